"""Write the events of a run as those of AG-UI 1.0.

Text arrives in pieces while a model writes it, and calls, results and states follow from the journal. What was sent and
does not hold, such as text of an attempt that broke off, is corrected by a snapshot of the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import attrs

from agentfsm.core import events as e
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import (
    AssistantMessage,
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Outcome,
    Part,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    read_inline_data,
)
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.serve.dialects.conversations import list_front_end_calls
from agentfsm.serve.dialects.replies import REPLIES, PieceFilter
from agentfsm.serve.event_stream import Ending
from agentfsm.serve.journal_feeds import to_json
from agentfsm.streaming.stream import TextDelta
from agentfsm.tools.front_end import UPDATE_STATE, Page, read_page

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.core.usage import Usage
    from agentfsm.journal.follow import JournalEvent
    from agentfsm.streaming.stream import StreamEvent

PROTOCOL_VERSION: Final = "1.0"
Event = dict[str, Any]

_TEXT: Final = {"type": "string"}
# Schemas of the answer to each kind of interrupt.
_APPROVAL_SCHEMA: Final = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "arguments": {"type": "object"}, "message": _TEXT},
    "required": ["approved"],
}
_OUTCOME_SCHEMA: Final = {
    "type": "object",
    "properties": {"result": _TEXT, "failed": _TEXT, "rerun": {"type": "boolean"}},
}


@attrs.define(eq=False, repr=False)
class _RunView:
    """The part of one run that a stream has sent."""

    prefix: str = ""
    """Prefix of the ids of messages and calls; empty for the run of the stream."""

    tag: Mapping[str, str] = attrs.field(factory=dict)
    """Fields of each event that name the sub-agent; empty for the run of the stream."""

    pieces: PieceFilter = attrs.field(factory=PieceFilter)
    text_id: str = ""
    """Id of the open text message; empty if none is open."""

    thinking_id: str = ""
    """Id of the open reasoning; empty if none is open."""

    open_calls: dict[str, str] = attrs.field(factory=dict)
    """Names of the calls without a result, by their ids."""

    is_over: bool = False


@attrs.define(eq=False, repr=False, kw_only=True)
class AGUIEncoder:
    """Encoder of AG-UI events. The stream ends when the run waits: its interrupts are the waits of the run."""

    ends_at_wait = True
    folds = True

    thread_id: str
    """The client's id of the conversation."""

    run_id: str
    """The client's id of this part of the conversation; a run of the store that waits has several."""

    _root: Run | None = attrs.field(default=None, init=False)
    _before: Usage | None = attrs.field(default=None, init=False)
    """Usage of the run before the stream."""

    _views: dict[str, _RunView] = attrs.field(factory=dict, init=False)
    _page: Page = attrs.field(factory=Page, init=False)
    """State and context of the client's page, as the client sent them."""

    _step: str = attrs.field(default="", init=False)
    """State of the run, whose step is open; empty before the first event."""

    def encode_start(self, run: Run | None) -> str:
        """Begin: the messages so far, and the state."""
        assert run is not None  # noqa: S101  `folds` is set
        self._root, self._before = run, run.usage
        self._views[run.id] = _RunView(open_calls={entry.call.id: entry.call.name for entry in run.open})
        started = {
            "type": "RUN_STARTED",
            "threadId": self.thread_id,
            "runId": self.run_id,
            "protocolVersion": PROTOCOL_VERSION,
        }
        events = [started, self._snapshot()]
        self._page = read_page(run)
        if self._page.state is not None:
            events.append({"type": "STATE_SNAPSHOT", "snapshot": dict(self._page.state)})
        return self._frame(events)

    def encode_event(self, item: JournalEvent, run: Run | None, position: str) -> str:
        """Write the events that follow from an event of a journal."""
        assert run is not None  # noqa: S101  `folds` is set
        events: list[Event] = []
        if self._root is not None and run.id == self._root.id:
            self._root = run
            view = self._views[run.id]
        else:
            view = self._open_sub_agent(run, events)
        events += self._translate(view, item.event, run)
        if run.id == self.root.id and _may_change_page(item.event):
            before, self._page = self._page, read_page(run)
            if patch := _diff_states(before, self._page):
                events.append({"type": "STATE_DELTA", "delta": patch})
        if run.id == self.root.id and run.state != self._step:
            if self._step:
                events.append({"type": "STEP_FINISHED", "stepName": self._step})
            self._step = "" if run.state in (State.DONE, State.ERROR) else str(run.state)
            if self._step:
                events.append({"type": "STEP_STARTED", "stepName": self._step})
        for piece, offset in view.pieces.take_early():
            events += self._write_piece(view, run, piece, offset)
        if view.tag and run.is_over:
            view.is_over = True
            events += _close_texts(view)
            if run.state is State.DONE:
                outcome = {"result": run.answer, "outcome": {"type": "success"}}
                events.append({"type": "SUBAGENT_FINISHED", **view.tag, **outcome})
            else:
                failure = {"message": run.stop_message, "code": str(run.stop_reason)}
                events.append({"type": "SUBAGENT_ERROR", **view.tag, **failure})
        for each in events:
            each.setdefault("timestamp", int(item.event.at * 1_000))
        return self._frame(events, position)

    def encode_delta(self, event: StreamEvent, offset: int) -> str:
        """Write a piece of a text."""
        run_id = getattr(event, "run_id", "")
        view = self._views.get(run_id)
        # The pieces of a sub-agent are left out: its replies come whole from its journal.
        if view is None or view.tag or self._root is None:
            return ""
        return self._frame(list(self._write_piece(view, self._root, event, offset)))

    def encode_end(self, run: Run | None, position: str) -> str:
        """Write how the run ended, or what it waits for."""
        assert run is not None  # noqa: S101  `folds` is set
        asked = list_front_end_calls(run)  # the client executes these calls, so they are no interrupts
        interrupts = [_build_interrupt(self, item, position) for item in run.pending if item not in asked]
        events: list[Event] = list(self._close_everything(interrupts))
        assert self._before is not None  # noqa: S101  the stream has begun
        tokens_in = run.usage.input_tokens - self._before.input_tokens
        tokens_out = run.usage.output_tokens - self._before.output_tokens
        usage: Event = {}
        if tokens_in + tokens_out:
            model = (run.fingerprint or run.header.fingerprint).model
            usage = {"usage": [{"model": model, "inputTokens": tokens_in, "outputTokens": tokens_out}]}
        finished = {"type": "RUN_FINISHED", "threadId": self.thread_id, "runId": self.run_id} | usage
        if run.state is State.DONE:
            events.append(finished | {"result": run.answer, "outcome": {"type": "success"}})
        elif run.stop_reason is StopReason.CANCELLED:
            events.append(finished | {"outcome": {"type": "cancelled"}})
        elif run.stop_reason is not None:
            error = {"type": "RUN_ERROR", "message": run.stop_message or str(run.stop_reason)}
            events.append(error | {"code": str(run.stop_reason)} | usage)
        elif asked and not interrupts:
            events.append(finished | {"outcome": {"type": "success"}})
        else:
            events.append(finished | {"outcome": {"type": "interrupt", "interrupts": interrupts}})
        return self._frame(events, position)

    def encode_cut(self, ending: Ending) -> str:
        """Write that this stream ends, and not its run."""
        texts = {
            Ending.RETRY: "the store does not answer; the run goes on: send the same request again",
            Ending.SHUTDOWN: "the server stops; the run goes on: send the same request again",
            Ending.DELETED: "the run was deleted",
            Ending.REVOKED: "the key is not valid any more, or has other rights; the run goes on",
        }
        return self._frame([{"type": "RUN_ERROR", "message": texts[ending], "code": f"stream_{ending}"}])

    @property
    def root(self) -> Run:
        """The run of the stream, after the newest event."""
        assert self._root is not None  # noqa: S101  the stream has begun
        return self._root

    # One event.

    def _translate(self, view: _RunView, event: e.Event, run: Run) -> Iterator[Event]:
        if isinstance(event, REPLIES):
            index = len(run.messages) - (not isinstance(event, e.ToolsChosen))
            yield from self._finish_reply(view, event.message, f"{view.prefix}m{index}")
        elif isinstance(event, e.ModelFaltered | e.LimitReached | e.Failed):
            had_text = bool(view.pieces.reply.text)  # of a reply that broke off, not a part of the conversation
            yield from _close_texts(view)
            view.pieces.finish("")
            if had_text:
                yield self._snapshot()
        if isinstance(event, e.Planned | e.StepsReady):
            calls = (event.call,) if isinstance(event, e.Planned) else event.calls
            yield from _write_calls(view, calls, "")
        elif isinstance(event, e.ToolFinished):
            yield from _write_result(view, event.result)
        elif isinstance(event, e.LimitReached | e.Failed):
            for result in [each for each in run.messages if isinstance(each, ToolResult)]:
                yield from _write_result(view, result)
        elif isinstance(event, e.Observed) and event.inputs and not view.tag:
            yield self._snapshot()

    def _finish_reply(self, view: _RunView, message: AssistantMessage, message_id: str) -> Iterator[Event]:
        streamed_thinking = view.pieces.reply.thinking
        rest = view.pieces.finish(message.text)
        if message.thinking and not streamed_thinking and not view.tag:
            yield from _write_thinking(view, message.thinking, f"{message_id}.thinking")
        if rest:
            yield from _write_text(view, rest, view.text_id or message_id)
        parent = view.text_id or message_id
        yield from _close_texts(view)
        yield from _write_calls(view, message.calls, parent)
        if rest is None:
            yield self._snapshot()

    def _write_piece(self, view: _RunView, run: Run, event: StreamEvent, offset: int) -> Iterator[Event]:
        piece = view.pieces.accept(run, event, offset)
        if piece is None:
            return
        reply = view.pieces.reply
        message_id = f"{view.prefix}m{len(run.messages)}" + (f".{piece.attempt}" if reply.retracted else "")
        if isinstance(piece, TextDelta):
            yield from _write_text(view, piece.text, message_id)
        else:
            yield from _write_thinking(view, piece.text, f"{message_id}.thinking")

    # Sub-agents.

    def _open_sub_agent(self, run: Run, events: list[Event]) -> _RunView:
        if (view := self._views.get(run.id)) is None or view.is_over:
            view = self._views[run.id] = _RunView(prefix=f"{run.id}:", tag={"subagentRunId": run.id})
            started: Event = {"type": "SUBAGENT_STARTED", "subagentRunId": run.id, "name": run.header.agent}
            parent = self._views.get(run.header.parent or "")
            if parent is not None and parent.tag and not parent.is_over:
                started["parentSubagentRunId"] = run.header.parent
            events.append(started)
        return view

    def _close_everything(self, interrupts: list[Event]) -> Iterator[Event]:
        for view in reversed(tuple(self._views.values())):
            yield from _close_texts(view)
            if view.tag and not view.is_over:
                run_id = view.tag["subagentRunId"]
                own = [each["id"] for each in interrupts if each.get("subagentRunId") == run_id]
                outcome = {"type": "suspended"} | ({"interruptIds": own} if own else {})
                view.is_over = True
                yield {"type": "SUBAGENT_FINISHED", "subagentRunId": run_id, "outcome": outcome}
        if self._step:
            yield {"type": "STEP_FINISHED", "stepName": self._step}
            self._step = ""

    # Parts of the stream.

    def _snapshot(self) -> Event:
        return {"type": "MESSAGES_SNAPSHOT", "messages": list(_list_messages(self.root))}

    def _frame(self, events: list[Event], position: str = "") -> str:
        texts = [f"data: {to_json(each)}\n\n" for each in events]
        if texts and position:
            texts[-1] = f"id: {position}\n{texts[-1]}"
        return "".join(texts)


def _write_text(view: _RunView, text: str, message_id: str) -> Iterator[Event]:
    if view.text_id != message_id:
        yield from _close_texts(view)
        view.text_id = message_id
        yield {"type": "TEXT_MESSAGE_START", "messageId": message_id, "role": "assistant", **view.tag}
    yield {"type": "TEXT_MESSAGE_CONTENT", "messageId": message_id, "delta": text, **view.tag}


def _write_thinking(view: _RunView, text: str, message_id: str) -> Iterator[Event]:
    if view.thinking_id != message_id:
        yield from _close_texts(view)
        view.thinking_id = message_id
        yield {"type": "REASONING_START", "messageId": message_id}
        yield {"type": "REASONING_MESSAGE_START", "messageId": message_id, "role": "reasoning"}
    yield {"type": "REASONING_MESSAGE_CONTENT", "messageId": message_id, "delta": text}


def _close_texts(view: _RunView) -> Iterator[Event]:
    if view.text_id:
        yield {"type": "TEXT_MESSAGE_END", "messageId": view.text_id, **view.tag}
    if view.thinking_id:
        yield {"type": "REASONING_MESSAGE_END", "messageId": view.thinking_id}
        yield {"type": "REASONING_END", "messageId": view.thinking_id}
    view.text_id = view.thinking_id = ""


def _write_calls(view: _RunView, calls: tuple[ToolCall, ...], parent: str) -> Iterator[Event]:
    for call in calls:
        call_id = f"{view.prefix}{call.id}"
        view.open_calls[call.id] = call.name
        started: Event = {"type": "TOOL_CALL_START", "toolCallId": call_id, "toolCallName": call.name, **view.tag}
        yield started | ({"parentMessageId": parent} if parent else {})
        yield {"type": "TOOL_CALL_ARGS", "toolCallId": call_id, "delta": call.arguments, **view.tag}
        yield {"type": "TOOL_CALL_END", "toolCallId": call_id, **view.tag}


def _write_result(view: _RunView, result: ToolResult) -> Iterator[Event]:
    if view.open_calls.pop(result.call_id, None) is None:
        return
    call_id = f"{view.prefix}{result.call_id}"
    message_id = f"{call_id}.result"
    yield {
        "type": "TOOL_CALL_RESULT",
        "messageId": message_id,
        "toolCallId": call_id,
        "content": result.content,
        "role": "tool",
        **view.tag,
    }


def _may_change_page(event: e.Event) -> bool:
    """Return whether a run may share another state with its client after an event."""
    if isinstance(event, e.ToolFinished):
        return event.result.tool == UPDATE_STATE
    return isinstance(event, e.Observed) and bool(event.inputs)


def _diff_states(before: Page, after: Page) -> list[Event]:
    """Return the JSON Patch (RFC 6902) that makes the state of one page that of the other, field by field."""
    changes = before.changes_to(after)
    patch = [{"op": "remove", "path": _point_to(name)} for name in changes.get("removed", ())]
    added = changes.get("state", {}).items()
    return [*patch, *[{"op": "add", "path": _point_to(name), "value": value} for name, value in added]]


def _point_to(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")


# Messages.


def _list_messages(run: Run) -> Iterator[Event]:
    """Yield the messages of the conversation, with the ids under which they are streamed."""
    messages: tuple[Message, ...] = tuple(run.messages)
    if not run.version:
        messages = (*run.prior, *run.header.history, UserMessage(parts=run.header.prompt))
    for index, message in enumerate(messages):
        yield _convert_message(message, f"m{index}")
    if run.reply is not None:
        yield _convert_message(run.reply, f"m{len(messages)}")
        for entry in run.open:
            if entry.result is not None:
                yield _convert_message(entry.result, "")


def _convert_message(message: Message, message_id: str) -> Event:
    if isinstance(message, SystemMessage) or (isinstance(message, UserMessage) and message.is_note):
        return {"id": message_id, "role": "system", "content": message.text}
    if isinstance(message, UserMessage):
        is_plain = all(isinstance(part, TextPart) for part in message.parts)
        content = message.text if is_plain else [_convert_part(part) for part in message.parts]
        return {"id": message_id, "role": "user", "content": content}
    if isinstance(message, ToolResult):
        fields = {"id": f"{message.call_id}.result", "role": "tool", "toolCallId": message.call_id}
        error = {} if message.outcome is Outcome.DONE else {"error": message.content}
        return fields | {"content": message.content} | error
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]
    fields = {"id": message_id, "role": "assistant", "content": message.text}
    return fields | ({"toolCalls": calls} if calls else {})


def _convert_part(part: Part) -> Event:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    kinds = {ImagePart: "image", AudioPart: "audio", FilePart: "document"}
    inline = read_inline_data(part)
    if inline is None:
        return {"type": kinds[type(part)], "source": {"type": "url", "value": part.url}}
    source = {"type": "data", "value": inline[1], "mimeType": inline[0] or "application/octet-stream"}
    return {"type": kinds[type(part)], "source": source}


# Interrupts.


def format_interrupt_id(item: Pending, position: str) -> str:
    """Return the id of a wait: it names the call, the digest of what is shown, and the position of the stream."""
    return "/".join([quote(item.run_id, safe=""), quote(item.call_id, safe=""), quote(item.digest, safe=""), position])


def _build_interrupt(encoder: AGUIEncoder, item: Pending, position: str) -> Event:
    questions = " ".join(question.message for question in item.questions)
    what = item.error or questions or item.reason or item.description or f"{item.kind} of {item.tool or 'the run'}"
    interrupt: Event = {
        "id": format_interrupt_id(item, position),
        "reason": str(item.kind),
        "message": what,
        "metadata": {"runId": item.run_id, "callId": item.call_id, "tool": item.tool, "arguments": item.arguments},
    }
    is_own = item.run_id == encoder.root.id
    if item.call_id:
        interrupt["toolCallId"] = item.call_id if is_own else f"{item.run_id}:{item.call_id}"
    if not is_own:
        interrupt["subagentRunId"] = item.run_id
    if (schema := _answer_schema(item)) is not None:
        interrupt["responseSchema"] = schema
    if item.expires_at is not None:
        interrupt["expiresAt"] = datetime.fromtimestamp(item.expires_at, UTC).isoformat()
    return interrupt


def _answer_schema(item: Pending) -> Mapping[str, Any] | None:
    if item.kind is PendingKind.APPROVAL:
        return _APPROVAL_SCHEMA
    if item.kind is PendingKind.OUTCOME:
        return _OUTCOME_SCHEMA
    if item.kind is PendingKind.INPUT:
        return _TEXT
    if item.kind is not PendingKind.QUESTION:
        return None
    schemas = {question.key: question.schema or {"type": "null"} for question in item.questions}
    if len(schemas) > 1:
        return {"type": "object", "properties": schemas, "required": list(schemas)}
    return next(iter(schemas.values()), _TEXT)
