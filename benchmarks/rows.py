"""The rows of the table, written once for whoever takes part; each checks that the work was done.

Goals and stretches are those of the project's plan. Nothing is asserted about time.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.contender import ANSWER, BURST, FUNCTION, Contender, Done, Job, Script, words
from benchmarks.measure import Row, Sample
from benchmarks.server import served

Clock = Callable[[], float]
# The time of all threads. What never waits takes as long on a quiet machine; on a busy one, this is what can still be
# compared.
CPU: Clock = time.process_time
WALL: Clock = time.perf_counter
US = 1e6
MS = 1e3
# A millisecond in ten steps: asyncio's poll rounds a wait up to whole milliseconds, and on which side of one a
# contender comes out would be luck.
NAPS_S = tuple(0.02 + step / 10_000 for step in range(10))
MODEL_S = 0.05
CROWD = Script(turns=3, model_s=MODEL_S)
# How finely a stall of the event loop is seen.
TICK_S = 0.001
# Seconds for the crowd whose memory is measured, so that nothing outlives this process when it is given up.
MAX_S = 120.0
# Sent one after the other in one measurement.
REQUESTS = 20
CHUNKS = 2_000
# Texts of one streamed answer over HTTP. They may all come with one read, and for a reader that is 256 events behind
# agentfsm merges them.
EVENTS = 240
# In one measurement.
STREAMS = 4
# Texts of one stream whose way to the reader is timed, each sent by itself.
SENT = 40


def check(done: Done, script: Script) -> None:
    """Make sure that a run was what the script says."""
    assert done == Done(answer=ANSWER, calls=script.calls), done


async def timed(job: Job, script: Script, times: int, clock: Clock) -> float:
    """Return the seconds of so many runs, one after the other."""
    begun = clock()
    runs = [await job() for _ in range(times)]
    took = clock() - begun
    for done in runs:
        check(done, script)
    return took


async def at_once(job: Job, script: Script, runs: int) -> None:
    """Do so many runs at once."""
    for done in await asyncio.gather(*[job() for _ in range(runs)]):
        check(done, script)


# In memory


@asynccontextmanager
async def sequential(contender: Contender, script: Script, times: int, parts: int) -> AsyncIterator[Sample]:
    """Give the time of a run, divided by its parts: turns, calls, or 1."""
    job = contender.runs(script)

    async def sample() -> float:
        return await timed(job, script, times, CPU) / times / parts * US

    yield sample


@asynccontextmanager
async def napping(contender: Contender) -> AsyncIterator[Sample]:
    """Give the time of calls that sleep, all at once."""
    scripts = [Script(turns=1, width=20, tool_s=nap_s) for nap_s in NAPS_S]
    jobs = cycle([(contender.runs(script), script) for script in scripts])

    async def sample() -> float:
        return await timed(*next(jobs), 1, WALL) * MS

    yield sample


@asynccontextmanager
async def grown(contender: Contender) -> AsyncIterator[Sample]:
    """Give how many times a turn of a run of 400 costs one of a run of 20, the start of a run left out.

    The mean turn of a run of 400 is its turn 200, that of a run of 20 its turn 10, if the growth is even.
    """
    none, short, long = (Script(turns=turns) for turns in (0, 20, 400))
    jobs = {script: contender.runs(script) for script in (none, short, long)}

    async def sample() -> float:
        start = await timed(jobs[none], none, 60, CPU) / 60
        early = await timed(jobs[short], short, 20, CPU) / 20 - start
        late = await timed(jobs[long], long, 1, CPU) - start
        return (late / 400) / (early / 20)

    yield sample


@asynccontextmanager
async def crowded(contender: Contender, runs: int, clock: Clock) -> AsyncIterator[Sample]:
    """Give the time of many runs at once, by this clock."""
    job = contender.runs(CROWD)

    async def sample() -> float:
        begun = clock()
        await at_once(job, CROWD, runs)
        return clock() - begun

    yield sample


@asynccontextmanager
async def stalled(contender: Contender, runs: int) -> AsyncIterator[Sample]:
    """Give the longest time for which a task that wants to run every millisecond could not."""
    job = contender.runs(CROWD)

    async def sample() -> float:
        async with ticking() as longest:
            await at_once(job, CROWD, runs)
        return longest() * MS

    yield sample


@asynccontextmanager
async def ticking() -> AsyncIterator[Callable[[], float]]:
    """Give the longest stall of the event loop within the block, in seconds, once it is over."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            begun = WALL()
            await asyncio.sleep(TICK_S)
            longest = max(longest, WALL() - begun - TICK_S)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)  # so that it ticks before the block begins
    yield lambda: longest
    await asyncio.sleep(0)  # and hears of a stall at the end
    ticker.cancel()
    with suppress(asyncio.CancelledError):
        await ticker


@asynccontextmanager
async def remembered(contender: Contender, runs: int) -> AsyncIterator[Sample]:
    """Give the memory of a run among many that are alive at once, in a fresh process (`benchmarks.memory`)."""

    async def sample() -> float:
        command = [sys.executable, "-m", "benchmarks.memory", type(contender).__module__, str(runs)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=MAX_S)  # noqa: ASYNC221, S603  nothing else runs
        return float(done.stdout)

    yield sample


# On disk


@asynccontextmanager
async def journalled(contender: Contender, turns: int, level: str) -> AsyncIterator[Sample]:
    """Give the time of a turn with every step on disk.

    The floor waits for each commit, as agentfsm does before each call of a bare `@tool`. A call that declares
    `read_only=True` may be made again after a crash, so agentfsm waits at the end of such a run only: at level "full"
    that is most of the difference, and a ratio below 1 is no faster disk.
    """
    script = Script(turns=turns)
    contender.level = level
    with TemporaryDirectory() as folder:
        job = await contender.durable(script, Path(folder))
        times = max(1, 400 // turns)

        async def sample() -> float:
            return await timed(job, script, times, WALL) / times / turns * US

        yield sample
        await contender.aclose()


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@asynccontextmanager
async def stored(contender: Contender) -> AsyncIterator[Sample]:
    """Give the bytes on disk for a turn of a long run, once all is closed."""
    script = Script(turns=400)

    async def sample() -> float:
        with TemporaryDirectory() as folder:
            job = await contender.durable(script, Path(folder))
            check(await job(), script)
            await contender.aclose()
            size = size_of(Path(folder))
        assert size > 20 * script.turns, "the steps are not on disk"
        return size / script.turns

    yield sample


@asynccontextmanager
async def crowded_on_disk(contender: Contender, runs: int, level: str) -> AsyncIterator[Sample]:
    """Give the processor time of many runs at once, with every step on disk, all threads together."""
    contender.level = level
    with TemporaryDirectory() as folder:
        job = await contender.durable(CROWD, Path(folder))

        async def sample() -> float:
            begun = CPU()
            await at_once(job, CROWD, runs)
            return (CPU() - begun) * MS

        yield sample
        await contender.aclose()


# Streams and servers


async def listen(stream: AsyncIterator[str]) -> list[str]:
    """Take in a stream."""
    return [text async for text in stream if text]


def check_texts(texts: list[str], chunks: int, *, merged: bool = False) -> None:
    """Make sure that all of a stream came, each chunk by itself unless they may be merged."""
    assert "".join(texts).split() == "".join(words(chunks)).split(), f"{len(texts)} texts, and not those of the model"
    assert merged or len(texts) == chunks, f"{len(texts)} texts in place of {chunks}"


@asynccontextmanager
async def streamed(contender: Contender, burst: int) -> AsyncIterator[Sample]:
    """Give the time of a text from the model to whoever iterates."""
    contender.burst = burst
    stream = contender.streams(CHUNKS)

    async def sample() -> float:
        begun = CPU()
        texts = await listen(stream())
        took = CPU() - begun
        check_texts(texts, CHUNKS, merged=burst > BURST)
        return took / CHUNKS * US

    yield sample


@asynccontextmanager
async def asked(contender: Contender, history: int) -> AsyncIterator[Sample]:
    """Give the processor time of a question over HTTP, which leaves the server's out."""
    with served() as address:
        ask = contender.over_http(f"{address}/history-{history}/v1", history)

        async def sample() -> float:
            begun = CPU()
            answers = [await ask() for _ in range(REQUESTS)]
            took = CPU() - begun
            assert set(answers) == {ANSWER}, answers
            return took / REQUESTS * MS

        yield sample
        await contender.aclose()


@asynccontextmanager
async def heard(contender: Contender) -> AsyncIterator[Sample]:
    """Give the processor time of a text that is streamed over HTTP, its share of the request included."""
    with served() as address:
        stream = contender.over_sse(f"{address}/chunks-{EVENTS}/v1")

        async def sample() -> float:
            begun = CPU()
            answers = [await listen(stream()) for _ in range(STREAMS)]
            took = CPU() - begun
            for texts in answers:
                check_texts(texts, EVENTS)
            return took / STREAMS / EVENTS * US

        yield sample
        await contender.aclose()


@asynccontextmanager
async def reached(contender: Contender, history: int) -> AsyncIterator[Sample]:
    """Give the time from a question to the first byte of its request at the server, median of several."""
    with served() as address:
        ask = contender.over_http(f"{address}/arrived-{history}/v1", history)

        async def once() -> float:
            begun = time.perf_counter_ns()
            return (int(await ask()) - begun) / 1e3

        async def sample() -> float:
            return statistics.median([await once() for _ in range(REQUESTS)])

        yield sample
        await contender.aclose()


@asynccontextmanager
async def delivered(contender: Contender) -> AsyncIterator[Sample]:
    """Give the time from a text's writing at the server to whoever iterates, median of a stream."""
    with served() as address:
        stream = contender.over_sse(f"{address}/sent-{SENT}/v1")

        async def sample() -> float:
            took = [(time.perf_counter_ns() - int(text)) / 1e3 async for text in stream() if text.strip()]
            assert len(took) == SENT, f"{len(took)} texts in place of {SENT}"
            return statistics.median(took)

        yield sample
        await contender.aclose()


@asynccontextmanager
async def served_over_mcp(contender: Contender, revision: str) -> AsyncIterator[Sample]:
    """Give the time of a call of a tool of an MCP server, by the SDK's client over HTTP, one call after the other."""
    from benchmarks.mcp_servers import connected, served_by  # noqa: PLC0415  not every environment has the package

    with served_by(contender.mcp_server) as url:

        async def sample() -> float:
            async with connected(url, revision) as client:
                await client.list_tools()  # so that the client knows the schema
                begun = WALL()
                results = [await client.call_tool("add", {"a": n, "b": 1}) for n in range(REQUESTS)]
                took = WALL() - begun
            texts = [block.text for result in results for block in result.content]
            assert texts == [str(n + 1) for n in range(REQUESTS)], texts
            return took / REQUESTS * MS

        yield sample


@asynccontextmanager
async def imported(contender: Contender, program: Callable[[Contender], str]) -> AsyncIterator[Sample]:
    """Give the time of a process that does nothing but begin as a user's program does, its modules compiled before."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def begin() -> None:
        subprocess.run([sys.executable, "-c", program(contender)], check=True, env=env)  # noqa: S603  nothing else runs

    begin()

    async def sample() -> float:
        begun = WALL()
        begin()
        return (WALL() - begun) * MS

    yield sample


def _with_tool(contender: Contender) -> str:
    return f"{contender.imports}\n{FUNCTION}\n{contender.first_tool}"


def _in_memory(name: str, what: str, script: Script, *, times: int, parts: int, goal: float, stretch: float) -> Row:
    ready = partial(sequential, script=script, times=times, parts=parts)
    return Row(name=name, what=f"{what}: CPU", unit="us", ready=ready, goal=goal, stretch=stretch)


def _crowd(case: str, what: str, unit: str, ready: Callable[..., Any], **how: Any) -> Row:
    return Row(name="crowd", case=case, what=what, unit=unit, ready=partial(ready, runs=1_000), **how)


def _journal(turns: int, level: str, case: str, what: str, **goals: Any) -> Row:
    ready = partial(journalled, turns=turns, level=level)
    return Row(name="journal", case=case, what=what, unit="us", ready=ready, repeats=15, **goals)


def _crowd_on_disk(case: str, what: str, level: str, **goals: Any) -> Row:
    ready = partial(crowded_on_disk, runs=300, level=level)
    return Row(name="crowd+disk", case=case, what=what, unit="ms", ready=ready, repeats=12, **goals)


def _chunk(case: str, what: str, burst: int, **goals: Any) -> Row:
    ready = partial(streamed, burst=burst)
    return Row(name="chunk", case=case, what=f"a text of 2,000 {what}: CPU", unit="us", ready=ready, **goals)


def _import(case: str, what: str, program: Callable[[Contender], str], **goals: Any) -> Row:
    ready = partial(imported, program=program)
    return Row(
        name="import", case=case, what=f"a process that {what}: wall", unit="ms", ready=ready, repeats=15, **goals
    )


def _http(history: int, **goals: Any) -> Row:
    what = f"a question over HTTP after {history} turns: CPU"
    return Row(name="http", case=str(history), what=what, unit="ms", ready=partial(asked, history=history), **goals)


def _latency(case: str, what: str, ready: Callable[..., Any]) -> Row:
    return Row(name="latency", case=case, what=f"{what}: wall", unit="us", ready=ready, goal=1)


def _mcp(revision: str, **goals: Any) -> Row:
    what = f"a call over MCP and HTTP of {revision}, floor: the SDK's server: wall"
    ready = partial(served_over_mcp, revision=revision)
    return Row(name="mcp", case=revision, what=what, unit="ms", ready=ready, peers=False, **goals)


def rows() -> list[Row]:
    """Return all rows, in the order in which they are printed."""
    many = "1,000 runs of 3 turns at once, model 50 ms"
    return [
        _in_memory("run", "a run without tools", Script(turns=0), times=200, parts=1, goal=50, stretch=15),
        _in_memory("turns", "a turn of 10, one call each", Script(turns=10), times=20, parts=10, goal=9, stretch=4),
        _in_memory(
            "fan-out", "a call of 100 at once", Script(turns=1, width=100), times=5, parts=100, goal=7, stretch=3
        ),
        Row(name="naps", what="20 tools at once, some 20 ms each: wall", unit="ms", ready=napping, goal=1.03),
        _crowd("cpu", f"{many}: CPU", "s", partial(crowded, clock=CPU), goal=4, stretch=2, repeats=12),
        _crowd(
            "wall",
            "the same: wall",
            "s",
            partial(crowded, clock=WALL),
            goal=0.25,
            stretch=0.2,
            absolute=True,
            repeats=12,
        ),
        _crowd(
            "memory", "the same: peak memory, each run", "KiB", remembered, goal=12, stretch=8, absolute=True, repeats=4
        ),
        _crowd(
            "stall",
            "the same: longest stall of the loop",
            "ms",
            stalled,
            goal=30,
            stretch=10,
            absolute=True,
            repeats=12,
        ),
        Row(
            name="crowd10k",
            what="10,000 of them: wall",
            unit="s",
            ready=partial(crowded, runs=10_000, clock=WALL),
            goal=2.5,
            stretch=1.2,
            absolute=True,
            repeats=3,
        ),
        *[
            _journal(turns, "normal", str(turns), f"a turn of {turns}, each on disk: wall", goal=5, stretch=3)
            for turns in (20, 100, 400)
        ],
        _journal(100, "full", "full", "a turn of 100, each synced to disk: wall"),
        Row(
            name="disk",
            what="a turn of 400 on disk",
            unit="bytes",
            ready=stored,
            goal=1024,
            stretch=512,
            absolute=True,
            repeats=3,
        ),
        _crowd_on_disk("", "300 runs of 3 turns at once on disk, model 50 ms: CPU", "normal", goal=3, stretch=1.2),
        _crowd_on_disk("full", "the same, each step synced to disk: CPU", "full"),
        Row(
            name="growth",
            what="turn 200 over turn 10: CPU",
            unit="x",
            ready=grown,
            goal=1.1,
            stretch=1.02,
            absolute=True,
        ),
        _chunk("", "through the stream, each by itself", BURST, goal=8, stretch=2.5),
        _chunk("merged", "to a reader that is behind, which may get them merged", CHUNKS),
        _http(10, goal=0.7, stretch=0.4),
        _http(50, goal=0.15, stretch=0.1),
        Row(name="sse", what="a text of 240 streamed over HTTP: CPU", unit="us", ready=heard, goal=0.3, stretch=0.15),
        _latency("request", "from a question to the server's first byte", partial(reached, history=0)),
        _latency("next", "the same after 10 turns of one call", partial(reached, history=10)),
        _latency("chunk", "from a text at the server to its reader", delivered),
        _mcp("2025-11-25", goal=1.3, stretch=1),
        _mcp("2026-07-28", goal=1.3, stretch=1),
        _import("", "imports it", lambda contender: contender.imports, goal=2.8, stretch=2),
        _import("tool", "makes its first tool", _with_tool),
    ]
