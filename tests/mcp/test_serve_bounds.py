"""A server over HTTP under clients that take places and give nothing: half requests, and sessions that are not used."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from agentfsm import tool
from agentfsm._lib.web import http_connections
from agentfsm._lib.web.eviction import derive_client_key
from agentfsm.mcp import ClientLimits, MCPService
from agentfsm.mcp.server import http_sessions

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
# Whether the rude client has the address of the others.
RUDE = pytest.mark.parametrize("rude", [HERE, ELSEWHERE])
HEAD = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_HEAD = HEAD[:40]
HALF_BODY = HEAD + b"Content-Length: 1000\r\n\r\n{"
JSON = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}
PING = {"jsonrpc": "2.0", "id": 2, "method": "ping"}


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.fixture
def few(monkeypatch):
    """Leave few places, so that a test can take them all."""
    monkeypatch.setattr(http_connections, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(http_sessions, "MAX_SESSIONS", 8)


class Held:
    """A service with a tool that waits until it is let go."""

    def __init__(self):
        self.limits = ClientLimits(connections=5, sessions=5)
        self.begun, self.release = anyio.Semaphore(0), anyio.Event()

    async def hold(self) -> str:
        """Wait."""
        self.begun.release()
        await self.release.wait()
        return "let go"

    @asynccontextmanager
    async def serving(self):
        """Serve on a free port, and hand out the URL and the port."""
        service = MCPService([tool(read_only=True)(self.hold)], name="demo", client_limits=self.limits)
        async with anyio.create_task_group() as tasks:
            url = await tasks.start(lambda *, task_status: service.http(port=0, task_status=task_status))
            yield url, httpx2.URL(url).port
            tasks.cancel_scope.cancel()


@pytest.fixture
def held():
    return Held()


async def connect(stack, port, said, address=HERE):
    """Connect from an address, and say something."""
    stream = await stack.enter_async_context(await anyio.connect_tcp(HERE, port, local_host=address))
    await stream.send(said)
    return stream


async def ended(stream):
    """Wait until the server closes a connection, and return what it said before."""
    heard = b""
    try:
        while True:
            heard += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return heard


@asynccontextmanager
async def connected(url, mode):
    async with httpx2.AsyncClient() as http, Client(streamable_http_client(url, http_client=http), mode=mode) as client:
        yield client


@asynccontextmanager
async def posting(address=HERE):
    """Give a function that posts a message from an address, each on a connection of its own."""
    transport = httpx2.AsyncHTTPTransport(local_address=address)
    async with httpx2.AsyncClient(transport=transport, headers={**JSON, "connection": "close"}) as http:

        async def post(url, body, session=None, headers=()):
            own = {"mcp-session-id": session} if session else dict(headers)
            return await http.post(url, json=body, headers=own)

        yield post


@RUDE
@pytest.mark.parametrize("said", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "half a head", "half a body"])
async def test_half_requests_take_no_place_from_others(few, held, rude, said):
    """Whoever opens connections and sends no whole request loses the oldest of them, and everybody else is served."""
    held.release.set()
    async with held.serving() as (url, port), AsyncExitStack() as stack:
        half = [await connect(stack, port, said, rude) for _ in range(20)]
        async with connected(url, "auto") as client:
            assert (await client.call_tool("hold", {})).content[0].text == "let go"
        assert await ended(half[0]) == b""


@pytest.mark.parametrize("said", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "half a head", "half a body"])
async def test_a_request_has_to_arrive_in_time(monkeypatch, held, said):
    """A connection with half a request is closed, although there is room; one that waits for its answer is not."""
    monkeypatch.setattr(http_connections, "RECEIVE_TIMEOUT_S", 0.1)
    async with held.serving() as (url, port), AsyncExitStack() as stack, connected(url, "legacy") as client:
        results = []

        async def call():
            results.append(await client.call_tool("hold", {}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await held.begun.acquire()
            assert await ended(await connect(stack, port, said)) == b""
            held.release.set()
        assert results[0].content[0].text == "let go"


@pytest.mark.usefixtures("few")
async def test_a_connection_in_use_makes_no_room(held):
    """A client whose connections are all in use is told to come later (503); another is served, and none is cut off."""
    call = json.dumps(
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "hold", "arguments": {}, "_meta": META}}
    ).encode()
    head = HEAD + b"".join(f"{name}: {value}\r\n".encode() for name, value in MODERN.items())
    whole = head + f"Content-Length: {len(call)}\r\n\r\n".encode() + call
    async with held.serving() as (url, port), AsyncExitStack() as stack:
        calls = [await connect(stack, port, whole, ELSEWHERE) for _ in range(5)]
        for _ in calls:
            await held.begun.acquire()
        refused = await connect(stack, port, whole, ELSEWHERE)
        assert (await ended(refused)).startswith(b"HTTP/1.1 503 ")
        async with connected(url, "auto") as client:
            assert [each.name for each in (await client.list_tools()).tools] == ["hold"]
        held.release.set()
        for stream in calls:
            heard = b""
            while b"let go" not in heard:
                heard += await stream.receive()


async def test_a_client_with_too_many_calls_is_told_so(held):
    """Over whatever connections and sessions they come; its further call is not run, and another client is served."""
    held.limits = ClientLimits(calls=2)
    params = {"name": "hold", "arguments": {}, "_meta": META}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    async with held.serving() as (url, _port), posting(ELSEWHERE) as post, connected(url, "auto") as client:
        answers = []

        async def hold():
            answers.append(await post(url, call, headers=MODERN))

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(hold)
                await held.begun.acquire()
            refused = (await post(url, call, headers=MODERN)).text
            assert "hold was not run: this client has too many calls in progress, of which it may have 2" in refused
            tasks.start_soon(client.call_tool, "hold", {})
            await held.begun.acquire()
            held.release.set()
        assert all("let go" in each.text for each in answers)
        assert len(answers) == 2


META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "x", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
MODERN = {
    "accept": JSON["accept"],
    "mcp-protocol-version": "2026-07-28",
    "mcp-method": "tools/call",
    "mcp-name": "hold",
}


@RUDE
async def test_sessions_that_are_only_opened_lock_nobody_out(few, held, rude):
    """A client that only initialises loses its oldest sessions; those of others live on, and a new client gets in."""
    held.release.set()
    async with held.serving() as (url, _port), connected(url, "legacy") as early, posting(rude) as post:
        opened = [(await post(url, HELLO)).headers["mcp-session-id"] for _ in range(20)]
        async with connected(url, "legacy") as late:
            for client in (early, late):
                assert (await client.call_tool("hold", {})).content[0].text == "let go"
        assert [(await post(url, PING, session)).status_code for session in (opened[0], opened[-1])] == [404, 200]


async def test_a_session_in_use_is_not_ended(few, held):
    """Beside many that are used and idle, of the same client: its call under way is answered."""
    call = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "hold", "arguments": {}}}
    async with held.serving() as (url, _port), posting() as post:
        busy = (await post(url, HELLO)).headers["mcp-session-id"]
        answers = []

        async def hold():
            answers.append(await post(url, call, busy))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            await held.begun.acquire()
            idle = []
            for _ in range(20):
                idle.append((await post(url, HELLO)).headers["mcp-session-id"])
                assert (await post(url, PING, idle[-1])).status_code == 200
            assert (await post(url, PING, idle[0])).status_code == 404
            held.release.set()
        assert "let go" in answers[0].text
        assert (await post(url, PING, busy)).status_code == 200


async def test_a_session_that_its_client_ended_holds_no_place(few, held):
    """So one that is still open is not ended for it."""
    async with held.serving() as (url, _port), posting() as post, httpx2.AsyncClient() as http:
        kept = (await post(url, HELLO)).headers["mcp-session-id"]
        for _ in range(20):
            gone = (await post(url, HELLO)).headers["mcp-session-id"]
            assert (await http.delete(url, headers={"mcp-session-id": gone})).status_code == 200
        assert (await post(url, PING, kept)).status_code == 200


async def test_sessions_that_were_idle_for_long_hold_no_place(few, monkeypatch, held):
    """The SDK has ended them; here every session that is idle counts as such, so none has to make room."""
    monkeypatch.setattr(http_sessions, "SESSION_IDLE_TIMEOUT_S", -1.0)
    async with held.serving() as (url, _port), posting() as post:
        opened = [(await post(url, HELLO)).headers["mcp-session-id"] for _ in range(20)]
        assert {(await post(url, PING, session)).status_code for session in opened} == {200}


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("", ""),
        ("testclient", "testclient"),
    ],
)
def test_what_places_are_counted_by(address, client):
    """An IPv4 address, or the network of an IPv6 address, of which a client may have as many as it likes."""
    assert derive_client_key(address) == client
