"""Ctrl-C and SIGTERM: the first ends in order what is under way, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, TypeVarTuple, cast

import anyio
import attrs

from agentfsm._concurrency import threadsafe_scheduler
from agentfsm.cli.codes import Exit

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")
Args = TypeVarTuple("Args")

# The cursor may be hidden, where a live view is cut off.
_CURSOR: Final = b"\x1b[?25h"
_AT_ONCE: Final = b"\nended at once: nothing that was acknowledged is lost\n"


@attrs.define(eq=False, repr=False)
class Ending:
    """Hears the signals while the block runs: `with Ending() as ending: ending.run(act)`."""

    _asked: bool = attrs.field(default=False, init=False)
    _stop: Callable[[], object] | None = attrs.field(default=None, init=False)
    # Cancels what runs; None where nothing does.
    _before: dict[int, Any] = attrs.field(factory=dict, init=False)
    # What the signals did.

    def __enter__(self) -> Self:
        """Listen; in another thread than the main one signals are the business of whoever called."""
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell sets it for what runs beside it
                    self._before[number] = signal.signal(number, self._hear)
            except ValueError:
                break
        return self

    def __exit__(self, *_error: object) -> None:
        """Let the signals do what they did."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, act: Callable[[*Args], Awaitable[T]], *args: *Args) -> T:
        """Run it in an event loop; a first signal cancels it.

        Raises:
            KeyboardInterrupt: when it was cancelled, or a signal came too late for that.
        """
        before, self._stop = self._asked, _wait
        try:
            result = anyio.run(self._cancellable, partial(act, *args), before)
        finally:
            self._stop = None
        if self._asked and not before:
            raise KeyboardInterrupt
        return cast("T", result)

    async def _cancellable(self, act: Callable[[], Awaitable[T]], before: bool) -> T | None:
        with anyio.CancelScope() as scope:
            self._stop = partial(threadsafe_scheduler(), scope.cancel)
            if self._asked and not before:  # while the loop began
                scope.cancel()
            return await act()
        return None

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            os.write(2, (_CURSOR if sys.stderr.isatty() else b"") + _AT_ONCE)
            os._exit(Exit.INTERRUPTED)
        self._asked = True
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()


def _wait() -> None:
    """Do nothing yet: the event loop begins, or ends."""
