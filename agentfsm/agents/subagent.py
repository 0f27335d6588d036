"""Agents as tools of other agents. The child run has its own journal, and spends from the budget of its parent run.

The id of the child run is made of the parent's id and the call's id, so a repeated call continues the same run: after a
crash, none of its work is repeated. The time limit of the child run is within that of the call, so that the child run
can end properly and return its partial result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.runnable_agent import DEFAULT_TIMEOUT_S, DEFAULT_TURNS, RunnableAgent
from agentfsm.core.errors import AgentError, ConflictError, LeaseHeldError, MisuseError, RunNotFoundError
from agentfsm.core.header import FRONT_END, short_hash
from agentfsm.core.labels import Level, ToolKind
from agentfsm.core.machine import State
from agentfsm.core.messages import JSON, ErrorType, Outcome, ToolResult
from agentfsm.core.plans import GOAL_TOOL, build_goal_prompt
from agentfsm.core.run import Run
from agentfsm.core.run_ids import child_run_id
from agentfsm.core.validation import BOOL, COUNT, SECONDS
from agentfsm.engine.execution.child_runs import (
    build_final_result,
    build_unresponsive_result,
    has_child_run,
    load_child_run,
)
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.engine.execution.parent import Parent
from agentfsm.engine.execution.unattended import cancel_child_run
from agentfsm.engine.program_check import has_tool
from agentfsm.streaming.stream import AgentEvent, AgentEventType
from agentfsm.tools.run_context import CallPaused, RunContext, ToolReturn
from agentfsm.tools.schema.binding import Arguments
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.ports.policies import PlanMaker
    from agentfsm.ports.store import Clock, Store
    from agentfsm.tools.registry import ToolRegistry

# Seconds that a call has after its timeout, for the child run to end.
GRACE_S: Final = 5.0
# Hexadecimal digits of the nonce of a child run.
NONCE_DIGITS: Final = 16
COORDINATION: Final = (
    "If a tool returns an error, go on with what the other tools gave you. Do not call the failed tool again unless "
    "its error says that this helps. Never show the user technical details of an error: say in plain words what you "
    "could not find out."
)
"""Instructions for an agent that coordinates other agents, about errors of their tools."""

BuildPrompt = Callable[[Arguments], str]
VaryAgent = Callable[[RunnableAgent, Parent, Arguments], RunnableAgent]


def make_agent_tool(
    agent: RunnableAgent,
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, JSON] | None = None,
    prompt: BuildPrompt | None = None,
    turns: int | None = None,
    timeout_s: float | None = None,
    background: bool = False,
    accepts_partial: bool = True,
    returns_call: bool = False,
    speaks_for_caller: bool = False,
    **options: Any,
) -> Tool[..., Any]:
    """Return a tool that calls an agent; implements `Agent.as_tool`, which documents the arguments.

    With `accepts_partial=False`, the call of an agent that reached a limit fails, also if it has a partial result. With
    `returns_call`, the result in the background is that of the only call of the agent. With `speaks_for_caller`, guards
    decide on the calls of the agent as if its caller made them.
    """
    BOOL.check("as_tool", "background", background)
    if turns is None:
        turns = agent.limits.turns if background else DEFAULT_TURNS
    if timeout_s is None:
        timeout_s = agent.limits.seconds if background else DEFAULT_TIMEOUT_S
    COUNT.check("as_tool", "turns", turns)
    SECONDS.check("as_tool", "timeout_s", timeout_s)
    if derived := {"read_only", "idempotent", "on_unknown", "kind", "grace_s"} & options.keys():
        raise MisuseError(f"as_tool() derives {', '.join(sorted(derived))} from the agent's own tools: leave it out")
    config = agent.driver.config
    config.model.prepare()  # it may block, so not in the event loop of the parent run
    agent.driver.check_price()
    child = _SubagentTool(
        agent,
        prompt,
        turns,
        timeout_s,
        accepts_partial=accepts_partial,
        background=background,
        returns_call=returns_call,
        speaks_for_caller=speaks_for_caller,
    )
    if parameters is None and prompt is None and config.planner is not None:
        parameters = config.planner.input_schema
    tools = list(config.registry)
    if config.registry.sources:  # their tools are not known yet
        read_only, level, is_safe = False, Level.WRITE, False
    else:
        read_only = all(tool.read_only for tool in tools)
        level = max([tool.permission for tool in tools], default=Level.READ)
        is_safe = all(tool.concurrency_safe is True for tool in tools)
    options.setdefault("permission", level)
    options.setdefault("concurrency_safe", is_safe or background)
    description = description if description is not None else f"Ask the agent {agent.name}."
    made = make_tool(
        child.ask if parameters is None else child.call,
        name=name or agent.name,
        description=f"{description} {_BACKGROUND_HINT}" if background else description,
        parameters=parameters,
        kind=ToolKind.AGENT,
        read_only=read_only,
        idempotent=True,
        timeout_s=DEFAULT_TIMEOUT_S if background else timeout_s,
        grace_s=GRACE_S,
        background=background,
        **options,
    )
    made.inner_agent = child
    return made


_BACKGROUND_HINT: Final = (
    "It works in the background: the call returns at once with the id of the run, and the result comes later as a "
    "message. Go on with other work meanwhile, or call `wait`."
)
_BEGUN: Final = (
    "begun in the background as run {id}. Its result comes as a message once it has ended: go on with other work, or "
    "wait. You have to do nothing for it."
)
# The arguments of a goal are those of its step, which was validated with its plan.
_GOAL_SCHEMA: Final[Mapping[str, JSON]] = {
    "type": "object",
    "properties": {
        "goal": {"type": "string"},
        "tools": {"type": "array", "items": {"type": "string"}},
        "results": {"type": "object"},
    },
    "required": ["goal", "tools", "results"],
}


def make_goal_tool(agent: RunnableAgent, tools: ToolRegistry, planner: PlanMaker) -> Tool[..., Any]:
    """Return the engine's tool for the goals of plans.

    A goal is a child run of the agent itself, step by step, with the tools that the goal names.

    Args:
        agent: The agent whose plans have goals.
        tools: Its tools.
        planner: Its planner, which has the limits of a goal.
    """
    plain = agent.with_(
        planner=None,
        reflector=None,
        output_type=None,
        output_mode=None,
        output_validators=(),
        claims=None,
        watch=(),
    )

    def select_tools(child: RunnableAgent, parent: Parent, arguments: Arguments) -> RunnableAgent:
        instructions = parent.run.header.instructions  # those of the parent's start
        changes = {} if instructions is None else {"instructions": instructions}
        return child.with_(tools=tools.filter(names=arguments.tools), **changes)

    def is_safe(arguments: Arguments) -> bool:
        return all(tool.concurrency_safe is True for tool in tools.filter(names=arguments.tools))

    child = _SubagentTool(
        plain,
        lambda arguments: build_goal_prompt(arguments.goal, arguments.results),
        planner.goal_turns,
        planner.goal_timeout_s,
        vary=select_tools,
        accepts_partial=False,
    )
    made = make_tool(
        child.call,
        name="goal",
        description="Work on a goal.",
        parameters=_GOAL_SCHEMA,
        kind=ToolKind.AGENT,
        idempotent=True,
        permission=Level.READ,  # its own calls need permissions
        concurrency_safe=is_safe,
        timeout_s=planner.goal_timeout_s,
        grace_s=GRACE_S,
    )
    made = attrs.evolve(made, name=GOAL_TOOL)
    made.inner_agent = child
    return made


def find_inner_agent(tool: Tool[..., Any]) -> RunnableAgent | None:
    """Return the agent that a tool calls; None if the tool calls none."""
    return tool.inner_agent.agent if isinstance(tool.inner_agent, _SubagentTool) else None


@attrs.define(eq=False, repr=False)
class _SubagentTool:
    """Function of the tool that calls an agent."""

    agent: RunnableAgent
    prompt: BuildPrompt | None
    turns: int
    timeout_s: float
    vary: VaryAgent | None = None
    """Function of the agent, the parent run and the arguments that returns the agent of a call; None: it is the same
    for all.
    """

    accepts_partial: bool = True
    """Whether the call succeeds if the child run reached a limit but has a partial result."""

    background: bool = False
    """Whether the child run goes on in the background after the call."""

    returns_call: bool = False
    """Whether the result in the background is that of the only call of the agent."""

    speaks_for_caller: bool = False
    """Whether guards decide on the calls of the agent as if its caller made them."""

    async def ask(self, ctx: RunContext[Any], query: str) -> ToolReturn:
        """Let the agent answer a question, and return the result.

        Args:
            ctx: Context of the call.
            query: The question or task for the agent.
        """
        return await self.call(ctx, query=query)

    async def call(self, ctx: RunContext[Any], **arguments: Any) -> ToolReturn:
        """Run the agent on the arguments, and return the result."""
        parent: Parent | None = ctx.parent
        known: Run | None = None
        if parent is not None and ctx.attempt > 1:  # a child run that exists goes on, whatever has changed since
            with suppress(RunNotFoundError):
                known = await load_child_run(parent.store, ctx.run_id, ctx.call_id)
        if parent is not None and known is None and parent.run.header.depth >= parent.depth_limit:
            text = f"agents may call agents {parent.depth_limit} deep, and this call would be deeper: answer yourself"
            return ToolReturn(outcome=Outcome.FAILED, content=text, error_type=ErrorType.AGENT)
        agent = self._build_variant(ctx, parent)
        if self.vary is not None and parent is not None:
            agent = self.vary(agent, parent, Arguments(**arguments))
        callers = (*parent.options.callers, parent.run) if self.speaks_for_caller and parent is not None else ()
        call = _SubagentCall(agent, ctx, parent, accepts_partial=self.accepts_partial, callers=callers)
        if self.background and parent is not None:
            prompt = self._write_prompt(arguments)
            return await call.begin_in_background(prompt if known is None else known)
        if known is not None:
            return await call.run(known)
        return await call.run(self._write_prompt(arguments))

    def _write_prompt(self, arguments: dict[str, Any]) -> str:
        if self.prompt is None:
            return json.dumps(arguments, ensure_ascii=False, indent=2)
        return self.prompt(Arguments(**arguments))

    async def drive_run(self, context: RunContext[Any]) -> ToolReturn:
        """Execute the child run of a background call until it is over or waits; return what it did."""
        parent: Parent = context.parent
        run = await load_child_run(parent.store, context.run_id, context.call_id)
        agent = self._build_variant(context, parent)
        end = await _SubagentCall(agent, context, parent, accepts_partial=self.accepts_partial).run(run)
        if not self.returns_call:
            return end
        run = await load_child_run(parent.store, context.run_id, context.call_id)
        made = next((message for message in run.messages if isinstance(message, ToolResult)), None)
        if made is None or run.state is not State.DONE:
            return end
        return attrs.evolve(end, outcome=made.outcome, content=made.content, error_type=made.error_type)

    def hash_agent(self, seen: tuple[object, ...]) -> str:
        """Return the version and the digest of the fingerprint of the agent; `seen` are the tools on the way."""
        return f"{self.agent.version} {self.agent.driver.config.find_fingerprint(seen).digest}"

    async def end_run(self, store: Store, clock: Clock, caller: str, call_id: str) -> ToolReturn:
        """Cancel the child run of a call, because the parent run or the call ends. Return the result of its work."""
        driver = self.agent.driver
        model, tools = driver.config.model, driver.config.registry
        run = await cancel_child_run(store, caller, call_id, clock=clock, tools=tools, durability=driver.durability)
        return build_final_result(run, model) if run.is_over else build_unresponsive_result(run, model)

    def has_tool(self, name: str, seen: tuple[object, ...]) -> bool:
        """Return whether the agent has a tool, or an agent below it; `seen` are the tools on the way."""
        return has_tool(self.agent.driver.config, name, seen)

    async def find_child(self, store: Store, caller: str, call_id: str) -> tuple[EngineConfig, Run] | None:
        """Return the configuration of the agent and the child run of a call; None if it has none that is open."""
        config = self.agent.driver.config
        try:
            run = await load_child_run(store, caller, call_id)
        except RunNotFoundError:
            return None
        if config.registry.sources:
            await config.registry.refresh()
        return None if run.is_over else (config, run)

    def _build_variant(self, ctx: RunContext[Any], parent: Parent | None) -> RunnableAgent:
        """Return a variant of the agent with the parent's store and clock, within the limits of the call."""
        clock = self.agent.clock if parent is None else parent.clock
        left_s = max(0.001, min(self.timeout_s, ctx.deadline - clock.now(), self.agent.limits.seconds))
        limits = attrs.evolve(self.agent.limits, turns=self.turns, seconds=left_s)
        build = partial(self.agent.with_, pause_before=())  # it pauses only with its parent
        if parent is None:
            return build(limits=limits)
        depth = min(parent.depth_limit, parent.run.header.depth + 1 + limits.depth)
        watch = (*parent.watch, *self.agent.driver.config.watch)
        own = self.agent.driver.config.guards
        inherited = [guard.for_sub_agent(parent.run.header) for guard in parent.guards]
        guards = (*own, *[guard for guard in inherited if guard not in own])
        limits = attrs.evolve(limits, depth=depth)
        fields: dict[str, Any] = {"watch": watch}
        if (world := parent.options.world) is not None:
            fields = world.enter(ctx.run_id, ctx.call_id).cut_off(self.agent.driver.config.memory)
        return build(limits=limits, store=parent.store, clock=clock, guards=guards, **fields)


class _IdTakenError(AgentError):
    """The id of the child run is that of a run with another parent."""


@attrs.define(eq=False, repr=False)
class _SubagentCall:
    """A call of an agent, and its child run."""

    agent: RunnableAgent
    ctx: RunContext[Any]
    parent: Parent | None
    accepts_partial: bool = True
    callers: tuple[Run, ...] = ()
    """The parent and the runs above it for which it speaks, the outermost first, if the child run speaks for it."""

    turn: int = 0
    """The newest turn that an event has reported, from 1; 0 before the first."""

    async def run(self, message: str | Run) -> ToolReturn:
        """Execute the child run until it is over or waits.

        Args:
            message: The first message of the child run, or the child run that an earlier attempt began.

        Raises:
            CallPaused: when the child run waits for external input.
        """
        run = message if isinstance(message, Run) else self._begin(message)
        since = self.agent.clock.monotonic()
        self._emit(AgentEventType.STARTED, run)
        try:
            run = await self._execute_child(run, is_known=run is message)
        except _IdTakenError as error:
            return ToolReturn(outcome=Outcome.FAILED, content=str(error), error_type=ErrorType.AGENT)
        finally:
            duration_s = self.agent.clock.monotonic() - since
            if run.is_waiting:
                self._emit(AgentEventType.PAUSED, run, duration_s=duration_s)
            else:
                self._emit(AgentEventType.COMPLETED, run, duration_s=duration_s, success=run.state is State.DONE)
        if run.is_waiting:
            raise CallPaused(run.pending)
        result = build_final_result(run, self.agent.driver.config.model)
        if run.state is State.DONE or self.accepts_partial or result.outcome is not Outcome.DONE:
            return result
        return attrs.evolve(result, outcome=Outcome.FAILED, error_type=ErrorType.AGENT)

    async def begin_in_background(self, message: str | Run) -> ToolReturn:
        """Create the child run in the store, unless an earlier attempt has, and return its id for the model."""
        if not isinstance(message, Run):
            try:
                await self.agent.submit(self._begin(message), deps=self.ctx.deps)
            except ConflictError:
                assert self.parent is not None  # as the caller has checked  # noqa: S101
                if not await has_child_run(self.parent.store, self.ctx.run_id, self.ctx.call_id):
                    raise
        return ToolReturn(outcome=Outcome.DONE, content=_BEGUN.format(id=self.ctx.call_id), background=True)

    def _begin(self, message: str) -> Run:
        ctx, parent = self.ctx, self.parent
        run = self.agent.start(
            message,
            id=child_run_id(ctx.run_id, ctx.call_id) if parent is not None else None,
            user=ctx.user,
            roles=ctx.roles,
            metadata={
                name: each for name, each in ctx.metadata.items() if name != FRONT_END
            },  # whose tools are not its own
            parent=None if parent is None else parent.run,
        )
        if parent is None:
            return run
        # If the child run is lost and its call is repeated, the calls of the new child run have the same idempotency
        # keys, because the nonce is derived from that of the call.
        nonce = short_hash(ctx.idempotency_key, NONCE_DIGITS)
        return attrs.evolve(run, header=attrs.evolve(run.header, nonce=nonce))

    async def _execute_child(self, run: Run, *, is_known: bool) -> Run:
        driver, parent = self.agent.driver, self.parent
        options = ExecutionOptions(
            deps=self.ctx.deps,
            resume=True,  # only the engine pauses a child run, after crashes: to resume its parent is to resume it
            on_event=self.ctx.on_event,
            on_run=self._on_run,
            attendant=None if self.ctx.attendance is None else self.ctx.attendance.attendant,
        )
        if parent is not None:
            above = parent.options
            world = None if above.world is None else above.world.enter(self.ctx.run_id, self.ctx.call_id)
            options = options._replace(
                parent_budget=parent.budget,
                drain=above.drain,
                renamed=above.renamed,
                callers=self.callers,
                world=world,
            )
        try:
            return await driver.run_until_blocked(run.id if is_known else run, options)
        except ConflictError as error:
            if parent is None:
                raise
            if not await has_child_run(parent.store, self.ctx.run_id, self.ctx.call_id):
                raise _IdTakenError(
                    f"not called: the run of agent {self.agent.name} needs the id {run.id!r}, which an unrelated run "
                    "has. Continue without this call, or call the agent again: a new call has another id."
                ) from error
            if isinstance(error, LeaseHeldError):
                if not parent.options.takeover:
                    raise
                return await driver.run_until_blocked(run.id, options._replace(takeover=True))
            return await driver.run_until_blocked(run.id, options)  # the child run has another first message

    def _on_run(self, run: Run) -> None:
        """Report each turn that begins."""
        if run.state is State.THINK and self.turn <= run.turn < self.agent.limits.turns:
            self.turn = run.turn + 1
            self._emit(AgentEventType.PROGRESS, run)

    def _emit(self, kind: AgentEventType, run: Run, **details: Any) -> None:
        if self.ctx.on_event is None:
            return
        self.ctx.on_event(
            AgentEvent(
                type=kind,
                run_id=self.ctx.run_id,
                call_id=self.ctx.call_id,
                agent=self.agent.name,
                child_id=run.id,
                turn=self.turn,
                limit=self.agent.limits.turns,
                **details,
            ),
        )
