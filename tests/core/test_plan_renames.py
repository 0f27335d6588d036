"""New names of tools in a run: which calls, steps and compensations take them, and compensations in JSON."""

from __future__ import annotations

import attrs
import pytest

from agentfsm import MisuseError, Outcome, ToolCall
from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.plans import Compensation, PlanProgress, rename_tools
from agentfsm.planning import Plan, PlanStep
from tests.support.sample_runs import acting, call, chosen, result, thinking

NAMES = {"charge": "charge_card", "refund": "give_back"}
REFUND = Compensation(tool="refund", arguments={"charge": {"$step": 1}, "order": "o1"})
STEPS = (
    PlanStep(id=1, tool="charge", arguments={"order": "o1"}, compensation=REFUND),
    PlanStep(id=2, tool="ship", arguments={"charge": {"$step": 1}}, after=(1,)),
)


def progress_of(phase):
    """Return the plan of two steps, of which the first has a call in a phase; None: it has not started."""
    ended = result("p1.1", name="charge") if phase is Phase.FINISHED else None
    entry = OpenCall(
        call=ToolCall(id="p1.1", name="charge", arguments="{}"),
        phase=phase or Phase.INTENDED,
        attempts=phase is not None,
        result=ended,
    )
    plan = Plan(steps=STEPS)
    return PlanProgress(number=1, plan=plan, forward=plan, closed=(entry,) if ended else ()), () if ended else (entry,)


@pytest.mark.parametrize("phase", [None, Phase.RUNNING, Phase.FINISHED])
def test_what_has_not_started_takes_the_new_names(phase):
    """A step that has started keeps its name; its compensation, and what takes its result by name, do not."""
    renamed = rename_tools(*_in_order(progress_of(phase)))
    assert renamed.plan == renamed.forward
    charge, ship = renamed.plan.steps
    assert charge.tool == ("charge_card" if phase is None else "charge")
    assert charge.compensation == Compensation(tool="give_back", arguments={"charge_card": {"$step": 1}, "order": "o1"})
    assert (ship.tool, ship.arguments) == ("ship", {"charge_card": {"$step": 1}})


def _in_order(found):
    progress, opened = found
    return progress, NAMES, opened


def test_a_name_of_another_tool_of_the_plan_is_refused():
    """Two steps would become one. Names that change places are two."""
    progress, opened = progress_of(None)
    with pytest.raises(MisuseError, match="'ship' is another tool of the plan already, so 'charge' cannot"):
        rename_tools(progress, {"charge": "ship"}, opened)
    with pytest.raises(MisuseError, match="cannot be renamed"):
        rename_tools(progress, {"charge": "one", "ship": "one"}, opened)
    renamed = rename_tools(progress, NAMES, opened)
    assert rename_tools(renamed, NAMES, opened) == renamed  # a second time changes nothing
    swapped = rename_tools(progress, {"charge": "ship", "ship": "charge"}, opened)
    assert [step.tool for step in swapped.plan.steps] == ["ship", "charge"]


def test_calls_that_have_not_started_take_the_new_names():
    """Also in the reply that requested them; those that have started, or ended, keep theirs."""
    run = acting(e.ToolStarted(call_id="t1.1"), e.ToolFinished(result=result("t1.2")), count=4)
    run = run.apply(e.Resumed(renamed={"search": "find"}))
    assert [entry.call.name for entry in run.open] == ["find", "search", "search", "find"]
    assert [each.name for each in run.reply.calls] == ["find", "search", "search", "find"]
    other = thinking().apply(chosen()).apply(e.Resumed(renamed={"look": "find"}))
    assert [entry.call for entry in other.open] == [call()]


def test_a_plan_without_an_open_reply_is_renamed():
    """Its steps have no calls yet."""
    run = thinking()
    run = attrs.evolve(run, plan=progress_of(None)[0])
    assert run.apply(e.Resumed(renamed=NAMES)).plan.plan.steps[0].tool == "charge_card"


def test_a_step_that_waits_for_its_tool_was_not_run():
    """The end of the run says so, since it never started."""
    run = acting(e.ToolLost(call_id="t1.0", reason="no tool", lacks_tool=True), e.ToolLost(call_id="t1.1"), count=2)
    ended = run.apply(e.Failed(reason=e.StopReason.CANCELLED, message="by ann"))
    assert [each.outcome for each in ended.messages[-2:]] == [Outcome.SKIPPED, Outcome.UNKNOWN]


@pytest.mark.parametrize(
    ("step", "flaw"),
    [
        ({"after": "1"}, "'after' is a list of step numbers"),
        ({"arguments": []}, "'arguments' is an object"),
        ({"tools": "look"}, "'tools' is a list of names"),
        ({"undoes": "1"}, "'undoes' is the number of a step"),
        ({"compensation": {"arguments": {}}}, "'compensation' is an object with 'tool' and 'arguments'"),
        ({"compensation": {"tool": "refund", "arguments": []}}, "'compensation' is an object"),
    ],
)
def test_a_flawed_step_says_what_is_wrong(step, flaw):
    with pytest.raises(MisuseError, match=f"step 1: {flaw}"):
        Plan.from_json({"steps": [{"id": 1, "question": "?", **step}]})
