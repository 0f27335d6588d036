"""The gate of an event loop: so many steps pass in one round of it, so that a crowd of runs never holds it for long.

A step is some 50 us of work around what it waits for. A thousand runs that begin together, or whose models answer
together, would do theirs in one round of the loop, and for so long nothing else in the process would be heard: no
health check, no other request. Who comes when the round is full waits for one of the next, in the order of coming.
It is there for that, not for speed: a turn costs the same without it, and the longest stall of 1,000 runs was 529 ms in
place of 294, without the garbage collector 310 in place of 67 (`python -m benchmarks crowd:stall`, a busy machine).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm._concurrency import next_tick_scheduler

if TYPE_CHECKING:
    from agentfsm._concurrency import CallSoon

# Steps in one round of the event loop: 3 to 6 ms of work. To wait for the next costs 10 us where nobody else does.
STEPS_PER_TICK: Final = 64


@attrs.define(eq=False, repr=False)
class _Tick:
    """A round to come."""

    started: anyio.Event
    steps: int = 0
    """That wait for it."""


@attrs.define(eq=False, repr=False)
class StepThrottle:
    """Where steps wait for a round that has room for them."""

    _remaining: int = STEPS_PER_TICK
    """Steps that may pass in this round."""

    _ticks: deque[_Tick] = attrs.field(factory=deque)
    """Those to come, all of them full but the last."""

    @classmethod
    async def enter(cls) -> StepThrottle:
        """Pass the gate of the event loop that runs, and return it."""
        native = current_token().native_token
        gate = _throttles.get(native)
        if gate is None:
            gate = _throttles[native] = cls()
        if not gate.try_acquire():
            await gate.acquire()
        return gate

    def try_acquire(self) -> bool:
        """Pass, if this round has room for one more step; return whether it has."""
        if not self._remaining:
            return False
        self._remaining -= 1
        return True

    async def acquire(self) -> None:
        """Wait for a round that has room for one more step."""
        if not self._ticks or self._ticks[-1].steps == STEPS_PER_TICK:
            self._add_tick()
        last = self._ticks[-1]
        last.steps += 1
        await last.started.wait()

    def _add_tick(self) -> None:
        self._ticks.append(_Tick(anyio.Event()))
        if len(self._ticks) == 1:
            self._schedule_next(next_tick_scheduler())

    def _schedule_next(self, call_soon: CallSoon) -> None:
        call_soon(partial(self._begin_tick, call_soon))

    def _begin_tick(self, call_soon: CallSoon) -> None:
        this = self._ticks.popleft()
        self._remaining = STEPS_PER_TICK - this.steps
        this.started.set()
        if self._ticks:
            self._schedule_next(call_soon)


# By the event loop's own token.
_throttles: Final[WeakKeyDictionary[object, StepThrottle]] = WeakKeyDictionary()
