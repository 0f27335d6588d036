"""A Grafana board of the metrics of `agentfsm serve`, in Grafana's classic JSON model.

Panels are a table, and name the metrics and alerts of theirs. Counters of runs are the same at all servers of a store,
so a panel takes the maximum of these, as the rules do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.telemetry import measurements as m
from agentfsm.telemetry.alerts import ALERTS, Alert, Series, format_value

# Version of the classic model: that of Grafana 12.2. Newer ones convert it, older ones read what they know of it.
SCHEMA_VERSION: Final = 42
# The time that counters are added up over, a variable of the board, and the step between two of their values.
WINDOW: Final = "$window:1m"
WINDOWS: Final = ("15m", "1h", "6h", "1d")
_SHOWN: Final = ('job=~"$job"', 'agent=~"$agent"')
_SELECTOR: Final = f"{{{', '.join(_SHOWN)}}}"
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@attrs.frozen(kw_only=True)
class Panel(Value):
    """A panel of the board."""

    title: str
    unit: str
    """Unit as Grafana knows it, such as "s" or "percentunit"."""

    queries: Sequence[tuple[str, str]]
    """PromQL and the legend of each query."""

    alert: str = ""
    """Name of the alert whose threshold is drawn; empty for none."""

    is_stacked: bool = False
    is_now: bool = False
    """Whether only the present is shown, as bars."""


def _legend(*labels: str) -> str:
    return " ".join([f"{{{{{label}}}}}" for label in labels])


def _count(metric: m.Metric, *by: str) -> tuple[str, str]:
    """Return the query of what was counted."""
    series = Series(metric=metric, part="count" if metric.kind == "histogram" else "")
    return f"sum by ({', '.join(by)}) ({series.format_query(WINDOW, *_SHOWN)})", _legend(*by)


def _mean(metric: m.Metric, *by: str) -> tuple[str, str]:
    total = Series(metric=metric, part="sum").format_query(WINDOW, *_SHOWN)
    return f"sum by ({', '.join(by)}) ({total}) / {_count(metric, *by)[0]}", _legend(*by)


def _percentile(metric: m.Metric, share: float, *by: str) -> tuple[str, str]:
    buckets = Series(metric=metric, part="bucket").format_query(WINDOW, *_SHOWN)
    query = f"histogram_quantile({share:g}, sum by ({', '.join([*by, 'le'])}) ({buckets}))"
    return query, f"p{100 * share:g} {_legend(*by)}".strip()


def _alert(name: str) -> tuple[str, str]:
    """Return the query of what an alert compares."""
    return format_value(ALERTS[name], WINDOW, *_SHOWN), _legend(*ALERTS[name].by)


def _gauge(name: str, *by: str) -> str:
    """Return a gauge that all servers of a store show."""
    return f"max by ({', '.join(['job', *by])}) ({name}{_SELECTOR})"


def _of_servers(name: str) -> str:
    """Return what all servers together have counted, each for itself."""
    return f"sum by (agent) (increase({name}{_SELECTOR}[$window]))"


_SPEND: Final = ("agent", "per", "tz", "purpose")
PANELS: Final[dict[str, Sequence[Panel]]] = {
    "Tasks": (
        Panel(title="Tasks by outcome", unit="short", queries=[_count(m.RUNS, "outcome")], is_stacked=True),
        Panel(
            title="Completed tasks",
            unit="percentunit",
            queries=[_alert("task_success_rate")],
            alert="task_success_rate",
        ),
        Panel(title="Error rate", unit="percentunit", queries=[_alert("error_rate")], alert="error_rate"),
        Panel(title="Latency, mean", unit="ms", queries=[_alert("avg_latency_ms")], alert="avg_latency_ms"),
        Panel(title="Latency", unit="s", queries=[_percentile(m.RUN_DURATION, share) for share in (0.5, 0.95, 0.99)]),
        Panel(
            title="Turns of a task", unit="short", queries=[_alert("avg_rounds_per_task")], alert="avg_rounds_per_task"
        ),
    ),
    "Tokens and cost": (
        Panel(title="Tokens", unit="short", queries=[_count(m.TOKENS, "direction")], is_stacked=True),
        Panel(
            title="Tokens of a task", unit="short", queries=[_alert("avg_tokens_per_task")], alert="avg_tokens_per_task"
        ),
        Panel(title="Cost", unit="currencyUSD", queries=[_count(m.COST, "agent", "model")], is_stacked=True),
        Panel(title="Tokens without a known price", unit="short", queries=[_count(m.UNPRICED, "agent", "model")]),
        Panel(
            title="Cost of 24 hours, all agents",
            unit="currencyUSD",
            queries=[(format_value(ALERTS["daily_cost_usd"], "1d:5m", _SHOWN[0]), "{{job}}")],
            alert="daily_cost_usd",
        ),
        Panel(
            title="Spent today and this month, of the limit",
            unit="percentunit",
            queries=[
                (
                    f"{_gauge('agentfsm_spend_usd', *_SPEND)} / {_gauge('agentfsm_spend_limit_usd', *_SPEND)}",
                    "{{agent}} {{per}} {{purpose}}",
                )
            ],
            is_now=True,
        ),
        Panel(title="Tasks ended by a limit of cost", unit="short", queries=[_alert("over_cost_limit")]),
    ),
    "Models": (
        Panel(
            title="Requests by outcome", unit="short", queries=[_count(m.REQUESTS, "model", "outcome")], is_stacked=True
        ),
        Panel(title="Time of a request", unit="s", queries=[_percentile(m.REQUESTS, 0.95, "model")]),
        Panel(title="Replies of another model", unit="short", queries=[_alert("other_model_replies")]),
    ),
    "Tools": (
        Panel(title="Tool calls", unit="short", queries=[_count(m.TOOL_CALLS, "tool")], is_stacked=True),
        Panel(title="Tool errors", unit="percentunit", queries=[_alert("tool_error_rate")], alert="tool_error_rate"),
        Panel(title="Time of a call", unit="s", queries=[_percentile(m.TOOL_DURATION, 0.95, "tool")]),
    ),
    "Workers": (
        Panel(
            title="Queue",
            unit="short",
            queries=[
                (_gauge("agentfsm_queue_runs", "agent"), "{{agent}}"),
                (f"{_gauge('agentfsm_stranded_runs', 'agent', 'reason')} > 0", "{{agent}} no worker: {{reason}}"),
            ],
        ),
        Panel(
            title="Runs that wait for people",
            unit="short",
            queries=[(_gauge("agentfsm_waiting_runs", "agent"), "{{agent}}")],
        ),
        Panel(title="Waits by kind", unit="s", queries=[_percentile(m.WAITS, 0.95, "kind")]),
        Panel(
            title="Crashes",
            unit="short",
            queries=[
                (_of_servers("agentfsm_crashes_total"), "{{agent}} worker died"),
                (_of_servers("agentfsm_leases_lost_total"), "{{agent}} lease lost"),
            ],
        ),
    ),
    "People": (
        Panel(
            title="Ratings",
            unit="short",
            queries=[_mean(m.RATINGS, "agent"), _mean(m.JUDGE_RATINGS, "agent", "judge")],
            alert="user_satisfaction",
        ),
        Panel(title="Signs of dissatisfaction", unit="short", queries=[_count(m.SIGNALS, "signal")], is_stacked=True),
    ),
}
"""The panels of the board, by the heading of their row."""


def format_dashboard(alerts: Iterable[Alert] = tuple(ALERTS.values())) -> str:
    """Return the board as JSON, with the thresholds of these alerts."""
    found = {each.name: each for each in alerts}
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, row in PANELS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        named = {"type": "row", "title": heading, "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, **named, "gridPos": place})
        width = 6 if len(row) == 4 else 24 // min(len(row), 3)
        for index, each in enumerate(row):
            line, column = divmod(index, 24 // width)
            place = {"h": 8, "w": width, "x": column * width, "y": top + 1 + 8 * line}
            described = _describe(each, found.get(each.alert))
            panels.append({"id": len(panels) + 1, "gridPos": place, **described})
        top = panels[-1]["gridPos"]["y"] + 8
    variables = [
        {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
        _describe_labels("job", "label_values(agentfsm_runs_total, job)"),
        _describe_labels("agent", 'label_values(agentfsm_runs_total{job=~"$job"}, agent)'),
        {
            "type": "custom",
            "name": "window",
            "label": "Counted over",
            "query": ",".join(WINDOWS),
            "current": {"text": "1h", "value": "1h"},
            "options": [{"text": each, "value": each, "selected": each == "1h"} for each in WINDOWS],
        },
    ]
    board = {
        "uid": "agentfsm",
        "title": "agentfsm",
        "tags": ["agentfsm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": variables},
        "panels": panels,
    }
    lines = ",\n".join([f"  {json.dumps(each)}" for each in panels])  # one for each panel
    return json.dumps(board | {"panels": []}, indent=1).replace('"panels": []', f'"panels": [\n{lines}\n ]') + "\n"


def _describe_labels(name: str, query: str) -> dict[str, Any]:
    """Return the variable of a label with the values that the metrics have."""
    return {
        "type": "query",
        "name": name,
        "label": name.capitalize(),
        "datasource": _DATASOURCE,
        "query": {"qryType": 1, "query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _describe(panel: Panel, alert: Alert | None) -> dict[str, Any]:
    """Return a panel without its place."""
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.is_now:
        steps = [{"color": "green", "value": None}, {"color": "orange", "value": 0.8}, {"color": "red", "value": 1}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options: dict[str, Any] = {
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    else:
        stacking = {"group": "A", "mode": "normal" if panel.is_stacked else "none"}
        defaults["custom"] = {"drawStyle": "line", "fillOpacity": 20 if panel.is_stacked else 0, "stacking": stacking}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if alert is not None:
        below, above = ("red", "green") if alert.is_minimum else ("green", "red")
        steps = [{"color": below, "value": None}, {"color": above, "value": alert.threshold}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["custom"]["thresholdsStyle"] = {"mode": "dashed"}
    return {
        "type": "bargauge" if panel.is_now else "timeseries",
        "title": panel.title,
        "description": "" if alert is None else f"The dashed line is the threshold of the alert {alert.name}.",
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "editorMode": "code",
                "expr": expression,
                "legendFormat": legend,
                "instant": panel.is_now,
                "range": not panel.is_now,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }
