"""The gate of an event loop: so many steps pass in one round of it, so that a crowd of runs never holds it for long.

A step is some 50 us of work around what it waits for. A thousand runs that begin together, or whose models answer
together, would do theirs in one round of the loop, and for so long nothing else in the process would be heard: no
health check, no other request. Who comes when the round is full waits for one of the next, in the order of coming.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import attrs

from agentfsm.threads import event_loop

if TYPE_CHECKING:
    import anyio

ROUND: Final = 64
# Steps in one round of the event loop: 3 to 6 ms of work. To wait for the next costs 10 us where nobody else does.

Soon: TypeAlias = Callable[[Callable[[], object]], object]
# Lets an event loop call a function in its next round.


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
        native = event_loop().current_token()
        gate = _gates.get(native)
        if gate is None:
            gate = _gates[native] = cls()
        if not gate.is_open():
            await gate.wait()
        return gate

    def is_open(self) -> bool:
        """Whether one more step may pass in this round; it then counts as one that has."""
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
        loop = event_loop()
        self._rounds.append(_Round(loop.create_event()))
        if len(self._rounds) == 1:
            native: Any = loop.current_token()
            self._call(getattr(native, "call_soon", None) or native.run_sync_soon)

    def _call(self, soon: Soon) -> None:
        soon(partial(self._begin_round, soon))

    def _begin_round(self, soon: Soon) -> None:
        this = self._rounds.popleft()
        self._room = ROUND - this.steps
        this.begun.set()
        if self._rounds:
            self._call(soon)


_gates: Final[WeakKeyDictionary[object, Gate]] = WeakKeyDictionary()
# By the event loop's own token.
