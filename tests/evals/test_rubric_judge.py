"""Judges: votes by a rubric, replies that are no grade, families of models, and pairs in a random order."""

import json

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.core.run import begin_run
from agentfsm.evals import (
    SCORERS,
    Case,
    Evaluation,
    GateDecision,
    Grade,
    GradedRun,
    JudgeCalibration,
    RubricJudge,
    calibrate,
    evaluate,
    gate,
)
from agentfsm.evals.rubric_judge import RUBRIC, find_family
from agentfsm.testing import FunctionModel, ScriptedModel

CASE = Case(input="What is 6 * 7?", answer="42")


def vote(score, reason="because"):
    return json.dumps({name: {"reason": reason, "score": score} for name in RUBRIC})


async def judge_once(*replies, judge=None, **fields):
    model = ScriptedModel(*replies)
    agent = Agent(FunctionModel(lambda _request: "It is 42."))
    judge = judge or RubricJudge(model, votes=len(replies), **fields)
    found = await evaluate(agent, [CASE], runs=1, scorers=[*SCORERS, judge])
    return found.results[0].grades["judge"], model, (agent, judge)


async def test_votes_are_averaged():
    """From 0 for the score 1 to 1 for 5, with the reason of the lowest."""
    grade, model, _ = await judge_once(vote(5), vote(3, "it has no unit"), vote(4))
    assert (grade.value, grade.reason) == (0.75, "completeness: it has no unit")
    request = model.requests[0]
    assert json.loads(request.messages[-1].text) == {
        "task": "What is 6 * 7?",
        "expected_answer": "42",
        "answer": "It is 42.",
    }
    prompt = request.instructions
    assert prompt.index('"reason"') < prompt.index('"score"')
    assert "1: states something false" in prompt


@pytest.mark.parametrize("reply", ["fine", "{}", vote(6), vote("5"), vote(True), '{"correctness": 5}', "[1]"])
async def test_a_reply_that_is_no_grade_is_no_vote(reply):
    """Without any vote, the answer is not scored; it does not count as 0."""
    grade, _, _ = await judge_once(reply, vote(5))
    assert grade.value == 1
    grade, _, _ = await judge_once(reply)
    assert (grade.value, grade.reason) == (None, "none of 1 replies of the judge is a valid grade")


async def test_votes_are_made_once():
    """They are runs in the store, so a second evaluation asks for none; another rubric is another question."""
    _, model, (agent, judge) = await judge_once(vote(5), vote(5))
    again = await evaluate(agent, [CASE], runs=1, scorers=[judge])
    assert again.mean("judge") == 1
    assert len(model.requests) == 2
    other = RubricJudge(ScriptedModel(vote(1)), votes=1, rubric={"tone": {1: "rude", 5: "friendly"}})
    found = await evaluate(agent, [CASE], runs=1, scorers=[other])
    assert found.mean("judge") is None  # the reply has none of its criteria


async def test_a_judge_of_the_same_family():
    """It is refused, unless that is wanted."""
    agent = Agent(ScriptedModel("It is 42.", vote(5)))
    with pytest.raises(MisuseError, match="are of one family"):
        await evaluate(agent, [CASE], runs=1, scorers=[RubricJudge(agent.model)])
    judge = RubricJudge(agent.model, votes=1, own_family=True)
    assert (await evaluate(agent, [CASE], runs=1, scorers=[judge])).mean("judge") == 1


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt-4o", "openai"),
        ("openai/o3-mini", "openai"),
        ("chatgpt-4o", "openai"),
        ("claude-sonnet-4-5", "claude"),
        ("gemini-3", "gemini"),
        ("Qwen3-32B", "qwen"),
        ("7b", "7b"),
    ],
)
def test_families(name, family):
    """By the word that the name begins with."""
    assert find_family(name) == family


async def test_pairs_have_no_favourite_place():
    """A judge that always prefers the first place is even; one that looks at the answers is not."""
    agent = Agent(FunctionModel(lambda request: request.messages[-1].text.upper()))
    runs = [await agent.run(text) for text in ("good", "bad")]
    first, second = [GradedRun(case=CASE, run=run, agent=agent) for run in runs]
    places = []

    def prefer_a(request):
        places.append(json.loads(request.messages[-1].text)["A"])
        return '{"reason": "first", "better": "A"}'

    def prefer_good(request):
        work = json.loads(request.messages[-1].text)
        return json.dumps({"reason": "good", "better": "A" if work["A"] == "GOOD" else "B"})

    class Named(FunctionModel):
        name = "other"

    even = await RubricJudge(Named(prefer_a), votes=40, name="judge-a").prefer(first, second)
    assert abs(even) < 0.5
    assert set(places) == {"GOOD", "BAD"}
    assert await RubricJudge(Named(prefer_good), votes=5, name="judge-b").prefer(first, second) == -1
    assert await RubricJudge(Named(prefer_good), votes=5, name="judge-c").prefer(second, first) == 1
    assert await RubricJudge(Named(lambda _request: "neither"), votes=3, name="judge-d").prefer(first, second) is None
    open_run = GradedRun(case=CASE, run=begin_run(agent.start("x").header), agent=agent)
    with pytest.raises(MisuseError, match="has no answer to compare"):
        await RubricJudge(Named(prefer_a)).prefer(first, open_run)


@pytest.mark.parametrize("rubric", [{}, {"tone": {1: "rude"}}, {"tone": "friendly"}])
def test_a_rubric_without_anchors(rubric):
    """It is refused."""
    with pytest.raises(MisuseError, match="give anchors by criterion"):
        RubricJudge(ScriptedModel(), rubric=rubric)


def make_judge(score=5, usd=0.0, **fields):
    class Judge(FunctionModel):
        name = fields.pop("model", "claude")

        def cost_usd(self, _usage):
            return usd

    reply = json.dumps({"criterion": {"reason": "", "score": score}})
    return RubricJudge(Judge(lambda _request: reply), votes=1, **{"rubric": "It is right.", **fields})


async def evaluate_by(*scorers, cases=80, **fields):
    agent = Agent(FunctionModel(lambda _request: "42"))
    return await evaluate(
        agent, [Case(id=f"c{n}", input=f"{n}", **fields) for n in range(cases)], runs=1, scorers=scorers
    )


@pytest.mark.parametrize("metric", ["quality", "total"])
async def test_a_judge_decides_with_a_calibration_of_its_own(metric):
    """Whatever its name is, also in the total, and as a floor; not with that of another model or rubric."""
    judge = make_judge(name="quality")
    found = await evaluate_by(judge)
    labels = [n % 5 / 4 for n in range(60)]
    own = calibrate(labels, labels, judge=found.results[0].grades["quality"].judge)
    for fields in ({"metrics": [metric]}, {"metrics": ["quality"], "floors": {metric: 0.9}}):
        with pytest.raises(MisuseError, match="a judge that is not calibrated decides nothing"):
            gate(found, found, **fields)
        for other in (make_judge(rubric="It is kind."), make_judge(model="gemini"), None):
            made = calibrate(labels, labels, judge="" if other is None else other.digest)
            with pytest.raises(MisuseError, match=r"the calibration is of .*: calibrate this judge"):
                gate(found, found, calibration=made, **fields)
        assert gate(found, found, calibration=own, **fields).decision is GateDecision.PASS


async def test_names_of_scorers():
    """Two of one name would lose the cost of one, and one named as a built-in aspect would replace it."""
    for scorers in ([make_judge(), make_judge(usd=1.0)], [make_judge(name="outcome")], [make_judge(name="total")]):
        with pytest.raises(MisuseError, match="give each scorer a name of its own"):
            await evaluate_by(*scorers)
    with pytest.raises(MisuseError, match="'outcome' names another aspect"):
        await evaluate_by(*SCORERS, make_judge(name="outcome"))


async def test_what_no_scorer_reads_is_refused():
    """A weight of an aspect that there is not, and a rubric without a judge."""
    with pytest.raises(MisuseError, match=r"case 'c0' has a weight of 'nope'; scorers: outcome, tool_path"):
        await evaluate_by(*SCORERS, weights={"nope": 2})
    with pytest.raises(MisuseError, match="case 'c0' has a rubric, and no judge grades by it"):
        await evaluate_by(*SCORERS, rubric="It is kind.")
    found = await evaluate_by(*SCORERS, make_judge(), cases=1, rubric="It is kind.", weights={"judge": 2, "cost": 0})
    assert found.mean("judge") == 1


@pytest.mark.parametrize("value", [7.0, -0.1, float("nan"), float("inf"), "1"])
async def test_grades_and_labels_are_numbers(value, tmp_path):
    """From 0 to 1: else none is made, read from a file, or calibrated with."""
    with pytest.raises(MisuseError, match=r"Grade\(value=.*\): give a number from 0 to 1, or None"):
        Grade(value)
    for judged, labels in (([0.5, value], [0.5, 0.5]), ([0.5, 0.5], [0.5, value])):
        with pytest.raises(MisuseError, match="give a number from 0 to 1"):
            calibrate(judged, labels)
    (await evaluate_by(make_judge(), cases=1)).save(tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text(encoding="utf-8")
    (tmp_path / "r.json").write_text(text.replace('"value": 1.0', f'"value": {json.dumps(value)}'), encoding="utf-8")
    with pytest.raises(MisuseError, match=r"r\.json is not the result of an evaluation: Grade"):
        Evaluation.load(tmp_path / "r.json")
    doubt = JudgeCalibration(labels=60, spearman=0.9, kappa=float("nan"), false_passes=0, false_fails=0)
    assert doubt.find_doubt().startswith("the judge does not agree")
