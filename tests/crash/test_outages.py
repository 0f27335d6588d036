"""The database dies and comes back under a crowd of runs, again and again: all end as they must."""

from __future__ import annotations

from collections import Counter
from functools import partial

import anyio
import pytest
from anyio.to_thread import run_sync

from agentfsm import Agent, Filter, Found, RunContext, State, ToolResult, tool
from agentfsm.core.events import ToolFinished, ToolStarted
from agentfsm.ports import ProposedCall, Reply
from agentfsm.stores import PostgresStore, RedisStore
from agentfsm.testing import FunctionModel
from tests.support.checks import keys_of, valid_history
from tests.support.database_servers import PostgresServer, RedisServer

# Runs that a worker drives at once.
PARALLEL = 40


def think(request):
    """Ask for three calls, then for a payment, then answer."""
    results = [message for message in request.messages if isinstance(message, ToolResult)]
    names = {0: ("look", "note", "look"), 3: ("pay",)}.get(len(results))
    if names is None:
        return results[-1].text
    return Reply(calls=tuple(ProposedCall(id=name, name=name, arguments="{}") for name in names))


class World:
    """What has happened outside, by the keys of the calls."""

    def __init__(self):
        self.paid = Counter()
        self.notes = set()
        self.begun = 0
        self.moved = anyio.Event()

    def agent(self, store):
        """Return an agent whose tools act in the world."""

        @tool(read_only=True)
        async def look() -> str:
            """Look."""
            return "seen"

        @tool(idempotent=True)
        async def note(ctx: RunContext) -> str:
            """Note."""
            self.notes.add(ctx.idempotency_key)
            return "noted"

        def look_up(ctx: RunContext, _arguments: object) -> Found | str:
            return Found("paid") if self.paid[ctx.idempotency_key] else "rerun"

        @tool(on_unknown=look_up)  # a lease may run out where the server takes long to return
        async def pay(ctx: RunContext) -> str:
            """Pay."""
            self.paid[ctx.idempotency_key] += 1
            self.moved.set()
            return "paid"

        return Agent(FunctionModel(think), tools=[look, note, pay], store=store, name="clerk")


async def die_and_return(server, world, runs, deaths):
    """Kill the server each time that so many runs more have come to their payment, in the middle of the others."""
    for death in range(1, deaths + 1):
        while len(world.paid) < death * runs // (deaths + 2):
            world.moved = anyio.Event()
            await world.moved.wait()
        await run_sync(server.kill)
        await run_sync(server.start)


async def crowd(server, store_of, runs, deaths):
    """Let two workers drive so many runs while the server dies under them; check each of them, and the world."""
    world, stores = World(), [store_of(server.url) for _ in range(2)]
    agents = [world.agent(store) for store in stores]
    ids = []

    async def submit(number):
        ids.append((await agents[0].submit("go", id=f"r{number}")).id)

    async with anyio.create_task_group() as group:
        for number in range(runs):
            group.start_soon(submit, number)
    async with anyio.create_task_group() as workers:
        for agent in agents:
            workers.start_soon(partial(agent.worker, parallel=PARALLEL, poll_s=0.1))
        await die_and_return(server, world, runs, deaths)
        while len(await stores[0].runs(Filter(state=State.DONE), limit=runs)) < runs:  # noqa: ASYNC110  others end them
            await anyio.sleep(0.1)
        workers.cancel_scope.cancel()
    keys = []
    for run_id in ids:
        run = await agents[1].load(run_id)
        keys.append(keys_of(run))
        assert (run.state, run.output) == (State.DONE, "[pay: done]\npaid"), run_id
        valid_history(run.messages)
        events = await agents[1].history(run_id)
        assert sum(isinstance(event, ToolFinished) for event in events) == 4
        assert sum(isinstance(event, ToolStarted) for event in events) >= 2
    assert world.paid == Counter(key["t2.0"] for key in keys)
    assert world.notes == {key["t1.1"] for key in keys}
    for store in stores:
        await store.aclose()


crowds = pytest.mark.parametrize(("runs", "deaths"), [(80, 2), pytest.param(1_000, 6, marks=pytest.mark.soak)])


@crowds
async def test_postgres_dies_under_a_crowd(runs, deaths):
    """PostgreSQL is killed and started again, and no run is lost, ends otherwise, or pays twice."""
    with PostgresServer() as server:
        await crowd(server, PostgresStore, runs, deaths)


@crowds
async def test_redis_dies_under_a_crowd(runs, deaths):
    """Redis with a log that it syncs at each write is killed and started again, likewise."""
    with RedisServer({"appendonly": "yes", "appendfsync": "always"}) as server:
        await crowd(server, RedisStore, runs, deaths)
