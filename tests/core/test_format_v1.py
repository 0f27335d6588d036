"""Format 1, kept for ever: a journal and an inbox as the first release wrote them, and what they mean.

The files in `fixtures/` are never changed. Newer formats have files of their own beside them, and these go on being
read; nobody writes them any more.
"""

from pathlib import Path

import attrs

from agentfsm.core import events as e
from agentfsm.core.codec import decode_event, decode_header, decode_item, encode_event, encode_header, encode_item
from agentfsm.core.effects import Pending, PendingKind
from agentfsm.core.fingerprint import Fingerprint
from agentfsm.core.inbox import (
    Approve,
    Cancel,
    GiveInput,
    InboxItem,
    Input,
    InputKind,
    Pause,
    Reject,
    Rerun,
    Settle,
    Wake,
)
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import (
    AgentCost,
    AssistantMessage,
    ErrorType,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from agentfsm.core.run import FORMAT, Header, begin_run
from tests.support.sample_runs import ADDED_IN_4, sound_history

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
        ToolResult(call_id="t2.0", tool="greet", outcome=Outcome.DONE, content="hi"),
    ),
    agent="billing",
    agent_version="1.4",
    fingerprint=Fingerprint(),  # the file has one hash for the whole agent, of which nothing can be said
    target="shop.agents:billing",
    user="ann",
    roles=("clerk", "lead"),
    parent="desk-3",
    depth=1,
    metadata={"order": 17, "vip": True, "note": None, "tags": ["a", "ß", 0.5], "at": {"city": "Köln"}},
    format=1,
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
ASK = ToolCall(id="t4.3", name="ask_bank", arguments='{"query":"order 17"}', repaired='{"query":"order 17"')

WAITED = {"run_id": "order-17.t4.3", "tool": "wire", "arguments": {"cents": 1700, "to": ["DE02", None]}}
PENDING = (
    Pending(
        kind=PendingKind.APPROVAL,
        call_id="t1.0",
        description="Wires 17.00 €.",
        expires_at=1_760_604_804.0,
        **WAITED,
    ),
    Pending(kind=PendingKind.OUTCOME, call_id="t1.1", **WAITED),
)
COST = AgentCost(
    agent="bank",
    run_id="order-17.t4.3",
    usage=Usage(input_tokens=300, output_tokens=20),
    usd=0.25,
    turns=2,
    tool_calls=("wire", "clerk"),
    duration_s=3.5,
    children=(AgentCost(agent="clerk", run_id="order-17.t4.3.t1.1", usage=Usage(), usd=None, turns=1),),
)

# A run as it could have been, from its prompt to DONE.
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
    e.ToolsOffered(
        at=1_760_000_001.75,
        took_s=0.25,
        tools=("pay", "look_up", "ask_bank"),
        how="by their words",
        usage=Usage(input_tokens=90),
    ),
    e.ToolsChosen(
        at=1_760_000_003.0,
        took_s=1.5,
        message=AssistantMessage(text="I will look and pay.", calls=(PAY, BROKEN, LOOK_UP, ASK)),
        usage=Usage(input_tokens=812, output_tokens=64, cached_tokens=512, cost_usd=0.0031, estimated=True),
    ),
    e.ApprovalAsked(at=1_760_000_003.0, call_id="t4.0", expires_at=1_760_604_803.0, description="Pays 17.00 €."),
    e.ApprovalGiven(at=1_760_000_060.0, call_id="t4.0", by="bob", arguments='{"account": "DE02", "cents": 1600}'),
    e.ToolStarted(at=1_760_000_060.0, took_s=0.001, call_id="t4.0", repeatable=True),
    e.ToolLost(at=1_760_000_100.0, call_id="t4.0"),
    e.ToolFinished(
        at=1_760_000_200.0,
        result=ToolResult(
            call_id="t4.0",
            tool="pay",
            outcome=Outcome.UNKNOWN,
            content="The bank says: see statement.",
            duration_s=1.25,
            shown_chars=16,
        ),
        by="bob",
    ),
    e.ToolFinished(
        at=1_760_000_200.0,
        result=ToolResult(call_id="t4.1", tool="lookup", outcome=Outcome.FAILED, content="no JSON object"),
    ),
    e.ToolFinished(
        at=1_760_000_200.5,
        result=ToolResult(call_id="t4.2", tool="look_up", outcome=Outcome.DONE, content='{"cents":1700}'),
    ),
    e.ToolStarted(at=1_760_000_200.5, call_id="t4.3", repeatable=True),
    e.ToolPaused(at=1_760_000_200.5, call_id="t4.3", pending=PENDING),
    e.ToolStarted(at=1_760_000_300.0, call_id="t4.3", repeatable=True),
    e.ToolFinished(
        at=1_760_000_303.5,
        took_s=3.5,
        result=ToolResult(
            call_id="t4.3",
            tool="ask_bank",
            outcome=Outcome.DONE,
            content="It is paid.",
            index=3,
            started_at=1_760_000_300.0,
            duration_s=3.5,
            attempts=2,
            child=COST,
        ),
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

ERRORS = (
    ErrorType.ARGUMENTS,
    ErrorType.UNKNOWN_TOOL,
    ErrorType.NOT_PERMITTED,
    ErrorType.WITHDRAWN,
    ErrorType.BLOCKED,
    ErrorType.CIRCUIT_OPEN,
    ErrorType.RATE_LIMITED,
    ErrorType.UNAVAILABLE,
    ErrorType.TIMEOUT,
    ErrorType.RETRY,
    ErrorType.TOOL,
    ErrorType.AGENT,
)

FURTHER = (
    e.AnswerGiven(at=1_760_000_203.0, message=AssistantMessage(text="Refunded."), usage=Usage(cost_usd=0.5)),
    e.Failed(at=1_760_000_203.0, reason=StopReason.MAX_TURNS, message="20 of 20 turns used"),
    *[
        e.ToolFinished(
            at=1_760_000_204.0,
            result=ToolResult(
                call_id="t5.0",
                tool="pay",
                outcome=Outcome.FAILED,
                content="no",
                error_type=kind,
                retryable=True,
            ),
        )
        for kind in ERRORS
    ],
)

ITEMS = (
    Input(parts=(TextPart(text="And order 18?"),)),
    Input(kind=InputKind.TIMER, parts=(TextPart(text="08:00"), ImagePart(url="https://example.com/a.png"))),
    Approve(call_id="t4.0", by="bob"),
    Approve(call_id="t4.0", by="bob", arguments='{"account": "DE02", "cents": 1600}'),
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
    assert tuple(decode_event(line, HEADER) for line in rest) == JOURNAL + FURTHER
    run = begin_run(HEADER).fold(decode_event(line, HEADER) for line in rest[: len(JOURNAL)])
    sound_history(run.messages)
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


def test_the_inbox_is_read():
    """The rows of the file are the values above."""
    assert tuple(decode_item(line) for line in lines("v1-inbox.jsonl")) == ITEMS


def test_what_is_written_now_is_newer():
    """The values are written in today's format, and are read as the same ones, also into a run of this old one."""
    assert decode_header(encode_header(HEADER)) == attrs.evolve(HEADER, format=FORMAT)
    for event in JOURNAL + FURTHER:
        text = encode_event(event, HEADER)
        assert text.startswith(f'{{"v":{FORMAT},')
        assert decode_event(text, HEADER) == event
    assert all(decode_item(encode_item(item)) == item for item in ITEMS)


def test_a_run_begun_in_format_1_goes_on_in_todays():
    """A journal may begin in format 1 and go on in a newer one: each record is read as what it is."""
    first, *rest = lines("v1.jsonl")
    header = decode_header(first)
    half = [decode_event(line, header) for line in rest[:6]]
    later = [e.Paused(by="bob"), e.Resumed(changes=("other instructions",)), *JOURNAL[6:]]
    run = begin_run(header).fold(half).fold(decode_event(encode_event(event, header), header) for event in later)
    assert (run.state, run.output, run.version) == (State.DONE, "Refunded 17.00 €.", 23)


def test_no_type_is_left_out():
    """Every type that format 1 knows is in the files."""
    assert {type(event) for event in JOURNAL + FURTHER} >= set(e.EVENTS) - ADDED_LATER
    assert {type(item) for item in ITEMS} >= set(InboxItem.__args__) - ADDED_LATER


def shown(value):
    """Yield (type, field) for each field in the value, deep inside too, that is not at its default."""
    if isinstance(value, tuple):
        for item in value:
            yield from shown(item)
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            if getattr(value, field.name) != field.default:
                yield type(value), field.name
                yield from shown(getattr(value, field.name))


def test_no_field_is_left_out():
    """Every field of every type is in the files at least once with something in it, and so is every kind of error."""
    found = set(shown((HEADER, *JOURNAL, *FURTHER, *ITEMS)))
    kinds = {kind for kind, _ in found}
    fields = {(kind, field.name) for kind in kinds for field in attrs.fields(kind) if not field.inherited}
    assert fields - found <= ADDED_LATER
    assert set(ERRORS) >= set(ErrorType) - ADDED_LATER


# Types, fields and kinds of error that came after format 1 was frozen; they stand in a later file.
ADDED_LATER = (
    frozenset(
        {
            (ToolResult, "parts"),
            GiveInput,
            e.InputGiven,
            (Pending, "questions"),
            (e.ToolPaused, "state"),
            e.Paused,
            e.Resumed,
            Pause,
            Wake,
            (e.Compacted, "head"),
            (e.Compacted, "policies"),
            (e.Compacted, "usage"),
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
            e.Judged,
            (Header, "settings"),
            (AssistantMessage, "native"),
            (Usage, "cache_write_tokens"),
            (Usage, "reasoning_tokens"),
            (Usage, "unpriced"),
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


def test_every_format_has_its_file():
    """Whoever raises the format adds files of the new one, and keeps the old ones."""
    names = [f"v{version}{part}.jsonl" for version in range(1, FORMAT + 1) for part in ("", "-inbox")]
    assert all((FIXTURES / name).exists() for name in names)
