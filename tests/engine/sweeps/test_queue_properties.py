"""Random batches in virtual time: whatever the model asks for, the promises of the queue hold."""

from __future__ import annotations

import json
import random

import anyio
import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Outcome, ToolCall, ToolQueue, ToolRegistry, ToolResult, tool
from agentfsm.testing import VirtualClock, run_virtual
from tests.support.checks import Keeping

TIMEOUT_S = 10


@attrs.frozen
class Job:
    """What one call of a random batch is like."""

    safe: bool
    seconds: int
    fails: bool


@attrs.frozen
class Span:
    """When a call ran."""

    index: int
    safe: bool
    begin: float
    end: float

    def overlaps(self, other: Span) -> bool:
        """Whether there is a moment at which both ran."""
        return self.begin < other.end and other.begin < self.end


JOBS = st.lists(st.builds(Job, st.booleans(), st.integers(0, 15), st.booleans()), max_size=14)


def played(jobs: list[Job], limit: int) -> tuple[list[ToolResult], list[Span], float]:
    """Run the jobs as calls, and note when each ran."""
    spans: list[Span] = []

    async def work(index: int, safe: bool) -> str:
        job, begin = jobs[index], anyio.current_time()
        try:
            await anyio.sleep(job.seconds)
            if job.fails:
                raise ValueError(f"no luck with {index}")
            return str(index)
        finally:
            spans.append(Span(index, safe, begin, anyio.current_time()))

    # A tool for each call, so that no breaker is opened by the others' time-outs.
    registry = ToolRegistry.of([tool(name=f"work_{i}", read_only=job.safe)(work) for i, job in enumerate(jobs)])
    calls = [
        ToolCall(id=f"t1.{i}", name=f"work_{i}", arguments=json.dumps({"index": i, "safe": job.safe}))
        for i, job in enumerate(jobs)
    ]

    async def play() -> tuple[list[ToolResult], float]:
        queue = ToolQueue(registry=registry, clock=VirtualClock(), limit=limit, timeout_s=TIMEOUT_S)
        results = await queue.execute_all(calls)
        assert queue.statistics().running == 0
        return results, anyio.current_time()

    results, took = run_virtual(play)
    return results, spans, took


def expected(job: Job, index: int) -> tuple[Outcome, str]:
    """How a job has to end."""
    if job.seconds >= TIMEOUT_S:
        return Outcome.TIMED_OUT, f"within {TIMEOUT_S} s"
    return (Outcome.FAILED, f"no luck with {index}") if job.fails else (Outcome.DONE, str(index))


def check_barriers(spans: list[Span]) -> None:
    """An unsafe call overlaps nothing, and stands between what was before and what is behind it."""
    by_index = sorted(spans, key=lambda span: span.index)
    for earlier in by_index:
        for later in by_index[earlier.index + 1 :]:
            if not (earlier.safe and later.safe):
                assert earlier.end <= later.begin
                assert not earlier.overlaps(later)


def check_time(jobs: list[Job], limit: int, took: float) -> None:
    """No batch takes longer than its longest call and its fair share of the work; nothing is waited for in vain."""
    bound, batch = 0.0, []
    for job in [*jobs, Job(False, 0, False)]:
        seconds = min(job.seconds, TIMEOUT_S)
        if job.safe:
            batch.append(seconds)
            continue
        if batch:
            bound += max(batch) if len(batch) <= limit else sum(batch) / limit + max(batch)
        bound, batch = bound + seconds, []
    assert took <= bound + 1e-6


@given(jobs=JOBS, limit=st.integers(1, 6))
def test_the_promises_hold_for_any_batch(jobs, limit):
    """Results in call order and one for each, failures isolated, unsafe calls alone, the limit kept, no idle time."""
    results, spans, took = played(jobs, limit)
    assert [result.call_id for result in results] == [f"t1.{i}" for i in range(len(jobs))]
    for index, (job, result) in enumerate(zip(jobs, results, strict=True)):
        outcome, words = expected(job, index)
        assert words in result.content
        if job.seconds != TIMEOUT_S:
            assert result.outcome is outcome
    assert sorted(span.index for span in spans) == list(range(len(jobs)))
    check_barriers(spans)
    check_time(jobs, limit, took)
    for moment in {span.begin for span in spans}:
        assert sum(span.begin <= moment < span.end for span in spans) <= limit


def test_thousands_of_seeded_schedules():
    """An unsafe call never overlaps another, over thousands of calls in hundreds of schedules."""
    calls = 0
    for seed in range(150):
        dice = random.Random(seed)
        jobs = [Job(dice.random() < 0.6, dice.randrange(9), dice.random() < 0.2) for _ in range(dice.randrange(5, 40))]
        _, spans, _ = played(jobs, limit=dice.randrange(1, 9))
        check_barriers(spans)
        calls += len(jobs)
    assert calls > 3_000


@given(jobs=JOBS, limit=st.integers(1, 4), when=st.integers(0, 40))
def test_a_cancel_at_any_moment_leaves_only_finished_results(jobs, limit, when):
    """What was handed over before the cancel had run to its end, once, and nothing runs after it."""
    host = Keeping()
    begun: list[float] = []

    async def work(index: int) -> str:
        begun.append(anyio.current_time())
        await anyio.sleep(jobs[index].seconds)
        return str(index)

    async def read(index: int) -> str:
        return await work(index)

    async def write(index: int) -> str:
        return await work(index)

    async def play() -> None:
        registry = ToolRegistry.of([tool(read_only=True)(read), tool(write)])
        calls = [
            ToolCall(id=f"t1.{i}", name="read" if job.safe else "write", arguments=f'{{"index": {i}}}', key=f"k{i}")
            for i, job in enumerate(jobs)
        ]
        queue = ToolQueue(registry=registry, clock=VirtualClock(), limit=limit, host=host)
        with anyio.move_on_after(when) as scope:
            await queue.execute_all(calls)
        assert queue.statistics().running == 0
        if not scope.cancelled_caught:
            assert len(host.kept) == len(jobs)

    run_virtual(play)
    ids = [result.call_id for result in host.kept]
    assert len(ids) == len(set(ids))
    assert all(result.outcome is Outcome.DONE for result in host.kept)
    assert all(moment <= when for moment in begun)


@pytest.mark.parametrize("limit", [1, 2, 7, 32])
def test_a_wide_batch_is_worked_off_without_gaps(limit):
    """A hundred calls of one second take a hundred seconds divided by the limit, rounded up."""
    jobs = [Job(True, 1, False)] * 100
    _, _, took = played(jobs, limit)
    assert took == pytest.approx(-(-100 // limit))
