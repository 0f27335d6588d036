"""P4: two workers never advance one run, though both want it at the same moment, or one had stopped and wakes late."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentfsm.core.events import AnswerGiven, ToolLost
from agentfsm.ports import Store
from agentfsm.testing.crash import ForkServer
from tests.support.checks import keys_of, starts_of
from tests.support.crash_story import World
from tests.support.race_story import approved, payer, racer, stopping

# Runs that both workers resume at the same moment.
HEAT = 10
# A lease: it has to end before another worker may go on.
SHORT_S = 0.3

on_each = pytest.mark.parametrize("store_of", ["sqlite", "postgres", "redis"], indirect=True)
on_sqlite = pytest.mark.parametrize("store_of", ["sqlite"], indirect=True)


def heats_of(count: int) -> list[list[str]]:
    """Return the ids of so many runs, in heats."""
    return [[f"run-{number}" for number in range(start, start + HEAT)] for start in range(0, count, HEAT)]


def race(
    fork_server: ForkServer, store: Callable[[], Store], books: Path, heats: Sequence[Sequence[str]], **how: Any
) -> None:
    """Let two workers race for runs, and fail unless each run is done, and its call was made once."""
    fork_server.run(approved, store, [run_id for heat in heats for run_id in heat])
    racers = [fork_server.start(partial(racer, **how), store, str(books), heats) for _ in range(2)]
    for _ in heats:
        assert [each.next_report() for each in racers] == ["ready", "ready"]
        for each in racers:
            each.go()
    beaten = [each.end().reports[-1] for each in racers]
    assert how.get("wait") or sum(beaten) > 0, "they never met"
    check(store, books, [run_id for heat in heats for run_id in heat])


def check(store: Callable[[], Store], books: Path, run_ids: Sequence[str]) -> None:
    """Fail unless each call was made once, and the journals say so."""
    made = [line.split()[0] for line in books.read_text().splitlines()]
    assert sorted(made) == sorted(anyio.run(check_journals, store, run_ids)), "doubles, or calls that nobody made"


async def check_journals(store: Callable[[], Store], run_ids: Sequence[str]) -> list[str]:
    """Fail unless each run is done, and has begun its call once; return the keys of these calls."""
    keys = []
    async with payer(store()) as agent:
        for run_id in run_ids:
            keys.append(keys_of(await agent.load(run_id))["t1.0"])
            events = await agent.history(run_id)
            assert isinstance(events[-1], AnswerGiven)
            assert starts_of(events, "t1.0") == 1
            assert not [event for event in events if isinstance(event, ToolLost)]
    return keys


@on_each
def test_workers_race_for_runs(fork_server, store_of, folder):
    """Runs that a person has let go on, each resumed by two processes at once: each call is made once."""
    race(fork_server, store_of, folder / "books", heats_of(80))


@on_each
@pytest.mark.soak
def test_workers_race_for_a_thousand_runs(fork_server, store_of, folder):
    """The same, longer."""
    race(fork_server, store_of, folder / "books", heats_of(1_000))


@on_each
def test_the_loser_waits_and_gets_the_finished_run(fork_server, store_of, folder):
    """Where both wait for one another, both have the run that is over in the end."""
    race(fork_server, store_of, folder / "books", heats_of(30), wait=True)


@on_sqlite
@pytest.mark.parametrize("fault", ["granted", "granted, unchecked"])
def test_the_race_finds_what_is_broken(fork_server, store_of, folder, fault):
    """Planted: a lease for whoever asks, without and with a store that takes the appends of a former owner."""
    with pytest.raises(AssertionError):
        race(fork_server, store_of, folder / "books", heats_of(200), fault=fault)


def stall(fork_server: ForkServer, store: Callable[..., Store], books: Path, **how: Any) -> str:
    """Stop a worker in the middle of a run, let another end that, and let the first go on; return what it met."""
    world = World(store, "r1", str(books))
    late = fork_server.start(partial(stopping, stops=True, **how), partial(store, lease_s=SHORT_S), world)
    assert late.next_report() == "halted"
    late.signal(signal.SIGSTOP)
    assert fork_server.run(partial(stopping, stops=False), store, world).reports == ("done",)
    late.signal(signal.SIGCONT)
    late.go()
    return late.end().reports[-1]


@on_each
@pytest.mark.parametrize("beats", [True, False], ids=["beating", "silent"])
def test_an_owner_that_wakes_late_is_refused(fork_server, store_of, folder, beats):
    """It was stopped until its lease had ended and another had gone on: its append is refused, its call is not made.

    Its store may learn that when it renews its leases, or, where that does not come first, in the append itself.
    """
    assert stall(fork_server, store_of, folder / "books", beats=beats) == "LeaseLostError"
    assert len((folder / "books").read_text().splitlines()) == 1


@on_sqlite
def test_an_owner_that_is_not_refused_would_act_twice(fork_server, store_of, folder):
    """Planted: a store that takes whatever a former owner appends."""
    stall(fork_server, store_of, folder / "books", beats=False, fault="unchecked")
    assert len((folder / "books").read_text().splitlines()) == 2
