"""The rules in Prometheus: its own tool evaluates them as the replay of the journals does."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx2
import pytest
import yaml

from agentfsm import Agent, Outcome, StopReason, tool
from agentfsm.ports import Feedback
from agentfsm.serve.metrics import RunMetrics
from agentfsm.stores import MemoryStore
from agentfsm.telemetry import alerts
from agentfsm.telemetry.alerts import ALERTS, INTERVAL_S, STEP_S, format_rules, replay_alerts
from agentfsm.telemetry.dashboard import format_dashboard
from agentfsm.telemetry.measurements import METRICS
from agentfsm.telemetry.metrics_summary import read_measurements
from agentfsm.telemetry.totals import SLOT_S, Totals
from agentfsm.testing import ScriptedModel
from tests.support.alert_logs import FIRING, SILENT
from tests.support.database_servers import find_prometheus, promtool
from tests.support.port_servers import listening
from tests.support.recorded_tasks import record_task
from tests.support.server_reaper import await_that


def length_of(alert):
    """Return the seconds in which an alert begins and ends in the logs."""
    return 32 * 3_600 if alert.has_baseline else alert.window_s + 3 * 3_600


def write_rules(path, alert):
    """Write the rules of an alert without their texts, which a test would have to repeat."""
    document = yaml.safe_load(format_rules([alert]))
    for rule in document["groups"][0]["rules"]:
        rule.pop("annotations", None)
    path.write_text(json.dumps(document), encoding="utf-8")


def list_series(log, alert, job):
    """Return the counters of two servers that an alert looks at, as values in the notation of the tool."""
    found, used = [], {alert.parts.metric.name, (alert.wholes or alert.parts).metric.name}
    for (name, labels), points in log.series.items():
        if name not in used:
            continue
        metric = METRICS[name]
        for part in ("",) if metric.kind == "counter" else ("_sum", "_count"):
            text, total, before = [], 0.0, 0
            for at, value, _ in sorted(points):
                step = int(at // STEP_S) + 1
                if step > before:
                    text.append(f"{total!r}x{step - before - 1}")
                    before = step
                total += 1.0 if part == "_count" else value
            text.append(f"{total!r}x{int(length_of(alert) / STEP_S) - before}")
            names = {**dict(zip(metric.labels, labels, strict=True)), "job": job}
            for instance in ("a", "b"):
                pairs = ", ".join(f'{key}="{value}"' for key, value in (names | {"instance": instance}).items())
                found.append({"series": f"{name}{part}{{{pairs}}}", "values": " ".join(text)})
    return found


def list_expectations(logs, alert):
    """Return when an alert fires in the journals of each job, and when not, apart from the moments of a change."""
    found = []
    firings = {job: replay_alerts(log, 0.0, length_of(alert), [alert]) for job, log in logs.items()}

    def labels_at(at):
        return [
            {**each.labels, "job": job, "severity": "warning", "metric": alert.name}
            for job, fired in firings.items()
            for each in fired
            if each.since <= at and (each.until is None or at < each.until)
        ]

    for step in range(1, int(length_of(alert) / INTERVAL_S)):
        at = step * INTERVAL_S
        if labels_at(at - INTERVAL_S) == labels_at(at) == labels_at(at + INTERVAL_S):
            alerts = [{"exp_labels": labels} for labels in labels_at(at)]
            found.append({"eval_time": f"{at:.0f}s", "alertname": alert.rule_name, "exp_alerts": alerts})
    return found


def test_the_file_is_one_of_rules():
    """The tool accepts it as shipped."""
    promtool("check", "rules", Path(alerts.__file__).with_name("alert_rules.yml"))


def test_rules_fire_as_with_the_journals(tmp_path):
    """At each evaluation, also with two servers that show the same counters, and with several jobs."""
    files = []
    for name, alert in ALERTS.items():
        logs = {f"{name}-{number}": log for number, log in enumerate((FIRING[name], *SILENT[name]))}
        expected = list_expectations(logs, alert)
        assert {labels["exp_labels"]["job"] for each in expected for labels in each["exp_alerts"]} == {f"{name}-0"}
        write_rules(tmp_path / f"{name}.yml", alert)
        test = {
            "interval": f"{STEP_S:.0f}s",
            "input_series": [series for job, log in logs.items() for series in list_series(log, alert, job)],
            "alert_rule_test": expected,
        }
        document = {"rule_files": [f"{name}.yml"], "evaluation_interval": f"{INTERVAL_S:.0f}s", "tests": [test]}
        files.append(tmp_path / f"{name}-test.yml")
        files[-1].write_text(json.dumps(document), encoding="utf-8")
    promtool("test", "rules", *files)


HOUR = 3_600
BEGIN = 20_370 * 24 * HOUR
DAYS = 5
# Tasks of an agent in each hour, if there are other ones than usual.
BUSY = {
    30: (60, {}),  # a burst
    **{hour: (24, {"failed": StopReason.TIMEOUT}) for hour in (40, 41)},
    50: (20, {"seconds": 25}),
    60: (12, {"usd": 42.0}),
    **{hour: (12, {"tokens": 12_000, "turns": 9}) for hour in (70, 71)},
    80: (10, {"served": "m-2026-11-20"}),
    75: (10, {"failed": StopReason.COST_BUDGET}),
    85: (20, {"outcome": Outcome.FAILED}),
    90: (24, {}),
}
# Hours in which no server is there; the next one has another name.
AWAY = (90, 112)


@tool(read_only=True)
async def search(query: str) -> str:
    """Search."""
    return query


class SetClock:
    """A clock that is set."""

    at = float(BEGIN)

    def now(self):
        return self.at


def script_tasks():
    """Return tasks by the time of their ends: five days of an agent, of a rare one, and of one that nobody expects."""
    found = []
    for hour in range(1, DAYS * 24 - 1):
        count, options = BUSY.get(hour, (2 if hour % 24 < 6 else 10, {}))
        for index in range(count):
            length = HOUR / 6 if count == 60 else HOUR
            at = BEGIN + hour * HOUR + 7 + index * length / count
            found.append(record_task(len(found), at, **{"turns": 3, **options}))
        if hour % 3 == 0:
            found.append(record_task(len(found), BEGIN + hour * HOUR + 1_000, seconds=20, agent="rare"))
    found.append(record_task(len(found), BEGIN + 100.5 * HOUR, usd=600.0, agent="unexpected"))
    return sorted(found, key=lambda each: each.events[-1].at)


# Names of the series that are scraped: those of the alerts.
SCRAPED = {
    f"{series.metric.name}_{series.part}".removesuffix("_")
    for alert in ALERTS.values()
    for series in (alert.parts, alert.wholes)
    if series is not None
}


async def record_scrapes(store, clock, path):
    """Let the tasks end, and write what a server shows every two minutes, as long as there is one."""
    agent = Agent(ScriptedModel(), name="shop", tools=[search], store=store)
    agents = [agent, agent.with_(name="rare")]
    tasks, totals, metrics, instance = script_tasks(), Totals(store), RunMetrics(store), 0
    with path.open("w", encoding="utf-8") as file:
        for minute in range(0, DAYS * 24 * 60, 2):
            clock.at = float(BEGIN + minute * 60)
            ended = False
            while tasks and tasks[0].events[-1].at <= clock.at:
                made = tasks.pop(0)
                _, lease = await store.create(made.header, events=made.events)
                await store.release(lease).wait()
                ended = True
            if minute == 95 * 60:
                for person in range(10):
                    await store.add_feedback(made.header.id, str(person), Feedback(rating=1, at=clock.at))
            if ended or minute in {0, 95 * 60}:
                await totals.catch_up(with_active=False)
            if minute // 60 in AWAY and minute % 60 < 40:
                metrics, instance = RunMetrics(store), minute // 60
                continue
            for line in (await metrics.format(agents)).splitlines():
                name, brace, rest = line.partition("{")
                if name in SCRAPED:
                    file.write(f'{name}{brace}job="agents",instance="{instance}",{rest} {clock.at:.0f}\n')
        file.write("# EOF\n")


@contextmanager
def prometheus(folder):
    """Run a Prometheus on blocks of samples, and yield its address."""
    (folder / "empty.yml").write_text("{}", encoding="utf-8")
    options = ["--storage.tsdb.path=data", "--storage.tsdb.retention.time=10y", "--log.level=error"]
    words = ["--config.file=empty.yml", *options, "--web.listen-address=127.0.0.1:{port}"]
    with listening([str(find_prometheus("prometheus")), *words], {}, cwd=folder) as url:
        await_that(lambda: httpx2.get(f"{url}/-/ready").status_code == 200, "Prometheus is ready")
        yield url


def query(url, rule):
    """Return the series of a rule over the five days, evaluated as often as Prometheus does."""
    asked = {"query": rule["expr"], "start": BEGIN, "end": BEGIN + DAYS * 24 * HOUR, "step": INTERVAL_S}
    answer = httpx2.post(f"{url}/api/v1/query_range", data=asked, timeout=300).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def list_panel_queries():
    """Return the queries of the board as Grafana sends them for all agents."""
    panels = json.loads(format_dashboard())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [re.sub(r"\$(job|agent)", ".*", each).replace("$window", "1h") for each in asked]


def query_firings(url, rule, alert):
    """Return when a rule fires, by its labels."""
    for series in query(url, rule):
        labels = {label: series["metric"][label] for label in alert.by}
        values = {float(at): float(value) for at, value in series["values"]}
        times = [BEGIN + INTERVAL_S * step for step in range(int(DAYS * 24 * HOUR / INTERVAL_S) + 1)]
        yield from alerts._find_firings(alert, labels, [(at, values.get(at)) for at in times])


@pytest.mark.soak
def test_five_days_in_prometheus(tmp_path):
    """Bursts, slow traffic, errors, a new agent, and servers that are away and replaced: the alerts of the journals."""
    clock = SetClock()
    store = MemoryStore(clock=clock)
    anyio.run(record_scrapes, store, clock, tmp_path / "samples")
    promtool("tsdb", "create-blocks-from", "openmetrics", "-q", tmp_path / "samples", tmp_path / "data")
    rules = yaml.safe_load(format_rules())["groups"][0]["rules"]
    with prometheus(tmp_path) as url:
        samples = [
            (
                at,
                f"{rule['record']}{{{','.join(f'{name}={json.dumps(of)}' for name, of in series['metric'].items())}}}",
                value,
            )
            for rule in rules
            if "record" in rule
            for series in query(url, rule)
            for at, value in series["values"]
        ]
    text = "".join(f"{name} {value} {at}\n" for at, name, value in sorted(samples))
    (tmp_path / "records").write_text(f"{text}# EOF\n", encoding="utf-8")
    promtool("tsdb", "create-blocks-from", "openmetrics", "-q", tmp_path / "records", tmp_path / "data")
    by_name = {rule["alert"]: rule for rule in rules if "alert" in rule}
    with prometheus(tmp_path) as url:
        found = [each for alert in ALERTS.values() for each in query_firings(url, by_name[alert.rule_name], alert)]
        shown = {expression: query(url, {"expr": expression}) for expression in list_panel_queries()}
    empty = [expression for expression, series in shown.items() if not series]
    assert [each for each in empty if {*re.findall(r"agentfsm_\w+", each)} <= SCRAPED] == []

    until = BEGIN + DAYS * 24 * HOUR

    async def replay():
        return replay_alerts(await read_measurements(store, step_s=SLOT_S), BEGIN, until)

    expected = sorted(anyio.run(replay), key=lambda each: (each.alert, sorted(each.labels.items()), each.since))
    found.sort(key=lambda each: (each.alert, sorted(each.labels.items()), each.since))
    assert [(each.alert, each.labels) for each in found] == [(each.alert, each.labels) for each in expected]
    assert {each.alert for each in found} == set(ALERTS)
    for ours, theirs in zip(expected, found, strict=True):
        assert abs(ours.since - theirs.since) <= 2 * INTERVAL_S, (ours, theirs)
        assert abs((ours.until or until) - (theirs.until or until)) <= 2 * INTERVAL_S, (ours, theirs)
