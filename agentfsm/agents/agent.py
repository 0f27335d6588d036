"""The agent: methods that start, execute and control runs. Each method uses a simpler one.

`start` begins a run, `step` performs one effect, `steps` and `finish` repeat it, `run` is `start` and `finish`,
`stream` also yields events, and `run_sync` is `run` for synchronous code.

The engine is half of the package, and is loaded with the first agent: what imports `Agent` to define one later, such as
a module of tools, does not wait for it.

The fields of an agent are in `agent_fields`, the methods that begin runs in `agent_starts`, and those that control runs
by their ids in `agent_controls`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm._lib.fairness import StepThrottle
from agentfsm.agents import extras
from agentfsm.agents.agent_controls import AgentControls
from agentfsm.agents.agent_starts import AgentStarts, StartOptions, check_option_names
from agentfsm.agents.validation import check_run
from agentfsm.core.errors import LeaseHeldError, MisuseError
from agentfsm.core.run import A_co, Run
from agentfsm.core.validation import COUNT, NOT_NEGATIVE, SECONDS, suggest_fields
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.stores.rules import check_run_id

if TYPE_CHECKING:
    from types import TracebackType

    from agentfsm.agents.runs import Prompt
    from agentfsm.core.header import Fingerprint, Header
    from agentfsm.core.messages import JSON
    from agentfsm.core.pending import Elicit
    from agentfsm.core.usage import AgentCost, SessionCost
    from agentfsm.engine.replay import Replay
    from agentfsm.mcp.server.service import MCPService
    from agentfsm.streaming.stream import Listener, RunStream
    from agentfsm.tools.attendance import Attendant
    from agentfsm.tools.schema.binding import Arguments
    from agentfsm.tools.tool import Tool, ToolDeclarations

# Runs that a worker executes at once: they wait for models most of the time.
WORKER_PARALLEL: Final = 100
# Seconds between two polls of a worker: a poll costs less than 1 ms, and a user can wait a second.
WORKER_POLL_S: Final = 1.0
# Seconds that effects in flight have when a process of the command line stops: Kubernetes kills it after 30 s.
DRAIN_S: Final = 25.0


class Agent(AgentControls[A_co], AgentStarts[A_co]):
    """A model with tools, instructions and limits.

    An agent is immutable and holds no state of runs, so one agent can execute thousands at once. `with_` returns a
    variant.

    Args:
        model: A `Model`, or a string such as "openai:gpt-5.4-mini".
        tools: Tools, plain functions, tool sources such as MCP servers, and hosted tools, which the provider executes,
            such as `WebSearch()`; or a registry, which is then shared.
        skills: Skills, as `Skills("skills/")` of `agentfsm.skills`: folders of instructions that the model reads when
            it needs them.
        instructions: System prompt: text, a prompt of `agentfsm.prompts`, or a function, plain or async, that
            returns text; empty for none.
        reminder: Note at the end of each request: text, a prompt, or a function, plain or async, that returns text;
            empty for none.
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
        claims: Requirement that answers name a call for each act that they say was done; None for none.
        reflector: Judge of answers, or of the results of selected tools, before the run continues; None for no judge.
        memory: Memory across runs, which is searched once for each input of the user; None for no memory.
        guards: Guards that decide on calls before they start; empty for no rules.
        planner: Maker of plans, whose steps run without a request to the model for each; None: the model is asked for
            each step.
        last_answer: Whether the model is asked for a last answer, without tools, when a limit or a loop stops a run.
        stop_when: Functions of the run that end it before the model does: they return False, True to stop without an
            answer, or a text, which is then the answer.
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

    __slots__ = ()

    def __repr__(self) -> str:
        hosted = [tool.name for tool in self.tools.hosted]
        tools = ", ".join([*self.tools.names, *hosted, *("..." for _ in self.tools.sources)])
        return f"<Agent {self.name} {self.model.name}, tools: {tools or 'none'}>"

    # Execute runs.

    async def step(self, run: Run[A_co], *, deps: Any = None, elicit: Elicit | None = None) -> Run[A_co]:
        """Perform the run's pending effect, and return the run after it.

        A run that is over, or that waits without a decision, is returned unchanged. The step is durable when this
        returns. After a cancellation, `resume` continues the run.

        Raises:
            ConflictError: when the run has changed, or another worker executes it; nothing was done.
            StoreError: when the journal cannot be read or written.
        """
        check_run(run, "step")
        options = ExecutionOptions(deps=deps, once=True, attendant=_as_attendant(elicit))
        return run if run.is_over else await self.driver.run_until_blocked(run, options)

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
        options = ExecutionOptions(deps=deps, attendant=_as_attendant(elicit))
        return run if run.is_over else await self.driver.run_until_blocked(run, options)

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
        check_option_names("run", start)
        gate = await StepThrottle.enter()  # before the run is built: a thousand may begin at once
        options = ExecutionOptions(deps=deps, attendant=_as_attendant(elicit), throttle=gate)
        return await self.driver.run_until_blocked(self.start(prompt, **start), options)

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
        from agentfsm.streaming.stream import RunStream, TypedStream  # noqa: PLC0415  with the engine

        check_option_names("stream", start)
        run = prompt_or_run if isinstance(prompt_or_run, Run) else self.start(prompt_or_run, **start)
        names = self._check_names(renamed)
        options = ExecutionOptions(deps=deps, resume=resume, renamed=names, attendant=_as_attendant(elicit))

        def execute(on_event: Listener, on_run: Callable[[Run[Any]], None]) -> Awaitable[Run[A_co]]:
            return self.driver.run_until_blocked(run, options._replace(on_event=on_event, on_run=on_run))

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
        check_option_names("run_sync", start)
        if _is_in_event_loop():
            raise MisuseError("run_sync would block the running event loop: use `await agent.run(...)` here")
        return anyio.run(partial(self.run, prompt, deps=deps, elicit=elicit, **start))

    def _check_names(self, renamed: Mapping[str, str] | None) -> dict[str, str]:
        """Return the new names of tools.

        Raises:
            MisuseError: if neither this agent nor one below it has a tool of a new name.
        """
        if not renamed:
            return {}
        from agentfsm.engine.program_check import has_tool  # noqa: PLC0415  with the engine

        for old, new in renamed.items():
            if not has_tool(self.driver.config, new):
                raise MisuseError(f"renamed={{{old!r}: {new!r}}}: this agent has no tool {new!r}; nothing was changed")
        return dict(renamed)

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
        from agentfsm.agents.decisions import wake_callers  # noqa: PLC0415  with the engine
        from agentfsm.engine.driver import LEASE_POLL_S  # noqa: PLC0415  with the engine

        names = self._check_names(renamed)
        check_run_id(run_id)
        attendant = _as_attendant(elicit)
        options = ExecutionOptions(deps=deps, resume=True, takeover=takeover, renamed=names, attendant=attendant)
        if self.version:
            self._check_release(await self.runs.header(run_id))
        while True:
            try:
                run = await self.driver.run_until_blocked(run_id, options)
            except LeaseHeldError:
                if not wait:
                    raise
                options = options._replace(takeover=False)  # only once: the worker that executes it now may be healthy
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
        from agentfsm.engine.replay import replay  # noqa: PLC0415  with the engine

        check_run_id(run_id)
        return await replay(self.driver.config, self.store, run_id, deps)

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
        from agentfsm.agents.worker import Worker  # noqa: PLC0415  with the engine

        COUNT.check("worker", "parallel", parallel)
        SECONDS.check("worker", "poll_s", poll_s)
        NOT_NEGATIVE.check("worker", "drain_s", drain_s)
        execute = self.driver.run_until_blocked if deltas is None else extras.publish_deltas(self.driver, deltas)
        starter = extras.create_due_runs(self)
        options: Any = {"deps": deps, "parallel": parallel, "poll_s": poll_s, "drain_s": drain_s, "starter": starter}
        await Worker(agent=self, execute=execute, **options).run(until_idle=until_idle)

    # The agent as a tool or as an MCP server.

    def as_tool(
        self,
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, JSON] | None = None,
        prompt: Callable[[Arguments], str] | None = None,
        turns: int | None = None,
        timeout_s: float | None = None,
        background: bool = False,
        **options: Unpack[ToolDeclarations],
    ) -> Tool[..., Any]:
        """Return a tool that calls this agent, for another agent: `Agent(..., tools=[researcher.as_tool()])`.

        Each call is a run of its own in the caller's store, and spends from the caller's budget. The tool is read-only
        if all tools of this agent are, and may run in parallel with other calls if all of them may.

        Args:
            name: Name of the tool; by default the agent's name.
            description: Description of the tool for the caller's model: when to call it.
            parameters: JSON Schema of the arguments; by default one string, `query`, and for a flow its inputs.
            prompt: Function that builds the agent's first message from the arguments; by default they are sent as JSON.
            turns: Maximum number of model replies, 1 or more; after that the call returns the work done so far. None:
                3, and for a background run those of this agent's `limits`.
            timeout_s: Maximum duration in seconds, above 0; after that the call returns the work done so far. None: 30,
                and for a background run the seconds of this agent's `limits`.
            background: Whether the work goes on in the background: the call returns the id of the run at once, and the
                caller's model reads the result as a message once it is there. The caller ends after its background
                runs.
            **options: Further declarations, as for `tool`.

        Raises:
            MisuseError: when the name or the schema is invalid, or `turns` or `timeout_s` is out of range.
        """
        from agentfsm.agents.subagent import make_agent_tool  # noqa: PLC0415  with the engine

        return make_agent_tool(
            self,
            name=name,
            description=description,
            parameters=parameters,
            prompt=prompt,
            turns=turns,
            timeout_s=timeout_s,
            background=background,
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
        from agentfsm.engine.execution.cost import calculate_run_cost  # noqa: PLC0415  with the engine

        check_run(run, "cost")
        return calculate_run_cost(run, self.model)

    async def session_cost(self, session: str) -> SessionCost:
        """Return the cost of all runs of a session so far, read from their journals; zero for an unknown session."""
        from agentfsm.engine.execution.cost import calculate_session_cost  # noqa: PLC0415  with the engine

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
        from agentfsm.streaming.detached_task import cut_off_owned  # noqa: PLC0415  with the engine

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


def _as_attendant(elicit: Elicit | None) -> Attendant | None:
    if elicit is None:
        return None
    from agentfsm.agents.decisions import as_attendant  # noqa: PLC0415  with the engine

    return as_attendant(elicit)


def _is_in_event_loop() -> bool:
    try:
        current_token()
    except RuntimeError:  # anyio.NoEventLoopError
        return False
    return True


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
