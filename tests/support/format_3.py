"""Format 3, frozen: what came after format 2, and all that was there before, as format 3 writes it."""

import attrs

from agentfsm import (
    AgentCost,
    AssistantMessage,
    AudioPart,
    ErrorType,
    FilePart,
    ImagePart,
    InputKind,
    Outcome,
    Pending,
    PendingKind,
    Priority,
    Question,
    Settings,
    StopReason,
    TextPart,
    ToolResult,
    Usage,
)
from agentfsm.core import events as e
from agentfsm.core.header import Header
from agentfsm.core.history import Removed, Span, Summarised
from agentfsm.core.inbox import GiveInput, Input
from agentfsm.core.messages import NativeReply
from agentfsm.reflection import Action, Score, Verdict
from tests.support.format_2 import FORMAT_2
from tests.support.formats import Format

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
    FORMAT_2.header,
    prompt=(
        *FORMAT_2.header.prompt,
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
    *FORMAT_2.further,
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
    *FORMAT_2.items,
    Input(kind=InputKind.USER, parts=(TextPart(text="this one"), FilePart(url="https://example.com/a.pdf"))),
    GiveInput(
        call_id="t5.0", by="bob", answers={"who": {"name": "Ann", "age": 41}, "pay": None}, digest="4e07408562bedb8b"
    ),
)

FORMAT_3 = Format(
    number=3,
    header=HEADER,
    journal=FORMAT_2.journal,
    further=FURTHER,
    items=ITEMS,
    added=frozenset(
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
    ),
    closed_sets=(Action, ErrorType, InputKind, Outcome, PendingKind, Priority, StopReason),
)
