"""Several processes on one file: killed, racing, forked."""

import os
import random
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import anyio
import pytest

from agentfsm import LeaseHeldError
from agentfsm.core.events import Observed
from agentfsm.core.run import begin_run
from agentfsm.stores import SQLiteStore
from agentfsm.testing.conformance.helpers import LeasedRun, build_turn, create_finished_run, make_header

WORKER = Path(__file__).with_name("sqlite_worker.py")


@pytest.fixture
def start():
    """Start worker processes; what is left of them at the end of the test is killed."""
    workers = []

    def start(*arguments):
        command = [sys.executable, WORKER, *map(str, arguments)]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return workers[-1]

    yield start
    for worker in workers:
        with worker:
            worker.kill()


def end(worker):
    """Wait for a worker, and return what it said last."""
    out, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    return out.splitlines()[-1]


def test_killed_workers_lose_nothing_that_was_acknowledged(start, path):
    """However workers are killed while they append: what was told to be written is there, in order, without a gap.

    Each next one takes the lease at once, since its predecessor can be seen to be dead, and goes on where that stopped.
    """
    chance = random.Random(1)
    for _ in range(6):
        worker = start("append_for_ever", path, "r1")
        lines = [worker.stdout.readline() for _ in range(chance.randrange(1, 60))]
        worker.kill()
        rest, _ = worker.communicate()
        acknowledged = [int(line) for line in [*lines, *rest.splitlines(keepends=True)] if line.endswith("\n")]
        events = anyio.run(read, path).events
        assert len(events) >= acknowledged[-1]
        assert [event.at for event in events] == [float(number) for number in range(1, len(events) + 1)]


async def read(path):
    """Read the run with a store of its own."""
    store = SQLiteStore(path)
    stored = await store.read("r1")
    await store.aclose()
    return stored


async def test_a_living_worker_keeps_its_lease_and_a_dead_one_does_not(start, store, path):
    """While the process lives its lease holds; when it is killed the run may be taken at once, reaped or not."""
    await create_finished_run(store)
    worker = start("hold", path, "r1")
    word, token, crashes = worker.stdout.readline().split()
    assert (word, crashes) == ("held", "0")
    with pytest.raises(LeaseHeldError):
        await store.lease("r1")
    worker.kill()
    await anyio.to_thread.run_sync(
        os.waitid, os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT
    )  # ended, not reaped: a zombie
    lease = await store.lease("r1")
    assert lease.token == int(token) + 1


def test_killed_workers_are_counted(start, path):
    """A run that kills one worker after another can be told from others, until one of them finishes a turn."""
    tokens = []
    for number in range(3):
        worker = start("hold", path, "r1")
        word, token, crashes = worker.stdout.readline().split()
        assert (word, int(crashes)) == ("held", number)
        tokens.append(int(token))
        worker.kill()
        worker.wait()
    assert tokens == [tokens[0], tokens[0] + 1, tokens[0] + 2]
    assert anyio.run(counted, path) == [3, 3, 0]


async def counted(path):
    """Take the run after a crash, after an orderly end, and after a turn; return how many crashes each lease tells."""
    store = SQLiteStore(path)
    counts = []
    for events in ((Observed(),), build_turn(begin_run(make_header()).apply(Observed())), ()):
        driver = await LeasedRun.resume(store)
        counts.append(driver.lease.crashes)
        if events:
            await driver.append(*events).wait()
        await driver.release()
    await store.aclose()
    return counts


async def test_workers_that_race_drive_one_after_another(start, store, path):
    """Processes that all want one run get it in turn: each lease's appends stand together, and tokens grow."""
    await create_finished_run(store)
    workers = [start("race", path, 15) for _ in range(3)]
    assert [end(worker) for worker in workers] == ["15"] * 3
    events = (await store.read("r1", 2)).events
    drives = [(token, len(list(group))) for token, group in groupby(events, key=lambda event: event.at)]
    tokens = [token for token, _count in drives]
    assert [count for _token, count in drives] == [2] * 45
    assert tokens == sorted(set(tokens))
    assert len({event.took_s for event in events}) == 3


def test_a_forked_child_does_not_share_an_open_file(start, path):
    """SQLite would lose what the child writes: the child is told so, also by a store of its own; the parent goes on."""
    out, _ = start("fork", path, "used").communicate(timeout=60)
    *refusals, listed = out.splitlines()
    assert len(refusals) == 2
    assert all("was open when this process was forked" in line for line in refusals)
    assert listed == "['afterwards', 'of the parent']"


@pytest.mark.parametrize("when", ["unused", "closed"])
def test_a_forked_child_may_use_a_file_that_was_not_open(start, path, when):
    """A store that is made before the workers are forked, and used by them, is the usual case."""
    listed = end(start("fork", path, when))
    parents = ["of the parent"] if when == "closed" else []
    assert listed == str(["afterwards", "of child 0", "of child 1", *parents])


def test_an_open_store_does_not_hold_the_process(start, path):
    """A program that ends without closing its store ends."""
    assert end(start("leave", path)) == "left"
