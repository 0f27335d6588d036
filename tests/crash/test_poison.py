"""A run that ends every process which drives it costs the runs beside it time, and nothing else."""

from __future__ import annotations

import signal

import anyio
import pytest

from agentfsm import PendingKind, State
from agentfsm.ports import Filter
from tests.support.poison_story import POISON, Books, agent_on, hold, submit, work

RUNS = 20
# Workers that die before the run is alone (two with all runs, then with 10, 5, 2 and 1), and may die after that.
LIVES = 12

on_each_store = pytest.mark.parametrize("store_of", ["sqlite", "postgres", "redis"], indirect=True)


@on_each_store
def test_a_poison_run_takes_no_other_run_with_it(fork_server, store_of, folder):
    """Of 20 runs 19 finish, each with its effect once; the one that kills its workers is paused, and tells it."""
    books = Books(str(folder / "books"))
    innocent = [f"r{number}" for number in range(RUNS - 1)]
    fork_server.run(submit, store_of, [*innocent[:9], POISON, *innocent[9:]])
    deaths = 0
    while fork_server.run(work, store_of, books).killed:
        deaths += 1
        assert deaths <= LIVES, "it is never quiet"
    assert deaths >= 3

    async def look():
        agent = agent_on(store_of())
        runs = {run_id: await agent.load(run_id) for run_id in (*innocent, POISON)}
        await agent.aclose()
        return runs

    runs = anyio.run(look)
    assert {run_id for run_id, run in runs.items() if run.state is not State.DONE} == {POISON}
    assert [item.kind for item in runs[POISON].pending] == [PendingKind.CRASH]
    assert books.effects() == dict.fromkeys(innocent, 1)


@on_each_store
def test_the_first_crash_changes_nothing(fork_server, store_of, folder):
    """When a worker is killed, one claim takes all of its runs at once, and none is under suspicion."""
    fork_server.run(submit, store_of, [f"r{number}" for number in range(RUNS)])
    worker = fork_server.start(hold, store_of)
    assert worker.next_report() == RUNS
    worker.signal(signal.SIGKILL)
    worker.end()

    async def look():
        store = store_of()
        assert not any(line.driven for line in await store.runs(Filter(agent="cashier")))
        claim = await store.claim("cashier", limit=100)
        await store.aclose()
        return claim

    claim = anyio.run(look)
    assert sorted(lease.run_id for lease in claim.leases) == sorted(f"r{number}" for number in range(RUNS))
    assert not claim.has_suspects
    assert {lease.crashes for lease in claim.leases} == {0}
