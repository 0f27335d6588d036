"""Serve an agent: tools that start and control its runs, and the runs as resources.

A run belongs to the store, not to a client. A worker of the server executes it, so a client that disconnects ends
nothing, and the next server continues the runs of a crashed one.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, ParamSpec, TypeAlias

import anyio
import attrs
import mcp.types as m
from mcp import MCPError
from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated
from pydantic import Field

from agentfsm._lib.newest import Newest
from agentfsm.agents.admission import admit, admit_answer
from agentfsm.agents.background_calls import find_function_agents
from agentfsm.agents.run_reports import describe_progress, describe_run
from agentfsm.agents.runnable_agent import RunnableAgent
from agentfsm.agents.worker import Worker
from agentfsm.core.codec import message_to_json
from agentfsm.core.errors import AgentError, MisuseError, RunNotFoundError
from agentfsm.core.labels import FROM_MODEL
from agentfsm.core.messages import JSON, ErrorType, Outcome
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.journal.run_status import RunStatus, list_statuses, read_status
from agentfsm.mcp.server.handshake_clients import EventBus
from agentfsm.mcp.server.resources import Resource
from agentfsm.ports.store import Filter, Store
from agentfsm.schedules.due_runs import DueRuns
from agentfsm.tools.queue import result_text
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import RunContext, ToolReturn
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.core.run import Run

P = ParamSpec("P")

# Default seconds that `start` waits for the end of the run: short runs need no second call.
START_WAIT_S: Final = 10.0
# Default seconds that `result` waits: hosts cancel calls after 60 s.
RESULT_WAIT_S: Final = 30.0
MAX_WAIT_S: Final = 300.0
# Seconds between two checks of a run that another process may execute.
POLL_S: Final = 1.0
# Maximum of runs executed at once, as by `Agent.worker`.
MAX_PARALLEL_RUNS: Final = 100
# Maximum of runs with the same creation time.
MAX_SIMULTANEOUS_RUNS: Final = 20
# Runs in a page of the list.
PAGE_SIZE: Final = 50
# Maximum of runs whose newest error is kept.
MAX_FAILURES: Final = 1_000
# Maximum of runs with the same creation time that a cursor can skip.
MAX_CURSOR_OFFSET: Final = 10_000
# Maximum of messages in the resource of a run: the newest.
MAX_MESSAGES: Final = 500
# Maximum length of a text in a message, in characters.
MAX_MESSAGE_CHARS: Final = 20_000
# Who speaks through a client, for the log: it has no user.
_CLIENT: Final = "an MCP client"
RUN_URI_PREFIX: Final = "agentfsm://runs/"

_RunId: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
_Wait: TypeAlias = Annotated[float, Field(ge=0, le=MAX_WAIT_S)]

_TEXT: Final[JSON] = {"type": "string"}
RUN_SCHEMA: Final[Mapping[str, JSON]] = {
    "type": "object",
    "properties": {
        "run_id": _TEXT,
        "status": {"type": "string", "enum": [*RunStatus]},
        "turn": {"type": "integer"},
        "answer": {
            "description": "The answer, once the status is done: text, or JSON if the agent has an output type."
        },
        "not_done": {"type": "string", "description": "What the answer says was done, although it was not."},
        "stop_reason": _TEXT,
        "stop_message": _TEXT,
        "standstill": {"type": "string", "description": "Why no process executes the run, and how it continues."},
        "pending": {"type": "array", "items": {"type": "object"}},
        "tokens": {"type": "integer"},
        "trouble": {"type": "string", "description": "Error that interrupted the run; it is retried."},
    },
    "required": ["run_id", "status", "turn", "tokens"],
}
NOTED_SCHEMA: Final[Mapping[str, JSON]] = {
    "type": "object",
    "properties": {"run_id": _TEXT, "noted": _TEXT},
    "required": ["run_id", "noted"],
}


def _return_errors(function: Callable[P, Awaitable[Any]]) -> Callable[P, Awaitable[Any]]:
    """Convert errors of this package to failed results with their message."""

    @functools.wraps(function)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await function(*args, **kwargs)
        except AgentError as error:
            return ToolReturn(outcome=Outcome.FAILED, content=str(error), error_type=ErrorType.TOOL)

    return wrapper


@attrs.define(eq=False, repr=False)
class _WorkerScope:
    """Cancel scope of a worker, and the event of its end."""

    scope: anyio.CancelScope
    ended: anyio.Event = attrs.field(factory=anyio.Event)


@attrs.define(eq=False, repr=False, kw_only=True)
class ServedRuns:
    """Runs of one agent, for the clients of one server. All clients see all of them."""

    agent: RunnableAgent
    deps: Any = None
    """Dependencies of every run, or a function of the run that returns them, plain or async."""

    description: str = ""
    """Purpose of the agent in a sentence, for the client's model."""

    prefix: str = ""
    """Prefix of the names of the tools for the runs."""

    bus: EventBus = attrs.field(factory=EventBus)
    """Reports changes to listening clients."""

    _live_runs: dict[str, Run] = attrs.field(factory=dict, init=False)
    """Newest state of the runs that are executed here, by id."""

    _waiters: dict[str, set[anyio.Event]] = attrs.field(factory=dict, init=False)
    """Events to set at the next change of a run, by run id."""

    _failures: Newest[str, str] = attrs.field(factory=lambda: Newest(MAX_FAILURES), init=False)
    """Error of the newest attempt to execute a run here, by run id."""

    _is_ending: bool = attrs.field(default=False, init=False)
    """Whether the server is shutting down, so that calls do not wait."""

    _workers: dict[Worker, _WorkerScope] = attrs.field(factory=dict, init=False)
    """Workers that execute the runs: one for each lifespan of the server."""

    # Lifespan.

    @asynccontextmanager
    async def lifespan(self, drain_s: float = 0.0) -> AsyncIterator[None]:
        """Execute runs while the block lasts; at its end, active runs are released for the next server.

        Args:
            drain_s: Seconds that their model requests and calls in flight have to end then.
        """
        self._is_ending = False
        async with anyio.create_task_group() as tasks:
            for agent in (self.agent, *self.long_tools.values()):
                tasks.start_soon(self._run_worker, agent, drain_s)
            yield
            tasks.cancel_scope.cancel()

    async def _run_worker(self, agent: RunnableAgent, drain_s: float) -> None:
        worker = Worker(
            agent=agent,
            execute=functools.partial(self._drive, agent),
            deps=self.deps,
            parallel=MAX_PARALLEL_RUNS,
            poll_s=POLL_S,
            drain_s=drain_s,
            starter=DueRuns(agent) if agent is self.agent else None,
        )
        with anyio.CancelScope() as scope:
            own = self._workers[worker] = _WorkerScope(scope)
            try:
                await worker.run(until_idle=False)
            finally:
                del self._workers[worker]
                own.ended.set()

    def release_waiters(self) -> None:
        """End all waiting for runs, since the server is shutting down."""
        self._is_ending = True
        for run_id in tuple(self._waiters):
            self._notify_waiters(run_id)

    def drain(self) -> None:
        """Execute no further run, and release each of the active ones as soon as none of its effects is in flight."""
        for worker in tuple(self._workers):
            worker.drain()

    def end_drain(self) -> None:
        """Cut off the effects in flight now."""
        for worker in tuple(self._workers):
            worker.end_drain()

    async def release_runs(self) -> None:
        """Release the active runs to the store, and execute no more."""
        workers = tuple(self._workers.values())
        for worker in workers:
            worker.scope.cancel()
        for worker in workers:
            await worker.ended.wait()

    async def _drive(self, agent: RunnableAgent, run: Run, options: ExecutionOptions) -> Run:
        run_id, report = run.id, options.on_run

        def report_and_record(run: Run) -> None:
            if report is not None:
                report(run)
            self._live_runs[run.id] = run
            self._notify_waiters(run.id)

        self._failures.pop(run_id, None)
        try:
            return await agent.driver.run_until_blocked(run, options._replace(on_run=report_and_record))
        except Exception as error:
            self._failures[run_id] = result_text.describe_error(error)
            raise
        finally:
            self._live_runs.pop(run_id, None)
            self._notify_waiters(run_id)

    def _notify_waiters(self, run_id: str) -> None:
        for changed in self._waiters.get(run_id, ()):
            changed.set()
        self.bus.announce(ResourceUpdated(uri=f"{RUN_URI_PREFIX}{run_id}"))

    @contextmanager
    def _waiter(self, run_id: str) -> Iterator[anyio.Event]:
        """Yield an event that the next change of a run sets."""
        changed, waiters = anyio.Event(), self._waiters.setdefault(run_id, set())
        waiters.add(changed)
        try:
            yield changed
        finally:
            waiters.discard(changed)
            if not waiters:
                self._waiters.pop(run_id, None)

    def _wake_workers(self) -> None:
        for worker in self._workers:
            worker.wake()

    # Tools.

    def build_tools(self) -> tuple[ToolRegistry, dict[str, Mapping[str, JSON]]]:
        """Return the tools for the runs, and their output schemas by name."""
        about = f" {self.description}" if self.description else ""
        planner = self.agent.driver.config.planner
        if planner is not None and planner.input_schema is not None:
            shape = json.dumps(planner.input_schema, ensure_ascii=False)
            about += f"\n\nThe prompt is the text of a JSON object of this JSON Schema: {shape}"
        long_s = MAX_WAIT_S + 30.0
        made = [
            self._build_tool(self.start, description=about, timeout_s=long_s),
            self._build_tool(self.send),
            self._build_tool(self.status, read_only=True),
            self._build_tool(self.result, read_only=True, timeout_s=long_s),
            self._build_tool(self.approve),
        ]
        noted = {f"{self.prefix}{name}" for name in ("send", "approve")}
        return ToolRegistry.of(made), {each.name: NOTED_SCHEMA if each.name in noted else RUN_SCHEMA for each in made}

    def _build_tool(
        self, function: Callable[..., Awaitable[Any]], description: str = "", **declared: Any
    ) -> Tool[..., Any]:
        made = make_tool(
            _return_errors(function), name=f"{self.prefix}{function.__name__}", concurrency_safe=True, **declared
        )
        made.description = made.description.replace("the agent", f"the agent {self.agent.name!r}", 1) + description
        return made

    async def start(
        self,
        ctx: RunContext[Any],
        prompt: Annotated[str, Field(min_length=1)],
        wait_s: _Wait = START_WAIT_S,
        session: _RunId | None = None,
        run_id: _RunId | None = None,
    ) -> dict[str, Any]:
        """Give the agent a task, and wait a short time for its result.

        The run continues after that: get its result later with `result` and its run_id.

        Args:
            ctx: Receives the progress.
            prompt: The task, with everything that the agent needs to know.
            wait_s: Seconds to wait for the result.
            session: Name of a conversation; the run continues it.
            run_id: An id of your choice; a second call with the same id and prompt returns the same run.
        """
        self.agent.driver.check_price()
        if self.agent.driver.config.registry.sources:
            await self.agent.driver.config.registry.refresh()
        run = await self.agent.submit(admit(prompt, _CLIENT), id=run_id, session=session, labels=FROM_MODEL)
        self.bus.announce(ResourcesListChanged())
        self._wake_workers()
        return await self._describe_run(await self._wait_until_settled(ctx, run.id, wait_s))

    async def send(self, run_id: _RunId, text: Annotated[str, Field(min_length=1)]) -> dict[str, str]:
        """Send the agent a message during a run; it reads the message at its next turn.

        Args:
            run_id: Id of the run.
            text: The message.
        """
        await self._load_own(run_id)
        await self.agent.runs.send(run_id, admit(text, _CLIENT), labels=FROM_MODEL)
        self._wake_workers()
        return {"run_id": run_id, "noted": "the agent reads it at its next turn"}

    async def status(self, run_id: _RunId) -> dict[str, Any]:
        """Return the status of a run without waiting: running, idle, queued, waiting, paused, done or failed.

        A run that is idle or queued stands still until a worker executes it: `standstill` says how it continues.

        Args:
            run_id: Id of the run.
        """
        return await self._describe_run(await self._load_own(run_id))

    async def result(self, ctx: RunContext[Any], run_id: _RunId, wait_s: _Wait = RESULT_WAIT_S) -> dict[str, Any]:
        """Wait until a run of the agent is over, or waits for a person, and return its answer.

        With `running`, `idle` or `queued` it is not finished: call again. With `waiting` a person has to decide what is
        pending.

        Args:
            ctx: Receives the progress.
            run_id: Id of the run.
            wait_s: Seconds to wait.
        """
        await self._load_own(run_id)
        return await self._describe_run(await self._wait_until_settled(ctx, run_id, wait_s))

    async def approve(
        self,
        run_id: _RunId,
        call_id: Annotated[str, Field(min_length=1, max_length=40)],
        decision: Literal["approve", "reject", "answer"],
        *,
        by: Annotated[str, Field(min_length=1, max_length=200)],
        text: str = "",
        arguments: dict[str, Any] | None = None,
        digest: str | None = None,
    ) -> dict[str, str]:
        """Submit a person's decision on a waiting call of the agent: never decide yourself, ask the person.

        Args:
            run_id: Id of the run, from `pending`.
            call_id: Id of the call, from `pending`.
            decision: The person's decision: approve or reject a call, or answer a question.
            by: Name of the person, for the record.
            text: The answer, or the reason for a rejection.
            arguments: New arguments of the call, if the person changed them.
            digest: The digest from `pending`, so that only the call that the person was shown is approved.
        """
        await self._load_own(run_id)
        text = admit_answer(text, by)
        if decision == "approve":
            await self.agent.runs.approve(run_id, call_id, by=by, arguments=arguments, digest=digest)
        elif decision == "reject":
            await self.agent.runs.reject(run_id, call_id, message=text, by=by)
        elif text:
            await self.agent.runs.answer(run_id, call_id, text, by=by)
        else:
            raise MisuseError("decision 'answer' needs the answer: give it as text=")
        self._wake_workers()
        return {"run_id": run_id, "noted": f"{decision} by {by}"}

    # Tasks.

    @property
    def store(self) -> Store:
        """Store of the runs."""
        return self.agent.store

    @property
    def start_tool(self) -> str:
        """Name of the tool that starts runs."""
        return f"{self.prefix}start"

    @functools.cached_property
    def long_tools(self) -> Mapping[str, RunnableAgent]:
        """Agents that make the calls of background functions, by the name of the function."""
        return find_function_agents(self.agent.driver.config.registry)

    async def load_task(self, _deps: Any, run_id: str) -> Run:
        """Return a run of this agent."""
        return await self._load_own(run_id)

    async def describe_task(self, run: Run) -> dict[str, Any]:
        """Return a run as `result` does."""
        return await self._describe_run(run)

    async def decide(self, _deps: Any, _run: Run, item: Pending, given: bool | str | Mapping[str, Any] | None) -> None:
        """Post a person's decision."""
        runs = self.agent.runs
        if item.kind is PendingKind.APPROVAL and given:
            await runs.approve(item.run_id, item.call_id, by=_CLIENT, digest=item.digest)
        elif item.kind is PendingKind.APPROVAL:
            await runs.reject(item.run_id, item.call_id, by=_CLIENT)
        else:
            assert not isinstance(given, bool)  # it is no approval  # noqa: S101
            is_declined = given is None
            await runs.answer(
                item.run_id, item.call_id, given, declined=is_declined, by=_CLIENT, digest=item.digest or None
            )
        self._wake_workers()

    async def cancel_task(self, _deps: Any, run: Run) -> None:
        """End a run."""
        await self.agent.runs.cancel(run.id, by=_CLIENT)

    async def _load_own(self, run_id: str) -> Run:
        """Return a run of this agent, or of one of its sub-agents.

        Raises:
            RunNotFoundError: when the store has no run with this id, or it belongs to another agent.
        """
        run = await self.agent.load(run_id)
        header = run.header
        while header.agent != self.agent.name and header.parent is not None:
            header = await self.agent.runs.header(header.parent)
        if header.agent != self.agent.name and header.agent not in self.long_tools:
            raise RunNotFoundError(f"there is no run {run_id!r} of {self.agent.name!r} in the store")
        return run

    async def _wait_until_settled(self, ctx: RunContext[Any], run_id: str, wait_s: float) -> Run:
        """Wait until the run is over or waits for input, or the time is up; report the progress meanwhile."""
        reported = ""
        with anyio.move_on_after(wait_s):
            while True:
                with self._waiter(run_id) as changed:
                    seen = self._live_runs.get(run_id)
                    if self._is_ending or (seen is None and await self._is_settled(run_id)):
                        break
                    if seen is not None and (progress := describe_progress(seen)) != reported:
                        reported = progress
                        ctx.progress(progress)
                    with anyio.move_on_after(POLL_S):
                        await changed.wait()
        return await self.agent.load(run_id)

    async def _is_settled(self, run_id: str) -> bool:
        run = await self.agent.load(run_id)
        status, _ = await read_status(self.agent.store, run)
        is_open = status in {RunStatus.RUNNING, RunStatus.IDLE, RunStatus.QUEUED} or run.awaits_tasks
        return not is_open or run_id in self._failures

    async def _describe_run(self, run: Run) -> dict[str, Any]:
        view = describe_run(run, *await read_status(self.agent.store, run))
        if not run.is_over and run.id in self._failures:
            view["trouble"] = self._failures[run.id]
        return view

    # Resources.

    @property
    def resource(self) -> Resource:
        """The runs, by their ids."""
        return Resource(
            uri=f"{RUN_URI_PREFIX}{{run_id}}",
            name="run",
            description=f"A run of the agent {self.agent.name!r}: its state, messages, pending items and cost.",
            mime_type="application/json",
            read=self._read_run,
        )

    async def _read_run(self, run_id: str) -> dict[str, Any]:
        try:
            run = await self._load_own(run_id)
        except RunNotFoundError as error:
            raise MCPError(m.INVALID_PARAMS, str(error), {"uri": f"{RUN_URI_PREFIX}{run_id}"}) from None
        before = max(0, len(run.messages) - MAX_MESSAGES)
        return await self._describe_run(run) | {
            "state": str(run.state),
            "prompt": [attrs.asdict(part) for part in run.header.prompt],
            "created_at": run.created_at,
            "updated_at": run.updated_at,
            "messages_before": before,
            "messages": [_shorten_json(message_to_json(message)) for message in run.messages[before:]],
            "cost": attrs.asdict(self.agent.cost(run)),
        }

    async def list_page(self, cursor: str | None) -> tuple[list[m.Resource], str | None]:
        """Return the newest runs, or those after a cursor, and the cursor of the next page.

        Raises:
            MCPError: when the cursor is invalid.
        """
        before, known = (None, 0) if cursor is None else _parse_cursor(cursor)
        where = Filter(agent=self.agent.name, before=before, purpose="")
        lines = (await self.agent.runs.list(where, limit=known + PAGE_SIZE))[known:]
        statuses = await list_statuses(self.agent.store, lines)
        resources = [
            m.Resource(
                uri=f"{RUN_URI_PREFIX}{line.id}",
                name=line.id,
                description=f"{status}, turn {line.turn}: {line.prompt}",
                mime_type="application/json",
            )
            for line, status in zip(lines, statuses, strict=True)
        ]
        if len(lines) < PAGE_SIZE:
            return resources, None
        last = lines[-1].created_at
        same = sum(line.created_at == last for line in lines)
        if before is not None and last == math.nextafter(before, -math.inf):
            same += known
        return resources, f"{last!r}:{same}"


def _shorten_json(value: Any) -> Any:
    """Return JSON values without provider-specific data, and with shortened texts."""
    if isinstance(value, dict):
        return {name: _shorten_json(each) for name, each in value.items() if name != "native"}
    if isinstance(value, list | tuple):
        return [_shorten_json(each) for each in value]
    if isinstance(value, str) and len(value) > MAX_MESSAGE_CHARS:
        return f"{value[:MAX_MESSAGE_CHARS]}\n[... {len(value) - MAX_MESSAGE_CHARS} more characters ...]"
    return value


def _parse_cursor(cursor: str) -> tuple[float, int]:
    """Return the creation time before which a page begins, and how many runs to skip, which earlier pages showed.

    Runs with the same creation time may be on both sides of a page's end.

    Raises:
        MCPError: when the cursor is invalid.
    """
    moment, _, known = cursor.partition(":")
    try:
        place = math.nextafter(float(moment), math.inf), int(known)
    except (ValueError, OverflowError):
        place = math.nan, 0
    if not math.isfinite(place[0]) or not 0 <= place[1] <= MAX_CURSOR_OFFSET:
        raise MCPError(m.INVALID_PARAMS, f"invalid cursor {cursor[:40]!r}: start again without a cursor")
    return place
