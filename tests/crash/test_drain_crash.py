"""Workers that are drained, also ones that are killed within the drain: the effects agree with the books."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from agentfsm.core.events import ToolLost
from tests.support.crash_story import World, agent_on, check, drained, lives

# Events of a life before its drain begins: in the first request, and amid the calls of a reply.
EARLY, AMID = 1, 6

on_sqlite = pytest.mark.parametrize("store_of", ["sqlite"], indirect=True)


def end(fork_server, store, worlds, told):
    """Let one worker end the runs, and check them against the books."""
    ended = fork_server.run(lives, store, worlds)
    assert not ended.killed
    anyio.run(check, store, worlds, [*told, *[word for word in ended.reports if word != "alive"]])


def kill_within(fork_server, store, folder, kind, after):
    """Kill a worker at each moment of a kind, from the start of a life that ends with a drain; return how many."""
    at, was_killed = 0, True
    while was_killed:
        at += 1
        world = World(store, f"run-{at}", str(folder / f"books-{at}"))
        ended = fork_server.run(partial(drained, after=after), world, kill_at=(kind, at))
        was_killed = ended.killed
        end(fork_server, store, [world], [word for word in ended.reports if word != "alive"])
    return at - 1


@on_sqlite
def test_a_run_goes_from_drain_to_drain(fork_server, store_of, folder):
    """Each worker is drained at its first event; no call is cut off, and no person is asked about an outcome."""
    world, told = World(store_of, "run-d", str(folder / "books")), []
    for _ in range(7):
        told += [word for word in fork_server.run(partial(drained, after=1), world).reports if word != "alive"]
    assert len({version for _, version, _ in told}) > 5
    end(fork_server, store_of, [world], told)

    async def read():
        async with agent_on(store_of()) as agent:
            return await agent.history("run-d")

    assert not [event for event in anyio.run(read) if isinstance(event, ToolLost)]


@on_sqlite
def test_a_worker_may_be_killed_within_a_drain(fork_server, store_of, folder):
    """Before and after each effect of a life that is drained amid the calls of a reply."""
    assert kill_within(fork_server, store_of, folder, "effect", AMID) > 3


@pytest.mark.soak
@on_sqlite
@pytest.mark.parametrize("kind", ["commit", "await"])
@pytest.mark.parametrize("after", [EARLY, AMID, 2 * AMID, 3 * AMID])
def test_a_worker_may_be_killed_at_each_moment_of_a_drain(fork_server, store_of, folder, kind, after):
    """The same at each commit and each await, of drains that begin early and late."""
    assert kill_within(fork_server, store_of, folder, kind, after) > 0
