"""Background runs in the fields of a run: begun, waiting, ended, told."""

import attrs
import pytest

from agentfsm import MisuseError, Outcome, State
from agentfsm.core import events as e
from agentfsm.core.effects import Reflect, Wait
from agentfsm.core.inbox import Input
from agentfsm.core.labels import Label
from agentfsm.core.messages import SystemMessage
from agentfsm.core.run_facts import list_results, list_spending
from agentfsm.core.text_safety import FENCE_NOTE
from agentfsm.core.usage import AgentCost, Purpose
from tests.support.sample_runs import PROMPT, SAMPLES, STARTED, USAGE, WAITED, acting, answer, finished, result

BEGUN = e.ChildReported(call_id="t1.0")
WAITS = e.ChildReported(call_id="t1.0", pending=(WAITED,))
COST = AgentCost(
    agent="helper", run_id="r1.t1.0", usage=USAGE, usd=None, turns=1, tool_calls=("dig", "dig"), counted=("dig",)
)


def ended(**changes):
    fields = {"call_id": "t1.0", "outcome": Outcome.UNKNOWN, "content": "perhaps", "child": COST}
    return e.ChildReported(call_id="t1.0", result=result(**(fields | changes)))


def going():
    """Return a run in OBSERVE that has begun a background run."""
    events = (STARTED, BEGUN, finished(), e.ToolsReturned(), e.Continued())
    return acting(*events)


def drafted(*events):
    return going().fold((e.Observed(), e.AnswerDrafted(message=answer(), usage=USAGE), *events))


def test_a_run_begins_waits_ends_and_is_told_once():
    """The result counts when it is reported, and is read with the next inputs."""
    run = going()
    assert [each.call.id for each in run.open_background] == ["t1.0"]
    assert run.pending == ()
    assert run.apply(WAITS).pending == (WAITED,)
    after = run.fold((WAITS, ended(labels=(Label.UNTRUSTED,), shown_chars=4)))
    assert after.pending == ()
    assert after.usage == run.usage + USAGE
    assert after.tool_call_count == run.tool_call_count + 2
    assert (after.counted, after.has_cut) == ({"dig": 1}, True)
    assert after.labels[Label.UNTRUSTED].call_id == "t1.0"
    assert [each.call.id for each in after.untold_background] == ["t1.0"]
    assert list_results(after)[0].outcome is Outcome.UNKNOWN
    assert list_results(run)[0].outcome is Outcome.DONE
    told = after.apply(e.Observed(inputs=(Input(parts=PROMPT),)))
    assert [type(message) for message in told.messages[-2:]] == [SystemMessage, type(told.messages[0])]
    assert told.messages[-2].text.startswith("[Background run t1.0] [search: unknown]\n")
    assert told.untold_background == ()
    assert told.apply(e.ModelFaltered(error="x")).messages == told.messages


def test_a_result_between_marks_is_explained_once():
    """The note on the marks follows the first result that has them."""
    run = going().fold((ended(fence="0a1b"), e.Observed()))
    assert run.has_fenced
    assert run.messages[-1].text == FENCE_NOTE
    assert run.messages[-2].text.startswith("[Background run t1.0]")


def test_a_report_of_no_background_run_is_refused():
    """One begins with its open call, and ends once."""
    with pytest.raises(MisuseError, match="no open background run"):
        going().apply(e.ChildReported(call_id="t1.1", pending=(WAITED,)))
    with pytest.raises(MisuseError, match="no open background run"):
        going().fold((ended(), ended()))
    with pytest.raises(MisuseError, match="no open call"):
        going().apply(e.ChildReported(call_id="t1.1"))


def test_the_end_waits_for_people_only_if_nothing_else_goes_on():
    """A draft is reviewed while a background run goes on, and after its end."""
    assert isinstance(drafted().effect, Reflect)
    waiting = drafted(WAITS)
    assert (waiting.state, waiting.effect) == (State.REFLECT, Wait(pending=(WAITED,)))
    assert isinstance(drafted(WAITS, ended()).effect, Reflect)


def test_its_spending_is_that_of_an_agent():
    """A report without a result has spent nothing."""
    assert list_spending(WAITS) == ()
    assert [(part.purpose, part.usage) for part in list_spending(ended())] == [(Purpose.AGENT, USAGE)]
    assert list_spending(ended(child=None)) == ()


def test_its_tool_is_renamed():
    """A run goes on with a program that has its tool under another name."""
    run = going().apply(e.Resumed(renamed={"search": "look"}))
    assert run.background["t1.0"].call.name == "look"
    assert attrs.evolve(run, background={}).apply(SAMPLES[e.Resumed]).background == {}


def test_its_note_is_empty_before_its_end():
    """A note is for a result."""
    assert going().background["t1.0"].note.text == "[Background run t1.0] "
