"""`python -m benchmarks lists [PLACE [RUNS]]`: what a page of the list of runs costs in a store with many of them.

A place is the path of a SQLite file, or the URL of a PostgreSQL or Redis; without one, a new file. It is filled up to
RUNS runs, 100,000 without a number, of 1,000 users, 1,000 sessions, 20 tenants and three agents: most are over, one in
a hundred has failed, waits, or is ready for a worker, and one in a hundred has feedback. Then the bytes and the CPU
time of a run are printed, and the CPU time of this process for the page of each filter: the newest 100 runs of it, or
their number.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import zlib
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs

from agentfsm.core.events import ApprovalAsked, Event, Failed, Observed
from agentfsm.core.header import Header
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage
from agentfsm.core.run import begin_run
from agentfsm.ports import Feedback, Filter, Store
from agentfsm.stores import PostgresStore, RedisStore, SQLiteStore
from agentfsm.testing.conformance.helpers import FAR_FUTURE, build_answer, build_turn, make_header
from benchmarks.rows import CPU, MS, US, WALL, size_of

RUNS: Final = 100_000
# Runs that are created at once, and in all by a thousand: one that has failed, waits, or is ready, and is rated.
CROWD: Final = 500
HUNDRED: Final = 100
REPEATS: Final = 7


def store_of(place: str) -> Store:
    """Return the store at a place."""
    if place.startswith("redis"):
        return RedisStore(place, accept_loss="everything")
    return PostgresStore(place) if place.startswith("postgres") else SQLiteStore(place)


def words_of(number: int, count: int) -> str:
    """Return words of a text: of 20,000, the first of which are the most frequent, as in a language."""
    dice = random.Random(number)
    return " ".join([word_of(int(20_000 ** dice.random())) for _ in range(count)])


@cache
def word_of(rank: int) -> str:
    """Return a word of a language, by how frequent it is: 1 for the most frequent."""
    return f"{zlib.crc32(str(rank).encode()):x}".translate(str.maketrans("0123456789", "ghijklmnop"))


def header_of(number: int) -> Header:
    """Return the header of a run: who has it depends on its number."""
    return make_header(
        f"run-{number:08}",
        prompt=f"Order {number}: {words_of(number, 20)}",
        agent="rare" if number % 10_000 == 0 else f"agent{number % 2}",
        user=f"u{number % 1_000}",
        session=f"s{number % 1_000}" if number % HUNDRED > 3 else None,
        tenant=f"t{number % 20}" if number % 4 == 0 else None,
        created_at=1_700_000_000.0 + number,
    )


def events_of(number: int, head: Header) -> tuple[Event, ...]:
    """Return the events of a run, whose end depends on its number."""
    at = head.created_at
    begun = (Observed(at=at),)
    match number % HUNDRED:
        case 1:
            return (*begun, Failed(at=at, reason=StopReason.MAX_TURNS, message="10 turns"))
        case 2:
            chosen, *_rest = build_turn(begin_run(head))
            return (*begun, chosen, ApprovalAsked(at=at, call_id="t1.0", expires_at=FAR_FUTURE))
        case 3:
            return ()
        case _:
            answer = build_answer(number * 37 % 1_000 / 1_000, number * 53 % 600 / 10)
            said = AssistantMessage(text=words_of(-number, 100))
            return (*begun, attrs.evolve(answer, at=at, message=said))


async def fill(store: Store, runs: int, done: int) -> None:
    """Create the runs from number `done` on."""

    async def create(number: int) -> None:
        head = header_of(number)
        _, lease = await store.create(head, events=events_of(number, head), durability="normal")
        await store.release(lease).wait()
        if number % HUNDRED == 5:  # any that is over
            await store.add_feedback(head.id, "k", Feedback(rating=1 + number // HUNDRED % 5, by="ann", at=1.0))

    for start in range(done, runs, CROWD):
        await asyncio.gather(*[create(number) for number in range(start, min(start + CROWD, runs))])


async def told(name: str, ask: Callable[[], Awaitable[Any]]) -> None:
    """Print the CPU time and the wall time of a call."""
    cpu, wall = [], []
    for _ in range(REPEATS):
        begun = CPU(), WALL()
        found = await ask()
        cpu.append(CPU() - begun[0])
        wall.append(WALL() - begun[1])
    size = found if isinstance(found, int) else len(found)
    print(
        f"{name:<44}{statistics.median(cpu) * MS:>8.2f} ms CPU{statistics.median(wall) * MS:>9.2f} ms   {size}",
        flush=True,
    )


async def measure(place: str, runs: int) -> None:
    """Fill the store, and print."""
    store = store_of(place)
    done = await store.count(limit=runs)
    begun = CPU()
    await fill(store, runs, done)
    if done < runs:
        print(f"{runs - done:,} runs created, {(CPU() - begun) / (runs - done) * US:.0f} us CPU each in this process")
    if isinstance(store, SQLiteStore):
        await store.aclose()
        print(f"{size_of(Path(place).parent) / runs:.0f} bytes of the file for a run")
        store = store_of(place)
    now, middle = await store.now(), 1_700_000_000.0 + runs / 2
    filters = {
        "all": Filter(),
        "before the middle": Filter(before=middle),
        "user": Filter(user="u7"),
        "user without runs": Filter(user="nobody"),
        "user, before the middle": Filter(user="u7", before=middle),
        "user, agent without runs": Filter(user="u7", agent="none"),
        "no user, agent with few runs": Filter(user="", agent="rare"),
        "tenant, user": Filter(tenant="t8", user="u8"),
        "no tenant, user": Filter(tenant="", user="u7"),
        "no user": Filter(user=""),
        "session": Filter(session="s77"),
        "agent": Filter(agent="agent1"),
        "agent with few runs": Filter(agent="rare"),
        "agent without runs": Filter(agent="none"),
        "agent, release without runs": Filter(agent="agent1", release="2"),
        "tenant": Filter(tenant="t8"),
        "tenant without runs": Filter(tenant="none"),
        "no tenant, agent with few runs": Filter(tenant="", agent="rare"),
        "tenant, agent without runs": Filter(tenant="t8", agent="none"),
        **{f"state {state}": Filter(state=state) for state in State},
        "no tenant, state error": Filter(tenant="", state=State.ERROR),
        "user, state error": Filter(user="u7", state=State.ERROR),
        "waiting": Filter(waiting=True),
        "not waiting": Filter(waiting=False),
        "user, waiting": Filter(user="u2", waiting=True),
        "agent, waiting": Filter(agent="rare", waiting=True),
        "not over": Filter(over=False),
        "over": Filter(over=True),
        "tenant, user, not over": Filter(tenant="t8", user="u8", over=False),
        "rating up to 2": Filter(max_rating=2),
        "agent, rating up to 2": Filter(agent="rare", max_rating=2),
        "ready": Filter(ready_by=now),
        "agent, ready": Filter(agent="agent1", ready_by=now),
        "active": Filter(active_at=now),
        "tenant, active": Filter(tenant="t8", active_at=now),
        "callers": Filter(parent="", tenant="", purpose=""),
        "completed, since the middle": Filter(stop_reason=StopReason.COMPLETED, since=middle),
        "turns were used up": Filter(stop_reason=StopReason.MAX_TURNS),
        "cost of $0.999 and more": Filter(min_cost_usd=0.999),
        "agent with few runs, up to 10 s": Filter(agent="rare", max_duration_s=10.0),
        "release without runs, cost of $0.5 and more": Filter(release="none", min_cost_usd=0.5),
    }
    for name, where in filters.items():
        await told(name, lambda where=where: store.runs(where))  # type: ignore[misc]
    if not isinstance(store, RedisStore):
        rare, common, most = word_of(19_999), word_of(200), word_of(1)
        said = {
            "a rare word": Filter(text=rare),
            "a common word": Filter(text=common),
            "the most common word": Filter(text=most),
            "two common words": Filter(text=f"{common} {most}"),
            "three letters": Filter(text=rare[:3]),
            "a word of no run": Filter(text="nowhere"),
            "a common word, agent with few runs": Filter(text=common, agent="rare", parent="", purpose=""),
            "the most common word, user, completed": Filter(
                text=most, user="u7", stop_reason=StopReason.COMPLETED, purpose=""
            ),
            "the most common word, user without runs": Filter(text=most, user="nobody"),
        }
        filters |= said
        for name, where in said.items():
            await told(name, lambda where=where: store.runs(where))  # type: ignore[misc]
            await told(f"cost: {name}", lambda where=where: store.runs(where, order="cost"))  # type: ignore[misc]
    for name in (
        "all",
        "user",
        "user without runs",
        "agent",
        "agent with few runs",
        "tenant",
        "user, before the middle",
    ):
        for order in ("cost", "duration"):
            await told(f"{order}: {name}", lambda name=name, order=order: store.runs(filters[name], order=order))  # type: ignore[misc]
    await told("cost: after half", lambda: store.runs(order="cost", after=(0.5, "")))
    for name, where in filters.items():
        await told(f"count: {name}", lambda where=where: store.count(where, limit=1_000_000))  # type: ignore[misc]
    await store.aclose()


def main(place: str = "", runs: str = str(RUNS)) -> int:
    """Measure lists."""
    if place:
        asyncio.run(measure(place, int(runs)))
    else:
        with TemporaryDirectory() as folder:
            asyncio.run(measure(f"{folder}/runs.db", int(runs)))
    return 0
