"""Alerts on the metrics: one table, from which the rules for Prometheus are written and which journals are tested with.

agentfsm has no alert engine: Prometheus evaluates the rules, and Alertmanager notifies. `replay_alerts` evaluates the
same table over recorded journals, so that a threshold can be tried before it is relied on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil, inf
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import anyio
import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.limits import StopReason
from agentfsm.core.validation import NOT_NEGATIVE
from agentfsm.core.value import Value
from agentfsm.telemetry import measurements as m
from agentfsm.telemetry.metrics_summary import (
    CANCELLED,
    COMPLETED,
    ERROR_REASONS,
    MeasurementLog,
    read_measurements,
)
from agentfsm.telemetry.totals import DAY_S, HOUR_S, SLOT_S

if TYPE_CHECKING:
    from agentfsm.ports.store import Store

# Seconds between two evaluations: those of the rules, and of a replay.
INTERVAL_S: Final = float(SLOT_S)
# Seconds between two values of a counter that a rule looks at in an hour; in a day it is five times as long.
STEP_S: Final = 60.0
# Share of a day's budget from which on there is a warning (document H, 4.4).
WARNING_SHARE: Final = 0.8
# Time in which the median of a tool's calls is taken, seconds, and the fewest hours that make a baseline.
BASELINE_S: Final = 7 * DAY_S
MIN_BASELINE_HOURS: Final = 24


@attrs.frozen(kw_only=True)
class Series(Value):
    """The series of a metric that an alert adds up."""

    metric: m.Metric
    """The metric."""

    label: str = ""
    """Label that selects series; empty for all."""

    only: tuple[str, ...] = ()
    """Values of the label that are added up."""

    without: tuple[str, ...] = ()
    """Values of the label that are left out."""

    part: Literal["", "sum", "count", "bucket"] = ""
    """Of a histogram: the sum of its values, their number, or that of those up to each bound; empty for a counter."""

    def selects(self, labels: tuple[str, ...]) -> bool:
        """Return whether a series with these labels is added up."""
        if not self.label:
            return True
        value = labels[self.metric.labels.index(self.label)]
        return value in self.only if self.only else value not in self.without

    def format_query(self, window: str, *matchers: str) -> str:
        """Return the increase in a window, as PromQL, of each series of a store.

        All servers of a store show the same counters, so the increase is that of their maximum: a server that starts,
        ends or is replaced changes nothing. Those of a job are the servers of a store.

        Args:
            window: The window and the seconds between two values that are looked at, such as "1h:1m".
            matchers: Further conditions on labels, such as 'agent="shop"'.
        """
        name = f"{self.metric.name}_{self.part}" if self.part else self.metric.name
        if self.label:
            operator, values = ("=~", self.only) if self.only else ("!~", self.without)
            matchers = (f'{self.label}{operator}"{"|".join(values)}"', *matchers)
        selector = f"{{{', '.join(matchers)}}}" if matchers else ""
        labels = ["job", *self.metric.labels, *(["le"] if self.part == "bucket" else [])]
        return f"increase(max by ({', '.join(labels)}) ({name}{selector})[{window}])"


@attrs.frozen(kw_only=True)
class Alert(Value):
    """A threshold of a metric. The value is `parts / wholes`, or the sum of `parts` if there are no `wholes`."""

    name: str
    """Name of the metric."""

    text: str
    """Meaning, for people."""

    action: str
    """What to do about it, for people."""

    parts: Series
    wholes: Series | None = None
    threshold: float
    """Limit of the value. For an alert with a baseline: multiple of the median hour of the 7 days before."""

    is_minimum: bool = False
    """Whether the alert fires below the threshold, not above it."""

    by: tuple[str, ...] = ("agent",)
    """Labels by which series are added up; each group fires on its own. Empty: all together."""

    window_s: float = HOUR_S
    """Seconds that the value is about."""

    at_least: int = 0
    """Fewest values in the window: with fewer the alert is silent."""

    scale: float = 1.0
    """Factor from the unit of the metric to that of the threshold."""

    has_baseline: bool = False
    """Whether the value is compared with its own median, for which `MIN_BASELINE_HOURS` must be known."""

    for_s: float = 600.0
    """Seconds for which the threshold must be exceeded before the alert fires."""

    keep_s: float = 900.0
    """Seconds for which it goes on firing afterwards, so that it does not flap."""

    def is_exceeded(self, value: float) -> bool:
        """Return whether a value is on the wrong side of the threshold."""
        return value < self.threshold if self.is_minimum else value > self.threshold

    @property
    def record(self) -> str:
        """Name of the series in Prometheus that keeps the values of an alert with a baseline."""
        return f"agentfsm:{self.name}:increase"

    @property
    def rule_name(self) -> str:
        """Name of the rule in Prometheus."""
        return "Agentfsm" + "".join(word.capitalize() for word in self.name.split("_"))


_ENDED: Final = Series(metric=m.RUNS, label="outcome", without=(CANCELLED,))
_MADE_CALLS: Final = Series(metric=m.TOOL_CALLS, label="outcome", only=(m.TOOL_DONE, *m.TOOL_ERRORS))

ALERTS: Final[Mapping[str, Alert]] = MappingProxyType(
    {
        each.name: each
        for each in (
            Alert(
                name="task_success_rate",
                text="Fewer than 90 % of an agent's tasks are completed.",
                action="Look at the stop reasons of the failed runs. If it began with a release, roll that back.",
                parts=Series(metric=m.RUNS, label="outcome", only=(COMPLETED,)),
                wholes=_ENDED,
                threshold=0.9,
                is_minimum=True,
                at_least=20,
            ),
            Alert(
                name="error_rate",
                text="More than 5 % of an agent's tasks end by a timeout, model errors, too many errors or a loop.",
                action="Look at the stop reasons of the failed runs. Is the provider down? Add a fallback model.",
                parts=Series(metric=m.RUNS, label="outcome", only=ERROR_REASONS),
                wholes=_ENDED,
                threshold=0.05,
                at_least=20,
            ),
            Alert(
                name="avg_rounds_per_task",
                text="An agent needs more than 8 turns for a task, on average.",
                action="Look at runs with many turns for a loop, or for a tool that does not give what is asked.",
                parts=Series(metric=m.RUN_TURNS, part="sum"),
                wholes=Series(metric=m.RUN_TURNS, part="count"),
                threshold=8.0,
                at_least=10,
            ),
            Alert(
                name="avg_latency_ms",
                text="An agent needs more than 15 s for a task, on average, without the time that it waits for people.",
                action="Compare requests, tools and the queue on the timeline of a slow run.",
                parts=Series(metric=m.RUN_DURATION, part="sum"),
                wholes=Series(metric=m.RUN_DURATION, part="count"),
                threshold=15_000.0,
                scale=1_000.0,
                at_least=10,
            ),
            Alert(
                name="avg_tokens_per_task",
                text="An agent uses more than 10,000 tokens for a task, on average.",
                action="See what the model was shown in a dear run: long results, many tools, a late compaction.",
                parts=Series(metric=m.RUN_TOKENS, part="sum"),
                wholes=Series(metric=m.RUN_TOKENS, part="count"),
                threshold=10_000.0,
                at_least=10,
            ),
            Alert(
                name="daily_cost_usd",
                text="All agents together cost more than 500 US dollars in a day.",
                action="See which agent, user and model cost most, and give the agent a spending limit.",
                parts=Series(metric=m.COST),
                threshold=500.0,
                by=(),
                window_s=DAY_S,
                for_s=0.0,
            ),
            Alert(
                name="daily_cost_warning_usd",
                text="All agents together cost more than 80 % of what is too much in a day.",
                action="See which agent, user and model cost most, before the day's limit is reached.",
                parts=Series(metric=m.COST),
                threshold=WARNING_SHARE * 500.0,
                by=(),
                window_s=DAY_S,
                for_s=0.0,
            ),
            Alert(
                name="over_cost_limit",
                text="A task of an agent was ended because it reached its limit of cost.",
                action="Find what made the run dear, or raise the limit if the task is worth it.",
                parts=Series(metric=m.RUNS, label="outcome", only=(str(StopReason.COST_BUDGET),)),
                threshold=0.0,
                for_s=0.0,
            ),
            Alert(
                name="tool_call_frequency",
                text="An agent calls a tool more than 3 times as often as in its median hour of the last 7 days.",
                action="Look at runs that call the tool: a loop, a new prompt, or more traffic.",
                parts=Series(metric=m.TOOL_CALLS),
                threshold=3.0,
                by=("agent", "tool"),
                at_least=20,
                has_baseline=True,
            ),
            Alert(
                name="tool_error_rate",
                text="More than 10 % of an agent's calls of a tool fail.",
                action="Read the errors of the tool in its runs, and try the service behind it.",
                parts=Series(metric=m.TOOL_CALLS, label="outcome", only=m.TOOL_ERRORS),
                wholes=_MADE_CALLS,
                threshold=0.1,
                by=("agent", "tool"),
                at_least=20,
            ),
            Alert(
                name="user_satisfaction",
                text="People rate an agent below 3.5 of 5, on average of a day.",
                action="Read the worst runs and their comments: `agentfsm runs --max-rating 2` lists them.",
                parts=Series(metric=m.RATINGS, part="sum"),
                wholes=Series(metric=m.RATINGS, part="count"),
                threshold=3.5,
                is_minimum=True,
                window_s=DAY_S,
                at_least=10,
                for_s=0.0,
            ),
            Alert(
                name="other_model_replies",
                text="A provider replies with another model than the snapshot that an agent asks for.",
                action="Ask the provider why the snapshot was replaced, and evaluate the agent again.",
                parts=Series(metric=m.OTHER_MODELS),
                threshold=0.0,
                by=("agent", "model", "served"),
                for_s=0.0,
            ),
        )
    }
)
"""The alerts, by the name of the metric."""

# Time before a replay that its values depend on, seconds.
LOOKBACK_S: Final = BASELINE_S + DAY_S


def find_starts(since: float, alerts: Iterable[Alert] = tuple(ALERTS.values())) -> dict[str, float]:
    """Return the metrics that a replay from a time on needs, each with the time from which on."""
    starts: dict[str, float] = {}
    for alert in alerts:
        first = since - alert.window_s - INTERVAL_S - (BASELINE_S if alert.has_baseline else 0)
        for series in (alert.parts, alert.wholes or alert.parts):
            starts[series.metric.name] = min(first, starts.get(series.metric.name, first))
    return starts


def set_thresholds(thresholds: Mapping[str, float]) -> tuple[Alert, ...]:
    """Return all alerts, some with a threshold of your own.

    Args:
        thresholds: Thresholds by name of the metric. That of `daily_cost_usd` sets its warning to 80 %, too.

    Raises:
        MisuseError: when there is no such alert, or a threshold is not a finite number, 0 or more.
    """
    if unknown := thresholds.keys() - ALERTS.keys():
        raise MisuseError(f"there is no alert {min(unknown)!r}: choose one of {', '.join(ALERTS)}")
    for name, value in thresholds.items():
        NOT_NEGATIVE.check("set_thresholds", name, value)  # nothing is above or below NaN: the alert would be silent
    if "daily_cost_usd" in thresholds:  # the warning is about the same budget
        thresholds = {"daily_cost_warning_usd": WARNING_SHARE * thresholds["daily_cost_usd"], **thresholds}
    return tuple([attrs.evolve(each, threshold=thresholds.get(name, each.threshold)) for name, each in ALERTS.items()])


# Rules for Prometheus.


def format_rules(alerts: Iterable[Alert] = tuple(ALERTS.values())) -> str:
    """Return the alerts as a file of rules for Prometheus, in YAML."""
    lines = [
        "# Alerts on the metrics of agentfsm, for Prometheus: written by `agentfsm alerts rules`.",
        "groups:",
        "  - name: agentfsm",
        f"    interval: {_format_span(INTERVAL_S)}",
        "    rules:",
    ]
    for each in alerts:
        if each.has_baseline:  # kept, since 7 days of it are too many to compute each time
            by, query = _join_labels(each), each.parts.format_query(_format_window(each))
            began = f"sum by ({by}) ({each.parts.metric.name}) > 0"  # it is there, at 0, long before the first call
            lines += [f"      - record: {each.record}", f"        expr: sum by ({by}) ({query}) and {began}"]
        where = " ".join(f"{{{{ $labels.{label} }}}}" for label in each.by)
        lines += [
            f"      - alert: {each.rule_name}",
            "        expr: >-",
            *[f"          {line}" for line in _format_expression(each)],
            f"        for: {_format_span(each.for_s)}",
            f"        keep_firing_for: {_format_span(each.keep_s)}",
            "        labels:",
            "          severity: warning",
            f"          metric: {each.name}",
            "        annotations:",
            f"          summary: {each.text!r}",
            f"          description: '{each.name}{' of ' + where if where else ''} is {{{{ $value | humanize }}}}'",
        ]
    return "\n".join(lines) + "\n"


def _format_expression(alert: Alert) -> Iterator[str]:
    """Yield the lines of an alert's expression in PromQL."""
    compared = f"{'<' if alert.is_minimum else '>'} {alert.threshold:.12g}"
    if alert.has_baseline:
        history = f"{alert.record}[{_format_span(BASELINE_S)}:1h] offset {_format_span(alert.window_s)}"
        yield f"{alert.record} / quantile_over_time(0.5, {history}) {compared}"
        yield f"and {alert.record} >= {alert.at_least}"
        yield f"and count_over_time({history}) >= {MIN_BASELINE_HOURS}"
        return
    yield f"{format_value(alert, _format_window(alert))} {compared}"
    if alert.wholes is not None:
        yield f"and {_format_sum(alert, alert.wholes, _format_window(alert))} >= {alert.at_least}"


def format_value(alert: Alert, window: str, *matchers: str) -> str:
    """Return what an alert without a baseline compares, as PromQL; the window and matchers are as for a series."""
    value = _format_sum(alert, alert.parts, window, *matchers)
    if alert.wholes is None:
        return value
    count = _format_sum(alert, alert.wholes, window, *matchers)
    if alert.parts.label:
        value = f"({value} or 0 * {count})"  # Prometheus has no series for an outcome that has not occurred
    scaled = value if alert.scale == 1 else f"{alert.scale:g} * {value}"
    return f"{scaled} / {count}"


def _format_sum(alert: Alert, series: Series, window: str, *matchers: str) -> str:
    return f"sum by ({_join_labels(alert)}) ({series.format_query(window, *matchers)})"


def _format_window(alert: Alert) -> str:
    step = STEP_S if alert.window_s < DAY_S else 5 * STEP_S
    return f"{_format_span(alert.window_s)}:{_format_span(step)}"


def _join_labels(alert: Alert) -> str:
    """Return the labels of an alert in Prometheus: each job has a store of its own."""
    return ", ".join(["job", *alert.by])


def _format_span(seconds: float) -> str:
    """Return a time as Prometheus writes it."""
    for unit, length in (("d", DAY_S), ("h", HOUR_S), ("m", 60.0)):
        if seconds and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


# Replay.


@attrs.frozen(kw_only=True)
class Firing(Value):
    """A time in which an alert would have fired."""

    alert: str
    """Name of the alert."""

    labels: Mapping[str, str]
    """The agent, and the tool if the alert is about tools; none for an alert on all together."""

    since: float
    """Time at which it began to fire, seconds since 1970."""

    until: float | None
    """Time at which it ended; None if it still fires at the end of the replay."""

    worst: float
    """Value farthest from the threshold."""


async def read_firings(
    store: Store, since: float, alerts: Iterable[Alert] = tuple(ALERTS.values())
) -> tuple[Firing, ...]:
    """Return when the alerts would have fired from a time until now, oldest first, by the runs in a store.

    Args:
        store: The store.
        since: Beginning, seconds since 1970; -inf for the first measurement.
        alerts: The alerts. Default: all of them.
    """
    only = find_starts(since, alerts)
    log = await read_measurements(store, since=min(only.values()), step_s=SLOT_S, only=only, with_open=False)
    return await anyio.to_thread.run_sync(replay_alerts, log, since, log.find_end(await store.now()), alerts)


def replay_alerts(
    log: MeasurementLog, since: float, until: float, alerts: Iterable[Alert] = tuple(ALERTS.values())
) -> tuple[Firing, ...]:
    """Return when the alerts would have fired, evaluated every 5 minutes, oldest first.

    Args:
        log: The measurements, from `LOOKBACK_S` before the replay on.
        since: Beginning of the replay, seconds since 1970; -inf for the first measurement.
        until: End of the replay, seconds since 1970.
        alerts: The alerts. Default: all of them.
    """
    # Sums over 5 minutes are in a window as a whole, or not at all: that of the present is, in the last one.
    last = ceil(until / INTERVAL_S) * INTERVAL_S if log.step_s else until
    since = min(log.find_start(since), last)
    # The last evaluation is at the end, so that the newest events count.
    ends = [last - INTERVAL_S * step for step in range(int((last - since) / INTERVAL_S), -1, -1)]
    found = [firing for alert in alerts for firing in _replay_alert(log, alert, [*ends[:-1], until], last)]
    return tuple(sorted(found, key=lambda each: each.since))


def _group(
    log: MeasurementLog, series: Series, by: tuple[str, ...]
) -> dict[tuple[str, ...], list[tuple[float, float]]]:
    """Return the times and values of series, oldest first, by the labels of their group."""
    indexes = [series.metric.labels.index(label) for label in by]
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for (name, labels), points in log.series.items():
        if name == series.metric.name and series.selects(labels):
            values = [(at, float(count) if series.part == "count" else value) for at, value, count in points]
            groups.setdefault(tuple([labels[index] for index in indexes]), []).extend(values)
    return {key: sorted(points) for key, points in groups.items()}


def _add_up(points: Sequence[tuple[float, float]], ends: Iterable[float]) -> list[float]:
    """Return the sum of the values up to each of these times."""
    times, totals = [at for at, _ in points], [0.0, *accumulate([value for _, value in points])]
    return [totals[bisect_right(times, end)] for end in ends]


def _replay_alert(log: MeasurementLog, alert: Alert, times: Sequence[float], last: float) -> Iterator[Firing]:
    """Yield the times in which an alert fires. Windows of evaluations end on a grid whose last point is given."""
    parts = _group(log, alert.parts, alert.by)
    wholes = parts if alert.wholes is None else _group(log, alert.wholes, alert.by)
    window, hour = int(alert.window_s / INTERVAL_S), int(HOUR_S / INTERVAL_S)
    baseline = int(BASELINE_S / INTERVAL_S) if alert.has_baseline else 0
    before = window + baseline
    # Ends of all steps that a value depends on. The window of `times[step]` ends with the sum at `step + before`.
    ends = [last - INTERVAL_S * step for step in range(len(times) - 1 + before, -1, -1)]
    for key, points in wholes.items():
        whole, part = _add_up(points, ends), _add_up(parts.get(key, ()), ends)
        hours = [end - start for start, end in zip(whole, whole[hour:], strict=False)] if baseline else []
        known = bisect_left(ends, points[0][0]) - hour  # the first hour that does not end before the first value
        values: list[tuple[float, float | None]] = []
        for step, at in enumerate(times):
            count, value = whole[step + before] - whole[step + baseline], None
            if not count or count < alert.at_least:
                pass
            elif baseline:
                skipped = max(0, ceil((known - step) / hour)) * hour
                usual = hours[step + skipped : step + baseline - hour + 1 : hour]
                if len(usual) >= MIN_BASELINE_HOURS:
                    value = count / middle if (middle := median(usual)) else inf
            elif alert.wholes is None:
                value = count
            else:
                value = alert.scale * (part[step + before] - part[step + baseline]) / count
            values.append((at, value))
        yield from _find_firings(alert, dict(zip(alert.by, key, strict=True)), values)


def _find_firings(
    alert: Alert, labels: Mapping[str, str], values: Sequence[tuple[float, float | None]]
) -> Iterator[Firing]:
    """Yield the times in which the values make an alert fire."""
    pending_since: float | None = None
    silent_since: float | None = None
    firing: Firing | None = None
    for at, value in values:
        if value is not None and alert.is_exceeded(value):
            pending_since, silent_since = at if pending_since is None else pending_since, None
            if firing is None and at - pending_since >= alert.for_s:
                firing = Firing(alert=alert.name, labels=labels, since=at, until=None, worst=value)
            elif firing is not None:
                choose = min if alert.is_minimum else max
                firing = attrs.evolve(firing, worst=choose(firing.worst, value))
            continue
        pending_since, silent_since = None, at if silent_since is None else silent_since
        if firing is not None and at - silent_since >= alert.keep_s:
            yield attrs.evolve(firing, until=at)
            firing = None
    if firing is not None:
        yield firing
