"""Measure how long runs take at a stated concurrency."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import anyio

from agentfsm.core.errors import AgentError, MisuseError, first_error
from agentfsm.core.machine import State
from agentfsm.core.validation import COUNT
from agentfsm.readiness.evidence import LoadReport

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run


async def measure_load(
    agent: Agent[Any],
    prompts: Sequence[str],
    *,
    runs: int,
    concurrency: int,
    deps: Any = None,
    runs_per_day: int | None = None,
    on_run: Callable[[Run[Any]], None] | None = None,
) -> LoadReport:
    """Execute runs of an agent, and measure their times. They are real runs: they cost money, and have effects.

    Args:
        agent: The agent.
        prompts: Prompts, used in turn.
        runs: Number of runs, 1 or more.
        concurrency: Number of runs at a time, 1 or more.
        deps: Dependencies of each run.
        runs_per_day: Runs that are expected in a day of production, for a forecast of the costs.
        on_run: Called with each run, for progress.

    Raises:
        MisuseError: if an argument is wrong.
        AgentError: if a run cannot be executed, such as a StoreError.
    """
    COUNT.check("measure_load", "runs", runs)
    COUNT.check("measure_load", "concurrency", concurrency)
    if isinstance(prompts, str) or not prompts:
        raise MisuseError(f"measure_load(prompts={prompts!r:.80}): give a list of prompts, one at least")
    concurrency = min(concurrency, runs)
    times: list[float] = []
    ended: list[Run[Any]] = []
    reasons = Counter[str]()
    numbers = iter(range(runs))

    async def work() -> None:
        for number in numbers:
            start = time.perf_counter()
            try:
                run = await agent.run(prompts[number % len(prompts)], deps=deps)
            except AgentError:
                raise
            except Exception as error:  # noqa: BLE001  code of the agent, which may raise anything
                reasons[f"raised {type(error).__name__}"] += 1
                continue
            finally:
                times.append(time.perf_counter() - start)
            ended.append(run)
            reasons[str(run.stop_reason or "waiting")] += 1
            if on_run is not None:
                on_run(run)

    begin = time.perf_counter()
    try:
        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(work)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    seconds = time.perf_counter() - begin
    p50, p95, p99 = _find_percentiles(times)
    # Of a run that raised, nobody knows what it has cost.
    known = [each.usage.cost_usd for each in ended if each.usage.cost_usd is not None and not each.usage.unpriced]
    return LoadReport(
        agent=agent.name,
        fingerprint=agent.fingerprint.digest,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=agent.model.name,
        runs=runs,
        concurrency=concurrency,
        failed=runs - sum(each.state is State.DONE for each in ended),
        seconds=round(seconds, 6),
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        tokens=sum(each.usage.tokens for each in ended),
        usd=sum(known) if len(known) == runs else None,
        runs_per_day=runs_per_day,
        stop_reasons=dict(reasons),
    )


def _find_percentiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        times = times * 2
    found = quantiles(times, n=100, method="inclusive")
    return round(found[49], 4), round(found[94], 4), round(found[98], 4)
