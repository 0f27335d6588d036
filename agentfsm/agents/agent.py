"""The agent: methods that start, execute and control runs. Each method uses a simpler one.

`start` begins a run, `step` performs one effect, `steps` and `finish` repeat it, `run` is `start` and `finish`,
`stream` also yields events, and `run_sync` is `run` for synchronous code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from functools import partial, wraps
from math import inf
from os import urandom
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, ParamSpec, Self, TypedDict, TypeVar, Unpack

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm.agents import extras, subagent
from agentfsm.agents.decisions import as_attendant, wake_callers
from agentfsm.agents.runs import Prompt, Runs
from agentfsm.agents.validation import (
    as_context,
    as_guards,
    as_messages,
    as_roles,
    as_spending_limits,
    as_states,
    as_text,
    check_agent,
    check_identity,
    check_new_id,
    check_run,
    check_start_options,
    to_plain_json,
    warn_of_undescribed_tools,
    warn_of_unreachable_rules,
    warn_once,
)
from agentfsm.agents.worker import Worker
from agentfsm.context import AutoSelect, SlidingWindow, TrimResults
from agentfsm.core.errors import ConflictError, LeaseHeldError, MisuseError, PartlyDoneError, StoreError
from agentfsm.core.header import INHERITED_FIELDS, Fingerprint, Header
from agentfsm.core.hosted_tools import HostedTool
from agentfsm.core.inbox import InputKind, Priority
from agentfsm.core.json_text import round_timestamp
from agentfsm.core.labels import Label, LabelSource, as_labels, find_owner, join_labels
from agentfsm.core.limits import Limits, Spend
from agentfsm.core.machine import State
from agentfsm.core.messages import JSON, AssistantMessage, Message, Part, ToolResult, as_parts, check_history
from agentfsm.core.pending import Elicit
from agentfsm.core.plans import Plan
from agentfsm.core.run import A_co, Run, begin_run
from agentfsm.core.run_ids import child_run_id
from agentfsm.core.settings import EXTRA_TOOLS, Settings
from agentfsm.core.trace_context import child_traceparent
from agentfsm.core.usage import AgentCost, SessionCost
from agentfsm.core.validation import BOOL, COUNT, NOT_NEGATIVE, SECONDS, require_type, suggest_fields
from agentfsm.engine.driver import LEASE_POLL_S, Driver
from agentfsm.engine.execution.answer_cache import AnswerCache
from agentfsm.engine.execution.config import EngineConfig, join_instructions
from agentfsm.engine.execution.cost import calculate_run_cost, calculate_session_cost
from agentfsm.engine.execution.fairness import StepThrottle
from agentfsm.engine.execution.forked_calls import ForkedCalls, find_line
from agentfsm.engine.fork import build_fork_events
from agentfsm.engine.program_check import has_tool
from agentfsm.engine.replay import Replay, replay
from agentfsm.engine.tool_calls.plan_tools import build_plan_tools
from agentfsm.journal import load as journals
from agentfsm.ports.context import Context
from agentfsm.ports.guards import CallGuard
from agentfsm.ports.memory_items import RunMemory
from agentfsm.ports.model import Model, OutputMode
from agentfsm.ports.policies import Judge, PlanMaker, ToolSelector
from agentfsm.ports.store import ALL_RUNS, Clock, Durability, Filter, Store, SystemClock
from agentfsm.stores import MemoryStore
from agentfsm.stores.rules import check_run_id
from agentfsm.streaming import log
from agentfsm.streaming.detached_task import cut_off_owned
from agentfsm.streaming.stream import RunStream, TypedStream
from agentfsm.tokens import load_counter
from agentfsm.tools.executing_call import current_call, list_passed_labels, report_read_run
from agentfsm.tools.permission import Permissions
from agentfsm.tools.registry import ToolRegistry, ToolSource
from agentfsm.tools.schema.binding import Arguments
from agentfsm.tools.tool import Tool, ToolDeclarations

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import TypeForm

    from agentfsm.core.events import Event
    from agentfsm.core.inbox import PostedItem
    from agentfsm.core.pending import Pending
    from agentfsm.engine.execution.output import OutputSpec
    from agentfsm.journal.audit import AuditRecord
    from agentfsm.journal.follow import JournalEvent
    from agentfsm.mcp.server.service import MCPService
    from agentfsm.prompts.resolution import Instructions, Reminder
    from agentfsm.streaming.stream import Listener
    from agentfsm.streaming.watch import Outlet, Watcher

P = ParamSpec("P")
R = TypeVar("R")

# Runs that a worker executes at once: they wait for models most of the time.
WORKER_PARALLEL: Final = 100
# Seconds between two polls of a worker: a poll costs less than 1 ms, and a user can wait a second.
WORKER_POLL_S: Final = 1.0
# Fields that the header of a fork takes from that of the forked run. Its release is that of the agent.
_FORKED_FIELDS: Final = ("tenant", "clearance", "traceparent")
# Bytes of a run's nonce: enough that no two runs have the same one.
NONCE_BYTES: Final = 8


class StartOptions(TypedDict, total=False):
    """Optional arguments of `Agent.start`, which documents them."""

    id: str | None
    after: Run[Any] | None
    session: str | None
    messages: Sequence[Message] | None
    user: str | None
    roles: Iterable[str] | None
    settings: Settings | None
    metadata: Mapping[str, Any] | None
    tenant: str | None
    clearance: str
    release: str
    arms: Mapping[str, str] | None
    traceparent: str
    labels: Iterable[str]
    parent: Run[Any] | None


def _check_start_options(method: str, options: Iterable[str]) -> None:
    """Refuse options that a run does not have.

    Raises:
        TypeError: naming the method and the option; for a field of the agent, it points to `with_`.
    """
    for name in options:
        if name in StartOptions.__annotations__:
            continue
        fields = attrs.fields_dict(Agent)
        if name in fields and fields[name].init:
            hint = f"it is a field of the agent: write agent.with_({name}=...).{method}(...)"
        else:
            hint = f"valid options: {', '.join(StartOptions.__annotations__)}"
        raise TypeError(f"Agent.{method}() got an unexpected keyword argument {name!r}; {hint}")


def _checks_start_options(start: Callable[P, R]) -> Callable[P, R]:
    """Decorate `Agent.start`, whose explicit parameters serve type checkers, with the check of its options."""

    @wraps(start)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        _check_start_options("start", options.keys() - {"prompt"})
        return start(*args, **options)

    return checked


def new_id() -> str:
    """Return an id for a run: 80 random bits, short enough to type."""
    return urandom(10).hex()


def _as_registry(tools: Iterable[Tool[..., Any] | Callable[..., Any] | ToolSource | HostedTool]) -> ToolRegistry:
    return ToolRegistry.of(tools)


def _as_outlets(watchers: Iterable[Watcher | Outlet]) -> tuple[Outlet, ...]:
    if watchers == ():
        return ()
    from agentfsm.streaming.watch import build_outlets  # noqa: PLC0415  few agents are watched

    return build_outlets(watchers)


def _build_driver(agent: Agent[A_co]) -> Driver[A_co]:
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
    engine_tools: dict[str, Tool[..., Any]] = {}
    if agent.planner is not None:
        engine_tools |= build_plan_tools(agent.planner, agent.tools)
        if agent.planner.mode == "hybrid":
            goal = subagent.make_goal_tool(agent, agent.tools, agent.planner)
            engine_tools[goal.name] = goal
    answers = _build_answers(agent)
    is_plain = type(agent.instructions) is str
    engine = EngineConfig(
        model=agent.model,
        instructions=join_instructions(agent.instructions if isinstance(agent.instructions, str) else "", answers),
        resolve_instructions=None if is_plain else partial(extras.resolve_instructions, agent.instructions),
        registry=agent.tools,
        permissions=agent.permissions,
        selector=agent.selector,
        limits=agent.limits,
        settings=agent.settings,
        output_spec=answers,
        judge=agent.reflector,
        reminder=partial(extras.resolve_reminder, agent.reminder) if agent.reminder else None,
        planner=agent.planner,
        memory=agent.memory,
        guards=agent.guards,
        spend=agent.spend,
        engine_tools=engine_tools,
        last_answer=agent.last_answer,
        answer_cache=agent.answer_cache,
        context=agent.context,
        clock=agent.clock,
        load_counter=load_counter,
        log_prompts=agent.log_prompts,
        watch=agent.watch,
    )
    return Driver(config=engine, store=agent.store, durability=agent.durability, pause_before=agent.pause_before)


def _build_client(agent: Agent[Any]) -> Runs:
    return Runs(
        agent.store,
        tools={agent.name: agent.tools},
        clock=agent.clock,
        durability=agent.durability,
        ended_runs=agent.driver.ended_runs,
    )


def _build_answers(agent: Agent[Any]) -> OutputSpec | None:
    """Return the specification of the agent's answers; None for plain text."""
    if agent.output_type is None and not agent.output_validators and agent.output_mode is None:
        return None
    from agentfsm.engine.execution.output import build_output_spec  # noqa: PLC0415  brings pydantic

    return build_output_spec(
        agent.output_type, agent.output_validators, agent.output_mode, agent.model, agent.tools.names
    )


_check_answer_cache: Final = require_type(AnswerCache, wanted="an AnswerCache").or_none()


def _refuse_change(_agent: object, attribute: attrs.Attribute[Any], _value: object) -> NoReturn:
    field = attribute.name
    raise MisuseError(
        f"an agent cannot be changed, because it may be executing runs: write agent = agent.with_({field}=...)"
    )


@attrs.define(eq=False, repr=False, kw_only=True, on_setattr=_refuse_change)
class Agent(Generic[A_co]):
    """A model with tools, instructions and limits.

    An agent is immutable and holds no state of runs, so one agent can execute thousands at once. `with_` returns a
    variant.

    Args:
        model: A `Model`, or a string such as "openai:gpt-5.4-mini".
        tools: Tools, plain functions, tool sources such as MCP servers, and hosted tools, which the provider executes,
            such as `WebSearch()`; or a registry, which is then shared.
        instructions: System prompt: text, a prompt of `agentfsm.prompts`, or a function of the run's header that
            returns text; empty for none.
        reminder: Note at the end of each request: text, a prompt, or a function of the run that returns text; empty for
            none.
        permissions: Permissions of runs for the tools, by level and by rules; None: all tools are allowed.
        selector: Selector of the tools that a request offers to the model, if there are many.
        name: Name of the agent.
        version: Version of your agent, for roll-outs.
        limits: Limits of each run.
        spend: Spending limits for a calendar day or month, over all runs and processes that share the store; empty for
            none.
        settings: Settings of model requests, or a function that returns them for each turn, given the current run.
        output_type: Type of the answer: a pydantic model, a dataclass, an attrs class, a union, or any type that JSON
            can represent.
        output_mode: Way in which the model is constrained to `output_type`: "schema", "tool", "json" or "prompt".
        output_validators: Functions, plain or async, that take the answer, or the RunContext and the answer.
        reflector: Judge of answers, or of the results of selected tools, before the run continues; None for no judge.
        memory: Memory across runs, which is searched once for each input of the user; None for no memory.
        guards: Guards that decide on calls before they start; empty for no rules.
        planner: Maker of plans, whose steps run without a request to the model for each; None: the model is asked for
            each step.
        last_answer: Whether the model is asked for a last answer, without tools, when a limit or a loop stops a run.
        answer_cache: Cache that repeats the answer of an earlier run to the same question; None for no cache.
        clock: Clock for timestamps and durations.
        store: Store of the runs; by default a `MemoryStore`, which is lost when the process ends.
        durability: Failures that acknowledged appends survive: "full", a power cut; "normal", only the death of this
            process.
        pause_before: States before which a run pauses until it is resumed: `{State.ACT}` pauses it before tool calls.
        context: Policies that shorten the history when it outgrows the context window, in order; or one policy.
        new_id: Function that returns a new run id.
        target: Import path of this agent, as "module:attribute"; empty if unknown.
        log_prompts: Whether prompts are logged at level DEBUG, with secrets and personal data masked.
        watch: Functions that observe the runs live, in `run`, `resume` and workers.

    Raises:
        MisuseError: when the model string is unknown, an API key is missing, or a tool cannot be built.
        DuplicateToolError: when two tools share a name.
    """

    model: Model = attrs.field(kw_only=False, converter=extras.resolve_model)
    """A `Model`, or a string such as "openai:gpt-5.4-mini"."""

    tools: ToolRegistry = attrs.field(factory=ToolRegistry, converter=_as_registry)
    """Tools, plain functions, tool sources such as MCP servers, and hosted tools, which the provider executes, such as
    `WebSearch()`; or a registry, which is then shared.
    """

    instructions: Instructions = ""
    """System prompt: text, a prompt of `agentfsm.prompts`, or a function of the run's header that returns text; empty
    for none. A prompt and a function are resolved once, at `start`, and the run records the text with the versions of
    its prompts. So a version that is activated later does not change runs in flight.
    """

    reminder: Reminder = ""
    """Note at the end of each request: text, a prompt, or a function of the run that returns text; empty for none. It
    holds rules for this turn, and the function is asked once in a turn. It is not part of the history, so the
    rest of the request stays the same, and caches of providers hold. The journal records each change of it.
    """

    permissions: Permissions | None = None
    """Permissions of runs for the tools, by level and by rules; None: all tools are allowed."""

    selector: ToolSelector = attrs.field(factory=AutoSelect)
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

    answer_cache: AnswerCache | None = attrs.field(default=None, validator=_check_answer_cache)
    """Cache that repeats the answer of an earlier run to the same question; None for no cache. Only runs whose tools
    are all read-only and `cacheable`, and need no approval, are kept, by default for the same user. Not together with
    `memory`.
    """

    clock: Clock = attrs.field(factory=SystemClock)
    """Clock for timestamps and durations. Default: the clock of the system."""

    store: Store = attrs.field(default=attrs.Factory(lambda agent: MemoryStore(clock=agent.clock), takes_self=True))
    """Store of the runs; by default a `MemoryStore`, which is lost when the process ends."""

    durability: Durability = "full"
    """Failures that acknowledged appends survive: "full", a power cut; "normal", only the death of this process. With
    "full", the default, each group of appends waits for the disk, from 0.04 ms when it is idle to 4 ms when it is busy,
    shared by all runs that commit together. With "normal", an append costs 0.01 ms, but a power cut or a crash of the
    database server may lose the newest appends, so that a call may be made twice.
    """

    pause_before: frozenset[State] = attrs.field(default=frozenset(), converter=as_states)
    """States before which a run pauses until it is resumed: `{State.ACT}` pauses it before tool calls."""

    context: Context = attrs.field(factory=lambda: Context((TrimResults(), SlidingWindow())), converter=as_context)
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

    def __repr__(self) -> str:
        hosted = [tool.name for tool in self.tools.hosted]
        tools = ", ".join([*self.tools.names, *hosted, *("..." for _ in self.tools.sources)])
        return f"<Agent {self.name} {self.model.name}, tools: {tools or 'none'}>"

    # Start and execute runs.

    @_checks_start_options
    def start(
        self,
        prompt: Prompt,
        *,
        id: str | None = None,  # noqa: A002  the contract's name
        after: Run[Any] | None = None,
        session: str | None = None,
        messages: Sequence[Message] | None = None,
        user: str | None = None,
        roles: Iterable[str] | None = None,
        settings: Settings | None = None,
        metadata: Mapping[str, Any] | None = None,
        tenant: str | None = None,
        clearance: str = "",
        release: str = "",
        arms: Mapping[str, str] | None = None,
        traceparent: str = "",
        labels: Iterable[str] = (),
        parent: Run[Any] | None = None,
    ) -> Run[A_co]:
        """Begin a run, in OBSERVE, without I/O. The first call that executes it creates it in the store.

        The function of a tool or of a flow's step may start runs. Such a run has the labels of the calling run, and the
        labels that it brings in become those of the call. Its user, with the roles, its tenant and its clearance are
        those of the calling run unless they are given.

        Args:
            prompt: The task: text, or parts.
            id: Id of the run, unique in the store. If the store has a run with this id and prompt, that run is resumed.
                The forms of ids that agentfsm derives, such as those of sub-agents and schedules, are refused.
                By default a new id; in the function of a tool, an id made of its call, so that the call resumes the run
                when it is repeated.
            after: A run that is over; this run continues its history.
            session: Id of a session; this run continues the history of the session's last run. With `after`, the
                session is new and branches off after that run.
            messages: A history to continue that is not in the store.
            user: User on whose behalf the run works.
            roles: Roles of the user; by default none.
            settings: Settings of model requests for this run; set fields override the agent's.
            metadata: Metadata of your own, as plain JSON.
            tenant: Tenant that the user belongs to.
            clearance: Highest level of data that the run may use: "public", "internal", "confidential", "restricted".
            release: Name of the release of the agent that the run was assigned to.
            arms: Arm of each experiment that the run takes part in, by the name of the experiment.
            traceparent: Trace that the run belongs to, as in the W3C header `traceparent`.
            labels: Labels of the prompt and of `messages`, such as "untrusted" for a prompt that contains a mail, and
                `labels=other.labels` for one that contains the answer of another run. The run has those of the results
                in `messages` as well.
            parent: The run that calls this agent as a tool.

        Raises:
            TypeError: when an option is unknown; `with_` changes the fields of the agent.
            MisuseError: when the prompt is empty, several histories are given, a history is invalid, the metadata is
                not JSON, or an argument is of a wrong type.
        """
        parts = self._check_prompt(prompt)
        check_start_options(user, session, settings, after, parent)
        history = as_messages(messages)
        check_history(history)
        if history and (after is not None or session is not None):
            raise MisuseError("messages= is a history to go on from, as after= and session= are: give one of them")
        if after is not None and not after.is_over:
            raise MisuseError(f"run {after.id!r} is in {after.state.upper()}: finish it before you go on after it")
        call = current_call() if parent is None else None
        if call is not None:
            own = call.run.header
            roles = own.roles if roles is None and user in {None, own.user} else roles
            user, tenant, clearance = user or own.user, tenant or own.tenant, clearance or own.clearance
        if self.memory is not None and user is None:
            warn_once(
                f"a run of agent {self.name} has no user, so its memory is neither searched nor filled: give user=, as "
                'in agent.run(prompt, user="ann")',
                logger="agentfsm",
            )
        identity: dict[str, Any] = {}
        if not traceparent and parent is None and (tracer := self.driver.config.tracer) is not None:
            traceparent = tracer.current_traceparent()
        if call is not None:
            traceparent = traceparent or child_traceparent(call.run.header, call.call.id)
        if tenant or clearance or release or arms or traceparent:
            given = {"tenant": tenant, "clearance": clearance, "release": release, "arms": arms}
            identity = check_identity({**given, "traceparent": traceparent})
        if parent is not None:
            inherited = {name: getattr(parent.header, name) for name in INHERITED_FIELDS}
            called = next((each.call.id for each in parent.open if id == child_run_id(parent.id, each.call.id)), "")
            identity = inherited | {"traceparent": child_traceparent(parent.header, called)} | identity
        elif call is not None:
            identity |= {"caller": call.caller, "withhold": call.run.header.withhold}
            id = call.next_run_id() if id is None else id  # noqa: A001
        header = self._build_header(
            parts,
            id,
            session=session,
            after=None if after is None else after.id,
            history=history,
            user=user,
            roles=() if roles is None else as_roles(roles),
            settings=settings,
            parent=None if parent is None else parent.id,
            depth=0 if parent is None else parent.header.depth + 1,
            metadata=to_plain_json(metadata, "metadata") if metadata else {},
            **identity,
        )
        inherited_labels = parent.labels if parent is not None else {} if call is None else call.labels
        # A task that a call has left behind is outside of the call, and has what that had read.
        passed = list_passed_labels() if parent is None and call is None else ()
        if labels or passed or inherited_labels or header.history:
            sources = _list_label_sources(header, join_labels(as_labels(labels), passed), inherited_labels)
            header = attrs.evolve(header, labels=sources)
        return self.driver.attach_decoder(begin_run(header, after))

    def _check_prompt(self, prompt: Prompt) -> tuple[Part, ...]:
        """Convert a prompt to parts.

        Raises:
            MisuseError: when it is empty, or has a part that the model does not support.
        """
        parts = as_parts(prompt)
        if why := next((why for part in parts if (why := self.model.unsupported_part(part)) is not None), None):
            raise MisuseError(f"{self.model.name} cannot take this: {why}")
        return parts

    def _build_header(self, prompt: tuple[Part, ...], run_id: str | None, **more: Any) -> Header:
        header = Header(
            id=check_new_id(self.new_id() if run_id is None else run_id, more.get("parent"), more.get("caller")),
            nonce=urandom(NONCE_BYTES).hex(),
            prompt=prompt,
            created_at=round_timestamp(self.clock.now()),
            agent=self.name,
            agent_version=self.version,
            fingerprint=self.fingerprint,
            target=self.target,
            **more,
        )
        config = self.driver.config
        if config.resolve_instructions is None:
            return header
        header = config.resolve_instructions(header)
        return attrs.evolve(header, fingerprint=config.for_run(header).fingerprint)

    async def step(self, run: Run[A_co], *, deps: Any = None, elicit: Elicit | None = None) -> Run[A_co]:
        """Perform the run's pending effect, and return the run after it.

        A run that is over, or that waits without a decision, is returned unchanged. The step is durable when this
        returns. After a cancellation, `resume` continues the run.

        Raises:
            ConflictError: when the run has changed, or another worker executes it; nothing was done.
            StoreError: when the journal cannot be read or written.
        """
        check_run(run, "step")
        attendant = as_attendant(elicit)
        return run if run.is_over else await self.driver.run_until_blocked(run, deps, once=True, attendant=attendant)

    def steps(self, run: Run[A_co], *, deps: Any = None, elicit: Elicit | None = None) -> AsyncIterator[Run[A_co]]:
        """Perform effects until the run is over or waits: `async for run in agent.steps(run): ...`.

        Nothing is held between two steps, so it is safe to leave the loop at any time.
        """
        check_run(run, "steps")
        return _StepIterator(self, run, deps, elicit)

    async def finish(self, run: Run[A_co], *, deps: Any = None, elicit: Elicit | None = None) -> Run[A_co]:
        """Execute the run until it is over or waits for a person.

        Raises:
            ConflictError: when the run has changed, or another worker executes it.
        """
        check_run(run, "finish")
        attendant = as_attendant(elicit)
        return run if run.is_over else await self.driver.run_until_blocked(run, deps, attendant=attendant)

    async def run(
        self, prompt: Prompt, *, deps: Any = None, elicit: Elicit | None = None, **start: Unpack[StartOptions]
    ) -> Run[A_co]:
        """Start a run and finish it.

        Args:
            prompt: The task.
            deps: Object that tools receive as `ctx.deps`; never stored.
            elicit: Function, plain or async, that asks a person the questions of a tool whose call has to stay open for
                the answer (an MCP server of the handshake revision). It takes a `Pending` with the `questions`, and
                returns an `Answer`, or None if the person gave none. The time that it takes is not the run's. None:
                such questions are refused, unless the call may be repeated.
            **start: As in `start`.

        Returns:
            The run: in DONE with its `output`, in ERROR with its `stop_reason`, or waiting for the items in `pending`.
        """
        _check_start_options("run", start)
        gate = await StepThrottle.enter()  # before the run is built: a thousand may begin at once
        attendant = as_attendant(elicit)
        return await self.driver.run_until_blocked(
            self.start(prompt, **start), deps, throttle=gate, attendant=attendant
        )

    def stream(
        self,
        prompt_or_run: Prompt | Run[A_co],
        *,
        deps: Any = None,
        elicit: Elicit | None = None,
        resume: bool = False,
        renamed: Mapping[str, str] | None = None,
        **start: Unpack[StartOptions],
    ) -> RunStream[A_co]:
        """Execute a run and yield its events: `async with agent.stream("...") as s: async for event in s: ...`.

        Args:
            prompt_or_run: The task, or a run to continue.
            deps: As in `run`.
            elicit: As in `run`.
            resume: Whether to end a pause of the run, as `resume` does.
            renamed: As in `resume`.
            **start: As in `start`.
        """
        _check_start_options("stream", start)
        run = prompt_or_run if isinstance(prompt_or_run, Run) else self.start(prompt_or_run, **start)
        attendant, names = as_attendant(elicit), self._check_names(renamed)

        def execute(on_event: Listener, on_run: Callable[[Run[Any]], None]) -> Awaitable[Run[A_co]]:
            return self.driver.run_until_blocked(
                run, deps, on_event=on_event, on_run=on_run, resume=resume, attendant=attendant, renamed=names
            )

        answers = self.driver.config.output_spec
        if answers is None:
            return RunStream(execute, run, self.store)
        return TypedStream(execute, run, answers.parse_partial, self.store)

    def run_sync(
        self, prompt: Prompt, *, deps: Any = None, elicit: Elicit | None = None, **start: Unpack[StartOptions]
    ) -> Run[A_co]:
        """Run the agent from synchronous code; otherwise like `run`.

        Raises:
            MisuseError: inside a running event loop, which it would block; use `await agent.run(...)` there.
        """
        _check_start_options("run_sync", start)
        if _is_in_event_loop():
            raise MisuseError("run_sync would block the running event loop: use `await agent.run(...)` here")
        return anyio.run(partial(self.run, prompt, deps=deps, elicit=elicit, **start))

    def _check_names(self, renamed: Mapping[str, str] | None) -> dict[str, str]:
        """Return the new names of tools.

        Raises:
            MisuseError: if neither this agent nor one below it has a tool of a new name.
        """
        for old, new in (renamed or {}).items():
            if not has_tool(self.driver.config, new):
                raise MisuseError(f"renamed={{{old!r}: {new!r}}}: this agent has no tool {new!r}; nothing was changed")
        return dict(renamed or {})

    async def resume(
        self,
        run_id: str,
        *,
        deps: Any = None,
        elicit: Elicit | None = None,
        wait: bool = True,
        takeover: bool = False,
        renamed: Mapping[str, str] | None = None,
    ) -> Run[A_co]:
        """Continue a run from its journal, in any process.

        Args:
            run_id: The run. One that is over is returned unchanged.
            deps: As in `run`.
            elicit: As in `run`.
            wait: Whether to wait while another worker executes it.
            takeover: Take the run from the worker that executes it, without waiting for its lease to end. Use it
                when you know that the other worker hangs. That worker can no longer write to the run's journal. A call
                that it has in flight is treated as after a crash, and may still have its effect.
            renamed: New names of tools by their names in the journal, if this program has renamed tools or steps that
                the run still needs. It is recorded, and applies to calls, steps and compensations that have not
                started, also in the runs below. None: nothing was renamed.

        Raises:
            RunNotFoundError: when the store has no such run.
            LeaseHeldError: when another worker executes it and `wait` is False.
            IncompatibleProgramError: when a tool of an open call is gone, or the run was begun by a program of another
                kind; nothing was changed.
            MisuseError: when the run was begun with a release other than the `version` of this agent, or this agent has
                no tool of a new name; nothing was changed.
        """
        names = self._check_names(renamed)
        check_run_id(run_id)
        attendant = as_attendant(elicit)
        if self.version:
            self._check_release(await self.runs.header(run_id))
        while True:
            try:
                run = await self.driver.run_until_blocked(
                    run_id, deps, resume=True, takeover=takeover, attendant=attendant, renamed=names
                )
            except LeaseHeldError:
                if not wait:
                    raise
                takeover = False  # only once: the worker that executes it now may be healthy
            else:
                await wake_callers(self.store, run_id, run.header.parent, f"resumed:{run.version}")
                return run
            await anyio.sleep(LEASE_POLL_S)

    def _check_release(self, header: Header) -> None:
        if header.parent is None and header.release not in {"", self.version}:  # a sub-agent's run has its caller's
            raise MisuseError(
                f"run {header.id!r} was begun with release {header.release!r} of agent {header.agent!r}, and this "
                f"agent is {self.version!r}: resume it with that release, for example by `rollout.resume(...)`"
            )

    async def load(self, run_id: str, *, at: int | None = None) -> Run[A_co]:
        """Return a run from its journal: as it stands, or as it was at version `at`. See `Runs.load`."""
        return self.driver.attach_decoder(await self.runs.load(run_id, at=at))

    async def history(self, run_id: str) -> tuple[Event, ...]:
        """Return the events of a run's journal, oldest first. See `Runs.history`."""
        return await self.runs.history(run_id)

    async def audit(self, run_id: str) -> tuple[AuditRecord, ...]:
        """Return a record of each call of a run, oldest first. See `Runs.audit`."""
        return await self.runs.audit(run_id)

    def audits(self, where: Filter = ALL_RUNS, *, since: float = -inf) -> AsyncIterator[AuditRecord]:
        """Return a record of each call of all runs that a filter takes. See `Runs.audits`."""
        return self.runs.audits(where, since=since)

    async def fork(
        self,
        run_id: str,
        *,
        at: int | None = None,
        edit: Mapping[int, Event] | None = None,
        prompt: Prompt | None = None,
        id: str | None = None,  # noqa: A002  the contract's name
        withhold: bool = False,
        by: str = "",
    ) -> Run[A_co]:
        """Create a run in the store whose journal begins with the first events of another run.

        A fork acts: once it is executed, it calls tools with their effects, like any other run, also such calls as the
        forked run never made. With `withhold` it only shows these calls.

        Copied calls keep their idempotency keys; later calls get new ones. A copied call that was open and is not
        read-only waits for `settle`, because the original run may have completed it since. The fork has no session. If
        the agent is another release than that of the run, the fork has its release, and no arms.

        Args:
            run_id: The run to fork.
            at: Number of events to copy; by default all, except the event that ended the run.
            edit: Replacements for copied events, by version: `{5: attrs.evolve(history[4], ...)}`.
            prompt: Replacement for the first message.
            id: Id of the fork; by default a new one.
            withhold: Whether calls of tools that are not read-only are refused, each with a result that shows the call.
                Sub-agents run, and their calls are refused in the same way. Questions to people remain.
            by: Name of the person who makes the fork.

        Raises:
            RunNotFoundError: when the store has no such run.
            MisuseError: when the run has no version `at`, the edited events are not a valid run, or the copy is over;
                and when calls cannot be withheld, because `settings` add tools that agentfsm does not know.
            ConflictError: when another run has the id.
        """
        check_run_id(run_id)
        BOOL.check("fork", "withhold", withhold)
        stored = await self.store.read(run_id)
        for settings in (self.settings, stored.header.settings) if withhold else ():
            if isinstance(settings, Settings) and "tools" in settings.extra_body:
                raise MisuseError(
                    'fork(withhold=True): the provider executes the tools of Settings(extra_body={"tools": ...}) '
                    "itself, so their calls cannot be withheld: fork with an agent without them"
                )
        before = await journals.load_predecessor(self.store, stored.header)
        whole = begin_run(stored.header, before).fold(stored.events)
        at = len(stored.events) - whole.is_over if at is None else at
        prefix = journals.first_events(stored, at)
        release = self.version if stored.header.release and self.version else stored.header.release
        header = self._build_header(
            stored.header.prompt if prompt is None else self._check_prompt(prompt),
            id,
            after=stored.header.after,
            history=stored.header.history,
            user=stored.header.user,
            roles=stored.header.roles,
            settings=stored.header.settings,
            metadata=stored.header.metadata,
            labels=stored.header.labels,
            **{name: getattr(stored.header, name) for name in _FORKED_FIELDS},
            withhold=withhold,
            release=release,
            arms=stored.header.arms if release == stored.header.release else {},
            forked_from=run_id,
            forked_at=at,
            forked_by=as_text(by, "by"),
        )
        passed = list_passed_labels() if prompt is not None or edit else ()
        if prompt is None and (stored.header.parent is not None or stored.header.caller is not None):
            passed = join_labels(passed, [Label.USER_DATA])  # a model or a tool has written it: it is no order
        if passed:
            others = [source for source in header.labels if source.label not in passed]
            given = _list_label_sources(attrs.evolve(header, history=()), passed, {})
            header = attrs.evolve(header, labels=(*others, *given))
        events = build_fork_events(header, before, prefix, edit or {}, self.tools)
        if self.driver.config.counted_tools:
            calls = ForkedCalls(self.store, await find_line(self.store, stored.header))
            own = whole.counted
            if (session := stored.header.session) is not None:
                [newest] = await self.runs.list(Filter(session=session), limit=1)
                own = (await journals.load_run(self.store, newest.id)).counted
            await calls.add_fork(header.id, begin_run(header, before).fold(events).counted, own)
        found, lease = await self.store.create(header, events=events, durability=self.durability)
        try:
            await self.store.release(lease).wait()
            stopped = await self.driver.apply_stop_requests(header.id)
        except StoreError as error:
            if found == header:
                raise _created_error(header.id, error) from error
            raise
        if found != header:
            raise ConflictError(f"run {header.id!r} exists already; choose another id")
        run = begin_run(header, before).fold(events) if stopped is None else stopped
        report_read_run(run)
        return self.driver.attach_decoder(run)

    async def replay(self, run_id: str, *, deps: Any = None) -> Replay:
        """Rebuild a run from its journal without calling a model or a tool, and check the hash of each request.

        The result says which requests this agent would send differently now. To continue a run differently from an
        earlier version, use `fork` and `finish`, and compare the two with `difference`.

        Args:
            run_id: The run.
            deps: Passed to the tools' `enabled` functions, which decide the tools of a request.

        Raises:
            RunNotFoundError: when the store has no such run.
        """
        check_run_id(run_id)
        return await replay(self.driver.config, self.store, run_id, deps)

    # Runs that workers execute.

    async def submit(self, prompt_or_run: Prompt | Run[A_co], **start: Unpack[StartOptions]) -> Run[A_co]:
        """Create a run in the store for a worker to execute. The run is durable when this returns.

        Args:
            prompt_or_run: The task, or a run that `start` returned.
            **start: As in `start`. A second call with the same id and prompt returns the run of the first call.

        Raises:
            ConflictError: when the id is that of a run with another prompt, or the session has a run that is not over.
            PartlyDoneError: when the run was created, and the store failed then; the message has its id.
        """
        _check_start_options("submit", start)
        run = prompt_or_run if isinstance(prompt_or_run, Run) else self.start(prompt_or_run, **start)
        with suppress(LeaseHeldError):  # a worker executes it already
            _header, lease = await self.store.create(run.header, durability=self.durability)
            try:
                await self.store.release(lease).wait()
                await self.driver.apply_stop_requests(run.id)
                return await self.load(run.id)
            except StoreError as error:
                raise _created_error(run.id, error) from error
        return await self.load(run.id)

    async def worker(
        self,
        *,
        deps: Any = None,
        parallel: int = WORKER_PARALLEL,
        poll_s: float = WORKER_POLL_S,
        until_idle: bool = False,
        drain_s: float = 0.0,
        deltas: str | None = None,
    ) -> None:
        """Execute the runs of agents with this name that are ready, until cancelled.

        A run is ready when it was submitted, when its worker died, or when its wait has ended: by a decision, an
        answer, input, a timer or a deadline. Any number of workers may share the store. A run that fails to execute
        is logged and retried after a growing delay, 1 s to 7.5 min. A run that was begun with a release other than the
        `version` of this agent is left to other workers.

        Args:
            deps: Dependencies of every run, or a function, plain or async, that takes the run and returns them.
            parallel: Maximum number of runs executed at once, 1 or more.
            poll_s: Seconds between two polls of the store, above 0.
            until_idle: Whether to return when no run is ready.
            drain_s: Seconds that model requests and calls in flight have to end after a cancellation, 0 or more. The
                worker claims no further run meanwhile, and the runs are released between two steps. Default 0: they are
                cut off.
            deltas: URL of a Redis through which the text that models write reaches the event streams of servers, which
                have the same URL. It may be lost, and delays no run. None: a stream has the text from the journal.

        Raises:
            MisuseError: when `parallel` is below 1, `poll_s` is not above 0, `drain_s` is negative, or `deltas` is not
                the URL of a Redis.
        """
        COUNT.check("worker", "parallel", parallel)
        SECONDS.check("worker", "poll_s", poll_s)
        NOT_NEGATIVE.check("worker", "drain_s", drain_s)
        execute = self.driver.run_until_blocked if deltas is None else extras.publish_deltas(self.driver, deltas)
        starter = extras.create_due_runs(self)
        options: Any = {"deps": deps, "parallel": parallel, "poll_s": poll_s, "drain_s": drain_s, "starter": starter}
        await Worker(agent=self, execute=execute, **options).run(until_idle=until_idle)

    def events(self, run_id: str, *, after: int = 0) -> AsyncIterator[JournalEvent]:
        """Return the events of a run's journal as they are written, by any process. See `Runs.events`."""
        return self.runs.events(run_id, after=after)

    async def wait(self, run_id: str) -> Run[A_co]:
        """Wait until a run that a worker executes is over or waits, and return it. See `Runs.wait`."""
        return self.driver.attach_decoder(await self.runs.wait(run_id))

    # Decisions and requests, from any process. `Runs` has the same methods and needs no agent.

    async def approve(
        self,
        run_id: str,
        call_id: str,
        *,
        by: str = "",
        arguments: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        digest: str | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        """Approve a call, perhaps with edited `arguments`. It runs when the run is resumed. See `Runs.approve`.

        With `call_id="plan"` the plan that waits is approved, or the edited `plan` in its place. With `allow=["to"]`
        later calls like it, with the same value of `to`, run without this question in this session.
        """
        await self.runs.approve(run_id, call_id, by=by, arguments=arguments, plan=plan, digest=digest, allow=allow)

    async def reject(self, run_id: str, call_id: str, *, message: str = "", by: str = "") -> None:
        """Reject a call. It does not run, and the model reads the message. See `Runs.reject`."""
        await self.runs.reject(run_id, call_id, message=message, by=by)

    async def decide(
        self, *, approve: Iterable[Pending] = (), reject: Iterable[Pending] = (), message: str = "", by: str = ""
    ) -> None:
        """Decide on several items of `run.pending` together, each bound to what it shows. See `Runs.decide`."""
        await self.runs.decide(approve=approve, reject=reject, message=message, by=by)

    async def answer(
        self,
        run_id: str,
        call_id: str,
        content: str | Mapping[str, Any] | None = None,
        *,
        failed: bool = False,
        declined: bool = False,
        by: str = "",
        digest: str | None = None,
    ) -> None:
        """Give the result of a call that comes from outside, or the input that a tool asks for. See `Runs.answer`."""
        await self.runs.answer(run_id, call_id, content, failed=failed, declined=declined, by=by, digest=digest)

    async def settle(
        self,
        run_id: str,
        call_id: str,
        *,
        result: str | None = None,
        failed: str | None = None,
        rerun: bool = False,
        by: str = "",
    ) -> None:
        """Record the outcome of a call that was in flight when its worker died. See `Runs.settle`."""
        await self.runs.settle(run_id, call_id, result=result, failed=failed, rerun=rerun, by=by)

    async def send(
        self,
        run_id: str,
        content: Prompt,
        *,
        kind: InputKind | str = InputKind.USER,
        priority: Priority | str = Priority.NORMAL,
        at: datetime | float | None = None,
        key: str | None = None,
        labels: Iterable[str] = (),
        by: str = "",
    ) -> PostedItem:
        """Send a run more input that the model can take. The run reads it at its next OBSERVE. See `Runs.send`."""
        parts = self._check_prompt(content)
        return await self.runs.send(run_id, parts, kind=kind, priority=priority, at=at, key=key, labels=labels, by=by)

    async def pause(self, run_id: str, *, by: str = "", message: str = "") -> None:
        """Pause a run at its next boundary between two steps, until it is resumed. See `Runs.pause`."""
        await self.runs.pause(run_id, by=by, message=message)

    async def feedback(self, run_id: str, *, rating: int, comment: str = "", by: str = "") -> None:
        """Record a person's opinion of a run, from 1 (bad) to 5 (good). See `Runs.feedback`."""
        await self.runs.feedback(run_id, rating=rating, comment=comment, by=by)

    async def cancel(self, run_id: str, *, by: str = "", message: str = "") -> None:
        """End a run and the runs of its sub-agents. See `Runs.cancel`."""
        await self.runs.cancel(run_id, by=by, message=message)

    # The agent as a tool or as an MCP server.

    def as_tool(
        self,
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, JSON] | None = None,
        prompt: Callable[[Arguments], str] | None = None,
        turns: int = subagent.DEFAULT_TURNS,
        timeout_s: float = subagent.DEFAULT_TIMEOUT_S,
        **options: Unpack[ToolDeclarations],
    ) -> Tool[..., Any]:
        """Return a tool that calls this agent, for another agent: `Agent(..., tools=[researcher.as_tool()])`.

        Each call is a run of its own in the caller's store, and spends from the caller's budget. The tool is read-only
        if all tools of this agent are, and may run in parallel with other calls if all of them may.

        Args:
            name: Name of the tool; by default the agent's name.
            description: Description of the tool for the caller's model: when to call it.
            parameters: JSON Schema of the arguments; by default one string, `query`.
            prompt: Function that builds the agent's first message from the arguments; by default they are sent as JSON.
            turns: Maximum number of model replies, 1 or more; after that the call returns the work done so far.
            timeout_s: Maximum duration in seconds, above 0; after that the call returns the work done so far.
            **options: Further declarations, as for `tool`.

        Raises:
            MisuseError: when the name or the schema is invalid, or `turns` or `timeout_s` is out of range.
        """
        return subagent.make_agent_tool(
            self,
            name=name,
            description=description,
            parameters=parameters,
            prompt=prompt,
            turns=turns,
            timeout_s=timeout_s,
            **options,
        )

    def as_mcp_server(
        self,
        *,
        prefix: str = "",
        tools: bool = True,
        about: str = "",
        deps: Any = None,
        **options: Any,
    ) -> MCPService:
        """Return an MCP server for this agent: `await agent.as_mcp_server().stdio()`. Needs agentfsm[mcp].

        Clients start runs, read them, send them input and post people's decisions; each client sees all runs of the
        agent. The server executes the runs in the agent's store, whether or not a client waits.

        Args:
            prefix: Prefix of the names of the tools for runs: `start`, `send`, `status`, `result`, `approve`.
            tools: Whether clients may also call the agent's own tools.
            about: Description of the agent's purpose, one sentence, for the client's model.
            deps: Dependencies of every run, or a function, plain or async, that takes the run and returns them. Unless
                it is a function, the agent's own tools receive it too when a client calls them.
            **options: Further fields of `MCPService`: `name`, `instructions`, `resources`, `prompts`, ...

        Raises:
            MisuseError: when a tool of the agent has the name of a tool for runs.
        """
        options |= {"prefix": prefix, "tools": tools, "about": about, "deps": deps}
        service: MCPService = extras.build_mcp_service(self, **options)
        return service

    def cost(self, run: Run[Any]) -> AgentCost:
        """Return the cost of a run so far: tokens, US dollars, turns, tool calls, time; sub-agents included.

        If a price is unknown, `usd` is None and `unpriced` names the model: install agentfsm[prices], or give the model
        a price.
        """
        check_run(run, "cost")
        return calculate_run_cost(run, self.model)

    async def session_cost(self, session: str) -> SessionCost:
        """Return the cost of all runs of a session so far, read from their journals; zero for an unknown session."""
        return await calculate_session_cost(self.store, session, self.model)

    # Variants and cleanup.

    def with_(self, **changes: Any) -> Agent[Any]:
        """Return a variant of the agent with other fields: `agent.with_(model=ScriptedModel(...))` in a test."""
        return attrs.evolve(self, **changes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of the model, the context policies and the tool servers, then the store.

        Streams of runs in this store that were not left are cut off first, and their runs can be resumed. Those of
        other event loops are not waited for. Watchers get up to 5 s for the events that they have not received yet.
        """
        async with AsyncExitStack() as rest:
            for outlet in self.watch:
                rest.push_async_callback(anyio.to_thread.run_sync, outlet.flush, abandon_on_cancel=True)
            rest.push_async_callback(self.store.aclose)
            rest.push_async_callback(self.tools.aclose)
            for policy in self.context.policies:
                rest.push_async_callback(policy.aclose)
            rest.push_async_callback(self.model.aclose)
            await cut_off_owned(self.store)

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the instructions, the model, and the tools with their schemas."""
        return self.driver.config.fingerprint


@attrs.define(eq=False, repr=False)
class _StepIterator(AsyncIterator[Run[A_co]]):
    """Iterator over `step`. An async generator would have to be closed when its loop is left early."""

    _agent: Agent[A_co]
    _run: Run[A_co]
    _deps: Any
    _elicit: Elicit | None

    async def __anext__(self) -> Run[A_co]:
        before, self._run = self._run, await self._agent.step(self._run, deps=self._deps, elicit=self._elicit)
        if self._run.version == before.version:
            raise StopAsyncIteration
        return self._run


def _list_label_sources(
    header: Header, labels: Iterable[Label], inherited: Mapping[Label, LabelSource]
) -> tuple[LabelSource, ...]:
    """Return the labels with which a run begins: of its history, its prompt, and the run that calls the agent."""
    found: list[tuple[Label, str, str]] = []
    for message in header.history:
        if isinstance(message, ToolResult):
            found += [(label, message.tool, message.call_id) for label in message.labels]
        elif isinstance(message, AssistantMessage) and message.hosted is not None:
            found += [(label, "messages", "") for label in message.hosted.labels]
    found += [(label, "prompt", "") for label in labels]
    own = {
        label: LabelSource(
            label=label, run_id=header.id, call_id=call_id, name=name, owner=find_owner(label, header.user)
        )
        for label, name, call_id in found
    }
    return tuple({**own, **inherited}.values())


def _is_in_event_loop() -> bool:
    try:
        current_token()
    except RuntimeError:  # anyio.NoEventLoopError
        return False
    return True


def _created_error(run_id: str, error: StoreError) -> PartlyDoneError:
    return PartlyDoneError(
        f"run {run_id!r} is in the store, and a worker executes it; but the store failed then: {error}; do not start "
        "it again under another id, and load it by this one"
    )


suggest_fields(
    Agent,
    **dict.fromkeys(("system_prompt", "system", "prompt", "instruction", "system_message"), "instructions"),
    **dict.fromkeys(("llm", "model_name"), "model"),
    **dict.fromkeys(("functions", "toolsets"), "tools"),
    **dict.fromkeys(("max_turns", "max_steps", "max_iterations", "recursion_limit", "timeout"), "limits"),
    **dict.fromkeys(("temperature", "model_settings", "max_tokens"), "settings"),
    **dict.fromkeys(("response_model", "result_type", "response_format", "output_schema"), "output_type"),
    **dict.fromkeys(("checkpointer", "session_store", "db"), "store"),
)
