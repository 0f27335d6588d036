"""Document B's research assistant (6): its story, a question that outlives the process, and who means it harm."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Barrier, Event, Thread
from types import ModuleType
from typing import Any, ClassVar, Self

import anyio
import attrs
import httpx
import pytest

from agentfsm import ArgumentsError, MisuseError, ModelRetry, Outcome, State, StopReason, ToolEvent, ToolEventType
from tests.support.checks import HANG_S, sound
from tests.support.example_modules import example

ROOT = Path(__file__).parent.parent
TURN = ["think", "act", "reflect", "observe"]
TRACE = """\
Turn 1: calling LLM...  → web_search('Python asyncio best practices')
Turn 2: calling LLM...  → read_url('http://library.test/together') + read_url('http://library.test/block')  [parallel]
Turn 3: calling LLM...  → web_search('asyncio common pitfalls')
Turn 4: calling LLM...  → read_url('http://library.test/pitfalls')
Turn 5: calling LLM...  → write_file('asyncio-report.md')
Turn 6: calling LLM...  → [no tool_calls] → Done

==================================================
Turns: 6 | Tokens: 11400 | #ms | completed
  Turn 1: web_search() OK #ms
  Turn 2: read_url() OK #ms
  Turn 2: read_url() OK #ms
  Turn 3: web_search() OK #ms
  Turn 4: read_url() OK #ms
  Turn 5: write_file() OK #ms

The report is saved as asyncio-report.md. In short: start tasks in a TaskGroup and bound"""


@pytest.fixture(scope="module")
def loaded() -> ModuleType:
    """The example. It keeps nothing of a run, so it is loaded once."""
    return example("research")


@pytest.fixture
def research(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The example, in a folder of its own and without a key."""
    for name in ("OPENAI_API_KEY", "SEARCH_URL", "AGENTFSM_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield loaded
    loaded.LOCAL.clear()


# The story.


async def test_it_prints_the_trace_of_document_b(research, capsys):
    """Six turns, six calls, and the start of the answer."""
    run = await research.main()
    out = capsys.readouterr().out
    assert re.sub(r"\d+ms", "#ms", out).partition("\n\n")[2].startswith(TRACE)
    assert (run.state, run.stop_reason, run.turn) == (State.DONE, StopReason.COMPLETED, 6)
    report = (Path(".agentfsm") / "research" / "asyncio-report.md").read_text(encoding="utf-8")
    assert "TaskGroup" in report
    assert f"{research.LIBRARY}/pitfalls" in report
    assert not research.LOCAL


async def test_it_goes_round_the_machine(research):
    """Five turns with tools, and one with the answer; what was read is in the history, and all of it in the journal."""
    async with research.agent() as agent:
        run = agent.start(research.TOPIC)
        states = []
        async for run in agent.steps(run):  # noqa: B020  each step gives the run anew
            states.append(run.state)
        await sound(agent, run)
        assert (agent.limits.turns, agent.limits.seconds) == (15, 120)
        assert agent.tools.names == ("web_search", "read_url", "write_file", "ask_user")
    assert states == [*TURN * 5, "think", "done"]
    read = "\n".join(message.text for message in run.messages)
    assert "[Content from http://library.test/together]\nasyncio best practices: tasks that belong together" in read
    assert "asyncio.timeout() bounds them — all at once." in read
    assert "no model reads this" not in read


async def test_the_two_pages_of_one_reply_are_read_at_once(research, monkeypatch):
    """Neither is given before both were asked for, and the events of the two overlap."""
    both = Barrier(2)

    class Meeting(research.Shelf):
        def do_GET(self) -> None:  # noqa: N802  the name is http.server's
            if self.path in {"/together", "/block"}:
                both.wait(HANG_S)
            super().do_GET()

    monkeypatch.setattr(research, "Shelf", Meeting)
    async with research.agent() as agent, agent.stream(research.TOPIC) as stream:
        told = [event async for event in stream if isinstance(event, ToolEvent)]
    at = {(event.call_id, event.type): number for number, event in enumerate(told)}
    started = [at[call, ToolEventType.STARTED] for call in ("t2.0", "t2.1")]
    completed = [at[call, ToolEventType.COMPLETED] for call in ("t2.0", "t2.1")]
    assert max(started) < min(completed)


def test_with_a_key_it_says_what_it_needs(research, monkeypatch):
    """A real model wants a real search engine."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for address in ("", "localhost:8888"):
        monkeypatch.setenv("SEARCH_URL", address)
        with pytest.raises(MisuseError, match="SEARCH_URL is not set"):
            research.agent()
    monkeypatch.setenv("SEARCH_URL", "http://localhost:8888/search")
    assert research.agent().model.name == "gpt-5.4-mini"


# The question.


def started(folder: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    """Start a Python of its own in a folder, without a key."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "AGENTFSM"))}
    environment = {**plain, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "error"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, text=True, encoding="utf-8", **streams
    )


def told(process: subprocess.Popen[str]) -> str:
    """Return what a process has printed, at its end."""
    out, err = process.communicate(timeout=5 * HANG_S)
    assert process.returncode == 0, err
    return out


def test_a_question_waits_for_another_process(tmp_path):
    """One process asks and ends, a second brings the answer, a third goes on to the report."""
    out = told(started(tmp_path, str(ROOT / "examples" / "research.py"), "asyncio"))
    assert "Agent asks: What about it shall I look for" in out
    assert "Turn 2" not in out
    answer, resume = re.findall(r"^    agentfsm (.+)$", out, re.MULTILINE)
    run_id = resume.removeprefix("resume ")
    assert answer == f'answer {run_id} t1.0 "best practices"'
    told(started(tmp_path, "-m", "agentfsm", "answer", run_id, "t1.0", "mostly the pitfalls"))
    assert "The report is saved" in told(started(tmp_path, "-m", "agentfsm", "resume", run_id))
    kept = json.loads(told(started(tmp_path, "-m", "agentfsm", "show", run_id, "--json")))
    assert "mostly the pitfalls" in json.dumps(kept)
    assert (tmp_path / ".agentfsm" / "research" / "asyncio-report.md").is_file()


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are of POSIX")
def test_a_question_is_asked_at_the_terminal(tmp_path):
    """Whoever sits there is asked, and the run goes on at once; an end of input leaves it waiting."""
    for typed, ends in (b"best practices\n", "a cancellation.\n"), (b"\x04", "resume "):
        master, slave = os.openpty()
        process = started(tmp_path, str(ROOT / "examples" / "research.py"), "asyncio", stdin=slave)
        os.close(slave)
        os.write(master, typed)
        out = told(process)
        os.close(master)
        assert "Agent asks: What about it shall I look for" in out
        assert ends in out


# The web: a server inside, which nobody may be led to, and which plays the hostile one where it is let in.


@attrs.define(eq=False)
class Inside:
    """A server on an address of this machine: it knows who asked for what, and answers as it is told."""

    address: str = "127.0.0.1"
    port: int = 0
    asked: list[tuple[str, str]] = attrs.field(factory=list)
    # Host header and path, in order.
    pages: dict[str, tuple[int, dict[str, str], bytes]] = attrs.field(factory=dict)
    # Status, headers and body, by path.
    sent: int = 0
    # Bytes of "/endless" or "/endless-redirect", and
    gone: Event = attrs.field(factory=Event)
    # whether its reader has left.
    read: Event = attrs.field(factory=Event)
    # Set by the test, when "/broken" has been read in part: then it breaks off.
    _server: Any = None

    def __enter__(self) -> Self:
        inside = self

        class Handler(Answering):
            server_of = inside

        self._server = ThreadingTCPServer((self.address, self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Answering(BaseHTTPRequestHandler):
    server_of: ClassVar[Inside]

    def do_GET(self) -> None:
        inside = self.server_of
        inside.asked.append((self.headers["host"], self.path))
        usual = (200, {"content-type": "text/plain"}, b"secret")
        endless = self.path.startswith("/endless")
        if self.path == "/endless-redirect":
            usual = (302, {"location": "/page"}, b"")
        status, headers, body = inside.pages.get(self.path, usual)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        try:
            while endless:
                inside.sent += self.wfile.write(b"more and more " * 4096)
        except OSError:
            inside.gone.set()
        if self.path == "/broken":
            inside.read.wait(HANG_S)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()  # at once and without a farewell, as LINGER says

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def inside(research: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """A server inside, at what the example takes for the usual port: whoever is led to 127.0.0.1 meets it."""
    with Inside() as server:
        monkeypatch.setitem(research.PORTS, "http", server.port)
        yield server


@pytest.fixture
def outside(research: ModuleType, inside: Inside) -> Inside:
    """The same server, which may be read under one name."""
    research.LOCAL["http://open.test"] = ("127.0.0.1", inside.port)
    return inside


# What the model is told where nobody was connected to.
REFUSED = r"not of the public web|does not exist: check|without a user|\((InvalidURL|RemoteProtocolError)"
HOSTS = [
    *("127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "127.255.255.254", "localhost", "LOCALHOST.", "0"),
    "0.0.0.0",  # noqa: S104  an address to refuse
    *("2130706433", "0x7f000001", "0x7f.0.0.1", "0x7f.1", "0177.0.0.1", "0177.1", "017700000001", "127.0.0.0x1"),
    *("16843009", "0x1010101", "0x1.0x1.0x1.0x1", "1.1", "1.1.257"),  # public, and still no way to write it
    *("%31%32%37.0.0.1", "127。0。0。1", "\uff11\uff12\uff17.0.0.1", "①②⑦.0.0.1", "127.0.0.1%00.example.com"),
    *("[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[0:0:0:0:0:ffff:7f00:0001]"),
    *("[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[::ffff:0:7f00:1]"),
    *("user@127.0.0.1", "example.com\\@127.0.0.1", "example.com:x@127.0.0.1", "-", ".."),
    *("", "a b", "x" * 300),
    *("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.127.255.255"),
    *("192.0.0.8", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "0.1.2.3"),
    *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    *("[fe80::1]", "[fe80::1%25lo]", "[fec0::1]", "[fc00::1]", "[fd12:3456::1]", "[ff02::1]", "[ff0e::1]"),
    *("[2001:db8::1]", "[3fff::1]", "[100::1]", "[5f00::1]", "[2001:20::1]", "[4000::1]"),
]


@pytest.mark.parametrize("host", HOSTS)
def test_what_is_not_public_is_not_read(research, inside, host):
    """However it is spelt: the model is told, and nobody is connected to."""
    with pytest.raises(ModelRetry, match=REFUSED):
        anyio.run(research.read_url, f"http://{host}/")
    assert not inside.asked


ADDRESSES = [
    *("file:///etc/passwd", "ftp://example.com/", "gopher://127.0.0.1/", "javascript:alert(1)", "data:text/plain,a"),
    *("//127.0.0.1/", "/etc/passwd", "127.0.0.1", "http:", "http:///x", "http://[::1"),
    *("http://1.1.1.1:22/", "http://1.1.1.1:0/", "http://1.1.1.1:99999/", "http://1.1.1.1:x/", "http://u:p@1.1.1.1/"),
    *("", "http://a\n/", "http://a\0/"),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_is_no_address_of_the_web_is_not_read(research, address):
    """Other schemes, other ports, users and broken addresses; `ModelRetry` is what the model can act upon."""
    with pytest.raises(ModelRetry, match=REFUSED):
        anyio.run(research.read_url, address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "2001:4860:4860::8888"]
)
def test_what_is_public_may_be_read(research, address):
    """The check does not simply refuse everything."""
    assert research.is_public(ip_address(address))


LOCATIONS = [
    *("http://127.0.0.1/secret", "//127.0.0.1/secret", "http://localhost/secret", "http://2130706433/secret"),
    *("http://[::ffff:127.0.0.1]/secret", "http://user@127.0.0.1/secret", "file:///secret", "ftp://open.test/secret"),
    *("http://open.test:1/secret", "https://127.0.0.1/secret", "http://[/secret", "http://169.254.169.254/secret"),
]


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_redirect_is_checked_as_the_first_address_was(research, outside, location):
    """A page that may be read leads to one that may not: it is not asked for."""
    outside.pages["/"] = (302, {"location": location}, b"")
    with pytest.raises(ModelRetry, match=REFUSED):
        anyio.run(research.read_url, "http://open.test/")
    assert outside.asked == [("open.test", "/")]


async def test_five_redirects_are_followed(research, outside):
    """Relative ones too; the page says where it was found; a sixth is too many."""
    for number in range(5):
        outside.pages[f"/{number}"] = (301 + number % 2, {"location": f"{number + 1}"}, b"")
    outside.pages["/5"] = (200, {"content-type": "text/plain"}, b"at last")
    assert await research.read_url("http://open.test/0") == "[Content from http://open.test/5]\nat last"
    assert outside.asked == [("open.test", f"/{number}") for number in range(6)]
    outside.pages["/5"] = (302, {"location": "/6"}, b"")
    with pytest.raises(ModelRetry, match="more than 5 times"):
        await research.read_url("http://open.test/0")
    assert len(outside.asked) == 12


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Let the system's resolver answer so for names that end in .rebind, one answer after the other."""
    real, asked = socket.getaddrinfo, []

    def getaddrinfo(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not str(name).endswith(".rebind"):
            return real(host, port, *args, **options)
        asked.append(name)
        found = answers[min(len(asked), len(answers)) - 1]
        return [each for address in found for each in real(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.fixture
def other(inside: Inside) -> Iterator[Inside]:
    """A server at the same port of another address, which the test calls a public one."""
    with Inside(address="127.0.0.2", port=inside.port) as server:
        yield server


async def test_a_name_is_asked_once(research, inside, other, monkeypatch):
    """A name that means a public address when it is checked and another when it is connected to gains nothing."""
    monkeypatch.setattr(research, "is_public", lambda ip: str(ip) == "127.0.0.2")
    asked = resolving(monkeypatch, ["127.0.0.2"], ["127.0.0.1"])
    other.pages["/"] = (200, {"content-type": "text/plain"}, b"public")
    assert (await research.read_url("http://a.rebind/")).endswith("\npublic")
    assert asked == ["a.rebind"]
    assert other.asked == [("a.rebind", "/")]
    with pytest.raises(ModelRetry, match="not of the public web"):
        await research.read_url("http://a.rebind/")
    assert not inside.asked


async def test_a_name_with_one_foot_inside_is_refused(research, inside, other, monkeypatch):
    """All addresses of a name have to be public, whichever comes first."""
    monkeypatch.setattr(research, "is_public", lambda ip: str(ip) == "127.0.0.2")
    resolving(monkeypatch, ["127.0.0.2", "127.0.0.1"])
    with pytest.raises(ModelRetry, match="not of the public web"):
        await research.read_url("http://a.rebind/")
    assert not other.asked + inside.asked


async def test_a_redirect_rebinds_nothing(research, inside, other, monkeypatch):
    """The name is looked up again for the next request, and what it then means is checked."""
    monkeypatch.setattr(research, "is_public", lambda ip: str(ip) == "127.0.0.2")
    resolving(monkeypatch, ["127.0.0.2"], ["127.0.0.1"])
    other.pages["/"] = (302, {"location": "/secret"}, b"")
    with pytest.raises(ModelRetry, match="not of the public web"):
        await research.read_url("http://a.rebind/")
    assert not inside.asked


async def test_the_certificate_is_asked_for_by_name(research, monkeypatch):
    """Connecting by number keeps the name in the TLS handshake, which then has to prove it."""
    hello = []

    def listen(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        hello.append(connection.recv(4096))
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setitem(research.PORTS, "https", listener.getsockname()[1])
        monkeypatch.setattr(research, "is_public", lambda _ip: True)
        resolving(monkeypatch, ["127.0.0.1"])
        thread = Thread(target=listen, args=(listener,))
        thread.start()
        with pytest.raises(ModelRetry, match="could not be had"):
            await research.read_url("https://named.rebind/")
        thread.join()
    assert b"named.rebind" in hello[0]


async def test_a_page_without_end_is_cut(research, outside):
    """So much is read, and the connection closed; the body of a redirect is not read at all."""
    text = await research.read_url("http://open.test/endless")
    assert research.PAGE_BYTES - 100 < len(text) <= research.PAGE_BYTES + 100
    assert outside.gone.wait(HANG_S)
    assert outside.sent < 30 * research.PAGE_BYTES  # the rest is what sockets hold
    outside.gone.clear()
    assert (await research.read_url("http://open.test/endless-redirect")).endswith("secret")
    assert outside.gone.wait(HANG_S)


async def test_half_a_page_is_no_page(research, outside, monkeypatch):
    """A connection that breaks is told, and not taken for the end."""
    whole = httpx.Response.aiter_raw

    async def aiter_raw(answer: httpx.Response) -> AsyncIterator[bytes]:
        async for piece in whole(answer):
            outside.read.set()
            yield piece

    monkeypatch.setattr(httpx.Response, "aiter_raw", aiter_raw)
    with pytest.raises(ModelRetry, match="could not be had"):
        await research.read_url("http://open.test/broken")
    assert outside.read.is_set()


@pytest.mark.parametrize(
    ("status", "headers", "says"),
    [
        (404, {"content-type": "text/html"}, "status 404"),
        (500, {"content-type": "text/html"}, "status 500"),
        (302, {"content-type": "text/html"}, "status 302"),
        (200, {"content-type": "image/png"}, r"not readable text \(image/png\)"),
        (200, {"content-type": "application/octet-stream"}, "not readable text"),
        (200, {"content-type": "a\x1b[31m\x80b"}, r"not readable text \(ab\)"),
        (200, {}, r"not readable text \(unknown\)"),
        (200, {"content-type": "text/plain", "content-encoding": "gzip"}, "not readable text"),
    ],
)
async def test_what_is_no_text_is_not_read(research, outside, status, headers, says):
    """The model is told what it is, in clean words."""
    outside.pages["/"] = (status, headers, b"body")
    with pytest.raises(ModelRetry, match=says):
        await research.read_url("http://open.test/")


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        ("text/plain; charset=gbk", "北京".encode("gbk"), "北京"),
        ("TEXT/PLAIN; Charset=ISO-8859-1", b"caf\xe9", "café"),
        ("text/plain; charset=klingon", "é".encode(), "é"),
        ("text/plain; charset=utf-99", "é".encode(), "é"),
        ("text/plain; charset=hex", b"6161", "6161"),
        ("text/plain; charset=punycode", b"a" * 900_000 + b"-b", "a" * 900_000 + "-b"),
        ("text/plain", b"\xff\xfe", "��"),
        ("application/ld+json", b'{"a": 1}', '{"a": 1}'),
        ("application/xhtml+xml", b"<p>a</p>", "a"),
        ("text/html", b"", "(no text)"),
    ],
)
async def test_text_of_any_encoding_is_read(research, outside, kind, body, text):
    """As it is declared, if that is an encoding of texts, else as UTF-8."""
    outside.pages["/"] = (200, {"content-type": kind}, body)
    assert await research.read_url("http://open.test/") == f"[Content from http://open.test/]\n{text}"


async def test_hostile_text_comes_clean(research, outside):
    """No terminal escapes, nothing invisible and nothing that turns text around, also if written as an entity."""
    hostile = "a\x1b[31m\u202e&#x202e;\u200b&#8203;\U000e0041&#xE0041;\x00\ufeff&#27;b<p>c&amp;&lt;d"
    outside.pages["/"] = (200, {"content-type": "text/html; charset=utf-8"}, hostile.encode())
    assert (await research.read_url("http://open.test/")).partition("\n")[2] == "ab\nc&<d"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<!DOCTYPE html><html><head><title>T</title><style>p{}</style></head><body><p>a <b>b</b>c</p>d", "T\na bc\nd"),
        ("a<script>if (1 < 2) x = '<p>hidden</p>'</SCRIPT>b", "a\nb"),
        ("a<!-- <p>hidden --> b<!-- hidden", "a b"),
        ("a<script>hidden", "a"),
        ("<pre>def f():\n    pass</pre>", "def f():\n    pass"),
        ("1 < 2 > 0 <", "1 < 2 > 0 <"),
        ("<a href='x'>link</a>, <noscript><p>hidden</p></noscript>end", "link,\nend"),
        ("a&nbsp;&eacute;&#" + "9" * 5_000 + ";", "a&nbsp;&eacute;&#" + "9" * 5_000 + ";"),
    ],
)
def test_html_becomes_text(research, page, text):
    """What is shown is kept, a line for each block; scripts, styles and comments are not."""
    assert research.text_of(page) == text


@pytest.mark.parametrize("piece", ["<a ", "<", "<!--", "<!", "<![CDATA[", "</", '<a b="', "<a b='>", "<?", "&#", "a"])
def test_no_page_takes_for_ever(research, piece):
    """A megabyte of what `html.parser` would chew on for hours, and of what a careless pattern would."""
    research.text_of("<b" + piece * (research.PAGE_BYTES // len(piece)))


# The search.


async def test_it_asks_the_search_engine_that_it_is_given(research, inside, monkeypatch):
    """Also one of this machine, since the user named it; but no other page of it may be read."""
    results = [{"title": f"T\u202e{n}", "url": f"http://x{n}/", "content": "a\n\x1b[31mb"} for n in range(9)]
    inside.pages["/search?lang=en&q=a+b%26c&format=json"] = (
        200,
        {"content-type": "application/json"},
        json.dumps({"results": [*results[:1], {"title": None}, *results[2:]]}).encode(),
    )
    address = f"http://127.0.0.1:{inside.port}"
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("SEARCH_URL", f"{address}/search?lang=en")
    assert await research.web_search("a b&c", max_results=2) == [
        {"title": "T0", "url": "http://x0/", "snippet": "a b"},
        {"title": "", "url": "", "snippet": ""},
    ]
    with pytest.raises(ModelRetry, match="not of the public web"):
        await research.read_url(f"{address}/search")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"results": 1}',
        b'{"results": {}}',
        b'{"results": [1]}',
        b"[" * 90_000,
        b"9" * 5_000,
        b"\xff",
    ],
)
async def test_a_search_engine_that_answers_nonsense(research, inside, monkeypatch, body):
    """The model is told to go on without."""
    inside.pages["/search?q=a&format=json"] = (200, {"content-type": "application/json"}, body)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("SEARCH_URL", f"http://127.0.0.1:{inside.port}/search")
    with pytest.raises(ModelRetry, match="cannot be read: go on"):
        await research.web_search("a")


@pytest.mark.parametrize("number", [0, 11])
def test_the_number_of_results_is_bounded(research, number):
    """By the schema, before anything is asked."""
    with pytest.raises(ArgumentsError, match="max_results"):
        research.web_search.bind(json.dumps({"query": "a", "max_results": number}))


# The file.


NAMES = [
    *("../up.md", "a/b.md", "a\\b.md", "..", ".", ".hidden.md", "..md", "-rf.md", "_a.md", "a:b.md", "a*.md", "~.md"),
    *("$HOME.md", "a.md.", "a.md/"),
    *("a.py", "conftest.py", "a.html", "a", "CON.md", "nul.txt", "com1.md", "LPT¹.txt", "a\u202emd.txt"),
    *("a\u200b.md", "a\ud800.md"),
    *("", " a.md", "a.md ", "aux .md", "a\0.md", "a\n.md", "a.md\n", "a.md\0.txt"),
    *("x" * 60 + ".md", "x" * 100_000 + ".md"),
]


@pytest.mark.parametrize("name", [*NAMES, "{absolute}/a.md"])
def test_a_file_has_a_plain_name(research, tmp_path, name):
    """Or none is written, anywhere."""
    with pytest.raises(ModelRetry, match="begins with a letter"):
        research.write_file(name.replace("{absolute}", str(tmp_path)), "text")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "name", ["report.md", "Python 3.11_x-y.TXT", "报告.md", "console.md", "com.md", "北" * 51 + ".md"]
)
def test_a_plain_name_is_taken(research, tmp_path, name):
    """In any script, and as long as a file system takes; twice is the same as once, and no draft is left."""
    for text in ("first", "caf\u00e9 \ud800"):
        said = research.write_file(name, text)
    assert said == f"Wrote 6 chars to {Path('.agentfsm', 'research', name)}"
    (written,) = (tmp_path / ".agentfsm" / "research").iterdir()
    assert (written.name, written.read_text(encoding="utf-8")) == (name, "café ?")


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
def test_a_link_is_replaced_and_not_followed(research, tmp_path, kind):
    """What bears the report's name and is something else keeps its content."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = tmp_path / ".agentfsm" / "research"
    folder.mkdir(parents=True)
    getattr(folder / "report.md", kind)(secret)
    research.write_file("report.md", "text")
    assert secret.read_text() == "secret"
    assert (folder / "report.md").read_text() == "text"
    assert not (folder / "report.md").is_symlink()


def test_a_folder_that_leads_elsewhere_is_not_written_to(research, tmp_path):
    """Whether or not there is something behind it."""
    folder = tmp_path / ".agentfsm" / "research"
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(ModelRetry, match="leads elsewhere"):
            research.write_file("report.md", "text")
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_place_that_is_taken(research, tmp_path):
    """A folder of that name stays, no draft is left, and the model may choose another name."""
    taken = tmp_path / ".agentfsm" / "research" / "report.md"
    taken.mkdir(parents=True)
    with pytest.raises(ModelRetry, match="choose another name"):
        research.write_file("report.md", "text")
    assert list(taken.parent.iterdir()) == [taken]


async def test_a_call_that_is_refused_fails_and_the_run_goes_on(research):
    """`ModelRetry` is a failed result that the model reads."""
    assert research.write_file.idempotent
    assert research.read_url.read_only
    assert research.web_search.read_only
    async with research.agent() as agent:
        model = research.FunctionModel(lambda request: leading_astray(research, request))
        run = await agent.with_(model=model).run("Read what is inside.")
    assert (run.state, [each.outcome for each in run.calls]) == (State.DONE, [Outcome.FAILED])


def leading_astray(research: ModuleType, request: Any) -> Any:
    """Play a model that was talked into reading what is inside."""
    if len(request.messages) > 1:
        assert "not of the public web" in request.messages[-1].text
        return "I may not read that."
    call = research.ProposedCall(id="1", name="read_url", arguments='{"url": "http://169.254.169.254/"}')
    return research.Reply(calls=(call,))
