"""Telemetry when things fail: collectors that hang, fail or come back, empty stores, runs that go, and rubbish."""

import json
import threading

import anyio
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agentfsm import Agent, MisuseError
from agentfsm.cli import main
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.telemetry import Telemetry, estimate, read_costs
from agentfsm.telemetry.alerts import replay_alerts, set_thresholds
from agentfsm.telemetry.metrics_summary import read_measurements, summarize
from agentfsm.telemetry.trace_export import TraceExport, TraceExportError
from agentfsm.testing import FunctionModel
from tests.support.checks import settled
from tests.support.otlp_receiver import OTLPReceiver


class Collector(SpanExporter):
    """An exporter that hangs until it is let go, and fails for as long as it is told to."""

    def __init__(self, *, hangs=False, fails=()):
        self.ids, self.fails, self.calls = [], set(fails), 0
        self.entered, self.free = threading.Event(), threading.Event()
        if not hangs:
            self.free.set()

    def export(self, spans):
        self.entered.set()
        self.free.wait()
        self.calls += 1
        if self.calls in self.fails:
            raise ConnectionError("the collector is away")
        self.ids += [span.context.span_id for span in spans]
        return SpanExportResult.SUCCESS


def answering(**options):
    return Agent(FunctionModel(lambda _request: "ok"), name="shop", **options)


async def test_a_collector_that_hangs_holds_up_no_run(monkeypatch, caplog):
    """Runs end, a flush ends when its time is up and says so, and what was queued is delivered afterwards."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    collector = Collector(hangs=True)
    telemetry = Telemetry(collector)
    agent = answering(watch=[telemetry])
    for _ in range(5):
        assert (await agent.run("go")).output == "ok"
    await anyio.to_thread.run_sync(settled, collector.entered.is_set)
    telemetry.flush(0.01)
    assert "spans are still being exported after 0.01 s" in caplog.text
    assert telemetry.exported == 0 < telemetry.lost
    collector.free.set()
    [outlet] = agent.watch
    outlet.flush()
    assert telemetry.lost == 0
    assert telemetry.exported == len(collector.ids) >= 10


async def test_a_full_queue_drops_spans_and_counts_them(monkeypatch):
    """They are lost, as the numbers say, and no run waits for room."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    collector = Collector(hangs=True)
    telemetry = Telemetry(collector)
    agent = answering(watch=[telemetry])
    for _ in range(20):
        await agent.run("go")
    await anyio.to_thread.run_sync(settled, lambda: telemetry.lost >= 40)
    queued = telemetry.lost
    collector.free.set()
    [outlet] = agent.watch
    outlet.flush()
    assert telemetry.exported + telemetry.lost == queued
    assert 4 <= telemetry.exported == len(collector.ids) < 40


@pytest.mark.parametrize("place", ["", "/", "/v1/traces", "/v1/traces/"])
async def test_the_address_of_a_collector_may_have_its_path(place):
    """With or without a slash at the end."""
    with OTLPReceiver() as server:
        agent = answering()
        run = await agent.run("go")
        assert await TraceExport(agent.store, f"{server.url}{place}").run(run.id) == len(server.ids) >= 2


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_a_collector_that_refuses_is_told(status):
    """As an error that says what to check; after it is repaired the same spans arrive once more."""
    with OTLPReceiver() as server:
        agent = answering()
        run = await agent.run("go")
        server.status = status
        with pytest.raises(TraceExportError, match=r"\d spans could not be delivered .*: check the address"):
            await TraceExport(agent.store, server.url).run(run.id)
        server.status = 200
        assert await TraceExport(agent.store, server.url).run(run.id) == len(set(server.ids)) >= 2


async def test_a_follower_goes_on_with_the_run_that_was_not_delivered(tmp_path):
    """Runs before it are not sent again, and none is left out."""
    store = SQLiteStore(tmp_path / "runs.db")
    agent = answering(store=store)
    ids = [(await agent.run("go")).id for _ in range(3)]
    collector = Collector(fails={2})
    first = TraceExport(store, collector).follow(until_idle=True)
    assert await anext(first) == ids[0]
    with pytest.raises(TraceExportError, match="ConnectionError"):
        await anext(first)
    assert [each async for each in TraceExport(store, collector).follow(until_idle=True)] == ids[1:]
    assert len(set(collector.ids)) == len(collector.ids)
    await agent.aclose()


@pytest.mark.parametrize("way", ["runs", "follow"])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_runs_that_are_deleted_meanwhile_are_left_out(tmp_path, kind, way):
    """As retention does, in the middle of an export."""
    store = MemoryStore() if kind == "memory" else SQLiteStore(tmp_path / "runs.db")
    agent = answering(store=store)
    ids = [(await agent.run("go")).id for _ in range(3)]

    class Race(TraceExport):
        async def run(self, run_id, **options):
            if run_id == ids[1]:
                await agent.runs.delete(run_id)
            return await super().run(run_id, **options)

    export = Race(store, Collector())
    if way == "runs":
        assert await export.runs() == 2
    else:
        assert [each async for each in export.follow(until_idle=True)] == [ids[0], ids[2]]
        assert [each async for each in export.follow(until_idle=True)] == []
    await agent.aclose()


# Empty stores.


async def test_a_store_without_runs_has_no_numbers():
    """None instead of 0 where nothing was measured, and a time without length, which does not begin in 1970."""
    store = MemoryStore()
    log = await read_measurements(store)
    now = log.find_end(await store.now())
    summary = summarize(log, float("-inf"), now)
    assert (summary.since, summary.until, summary.tasks) == (now, now, 0)
    assert {summary.task_success_rate, summary.daily_cost_usd, summary.user_satisfaction, summary.latency_s} == {None}
    assert replay_alerts(log, float("-inf"), now) == ()
    report = await read_costs(store)
    assert (report.rows, report.runs, report.is_whole, report.since) == ((), 0, True, report.until)
    assert (report.forecast_month()[1], report.forecast_gap) == (None, "the costs are of less than a day")


async def test_the_commands_over_an_empty_store(tmp_path, capsys):
    """Each says what there is, and none fails."""
    path = str(tmp_path / "runs.db")
    store = SQLiteStore(path)
    await store.runs(limit=1)
    await store.aclose()

    def command(*words):
        assert main([*words, "--store", path]) == 0
        return capsys.readouterr().out

    shown = await anyio.to_thread.run_sync(command, "metrics", "--json")
    assert json.loads(shown)["since"] == json.loads(shown)["until"]
    assert "1970" not in await anyio.to_thread.run_sync(command, "metrics")
    assert "no alert" in await anyio.to_thread.run_sync(command, "alerts", "test")
    assert "$0.00 in 0 runs" in await anyio.to_thread.run_sync(command, "costs")


# Rubbish.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, True, "0.1", None])
def test_a_threshold_is_a_finite_number(value):
    """Nothing is above or below NaN, so its alert would be silent for ever."""
    with pytest.raises(MisuseError, match=r"error_rate=.*give a finite number, 0 or more"):
        set_thresholds({"error_rate": value})


@pytest.mark.parametrize("command", [("rules",), ("test", "--store", "runs.db")])
def test_a_threshold_that_is_no_number_is_refused_on_the_command_line(command, capsys):
    """Before a file of rules is written."""
    assert main(["alerts", *command, "--set", "error_rate=nan"]) == 2
    assert "give a finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [{"turns": 0}, {"turns": True}, {"added_tokens": float("nan")}, {"added_tokens": -1}, {"reply_tokens": "9"}],
    ids=str,
)
async def test_an_estimate_of_nonsense_is_refused(options):
    """It would be a cost below 0, or none."""
    with pytest.raises(MisuseError, match=f"estimate.{next(iter(options))}="):
        await estimate(answering(), **options)


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": -1}, {"by": "colour"}, {"tz": "Mars/Olympus"}], ids=str)
async def test_costs_of_nonsense_are_refused(options):
    """With what to give."""
    with pytest.raises(MisuseError, match=f"{next(iter(options))}=.*give"):
        await read_costs(MemoryStore(), **options)
