"""An agent as tools of a server: start a run, look at it, say something to it; and its runs as resources.

A run belongs to the store and not to a client. It is driven by a worker that the server brings along, so a client that
goes away ends nothing, and what a server that died has left is driven on by the next one.
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
from pydantic import Field

from agentfsm._runnable_agent import RunnableAgent
from agentfsm.core.codec import message_to_json
from agentfsm.core.errors import AgentError, ArgumentsError, MisuseError, RunNotFoundError
from agentfsm.core.machine import State
from agentfsm.core.messages import JSON, ErrorType, Outcome
from agentfsm.mcp.server.event_bus import EventBus
from agentfsm.mcp.server.resources import Resource
from agentfsm.ports.store import Filter, RunSummary
from agentfsm.tools.queue import result_text
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import RunContext, ToolReturn
from agentfsm.tools.tool import Tool, make_tool
from agentfsm.worker import Worker

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Lease

P = ParamSpec("P")

# Seconds that `start` waits for the end unless it is told otherwise: short runs need no second call.
START_WAIT_S: Final = 10.0
# The same of `result`: hosts cut calls off after 60 s.
RESULT_WAIT_S: Final = 30.0
MAX_WAIT_S: Final = 300.0
# Seconds between two looks at a run that another process may drive.
POLL_S: Final = 1.0
# Runs driven at once, as by `Agent.worker`.
MAX_PARALLEL_RUNS: Final = 100
# Runs that may have been created in the same moment.
MAX_SIMULTANEOUS_RUNS: Final = 20
# Runs in a page of the list.
PAGE_SIZE: Final = 50
# Runs of which it is kept why they could not be driven.
MAX_FAILURES: Final = 1_000
# Runs of one moment that a cursor may speak of.
MAX_CURSOR_OFFSET: Final = 10_000
# Messages shown of a run as a resource: the newest.
MAX_MESSAGES: Final = 500
# Characters of a text in one.
MAX_MESSAGE_CHARS: Final = 20_000
RUN_URI_PREFIX: Final = "agentfsm://runs/"

_RunId: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
_Wait: TypeAlias = Annotated[float, Field(ge=0, le=MAX_WAIT_S)]

_TEXT: Final[JSON] = {"type": "string"}
RUN_SCHEMA: Final[Mapping[str, JSON]] = {
    "type": "object",
    "properties": {
        "run_id": _TEXT,
        "status": {"type": "string", "enum": ["running", "waiting", "done", "stopped"]},
        "turn": {"type": "integer"},
        "answer": {"description": "The answer, once the status is done: text, or JSON where the agent has a type."},
        "stop_reason": _TEXT,
        "stop_message": _TEXT,
        "pending": {"type": "array", "items": {"type": "object"}},
        "tokens": {"type": "integer"},
        "trouble": {"type": "string", "description": "Why the run could not go on just now; that is tried again."},
    },
    "required": ["run_id", "status", "turn", "tokens"],
}
NOTED_SCHEMA: Final[Mapping[str, JSON]] = {
    "type": "object",
    "properties": {"run_id": _TEXT, "noted": _TEXT},
    "required": ["run_id", "noted"],
}


def _return_errors(function: Callable[P, Awaitable[Any]]) -> Callable[P, Awaitable[Any]]:
    """Let our own errors be results in their own words."""

    @functools.wraps(function)
    async def told(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await function(*args, **kwargs)
        except AgentError as error:
            return ToolReturn(outcome=Outcome.FAILED, content=str(error), error_type=ErrorType.TOOL)

    return told


@attrs.define(eq=False, repr=False)
class _WorkerScope:
    """A worker's time of work."""

    scope: anyio.CancelScope
    ended: anyio.Event = attrs.field(factory=anyio.Event)


@attrs.define(eq=False, repr=False, kw_only=True)
class ServedRuns:
    """The runs of one agent, for the clients of one server. All clients see all of them."""

    agent: RunnableAgent
    deps: Any = None
    """For every run, or a function of the run that makes them, plain or async."""

    description: str = ""
    """What the agent is for, in a sentence, for the model that chooses."""

    prefix: str = ""
    """Of the names of its tools."""

    bus: EventBus = attrs.field(factory=EventBus)
    """Tells clients who listen."""

    _live_runs: dict[str, Run] = attrs.field(factory=dict, init=False)
    """As they stand, those that are driven here."""

    _waiters: dict[str, set[anyio.Event]] = attrs.field(factory=dict, init=False)
    """By run: what those wait for who wait for its news."""

    _failures: dict[str, str] = attrs.field(factory=dict, init=False)
    """Why a run could not be driven here when that was last tried."""

    _is_ending: bool = attrs.field(default=False, init=False)
    """Whether the server ends, so that nobody may wait."""

    _workers: dict[Worker, _WorkerScope] = attrs.field(factory=dict, init=False)
    """Those who drive them: one for each lifespan of the server."""

    # Its life.

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Drive runs while the block lasts; those under way at its end are given back, for the next server."""
        self._is_ending = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_worker)
            yield
            tasks.cancel_scope.cancel()

    async def _run_worker(self) -> None:
        worker = Worker(
            agent=self.agent, execute=self._drive, deps=self.deps, parallel=MAX_PARALLEL_RUNS, poll_s=POLL_S
        )
        with anyio.CancelScope() as scope:
            shift = self._workers[worker] = _WorkerScope(scope)
            try:
                await worker.run(until_idle=False)
            finally:
                del self._workers[worker]
                shift.ended.set()

    def release_waiters(self) -> None:
        """Let nobody wait for a run any more: the server ends."""
        self._is_ending = True
        for run_id in tuple(self._waiters):
            self._notify_waiters(run_id)

    async def release_runs(self) -> None:
        """Give back the runs that are driven, and drive no more."""
        shifts = tuple(self._workers.values())
        for shift in shifts:
            shift.scope.cancel()
        for shift in shifts:
            await shift.ended.wait()

    async def _drive(self, run: Run, deps: Any, *, lease: Lease, on_run: Callable[[Run], None]) -> Run:
        run_id = run.id

        def see_and_show(run: Run) -> None:
            on_run(run)
            self._record_run(run)

        self._failures.pop(run_id, None)
        try:
            return await self.agent.driver.run_until_blocked(run, deps, lease=lease, on_run=see_and_show)
        except Exception as error:
            self._failures[run_id] = result_text.describe_error(error)
            if len(self._failures) > MAX_FAILURES:
                del self._failures[next(iter(self._failures))]
            raise
        finally:
            self._live_runs.pop(run_id, None)
            self._notify_waiters(run_id)

    def _record_run(self, run: Run) -> None:
        self._live_runs[run.id] = run
        self._notify_waiters(run.id)

    def _notify_waiters(self, run_id: str) -> None:
        for bell in self._waiters.get(run_id, ()):
            bell.set()
        self.bus.notify_resource_updated(f"{RUN_URI_PREFIX}{run_id}")

    @contextmanager
    def _waiter(self, run_id: str) -> Iterator[anyio.Event]:
        """Hang up what the next news of a run sets off."""
        bell, bells = anyio.Event(), self._waiters.setdefault(run_id, set())
        bells.add(bell)
        try:
            yield bell
        finally:
            bells.discard(bell)
            if not bells:
                self._waiters.pop(run_id, None)

    def _wake_workers(self) -> None:
        for worker in self._workers:
            worker.wake()

    # Its tools.

    def build_tools(self) -> tuple[ToolRegistry, dict[str, Mapping[str, JSON]]]:
        """Return the tools that clients have for the runs, and by name what each returns."""
        about = f" {self.description}" if self.description else ""
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
        """Give the agent a task, and wait a short while for its end.

        The run goes on by itself, also when nobody waits: ask for it later with `result`, by its run_id.

        Args:
            ctx: Takes the progress.
            prompt: The task, with all that the agent has to know of it.
            wait_s: Seconds to wait for the end.
            session: The name of a conversation: the run knows what was said in it.
            run_id: An id of your own; the same id and prompt again means the same run, and starts nothing.
        """
        self.agent.driver.check_price()
        if self.agent.driver.config.registry.sources:
            await self.agent.driver.config.registry.refresh()
        run = await self.agent.submit(prompt, id=run_id, session=session)
        self.bus.notify_resources_changed()
        self._wake_workers()
        return self._describe_run(await self._wait_until_settled(ctx, run.id, wait_s))

    async def send(self, run_id: _RunId, text: Annotated[str, Field(min_length=1)]) -> dict[str, str]:
        """Tell the agent more while a run of it is not over; it reads it at its next turn.

        Args:
            run_id: The run.
            text: What to tell it.
        """
        await self._load_own(run_id)
        await self.agent.runs.send(run_id, text)
        self._wake_workers()
        return {"run_id": run_id, "noted": "the agent reads it at its next turn"}

    async def status(self, run_id: _RunId) -> dict[str, Any]:
        """Tell how a run of the agent stands, at once: running, waiting (for what), done or stopped.

        Args:
            run_id: The run.
        """
        return self._describe_run(await self._load_own(run_id))

    async def result(self, ctx: RunContext[Any], run_id: _RunId, wait_s: _Wait = RESULT_WAIT_S) -> dict[str, Any]:
        """Wait until a run of the agent is over, or waits for a person, and return its answer.

        With the status `running` it is still at work: ask again. With `waiting` a person has to decide what is pending.

        Args:
            ctx: Takes the progress.
            run_id: The run.
            wait_s: Seconds to wait.
        """
        await self._load_own(run_id)
        return self._describe_run(await self._wait_until_settled(ctx, run_id, wait_s))

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
        """Pass on a person's decision on a call of the agent that waits: never decide yourself, ask the person.

        Args:
            run_id: The run, as `pending` names it.
            call_id: The call, as `pending` names it.
            decision: What the person said: approve or reject a call, or answer a question.
            by: Who the person is, for the record.
            text: The answer; or why it was rejected.
            arguments: Run the call with these in place of its own, if the person changed them.
            digest: The one in `pending`: the yes counts for what the person was shown, and for nothing else.
        """
        await self._load_own(run_id)
        if decision == "approve":
            await self.agent.runs.approve(run_id, call_id, by=by, arguments=arguments, digest=digest)
        elif decision == "reject":
            await self.agent.runs.reject(run_id, call_id, message=text, by=by)
        elif text:
            await self.agent.runs.answer(run_id, call_id, text, by=by)
        else:
            raise MisuseError("an answer needs its text: give it as text=")
        self._wake_workers()
        return {"run_id": run_id, "noted": f"{decision} by {by}"}

    async def _load_own(self, run_id: str) -> Run:
        """Return a run of this agent, or of one below it.

        Raises:
            RunNotFoundError: when the store holds none of that id, or it is another agent's.
        """
        run = await self.agent.load(run_id)
        header = run.header
        while header.agent != self.agent.name and header.parent is not None:
            header = await self.agent.runs.header(header.parent)
        if header.agent != self.agent.name:
            raise RunNotFoundError(f"there is no run {run_id!r} of {self.agent.name!r} in the store")
        return run

    async def _wait_until_settled(self, ctx: RunContext[Any], run_id: str, wait_s: float) -> Run:
        """Wait until nothing more happens by itself, or the time is up; tell what happens meanwhile."""
        told = ""
        with anyio.move_on_after(wait_s):
            while True:
                with self._waiter(run_id) as bell:
                    seen = self._live_runs.get(run_id)
                    if self._is_ending or (seen is None and await self._is_settled(run_id)):
                        break
                    if seen is not None and (news := _describe_progress(seen)) != told:
                        told = news
                        ctx.progress(news)
                    with anyio.move_on_after(POLL_S):
                        await bell.wait()
        return await self.agent.load(run_id)

    async def _is_settled(self, run_id: str) -> bool:
        run = await self.agent.load(run_id)
        if run.is_over or run_id in self._failures:
            return True
        if not run.is_waiting:
            return False
        newest_first = Filter(agent=self.agent.name, before=math.nextafter(run.created_at, math.inf))
        lines = await self.agent.runs.list(newest_first, limit=MAX_SIMULTANEOUS_RUNS)
        at = next((line.ready_at for line in lines if line.id == run_id), None)
        return at is None or at > await self.agent.store.now()

    def _describe_run(self, run: Run) -> dict[str, Any]:
        view: dict[str, Any] = {
            "run_id": run.id,
            "status": describe_status(run),
            "turn": run.turn,
            "tokens": run.usage.tokens,
        }
        if run.state is State.DONE:
            view["answer"] = _read_answer(run)
        elif run.stop_reason is not None:
            view |= {"stop_reason": str(run.stop_reason), "stop_message": run.stop_message}
        if run.pending:
            view["pending"] = [attrs.asdict(item) for item in run.pending]
        if not run.is_over and run.id in self._failures:
            view["trouble"] = self._failures[run.id]
        return view

    # Its runs as resources.

    @property
    def resource(self) -> Resource:
        """The runs, by their ids."""
        return Resource(
            uri=f"{RUN_URI_PREFIX}{{run_id}}",
            name="run",
            description=f"A run of the agent {self.agent.name!r}: its state, messages, what it waits for, its cost.",
            mime_type="application/json",
            read=self._read_run,
        )

    async def _read_run(self, run_id: str) -> dict[str, Any]:
        try:
            run = await self._load_own(run_id)
        except RunNotFoundError as error:
            raise MCPError(m.INVALID_PARAMS, str(error), {"uri": f"{RUN_URI_PREFIX}{run_id}"}) from None
        before = max(0, len(run.messages) - MAX_MESSAGES)
        return self._describe_run(run) | {
            "state": str(run.state),
            "prompt": [attrs.asdict(part) for part in run.header.prompt],
            "created_at": run.created_at,
            "updated_at": run.updated_at,
            "messages_before": before,
            "messages": [_shorten_json(message_to_json(message)) for message in run.messages[before:]],
            "cost": attrs.asdict(self.agent.cost(run)),
        }

    async def list_page(self, cursor: str | None) -> tuple[list[m.Resource], str | None]:
        """Return the newest runs, or those that are older than what a cursor names; and the cursor of the rest.

        Raises:
            MCPError: when the cursor is none.
        """
        before, known = (None, 0) if cursor is None else _parse_cursor(cursor)
        where = Filter(agent=self.agent.name, before=before)
        lines = (await self.agent.runs.list(where, limit=known + PAGE_SIZE))[known:]
        if len(lines) < PAGE_SIZE:
            return [_to_mcp_resource(line) for line in lines], None
        last = lines[-1].created_at
        same = sum(line.created_at == last for line in lines)
        if before is not None and last == math.nextafter(before, -math.inf):
            same += known
        return [_to_mcp_resource(line) for line in lines], f"{last!r}:{same}"


def describe_status(run: Run) -> str:
    """Return how a run stands, in a word."""
    if run.is_over:
        return "done" if run.state is State.DONE else "stopped"
    return "waiting" if run.is_waiting else "running"


def _read_answer(run: Run) -> Any:
    """Return the answer as JSON values; as it was written, where the agent's type has changed since."""
    try:
        value = run.output
    except ArgumentsError:
        return run.answer
    return value if isinstance(value, str) else json.loads(result_text.render_text(value))


def _describe_progress(run: Run) -> str:
    names = ", ".join(entry.call.name for entry in run.open)
    return f"turn {run.turn}: {names or run.state}"


def _shorten_json(value: Any) -> Any:
    """Return JSON values without what only a provider understands, long texts cut."""
    if isinstance(value, dict):
        return {name: _shorten_json(each) for name, each in value.items() if name != "native"}
    if isinstance(value, list | tuple):
        return [_shorten_json(each) for each in value]
    if isinstance(value, str) and len(value) > MAX_MESSAGE_CHARS:
        return f"{value[:MAX_MESSAGE_CHARS]}\n[... {len(value) - MAX_MESSAGE_CHARS} more characters ...]"
    return value


def _parse_cursor(cursor: str) -> tuple[float, int]:
    """Return where a page begins: before which moment, and how many of its newest lines were on earlier pages.

    Runs that were created at one moment may stand on both sides of a page's end.

    Raises:
        MCPError: when the cursor is none.
    """
    moment, _, known = cursor.partition(":")
    try:
        place = math.nextafter(float(moment), math.inf), int(known)
    except (ValueError, OverflowError):
        place = math.nan, 0
    if not math.isfinite(place[0]) or not 0 <= place[1] <= MAX_CURSOR_OFFSET:
        raise MCPError(m.INVALID_PARAMS, f"there is no page {cursor[:40]!r}: begin anew without a cursor")
    return place


def _to_mcp_resource(line: RunSummary) -> m.Resource:
    status = "waiting" if line.waiting else str(line.state)
    return m.Resource(
        uri=f"{RUN_URI_PREFIX}{line.id}",
        name=line.id,
        description=f"{status}, turn {line.turn}: {line.prompt}",
        mime_type="application/json",
    )
