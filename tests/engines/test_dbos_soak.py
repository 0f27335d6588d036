"""Four executors, one of which is killed every two seconds, and a database that is restarted in the middle."""

import random
from collections import Counter
from contextlib import ExitStack

import anyio
import pytest

from agentfsm import Limits, State
from tests.support.database_servers import PostgresServer
from tests.support.dbos_executor import POISON, make_clerk, make_engine, start

RUNS = 1_500
EXECUTORS = 4
KILL_EVERY_S = 2.0
KILL_FOR_S = 60.0


@pytest.mark.soak
async def test_no_effect_is_doubled_and_no_run_is_lost(books):
    """Each call is made once. Each run is done, or waits by name for the outcome of a call."""
    ids = [f"order-{number}" for number in range(RUNS)]
    with PostgresServer() as server, ExitStack() as stack:
        agent = make_clerk(server.url, "agentfsm", books)
        async with agent, make_engine(agent) as engine:
            for run_id in ids:
                await engine.submit(str(random.uniform(0.1, 1.0)), id=run_id)

            def started():
                return stack.enter_context(start(server.url, "agentfsm", books, 10))

            executors = [started() for _ in range(EXECUTORS)]
            await anyio.sleep(5)  # they work
            kills = 0
            begun = anyio.current_time()
            is_restarted = False
            while (now := anyio.current_time() - begun) < KILL_FOR_S:
                if now > KILL_FOR_S / 2 and not is_restarted:
                    is_restarted = True
                    await anyio.to_thread.run_sync(server.stop)
                    await anyio.sleep(1)
                    await anyio.to_thread.run_sync(server.start)
                victim = random.randrange(EXECUTORS)
                executors[victim].kill()
                kills += 1
                executors[victim] = started()
                await anyio.sleep(KILL_EVERY_S)

            with anyio.fail_after(300):
                while not await is_settled(agent, engine):  # noqa: ASYNC110  other processes do it
                    await anyio.sleep(0.5)
            runs = [await agent.load(run_id) for run_id in ids]
    keys = Counter(line.split()[1] for line in books.read_text().splitlines())
    waiting = [run for run in runs if run.state is not State.DONE]
    print(f"{kills} kills, {RUNS - len(waiting)} runs done, {len(waiting)} wait, {len(keys)} calls")  # noqa: T201  with -s
    assert max(keys.values()) == 1
    assert {(item.kind, item.tool) for run in waiting for item in run.pending} <= {("outcome", "pay")}


async def is_settled(agent, engine, number=RUNS):
    """Whether all runs are over or wait, and the queue is empty."""
    runs = await agent.store.runs(limit=number)
    left = await engine._open_client.list_workflows_async(status=["ENQUEUED", "PENDING"], limit=1)
    return all(each.waiting or each.state is State.DONE for each in runs) and not left


@pytest.mark.soak
async def test_a_run_that_kills_its_executors_is_paused_and_the_others_are_done(shared_postgres, schema, books):
    """It is executed alone from the second death on, and after five deaths alone a person has to look."""
    ids = ["poison", *[f"order-{number}" for number in range(8)]]
    agent = make_clerk(shared_postgres, schema, books)
    async with agent, make_engine(agent) as engine:
        for run_id in ids:
            await engine.submit(POISON if run_id == "poison" else "0.5", id=run_id)
        deaths = 0
        while not await is_settled(agent, engine, len(ids)):
            with start(shared_postgres, schema, books, 10) as executor:
                while executor.poll() is None and not await is_settled(agent, engine, len(ids)):  # noqa: ASYNC110
                    await anyio.sleep(0.1)
                deaths += executor.poll() is not None
        runs = {run_id: await agent.load(run_id) for run_id in ids}
    assert [item.kind for item in runs.pop("poison").pending] == ["crash"]
    assert {run.state for run in runs.values()} <= {State.DONE, State.ACT}
    assert any(run.state is State.DONE for run in runs.values())
    assert 2 + Limits().crashes <= deaths <= 4 + Limits().crashes
