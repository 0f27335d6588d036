"""Show a conversation: with Markdown and live progress in a terminal, in plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from agentfsm.cli.render.progress import PlainView, RunView
from agentfsm.core.machine import State
from agentfsm.streaming.stream import StateChanged, TextDelta

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.streaming.stream import StreamEvent


class ChatView(RunView, Protocol):
    """Shows the replies of a conversation."""

    def show_message(self, text: str) -> None:
        """Show an earlier message of the person."""
        ...

    def show_answer(self, text: str, *, is_new: bool = True) -> None:
        """Show the text that ends a reply.

        Args:
            text: Text of the answer, in Markdown.
            is_new: Whether it is the answer of the reply that was just executed, which may have been shown already.
        """
        ...

    def show_note(self, text: str) -> None:
        """Show a remark about the conversation."""
        ...


@attrs.define(eq=False, repr=False, kw_only=True)
class PlainChatView(PlainView):
    """Writes plain lines: answers to stdout, all else to stderr. In a terminal, answers appear as they are written."""

    _streamed: str = ""
    """Text of the reply that is being written, as far as it was shown."""

    _attempt: int = 0

    def on_event(self, event: StreamEvent, run: Run) -> None:
        """Write a piece of the answer, or a line for a tool."""
        if isinstance(event, TextDelta):
            if not self.terminal.is_watched:
                return
            if event.attempt != self._attempt and self._streamed:
                self._end_line()
                self.terminal.err("(the model begins again)")
            self._attempt = event.attempt
            self._streamed += event.text
            self.terminal.err(event.text, end="")
            return
        if isinstance(event, StateChanged):
            if event.state is State.ACT:
                if not self._streamed:
                    super().on_event(event, run)
                self._end_line()
            return
        self._end_line()
        super().on_event(event, run)

    def _end_line(self) -> None:
        if self._streamed:
            self._streamed = ""
            self.terminal.err("")

    def end(self, run: Run) -> None:
        """Keep the text that was streamed: `show_answer` ends its line."""

    def show_message(self, text: str) -> None:
        """Write a message of the person."""
        self.terminal.err("\n".join(f"> {line}" for line in text.splitlines()))

    def show_answer(self, text: str, *, is_new: bool = True) -> None:
        """Write the answer to stdout, unless it was streamed to the same terminal."""
        was_shown = is_new and self.terminal.width is not None and self._streamed.strip() == text.strip()
        self._end_line()
        if not was_shown:
            self.terminal.out(text)

    def show_note(self, text: str) -> None:
        """Write a remark to stderr."""
        self._end_line()
        self.terminal.err(text)
