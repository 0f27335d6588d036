"""Operations that explain a run from its journal: its events, versions, requests, calls and differences."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import codec
from agentfsm.core.claimed_calls import describe_claims
from agentfsm.engine.sent_request import build_request_document, read_sent_request
from agentfsm.journal.diff import difference
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.queries import read_number, read_text
from agentfsm.serve.run_documents import JSONDocument, build_row_documents, strip_native

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.core.messages import Message
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway

# Events in a page of a journal.
JOURNAL_PAGE: Final = 500
MAX_JOURNAL_PAGE: Final = 2_000
# A version has at most twelve digits.
_MAX_VERSION: Final = 10**12 - 1


async def read_journal(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return the header and a page of the events of a run, after the version `after`.

    Administrators get the instructions of the run as well.
    """
    header = await gateway.open_run(request.path_params["run_id"], caller)
    shown = header if caller.allows("admin") else attrs.evolve(header, instructions=None)
    query = request.query_params
    after = read_number(query, "after", 0, _MAX_VERSION)
    limit = max(1, read_number(query, "limit", JOURNAL_PAGE, MAX_JOURNAL_PAGE))
    stored = await gateway.runs.store.read(header.id, after)
    page = [
        {"version": version, "event": strip_native(event.to_dict(), caller)}
        for version, event in enumerate(stored.events[:limit], after + 1)
    ]
    return JSONDocument(
        {
            "header": json.loads(codec.encode_header(shown)),
            "events": page,
            "after": after + len(page) if len(stored.events) > limit else None,
        }
    )


async def list_messages(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return the messages of a run, at the version `at`, and which of them its model is shown."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    run = await gateway.load(header, _read_version(request, "at"))
    return JSONDocument(
        {
            "id": run.id,
            "version": run.version,
            "own_start": run.own_start,
            "messages": _list_messages(run.messages, caller),
            "shown": _list_messages(run.shown, caller) if run.shown is not run.messages else None,
        }
    )


async def get_model_request(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return what the model was sent in a turn: all parts with their tokens and costs, and what has changed.

    Administrators get the instructions as well. Tools and settings are those of the agent, if it is served here.
    """
    header = await gateway.open_run(request.path_params["run_id"], caller)
    turn = read_number(request.query_params, "turn", 0, _MAX_VERSION)
    config, deps = None, None
    if header.agent in gateway.agents:
        config = gateway.find_release(header).driver.config
        deps = await gateway.resolve_deps(await gateway.load(header))
    found = await read_sent_request(gateway.runs.store, header.id, turn, config=config, deps=deps)
    return JSONDocument(build_request_document(found, is_admin=caller.allows("admin")))


async def audit_run(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return a record of each call of a run and its sub-agents: who asked for it, who approved it, how it ended.

    Beside them are the claims of its answer, each with the call that did it, and the calls that it does not claim.
    """
    header = await gateway.open_run(request.path_params["run_id"], caller)
    records = await gateway.runs.audit(header.id)
    claims = describe_claims(await gateway.load(header))
    return JSONDocument({"calls": [attrs.asdict(each) for each in records], **claims})


async def compare_runs(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Compare two versions of a run, `at` and `to`, or a run with another one, `other`."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    other_id = read_text(request.query_params, "other")
    other = header if other_id is None else await gateway.open_run(other_id, caller)
    before = await gateway.load(header, _read_version(request, "at"))
    after = await gateway.load(other, _read_version(request, "to"))
    found = difference(before, after)
    return JSONDocument(
        {
            "before": {"id": before.id, "version": before.version},
            "after": {"id": after.id, "version": after.version},
            "shared": found.shared,
            "removed": _list_messages(found.removed, caller),
            "added": _list_messages(found.added, caller),
            "changed": attrs.asdict(found)["changed"],
            "calls": {name: list(pair) for name, pair in found.calls.items()},
            "agent": list(found.agent),
        }
    )


async def replay_run(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Replay a run without calling a model or a tool, and return the requests that its agent would send differently."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    agent = gateway.find_agent(header.agent)
    found = await agent.replay(header.id, deps=await gateway.resolve_deps(await gateway.load(header)))
    divergences = [attrs.asdict(each) for each in found.divergences]
    return JSONDocument({"id": header.id, "checked": found.checked, "divergences": divergences})


async def list_children(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """List the runs of the sub-agents that a run has called, newest first."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    rows = await gateway.runs.children(header.id)
    return JSONDocument({"runs": await build_row_documents(gateway.runs.store, rows)})


async def list_feedback(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return the feedback on a run, oldest first."""
    header = await gateway.open_run(request.path_params["run_id"], caller)
    found = await gateway.runs.list_feedback(header.id)
    return JSONDocument({"feedback": [attrs.asdict(each) for each in found]})


def _read_version(request: Request, name: str) -> int | None:
    if name not in request.query_params:
        return None
    return read_number(request.query_params, name, 0, _MAX_VERSION)


def _list_messages(messages: Iterable[Message], caller: Caller) -> list[dict[str, Any]]:
    return [strip_native(codec.message_to_json(each), caller) for each in messages]


_RUN: Final = "/v1/runs/{run_id}"
INSPECTION: Final = RouteGroup(
    name="inspection",
    endpoints=(
        Endpoint(method="GET", path=f"{_RUN}/journal", handler=read_journal, query=("after", "limit")),
        Endpoint(method="GET", path=f"{_RUN}/messages", handler=list_messages, query=("at",)),
        Endpoint(method="GET", path=f"{_RUN}/request", handler=get_model_request, query=("turn",)),
        Endpoint(method="GET", path=f"{_RUN}/audit", handler=audit_run),
        Endpoint(method="GET", path=f"{_RUN}/diff", handler=compare_runs, query=("other", "at", "to")),
        Endpoint(method="GET", path=f"{_RUN}/replay", handler=replay_run),
        Endpoint(method="GET", path=f"{_RUN}/children", handler=list_children),
        Endpoint(method="GET", path=f"{_RUN}/feedback", handler=list_feedback),
    ),
)
