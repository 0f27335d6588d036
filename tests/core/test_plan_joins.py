"""Joins of steps: which of them start, and which never can, for each way in which the steps before them may end."""

from __future__ import annotations

import json
from itertools import product

import pytest

from agentfsm import ErrorType, MisuseError, Outcome, ToolCall
from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.plans import PlanProgress
from agentfsm.planning import Plan, PlanStep, ready
from tests.support.sample_runs import header, result

ENDS = ("succeeded", "skipped", "failed", "not run", "running")


def is_ready(join: str, ends: tuple[str, ...]) -> bool:
    """Return whether a step behind steps that have ended so can start."""
    steps = [PlanStep(id=100, question="?")]  # the one whose failure keeps others from running
    for number, end in enumerate(ends, 1):
        steps.append(PlanStep(id=number, question="?", after=(100,) if end == "not run" else ()))
    last = PlanStep(id=50, question="?", after=tuple(range(1, len(ends) + 1)), join=join)
    found = {end: [number for number, each in enumerate(ends, 1) if each == end] for end in ENDS}
    started = [100, *[number for number, end in enumerate(ends, 1) if end != "not run"]]
    return last in ready(
        Plan(steps=(*steps, last)),
        dict.fromkeys(found["succeeded"]),
        started,
        skipped=found["skipped"],
        failed=[100, *found["failed"]],
    )


@pytest.mark.parametrize("ends", list(product(ENDS, repeat=2)))
def test_the_matrix_of_joins_and_ends(ends):
    """A skipped step never blocks; one that failed or was not run blocks only where all have to succeed."""
    assert is_ready("all_success", ends) == (set(ends) <= {"succeeded", "skipped"})
    assert is_ready("all_done", ends) == ("running" not in ends)
    assert is_ready("any", ends) == ("succeeded" in ends or set(ends) == {"skipped"})


def test_what_never_can_start_is_lost_at_any_depth():
    """After the failure of the first step, only the one that waits for any end starts."""
    plan = Plan(
        steps=(
            PlanStep(id=1, question="?"),
            PlanStep(id=2, question="?", after=(1,)),
            PlanStep(id=3, question="?", after=(2,), join="any"),
            PlanStep(id=4, question="?", after=(3,), join="all_done"),
        )
    )
    assert [step.id for step in ready(plan, {}, [1], failed=[1])] == [4]
    assert ready(plan, {}, [1]) == ()


def test_a_join_survives_json_and_is_checked():
    """The default is not written, so that plans without joins stay as they were."""
    plan = Plan(steps=(PlanStep(id=1, question="?"), PlanStep(id=2, question="?", after=(1,), join="any")))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert [step.get("join") for step in plan.to_json()["steps"]] == [None, "any"]
    with pytest.raises(MisuseError, match="step 1: 'join' is one of all_success, all_done, any"):
        Plan.from_json({"steps": [{"id": 1, "question": "?", "join": "some"}]})


@pytest.mark.parametrize("error", [ErrorType.CONDITION, ErrorType.BUDGET])
def test_only_the_condition_of_a_step_skips_it(error):
    """Its result is null for the step behind it; a call that was refused is a failure."""
    plan = Plan(
        steps=(PlanStep(id=1, tool="look"), PlanStep(id=2, tool="act", arguments={"look": {"$step": 1}}, after=(1,)))
    )
    skipped = result("p1.1", outcome=Outcome.SKIPPED, name="look", error_type=error)
    entry = OpenCall(call=ToolCall(id="p1.1", name="look", arguments="{}"), phase=Phase.FINISHED, result=skipped)
    progress = PlanProgress(number=1, plan=plan, closed=(entry,))
    is_skipped = error is ErrorType.CONDITION
    assert [call.arguments for call in progress.build_ready_calls(header())] == ['{"look": null}'] * is_skipped
    assert progress.is_stuck
    assert PlanProgress(number=1, plan=Plan(steps=plan.steps[:1]), closed=(entry,)).is_stuck is not is_skipped


def test_a_plan_whose_steps_have_all_started_has_no_others():
    """The call that accepted the plan may be among the opened ones."""
    plan = Plan(steps=(PlanStep(id=1, tool="look"), PlanStep(id=2, tool="act")))
    accepted, *steps = [
        OpenCall(call=ToolCall(id=each, name=name, arguments="{}"))
        for each, name in [("p1", "agentfsm.plan"), ("p1.1", "look"), ("p1.2", "act")]
    ]
    progress = PlanProgress(number=1, plan=plan)
    assert [progress.has_started(each) for each in [(), steps[:1], (accepted, *steps[:1])]] == [False] * 3
    assert progress.has_started(steps)
    assert progress.has_started((accepted, *steps))
    assert not PlanProgress().has_started(())
    assert PlanProgress().build_ready_calls(header()) == ()
