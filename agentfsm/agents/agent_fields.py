"""The fields of an agent, and what is built of them: the driver of its runs, and the client for those in its store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from os import urandom
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, cast

import attrs

from agentfsm.agents import extras
from agentfsm.agents.validation import (
    as_context,
    as_guards,
    as_spending_limits,
    as_states,
    as_stop_conditions,
    check_agent,
    warn_of_undescribed_tools,
    warn_of_unreachable_rules,
)
from agentfsm.core.claims import Claims
from agentfsm.core.errors import MisuseError
from agentfsm.core.hosted_tools import HostedTool
from agentfsm.core.limits import Limits, Spend
from agentfsm.core.machine import State
from agentfsm.core.messages import Part, as_parts
from agentfsm.core.run import A_co, Run
from agentfsm.core.settings import EXTRA_TOOLS, Settings
from agentfsm.core.stops import StopCondition
from agentfsm.core.validation import require_members, require_type
from agentfsm.ports.context import Context
from agentfsm.ports.guards import CallGuard
from agentfsm.ports.memory_items import RunMemory
from agentfsm.ports.model import Model, OutputMode
from agentfsm.ports.policies import Judge, PlanMaker, ToolSelector
from agentfsm.ports.store import Clock, Durability, Store, SystemClock
from agentfsm.tools.permission import Permissions
from agentfsm.tools.registry import SkillSource, ToolRegistry, ToolSource
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.agents.runs import Prompt, Runs
    from agentfsm.engine.driver import Driver
    from agentfsm.engine.execution.answer_cache import AnswerCache
    from agentfsm.engine.execution.output import OutputSpec
    from agentfsm.prompts.resolution import Instructions, Reminder
    from agentfsm.streaming.watch import Outlet, Watcher


_SKILLS: Final = require_members("tools", "instructions", "digests", wanted="Skills(...)").or_none()


def new_id() -> str:
    """Return an id for a run: 80 random bits, short enough to type."""
    return urandom(10).hex()


def _as_registry(tools: Iterable[Tool[..., Any] | Callable[..., Any] | ToolSource | HostedTool]) -> ToolRegistry:
    return ToolRegistry.of(tools)


def _add_skills(
    skills: SkillSource | None, agent: attrs.AttrsInstance, field: attrs.Attribute[SkillSource | None]
) -> SkillSource | None:
    _SKILLS(agent, field, skills)
    tools = cast("AgentFields[Any]", agent).tools
    if tools.skills is not skills:
        object.__setattr__(agent, "tools", tools.with_skills(skills))
    return skills


def _as_outlets(watchers: Iterable[Watcher | Outlet]) -> tuple[Outlet, ...]:
    if watchers == ():
        return ()
    from agentfsm.streaming.watch import build_outlets  # noqa: PLC0415  few agents are watched

    return build_outlets(watchers)


def _build_selector() -> ToolSelector:
    from agentfsm.context import AutoSelect  # noqa: PLC0415  with the engine

    return AutoSelect()


def _build_context() -> Context:
    from agentfsm.context import SlidingWindow, TrimResults  # noqa: PLC0415  with the engine

    return Context((TrimResults(), SlidingWindow()))


def _build_store(agent: AgentFields[Any]) -> Store:
    from agentfsm.stores import MemoryStore  # noqa: PLC0415  with the engine

    return MemoryStore(clock=agent.clock)


def _build_driver(agent: AgentFields[A_co]) -> Driver[A_co]:
    from agentfsm.engine.driver import Driver  # noqa: PLC0415  the engine is loaded with the first agent
    from agentfsm.engine.execution.config import EngineConfig, join_instructions  # noqa: PLC0415
    from agentfsm.streaming import log  # noqa: PLC0415
    from agentfsm.tokens import load_counter  # noqa: PLC0415

    check_agent(agent)
    log.preload()
    for tool in agent.tools.hosted:
        if (why := agent.model.unsupported_hosted_tool(tool)) is not None:
            raise MisuseError(why)
    if isinstance(agent.settings, Settings):
        if (why := agent.model.unsupported_settings(agent.settings)) is not None:
            raise MisuseError(why)
        if "tools" in agent.settings.extra_body and (agent.tools.hosted or len(agent.tools)):
            raise MisuseError(EXTRA_TOOLS)
    if agent.limits.usd is not None or agent.spend:
        agent.model.prepare()  # here, because it may block; `check_price` asks for a price in the event loop
    if agent.planner is None or not agent.planner.fixed:  # no model reads the steps of a flow
        warn_of_undescribed_tools(agent.tools)
    if agent.guards:
        warn_of_unreachable_rules(agent.guards, agent.tools)
    if agent.answer_cache is not None and agent.memory is not None:
        raise MisuseError(
            "answer_cache= and memory= exclude each other: an answer that depends on what the memory knows of a user "
            "cannot be repeated. Leave one of them out"
        )
    if agent.tools.background_tools:
        if agent.planner is not None and agent.planner.fixed:
            raise MisuseError("a step of a flow has ended when its result is there: leave out background=True")
        from agentfsm.agents.background_calls import wrap_background_functions  # noqa: PLC0415  few agents have some

        wrapped = wrap_background_functions(cast("RunnableAgent", agent), agent.tools)
        object.__setattr__(agent, "tools", wrapped)
    engine_tools: dict[str, Tool[..., Any]] = {}
    if agent.planner is not None:
        from agentfsm.engine.deciders.plan_tools import build_plan_tools  # noqa: PLC0415

        engine_tools |= build_plan_tools(agent.planner, agent.tools, agent.guards)
        if agent.planner.mode == "hybrid":
            # These are the fields of an `Agent`, which can be run.
            from agentfsm.agents.subagent import make_goal_tool  # noqa: PLC0415

            goal = make_goal_tool(cast("RunnableAgent", agent), agent.tools, agent.planner)
            engine_tools[goal.name] = goal
    answers = _build_answers(agent)
    resolve_instructions, resolve_deferred = extras.read_instructions(agent.instructions)
    engine = EngineConfig(
        model=agent.model,
        instructions=join_instructions(agent.instructions if isinstance(agent.instructions, str) else "", answers),
        resolve_instructions=resolve_instructions,
        resolve_deferred=resolve_deferred,
        registry=agent.tools,
        permissions=agent.permissions,
        selector=agent.selector,
        limits=agent.limits,
        settings=agent.settings,
        output_spec=answers,
        judge=agent.reflector,
        reminder=extras.read_reminder(agent.reminder),
        planner=agent.planner,
        memory=agent.memory,
        guards=agent.guards,
        spend=agent.spend,
        engine_tools=engine_tools,
        last_answer=agent.last_answer,
        stop_when=agent.stop_when,
        answer_cache=agent.answer_cache,
        context=agent.context,
        clock=agent.clock,
        load_counter=load_counter,
        log_prompts=agent.log_prompts,
        watch=agent.watch,
    )
    return Driver(config=engine, store=agent.store, durability=agent.durability, pause_before=agent.pause_before)


def _build_client(agent: AgentFields[Any]) -> Runs:
    from agentfsm.agents.runs import Runs  # noqa: PLC0415  with the engine

    return Runs(
        agent.store,
        tools={agent.name: agent.tools},
        clock=agent.clock,
        durability=agent.durability,
        ended_runs=agent.driver.ended_runs,
    )


def _build_answers(agent: AgentFields[Any]) -> OutputSpec | None:
    """Return the specification of the agent's answers; None for plain text."""
    if agent.output_type is None and not agent.output_validators and agent.output_mode is None and agent.claims is None:
        return None
    from agentfsm.engine.execution.output import build_output_spec  # noqa: PLC0415  brings pydantic

    return build_output_spec(
        agent.output_type,
        agent.output_validators,
        agent.output_mode,
        agent.model,
        agent.tools.names,
        claims=agent.claims,
    )


def _check_answer_cache(agent: object, field: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        from agentfsm.engine.execution.answer_cache import AnswerCache  # noqa: PLC0415  with the engine

        require_type(AnswerCache, wanted="an AnswerCache, or None")(agent, field, value)


def _refuse_change(_agent: object, attribute: attrs.Attribute[Any], _value: object) -> NoReturn:
    field = attribute.name
    raise MisuseError(
        f"an agent cannot be changed, because it may be executing runs: write agent = agent.with_({field}=...)"
    )


@attrs.define(eq=False, repr=False, kw_only=True, on_setattr=_refuse_change)
class AgentFields(Generic[A_co]):
    """Fields of an agent, without its methods, so that the classes of those methods can use them."""

    model: Model = attrs.field(kw_only=False, converter=extras.resolve_model)
    """A `Model`, or a string such as "openai:gpt-5.4-mini"."""

    tools: ToolRegistry = attrs.field(factory=ToolRegistry, converter=_as_registry)
    """Tools, plain functions, tool sources such as MCP servers, and hosted tools, which the provider executes, such as
    `WebSearch()`; or a registry, which is then shared.
    """

    skills: SkillSource | None = attrs.field(
        default=None,
        converter=attrs.Converter(_add_skills, takes_self=True, takes_field=True),  # type: ignore[misc]  # mypy knows functions only
    )
    """Skills, as `Skills("skills/")` of `agentfsm.skills`: folders of instructions that the model reads when it needs
    them. Their tools are added to `tools`, to a copy of it if that is a registry. None: no skills.
    """

    instructions: Instructions = ""
    """System prompt: text, a prompt of `agentfsm.prompts`, or a function, plain or async, that returns text; empty for
    none. The function takes the run's header, or a RunContext with the `deps`, or first the context and then the
    header. A prompt and a function are resolved once, and the run records the text with the versions of its prompts. So
    a version that is activated later does not change runs in flight. `start` resolves what needs neither an event loop
    nor the context; anything else is resolved right before the run is created in the store.
    """

    reminder: Reminder = ""
    """Note at the end of each request: text, a prompt, or a function, plain or async, that returns text; empty for
    none. The function takes the run, or a RunContext with the `deps`, or first the context and then the run. It holds
    rules for this turn, and is asked once in a turn, and again after steps of a plan. It is not part of the history, so
    the rest of the request stays the same, and caches of providers hold. The journal records each change of it.
    """

    permissions: Permissions | None = None
    """Permissions of runs for the tools, by level and by rules; None: all tools are allowed."""

    selector: ToolSelector = attrs.field(factory=_build_selector)
    """Selector of the tools that a request offers to the model, if there are many. Default: `AutoSelect()`."""

    name: str = "agent"
    """Name of the agent. Workers find the agent's runs by it, so agents that share a store need different names."""

    version: str = ""
    """Version of your agent, for roll-outs. It is written into the header of every run."""

    limits: Limits = attrs.field(factory=Limits)
    """Limits of each run. Default: `Limits()`."""

    spend: tuple[Spend, ...] = attrs.field(default=(), converter=as_spending_limits)
    """Spending limits for a calendar day or month, over all runs and processes that share the store; empty for none. A
    run that reaches one ends with `StopReason.COST_BUDGET`. The requests of sub-agents count as well.
    """

    settings: Settings | Callable[[Run], Settings] = attrs.field(factory=Settings)
    """Settings of model requests, or a function that returns them for each turn, given the current run."""

    output_type: type[A_co] | TypeForm[A_co] | UnionType | None = None
    """Type of the answer: a pydantic model, a dataclass, an attrs class, a union, or any type that JSON can represent.
    None: text. `type` and `UnionType` serve type checkers that do not support `TypeForm`, or not for unions.
    """

    output_mode: OutputMode | str | None = None
    """Way in which the model is constrained to `output_type`: "schema", "tool", "json" or "prompt". With "schema", the
    provider enforces the JSON Schema; with "tool", the arguments of a tool call are the answer; with "json", the
    provider enforces JSON; with "prompt", only the instructions contain the schema. None: the first of these that the
    model supports for the type.
    """

    output_validators: Sequence[Callable[..., Any]] = ()
    """Functions, plain or async, that take the answer, or the RunContext and the answer. They raise ModelRetry to
    refuse the answer.
    """

    claims: Claims | None = None
    """Requirement that answers name a call for each act that they say was done; None for none. With `Claims()`, an
    answer that names calls which are not done goes back to the model, as one that does not fit; after the limit it is
    given with the mark `run.not_done`.
    """

    reflector: Judge | None = None
    """Judge of answers, or of the results of selected tools, before the run continues; None for no judge."""

    memory: RunMemory | None = None
    """Memory across runs, which is searched once for each input of the user; None for no memory. Use
    `Memory("memory.db")` of `agentfsm.memory`. The model reads the items found as data. A run without `user=` has none.
    """

    guards: tuple[CallGuard, ...] = attrs.field(default=(), converter=as_guards)
    """Guards that decide on calls before they start; empty for no rules. `Guard.default()` of `agentfsm.guards` is the
    recommended policy. Each decision is an event of the journal. The runs of sub-agents obey the guards of their
    callers as well.
    """

    planner: PlanMaker | None = None
    """Maker of plans, whose steps run without a request to the model for each; None: the model is asked for each
    step.
    """

    last_answer: bool = False
    """Whether the model is asked for a last answer, without tools, when a limit or a loop stops a run. The answer is
    `run.partial`. A turn and a part of the time, tokens and cost are reserved for it, so that no limit is exceeded.
    """

    stop_when: tuple[StopCondition, ...] = attrs.field(default=(), converter=as_stop_conditions)
    """Functions of the run that end it before the model does: they return False, True to stop without an answer, or a
    text, which is then the answer. They read only the run, and are asked whenever it would go on to another turn; the
    first that holds decides. `stop_after_tool("name")` is one.
    """

    answer_cache: AnswerCache | None = attrs.field(default=None, validator=_check_answer_cache)
    """Cache that repeats the answer of an earlier run to the same question; None for no cache. Only runs whose tools
    are all read-only and `cacheable`, and need no approval, are kept, by default for the same user. Not together with
    `memory`.
    """

    clock: Clock = attrs.field(factory=SystemClock)
    """Clock for timestamps and durations. Default: the clock of the system."""

    store: Store = attrs.field(default=attrs.Factory(_build_store, takes_self=True))
    """Store of the runs; by default a `MemoryStore`, which is lost when the process ends."""

    durability: Durability = "full"
    """Failures that acknowledged appends survive: "full", a power cut; "normal", only the death of this process. With
    "full", the default, each group of appends waits for the disk, from 0.04 ms when it is idle to 4 ms when it is busy,
    shared by all runs that commit together. With "normal", an append costs 0.01 ms, but a power cut or a crash of the
    database server may lose the newest appends, so that a call may be made twice.
    """

    pause_before: frozenset[State] = attrs.field(default=frozenset(), converter=as_states)
    """States before which a run pauses until it is resumed: `{State.ACT}` pauses it before tool calls."""

    context: Context = attrs.field(factory=_build_context, converter=as_context)
    """Policies that shorten the history when it outgrows the context window, in order; or one policy."""

    new_id: Callable[[], str] = new_id
    """Function that returns a new run id. Default: 80 random bits in hexadecimal."""

    target: str = ""
    """Import path of this agent, as "module:attribute"; empty if unknown. Each run records it, so that commands such as
    `agentfsm resume RUN` find the agent. The command line sets it on the agents that it loads; set it yourself for
    runs that your code starts.
    """

    log_prompts: bool = False
    """Whether prompts are logged at level DEBUG, with secrets and personal data masked."""

    watch: tuple[Outlet, ...] = attrs.field(default=(), converter=_as_outlets)
    """Functions that observe the runs live, in `run`, `resume` and workers. `watch(run, events)` is called after each
    commit with the run and the events of the commit, in a thread of its own. It also observes the runs of sub-agents.
    It cannot change, delay or fail a run: its exceptions are logged, and commits beyond a backlog of 1,000 are dropped
    and counted. The field holds the functions with their queues.
    """

    driver: Driver[A_co] = attrs.field(init=False, default=attrs.Factory(_build_driver, takes_self=True))
    """Driver that executes the runs. The methods of this class and the MCP server use it."""

    runs: Runs = attrs.field(init=False, default=attrs.Factory(_build_client, takes_self=True))
    """Client for the runs in the agent's store. It also lists and deletes them."""

    def _check_prompt(self, prompt: Prompt) -> tuple[Part, ...]:
        """Convert a prompt to parts.

        Raises:
            MisuseError: when it is empty, or has a part that the model does not support.
        """
        parts = as_parts(prompt)
        if why := next((why for part in parts if (why := self.model.unsupported_part(part)) is not None), None):
            raise MisuseError(f"{self.model.name} cannot take this: {why}")
        return parts
