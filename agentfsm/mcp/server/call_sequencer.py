"""Decide which of the calls that reach a server may overlap.

A tool queue orders the calls of one reply. Here each call arrives in its own request, from any client, so calls are
ordered by arrival: a call waits for all earlier ones that it may not overlap.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import attrs

from agentfsm.tools.queue.plan import Access

# Maximum of calls in progress or waiting, since each call checks all earlier ones. Further calls are refused.
MAX_CALLS: Final = 1_000


@attrs.define(eq=False, repr=False)
class _SequencedCall:
    """Call that has arrived and has not ended."""

    access: Access
    ended: anyio.Event = attrs.field(factory=anyio.Event)


@attrs.define(eq=False, repr=False)
class CallSequencer:
    """Calls that have not ended, in the order of arrival, in one event loop."""

    _calls: list[_SequencedCall] = attrs.field(factory=list, init=False)

    @property
    def is_full(self) -> bool:
        """Whether another call would be too many."""
        return len(self._calls) >= MAX_CALLS

    @asynccontextmanager
    async def wait_turn(self, access: Access) -> AsyncIterator[None]:
        """Wait for the earlier calls that this call may not overlap; later calls wait for it in the same way.

        A call that is cancelled while it waits does not delay later calls.
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
