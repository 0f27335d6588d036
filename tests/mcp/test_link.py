"""The life of a connection: opened late, shared, closed in order, whoever cancels what."""

import os
import sys
import threading
from contextlib import nullcontext

import anyio
import mcp.types as m
import pytest
from anyio import wait_all_tasks_blocked
from mcp.client import session
from mcp.shared.message import SessionMessage

from agentfsm import Agent, ClosedError, Outcome, RefusedError, RunContext
from agentfsm.mcp import MCPServer, MCPServerError
from agentfsm.mcp.connection import connection_thread, server_connection
from agentfsm.mcp.connection import lenient_parsing as client
from agentfsm.testing import ScriptedModel, say
from tests.support.mcp_calls import heard, leftovers, lives, one_call, rude, until


@pytest.fixture
def record(tmp_path):
    return tmp_path / "record"


@pytest.fixture(autouse=True)
def no_leak(record):
    """Nothing of a server is left when its last agent is closed."""
    yield
    assert not leftovers(record)


async def act(client):
    return await client.call_tool("act", {})


async def test_nothing_is_started_before_it_is_needed(record):
    """Neither making a server nor an agent of it starts the process, and closing it then starts none either."""
    server = rude("plain", record)
    async with Agent(ScriptedModel(say("hello")), tools=[server]):
        assert server.connection.start_count == 0
    await server.aclose()
    assert lives(record) == []


async def test_an_older_server_that_does_not_answer_what_it_does_not_know(record, monkeypatch):
    """The first question has a share of the start's time, so that the rest is there for the handshake."""
    monkeypatch.setattr(client, "DISCOVERY_SHARE", 0.01)
    (result,) = await one_call(rude("wordless", record))
    assert result.content == "acted"
    assert [message["method"] for message in heard(record)][:2] == ["server/discover", "initialize"]


async def test_a_slow_server_is_not_taken_for_an_older_one(record, monkeypatch):
    """It is waited for as long as the start may take, and no shorter time of the SDK's."""
    monkeypatch.setattr(session, "DISCOVER_TIMEOUT_SECONDS", 0.01)
    (result,) = await one_call(rude("slow-today", record))
    assert result.content == "acted"
    assert [message["method"] for message in heard(record)][:2] == ["server/discover", "tools/list"]


async def test_a_server_that_asks_and_does_not_take_the_answers_is_passed_over():
    """So they do not pile up, and what was asked of it is heard all the same."""
    tell, read = anyio.create_memory_object_stream(400)
    write, untaken = anyio.create_memory_object_stream(0)
    for number in range(300):
        tell.send_nowait(SessionMessage(m.JSONRPCRequest(jsonrpc="2.0", id=number, method="ping")))
    tell.send_nowait(SessionMessage(m.JSONRPCResponse(jsonrpc="2.0", id=1, result={})))
    asked = 0
    with tell, untaken:
        streams = server_connection._observe_transport(nullcontext((read, write)), tell.close)
        async with streams as (heard, said), heard, said, anyio.create_task_group() as answers:
            async for each in heard:
                if isinstance(each.message, m.JSONRPCResponse):
                    break
                asked += 1
                answers.start_soon(said.send, "pong")
                await wait_all_tasks_blocked()
            answers.cancel_scope.cancel()
    assert asked == server_connection.MAX_UNSENT_MESSAGES


async def test_closing_twice_is_closing_once_and_the_next_request_opens_again(record):
    """A closed connection is no end of the server."""
    server = rude("plain", record)
    await server.update()
    await server.aclose()
    await server.aclose()
    assert not leftovers(record)
    await server.update()
    assert server.connection.start_count == 2
    await server.aclose()


async def test_requests_at_once_open_one_connection(record):
    """Whoever asks while it is being opened waits for it."""
    server = rude("plain", record)
    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(server.connection.request, act)
    assert server.connection.start_count == 1
    await server.aclose()


async def test_cancelling_the_opening_leaves_nothing_and_the_next_one_may_open(record):
    """A caller who gives up while the server does not answer takes the process with him, and harms nobody else."""
    server = rude("mute", record)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(server.update)
            await until(lambda: lives(record))
            scope.cancel()
    assert not leftovers(record)
    server.connection.transport.args = [server.connection.transport.args[0], "plain", str(record)]
    await server.update()
    assert [tool.name for tool in server.tools] == ["rude__act"]
    await server.aclose()


async def test_one_who_gives_up_opening_does_not_take_the_others_along(record):
    """Those who waited for the same connection get one of their own."""
    server = rude("mute", record)
    done = []

    async def ask():
        await server.connection.request(act)
        done.append(True)

    async with anyio.create_task_group() as group, anyio.create_task_group() as first:
        first.start_soon(server.connection.request, act)
        await until(lambda: lives(record))
        group.start_soon(ask)
        server.connection.transport.args = [server.connection.transport.args[0], "plain", str(record)]
        first.cancel_scope.cancel()
    assert done == [True]
    await server.aclose()


async def test_an_agent_that_closes_leaves_the_connection_to_another_that_uses_it(record):
    """The connection is closed when the last request is done, and the call of the other agent comes to its end."""
    server = rude("hangs", record, timeout_s=0.5)
    other = Agent(ScriptedModel(say("bye")), tools=[server])
    results = []

    async def use():
        results.extend(await one_call(server))

    async with anyio.create_task_group() as group:
        group.start_soon(use)
        await until(lambda: any(message["method"] == "tools/call" for message in heard(record)))
        await other.aclose()
        assert leftovers(record)
    assert [result.outcome for result in results] == [Outcome.TIMED_OUT]


async def test_a_request_goes_on_a_new_connection_while_the_old_one_is_closed(record):
    """What is asked while a server takes its time to end waits, and meets another process."""
    server = rude("plain", record)
    await server.update()
    async with anyio.create_task_group() as group:
        group.start_soon(server.aclose)
        group.start_soon(server.connection.request, act)
    await server.aclose()


def test_a_server_outlives_an_event_loop(record):
    """What one `run_sync` has opened the next one uses, though its event loop is another; both backends share it."""
    server = rude("plain", record)
    agent = Agent(ScriptedModel(say("one"), say("two"), say("three")), tools=[server])
    assert agent.run_sync("1").output == "one"
    assert agent.run_sync("2").output == "two"
    anyio.run(agent.run, "3", backend="trio")
    assert server.connection.start_count == 1
    anyio.run(agent.aclose)


async def test_a_visit_brings_back_what_is_raised_there(record):
    """An error of a question is the caller's, as it is."""
    server = rude("plain", record)

    async def ask(_client):
        raise LookupError(threading.current_thread().name)

    with pytest.raises(LookupError, match="agentfsm-mcp"):
        await server.connection.request(ask)
    await server.aclose()


async def test_a_start_that_failed_may_be_tried_again_by_the_engine(record):
    """Nothing was done then: the error says so, and the call of any tool is retried."""
    server = rude("plain", record)
    await server.update()
    await server.aclose()
    server.connection.transport.args = [server.connection.transport.args[0], "exits", str(record)]
    (tool,) = server.tools
    with pytest.raises(RefusedError, match="cannot be used: it closed the connection before answering") as caught:
        await tool.function(RunContext(deps=None))
    assert "no API key" not in str(caught.value)


async def test_nothing_is_begun_when_the_interpreter_ends(monkeypatch):
    """Whoever asks then is told so, and does not wait for a thread that is gone."""
    monkeypatch.setattr(connection_thread.get_connection_thread(), "is_closed", True)
    with pytest.raises(ClosedError, match="the interpreter is exiting"):
        await MCPServer.stdio(sys.executable).update()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_off_has_connections_of_its_own(record):
    """It neither uses nor closes those of its parent."""
    server = rude("plain", record)
    anyio.run(server.update)
    child = os.fork()
    if not child:
        try:
            anyio.run(server.connection.request, act)
            anyio.run(server.aclose)
            os._exit(0 if server.connection.start_count == 2 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    anyio.run(server.connection.request, act)
    assert server.connection.start_count == 1
    anyio.run(server.aclose)


async def test_closing_while_it_opens_waits_for_nobody(record):
    """Whoever opens it has it; it is closed when he has given up."""
    server = rude("mute", record, start_s=0.5)
    async with anyio.create_task_group() as group:

        async def ask():
            with pytest.raises(MCPServerError):
                await server.update()

        group.start_soon(ask)
        await until(lambda: lives(record))
        await server.aclose()
