"""Runs of our server as tasks of its clients: they outlive it, ask its people, and are cancelled."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import anyio
import mcp.types as m
import pytest
from mcp import Client, MCPError

from agentfsm import Agent, InputRequired, Question, RunContext, tool
from agentfsm.mcp.client.tasks import cancel_task
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.task_client import OPTIONS, accept, answer, begin, look

SURE = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}


@tool(background=True)
async def print_map(pages: int) -> str:
    """Print a map, which takes long."""
    if pages > 100:
        raise ValueError("out of paper")
    return f"{pages} pages"


@tool(background=True, requires_approval=True)
async def burn(name: str) -> str:
    """Burn a map."""
    return f"{name} burnt"


@tool(background=True)
async def route(ctx: RunContext[None]) -> str:
    """Find a route that people agree on."""
    if not ctx.answers:
        raise InputRequired(Question(key="by", message="Bridge?", schema=SURE), Question(key="at", message="Noon?"))
    return str(dict(ctx.answers))


@tool(read_only=True)
async def slow() -> str:
    """Wait for ever."""
    await anyio.sleep_forever()
    return ""


@asynccontextmanager
async def client_of(agent, *, has_tasks=True):
    """Connect to a server of the agent; each is another process's."""
    service = agent.as_mcp_server()
    async with Client(service.server, **(OPTIONS if has_tasks else {})) as client:
        yield client


def agent_on(path, *replies):
    return Agent(
        ScriptedModel(*replies),
        name="digger",
        tools=[print_map, burn, route, slow],
        store=SQLiteStore(path / "runs.db"),
    )


async def test_a_run_is_a_task(tmp_path):
    """It is begun at once, and its result is that of the tool `result`."""
    async with client_of(agent_on(tmp_path, "a hole")) as client:
        task = await begin(client, "start", prompt="dig", wait_s=300)
        ended = await look(client, task, "completed")
    assert ended.result["content"] == [{"type": "text", "text": "a hole"}]
    assert ended.result["structuredContent"]["run_id"] == task


async def test_a_call_that_takes_long_is_a_task(tmp_path):
    """Its result is that of the function, and a failure is a result."""
    async with client_of(agent_on(tmp_path)) as client:
        assert (await look(client, await begin(client, "print_map", pages=3), "completed")).result == {
            "content": [{"type": "text", "text": "3 pages"}],
            "isError": False,
            "resultType": "complete",
        }
        failed = await look(client, await begin(client, "print_map", pages=101), "completed")
        assert (failed.result["isError"], "out of paper" in failed.result["content"][0]["text"]) == (True, True)
        refused = await client.session.call_tool("print_map", {"pages": "many"})
        assert refused.is_error


async def test_people_are_asked_by_the_task(tmp_path):
    """An approval counts for the exact call, by any server; each question is asked until it has its answer."""
    async with client_of(agent_on(tmp_path)) as client:
        task = await begin(client, "burn", name="north")
        asked = await look(client, task, "input_required")
        [(key, request)] = asked.input_requests.items()
        assert request.params.message.startswith("May burn run?")
        assert '"north"' in request.params.message
    async with client_of(agent_on(tmp_path)) as client:
        await answer(client, task, other=accept(approve=True))
        assert (await look(client, task)).status == "input_required"
        await answer(client, task, **{key: accept(approve=True)})
        await answer(client, task, **{key: accept(approve=True)})
        assert (await look(client, task, "completed")).result["content"][0]["text"] == "north burnt"
        route = await begin(client, "route")
        first, second = (await look(client, route, "input_required")).input_requests
        await answer(client, route, **{first: accept(sure=True)})
        assert list((await look(client, route)).input_requests) == [second]
        await answer(client, route, **{second: m.ElicitResult(action="decline")})
        ended = await look(client, route, "completed")
    assert ended.result["content"][0]["text"] == "{'by': {'sure': True}, 'at': None}"


async def test_a_task_is_cancelled(tmp_path):
    """The run ends, and a second cancellation is acknowledged like the first."""
    async with client_of(agent_on(tmp_path, say("", call("slow")))) as client:
        task = await begin(client, "start", prompt="dig")
        await cancel_task(client, task)
        assert (await look(client, task, "cancelled")).status_message == "cancelled by an MCP client"
        await cancel_task(client, task)


async def test_who_has_no_tasks(tmp_path):
    """A client that does not declare the extension gets no task, and may ask for none."""
    async with client_of(agent_on(tmp_path, "a hole"), has_tasks=False) as client:
        listed = [each.name for each in (await client.list_tools()).tools]
        assert ("slow" in listed, "print_map" in listed) == (True, False)
        run = await client.call_tool("start", {"prompt": "dig"})
        assert run.structured_content["answer"] == "a hole"
        for refused in (partial(client.call_tool, "print_map", {"pages": 3}), partial(look, client, "x")):
            with pytest.raises(MCPError) as caught:
                await refused()
            assert caught.value.code == m.MISSING_REQUIRED_CLIENT_CAPABILITY
    async with client_of(agent_on(tmp_path)) as client:
        with pytest.raises(MCPError, match="there is no task 'x'") as caught:
            await look(client, "x")
        assert caught.value.code == m.INVALID_PARAMS
