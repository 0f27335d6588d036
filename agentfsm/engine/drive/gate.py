"""The gate of an event loop: so many steps pass in one round of it, so that a crowd of runs never holds it for long.

A step is some 50 us of work around what it waits for. A thousand runs that begin together, or whose models answer
together, would do theirs in one round of the loop, and for so long nothing else in the process would be heard: no
health check, no other request. Who comes when the round is full waits for one of the next, in the order of coming.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import attrs

from agentfsm._concurrency import current_backend, next_tick_scheduler

if TYPE_CHECKING:
    import anyio

    from agentfsm._concurrency import CallSoon

# Steps in one round of the event loop: 3 to 6 ms of work. To wait for the next costs 10 us where nobody else does.
ROUND: Final = 64


@attrs.define(eq=False, repr=False)
class _Round:
    """A round to come."""

    begun: anyio.Event
    steps: int = 0
    # That wait for it.


@attrs.define(eq=False, repr=False)
class Gate:
    """Where steps wait for a round that has room for them."""

    _room: int = ROUND
    # Steps that may pass in this round.
    _rounds: deque[_Round] = attrs.field(factory=deque)
    # Those to come, all of them full but the last.

    @classmethod
    async def passed(cls) -> Gate:
        """Pass the gate of the event loop that runs, and return it."""
        native = current_backend().current_token()
        gate = _gates.get(native)
        if gate is None:
            gate = _gates[native] = cls()
        if not gate.try_pass():
            await gate.wait()
        return gate

    def try_pass(self) -> bool:
        """Pass, if this round has room for one more step; return whether it has."""
        if not self._room:
            return False
        self._room -= 1
        return True

    async def wait(self) -> None:
        """Wait for a round that has room for one more step."""
        if not self._rounds or self._rounds[-1].steps == ROUND:
            self._add_round()
        last = self._rounds[-1]
        last.steps += 1
        await last.begun.wait()

    def _add_round(self) -> None:
        self._rounds.append(_Round(current_backend().create_event()))
        if len(self._rounds) == 1:
            self._call_next(next_tick_scheduler())

    def _call_next(self, entrance: CallSoon) -> None:
        entrance(partial(self._begin_round, entrance))

    def _begin_round(self, entrance: CallSoon) -> None:
        this = self._rounds.popleft()
        self._room = ROUND - this.steps
        this.begun.set()
        if self._rounds:
            self._call_next(entrance)


# By the event loop's own token.
_gates: Final[WeakKeyDictionary[object, Gate]] = WeakKeyDictionary()
