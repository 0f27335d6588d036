"""Requests with one idempotency key that arrive together: one of them starts the run."""

from contextlib import AsyncExitStack

import anyio
import httpx
import pytest

from agentfsm import Agent
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, say
from tests.support.gateways import named, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


def greeter(store, name="greeter"):
    return Agent(ScriptedModel(say("hello")), name=name, store=store)


async def post_together(*clients):
    """Post the same start three times to each server at once."""
    answers: list[httpx.Response] = []

    async def post(client):
        sent = {"json": {"prompt": "hi", "wait_s": 30}, "headers": {"idempotency-key": "order-1"} | named()}
        answers.append(await client.post("/v1/runs", **sent))

    async with anyio.create_task_group() as group:
        for client in clients * 3:
            group.start_soon(post, client)
    return answers


async def test_one_of_two_racing_servers_says_that_the_run_is_new(place):
    """Of equal requests at two servers, one is answered with 201 and the others with 200, all with the same run."""
    async with AsyncExitStack() as servers:
        clients = [await servers.enter_async_context(serving(greeter(place.make()))) for _ in range(2)]
        answers = await post_together(*clients)
    assert sorted(each.status_code for each in answers) == [200] * 5 + [201]
    assert {each.json()["output"] for each in answers} == {"hello"}
    assert len({each.json()["id"] for each in answers}) == 1


async def test_one_of_racing_requests_says_so_in_memory():
    """The same holds for one server with a store in memory."""
    async with serving(greeter(MemoryStore())) as client:
        answers = await post_together(client)
    assert sorted(each.status_code for each in answers) == [200, 200, 201]


async def test_a_racing_key_names_the_run_of_one_agent(store):
    """Of two requests with the same key and prompt for two agents, one is refused: it does not get the other's run."""
    async with serving(greeter(store, "one"), greeter(store, "two")) as client:
        answers = []

        async def post(agent):
            sent = {"json": {"prompt": "hi", "agent": agent}, "headers": {"idempotency-key": "order-1"} | named()}
            answers.append(await client.post("/v1/runs", **sent))

        async with anyio.create_task_group() as group:
            for agent in ("one", "two"):
                group.start_soon(post, agent)
    assert sorted(each.status_code for each in answers) == [201, 409]
