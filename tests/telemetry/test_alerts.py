"""Alerts: each threshold of document H fires and is silent, and the rules for Prometheus say the same."""

from pathlib import Path

import anyio
import promql_parser
import pytest
import yaml

import agentfsm.telemetry
from agentfsm import Agent, MisuseError
from agentfsm.cli import main
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry.alerts import ALERTS, format_rules, replay_alerts, set_thresholds
from agentfsm.telemetry.measurements import METRICS
from agentfsm.testing import ScriptedModel
from tests.support.alert_logs import FIRING, HOUR, SILENT

RULES = Path(agentfsm.telemetry.__file__).with_name("alert_rules.yml")


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
    budget = {each.name: each.threshold for each in set_thresholds({"daily_cost_usd": 20})}
    assert (budget["daily_cost_usd"], budget["daily_cost_warning_usd"]) == (20, 16)
    with pytest.raises(MisuseError, match="task_success_rate"):
        set_thresholds({"success": 0.5})
    with pytest.raises(MisuseError, match="0 or more"):
        set_thresholds({"error_rate": -1.0})


def test_the_rules_file():
    """It ships with the package and is that of the table; its expressions are PromQL over metrics that exist."""
    assert RULES.read_text(encoding="utf-8") == format_rules()
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = [rule for rule in group["rules"] if "alert" in rule]
    records = {rule["record"]: rule["expr"] for rule in group["rules"] if "record" in rule}
    assert [rule["labels"]["metric"] for rule in rules] == list(ALERTS)
    assert len({rule["alert"] for rule in rules}) == len(ALERTS)
    for rule in rules:
        alert = ALERTS[rule["labels"]["metric"]]
        query = f"{rule['expr']} and {records[alert.record]}" if alert.has_baseline else rule["expr"]
        names = set(_iter_metrics(promql_parser.parse(query))) - {alert.record}
        used = [alert.parts] if alert.wholes is None else [alert.parts, alert.wholes]
        assert names == {"_".join(filter(None, (each.metric.name, each.part))) for each in used}
        assert all(METRICS[each.metric.name] == each.metric for each in used)
        assert f"{alert.threshold:.12g}" in rule["expr"]
        assert f"[{'1d:5m' if alert.window_s > HOUR else '1h:1m'}]" in query


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
