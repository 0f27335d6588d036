"""Format 1, frozen: the values that its files hold, as the first release wrote them."""

from agentfsm import (
    AgentCost,
    AssistantMessage,
    ErrorType,
    ImagePart,
    InputKind,
    Outcome,
    Pending,
    PendingKind,
    StopReason,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from agentfsm.core import events as e
from agentfsm.core.header import Fingerprint, Header
from agentfsm.core.inbox import Approve, Cancel, Input, Reject, Rerun, Settle
from tests.support.formats import Format

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

FORMAT_1 = Format(
    number=1,
    header=HEADER,
    journal=JOURNAL,
    further=FURTHER,
    items=ITEMS,
    added=frozenset(),
    closed_sets=(ErrorType,),
)
