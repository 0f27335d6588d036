"""Two workers with the items of flows, one of which is killed: each item has its effect once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from agentfsm import Found, RunContext, State
from agentfsm.flow import Flow, each, step
from agentfsm.ports import Store
from agentfsm.testing.crash import ForkServer, crash_point, report

RUNS = ("first", "second")


class Ledger:
    """The effects, as files of a folder. A second effect of a key fails."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def act(self, key: str) -> None:
        """Have the effect of a key."""
        crash_point("effect")
        os.close(os.open(self.folder / key.replace(":", "_"), os.O_CREAT | os.O_EXCL))
        crash_point("effect")

    def look_up(self, ctx: RunContext[None], _arguments: object) -> Found | str:
        """Return the result of an item whose worker died after its effect."""
        return Found("0") if (self.folder / ctx.idempotency_key.replace(":", "_")).exists() else "rerun"


def flow_on(store: Store, folder: str) -> Flow:
    """Return a flow with an effect for each item of a list."""
    ledger = Ledger(folder)

    @step(on_unknown=ledger.look_up)
    async def load(ctx: RunContext[None], item: int) -> int:
        ledger.act(ctx.idempotency_key)
        await anyio.sleep(0.001)
        return 0

    @step(depends_on=["load"], read_only=True)
    async def count(load: list[int]) -> int:
        return len(load)

    return Flow([each(load, over="items", parallel=8), count], name="loads", store=store)


async def submit(make_store: Callable[[], Store], folder: str, items: int) -> None:
    """Create the runs."""
    async with flow_on(make_store(), folder) as flow:
        for run_id in RUNS:
            await flow.submit({"items": list(range(items))}, id=run_id)


async def work(make_store: Callable[[], Store], folder: str) -> None:
    """Work until all runs are over, or until this process is killed."""
    async with flow_on(make_store(), folder) as flow:
        while not all([(await flow.load(run_id)).is_over for run_id in RUNS]):
            await flow.worker(until_idle=True, parallel=1)
            await anyio.sleep(0.02)
        for run_id in RUNS:
            run = await flow.load(run_id)
            report((run_id, run.state is State.DONE and run.output, run.stop_message))


def run_workers(fork_server: ForkServer, make_store: Callable[[], Store], folder: Path, items: int) -> None:
    """Let two workers load the items of two runs, and kill one of them on its way."""
    effects = folder / "effects"
    effects.mkdir()
    assert not fork_server.run(submit, make_store, str(effects), items).killed
    start = partial(fork_server.start, work, make_store, str(effects))
    first = start(kill_at=("effect", items // 2))
    while not any(effects.iterdir()):  # it has a run now
        time.sleep(0.01)
    second = start()
    assert first.end().killed
    ended = second.end()
    assert list(ended.reports) == [(run_id, f'{{"count": {items}}}', "") for run_id in RUNS]
    assert len(list(effects.iterdir())) == len(RUNS) * items


@pytest.mark.parametrize("store_of", ["sqlite", "postgres"], indirect=True)
def test_two_workers_have_each_effect_once(fork_server, store_of, folder):
    """One is killed after half of its items; the other one goes on where it was."""
    run_workers(fork_server, store_of, folder, 20)


@pytest.mark.soak
@pytest.mark.parametrize("store_of", ["sqlite", "postgres"], indirect=True)
def test_two_workers_have_a_thousand_effects_once(fork_server, store_of, folder):
    """A thousand items for each of the two runs."""
    run_workers(fork_server, store_of, folder, 1_000)
