"""An agent with the tools of real servers."""

import sys

import pytest

from agentfsm import Agent
from agentfsm.mcp import MCPServer
from agentfsm.testing import ScriptedModel, call, say

SERVER = """
from mcp.server import MCPServer
server = MCPServer("demo")
@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
server.run()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


async def test_an_agent_calls_the_tool_of_a_server(script):
    """The thin path: a process, its listing, a call, its result, its end."""
    server = MCPServer.stdio(sys.executable, [str(script)], name="demo", confirm=False)
    async with Agent(ScriptedModel(say("", call("demo__add", a=1, b=2)), say("three")), tools=[server]) as agent:
        run = await agent.run("add")
    assert run.output == "three"
    assert [message.content for message in run.messages if hasattr(message, "content")] == ["3"]
