"""The trace of a run, derived from its journal.

Each span ends with one event, and is computed from that event and the run before and after it. So the spans of a run
are the same when they are exported while it runs, by several workers one after the other, or years later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.header import Header
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, Outcome, ToolResult, UserMessage
from agentfsm.core.run import Run, begin_run
from agentfsm.core.sensitive_text import mask_sensitive
from agentfsm.core.trace_context import (
    TraceContext,
    call_context,
    caller_context,
    event_context,
    hash_run_span_id,
    rating_context,
    run_context,
    wait_context,
)
from agentfsm.core.usage import Purpose, Usage
from agentfsm.core.value import Value
from agentfsm.engine.deciders.judge import NOT_JUDGED
from agentfsm.engine.stop_requests import CUT_OFF_ERROR
from agentfsm.ports.stored import Feedback
from agentfsm.telemetry import attribute_names as n
from agentfsm.telemetry.measurements import find_gap
from agentfsm.telemetry.request_facts import RequestFacts, describe_settings

Content: TypeAlias = Literal["none", "redacted", "full"]
"""Texts of a run that its spans have: "none", "redacted" (with personal data and secrets replaced), or "full"."""

CONTENTS: Final = get_args(Content)
Attribute: TypeAlias = "str | bool | int | float | tuple[str, ...]"

# Maximum size of a text in an attribute as UTF-8, bytes: collectors refuse or cut what is much larger.
MAX_ATTRIBUTE_BYTES: Final = 64 * 1024
_CUT_MARK: Final = "... [cut]"


@attrs.frozen(kw_only=True)
class SpanEvent(Value):
    """Something at a moment of a span: an exception, or the result of an evaluation."""

    name: str
    """Name of the event, see `attribute_names`."""

    at: float
    """Its time, seconds since 1970."""

    attributes: Mapping[str, Attribute]
    """Attributes by name."""


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
    """Attributes by name, see `attribute_names`. No text is larger than `MAX_ATTRIBUTE_BYTES`."""

    error: str | None = None
    """Description of the failure; None if there was none. `attributes` has its kind, as `error.type`."""

    events: tuple[SpanEvent, ...] = ()
    """The exception of a failure, and results of evaluations."""

    is_client: bool = False
    """Whether it is a request to another service, such as a model."""

    links: tuple[TraceContext, ...] = ()
    """Spans that this one is related to: those of the runs that a run was forked from, and that it continues."""

    @property
    def duration_s(self) -> float:
        """Seconds from its beginning to its end."""
        return self.ended_at - self.started_at


_NO_TRACES: Final[Mapping[str, str]] = {}


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
    traces = {} if before is None else {before.id: before.header.traceparent}
    for event in events:
        then, run = run, run.apply(event)
        spans += list_spans(then, event, run, content=content, traces=traces)
    return tuple(spans)


def list_spans(
    before: Run[Any],
    event: e.Event,
    run: Run[Any],
    *,
    content: Content = "none",
    facts: RequestFacts | None = None,
    traces: Mapping[str, str] = _NO_TRACES,
) -> list[TraceSpan]:
    """Return the spans that end with an event.

    Args:
        before: The run before the event.
        event: The event.
        run: The run after it.
        content: Texts that the spans have. Default "none".
        facts: The model request that ended with the event, from the process that sent it. Default None: what the
            journal has.
        traces: Values of `Header.traceparent` of other runs, by their ids, for a link to the run that this one
            continues. Default: none is known.
    """
    if run.version <= run.header.forked_at:
        return []  # the run that it was forked from has these spans
    if type(event) in _SILENT and not run.is_over and find_gap(before, event) is None:
        return []  # most events: the rest would be in vain
    builder = _SpanBuilder(before, event, run, _WRITERS[content], facts, traces)
    return [*builder.list_gap(), *builder.list_work(), *builder.list_end()]


def _write_nothing(_text: str) -> None:
    return None


_WRITERS: Final[Mapping[Content, Callable[[str], str | None]]] = {
    "none": _write_nothing,
    "redacted": mask_sensitive,
    "full": str,
}


class _Failure(NamedTuple):
    """The failure of a span."""

    kind: str
    """Its kind, of few values, for `error.type`."""

    text: str
    """Its description, which is content."""

    exception: str = ""
    """Class of the exception; empty if it is not known."""


@attrs.define
class _SpanBuilder:
    """Builds the spans of one event."""

    before: Run[Any]
    event: e.Event
    run: Run[Any]
    write: Callable[[str], str | None]
    """Returns a text as it is exported; None to leave it out."""

    facts: RequestFacts | None
    traces: Mapping[str, str]

    @property
    def header(self) -> Header:
        return self.run.header

    def write_messages(self, messages: Sequence[Any]) -> str | None:
        """Return messages as they are exported, the oldest left out if not all fit; None without content."""
        if self.write is _write_nothing:
            return None
        texts, room = list[str](), MAX_ATTRIBUTE_BYTES - MAX_ATTRIBUTE_BYTES // 64
        for index in range(len(messages) - 1, -1, -1):
            each = json.dumps(_write_message(messages[index]), ensure_ascii=False)
            room -= len(each.encode("utf-8", "replace")) + 2
            if room < 0 and texts:
                note = {"role": "system", "parts": [{"type": "text", "content": f"{index + 1} messages {_CUT_MARK}"}]}
                texts.append(json.dumps(note))
                break
            texts.append(each)
        return self.write(f"[{', '.join(reversed(texts))}]")

    def build(
        self, name: str, start: float, attributes: Mapping[str, object], failure: _Failure | None = None, **more: Any
    ) -> TraceSpan:
        """Return a span below that of the run.

        Args:
            name: Its name.
            start: Time at which it began.
            attributes: Its attributes; empty ones are left out.
            failure: Its failure, if it failed.
            **more: Further fields of the span.
        """
        fields = {
            "context": event_context(self.header, self.run.version),
            "parent": hash_run_span_id(self.header.id),
            "ended_at": self.event.at,
            **more,
        }
        given = {n.RUN: self.run.id, n.VERSION: self.run.version, **attributes}
        return self.finish(given, failure, name=name, started_at=start, **fields)

    def finish(self, attributes: Mapping[str, object], failure: _Failure | None, **fields: Any) -> TraceSpan:
        """Return a span with the attributes, the description and the exception of its failure, all within bounds."""
        if failure is not None:
            attributes = {**attributes, n.ERROR_TYPE: failure.kind}
            text = self.write(failure.text)
            told = _clean({n.EXCEPTION_TYPE: failure.exception or failure.kind, n.EXCEPTION_MESSAGE: text})
            happened = SpanEvent(name=n.EXCEPTION, at=fields["ended_at"], attributes=told)
            fields |= {"error": _cut(text or failure.kind), "events": (*fields.get("events", ()), happened)}
        return TraceSpan(attributes=_clean(attributes), **fields)

    # Gaps between two events.

    def list_gap(self) -> list[TraceSpan]:
        """Return the time before the event during which no worker executed the run, if there was such a time."""
        if (gap := find_gap(self.before, self.event)) is None:
            return []
        calls = tuple([item.call_id for item in self.before.pending if item.call_id])
        context = wait_context(self.header, self.run.version)
        attributes = {n.WAIT: gap.kind, n.TOOL_CALL_ID: calls}
        return [self.build(f"wait {gap.kind}", gap.started_at, attributes, context=context, ended_at=gap.ended_at)]

    # Work.

    def list_work(self) -> list[TraceSpan]:
        """Return the spans of what the event reports."""
        event = self.event
        match event:
            case e.AnswerGiven() | e.AnswerDrafted() if event.answered_from is not None:
                return [self._build_step(n.REPEAT_ANSWER, {n.ANSWERED_FROM: event.answered_from.run_id})]
            case e.ToolsChosen() | e.AnswerGiven() | e.AnswerDrafted():
                return [self._build_chat(event)]
            case e.ModelFaltered() | e.AttemptFailed():
                return [self._build_failed_request(event.error)]
            case e.ToolFinished():
                return [self._build_call(event.result)]
            case e.LimitReached() | e.Failed():
                cut = [self._build_cut_call(entry) for entry in self.before.open if entry.phase is Phase.RUNNING]
                is_refusal = isinstance(event, e.Failed) and self._is_refused_request(event)
                return [self._build_failed_request(event.message), *cut] if is_refusal else cut
            case e.Planned():
                return [self._build_step(n.PLAN)]
            case e.PlanDropped():
                return [self._build_step(n.PLAN, failure=_Failure("plan_dropped", event.reason))]
            case e.Recalled():
                found: dict[str, object] = {
                    n.MEMORY_ITEMS: len(event.items),
                    n.MEMORY_PROFILE: len(event.profile or ()),
                }
                failure = _Failure("memory_fault", event.fault) if event.fault else None
                return [self._build_step(n.SEARCH_MEMORY, found, failure)]
            case e.Judged():
                note = event.verdict.note
                failure = _Failure("not_judged", note) if note.startswith(NOT_JUDGED) else None
                events = self._list_evaluations(event.verdict)
                return [self._build_step("judged", failure=failure, events=events)]
            case e.Guarded():
                found = {n.TOOL_CALL_ID: event.call_id, n.GUARD_VERDICT: str(event.verdict), n.GUARD_RULE: event.rule}
                return [self._build_step("guarded", found)]
            case e.ToolLost():
                failure = _Failure("tool_lost", event.reason)
                return [self._build_step("tool_lost", {n.TOOL_CALL_ID: event.call_id}, failure)]
            case _ if type(event) in _SILENT:
                return []
        why = getattr(event, "how", "") or getattr(event, "why", "")
        found = {n.TOOL_CALL_ID: getattr(event, "call_id", None), n.REASON: self.write(why)}
        return [self._build_step(_SNAKE.sub("_", type(event).__name__).lower(), found)]

    def _build_step(
        self,
        operation: str,
        more: Mapping[str, object] | None = None,
        failure: _Failure | None = None,
        *,
        events: tuple[SpanEvent, ...] = (),
    ) -> TraceSpan:
        """Return the span of a request, or of another step of the run."""
        event, own = self.event, self._own_model()
        usage: Usage = getattr(event, "usage", Usage())
        model: str = getattr(event, "model", "")
        purpose: Purpose | None = getattr(event, "purpose", None)
        is_request = purpose is not None or operation == n.CHAT
        replied = "" if failure is not None else getattr(event, "served_model", "") or model or own
        attributes = {
            n.OPERATION: operation,
            n.EVENT: type(event).__name__,
            n.CONVERSATION: self.header.session,
            n.TURN: self.run.turn,
            n.PURPOSE: None if purpose is None else str(purpose),
            **(_usage_attributes(usage, own, replied) if is_request else {}),
            **(more or {}),
        }
        name = f"{operation} {model or own}".strip() if is_request else operation
        # Times are rounded to milliseconds, and the clock of the step before may have been ahead.
        start = min(max(event.at - event.took_s, self.before.updated_at), event.at)
        return self.build(name, start, attributes, failure, is_client=is_request, events=events)

    def _describe_request(self) -> dict[str, object]:
        """Return what is known about a request of a turn beside its reply."""
        known = describe_settings(self.header.settings)
        return known if self.facts is None else known | _clean(self.facts.to_attributes(self.write))

    def _build_chat(self, event: e.ToolsChosen | e.AnswerGiven | e.AnswerDrafted) -> TraceSpan:
        message = event.message
        shown = () if self.write is _write_nothing else self.before.shown
        return self._build_step(
            n.CHAT,
            {
                n.DECISION: "TOOL_CALL" if message.calls else "FINAL_ANSWER",
                n.TIER: None if event.tier is None else event.tier.name,
                n.TIER_REASON: None if event.tier is None else event.tier.reason,
                n.INPUT_MESSAGES: self.write_messages(shown),
                n.OUTPUT_MESSAGES: self.write_messages([message]),
                n.HOSTED_CALLS: tuple([call.tool for call in message.hosted.calls]) if message.hosted else (),
                **self._describe_request(),
            },
        )

    def _build_failed_request(self, error: str) -> TraceSpan:
        """Return the span of a request, or of one attempt at it, that gave no reply."""
        facts, purpose = self.facts, getattr(self.event, "purpose", None)
        kind, exception = ("cut_off", "") if error == CUT_OFF_ERROR else ("model_error", "")
        if facts is not None and facts.error_type:
            kind, exception = facts.error_type, facts.exception_type
        more = {
            n.TURN: self.before.turn + (purpose is None),  # an attempt does not count as a turn, but is part of one
            n.TIER: None if (tier := getattr(self.event, "tier", None)) is None else tier.name,
            n.INPUT_MESSAGES: self.write_messages(self.before.shown) if purpose is None else None,
            **self._describe_request(),
        }
        return self._build_step(n.CHAT, more, _Failure(kind, error, exception))

    def _is_refused_request(self, event: e.Failed) -> bool:
        """Return whether the event is also the only one of a request: one that a retry would not help."""
        before = self.before
        if event.reason is not StopReason.MODEL_ERROR or before.state is not State.THINK:
            return False
        newest = before.model_failures[-1] if before.model_failures else None
        is_same_commit = before.updated_at == event.at and not event.took_s
        # Any other request has an event, which is then in the same commit.
        return not (
            newest and newest.turn == before.turn and is_same_commit and event.message.startswith(newest.message)
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
            n.CONVERSATION: self.header.session,
            n.TURN: self.run.turn,
            n.OUTCOME: str(result.outcome),
            n.ATTEMPTS: result.attempts,
            n.KEY: None if entry is None else entry.call.key,
            n.LABELS: tuple(map(str, result.labels)),
            n.COST: None if spent is None else spent.cost_usd,
            n.TOOL_ARGUMENTS: None if entry is None else self.write(entry.call.arguments),
            n.TOOL_RESULT: self.write(result.content),
        }
        failure = None
        if result.outcome is not Outcome.DONE:
            failure = _Failure(str(result.error_type or result.outcome), result.content)
        context = call_context(self.header, result.call_id)
        name = f"{n.EXECUTE_TOOL} {result.tool}"
        return self.build(name, start, attributes, failure, context=context, ended_at=end)

    def _build_cut_call(self, entry: Any) -> TraceSpan:
        """Return the span of a call that the end of the run cut off."""
        attributes = {
            n.OPERATION: n.EXECUTE_TOOL,
            n.TOOL_NAME: entry.call.name,
            n.TOOL_CALL_ID: entry.call.id,
            n.TOOL_TYPE: "function",
            n.CONVERSATION: self.header.session,
            n.TURN: self.run.turn,
            n.OUTCOME: "cut_off",
            n.ATTEMPTS: entry.attempts,
            n.KEY: entry.call.key,
            n.TOOL_ARGUMENTS: self.write(entry.call.arguments),
        }
        name, context = f"{n.EXECUTE_TOOL} {entry.call.name}", call_context(self.header, entry.call.id)
        start = entry.started_at or self.event.at
        end = start + entry.duration_s if entry.duration_s else max(start, self.event.at)
        failure = _Failure("cut_off", f"cut off: {getattr(self.event, 'message', '')}")
        return self.build(name, start, attributes, failure, context=context, ended_at=end)

    def _list_evaluations(self, verdict: e.Verdict) -> tuple[SpanEvent, ...]:
        """Return the results of a judge: its verdict, and each of its scores, 1 to 5."""
        label = str(verdict.action) if verdict.passed is None else "pass" if verdict.passed else "fail"
        results: list[dict[str, object]] = [
            {n.EVALUATION: "verdict", n.SCORE_LABEL: label, n.EXPLANATION: self.write(verdict.note)}
        ]
        results += [
            {n.EVALUATION: each.criterion, n.SCORE: float(each.score), n.EXPLANATION: self.write(each.reason)}
            for each in verdict.scores
        ]
        return tuple([SpanEvent(name=n.EVALUATION_RESULT, at=self.event.at, attributes=_clean(r)) for r in results])

    # The run.

    def list_end(self) -> list[TraceSpan]:
        """Return the span of the run, if the event ends it."""
        run, header = self.run, self.header
        if not run.is_over:
            return []
        caller = caller_context(header)
        is_done = run.stop_reason is StopReason.COMPLETED
        instructions = [{"type": "text", "content": header.instructions}] if header.instructions else []
        attributes = {
            n.RUN: run.id,
            n.OPERATION: n.INVOKE_AGENT,
            n.AGENT_NAME: header.agent,
            n.AGENT_VERSION: header.agent_version,
            n.CONVERSATION: header.session,
            n.AFTER: header.after,
            n.FORKED_FROM: header.forked_from,
            n.PARENT: header.parent,
            **describe_settings(header.settings),
            **_usage_attributes(run.usage, self._own_model(), ""),
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
            n.INSTRUCTIONS: instructions and self.write(json.dumps(instructions, ensure_ascii=False)),
            n.INPUT_MESSAGES: self.write_messages([UserMessage(parts=header.prompt)]),
            n.OUTPUT_MESSAGES: self.write_messages(
                [AssistantMessage(text=run.partial or (run.answer if is_done else ""))]
            ),
        }
        related = [header.forked_from] if header.forked_from is not None else []
        traces = dict.fromkeys(related, header.traceparent)  # a fork inherits it
        if header.after is not None and header.after in self.traces:
            traces[header.after] = self.traces[header.after]
        span = self.finish(
            attributes,
            None if is_done else _Failure(str(run.stop_reason), run.stop_message),
            name=f"{n.INVOKE_AGENT} {header.agent}".strip(),
            context=run_context(header),
            parent=None if caller is None else caller.span_id,
            started_at=header.created_at,
            ended_at=max(header.created_at, run.updated_at),  # by another clock, which may be behind
            links=tuple([run_context(attrs.evolve(header, id=id_, traceparent=t)) for id_, t in traces.items()]),
        )
        return [span]

    def _own_model(self) -> str:
        return (self.run.fingerprint or self.header.fingerprint).model


# Events without a span of their own: they take no time, or a span of another event covers them.
_SILENT: Final = frozenset({e.Observed, e.ToolStarted, e.ToolsReturned, e.Continued, e.Accepted, e.Resumed, e.Paused})
_SNAKE: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


def list_ratings(header: Header, feedback: Iterable[Feedback], *, content: Content = "none") -> list[TraceSpan]:
    """Return the spans of the ratings of a run, without a duration, each with a result of an evaluation.

    Args:
        header: Header of the run.
        feedback: All feedback on the run, oldest first.
        content: Texts that the spans have: names of raters, and comments. Default "none".
    """
    write, spans = _WRITERS[content], list[TraceSpan]()
    for number, each in enumerate(feedback, 1):
        event = _build_evaluation(each.at, "rating", None, float(each.rating), write(each.comment))
        attributes = {n.RUN: header.id, n.OPERATION: n.RATE, n.CONVERSATION: header.session, n.RATED_BY: write(each.by)}
        spans.append(
            TraceSpan(
                name=n.RATE,
                context=rating_context(header, number),
                parent=hash_run_span_id(header.id),
                started_at=each.at,
                ended_at=each.at,
                attributes=_clean(attributes),
                events=(event,),
            )
        )
    return spans


def _build_evaluation(at: float, name: str, label: str | None, score: float | None, why: str | None) -> SpanEvent:
    """Return the result of an evaluation, with the label or the score that it gave."""
    result = {n.EVALUATION: name, n.SCORE_LABEL: label, n.SCORE: score, n.EXPLANATION: why}
    return SpanEvent(name=n.EVALUATION_RESULT, at=at, attributes=_clean(result))


# An attribute that is 0 or False is not empty.
_NUMBERS: Final = frozenset({bool, int, float})


def _clean(attributes: Mapping[str, object]) -> dict[str, Any]:
    """Return attributes without the empty ones, and with their texts cut."""
    return {
        name: _cut(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if value or value.__class__ in _NUMBERS
    }


def _cut(text: str) -> str:
    """Return a text of at most `MAX_ATTRIBUTE_BYTES`, with a mark at its end if something is missing."""
    if len(text) * 4 <= MAX_ATTRIBUTE_BYTES or len(data := text.encode("utf-8", "replace")) <= MAX_ATTRIBUTE_BYTES:
        return text
    return data[: MAX_ATTRIBUTE_BYTES - len(_CUT_MARK)].decode("utf-8", "ignore") + _CUT_MARK


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


def _write_message(message: Any) -> dict[str, object]:
    if isinstance(message, ToolResult):
        part = {"type": "tool_call_response", "id": message.call_id, "response": message.content}
        return {"role": "tool", "parts": [part]}
    if isinstance(message, AssistantMessage):
        parts: list[dict[str, object]] = []
        if message.thinking:
            parts.append({"type": "reasoning", "content": message.thinking})
        if message.text:
            parts.append({"type": "text", "content": message.text})
        for call in message.calls:
            arguments = json.loads(call.arguments)
            parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments})
        return {"role": "assistant", "parts": parts, "finish_reason": "tool_call" if message.calls else "stop"}
    role = "user" if isinstance(message, UserMessage) else "system"
    given = getattr(message, "parts", None)
    texts = [message.text] if given is None else [getattr(part, "text", f"[{type(part).__name__}]") for part in given]
    return {"role": role, "parts": [{"type": "text", "content": text} for text in texts]}
