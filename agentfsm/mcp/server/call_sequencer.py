"""Decide which of the calls that reach a server may overlap, and whose turn it is.

A tool queue orders the calls of one reply. Here each call arrives in its own request, from any client. A call starts
when it may overlap all calls in progress and all waiting calls before it. Clients take turns: the client whose newest
start was longest ago comes first, so that a client with many slow calls does not hold up the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import attrs

from agentfsm.tools.queue.call_order import Access

# Maximum of calls in progress or waiting, since each call checks all earlier ones. Further calls are refused.
MAX_CALLS: Final = 1_000


@attrs.define(eq=False, repr=False)
class _SequencedCall:
    """Call that has arrived and has not ended."""

    access: Access
    client: str
    started: anyio.Event = attrs.field(factory=anyio.Event)


@attrs.define(eq=False, repr=False)
class CallSequencer:
    """Calls that have not ended, in one event loop."""

    limit: int = MAX_CALLS
    """Maximum of calls in progress."""

    _running: list[_SequencedCall] = attrs.field(factory=list, init=False)
    _waiting: list[_SequencedCall] = attrs.field(factory=list, init=False)
    """Calls that wait, in the order of arrival."""

    _start_count: int = attrs.field(default=0, init=False)
    _newest_starts: dict[str, float] = attrs.field(factory=dict, init=False)
    """Number of the newest start of each client with calls here. A client that comes back counts as having started
    right before the newest start, so that newcomers do not go before those who wait.
    """

    @property
    def is_full(self) -> bool:
        """Whether another call would be too many."""
        return len(self._running) + len(self._waiting) >= MAX_CALLS

    async def wait_idle(self) -> None:
        """Wait until no call is in progress or waits."""
        while self._running or self._waiting:  # noqa: ASYNC110  only at the end of a process
            await anyio.sleep(0.02)

    def count_calls(self, address: str) -> int:
        """Return the number of calls of the clients at an address."""
        return sum(each.client.partition(" ")[0] == address for each in (*self._running, *self._waiting))

    @asynccontextmanager
    async def wait_turn(self, access: Access, client: str = "") -> AsyncIterator[None]:
        """Wait until a call may run, and hold its place meanwhile. A call that is cancelled delays no other.

        Args:
            access: The access of the call, which decides what it may overlap.
            client: Key of the client that makes it; its address may come first, before a space.
        """
        own = _SequencedCall(access, client)
        self._newest_starts.setdefault(client, self._start_count - 0.5)
        self._waiting.append(own)
        self._start_ready()
        try:
            await own.started.wait()
            yield
        finally:
            (self._running if own in self._running else self._waiting).remove(own)
            if all(each.client != client for each in (*self._running, *self._waiting)):
                del self._newest_starts[client]
            self._start_ready()

    def _start_ready(self) -> None:
        """Start the waiting calls whose turn has come."""
        before = list(self._running)
        for each in self._order_waiting():
            if len(self._running) >= self.limit:
                return
            if all(each.access.may_overlap(other.access) for other in before):
                self._waiting.remove(each)
                self._running.append(each)
                self._start_count += 1
                self._newest_starts[each.client] = self._start_count
                each.started.set()
            before.append(each)

    def _order_waiting(self) -> list[_SequencedCall]:
        """Return the waiting calls by their turns: one of each client, then a second of each, and so on."""
        numbers: Counter[str] = Counter()
        turns: list[tuple[int, float, _SequencedCall]] = []
        for each in self._waiting:
            turns.append((numbers[each.client], self._newest_starts[each.client], each))
            numbers[each.client] += 1
        return [each for *_, each in sorted(turns, key=lambda turn: turn[:2])]
