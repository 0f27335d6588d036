"""Alerts: each threshold of document H fires and is silent, and the rules for Prometheus say the same."""

from pathlib import Path

import anyio
import promql_parser
import pytest
import yaml

import agentfsm.telemetry
from agentfsm import Agent, MisuseError, Outcome, StopReason
from agentfsm.cli import main
from agentfsm.ports import Feedback
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry.alerts import ALERTS, format_rules, replay_alerts, set_thresholds
from agentfsm.telemetry.measurements import METRICS, measure_feedback, measure_run
from agentfsm.telemetry.metrics_summary import MeasurementLog
from agentfsm.testing import ScriptedModel
from tests.support.recorded_tasks import record_task

HOUR = 3_600.0
RULES = Path(agentfsm.telemetry.__file__).with_name("alert_rules.yml")


def log_of(tasks, ratings=()):
    """Return the measurements of recorded tasks, and of ratings of the first."""
    tasks, log = list(tasks), MeasurementLog()
    for each in tasks:
        log.add(measure_run(each.header, each.events))
    log.add(measure_feedback(tasks[0].header, Feedback(rating=rating, at=HOUR)) for rating in ratings)
    return log


def tasks(count, **options):
    """Return tasks, spread over an hour."""
    return [record_task(number, number * HOUR / count, **options) for number in range(count)]


def mixed(good, bad, **options):
    """Return good tasks and others, in turn over an hour."""
    total = good + bad
    every = [options if number * bad % total < bad else {} for number in range(total)]
    return [record_task(number, number * HOUR / total, **each) for number, each in enumerate(every)]


def hourly(counts):
    """Return tasks with one call each, so many in each hour."""
    return [
        record_task(hour * 1000 + number, hour * HOUR + number * HOUR / count, turns=2)
        for hour, count in enumerate(counts)
        for number in range(count)
    ]


FIRING = {
    "task_success_rate": log_of(mixed(35, 5, failed=StopReason.MAX_TURNS)),
    "error_rate": log_of(mixed(37, 3, failed=StopReason.TIMEOUT)),
    "avg_rounds_per_task": log_of(tasks(12, turns=9)),
    "avg_latency_ms": log_of(tasks(12, seconds=16)),
    "avg_tokens_per_task": log_of(tasks(12, tokens=10_100)),
    "daily_cost_usd": log_of(tasks(12, usd=42)),
    "tool_call_frequency": log_of(hourly([10] * 30 + [40])),
    "tool_error_rate": log_of(mixed(35, 5, turns=2, outcome=Outcome.FAILED) + tasks(30, turns=2)),
    "user_satisfaction": log_of(tasks(1), ratings=[3] * 10),
    "other_model_replies": log_of(mixed(30, 1, served="m-2026-11-20")),
}
FIRING["tool_error_rate"] = log_of(
    [record_task(n, n * 90.0, turns=2, outcome=Outcome.FAILED if n % 8 == 0 else Outcome.DONE) for n in range(40)]
)
SILENT = {
    "task_success_rate": [
        log_of(mixed(37, 3, failed=StopReason.MAX_TURNS)),
        log_of(tasks(19, failed=StopReason.GUARD)),
    ],
    "error_rate": [log_of(mixed(35, 5, failed=StopReason.MAX_TURNS)), log_of(tasks(30, failed=StopReason.CANCELLED))],
    "avg_rounds_per_task": [log_of(tasks(12, turns=8)), log_of(tasks(9, turns=20))],
    "avg_latency_ms": [log_of(tasks(12, seconds=14))],
    "avg_tokens_per_task": [log_of(tasks(12, tokens=9_900))],
    "daily_cost_usd": [log_of(tasks(12, usd=41))],
    # Three times the median is not more than that; a new tool has no median yet; few calls are no surge.
    "tool_call_frequency": [
        log_of(hourly([10] * 30 + [29])),
        log_of(hourly([1] * 20 + [40])),
        log_of(hourly([1] * 30 + [15])),
    ],
    "tool_error_rate": [
        log_of(
            [record_task(n, n * 90.0, turns=2, outcome=Outcome.REJECTED if n % 3 else Outcome.DONE) for n in range(90)]
        )
    ],
    # Nobody voted, or few people, or they are content.
    "user_satisfaction": [log_of(tasks(30)), log_of(tasks(1), ratings=[1] * 9), log_of(tasks(1), ratings=[4, 3] * 5)],
    "other_model_replies": [log_of(tasks(30))],
}


def names_of(log):
    """Return the names of the alerts that fire in the journals, over 32 hours."""
    return {each.alert for each in replay_alerts(log, 0.0, 32 * HOUR)}


@pytest.mark.parametrize("name", ALERTS)
def test_it_fires(name):
    """The threshold of document H is exceeded."""
    assert name in names_of(FIRING[name])


@pytest.mark.parametrize("name", ALERTS)
def test_it_is_silent(name):
    """The threshold is met, or there is too little to judge by."""
    assert all(name not in names_of(each) for each in SILENT[name])


def test_a_firing_has_its_time_and_its_worst_value():
    """It begins after `for`, ends after `keep_firing_for`, and names the agent."""
    (firing,) = replay_alerts(FIRING["avg_latency_ms"], 0.0, 4 * HOUR)
    assert (firing.alert, firing.labels, firing.worst) == ("avg_latency_ms", {"agent": "shop"}, 16_000)
    # The tenth task ends in the 46th minute; the window of an hour loses the last but nine in the 66th.
    assert 46 * 60 + 600 <= firing.since < firing.until < 3 * HOUR
    (open_firing,) = replay_alerts(FIRING["avg_latency_ms"], 0.0, 1 * HOUR)
    assert open_firing.until is None


def test_thresholds_of_ones_own():
    """They replace those of the document; a wrong name or number is told."""
    alerts = set_thresholds({"avg_latency_ms": 20_000})
    assert not replay_alerts(FIRING["avg_latency_ms"], 0.0, 4 * HOUR, alerts)
    assert "> 20000" in format_rules(alerts)
    with pytest.raises(MisuseError, match="task_success_rate"):
        set_thresholds({"success": 0.5})
    with pytest.raises(MisuseError, match="0 or more"):
        set_thresholds({"error_rate": -1.0})


def test_the_rules_file():
    """It ships with the package and is that of the table; its expressions are PromQL over metrics that exist."""
    assert RULES.read_text(encoding="utf-8") == format_rules()
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    assert [rule["labels"]["metric"] for rule in group["rules"]] == list(ALERTS)
    assert len({rule["alert"] for rule in group["rules"]}) == 10
    for rule in group["rules"]:
        names = set(_iter_metrics(promql_parser.parse(rule["expr"])))
        alert = ALERTS[rule["labels"]["metric"]]
        used = [alert.parts] if alert.wholes is None else [alert.parts, alert.wholes]
        assert names == {"_".join(filter(None, (each.metric.name, each.part))) for each in used}
        assert all(METRICS[each.metric.name] == each.metric for each in used)
        assert f"{alert.threshold:.12g}" in rule["expr"]
        assert f"[{'1d' if alert.window_s > HOUR else '1h'}]" in rule["expr"]


def _iter_metrics(node):
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "param"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list) else [] if below is None else [below]:
            yield from _iter_metrics(each)


@pytest.mark.anyio
async def test_the_commands(tmp_path, capsys):
    """The rules are printed; a test over a store tells what would have fired, and by its exit code what still does."""
    assert await anyio.to_thread.run_sync(main, ["alerts", "rules"]) == 0
    assert capsys.readouterr().out == format_rules()
    path = str(tmp_path / "runs.db")
    agent = Agent(ScriptedModel("done"), store=SQLiteStore(path), name="shop")
    run = await agent.run("go")
    words = ["alerts", "test", "--since", "7d", "--store", path]
    assert await anyio.to_thread.run_sync(main, words) == 0
    assert "no alert" in capsys.readouterr().out
    for person in range(10):
        await agent.runs.feedback(run.id, rating=1, by=str(person))
    await agent.aclose()
    assert await anyio.to_thread.run_sync(main, words) == 1
    assert "user_satisfaction  shop: below the threshold, 1, still fires" in capsys.readouterr().out
    assert await anyio.to_thread.run_sync(main, [*words, "--set", "user_satisfaction=0.5"]) == 0
