"""Metrics of the gateway in the text format of Prometheus. All labels have a bounded set of values.

Those of runs are counted from the journals, by a follower that begins with the first request for them.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, TypeAlias

import anyio
import attrs

from agentfsm.core.errors import AgentError, RunNotFoundError, StoreError
from agentfsm.core.limits import StopReason
from agentfsm.journal.load import read_previous_header
from agentfsm.ports.followers import Delivery
from agentfsm.ports.store import Store
from agentfsm.telemetry.measurements import (
    METRICS,
    RUNS,
    TOOL_CALLS,
    TOOL_DONE,
    TOOL_ERRORS,
    Measurement,
    Metric,
    measure_feedback,
    measure_run,
)

Samples: TypeAlias = "list[tuple[dict[str, str], float]]"
"""Labels and value of each sample of a metric."""

# Name of the follower that counts runs. All servers of a store share it: each run is counted by one of them.
METRICS_FOLLOWER: Final = "metrics"
# Seconds after which the follower is started again when the store fails.
FOLLOWER_RETRY_S: Final = 5.0
# Series of one metric; further ones are added to a series whose labels are all "(other)".
MAX_SERIES: Final = 2_000
OTHER: Final = "(other)"
# Runs whose number of ratings is remembered, so that each counts once.
MAX_RATED_RUNS: Final = 10_000

_log = logging.getLogger("agentfsm.serve")

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@attrs.define(eq=False, repr=False)
class RequestCounts:
    """Counts of requests and executed runs in this process."""

    requests: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Requests by operation and class of the status, such as "2xx"."""

    executions: Counter[str] = attrs.field(factory=Counter)
    """Executions of runs, each until the run is over or waits, by agent."""

    crashes: Counter[str] = attrs.field(factory=Counter)
    """Executions that went on with a run whose last worker had not released it, by agent."""

    lost_leases: Counter[str] = attrs.field(factory=Counter)
    """Executions that ended because another worker had taken the run, by agent."""

    def count_request(self, operation: str, status: int) -> None:
        """Count a request that was answered."""
        self.requests[operation, f"{status // 100}xx"] += 1


@attrs.define(eq=False, repr=False)
class _SeriesTotals:
    """Total of one series."""

    total: float = 0.0
    buckets: list[int] = attrs.field(factory=list)
    """Number of values in each bucket of a histogram, and above the last; empty for a counter."""


@attrs.define(eq=False, repr=False)
class RunCounts:
    """Counts of the events of runs, from their journals, since this process began to count."""

    store: Store
    """Store of the runs."""

    _series: dict[str, dict[tuple[str, ...], _SeriesTotals]] = attrs.field(
        factory=lambda: {name: {} for name in METRICS}, init=False
    )
    _rated: dict[str, int] = attrs.field(factory=dict, init=False)
    """Number of ratings that were counted, by run."""

    has_begun: bool = attrs.field(default=False, init=False)
    """Whether the runs are followed."""

    def expect(self, agent: str, version: str, model: str, tools: Iterable[str]) -> None:
        """Begin the series of an agent at 0, so that Prometheus sees its first failure as an increase.

        Args:
            agent: Name of the agent.
            version: Its version; empty if it has none.
            model: Name of its model.
            tools: Names of its tools.
        """
        outcomes = [each for each in StopReason if each is not StopReason.PARKED]
        series: list[tuple[str, tuple[str, ...]]]
        series = [(RUNS.name, (agent, version, model, str(each))) for each in outcomes]
        series += [(TOOL_CALLS.name, (agent, tool, each)) for tool in tools for each in (TOOL_DONE, *TOOL_ERRORS)]
        self.add(Measurement(metric, labels, 0.0, 0.0) for metric, labels in series)

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Count measurements."""
        for each in measurements:
            metric, series = METRICS[each.metric], self._series[each.metric]
            labels = each.labels if each.labels in series or len(series) < MAX_SERIES else (OTHER,) * len(each.labels)
            if (found := series.get(labels)) is None:
                buckets = [0] * (len(metric.buckets) + 1) if metric.kind == "histogram" else []
                found = series[labels] = _SeriesTotals(buckets=buckets)
            found.total += each.value
            if found.buckets:
                found.buckets[bisect_left(metric.buckets, each.value)] += 1

    async def follow(self) -> None:
        """Count the new events in the store, until cancelled. A store without followers has no such metrics."""
        if type(self.store).add_follower is Store.add_follower:
            _log.warning("there are no metrics of runs: %s has no followers", type(self.store).__name__)
            return
        while True:
            try:
                began_at = await self.store.now()
                async with self.store.follow(METRICS_FOLLOWER, start="now") as follower:
                    async for delivery in follower:
                        await self._count(delivery, began_at)
                        await delivery.done()
            except AgentError as error:  # the store fails, or the follower was dropped
                _log.warning("the metrics of runs are counted later: %s", error)
                await anyio.sleep(FOLLOWER_RETRY_S)

    async def _count(self, delivery: Delivery, began_at: float) -> None:
        if delivery.header.purpose:  # only production is measured
            return
        try:
            await self._count_events(delivery)
        except StoreError:
            raise
        except Exception:  # noqa: BLE001  metrics are no reason to stop the server
            _log.exception("run %s is left out of the metrics", delivery.run_id)
        known = self._rated.pop(delivery.run_id, None)
        new = delivery.feedback[known or 0 :]
        self.add(measure_feedback(delivery.header, each) for each in new if known is not None or each.at >= began_at)
        if delivery.feedback:
            self._rated[delivery.run_id] = len(delivery.feedback)
            if len(self._rated) > MAX_RATED_RUNS:
                del self._rated[next(iter(self._rated))]

    async def _count_events(self, delivery: Delivery) -> None:
        if delivery.events:
            events = delivery.events
            if delivery.after_version:
                try:
                    events = (await self.store.read(delivery.run_id)).events
                except RunNotFoundError:  # removed meanwhile
                    return
            previous = await read_previous_header(self.store, delivery.header)
            self.add(measure_run(delivery.header, events, after=delivery.after_version, previous=previous))

    def format(self) -> str:
        """Return the counts in the text format of Prometheus."""
        return "".join(_format_series(METRICS[name], series) for name, series in self._series.items())


def _format_series(metric: Metric, series: dict[tuple[str, ...], _SeriesTotals]) -> str:
    if metric.kind == "counter":
        totals: Samples = [(dict(zip(metric.labels, has, strict=True)), each.total) for has, each in series.items()]
        return format_metric(metric.name, "counter", metric.text, totals)
    bounds = [*[f"{bound:g}" for bound in metric.buckets], "+Inf"]
    lines = [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} histogram"]
    for has, each in series.items():
        labels = dict(zip(metric.labels, has, strict=True))
        for bound, count in zip(bounds, accumulate(each.buckets), strict=True):
            lines.append(_format_sample(f"{metric.name}_bucket", labels | {"le": bound}, count))
        lines.append(_format_sample(f"{metric.name}_sum", labels, each.total))
        lines.append(_format_sample(f"{metric.name}_count", labels, sum(each.buckets)))
    return "\n".join(lines) + "\n"


def format_metric(name: str, kind: str, text: str, samples: Samples) -> str:
    """Return a metric with its samples.

    Args:
        name: Name of the metric.
        kind: "counter" or "gauge".
        text: What it counts.
        samples: Labels and value of each sample.
    """
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [_format_sample(name, labels, value) for labels, value in samples]
    return "\n".join(lines) + "\n"


def _format_sample(name: str, labels: dict[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
    number = repr(value) if value % 1 else f"{value:.0f}"  # in full: a rounded counter would stand still
    return f"{name}{{{pairs}}} {number}" if pairs else f"{name} {number}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
