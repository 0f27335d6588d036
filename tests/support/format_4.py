"""Format 4: what came after format 3, and all that was there before, as it is written now.

It stays open until the release of 0.2.0: what is added before that is added to its files.
"""

import attrs

from agentfsm import (
    AgentCost,
    AssistantMessage,
    ErrorType,
    ImagePart,
    InputKind,
    Label,
    Outcome,
    Pending,
    PendingKind,
    Priority,
    Purpose,
    Question,
    StopReason,
    TextPart,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from agentfsm.core import events as e
from agentfsm.core.events import AnswerSource
from agentfsm.core.header import Fingerprint, Header
from agentfsm.core.inbox import Input
from agentfsm.core.labels import LabelSource
from agentfsm.core.messages import MessageOrigin, NativeReply
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.usage import Spending, TierChoice
from agentfsm.core.window_layers import WindowLayers
from agentfsm.guards import GuardVerdict
from agentfsm.models import Citation, HostedCall, HostedContent, HostedFile
from agentfsm.reflection import Action, Verdict
from tests.support.format_2 import FORMAT_2
from tests.support.format_3 import FORMAT_3
from tests.support.formats import Format

HEADER = attrs.evolve(
    FORMAT_3.header,
    nonce="9f3c61d07a5be284",
    history=(
        UserMessage(parts=(TextPart(text="[Memory] Ann drinks green tea."),), origin=MessageOrigin.MEMORY),
        UserMessage(parts=(TextPart(text="[Plan] 17.00 €"),), origin=MessageOrigin.PLAN),
        *FORMAT_3.header.history,
    ),
    fingerprint=attrs.evolve(FORMAT_3.header.fingerprint, config="1f2e3d4c", prompts={"billing": "1.4.0#0123456789ab"}),
    instructions="You answer questions on invoices.",
    tenant="acme",
    clearance="internal",
    release="2026-11",
    arms={"prompt": "b"},
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    labels=(
        LabelSource(label=Label.UNTRUSTED, run_id="order-16", version=4, call_id="t1.0", name="read_mail"),
        LabelSource(label=Label.INTERNAL, run_id="order-17", name="prompt"),
    ),
    format=4,
)
MISFIT = "not run: the arguments given by bob do not fit: cents is missing"
# The same question, asked by the run of an agent below.
BELOW = Pending(
    kind=PendingKind.APPROVAL,
    run_id="order-17.t6.2",
    call_id="t1.0",
    tool="pay",
    arguments={"cents": 1700},
    reason="the rule two_of(untrusted, private, sends_out)",
    expires_at=1700604800.0,
    digest="aa",
    error=MISFIT,
)
SURE = Question(key="q1", message="Sure?", schema={"type": "object", "properties": {"ok": {"type": "boolean"}}})
HOSTED = HostedContent(
    calls=(
        HostedCall(tool="web_search", id="ws_1", arguments='{"query": "euro"}', output='[{"url": "https://a.eu"}]'),
        HostedCall(tool="crm.find", id="mcp_1", error="no such customer"),
    ),
    citations=(
        Citation(url="https://a.eu", title="Euro", quote="17 €", start=0, end=9),
        Citation(file_id="file_1", title="terms.txt"),
    ),
    files=(HostedFile(id="file_2", name="sums.csv", container="cntr_1"),),
    images=(ImagePart(url="data:image/png;base64,AAAA"),),
    container="cntr_1",
    labels=(Label.UNTRUSTED, Label.PUBLIC),
)
PLANNED = ToolCall(id="p1", name="agentfsm.plan", arguments='{"steps": [{"id": 1, "tool": "pay"}]}', key="k:p1")
STEP = ToolCall(id="p1.1", name="pay", arguments="{}", key="k:p1.1")
ANSWERED = ToolResult(
    call_id="p1.2",
    tool="agentfsm.question",
    outcome=Outcome.DONE,
    content="The first.",
    index=2,
    spent=(
        Spending(purpose=Purpose.PLAN_QUESTION, usage=Usage(input_tokens=40, output_tokens=3), model="small"),
        Spending(purpose=Purpose.TOOL, usage=Usage(cost_usd=0.005)),
        Spending(purpose=Purpose.AGENT),
        Spending(purpose=Purpose.TURN),
    ),
    labels=(Label.PRIVATE, Label.CONFIDENTIAL, Label.RESTRICTED),
    sandbox="bubblewrap",
    fence="untrusted-5f0c81d2a7be",
    child=AgentCost(
        agent="clerk", run_id="order-17.p1.2", usage=Usage(input_tokens=40), usd=None, turns=1, counted=("pay", "pay")
    ),
)
# What requests beside the turns have spent.
SMALL = Usage(input_tokens=90, output_tokens=9)
REMEMBERED = RecalledItem(
    id="order-16.1",
    kind="preference",
    text="Ann drinks green tea.",
    score=0.93,
    valid_from=1699990000.0,
    source="order-16",
    labels=(Label.PRIVATE, Label.INTERNAL),
)
ESCALATED = TierChoice(
    name="large",
    reason="escalated from small: refusal",
    spent=(Spending(purpose=Purpose.ROUTING, usage=Usage(input_tokens=60, output_tokens=1), model="small"),),
)
KEPT = TierChoice(name="large", reason="kept")
EARLIER = AnswerSource(run_id="order-15", at=1699990000.0, labels=(Label.INTERNAL,))
FURTHER = (
    *FORMAT_3.further,
    e.Reminded(text="No refunds today.", prompts=("today@1.0#0123456789ab",)),
    e.Recalled(
        query="Which tea?",
        items=(REMEMBERED,),
        fault="the embedder is away",
        usage=SMALL,
        purpose=Purpose.MEMORY,
        model="embedder",
        layers=WindowLayers(instructions=1600, memory=2400, history=2400, reserve=1600),
        left_out=2,
    ),
    e.Judged(verdict=Verdict(action=Action.ACCEPT, passed=True)),
    e.Planned(
        call=PLANNED,
        reason="step 1 failed",
        usage=SMALL,
        purpose=Purpose.PLAN,
        model="small",
        request="0a1b2c3d-4e5f6071",
    ),
    e.PlanDropped(reason="No plan is needed.", usage=SMALL, purpose=Purpose.PLAN, model="small"),
    e.StepsReady(calls=(STEP,), usage=SMALL, purpose=Purpose.PLAN, model="small"),
    e.ToolsOffered(tools=("pay",), how="two_stage", usage=SMALL, purpose=Purpose.TOOL_SELECTION, model="small"),
    e.Judged(verdict=Verdict(action=Action.ACCEPT), usage=SMALL, purpose=Purpose.JUDGE, model="small"),
    e.Compacted(
        start=0,
        head=(),
        tokens_before=9,
        tokens_after=9,
        why="full",
        usage=SMALL,
        purpose=Purpose.SUMMARY,
        model="small, large",
    ),
    e.ModelFaltered(error="the last reply said nothing", usage=SMALL, purpose=Purpose.LAST_ANSWER),
    e.ToolFinished(result=ANSWERED),
    e.ApprovalGiven(call_id="t5.0", by="bob", arguments='{"cents":900}', key="9f3c61d07a5be284:t5.0:4ae81572"),
    e.Paused(message="5 workers died while they drove it", kind=PendingKind.CRASH),
    e.LimitReached(reason=StopReason.MAX_TURNS, message="20 of 20 turns used", note="Answer now."),
    e.ToolFinished(
        result=ToolResult(
            call_id="p1.2",
            tool="load",
            outcome=Outcome.SKIPPED,
            content="skipped: its condition is false",
            error_type=ErrorType.CONDITION,
        )
    ),
    e.ToolFinished(
        result=ToolResult(
            call_id="p1.3", tool="mood", outcome=Outcome.DONE, content='"neutral"', error_type=ErrorType.FALLBACK
        )
    ),
    e.Failed(reason=StopReason.STEP_FAILED, message="step load failed (failed: KeyError)"),
    e.ToolStarted(call_id="t6.0", repeatable=True, read_only=True, since=1700000200.5, attempts=2),
    e.ToolStarted(call_id="t6.1", labels=(Label.SENDS_OUT, Label.IRREVERSIBLE)),
    e.Guarded(
        call_id="t6.1",
        verdict=GuardVerdict.ASK,
        rule="no(untrusted, irreversible)",
        reason="pay cannot be undone, and the run has read untrusted content",
        labels=(LabelSource(label=Label.UNTRUSTED, run_id="order-17", version=4, call_id="t1.0", name="read_mail"),),
        digest="aa",
        counts=True,
    ),
    e.ToolCutOff(call_id="t6.0", started_at=1700000200.5, duration_s=0.25, undone=True),
    e.ApprovalAsked(call_id="t6.1", expires_at=1700604800.0, description="Pays 17.00 €.", digest="aa", error=MISFIT),
    e.ToolPaused(call_id="t6.2", pending=(BELOW,)),
    e.InputGiven(call_id="t6.0", by="ann", answers={"q1": {"ok": True}}, questions=(SURE,), state='{"asked": []}'),
    e.AnswerDrafted(
        message=AssistantMessage(
            text="17.00 € is",
            native=NativeReply(provider="anthropic", content='[{"type": "text", "text": "17.00 € is"}]'),
            thinking="I look it up.",
            hosted=HOSTED,
            paused=True,
        ),
        filtered=("exit_filter(redact): 1 email",),
        purpose=Purpose.LAST_ANSWER,
    ),
    e.ToolsChosen(message=AssistantMessage(calls=(STEP,)), filtered=("exit_filter(redact): 1 phone",)),
    e.AnswerGiven(message=AssistantMessage(text="[EMAIL_REDACTED]"), filtered=("exit_filter(redact): 1 email",)),
    e.ToolsChosen(message=AssistantMessage(calls=(STEP,)), usage=SMALL, model="large", tier=ESCALATED),
    e.ToolsChosen(message=AssistantMessage(calls=(STEP,)), served_model="large-2026-11-20"),
    e.AnswerDrafted(message=AssistantMessage(text="It is paid."), served_model="large-2026-11-20"),
    e.AnswerGiven(message=AssistantMessage(text="It is paid."), served_model="large-2026-11-20"),
    e.AnswerDrafted(message=AssistantMessage(text="It is paid."), tier=KEPT, answered_from=EARLIER),
    e.AnswerGiven(
        message=AssistantMessage(text="It is paid."), usage=Usage(cached_replies=1), tier=KEPT, answered_from=EARLIER
    ),
)

FORMAT_4 = Format(
    number=4,
    header=HEADER,
    journal=FORMAT_2.journal,
    further=FURTHER,
    items=(
        *FORMAT_3.items,
        Input(parts=(TextPart(text="See the mail below."),), labels=(Label.UNTRUSTED,)),
    ),
    added=frozenset(
        {
            (Header, "nonce"),
            *((Header, name) for name in ("tenant", "clearance", "release", "arms", "traceparent")),
            (Fingerprint, "config"),
            (Fingerprint, "prompts"),
            (Header, "instructions"),
            (UserMessage, "origin"),
            e.Reminded,
            *((e.Reminded, name) for name in ("text", "prompts")),
            (Verdict, "passed"),
            (ToolResult, "spent"),
            Spending,
            *((Spending, name) for name in ("purpose", "usage", "model")),
            *Purpose,
            *Label,
            LabelSource,
            *((LabelSource, name) for name in ("label", "run_id", "version", "call_id", "name")),
            (Header, "labels"),
            (Input, "labels"),
            (HostedContent, "labels"),
            e.Guarded,
            *((e.Guarded, name) for name in ("call_id", "verdict", "rule", "reason", "labels", "digest", "counts")),
            *GuardVerdict,
            (AgentCost, "counted"),
            (Pending, "reason"),
            *((kind, "tier") for kind in (e.ToolsChosen, e.AnswerGiven, e.AnswerDrafted)),
            *((kind, "served_model") for kind in (e.ToolsChosen, e.AnswerGiven, e.AnswerDrafted)),
            *((kind, "answered_from") for kind in (e.AnswerGiven, e.AnswerDrafted)),
            TierChoice,
            *((TierChoice, name) for name in ("name", "reason", "spent")),
            AnswerSource,
            *((AnswerSource, name) for name in ("run_id", "at", "labels")),
            (Usage, "cached_replies"),
            (ToolResult, "labels"),
            (ToolResult, "sandbox"),
            (ToolResult, "fence"),
            *((kind, "filtered") for kind in (e.ToolsChosen, e.AnswerGiven, e.AnswerDrafted)),
            (e.ToolStarted, "labels"),
            *((kind, "purpose") for kind in (e.AnswerDrafted, e.ModelFaltered)),
            *((kind, name) for kind in (e.Compacted, e.ToolsOffered, e.Judged) for name in ("purpose", "model")),
            e.Recalled,
            *((e.Recalled, name) for name in ("query", "items", "fault", "usage", "purpose", "model")),
            *((e.Recalled, name) for name in ("layers", "left_out")),
            *((WindowLayers, name) for name in ("instructions", "memory", "history", "reserve")),
            e.Planned,
            e.PlanDropped,
            e.StepsReady,
            *((e.Planned, name) for name in ("call", "reason", "usage", "purpose", "model", "request")),
            *((e.PlanDropped, name) for name in ("reason", "usage", "purpose", "model")),
            *((e.StepsReady, name) for name in ("calls", "usage", "purpose", "model")),
            (e.ApprovalGiven, "key"),
            (e.ApprovalAsked, "error"),
            (Pending, "error"),
            (e.Paused, "kind"),
            PendingKind.CRASH,
            ErrorType.CONDITION,
            ErrorType.FALLBACK,
            StopReason.STEP_FAILED,
            e.LimitReached,
            e.ToolCutOff,
            (e.ToolStarted, "read_only"),
            (e.ToolStarted, "since"),
            (e.ToolStarted, "attempts"),
            (e.InputGiven, "questions"),
            (e.InputGiven, "state"),
            (AssistantMessage, "thinking"),
            (AssistantMessage, "hosted"),
            (AssistantMessage, "paused"),
            HostedContent,
            HostedCall,
            Citation,
            HostedFile,
            *((HostedContent, name) for name in ("calls", "citations", "files", "images", "container")),
            *((HostedCall, name) for name in ("tool", "id", "arguments", "output", "error")),
            *((Citation, name) for name in ("url", "title", "file_id", "quote", "start", "end")),
            *((HostedFile, name) for name in ("id", "name", "container")),
        }
    ),
    closed_sets=(
        Action,
        ErrorType,
        InputKind,
        Label,
        MessageOrigin,
        Outcome,
        PendingKind,
        Priority,
        Purpose,
        StopReason,
    ),
)
