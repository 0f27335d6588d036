"""Metrics of the runs in a store over a time, computed from their journals."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from math import ceil, inf
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.errors import RunNotFoundError
from agentfsm.core.limits import StopReason
from agentfsm.core.pending import PendingKind
from agentfsm.core.run import begin_run
from agentfsm.core.value import Value
from agentfsm.journal.load import read_previous_header
from agentfsm.journal.run_list import RunIterator, find_stranded
from agentfsm.ports.store import Filter, Store
from agentfsm.telemetry import measurements as m
from agentfsm.telemetry.measurements import INTERRUPTION, QUEUE
from agentfsm.telemetry.totals import (
    CALLS,
    DAY_S,
    HOUR_S,
    MEASURED,
    RATIO,
    SLOT_S,
    SLOTS,
    STEPS,
    UNIT,
    CellTable,
    find_first,
    iter_span,
    read_cells,
    read_series,
    read_status,
)

if TYPE_CHECKING:
    from agentfsm.ports.stored import StoredRun
    from agentfsm.telemetry.totals import Subject

# Seconds for which a run waits for a person until it counts as abandoned.
ABANDONED_S: Final = DAY_S

# Stop reasons of tasks that broke, as opposed to those that used up a limit or were stopped.
ERROR_REASONS: Final = (
    str(StopReason.TIMEOUT),
    str(StopReason.TOO_MANY_ERRORS),
    str(StopReason.LOOP_DETECTED),
    str(StopReason.MODEL_ERROR),
)
COMPLETED: Final = str(StopReason.COMPLETED)
# A cancelled task says nothing of what it would have become.
CANCELLED: Final = str(StopReason.CANCELLED)


@attrs.frozen(kw_only=True)
class Distribution(Value):
    """Distribution of measured values. Percentiles are values that occurred, or within 5 % of one if from totals."""

    count: int
    """Number of values."""

    mean: float
    p50: float
    p95: float
    p99: float


@attrs.frozen(kw_only=True)
class ToolMetrics(Value):
    """Metrics of one tool."""

    tool: str
    """Name of the tool; "(unknown)" stands for all names that models invented."""

    calls: int
    """Number of calls that ended, refused ones included."""

    calls_per_hour: float
    """`tool_call_frequency`: calls in an hour, over the whole time."""

    tool_error_rate: float | None
    """Share of failures in the calls that were made, 0 to 1; None if none was."""

    duration_s: Distribution | None
    """Seconds of a call with all its attempts; None if none was made."""


@attrs.frozen(kw_only=True)
class MetricsSummary(Value):
    """Metrics of runs over a time. A figure that nothing was measured for is None, never 0."""

    since: float
    """Beginning of the time, seconds since 1970."""

    until: float
    """End of the time, seconds since 1970."""

    tasks: int
    """Number of tasks that ended: runs that no other run has called, without cancelled ones."""

    cancelled: int
    """Number of tasks that were cancelled. They count in no rate."""

    task_success_rate: float | None
    """Share of completed tasks, 0 to 1."""

    error_rate: float | None
    """Share of tasks that ended by a timeout, model errors, too many errors or a loop, 0 to 1."""

    avg_rounds_per_task: float | None
    """Mean of turns of a task."""

    avg_latency_ms: float | None
    """Mean milliseconds from the creation of a task to its end, without the time that it waited for people."""

    avg_tokens_per_task: float | None
    """Mean tokens of a task, those of its sub-agents included."""

    daily_cost_usd: float | None
    """US dollars of all runs in a day; over several days their mean. None if no price was known."""

    unpriced_tokens: int
    """Tokens whose price was unknown: their cost is missing."""

    user_satisfaction: float | None
    """Mean rating by people, 1 to 5."""

    ratings: int
    """Number of ratings by people."""

    judge_ratings: Mapping[str, float]
    """Mean rating by each judge, 1 to 5, by its model and a hash of its rubric."""

    signals: Mapping[str, int]
    """Number of implicit signals by kind: "asked_again" (nearly the same question within 10 minutes, in a session),
    "edited" (a person changed the arguments of a call), "cancelled", "finding" (something that rules want was due at
    the end of a run), and "abandoned" (open runs that have waited for a person for a day or longer).
    """

    latency_s: Distribution | None
    """Seconds of a task, as in `avg_latency_ms`."""

    request_s: Distribution | None
    """Seconds of a turn's model request."""

    queue_s: Distribution | None
    """Seconds from the creation of a run until a worker began it."""

    waits: Mapping[str, Distribution]
    """Seconds of other times without a worker, by kind, such as "approval" or "interruption"."""

    interruptions: int
    """Number of times that a worker was gone in the middle of a run, by a crash or a shutdown."""

    input_tokens: int
    """Tokens of all requests."""

    output_tokens: int
    """Tokens of all replies."""

    outcomes: Mapping[str, int]
    """Number of tasks that ended, by stop reason."""

    tools: tuple[ToolMetrics, ...]
    """Tools, the most called first."""

    waiting: Mapping[str, int]
    """Number of open runs that wait now, by the kind of wait, such as "approval"."""

    stranded: Mapping[str, int]
    """Number of open runs that are ready and that no worker takes, by the reason; see `StrandedRun.reason`."""


@attrs.define(eq=False, repr=False)
class MeasurementLog:
    """Measurements of many runs, by metric and labels."""

    series: dict[tuple[str, tuple[str, ...]], list[tuple[float, float, int]]] = attrs.field(factory=dict)
    """By metric and labels: times, values, and the numbers of measurements that each value is the sum of."""

    spreads: dict[tuple[str, tuple[str, ...]], list[tuple[float, float, int]]] = attrs.field(factory=dict)
    """Distributions, if the values are sums: times, values, and how often each occurred. From totals: within 5 %."""

    step_s: float = 0.0
    """Seconds that the sums are over, at least: a time begins with a multiple of it. 0 for single measurements."""

    waiting: Counter[str] = attrs.field(factory=Counter)
    """Number of runs that wait, by the kind of wait."""

    stranded: Counter[str] = attrs.field(factory=Counter)
    """Number of runs that are ready and that no worker takes, by the reason."""

    abandoned: list[float] = attrs.field(factory=list)
    """Times at which open runs had waited for a person for `ABANDONED_S`, seconds since 1970."""

    def add(self, measurements: Iterable[m.Measurement]) -> None:
        """Add measurements."""
        for each in measurements:
            self.series.setdefault((each.metric, each.labels), []).append((each.at, each.value, 1))

    def find_start(self, since: float) -> float:
        """Return a time; for -inf that of the oldest measurement, else inf; the measurements must be in order."""
        first = since if since > -inf else min([points[0][0] for points in self.series.values()], default=inf)
        return first - first % self.step_s if self.step_s and first < inf else first

    def find_end(self, now: float) -> float:
        """Return the present, or the time of the newest measurement: clocks differ, and times are rounded."""
        return max([now, *[points[-1][0] for points in self.series.values()]])

    def add_up(self, metric: m.Metric, since: float, until: float, **labels: str) -> tuple[float, int]:
        """Return the sum and the number of the measurements of a metric in a time, of all series with these labels."""
        found = self._select(self.series, metric, since, until, labels)
        return sum(value for value, _ in found), sum(count for _, count in found)

    def distribute(self, metric: m.Metric, since: float, until: float, **labels: str) -> Distribution | None:
        """Return the distribution of a metric in a time, of all series with these labels; None if there is nothing."""
        total, number = self.add_up(metric, since, until, **labels)
        values = sorted(self._select(self.spreads or self.series, metric, since, until, labels))
        if not values:
            return None
        ranks = [*accumulate(count for _, count in values)]

        def at(share: float) -> float:
            return values[bisect_left(ranks, ceil(share * ranks[-1]))][0]

        return Distribution(count=number, mean=total / number, p50=at(0.5), p95=at(0.95), p99=at(0.99))

    @staticmethod
    def _select(
        series: Mapping[tuple[str, tuple[str, ...]], list[tuple[float, float, int]]],
        metric: m.Metric,
        since: float,
        until: float,
        labels: Mapping[str, str],
    ) -> list[tuple[float, int]]:
        wanted = [(metric.labels.index(name), value) for name, value in labels.items()]
        return [
            (value, count)
            for (name, has), points in series.items()
            if name == metric.name and all(has[index] == label for index, label in wanted)
            for at, value, count in points
            if since <= at <= until
        ]

    def label_values(self, metric: m.Metric, label: str) -> list[str]:
        """Return the values that a label of a metric has, sorted."""
        index = metric.labels.index(label)
        return sorted({has[index] for name, has in self.series if name == metric.name})


async def read_measurements(
    store: Store,
    *,
    since: float = -inf,
    agent: str | None = None,
    purpose: str | None = "",
    step_s: int = DAY_S,
    only: Mapping[str, float] | None = None,
    with_open: bool = True,
) -> MeasurementLog:
    """Return the measurements of the runs in a store: from its totals if it has them, else from the journals.

    Args:
        store: The store.
        since: Time in seconds since 1970; runs that were over before it are left out.
        agent: Name of the agent; None for all.
        purpose: Purpose of the runs, such as "eval"; by default those of production; None for all.
        step_s: What the sums of totals are over, seconds: a day, or more where `since` is longer ago; an hour; or 5
            minutes, in which there are only the metrics of alerts.
        only: Metrics that are wanted, each with the time from which on, to read less of the totals; None for all.
        with_open: Whether to read what open runs wait for; their journals are read for this.
    """
    log, where = MeasurementLog(), Filter(agent=agent, purpose=purpose)
    status = await read_status(store)
    if status is not None and status.is_whole:
        await _read_totals(store, status.generation, since, where, log, step_s=step_s, only=only)
        if with_open:
            async for summary in RunIterator(store, attrs.evolve(where, waiting=True)):
                with suppress(RunNotFoundError):
                    _measure_wait(await store.read(summary.id), log)
    else:
        async for summary in RunIterator(store, where):
            if summary.stop_reason is None or summary.updated_at >= since or summary.rating is not None:
                with suppress(RunNotFoundError):  # removed after it was listed
                    stored = await store.read(summary.id)
                    previous = await read_previous_header(store, stored.header)
                    log.add(m.measure_run(stored.header, stored.events, previous=previous))
                    if summary.rating is not None:
                        feedback = await store.list_feedback(summary.id)
                        log.add(m.measure_feedback(stored.header, each) for each in feedback)
                    if summary.waiting and with_open:
                        _measure_wait(stored, log)
    for points in (*log.series.values(), *log.spreads.values()):
        points.sort()
    if with_open:
        log.stranded.update([each.reason for each in await find_stranded(store, where)])
    return log


def _measure_wait(stored: StoredRun, log: MeasurementLog) -> None:
    run = begin_run(stored.header).fold(stored.events)
    # A wait of a sub-agent is counted at its own run.
    log.waiting.update(str(item.kind) for item in run.pending if item.run_id == run.id)
    log.abandoned.append(run.updated_at + ABANDONED_S)


async def _read_totals(
    store: Store,
    generation: str,
    since: float,
    where: Filter,
    log: MeasurementLog,
    *,
    step_s: int,
    only: Mapping[str, float] | None,
) -> None:
    """Add the totals of a store to a log: sums of 5 minutes at the middle of these, others at the beginning."""

    def fits(of: Subject) -> bool:
        return where.agent in {None, of.agent} and where.purpose in {None, of.purpose}

    log.step_s, now = min(step_s, HOUR_S), await store.now()
    if step_s == SLOT_S:
        calls = m.TOOL_CALLS.name
        others = {name: at for name, at in (only or {}).items() if name != calls} or {"": since}
        for levels, start in ((STEPS, min(others.values())), (CALLS, (only or {}).get(calls, since))):
            async for record in iter_span(store, generation, levels, max(0.0, start // HOUR_S * HOUR_S)):
                _add_steps(CellTable.read(record.value), where, log, now, only)
        return
    begin = max(0.0, since // HOUR_S * HOUR_S) if since > -inf else 0.0
    oldest = await find_first(store, generation, MEASURED, fits) or now
    async for record in iter_span(store, generation, MEASURED if step_s > HOUR_S else MEASURED[:1], begin):
        for of, cell in read_cells(record.value).items():
            if not fits(of):
                continue
            at = max(of.at, oldest)
            for series, fields in cell.items():
                name = (labels := read_series(series))[0]
                if name not in m.METRICS or (only is not None and of.at + HOUR_S < only.get(name, inf)):
                    continue
                key = name, labels[1:]
                for field, count in fields.items():
                    if field == "n":
                        log.series.setdefault(key, []).append((min(at, now), fields["s"] / UNIT, count))
                    elif field[0] == "b":
                        value = 2 * RATIO ** int(field[1:]) / (1 + RATIO)
                        log.spreads.setdefault(key, []).append((at, value, count))


def _add_steps(
    table: CellTable, where: Filter, log: MeasurementLog, now: float, only: Mapping[str, float] | None
) -> None:
    """Add the sums of 5 minutes in a record to a log."""
    steps = [
        (min(table.at + (step + 0.5) * SLOT_S, now), table.fields[f"n{step}"], table.fields.get(f"s{step}"))
        for step in range(SLOTS)
        if f"n{step}" in table.fields
    ]
    for row, (agent, purpose, series) in enumerate(zip(table.agents, table.purposes, table.series, strict=True)):
        name = (labels := read_series(series))[0]
        if name not in m.METRICS or where.agent not in {None, agent} or where.purpose not in {None, purpose}:
            continue
        if only is not None and table.at + HOUR_S < only.get(name, inf):
            continue
        points = log.series.setdefault((name, labels[1:]), [])
        for at, counts, sums in steps:
            if counts[row]:
                points.append((at, 0.0 if sums is None else sums[row] / UNIT, counts[row]))


def summarize(log: MeasurementLog, since: float, until: float) -> MetricsSummary:
    """Return the metrics of a time.

    Args:
        log: The measurements.
        since: Beginning, seconds since 1970; -inf for the first measurement.
        until: End, seconds since 1970.
    """
    since = min(log.find_start(since), until)
    hours = max((until - since) / HOUR_S, 1.0)

    def add_up(metric: m.Metric, **labels: str) -> float:
        return log.add_up(metric, since, until, **labels)[0]

    def mean(metric: m.Metric, **labels: str) -> float | None:
        total, count = log.add_up(metric, since, until, **labels)
        return total / count if count else None

    outcomes = {each: round(add_up(m.RUNS, outcome=each)) for each in log.label_values(m.RUNS, "outcome")}
    cancelled = outcomes.get(CANCELLED, 0)
    tasks = sum(outcomes.values()) - cancelled
    latency = log.distribute(m.RUN_DURATION, since, until)
    cost, costs = log.add_up(m.COST, since, until)
    kinds = {kind: log.distribute(m.WAITS, since, until, kind=kind) for kind in log.label_values(m.WAITS, "kind")}
    waits = {kind: found for kind, found in kinds.items() if found is not None}
    signals = {each: round(add_up(m.SIGNALS, signal=each)) for each in log.label_values(m.SIGNALS, "signal")}
    signals["abandoned"] = len([at for at in log.abandoned if since <= at <= until])
    judged = {judge: mean(m.JUDGE_RATINGS, judge=judge) for judge in log.label_values(m.JUDGE_RATINGS, "judge")}
    tools = [_summarize_tool(log, tool, since, until, hours) for tool in log.label_values(m.TOOL_CALLS, "tool")]
    return MetricsSummary(
        since=since,
        until=until,
        tasks=tasks,
        cancelled=cancelled,
        task_success_rate=outcomes.get(COMPLETED, 0) / tasks if tasks else None,
        error_rate=sum(outcomes.get(each, 0) for each in ERROR_REASONS) / tasks if tasks else None,
        avg_rounds_per_task=mean(m.RUN_TURNS),
        avg_latency_ms=None if latency is None else latency.mean * 1_000,
        avg_tokens_per_task=mean(m.RUN_TOKENS),
        daily_cost_usd=cost / max((until - since) / DAY_S, 1.0) if costs else None,
        unpriced_tokens=round(add_up(m.UNPRICED)),
        user_satisfaction=mean(m.RATINGS),
        ratings=log.add_up(m.RATINGS, since, until)[1],
        judge_ratings={judge: rated for judge, rated in judged.items() if rated is not None},
        signals={kind: count for kind, count in signals.items() if count},
        latency_s=latency,
        request_s=log.distribute(m.REQUESTS, since, until),
        queue_s=waits.pop(QUEUE, None),
        interruptions=0 if INTERRUPTION not in waits else waits[INTERRUPTION].count,
        waits=waits,
        input_tokens=round(add_up(m.TOKENS, direction="input")),
        output_tokens=round(add_up(m.TOKENS, direction="output")),
        outcomes={outcome: count for outcome, count in outcomes.items() if count},
        tools=tuple(sorted([each for each in tools if each.calls], key=lambda each: -each.calls)),
        waiting={str(kind): log.waiting[str(kind)] for kind in PendingKind if log.waiting[str(kind)]},
        stranded=dict(sorted(log.stranded.items())),
    )


def _summarize_tool(log: MeasurementLog, tool: str, since: float, until: float, hours: float) -> ToolMetrics:
    outcomes = {
        outcome: log.add_up(m.TOOL_CALLS, since, until, tool=tool, outcome=outcome)[1]
        for outcome in log.label_values(m.TOOL_CALLS, "outcome")
    }
    calls = sum(outcomes.values())
    errors = sum(outcomes.get(each, 0) for each in m.TOOL_ERRORS)
    made = errors + outcomes.get(m.TOOL_DONE, 0)
    return ToolMetrics(
        tool=tool,
        calls=calls,
        calls_per_hour=calls / hours,
        tool_error_rate=errors / made if made else None,
        duration_s=log.distribute(m.TOOL_DURATION, since, until, tool=tool),
    )
