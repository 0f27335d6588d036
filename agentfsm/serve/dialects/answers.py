"""The answer of a run for protocols that know no runs: its text, whether there is more to come, or why there is none.

`AnswerEncoder` writes a run as one growing text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import attrs

from agentfsm.agents.decisions import HOW_TO_RESOLVE
from agentfsm.agents.run_reports import read_output
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.pending import PendingKind
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.engine.model_calls.request import UNUSABLE_ANSWERS
from agentfsm.ports.model import FinishReason
from agentfsm.serve.dialects.replies import REPLIES, PieceFilter
from agentfsm.streaming.stream import TextDelta

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.serve.event_stream import Ending
    from agentfsm.serve.journal_feeds import FeedEvent
    from agentfsm.streaming.stream import StreamEvent


class AnswerStatus(StrEnum):
    """State of an answer."""

    DONE = "done"
    """It is whole."""

    CUT_OFF = "cut_off"
    """The model reached the most tokens of a reply."""

    WAITING = "waiting"
    """There is none yet, because the run waits: the text tells for what."""

    WORKING = "working"
    """There is none yet, because the run works."""

    CANCELLED = "cancelled"
    """The run was cancelled, so it has no answer."""

    FAILED = "failed"
    """There is none, because the run failed."""


@attrs.frozen(kw_only=True)
class Answer(Value):
    """The answer of a run."""

    status: AnswerStatus = AnswerStatus.DONE
    """Its state."""

    text: str = ""
    """The answer; of a run that waits or works, a text for a chat about that; empty if it failed."""

    code: str = ""
    """The stop reason of a run that failed."""

    error: str = ""
    """Why the run failed, for people."""

    usage: Usage = attrs.field(factory=Usage)
    """Usage of the run."""


def read_answer(run: Run) -> Answer:
    """Return the answer of a run."""
    if run.state is State.DONE:
        output = read_output(run)
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        return Answer(text=text, usage=run.usage)
    if run.stop_reason is not None:
        if run.stop_message == UNUSABLE_ANSWERS[FinishReason.LENGTH]:
            return Answer(status=AnswerStatus.CUT_OFF, text=run.partial or "", usage=run.usage)
        is_cancelled = run.stop_reason is StopReason.CANCELLED
        return Answer(
            status=AnswerStatus.CANCELLED if is_cancelled else AnswerStatus.FAILED,
            code=str(run.stop_reason),
            error=f"run {run.id} ended without an answer: {run.stop_message}",
            usage=run.usage,
        )
    if run.is_waiting and not run.awaits_tasks:
        return Answer(status=AnswerStatus.WAITING, text=describe_waits(run), usage=run.usage)
    text = f"[Run {run.id} goes on; see GET /v1/runs/{run.id}]"
    return Answer(status=AnswerStatus.WORKING, text=text, usage=run.usage)


def describe_waits(run: Run) -> str:
    """Return a text for a chat about the wait of a run, and how to decide."""
    lines = [f"[Run {run.id} waits]"]
    for item in run.pending:
        questions = " ".join(f"{each.message} {each.url}".rstrip() for each in item.questions)
        what = questions or item.reason or item.description or json.dumps(item.arguments, ensure_ascii=False)
        name = f"{item.tool} ({item.call_id})" if item.call_id else "the run"
        how = "answer here" if item.kind in (PendingKind.QUESTION, PendingKind.INPUT) else HOW_TO_RESOLVE[item.kind]
        lines.append(f"- {item.kind} of {name}: {what}; {how}")
    return "\n".join(lines)


class AnswerWriter(Protocol):
    """Writes one answer in the events of a protocol. Each method returns text."""

    def write_start(self) -> str:
        """Begin the answer."""
        ...

    def write_text(self, text: str, /, *, is_refusal: bool = False) -> str:
        """Write a piece of the text, or the reason why the answer does not have the requested form."""
        ...

    def write_end(self, answer: Answer, /) -> str:
        """End the answer, of which all the text was written."""
        ...

    def write_error(self, code: str, text: str, /) -> str:
        """End the answer before its run."""
        ...


def write_answer(writer: AnswerWriter, answer: Answer) -> str:
    """Write an answer at once."""
    return writer.write_start() + writer.write_text(answer.text) + writer.write_end(answer)


@attrs.define(eq=False, repr=False, kw_only=True)
class AnswerEncoder:
    """Encoder of a run as one text: the texts of its model, and at the end what the run waits for."""

    ends_at_wait = True
    folds = True

    run_id: str
    writer: AnswerWriter
    decode: Callable[[Run], Run]
    """Returns a run whose agent parses its output."""

    is_formed: bool = False
    """Whether only the answer is written, whole: texts before it would make it invalid JSON."""

    _run: Run | None = attrs.field(default=None, init=False)
    _pieces: PieceFilter = attrs.field(factory=PieceFilter, init=False)
    _has_text: bool = attrs.field(default=False, init=False)
    _is_apart: bool = attrs.field(default=False, init=False)
    """Whether the next text begins a paragraph, because it is that of another reply."""

    def encode_start(self, run: Run | None) -> str:
        """Begin the answer."""
        self._run = run
        return self.writer.write_start()

    def encode_event(self, item: FeedEvent, run: Run | None, position: str) -> str:  # noqa: ARG002
        """Write the rest of a reply."""
        if run is None or item.run_id != self.run_id or self.is_formed:
            return ""
        self._run, event, text = run, item.event, ""
        if isinstance(event, REPLIES):
            rest = self._pieces.finish(event.message.text)
            text = self._write(event.message.text, is_apart=True) if rest is None else self._write(rest)
            self._is_apart = self._has_text
        for piece, offset in self._pieces.take_early():
            text += self.encode_delta(piece, offset)
        return text

    def encode_delta(self, event: StreamEvent, offset: int) -> str:
        """Write a piece of text."""
        if self._run is None or getattr(event, "run_id", "") != self.run_id or self.is_formed:
            return ""
        piece = self._pieces.accept(self._run, event, offset)
        return self._write(piece.text) if isinstance(piece, TextDelta) else ""

    def encode_end(self, run: Run | None, position: str) -> str:  # noqa: ARG002
        """Write the wait of the run, or why it failed, and the end."""
        assert run is not None  # noqa: S101  `folds` is set
        answer, text = read_answer(self.decode(run)), ""
        is_told = answer.status is AnswerStatus.WAITING
        if self.is_formed or is_told:
            text = self._write(answer.text, is_apart=True, is_refusal=self.is_formed and is_told)
        return text + self.writer.write_end(answer)

    def encode_cut(self, ending: Ending) -> str:
        """Write an error, because a stream that only stopped would look like a whole answer."""
        return self.writer.write_error(f"stream_{ending}", f"the stream ended; see GET /v1/runs/{self.run_id}")

    def _write(self, text: str, *, is_apart: bool = False, is_refusal: bool = False) -> str:
        if not text:
            return ""
        gap = "\n\n" if self._has_text and (is_apart or self._is_apart) else ""
        self._has_text, self._is_apart = True, False
        return self.writer.write_text(gap + text, is_refusal=is_refusal)
