"""A gateway on a real socket, an agent that asks for approval, and the events that a client reads."""

import json
from contextlib import asynccontextmanager

import anyio
import httpx

from agentfsm import Agent, tool
from agentfsm.serve import Caller, serve
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.web import http_server


def caller_named(request):
    """Return the caller that a request names in a header, as `NAME/TENANT/SCOPE+SCOPE`."""
    if not request.headers.get("x-caller"):
        return None
    user, tenant, scopes = request.headers["x-caller"].split("/")
    return Caller(user=user, tenant=tenant or None, scopes=scopes.split("+"))


@asynccontextmanager
async def serving(*agents, auth=caller_named, **options):
    """Serve on a free port, and return a client whose requests are those of an administrator."""
    app = serve(agents, auth=auth, **options)

    async def run(*, task_status):
        with http_server.bind_socket("127.0.0.1", 0) as bound:
            url = http_server.format_url("127.0.0.1", bound)
            await http_server.serve(app, bound, url, task_status, app.close_streams)

    async with anyio.create_task_group() as tasks:
        url = await tasks.start(run)
        async with httpx.AsyncClient(base_url=url, headers={"x-caller": "root//admin"}, timeout=30) as client:
            yield client
        tasks.cancel_scope.cancel()


def named(user="ann", tenant="", scopes="run"):
    return {"x-caller": f"{user}/{tenant}/{scopes}"}


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


def paying(store=None, **options):
    return Agent(
        ScriptedModel(say("", call("pay", amount=5)), say("done")),
        tools=[pay],
        name="shop",
        store=store or MemoryStore(),
        **options,
    )


async def events_of(client, run_id, *, after="", until=None, **options):
    """Return the events of a stream, as (id, data), until it ends or an event of this type has come."""
    found, position = [], None
    async with client.stream("GET", f"/v1/runs/{run_id}/events", params={"after": after}, **options) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                position = line[4:]
            elif line.startswith("data: ") and position is not None:
                found.append((position, json.loads(line[6:])))
                position = None
                if until is not None and found[-1][1]["event"]["is"] == until:
                    break
    return found
