"""Format 2, kept for ever: what came after format 1, and all that was there before, as it is written now.

What format 1 already had stands in its own test, and is written here in format 2.
"""

from enum import StrEnum

import attrs
from test_format_v1 import FURTHER as FURTHER_1
from test_format_v1 import HEADER as HEADER_1
from test_format_v1 import ITEMS as ITEMS_1
from test_format_v1 import JOURNAL as JOURNAL_1
from test_format_v1 import lines, shown

from agentfsm.core import events as e
from agentfsm.core.codec import decode_event, decode_header, decode_item
from agentfsm.core.effects import Pending, PendingKind
from agentfsm.core.fingerprint import Fingerprint
from agentfsm.core.inbox import Approve, GiveInput, InboxItem, Input, InputKind, Pause, Priority, Wake
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AgentCost, AssistantMessage, ErrorType, Outcome, TextPart, ToolResult, Usage
from agentfsm.core.run import Header, begin_run
from tests.support.sample_runs import ADDED_IN_4, sound_history

AGENT = Fingerprint(instructions="9f86d081", model="gpt-4o", tools={"pay": "60303ae2", "look_up": "fd61a03a"})
HEADER = attrs.evolve(HEADER_1, fingerprint=AGENT, forked_from="order-9", forked_at=12, format=2)

URGENT = Input(
    kind=InputKind.EVENT,
    parts=(TextPart(text="The shop closes."),),
    priority=Priority.HIGH,
    due_at=1_760_000_000.25,
)
WAITS = [
    Pending(kind=PendingKind.QUESTION, run_id="order-17", call_id="t4.3", tool="ask_user", digest="5feceb66ffc86f38"),
    Pending(kind=PendingKind.INPUT, run_id="order-17", call_id="t4.3", tool="wait"),
    Pending(kind=PendingKind.PAUSE, run_id="order-17"),
]


def changed(event):
    """Return an event of the old journal with what it may say since."""
    match event:
        case e.Observed(inputs=inputs) if inputs:
            return attrs.evolve(event, inputs=(*inputs, URGENT))
        case e.ToolsChosen() | e.AnswerGiven() | e.AnswerDrafted() | e.ModelFaltered():
            return attrs.evolve(event, request="6b86b273ff34fce1")
        case e.ApprovalAsked():
            return attrs.evolve(event, digest="d4735e3a265e16ee")
        case e.ToolPaused(pending=pending):
            return attrs.evolve(event, pending=(*pending, *WAITS))
    return event


REST = (
    e.Paused(at=1_760_000_202.0, by="bob", message="look at it first"),
    e.Resumed(at=1_760_000_202.5, fingerprint=AGENT, changes=("other instructions", "tool pay has changed")),
)
# The run of format 1, which somebody paused before its last turn.
JOURNAL = tuple(map(changed, [*JOURNAL_1[:-2], *REST, *JOURNAL_1[-2:]]))

REASONS = (
    StopReason.MAX_TURNS,
    StopReason.TOKEN_BUDGET,
    StopReason.COST_BUDGET,
    StopReason.TIMEOUT,
    StopReason.TOO_MANY_ERRORS,
    StopReason.LOOP_DETECTED,
    StopReason.MODEL_ERROR,
    StopReason.CANCELLED,
    StopReason.GUARD,
    StopReason.PARKED,
)
OUTCOMES = (
    Outcome.DONE,
    Outcome.FAILED,
    Outcome.TIMED_OUT,
    Outcome.CANCELLED,
    Outcome.REJECTED,
    Outcome.SKIPPED,
    Outcome.UNKNOWN,
)
FURTHER = (
    *map(changed, FURTHER_1),
    *[e.Failed(at=1_760_000_205.0, reason=reason, message="so it was") for reason in REASONS],
    *[
        e.ToolFinished(result=ToolResult(call_id="t5.0", tool="pay", outcome=outcome, content="so"))
        for outcome in OUTCOMES
    ],
)
ITEMS = (
    *ITEMS_1,
    URGENT,
    *[
        Input(kind=kind, parts=(TextPart(text="x"),), priority=Priority.LOW)
        for kind in (InputKind.WEBHOOK, InputKind.REFLECTION)
    ],
    Approve(call_id="t4.0", by="bob", digest="d4735e3a265e16ee"),
    Pause(by="bob", message="look at it first"),
    Wake(run_id="order-17.t4.3"),
)


def test_the_journal_is_read():
    """Header and events of the file are the values above, and fold to the run that they tell of."""
    first, *rest = lines("v2.jsonl")
    assert decode_header(first) == HEADER
    events = tuple(decode_event(line, HEADER) for line in rest)
    assert events == JOURNAL + FURTHER
    run = begin_run(HEADER).fold(events[: len(JOURNAL)])
    sound_history(run.messages)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 23, 3)
    assert (run.fingerprint, run.paused) == (AGENT, None)
    assert "[System Event] " in run.messages[7].text


def test_the_inbox_is_read():
    """The rows of the file are the values above."""
    assert tuple(decode_item(line) for line in lines("v2-inbox.jsonl")) == ITEMS


def test_no_type_is_left_out():
    """Every type that format 2 knows is in the files."""
    assert {type(event) for event in JOURNAL + FURTHER} >= set(e.EVENTS) - ADDED_LATER
    assert {type(item) for item in ITEMS} >= set(InboxItem.__args__) - ADDED_LATER


def test_no_field_is_left_out():
    """Every field of every type is in the files at least once with something in it."""
    found = set(shown((HEADER, *JOURNAL, *FURTHER, *ITEMS)))
    kinds = {kind for kind, _ in found}
    fields = {(kind, field.name) for kind in kinds for field in attrs.fields(kind) if not field.inherited}
    assert fields - found <= ADDED_LATER | IMPLIED


def words(value):
    """Yield every word of a closed set in the value, deep inside too."""
    if isinstance(value, StrEnum):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from words(item)
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from words(getattr(value, field.name))


def test_no_word_is_left_out():
    """Every word of every closed set is in the files."""
    found = set(words((HEADER, *JOURNAL, *FURTHER, *ITEMS)))
    sets = (ErrorType, InputKind, Outcome, PendingKind, Priority, StopReason)
    assert {word for each in sets for word in each} - found <= ADDED_LATER | {StopReason.COMPLETED}


# What no record holds, since it is what the first one says of all.
IMPLIED = frozenset({(Header, "format")})
# Types, fields and words that came after format 2 was frozen; they stand in a later file.
ADDED_LATER = (
    frozenset(
        {
            (ToolResult, "parts"),
            GiveInput,
            e.InputGiven,
            (Pending, "questions"),
            (e.ToolPaused, "state"),
            e.Judged,
            (Header, "settings"),
            (AssistantMessage, "native"),
            (Usage, "cache_write_tokens"),
            (Usage, "reasoning_tokens"),
            (Usage, "unpriced"),
            (e.Compacted, "usage"),
            (e.Compacted, "policies"),
            (e.Compacted, "head"),
            (e.ToolsChosen, "model"),
            (e.AnswerGiven, "model"),
            (e.AnswerDrafted, "model"),
            (AgentCost, "unpriced"),
            ErrorType.BUDGET,
            StopReason.TOOL_BUDGET,
            (e.Continued, "refused"),
            (e.Continued, "is_last"),
            (e.Continued, "asks"),
        }
    )
    | ADDED_IN_4
)
