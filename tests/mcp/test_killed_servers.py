"""The official servers killed in the middle of a call: the run goes on truthfully, with a restarted server."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs
import pytest

from agentfsm import Agent, ToolResult
from agentfsm.mcp import MCPServer
from agentfsm.mcp.client.mcp_server import ToolPolicy
from agentfsm.testing import ScriptedModel, call, say
from tests.support.cut_server import CutTransport
from tests.support.node_packages import program

CUTS = pytest.mark.parametrize("cut", ["before", "after"])


@attrs.frozen(kw_only=True)
class Official:
    """One server: how it starts, a call of it that reads, one that writes, and the effects on the disk."""

    command: list[str]
    reads: tuple[str, dict]
    writes: tuple[str, dict] | None = None
    env: dict = attrs.field(factory=dict)
    count_effects: object = None

    def server(self, folder, cut):
        transport = CutTransport.to(self.command, folder / "pid", cut, env=self.env)
        policy = ToolPolicy(hints=True, confirm=False)
        return MCPServer(name="s", transport=transport, tool_policy=policy)


def everything(folder):
    return Official(
        command=program("@modelcontextprotocol/server-everything", "stdio"),
        reads=("get-sum", {"a": 1, "b": 2}),
        writes=("toggle-simulated-logging", {}),
    )


def filesystem(folder):
    note = folder / "note.txt"
    note.write_text("one\n")
    return Official(
        command=program("@modelcontextprotocol/server-filesystem", str(folder)),
        reads=("read_text_file", {"path": str(note)}),
        writes=("edit_file", {"path": str(note), "edits": [{"oldText": "one", "newText": "one and one"}]}),
        count_effects=lambda: note.read_text().count("one") - 1,
    )


def memory(folder):
    graph = folder / "graph.jsonl"
    ada = {"name": "Ada", "entityType": "person", "observations": []}
    return Official(
        command=program("@modelcontextprotocol/server-memory"),
        env={"MEMORY_FILE_PATH": str(graph)},
        reads=("read_graph", {}),
        writes=("create_entities", {"entities": [ada]}),
        count_effects=lambda: graph.read_text().count('"Ada"') if graph.exists() else 0,
    )


def git(folder):
    def run(*words):
        settings = ["-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
        return subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True).stdout

    run("init", "-q", "-b", "main")
    run("commit", "-q", "--allow-empty", "-m", "first")
    (folder / "a.txt").write_text("a")
    run("add", "a.txt")
    return Official(
        command=[module("mcp-server-git"), "-r", str(folder)],
        env={f"GIT_{who}_{what}": "ann@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        reads=("git_status", {"repo_path": str(folder)}),
        writes=("git_commit", {"repo_path": str(folder), "message": "second"}),
        count_effects=lambda: len(run("log", "--oneline").splitlines()) - 1,
    )


def time(folder):
    return Official(command=[module("mcp-server-time")], reads=("get_current_time", {"timezone": "Europe/Zurich"}))


def module(name):
    return str(Path(sys.executable).with_name(name))


async def played(server, wanted, again):
    """Make a call in which the server is killed, then one with the restarted server; return the results."""
    script = [say("", call(f"s__{name}", **arguments)) for name, arguments in (wanted, again)]
    async with Agent(ScriptedModel(*script, "done"), tools=[server]) as agent:
        run = await agent.finish(agent.start("go on"))
        if run.is_waiting:
            (item,) = run.pending
            await agent.settle(run.id, item.call_id, failed=f"settled: {item.error}")
            run = await agent.resume(run.id)
    assert run.output == "done"
    assert server.transport.is_cut
    assert server.connection.start_count == 2
    return [message for message in run.messages if isinstance(message, ToolResult)]


async def check_reading(official, folder, cut):
    """A call that only reads is made again with the restarted server, and the model sees its result."""
    first, second = await played(official.server(folder, cut), official.reads, official.reads)
    assert [(each.outcome, each.attempts) for each in (first, second)] == [("done", 2), ("done", 1)]


async def check_writing(official, folder, cut):
    """A call that writes is not made again: a person is asked, with the reason, and the next call works."""
    first, second = await played(official.server(folder, cut), official.writes, official.reads)
    assert first.attempts == 1
    assert first.outcome == "failed"
    assert first.content.startswith("settled: the connection to the MCP server 's' was lost during the call")
    assert (second.outcome, second.attempts) == ("done", 1)
    if official.count_effects is not None:
        assert official.count_effects() == {"before": 0, "after": 1}[cut]


@CUTS
async def test_a_reading_call(tmp_path, cut):
    """Of the filesystem server; the other servers are checked by `make soak PART=mcp`."""
    await check_reading(filesystem(tmp_path), tmp_path, cut)


@CUTS
async def test_a_writing_call(tmp_path, cut):
    """Of the filesystem server, with the file on the disk."""
    await check_writing(filesystem(tmp_path), tmp_path, cut)


@pytest.mark.soak
@CUTS
@pytest.mark.parametrize("make", [everything, memory, git, time])
async def test_reading_calls_of_the_others(tmp_path, cut, make):
    """From npm and PyPI."""
    await check_reading(make(tmp_path), tmp_path, cut)


@pytest.mark.soak
@CUTS
@pytest.mark.parametrize("make", [everything, memory, git])
async def test_writing_calls_of_the_others(tmp_path, cut, make):
    """The graph of the memory server, and the commits of the git server, have the effect once or not at all."""
    await check_writing(make(tmp_path), tmp_path, cut)


class Page(BaseHTTPRequestHandler):
    """A page of this machine."""

    def do_GET(self):
        body = b"<html><body><p>A page.</p></body></html>"
        self.send_response(200 if "robots" not in self.path else 404)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.mark.soak
@CUTS
async def test_the_server_that_fetches(tmp_path, cut):
    """It reads a page of this machine, since tests have no network."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_address[1]}/"
        fetch = Official(command=[module("mcp-server-fetch"), "--allow-private-ips"], reads=("fetch", {"url": url}))
        first, _ = await played(fetch.server(tmp_path, cut), fetch.reads, fetch.reads)
        web.shutdown()
    assert (first.outcome, first.attempts) == ("done", 2)
    assert "A page." in first.content
