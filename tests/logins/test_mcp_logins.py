"""MCP servers and OpenAPI tools whose calls go out with the token of the run's user."""

from hashlib import sha256

import pytest

from agentfsm import PendingKind, State, ToolResult
from agentfsm.core import events as e
from agentfsm.logins import APIKey, OAuth
from agentfsm.mcp import MCPServer
from agentfsm.mcp.client import user_sessions
from agentfsm.openapi import tools_from_openapi
from agentfsm.testing import call
from tests.support.guarded_server import agree, guarded_server
from tests.support.oauth_server import log_in


@pytest.fixture(scope="module")
def guard():
    with guarded_server() as running:
        yield running


async def test_calls_of_an_mcp_server_wait_for_the_login_of_their_user(guard, program):
    """The program lists the tools with its own login; each call goes out with its user's, over another connection."""

    def make_server():
        settings = OAuth(tokens=program.tokens)
        login = OAuth(tokens=program.tokens, redirect_url=program.settings.redirect_url)
        return MCPServer.http(f"{guard.url}/mcp", auth=settings, login=login, name="shop", confirm=False)

    server = make_server()
    await server.login(agree)
    async with program.begin(server, calls=[call("shop__pay")]) as agent:
        waiting = await agent.run("pay", user="ann")
        [item] = waiting.pending
        assert (item.kind, item.questions[0].key) == (PendingKind.LOGIN, f"{guard.url}/mcp")
        assert not [each for each in await agent.history(waiting.id) if isinstance(each, e.ToolStarted)]
        before = set(guard.access)
        await program.come_back(agent, log_in(guard, item.questions[0].url))
    own = set(guard.access) - before
    async with program.go_on(make_server()) as agent:
        run = await agent.resume(waiting.id)
        assert run.state is State.DONE
        assert guard.seen["paid"] == 1
        for token in own:  # revoked, and no longer renewed: the next call asks again
            del guard.access[token]
        guard.refresh.clear()
    async with program.begin(make_server(), calls=[call("shop__pay")]) as agent:
        waiting = await agent.run("pay", user="ann")
        assert waiting.pending[0].kind is PendingKind.LOGIN
    assert guard.seen["paid"] == 1


async def test_each_user_reads_with_their_own_token_and_no_result_has_it(guard, program, monkeypatch):
    """Resources as well as tools; the connection of one user is closed for that of another, and opens again."""
    monkeypatch.setattr(user_sessions, "MAX_SESSIONS", 1)
    settings = OAuth(tokens=program.tokens)
    login = OAuth(tokens=program.tokens, redirect_url=program.settings.redirect_url)
    server = MCPServer.http(
        f"{guard.url}/mcp", auth=settings, login=login, name="shop", confirm=False, resources_as_tools=True
    )
    await server.login(agree)
    calls = [
        call("shop__read_resource", uri="shop://account"),
        call("shop__repeat"),
        call("shop__repeat", fails=True),
    ]
    owners = {}
    for user in ("ann", "ben"):
        async with program.begin(server, calls=calls) as agent:
            waiting = await agent.run("read", user=user)
            before = set(guard.access)
            await program.come_back(agent, log_in(guard, waiting.pending[0].questions[0].url))
            [token] = set(guard.access) - before
        owners[user] = token
    for user in ("ann", "ben", "ann"):
        async with program.begin(server, calls=calls) as agent:
            run = await agent.run("read", user=user)
            read, repeated, failed = [message.content for message in run.messages if isinstance(message, ToolResult)]
            assert read == sha256(owners[user].encode()).hexdigest()
            assert repeated == "your token is ***"
            assert "bad token ***" in failed
            assert len(server.sessions._sessions) == 1
    assert not [token for token in owners.values() if token.encode() in program.read_database()]


SPEC = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1"},
    "paths": {
        "/orders": {
            "post": {
                "operationId": "order",
                "summary": "Order.",
                "parameters": [{"name": "url", "in": "query", "schema": {"type": "string"}}],
                "responses": {"200": {"description": "OK"}},
            }
        }
    },
}


@pytest.mark.parametrize("way", ["oauth", "key"])
async def test_calls_of_an_openapi_tool_wait_as_well(shop, program, way):
    """The result has no token, although the API repeats what it gets."""
    key = APIKey(header="X-API-Key", prefix="", tokens=program.tokens)
    login = program.settings if way == "oauth" else key
    tools = tools_from_openapi(
        SPEC, base_url=shop.url, login=login, trusted=True, labels={"order": {"irreversible": False}}
    )
    async with program.begin(*tools) as agent:
        waiting = await agent.run("order", user="ann")
        [item] = waiting.pending
        assert item.kind is PendingKind.LOGIN
        if way == "oauth":
            await program.come_back(agent, log_in(shop, item.questions[0].url))
        else:
            shop.keys["key-of-ann"] = "ann"
            await tools[0].login.store_key("key-of-ann", tenant=None, user="ann")
    async with program.go_on(*tools) as agent:
        run = await agent.resume(waiting.id)
    assert [person for person, _key in shop.orders] == ["ann"]
    [result] = [message for message in run.messages if isinstance(message, ToolResult)]
    assert not [secret for secret in shop.issued if secret in result.content]
