"""Plans as data: their form, their flaws, which steps are ready, and how arguments are bound."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import MisuseError
from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.plans import PlanProgress
from agentfsm.planning import Plan, PlanStep, bind, ready
from tests.support.sample_runs import call, header, result

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)


@st.composite
def plans(draw):
    """Return a plan in which each step depends on some earlier ones."""
    size = draw(st.integers(1, 8))
    after = [draw(st.sets(st.sampled_from(range(1, number)), max_size=3)) for number in range(2, size + 1)]
    steps = [PlanStep(id=number, question="?", after=tuple(sorted(each))) for number, each in enumerate(after, 2)]
    return Plan(steps=(PlanStep(id=1, question="?"), *steps))


@given(plans(), st.randoms())
def test_the_order_of_effects_is_a_linearisation_of_the_graph(plan, random):
    """Whichever ready step ends next: each starts after those that it depends on, all run, and none twice."""
    done, started = {}, set()
    while len(done) < len(plan.steps):
        for step in ready(plan, done, started):
            assert set(step.after) <= done.keys()
            assert step.id not in started
            started.add(step.id)
        running = sorted(started - done.keys())
        assert running, "the plan is stuck"
        done[random.choice(running)] = "ok"
    assert ready(plan, done, started) == ()


@given(plans())
def test_a_plan_survives_json(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.find_flaws(max_steps=8) == []


@given(JSON, JSON)
def test_a_result_is_passed_on_with_its_type_and_never_read_again(result, other):
    """Not even a result that looks like a reference is resolved."""
    nested = {"$step": 2, "path": "/x"}
    bound = bind(
        {"a": {"$step": 1}, "b": [{"$step": 3}], "c": other if not _refers(other) else 0}, {1: result, 3: nested}
    )
    assert bound["a"] == result
    assert bound["b"] == [nested]


def _refers(value):
    return "$step" in json.dumps(value) or "$text" in json.dumps(value)


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        ({"$step": 1, "path": "/a/0"}, 5),
        ({"$step": 1, "path": "/x~1y"}, "slash"),
        ({"$step": 1, "path": "/m~0n"}, "tilde"),
        ({"$text": ["t=", {"$step": 1, "path": "/a"}, "!"]}, "t=[5, 6]!"),
        ({"$text": [{"$step": 2}]}, "plain"),
        ({"x": {"$step": 2}, "$other": 1}, {"x": "plain", "$other": 1}),
        ({"$step": "1"}, {"$step": "1"}),
        ({"$step": 1, "more": 2}, {"$step": 1, "more": 2}),
    ],
)
def test_references_are_json_pointers(arguments, bound):
    results = {1: {"a": [5, 6], "x/y": "slash", "m~n": "tilde"}, 2: "plain"}
    assert bind(arguments, results) == bound


@pytest.mark.parametrize("path", ["/b", "/a/2", "/a/x", "/a/-1", "a", "/a/0/c", 5])
def test_a_part_that_is_not_there_is_an_error(path):
    with pytest.raises(MisuseError, match=r"nothing at|JSON pointer"):
        bind({"$step": 1, "path": path}, {1: {"a": [5, 6]}})
    with pytest.raises(MisuseError, match="step 9 has no result"):
        bind({"$step": 9}, {})


@pytest.mark.parametrize("steps", [3, (), [PlanStep(id=1, tool="add")], ("add",)])
def test_a_plan_is_made_of_steps(steps):
    """Anything else is refused where it is given."""
    with pytest.raises(MisuseError, match="a tuple of PlanStep"):
        Plan(steps=steps)


@pytest.mark.parametrize(
    ("step", "flaw"),
    [
        ("add", "step 1: it is not an object"),
        ({"tool": "add", "args": {}}, "step 1: unknown key 'args'"),
        ({"id": 0, "tool": "add"}, "step 1: 'id' is a whole number from 1"),
        ({"id": True, "tool": "add"}, "step 1: 'id' is a whole number from 1"),
        ({"tool": "add", "after": 1}, "step 1: 'after' is a list of step numbers"),
        ({"tool": "add", "after": ["1"]}, "step 1: 'after' is a list of step numbers"),
        ({"tool": "add", "arguments": "{}"}, "step 1: 'arguments' is an object"),
        ({"tool": 5}, "step 1: 'tool' is a text"),
    ],
)
def test_a_step_of_the_wrong_form_is_refused(step, flaw):
    """The error names the step and the key, since a model reads it and writes the plan again."""
    with pytest.raises(MisuseError, match=flaw):
        Plan.from_json({"steps": [step]})


def test_arguments_that_cannot_be_bound_refuse_the_call():
    """The call of such a step says what was not found, and its tool is never started."""
    step = PlanStep(id=2, tool="add", arguments={"a": {"$step": 1, "path": "/none"}}, after=(1,))
    plan = Plan(steps=(PlanStep(id=1, tool="add"), step))
    finished = OpenCall(
        call=attrs.evolve(call(), id="p1.1"),
        phase=Phase.FINISHED,
        result=result("p1.1", content='{"a": 5}', name="add"),
    )
    (ready_call,) = PlanProgress(number=1, plan=plan, closed=(finished,)).build_ready_calls(header())
    assert ready_call.id == "p1.2"
    assert "nothing at" in ready_call.malformed
