"""Hosts that a function in a sandbox may connect to."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import pytest

from agentfsm._lib.public_network import matches_host
from agentfsm.sandbox import Sandbox, find_isolation
from agentfsm.sandbox.egress_proxy import open_proxy
from tests.support import sandbox_functions
from tests.support.checks import HANG_S
from tests.support.database_servers import debian


class Answer(BaseHTTPRequestHandler):
    """Answers with the path and the headers of the request."""

    def do_GET(self):
        hosts = f" hosts: {self.headers.get_all('Host')}" if "X-Two" in self.headers else ""
        body = f"{self.path} {sorted(self.headers)}{hosts}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Stay quiet."""


@pytest.fixture
def port():
    """Give the port of a web server on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def sandboxed():
    """Skip where there is no sandbox."""
    debian("bwrap", "bubblewrap")
    if find_isolation().isolation is None:
        pytest.skip(f"no sandbox here: {find_isolation().description}")


@pytest.mark.usefixtures("sandboxed")
async def test_there_is_no_way_around_the_proxy(port):
    """Connections elsewhere are refused, and open ones that say nothing do not hold up the end of the call."""
    sandbox = Sandbox(hosts=[f"127.0.0.1:{port}"])
    ended = await sandbox.run(sandbox_functions.go_around_the_proxy, (port,), {})
    assert (ended.value["file"], ended.value["dns"]) == ("EACCES", "gaierror")
    # Landlock refuses it from version 4 on; before, there is nothing at this port of the sandbox's own network.
    assert ended.value["direct"] in {"EACCES", "ECONNREFUSED"}


@pytest.mark.usefixtures("sandboxed")
async def test_only_the_hosts_of_the_list_are_reached(port):
    """A listed address is; another port is not, nor a name with a private address, nor a host by its address."""
    sandbox = Sandbox(hosts=[f"127.0.0.1:{port}", f"localhost:{port}"])
    urls = [
        f"http://127.0.0.1:{port}/a?b=1",
        "http://127.0.0.1:9/",
        f"http://localhost:{port}/",
        f"http://[::1]:{port}/",
    ]
    reached, other_port, private, other_address = (await sandbox.run(sandbox_functions.fetch, (urls,), {})).value
    assert reached == "200 /a?b=1 ['Accept-Encoding', 'Connection', 'Host', 'User-Agent']"
    assert other_port == "403 127.0.0.1:9 is not among the hosts of the sandbox"
    assert private == "403 localhost has the address 127.0.0.1, which is not public"
    assert other_address == f"403 ::1:{port} is not among the hosts of the sandbox"


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"Host: evil.example\r\n",
        b"hOST:evil.example\r\nHost: b.example\r\n",
        b"Host : evil.example\r\n",
        b"\tHost: evil.example\r\n",
        b"X-One: 1\r\n Host: evil.example\r\n",
        b"X-One: 1\nHost: evil.example\r\n",
        b"X-One: 1\rHost: evil.example\r\n",
        b"X-One: 1\0\r\nHost: evil.example\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
    ],
)
async def test_the_host_of_a_request_is_that_of_its_url(port, headers):
    """Whatever `Host` a function sends, in any notation: a server of many names must not answer for another one."""
    async with open_proxy([f"127.0.0.1:{port}"]) as channel:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.send_fds(channel, [b"x"], [listener.fileno()])
            async with await anyio.connect_tcp("127.0.0.1", listener.getsockname()[1]) as client:
                await client.send(b"GET http://127.0.0.1:%d/ HTTP/1.1\r\n%sX-Two: 2\r\n\r\n" % (port, headers))
                answer = b"".join([chunk async for chunk in client]).decode()
    if " 400 " in answer:
        assert any(each in headers.replace(b"\r\n", b"") for each in (b"\r", b"\n", b"\0"))
        return
    assert answer.startswith("HTTP/1.0 200 ")
    assert f"hosts: ['127.0.0.1:{port}']" in answer
    assert "evil.example" not in answer
    assert "Upgrade" not in answer


async def exchange(hosts, *parts, waits=b""):
    """Send parts to a proxy, from the second on once its answer has these bytes; return the whole answer."""
    async with open_proxy(hosts) as channel:
        with socket.create_server(("127.0.0.1", 0)) as listener, anyio.fail_after(HANG_S):
            socket.send_fds(channel, [b"x"], [listener.fileno()])
            async with await anyio.connect_tcp("127.0.0.1", listener.getsockname()[1]) as client:
                answer = b""
                for number, part in enumerate(parts):
                    while number and waits not in answer:
                        answer += await client.receive()
                    await client.send(part)
                return answer + b"".join([chunk async for chunk in client])


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"x" * 17_000, b"431 Request Header Fields Too Large"),
        (b"\r\n\r\n", b"400 Bad Request"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"GET ftp://127.0.0.1/ HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"GET http:///x HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"CONNECT 127.0.0.1:99999 HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"CONNECT [::1 HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"connect 127.0.0.1:1 HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        ("GET http://exämple.org/ HTTP/1.1\r\n\r\n".encode(), b"400 Bad Request"),
        (b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n", b"403 Forbidden"),
        (b"CONNECT 127.0.0.1 HTTP/1.1\r\n\r\n", b"403 Forbidden"),
        (b"CONNECT evil.example:80@127.0.0.1:1 HTTP/1.1\r\n\r\n", b"502 Bad Gateway"),
        (b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n", b"502 Bad Gateway"),
        (b"CONNECT no-such-name.invalid:443 HTTP/1.1\r\n\r\n", b"502 Bad Gateway"),
    ],
)
async def test_what_is_no_request_to_a_host_of_the_list_is_answered(head, status):
    """With a status and a reason, and the connection ends."""
    answer = await exchange(["127.0.0.1:1", "no-such-name.invalid"], head)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"Connection: close" in answer


@pytest.mark.parametrize("waits", [b"", b"established"])
async def test_a_tunnel_carries_what_is_sent_before_and_after_its_answer(port, waits):
    """A client need not wait until the tunnel is there, and nothing that it has sent is lost."""
    parts = (b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % port, b"GET /in HTTP/1.0\r\n\r\n")
    answer = await exchange([f"127.0.0.1:{port}"], *(parts if waits else [b"".join(parts)]), waits=waits)
    assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.0 200 ")
    assert b"/in " in answer


async def test_clients_that_go_leave_the_proxy_alone(port):
    """One that says nothing, one in the middle of its head, and one that does not wait for the answer."""
    whole = b"GET http://127.0.0.1:%d/a HTTP/1.1\r\n\r\n" % port
    async with open_proxy([f"127.0.0.1:{port}"]) as channel:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.send_fds(channel, [b"x"], [listener.fileno()])
            for sent in (b"", whole[:9], whole):
                async with await anyio.connect_tcp("127.0.0.1", listener.getsockname()[1]) as client:
                    await client.send(sent)
            async with await anyio.connect_tcp("127.0.0.1", listener.getsockname()[1]) as client:
                for at in range(len(whole)):
                    await client.send(whole[at : at + 1])
                assert b"/a " in b"".join([chunk async for chunk in client])


@pytest.mark.parametrize(
    ("pattern", "host", "port", "matches"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "EXAMPLE.org.", 80, True),
        ("example.org", "example.org", 22, False),
        ("example.org", "a.example.org", 443, False),
        ("example.org", "notexample.org", 443, False),
        ("example.org:8443", "example.org", 8443, True),
        ("example.org:8443", "example.org", 443, False),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "example.org.evil.net", 443, False),
        ("*.0.0.1", "127.0.0.1", 80, False),
        ("[::1]:80", "::1", 80, True),
    ],
)
def test_which_hosts_an_entry_allows(pattern, host, port, matches):
    """A name allows itself on the ports of HTTP; `*.` all names below it; a port only that one."""
    assert matches_host(pattern, host, port) is matches
