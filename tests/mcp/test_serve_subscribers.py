"""Clients of the handshake revision who subscribe to resources."""

import anyio
import pytest
from mcp import Client, MCPError
from mcp.types import ResourceUpdatedNotification

from agentfsm import Agent
from agentfsm.mcp import MCPService, Resource
from agentfsm.mcp.server import handshake_clients
from agentfsm.testing import ScriptedModel, say

pytestmark = pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")
STEP = Resource(uri="n://{n}", name="n", read=lambda n: n)


class Ear:
    """Takes what a client is told, until a resource has changed."""

    def __init__(self, uri):
        self.uri, self.heard, self.done = uri, [], anyio.Event()

    async def __call__(self, message):
        if isinstance(message, ResourceUpdatedNotification):
            self.heard.append(message.params.uri)
            if message.params.uri == self.uri:
                self.done.set()


async def test_who_subscribes_hears_of_a_run_until_it_unsubscribes():
    """Of the runs it has named, and of no others; what they do meanwhile holds up nobody."""
    agent = Agent(ScriptedModel(say("one"), say("two"), say("three")))
    ear = Ear("agentfsm://runs/r3")
    async with Client(agent.as_mcp_server().server, mode="legacy", message_handler=ear) as client:
        assert client.server_capabilities.resources.subscribe
        await client.unsubscribe_resource("agentfsm://runs/never")
        for run_id in ("r1", "r3"):
            await client.subscribe_resource(f"agentfsm://runs/{run_id}")
        await client.unsubscribe_resource("agentfsm://runs/r1")
        for run_id in ("r1", "r2", "r3"):
            await client.call_tool("start", {"prompt": "go", "run_id": run_id})
        with anyio.fail_after(5):
            await ear.done.wait()
    assert set(ear.heard) == {"agentfsm://runs/r3"}


async def test_a_connection_that_has_gone_is_told_no_more():
    """Nothing of it stays behind with what tells the news."""
    service = MCPService([], name="demo", resources=[STEP])
    async with Client(service.server, mode="legacy") as client:
        await client.subscribe_resource("n://1")
        assert len(service._bus._listeners) == 1
    assert not service._bus._listeners


@pytest.mark.parametrize("uri", ["other://1", "n://3", f"n://{'1' * 3_000}"])
async def test_what_cannot_be_subscribed_to_is_an_error(monkeypatch, uri):
    """What is no resource, one too many, and an address that nobody has."""
    monkeypatch.setattr(handshake_clients, "MAX_URIS", 2)
    service = MCPService([], name="demo", resources=[STEP])
    async with Client(service.server, mode="legacy") as client:
        for known in ("n://1", "n://2", "n://1"):
            await client.subscribe_resource(known)
        with pytest.raises(MCPError, match=r"unknown resource|subscribed to 2"):
            await client.subscribe_resource(uri)
