"""Format 1, kept for ever: a journal and an inbox as the first release wrote them, and what they mean.

The files in `fixtures/` are never changed. A new format gets files of its own beside them, and these go on being read;
only the test that writes them again then rests.
"""

from pathlib import Path

import pytest
from sample_runs import sound_history

from agentfsm.core import events as e
from agentfsm.core.codec import (
    VERSION,
    decode_event,
    decode_header,
    decode_item,
    encode_event,
    encode_header,
    encode_item,
)
from agentfsm.core.inbox import Approve, Cancel, InboxItem, Input, InputKind, Reject, Rerun, Settle
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import (
    AssistantMessage,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from agentfsm.core.run import Header, begin

FIXTURES = Path(__file__).parent / "fixtures"

HEADER = Header(
    id="order-17",
    prompt=(
        TextPart(text="Refund order 17 \N{BULLET} „bitte“."),
        ImagePart(url="https://example.com/receipt.png", detail="low"),
    ),
    created_at=1_760_000_000.25,
    session="user-7",
    after="order-16",
    history=(
        SystemMessage(text="House rules."),
        UserMessage(parts=(TextPart(text="Hello"),)),
        AssistantMessage(
            text="One moment.",
            calls=(ToolCall(id="t2.0", name="greet", arguments="{}", key="order-16:t2.0"),),
        ),
        ToolResult(call_id="t2.0", name="greet", outcome=Outcome.DONE, content="hi"),
    ),
    agent="billing",
    agent_version="1.4",
    fingerprint="9f86d081",
    target="shop.agents:billing",
    user="ann",
    roles=("clerk", "lead"),
    metadata={"order": 17, "vip": True, "note": None, "tags": ["a", "ß", 0.5], "at": {"city": "Köln"}},
)

PAY = ToolCall(
    id="t4.0",
    name="pay",
    arguments='{"account": "DE02", "cents": 1700}',
    key="order-17:t4.0",
    provider_id="call_9a",
)
BROKEN = ToolCall(id="t4.1", name="lookup", arguments="{}", key="order-17:t4.1", invented=True, malformed='{"order": ')
LOOK_UP = ToolCall(id="t4.2", name="look_up", arguments='{"order":17}', key="order-17:t4.2")

JOURNAL = (
    e.Observed(
        at=1_760_000_000.5,
        inputs=(
            Input(parts=(TextPart(text="It is urgent."),)),
            Input(
                kind=InputKind.WEBHOOK,
                parts=(TextPart(text="paid\n\ttwice\x00"), ImagePart(url="data:image/png;base64,AA==")),
            ),
        ),
    ),
    e.ModelFaltered(at=1_760_000_001.0, took_s=0.5, error="503 overloaded", usage=Usage(input_tokens=700)),
    e.Compacted(
        at=1_760_000_001.5,
        took_s=0.25,
        start=4,
        tokens_before=9_000,
        tokens_after=700,
        why="9,000 tokens of messages, 8,000 of room",
    ),
    e.ToolsChosen(
        at=1_760_000_003.0,
        took_s=1.5,
        message=AssistantMessage(text="I will look and pay.", calls=(PAY, BROKEN, LOOK_UP)),
        usage=Usage(input_tokens=812, output_tokens=64, cached_tokens=512, cost_usd=0.0031, estimated=True),
    ),
    e.ApprovalAsked(at=1_760_000_003.0, call_id="t4.0", expires_at=1_760_604_803.0),
    e.ApprovalGiven(at=1_760_000_060.0, call_id="t4.0", by="bob"),
    e.ToolStarted(at=1_760_000_060.0, took_s=0.001, call_id="t4.0", repeatable=True),
    e.ToolLost(at=1_760_000_100.0, call_id="t4.0"),
    e.ToolFinished(
        at=1_760_000_200.0,
        result=ToolResult(
            call_id="t4.0",
            name="pay",
            outcome=Outcome.UNKNOWN,
            content="The bank says: see statement.",
            duration_s=1.25,
            shown_chars=16,
        ),
        by="bob",
    ),
    e.ToolFinished(
        at=1_760_000_200.0,
        result=ToolResult(call_id="t4.1", name="lookup", outcome=Outcome.FAILED, content="no JSON object"),
    ),
    e.ToolFinished(
        at=1_760_000_200.5,
        result=ToolResult(call_id="t4.2", name="look_up", outcome=Outcome.DONE, content='{"cents":1700}'),
    ),
    e.ToolsReturned(at=1_760_000_200.5),
    e.Continued(at=1_760_000_201.0, note="You are repeating yourself.", loop=True, disabled=("look_up",)),
    e.Observed(at=1_760_000_201.0),
    e.AnswerDrafted(
        at=1_760_000_203.0,
        took_s=2.0,
        message=AssistantMessage(text="Refunded 17.00 €."),
        usage=Usage(input_tokens=900, output_tokens=8),
    ),
    e.Accepted(at=1_760_000_203.0),
)
# A run as it could have been, from its prompt to DONE.

OTHER_ENDS = (
    e.AnswerGiven(at=1_760_000_203.0, message=AssistantMessage(text="Refunded."), usage=Usage(cost_usd=0.5)),
    e.Failed(at=1_760_000_203.0, reason=StopReason.MAX_TURNS, message="20 of 20 turns used"),
)

ITEMS = (
    Input(parts=(TextPart(text="And order 18?"),)),
    Input(kind=InputKind.TIMER, parts=(TextPart(text="08:00"), ImagePart(url="https://example.com/a.png"))),
    Approve(call_id="t4.0", by="bob"),
    Reject(call_id="t4.0", by="bob", message="not this account"),
    Settle(call_id="t4.0", by="bob", outcome=Outcome.FAILED, content="the bank refused"),
    Rerun(call_id="t4.0", by="bob"),
    Cancel(by="bob", message="wrong order"),
)


def lines(name):
    return (FIXTURES / name).read_text(encoding="utf-8").split("\n")[:-1]


def test_the_journal_is_read():
    """Header and events of the file are the values above, and fold to the run that they tell of."""
    first, *rest = lines("v1.jsonl")
    assert decode_header(first) == HEADER
    assert tuple(decode_event(line) for line in rest) == JOURNAL + OTHER_ENDS
    run = begin(HEADER).fold(decode_event(line) for line in rest[: len(JOURNAL)])
    sound_history(run.messages)
    assert (run.state, run.output, run.version, run.turn) == (State.DONE, "Refunded 17.00 €.", 16, 3)
    assert (run.usage.tokens, run.loops, run.disabled, run.window) == (2_484, 1, ("look_up",), 4)
    assert [(record.call_id, record.turn, record.outcome) for record in run.calls] == [
        ("t4.0", 2, Outcome.UNKNOWN),
        ("t4.1", 2, Outcome.FAILED),
        ("t4.2", 2, Outcome.DONE),
    ]


def test_the_inbox_is_read():
    """The rows of the file are the values above."""
    assert tuple(decode_item(line) for line in lines("v1-inbox.jsonl")) == ITEMS


@pytest.mark.skipif(VERSION != 1, reason="a newer format is written")
def test_they_are_written_the_same_way():
    """Writing the values gives the very text of the files."""
    assert [encode_header(HEADER), *map(encode_event, JOURNAL + OTHER_ENDS)] == lines("v1.jsonl")
    assert [encode_item(item) for item in ITEMS] == lines("v1-inbox.jsonl")


def test_no_type_is_left_out():
    """Every type that format 1 knows is in the files."""
    assert {type(event) for event in JOURNAL + OTHER_ENDS} >= set(e.EVENTS) - ADDED_LATER
    assert {type(item) for item in ITEMS} >= set(InboxItem.__args__) - ADDED_LATER


ADDED_LATER = frozenset()
# Types that came after format 1 was frozen; they stand in a later file.


def test_every_format_has_its_file():
    """Whoever raises VERSION adds a file of the new format, and keeps the old ones."""
    assert all((FIXTURES / f"v{version}.jsonl").exists() for version in range(1, VERSION + 1))
