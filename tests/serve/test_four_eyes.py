"""With four eyes, each door that approves refuses whoever has shaped the call, and lets another person decide."""

from contextlib import aclosing, asynccontextmanager
from urllib.parse import quote

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from agentfsm import Agent, ask_user
from agentfsm.cli import main
from agentfsm.serve import Caller
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateways import named, serving
from tests.support.shaped_calls import ASK, PAYMENT, WAYS, by_answer, pay, shop


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@asynccontextmanager
async def run_endpoint(client, caller):
    """`POST /v1/runs/RUN/approve`, which the studio calls as well."""

    async def approve(item):
        body = {"call_id": item.call_id, "digest": item.digest}
        answer = await client.post(f"/v1/runs/{item.run_id}/approve", json=body, headers=named(*caller))
        return "" if answer.status_code == 202 else answer.text

    yield approve


@asynccontextmanager
async def ag_ui(client, caller):
    """The answer to an interrupt."""

    async def approve(item):
        parts = [quote(each, safe="") for each in (item.run_id, item.call_id, item.digest, "1")]
        answer = {"interruptId": "/".join(parts), "status": "resolved", "payload": {"approved": True}}
        body = {"threadId": "t", "runId": "r", "resume": [answer]}
        path = "/v1/agents/shop/ag-ui"
        async with client.stream("POST", path, json=body, headers=named(*caller)) as response:
            return "" if response.status_code == 200 else (await response.aread()).decode()

    yield approve


@asynccontextmanager
async def mcp_tool(client, caller):
    """The tool `approve` of the MCP server."""
    key = {"authorization": f"Bearer {'/'.join(caller)}"}
    async with (
        httpx2.AsyncClient(headers=key) as http,
        Client(streamable_http_client(f"{client.base_url}/mcp", http_client=http)) as door,
    ):

        async def approve(item):
            shown = {"run_id": item.run_id, "call_id": item.call_id, "digest": item.digest}
            answer = await door.call_tool("approve", {**shown, "decision": "approve"})
            return answer.content[0].text if answer.is_error else ""

        yield approve


DOORS = (run_endpoint, ag_ui, mcp_tool)


async def test_each_way_of_shaping_a_call_at_each_door():
    """The person is refused with the reason at each door; another person is let in."""
    store = MemoryStore()
    waiting = [(way, (await way(store, "eve")).pending[0]) for way in WAYS]
    agents = [Agent(ScriptedModel("x"), name=name, store=store) for name in ("shop", "clerk")]
    async with serving(*agents, four_eyes=True, parallel=0) as client:
        for door in DOORS:
            async with door(client, ("eve", "", "run+approve")) as approve:
                for way, item in waiting:
                    assert "has shaped it" in await approve(item), (way, door)
        for number, door in enumerate(DOORS):
            async with door(client, ("bob", "", "run+approve")) as approve:
                for _, item in waiting[number::3]:
                    assert await approve(item) == "", door


async def test_an_edit_over_http():
    """One edits the call of another user's run: it waits again, and neither of the two can approve it."""
    agent = shop(MemoryStore())
    async with serving(agent, four_eyes=True) as client:
        started = {"prompt": "pay", "wait_s": 30}
        run = (await client.post("/v1/runs", json=started, headers=named("ann"))).json()
        path, [item] = f"/v1/runs/{run['id']}", run["pending"]
        edited = {"iban": "FE1-OWN", "cents": 99_999_999}
        body = {"call_id": item["call_id"], "digest": item["digest"], "arguments": edited}
        assert (await client.post(f"{path}/approve", json=body, headers=named("eve", "", "approve"))).status_code == 202
        run = (await client.get(path, params={"wait_s": 30})).json()
        [item] = run["pending"]
        assert item["arguments"] == edited
        body = {"call_id": item["call_id"], "digest": item["digest"]}
        for user, status in (("eve", 403), ("ann", 403), ("bob", 202)):
            answer = await client.post(f"{path}/approve", json=body, headers=named(user, "", "run+approve"))
            assert answer.status_code == status, answer.text
        assert (await client.get(path, params={"wait_s": 30})).json()["output"] == "done"


async def test_a_key_of_its_own_four_eyes():
    """The rule holds for the caller who has such a key, and its deeds through the gateway carry its name."""
    agent = shop(MemoryStore())

    def authenticate(request):
        user = request.headers["x-user"]
        return Caller(user=user, scopes=["admin"], four_eyes=user == "eve")

    async with serving(agent, auth=authenticate) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers={"x-user": "ann"})).json()
        fork = await client.post(f"/v1/runs/{run['id']}/fork", json={}, headers={"x-user": "eve"})
        assert (await agent.load(fork.json()["id"])).header.forked_by == "eve"
        sent = await client.post(f"/v1/runs/{run['id']}/input", json={"text": "hi"}, headers={"x-user": "eve"})
        assert sent.status_code == 202
        [row] = await agent.store.inbox(run["id"])
        assert row.item.by == "eve"
        [item] = run["pending"]
        settled = {"call_id": item["call_id"], "result": "paid"}
        for user, status in (("eve", 403), ("ann", 202)):  # the key of ann does not ask for four eyes
            answer = await client.post(f"/v1/runs/{fork.json()['id']}/settle", json=settled, headers={"x-user": user})
            assert answer.status_code == status, answer.text
        body = {"call_id": item["call_id"], "digest": item["digest"]}  # the input came after the call was written
        answer = await client.post(f"/v1/runs/{run['id']}/approve", json=body, headers={"x-user": "eve"})
        assert answer.status_code == 202


@pytest.mark.parametrize("deed", ["starts", "answers", "is executed"])
async def test_what_was_allowed_before_four_eyes_ends(deed):
    """It lets no call through after a new run or an answer of its giver, nor on a server that asks for four eyes."""
    ann = Caller(user="ann", scopes=["admin"], four_eyes=deed != "is executed")
    between = "done" if deed == "starts" else say("", ASK)
    script = ScriptedModel(say("", PAYMENT), between, say("", PAYMENT), "done")
    agent = Agent(script, tools=[pay, ask_user], name="shop", store=MemoryStore())
    run = await agent.run("pay", user="ann", session=ann.qualify_session("s"))
    [item] = run.pending
    await agent.approve(run.id, item.call_id, by="ann", digest=item.digest, allow=["iban"])
    run = await agent.resume(run.id)
    if deed == "is executed":
        await agent.answer(run.id, run.pending[0].call_id, "DE1", by="ann")
    async with serving(agent, auth=lambda _request: ann, four_eyes=deed == "is executed") as client:
        path = f"/v1/runs/{run.id}"
        if deed == "answers":
            body = {"call_id": run.pending[0].call_id, "content": "DE1"}
            assert (await client.post(f"{path}/answer", json=body)).status_code == 202
        if deed == "starts":
            begun = await client.post("/v1/runs", json={"prompt": "pay", "session": "s"})
            path = begun.headers["location"]
        found = (await client.get(path, params={"wait_s": 30})).json()
        assert [each["tool"] for each in found["pending"]] == ["pay"]
        [allowance] = (await client.get(f"{path}/allowances")).json()["allowances"]
        assert allowance["revoked_by"] == "four eyes"


def test_the_command_line(tmp_path):
    """`--four-eyes` refuses an approval and a settlement by a person who has shaped the call."""
    place = tmp_path / "runs.db"

    async def begin():
        async with aclosing(SQLiteStore(place)) as store:
            asked = (await by_answer(store, "eve")).pending[0]
            agent = shop(store, call("order", thing="a book"))
            return asked, (await agent.run("pay", user="eve")).pending[0]

    asked, lost = anyio.run(begin)
    for item, words in ((asked, ["approve"]), (lost, ["settle", "--rerun"])):
        order = [words[0], item.run_id, item.call_id, *words[1:], "--store", str(place), "--by"]
        assert main([*order, "eve", "--four-eyes"]) != 0
        assert main([*order, "bob", "--four-eyes"]) == 0
