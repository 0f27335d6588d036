"""Step throttle of an event loop: limits the steps per round, so that work without a wait does not block it for long.

A step is a part of such work: a step of a run, a call of a tool, an item of a list. A thousand runs that begin
together, or 10,000 calls that each end at once, would all be done in one round of the loop and block everything else in
the process, such as health checks and other requests. Steps beyond the limit wait for a later round, first come, first
served, and all loops of the package share it: a loop that may go on without a wait passes it before each part.

The aim is latency, not speed: a turn costs the same without it. 10,000 items of a flow were one round of 4.9 s.
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

# Steps per round of the event loop: 2 ms of work if they are steps of runs, 10 ms if they are calls. Waiting for the
# next round costs 10 us if no other step waits.
STEPS_PER_TICK: Final = 32


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
    def current(cls) -> StepThrottle:
        """Return the throttle of the running event loop."""
        native = current_token().native_token
        gate = _throttles.get(native)
        if gate is None:
            gate = _throttles[native] = cls()
        return gate

    @classmethod
    async def enter(cls) -> StepThrottle:
        """Wait for a place in the running event loop's current or next round, and return its throttle."""
        gate = cls.current()
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
