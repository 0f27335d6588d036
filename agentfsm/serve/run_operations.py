"""Operations on runs: start, read, follow, decide and control."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, get_args

import attrs
from starlette.responses import Response

from agentfsm._lib.concurrency import start_in_thread
from agentfsm.agents.admission import admit, admit_answer
from agentfsm.agents.agent_fields import new_id
from agentfsm.core.errors import ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.inbox import Input
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.run_ids import build_key_id
from agentfsm.engine.execution.allowances import build_document
from agentfsm.ports.store import Filter, RunOrder
from agentfsm.serve import bodies
from agentfsm.serve.agent_documents import build_agent_document
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.errors import ForbiddenError
from agentfsm.serve.event_stream import JournalEncoder, RunEventStream, parse_position
from agentfsm.serve.fork_edits import has_edits, parse_edits
from agentfsm.serve.gateway import check_key, taken_key_error
from agentfsm.serve.queries import read_amount, read_choice, read_number, read_text, read_traceparent
from agentfsm.serve.rate_limits import NO_LIMITS
from agentfsm.serve.run_control import answer_call, approve_call, cancel_run, decide_calls, reject_call, send_text
from agentfsm.serve.run_documents import (
    JSONDocument,
    build_past_document,
    build_row_documents,
    build_run_document,
    locate_run,
)
from agentfsm.serve.run_pages import MAX_PAGE_SIZE, PAGE_SIZE, count_runs, find_page
from agentfsm.serve.stream_tokens import create_stream_token

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway

# Start and read runs.


async def create_run(gateway: Gateway, request: Request, caller: Caller, body: bodies.StartBody) -> Response:
    """Start a run. A second request of the user with the same `Idempotency-Key` returns the same run.

    `Location` and `id` name the run.

    `traceparent` names the span that the run is below, unless the server itself is traced: then it is the server's.
    """
    started, is_new = await gateway.start_run(
        caller,
        bodies.read_prompt(body.prompt),
        agent=body.agent,
        session=body.session,
        metadata=body.metadata,
        key=request.headers.get("idempotency-key"),
        traceparent=read_traceparent(request),
    )
    found = await gateway.wait_for(started.id, body.wait_s) if body.wait_s else started
    return await _describe_start(gateway, request, found, 201 if is_new else 200)


async def list_runs(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """List runs of the caller, or with the scope "approve" of the tenant, newest first or in another `order`.

    `since` and `before` are seconds since 1970. With `total=true`, `total` is the number of runs on all pages.
    """
    query = request.query_params
    texts: dict[str, Any] = {name: read_text(query, name) for name in _TEXTS}
    amounts: dict[str, Any] = {name: read_amount(query, name) for name in _AMOUNTS}
    where = Filter(
        **texts,
        **amounts,
        state=read_choice(query, "state", State),
        stop_reason=read_choice(query, "stop_reason", StopReason),
        waiting=None if "waiting" not in query else query["waiting"] == "true",
        parent="" if query.get("subagents") == "false" else None,
    )
    order = read_choice(query, "order", _ORDERS) or "newest"
    limit = max(1, read_number(query, "limit", PAGE_SIZE, MAX_PAGE_SIZE))
    rows, after = await find_page(gateway, caller, where, order=order, limit=limit, after=read_text(query, "after"))
    total = await count_runs(gateway, caller, where, order) if query.get("total") == "true" else None
    runs = await build_row_documents(gateway.runs.store, rows)
    return JSONDocument({"runs": runs, "after": after} | ({"total": total} if "total" in query else {}))


async def get_run(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return a run, at the version `at`; or with `wait_s`, up to 60 seconds later, once it is over or waits."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    if "at" in request.query_params:
        at = read_number(request.query_params, "at", 0, 10**12 - 1)
        return JSONDocument(build_past_document(await gateway.load(header, at)))
    wait_s = read_number(request.query_params, "wait_s", 0, 60)
    return JSONDocument(await build_run_document(gateway.runs.store, await gateway.wait_for(header.id, wait_s)))


async def stream_events(gateway: Gateway, request: Request, caller: Caller, _body: object) -> RunEventStream:
    """Stream the events of a run and its sub-agents, as server-sent events after `Last-Event-ID` or `after`."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    position = request.headers.get("last-event-id") or request.query_params.get("after", "")
    return await gateway.open_stream(header.id, parse_position(position, header.id), JournalEncoder(caller))


async def list_agents(gateway: Gateway, _request: Request, _caller: Caller, _body: object) -> Response:
    """List the agents of the server, with their tools."""
    return JSONDocument({"agents": [build_agent_document(each) for each in gateway.agents.values()]})


# Control runs.


async def send_input(gateway: Gateway, request: Request, caller: Caller, body: bodies.InputBody) -> Response:
    """Send a run input, which its model reads at the next turn."""
    run_id = request.path_params["run_id"]
    text = bodies.read_prompt(body.text)
    key = None if body.key is None else build_key_id(body.key, tenant=caller.tenant, user=caller.user)
    posted = await send_text(gateway, caller, run_id, text, key=key, priority=body.priority)
    if not isinstance(posted.item, Input) or posted.item.parts != admit(text, caller.user):
        raise taken_key_error("key")
    return await _accept(gateway, run_id)


async def approve(gateway: Gateway, request: Request, caller: Caller, body: bodies.ApproveBody) -> Response:
    """Approve a call that waits."""
    run_id = request.path_params["run_id"]
    await approve_call(
        gateway,
        caller,
        run_id,
        body.call_id,
        digest=body.digest,
        shown_run=body.run_id,
        arguments=body.arguments,
        allow=body.allow,
    )
    return await _accept(gateway, run_id)


async def list_allowances(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """List what a person has allowed for later calls in the session of a run, and how many calls it has let through."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    found = await gateway.runs.allowances(header.id)
    return JSONDocument({"allowances": [build_document(each) for each in found]})


async def revoke(gateway: Gateway, request: Request, caller: Caller, body: bodies.RevokeBody) -> Response:
    """End an allowance of the session of a run, as its own user or with the scope "approve"."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    for each in await gateway.runs.allowances(header.id):
        if each.id == body.allowance:
            ended = await gateway.runs.revoke(each.id, by=caller.user)
            return JSONDocument(build_document(attrs.evolve(ended, used=each.used)))
    raise MisuseError(f"the session of run {header.id!r} has no allowance {body.allowance!r}")


async def reject(gateway: Gateway, request: Request, caller: Caller, body: bodies.RejectBody) -> Response:
    """Reject a call that waits; the model reads the reason."""
    run_id = request.path_params["run_id"]
    await reject_call(gateway, caller, run_id, body.call_id, shown_run=body.run_id, message=body.message)
    return await _accept(gateway, run_id)


async def decide(gateway: Gateway, request: Request, caller: Caller, body: bodies.DecideBody) -> Response:
    """Approve or reject several calls that wait, as they were shown. Nothing is decided if one has changed."""
    run_id = request.path_params["run_id"]
    await decide_calls(gateway, caller, run_id, approve=body.approve, reject=body.reject, message=body.message)
    return await _accept(gateway, run_id)


async def answer(gateway: Gateway, request: Request, caller: Caller, body: bodies.AnswerBody) -> Response:
    """Answer a question, or give the result of a call that comes from outside."""
    run_id = request.path_params["run_id"]
    await answer_call(
        gateway,
        caller,
        run_id,
        body.call_id,
        body.content,
        digest=body.digest,
        shown_run=body.run_id,
        failed=body.failed,
        declined=body.declined,
    )
    return await _accept(gateway, run_id)


async def settle(gateway: Gateway, request: Request, caller: Caller, body: bodies.SettleBody) -> Response:
    """Record the outcome of a call that was in flight when its worker died."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    tool_run = await gateway.find_waiting_run(header, body.call_id, shown_run=body.run_id)
    result, failed = admit_answer(body.result, caller.user), admit_answer(body.failed, caller.user)
    await (await gateway.decide_as(caller, header)).settle(
        tool_run, body.call_id, result=result, failed=failed, rerun=body.rerun, by=caller.user
    )
    return await _accept(gateway, header.id)


async def pause(gateway: Gateway, request: Request, caller: Caller, body: bodies.StopBody) -> Response:
    """Pause a run between two steps."""
    header = await gateway.open_run(request.path_params["run_id"], caller, is_control=True)
    await gateway.runs.pause(header.id, by=caller.user, message=admit_answer(body.message, caller.user))
    return await _accept(gateway, header.id)


async def resume(gateway: Gateway, request: Request, caller: Caller, _body: bodies.EmptyBody) -> Response:
    """End the pause of a run."""
    header = await gateway.open_run(request.path_params["run_id"], caller, is_control=True)
    gateway.resume(header)
    return await _accept(gateway, header.id)


async def cancel(gateway: Gateway, request: Request, caller: Caller, body: bodies.StopBody) -> Response:
    """End a run and the runs of its sub-agents."""
    run_id = request.path_params["run_id"]
    await cancel_run(gateway, caller, run_id, message=body.message)
    return await _accept(gateway, run_id)


async def _open_agent(gateway: Gateway, run: Run) -> Agent:
    """Return the agent of a run, imported from the target that the run names.

    Raises:
        ConflictError: when the server is not over a store alone, so that its own agents execute its runs.
        MisuseError: when the run names no agent, or it cannot be imported.
    """
    found = gateway.continuation
    if found is None:
        raise ConflictError("this server does not import the agents of runs: a worker continues them")
    root = await gateway.runs.root(run.id)
    if not root.target:
        raise MisuseError(
            "the run does not name its agent, since it was started from Python by an Agent without "
            f"target='module:name'. Continue it with: {found.build_command(root)}"
        )
    return await start_in_thread(lambda: found.open_agent(run, root)).wait()


async def continue_run(gateway: Gateway, request: Request, caller: Caller, _body: bodies.EmptyBody) -> Response:
    """Execute a run on this server until it is over or waits, with the agent that it names. A pause ends."""
    header = await gateway.open_run(request.path_params["run_id"], caller, is_control=True)
    run = await gateway.runs.load((await gateway.runs.root(header.id)).id)
    if run.is_over:
        raise ConflictError(f"run {run.id!r} is over")
    await gateway.execute_once(await _open_agent(gateway, run), run)
    return JSONDocument(await build_run_document(gateway.runs.store, await gateway.wait_for(header.id, 0)), 202)


async def fork(gateway: Gateway, request: Request, caller: Caller, body: bodies.ForkBody) -> Response:
    """Start a run from the first events of another.

    A second request of the user with the same `Idempotency-Key` returns the same run.
    """
    header = await gateway.open_run(request.path_params["run_id"], caller, is_control=True)
    is_foreign = not gateway.agents and gateway.continuation is not None
    run = await gateway.load(header) if is_foreign else None
    agent = gateway.find_agent(header.agent) if run is None else await _open_agent(gateway, run)
    if header.user == caller.user and (lost := set(header.roles) - set(caller.roles)):
        raise ForbiddenError(f"the run has roles that you no longer have ({', '.join(sorted(lost))}): start a new one")
    prompt = None if body.prompt is None else admit(bodies.read_prompt(body.prompt), caller.user)
    history = await gateway.runs.history(header.id)
    edit = parse_edits(body.edit, header, history, caller)
    owner = caller  # a fork is a run of the same user
    if header.user != caller.user:
        owner = attrs.evolve(caller, user=header.user or "", limits=NO_LIMITS)
    fork_id = new_id()
    if (key := request.headers.get("idempotency-key")) is not None:
        check_key(key)
        fork_id, known = await gateway.find_keyed_run(caller, key)
        if known is None and owner is not caller:  # the key is the caller's, and its fork is a run of the owner
            with suppress(RunNotFoundError):
                known = await gateway.runs.header(fork_id)
        if known is not None:
            is_same = (known.forked_from, known.withhold) == (header.id, body.withhold)
            if not is_same or body.at not in {None, known.forked_at} or (prompt or header.prompt) != known.prompt:
                raise taken_key_error()
            copied = (await gateway.runs.history(known.id))[: known.forked_at]
            if not has_edits(copied, history, edit):
                raise taken_key_error()
            return await _describe_start(gateway, request, await gateway.load(known), 200)
    async with gateway.admission.admit_run(owner, agent.name, fork_id):
        run = await agent.fork(
            header.id, at=body.at, prompt=prompt, edit=edit, id=fork_id, withhold=body.withhold, by=caller.user
        )
    return await _describe_start(gateway, request, run, 201)


async def give_feedback(gateway: Gateway, request: Request, caller: Caller, body: bodies.FeedbackBody) -> Response:
    """Rate a run, also if it is over."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    comment = admit_answer(body.comment, caller.user)
    await gateway.runs.feedback(header.id, rating=body.rating, comment=comment, by=caller.user)
    return Response(status_code=204)


async def delete(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Delete a run that no worker executes, with the runs of its sub-agents."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    await gateway.runs.delete(header.id)
    return Response(status_code=204)


async def _describe_start(gateway: Gateway, request: Request, run: Run, status: int) -> Response:
    headers = {"location": locate_run(request.scope, run.id)}
    return JSONDocument(await build_run_document(gateway.runs.store, run), status, headers)


async def _accept(gateway: Gateway, run_id: str) -> Response:
    return JSONDocument(await build_run_document(gateway.runs.store, await gateway.wait_for(run_id, 0)), 202)


# Filters of the list of runs: texts; and times, costs and durations.
_TEXTS: Final = ("agent", "user", "session", "purpose", "release", "text")
_AMOUNTS: Final = ("since", "before", "min_cost_usd", "max_cost_usd", "min_duration_s", "max_duration_s")
_ORDERS: Final[tuple[RunOrder, ...]] = get_args(RunOrder)
_RUN: Final = "/v1/runs/{run_id}"
RUNS: Final = RouteGroup(
    name="runs",
    endpoints=(
        Endpoint(method="POST", path="/v1/runs", handler=create_run, scope="run", body=bodies.StartBody),
        Endpoint(
            method="GET",
            path="/v1/runs",
            handler=list_runs,
            query=(
                *(*_TEXTS, *_AMOUNTS, "state", "stop_reason", "waiting", "subagents"),
                *("order", "total", "limit", "after"),
            ),
        ),
        Endpoint(method="GET", path=_RUN, handler=get_run, query=("wait_s", "at")),
        Endpoint(method="DELETE", path=_RUN, handler=delete, scope="admin"),
        Endpoint(
            method="GET",
            path=f"{_RUN}/events",
            handler=stream_events,
            query=("after", "token"),
            takes_token=True,
        ),
        Endpoint(method="POST", path=f"{_RUN}/stream-token", handler=create_stream_token, body=bodies.StreamTokenBody),
        Endpoint(method="POST", path=f"{_RUN}/input", handler=send_input, scope="run", body=bodies.InputBody),
        Endpoint(method="POST", path=f"{_RUN}/approve", handler=approve, scope="approve", body=bodies.ApproveBody),
        Endpoint(method="POST", path=f"{_RUN}/reject", handler=reject, scope="approve", body=bodies.RejectBody),
        Endpoint(method="GET", path=f"{_RUN}/allowances", handler=list_allowances),
        Endpoint(method="POST", path=f"{_RUN}/revoke", handler=revoke, body=bodies.RevokeBody),
        Endpoint(method="POST", path=f"{_RUN}/decide", handler=decide, scope="approve", body=bodies.DecideBody),
        Endpoint(method="POST", path=f"{_RUN}/answer", handler=answer, body=bodies.AnswerBody),
        Endpoint(method="POST", path=f"{_RUN}/settle", handler=settle, scope="approve", body=bodies.SettleBody),
        Endpoint(method="POST", path=f"{_RUN}/pause", handler=pause, scope="run", body=bodies.StopBody),
        Endpoint(method="POST", path=f"{_RUN}/resume", handler=resume, scope="run", body=bodies.EmptyBody),
        Endpoint(method="POST", path=f"{_RUN}/cancel", handler=cancel, scope="run", body=bodies.StopBody),
        Endpoint(method="POST", path=f"{_RUN}/fork", handler=fork, scope="run", body=bodies.ForkBody),
        Endpoint(method="POST", path=f"{_RUN}/feedback", handler=give_feedback, body=bodies.FeedbackBody),
        Endpoint(method="GET", path="/v1/agents", handler=list_agents),
    ),
)
# Only of a server over a store that has no agents.
CONTINUATION: Final = RouteGroup(
    name="continuation",
    endpoints=(
        Endpoint(
            method="POST",
            path=f"{_RUN}/continue",
            handler=continue_run,
            scope="admin",
            body=bodies.EmptyBody,
        ),
    ),
)
