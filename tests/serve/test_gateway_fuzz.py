"""Random requests: whatever is sent, the answer is no server error, and the server goes on."""

import json
import random
from urllib.parse import quote

import anyio
import httpx
import pytest

from agentfsm import Agent, tool
from agentfsm.serve import Caller, serve
from agentfsm.serve.app import ROUTE_GROUPS
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say

ENDPOINTS = [each for group in ROUTE_GROUPS for each in group.endpoints]
TEXTS = [
    "",
    "x",
    "\x00",
    "\ud800",
    "\u202e",
    "é" * 300,
    "a:1",
    "99999999999999999999",
    "-1",
    "nan",
    "1e999",
    "null",
    "../..",
    "plan",
]
VALUES = [*TEXTS, None, True, 0, -1, 5, 2**70, 1.5, [], {}, ["x"], {"\x00": "\ud800"}, {"a": {"b": [1, None]}}]


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


def body_of(chance, endpoint, known):
    """Return a body whose fields are often the right ones, with values that are often wrong."""
    fields = [*(endpoint.body.model_fields if endpoint.body else ()), "other"]
    made = {name: chance.choice(VALUES) for name in fields if chance.random() < 0.5}
    if chance.random() < 0.5:
        return {name: value for name, value in known.items() if name in fields}
    return chance.choice([made, made, made, made, chance.choice(VALUES)])


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 60))])
async def test_no_request_is_a_server_error(seed, tmp_path, anyio_backend):
    """Each path with random ids, queries, headers and bodies, to both kinds of store."""
    chance = random.Random(seed)
    store = MemoryStore() if seed % 2 else SQLiteStore(tmp_path / "runs.db")
    script = ScriptedModel(say("", call("pay", amount=1)), say("done"))
    agent = Agent(script, tools=[pay], name="shop", store=store)
    gateway = serve(
        [agent],
        auth=lambda _request: Caller(user="ann", scopes=[chance.choice(["run", "approve", "admin"])]),
    )
    transport = httpx.ASGITransport(gateway, raise_app_exceptions=False)
    async with gateway.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        ids = ["unknown", "%00", "%ff", "%F0%9F%98%80", "x" * 5_000, (await agent.submit("p", user="ann")).id]
        for number in range(250):
            endpoint = chance.choice(ENDPOINTS)
            run_id = chance.choice(ids[-6:])
            known = {"prompt": "p", "text": "t", "rating": 3, "call_id": "t1.0", "digest": "d"}
            known |= {"threadId": "t", "runId": "r", "messages": [{"role": "user", "content": "x"}], "model": "shop"}
            content = json.dumps(body_of(chance, endpoint, known)).encode()
            if chance.random() < 0.05:
                content = content[: len(content) // 2]
            query = {
                name: chance.choice(TEXTS) for name in endpoint.query if name != "wait_s" and chance.random() < 0.5
            }
            if endpoint.path.endswith(("/events", "}/ag-ui")):
                query["after"] = chance.choice(["x", "unknown:1", "9" * 12, "%00:1", f"{run_id}:{'9' * 5_000}"])
            headers = {"content-type": "application/json"}
            if chance.random() < 0.3:
                headers["idempotency-key"] = chance.choice(["k", "k2", "x" * 300, "a b", "\t"])
            path = endpoint.path.format(
                run_id=run_id, model="shop", agent=quote(chance.choice(["shop", *TEXTS]), safe="", errors="replace")
            )
            query = {name: text.encode("utf-8", "replace").decode() for name, text in query.items()}
            content = content if endpoint.method == "POST" else b""
            with anyio.move_on_after(0.1) as left:  # a stream of a run that goes on is left by its client
                response = await client.request(endpoint.method, path, params=query, content=content, headers=headers)
            if left.cancelled_caught:
                continue
            assert response.status_code < 500, (number, endpoint.path, query, content, response.text)
            is_json = response.headers.get("content-type") == "application/json"
            if response.status_code in {200, 201} and is_json and "id" in response.json():
                ids.append(response.json()["id"])
        assert (await client.get("/readyz")).status_code == 200
    await store.aclose()
