"""Runs of production that a judge grades: once, within a limit, and with its cost apart."""

import json

import pytest

from agentfsm import Agent, LimitError, MisuseError, ModelError, StoreError
from agentfsm.core.usage import Usage
from agentfsm.evals import SCORERS, Case, RubricJudge, SimulatedUser, evaluate, grade_stored
from agentfsm.memory import Memory
from agentfsm.ports import Reply
from agentfsm.ports.store import Filter
from agentfsm.stores import MemoryStore
from agentfsm.telemetry.costs import read_costs
from agentfsm.telemetry.metrics_summary import read_measurements, summarize
from agentfsm.testing import FunctionModel, ScriptedModel, fail

RUBRIC = "The answer is polite."


class PricedModel(FunctionModel):
    """A judge whose vote costs 0.01 US dollars."""

    name = "judging"

    def cost_usd(self, usage):
        """Return the price."""
        return 0.01


@pytest.fixture
async def shop():
    """Return a store with ten runs of production and others beside them, a judge, and its requests."""
    store, asked = MemoryStore(), []

    def reply(request):
        asked.append(json.loads(request.messages[-1].text))
        score = 1 if "rude" in asked[-1]["answer"] else 5
        text = json.dumps({"criterion": {"reason": "as it reads", "score": score}})
        return Reply(text=text, usage=Usage(input_tokens=9, output_tokens=1, cost_usd=0.01))

    agent = Agent(FunctionModel(lambda request: f"{request.messages[-1].text} said."), name="shop", store=store)
    for number in range(10):
        await agent.run("rude" if number == 0 else "kind", id=f"run-{number}")
    await agent.run("kind", id="apart", purpose="eval")
    broken = agent.with_(model=ScriptedModel(fail(ModelError("down"))), name="broken")
    assert (await broken.run("kind", id="failed")).state == "error"
    judge = RubricJudge(PricedModel(reply), rubric=RUBRIC, votes=1)
    return store, agent, judge, asked


async def test_a_run_is_graded_once(shop):
    """Only answers of production; another rubric is another grade, and the cost is that of evaluations."""
    store, agent, judge, asked = shop
    found = await grade_stored(store, judge)
    assert sorted(each.run_id for each in found.results) == [f"run-{number}" for number in range(10)]
    assert (found.mean("judge"), found.judge_usd) == (0.9, pytest.approx(0.1))
    [bad] = await agent.runs.list_feedback("run-0")
    assert (bad.rating, bad.comment, bad.by.split(":")[:2]) == (1, "criterion: as it reads", ["judge", "judging"])
    assert [each.id for each in await agent.runs.list(Filter(max_rating=2))] == ["run-0"]
    assert (await grade_stored(store, judge)).results == ()
    assert len(asked) == 10
    again = await grade_stored(store, RubricJudge(judge.model, rubric=[RUBRIC, "It is true."], votes=1))
    assert len(again.results) == 10
    log = await read_measurements(store)
    figures = summarize(log, 0.0, log.find_end(await store.now()))
    assert (figures.user_satisfaction, [*figures.judge_ratings.values()]) == (None, [4.6])
    rows = await read_costs(store, by="purpose")
    assert {row.name: row.usd for row in rows.rows}["eval"] == pytest.approx(0.2)


async def test_it_goes_on_after_a_kill(shop, monkeypatch):
    """A vote that was given is not asked for again, and its feedback is written once."""
    store, agent, judge, asked = shop
    with monkeypatch.context() as patch:

        async def break_off(*_given):
            raise StoreError("killed")

        patch.setattr(store, "add_feedback", break_off)
        with pytest.raises(StoreError, match="killed"):
            await grade_stored(store, judge, parallel=1)
    assert len(asked) == 1
    assert len((await grade_stored(store, judge)).results) == 10
    assert len(asked) == 10
    assert [len(await agent.runs.list_feedback(f"run-{number}")) for number in range(10)] == [1] * 10


async def test_a_limit_and_a_sample(shop):
    """What was graded before the limit is kept; a sample is the same each time, and its parts add up."""
    store, agent, judge, asked = shop
    with pytest.raises(LimitError, match="3 of 10"):
        await grade_stored(store, judge, usd=0.03)
    assert len(asked) == 3
    assert len(await agent.runs.list(Filter(max_rating=5))) == 3
    other = RubricJudge(judge.model, rubric="It is true.", votes=1)
    half = await grade_stored(store, other, sample=0.5)
    assert 0 < len(half.results) < 10
    assert (await grade_stored(store, other, sample=0.5)).results == ()
    assert len(half.results) + len((await grade_stored(store, other)).results) == 10
    assert (await grade_stored(store, judge, since=await store.now() + 60)).results == ()
    with pytest.raises(MisuseError, match="sample"):
        await grade_stored(store, judge, sample=5)
    with pytest.raises(MisuseError, match="are of one family"):
        await grade_stored(store, RubricJudge(agent.model, votes=1))


async def test_the_judge_reads_what_was_said_before(shop):
    """An answer in a session is judged with the conversation that it continues."""
    store, agent, judge, asked = shop
    await agent.run("I live in Faro.", session="s")
    await agent.run("Where?", session="s", id="where")
    await grade_stored(store, judge)
    [work] = [each for each in asked if each["task"] == "Where?"]
    assert work["conversation"][0] == {"user": "I live in Faro."}


async def test_the_words_of_a_user_are_deleted_from_all_runs_of_an_evaluation(shop):
    """Votes, simulated users, decisions and checks belong to the user of the runs that they are about."""
    store, agent, judge, _asked = shop
    await agent.run("My secret.", user="ann", tenant="acme")
    await grade_stored(store, judge)
    user = SimulatedUser("You tell your secret.", model=ScriptedModel("My secret.", "[END]"))
    said = iter(["My secret.", None])
    cases = [
        Case(id="simulated", user="ann", tenant="acme", turns=user, check=lambda _run, _deps: "secret"),
        Case(id="function", user="ann", tenant="acme", turns=lambda _run: next(said)),
    ]
    await evaluate(agent, cases, runs=1, scorers=[*SCORERS, judge], parallel=1)
    assert len(await agent.runs.list(Filter(user="ann"))) > 9
    await Memory().for_(user="ann", tenant="acme").forget_all(runs="delete", store=store)
    left = [await agent.runs.load(each.id) for each in await agent.runs.list(Filter())]
    assert [run.id for run in left if "secret" in str(run.messages)] == []
