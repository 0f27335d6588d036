"""Metrics of the gateway in the text format of Prometheus. All labels have a bounded set of values.

Those of runs are the totals of the store over all time, so all servers of a store show the same, also after a restart.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, product
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.limits import StopReason
from agentfsm.core.messages import Outcome
from agentfsm.core.pending import PendingKind
from agentfsm.telemetry import measurements as m
from agentfsm.telemetry.totals import (
    BORN,
    KIND,
    UNIT,
    Cell,
    add_fields,
    can_keep_totals,
    iter_level,
    read_cells,
    read_series,
    read_status,
)

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.ports.store import Store

Samples: TypeAlias = "list[tuple[dict[str, str], float]]"
"""Labels and value of each sample of a metric."""

# Seconds for which a new series that was not expected at the start, such as that of another model, is shown at 0:
# Prometheus sees no increase in the first value of a series. It is the longest step of the rules, 5 minutes, and an
# interval of scrapes, so that a rule has looked at the 0.
BIRTH_S: Final = 450.0

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
class RunMetrics:
    """The metrics of the runs in a store, from its totals."""

    store: Store
    """Store of the runs."""

    _generation: str = attrs.field(default="", init=False)
    """Totals that are known to be whole."""

    _warned: bool = attrs.field(default=False, init=False)
    _shown: tuple[list[Cell], tuple[tuple[str, ...], ...]] = attrs.field(default=([], ()), init=False)
    """Sums and expected series of which `_text` was made."""

    _shown_until: float = attrs.field(default=0.0, init=False)
    """Time of the store at which a further series is shown."""

    _text: str = attrs.field(default="", init=False)

    async def format(self, agents: Iterable[Agent[Any]]) -> str:
        """Return them in the text format of Prometheus; nothing while the totals do not have all runs yet.

        Args:
            agents: Agents whose series are there from the start, at 0.
        """
        if not can_keep_totals(self.store):
            if not self._warned:
                _log.warning("there are no metrics of runs: %s keeps no totals", type(self.store).__name__)
            self._warned = True
            return ""
        root = await self.store.read_record(KIND, "root")
        generation = root.value["generation"] if root is not None and isinstance(root.value, dict) else None
        if generation is None or generation != self._generation:
            status = await read_status(self.store)
            if status is None or not status.is_whole:
                return ""
            self._generation = status.generation
        records = [each async for each in iter_level(self.store, self._generation, "all")]
        cells = [cell for each in records for cell in read_cells(each.value).values()]
        expected, now = tuple(expect_series(agents)), await self.store.now()
        if (cells, expected) != self._shown or now >= self._shown_until:
            self._shown, self._text = (cells, expected), format_cells(cells, expected, now)
            births = [fields[BORN] + BIRTH_S for cell in cells for fields in cell.values()]
            self._shown_until = min([at for at in births if at > now], default=inf)
        return self._text


def expect_series(agents: Iterable[Agent[Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the series that agents have as far as they can be known, such as that of each outcome of each tool."""
    outcomes = {
        m.RUNS.name: [str(each) for each in StopReason if each is not StopReason.PARKED],
        m.REQUESTS.name: ["done", "failed", "cached"],
        m.TOOL_CALLS.name: [*[str(each) for each in Outcome], m.REFUSED, m.CUT_OFF],
    }
    for agent in agents:
        known = {
            "agent": [agent.name],
            "version": [agent.version],
            "model": [agent.driver.config.model.name],
            "tool": [*[tool.name for tool in agent.driver.config.registry], m.UNKNOWN_TOOL],
            "direction": ["input", "output"],
            "kind": [m.QUEUE, m.INTERRUPTION, *[str(each) for each in PendingKind]],
            "signal": [m.ASKED_AGAIN, m.EDITED, m.STOPPED, m.FINDING],
            "served": [],  # known with the first reply of another model, and the first verdict
            "judge": [],
        }
        for metric in m.METRICS.values():
            values = [outcomes[metric.name] if label == "outcome" else known[label] for label in metric.labels]
            yield from ((metric.name, *labels) for labels in product(*values))
        yield m.COST.name, agent.name, ""  # calls of tools that cost money


def format_cells(cells: Iterable[Cell], expected: Iterable[tuple[str, ...]], now: float) -> str:
    """Return the totals over all time in the text format of Prometheus.

    Args:
        cells: The totals of each agent.
        expected: Series that are there in any case: names of metrics, and their labels.
        now: The present, seconds since 1970.
    """
    found: dict[str, dict[tuple[str, ...], dict[str, int]]] = {name: {} for name in m.METRICS}
    for name, *labels in expected:
        found[name][tuple(labels)] = {}
    for cell in cells:
        for series, fields in cell.items():
            name, *rest = read_series(series)
            sums = found[name].get(tuple(rest))
            if sums is None:
                sums = found[name][tuple(rest)] = {}
                if fields[BORN] + BIRTH_S > now:
                    continue
            add_fields(sums, fields)
    return "".join(_format_sums(m.METRICS[name], series) for name, series in found.items())


def _format_sums(metric: m.Metric, series: Mapping[tuple[str, ...], Mapping[str, int]]) -> str:
    lines = [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}"]
    bounds = [*[f"{bound:g}" for bound in metric.buckets], "+Inf"]
    for values, sums in series.items():
        labels, total = dict(zip(metric.labels, values, strict=True)), sums.get("s", 0) / UNIT
        if metric.kind == "counter":
            lines.append(_format_sample(metric.name, labels, total))
            continue
        counts = accumulate(sums.get(f"le{index}", 0) for index in range(len(bounds)))
        for bound, count in zip(bounds, counts, strict=True):
            lines.append(_format_sample(f"{metric.name}_bucket", labels | {"le": bound}, count))
        lines.append(_format_sample(f"{metric.name}_sum", labels, total))
        lines.append(_format_sample(f"{metric.name}_count", labels, sums.get("n", 0)))
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
