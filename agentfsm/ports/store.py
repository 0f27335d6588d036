"""What the engine needs of a store of journals, and of a clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, TypeAlias

import attrs

from agentfsm.core.errors import LeaseLostError, MisuseError
from agentfsm.core.events import Event
from agentfsm.core.header import Header
from agentfsm.core.inbox import InboxItem, PostedItem
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.run import Run
from agentfsm.core.validation import BOOL, STRING, ValueRule, is_number, require_choice
from agentfsm.core.value import Value


class Clock(Protocol):
    """Where the engine reads the time."""

    def now(self) -> float:
        """Seconds since 1970, for what is shown to people."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment, for durations; never goes back."""
        ...


class SystemClock:
    """The machine's own clocks: seconds since 1970, and seconds since some moment."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)


# What an acknowledged append survives. "full": a power cut. "normal": the death of the process that asked, not always
# that of the machine or of a database server.
Durability: TypeAlias = Literal["full", "normal"]


@attrs.define(eq=False, repr=False)
class LeaseTerm:
    """How long the leases of one owner surely hold; the store moves it on each time that it has renewed them."""

    until: float = math.inf
    """Seconds by `threads.boot_clock`. From then on another worker may hold the leases."""


# Of a lease that ends only when it is given back.
NO_EXPIRY: Final = LeaseTerm()


@attrs.define(eq=False, repr=False, kw_only=True)
class Lease:
    """The right to append to one run, until it is released, lost or dropped. A store keeps it alive by itself."""

    run_id: str
    token: int
    """The fencing token: grows with each change of owner, and is checked inside every append."""

    version: int
    """How many events the journal held when the lease was taken."""

    durability: Durability = "full"
    """Of its appends."""

    term: LeaseTerm = NO_EXPIRY
    """Of its owner. Before a tool has an effect the engine sees whether the lease still holds."""

    crashes: int = 0
    """How many owners died while they drove this run and no other, since it last finished a turn or was paused."""

    abandoned: bool = False
    """Whether an owner did not give it back since it last finished a turn: what that had begun may have come further
    than the journal says, also where the run was paused since.
    """

    inbox_head: int = 0
    """The newest inbox number that the store has told of."""

    inbox_read: int = 0
    """The newest inbox number that the owner has looked at; kept by the release, so that `claim` sees what is newer."""

    timers_read_at: float = 0.0
    """When it last looked for timers, seconds since 1970 by the store's clock: what fell due later is news, too."""

    backoff_s: float = 0.0
    """Seconds for which no worker claims the run after the release; a newer post than the next ends that rest."""

    backoff_inbox_head: int = 0
    """The newest inbox number when the rest was decided on."""

    cancelled: bool = False
    """Whether somebody asked for the end of the run."""

    lost: bool = False
    """Whether another owner has taken over."""

    wake: Callable[[], None] | None = None
    """Called, from any thread, when `cancelled` or `lost` turns true."""

    agent: str = ""
    """The name of the run's agent, once the store knows it."""

    @property
    def valid_until(self) -> float:
        """Until when the lease surely holds, seconds by `threads.boot_clock`; the store moves it at each renewal."""
        return self.term.until


@attrs.frozen(kw_only=True)
class Claim(Value):
    """What a worker got to drive."""

    leases: tuple[Lease, ...] = ()
    """Of runs that can be moved on now, those first that could be for longest."""

    has_suspects: bool = False
    """Whether runs can be moved on whose owners died twice or more: a worker that drives nothing else claims them."""


def lease_lost_error(lease: Lease) -> LeaseLostError:
    """Return the error of who goes on with a run that is another's now, or is gone."""
    return LeaseLostError(
        f"run {lease.run_id!r} was taken over by another worker, or the store has lost it: load it to see",
    )


@attrs.frozen(kw_only=True)
class StoredRun(Value):
    """What a store holds of one run."""

    header: Header
    events: tuple[Event, ...]
    """Those after the version asked for, oldest first."""


@attrs.frozen(kw_only=True)
class RunSummary(Value):
    """A line of a list of runs."""

    id: str
    agent: str
    session: str | None
    user: str | None
    parent: str | None
    """The run whose tool it is."""

    state: State
    stop_reason: StopReason | None
    waiting: bool
    """Whether only something from outside can move it on."""

    driven: bool
    """Whether somebody holds its lease now."""

    turn: int
    version: int
    tokens: int
    created_at: float
    """Seconds since 1970, as `updated_at`."""

    updated_at: float
    prompt: str
    """The first 200 characters."""

    ready_at: float | None = None
    """Since or from when a worker may claim it, seconds since 1970 by the store's clock. None while it is driven, while
    only something from outside can move it on, and when it is over or another run's.
    """


TIMESTAMP: Final = ValueRule(fits=is_number, wanted="seconds since 1970, for example moment.timestamp()")


@attrs.frozen(kw_only=True)
class Filter(Value):
    """Which runs a list shows; what is None lets all through."""

    session: str | None = attrs.field(default=None, validator=STRING.or_none())
    agent: str | None = attrs.field(default=None, validator=STRING.or_none())
    user: str | None = attrs.field(default=None, validator=STRING.or_none())
    state: State | None = attrs.field(default=None, validator=require_choice(*State).or_none())
    waiting: bool | None = attrs.field(default=None, validator=BOOL.or_none())
    parent: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Those whose caller is this run."""

    before: float | None = attrs.field(default=None, validator=TIMESTAMP.or_none())
    """Those created earlier, seconds since 1970. Several runs may share one time, so that it does not tell pages apart:
    `Runs.iterate` does.
    """

    def matches(self, summary: RunSummary) -> bool:
        """Whether the list shows this line."""
        wanted = attrs.asdict(self)
        before = wanted.pop("before")
        named = all(value is None or getattr(summary, name) == value for name, value in wanted.items())
        return named and (before is None or summary.created_at < before)


ALL_RUNS = Filter()


class PendingWrite(Protocol):
    """An append on its way to the disk."""

    @property
    def is_done(self) -> bool:
        """Whether its outcome is known, so that `wait` does not wait."""
        ...

    async def wait(self) -> bool:
        """Return when it is durable: True if it was written, False if a final append met an inbox that is not empty.

        Cancelling the wait does not undo the append.

        Raises:
            LeaseLostError: when another owner has taken the run.
            ConflictError: when the journal is at another version.
            StoreError: when it could not be written.
        """
        ...


class Store(Protocol):
    """Where journals live. Appends of one run are written in the order in which they were asked for.

    All times that decide something (leases, expiry, timers) are the store's own.
    """

    async def now(self) -> float:
        """Seconds since 1970 by the store's clock."""
        ...

    async def create(
        self,
        header: Header,
        *,
        events: Sequence[Event] = (),
        durability: Durability = "full",
    ) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease.

        Of a run in a session the header that is stored names, in `after`, the session's last run.

        Args:
            header: Entry 0.
            events: What the journal begins with, in the same transaction: a fork's are those of the run it came from.
            durability: Of the lease's appends, and of this one.

        Returns:
            The header as it stands in the store, and the lease; its `version` tells whether the run existed.

        Raises:
            ConflictError: when the id stands for another prompt, somebody else drives it, its session has a run that
                is not over, or the run that a new one goes on from is not there.
            MisuseError: when there is no such durability.
        """
        ...

    async def lease(self, run_id: str, *, durability: Durability = "full", takeover: bool = False) -> Lease:
        """Take the lease of a run that exists.

        Args:
            run_id: The run.
            durability: Of the lease's appends.
            takeover: Take the lease even if another owner holds it; that owner is refused at its next append.

        Raises:
            RunNotFoundError: when there is none.
            LeaseHeldError: when somebody else has it.
        """
        ...

    async def claim(self, agent: str, *, limit: int, durability: Durability = "full", suspects: bool = False) -> Claim:
        """Take the leases of runs of that agent that a worker can move on now, those first that could be for longest.

        They are not over, nobody drives them, no other run calls them, and they either do not wait, or something has
        come that their last owner had not seen, or the time of what they wait for is up.

        An owner that ends without giving its leases back has crashed, and one of its runs may be the reason. A first
        crash changes nothing. Runs whose owners crashed twice or more are suspects: they are claimed by themselves, in
        groups of half as many runs as the last of these owners had, and in the end one by one. A run that finishes a
        turn is no suspect any more.

        Args:
            agent: Its name.
            limit: How many at most.
            durability: Of the leases' appends.
            suspects: Whether to claim one group of suspects, for a worker that drives nothing else meanwhile; else
                those are left out.
        """
        ...

    def append(
        self,
        lease: Lease,
        run: Run,
        events: Sequence[Event],
        *,
        taken: Sequence[int] = (),
        final: bool = False,
    ) -> PendingWrite:
        """Write events and strike inbox rows, in one transaction; returns before it is durable.

        Args:
            lease: Checked in the transaction.
            run: The run after the events; the journal must be at `run.version - len(events)`.
            events: At least one.
            taken: The numbers of the inbox rows that the events took in.
            final: Write only if the inbox holds nothing else that is due.
        """
        ...

    def release(self, lease: Lease) -> PendingWrite:
        """Give the lease back, after the appends before; returns at once, and is harmless when the lease is lost."""
        ...

    async def post(self, run_id: str, key: str, item: InboxItem, *, before: float | None = None) -> PostedItem:
        """Put an item into the inbox, durably. The first post of a key wins, and the winner is returned.

        Args:
            run_id: The run.
            key: Unique in the run.
            item: What to post.
            before: Seconds since 1970 by the store's clock, from which on it is refused; None: it is never too late.

        Raises:
            RunNotFoundError: when there is no such run.
            ConflictError: when it is over, or it is too late; or when it is input and 1,000 posts wait already.
        """
        ...

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Return the rows that are not taken yet, oldest first; those that are not due yet, too."""
        ...

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Return the header and the events after that version.

        Raises:
            RunNotFoundError, CorruptError, TooNewError: as they say.
        """
        ...

    async def runs(self, where: Filter = ALL_RUNS, *, limit: int = 100) -> tuple[RunSummary, ...]:
        """Return the newest runs that the filter takes, newest first."""
        ...

    async def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, with its inbox and the runs of agents below it.

        Raises:
            RunNotFoundError: when there is no such run.
            ConflictError: when it, or one below it, is driven, or another run goes on from one of them (sessions are
                deleted whole), or it works for another run that is not over and would do its work again.
        """
        ...

    async def delete_session(self, session: str) -> int:
        """Remove all runs of a session, with what `delete` removes; return how many they were.

        Raises:
            ConflictError: when one of them is driven, or a run outside goes on from one; none is removed then.
        """
        ...

    async def prune(self, before: float) -> int:
        """Remove what is over and has not changed since that moment; return how many runs that were.

        Sessions go whole, when all of their runs may; a run from which another goes on stays as long as that one, and
        runs of agents as long as their callers.

        Args:
            before: Seconds since 1970.

        Raises:
            MisuseError: when it is no such number; nothing is removed.
        """
        ...

    def subscribe(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002  a default
        """Call `wake`, from any thread, when something may have changed under the topic; it must not block.

        Wakes may be spurious, and may be missing where another process writes and the store cannot tell: poll as well.
        The default never wakes.

        Args:
            topic: `run:<id>`: the run's journal grew, or its state changed. `agent:<name>`: a run of that agent may
                have become one that a worker can take (created, posted to, released).
            wake: Called after the change is committed.

        Returns:
            A function that ends the subscription, from any thread; a second call does nothing.
        """
        return lambda: None

    async def aclose(self) -> None:
        """Close what is open; appends on their way are written first."""
        ...


_STORE_MEMBERS: Final = ("create", "append", "post", "read", "subscribe", "aclose")
# Members without which a store keeps nothing. A subclass of the protocol inherits them, and they do nothing there.
_REQUIRED_OVERRIDES: Final = frozenset({"create", "append", "post", "read"})
STORE: Final = ValueRule(
    fits=lambda value: not isinstance(value, type) and not _list_missing_members(value),
    wanted="a store, for example SQLiteStore('runs.db')",
)


def _list_missing_members(store: object) -> list[str]:
    """Return the members that a store lacks, or has inherited from the protocol, which does nothing."""
    inherited = [name for name in _REQUIRED_OVERRIDES if getattr(type(store), name, None) is getattr(Store, name)]
    return [name for name in _STORE_MEMBERS if name in inherited or not hasattr(store, name)]


def ensure_store(store: Store) -> Store:
    """Return `store` unchanged if it implements `Store`.

    Raises:
        MisuseError: naming the missing members.
    """
    if isinstance(store, type):
        raise MisuseError(
            f"{store.__name__} is a class, and a store is one of its objects: write {store.__name__}(...)"
        )
    if missing := _list_missing_members(store):
        raise MisuseError(
            f"it does not implement {', '.join(missing)}: give a store such as SQLiteStore('runs.db'), or one of your "
            "own subclass of agentfsm.ports.Store"
        )
    return store
