"""A server over HTTP on a real socket of this machine: who gets in, what a request may be, how it ends."""

import json
import socket
from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest
from anyio.lowlevel import checkpoint
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import ElicitResult, Implementation

from agentfsm import Agent, MisuseError, tool
from agentfsm._lib.web.http_guard import HTTPGuard, build_allowed_hosts, is_loopback
from agentfsm._lib.web.http_server import bind_socket
from agentfsm.mcp import MCPService, Resource
from agentfsm.testing import FunctionModel, ScriptedModel, say
from agentfsm.testing.conformance.helpers import list_claimable
from tests.support.server_reaper import HANG_S

TOKEN = "a-token-that-is-long-enough"  # noqa: S105  it opens nothing
EVERYWHERE = "0.0.0.0"  # noqa: S104  nothing listens there
SCOPE = {"type": "http", "method": "POST", "path": "/mcp"}
MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
JSON = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@tool(read_only=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@asynccontextmanager
async def serving(service, **options):
    """Serve on a port that is free, and hand out the URL."""
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(lambda *, task_status: service.http(port=0, task_status=task_status, **options))
        yield url
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def connected(url, token=None, **options):
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(url, http_client=http), **options) as client,
    ):
        yield client


@MODES
async def test_both_revisions_are_served(mode):
    """Tools, resources and runs, over a socket."""
    agent = Agent(ScriptedModel(say("done")), tools=[add])
    notes = Resource(uri="notes://all", name="all", read=lambda: "é")
    async with serving(agent.as_mcp_server(resources=[notes])) as url, connected(url, mode=mode) as client:
        assert client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
        assert (await client.call_tool("add", {"a": 1, "b": 2})).content[0].text == "3"
        assert (await client.read_resource("notes://all")).contents[0].text == "é"
        run = (await client.call_tool("start", {"prompt": "go"})).structured_content
        assert run["answer"] == "done"
        assert [each.name for each in (await client.list_resources()).resources] == ["all", run["run_id"]]


@MODES
async def test_a_person_is_asked_over_http(mode):
    """As an answer that asks, or as a request of the server's on the stream of the call."""

    @tool(requires_approval=True)
    async def wipe(path: str) -> str:
        """Remove a file."""
        return f"removed {path}"

    async def ask(_context, _params):
        return ElicitResult(action="accept", content={"approve": True})

    async with (
        serving(MCPService([wipe], name="demo")) as url,
        connected(url, mode=mode, elicitation_callback=ask) as client,
    ):
        assert (await client.call_tool("wipe", {"path": "/etc"})).content[0].text == "removed /etc"


async def posted(url, body=HELLO, **headers):
    async with httpx2.AsyncClient() as http:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await http.post(url, content=content, headers={**JSON, **headers})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:9"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example:80"}, 421),
        ({"host": "localhost:1@evil"}, 421),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost.evil.example"}, 403),
        ({"content-type": "text/plain"}, 400),
    ],
)
@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
async def test_pages_from_elsewhere_are_refused(headers, status, version):
    """By the name that the server is called by (DNS rebinding), and by the page that calls, in both revisions."""
    body = HELLO if version == "2025-11-25" else {**HELLO, "method": "server/discover", "params": {"_meta": _META}}
    if version == "2026-07-28":
        headers = {"mcp-protocol-version": version, "mcp-method": "server/discover", **headers}
    async with serving(MCPService([add], name="demo")) as url:
        assert (await posted(url, body, **headers)).status_code == status


_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "x", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


async def test_a_client_that_cannot_ask_gets_http_400():
    """With -32021, as the revision 2026-07-28 wants it."""

    @tool(requires_approval=True)
    async def wipe(path: str) -> str:
        """Remove a file."""
        return f"removed {path}"

    params = {"name": "wipe", "arguments": {"path": "/etc"}, "_meta": _META}
    body = {**HELLO, "method": "tools/call", "params": params}
    headers = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": "wipe"}
    async with serving(MCPService([wipe], name="demo")) as url:
        answer = await posted(url, body, **headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, -32021)
    assert error["data"] == {"requiredCapabilities": {"elicitation": {"form": {}}}}


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer wrong-token-of-some-length", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer", 401),
        (f"Bearer {TOKEN}x", 401),
        ("Bearer t\u00f6ken", 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN}", 200),
    ],
)
async def test_a_token_is_asked_for(authorization, status):
    """None, a wrong one and another scheme are refused with what would do; nothing is read of such a request."""
    async with serving(MCPService([add], name="demo"), token=TOKEN) as url:
        headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
        answer = await posted(url, **headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert ("invalid_token" in answer.headers["www-authenticate"]) is (authorization is not None)


@MODES
async def test_a_client_with_the_token_is_served(mode, monkeypatch):
    """The token may come from the environment, and no tool sees it."""
    monkeypatch.setenv("AGENTFSM_MCP_TOKEN", TOKEN)
    async with serving(MCPService([add], name="demo")) as url, connected(url, TOKEN, mode=mode) as client:
        assert (await client.call_tool("add", {"a": 1, "b": 2})).content[0].text == "3"


async def test_the_token_goes_no_further():
    """What is behind the guard sees no `Authorization`."""
    seen = []

    async def app(scope, _receive, _send):
        seen.append(scope["headers"])

    guarded = HTTPGuard(app, build_allowed_hosts("127.0.0.1", []), TOKEN)
    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
    await guarded(SCOPE | {"headers": headers}, None, None)
    assert seen == [[(b"host", b"localhost")]]


async def test_two_tokens_are_none():
    """A request that brings two is refused, whichever is right."""
    sent = []

    async def send(message):
        sent.append(message)

    right = (b"authorization", f"Bearer {TOKEN}".encode())
    guarded = HTTPGuard(None, build_allowed_hosts("127.0.0.1", []), TOKEN)
    await guarded(SCOPE | {"headers": [(b"host", b"localhost"), right, right]}, None, send)
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("declared", [True, False])
async def test_a_huge_body_is_refused(declared):
    """10 MB, with its length told or in pieces without it."""
    size = 10 * 1024 * 1024

    async def pieces():
        for _ in range(10):
            yield b"x" * 1024 * 1024

    async with serving(MCPService([add], name="demo")) as url, httpx2.AsyncClient() as http:
        content = b"x" * size if declared else pieces()
        try:
            status = (await http.post(url, content=content, headers=JSON)).status_code
        except httpx2.TransportError:  # the server has answered and closed, while the client still wrote
            status = 413
        assert status == 413
        assert (await posted(url)).status_code == 200


async def test_a_body_that_is_no_json_is_refused():
    """And deep nesting, and a batch."""
    async with serving(MCPService([add], name="demo")) as url:
        for body in (b"{", b"[" * 100_000, b"[]", b"null"):
            assert (await posted(url, body)).status_code == 400


@MODES
async def test_a_client_with_many_slow_calls_does_not_hold_up_another(mode):
    """Of 20 calls that run one at a time, 19 come after the call of the other, and end after its answer."""
    release, answered = anyio.Event(), anyio.Event()
    started, started_before = [], []

    @tool
    async def slow() -> str:
        """Wait for the other client's answer; the first one only until it may end."""
        started.append("slow")
        await release.wait()
        if len(started) > 1:
            with anyio.fail_after(HANG_S):
                await answered.wait()
        return "slow"

    @tool
    async def quick() -> str:
        """Return at once."""
        started.append("quick")
        return "quick"

    service = MCPService([slow, quick], name="shop")
    (tools,) = service._tools
    first, second = (Implementation(name=name, version="1") for name in "ab")
    async with (
        serving(service) as url,
        connected(url, mode=mode, client_info=first) as a,
        connected(url, mode=mode, client_info=second) as b,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(20):
            tasks.start_soon(a.call_tool, "slow", {})
        await _until(lambda: tools.sequencer.count_calls("127.0.0.1") == 20)

        async def call_quick():
            await b.call_tool("quick", {})
            started_before.append(len(started))
            answered.set()

        tasks.start_soon(call_quick)
        await _until(lambda: tools.sequencer.count_calls("127.0.0.1") == 21)
        release.set()
    assert started == ["slow", "quick", *["slow"] * 19]
    assert started_before[0] <= 3  # the first slow one, the quick one, and one that waits for its answer


async def _until(condition):
    with anyio.fail_after(HANG_S):
        while not condition():
            await checkpoint()


async def test_a_client_that_goes_away_in_mid_call_ends_the_call_and_no_run():
    """A tool's call is cancelled; a run that was started goes on, and the server with it."""
    begun, cancelled, release = anyio.Event(), anyio.Event(), anyio.Event()

    @tool
    async def hang() -> str:
        """Hang."""
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async def reply(_request):
        await release.wait()
        return "at last"

    service = Agent(FunctionModel(reply), tools=[hang]).as_mcp_server()
    async with serving(service) as url:
        async with connected(url) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "start", {"prompt": "go", "run_id": "r1", "wait_s": 60})
            tasks.start_soon(client.call_tool, "hang", {})
            await begun.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(10):
            await cancelled.wait()
        release.set()
        async with connected(url) as client:
            run = (await client.call_tool("result", {"run_id": "r1"})).structured_content
            assert run["answer"] == "at last"


async def test_the_end_of_the_server_gives_runs_back():
    """A run under way at the end has no owner afterwards, and the next server goes on with it."""
    asked, release = anyio.Event(), anyio.Event()

    async def reply(_request):
        asked.set()
        await release.wait()
        return "at last"

    agent = Agent(FunctionModel(reply))
    async with serving(agent.as_mcp_server()) as url, connected(url) as client:
        await client.call_tool("start", {"prompt": "go", "run_id": "r1", "wait_s": 0})
        await asked.wait()
    assert await list_claimable(agent.store, agent.name) == ("r1",)
    release.set()
    async with serving(agent.as_mcp_server()) as url, connected(url) as client:
        run = (await client.call_tool("result", {"run_id": "r1"})).structured_content
        assert run["answer"] == "at last"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": EVERYWHERE}, "clients need a bearer token"),
        ({"host": "192.0.2.1"}, "clients need a bearer token"),
        ({"host": EVERYWHERE, "token": TOKEN}, "host names of the server are unknown"),
        ({"token": "short"}, "16 or more printable"),
        ({"token": "t\u00f6ken" * 10}, "16 or more printable"),
    ],
)
async def test_a_server_that_anybody_could_reach_is_refused(options, words):
    """Before anything listens."""
    with pytest.raises(MisuseError, match=words):
        await MCPService([add], name="demo").http(port=0, **options)


async def test_a_port_that_is_taken_is_a_clear_error():
    """With what to do."""
    async with serving(MCPService([add], name="demo")) as url:
        port = int(url.partition("127.0.0.1:")[2].partition("/")[0])
        with pytest.raises(MisuseError, match="give another port"):
            await MCPService([add], name="demo").http(port=port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_answer_waits_for_an_acknowledgement(host):
    """Accepted connections send at once: the end of a streamed answer follows its beginning by less than 40 ms."""
    with (
        bind_socket(host, 0) as bound,
        socket.create_connection(bound.getsockname()[:2]),
        bound.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("called", "status"),
    [
        ({"host": ["localhost"]}, 200),
        ({"host": ["LocalHost:65535"]}, 200),
        ({"host": ["[::1]:8000"]}, 200),
        ({"host": ["10.0.0.7:1"]}, 200),
        ({"host": ["mcp.example.org"]}, 200),
        ({"host": ["proxy:443"]}, 200),
        ({"host": []}, 421),
        ({"host": [""]}, 421),
        ({"host": ["localhost", "localhost"]}, 421),
        ({"host": ["localhost", "evil.example"]}, 421),
        ({"host": ["localhost:1@evil"]}, 421),
        ({"host": ["user@localhost"]}, 421),
        ({"host": ["localhost:"]}, 421),
        ({"host": ["localhost:0"]}, 421),
        ({"host": ["localhost:080"]}, 421),
        ({"host": ["localhost:65536"]}, 421),
        ({"host": ["localhost:+80"]}, 421),
        ({"host": ["localhost:\u0661"]}, 421),
        ({"host": ["localhost:80:80"]}, 421),
        ({"host": ["localhost."]}, 421),
        ({"host": ["localhost.evil.example"]}, 421),
        ({"host": ["localhost/evil"]}, 421),
        ({"host": ["localhost, evil"]}, 421),
        ({"host": [" localhost"]}, 421),
        ({"host": ["localhost\n"]}, 421),
        ({"host": ["::1"]}, 421),
        ({"host": ["[::1"]}, 421),
        ({"host": ["[::1]evil"]}, 421),
        ({"host": ["[::1].evil.example"]}, 421),
        ({"host": ["[localhost]"]}, 421),
        ({"host": ["proxy"]}, 421),
        ({"host": ["proxy:80"]}, 421),
        ({"origin": ["http://localhost:3000"]}, 200),
        ({"origin": ["https://mcp.example.org"]}, 200),
        ({"origin": [""]}, 403),
        ({"origin": ["null"]}, 403),
        ({"origin": ["localhost"]}, 403),
        ({"origin": ["file://localhost"]}, 403),
        ({"origin": ["http://localhost", "http://localhost"]}, 403),
        ({"origin": ["http://localhost http://evil.example"]}, 403),
        ({"origin": ["http://localhost:1@evil"]}, 403),
        ({"origin": ["http://localhost/"]}, 403),
        ({"origin": ["http://localhost:3000.evil.example"]}, 403),
    ],
)
async def test_host_and_origin_are_read_strictly(called, status):
    """Only a plain host that is allowed, in one header, gets in; `localhost:1@evil` is a user at another host."""
    headers = {"host": ["localhost"], **called}
    sent = []

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    pairs = [(name.encode(), value.encode("utf-8")) for name, values in headers.items() for value in values]
    guarded = HTTPGuard(app, build_allowed_hosts("10.0.0.7", ["mcp.example.org", "proxy:443"]), None)
    await guarded(SCOPE | {"headers": pairs}, None, send)
    assert sent[0]["status"] == status


@pytest.mark.parametrize("name", ["http://localhost", "localhost:1@evil", "localhost:x", "*", ""])
def test_a_name_that_no_client_could_send_is_refused(name):
    """Where the server is made, and not by a 421 for everybody."""
    with pytest.raises(MisuseError, match="is not a HOST or HOST:PORT"):
        build_allowed_hosts("127.0.0.1", [name])


def test_what_is_loopback():
    """Only what no other machine can reach."""
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, (EVERYWHERE, "10.0.0.1", "example.org", "")))


async def test_an_app_serves_in_a_web_server_of_ones_own():
    """`asgi()` is an app with a lifespan; here the SDK's transport calls it without a socket."""
    app = Agent(ScriptedModel(say("done"))).as_mcp_server().asgi(token=TOKEN)
    started, over, sent = anyio.Event(), anyio.Event(), []

    async def receive():
        if not sent:
            return {"type": "lifespan.startup"}
        await over.wait()
        return {"type": "lifespan.shutdown"}

    async def send(message):
        sent.append(message["type"])
        started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app, {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
        await started.wait()
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as http:
            assert (await http.post("/mcp", json=HELLO, headers=JSON)).status_code == 401
            answer = await http.post("/mcp", json=HELLO, headers={**JSON, "authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 200
        over.set()
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
