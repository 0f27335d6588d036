"""Operations for pages that show runs and agents, such as the studio: the machine, a run, an agent, in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.inbox import Decision, decision_word
from agentfsm.core.labels import join_labels
from agentfsm.core.machine import START, TABLE
from agentfsm.core.messages import format_part
from agentfsm.serve.agent_documents import build_full_agent_document
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.run_documents import JSONDocument, build_run_document
from agentfsm.tools.builtin import asks_only

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway


async def get_machine(_gateway: Gateway, _request: Request, _caller: Caller, _body: object) -> Response:
    """Return the state machine: for each state, the events that it accepts, with the next state."""
    table = {state: {event.__name__: target for event, target in row.items()} for state, row in TABLE.items()}
    return JSONDocument({"start": START, "table": table})


async def get_details(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return a run with its prompt, its limits, its origin, and the decisions that no worker has read.

    Administrators get the error that ended its last execution by this server, if it stands still since.
    """
    header = await gateway.open_run(request.path_params["run_id"], caller)
    run = await gateway.wait_for(header.id, 0)
    agent = gateway.agents.get(header.agent)
    continuation = None  # how this server continues the run when a person asks for it
    if gateway.continuation is not None:
        continuation = gateway.continuation.describe(await gateway.runs.root(run.id))
    return JSONDocument(
        await build_run_document(gateway.runs.store, run)
        | {
            "prompt": "\n".join(map(format_part, header.prompt)),
            "agent_version": header.agent_version,
            "release": header.release,
            "purpose": header.purpose,
            "answered_from": None if run.answered_from is None else attrs.asdict(run.answered_from),
            "forked_from": header.forked_from,
            "forked_at": header.forked_at,
            "withhold": header.withhold,
            "may_act": gateway.continuation is not None if agent is None else _may_act(agent),
            "continuation": continuation,
            "failure": gateway.find_failure(run.id) if caller.allows("admin") else "",
            "reply": "" if run.reply is None else run.reply.text,
            "duration_s": run.duration_s,
            "labels": [attrs.asdict(run.labels[label]) for label in join_labels(run.labels)],
            "limits": None if agent is None else attrs.asdict(agent.limits),
            "posted": await _list_posted(gateway, run),
        }
    )


def _may_act(agent: Agent[Any]) -> bool:
    """Return whether a run of an agent may have effects; True also if its tools are not known yet."""
    tools = agent.tools
    acts = any(not (tool.read_only or asks_only(tool)) for tool in tools)
    return acts or bool(tools.sources) or any(not hosted.read_only for hosted in tools.hosted)


async def _list_posted(gateway: Gateway, run: Run) -> list[dict[str, Any]]:
    """Return the decisions in the inboxes of the run and of the runs of sub-agents that wait."""
    ids = dict.fromkeys([run.id, *[item.run_id for item in run.pending]])
    rows = [(run_id, row.item) for run_id in ids for row in await gateway.runs.store.inbox(run_id)]
    return [
        {"run_id": run_id, "call_id": item.call_id, "decision": decision_word(item), "by": item.by}
        for run_id, item in rows
        if isinstance(item, Decision)
    ]


async def get_agent(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return an agent: its tools with their declarations and findings, sub-agents, MCP servers and limits.

    Administrators get its instructions as well.
    """
    agent = gateway.find_agent(request.path_params["agent"])
    return JSONDocument(build_full_agent_document(agent, shows_instructions=caller.allows("admin")))


DETAILS: Final = RouteGroup(
    name="details",
    endpoints=(
        Endpoint(method="GET", path="/v1/machine", handler=get_machine),
        Endpoint(method="GET", path="/v1/runs/{run_id}/details", handler=get_details),
        Endpoint(method="GET", path="/v1/agents/{agent}", handler=get_agent),
    ),
)
