"""Format 4: what came after format 3, and all that was there before, as it is written now.

It stays open until the release of 0.2.0: what is added before that is added to its files. What the older formats
already had stands in their own tests, and is written here in format 4.
"""

import attrs
from test_format_v1 import lines, shown
from test_format_v2 import IMPLIED, words
from test_format_v2 import JOURNAL as JOURNAL_2
from test_format_v3 import FURTHER as FURTHER_3
from test_format_v3 import HEADER as HEADER_3
from test_format_v3 import ITEMS

from agentfsm.core import events as e
from agentfsm.core.codec import decode_event, decode_header, decode_item, encode_event, encode_header, encode_item
from agentfsm.core.effects import PendingKind
from agentfsm.core.inbox import InboxItem, InputKind, Priority
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.core.run import begin_run
from agentfsm.core.verdict import Action
from tests.support.sample_runs import sound_history

HEADER = attrs.evolve(HEADER_3, nonce="9f3c61d07a5be284", format=4)
FURTHER = (
    *FURTHER_3,
    e.ApprovalGiven(call_id="t5.0", by="bob", arguments='{"cents":900}', key="9f3c61d07a5be284:t5.0:4ae81572"),
    e.Paused(message="5 workers died while they drove it", kind=PendingKind.CRASH),
    e.LimitReached(reason=StopReason.MAX_TURNS, message="20 of 20 turns used", note="Answer now."),
    e.ToolStarted(call_id="t6.0", repeatable=True, read_only=True, since=1700000200.5, attempts=2),
    e.ToolCutOff(call_id="t6.0", started_at=1700000200.5, duration_s=0.25, undone=True),
)


def test_the_journal_is_read():
    """Header and events of the file are the values above, and fold to the run that they tell of."""
    first, *rest = lines("v4.jsonl")
    assert decode_header(first) == HEADER
    events = tuple(decode_event(line, HEADER) for line in rest)
    assert events == JOURNAL_2 + FURTHER
    run = begin_run(HEADER).fold(events[: len(JOURNAL_2)])
    sound_history(run.messages)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 23, 3)
    assert run.header.nonce == "9f3c61d07a5be284"


def test_the_inbox_is_read():
    """The rows of the file are the values above."""
    assert tuple(decode_item(line) for line in lines("v4-inbox.jsonl")) == ITEMS


def test_they_are_written_the_same_way():
    """Writing the values gives the very text of the files; when a newer format is written, this test goes."""
    events = [encode_event(event, HEADER) for event in JOURNAL_2 + FURTHER]
    assert [encode_header(HEADER), *events] == lines("v4.jsonl")
    assert [encode_item(item) for item in ITEMS] == lines("v4-inbox.jsonl")


def test_no_type_is_left_out():
    """Every type that there is, is in the files."""
    assert {type(event) for event in JOURNAL_2 + FURTHER} >= set(e.EVENTS)
    assert {type(item) for item in ITEMS} >= set(InboxItem.__args__)


def test_no_field_is_left_out():
    """Every field of every type is in the files at least once with something in it."""
    found = set(shown((HEADER, *JOURNAL_2, *FURTHER, *ITEMS)))
    kinds = {kind for kind, _ in found}
    fields = {(kind, field.name) for kind in kinds for field in attrs.fields(kind) if not field.inherited}
    assert fields - found <= IMPLIED


def test_no_word_is_left_out():
    """Every word of every closed set is in the files."""
    found = set(words((HEADER, *JOURNAL_2, *FURTHER, *ITEMS)))
    sets = (Action, ErrorType, InputKind, Outcome, PendingKind, Priority, StopReason)
    assert {word for each in sets for word in each} - found <= {StopReason.COMPLETED}
