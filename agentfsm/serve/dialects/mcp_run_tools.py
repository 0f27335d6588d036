"""Tools of MCP clients for the runs of a gateway. Each call has a caller, as each request of the gateway's own API."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, ParamSpec, Required, TypeAlias, cast

import anyio
import attrs
from pydantic import Field
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from agentfsm.agents.run_reports import describe_progress, describe_run
from agentfsm.core.errors import AgentError, MisuseError, first_error
from agentfsm.core.labels import FROM_MODEL
from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.journal.run_status import RunStatus, list_statuses, read_status
from agentfsm.ports.store import Filter, Store
from agentfsm.serve.access import Caller
from agentfsm.serve.errors import SERVER_FAILED, explain_error
from agentfsm.serve.run_control import answer_call, approve_call, cancel_run, check_scope, reject_call, send_text
from agentfsm.serve.run_pages import MAX_PAGE_SIZE, find_page
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import RunContext, ToolReturn
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.serve.gateway import Gateway

_log = logging.getLogger("agentfsm.serve")

# Default seconds that `start` waits for the end of the run: short runs need no second call.
START_WAIT_S: Final = 10.0
# Default seconds that `result` waits: hosts cancel calls after 60 s.
RESULT_WAIT_S: Final = 30.0
MAX_WAIT_S: Final = 300.0
# Seconds that a call may take beyond its wait.
TIMEOUT_S: Final = 30.0
# Calls of all clients in progress. A call that waits for a run costs a task.
MAX_CALLS: Final = 1_000
# Runs in a page of the list.
PAGE_SIZE: Final = 20

P = ParamSpec("P")

_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
_Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=1_000_000)]
_Note: TypeAlias = Annotated[str, Field(max_length=10_000)]
_Wait: TypeAlias = Annotated[float, Field(ge=0, le=MAX_WAIT_S)]
_Context: TypeAlias = RunContext[Caller]


class RunDocument(TypedDict, total=False):
    """A run."""

    run_id: Required[str]
    status: Required[RunStatus]
    turn: Required[int]
    tokens: Required[int]
    answer: Any
    not_done: str
    stop_reason: str
    stop_message: str
    standstill: str
    pending: list[dict[str, Any]]


class RunRow(TypedDict):
    """A run in a list."""

    run_id: str
    agent: str
    user: str | None
    status: RunStatus
    turn: int
    prompt: str
    created_at: float


class RunPage(TypedDict):
    """A page of a list."""

    runs: list[RunRow]
    after: str | None


class Noted(TypedDict):
    """Confirmation that something was stored for a run."""

    run_id: str
    noted: str


def _explain_errors(function: Callable[P, Awaitable[Any]]) -> Callable[P, Awaitable[Any]]:
    """Convert errors to failed results, with the texts of the gateway's own API."""

    @functools.wraps(function)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await function(*args, **kwargs)
        except AgentError as error:
            text = explain_error(error).message
        except Exception:  # noqa: BLE001  the client must not be shown what a store or a callback says
            _log.exception("a call of an MCP client failed")
            text = SERVER_FAILED
        return ToolReturn(outcome=Outcome.FAILED, content=text, error_type=ErrorType.TOOL)

    return wrapper


@attrs.define(eq=False, repr=False)
class CallerRunTools:
    """Tools that start, read and control runs. `ctx.deps` is the caller; another tenant's run does not exist for it."""

    gateway: Gateway

    _waits: set[anyio.CancelScope] = attrs.field(factory=set, init=False)
    """Scopes of the calls that wait for a run."""

    def build_tools(self) -> ToolRegistry:
        """Return the tools."""
        long_s = MAX_WAIT_S + TIMEOUT_S
        made = [
            _build_tool(self.start, timeout_s=long_s),
            _build_tool(self.send),
            _build_tool(self.status, read_only=True),
            _build_tool(self.result, read_only=True, timeout_s=long_s),
            _build_tool(self.list_runs, name="list", read_only=True),
            _build_tool(self.approve),
            _build_tool(self.cancel),
        ]
        return ToolRegistry.of(made)

    def release_waiters(self) -> None:
        """End all waiting for runs, since the server shuts down: the calls return the present states."""
        for scope in tuple(self._waits):
            scope.cancel()

    async def start(
        self,
        ctx: _Context,
        prompt: _Text,
        agent: _Name | None = None,
        *,
        wait_s: _Wait = START_WAIT_S,
        session: _Name | None = None,
        key: _Name | None = None,
    ) -> RunDocument:
        """Give an agent a task, and wait a short time for its result.

        The run continues after that: get its result later with `result` and its run_id.

        Args:
            ctx: Has the caller, and receives the progress.
            prompt: The task, with everything that the agent needs to know.
            agent: Name of the agent; it may be left out if the server has one.
            wait_s: Seconds to wait for the result.
            session: Name of a conversation; the run continues it.
            key: A key of your choice; a second call with the same key and prompt returns the same run.
        """
        check_scope(ctx.deps, "run")
        started, _ = await self.gateway.start_run(
            ctx.deps, prompt, agent=agent, session=session, key=key, labels=FROM_MODEL
        )
        return await self._wait_for(ctx, started.id, wait_s)

    async def send(self, ctx: _Context, run_id: _Name, text: _Text) -> Noted:
        """Send the agent of a run a message; it reads the message at its next turn.

        Args:
            ctx: Has the caller.
            run_id: Id of the run.
            text: The message.
        """
        await send_text(self.gateway, ctx.deps, run_id, text, labels=FROM_MODEL)
        return {"run_id": run_id, "noted": "the agent reads it at its next turn"}

    async def status(self, ctx: _Context, run_id: _Name) -> RunDocument:
        """Return the status of a run without waiting: running, idle, queued, waiting, paused, done or failed.

        A run that is idle or queued stands still until a worker executes it: `standstill` says how it continues.

        Args:
            ctx: Has the caller.
            run_id: Id of the run.
        """
        return await self._wait_for(ctx, run_id, 0)

    async def result(self, ctx: _Context, run_id: _Name, wait_s: _Wait = RESULT_WAIT_S) -> RunDocument:
        """Wait until a run is over, or waits for a person, and return its answer.

        With `running`, `idle` or `queued` it is not finished: call again. With `waiting` a person has to decide what is
        pending.

        Args:
            ctx: Has the caller, and receives the progress.
            run_id: Id of the run.
            wait_s: Seconds to wait.
        """
        return await self._wait_for(ctx, run_id, wait_s)

    async def list_runs(
        self,
        ctx: _Context,
        agent: _Name | None = None,
        *,
        session: _Name | None = None,
        waiting: bool | None = None,
        limit: Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE,
        after: _Name | None = None,
    ) -> RunPage:
        """List your runs, newest first; with the scope "approve" those of all users of your tenant.

        Args:
            ctx: Has the caller.
            agent: Name of the agent.
            session: Name of a conversation.
            waiting: Whether the runs wait, such as for a person.
            limit: Maximum of runs.
            after: `after` of the page before.
        """
        rows, more = await find_page(
            self.gateway,
            ctx.deps,
            Filter(agent=agent, session=session, waiting=waiting),
            limit=limit,
            after=after,
        )
        statuses = await list_statuses(self.gateway.runs.store, rows)
        runs: list[RunRow] = [
            {
                "run_id": row.id,
                "agent": row.agent,
                "user": row.user,
                "status": status,
                "turn": row.turn,
                "prompt": row.prompt,
                "created_at": row.created_at,
            }
            for row, status in zip(rows, statuses, strict=True)
        ]
        return {"runs": runs, "after": more}

    async def approve(
        self,
        ctx: _Context,
        run_id: _Name,
        call_id: _Name,
        decision: Literal["approve", "reject", "answer", "decline"],
        *,
        text: Annotated[str, Field(max_length=1_000_000)] = "",
        answers: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
        digest: _Name | None = None,
        shown_run: _Name | None = None,
    ) -> Noted:
        """Submit a person's decision on a waiting call: never decide yourself, ask the person.

        The decision is recorded as that of the user whose key this client has.

        Args:
            ctx: Has the caller.
            run_id: Id of the run.
            call_id: Id of the call, from `pending`.
            decision: The person's decision: approve or reject a call, answer a question or decline to.
            text: The answer, or the reason for a rejection.
            answers: The answer to a question that has a schema, as an object, in place of text.
            arguments: New arguments of the call, if the person changed them.
            digest: The digest from `pending`, so that only the call that the person was shown is approved. An approval
                needs it.
            shown_run: The `run_id` from `pending`, if calls of several runs have this id.
        """
        gateway, caller = self.gateway, ctx.deps
        await gateway.open_run(run_id, caller)  # a flaw of the decision must not tell that the run exists
        if decision == "approve":
            if digest is None:
                raise MisuseError("an approval needs the digest of the call that the person saw: see `pending`")
            await approve_call(
                gateway, caller, run_id, call_id, digest=digest, shown_run=shown_run, arguments=arguments
            )
        elif decision == "reject":
            await reject_call(gateway, caller, run_id, call_id, shown_run=shown_run, message=text)
        elif decision == "decline":
            await answer_call(gateway, caller, run_id, call_id, None, digest=digest, shown_run=shown_run, declined=True)
        elif not (text or answers):
            raise MisuseError("decision 'answer' needs the answer: give it as text=, or answers= if it has a schema")
        else:
            await answer_call(gateway, caller, run_id, call_id, answers or text, digest=digest, shown_run=shown_run)
        return {"run_id": run_id, "noted": f"{decision} by {caller.user}"}

    async def cancel(self, ctx: _Context, run_id: _Name, message: _Note = "") -> Noted:
        """End a run and the runs of its sub-agents.

        Args:
            ctx: Has the caller.
            run_id: Id of the run.
            message: The reason, for people.
        """
        await cancel_run(self.gateway, ctx.deps, run_id, message=message)
        return {"run_id": run_id, "noted": f"cancelled by {ctx.deps.user}"}

    # Tasks.

    start_tool = "start"
    long_tools: Mapping[str, Any] = MappingProxyType({})

    @property
    def store(self) -> Store:
        """Store of the runs."""
        return self.gateway.runs.store

    async def load_task(self, caller: Caller, run_id: str) -> Run:
        """Return a run that the caller may see."""
        return await self.gateway.load(await self.gateway.open_run(run_id, caller))

    async def describe_task(self, run: Run) -> dict[str, Any]:
        """Return a run as `result` does."""
        return describe_run(run, *await read_status(self.store, run))

    async def decide(
        self, caller: Caller, _run: Run, item: Pending, given: bool | str | Mapping[str, Any] | None
    ) -> None:
        """Post a decision as the caller."""
        if item.kind is not PendingKind.APPROVAL:
            assert not isinstance(given, bool)  # it is no approval  # noqa: S101
            await answer_call(
                self.gateway,
                caller,
                item.run_id,
                item.call_id,
                given,
                digest=item.digest or None,
                declined=given is None,
            )
        elif given:
            await approve_call(self.gateway, caller, item.run_id, item.call_id, digest=item.digest)
        else:
            await reject_call(self.gateway, caller, item.run_id, item.call_id)

    async def cancel_task(self, caller: Caller, run: Run) -> None:
        """End a run as the caller."""
        await cancel_run(self.gateway, caller, run.id)

    async def _wait_for(self, ctx: _Context, run_id: str, wait_s: float) -> RunDocument:
        """Return a run once it is over or waits, at the latest after `wait_s` seconds; report progress meanwhile."""
        header = await self.gateway.open_run(run_id, ctx.deps)
        if wait_s:
            with anyio.move_on_after(wait_s) as scope:
                self._waits.add(scope)
                try:
                    await self._wait_and_report(ctx, await self.gateway.load(header))
                finally:
                    self._waits.discard(scope)
        run = await self.gateway.load(header)
        return cast("RunDocument", describe_run(run, *await read_status(self.gateway.runs.store, run)))

    async def _wait_and_report(self, ctx: _Context, run: Run) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._report, ctx, run)
                await self.gateway.runs.wait(run.id)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _report(self, ctx: _Context, run: Run) -> None:
        reported = ""
        async for item in self.gateway.runs.events(run.id, after=run.version):
            run = run.fold((item.event,))
            if (progress := describe_progress(run)) != reported:
                reported = progress
                ctx.progress(progress)


def _build_tool(function: Callable[..., Awaitable[Any]], **declared: Any) -> Tool[..., Any]:
    return make_tool(_explain_errors(function), concurrency_safe=True, **declared)
