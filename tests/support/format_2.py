"""Format 2, frozen: what came after format 1, and all that was there before, as format 2 writes it."""

import attrs

from agentfsm import ErrorType, InputKind, Outcome, Pending, PendingKind, Priority, StopReason, TextPart, ToolResult
from agentfsm.core import events as e
from agentfsm.core.header import Fingerprint, Header
from agentfsm.core.inbox import Approve, Input, Pause, Wake
from tests.support.format_1 import FORMAT_1
from tests.support.formats import Format

AGENT = Fingerprint(instructions="9f86d081", model="gpt-4o", tools={"pay": "60303ae2", "look_up": "fd61a03a"})
HEADER = attrs.evolve(FORMAT_1.header, fingerprint=AGENT, forked_from="order-9", forked_at=12, format=2)

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
JOURNAL = tuple(map(changed, [*FORMAT_1.journal[:-2], *REST, *FORMAT_1.journal[-2:]]))

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
    *map(changed, FORMAT_1.further),
    *[e.Failed(at=1_760_000_205.0, reason=reason, message="so it was") for reason in REASONS],
    *[
        e.ToolFinished(result=ToolResult(call_id="t5.0", tool="pay", outcome=outcome, content="so"))
        for outcome in OUTCOMES
    ],
)
ITEMS = (
    *FORMAT_1.items,
    URGENT,
    *[
        Input(kind=kind, parts=(TextPart(text="x"),), priority=Priority.LOW)
        for kind in (InputKind.WEBHOOK, InputKind.REFLECTION)
    ],
    Approve(call_id="t4.0", by="bob", digest="d4735e3a265e16ee"),
    Pause(by="bob", message="look at it first"),
    Wake(run_id="order-17.t4.3"),
)

FORMAT_2 = Format(
    number=2,
    header=HEADER,
    journal=JOURNAL,
    further=FURTHER,
    items=ITEMS,
    added=frozenset(
        {
            e.Paused,
            e.Resumed,
            Pause,
            Wake,
            (Header, "fingerprint"),
            (Header, "forked_from"),
            (Header, "forked_at"),
            (e.ToolsChosen, "request"),
            (e.AnswerGiven, "request"),
            (e.AnswerDrafted, "request"),
            (e.ModelFaltered, "request"),
            (e.ApprovalAsked, "digest"),
            (Pending, "digest"),
            (Approve, "digest"),
            (Input, "priority"),
            (Input, "due_at"),
        }
    ),
    closed_sets=(ErrorType, InputKind, Outcome, PendingKind, Priority, StopReason),
)
