"""Terminal input and output: results on stdout, everything else on stderr, and all text without control characters."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

import attrs

from agentfsm.core.errors import AgentError
from agentfsm.core.text_safety import strip_unsafe


@attrs.define(eq=False, repr=False, kw_only=True)
class Terminal:
    """The three standard streams of the process. A reader that closed its end causes no error."""

    json: bool = False
    """Whether the result is one JSON document."""

    stdout: TextIO = attrs.field(factory=lambda: sys.stdout)
    """Kept, because `sys.stdout` is turned to stderr while code of the user's runs."""

    def out(self, text: str) -> None:
        """Write lines of the result."""
        _write_result(self.stdout, strip_unsafe(text) + "\n")

    def document(self, value: object) -> None:
        """Write the result as one JSON document, in ASCII, so that it contains no terminal control characters."""
        _write_result(self.stdout, json.dumps(value, indent=2, default=str) + "\n")

    def err(self, text: str, end: str = "\n") -> None:
        """Write progress lines to stderr."""
        _write_stderr(strip_unsafe(text) + end)

    @property
    def is_watched(self) -> bool:
        """Whether stderr is a terminal."""
        return _is_terminal(sys.stderr)

    @property
    def can_ask(self) -> bool:
        """Whether a person can answer questions."""
        return self.is_watched and _is_terminal(sys.stdin)

    def ask(self, question: str) -> str | None:
        """Ask, and return the answer; None if there is none (Ctrl-D, or a signal that ends the command)."""
        with _open_signal_pipe() as news:  # from before the question on: whoever reads it may press Ctrl-C at once
            self.err(question, end=" ")
            answer = sys.stdin.readline() if news is None or _wait_for_line(sys.stdin, news) else ""
        if not answer:
            self.err("")
        return answer.strip() if answer else None

    def ask_choice(self, question: str, choices: Mapping[str, str]) -> str | None:
        """Ask until the answer is one of the choices, ignoring case; None if there is no answer."""
        while (answer := self.ask(question)) is not None:
            if (chosen := choices.get(answer.lower())) is not None:
                return chosen
        return None


def _wait_for_line(stream: TextIO, news: int) -> bool:
    """Return when a terminal has a line to read, or a signal came, whose handler runs then; tell whether it has.

    A read that begins right behind a signal does not notice it: Ctrl-C would do nothing until the next line is typed.
    In an event loop its handler only cancels what runs, which has to come to an end first.
    """
    readable, _, _ = select.select([stream.fileno(), news], [], [])
    return stream.fileno() in readable


@contextmanager
def _open_signal_pipe() -> Iterator[int | None]:
    """Open a pipe that becomes readable when a signal arrives; None if the platform has none."""
    if os.name != "posix":
        yield None
        return
    news, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told)
    try:
        yield news
    finally:
        signal.set_wakeup_fd(before)
        os.close(news)
        os.close(told)


class _StderrProxy:
    """Stands for stdout while code of the user's runs: what it prints goes to stderr, read or not."""

    def write(self, text: str) -> int:
        _write_stderr(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect everything that the block prints to stderr, since stdout is reserved for results."""
    with _redirect_descriptor(), redirect_stdout(cast("TextIO", _StderrProxy())):
        yield


@contextmanager
def _redirect_descriptor() -> Iterator[None]:
    """Redirect the file descriptor of stdout to stderr, too, since child processes inherit it."""
    try:
        own, watched = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # no real streams
        yield
        return
    kept = os.dup(own)
    try:
        os.dup2(watched, own)
        yield
    finally:
        os.dup2(kept, own)
        os.close(kept)


def make_streams_tolerant() -> None:
    """Let nothing that stdout and stderr cannot do be an error.

    A question mark stands for a character that the encoding lacks; one that was closed before the start leads nowhere.
    """
    for number in range(3):  # else what is opened next gets the number, and is written to
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  it stays open
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def _write_result(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:  # whoever read it has had enough
        _silence(stream)
    except OSError as error:
        _silence(stream)
        raise AgentError(f"stdout takes no more ({error.strerror}): the result is not there as a whole") from error


def _write_stderr(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:  # the reader is gone, which is not a reason to stop
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Discard further writes to a stream whose reader is gone, including those at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
