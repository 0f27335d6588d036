"""Format 5: what came after format 4, and all that was there before, as it is written now.

It stays open until the next release: what is added before that is added to its files.
"""

import attrs

from agentfsm import (
    AssistantMessage,
    ErrorType,
    Label,
    Outcome,
    Pending,
    PendingKind,
    Purpose,
    StopReason,
    TextPart,
    ToolResult,
    Usage,
)
from agentfsm.core import events as e
from agentfsm.core.claims import Claim
from agentfsm.core.events import PlanKind
from agentfsm.core.header import Fingerprint, Header
from agentfsm.core.inbox import Approve, Input
from agentfsm.core.labels import LabelSource, ToolKind
from agentfsm.core.messages import NativeReply
from agentfsm.core.usage import CacheReport, TierChoice
from agentfsm.guards import GuardVerdict
from tests.support.format_4 import FORMAT_4, PLANNED, REMEMBERED
from tests.support.formats import Format

FURTHER = (
    *FORMAT_4.further,
    e.Planned(call=PLANNED, kind=PlanKind.COMPENSATION, continues=1, maker="flow"),
    e.Planned(call=PLANNED, kind=PlanKind.REPLAN, continues=1),
    e.ToolStarted(
        call_id="t6.3", repeatable=True, kind=ToolKind.AGENT, on_unknown="check", key="order-17", parameters="ab12cd"
    ),
    e.ToolLost(call_id="t6.3", reason="pay is not permitted in this run"),
    e.ToolLost(call_id="p2.3", reason="it has not started", lacks_tool=True),
    e.ApprovalAsked(call_id="p1", expires_at=1700604800.0, digest="aa", tools={"pay": "bb"}),
    e.ApprovalGiven(call_id="p1", by="ann", digest="aa"),
    e.ApprovalAsked(call_id="p1", expires_at=1700604801.0, digest="ab", by="ann", arguments="{}", key="order-16:p1:cd"),
    e.ApprovalGiven(call_id="p1", by="bob", digest="ab"),
    e.Observed(inputs=(Input(parts=(TextPart(text="Now."),), by="ann"),)),
    e.ApprovalGiven(call_id="t6.1", by="ann", digest="cc", allowance='allow(pay, to="Bob") of r1/t2.0'),
    e.Resumed(renamed={"refund": "give_back"}),
    e.Resumed(fingerprint=Fingerprint(model="gpt", skills={"pdf": "ab12cd"}), changes=("skill pdf is new",)),
    e.AttemptFailed(
        error="the connection broke",
        usage=Usage(input_tokens=90, output_tokens=12_000, cost_usd=0.12, estimated=True),
        request="ab12",
        purpose=Purpose.SUMMARY,
        tier=TierChoice(name="small", reason="rule"),
    ),
    e.ToolsChosen(
        message=AssistantMessage(
            text="so",
            native=NativeReply(provider="anthropic", content='[{"type":"thinking"}]', model="claude", prefix="ab12cd"),
        ),
        usage=Usage(input_tokens=9, output_tokens=2),
    ),
    e.ToolFinished(
        result=ToolResult(
            call_id="t6.4",
            tool="pay",
            content="withheld: pay({}) would have been called now.",
            outcome=Outcome.SKIPPED,
            error_type=ErrorType.WITHHELD,
        )
    ),
    e.AnswerGiven(
        message=AssistantMessage(text="kept"),
        usage=Usage(input_tokens=9, output_tokens=2, cache_write_tokens=8, cache_write_1h_tokens=5),
    ),
    e.Guarded(
        call_id="t6.5",
        verdict=GuardVerdict.ASK,
        rule="no_leaks()",
        labels=(LabelSource(label=Label.USER_DATA, run_id="r0", name="prompt", owner="ann"),),
    ),
    e.Failed(reason=StopReason.STOP_CONDITION, message="the stop condition is_stuck holds"),
    e.Recalled(query="tea", profile=(REMEMBERED,)),
    e.ToolPaused(
        call_id="t6.6",
        pending=(Pending(kind=PendingKind.LOGIN, run_id="order-17", call_id="t6.6", tool="order", digest="dd"),),
    ),
    e.ToolPaused(
        call_id="t6.6",
        pending=(Pending(kind=PendingKind.TASK, run_id="order-17", call_id="t6.6", tool="jobs__pack"),),
        state='{"task": {"id": "17"}}',
    ),
    e.ToolsChosen(
        message=AssistantMessage(
            text="so",
            cache_report=CacheReport(
                provider="anthropic", response_id="msg_17", reason="tools_changed", missed_tokens=9_000
            ),
        ),
    ),
    e.ChildReported(
        call_id="t6.7",
        pending=(Pending(kind=PendingKind.QUESTION, run_id="order-17.t6.7", call_id="t1.0", tool="ask_user"),),
    ),
    e.ChildReported(
        call_id="t6.7",
        result=ToolResult(call_id="t6.7", tool="researcher", outcome=Outcome.DONE, content="Three sources agree."),
    ),
    e.Guarded(call_id="t6.8", verdict=GuardVerdict.REFUSE, rule="before(pay, verify)", reason="none", first="verify"),
    e.Accepted(findings=("the rule eventually(unlock, after=lock): unlock has to succeed after lock",)),
    e.Failed(reason=StopReason.TIMEOUT, message="too late", findings=("unlock has to succeed after lock",)),
    e.AnswerDrafted(
        message=AssistantMessage(text="Both are paid."),
        claims=(
            Claim(tool="pay", arguments={"cents": 5}, call_id="t6.1"),
            Claim(tool="pay", arguments={"cents": 6}, fault="the call t6.1 differs in cents"),
        ),
    ),
)

FORMAT_5 = Format(
    number=5,
    header=attrs.evolve(
        FORMAT_4.header, caller="order-16/t1.0", withhold=True, forked_by="ann", purpose="eval", format=5
    ),
    journal=FORMAT_4.journal,
    further=FURTHER,
    items=(*FORMAT_4.items, Approve(call_id="p1", by="ann", arguments="{}", digest="aa", edit_only=True)),
    added=frozenset(
        {
            *((Header, name) for name in ("caller", "withhold", "forked_by", "purpose")),
            *((e.Planned, name) for name in ("kind", "continues", "maker")),
            *((e.ToolStarted, name) for name in ("kind", "on_unknown", "key", "parameters")),
            *((e.ToolLost, name) for name in ("reason", "lacks_tool")),
            *((NativeReply, name) for name in ("model", "prefix")),
            ErrorType.WITHHELD,
            e.AttemptFailed,
            e.ChildReported,
            (e.AnswerDrafted, "claims"),
            *((Claim, name) for name in ("tool", "arguments", "call_id", "fault")),
            *((e.ApprovalAsked, name) for name in ("tools", "by", "arguments", "key")),
            (Input, "by"),
            (Approve, "edit_only"),
            (e.ApprovalGiven, "digest"),
            (e.ApprovalGiven, "allowance"),
            (e.Resumed, "renamed"),
            (e.Recalled, "profile"),
            (LabelSource, "owner"),
            (e.Guarded, "first"),
            (e.Accepted, "findings"),
            (e.Failed, "findings"),
            (Usage, "cache_write_1h_tokens"),
            (Fingerprint, "skills"),
            (AssistantMessage, "cache_report"),
            Label.USER_DATA,
            StopReason.STOP_CONDITION,
            PendingKind.LOGIN,
            PendingKind.TASK,
        }
    ),
    closed_sets=(*FORMAT_4.closed_sets, PlanKind, ToolKind),
)
