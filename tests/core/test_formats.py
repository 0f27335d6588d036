"""Every format is read for ever: journals and inboxes as each of them wrote them, and what they mean.

What the files say stands in `tests/support/format_1.py` and its successors.
"""

import attrs
import pytest

from agentfsm import Outcome, State, StopReason
from agentfsm.core import events as e
from agentfsm.core.codec import decode_event, decode_header, decode_item, encode_event, encode_header, encode_item
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import InboxItem
from agentfsm.core.run import begin_run
from tests.support.format_1 import FORMAT_1
from tests.support.format_2 import AGENT, FORMAT_2
from tests.support.format_3 import FORMAT_3, SETTINGS
from tests.support.format_4 import FORMAT_4
from tests.support.format_5 import FORMAT_5
from tests.support.formats import FIXTURES, shown, words
from tests.support.sample_runs import sound_history

FORMATS = (FORMAT_1, FORMAT_2, FORMAT_3, FORMAT_4, FORMAT_5)
# What no record holds, since it is what the first one says of all.
IMPLIED = frozenset({(Header, "format")})

each_format = pytest.mark.parametrize("form", FORMATS, ids=str)


def added_after(form):
    """Types, fields and words that came after a format was frozen; they stand in a later one's files."""
    return frozenset().union(*[later.added for later in FORMATS if later.number > form.number])


def run_of(form):
    """Read a format's journal, check that it says what it should, and fold it to the run that it tells of."""
    first, *rest = form.records()
    assert decode_header(first) == form.header
    events = tuple(decode_event(line, form.header) for line in rest)
    assert events == form.events
    run = begin_run(form.header).fold(events[: len(form.journal)])
    sound_history(run.messages)
    return run


def test_the_journal_of_format_1_is_read():
    """Header and events of the file are its values, and fold to the run that they tell of."""
    run = run_of(FORMAT_1)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 21, 3)
    assert (run.usage.tokens, run.loops, run.disabled, run.cutoff) == (2_894, 1, ("look_up",), 4)
    assert [(record.call_id, record.turn, record.outcome) for record in run.calls] == [
        ("t4.0", 2, Outcome.UNKNOWN),
        ("t4.1", 2, Outcome.FAILED),
        ("t4.2", 2, Outcome.DONE),
        ("t4.3", 2, Outcome.DONE),
    ]
    assert run.calls[0].arguments == {"account": "DE02", "cents": 1600}
    assert (run.offered, run.has_cut, run.retries) == (("pay", "look_up", "ask_bank"), True, {"ask_bank": 1})


def test_the_journal_of_format_2_is_read():
    """Header and events of the file are its values, and fold to the run that they tell of."""
    run = run_of(FORMAT_2)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 23, 3)
    assert (run.fingerprint, run.paused) == (AGENT, None)
    assert "[System Event] " in run.messages[7].text


def test_the_journal_of_format_3_is_read():
    """Header and events of the file are its values, and fold to the run that they tell of."""
    run = run_of(FORMAT_3)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 23, 3)
    assert run.header.settings == SETTINGS


def test_the_journal_of_format_4_is_read():
    """Header and events of the file are its values, and fold to the run that they tell of."""
    run = run_of(FORMAT_4)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 23, 3)
    assert run.header.nonce == "9f3c61d07a5be284"


def test_the_journal_of_format_5_is_read():
    """Header and events of the file are its values, and fold to the run that they tell of."""
    run = run_of(FORMAT_5)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 23, 3)
    assert (run.header.caller, run.header.withhold) == ("order-16/t1.0", True)


def test_a_compensation_of_format_4_is_read_as_one():
    """Format 4 did not say what a plan is for: one after a failure that no model made undoes the steps of a flow."""
    kinds = {}
    for more in ('"reason":"step 1 failed",', '"reason":"step 1 failed","purpose":"plan",', ""):
        text = f'{{"v":4,"call":{{"id":"p2","name":"agentfsm.plan","arguments":"{{}}"}},{more}"at":1.0,"is":"Planned"}}'
        kinds[more] = decode_event(text, FORMAT_4.header).kind.value
    assert list(kinds.values()) == ["compensation", "forward", "forward"]


@each_format
def test_the_inbox_is_read(form):
    """The rows of the file are its values."""
    assert tuple(map(decode_item, form.rows())) == form.items


def test_format_5_is_written_the_same_way():
    """Writing the values gives the very text of the files; when a newer format is written, this test is about that."""
    events = [encode_event(event, FORMAT_5.header) for event in FORMAT_5.events]
    assert [encode_header(FORMAT_5.header), *events] == FORMAT_5.records()
    assert list(map(encode_item, FORMAT_5.items)) == FORMAT_5.rows()


def test_what_is_written_now_is_newer():
    """The values are written in today's format, and are read as the same ones, also into a run of an old one."""
    header = FORMAT_1.header
    assert decode_header(encode_header(header)) == attrs.evolve(header, format=FORMAT)
    for event in FORMAT_1.events:
        text = encode_event(event, header)
        assert text.startswith(f'{{"v":{FORMAT},')
        assert decode_event(text, header) == event
    assert all(decode_item(encode_item(item)) == item for item in FORMAT_1.items)


def test_a_run_begun_in_format_1_goes_on_in_todays():
    """A journal may begin in format 1 and go on in a newer one: each record is read as what it is."""
    first, *rest = FORMAT_1.records()
    header = decode_header(first)
    half = [decode_event(line, header) for line in rest[:6]]
    later = [e.Paused(by="bob"), e.Resumed(changes=("other instructions",)), *FORMAT_1.journal[6:]]
    run = begin_run(header).fold(half).fold(decode_event(encode_event(event, header), header) for event in later)
    assert (run.state, run.output, run.version) == (State.DONE, "Refunded 17.00 €.", 23)


@each_format
def test_no_type_is_left_out(form):
    """Every type that the format knows is in its files."""
    later = added_after(form)
    assert {type(event) for event in form.events} >= set(e.EVENTS) - later
    assert {type(item) for item in form.items} >= set(InboxItem.__args__) - later


@each_format
def test_no_field_is_left_out(form):
    """Every field of every type is in the files at least once with something in it."""
    found = set(shown(form.values))
    kinds = {kind for kind, _ in found}
    fields = {(kind, field.name) for kind in kinds for field in attrs.fields(kind) if not field.inherited}
    assert fields - found <= added_after(form) | IMPLIED


@each_format
def test_no_word_is_left_out(form):
    """Every word of the closed sets is in the files."""
    there = {word for each in form.closed_sets for word in each}
    assert there - set(words(form.values)) <= added_after(form) | {StopReason.COMPLETED}


def test_every_format_has_its_file():
    """Whoever raises the format adds files of the new one, and keeps the old ones."""
    names = [f"v{version}{part}.jsonl" for version in range(1, FORMAT + 1) for part in ("", "-inbox")]
    assert all((FIXTURES / name).exists() for name in names)
    assert [form.number for form in FORMATS] == list(range(1, FORMAT + 1))
