"""Terminal input and output: results on stdout, everything else on stderr, and all text without control characters."""

from __future__ import annotations

import getpass
import io
import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, cast

import attrs

from agentfsm.core.errors import AgentError
from agentfsm.core.text_safety import strip_unsafe

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]


@attrs.define(eq=False, repr=False, kw_only=True)
class Terminal:
    """Standard streams of the process. A reader that closes its end of stdout or stderr causes no error."""

    json: bool = False
    """Whether the result is written as one JSON document."""

    stdout: TextIO = attrs.field(factory=lambda: sys.stdout)
    """Stdout for results. Saved here, because `sys.stdout` is redirected to stderr while user code runs."""

    def out(self, text: str) -> None:
        """Write lines of the result to stdout."""
        _write_result(self.stdout, strip_unsafe(text) + "\n")

    def document(self, value: object) -> None:
        """Write the result as one JSON document to stdout, in ASCII, so that it contains no control characters."""
        _write_result(self.stdout, json.dumps(value, indent=2, default=str) + "\n")

    def err(self, text: str, end: str = "\n") -> None:
        """Write progress lines to stderr."""
        _write_stderr(strip_unsafe(text) + end)

    @property
    def is_watched(self) -> bool:
        """Whether stderr is a terminal."""
        return _is_terminal(sys.stderr)

    @property
    def can_render(self) -> bool:
        """Whether stderr is a terminal with colours and a movable cursor, and rich is installed."""
        return self.is_watched and os.environ.get("TERM") != "dumb" and find_spec("rich") is not None

    @property
    def width(self) -> int | None:
        """Columns of the terminal that stdout is connected to; None for a file or a pipe, whose lines are not cut."""
        return shutil.get_terminal_size().columns if _is_terminal(self.stdout) else None

    @property
    def can_ask(self) -> bool:
        """Whether stdin and stderr are terminals, so that a person can answer questions."""
        return self.is_watched and _is_terminal(sys.stdin)

    def ask(self, question: str) -> str | None:
        """Ask, and return the answer; None after Ctrl-D or a signal that ends the command."""
        with _open_signal_pipe() as signal_fd:  # opened first: Ctrl-C may follow the question at once
            self.err(question, end=" ")
            answer = sys.stdin.readline() if signal_fd is None or _wait_for_line(sys.stdin, signal_fd) else ""
        if not answer:
            self.err("")
        return answer.strip() if answer else None

    @property
    def can_edit(self) -> bool:
        """Whether stdin and stdout are a terminal with a movable cursor, and prompt_toolkit is installed."""
        both = _is_terminal(sys.stdin) and _is_terminal(self.stdout)
        return both and os.environ.get("TERM") != "dumb" and find_spec("prompt_toolkit") is not None

    def edit(self, question: str, text: str) -> str | None:
        """Let the person edit a text, and return it; None after Ctrl-D. Without an editor, the text is typed anew."""
        if not self.can_edit:
            return self.ask(question)
        from agentfsm.cli.line_editor import edit_text  # noqa: PLC0415  the one file that loads prompt_toolkit

        answer = edit_text(question, text)
        return answer if answer is None else answer.strip()

    def ask_secret(self, question: str) -> str | None:
        """Ask as `ask` does, without showing the answer while it is typed."""
        with _hidden_input(sys.stdin):
            return self.ask(question)

    def ask_choice(self, question: str, choices: Mapping[str, str], explanation: str = "") -> str | None:
        """Ask until the answer is one of the choices, ignoring case; return None after Ctrl-D.

        The explanation of the choices is shown after `?` and any other answer.

        Input that was typed before the question is dropped: it cannot be the answer to it.
        """
        if termios is not None and _is_terminal(sys.stdin):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
        while (answer := self.ask(question)) is not None:
            if (chosen := choices.get(answer.lower())) is not None:
                return chosen
            if answer and explanation:
                self.err(explanation)
        return None


@contextmanager
def _hidden_input(stream: TextIO) -> Iterator[None]:
    """Do not echo the input; on platforms without such terminals it is shown."""
    if termios is None:
        yield
        return
    before = termios.tcgetattr(stream)
    hidden = [*before]
    hidden[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(stream, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
        _write_stderr("\n")  # the line break was not shown either


def _wait_for_line(stream: TextIO, signal_fd: int) -> bool:
    """Wait until a terminal has a line to read or a signal arrives, and return whether it has a line.

    Without the descriptor, a read that starts right after a signal would block until the next line is typed, because
    in an event loop the signal handler only requests a cancellation.
    """
    readable, _, _ = select.select([stream.fileno(), signal_fd], [], [])
    return stream.fileno() in readable


@contextmanager
def _open_signal_pipe() -> Iterator[int | None]:
    """Open a pipe that becomes readable when a signal arrives. Yields None on platforms without such pipes."""
    if os.name != "posix":
        yield None
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


class _StderrProxy:
    """Replacement for stdout while user code runs: writes to stderr, and ignores that its reader is gone."""

    def write(self, text: str) -> int:
        _write_stderr(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect the output of the block to stderr, because stdout is reserved for results."""
    with _redirect_descriptor(), redirect_stdout(cast("TextIO", _StderrProxy())):
        yield


@contextmanager
def _redirect_descriptor() -> Iterator[None]:
    """Redirect the file descriptor of stdout to stderr as well, because child processes inherit it."""
    try:
        own, target = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # the streams are not files
        yield
        return
    kept = os.dup(own)
    try:
        os.dup2(target, own)
        yield
    finally:
        os.dup2(kept, own)
        os.close(kept)


def make_streams_tolerant() -> None:
    """Make stdout and stderr accept any text.

    Characters that their encoding lacks become question marks. A stream that was closed before the start discards
    its text.
    """
    for number in range(3):  # a free number would go to the next file that is opened, and output would corrupt it
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
    except ValueError:  # the stream is closed
        return False


def _write_result(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:  # the reader closed its end, for example `head`
        _silence(stream)
    except OSError as error:
        _silence(stream)
        raise AgentError(f"cannot write to stdout ({error.strerror}): the result is incomplete") from error


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


def user_name() -> str:
    """Return the name of the operating system's user, for the journal; empty if the system does not report it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""
