"""The trace of a run, derived from its journal.

Each span ends with one event, and is computed from that event and the run before and after it. So the spans of a run
are the same when they are exported while it runs, by several workers one after the other, or years later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.header import Header
from agentfsm.core.messages import AssistantMessage, Outcome, ToolResult, UserMessage
from agentfsm.core.run import Run, begin_run
from agentfsm.core.sensitive_text import mask_sensitive
from agentfsm.core.trace_context import (
    TraceContext,
    call_context,
    caller_context,
    event_context,
    hash_run_span_id,
    run_context,
    wait_context,
)
from agentfsm.core.usage import Purpose, Usage
from agentfsm.core.value import Value
from agentfsm.telemetry import attribute_names as n
from agentfsm.telemetry.measurements import find_gap

Content: TypeAlias = Literal["none", "redacted", "full"]
"""Texts of a run that its spans have: "none", "redacted" (with personal data and secrets replaced), or "full"."""

CONTENTS: Final = get_args(Content)
Attribute: TypeAlias = "str | bool | int | float | tuple[str, ...]"


@attrs.frozen(kw_only=True)
class TraceSpan(Value):
    """A part of a run, with its beginning and its end."""

    name: str
    """Operation, and what it is about: "chat gpt-5.4-mini", "execute_tool search"."""

    context: TraceContext
    """Trace and id of the span."""

    parent: str | None
    """Id of the span that contains it; None for the span of a run that was given no trace."""

    started_at: float
    """Time at which it began, seconds since 1970."""

    ended_at: float
    """Time at which it ended, seconds since 1970."""

    attributes: Mapping[str, Attribute] = attrs.field(factory=dict)
    """Attributes by name, see `attribute_names`."""

    error: str | None = None
    """Description of the failure; None if there was none."""

    is_client: bool = False
    """Whether it is a request to another service, such as a model."""

    links: tuple[TraceContext, ...] = ()
    """Spans that this one is related to: for a fork, that of the run that it was forked from, in the same trace or in
    its own.
    """

    @property
    def duration_s(self) -> float:
        """Seconds from its beginning to its end."""
        return self.ended_at - self.started_at


def trace_of(
    header: Header, events: Iterable[e.Event], *, content: Content = "none", before: Run[Any] | None = None
) -> tuple[TraceSpan, ...]:
    """Return the spans of a run, in the order of their ends. The last is that of the run itself, once it is over.

    Args:
        header: Header of the run.
        events: Events of its journal, from the first on.
        content: Texts that the spans have. Default "none".
        before: The run that it continues, if `header.after` names one and the content is wanted.
    """
    run, spans = begin_run(header, before), list[TraceSpan]()
    for event in events:
        then, run = run, run.apply(event)
        spans += list_spans(then, event, run, content=content)
    return tuple(spans)


def list_spans(before: Run[Any], event: e.Event, run: Run[Any], *, content: Content = "none") -> list[TraceSpan]:
    """Return the spans that end with an event.

    Args:
        before: The run before the event.
        event: The event.
        run: The run after it.
        content: Texts that the spans have. Default "none".
    """
    if run.version <= run.header.forked_at:
        return []  # the run that it was forked from has these spans
    if type(event) in _SILENT and not run.is_over and find_gap(before, event) is None:
        return []  # most events: the rest would be in vain
    builder = _SpanBuilder(before, event, run, _WRITERS[content])
    return [*builder.list_gap(), *builder.list_work(), *builder.list_end()]


def _write_nothing(_text: str) -> None:
    return None


_WRITERS: Final[Mapping[Content, Callable[[str], str | None]]] = {
    "none": _write_nothing,
    "redacted": mask_sensitive,
    "full": str,
}


@attrs.define
class _SpanBuilder:
    """Builds the spans of one event."""

    before: Run[Any]
    event: e.Event
    run: Run[Any]
    write: Callable[[str], str | None]
    """Returns a text as it is exported; None to leave it out."""

    @property
    def header(self) -> Header:
        return self.run.header

    def write_messages(self, messages: Sequence[Any]) -> str | None:
        """Return messages as they are exported; None to leave them out."""
        if self.write is _write_nothing:
            return None
        written = [each for message in messages for each in _iter_message(message)]
        return self.write(json.dumps(written, ensure_ascii=False))

    def build(self, name: str, start: float, attributes: Mapping[str, object], **more: Any) -> TraceSpan:
        return TraceSpan(
            name=name,
            context=more.pop("context", None) or event_context(self.header, self.run.version),
            parent=hash_run_span_id(self.header.id),
            started_at=start,
            ended_at=more.pop("end", self.event.at),
            attributes={n.RUN: self.run.id, n.VERSION: self.run.version, **_without_empty(attributes)},
            **more,
        )

    # Gaps between two events.

    def list_gap(self) -> list[TraceSpan]:
        """Return the time before the event during which no worker executed the run, if there was such a time."""
        if (gap := find_gap(self.before, self.event)) is None:
            return []
        calls = tuple([item.call_id for item in self.before.pending if item.call_id])
        context = wait_context(self.header, self.run.version)
        attributes = {n.WAIT: gap.kind, n.TOOL_CALL_ID: calls}
        return [self.build(f"wait {gap.kind}", gap.started_at, attributes, context=context, end=gap.ended_at)]

    # Work.

    def list_work(self) -> list[TraceSpan]:
        """Return the spans of what the event reports."""
        event = self.event
        match event:
            case e.AnswerGiven() | e.AnswerDrafted() if event.answered_from is not None:
                return [self._build_request(n.REPEAT_ANSWER, {n.ANSWERED_FROM: event.answered_from.run_id})]
            case e.ToolsChosen() | e.AnswerGiven() | e.AnswerDrafted():
                return [self._build_chat(event)]
            case e.ModelFaltered() | e.AttemptFailed():
                return [self._build_request(n.CHAT, error=event.error)]
            case e.ToolFinished():
                return [self._build_call(event.result)]
            case e.LimitReached() | e.Failed():
                return [self._build_cut_call(entry) for entry in self.before.open if entry.phase is Phase.RUNNING]
            case e.Planned() | e.PlanDropped():
                return [self._build_request(n.PLAN)]
            case e.Recalled():
                found = {
                    "agentfsm.memory.items": len(event.items),
                    "agentfsm.memory.profile": len(event.profile or ()),
                    "agentfsm.memory.fault": event.fault,
                }
                return [self._build_request(n.SEARCH_MEMORY, found)]
            case _ if type(event) in _SILENT:
                return []
        return [self._build_request(_SNAKE.sub("_", type(event).__name__).lower())]

    def _build_request(
        self,
        operation: str,
        more: Mapping[str, object] | None = None,
        error: str | None = None,
    ) -> TraceSpan:
        event = self.event
        usage: Usage = getattr(event, "usage", Usage())
        model: str = getattr(event, "model", "")
        purpose: Purpose | None = getattr(event, "purpose", None)
        is_request = purpose is not None or operation == n.CHAT
        own = self._own_model()
        attributes = {
            n.OPERATION: operation,
            n.EVENT: type(self.event).__name__,
            n.TURN: self.run.turn,
            n.PURPOSE: None if purpose is None else str(purpose),
            **(_usage_attributes(usage, own, model or own) if is_request else {}),
            **(more or {}),
        }
        name = f"{operation} {model or own}".strip() if is_request else operation
        failed = None if error is None else self.write(error) or "the model request failed"
        start = self.event.at - self.event.took_s
        return self.build(name, start, attributes, is_client=is_request, error=failed)

    def _build_chat(self, event: e.ToolsChosen | e.AnswerGiven | e.AnswerDrafted) -> TraceSpan:
        message = event.message
        decision = "TOOL_CALL" if message.calls else "FINAL_ANSWER"
        shown = () if self.write is _write_nothing else self.before.shown
        return self._build_request(
            n.CHAT,
            {
                n.DECISION: decision,
                n.TIER: None if event.tier is None else event.tier.name,
                n.TIER_REASON: None if event.tier is None else event.tier.reason,
                n.INPUT_MESSAGES: self.write_messages(shown),
                n.OUTPUT_MESSAGES: self.write_messages([message]),
                "agentfsm.hosted_calls": tuple([call.tool for call in message.hosted.calls]) if message.hosted else (),
            },
        )

    def _build_call(self, result: ToolResult) -> TraceSpan:
        entry = next((each for each in self.before.open if each.call.id == result.call_id), None)
        start = result.started_at or (entry.started_at if entry is not None else 0.0) or self.event.at
        end = start + result.duration_s if result.duration_s else max(start, self.event.at if entry is None else start)
        spent = result.usage
        attributes = {
            n.OPERATION: n.EXECUTE_TOOL,
            n.TOOL_NAME: result.tool,
            n.TOOL_CALL_ID: result.call_id,
            n.TOOL_TYPE: "function",
            n.TURN: self.run.turn,
            n.OUTCOME: str(result.outcome),
            n.ATTEMPTS: result.attempts,
            n.ERROR_TYPE: None if result.error_type is None else str(result.error_type),
            n.KEY: None if entry is None else entry.call.key,
            n.LABELS: tuple(map(str, result.labels)),
            n.COST: None if spent is None else spent.cost_usd,
            n.TOOL_ARGUMENTS: None if entry is None else self.write(entry.call.arguments),
            n.TOOL_RESULT: self.write(result.content),
        }
        failed = None if result.outcome is Outcome.DONE else self.write(result.content) or str(result.outcome)
        context = call_context(self.header, result.call_id)
        return self.build(f"{n.EXECUTE_TOOL} {result.tool}", start, attributes, context=context, end=end, error=failed)

    def _build_cut_call(self, entry: Any) -> TraceSpan:
        """Return the span of a call that the end of the run cut off."""
        attributes = {
            n.OPERATION: n.EXECUTE_TOOL,
            n.TOOL_NAME: entry.call.name,
            n.TOOL_CALL_ID: entry.call.id,
            n.TURN: self.run.turn,
            n.OUTCOME: "cut_off",
            n.ATTEMPTS: entry.attempts,
            n.KEY: entry.call.key,
            n.TOOL_ARGUMENTS: self.write(entry.call.arguments),
        }
        name, context = f"{n.EXECUTE_TOOL} {entry.call.name}", call_context(self.header, entry.call.id)
        start = entry.started_at or self.event.at
        end = start + entry.duration_s if entry.duration_s else max(start, self.event.at)
        return self.build(name, start, attributes, context=context, end=end, error="cut off")

    # The run.

    def list_end(self) -> list[TraceSpan]:
        """Return the span of the run, if the event ends it."""
        run, header = self.run, self.header
        if not run.is_over:
            return []
        caller = caller_context(header)
        usage = run.usage
        model = self._own_model()
        is_done = str(run.stop_reason) == "completed"
        attributes = {
            n.OPERATION: n.INVOKE_AGENT,
            n.AGENT_NAME: header.agent,
            n.AGENT_VERSION: header.agent_version,
            n.CONVERSATION: header.session,
            n.AFTER: header.after,
            **_usage_attributes(usage, model, ""),
            n.TURNS: run.turn,
            n.TOOL_CALLS: run.tool_call_count,
            n.ACTIVE_S: round(run.duration_s, 6),
            n.STATE: str(run.state),
            n.STOP_REASON: str(run.stop_reason),
            n.PROMPTS: tuple([f"{name}@{version}" for name, version in header.fingerprint.prompts.items()]),
            n.RELEASE: header.release,
            n.ARMS: tuple([f"{name}={arm}" for name, arm in header.arms.items()]),
            n.TENANT: header.tenant,
            n.LABELS: tuple(map(str, run.labels)),
            n.TARGET: header.target,
            n.USER: None if header.user is None else self.write(header.user),
            n.INPUT_MESSAGES: self.write_messages([UserMessage(parts=header.prompt)]),
            n.OUTPUT_MESSAGES: self.write_messages(
                [AssistantMessage(text=run.partial or (run.answer if is_done else ""))]
            ),
        }
        failed = None if is_done else self.write(run.stop_message) or str(run.stop_reason)
        return [
            TraceSpan(
                name=f"{n.INVOKE_AGENT} {header.agent}".strip(),
                context=run_context(header),
                parent=None if caller is None else caller.span_id,
                started_at=header.created_at,
                ended_at=max(header.created_at, run.updated_at),  # by another clock, which may be behind
                attributes=_without_empty({n.RUN: run.id, **attributes}),
                error=failed,
                links=() if header.forked_from is None else (run_context(attrs.evolve(header, id=header.forked_from)),),
            )
        ]

    def _own_model(self) -> str:
        return (self.run.fingerprint or self.header.fingerprint).model


# Events without a span of their own: they take no time, or a span of another event covers them.
_SILENT: Final = frozenset({e.Observed, e.ToolStarted, e.ToolsReturned, e.Continued, e.Accepted, e.Resumed, e.Paused})
_SNAKE: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


def _without_empty(attributes: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value not in (None, "", ())}


def _usage_attributes(usage: Usage, asked: str, replied: str) -> dict[str, object]:
    return {
        n.REQUEST_MODEL: asked,
        n.RESPONSE_MODEL: replied,
        n.INPUT_TOKENS: usage.input_tokens,
        n.OUTPUT_TOKENS: usage.output_tokens,
        n.CACHED_TOKENS: usage.cached_tokens or None,
        n.CACHE_WRITE_TOKENS: usage.cache_write_tokens or None,
        n.REASONING_TOKENS: usage.reasoning_tokens or None,
        n.COST: usage.cost_usd,
        n.CACHED_REPLIES: usage.cached_replies or None,
    }


def _iter_message(message: Any) -> Iterator[dict[str, object]]:
    if isinstance(message, ToolResult):
        part = {"type": "tool_call_response", "id": message.call_id, "response": message.content}
        yield {"role": "tool", "parts": [part]}
        return
    if isinstance(message, AssistantMessage):
        parts: list[dict[str, object]] = [{"type": "text", "content": message.text}] if message.text else []
        for call in message.calls:
            arguments = json.loads(call.arguments)
            parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments})
        yield {"role": "assistant", "parts": parts}
        return
    role = "user" if isinstance(message, UserMessage) else "system"
    given = getattr(message, "parts", None)
    texts = [message.text] if given is None else [getattr(part, "text", f"[{type(part).__name__}]") for part in given]
    yield {"role": role, "parts": [{"type": "text", "content": text} for text in texts]}
