"""What comes too late, twice or from nowhere: decisions, positions, long journals, slow and idle clients."""

import json
from contextlib import suppress

import anyio
import httpx
import pytest

from agentfsm import Agent, tool
from agentfsm._lib.web import http_connections
from agentfsm.serve import serve
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateway_client import events_of, named, paying, read_caller, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


async def test_an_approval_after_its_time():
    """Is refused with 409, and the call does not run."""
    paid = []

    @tool(requires_approval=True, approval_expires_s=0.2)
    async def pay(amount: int) -> str:
        """Pay an amount."""
        paid.append(amount)
        return "paid"

    agent = Agent(
        ScriptedModel(say("", call("pay", amount=5)), say("too late")), tools=[pay], name="shop", store=MemoryStore()
    )
    async with serving(agent, parallel=0) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay"})).json()
        run = await agent.resume(run["id"])
        [item] = run.pending
        while (await agent.store.now()) < item.expires_at:  # noqa: ASYNC110  a clock has no event
            await anyio.sleep(0.02)
        body = {"call_id": item.call_id, "digest": item.digest}
        late = await client.post(f"/v1/runs/{run.id}/approve", json=body)
        assert late.status_code == 409, late.text
        assert (await agent.resume(run.id)).output == "too late"
    assert paid == []


async def test_two_people_decide_at_once():
    """One decision counts, the other is refused with 409, and the journal names the one that counts."""
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        [item] = run["pending"]
        statuses = {}

        async def decide(user, operation, body):
            path = f"/v1/runs/{run['id']}/{operation}"
            response = await client.post(path, json=body, headers=named(user, "", "approve"))
            statuses[user] = response.status_code

        async with anyio.create_task_group() as tasks:
            for user in ("eve", "bob", "dan"):
                body = {"call_id": item["call_id"], "digest": item["digest"]}
                tasks.start_soon(decide, user, "approve", body)
            tasks.start_soon(decide, "zoe", "reject", {"call_id": item["call_id"], "message": "no"})
        winners = [user for user, status in statuses.items() if status == 202]
        assert len(winners) == 1
        assert all(status in {400, 409} for user, status in statuses.items() if user not in winners)
        await client.get(f"/v1/runs/{run['id']}", params={"wait_s": 30})
        [record] = (await client.get(f"/v1/runs/{run['id']}/audit")).json()["calls"]
        assert winners[0] in json.dumps(record)


async def build_long_run(store, turns):
    """Run an agent for many turns, and return the id."""

    @tool(read_only=True)
    async def look(at: int) -> str:
        """Look at a place."""
        return "seen"

    script = [say("", call("look", at=number)) for number in range(turns)]
    agent = Agent(ScriptedModel(*script, say("end")), tools=[look], name="long", store=store)
    agent = agent.with_(limits=agent.limits.__class__(turns=turns + 5, tool_calls=turns + 5, seconds=600))
    return agent, (await agent.run("go")).id


@pytest.mark.parametrize("turns", [60, pytest.param(2_500, marks=pytest.mark.soak)])
async def test_a_long_journal(turns, tmp_path):
    """Is streamed and paged whole and in order, 10,000 events too, and from the middle; other requests go on."""
    agent, run_id = await build_long_run(SQLiteStore(tmp_path / "runs.db"), turns)
    async with serving(agent) as client:
        health = []

        async def look_after():
            while True:
                health.append((await client.get("/healthz")).status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look_after)
            whole = await events_of(client, run_id)
            tasks.cancel_scope.cancel()
        versions = [data["version"] for _, data in whole]
        assert versions == list(range(1, versions[-1] + 1))
        assert len(versions) >= 4 * turns
        middle = whole[len(whole) // 2][0]
        assert await events_of(client, run_id, after=middle) == whole[len(whole) // 2 + 1 :]
        paged, after = [], 0
        while after is not None:
            page = (await client.get(f"/v1/runs/{run_id}/journal", params={"after": after, "limit": 700})).json()
            paged, after = paged + page["events"], page["after"]
        assert [each["event"] for each in paged] == [data["event"] for _, data in whole]
        assert set(health) == {200}
        assert health


async def test_idle_streams_are_bounded(monkeypatch):
    """Beyond the connections of a server, further streams are refused, and the others go on."""
    monkeypatch.setattr(http_connections, "MAX_CONNECTIONS", 8)
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        statuses, held, enough = [], [], anyio.Event()

        async def hold():
            limits = httpx.Limits(max_keepalive_connections=0)
            headers = named("root", "", "admin")
            async with httpx.AsyncClient(base_url=client.base_url, headers=headers, limits=limits, timeout=30) as own:
                try:
                    async with own.stream("GET", f"/v1/runs/{run['id']}/events") as stream:
                        statuses.append(stream.status_code)
                        if stream.status_code == 200:
                            held.append(stream)
                        if len(statuses) >= 20:
                            enough.set()
                        async for _ in stream.aiter_raw():
                            pass
                except httpx.HTTPError:
                    statuses.append("closed")
                    if len(statuses) >= 20:
                        enough.set()

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(hold)
            await enough.wait()
            assert len(held) <= 8
            assert 503 in statuses or "closed" in statuses
            tasks.cancel_scope.cancel()
        assert (await client.get(f"/v1/runs/{run['id']}")).status_code == 200


async def test_slow_headers_lose_their_connection(monkeypatch):
    """A request that does not arrive in time is dropped, and the server answers others meanwhile."""
    monkeypatch.setattr(http_connections, "RECEIVE_TIMEOUT_S", 1.0)

    async def check_health():
        """Ask until a request has arrived in time, which is not the first one's lot on a busy machine."""
        while True:
            with suppress(httpx.TransportError):
                return (await client.get("/healthz")).status_code

    # A connection that waits for its next request is dropped at that time, too, so each request has its own.
    async with serving(paying()) as client, httpx.AsyncClient(
        base_url=client.base_url, limits=httpx.Limits(max_keepalive_connections=0), timeout=30
    ) as client:  # fmt: skip
        stream = await anyio.connect_tcp("127.0.0.1", client.base_url.port)
        async with stream:
            await stream.send(b"GET /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            assert await check_health() == 200
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        assert await check_health() == 200


@pytest.mark.parametrize("clients", [20, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_many_clients_lose_nothing(clients):
    """Streams of some runs in one process, each cut some times: each client gets each event once, in order."""
    store = MemoryStore()

    @tool(read_only=True)
    async def look(at: int) -> str:
        """Look at a place."""
        await anyio.sleep(0.01)
        return "seen"

    script = [say("", call("look", at=number)) for number in range(40)]

    class Steady(ScriptedModel):
        """Answers each run by itself: a call for each of 40 turns, then the end."""

        async def reply(self, request, emit=None):
            done = sum(1 for each in request.messages if type(each).__name__ == "ToolResult")
            return await ScriptedModel([*script, say("end")][done]).reply(request, emit)

    agent = Agent(Steady(say("x")), tools=[look], name="steady", store=store)
    agent = agent.with_(limits=agent.limits.__class__(turns=100, seconds=600))
    app = serve([agent], auth=read_caller)
    request_of = _make_requests()
    async with app.lifespan():
        ids = [(await agent.submit(f"go {number}")).id for number in range(max(2, clients // 50))]
        got = {}

        async def follow(number):
            run_id, versions, position = ids[number % len(ids)], [], ""
            while not versions or not got.get(number):
                cut = len(versions) + 40 + number % 60
                position, is_over = await request_of(app, run_id, position, versions, cut)
                if is_over:
                    got[number] = versions

        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                tasks.start_soon(follow, number)
        for number, versions in got.items():
            newest = (await agent.load(ids[number % len(ids)])).version
            assert versions == list(range(1, newest + 1)), number
    assert len(got) == clients


def _make_requests():
    """Return a function that reads a stream over ASGI until it has so many versions, and then leaves."""

    async def read(app, run_id, position, versions, cut):
        state = {"position": position, "is_over": False}
        left = anyio.Event()

        async def receive():
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            for block in message.get("body", b"").decode().split("\n\n"):
                lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
                if lines.get("event") == "end":
                    state["is_over"] = True
                elif "id" in lines and not left.is_set():
                    state["position"] = lines["id"]
                    versions.append(json.loads(lines["data"])["version"])
                    if len(versions) >= cut:
                        left.set()

        scope = {
            "type": "http", "method": "GET", "path": f"/v1/runs/{run_id}/events", "raw_path": b"", "root_path": "",
            "query_string": b"", "headers": [(b"x-caller", b"root//admin"), (b"last-event-id", position.encode())],
            "scheme": "http", "http_version": "1.1", "server": ("here", 80), "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await app(scope, receive, send)
        return state["position"], state["is_over"]

    return read
