"""`python -m benchmarks options`: what each option costs by itself, for a turn with one call, beside the plain turn.

The plain turn is an agent with a journal in memory, one tool that declares `read_only=True`, nobody who watches.
Each option takes turns with it in one process. CPU is that of all threads; where a disk is waited for, the wall tells
more. There is no line for traces: beside the journal, the stream and the log there are none.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from agentfsm import Agent, Permissions, Rule
from agentfsm.core.header import Header
from agentfsm.ports import Emit, Lease, Model, PendingWrite, Reply, Request, Store
from agentfsm.reflection import Reflector
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.stores.memory import WRITE_ACCEPTED
from benchmarks.contender import PROMPT, Done, Job, Script, ran
from benchmarks.measure import Sample, alternate
from benchmarks.ours import USAGE, WIDE, Chatty, following, job, summing, texts
from benchmarks.rows import CPU, US, WALL, Clock, check_texts, listen, timed

TURNS = Script(turns=10)
# Calls of a turn, where there are several.
WIDTH = 10
# In one measurement.
RUNS = 10
REPEATS = 25
CHUNKS = 1_000


class NoStore(MemoryStore):
    """Keeps nothing, so that what is measured is the engine alone."""

    async def create(self, header: Header, **_options: object) -> tuple[Header, Lease]:
        """Give a lease of nothing."""
        return header, Lease(run_id=header.id, token=1, version=0)

    def append(self, *_args: object, **_options: object) -> PendingWrite:
        """Say that it is written."""
        return WRITE_ACCEPTED

    def release(self, lease: Lease) -> PendingWrite:
        """Say that it is done."""
        return WRITE_ACCEPTED


class Content(Model):
    """Finds every result correct."""

    name = "content"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer the three questions."""
        return Reply(text='{"correct": true, "more_needed": false, "next_step": ""}', usage=USAGE)


@attrs.frozen
class Option:
    """Something that a user may turn on."""

    name: str
    job: Job
    script: Script = TURNS
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    # In force while it is measured.


def watched(agent: Agent) -> Job:
    """Return a run that somebody watches."""

    async def once() -> Done:
        calls: list[int] = []
        ran.set(calls)
        async with agent.stream(PROMPT) as stream:
            async for _event in stream:
                pass
        assert stream.run is not None
        return Done(answer=stream.run.output, calls=len(calls))

    return once


def approved(agent: Agent) -> Job:
    """Return a run each of whose calls somebody approves."""

    async def once() -> Done:
        calls: list[int] = []
        ran.set(calls)
        run = await agent.run(PROMPT)
        while run.is_waiting:
            for item in run.pending:
                await agent.approve(run.id, item.call_id)
            run = await agent.resume(run.id)
        return Done(answer=run.output, calls=len(calls))

    return once


@contextmanager
def logging_at(level: int) -> Iterator[None]:
    """Write the log of that level, to nowhere."""
    log = logging.getLogger("agentfsm")
    with Path(os.devnull).open("w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        log.addHandler(handler)
        log.setLevel(level)
        yield
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def options(folder: Path) -> list[Option]:
    """Return what is measured."""

    def plain(store: Store | None = None, script: Script = TURNS, **agent: Any) -> Job:
        return job(following(script, store or MemoryStore(), **agent), script)

    def declared(**tool: Any) -> Job:
        return plain(tools=[summing(0.0, **tool)])

    disk = SQLiteStore(folder / "runs.db")
    wide = Script(turns=10, width=WIDTH)
    rules = Permissions(level="write", allow=(Rule("add", lambda a: a.a >= 0),))  # type: ignore[arg-type]
    return [
        Option("no journal at all", plain(NoStore())),
        Option("journal in SQLite, durability normal", plain(disk, durability="normal")),
        Option("journal in SQLite, durability full", plain(disk, durability="full")),
        Option("somebody watches the stream", watched(following(TURNS, MemoryStore()))),
        Option("log at INFO", plain(), around=lambda: logging_at(logging.INFO)),
        Option("log at DEBUG", plain(), around=lambda: logging_at(logging.DEBUG)),
        Option("a bare `@tool`", declared(read_only=False)),
        Option("the same in SQLite, full", plain(disk, tools=[summing(0.0, read_only=False)])),
        Option("tool has locks", declared(locks=lambda a: [a.a])),
        Option("tool has a limit", declared(limit=5)),
        Option("tool has a rule for its arguments", declared(validate=lambda a: None if a.a >= 0 else "negative")),
        Option("permissions with a rule", plain(permissions=rules)),
        Option(
            "a person approves each call",
            approved(following(TURNS, MemoryStore(), tools=[summing(0.0, requires_approval=True)])),
        ),
        Option(
            "a judge looks at each result",
            plain(reflector=Reflector(model=Content(), answers=False, tools=("add",))),
        ),
        Option(f"{WIDTH} calls at once in place of 1", plain(script=wide), wide),
        Option(f"{WIDTH} calls one by one", plain(script=wide, limits=attrs.evolve(WIDE, parallel=1)), wide),
    ]


def sample(option: Option, clock: Clock) -> Sample:
    """Return the measurement of an option: microseconds for a turn."""

    async def once() -> float:
        with option.around():
            took = await timed(option.job, option.script, RUNS, clock)
        return took / RUNS / option.script.turns * US

    return once


async def streamed(burst: int) -> float:
    """Return the microseconds of CPU for a text of a stream whose texts arrive so many together."""
    agent = Agent(Chatty(CHUNKS, burst), limits=WIDE)

    async def once() -> float:
        begun = CPU()
        heard = await listen(texts(agent))
        took = CPU() - begun
        check_texts(heard, CHUNKS)
        return took / CHUNKS * US

    return (await alternate(once, once, REPEATS)).own


async def measure() -> None:
    """Measure and print."""
    print(f"{'us for a turn':<40}{'CPU':>8}{'more':>9}{'':>8}{'wall':>10}{'more':>9}")
    with TemporaryDirectory() as folder:
        basis = Option("plain", job(following(TURNS, MemoryStore()), TURNS))
        for option in options(Path(folder)):
            cpu = await alternate(sample(basis, CPU), sample(option, CPU), REPEATS)
            wall = await alternate(sample(basis, WALL), sample(option, WALL), REPEATS)
            print(
                f"{option.name:<40}{cpu.own:>8.1f}{cpu.more:>+9.1f}{cpu.ratio - 1:>+8.0%}"
                f"{wall.own:>10.1f}{wall.more:>+9.1f}",
                flush=True,
            )
    print(f"{'a text of a stream, 100 at once':<40}{await streamed(100):>8.1f}")
    print(f"{'a text of a stream, each by itself':<40}{await streamed(1):>8.1f}")


def main() -> int:
    """Measure the options."""
    asyncio.run(measure())
    return 0
