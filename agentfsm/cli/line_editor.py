"""Editing of messages and texts in a terminal. Only this module imports prompt_toolkit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
from prompt_toolkit import PromptSession, prompt
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


def edit_text(question: str, text: str) -> str | None:
    """Return the text as the person edited it; None after Ctrl-D on an empty line.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
    """
    try:
        return prompt(f"{question} ", default=text)
    except EOFError:
        return None


class MessageEditor:
    """Reads messages. Enter ends a message, and Alt-Enter begins a new line; pasted lines stay together."""

    def __init__(self, commands: Mapping[str, str], history: Iterable[str] = ()) -> None:
        """Prepare the editor.

        Args:
            commands: Commands that are completed at the beginning of a message, with their descriptions.
            history: Earlier messages for the arrow keys, oldest first.
        """
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(list(history)),
            completer=_CommandCompleter(commands),
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_bind_keys(),
            reserve_space_for_menu=len(commands),
        )

    def read(self) -> str | None:
        """Return the next message; None after Ctrl-D on an empty line.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
        """
        try:
            return self._session.prompt("> ")
        except EOFError:
            return None


@attrs.define(eq=False, repr=False)
class _CommandCompleter(Completer):
    """Completes the commands of the chat while a message begins with a slash."""

    commands: Mapping[str, str]

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:  # noqa: ARG002  its signature is prompt_toolkit's
        typed = document.text_before_cursor
        if typed.startswith("/"):
            for name, description in self.commands.items():
                if name.startswith(typed):
                    yield Completion(name, start_position=-len(typed), display_meta=description)


def _bind_keys() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _end(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
