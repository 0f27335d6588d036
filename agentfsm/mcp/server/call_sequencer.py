"""Which of the calls that reach a server may overlap.

A queue orders the calls of one reply. Here each call comes in a request of its own, from any client, so what a reply's
order does is done by the order of coming: a call waits for all earlier ones that it may not overlap.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import attrs

from agentfsm.tools.queue.plan import Access

# Calls under way or waiting: each looks at all before it, and a client that floods is told so.
MAX_CALLS: Final = 1_000


@attrs.define(eq=False, repr=False)
class _SequencedCall:
    """A call that has come and has not ended."""

    access: Access
    ended: anyio.Event = attrs.field(factory=anyio.Event)


@attrs.define(eq=False, repr=False)
class CallSequencer:
    """The calls that have come and have not ended, in the order of their coming; of one event loop."""

    _calls: list[_SequencedCall] = attrs.field(factory=list, init=False)

    @property
    def is_full(self) -> bool:
        """Whether another call would be too many."""
        return len(self._calls) >= MAX_CALLS

    @asynccontextmanager
    async def wait_turn(self, access: Access) -> AsyncIterator[None]:
        """Wait for those calls before this one that it may not overlap; those behind it wait for it alike.

        A call that is cancelled while it waits holds up nobody: who waited for it waits for what it waited for, too.
        """
        own = _SequencedCall(access)
        before = [each for each in self._calls if not access.may_overlap(each.access)]
        self._calls.append(own)
        try:
            for each in before:
                await each.ended.wait()
            yield
        finally:
            self._calls.remove(own)
            own.ended.set()
