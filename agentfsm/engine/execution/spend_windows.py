"""Windows of spending limits in the store: amounts are reserved before each request and call, and settled after it.

The record of a window has what was spent in it, and the reservations of requests in progress in all processes. Changes
are made by compare-and-set. Each is made once, also if its write is repeated because its outcome is unknown: a
reservation has an id of its own, and to settle one that is gone changes nothing. The changes that the tasks of an event
loop make to a window while it is being written are written together, so the number of writes in progress is that of
processes and not of runs.

A request that has no room in one of its windows removes its reservations in the others before it waits, and then tries
that window first. So it does not hold up requests that only share another window with it, and no two requests wait for
each other.

A process that dies leaves its reservations. It is unknown what their requests have cost, so they count as spent with
the reserved amount: at once if the run continues, else other requests stop waiting for them after `PATIENCE_S`. Since a
request is settled before its reply is in the journal, no reply of a journal is counted twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary, ref

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm._lib.newest import Newest
from agentfsm.core.errors import ConflictError, CorruptError
from agentfsm.core.limits import SPEND_RECORDS, SpendWindow

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoreRecord

# Seconds for which other requests wait for a reservation; an older one counts as spent. Few requests take longer.
PATIENCE_S: Final = 300.0
# Seconds after which a reservation that was not settled becomes a part of what was spent.
FORGET_S: Final = 86_400.0
# Seconds for which the record of a window is kept after its end.
KEEP_S: Final = 7 * 86_400.0
# Longest wait before a write is tried again after another process has written, seconds; it doubles from the first.
_FIRST_RETRY_S: Final = 0.002
_LAST_RETRY_S: Final = 0.25
# Windows of one event loop that are cached.
_MAX_WINDOWS: Final = 1_000
# Ten requests of 0.1 US dollars fit a limit of 1, although floats add up to a little more.
_ROUNDING_USD: Final = 1e-9
# Digits of US dollars behind the point in a record: far more than a token costs.
_DIGITS: Final = 12


@attrs.define(eq=False)
class WindowRecord:
    """The record of a window, while a change is applied to it."""

    spent_usd: float = 0.0
    """US dollars for requests and calls that are over, and for those whose process has died."""

    requests: int = 0
    """Number of these requests and calls."""

    refused: int = 0
    """Number of requests and calls that were refused."""

    reserved: dict[str, tuple[float, float]] = attrs.field(factory=dict)
    """Amounts of requests in progress in US dollars, with the time of the reservation, by id."""

    warned: list[float] = attrs.field(factory=list)
    """Amounts in US dollars whose warning was given."""

    limits: list[float] = attrs.field(factory=list)
    """Limits of the agents that have used the window, US dollars."""

    @classmethod
    def from_json(cls, value: Any, key: str) -> WindowRecord:
        """Read a record.

        Raises:
            CorruptError: if it is not the record of a window.
        """
        try:
            reserved = {str(name): (float(usd), float(at)) for name, (usd, at) in value["reserved"].items()}
            return cls(
                float(value["spent_usd"]),
                int(value["requests"]),
                int(value["refused"]),
                reserved,
                [float(each) for each in value["warned"]],
                [float(each) for each in value["limits"]],
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"the record {key!r} of kind {SPEND_RECORDS!r} cannot be read: {error!r}") from error

    def to_json(self, window: SpendWindow) -> dict[str, JSON]:
        """Return the record with the description of its window."""
        return {
            "scope": window.scope,
            "subject": window.subject,
            "tenant": window.tenant,
            "per": window.per,
            "tz": window.tz,
            "start": window.start,
            "ends_at": window.ends_at,
            "purpose": window.purpose,
            "spent_usd": round(self.spent_usd, _DIGITS),
            "requests": self.requests,
            "refused": self.refused,
            "reserved": {name: [usd, at] for name, (usd, at) in self.reserved.items()},
            "warned": list(self.warned),
            "limits": list(self.limits),
        }

    @property
    def reserved_usd(self) -> float:
        """US dollars of all reservations."""
        return sum([usd for usd, _ in self.reserved.values()])

    def add_spent(self, usd: float) -> None:
        """Add the cost of a request or call that is over."""
        self.spent_usd += usd
        self.requests += 1

    def settle_left(self, owner: str, execution: str, now: float) -> bool:
        """Count reservations that earlier executions of a run have left, and forgotten ones. Return if there were any.

        A reservation that lies in the future was made while the clock was ahead; it is as little to be waited for.

        Args:
            owner: Beginning of the ids of the run's reservations.
            execution: Beginning of the ids of this execution's.
            now: The time, seconds since 1970.
        """
        left = [
            name
            for name, (_, at) in self.reserved.items()
            if abs(now - at) > FORGET_S or (name.startswith(owner) and not name.startswith(execution))
        ]
        for name in left:
            self.add_spent(self.reserved.pop(name)[0])
        return bool(left)


class WindowChange(Protocol):
    """A change of the record of a window. It may be applied several times, to newer and newer records."""

    def apply(self, record: WindowRecord) -> bool:
        """Change the record; return whether it has changed. If the change was applied before, it stays as it is."""
        ...

    def on_written(self) -> None:
        """Act on the record being durable."""
        ...


@attrs.define(eq=False)
class _PendingChange:
    change: WindowChange
    is_done: bool = False


@attrs.define(eq=False)
class SharedWindow:
    """A window as the tasks of one event loop use it."""

    _store: ref[Store]
    """Not a strong reference: the windows are kept as long as their store is in use."""

    window: SpendWindow
    settled: int = 0
    """Number of requests of this event loop that were settled."""

    _lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    _pending: list[_PendingChange] = attrs.field(factory=list)
    _record: StoreRecord | None = None
    """The record after the last write; None if it has to be read."""

    _settlement: anyio.Event | None = None
    """Set when a request is settled; None if no request waits for that."""

    _waiting: int = 0
    """Number of requests that wait for room."""

    @property
    def store(self) -> Store:
        """The store of the record."""
        store = self._store()
        assert store is not None  # the run has it  # noqa: S101
        return store

    async def change(self, change: WindowChange) -> None:
        """Apply a change to the record, together with others that wait for their turn; durable when it returns.

        A cancelled change may have been applied.

        Raises:
            StoreError: if the store cannot be reached; the change may have been applied.
        """
        pending = _PendingChange(change)
        self._pending.append(pending)
        try:
            async with self._lock:
                retry_s = _FIRST_RETRY_S
                while not pending.is_done:
                    if not await self._try_write():
                        await anyio.sleep(retry_s * random.uniform(0.5, 1.5))  # noqa: S311  spreads, hides nothing
                        retry_s = min(2 * retry_s, _LAST_RETRY_S)
        finally:
            if not pending.is_done and pending in self._pending:
                self._pending.remove(pending)

    def change_later(self, change: WindowChange) -> None:
        """Apply a change with the next write of this event loop, or by `flush`."""
        self._pending.append(_PendingChange(change))

    async def flush(self) -> None:
        """Write the changes that wait.

        Raises:
            StoreError: if the store cannot be reached.
        """
        while self._pending:
            await self.change(_Nothing())

    def wake(self) -> None:
        """Wake the requests of this event loop that wait for room, because one was settled."""
        self.settled += 1
        if self._settlement is not None:
            self._settlement.set()
            self._settlement = None

    async def wait(self, settled: int, timeout_s: float) -> None:
        """Wait until a request of this event loop is settled, or the time is up.

        Args:
            settled: Value of `settled` when there was no room.
            timeout_s: Longest wait, seconds: requests of other processes do not wake it.
        """
        if self.settled != settled:
            return
        # Not kept without need: an event that was waited for holds its event loop.
        settlement = self._settlement = self._settlement or anyio.Event()
        self._waiting += 1
        try:
            with anyio.move_on_after(timeout_s):
                await settlement.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._settlement = None

    async def _try_write(self) -> bool:
        """Apply all waiting changes in one write; return whether it was made, and no other came in between."""
        is_fresh = self._record is None
        if is_fresh:
            self._record = await self.store.read_record(SPEND_RECORDS, self.window.key)
        before, self._record = self._record, None  # read again if anything fails
        record = WindowRecord() if before is None else WindowRecord.from_json(before.value, self.window.key)
        changes = tuple(self._pending)
        has_changed = [each.change.apply(record) for each in changes]  # all of them
        if any(has_changed):
            try:
                self._record = await self.store.write_record(
                    SPEND_RECORDS,
                    self.window.key,
                    record.to_json(self.window),
                    revision=0 if before is None else before.revision,
                    expires_at=self.window.ends_at + KEEP_S,
                )
            except ConflictError:
                return False
        elif not is_fresh:  # refused by what may be out of date
            return await self._try_write()
        else:
            self._record = before
        for each in changes:
            each.is_done = True
            each.change.on_written()
        self._pending = [each for each in self._pending if not each.is_done]
        return True


@attrs.define(eq=False)
class FullWindow:
    """A window that has no room for a request until requests in progress are over."""

    shared: SharedWindow
    settled: int
    """Value of `SharedWindow.settled` when there was no room."""

    has_collided: bool
    """Whether the request had reservations in other windows, which were removed."""

    wait_s: float
    """Longest wait until the next attempt, seconds."""


class _Nothing:
    """A change of nothing."""

    def apply(self, record: WindowRecord) -> bool:  # noqa: ARG002  nothing
        return False

    def on_written(self) -> None:
        pass


# Windows in use by the token of their event loop, and by store.
_windows: Final[WeakKeyDictionary[object, WeakKeyDictionary[Store, Newest[str, SharedWindow]]]] = WeakKeyDictionary()


def share_window(store: Store, window: SpendWindow) -> SharedWindow:
    """Return the window that the tasks of the running event loop share."""
    of_loop = _windows.setdefault(current_token().native_token, WeakKeyDictionary())
    of_store = of_loop.setdefault(store, Newest(_MAX_WINDOWS))
    found = of_store[window.key] = of_store.get(window.key) or SharedWindow(ref(store), window)
    return found


@attrs.define(eq=False, kw_only=True)
class ReserveAmount:
    """The reservation of a request or call, if the window has room for it."""

    id: str
    owner: str
    """Beginning of the ids of all reservations of the run."""

    execution: str
    """Beginning of the ids of this execution's reservations."""

    limit_usd: float
    now: float
    """The time, seconds since 1970."""

    cost: Callable[[int], float]
    """Returns the cost of an answer of this many tokens, US dollars; for a call of a tool, that of the call."""

    wanted: int = 1
    """Tokens of the answer to make room for."""

    longest: int = 1
    """Tokens of the longest possible answer."""

    least: int = 1
    """Lowest acceptable cap of the answer, tokens."""

    is_call: bool = False
    """Whether it is for a call of a tool. No request waits for the end of a call, which may wait for requests."""

    granted: int | None = None
    """Permitted tokens of the answer; None if there is no room."""

    usd: float = 0.0
    """The reserved amount, or the amount that there was no room for."""

    may_wait: bool = False
    """Whether there may be room when requests in progress are over."""

    record: WindowRecord = attrs.field(factory=WindowRecord)
    """The record as it was last seen."""

    def apply(self, record: WindowRecord) -> bool:
        """Reserve the amount if there is room."""
        self.record = record
        if self.id in record.reserved:
            return True  # the write before this one was made, or it is repeated after another one
        is_changed = record.settle_left(self.owner, self.execution, self.now)
        if self.limit_usd not in record.limits:
            record.limits.append(self.limit_usd)
        left = self.limit_usd - record.spent_usd - record.reserved_usd + _ROUNDING_USD
        awaited = [usd for usd, at in record.reserved.values() if abs(self.now - at) < PATIENCE_S]
        self.usd, self.may_wait = self.cost(self.longest), False
        if not awaited:
            self.granted = self._find_affordable(left)
            if self.granted is not None and self.granted < self.wanted:
                self.usd = self.cost(self.granted)
        elif self.usd <= left:
            self.granted = self.wanted
        else:
            self.granted = None
            self.may_wait = self._find_affordable(left + sum(awaited)) is not None
        if self.granted is None:
            return is_changed
        record.reserved[self.id] = self.usd, self.now - PATIENCE_S if self.is_call else self.now
        return True

    def on_written(self) -> None:
        """Do nothing."""

    def _find_affordable(self, left_usd: float) -> int | None:
        """Return the longest answer that the money permits, up to the wanted; None if it is below the least."""
        granted = find_affordable_tokens(left_usd, self.wanted, self.cost)
        return None if granted < self.least else granted


@attrs.define(eq=False, kw_only=True)
class SettleAmount:
    """The replacement of a reservation by the actual cost; nothing if the reservation was settled before."""

    id: str
    usd: float | None
    """The actual cost, US dollars; None if it is unknown: the reserved amount counts."""

    was_sent: bool = True
    """Whether the request was sent, or the call was made."""

    limits: tuple[tuple[float, float], ...] = ()
    """Limits of the window that the run knows, US dollars, each with the amount at which to warn."""

    on_reached: Callable[[float, float], None] = lambda _used, _limit: None
    """Called with the spent amount and a limit of which this change has reached the share to warn at."""

    reached: tuple[float, float] | None = None
    """The spent amount and the limit to warn of; None if there is none, or a warning was given before."""

    def apply(self, record: WindowRecord) -> bool:
        """Settle the reservation."""
        held = record.reserved.pop(self.id, None)
        if held is None:
            return False
        if self.was_sent:
            record.add_spent(held[0] if self.usd is None else self.usd)
        self.reached = None
        for limit_usd, warn_usd in self.limits:
            if record.spent_usd + _ROUNDING_USD >= warn_usd and limit_usd not in record.warned:
                record.warned.append(limit_usd)
                self.reached = record.spent_usd, limit_usd
        return True

    def on_written(self) -> None:
        """Report the limit to warn of."""
        if self.reached is not None:
            self.on_reached(*self.reached)


@attrs.define(eq=False, kw_only=True)
class AddAmount:
    """A cost that is known only after it was paid.

    It is reserved first and settled by the next write, so that it counts once although a write may be repeated.
    """

    id: str
    usd: float
    now: float
    """The time, seconds since 1970."""

    settle: Callable[[], None]
    """Settles the amount with the next write."""

    def apply(self, record: WindowRecord) -> bool:
        """Reserve the amount, whether or not there is room."""
        record.reserved[self.id] = self.usd, self.now - PATIENCE_S
        return True

    def on_written(self) -> None:
        """Settle the amount."""
        self.settle()


class CountRefusal:
    """The count of a request or call that was refused."""

    def apply(self, record: WindowRecord) -> bool:
        """Count it; twice if the outcome of a write is unknown."""
        record.refused += 1
        return True

    def on_written(self) -> None:
        """Do nothing."""


def find_affordable_tokens(left_usd: float, wanted_tokens: int, cost: Callable[[int], float]) -> int:
    """Return the longest answer that the money permits: 0 if the request alone is too expensive."""
    alone, whole = cost(0), cost(wanted_tokens)
    if whole <= left_usd:
        return wanted_tokens
    return int(wanted_tokens * (left_usd - alone) / (whole - alone)) if whole > alone < left_usd else 0
