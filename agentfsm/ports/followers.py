"""Durable consumers of the journals in a store.

A follower reads the journals of runs that were released, paused or ended, at least once, and the store keeps its
position. Exporters, memory and counters are followers: they may be slow, offline or wrong without affecting a run.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self, TypeAlias, get_args

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm.core.errors import AgentError, MisuseError, RunNotFoundError
from agentfsm.core.events import Event
from agentfsm.core.header import Header
from agentfsm.core.validation import BOOL, NAME, SECONDS, require_choice
from agentfsm.ports.stored import Feedback, StoredRun, UnreadRun

if TYPE_CHECKING:
    from types import TracebackType

FollowerStart: TypeAlias = Literal["beginning", "now"]
"""The first change that a new follower reads: "beginning": all runs in the store. "now": only later changes."""

FOLLOWER_START: Final = require_choice(*get_args(FollowerStart))
# Runs that are requested from the store at a time.
BATCH: Final = 100
# Deliveries that may be open at a time. More mean that `done` is never called, and all would come again.
MAX_OPEN_DELIVERIES: Final = 1_000
# Default time that a delivery may take before another process may get it too, seconds.
FOLLOWER_LEASE_S: Final = 60.0
# Part of the lease after which a held delivery renews it: two renewals may fail.
RENEWAL_SHARE: Final = 0.3
# Default time between two looks into the store while there is nothing to deliver, seconds.
FOLLOWER_POLL_S: Final = 1.0


class FollowedStore(Protocol):
    """The methods of a store that a `Follower` uses."""

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Return the header and the events after that version.

        Raises:
            RunNotFoundError: if the run does not exist.
            CorruptError: if its journal cannot be read.
            TooNewError: if a newer agentfsm has written its journal.
        """
        ...

    async def list_feedback(self, run_id: str) -> tuple[Feedback, ...]:  # noqa: ARG002  a default
        """Return the feedback on a run, oldest first. The default returns none.

        Raises:
            RunNotFoundError: if the run does not exist.
        """
        return ()

    async def add_follower(self, name: str, *, start: FollowerStart = "beginning") -> None:  # noqa: ARG002  a default
        """Create a follower, unless it exists. The default refuses: a store without followers.

        Args:
            name: Name of the follower, unique in the store.
            start: The first change that it reads; ignored if it exists.
        """
        raise MisuseError(f"{type(self).__name__} has no followers: it does not implement add_follower")

    async def take_unread(
        self, name: str, *, holder: str, after: int = 0, lease_s: float = FOLLOWER_LEASE_S, limit: int = BATCH
    ) -> tuple[UnreadRun, ...]:
        """Return runs that changed after the follower's position, in the order of the changes, and hold the follower.

        A run appears once, with its last change. No change is left out: one that is committed later has a larger number
        than those returned before.

        Args:
            name: Name of the follower.
            holder: Name of the caller. Until `lease_s` has passed since its last call, others get nothing.
            after: Number of the last change that this caller has got already; 0 for none.
            lease_s: Seconds for which the caller holds the follower.
            limit: Maximum number of runs.

        Returns:
            The runs; none if there are no changes, or another caller holds the follower.

        Raises:
            MisuseError: if the follower does not exist.
        """
        ...

    async def confirm_read(
        self, name: str, *, holder: str, position: int, versions: Mapping[str, int], release: bool = False
    ) -> None:
        """Record that the follower has read all changes up to a number.

        Args:
            name: Name of the follower.
            holder: Name of the caller.
            position: Number of the last change that was read; a smaller one than before has no effect.
            versions: Versions up to which the runs were read, by `UnreadRun.key`.
            release: Whether to let other callers take the follower at once.

        Raises:
            LeaseLostError: if another caller holds the follower, or it was dropped; nothing is recorded.
        """
        ...


@attrs.frozen(eq=False, repr=False, kw_only=True)
class Delivery:
    """The new events of one run, for a follower."""

    header: Header
    """Header of the run."""

    after_version: int
    """Version up to which the follower had read the run: 0 at the first delivery of a run."""

    events: tuple[Event, ...]
    """Events after that version, oldest first; the first of them made version `after_version + 1`. Empty if only
    feedback is new.
    """

    feedback: tuple[Feedback, ...]
    """All feedback on the run so far, oldest first, also if it was delivered before."""

    _follower: Follower = attrs.field(alias="follower")
    _open_delivery: _OpenDelivery = attrs.field(alias="open_delivery")

    @property
    def run_id(self) -> str:
        """Id of the run. With a version it identifies an event, also if the event is delivered again."""
        return self.header.id

    @property
    def version(self) -> int:
        """Version of the run after the events."""
        return self.after_version + len(self.events)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Keep other processes from the follower during work that may take longer than `lease_s`.

            async with delivery.hold():
                await ask_a_model(delivery.events)
            await delivery.done()

        The lease is renewed in the background as long as the event loop runs. So `lease_s` may be short, and the place
        of a process that was killed is soon free. If a renewal comes too late, `done` says so.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._follower._renew_lease)  # noqa: SLF001  as below
                yield
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:  # it holds the error of the work
            error = group.exceptions[0]
            raise error from error.__cause__

    async def done(self) -> None:
        """Record that this delivery needs no repetition. A second call has no effect.

        Deliveries may be done in any order. The store's position moves up to the oldest one that is not done.

        Raises:
            LeaseLostError: if this took longer than `lease_s`, and another process got the follower meanwhile: it gets
                the delivery again. Also if the follower was dropped.
        """
        self._open_delivery.is_done = True
        await self._follower._confirm()  # noqa: SLF001  the follower is the only user of this class


@attrs.define(eq=False)
class _OpenDelivery:
    """A delivery that the store does not know to be done."""

    key: str
    change: int
    version: int
    is_done: bool = False


@attrs.define(eq=False, repr=False)
class Follower(AsyncIterator[Delivery]):
    """A durable consumer of the journals in a store, made by `Store.follow`.

        async with store.follow("export") as follower:
            async for delivery in follower:
                await export(delivery.run_id, delivery.after_version, delivery.events)
                await delivery.done()

    Each event of a run is delivered at least once, after the run was released, paused or ended. A delivery has the
    events that the follower has not read yet, up to the newest one. What was not done comes again after a crash, with
    the same run ids and versions, so use these as a key: replace what is there, do not add to it. A run that was
    deleted meanwhile is left out. `prune` keeps the runs that a follower has not read.

    Several processes may follow under one name. One of them works at a time. The others wait until it leaves, or has
    not called the store for `lease_s` seconds.
    """

    store: FollowedStore
    """The store whose runs are followed."""

    name: str = attrs.field(validator=NAME)
    """Name of the follower. The store keeps its position under this name."""

    start: FollowerStart = attrs.field(default="beginning", kw_only=True, validator=FOLLOWER_START)
    """The first change that is read if the store does not know the follower: "beginning" (all runs) or "now"."""

    wait: bool = attrs.field(default=True, kw_only=True, validator=BOOL)
    """Whether to wait for further changes. False: the iteration ends when everything was delivered."""

    lease_s: float = attrs.field(default=FOLLOWER_LEASE_S, kw_only=True, validator=SECONDS)
    """Seconds after which another process may get a delivery too if this one did not call the store meanwhile; set it
    above the longest time between two deliveries, or work under `delivery.hold()`. Default 60.
    """

    poll_s: float = attrs.field(default=FOLLOWER_POLL_S, kw_only=True, validator=SECONDS)
    """Seconds between two looks into the store while there is nothing to deliver. Default 1."""

    _holder: str = attrs.field(factory=lambda: secrets.token_hex(8), init=False)
    _is_added: bool = attrs.field(default=False, init=False)
    _taken: deque[UnreadRun] = attrs.field(factory=deque, init=False)
    """Runs that the store returned and that were not delivered yet."""

    _open: deque[_OpenDelivery] = attrs.field(factory=deque, init=False)
    """Deliveries that the store does not know to be done, oldest first."""

    _last_change: int = attrs.field(default=0, init=False)
    """Number of the last change that the store returned."""

    async def __aenter__(self) -> Self:
        await self._add()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let another process follow at once. What is not done is delivered again."""
        is_added, self._is_added = self._is_added, False
        self._taken.clear()
        self._open.clear()
        self._last_change = 0
        if is_added:
            with anyio.CancelScope(shield=True), suppress(AgentError):  # else it ends by itself, after `lease_s`
                await self.store.confirm_read(self.name, holder=self._holder, position=0, versions={}, release=True)

    async def __anext__(self) -> Delivery:
        """Return the next delivery.

        Raises:
            MisuseError: if the follower was dropped, or 1,000 deliveries are not done.
        """
        await self._add()
        while True:
            while self._taken:
                await checkpoint()  # a store in memory does not wait
                delivery = await self._read(self._taken[0])
                self._taken.popleft()  # not before: a cancelled read loses nothing
                if delivery is not None:
                    return delivery
                await self._confirm()
            if not await self._take():
                if not self.wait:
                    raise StopAsyncIteration
                await anyio.sleep(self.poll_s)

    async def _add(self) -> None:
        if not self._is_added:
            await self.store.add_follower(self.name, start=self.start)
            self._is_added = True

    async def _take(self) -> bool:
        """Request more runs. Return whether there are any."""
        if len(self._open) >= MAX_OPEN_DELIVERIES:
            raise MisuseError(
                f"follower {self.name!r}: {len(self._open):,} deliveries are not done; call `await delivery.done()` "
                "after each, or all of them come again"
            )
        found = await self.store.take_unread(
            self.name, holder=self._holder, after=self._last_change, lease_s=self.lease_s, limit=BATCH
        )
        self._taken.extend(found)
        self._last_change = found[-1].change if found else self._last_change
        return bool(found)

    async def _read(self, unread: UnreadRun) -> Delivery | None:
        """Return the delivery of a run; None if there is nothing to deliver, which counts as done."""
        after = max([each.version for each in self._open if each.key == unread.key], default=unread.after)
        try:
            stored = await self.store.read(unread.run_id, after)
            feedback = await self.store.list_feedback(unread.run_id)
        except RunNotFoundError:
            self._open.append(_OpenDelivery(unread.key, unread.change, after, is_done=True))
            return None
        version = after + len(stored.events)
        opened = _OpenDelivery(unread.key, unread.change, version, is_done=not (stored.events or feedback))
        self._open.append(opened)
        if opened.is_done:
            return None
        return Delivery(
            header=stored.header,
            after_version=after,
            events=stored.events,
            feedback=feedback,
            follower=self,
            open_delivery=opened,
        )

    async def _confirm(self) -> None:
        """Report the deliveries up to the oldest one that is not done."""
        done = list(takewhile(lambda each: each.is_done, self._open))
        if not done:
            return
        position, versions = done[-1].change, {each.key: each.version for each in done}
        await self.store.confirm_read(self.name, holder=self._holder, position=position, versions=versions)
        while self._open and self._open[0].change <= position:
            self._open.popleft()

    async def _renew_lease(self) -> None:
        """Renew the lease until cancelled. What is not done is unread, so `take_unread` finds it and renews."""
        while True:
            await anyio.sleep(RENEWAL_SHARE * self.lease_s)
            if self._open:
                with suppress(AgentError):  # else the next one renews, or `done` says that the lease was lost
                    # Refused if another one has held the follower meanwhile, who may have done the delivery.
                    await self.store.confirm_read(self.name, holder=self._holder, position=0, versions={})
                    await self.store.take_unread(
                        self.name, holder=self._holder, after=self._open[0].change - 1, lease_s=self.lease_s, limit=1
                    )
