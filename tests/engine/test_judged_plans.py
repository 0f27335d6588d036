"""Verdicts steer a plan: accept, retry_step, replan, escalate; and what the judge is shown of it."""

from __future__ import annotations

import json

import pytest

from agentfsm import Agent, PendingKind, tool
from agentfsm.core import events as e
from agentfsm.planning import Planner
from agentfsm.reflection import Reflector
from agentfsm.testing import ScriptedModel

pytestmark = pytest.mark.anyio

PLAN = json.dumps(
    {
        "steps": [
            {"id": 1, "tool": "price", "arguments": {"what": "flight"}},
            {"id": 2, "tool": "price", "arguments": {"what": "hotel"}},
            {"id": 3, "question": "What is the sum?", "after": [1, 2]},
        ]
    }
)
AGAIN = json.dumps({"steps": [{"id": 4, "question": "What is the sum, with fees?", "after": [1, 2]}]})


@tool(read_only=True)
async def price(what: str) -> int:
    """Return a price."""
    return {"flight": 100, "hotel": 50}[what]


def judgement(score, action, step="", change="", passed=None):
    evaluation = {name: {"score": score, "reason": "fees"} for name in ("completeness", "correctness", "format")}
    said = {"evaluation": evaluation, "action": action, "retry_details": {"step_id": step, "modification": change}}
    return json.dumps(said if passed is None else said | {"overall_pass": passed})


class Roles:
    """An agent whose roles have a model each."""

    def __init__(self, plans, answers, judgements, *, tools=frozenset(), **planner) -> None:
        self.planner, self.executor, self.judge = (ScriptedModel(*lines) for lines in (plans, answers, judgements))
        self.agent = Agent(
            self.executor,
            tools=[price],
            planner=Planner(model=self.planner, **planner),
            reflector=Reflector(model=self.judge, tools=tools),
        )

    def asked(self, number):
        """Return what the planner was asked."""
        request = self.planner.requests[number]
        return request.messages[-2].text, json.loads(request.messages[-1].text)


async def test_the_judge_is_shown_the_plan_and_its_results():
    roles = Roles([PLAN, "150"], ["It costs 150."], [judgement(5, "accept", passed=True)])
    run = await roles.agent.run("What does the journey cost?")
    assert run.output == "It costs 150."
    work = json.loads(roles.judge.requests[0].messages[-1].text)
    assert work["request"] == "What does the journey cost?"  # and not the note with the results
    assert work["plan"][0] == {"step": '1. price({"what": "flight"})', "outcome": "done"}
    assert [each["step"] for each in work["plan"]][2] == "3. What is the sum?, after 1, 2"
    results = roles.judge.requests[0].messages[1].text
    assert all(f"\n{each}\n" in results for each in (100, 50, 150))
    assert "overall_pass" in roles.judge.requests[0].messages[-2].text
    [judged] = [event for event in await roles.agent.history(run.id) if isinstance(event, e.Judged)]
    assert judged.verdict.passed is True


@pytest.mark.parametrize("action", ["retry_step", "replan"])
async def test_a_correction_leads_to_a_new_plan_that_keeps_results(action):
    """The planner plans the step anew, with a number of its own; nothing that is done is done again."""
    no, yes = judgement(2, action, step="3", change="add the fees"), judgement(5, "accept")
    roles = Roles([PLAN, "150", AGAIN, "170"], ["It costs 150.", "It costs 170."], [no, yes])
    run = await roles.agent.run("What does the journey cost?")
    assert run.output == "It costs 170."
    instructions, work = roles.asked(2)
    assert "add the fees" in instructions
    assert ("Do step 3 again" in instructions) == (action == "retry_step")
    assert work["results"] == {"1": 100, "2": 50, "3": 150}
    shown = roles.planner.requests[2].messages
    assert [each.text for each in (shown[0], shown[2])] == ["What does the journey cost?", "It costs 150."]
    assert [record.call_id for record in run.calls] == ["p1.1", "p1.2"]
    assert run.plan.replans == 1
    assert (await roles.agent.replay(run.id)).is_faithful


async def test_an_escalation_asks_a_person_and_a_new_plan_follows_the_answer():
    stop = judgement(1, "escalate", change="which journey?")
    yes = judgement(5, "accept")
    other = json.dumps({"steps": [{"id": 4, "tool": "price", "arguments": {"what": "hotel"}}]})
    roles = Roles([PLAN, "150", other], ["It costs 150.", "It costs 50."], [stop, yes])
    run = await roles.agent.run("What does it cost?")
    assert [item.kind for item in run.pending] == [PendingKind.INPUT]
    assert "which journey?" in run.pending[0].description
    await roles.agent.send(run.id, "only the hotel")
    run = await roles.agent.resume(run.id)
    assert run.output == "It costs 50."
    assert run.plan.objection == ""


async def test_results_of_steps_are_judged_before_the_answer():
    """If their tool is named; after each correction the planner is asked, at most three times."""
    wrong, right = [
        json.dumps({"correct": is_right, "more_needed": False, "next_step": "look at the return flight"})
        for is_right in (False, True)
    ]
    roles = Roles(
        [PLAN, "150", AGAIN, "170"], ["It costs 170."], [wrong, right, judgement(5, "accept")], tools={"price"}
    )
    run = await roles.agent.run("What does it cost?")
    assert run.output == "It costs 170."
    assert "look at the return flight" in roles.asked(2)[0]


async def test_without_replanning_the_criticism_goes_to_the_model():
    roles = Roles(
        [PLAN, "150"],
        ["It costs 150.", "It costs 170."],
        [judgement(2, "replan", change="add the fees"), judgement(5, "accept")],
        replan="never",
    )
    run = await roles.agent.run("What does it cost?")
    assert run.output == "It costs 170."
    assert "add the fees" in roles.executor.requests[1].messages[-1].text


async def test_an_objection_is_gone_once_the_planner_has_dealt_with_it():
    """Also if it finds that no plan is needed."""
    roles = Roles(
        [PLAN, "150", '{"steps": []}'],
        ["It costs 150.", "It costs 170."],
        [judgement(2, "replan", change="add the fees"), judgement(5, "accept")],
    )
    run = await roles.agent.run("What does it cost?")
    assert run.output == "It costs 170."
    assert (run.plan.objection, run.plan.plan) == ("", None)


@pytest.mark.parametrize(
    ("score", "passed", "is_accepted"),
    [(4, False, True), (3, True, True), (3, None, True), (3, False, False), (2, True, False)],
)
async def test_the_scores_decide_and_between_them_what_the_judge_says(score, passed, is_accepted):
    script = [judgement(score, "accept", change="x", passed=passed), judgement(5, "accept")]
    roles = Roles([PLAN, "150", AGAIN, "170"], ["one", "two"], script)
    assert (await roles.agent.run("go")).output == ("one" if is_accepted else "two")


async def test_a_judgement_without_a_word_for_passing_is_asked_for_again():
    roles = Roles([PLAN, "150"], ["one"], [judgement(5, "accept", passed="yes"), judgement(5, "accept")])
    assert (await roles.agent.run("go")).output == "one"
    assert len(roles.judge.requests) == 2
