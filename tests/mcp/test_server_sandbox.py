"""A server in a sandbox, with bubblewrap for real; and what a server's process is given at all."""

import json
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.mcp import MCPServer, MCPServerError, ServerSandbox
from agentfsm.testing import ScriptedModel, call, say
from tests.support.database_servers import debian
from tests.support.listing_server import listed, names, tool

WORLD = """
import json, os, socket, sys
from pathlib import Path

def reach():
    try:
        return socket.create_connection(("127.0.0.1", int(sys.argv[2])), timeout=5) and "reached"
    except OSError as error:
        return type(error).__name__

def tried(action):
    try:
        return str(action())
    except OSError as error:
        return type(error).__name__

place = Path(sys.argv[1])
facts = lambda: {
    "environment": sorted(os.environ),
    "read": tried((place / "read" / "note").read_text),
    "write": tried(lambda: (place / "write" / "new").write_text("x")),
    "write_read": tried(lambda: (place / "read" / "new").write_text("x")),
    "other": tried((place / "secret").read_text),
    "network": reach(),
    "home": os.environ.get("HOME"),
}
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    version = message.get("params", {}).get("protocolVersion")
    results = {
        "initialize": {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "", "version": ""},
        },
        "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [], "structuredContent": facts()} if message["method"] == "tools/call" else None,
    }
    result = results.get(message["method"])
    end = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **end}), flush=True)
"""


@cache
def refusal():
    """Say why nothing can be put into a sandbox here, or None."""
    program = debian("bwrap", "bubblewrap")
    if program is None:
        return "bubblewrap is not installed"
    tried = subprocess.run(
        [program, "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() or "bubblewrap fails" if tried.returncode else None


@pytest.fixture
def bubblewrap():
    """Skip where there are no sandboxes; where `CI` is set, only if the kernel refuses them."""
    if (reason := refusal()) is not None:
        pytest.skip(f"no sandbox here: {reason}")


@pytest.fixture
def world(tmp_path):
    """A folder with something to read, a place to write to, and a secret."""
    for name in ("read", "write"):
        (tmp_path / name).mkdir()
    (tmp_path / "read" / "note").write_text("a note")
    (tmp_path / "secret").write_text("hush")
    (tmp_path / "read" / "server.py").write_text(WORLD)
    return tmp_path


async def seen(world, port=1, **options):
    """Start the server, let it look around, and return what it saw."""
    program = str(world / "read" / "server.py")
    options = {"name": "demo", "confirm": False, **options}
    server = MCPServer.stdio(sys.executable, ["-S", program, str(world), str(port)], **options)
    async with Agent(ScriptedModel(say("", call("demo__look")), say("done")), tools=[server]) as agent:
        run = await agent.run("go")
    (result,) = [each for each in run.messages if hasattr(each, "content")]
    return json.loads(result.content)


async def test_a_server_gets_none_of_our_environment(world, monkeypatch):
    """A key in our environment is not in the server's; what it is told by `env` is."""
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    found = await seen(world, env={"GIVEN": "1"})
    assert set(found["environment"]) - {"LC_CTYPE"} <= {"GIVEN", "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    assert "GIVEN" in found["environment"]
    assert found["other"] == "hush"


@pytest.mark.usefixtures("bubblewrap")
async def test_what_a_server_in_a_sandbox_sees(world):
    """It reads what it may read, writes what it may write, and sees nothing else: no file, no host."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        sandbox = ServerSandbox(read=[*interpreter(), world / "read"], write=[world / "write"])
        found = await seen(world, there.getsockname()[1], sandbox=sandbox)
    assert found["read"] == "a note"
    assert found["write"] == "1"
    assert (world / "write" / "new").read_text() == "x"
    assert found["write_read"] == "OSError"
    assert found["other"] == "FileNotFoundError"
    assert found["network"] == "ConnectionRefusedError"
    assert found["home"] == "/tmp"  # noqa: S108  its own
    assert not (world / "read" / "new").exists()


@pytest.mark.usefixtures("bubblewrap")
async def test_a_sandbox_with_network(world):
    """Where the network is allowed it is ours."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        sandbox = ServerSandbox(read=[*interpreter(), world / "read"], network=True)
        found = await seen(world, there.getsockname()[1], sandbox=sandbox)
    assert found["network"] == "reached"
    assert found["write"] == "FileNotFoundError"


def interpreter():
    """What this Python needs to be seen, where it is not a part of the system."""
    return sorted({Path(sys.prefix), Path(sys.base_prefix)})


async def test_without_bubblewrap_nothing_is_started(tmp_path, monkeypatch):
    """A server that is to be in a sandbox is refused where there is none, with what to do."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    server = listed(tmp_path, tool()).server(sandbox=ServerSandbox())
    with pytest.raises(MCPServerError, match="apt-get install bubblewrap"):
        await names(server)


@pytest.mark.usefixtures("bubblewrap")
async def test_a_path_that_is_not_there(tmp_path):
    """What the server is to see has to exist."""
    server = listed(tmp_path, tool()).server(sandbox=ServerSandbox(read=[tmp_path / "nothing"]))
    with pytest.raises(MCPServerError, match="nothing of the sandbox does not exist"):
        await names(server)


def test_what_a_person_reads_of_a_sandbox():
    """All that it lets through stands there."""
    assert ServerSandbox(read=["/srv"], network=True).description == "reads /srv; writes nothing; with network"
    assert (
        ServerSandbox(write=["/a", "/b"]).description == "reads nothing but the system; writes /a, /b; without network"
    )


def test_one_path_is_not_several():
    """A text is no list of its letters."""
    with pytest.raises(MisuseError, match="sequences of paths"):
        ServerSandbox(read="/srv")
