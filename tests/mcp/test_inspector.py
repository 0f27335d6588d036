"""Our server driven by the official inspector's command line, over stdio and HTTP, in both eras of the protocol."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.mcp_conformance import AGENTFSM, environment
from tests.support.node_packages import program
from tests.support.port_servers import listening

INSPECTOR = "@modelcontextprotocol/inspector"
# The handshake of 2025-11-25, and 2026-07-28.
ERAS = ("legacy", "modern")
# How the inspector ends where a tool has failed.
TOOL_FAILED = 5
WORDS = ("-m", "agentfsm", "mcp", "serve")
HERE = str(Path(__file__).parent)
ENV = environment() | {"PYTHONPATH": os.pathsep.join([AGENTFSM, HERE])}


@pytest.fixture
def inspect(tmp_path):
    """What runs the inspector: it returns the result that it prints, once it has ended with that exit code."""

    def run(era, *options, code=0):
        command = program(INSPECTOR, "--cli", *options, "--protocol-era", era, "--quiet", "--format", "json")
        done = subprocess.run(
            command, env=ENV | {"HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)["result"]

    return run


@pytest.mark.parametrize("era", [ERAS[0], pytest.param(ERAS[1], marks=pytest.mark.soak)])
def test_over_stdio(era, inspect, tmp_path):
    """It starts `agentfsm mcp serve` as every host does, from a configuration file, and calls a tool."""
    words = [*WORDS, "conformance_server:SERVICE"]
    server = {"command": sys.executable, "args": words, "env": {"PYTHONPATH": ENV["PYTHONPATH"]}}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"ours": server}}))
    options = ["--config", str(config), "--server", "ours"]
    result = inspect(
        era, *options, "--method", "tools/call", "--tool-name", "test_headers", "--tool-arg", "region=Zürich"
    )
    assert result["content"] == [{"type": "text", "text": "{'region': 'Zürich'}"}]
    assert not result.get("isError")


@pytest.fixture(scope="module")
def served():
    """The URL of `agentfsm mcp serve --http`."""
    program(INSPECTOR)
    command = warm_python.MCP.command(*WORDS, "conformance_server:SERVICE", "--http", "{port}")
    with listening(command, ENV, cwd=Path(HERE)) as url:
        yield f"{url}/mcp"


def test_over_http(inspect, served):
    """Tools, resources and prompts: listed, called, read and got."""

    def ask(method, *options, **more):
        return inspect("modern", "--server-url", served, "--transport", "http", "--method", method, *options, **more)

    tools = {tool["name"]: tool for tool in ask("tools/list")["tools"]}
    assert tools["test_simple_text"]["annotations"]["readOnlyHint"] is True
    assert tools["test_headers"]["inputSchema"]["required"] == ["region"]
    called = ask("tools/call", "--tool-name", "test_image_content")
    assert [block["type"] for block in called["content"]] == ["text", "image"]
    failed = ask("tools/call", "--tool-name", "test_error_handling", code=TOOL_FAILED)
    assert failed["isError"] is True
    assert {each["uri"] for each in ask("resources/list")["resources"]} >= {"test://static-text"}
    (read,) = ask("resources/read", "--uri", "test://template/7/data")["contents"]
    assert json.loads(read["text"])["id"] == "7"
    assert len(ask("prompts/list")["prompts"]) == 4
    blanks = ["--prompt-args", "arg1=a", "arg2=b"]
    got = ask("prompts/get", "--prompt-name", "test_prompt_with_arguments", *blanks)
    assert got["messages"][0]["content"]["text"] == "Prompt with arguments: arg1='a', arg2='b'"


def test_over_http_with_a_handshake(inspect, served):
    """A client of 2025-11-25, which is what the inspector is unless it is told otherwise, sees the same tools."""
    listed = inspect("legacy", "--server-url", served, "--transport", "http", "--method", "tools/list")
    assert "test_simple_text" in [tool["name"] for tool in listed["tools"]]


def test_an_agent_over_http(inspect, tmp_path):
    """An agent is given a task, and its run is looked at: as a tool's result, and as a resource."""
    (tmp_path / "oracle.py").write_text(
        "from agentfsm import Agent\n"
        "from agentfsm.testing import FunctionModel\n"
        'agent = Agent(FunctionModel(lambda request: "42"), name="oracle")\n'
    )
    command = warm_python.MCP.command(*WORDS, "oracle:agent", "--http", "{port}")
    with listening(command, ENV, cwd=tmp_path) as url:
        server = ["--server-url", f"{url}/mcp", "--transport", "http"]

        def ask(method, *options):
            return inspect("modern", *server, "--method", method, *options)

        blanks = ["--tool-args-json", json.dumps({"prompt": "the question", "run_id": "r1", "wait_s": 30})]
        started = ask("tools/call", "--tool-name", "start", *blanks)["structuredContent"]
        assert (started["run_id"], started["status"], started["answer"]) == ("r1", "done", "42")
        (run,) = ask("resources/list")["resources"]
        (read,) = ask("resources/read", "--uri", run["uri"])["contents"]
        assert json.loads(read["text"])["status"] == "done"
