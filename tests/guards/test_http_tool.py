"""`http_request` and the client behind it, against a real server: what they reach, and what they refuse to reach."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import anyio
import httpcore2
import pytest

from agentfsm import Agent, Label, MisuseError, Outcome
from agentfsm.guards import EgressError, build_http_tool, open_http_client
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import HANG_S

PUBLIC = "93.184.216.34"


class Site(BaseHTTPRequestHandler):
    """A site with pages that redirect, do not end, or are not what they seem."""

    def do_GET(self):
        self.server.seen.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        wanted = parse_qs(url.query)
        if url.path == "/to":
            self.answer(302, b"", Location=wanted["url"][0])
        elif url.path == "/cut":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif url.path == "/half":
            self.send_response(200)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"x")
        elif url.path == "/loop":
            self.answer(302, b"", Location="/loop")
        elif url.path in {"/endless", "/slow"}:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            self.go_on(b"x" * 60_000 if url.path == "/endless" else b"x", 0 if url.path == "/endless" else HANG_S)
        elif url.path == "/gzip":
            self.answer(200, b"\x1f\x8b not so", **{"Content-Encoding": "gzip"})
        elif url.path == "/picture":
            self.answer(200, b"\x89PNG\0", **{"Content-Type": "image/png"})
        elif url.path == "/odd":
            self.answer(404, "é".encode(), **{"Content-Type": "text/html; charset=no-such"})
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            said = {"body": body, "headers": {name.lower(): text for name, text in self.headers.items()}}
            self.answer(200, json.dumps(said).encode(), **{"Content-Type": "application/json"})

    do_POST = do_HEAD = do_GET  # noqa: N815

    def go_on(self, chunk, pause_s):
        try:
            while not self.server.over.wait(pause_s):
                self.wfile.write(chunk)
        except OSError:
            return  # the client has closed the connection

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        """Stay quiet."""


@pytest.fixture
def site():
    """Run the site on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.seen, server.over = [], threading.Event()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        server.host = f"127.0.0.1:{server.server_port}"
        server.url = f"http://{server.host}"
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


async def ask(tool, **arguments):
    """Have an agent call the tool; return its result."""
    model = ScriptedModel(say("", call(tool.name, **arguments)), "done")
    async with Agent(model, tools=[tool]) as agent:
        run = await agent.run("go")
    [result] = [message for message in run.messages if getattr(message, "call_id", None)]
    return result


async def test_a_response_is_data(site):
    """The status of a refusal, a picture and an unknown encoding are results that the model can read."""
    tool = build_http_tool([site.host])
    found = json.loads((await ask(tool, url=f"{site.url}/odd")).content)
    assert found == {
        "status": 404,
        "content_type": "text/html; charset=no-such",
        "url": f"{site.url}/odd",
        "text": "é",
    }
    picture = json.loads((await ask(tool, url=f"{site.url}/picture")).content)
    assert (picture["bytes"], "text" in picture) == (5, False)
    head = json.loads((await ask(tool, url=f"{site.url}/gzip", method="HEAD")).content)
    assert head["status"] == 200


async def test_labels_follow_from_the_methods(site):
    """A tool that only reads is read-only; one that writes is not, and carries the key of its call."""
    reads = build_http_tool([site.host])
    assert (reads.read_only, reads.labels) == (True, (Label.UNTRUSTED, Label.SENDS_OUT))
    assert set(reads.parameters["properties"]) == {"url", "method"}
    assert not reads.may_start_early
    writes = build_http_tool([site.host], methods=["POST"], name="http_post", trusted=True)
    assert (writes.read_only, writes.labels) == (False, (Label.SENDS_OUT, Label.IRREVERSIBLE))
    result = await ask(writes, url=f"{site.url}/orders", body='{"a": 1}')
    said = json.loads(json.loads(result.content)["text"])
    assert said["body"] == '{"a": 1}'
    assert said["headers"]["content-type"] == "application/json"
    assert len(said["headers"]["idempotency-key"]) > 8
    moved = json.loads((await ask(writes, url=f"{site.url}/to?url=/orders")).content)
    assert (moved["status"], moved["location"]) == (302, "/orders")
    assert "POST /orders" not in site.seen[1:]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://localhost:{port}/", "localhost:{port} is not among the allowed hosts"),
        ("http://127.0.0.1:1/", "127.0.0.1:1 is not among the allowed hosts"),
        ("http://ann:secret@127.0.0.1:{port}/", "has a user name or a password"),
        ("http://127.0.0.1:{port}@evil.example/", "has a user name or a password"),
        ("http://[::ffff:127.0.0.1]:{port}/", "is not among the allowed hosts"),
        ("http://2130706433:{port}/", "2130706433:{port} is not among"),
        ("http://0x7f000001:{port}/", "is not among the allowed hosts"),
        ("file:///etc/passwd", "http:// and https:// URLs only"),
        ("ftp://127.0.0.1:{port}/", "http:// and https:// URLs only"),
        ("//127.0.0.1", "https://"),
        ("http://127.0.0.1:x/", "not a URL"),
    ],
)
async def test_urls_beside_the_list(site, url, reason):
    """Nothing is sent, neither at once nor where a page that is allowed redirects to it."""
    tool = build_http_tool([site.host])
    url, reason = url.format(port=site.server_port), reason.format(port=site.server_port)
    result = await ask(tool, url=url)
    assert result.outcome is Outcome.FAILED
    assert reason in result.content
    assert "secret" not in result.content
    assert site.seen == []


async def test_each_redirect_is_checked(site):
    """A page that is allowed leads to no other host, and not in circles."""
    tool = build_http_tool([site.host])
    followed = json.loads((await ask(tool, url=f"{site.url}/to?url=/odd")).content)
    assert (followed["status"], followed["url"]) == (404, f"{site.url}/odd")
    for target in (f"http://localhost:{site.server_port}/secret", "http://169.254.169.254/latest/meta-data"):
        result = await ask(tool, url=f"{site.url}/to?url={target}")
        assert "is not among the allowed hosts" in result.content
    assert "more than 5 redirects" in (await ask(tool, url=f"{site.url}/loop")).content
    assert not [line for line in site.seen if line.endswith(("/secret", "meta-data")) and "url=" not in line]


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0.0.0.0", "[::ffff:127.0.0.1]", "[::]", "10.0.0.1", "169.254.169.254", "localhost"],  # noqa: S104
)
async def test_every_host_means_every_public_one(site, host):
    """Other ways to write a private address are seen through, also as the target of a redirect."""
    target = f"http://{host}:{site.server_port}/secret"
    async with open_http_client(["*", site.host]) as client:
        with pytest.raises(EgressError, match=r"which is not allowed, so nothing was sent"):
            await client.get(target)
        with pytest.raises(EgressError, match=r"which is not allowed, so nothing was sent"):
            await client.get(f"{site.url}/to", params={"url": target}, follow_redirects=True)
    assert not [line for line in site.seen if line.endswith("/secret")]


@pytest.fixture
def network(site, monkeypatch):
    """Answer look-ups from a list, and note the addresses that are connected to, which all lead to the site."""
    answers, connected = [], []

    async def getaddrinfo(_host, port, **_):
        addresses = answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    connect = httpcore2.AnyIOBackend.connect_tcp

    async def connect_tcp(self, host, _port, *rest):
        connected.append(host)
        return await connect(self, "127.0.0.1", site.server_port, *rest)

    monkeypatch.setattr("agentfsm._lib.public_network.anyio.getaddrinfo", getaddrinfo)
    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    return answers, connected


async def test_a_name_that_changes_its_address(network):
    """The address that was checked is connected to; the next look-up is checked anew, and all of its addresses."""
    answers, connected = network
    answers += [[PUBLIC], ["127.0.0.1"], [PUBLIC, "10.0.0.1"]]
    for _ in range(3):
        async with open_http_client(["rebind.example"]) as client:
            if not connected:
                assert (await client.get("http://rebind.example/")).status_code == 200
                continue
            with pytest.raises(EgressError, match=r"rebind\.example has the address (127|10)\.0\.0\.1"):
                await client.get("http://rebind.example/")
    assert (connected, answers) == ([PUBLIC], [])


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("docs.example.org", True),
        ("a.b.example.org", True),
        ("DOCS.example.org.", True),
        ("api.example.com", True),
        ("example.org", False),
        ("docsexample.org", False),
        ("api.example.com.evil.example", False),
        ("www.api.example.com", False),
    ],
)
async def test_names_and_names_below_a_name(network, host, is_allowed):
    """An entry is one name; with "*." it is the names below one."""
    answers, connected = network
    answers.append([PUBLIC])
    async with open_http_client(["api.example.com", "*.example.org"]) as client:
        if is_allowed:
            assert (await client.get(f"http://{host}/")).status_code == 200
        else:
            with pytest.raises(EgressError, match="is not among the allowed hosts"):
                await client.get(f"http://{host}/")
    assert bool(connected) is is_allowed


async def test_bodies_have_an_end(site):
    """One that does not end is cut off by its size, one that does not come by time, and none is unpacked."""
    tool = build_http_tool([site.host], max_bytes=100_000)
    assert "more than 100,000 bytes" in (await ask(tool, url=f"{site.url}/endless")).content
    assert "compressed (gzip)" in (await ask(tool, url=f"{site.url}/gzip")).content
    brief = build_http_tool([site.host], seconds=0.2)
    with anyio.fail_after(HANG_S):
        result = await ask(brief, url=f"{site.url}/slow")
    assert "not complete within 0.2 seconds" in result.content


@pytest.mark.parametrize("path", ["/cut", "/half", "/slow", "/endless", "/gzip"])
async def test_a_request_whose_response_did_not_come_is_not_repeated(site, path):
    """It may have had its effect, as the model reads; a request that only reads may be sent again."""
    tool = build_http_tool([site.host], methods=["POST"], max_bytes=100, seconds=0.2)
    result = await ask(tool, url=f"{site.url}{path}", body="x")
    assert result.outcome is Outcome.FAILED
    assert "may have happened" in result.content
    assert site.seen == [f"POST {path}"]


@pytest.mark.parametrize(
    "options",
    [{"methods": 5}, {"methods": []}, {"trusted": "no"}, {"irreversible": None}, {"seconds": float("inf")}],
    ids=str,
)
def test_options_of_the_tool_that_make_no_sense(options):
    """They are refused: a text for a bool would take a label away."""
    with pytest.raises(MisuseError, match=next(iter(options))):
        build_http_tool(["example.org"], **options)


def test_lists_that_are_none():
    """A string, a URL, no method: the error shows how to write it."""
    with pytest.raises(MisuseError, match=r"must be a sequence of hosts, not 'example.org'"):
        build_http_tool("example.org")
    with pytest.raises(MisuseError, match="is not a host"):
        open_http_client(["https://example.org/"])
    with pytest.raises(MisuseError, match="give some of GET, HEAD"):
        build_http_tool(["example.org"], methods="GET")
    with pytest.raises(MisuseError, match="max_bytes"):
        build_http_tool(["example.org"], max_bytes=0)
