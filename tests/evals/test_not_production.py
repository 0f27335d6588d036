"""An evaluation beside production on one store: figures, lists and the learner leave it out, and its money is named."""

import pytest

from agentfsm import Agent, Limits, Usage, tool
from agentfsm.evals import SCORERS, Case, RubricJudge, SimulatedUser, evaluate
from agentfsm.memory.episodes import leaves_episode
from agentfsm.ports import Filter, Reply
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry.alerts import replay_alerts
from agentfsm.telemetry.costs import COST_GROUPS, read_costs
from agentfsm.telemetry.metrics_summary import read_measurements, summarize
from agentfsm.telemetry.totals import Totals
from agentfsm.testing import FunctionModel, call, say


def answer(text):
    """Return a model whose replies cost a cent, of another family for judges."""
    return FunctionModel(lambda _request: Reply(text=text, usage=Usage(input_tokens=9, output_tokens=1, cost_usd=0.01)))


@pytest.fixture
async def store(tmp_path):
    """A store with a run of production that cost a cent."""
    store = SQLiteStore(tmp_path / "runs.db")
    await Agent(answer("42"), store=store, name="prod").run("What is 6 * 7?", user="ann", session="s1")
    yield store
    await store.aclose()


async def read_figures(store):
    """Return what production is seen by."""
    log = await read_measurements(store)
    now = log.find_end(await store.now())
    costs = {by: (await read_costs(store, by=by)).rows for by in COST_GROUPS}
    return summarize(log, 0.0, now), replay_alerts(log, now - 3600, now), await store.runs(Filter(purpose="")), costs


async def test_an_evaluation_beside_production(store):
    """Success, alerts and lists are unchanged; each report of costs has one row more, that of the evaluation."""
    metrics, alerts, rows, costs = await read_figures(store)

    @tool
    async def ask_prod() -> str:
        """Ask."""
        return (await Agent(answer("7"), store=store, name="prod").run("What?", user="ann")).answer

    def think(request):
        return say("", call("ask_prod" if request.messages[-1].text == "Fail." else "nowhere"))

    bad = Agent(FunctionModel(think), tools=[ask_prod], store=store, name="prod", limits=Limits(turns=1))
    user = SimulatedUser("fail", model=answer("Go on."), max_turns=2)
    case = Case(turns=["Fail.", user], user="ann", session="s1")
    right = Case(input="6 * 7?", user="ann", check=lambda _run, _deps: True)
    found = await evaluate(bad, [case], runs=10)
    assert found.mean() == 0
    judged = Agent(answer("42"), store=store, name="prod")
    grade = '{"correctness": {"reason": "x", "score": 5}}'
    judge = RubricJudge(answer(grade), rubric={"correctness": {1: "no", 5: "yes"}}, own_family=True)
    await evaluate(judged, [right], runs=2, scorers=[*SCORERS, judge])
    after = await read_figures(store)
    assert (after[0].tasks, after[0].task_success_rate, after[0].input_tokens) == (1, 1.0, metrics.input_tokens)
    assert (after[1], after[2]) == (alerts, rows)
    for by, before in costs.items():
        own = [row for row in after[3][by] if row.name != "eval"]
        [row] = [row for row in after[3][by] if row.name == "eval"]
        assert own == [*before], by
        assert row.usd == pytest.approx(0.01 * (10 + 20 + 2 + 6))  # calls, the user, answers, and three votes on each
    kept = [await judged.load(each.id) for each in await store.runs(Filter(agent="eval-record"))]
    assert {(judged.cost(run).usd, judged.cost(run).usage.tokens) for run in kept} == {(0, 0)}, "no model was asked"
    for is_counted in (False, True):
        if is_counted:
            await Totals(store).catch_up()
        report = await read_costs(store)
        assert (report.is_from_totals, report.usd) == (is_counted, pytest.approx(0.01 * 39))
        assert report.production.cost_usd == pytest.approx(0.01), (
            "the evaluation is not a part of what goes on each day"
        )
    assert {line.purpose for line in await store.runs(limit=100)} == {"", "eval"}
    log = await read_measurements(store, purpose="eval")
    assert summarize(log, 0.0, log.find_end(await store.now())).task_success_rate < 1


async def test_an_evaluation_teaches_nothing(store):
    """Its runs have a user, and leave no episode."""
    agent = Agent(answer("42"), store=store)
    found = await evaluate(agent, [Case(input="I am Ann.", user="ann")], runs=1)
    assert not leaves_episode(await agent.load(found.results[0].run_id))
    assert leaves_episode(await agent.run("I am Ann.", user="ann"))
