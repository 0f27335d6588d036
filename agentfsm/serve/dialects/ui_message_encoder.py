"""Write the events of a run as the UI message stream of Vercel's `ai` SDK, version 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.events import ToolsReturned
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import Outcome
from agentfsm.core.pending import PendingKind
from agentfsm.serve.dialects.ag_ui_encoder import format_interrupt_id
from agentfsm.serve.dialects.answers import describe_waits
from agentfsm.serve.dialects.turn_parts import (
    CallEnded,
    CallMade,
    CallStarted,
    TextEnd,
    TextPiece,
    TurnPart,
    TurnParts,
    format_call_id,
)
from agentfsm.serve.event_stream import Ending
from agentfsm.serve.journal_feeds import to_json

if TYPE_CHECKING:
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run
    from agentfsm.journal.follow import JournalEvent
    from agentfsm.streaming.stream import StreamEvent

Chunk = dict[str, Any]

# Type of the part that describes a wait which is no approval.
WAIT_PART: Final = "data-wait"
_DONE: Final = "data: [DONE]\n\n"


@attrs.define(eq=False, repr=False, kw_only=True)
class UIMessageEncoder:
    """Encoder of chunks of a UI message: the answer to one message of the user. The stream ends when the run waits."""

    ends_at_wait = True
    folds = True

    continues: bool = False
    """Whether the client has the beginning of the message."""

    _parts: TurnParts | None = attrs.field(default=None, init=False)
    _text_id: str = attrs.field(default="", init=False)
    """Id of the newest text."""

    _in_step: bool = attrs.field(default=False, init=False)

    def encode_start(self, run: Run | None) -> str:
        """Begin the message, with the calls that are open before it."""
        assert run is not None  # noqa: S101  `folds` is set
        self._parts = TurnParts(run)
        started: Chunk = {"type": "start", "messageMetadata": {"runId": run.id}}
        if self.continues:
            self._in_step = bool(run.open)
            return self._frame([started])
        return self._frame(
            [started | {"messageId": f"{run.id}.{run.version}"}, *self._translate(self._parts.show_open_calls())]
        )

    def encode_event(self, item: JournalEvent, run: Run | None, position: str) -> str:
        """Write the chunks that follow from an event of a journal."""
        assert run is not None  # noqa: S101  `folds` is set
        chunks = self._translate(self.parts.read_event(item.event, run))
        if isinstance(item.event, ToolsReturned) and run.id == self.parts.run.id and self._in_step:
            self._in_step = False
            chunks.append({"type": "finish-step"})
        return self._frame(chunks, position)

    def encode_delta(self, event: StreamEvent, offset: int) -> str:
        """Write a piece of a text."""
        return self._frame(self._translate(self.parts.read_delta(event, offset)))

    def encode_end(self, run: Run | None, position: str) -> str:
        """Write how the run ended, or what it waits for."""
        assert run is not None  # noqa: S101  `folds` is set
        chunks = self._translate(self.parts.end())
        reason = "stop"
        if run.stop_reason is StopReason.CANCELLED:
            chunks.append({"type": "abort", "reason": run.stop_message or "the run was cancelled"})
            return self._frame(chunks, position) + _DONE
        if run.state is State.ERROR:
            reason = "error"
            chunks.append({"type": "error", "errorText": run.stop_message or str(run.stop_reason)})
        elif run.state is not State.DONE:
            reason = "tool-calls"
            chunks += self._write_waits(run, position)
        if self._in_step:
            self._in_step = False
            chunks.append({"type": "finish-step"})
        usage = {"inputTokens": run.usage.input_tokens, "outputTokens": run.usage.output_tokens}
        chunks.append({"type": "finish", "finishReason": reason, "messageMetadata": {"usage": usage}})
        return self._frame(chunks, position) + _DONE

    def encode_cut(self, ending: Ending) -> str:
        """Write an error, because a stream that only stopped would look like a whole answer."""
        texts = {
            Ending.RETRY: "the store does not answer; the run goes on: resume the stream",
            Ending.SHUTDOWN: "the server stops; the run goes on: resume the stream",
            Ending.DELETED: "the run was deleted",
            Ending.REVOKED: "the key is not valid any more, or has other rights; the run goes on",
        }
        return self._frame([{"type": "error", "errorText": texts[ending]}]) + _DONE

    @property
    def parts(self) -> TurnParts:
        """The parts of the run of the stream."""
        assert self._parts is not None  # noqa: S101  the stream has begun
        return self._parts

    def _translate(self, parts: Iterator[TurnPart]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for part in parts:
            if isinstance(part, TextPiece | CallMade):
                chunks += self._begin_step(part)
            if isinstance(part, TextPiece):
                kind = "reasoning" if part.is_thinking else "text"
                if part.id != self._text_id:
                    self._text_id = part.id
                    chunks.append({"type": f"{kind}-start", "id": part.id})
                chunks.append({"type": f"{kind}-delta", "id": part.id, "delta": part.text})
            elif isinstance(part, TextEnd):
                kind = "reasoning" if part.is_thinking else "text"
                retracted = {"providerMetadata": {"agentfsm": {"retracted": True}}} if part.is_retracted else {}
                chunks.append({"type": f"{kind}-end", "id": part.id, **retracted})
            elif isinstance(part, CallMade):
                called = {"toolCallId": part.id, "toolName": part.call.name, "input": _parse(part.call.arguments)}
                chunks.append({"type": "tool-input-available", **called})
            elif isinstance(part, CallEnded):
                chunks.append(_write_result(part))
            else:
                assert isinstance(part, CallStarted)  # noqa: S101  the protocol has nothing for it
        return chunks

    def _begin_step(self, part: TextPiece | CallMade) -> Iterator[Chunk]:
        # A call of a sub-agent has a step of its own: a page sends decisions once all calls of the newest step are
        # decided or over, and the call of the sub-agent itself is neither.
        is_below = isinstance(part, CallMade) and part.run_id != self.parts.run.id
        if self._in_step and is_below:
            yield {"type": "finish-step"}
        if not self._in_step or is_below:
            yield {"type": "start-step"}
        self._in_step = True

    def _write_waits(self, run: Run, position: str) -> Iterator[Chunk]:
        for item in run.pending:
            call_id, interrupt_id = format_call_id(item.run_id, item.call_id), format_interrupt_id(item, position)
            shown = _describe(item)
            if item.kind is PendingKind.APPROVAL:
                asked = {"approvalId": interrupt_id, "toolCallId": call_id, "approvalDescriptor": shown}
                yield {"type": "tool-approval-request", **asked}
            else:
                questions = [attrs.asdict(each) for each in item.questions]
                data = {**shown, "kind": str(item.kind), "toolCallId": call_id if item.call_id else None}
                yield {"type": WAIT_PART, "id": interrupt_id, "data": {**data, "questions": questions}}
        if any(item.kind is not PendingKind.APPROVAL for item in run.pending):
            text_id = f"wait.{position}"
            yield {"type": "text-start", "id": text_id}
            yield {"type": "text-delta", "id": text_id, "delta": describe_waits(run)}
            yield {"type": "text-end", "id": text_id}

    def _frame(self, chunks: list[Chunk], position: str = "") -> str:
        texts = [f"data: {to_json(each)}\n\n" for each in chunks]
        if texts and position:
            texts[-1] = f"id: {position}\n{texts[-1]}"
        return "".join(texts)


def _parse(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _write_result(part: CallEnded) -> Chunk:
    result = part.result
    if result.outcome is Outcome.REJECTED:
        return {"type": "tool-output-denied", "toolCallId": part.id}
    if result.outcome is not Outcome.DONE:
        return {"type": "tool-output-error", "toolCallId": part.id, "errorText": result.content}
    return {"type": "tool-output-available", "toolCallId": part.id, "output": result.content}


def _describe(item: Pending) -> dict[str, Any]:
    """Return what a person reads before a decision."""
    expires = None if item.expires_at is None else datetime.fromtimestamp(item.expires_at, UTC).isoformat()
    shown = {"runId": item.run_id, "tool": item.tool, "arguments": item.arguments, "description": item.description}
    return {**shown, "reason": item.reason, "error": item.error, "expiresAt": expires}
