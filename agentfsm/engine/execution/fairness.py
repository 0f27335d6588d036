"""Step throttle of an event loop: limits the steps per round, so that many runs do not block it for long.

A step is some 50 us of work around its wait. A thousand runs that begin together, or whose models answer together,
would all work in one round of the loop and block everything else in the process, such as health checks and other
requests. Steps beyond the limit wait for a later round, first come, first served.

The aim is latency, not speed: a turn costs the same without it, and the longest stall of 1,000 runs was 529 ms in place
of 294, without the garbage collector 310 in place of 67 (`python -m benchmarks crowd:stall`, a busy machine).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm._lib.concurrency import next_tick_scheduler

if TYPE_CHECKING:
    from agentfsm._lib.concurrency import CallSoon

# Steps per round of the event loop: 3 to 6 ms of work. Waiting for the next round costs 10 us if no other step waits.
STEPS_PER_TICK: Final = 64


@attrs.define(eq=False, repr=False)
class _Tick:
    """A future round of the event loop."""

    started: anyio.Event
    steps: int = 0
    """Number of steps that wait for this round."""


@attrs.define(eq=False, repr=False)
class StepThrottle:
    """Limits the steps in each round of an event loop."""

    _remaining: int = STEPS_PER_TICK
    """Number of steps that may still pass in this round."""

    _ticks: deque[_Tick] = attrs.field(factory=deque)
    """Future rounds; all but the last are full."""

    @classmethod
    async def enter(cls) -> StepThrottle:
        """Wait for a place in the running event loop's current or next round, and return its throttle."""
        native = current_token().native_token
        gate = _throttles.get(native)
        if gate is None:
            gate = _throttles[native] = cls()
        if not gate.try_acquire():
            await gate.acquire()
        return gate

    def try_acquire(self) -> bool:
        """Take a place in this round if there is one; return whether there was."""
        if not self._remaining:
            return False
        self._remaining -= 1
        return True

    async def acquire(self) -> None:
        """Wait for a round with a free place."""
        if not self._ticks or self._ticks[-1].steps == STEPS_PER_TICK:
            self._ticks.append(_Tick(anyio.Event()))
            if len(self._ticks) == 1:
                self._schedule_next(next_tick_scheduler())
        last = self._ticks[-1]
        last.steps += 1
        await last.started.wait()

    def _schedule_next(self, call_soon: CallSoon) -> None:
        call_soon(partial(self._begin_tick, call_soon))

    def _begin_tick(self, call_soon: CallSoon) -> None:
        this = self._ticks.popleft()
        self._remaining = STEPS_PER_TICK - this.steps
        this.started.set()
        if self._ticks:
            self._schedule_next(call_soon)


# Throttles by the token of their event loop.
_throttles: Final[WeakKeyDictionary[object, StepThrottle]] = WeakKeyDictionary()
