"""Items that a run recalled: the note that the model reads, and the labels that they bring."""

import attrs

from agentfsm import Label, State
from agentfsm.core import events as e
from agentfsm.core.labels import LabelSource
from agentfsm.core.recalled_items import build_profile_note, build_recall_note, read_recall_note
from tests.support.sample_runs import REMEMBERED, run_in


def test_items_bring_their_labels():
    """The run has the labels of what it recalled, with the memory as their source."""
    private = attrs.evolve(REMEMBERED, labels=(Label.PRIVATE, Label.INTERNAL))
    run = run_in(State.THINK).apply(e.Recalled(query="tea", items=(REMEMBERED, private)))
    assert {label: source.name for label, source in run.labels.items()} == {
        Label.USER_DATA: "memory",
        Label.PRIVATE: "memory",
        Label.INTERNAL: "memory",
    }
    assert run.is_recalled
    assert run.messages[-1] == build_recall_note((REMEMBERED, private))


def test_a_profile_stands_before_the_history():
    """It is no message of the history, brings its labels, and stays until another one was read."""
    before = run_in(State.THINK)
    private = attrs.evolve(REMEMBERED, labels=(Label.PRIVATE,))
    run = before.apply(e.Recalled(query="tea", profile=(private,)))
    assert run.messages == before.messages
    assert [*run.shown] == [build_profile_note((private,)), *before.messages]
    assert run.effect.messages == run.shown
    assert {*run.labels} == {Label.USER_DATA, Label.PRIVATE}
    assert run.apply(e.Recalled(query="tea", fault="the disk is gone")).profile is run.profile
    assert run.apply(e.Recalled(query="tea", profile=(private,))).profile is run.profile
    assert run.apply(e.Recalled(query="tea", profile=())).shown == before.messages


def test_nothing_found_adds_no_note():
    """The search counts all the same, so that it is not repeated."""
    before = run_in(State.THINK)
    after = before.apply(e.Recalled(query="tea"))
    assert after.is_recalled
    assert after.messages == before.messages


def test_a_day_beyond_the_calendar_is_unknown():
    """A time that no calendar has does not fail the note."""
    note = build_recall_note((attrs.evolve(REMEMBERED, valid_from=1e300),))
    assert "- fact of an unknown day: Ann drinks tea." in note.text
    assert "- fact of 1970-01-01: Ann drinks tea." in build_recall_note((REMEMBERED,)).text


def test_a_source_of_a_label_is_described():
    """A call is named with its tool; an input or the memory by its name."""
    assert (
        LabelSource(label=Label.UNTRUSTED, run_id="r", call_id="t1.0", name="fetch").describe() == "call t1.0 of fetch"
    )
    assert LabelSource(label=Label.UNTRUSTED, run_id="r", name="prompt").describe() == "prompt"


def test_the_texts_of_a_note_are_read_back():
    """One a line, without the words of the note."""
    note = build_recall_note((REMEMBERED, attrs.evolve(REMEMBERED, text="two\nlines")))
    assert read_recall_note(note).splitlines() == [REMEMBERED.text, "two lines"]
