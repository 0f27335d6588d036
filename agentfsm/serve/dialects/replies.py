"""Replies of models as a stream sends them: from pieces, which may be missing, and the journal, which has the whole."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.events import AnswerDrafted, AnswerGiven, ToolsChosen
from agentfsm.core.machine import State
from agentfsm.streaming.stream import TextDelta, ThinkingDelta

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.streaming.stream import StreamEvent

# Events with a reply of the model.
REPLIES: Final = (ToolsChosen, AnswerGiven, AnswerDrafted)
# Pieces of later replies that wait for the journal; when there are more, the journal sends those texts whole.
MAX_EARLY: Final = 1_000


@attrs.define(eq=False)
class SentReply:
    """The part of a reply that was sent: the next one of its run."""

    attempt: int = 0
    """Attempt of the newest piece."""

    text: str = ""
    """Text that was sent."""

    thinking: str = ""
    """Thinking that was sent."""

    retracted: bool = False
    """Whether text of an earlier attempt was sent, which is not part of the reply."""


@attrs.define(eq=False, repr=False)
class PieceFilter:
    """Accepts the pieces of one run's replies that continue what was sent, in the order of the journal."""

    reply: SentReply = attrs.field(factory=SentReply)
    """The reply that is being written."""

    _early: deque[tuple[StreamEvent, int]] = attrs.field(factory=lambda: deque(maxlen=MAX_EARLY))
    """Pieces that came before the event of the journal after which the model was asked."""

    def accept(self, run: Run, event: StreamEvent, offset: int) -> TextDelta | ThinkingDelta | None:
        """Return a piece if it is to be sent now.

        Args:
            run: The run, after the newest event that was sent.
            event: The piece.
            offset: Its position in the text of the reply.
        """
        if not isinstance(event, TextDelta | ThinkingDelta) or event.turn <= run.turn:
            return None
        if event.turn > run.turn + 1 or run.state is not State.THINK:
            self._early.append((event, offset))
            return None
        if event.attempt > self.reply.attempt:
            is_retracted = self.reply.retracted or bool(self.reply.text)
            self.reply = SentReply(attempt=event.attempt, retracted=is_retracted)
        is_text = isinstance(event, TextDelta)
        sent = self.reply.text if is_text else self.reply.thinking
        if event.attempt < self.reply.attempt or offset != len(sent) or not event.text:
            return None
        if is_text:
            self.reply.text += event.text
        else:
            self.reply.thinking += event.text
        return event

    def take_early(self) -> list[tuple[StreamEvent, int]]:
        """Return the pieces that came early, to be offered to `accept` again after an event."""
        pieces = list(self._early)
        self._early.clear()
        return pieces

    def finish(self, text: str) -> str | None:
        """End the reply. Return the rest of its text; None if something else was sent.

        Args:
            text: The text of the reply, from the journal.
        """
        reply, self.reply = self.reply, SentReply()
        return text[len(reply.text) :] if text.startswith(reply.text) and not reply.retracted else None
