"""Format 3, kept for ever: what came after format 2, and all that was there before, as it is written now.

What the older formats already had stands in their own tests, and is written here in format 3.
"""

import attrs
from test_format_v1 import lines, shown
from test_format_v2 import FURTHER as FURTHER_2
from test_format_v2 import HEADER as HEADER_2
from test_format_v2 import IMPLIED, words
from test_format_v2 import ITEMS as ITEMS_2
from test_format_v2 import JOURNAL as JOURNAL_2

from agentfsm.core import events as e
from agentfsm.core.codec import decode_event, decode_header, decode_item
from agentfsm.core.effects import Pending, PendingKind, Question
from agentfsm.core.inbox import GiveInput, InboxItem, Input, InputKind, Priority
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import (
    AgentCost,
    AssistantMessage,
    AudioPart,
    ErrorType,
    FilePart,
    ImagePart,
    NativeReply,
    Outcome,
    TextPart,
    ToolResult,
    Usage,
)
from agentfsm.core.run import begin_run
from agentfsm.core.segments import Removed, Span, Summarised
from agentfsm.core.settings import Settings
from agentfsm.core.verdict import Action, Score, Verdict
from tests.support.sample_runs import ADDED_IN_4, sound_history

SETTINGS = Settings(
    temperature=0.25,
    top_p=0.5,
    max_tokens=900,
    reasoning_effort="low",
    tool_choice="required",
    parallel_tool_calls=False,
    stream=True,
    seed=7,
    stop=("END",),
    extra_body={"user": "ann", "logit_bias": {"50256": -100}},
)
HEADER = attrs.evolve(
    HEADER_2,
    prompt=(
        *HEADER_2.prompt,
        AudioPart(url="data:audio/wav;base64,UklGRg=="),
        FilePart(url="data:application/pdf;base64,JVBERg==", name="receipt.pdf"),
    ),
    settings=SETTINGS,
    format=3,
)
NATIVE = NativeReply(provider="anthropic", content='[{"type":"thinking","thinking":"so","signature":"c2ln"}]')
DEAR = Usage(
    input_tokens=9,
    output_tokens=5,
    cached_tokens=3,
    cache_write_tokens=4,
    reasoning_tokens=2,
    unpriced=True,
)
BELOW = AgentCost(agent="clerk", run_id="order-17.t5.0", usage=DEAR, usd=None, turns=1, unpriced=("qwen3",))
VERDICT = Verdict(
    action=Action.RETRY_STEP,
    scores=(Score(criterion="correctness", score=2, reason="the sum is wrong"), Score(criterion="format", score=5)),
    step="2",
    note="add the fees",
)
INQUIRY = Pending(
    kind=PendingKind.QUESTION,
    run_id="order-17",
    call_id="t5.0",
    tool="clerk",
    description="Who are you?",
    digest="4e07408562bedb8b",
    questions=(
        Question(
            key="who",
            message="Who are you?",
            schema={"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
        ),
        Question(key="pay", message="Pay there.", url="https://pay.example.com/17"),
    ),
)
FURTHER = (
    *FURTHER_2,
    e.ToolsChosen(message=AssistantMessage(text="so", native=NATIVE), usage=DEAR, model="haiku"),
    e.AnswerGiven(message=AssistantMessage(text="so"), model="haiku"),
    e.AnswerDrafted(message=AssistantMessage(text="so"), model="haiku"),
    e.Judged(at=1_760_000_206.0, verdict=VERDICT, usage=DEAR),
    *[e.Judged(verdict=Verdict(action=action)) for action in Action],
    e.ToolFinished(
        result=ToolResult(
            call_id="t5.0",
            tool="clerk",
            outcome=Outcome.SKIPPED,
            content="so",
            error_type=ErrorType.BUDGET,
            child=BELOW,
        ),
    ),
    e.ToolFinished(
        result=ToolResult(
            call_id="t5.1",
            tool="scan",
            outcome=Outcome.DONE,
            content="[image 1: image/png, 8 bytes]\n[recording 2: audio/wav, 4 bytes]\n[file 3: https://example.com/a.pdf]",
            parts=(
                ImagePart(url="data:image/png;base64,iVBORw0KGgo=", detail="low"),
                AudioPart(url="data:audio/wav;base64,UklGRg=="),
                FilePart(url="https://example.com/a.pdf", name="a.pdf"),
            ),
        ),
    ),
    e.Failed(reason=StopReason.TOOL_BUDGET, message="so it was"),
    e.Compacted(
        start=9,
        head=(
            Span(start=0, end=1),
            Summarised(count=4, text="Order 17 is paid."),
            Span(start=5, end=9, chars=500, items=5),
            Removed(count=2),
        ),
        tokens_before=9_000,
        tokens_after=4_000,
        why="9,000 tokens of messages",
        policies=("TrimResults", "Summarise"),
        usage=DEAR,
    ),
    e.Continued(note="add the fees", refused=True),
    e.Continued(note="your last words", loop=True, is_last=True),
    e.Continued(asks="Which order is it?"),
    e.ToolPaused(call_id="t5.0", pending=(INQUIRY,), state='{"step": 2}'),
    e.InputGiven(call_id="t5.0", by="bob", answers={"who": {"name": "Ann", "age": 41}, "pay": None}),
)
ITEMS = (
    *ITEMS_2,
    Input(kind=InputKind.USER, parts=(TextPart(text="this one"), FilePart(url="https://example.com/a.pdf"))),
    GiveInput(
        call_id="t5.0", by="bob", answers={"who": {"name": "Ann", "age": 41}, "pay": None}, digest="4e07408562bedb8b"
    ),
)


def test_the_journal_is_read():
    """Header and events of the file are the values above, and fold to the run that they tell of."""
    first, *rest = lines("v3.jsonl")
    assert decode_header(first) == HEADER
    events = tuple(decode_event(line, HEADER) for line in rest)
    assert events == JOURNAL_2 + FURTHER
    run = begin_run(HEADER).fold(events[: len(JOURNAL_2)])
    sound_history(run.messages)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 23, 3)
    assert run.header.settings == SETTINGS


def test_the_inbox_is_read():
    """The rows of the file are the values above."""
    assert tuple(decode_item(line) for line in lines("v3-inbox.jsonl")) == ITEMS


def test_no_type_is_left_out():
    """Every type that format 3 knows is in the files."""
    assert {type(event) for event in JOURNAL_2 + FURTHER} >= set(e.EVENTS) - ADDED_LATER
    assert {type(item) for item in ITEMS} >= set(InboxItem.__args__) - ADDED_LATER


def test_no_field_is_left_out():
    """Every field of every type is in the files at least once with something in it."""
    found = set(shown((HEADER, *JOURNAL_2, *FURTHER, *ITEMS)))
    kinds = {kind for kind, _ in found}
    fields = {(kind, field.name) for kind in kinds for field in attrs.fields(kind) if not field.inherited}
    assert fields - found <= ADDED_LATER | IMPLIED


def test_no_word_is_left_out():
    """Every word of every closed set is in the files."""
    found = set(words((HEADER, *JOURNAL_2, *FURTHER, *ITEMS)))
    sets = (Action, ErrorType, InputKind, Outcome, PendingKind, Priority, StopReason)
    assert {word for each in sets for word in each} - found <= ADDED_LATER | {StopReason.COMPLETED}


# Types, fields and words that came after format 3 was frozen; they stand in a later file.
ADDED_LATER = ADDED_IN_4
