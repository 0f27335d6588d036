"""Programs that end without closing: in any way that leaves them a say, no server process is left."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.checks import settled
from tests.support.mcp_calls import RUDE, environment, heard, leftovers, lives
from tests.support.misbehaving_http import serving
from tests.support.warm_python import WARM_UP, WITH_MCP, WarmPython

STDIO = 'MCPServer.stdio(sys.executable, [{rude!r}, {habit!r}, {record!r}], name="rude", confirm=False)'
PROGRAM = """
import sys, anyio
from agentfsm import Agent
from agentfsm.mcp import MCPServer
from agentfsm.testing import ScriptedModel, call, say

server = {server}
agent = Agent(ScriptedModel(say("", call("rude__act")), say("done")), tools=[server])
"""

ENDS = {
    "it comes to its end": 'print(agent.run_sync("act").output, flush=True)',
    "its event loop ends first": """
        import asyncio
        async def main():
            print((await agent.run("act")).output, flush=True)
        asyncio.run(main())
    """,
    "trio": 'anyio.run(agent.run, "act", backend="trio"); print("done", flush=True)',
    "it asks at its end": """
        import atexit
        from agentfsm.core.errors import AgentError
        print(agent.run_sync("act").output, flush=True)
        server.needs_refresh = True
        async def late():
            try:
                await server.connection.request(lambda client: client.list_tools())
            except AgentError as error:
                print(type(error).__name__, flush=True)
        import agentfsm.mcp.connection.connection_thread
        atexit.unregister(agentfsm.mcp.connection.connection_thread._shut_down)
        atexit.register(lambda: anyio.run(late))
        atexit.register(agentfsm.mcp.connection.connection_thread._shut_down)
    """,
}


@pytest.fixture
def record(tmp_path):
    return tmp_path / "record"


# One program is started without it, since what Python does at an end depends on its start.
PYTHON = WarmPython("-W", "error", warm_up=WARM_UP + WITH_MCP)


def started(record, end, habit="plain", *, is_warm=True):
    return begun(STDIO.format(rude=RUDE, habit=habit, record=str(record)), end, is_warm=is_warm)


def begun(server, end, *, is_warm=True):
    words = ("-c", PROGRAM.format(server=server) + textwrap.dedent(end))
    return subprocess.Popen(
        PYTHON.command(*words) if is_warm else [sys.executable, "-W", "error", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_does_not_close_leaves_no_process(end, record):
    """Its end closes what it has opened, and says nothing."""
    out, errors = started(record, ENDS[end], is_warm=end != "it comes to its end").communicate(timeout=60)
    assert out.split()[0] == "done"
    assert "Warning" not in errors
    assert "Traceback" not in errors
    assert len(lives(record)) == 1
    assert not leftovers(record)


def test_a_program_that_has_looked_up_a_host_says_nothing_at_its_end():
    """An event loop that has a thread for that wants another one to part with it; at an end there is none to be had."""
    with serving("plain") as server:
        at_url = f"MCPServer.http({server.url.replace('127.0.0.1', 'localhost')!r}, name='rude', confirm=False)"
        out, errors = begun(at_url, ENDS["it comes to its end"]).communicate(timeout=60)
    assert (out, errors) == ("done\n", "")


def test_who_asks_when_the_program_ends_is_told_so(record):
    """A function that runs at exit, after the connections are closed, gets an error and does not wait for ever."""
    out, _ = started(record, ENDS["it asks at its end"]).communicate(timeout=60)
    assert out.split() == ["done", "ClosedError"]


def test_the_keyboard_ends_a_program_and_its_servers(record):
    """A program that is interrupted while a call hangs ends, and its server with it."""
    program = started(record, 'print("begun", flush=True); agent.run_sync("act")', habit="hangs")
    assert program.stdout.readline() == "begun\n"
    settled(lambda: any(message["method"] == "tools/call" for message in heard(record)))
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert not leftovers(record)


def test_a_program_that_is_killed_takes_along_a_server_that_reads(record):
    """Even then the server's input ends, and with it a server that goes by that."""
    program = started(record, 'print(agent.run_sync("act").output, flush=True); import time; time.sleep(3600)')
    assert program.stdout.readline() == "done\n"
    program.kill()
    program.communicate(timeout=60)
    settled(lambda: not leftovers(record))
