"""Where a server that is elsewhere may be, and that what is sent to one goes to no other."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import pytest

from agentfsm import MisuseError
from agentfsm._lib.public_network import is_local_host, is_private
from agentfsm.mcp import MCPServer, MCPServerError


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.9.1",
            "0.0.0.0",  # noqa: S104  nothing is bound to it
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
        ),
        *("168.63.129.16", "100.100.100.200", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "::", "fe80::1", "fe80::1%lo", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "64:ff9b::127.0.0.1"),
        *("64:ff9b::a9fe:a9fe", "64:ff9b:1::10.0.0.1", "2002:7f00:1::", "2002:a00:1::", "100::1"),
    ],
)
def test_addresses_that_are_not_public(address):
    """Private, loopback, link-local, multicast, reserved and metadata addresses, in IPv6 around IPv4 as well."""
    assert is_private(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]
)
def test_addresses_that_are_public(address):
    """The public network's, also where IPv6 carries IPv4."""
    assert not is_private(address)


def test_hosts_that_name_this_machine():
    """Only what says so in plain words is local; a number that happens to mean it is not."""
    assert all(map(is_local_host, ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.1.1.1", "::1", "[::1]"]))
    assert not any(
        map(is_local_host, ["2130706433", "0177.0.0.1", "127.1", "0.0.0.1", "localhost.example.org", "10.0.0.1"])
    )


@pytest.mark.parametrize(
    "url", ["http://example.org/mcp", "http://10.0.0.1/mcp", "ftp://localhost/", "localhost", "", None]
)
def test_urls_that_nothing_is_sent_to(url):
    """Plain HTTP is for this machine, and for a network of one's own."""
    with pytest.raises(MisuseError):
        MCPServer.http(url, name="demo")


def test_plain_http_in_a_network_of_ones_own():
    """Who says that a private address is fine says so of plain HTTP there."""
    assert MCPServer.http("http://10.0.0.1/mcp", allow_private=True).name == "10-0-0-1"


class Recorder(BaseHTTPRequestHandler):
    """Answers as an MCP server, or sends elsewhere, and remembers what came."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(dict(self.headers.items()))
        if self.server.elsewhere:
            self.send_response(307)
            self.send_header("Location", self.server.elsewhere)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        version = message.get("params", {}).get("protocolVersion")
        results = {
            "initialize": {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "", "version": ""},
            },
            "tools/list": {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]},
        }
        result = results.get(message["method"])
        end = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
        body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), **end}).encode()
        self.send_response(200 if "id" in message else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send_error(405)

    do_DELETE = do_GET  # noqa: N815  the library's name

    def log_message(self, *args):
        pass


@contextmanager
def listening(elsewhere=None):
    """Run a server on loopback, and yield it with its port and what it has seen."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    server.seen, server.elsewhere, server.daemon_threads = [], elsewhere, True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def url_of(server, host="127.0.0.1"):
    return f"http://{host}:{server.server_address[1]}/mcp"


async def listed(server):
    try:
        await server.update()
    finally:
        await server.aclose()
    return [each.name for each in server.tools]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_server_on_this_machine_is_fine(host):
    """A URL that says in so many words that it is local needs no leave."""
    with listening() as there:
        assert await listed(MCPServer.http(url_of(there, host), name="demo")) == ["demo__t"]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("mcp.example.org", "127.0.0.1"),
        ("mcp.example.org", "169.254.169.254"),
        ("mcp.example.org", "::ffff:10.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
    ],
)
async def test_a_host_that_is_somewhere_private(monkeypatch, host, address):
    """What counts is the address that is connected to; the error names it and the way on."""
    asked = []

    async def found(name, port, **_):
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port)), (0, 0, 0, "", (address, port))]

    monkeypatch.setattr(anyio, "getaddrinfo", found)
    with pytest.raises(MCPServerError) as caught:
        await listed(MCPServer.http(f"https://{host}/mcp", name="demo"))
    assert f"has the address {address}, which is not public" in str(caught.value)
    assert "allow_private=True" in str(caught.value)
    assert asked


async def test_a_host_that_moves_between_two_lookups(monkeypatch):
    """The address that was looked at is the one that is connected to: a name that changes its meaning gains nothing."""
    connected = []

    async def found(name, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port))]

    async def connect(remote_host, remote_port, **_):
        connected.append(remote_host)
        raise OSError

    monkeypatch.setattr(anyio, "getaddrinfo", found)
    monkeypatch.setattr(anyio, "connect_tcp", connect)
    with pytest.raises(MCPServerError):
        await listed(MCPServer.http("https://mcp.example.org/mcp", name="demo"))
    assert set(connected) == {"8.8.8.8"}


@pytest.mark.parametrize("private", [True, False])
async def test_a_redirect_takes_no_token_along(private):
    """What one server is sent goes to no other host or port, whatever it answers; the other is not even asked."""
    with listening() as other, listening(url_of(other)) as first:
        server = MCPServer.http(url_of(first), headers={"Authorization": "Bearer t0p"}, allow_private=private)
        with pytest.raises(MCPServerError):
            await listed(server)
    assert {seen["Authorization"] for seen in first.seen} == {"Bearer t0p"}
    assert other.seen == []


async def test_each_server_is_sent_its_own_headers():
    """Two servers at once, each with its token: neither sees the other's."""
    with listening() as one, listening() as two:
        for there, token in ((one, "first"), (two, "second")):
            server = MCPServer.http(url_of(there), headers={"Authorization": token}, name=token)
            assert await listed(server) == [f"{token}__t"]
    assert {seen["Authorization"] for seen in one.seen} == {"first"}
    assert {seen["Authorization"] for seen in two.seen} == {"second"}
