"""Tests of prompts as evaluations: pass rates, reasons, and mistakes that are found before the first request."""

import json

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.evals import RubricJudge, evaluate_prompt, evaluate_prompts
from agentfsm.prompts import PromptTemplate, not_contains
from agentfsm.testing import FunctionModel, ScriptedModel


def router(tests):
    return PromptTemplate(
        name="router", version="1.0", text="Route: {{request}}", variables={"request": "untrusted"}, tests=tests
    )


async def test_an_agent_is_tested():
    """Each test several times, the reasons counted."""
    tests = [
        {"name": "math", "values": {"request": "1024 * 768?"}, "checks": ["json_valid", {"has_field": "tool_name"}]},
        {"name": "vague", "values": {"request": "help"}, "input": "Go on.", "checks": ["json_valid"]},
    ]
    model = ScriptedModel(*['{"tool_name": "calculator"}'] * 4, '{"tool": 1}', *["{}"] * 5)
    agent = Agent(model, instructions="Others.")
    report = await evaluate_prompt(agent, router(tests), runs=5)
    assert [(test.name, test.passed, test.runs) for test in report.tests] == [("math", 4, 5), ("vague", 5, 5)]
    assert report.tests[0].failures == {"has_field tool_name: field 'tool_name' is missing": 1}
    assert not report.passed
    asked = [(request.instructions[:6], request.messages[-1].text[:6]) for request in model.requests]
    assert asked == [("", "Route:")] * 5 + [("Route:", "Go on.")] * 5
    assert report.digest == router(tests).digest
    assert (await evaluate_prompt(agent, router(tests), runs=5)).tests == report.tests
    assert len(model.requests) == 10  # the runs were over already


async def test_nothing_is_asked_if_a_test_is_wrong():
    """A missing value is found before the first request."""
    tests = [
        {"name": "a", "values": {"request": "x"}, "checks": ["json_valid"]},
        {"name": "b", "checks": ["json_valid"]},
    ]
    agent = Agent(ScriptedModel())
    for prompt, message in ((router(tests), "values are missing"), (router([]), "has no tests")):
        with pytest.raises(MisuseError, match=message):
            await evaluate_prompt(agent, prompt)


def is_short(reply):
    """Check the length of a reply."""
    return len(reply) < 20 or f"{len(reply)} characters"


class OtherModel(FunctionModel):
    """A model of another family."""

    name = "other"


async def test_a_matrix_of_prompts_and_models():
    """Each prompt with each model, by functions, negative checks and a judge, with rates and intervals."""

    def vote(request):
        score = 5 if "please" in json.loads(request.messages[-1].text)["answer"] else 1
        return json.dumps({"criterion": {"reason": "as it reads", "score": score}})

    checks = [{"function": f"{__name__}:is_short"}, not_contains("sorry")]
    tests = [
        {"name": "form", "values": {"request": "x"}, "checks": checks},
        {"name": "tone", "values": {"request": "x"}, "rubric": "It is polite."},
    ]
    old = router(tests)
    new = PromptTemplate(name="router", version="2.0", text="Route politely: x", tests=[{**tests[0], "values": {}}])
    models = [
        FunctionModel(lambda request: "please wait" if "politely" in request.messages[-1].text else "sorry"),
        OtherModel(lambda _request: "please, " * 9),
    ]
    judge = RubricJudge(FunctionModel(vote), votes=1, own_family=True)
    reports = await evaluate_prompts(Agent(models[0]), [old, new], models, runs=4, judge=judge)
    assert [(each.version, each.model, each.rate, each.passed) for each in reports] == [
        ("1.0", "function", 0.0, False),
        ("1.0", "other", 0.5, False),
        ("2.0", "function", 1.0, True),
        ("2.0", "other", 0.0, False),
    ]
    assert reports[1].tests[0].failures == {"is_short: 72 characters": 4}
    assert reports[0].tests[0].failures == {"not_contains 'sorry': 'sorry' is there": 4}
    assert reports[0].tests[1].failures == {"criterion: as it reads": 4}
    assert reports[1].interval == pytest.approx((0.215, 0.785), abs=0.001)
    with pytest.raises(MisuseError, match="the test 'tone' has a rubric: give judge="):
        await evaluate_prompts(Agent(models[0]), [new, old], models)
