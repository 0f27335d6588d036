"""The gate of an event loop: so many steps pass in one round of it, so that a crowd of runs never holds it for long.

A step is some 50 us of work around what it waits for. A thousand runs that begin together, or whose models answer
together, would do theirs in one round of the loop, and for so long nothing else in the process would be heard: no
health check, no other request. Who comes when the round is full waits for one of the next, in the order of coming.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
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
class Gate:
    """Where steps wait for a round that has room for them."""

    _room: int = ROUND
    # Steps that may pass in this round.
    _waiting: dict[anyio.Event, None] = attrs.field(factory=dict)
    # In the order of their coming; a dict, so that whoever is cancelled leaves at no cost.
    _is_called: bool = False
    # Whether the event loop is to begin the next round.

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
        opened = event_loop().create_event()
        self._waiting[opened] = None
        if not self._is_called:
            self._call(_soon())
        try:
            await opened.wait()
        finally:
            self._waiting.pop(opened, None)

    def _call(self, soon: Soon) -> None:
        self._is_called = True
        soon(partial(self._begin_round, soon))

    def _begin_round(self, soon: Soon) -> None:
        passing = list(islice(self._waiting, ROUND))
        for opened in passing:
            del self._waiting[opened]
            opened.set()
        self._room, self._is_called = ROUND - len(passing), False
        if self._waiting:
            self._call(soon)


def _soon() -> Soon:
    native: Any = event_loop().current_token()
    soon: Soon = getattr(native, "call_soon", None) or native.run_sync_soon
    return soon


_gates: Final[WeakKeyDictionary[object, Gate]] = WeakKeyDictionary()
# By the event loop's own token.
