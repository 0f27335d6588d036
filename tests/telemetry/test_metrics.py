"""Metrics of runs from their journals: the nine of document H, percentiles, waits, and what counts once."""

import json
from math import inf

import anyio
import pytest

from agentfsm import Agent, Outcome, StopReason, TextPart, tool
from agentfsm.cli import main
from agentfsm.core.header import Header
from agentfsm.ports import Feedback
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry.measurements import METRICS, TOKENS, is_asked_again, measure_feedback, measure_run
from agentfsm.telemetry.metrics_summary import MeasurementLog, read_measurements, summarize
from agentfsm.testing import ScriptedModel, call, say
from tests.support.recorded_tasks import record_task

pytestmark = pytest.mark.anyio
DAY = 86_400.0


@tool(read_only=True)
async def search(query: str) -> str:
    """Search."""
    return query


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


def log_of(*tasks, feedback=()):
    """Return the measurements of recorded tasks."""
    log = MeasurementLog()
    for each in tasks:
        log.add(measure_run(each.header, each.events))
    log.add(measure_feedback(tasks[0].header, each) for each in feedback)
    return log


async def summary_of(owner, **options):
    """Return the metrics of an agent's store."""
    log = await read_measurements(owner.store, **options)
    return summarize(log, -inf, log.find_end(await owner.store.now()))


def test_the_nine_metrics():
    """Document H, 2.4, from four journals; a cancelled task counts in no rate."""
    log = log_of(
        record_task(1, 0, seconds=1, turns=1, tokens=100, usd=0.5),
        record_task(2, 100, seconds=3, turns=3, tokens=300, usd=0.25),
        record_task(3, 200, seconds=8, turns=2, tokens=200, failed=StopReason.TIMEOUT, outcome=Outcome.FAILED),
        record_task(4, 300, failed=StopReason.CANCELLED, usd=0),
        feedback=[
            Feedback(rating=5, at=10.0),
            Feedback(rating=2, by="ann", at=20.0),
            *[Feedback(rating=rating, by="judge:small:1a", at=20.0) for rating in (1, 2)],
            Feedback(rating=5, by="judge:large:2b", at=20.0),
        ],
    )
    found = summarize(log, 0, DAY)
    assert (found.tasks, found.cancelled) == (3, 1)
    assert found.task_success_rate == pytest.approx(2 / 3)
    assert found.error_rate == pytest.approx(1 / 3)
    assert found.avg_rounds_per_task == pytest.approx((1 + 3 + 1 + 0) / 4)
    assert found.avg_latency_ms == pytest.approx((1 + 3 + 8 + 2) / 4 * 1000)
    assert found.avg_tokens_per_task == pytest.approx((100 + 300 + 100 + 0) / 4)
    assert found.daily_cost_usd == pytest.approx(0.755)
    assert (found.user_satisfaction, found.ratings) == (3.5, 2)
    assert found.judge_ratings == {"small:1a": 1.5, "large:2b": 5}
    (searches,) = found.tools
    assert (searches.tool, searches.calls, searches.calls_per_hour) == ("search", 3, 3 / 24)
    assert searches.tool_error_rate == pytest.approx(1 / 3)
    assert searches.duration_s.p99 == 2
    assert (found.latency_s.p50, found.latency_s.p95, found.latency_s.p99) == (2, 8, 8)


def test_nothing_measured_is_not_zero():
    """Without tasks, votes and prices there are no rates."""
    found = summarize(MeasurementLog(), -inf, DAY)
    assert found.task_success_rate is found.user_satisfaction is found.daily_cost_usd is found.avg_latency_ms is None
    assert (found.tasks, found.tools, found.waiting) == (0, (), {})


def test_measured_in_parts():
    """What was measured up to a version is left out later, so that parts add up to the whole."""
    task = record_task(1, 0, turns=3)
    whole = measure_run(task.header, task.events)
    parts = [measure_run(task.header, task.events[:7]), measure_run(task.header, task.events, after=7)]
    assert (*parts[0], *parts[1]) == whole
    assert all(len(each.labels) == len(METRICS[each.metric].labels) for each in whole)


async def test_a_wait_for_a_person_is_no_latency():
    """It is measured by its kind; a run that waits now is counted."""
    agent = Agent(ScriptedModel(say("", call("pay", cents=3)), "done"), tools=[pay], name="shop")
    run = await agent.run("go")
    assert (await summary_of(agent)).waiting == {"approval": 1}
    await anyio.sleep(0.05)
    await agent.approve(run.id, "t1.0", digest=run.pending[0].digest)
    await agent.resume(run.id)
    found = await summary_of(agent, agent="shop")
    assert found.waits["approval"].p50 >= 0.04
    assert found.latency_s.p50 < found.waits["approval"].p50
    assert (found.waiting, found.outcomes) == ({}, {"completed": 1})
    assert (await read_measurements(agent.store, agent="other")).series == {}


async def test_a_sub_agent_is_no_task_and_its_tokens_count_once():
    """Its tokens are its own; the task of its caller has them in its sum. An invented tool has no label of its own."""
    below = Agent(ScriptedModel("found"), name="finder").as_tool()
    replies = say("", call("finder", query="x")), say("", call("invented_by_the_model")), "done"
    agent = Agent(ScriptedModel(*replies), tools=[below], name="boss")
    run = await agent.run("go")
    found, log = await summary_of(agent), await read_measurements(agent.store)
    assert found.tasks == 1
    assert found.input_tokens + found.output_tokens == run.usage.tokens == found.avg_tokens_per_task
    assert log.label_values(TOKENS, "agent") == ["boss", "finder"]
    assert {each.tool for each in found.tools} == {"finder", "(unknown)"}


async def test_implicit_signals():
    """The same question again within 10 minutes, in a session; arguments that a person changed; a cancelled run."""
    agent = Agent(ScriptedModel(*["done"] * 9), name="shop")
    for question in ("Where is my order 17?", "where is my  order 17 now?", "Do you sell tea?"):
        await agent.run(question, session="s")
    await agent.run("Where is my order 17?", session="other")
    assert (await summary_of(agent)).signals == {"asked_again": 1}
    payer = Agent(ScriptedModel(say("", call("pay", cents=3)), "done"), tools=[pay], name="payer", store=agent.store)
    run = await payer.run("go")
    await payer.approve(run.id, "t1.0", arguments={"cents": 2})
    await payer.resume(run.id)
    stopped = await payer.with_(model=ScriptedModel(say("", call("pay", cents=3)))).run("go")
    log = await read_measurements(agent.store)
    later = await agent.store.now() + 2 * DAY
    assert summarize(log, -inf, later).signals == {"asked_again": 1, "edited": 1, "abandoned": 1}
    await payer.cancel(stopped.id)
    assert (await summary_of(agent)).signals == {"asked_again": 1, "edited": 1, "cancelled": 1}


def test_a_question_is_asked_again_soon_and_alike():
    """Not after 10 minutes, and not if its words are others."""

    def ask(text, at):
        return Header(id="r", prompt=(TextPart(text=text),), created_at=at)

    assert is_asked_again(ask("北京明天的天气怎么样", 0), ask("北京明天天气怎么样", 599))
    assert not is_asked_again(ask("Where is it?", 0), ask("Where is it?", 601))
    assert not is_asked_again(ask("Where is it?", 0), ask("Thank you, all is well.", 5))


async def test_the_command(tmp_path, capsys):
    """For people a table, for programs JSON."""
    path = str(tmp_path / "runs.db")
    agent = Agent(ScriptedModel(say("", call("search", query="x")), "done"), tools=[search], store=SQLiteStore(path))
    run = await agent.run("go")
    await agent.runs.feedback(run.id, rating=4)
    await agent.aclose()
    assert await anyio.to_thread.run_sync(main, ["metrics", "--since", "1d", "--store", path]) == 0
    text = capsys.readouterr().out
    assert "task_success_rate    100.0%" in text
    assert "user_satisfaction    4.00, 1 rating" in text
    assert "daily_cost_usd       unknown price" in text
    assert "search" in text
    assert await anyio.to_thread.run_sync(main, ["metrics", "--json", "--store", path]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tasks"], found["error_rate"], found["tools"][0]["calls"]) == (1, 0, 1)
