"""Tests of prompts as evaluations: pass rates, reasons, and mistakes that are found before the first request."""

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.evals import evaluate_prompt
from agentfsm.prompts import PromptTemplate
from agentfsm.testing import ScriptedModel


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
