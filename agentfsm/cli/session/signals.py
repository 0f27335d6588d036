"""Handle Ctrl-C and SIGTERM: the first signal cancels the running work, the second ends the process at once.

Work with a drain ends in order at the first signal. The second one cuts off its effects, and the third ends the
process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, TypeVarTuple, cast

import anyio
import attrs

from agentfsm._lib.concurrency import threadsafe_scheduler
from agentfsm.cli.codes import ExitCode

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")
Args = TypeVarTuple("Args")

# The live view hides the cursor.
_SHOW_CURSOR: Final = b"\x1b[?25h"
_FORCED_EXIT: Final = b"\nended at once: nothing that was acknowledged is lost\n"


@attrs.define(eq=False, repr=False)
class InterruptibleRunner:
    """Handles signals while the block runs: `with InterruptibleRunner() as runner: runner.run(act)`."""

    drain_s: float = 0.0
    """Seconds that effects in flight have to end after the first signal. 0: the work has no drain."""

    end_drain: Callable[[], object] | None = None
    """Cuts off the effects in flight, at the second signal; None if the work has no drain."""

    is_terminated: bool = attrs.field(default=False, init=False)
    """Whether the signal was SIGTERM, so that the process has to end."""

    _is_interrupted: bool = attrs.field(default=False, init=False)
    _is_cut_off: bool = attrs.field(default=False, init=False)
    _schedule: Callable[[Callable[[], object]], object] | None = attrs.field(default=None, init=False)
    """Calls a function in the event loop; None if no loop runs."""

    _cancel: Callable[[], object] | None = attrs.field(default=None, init=False)
    """Cancels the running function; None if no function runs."""

    _previous_handlers: dict[int, Any] = attrs.field(factory=dict, init=False)
    """Previous handler of each signal."""

    def __enter__(self) -> Self:
        """Install the handlers. In a thread other than the main one, leave signals to the caller."""
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                if signal.getsignal(number) is not signal.SIG_IGN:  # shells ignore SIGINT for background jobs
                    self._previous_handlers[number] = signal.signal(number, self._handle_signal)
            except ValueError:
                break
        return self

    def __exit__(self, *_error: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def run(self, act: Callable[[*Args], Awaitable[T]], *args: *Args) -> T:
        """Run a function in an event loop. The first signal cancels it.

        Raises:
            KeyboardInterrupt: if it was cancelled, or a signal arrived after its end.
        """
        before, self._cancel = self._is_interrupted, _defer_cancel
        try:
            result = anyio.run(self._run_cancellable, partial(act, *args), before)
        finally:
            self._cancel = self._schedule = None
        if self._is_interrupted and not before:
            raise KeyboardInterrupt
        return cast("T", result)

    async def _run_cancellable(self, act: Callable[[], Awaitable[T]], was_interrupted: bool) -> T | None:
        with anyio.CancelScope() as scope:
            self._schedule = threadsafe_scheduler()
            self._cancel = partial(self._schedule, scope.cancel)
            if self._is_interrupted and not was_interrupted:  # a signal arrived while the loop started
                scope.cancel()
            return await act()
        return None

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        self.is_terminated = self.is_terminated or number == signal.SIGTERM
        if self._is_interrupted and self.drain_s and not self._is_cut_off and self._schedule and self.end_drain:
            self._is_cut_off = True
            os.write(2, b"\ncutting off the effects in flight; another signal ends the process at once\n")
            self._schedule(self.end_drain)
            return
        if self._is_interrupted:
            os.write(2, (_SHOW_CURSOR if sys.stderr.isatty() else b"") + _FORCED_EXIT)
            os._exit(ExitCode.INTERRUPTED)
        self._is_interrupted = True
        if self.drain_s and self._schedule is not None:
            text = f"\nstopping: effects in flight have {self.drain_s:g} s to end; another signal cuts them off\n"
            os.write(2, text.encode())
        if self._cancel is None:
            raise KeyboardInterrupt
        self._cancel()


def _defer_cancel() -> None:
    """Do nothing, because the event loop is starting or closing. `run` checks the flag afterwards."""
