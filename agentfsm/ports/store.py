"""Protocols of journal stores and clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import attrs

from agentfsm.core.errors import LeaseLostError, MisuseError
from agentfsm.core.events import Event
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import InboxItem, PostedItem
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import JSON
from agentfsm.core.run import Run
from agentfsm.core.validation import BOOL, NOT_NEGATIVE, STRING, ValueRule, is_number, require_choice, suggest_fields
from agentfsm.core.value import Value
from agentfsm.ports.followers import FOLLOWER_LEASE_S, FOLLOWER_POLL_S, FollowedStore, Follower, FollowerStart
from agentfsm.ports.stored import RATING, Feedback, FollowerStatus, QuotaUse, StoreRecord


class Clock(Protocol):
    """The source of the engine's times."""

    def now(self) -> float:
        """Return seconds since 1970, for dates."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment, for durations; never decreases."""
        ...


class SystemClock:
    """The clocks of the machine: `time.time` and `time.monotonic`."""

    now: staticmethod[[], float] = staticmethod(time.time)
    """Returns the seconds since 1970."""

    monotonic: staticmethod[[], float] = staticmethod(time.monotonic)
    """Returns seconds that never go back, from any start."""


Durability: TypeAlias = Literal["full", "normal"]
"""The failures that an acknowledged append survives. "full": a power cut. "normal": a crash of the calling process, but
not always of the machine or of a database server.
"""

DURABILITY: Final = require_choice(*get_args(Durability))

RunOrder: TypeAlias = Literal["newest", "cost", "duration"]
"""The order of a list of runs. "newest": by the time of creation. "cost" and "duration": the dearest and the longest
first; these list the runs that are over and whose cost or duration is known.
"""

RUN_ORDER: Final = require_choice(*get_args(RunOrder))
# The fields of a summary, and columns of a database, by which the orders besides the newest sort.
ORDER_FIELDS: Final[Mapping[RunOrder, str]] = {"cost": "cost_usd", "duration": "duration_s"}


@attrs.define(eq=False, repr=False)
class LeaseTerm:
    """The time until which the leases of one owner are certainly valid; the store updates it at each renewal."""

    until: float = math.inf
    """Seconds by `boot_clock`. From then on another worker may hold the leases. Default: no expiry."""


NO_EXPIRY: Final = LeaseTerm()
"""The term of a lease that ends only when it is released."""


@attrs.define(eq=False, repr=False, kw_only=True)
class Lease:
    """The right to append to one run, until it is released, lost or dropped. The store renews it."""

    run_id: str
    """Id of the run that the lease is for."""

    token: int
    """Fencing token. It grows with each change of owner, and is checked inside every append."""

    version: int
    """Number of events in the journal when the lease was taken."""

    durability: Durability = "full"
    """Durability of the appends under this lease. Default "full"."""

    term: LeaseTerm = NO_EXPIRY
    """Validity of the owner's leases, which the engine checks before a tool has an effect. Default: no expiry."""

    crashes: int = 0
    """Number of owners that died while they executed only this run, since it last finished a turn or was paused."""

    abandoned: bool = False
    """True if an owner failed to release the run since it last finished a turn. The work of that owner may have come
    further than the journal says, even if the run was paused since.
    """

    is_suspect: bool = False
    """True if two owners or more died while they executed the run, since it last finished a turn. Execute it while this
    process executes no other run; see `Store.claim`.
    """

    inbox_head: int = 0
    """Newest inbox number that the store has reported."""

    inbox_read: int = 0
    """Newest inbox number that the owner has read. The release stores it, so that `claim` recognises newer posts."""

    timers_read_at: float = 0.0
    """Time when the owner last checked timers, seconds since 1970 by the store's clock. Timers due later count as news.
    """

    backoff_s: float = 0.0
    """Seconds after the release during which workers do not claim the run. A post newer than `backoff_inbox_head` ends
    the backoff.
    """

    refusal_backoff_s: float = 0.0
    """Seconds of the backoff if the program turns out to be unable to continue the run; 0 for `backoff_s`."""

    backoff_inbox_head: int = 0
    """Newest inbox number when the backoff was set."""

    cancelled: bool = False
    """True if a cancellation of the run was requested."""

    lost: bool = False
    """True if another owner has taken over the run."""

    wake: Callable[[], None] | None = None
    """Callback, called from any thread when `cancelled` or `lost` becomes True."""

    agent: str = ""
    """Name of the run's agent; empty until the store knows it."""

    @property
    def valid_until(self) -> float:
        """Time until which the lease is certainly valid, seconds by `boot_clock`. Each renewal moves it."""
        return self.term.until


@attrs.frozen(kw_only=True)
class Claim(Value):
    """The runs that a worker has claimed for execution."""

    leases: tuple[Lease, ...] = ()
    """Leases of runs that are ready, longest waiting first."""

    has_suspects: bool = False
    """True if runs are ready whose owners died twice or more. Only a worker that executes nothing else claims them."""

    has_newer: bool = False
    """True if fewer runs than the limit were claimed, and runs are ready whose records are in a newer format. Only a
    worker of that version of agentfsm claims them.
    """

    other_release: str = ""
    """If fewer runs than the limit were claimed, and runs of other releases than the given ones are ready: the release
    of one of them. Else empty.
    """

    stands_by: bool = False
    """True if the store wakes other idle workers for new runs, and not this one, which finds by its next poll what they
    have left. They also look for schedules that are due.
    """


def lease_lost_error(lease: Lease) -> LeaseLostError:
    """Build the error for an owner whose run was taken over or lost."""
    return LeaseLostError(
        f"run {lease.run_id!r} was taken over by another worker, or the store has lost it: load it to see",
    )


@attrs.frozen(kw_only=True)
class RunSummary(Value):
    """One entry of a list of runs."""

    id: str
    """Id of the run."""

    agent: str
    """Name of the agent that executes the run."""

    session: str | None
    """Session that the run belongs to; None if it has no session."""

    user: str | None
    """User on whose behalf the run works; None if not given."""

    parent: str | None
    """Id of the run that called this one as a tool; None if there is none."""

    state: State
    """Current state of the run."""

    stop_reason: StopReason | None
    """The reason why the run ended; None while it is not over."""

    waiting: bool
    """True if the run waits for an external input or decision."""

    driven: bool
    """True if a worker holds the lease of the run now."""

    turn: int
    """Number of the current turn."""

    version: int
    """Number of events in the journal."""

    tokens: int
    """Tokens used by the run so far."""

    created_at: float
    """Time when the run was created, seconds since 1970."""

    updated_at: float
    """Time of the newest event, seconds since 1970."""

    prompt: str
    """The first 200 characters of the prompt."""

    ready_at: float | None = None
    """Time from which a worker may claim the run, seconds since 1970 by the store's clock. None while it is executed or
    waits for an external input without a deadline, when it is over, and if another run called it.
    """

    rating: int | None = None
    """Rating of the newest feedback, from 1 (bad) to 5 (good); None if there is none."""

    tenant: str | None = None
    """Tenant that the user belongs to; None if not given."""

    crashes: int = 0
    """Number of owners that died while they executed the run, since it last finished a turn or was paused."""

    worker: str | None = None
    """Name of the event loop that has the run, as the store knows it, also if it has died and no other has claimed the
    run yet. None if there is none, or the runs are in the memory of this process.
    """

    release: str = ""
    """Release of the agent that the run was assigned to; empty if there are no releases."""

    purpose: str = ""
    """Purpose of the run, such as "eval"; empty for production."""

    cost_usd: float | None = None
    """US dollars that the run has cost, as far as prices were known. None while it is not over, if no price was known,
    and if it ended under an agentfsm that did not record it.
    """

    duration_s: float | None = None
    """Seconds that the run was executed, without its waits. None while it is not over, and if it ended under an
    agentfsm that did not record it.
    """

    format: int = FORMAT
    """Newest format in which a record of the run's journal or inbox was written. An agentfsm that reads only older
    formats leaves the run alone.
    """

    @property
    def is_too_new(self) -> bool:
        """Whether only a newer agentfsm can read and execute the run."""
        return self.format > FORMAT


TIMESTAMP: Final = ValueRule(fits=is_number, wanted="seconds since 1970, for example moment.timestamp()")


@attrs.frozen(kw_only=True)
class Filter(Value):
    """Selects the runs of a list. A field that is None matches all runs."""

    id: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the run with this id."""

    session: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the runs of this session."""

    agent: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the runs of the agent with this name."""

    user: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the runs of this user; an empty string matches the runs without a user."""

    state: State | None = attrs.field(default=None, validator=require_choice(*State).or_none())
    """Matches the runs in this state."""

    waiting: bool | None = attrs.field(default=None, validator=BOOL.or_none())
    """Matches the runs that wait for an external input or decision (True), or the others (False)."""

    parent: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the runs that the run with this id called as tools; an empty string matches the runs that no run called.
    """

    before: float | None = attrs.field(default=None, validator=TIMESTAMP.or_none())
    """Matches the runs created earlier, seconds since 1970. Several runs may share one time, so use `Runs.iterate` for
    pages.
    """

    since: float | None = attrs.field(default=None, validator=TIMESTAMP.or_none())
    """Matches the runs created at this time or later, seconds since 1970."""

    max_rating: int | None = attrs.field(default=None, validator=RATING.or_none())
    """Matches the runs whose newest feedback has at most this rating: 2 for bad runs, 5 for all runs with feedback."""

    tenant: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the runs of this tenant; an empty string matches the runs without a tenant."""

    release: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the runs of this release; an empty string matches the runs without a release."""

    purpose: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the runs of this purpose, such as "eval"; an empty string matches those of production."""

    ready_by: float | None = attrs.field(default=None, validator=TIMESTAMP.or_none())
    """Matches the runs that wait for a worker at this time, seconds since 1970 by the store's clock."""

    active_at: float | None = attrs.field(default=None, validator=TIMESTAMP.or_none())
    """Matches the runs that are not over and have a worker or wait for one at this time, seconds since 1970 by the
    store's clock. A worker that has died counts until its runs are claimed.
    """

    over: bool | None = attrs.field(default=None, validator=BOOL.or_none())
    """Matches the runs that are over (True), or the others (False)."""

    text: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Matches the runs whose id, prompt and answer together have all of these words, as beginnings of words from three
    letters on. The answer is searched once the run is over. A text without a word matches no run.
    """

    stop_reason: StopReason | None = attrs.field(default=None, validator=require_choice(*StopReason).or_none())
    """Matches the runs that ended for this reason."""

    min_cost_usd: float | None = attrs.field(default=None, validator=NOT_NEGATIVE.or_none())
    """Matches the runs that are over and have cost this much or more, US dollars."""

    max_cost_usd: float | None = attrs.field(default=None, validator=NOT_NEGATIVE.or_none())
    """Matches the runs that are over and have cost this much or less, US dollars."""

    min_duration_s: float | None = attrs.field(default=None, validator=NOT_NEGATIVE.or_none())
    """Matches the runs that are over and were executed for this long or longer, seconds."""

    max_duration_s: float | None = attrs.field(default=None, validator=NOT_NEGATIVE.or_none())
    """Matches the runs that are over and were executed for this long or shorter, seconds."""

    def matches(self, summary: RunSummary) -> bool:
        """Return whether the run with this summary is selected, as far as a summary says: `text` is not compared."""
        wanted = {name: value for name, value in attrs.asdict(self).items() if value is not None and name != "text"}
        return all(_MATCHERS.get(name, _is_equal)(summary, name, value) for name, value in wanted.items())


def _is_equal(summary: RunSummary, name: str, value: object) -> bool:
    return bool(getattr(summary, name) == value)


def _is_equal_or_absent(summary: RunSummary, name: str, value: object) -> bool:
    return (getattr(summary, name) or "") == value


def _is_at_least(summary: RunSummary, name: str, value: float) -> bool:
    found = getattr(summary, name.removeprefix("min_"))
    return found is not None and found >= value


def _is_at_most(summary: RunSummary, name: str, value: float) -> bool:
    found = getattr(summary, name.removeprefix("max_"))
    return found is not None and found <= value


def _is_active(summary: RunSummary, _name: str, value: float) -> bool:
    is_ready = summary.ready_at is not None and summary.ready_at <= value
    return summary.stop_reason is None and (summary.worker is not None or summary.driven or is_ready)


# The fields of `Filter` that are not compared for equality.
_MATCHERS: Final[Mapping[str, Callable[[RunSummary, str, Any], bool]]] = {
    **dict.fromkeys(("user", "tenant", "parent"), _is_equal_or_absent),
    **dict.fromkeys(("min_cost_usd", "min_duration_s"), _is_at_least),
    **dict.fromkeys(("max_rating", "max_cost_usd", "max_duration_s"), _is_at_most),
    "before": lambda summary, _name, value: summary.created_at < value,
    "since": lambda summary, _name, value: summary.created_at >= value,
    "ready_by": lambda summary, _name, value: summary.ready_at is not None and summary.ready_at <= value,
    "active_at": _is_active,
    "over": lambda summary, _name, value: (summary.stop_reason is not None) == value,
}

suggest_fields(Filter, session_id="session", status="state", rating="max_rating")

ALL_RUNS = Filter()
"""The filter that matches every run."""


class PendingWrite(Protocol):
    """An append that is being written."""

    @property
    def is_done(self) -> bool:
        """True if the outcome is known, so that `wait` returns at once."""
        ...

    async def wait(self) -> bool:
        """Wait until the append is durable. Return True if it was written, False if a final append met unread posts.

        Cancelling the wait does not undo the append.

        Raises:
            LeaseLostError: if another owner has taken over the run.
            ConflictError: if the journal is at another version.
            StoreError: if the append could not be written.
        """
        ...


class Store(FollowedStore, Protocol):
    """A store of journals. Appends of one run are written in the order of the calls.

    Leases, expiry and timers use the store's clock.
    """

    async def now(self) -> float:
        """Return seconds since 1970 by the store's clock."""
        ...

    async def create(
        self,
        header: Header,
        *,
        events: Sequence[Event] = (),
        durability: Durability = "full",
    ) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease.

        If the run is in a session, the stored header names the session's last run in `after`.

        Args:
            header: Entry 0 of the journal.
            events: First events of the journal, written in the same transaction; a fork copies those of its origin.
            durability: Durability of this write and of the appends under the lease.

        Returns:
            The header in the store, and the lease; its `version` shows whether the run existed.

        Raises:
            ConflictError: if the id belongs to a run with another prompt, another worker executes the run, its session
                has a run that is not over, or its `after` run does not exist.
            MisuseError: if the durability is invalid.
            TooNewError: if the run exists, and a newer agentfsm has written records of it.
        """
        ...

    async def lease(self, run_id: str, *, durability: Durability = "full", takeover: bool = False) -> Lease:
        """Take the lease of an existing run.

        Args:
            run_id: Id of the run.
            durability: Durability of the appends under the lease.
            takeover: Take the lease even if another owner holds it; that owner is refused at its next append.

        Raises:
            RunNotFoundError: if the run does not exist.
            LeaseHeldError: if another owner holds the lease.
            TooNewError: if a newer agentfsm has written records of the run; the lease is not taken.
        """
        ...

    async def claim(
        self,
        agent: str,
        *,
        limit: int,
        durability: Durability = "full",
        suspects: bool = False,
        newest_format: int = FORMAT,
        releases: Collection[str] | None = None,
    ) -> Claim:
        """Take the leases of runs of that agent that are ready, longest waiting first.

        A run is ready if it is not over, has no owner, was not called by another run, and either does not wait, or has
        a post that its last owner had not seen, or its deadline has passed. A run that is not production, such as one
        of an evaluation, is left to who has started it.

        An owner that ends without releasing its leases has crashed, and one of its runs may be the cause. The first
        crash has no effect. Runs whose owners crashed twice or more are suspects: they are claimed separately, in
        groups of half as many runs as the last of these owners had, and in the end one by one. A run that finishes a
        turn is not a suspect any more.

        A run whose records are in a newer format than the worker reads is left as it is for workers of that version: it
        is not claimed, no crash is counted, and it stays ready. `create`, `append` and `post` raise the format of a run
        to that of the agentfsm that calls them.

        Args:
            agent: Name of the agent.
            limit: Maximum number of leases.
            durability: Durability of the appends under the leases.
            suspects: Whether to claim one group of suspects, for a worker that executes nothing else meanwhile. If
                False, suspects are skipped.
            newest_format: Newest format that the worker reads. Default: that of this agentfsm.
            releases: Releases that the worker has: runs of others are left to other workers. Runs without a release are
                always claimed. None: runs of all releases are claimed.
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
        """Write events and remove inbox rows in one transaction. Return before it is durable.

        Args:
            lease: The lease of the run, which the transaction checks.
            run: The run after the events; the journal must be at `run.version - len(events)`.
            events: The events to write, at least one.
            taken: Numbers of the inbox rows that the events consumed.
            final: Write only if no other row of the inbox is due.
        """
        ...

    def release(self, lease: Lease) -> PendingWrite:
        """Release the lease after the pending appends. Return at once; a lost lease is ignored."""
        ...

    async def post(self, run_id: str, key: str, item: InboxItem, *, before: float | None = None) -> PostedItem:
        """Put an item into the inbox, durably. Return the first post of the key, which wins.

        Args:
            run_id: Id of the run.
            key: Key of the post, unique in the run.
            item: The item to post.
            before: Deadline, seconds since 1970 by the store's clock, from which on the post is refused; None for no
                deadline.

        Raises:
            RunNotFoundError: if the run does not exist.
            ConflictError: if the run is over, the deadline has passed, or the item is input and 1,000 posts wait
                already.
        """
        ...

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Return the rows that are not consumed yet, oldest first, including those that are not due yet."""
        ...

    async def runs(
        self,
        where: Filter = ALL_RUNS,
        *,
        limit: int = 100,
        order: RunOrder = "newest",
        after: tuple[float, str] | None = None,
    ) -> tuple[RunSummary, ...]:
        """Return the first runs that match the filter, by default the newest, newest first.

        Args:
            where: Filter of the runs.
            limit: Maximum number of runs.
            order: Order of the list. Runs of the same cost or duration are in the reverse order of their ids.
            after: Cost or duration, and id, of the run after which the list begins; None for its beginning. Pages of
                the newest runs begin with `Filter.before`.

        Raises:
            MisuseError: if the order is invalid, or the filter has a text and the store searches none.
        """
        ...

    async def count(self, where: Filter = ALL_RUNS, *, limit: int = 1_000) -> int:
        """Return the number of runs that match the filter, up to `limit`. The default reads their rows."""
        return len(await self.runs(where, limit=limit))

    async def delete(self, run_id: str) -> None:
        """Remove a run that is not being executed, with its inbox and the runs of its subagents.

        Raises:
            RunNotFoundError: if the run does not exist.
            ConflictError: if a run to remove is being executed, another run goes on from one of them (delete the whole
                session instead), or the run works for a caller that is not over and would repeat the work.
        """
        ...

    async def delete_session(self, session: str) -> int:
        """Remove all runs of a session, with everything that `delete` removes. Return the number of runs.

        Raises:
            ConflictError: if one of them is being executed, or a run outside goes on from one; nothing is removed then.
        """
        ...

    async def prune(self, before: float, *, unread: bool = False) -> int:
        """Remove the runs that are over and have not changed since that moment. Return the number of runs.

        A session is removed as a whole, once all of its runs qualify. A run from which another goes on stays as long as
        that one, and the runs of subagents as long as their callers. A run that a follower has not read stays. Records
        that have expired are deleted, too, whenever they were written.

        Args:
            before: Seconds since 1970.
            unread: Whether to remove also runs that a follower has not read.

        Raises:
            MisuseError: if `before` is not a valid time; nothing is removed.
        """
        ...

    async def add_feedback(self, run_id: str, key: str, feedback: Feedback) -> None:  # noqa: ARG002  a default
        """Record feedback on a run, durably, whether or not it is over. It is removed with the run.

        It sets the `rating` of the run in lists, and followers read the run again. The default refuses.

        Args:
            run_id: Id of the run.
            key: Key of the feedback, unique in the run; a second feedback with the same key is ignored.
            feedback: The feedback.

        Raises:
            RunNotFoundError: if the run does not exist.
        """
        raise MisuseError(f"{type(self).__name__} keeps no feedback: it does not implement add_feedback")

    async def take_quotas(self, uses: Sequence[QuotaUse], *, force: bool = False) -> float:  # noqa: ARG002  a default
        """Take amounts from quotas that all processes share: all of them, or none. The default refuses.

        A quota is the sum of the amounts of the last 60 s, in steps of a second. Several processes that take at the
        same moment may exceed it by what they take then. A power cut may lose the newest amounts.

        Args:
            uses: The amounts.
            force: Whether to take them even if a limit is exceeded, for what was used already.

        Returns:
            0 if they were taken, else the seconds after which to try again, up to 60.
        """
        raise MisuseError(f"{type(self).__name__} has no quotas: it does not implement take_quotas")

    # Records: small JSON values beside the runs.

    async def read_record(self, kind: str, key: str) -> StoreRecord | None:  # noqa: ARG002  a default
        """Return a record; None if there is none, or it has expired. The default refuses.

        Raises:
            MisuseError: if the kind or the key is invalid; see `StoreRecord`.
        """
        raise _no_records_error(self)

    async def write_record(
        self,
        kind: str,  # noqa: ARG002  a default
        key: str,  # noqa: ARG002
        value: JSON,  # noqa: ARG002
        *,
        revision: int,  # noqa: ARG002
        expires_at: float | None = None,  # noqa: ARG002
    ) -> StoreRecord:
        """Write a record if its revision is still the given one, durably. The default refuses.

        Of several writers with the same revision, in any process, one succeeds, so no change is lost: after a
        `ConflictError`, read the record and decide again.

        Args:
            kind: Kind of the record.
            key: Key of the record, unique in the kind.
            value: Plain JSON of up to 1 MiB.
            revision: Revision of the record that is replaced; 0 if there must be none, or an expired one.
            expires_at: Time from which on the record reads as absent, seconds since 1970 by the store's clock; None for
                never. Expired records are deleted by `prune`, and some by each later write with an expiry.

        Returns:
            The record as stored, with its new revision.

        Raises:
            ConflictError: if the record has another revision, exists although `revision` is 0, or does not exist.
            MisuseError: if an argument is invalid, or the value is not plain JSON or too large; nothing is written.
        """
        raise _no_records_error(self)

    async def list_records(
        self,
        kind: str,  # noqa: ARG002  a default
        *,
        prefix: str = "",  # noqa: ARG002
        after: str = "",  # noqa: ARG002
        limit: int = 1_000,  # noqa: ARG002
    ) -> tuple[StoreRecord, ...]:
        """Return the records of a kind that have not expired, in the order of the code points of their keys.

        The default refuses.

        Args:
            kind: Kind of the records.
            prefix: Beginning of the keys.
            after: Key after which the list begins; for the next page, the last key of the previous one.
            limit: Maximum number of records, 1 or more.

        Raises:
            MisuseError: if an argument is invalid.
        """
        raise _no_records_error(self)

    async def delete_record(
        self,
        kind: str,  # noqa: ARG002  a default
        key: str,  # noqa: ARG002
        *,
        revision: int | None = None,  # noqa: ARG002
    ) -> bool:
        """Delete a record, durably. Return whether it existed. The default refuses.

        Args:
            kind: Kind of the record.
            key: Key of the record.
            revision: Revision that the record must have; None for any.

        Raises:
            ConflictError: if the record exists with another revision; it is not deleted.
            MisuseError: if an argument is invalid.
        """
        raise _no_records_error(self)

    # Followers: durable consumers of the journals.

    def follow(
        self,
        name: str,
        *,
        start: FollowerStart = "beginning",
        wait: bool = True,
        lease_s: float = FOLLOWER_LEASE_S,
        poll_s: float = FOLLOWER_POLL_S,
    ) -> Follower:
        """Return a durable consumer of the journals of all runs: `async with store.follow("export") as follower: ...`.

        The arguments are the fields of `Follower`, which describes its guarantees.

        Args:
            name: Name of the follower; the store keeps its position.
            start: Where a new follower begins: "beginning" (all runs) or "now".
            wait: Whether to wait for further changes. False: the iteration ends when everything was delivered.
            lease_s: Seconds after which another process may get a delivery too.
            poll_s: Seconds between two looks into the store while there is nothing to deliver.

        Raises:
            MisuseError: if an argument is invalid.
        """
        return Follower(self, name, start=start, wait=wait, lease_s=lease_s, poll_s=poll_s)

    async def followers(self) -> tuple[FollowerStatus, ...]:
        """Return the followers and how far they are behind, by name."""
        return ()

    async def drop_follower(self, name: str) -> bool:  # noqa: ARG002  a default
        """Remove a follower with its position. Return whether it existed.

        A process that works on its deliveries gets an error at its next call.
        """
        return False

    def subscribe(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002  a default
        """Call `wake`, from any thread, when something may have changed under the topic; it must not block.

        Wakes may be spurious, and may be missing if another process writes and the store cannot notice: poll as well.
        The default never wakes.

        Args:
            topic: `run:<id>`: the run's journal grew, or its state changed. `agent:<name>`: a run of that agent may
                have become ready (created, posted to, released).
            wake: Called after the change is committed.

        Returns:
            A function that ends the subscription, from any thread; a second call does nothing.
        """
        return lambda: None

    async def aclose(self) -> None:
        """Close the store; pending appends are written first."""
        ...


def _no_records_error(store: Store) -> MisuseError:
    return MisuseError(
        f"{type(store).__name__} keeps no records: it does not implement write_record and its neighbours"
    )


_STORE_MEMBERS: Final = ("create", "append", "post", "read", "subscribe", "aclose")
# Members without which a store keeps nothing. A subclass of the protocol inherits them, and they do nothing there.
_REQUIRED_OVERRIDES: Final = frozenset({"create", "append", "post", "read"})
STORE: Final = ValueRule(
    fits=lambda value: not isinstance(value, type) and not _list_missing_members(value),
    wanted="a store, for example SQLiteStore('runs.db')",
)


def _list_missing_members(store: object) -> list[str]:
    """Return the members that a store lacks, or inherits from the protocol, whose methods do nothing."""
    inherited = [name for name in _REQUIRED_OVERRIDES if getattr(type(store), name, None) is getattr(Store, name)]
    return [name for name in _STORE_MEMBERS if name in inherited or not hasattr(store, name)]


def ensure_store(store: Store) -> Store:
    """Return `store` unchanged if it implements `Store`.

    Raises:
        MisuseError: naming the missing members.
    """
    if isinstance(store, type):
        raise MisuseError(f"{store.__name__} is a class; a store is an instance of it: write {store.__name__}(...)")
    if missing := _list_missing_members(store):
        raise MisuseError(
            f"it does not implement {', '.join(missing)}: give a store such as SQLiteStore('runs.db'), or an instance "
            "of your own subclass of agentfsm.ports.Store"
        )
    return store
