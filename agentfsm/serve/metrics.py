"""Metrics of the gateway in the text format of Prometheus. All labels have a bounded set of values."""

from __future__ import annotations

from collections import Counter
from typing import Final, TypeAlias

import attrs

Samples: TypeAlias = "list[tuple[dict[str, str], float]]"
"""Labels and value of each sample of a metric."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@attrs.define(eq=False, repr=False)
class RequestCounts:
    """Counts of requests and executed runs in this process."""

    requests: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Requests by operation and class of the status, such as "2xx"."""

    executions: Counter[str] = attrs.field(factory=Counter)
    """Executions of runs, each until the run is over or waits, by agent."""

    def count_request(self, operation: str, status: int) -> None:
        """Count a request that was answered."""
        self.requests[operation, f"{status // 100}xx"] += 1


def format_metric(name: str, kind: str, text: str, samples: Samples) -> str:
    """Return a metric with its samples.

    Args:
        name: Name of the metric.
        kind: "counter" or "gauge".
        text: What it counts.
        samples: Labels and value of each sample.
    """
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        pairs = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
        lines.append(f"{name}{{{pairs}}} {value:g}" if pairs else f"{name} {value:g}")
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
