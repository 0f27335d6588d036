"""A worker process for the tests: `python sqlite_worker.py WHAT PATH [ARGUMENT]`. It prints what it has done."""

import os
import sys

import anyio
import attrs

from agentfsm import LeaseHeldError, MisuseError, StoreError
from agentfsm.core.events import Observed
from agentfsm.core.run import begin_run
from agentfsm.stores import SQLiteStore
from agentfsm.testing.conformance.helpers import LeasedRun, make_header

# Queued together before each wait.
APPENDS = 3


def say(*words):
    """Print a line that the parent reads at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def append_for_ever(store, run_id):
    """Append, and say each version once it is acknowledged."""
    head, lease = await store.create(make_header(run_id))
    run = attrs.evolve(begin_run(head), version=lease.version)
    while True:
        for _ in range(APPENDS):
            version = run.version + 1
            run = attrs.evolve(run, version=version)
            commit = store.append(lease, run, (Observed(at=float(version)),))
        await commit.wait()
        say(run.version)


async def hold(store, run_id):
    """Take a lease and keep it."""
    driver = await LeasedRun.create(store, make_header(run_id))
    say("held", driver.lease.token, driver.lease.crashes)
    await anyio.sleep_forever()
    assert driver  # kept until here: a lease that nobody keeps is let go of


async def goes_on(store, first, second):
    """Write a run, and once a line comes, try to write another: with this store, twice, and with a new one."""
    await create(store, first)
    say("written", first)
    sys.stdin.readline()
    for each in (store, store, SQLiteStore(store.path, patience_s=0.0)):
        try:
            await create(each, second)
        except StoreError as error:
            say(error)
    say("ended")


async def race(store, drives):
    """Drive a run that others want as well, a number of times, two appends each; say nothing else than the number."""
    done = 0
    while done < int(drives):
        try:
            lease = await store.lease("r1")
        except LeaseHeldError:
            continue
        stored = await store.read("r1")
        assert len(stored.events) == lease.version
        run = attrs.evolve(begin_run(stored.header), version=lease.version)
        for _ in range(2):
            run = attrs.evolve(run, version=run.version + 1)
            commit = store.append(lease, run, (Observed(at=float(lease.token), took_s=float(os.getpid())),))
        assert await commit.wait()
        await store.release(lease).wait()
        done += 1
    say(done)


def fork(path, when):
    """Use a store in a forked child while the parent goes on using it."""
    store = SQLiteStore(path)
    if when == "used":
        anyio.run(create, store, "of the parent")
    elif when == "closed":
        anyio.run(create, SQLiteStore(path), "of the parent", "closed")
    child = os.fork()
    if child == 0:
        try:
            anyio.run(in_child, store, SQLiteStore(path))
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
    anyio.run(create, store, "afterwards")
    say(sorted(line.id for line in anyio.run(store.runs)))


async def create(store, run_id, then=""):
    """Create a run."""
    _head, lease = await store.create(make_header(run_id))
    await store.release(lease).wait()
    if then:
        await store.aclose()


async def in_child(*stores):
    """Create a run with each store."""
    for store in stores:
        try:
            await create(store, f"of child {stores.index(store)}")
        except MisuseError as error:
            say(error)


def leave(path):
    """End while a lease is held and the store open: the process must not hang."""
    store = SQLiteStore(path)
    _lease = anyio.run(LeasedRun.create, store)
    say("left")


def main(what, path, *arguments):
    if what in ("fork", "leave"):
        globals()[what](path, *arguments)
    else:
        anyio.run(globals()[what], SQLiteStore(path), *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
