"""The events of a run as the parts of a conversation: texts in pieces, calls and their results.

The encoders of editors and chat pages write these parts, each in the form of its protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import attrs

from agentfsm.core import events as e
from agentfsm.core.messages import ToolCall, ToolResult
from agentfsm.core.value import Value
from agentfsm.serve.dialects.replies import REPLIES, PieceFilter
from agentfsm.streaming.stream import TextDelta

if TYPE_CHECKING:
    from agentfsm.core.messages import AssistantMessage
    from agentfsm.core.run import Run
    from agentfsm.streaming.stream import StreamEvent


@attrs.frozen(kw_only=True)
class TextPiece(Value):
    """A piece of a text of the run; one with another id than the last begins a new text."""

    id: str
    text: str
    is_thinking: bool = False


@attrs.frozen(kw_only=True)
class TextEnd(Value):
    """The end of a text."""

    id: str
    is_thinking: bool = False
    is_retracted: bool = False
    """Whether the conversation does not have the text, for example because its attempt broke off."""


@attrs.frozen(kw_only=True)
class CallMade(Value):
    """A call that the model, or a plan, asks for."""

    id: str
    call: ToolCall
    run_id: str


@attrs.frozen(kw_only=True)
class CallStarted(Value):
    """The start of a call, as far as the journal has it: that of a read-only call is seldom written."""

    id: str


@attrs.frozen(kw_only=True)
class CallEnded(Value):
    """The result of a call."""

    id: str
    result: ToolResult


TurnPart: TypeAlias = TextPiece | TextEnd | CallMade | CallStarted | CallEnded


def format_call_id(run_id: str, call_id: str) -> str:
    """Return the id of a call for a client, which is unique in its conversation."""
    return f"{run_id}:{call_id}"


@attrs.define(eq=False, repr=False)
class TurnParts:
    """Translates the events of a run and of its sub-agents. Texts of sub-agents are left out: calls return them."""

    run: Run
    """The run of the stream, after the newest event."""

    _pieces: PieceFilter = attrs.field(factory=PieceFilter, init=False)
    _texts: dict[bool, str] = attrs.field(factory=dict, init=False)
    """Ids of the open texts: of thinking (True), and of the reply."""

    _open: set[str] = attrs.field(init=False)
    """Ids of the calls without a result."""

    _seen: set[str] = attrs.field(init=False)
    """Ids of the runs of which an event was read, or that the client has in part."""

    def __attrs_post_init__(self) -> None:
        self._open, self._seen = set(), set()
        self._note_open_calls(self.run)

    def read_event(self, event: e.Event, run: Run) -> Iterator[TurnPart]:
        """Yield the parts that follow from an event of a journal.

        Args:
            event: The event.
            run: The run after the event: that of the stream, or that of a sub-agent.
        """
        is_root = run.id == self.run.id
        if is_root:
            self.run = run
        elif run.id not in self._seen:
            self._note_open_calls(run)
        if isinstance(event, REPLIES):
            if is_root:
                yield from self._finish_reply(event.message)
            yield from self._make_calls(run, event.message.calls)
        elif isinstance(event, e.ModelFaltered | e.LimitReached | e.Failed) and is_root:
            yield from self._close_texts(is_retracted=bool(self._pieces.reply.text))
            self._pieces.finish("")
        if isinstance(event, e.Planned | e.StepsReady):
            yield from self._make_calls(run, (event.call,) if isinstance(event, e.Planned) else event.calls)
        elif isinstance(event, e.ToolStarted):
            yield CallStarted(id=format_call_id(run.id, event.call_id))
        elif isinstance(event, e.ToolFinished):
            yield from self._end_calls(run, [event.result])
        elif isinstance(event, e.LimitReached | e.Failed):
            yield from self._end_calls(run, [each for each in run.messages if isinstance(each, ToolResult)])
        if is_root:
            for piece, offset in self._pieces.take_early():
                yield from self.read_delta(piece, offset)

    def read_delta(self, event: StreamEvent, offset: int) -> Iterator[TurnPart]:
        """Yield the parts that follow from a piece of text."""
        if getattr(event, "run_id", "") != self.run.id:
            return
        piece = self._pieces.accept(self.run, event, offset)
        if piece is None:
            return
        text_id = f"m{len(self.run.messages)}.{piece.attempt}"
        if not all(each.startswith(text_id) for each in self._texts.values()):  # of an attempt that broke off
            yield from self._close_texts(is_retracted=True)
        yield from self._write_text(piece.text, text_id, is_thinking=not isinstance(piece, TextDelta))

    def show_open_calls(self) -> Iterator[TurnPart]:
        """Yield the open calls of the run, for a client that begins to read in the middle of a turn."""
        open_calls = [entry.call for entry in self.run.open if entry.result is None]
        return self._make_calls(self.run, tuple(open_calls))

    def end(self) -> Iterator[TurnPart]:
        """Yield the ends of the open texts."""
        yield from self._close_texts()

    def _note_open_calls(self, run: Run) -> None:
        self._seen.add(run.id)
        self._open.update(format_call_id(run.id, entry.call.id) for entry in run.open)

    def _finish_reply(self, message: AssistantMessage) -> Iterator[TurnPart]:
        reply, text_id = self._pieces.reply, f"m{len(self.run.messages)}.whole"
        self._pieces.finish(message.text)
        if message.thinking and not reply.thinking:
            yield from self._write_text(message.thinking, text_id, is_thinking=True)
        if not message.text.startswith(reply.text):  # what was sent is not the reply
            yield from self._close_texts(is_retracted=True)
            yield from self._write_text(message.text, text_id, is_thinking=False)
        elif rest := message.text[len(reply.text) :]:
            yield from self._write_text(rest, self._texts.get(False, text_id), is_thinking=False)
        yield from self._close_texts()

    def _write_text(self, text: str, text_id: str, *, is_thinking: bool) -> Iterator[TurnPart]:
        if not is_thinking and True in self._texts:
            yield TextEnd(id=self._texts.pop(True), is_thinking=True)
        if text:
            text_id = f"{text_id}.thinking" if is_thinking else text_id
            self._texts[is_thinking] = text_id
            yield TextPiece(id=text_id, text=text, is_thinking=is_thinking)

    def _close_texts(self, *, is_retracted: bool = False) -> Iterator[TurnPart]:
        for is_thinking, text_id in self._texts.items():
            yield TextEnd(id=text_id, is_thinking=is_thinking, is_retracted=is_retracted)
        self._texts.clear()

    def _make_calls(self, run: Run, calls: tuple[ToolCall, ...]) -> Iterator[TurnPart]:
        for call in calls:
            call_id = format_call_id(run.id, call.id)
            self._open.add(call_id)
            yield CallMade(id=call_id, call=call, run_id=run.id)

    def _end_calls(self, run: Run, results: list[ToolResult]) -> Iterator[TurnPart]:
        for result in results:
            call_id = format_call_id(run.id, result.call_id)
            if call_id in self._open:
                self._open.discard(call_id)
                yield CallEnded(id=call_id, result=result)
