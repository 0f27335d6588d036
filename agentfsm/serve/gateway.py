"""The gateway: operations of HTTP clients on the runs of agents, and the worker that executes these runs."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from math import inf, isfinite, nextafter
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
from starlette.responses import JSONResponse, Response

from agentfsm.agent import WORKER_PARALLEL, WORKER_POLL_S, Agent, new_id
from agentfsm.core.errors import AgentError, ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.machine import State
from agentfsm.ports.store import Filter
from agentfsm.serve.event_stream import DeltaHub, RunEventStream, parse_position
from agentfsm.serve.run_documents import build_agent_document, build_row_document, build_run_document
from agentfsm.worker import Worker

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from starlette.datastructures import QueryParams
    from starlette.requests import Request

    from agentfsm.core.header import Header
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Lease
    from agentfsm.runs import Runs
    from agentfsm.serve import bodies
    from agentfsm.serve.access import Caller

_log = logging.getLogger("agentfsm.serve")

# Rows in a page of the list.
PAGE_SIZE: Final = 50
MAX_PAGE_SIZE: Final = 200
# Rows that one request reads from the store, at most, to find those that the caller may see.
MAX_SCANNED: Final = 1_000
# Ids that a client may give: each stands in a path as it is.
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
# Seconds after which a store that does not answer counts as not ready.
READY_TIMEOUT_S: Final = 2.0


class ForbiddenError(AgentError):
    """The caller may see the run, but not do this with it."""


@attrs.define(eq=False, repr=False, kw_only=True)
class Gateway:
    """Operations of HTTP clients. Each takes the request, its caller and its body, and returns the response."""

    agents: Mapping[str, Agent[Any]]
    """Agents by name. They share one store."""

    deps: Any = None
    """Dependencies of every run, or a function, plain or async, that takes the run and returns them."""

    parallel: int = WORKER_PARALLEL
    """Runs of each agent that this process executes at once. 0: none; workers execute them."""

    hub: DeltaHub = attrs.field(factory=DeltaHub, init=False)
    streams: set[anyio.CancelScope] = attrs.field(factory=set, init=False)
    _tasks: TaskGroup | None = attrs.field(default=None, init=False)
    """Tasks of the lifespan; None outside of it."""

    @property
    def runs(self) -> Runs:
        """Client for the runs in the store."""
        return next(iter(self.agents.values())).runs

    # Execution.

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Execute runs. At the end active runs are released to the store, and the next server continues them."""
        async with anyio.create_task_group() as self._tasks:
            for agent in self.agents.values() if self.parallel else ():
                worker = Worker(
                    agent=agent,
                    execute=partial(self._execute, agent),
                    deps=self.deps,
                    parallel=self.parallel,
                    poll_s=WORKER_POLL_S,
                )
                self._tasks.start_soon(partial(worker.run, until_idle=False))
            try:
                yield
            finally:
                self._tasks.cancel_scope.cancel()

    def close_streams(self) -> None:
        """End the event streams, whose clients connect to the next server."""
        for scope in tuple(self.streams):
            scope.cancel()

    async def _execute(
        self,
        agent: Agent[Any],
        run: Run,
        deps: Any,
        *,
        lease: Lease | None = None,
        on_run: Callable[[Run], None] | None = None,
        resume: bool = False,
    ) -> Run:
        publish = partial(self.hub.publish, run.id)
        return await agent.driver.run_until_blocked(
            run, deps, lease=lease, on_event=publish, on_run=on_run, resume=resume
        )

    # Start and read runs.

    async def create_run(self, request: Request, caller: Caller, body: bodies.StartBody) -> Response:
        """Start a run. `Idempotency-Key` is the id of the run: a second request with it returns the same run."""
        agent = self._find_agent(body.agent)
        key = request.headers.get("idempotency-key")
        if key is not None and _ID.fullmatch(key) is None:
            raise MisuseError(
                "`Idempotency-Key` must have 1 to 200 letters, digits and ._:-, the first a letter or digit"
            )
        run_id = key or new_id()
        known = await self._find_header(run_id) if key else None
        if known is not None and not (caller.can_see(known) and known.agent == agent.name):
            raise _taken_key_error()
        run = agent.start(
            body.prompt,
            id=run_id,
            session=None if body.session is None else caller.qualify_session(body.session),
            user=caller.user,
            tenant=caller.tenant,
            roles=caller.roles,
            metadata=body.metadata,
        )
        await agent.submit(run)
        if known is None and not caller.can_see(await self.runs.header(run_id)):  # somebody else was faster
            raise _taken_key_error()
        found = await self._wait_for(run_id, body.wait_s)
        headers = {"location": f"/v1/runs/{run_id}"}
        return JSONResponse(build_run_document(found), 200 if known is not None else 201, headers)

    async def list_runs(self, request: Request, caller: Caller, _body: object) -> Response:
        """List runs, newest first: of the caller, or with the scope "approve" of the tenant."""
        query = request.query_params
        limit = max(1, _read_number(query, "limit", PAGE_SIZE, MAX_PAGE_SIZE))
        session = _read_text(query, "session")
        before, last_id = _parse_cursor(_read_text(query, "after"))
        where = Filter(
            agent=_read_text(query, "agent"),
            user=_read_text(query, "user") if caller.allows("approve") else caller.user,
            session=None if session is None else caller.qualify_session(session),
            state=None if "state" not in query else _read_state(query["state"]),
            waiting=None if "waiting" not in query else query["waiting"] == "true",
            before=before,
        )
        rows, scanned, more = [], 0, None
        is_begun = before is None
        async for row in self.runs.iterate(where):
            if not is_begun and nextafter(row.created_at, inf) == before:
                is_begun = row.id == last_id
                continue
            is_begun = True
            scanned += 1
            if await self._may_list(row.id, caller):
                rows.append(row)
            if len(rows) == limit or scanned == MAX_SCANNED:
                more = f"{row.created_at!r}:{row.id}"
                break
        return JSONResponse({"runs": [build_row_document(row) for row in rows], "after": more})

    async def get_run(self, request: Request, caller: Caller, _body: object) -> Response:
        """Return a run; with `wait_s`, up to 60 seconds later, once it is over or waits."""
        header = await self._open(request, caller)
        wait_s = _read_number(request.query_params, "wait_s", 0, 60)
        return JSONResponse(build_run_document(await self._wait_for(header.id, wait_s)))

    async def stream_events(self, request: Request, caller: Caller, _body: object) -> Response | RunEventStream:
        """Stream the events of a run and its sub-agents, as server-sent events after `Last-Event-ID` or `after`."""
        header = await self._open(request, caller)
        position = request.headers.get("last-event-id") or request.query_params.get("after", "")
        stream = RunEventStream(
            runs=self.runs,
            run_id=header.id,
            root_id=(await self.runs.root(header.id)).id,
            versions=parse_position(position, header.id),
            hub=self.hub,
            scopes=self.streams,
        )
        await stream.check()
        return stream

    async def list_agents(self, _request: Request, _caller: Caller, _body: object) -> Response:
        """List the agents of the server, with their tools."""
        return JSONResponse({"agents": [build_agent_document(each) for each in self.agents.values()]})

    # Control runs.

    async def send_input(self, request: Request, caller: Caller, body: bodies.InputBody) -> Response:
        """Send a run input, which its model reads at the next turn."""
        header = await self._open(request, caller, is_control=True)
        await self.runs.send(header.id, body.text, key=body.key, priority=body.priority)
        return await self._accept(header.id)

    async def approve(self, request: Request, caller: Caller, body: bodies.ApproveBody) -> Response:
        """Approve a call that waits."""
        header = await self._open(request, caller)
        tool_run = await self._find_waiting_run(header, body.call_id)
        await self.runs.approve(tool_run, body.call_id, by=caller.user, arguments=body.arguments, digest=body.digest)
        return await self._accept(header.id)

    async def reject(self, request: Request, caller: Caller, body: bodies.RejectBody) -> Response:
        """Reject a call that waits; the model reads the reason."""
        header = await self._open(request, caller)
        tool_run = await self._find_waiting_run(header, body.call_id)
        await self.runs.reject(tool_run, body.call_id, by=caller.user, message=body.message)
        return await self._accept(header.id)

    async def answer(self, request: Request, caller: Caller, body: bodies.AnswerBody) -> Response:
        """Answer a question, or give the result of a call that comes from outside."""
        header = await self._open(request, caller)
        tool_run = await self._find_waiting_run(header, body.call_id)
        await self.runs.answer(
            tool_run,
            body.call_id,
            body.content,
            failed=body.failed,
            declined=body.declined,
            by=caller.user,
            digest=body.digest,
        )
        return await self._accept(header.id)

    async def settle(self, request: Request, caller: Caller, body: bodies.SettleBody) -> Response:
        """Record the outcome of a call that was in flight when its worker died."""
        header = await self._open(request, caller)
        tool_run = await self._find_waiting_run(header, body.call_id)
        await self.runs.settle(
            tool_run, body.call_id, result=body.result, failed=body.failed, rerun=body.rerun, by=caller.user
        )
        return await self._accept(header.id)

    async def pause(self, request: Request, caller: Caller, body: bodies.StopBody) -> Response:
        """Pause a run between two steps."""
        header = await self._open(request, caller, is_control=True)
        await self.runs.pause(header.id, by=caller.user, message=body.message)
        return await self._accept(header.id)

    async def resume(self, request: Request, caller: Caller, _body: bodies.EmptyBody) -> Response:
        """End the pause of a run."""
        header = await self._open(request, caller, is_control=True)
        if self._tasks is None or not self.parallel:
            raise ConflictError("this server executes no runs: resume the run with `agentfsm resume`")
        if header.parent is not None:
            raise MisuseError(f"run {header.id!r} works for run {header.parent!r}: resume that one")
        self._tasks.start_soon(self._resume, self._find_agent(header.agent), header.id)
        return await self._accept(header.id)

    async def _resume(self, agent: Agent[Any], run_id: str) -> None:
        try:
            run = await agent.load(run_id)
            deps = self.deps(run) if callable(self.deps) else self.deps
            deps = await deps if isinstance(deps, Awaitable) else deps
            await self._execute(agent, run, deps, resume=True)
        except AgentError as error:
            _log.warning("run %s was not resumed: %s", run_id, error)
        except Exception:  # noqa: BLE001  an error in the user's code must not stop the server
            _log.exception("run %s was not resumed", run_id)

    async def cancel(self, request: Request, caller: Caller, body: bodies.StopBody) -> Response:
        """End a run and the runs of its sub-agents."""
        header = await self._open(request, caller, is_control=True)
        await self.runs.cancel(header.id, by=caller.user, message=body.message)
        return await self._accept(header.id)

    async def fork(self, request: Request, caller: Caller, body: bodies.ForkBody) -> Response:
        """Start a run from the first events of another."""
        header = await self._open(request, caller, is_control=True)
        agent = self._find_agent(header.agent)
        run = await agent.fork(header.id, at=body.at, prompt=body.prompt)
        return JSONResponse(build_run_document(run), 201, {"location": f"/v1/runs/{run.id}"})

    async def give_feedback(self, request: Request, caller: Caller, body: bodies.FeedbackBody) -> Response:
        """Rate a run, also if it is over."""
        header = await self._open(request, caller)
        await self.runs.feedback(header.id, rating=body.rating, comment=body.comment, by=caller.user)
        return Response(status_code=204)

    async def delete(self, request: Request, caller: Caller, _body: object) -> Response:
        """Delete a run that no worker executes, with the runs of its sub-agents."""
        header = await self._open(request, caller)
        await self.runs.delete(header.id)
        return Response(status_code=204)

    # State of the server.

    async def is_ready(self) -> bool:
        """Return whether the store answers and the worker is running."""
        with anyio.move_on_after(READY_TIMEOUT_S):
            try:
                await self.runs.store.now()
            except AgentError as error:
                _log.warning("the server is not ready: %s", error)
                return False
            return self._tasks is not None
        return False

    # Access.

    def _find_agent(self, name: str | None) -> Agent[Any]:
        if name is None and len(self.agents) == 1:
            return next(iter(self.agents.values()))
        if name is None or name not in self.agents:
            raise MisuseError(f"name one of the server's agents as `agent`: {', '.join(self.agents)}")
        return self.agents[name]

    async def _find_header(self, run_id: str) -> Header | None:
        try:
            return await self.runs.header(run_id)
        except RunNotFoundError:
            return None

    async def _open(self, request: Request, caller: Caller, *, is_control: bool = False) -> Header:
        """Return the header of the run of a request.

        Args:
            request: The request.
            caller: Its caller.
            is_control: Whether the run is controlled: only its own user and administrators may.

        Raises:
            RunNotFoundError: when there is no such run, or the caller may not see it, so that it does not learn of it.
            ForbiddenError: when the caller may see but not control the run.
        """
        run_id = request.path_params["run_id"]
        header = await self._find_header(run_id) if run_id.isprintable() else None
        if header is None or not caller.can_see(header) or await self._find_root_agent(header) not in self.agents:
            raise RunNotFoundError(f"there is no run {run_id!r}")
        if is_control and header.user != caller.user and not caller.allows("admin"):
            raise ForbiddenError("this is another user's run: its own user or an administrator may do this")
        return header

    async def _find_root_agent(self, header: Header) -> str:
        return header.agent if header.parent is None else (await self.runs.root(header.id)).agent

    async def _may_list(self, run_id: str, caller: Caller) -> bool:
        header = await self._find_header(run_id)
        return header is not None and caller.can_see(header) and await self._find_root_agent(header) in self.agents

    async def _find_waiting_run(self, header: Header, call_id: str) -> str:
        """Return the id of the run that waits for a decision on a call: the run, or that of a sub-agent."""
        run = await self.runs.load(header.id)
        return next((item.run_id for item in run.pending if item.call_id == call_id), header.id)

    async def _wait_for(self, run_id: str, wait_s: float) -> Run:
        if wait_s:
            with anyio.move_on_after(wait_s):
                await self.runs.wait(run_id)
        header = await self.runs.header(run_id)
        agent = self.agents.get(header.agent)
        return await (self.runs if agent is None else agent).load(run_id)

    async def _accept(self, run_id: str) -> Response:
        return JSONResponse(build_run_document(await self._wait_for(run_id, 0)), 202)


def _taken_key_error() -> ConflictError:
    return ConflictError("this `Idempotency-Key` is taken: choose another one")


def _read_text(query: QueryParams, name: str) -> str | None:
    text = query.get(name)
    if text is not None and not text.isprintable():
        raise MisuseError(f"{name}: give printable characters only")
    return text


def _parse_cursor(text: str | None) -> tuple[float | None, str]:
    """Return the time of creation before which a page begins, and the last run of the page before, which has this time.

    Raises:
        MisuseError: when the cursor is invalid.
    """
    if text is None:
        return None, ""
    moment, _, run_id = text.partition(":")
    try:
        created_at = float(moment)
    except ValueError:
        created_at = inf
    if not (isfinite(created_at) and run_id):
        raise MisuseError(f"after={text[:40]!r}: give the `after` of the page before")
    return nextafter(created_at, inf), run_id


def _read_number(query: QueryParams, name: str, default: int, high: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(high)) and int(text) <= high):
        raise MisuseError(f"{name}={text[:20]!r}: give a whole number up to {high}")
    return int(text)


def _read_state(text: str) -> State:
    if text not in set(State):
        raise MisuseError(f"state={text[:20]!r}: give one of {', '.join(State)}")
    return State(text)
