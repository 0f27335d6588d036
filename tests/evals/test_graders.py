"""Checks beside those of answers, rubrics of cases, what a judge sees, and what an evaluation may cost."""

import json

import attrs
import pytest

from agentfsm import Agent, LimitError, MisuseError, ToolResult, Usage, ask_user, tool
from agentfsm.core.messages import Citation, HostedContent
from agentfsm.evals import SCORERS, Case, RubricJudge, SimulatedUser, Turn, evaluate, no_question, not_called
from agentfsm.ports import Reply
from agentfsm.prompts import fits_schema, not_contains, not_matches
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say


@tool(read_only=True)
def look_up(order: int) -> str:
    """Look up an order."""
    return f"order {order}: 5 apples"


def make_agent(*script, **fields):
    return Agent(ScriptedModel(*script), tools=[look_up, ask_user], **fields)


async def grade(agent, **fields):
    """Return the result of one repeat of a case."""
    return (await evaluate(agent, [Case(input="Look.", **fields)], runs=1)).results[0]


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (not_contains("pears"), ""),
        (not_contains("apples"), "not_contains 'apples': 'apples' is there"),
        ({"not_matches": r"\d+"}, r"not_matches \d+: '5' matches"),
        (not_matches("x"), ""),
        (not_called("pay", "refund"), ""),
        ({"not_called": ["pay", "look_up"]}, "not_called pay, look_up: look_up was called"),
        ("no_question", ""),
        (lambda answer: "apples" in answer, ""),
        (lambda _answer: "too short", "<lambda>: too short"),
        (fits_schema({"type": "string"}), "fits_schema: not JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
async def test_checks_of_a_run(check, reason):
    """Of the answer, also by a function, and of the calls; each may be negative."""
    agent = make_agent(say("", call("look_up", order=17)), "There are 5 apples.")
    result = await grade(agent, expect=[check])
    assert (result.grades["outcome"].reason, result.passed) == (reason, not reason)


async def test_a_question_to_the_user():
    """By a tool, or by the answer; also of a single turn."""
    asked = await grade(make_agent(say("", call("ask_user", question="Which?")), "Done."), expect=[no_question()])
    assert asked.grades["outcome"].reason == "the run waits for a person"
    turns = [{"answer": "17"}]
    asked = await grade(
        make_agent(say("", call("ask_user", question="Which?")), "Done."), turns=turns, expect=["no_question"]
    )
    assert asked.grades["outcome"].reason == "no_question: ask_user was called"
    asked = await grade(make_agent("Which one?"), expect=[no_question()])
    assert asked.grades["outcome"].reason == "no_question: an answer is a question"
    for answer in ("**Which size?**", "Which size? :)", "Which size?\n\nTell me.", "要哪个尺码？告诉我。"):  # noqa: RUF001
        assert not (await grade(make_agent(answer), expect=[no_question()])).passed
    assert (await grade(make_agent("See http://a.b/?c=d, please."), expect=[no_question()])).passed
    asked = await grade(make_agent("Yes.", "Which?"), turns=[Turn("And?", expect=[no_question()])])
    assert asked.grades["outcome"].reason == "turn 2: no_question: an answer is a question"


async def test_a_call_that_must_not_be_made():
    """It may be one of a sub-agent; a call that a person rejects is not made, and a mistyped name is a finding."""
    clerk = make_agent(say("", call("look_up", order=17)), "5 apples.", name="clerk")
    boss = Agent(ScriptedModel(say("", call("clerk", query="Look.")), "5 apples."), tools=[clerk.as_tool()])
    result = await grade(boss, expect=[not_called("look_up")])
    assert (result.grades["outcome"].reason, result.findings) == ("not_called look_up: look_up was called", ())
    result = await grade(boss.with_(model=ScriptedModel("5 apples.")), expect=[not_called("lok_up")])
    assert (result.passed, result.findings) == (
        True,
        ("not_called lok_up: no agent that takes part has this tool",),
    )
    careful = attrs.evolve(look_up, requires_approval=True)
    asks = Agent(ScriptedModel(say("", call("look_up", order=17)), "No."), tools=[careful])
    result = await grade(asks, turns=[Turn(reject="look_up")], expect=[not_called("look_up")], paths=[["look_up"]])
    assert (result.passed, result.grades["tool_path"].value) == (True, 1)


@pytest.mark.parametrize("check", ["no_answer", {"not_called": 1}, {"contains": "a", "matches": "b"}, 1, dict])
def test_a_check_that_is_wrong(check):
    """It is refused when the case is made."""
    with pytest.raises(MisuseError):
        Case(input="a", expect=[check])


async def test_a_check_that_is_broken():
    """It says nothing of the agent: that run is not scored, with the reason, and the others are."""

    class Broken:
        name = "mine"

        async def grade(self, graded):
            return 0.5 if graded.case.id == "<1>" else 1 / 0

    def make_broken(number):
        return lambda answer: 1 / 0 if f"<{number}>" in answer else answer == "<4>" or 7

    agent = Agent(FunctionModel(lambda request: request.messages[-1].text))
    cases = [Case(id=f"<{n}>", input=f"<{n}>", expect=[make_broken(1)]) for n in (1, 2, 4)]
    found = await evaluate(agent, cases, runs=1, scorers=[*SCORERS, Broken()])
    outcomes = [each.grades["outcome"] for each in found.results]
    assert [each.value for each in outcomes] == [None, None, 1]
    assert "raised ZeroDivisionError" in outcomes[0].reason
    assert "returned int" in outcomes[1].reason
    assert [each.grades["mine"].reason for each in found.results[:2]] == [
        "not scored: the scorer mine returned float: return a Grade",
        "not scored: the scorer mine raised ZeroDivisionError: division by zero",
    ]


async def test_tokens_are_limited():
    """As turns, cost and time are."""
    result = await grade(make_agent(say("Yes.", usage=Usage(input_tokens=30, output_tokens=10))), max_tokens=20)
    assert result.grades["tokens"].value == 0.5


def vote(**scores):
    return json.dumps({name.replace("_", " "): {"reason": "so", "score": score} for name, score in scores.items()})


async def test_a_rubric_of_a_case():
    """It takes the place of that of the judge: a sentence, several, or anchors."""
    seen = []

    def judge(request):
        seen.append(request.instructions)
        names = [
            name for name in ("criterion 1", "criterion 2", "tone", "criterion") if f"- {name}:" in request.instructions
        ]
        return json.dumps({name: {"reason": "so", "score": 4} for name in names})

    agent = Agent(FunctionModel(lambda _request: "Yes."))
    rubrics = ("It says yes.", ["It says yes.", "It is short."], {"tone": {"1": "rude", "5": "friendly"}})
    cases = [Case(id=str(place), input="Go.", rubric=rubric) for place, rubric in enumerate(rubrics)]
    found = await evaluate(agent, cases, runs=1, scorers=[RubricJudge(FunctionModel(judge), votes=1, own_family=True)])
    assert [each.grades["judge"].value for each in found.results] == [0.75] * 3
    assert sorted("this does not hold: It is short." in each for each in seen) == [False, False, True]
    for wrong in ("", [], {"tone": {1: "rude"}}, {"tone": {0: "a", 5: "b"}}, {"tone": "friendly"}):
        with pytest.raises(MisuseError, match=r"rubric=.*: give anchors by criterion"):
            Case(input="a", rubric=wrong)


async def test_a_judge_sees_the_trajectory():
    """The texts, the calls with their results, long ones cut, and the sources of hosted tools."""
    cited = HostedContent(citations=(Citation(url="https://a.example", title="A"),))

    def think(request):
        last = request.messages[-1]
        if isinstance(last, ToolResult):
            return Reply(text="5 apples.", hosted=cited)
        return say("", call("look_up", order=17)) if last.text == "Look." else "Yes."

    asked = []

    def judge(request):
        asked.append(json.loads(request.messages[-1].text))
        return vote(grounded=5)

    scorer = RubricJudge(FunctionModel(judge), rubric={"grounded": {1: "no", 5: "yes"}}, votes=1, own_family=True)
    agent = Agent(FunctionModel(think), tools=[look_up])
    await evaluate(agent, [Case(turns=["Look.", "Sure?"])], runs=1, scorers=[scorer])
    assert asked[0]["task"] == "Look."
    assert asked[0]["answer"] == "Yes."
    user, called, result, answer, *rest = asked[0]["conversation"]
    assert (user, rest) == ({"user": "Look."}, [{"user": "Sure?"}, {"assistant": "Yes."}])
    assert called == {"calls": [{"tool": "look_up", "arguments": '{"order": 17}'}]}
    assert result == {"result_of": "look_up", "outcome": "done", "content": "order 17: 5 apples"}
    assert (answer["assistant"], answer["sources"][0]["url"]) == ("5 apples.", "https://a.example")


def priced(usd):
    """Return a function that makes replies at a price."""
    return lambda text: Reply(text=text, usage=Usage(input_tokens=9, output_tokens=1, cost_usd=usd))


async def test_the_cost_of_an_evaluation(tmp_path):
    """Runs, users and judges have a line each, and a limit holds for all of them; a higher one goes on."""
    user = FunctionModel(lambda _request: priced(0.02)("Go on."))
    judge = RubricJudge(
        FunctionModel(lambda _request: priced(0.03)(vote(tone=5))), rubric={"tone": {1: "a", 5: "b"}}, own_family=True
    )
    asked = []

    def think(_request):
        asked.append(1)
        return priced(0.01)("Yes.")

    agent = Agent(FunctionModel(think), store=SQLiteStore(tmp_path / "evals.db"))
    case = Case(turns=["Hi.", SimulatedUser("talk", model=user, max_turns=2)])
    options = {"runs": 10, "scorers": [*SCORERS, judge], "parallel": 3}
    with pytest.raises(LimitError, match=r"4 of 10 cases cost \$0\.64, and more would exceed usd=0\.7"):
        await evaluate(agent, [case], usd=0.7, **options)
    assert len(asked) == 4 * 3
    found = await evaluate(agent, [case], usd=1.7, **options)
    assert len(asked) == 10 * 3
    assert (found.usd, found.user_usd, found.judge_usd) == pytest.approx((0.3, 0.4, 0.9))
    assert found.results[0].judge_usd == pytest.approx(0.09)
    await agent.aclose()


async def test_an_estimate_comes_first():
    """It may stop the evaluation; with an unknown price there is none, and no limit can hold."""

    class Priced(FunctionModel):
        def cost_usd(self, usage):
            return usage.input_tokens * 1e-6 + usage.output_tokens * 1e-5

    told = []

    def tell(usd):
        told.append(usd)
        raise MisuseError("too much")

    agent = Agent(Priced(lambda _request: "Yes."))
    suite = [Case(input="a"), Case(turns=["a", "b"])]
    judge = RubricJudge(Priced(lambda _request: vote(tone=5)), own_family=True)
    for scorers in (SCORERS, [*SCORERS, judge]):
        with pytest.raises(MisuseError, match="too much"):
            await evaluate(agent, suite, runs=2, scorers=scorers, on_estimate=tell)
    assert 0 < told[0] < told[1]
    assert (await evaluate(agent, suite, runs=1, usd=1.0)).estimated_usd == pytest.approx(told[0] / 2)
    plain = Agent(ScriptedModel("Yes."))
    with pytest.raises(MisuseError, match=r"the price of a model of run .* is unknown, so the limit cannot hold"):
        await evaluate(plain, [Case(input="a")], runs=1, usd=1.0, on_estimate=told.append)
    assert told[-1] is None
