"""The official MCP client on the port of the gateway: its tools, the runs that they reach, and owners of sessions."""

import json
from contextlib import asynccontextmanager
from functools import partial

import anyio
import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from agentfsm import Agent, InputRequired, Question, RunContext, StoreError, ToolResult, tool
from agentfsm._lib.plugins import require_extra
from agentfsm.mcp.client.tasks import cancel_task
from agentfsm.serve import RateLimits, serve
from agentfsm.serve.dialects import mcp_sessions
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateway_client import paying
from tests.support.gateways import named, read_caller, serving
from tests.support.task_client import OPTIONS, accept, answer, begin, look

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}
ACCEPT = {"accept": "application/json, text/event-stream"}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
FIELDS = {"seats": {"type": "integer"}}
# Arguments of each tool that takes a run.
CALLS = {
    "send": {"text": "x"},
    "status": {},
    "result": {"wait_s": 5},
    "cancel": {},
    "approve": {"call_id": "t1.0", "decision": "approve", "digest": "d"},
    "approve ": {"call_id": "t1.0", "decision": "approve"},
    "approve  ": {"call_id": "t1.0", "decision": "reject"},
    "approve   ": {"call_id": "t1.0", "decision": "answer"},
}


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@asynccontextmanager
async def connected(server, caller="ann/acme/run", **options):
    """Connect as a caller, whose key is the text itself."""
    headers = {"authorization": f"Bearer {caller}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(
            streamable_http_client(f"{server.base_url}".rstrip("/") + "/mcp", http_client=http), **options
        ) as client,
    ):
        yield client


async def said(client, name, **arguments):
    result = await client.call_tool(name.strip(), arguments)
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


async def refused(client, name, **arguments):
    result = await client.call_tool(name.strip(), arguments)
    assert result.is_error, result.content
    return result.content[0].text


@MODES
async def test_a_run_is_that_of_the_key(mode):
    """From start to answer; tenant, user and session are those of the credential, as in the gateway's own API."""
    agent = Agent(ScriptedModel(say("hello"), say("again")), name="greeter", store=MemoryStore())
    async with serving(agent) as server, connected(server, mode=mode) as client:
        run = await said(client, "start", prompt="hi", session="s", key="r1")
        assert (run["status"], run["answer"]) == ("done", "hello")
        assert await said(client, "start", prompt="hi", session="s", key="r1") == run
        run_id = run["run_id"]
        assert await said(client, "status", run_id=run_id) == await said(client, "result", run_id=run_id) == run
        shown = (await server.get(f"/v1/runs/{run_id}", headers=named("ann", "acme"))).json()
        assert (shown["user"], shown["session"], shown["output"]) == ("ann", "s", "hello")
        header = (await agent.load(run_id)).header
        assert header.tenant == "acme"
        assert [(each.label, each.name) for each in header.labels] == [("user_data", "prompt")]  # a model wrote it
        await said(client, "start", prompt="more", session="s", agent="greeter")
        pages = [await said(client, "list", limit=1, session="s")]
        pages.append(await said(client, "list", limit=1, session="s", after=pages[0]["after"]))
        assert [row["prompt"] for page in pages for row in page["runs"]] == ["more", "hi"]
        assert "another" in await refused(client, "start", prompt="something else", key="r1")


@MODES
async def test_a_person_with_the_scope_decides(mode):
    """The key that started the run may not; the journal has the name of the key that may, whatever a client claims."""
    async with (
        serving(paying()) as server,
        connected(server, mode=mode) as client,
        connected(server, "eve/acme/approve", mode=mode) as approver,
    ):
        run = await said(client, "start", prompt="pay")
        [item] = run["pending"]
        decision = {"run_id": run["run_id"], "call_id": item["call_id"], "decision": "approve"}
        assert "scope 'approve'" in await refused(client, "approve", digest=item["digest"], **decision)
        assert "scope 'run'" in await refused(approver, "start", prompt="x")
        assert "scope 'run'" in await refused(approver, "cancel", run_id=run["run_id"])
        assert [row["run_id"] for row in (await said(approver, "list", waiting=True))["runs"]] == [run["run_id"]]
        assert "`pending`" in await refused(approver, "approve", **decision)
        assert "has changed" in await refused(approver, "approve", digest="x", **decision)
        assert "by" in await refused(approver, "approve", digest=item["digest"], by="ann", **decision)
        noted = await said(approver, "approve", digest=item["digest"], **decision)
        assert noted["noted"] == "approve by eve"
        assert (await said(client, "result", run_id=run["run_id"]))["answer"] == "done"
        [record] = (await server.get(f"/v1/runs/{run['run_id']}/audit", headers=named("ann", "acme"))).json()["calls"]
        assert record["approved_by"] == "eve"


@MODES
async def test_foreign_runs_do_not_exist(mode):
    """Each operation of another tenant, of another user, and on an id that nobody has, is answered with one text."""
    async with serving(paying()) as server, connected(server, mode=mode) as client:
        run_id = (await said(client, "start", prompt="pay"))["run_id"]
        before = await said(client, "status", run_id=run_id)
        for stranger in ("ann/other/admin", "root//admin", "bob/acme/run"):
            async with connected(server, stranger, mode=mode) as other:
                for name, arguments in CALLS.items():
                    texts = [await refused(other, name, run_id=each, **arguments) for each in (run_id, "unknown")]
                    assert texts[0].replace(run_id, "unknown") == texts[1], name
                    assert "there is no run" in texts[0], name
                assert (await said(other, "list"))["runs"] == []
        assert await said(client, "status", run_id=run_id) == before


async def test_questions_are_answered():
    """With text, with an object that fits the schema, or not at all."""

    @tool
    async def book(ctx: RunContext[None]) -> str:
        """Book."""
        if "q" not in ctx.answers:
            raise InputRequired(Question(key="q", message="How many?", schema={"type": "object", "properties": FIELDS}))
        return f"booked {ctx.answers['q']}"

    turns = [say("", call("book")), say("", call("book")), say("done")]
    agent = Agent(ScriptedModel(*turns), tools=[book], name="shop", store=MemoryStore())
    async with serving(agent) as server, connected(server) as client:
        run = await said(client, "start", prompt="book")
        to = {"run_id": run["run_id"], "call_id": run["pending"][0]["call_id"]}
        assert "text=" in await refused(client, "approve", decision="answer", **to)
        assert await refused(client, "approve", decision="answer", answers={"seats": "x"}, **to)
        await said(client, "approve", decision="answer", answers={"seats": 2}, digest=run["pending"][0]["digest"], **to)
        run = await said(client, "result", run_id=run["run_id"])
        to["call_id"] = run["pending"][0]["call_id"]
        await said(client, "approve", decision="decline", **to)
        assert (await said(client, "result", run_id=run["run_id"]))["answer"] == "done"
        results = [each.content for each in (await agent.load(run["run_id"])).messages if isinstance(each, ToolResult)]
        assert results == ["booked {'seats': 2}", "booked None"]


async def test_a_session_belongs_to_its_caller():
    """Another credential with its id, of another tenant or with other scopes, is answered as for an unknown session."""
    async with serving(paying()) as server:
        opened = await server.post("/mcp", json=HELLO, headers=ACCEPT | named("ann", "acme"))
        session = {"mcp-session-id": opened.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
        for caller in (named("ann", "other"), named("bob", "acme"), named("ann", "acme", "admin")):
            texts = []
            for id_ in (session["mcp-session-id"], "unknown"):
                headers = ACCEPT | session | {"mcp-session-id": id_} | caller
                answers = [
                    await server.post("/mcp", json=LIST, headers=headers),
                    await server.get("/mcp", headers=headers),
                    await server.delete("/mcp", headers=headers),
                ]
                assert [each.status_code for each in answers] == [404] * 3
                texts.append([each.text for each in answers])
            assert texts[0] == texts[1]
        mine = await server.post("/mcp", json=LIST, headers=ACCEPT | session | named("ann", "acme"))
        assert (mine.status_code, '"approve"' in mine.text) == (200, True)


async def test_keys_and_limits_are_those_of_the_gateway():
    """Without a valid key 401, beyond the limit of requests 429, for each request."""
    limits = RateLimits(requests=2)
    async with serving(paying(), limits=limits) as server:
        nobody = await server.post("/mcp", json=HELLO, headers=ACCEPT | {"x-caller": "x"})
        assert (nobody.status_code, nobody.headers["www-authenticate"][:6]) == (401, "Bearer")
        codes = [(await server.post("/mcp", json=HELLO, headers=ACCEPT | named())).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        with pytest.raises(BaseExceptionGroup):
            async with connected(server, "nobody"):
                pass
        large = await server.post("/mcp", content=b" " * 5_000_000, headers=ACCEPT | named("bob"))
        assert large.status_code == 413
        assert (await server.put("/mcp", headers=named("bob"))).status_code == 405


@pytest.mark.parametrize(
    ("error", "text"), [(StoreError, "the store does not answer: try again"), (KeyError, "the server failed; its log")]
)
async def test_errors_hide_what_failed(error, text, monkeypatch):
    """The texts of stores and of bugs may have names and addresses, which no client is shown."""
    agent = paying()
    async with serving(agent) as server, connected(server) as client:
        run_id = (await said(client, "start", prompt="pay"))["run_id"]

        async def fail(*_args, **_options):
            raise error("db.internal:5432")

        monkeypatch.setattr(agent.store, "read", fail)
        told = await refused(client, "status", run_id=run_id)
        assert told.startswith(text)
        monkeypatch.undo()


async def test_a_shutdown_ends_what_is_open():
    """Calls that wait return the state, streams end in order; and the app is served again in its next lifespan."""

    @tool
    async def wait() -> str:
        """Wait for ever."""
        await anyio.sleep_forever()
        raise AssertionError

    agent = Agent(ScriptedModel(*[say("", call("wait"))] * 2), tools=[wait], name="shop", store=MemoryStore())
    app = serve([agent], auth=read_caller)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here", headers=ACCEPT | named())
    for number in (1, 2):
        async with app.lifespan(), anyio.create_task_group() as tasks:
            opened = await http.post("/mcp", json=HELLO)
            headers = {"mcp-session-id": opened.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
            ended = []

            async def read(method, ended=ended, headers=headers, **options):
                ended.append(await http.request(method, "/mcp", headers=headers, **options))

            arguments = {"name": "start", "arguments": {"prompt": "go", "key": f"r{number}", "wait_s": 60}}
            tasks.start_soon(read, "GET")
            tasks.start_soon(partial(read, "POST", json={**LIST, "method": "tools/call", "params": arguments}))
            while not (app.gateway.streams and await is_working(agent, number)):  # noqa: ASYNC110  there is no event
                await anyio.sleep(0.01)
            app.close_streams()
            while len(ended) < 2:  # noqa: ASYNC110  they are on their way
                await anyio.sleep(0.01)
            assert [each.status_code for each in ended] == [200, 200]
            assert any('"status":"running"' in each.text or '"status":"queued"' in each.text for each in ended)


async def is_working(agent, count):
    """Return whether there are so many runs, and the call of the newest has started."""
    rows = await agent.runs.list()
    return len(rows) == count and any(entry.call.name == "wait" for entry in (await agent.load(rows[0].id)).open)


async def test_it_needs_its_extra(monkeypatch):
    """Without it the server runs, and the answer says what to install."""

    def load(_gateway):
        with require_extra("/mcp", "mcp", "mcp"):
            raise ModuleNotFoundError(name="mcp")

    monkeypatch.setattr(mcp_sessions, "_load_server", load)
    async with serving(paying()) as server:
        answer = await server.post("/mcp", json=HELLO, headers=ACCEPT | named())
        assert (answer.status_code, "pip install 'agentfsm[mcp]'" in answer.text) == (501, True)


async def test_a_run_is_a_task_of_its_caller():
    """Its approval is asked by the task, and decided by whose key may; to another tenant there is no such task."""
    async with serving(paying()) as server, connected(server, "ann/acme/run", **OPTIONS) as client:
        task = await begin(client, "start", prompt="pay")
        [(key, request)] = (await look(client, task, "input_required")).input_requests.items()
        assert "May pay run?" in request.params.message
        approve = {key: accept(approve=True)}
        for caller, why in (("bob/other/run+approve", "there is no task"), ("ann/acme/run", "approve")):
            async with connected(server, caller, **OPTIONS) as other:
                with pytest.raises(MCPError, match=why):
                    await answer(other, task, **approve)
        async with connected(server, "eve/acme/run+approve", **OPTIONS) as boss:
            await answer(boss, task, **approve)
        await look(client, task, "completed")
        again = await begin(client, "start", prompt="pay")
        await cancel_task(client, again)
        assert (await said(client, "result", run_id=again))["stop_reason"] == "cancelled"
