"""Store journals in Redis or Valkey, for workers on several machines, on asyncio and trio.

One thread sends the requests in groups (`threaded.group_commit`). `redis.server` connects to the server and checks it;
`redis.lua` implements the operations on the keys. This module calls the operations and parses their replies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import islice
from operator import itemgetter
from typing import Any, Final

import attrs

from agentfsm._lib.concurrency import boot_clock
from agentfsm.core.codec import encode_header
from agentfsm.core.errors import (
    ConflictError,
    CorruptError,
    LeaseHeldError,
    MisuseError,
    RunNotFoundError,
    StoreError,
)
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import Cancel, Input, PostedItem
from agentfsm.core.validation import SECONDS, require_choice
from agentfsm.ports.store import ORDER_FIELDS, Claim, Filter, Lease, RunOrder, RunSummary, lease_lost_error
from agentfsm.ports.stored import Feedback, FollowerStatus, QuotaUse, UnreadRun
from agentfsm.stores.redis.server import (
    DEFAULT_PREFIX,
    LOSS_DESCRIPTIONS,
    DurabilityGuarantee,
    Loss,
    RedisServer,
    build_connection,
    format_address,
    iter_notifications,
)
from agentfsm.stores.rules import (
    LEASE_HELD_ADVICE,
    MAX_INBOX_ROWS,
    PATIENCE_S,
    UNRECORDED_FORMAT,
    caller_open_error,
    check_deadline,
    check_format,
    check_inbox_capacity,
    check_not_over,
    check_same_prompt,
    continue_session,
    end_of_prefix,
    follower_lost_error,
    missing_follower_error,
    missing_predecessor_error,
    parse_summary,
    preview_prompt,
    resolve_duplicate_post,
    sort_summaries,
    successor_exists_error,
    wants_open,
)
from agentfsm.stores.threaded.change_listener import ChangeListener
from agentfsm.stores.threaded.lease_table import HeldLease, LeaseOwner, LeaseTable, lease_owner
from agentfsm.stores.threaded.outage import Outage
from agentfsm.stores.threaded.owner import OwnerIdentity
from agentfsm.stores.threaded.store import (
    LEASE_S,
    LEASE_SECONDS,
    MAX_LEASE_S,
    AppendRequest,
    CreateRequest,
    InboxPost,
    JournalRecords,
    LeaseRequest,
    ReadableWork,
    RecordRow,
    RunColumns,
    StoreWriter,
    ThreadedStore,
    decode_post,
    read_header,
)

# Records per call, so that other clients do not wait for long.
RECORDS_PAGE: Final = 100
_LINES_PER_CALL: Final = 500
# Digits of the number at the beginning of an index entry; the id of the run follows.
INDEX_DIGITS: Final = 16

# The fields of a summary, and their parsers.
_SUMMARY_PARSERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "agent": bytes.decode,
    "session": bytes.decode,
    "user": bytes.decode,
    "parent": bytes.decode,
    "state": bytes.decode,
    "stop_reason": lambda value: value.decode() or None,
    "waiting": int,
    "turn": int,
    "version": int,
    "tokens": int,
    "created_at": float,
    "updated_at": float,
    "ready_at": float,
    "rating": int,
    "format": int,
    "tenant": bytes.decode,
    "release": bytes.decode,
    "purpose": bytes.decode,
    "crashes": int,
    "cost_usd": lambda value: float(value) if value else None,
    "duration_s": lambda value: float(value) if value else None,
    "prompt": bytes.decode,
}
# Filters with an index, and the name of the index. For other filters, the list of all runs is searched.
_INDEXED_FILTERS: Final = {"session": "session", "parent": "below"}
# Filters that the server does not compare.
_COMPARED_HERE: Final = (
    "ready_by",
    "active_at",
    "over",
    "since",
    *[f"{end}_{name}" for name in ORDER_FIELDS.values() for end in ("min", "max")],
)
_CANCEL_FIRST: Final = "is being driven; cancel it before you delete it"


@attrs.define(eq=False, repr=False, kw_only=True)
class _RedisBackend(RedisServer):
    """The store's operations. Only the store's thread uses it.

    A group of jobs is executed until all replies have arrived, so the table of leases changes only afterwards.
    """

    worker_name: str
    """Name of the store object."""

    lease_s: float
    """Seconds that a lease lasts without renewal."""

    leases: LeaseTable
    """Leases that this store object holds."""

    def now(self) -> float:
        """Return seconds since 1970 by the server's clock."""
        _, now = self.call("now")
        return float(now)

    def read_guarantee(self) -> DurabilityGuarantee:
        """Return the durability of the server's writes."""
        self.call("now", at_once=True)
        assert self.guarantee is not None  # noqa: S101  the server has just answered
        return self.guarantee

    # Runs and their leases.

    def create(self, request: CreateRequest, lease_request: LeaseRequest) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header, last = request.header, b""
        self._renew_if_due(lease_request.owner)
        while True:
            fields, records = _build_fields(header, request.columns), (encode_header(header), *request.bodies)
            args = (header.id, lease_request.owner.name, last, *_with_count(fields), *_with_count(records))
            outcome, *rest = self.call("create", *args)
            if outcome == b"taken":
                return header, self._build_lease(header.id, lease_request, rest)
            if outcome == b"alone":
                raise missing_predecessor_error(header)
            if outcome == b"exists":
                stored = read_header(header.id, rest[0])
                check_same_prompt(stored, header)
                return stored, self.acquire_lease(header.id, lease_request)
            last, before, state = rest  # `last` is empty if that run was deleted meanwhile
            header = continue_session(request.header, (before.decode(), state.decode()) if last else None)

    def acquire_lease(self, run_id: str, lease_request: LeaseRequest, *, takeover: bool = False) -> Lease:
        """Take the lease of an existing run."""
        if (held := self.leases.find_lease(run_id)) is not None:
            self._renew_if_due(lease_owner(held))
        self._renew_if_due(lease_request.owner)
        take = ("take", run_id, lease_request.owner.name, takeover, FORMAT)
        outcome, *facts = self._call_unleased(take, LEASE_HELD_ADVICE)
        if outcome == b"gone":
            raise self._not_found_error(run_id)
        if outcome == b"newer":
            check_format(run_id, int(facts[0]))
        return self._build_lease(run_id, lease_request, facts)

    def claim(
        self, agent: str, limit: int, lease_request: LeaseRequest, *, suspects: bool, work: ReadableWork
    ) -> Claim:
        """Take the leases of runs that are ready."""
        for owner in self.leases.owners():
            self._renew_if_due(owner)  # else they could count as dead
        _, names = self.call("workers")
        if dead := [name for name in names if self._is_dead(name)]:
            # Not a part of the claim: with other arguments, a repeated claim would be a new one.
            self.call("free", *_with_count(dead))
        releases = (False, 0) if work.releases is None else (True, *_with_count(work.releases))
        request = ("claim", agent, lease_request.owner.name, limit, suspects, work.newest_format, *releases)
        _, has_suspects, found, has_newer, other_release = self.call(*request)
        leases = [self._build_lease(run_id.decode(), lease_request, facts) for run_id, *facts in found]
        return Claim(
            leases=tuple(leases),
            has_suspects=bool(has_suspects),
            has_newer=bool(has_newer),
            other_release=other_release.decode(),
        )

    def _build_lease(self, run_id: str, lease_request: LeaseRequest, facts: Sequence[bytes]) -> Lease:
        token, version, crashes, abandoned, newest, cancelled = map(int, facts)
        lease = Lease(
            run_id=run_id,
            token=token,
            version=version,
            durability=lease_request.durability,
            term=lease_request.owner,
            crashes=crashes,
            abandoned=bool(abandoned),
            is_suspect=abandoned > 1,
            inbox_head=newest,
            cancelled=bool(cancelled),
        )
        self.after_commit(partial(self._register_lease, lease, lease_request.owner, self.last_sent_at + self.lease_s))
        return lease

    def _register_lease(self, lease: Lease, owner: LeaseOwner, until: float) -> None:
        before = self.leases.find_lease(lease.run_id)
        self.leases.add(lease, owner)
        owner.until = max(owner.until, until)
        if before is not None:
            self.leases.mark_lost(before)

    def _renew_if_due(self, owner: LeaseOwner) -> None:
        """Renew the leases of a live event loop, if the machine has slept through a scheduled renewal."""
        if owner.until - boot_clock() > self.lease_s / 2 or not self.leases.is_renewable(owner):
            return
        if leases := self.leases.find_leases(owner):
            self._renew([owner], leases)

    def _renew(self, owners: Sequence[LeaseOwner], leases: Sequence[Lease]) -> list[list[bytes]]:
        """Renew the leases of event loops. Update the leases with their inboxes, and mark lost ones.

        Returns:
            For each loop the leases on the server: alternating index entries and tokens.
        """
        now = boot_clock()
        renewals = [("renew", lease.run_id, lease_owner(lease).name, lease.token, lease.inbox_head) for lease in leases]
        replies = self.call_all([*renewals, *[("renew_owner", owner.name) for owner in owners]])
        for lease, (outcome, *inbox) in zip(leases, replies, strict=False):
            if outcome == b"lost":
                self.leases.mark_lost(lease)
            else:
                self.leases.notify_inbox(lease.run_id, inbox[0], cancelled=bool(inbox[1]))
        for owner in owners:
            owner.until = now + self.lease_s
        return [held for _, held in replies[len(leases) :]]

    def _call_unleased(self, args: Sequence[object], advice: str) -> list[Any]:
        """Call an operation that requires that runs are not executed. Repeat it if their owners are dead.

        Raises:
            LeaseHeldError: if a run is being executed.
        """
        free: list[bytes] = []
        while (reply := self.call(*args, *_with_count(free)))[0] == b"driven":
            _, run_id, owner, token = reply
            if self._is_dropped(run_id.decode(), owner, token):
                free.append(token)
            elif self._is_dead(owner):
                free.append(owner)
            else:
                raise LeaseHeldError(f"run {run_id.decode()!r} {advice}")
        return reply

    def _is_dropped(self, run_id: str, owner: bytes, token: bytes) -> bool:
        """Return whether the lease belongs to this store object, and its coroutine has dropped it."""
        return self.leases.is_dropped(run_id, owner.decode()) and not self.is_answered(b"taken", token)

    def _is_dead(self, owner: bytes) -> bool:
        name = owner.decode()
        return not self.leases.is_ours(name) and OwnerIdentity.parse(name).is_dead

    def release(self, lease: Lease) -> bool:
        """Release the lease."""
        reads = (lease.inbox_read, lease.timers_read_at, lease.backoff_s, lease.backoff_inbox_head)
        self.call("release", lease.run_id, lease_owner(lease).name, lease.token, *reads)
        self.after_commit(partial(self.leases.release, lease))
        return True

    # The journal.

    def append(self, request: AppendRequest) -> bool:
        """Write events and remove inbox rows."""
        lease = request.lease
        self.leases.check(lease)
        self._renew_if_due(lease_owner(lease))
        numbers = (lease_owner(lease).name, lease.token, request.expected_version, lease.inbox_head, request.final)
        lists = (
            *_with_count(request.taken),
            *_with_count(_flatten_pairs(request.columns._asdict())),
            *_with_count(request.bodies),
        )
        try:
            outcome, *rest = self.call("append", lease.run_id, *numbers, *lists)
        except (StoreError, MisuseError) as error:
            self.after_commit(partial(self.leases.mark_failed, lease, error))
            raise
        if outcome == b"lost":
            self.after_commit(partial(self.leases.mark_lost, lease))
            raise lease_lost_error(lease)
        version, newest, cancelled = map(int, rest)
        self._notify_inbox(lease, newest, cancelled)
        if outcome == b"moved":
            raise ConflictError(
                f"run {lease.run_id!r} is at version {version}, not {request.expected_version}; load it again"
            )
        return bool(outcome == b"written")

    def _notify_inbox(self, lease: Lease, inbox_head: int, cancelled: int) -> None:
        if inbox_head > lease.inbox_head:
            self.after_commit(partial(self.leases.notify_inbox, lease.run_id, inbox_head, cancelled=bool(cancelled)))

    def read(self, run_id: str, after: int) -> JournalRecords:
        """Return the run's version, the header as record 0, and the events after `after`."""
        after = max(after, 0)
        _, version, header, events = self._call_for_run(run_id, "read", after)
        return int(version), [(0, header), *enumerate(events, after + 1)]

    # The inbox.

    def post(self, post: InboxPost) -> PostedItem:
        """Insert an item; the first post of a key wins."""
        run_id, is_cancel = post.run_id, isinstance(post.item, Cancel)
        due_at = "-" if post.due_at is None else post.due_at
        limit = MAX_INBOX_ROWS if isinstance(post.item, Input) else ""
        values = (post.key, due_at, is_cancel, post.before, post.text, limit, FORMAT)
        outcome, *rest = self._call_for_run(run_id, "post", *values)
        if outcome == b"decided":
            number, item = _parse_post(run_id, post.key, rest[0])
            return resolve_duplicate_post(run_id, decode_post(run_id, number, post.key, item), post.item)
        if outcome == b"over":
            check_not_over(run_id, *[value.decode() for value in rest])
        if outcome == b"late":
            check_deadline(run_id, post.before, float(rest[0]))
        if outcome == b"full":
            check_inbox_capacity(run_id, post.item, int(rest[0]))
        number = rest[0]
        self.after_commit(partial(self.leases.notify_inbox, run_id, number, cancelled=is_cancel))
        return PostedItem(number=number, key=post.key, item=post.item)

    def inbox(self, run_id: str) -> list[tuple[int, str, bytes]]:
        """Return the rows that are not consumed yet, oldest first."""
        _, rows = self._call_for_run(run_id, "inbox")
        posts = ((key.decode(), row) for key, row in rows)
        return [(number, key, item) for key, row in posts for number, item in [_parse_post(run_id, key, row)]]

    # Lists.

    def runs(
        self, where: Filter, limit: int, order: RunOrder, after: tuple[float, str] | None
    ) -> tuple[RunSummary, ...]:
        """Return the first runs that match the filter. For an order other than the newest, all of them are read."""
        if where.text is not None:
            raise MisuseError(
                "RedisStore does not search text: list runs by the other filters, or keep them in SQLite or PostgreSQL"
            )
        index = next((name for name in _INDEXED_FILTERS if getattr(where, name)), None)
        is_sorted = index is None and order == "newest"
        lines = self._iter_summaries(where, index, limit if is_sorted else _LINES_PER_CALL)
        found = (line for line in lines if where.matches(line))
        # An index has the order of the insertions, which may differ from that of `created_at`.
        return tuple(islice(found, limit) if is_sorted else sort_summaries(found, order, after)[:limit])

    def _iter_summaries(self, where: Filter, index: str | None, limit: int) -> Iterator[RunSummary]:
        if where.id is not None:
            _, lines = self.call("summary", where.id, *_with_count(_SUMMARY_PARSERS), at_once=True)
            yield from (self._parse_summary(*line) for line in lines)
            return
        wanted = {name: value for name, value in attrs.asdict(where).items() if value is not None}
        before, max_rating = wanted.pop("before", math.inf), wanted.pop("max_rating", "")
        for name in _COMPARED_HERE:
            wanted.pop(name, None)
        is_open = wants_open(where) or where.active_at is not None or where.waiting
        key, score, size = (
            ("unfinished" if is_open else "runs", before, min(limit, _LINES_PER_CALL))
            if index is None
            else (f"{_INDEXED_FILTERS[index]}:{wanted[index]}", math.inf, _LINES_PER_CALL)
        )
        tests = (*_with_count(wanted), *_with_count(wanted.values()), max_rating, *_with_count(_SUMMARY_PARSERS))
        entry, more = b"", 1
        while more:
            _, more, entry, score, lines = self.call("runs", key, entry, score, size, *tests, at_once=True)
            yield from (self._parse_summary(*line) for line in lines)

    def count(self, where: Filter, limit: int) -> int:
        """Return the number of runs that match the filter, up to `limit`."""
        if where.agent is not None and where == Filter(agent=where.agent, ready_by=where.ready_by, purpose=""):
            (_, count) = self.call("count_ready", where.agent)
            return min(int(count), limit)
        return len(self.runs(where, limit, "newest", None))

    def _parse_summary(self, run_id: bytes, fields: Sequence[bytes | None], *lease: bytes) -> RunSummary:
        values: dict[str, Any] = {"id": run_id.decode()}
        try:
            for (name, parse), field in zip(_SUMMARY_PARSERS.items(), fields, strict=True):
                values[name] = None if field is None else parse(field)
            values["format"] = values["format"] or UNRECORDED_FORMAT
            values |= {name: values[name] or "" for name in ("release", "purpose")}
        except ValueError as error:
            raise CorruptError(f"run {values['id']!r}: {error}; restore a backup, or delete the run") from None
        worker = lease[0].decode() if lease else None
        return parse_summary(values, driven=self._is_driven(values["id"], *lease), worker=worker)

    def _is_driven(self, run_id: str, *lease: bytes) -> bool:
        return bool(lease) and not (self._is_dropped(run_id, *lease) or self._is_dead(lease[0]))

    # Deletion.

    def delete(self, run_id: str) -> None:
        """Remove a run that is not being executed, and the runs of its subagents."""
        reply = self._call_unleased(("delete", run_id), _CANCEL_FIRST)
        if reply[0] == b"gone":
            raise self._not_found_error(run_id)
        _parse_removed_count(reply)

    def delete_session(self, session: str) -> int:
        """Remove all runs of a session, and the runs of their subagents. Return the number of runs in the session."""
        return _parse_removed_count(self._call_unleased(("delete_session", session), _CANCEL_FIRST))

    def prune(self, before: float, start: int, limit: int, *, unread: bool) -> tuple[int, int]:
        """Remove a batch of old finished runs that no kept run or follower needs; a million runs take half a minute."""
        _, count, start = self.call("prune", before, start, limit, unread)
        return count, start

    # Quotas.

    def take_quotas(self, uses: Sequence[QuotaUse], *, force: bool) -> float:
        """Take amounts from quotas that all processes share: all of them, or none."""
        columns = [[getattr(use, name) for use in uses] for name in ("name", "amount", "limit")]
        _, wait_s = self.call("take_quotas", force, *[each for column in columns for each in _with_count(column)])
        return float(wait_s)

    # Records.

    def read_record(self, kind: str, key: str) -> RecordRow | None:
        """Return a record; None if there is none, or it has expired."""
        _, rows = self.call("read_record", kind, key)
        return next((_parse_record_row(*row) for row in rows), None)

    def write_record(self, kind: str, key: str, text: str, revision: int, expires_at: float | None) -> int | None:
        """Write a record. Return its new revision; None if the stored one is not `revision`."""
        outcome, *rest = self.call("write_record", kind, key, text, revision, expires_at)
        return int(rest[0]) if outcome == b"written" else None

    def list_records(self, kind: str, prefix: str, after: str, limit: int) -> list[RecordRow]:
        """Return the records of a kind that have not expired, in the order of their keys."""
        found: list[RecordRow] = []
        start, end = f"({after}" if after > prefix else f"[{prefix}", f"({end_of_prefix(prefix)}"
        while start and len(found) < limit:
            size = min(limit - len(found), RECORDS_PAGE)
            _, rows, last = self.call("list_records", kind, start, end, size, at_once=True)
            found += [_parse_record_row(*row) for row in rows]
            start = f"({last.decode()}" if last else ""
        return found

    def delete_record(self, kind: str, key: str, revision: int | None) -> bool | None:
        """Delete a record. Return whether it existed; None if its revision is not `revision`."""
        outcome, *rest = self.call("delete_record", kind, key, revision)
        return None if outcome == b"moved" else rest[0] > 0

    def delete_expired_records(self, limit: int) -> int:
        """Delete up to `limit` expired records. Return their number."""
        _, count = self.call("expire_records", limit)
        return int(count)

    # Feedback.

    def add_feedback(self, run_id: str, key: str, feedback: Feedback) -> None:
        """Record feedback on a run."""
        self._call_for_run(run_id, "add_feedback", key, feedback.rating, json.dumps(attrs.asdict(feedback)))

    def list_feedback(self, run_id: str) -> list[Feedback]:
        """Return the feedback on a run, oldest first."""
        _, rows = self._call_for_run(run_id, "list_feedback")
        return [feedback for _, feedback in sorted([_parse_feedback(run_id, row) for row in rows], key=itemgetter(0))]

    # Followers.

    def number_changes(self, limit: int) -> bool:  # noqa: ARG002  the other stores number changes later
        """Return False: each operation is atomic, so a change gets its number at once."""
        return False

    def add_follower(self, name: str, *, from_now: bool) -> None:
        """Create a follower, unless it exists."""
        self.call("add_reader", name, from_now)

    def has_unread(self, name: str, after: int) -> bool:  # noqa: ARG002  a look is as expensive as the request
        """Return True: `take_unread` writes only if it finds something."""
        return True

    def take_unread(self, name: str, holder: str, after: int, lease_s: float, limit: int) -> list[UnreadRun]:
        """Return runs that changed after the follower's position, and hold the follower."""
        more, rows = 1, []
        while more:  # a page may have only runs that have expired
            outcome, *rest = self.call("take_unread", name, holder, after, lease_s, limit)
            if outcome == b"gone":
                raise missing_follower_error(name)
            rows, more = rest
        return [
            UnreadRun(key=key.decode(), run_id=run_id.decode(), change=int(change), after=int(read))
            for key, run_id, change, read in rows
        ]

    def confirm_read(
        self, name: str, holder: str, position: int, versions: Mapping[str, int], *, release: bool
    ) -> None:
        """Record that the follower has read all changes up to a number."""
        lists = (*_with_count(versions), *_with_count(versions.values()))
        (outcome,) = self.call("confirm_read", name, holder, position, release, *lists)
        if outcome == b"lost":
            raise follower_lost_error(name)

    def followers(self) -> list[FollowerStatus]:
        """Return the followers and how far they are behind, by name. Expired runs may be counted for a while."""
        _, rows = self.call("readers")
        return sorted(
            [
                FollowerStatus(
                    name=name.decode(),
                    position=int(position),
                    lag=lag,
                    waiting_since=float(since) if since else None,
                    held=bool(is_held),
                )
                for name, position, lag, since, is_held in rows
            ],
            key=lambda status: status.name,
        )

    def drop_follower(self, name: str) -> bool:
        """Remove a follower, and let the runs expire that were kept for it. Return whether it existed."""
        _, is_found = self.call("drop_reader", name)
        last = 0
        while int(last) >= 0:
            _, last = self.call("expire_read", last)
        return bool(is_found)

    # Maintenance.

    def renew_leases(self) -> None:
        """Renew the leases of live event loops, release dropped ones, and detect new posts and lost leases."""
        kept = [lease for _, held in self.leases if (lease := held.lease_ref()) is not None]
        dropped = [(run_id, held) for run_id, held in self.leases if held.lease_ref() is None]
        owners = self.leases.renewable_owners()
        stored = self._renew(owners, kept)
        self.call_all([_build_release_args(*each) for each in dropped])
        for run_id, _ in dropped:
            self.leases.remove(run_id)
        # Leases on the server that are missing here are released: the reply that granted them was lost.
        stray = [
            ("disown", owner.name, entry, token)
            for owner, held in zip(owners, stored, strict=True)
            for entry, token in zip(held[::2], held[1::2], strict=True)
            if not self.leases.has_lease(entry[INDEX_DIGITS:].decode(), int(token))
        ]
        if stray:
            self.call_all(stray)

    def maintain(self) -> None:
        """Remove expired runs from the lists."""
        more = 1
        while more:
            ((_, more),) = self.call_all([("sweep",)])

    def close(self) -> None:
        """Release the leases, and close the connection."""
        try:
            if self.leases:
                owners = self.leases.owners()
                releases = [_build_release_args(run_id, held) for run_id, held in self.leases]
                self.call_all([*releases, *[("forget", owner.name) for owner in owners]])
                for owner in owners:
                    owner.until = 0.0
        finally:
            self.leases.clear()
            self.disconnect()

    def _call_for_run(self, run_id: str, operation: str, *args: object) -> list[Any]:
        reply = self.call(operation, run_id, *args)
        if reply[0] == b"gone":
            raise self._not_found_error(run_id)
        return reply

    def _not_found_error(self, run_id: str) -> RunNotFoundError:
        return RunNotFoundError(f"{self.address} holds no run {run_id!r}; `agentfsm runs` lists its runs")


def _build_release_args(run_id: str, held: HeldLease) -> tuple[object, ...]:
    """Return the arguments that release a lease without any reads."""
    return "release", run_id, held.owner.name, held.token, 0, 0.0, 0.0, 0


def _with_count(values: Collection[object]) -> tuple[object, ...]:
    return len(values), *values


def _build_fields(header: Header, facts: RunColumns) -> list[object]:
    """Return the fields of a new run for lists, as alternating names and values; fields that are None are omitted."""
    names = ("session", "after", "parent", "agent", "user", "tenant", "release", "purpose", "created_at")
    values = {name: getattr(header, name) for name in names}
    fields = {"prompt": preview_prompt(header)} | {name: value for name, value in values.items() if value is not None}
    return _flatten_pairs(fields | facts._asdict())


def _flatten_pairs(values: Mapping[str, object]) -> list[object]:
    return [each for pair in values.items() for each in pair]


def _parse_post(run_id: str, key: str, row: bytes) -> tuple[int, bytes]:
    """Return the number and the item of an inbox row."""
    try:
        number, _due_at, _cancel, item = row.split(b" ", 3)
        return int(number), item
    except ValueError:
        raise CorruptError(f"run {run_id!r}: post {key!r} is damaged: restore a backup, or delete the run") from None


def _parse_feedback(run_id: str, row: bytes) -> tuple[int, Feedback]:
    """Return the number and the content of a feedback."""
    try:
        number, text = row.split(b" ", 1)
        return int(number), Feedback(**json.loads(text))
    except (ValueError, TypeError, MisuseError):
        raise CorruptError(f"run {run_id!r}: a feedback is damaged: restore a backup, or delete the run") from None


def _parse_record_row(key: bytes, value: bytes, revision: bytes, expires_at: bytes) -> RecordRow:
    return key.decode(), value, int(revision), float(expires_at) if expires_at else None


def _parse_removed_count(reply: list[Any]) -> int:
    """Return the number of removed runs.

    Raises:
        ConflictError: if another run goes on from one of them, or the caller of one of them is not over.
    """
    if reply[0] == b"followed":
        raise successor_exists_error(reply[1].decode(), reply[2].decode())
    if reply[0] == b"called":
        raise caller_open_error(reply[1].decode(), reply[2].decode())
    return int(reply[1])


@cache
def _load_script() -> str:
    return files("agentfsm.stores.redis").joinpath("redis.lua").read_text(encoding="utf-8")


def _check_url(_store: object, _attribute: object, url: str) -> None:
    build_connection(url)


@attrs.define(eq=False, repr=False)
class RedisStore(ThreadedStore[_RedisBackend]):
    """A store that keeps journals in a Redis or Valkey server, which workers of several machines may share.

    The settings of the server determine its durability, so the store checks them at each connection, and refuses a
    server that may lose more than `accept_loss`. `describe_durability` returns the result. With appendonly yes,
    appendfsync always and no-appendfsync-on-rewrite no, acknowledged writes survive a crash of the server and a power
    cut. A server that evicts keys when its memory is full (maxmemory with a policy other than noeviction) is always
    refused. Later changes of the settings are noticed at the next connection.

    Replication in Redis is asynchronous. The store uses neither WAIT nor WAITAOF, since neither prevents the promotion
    of a replica that lacks writes. So a failover may lose the newest acknowledged writes with any settings. The owner
    of such a run is refused at its next append, and its effects since then are not undone. Redis Cluster is refused.

    A lease lasts `lease_s` seconds of the server's clock. The store's thread renews it, unless the event loop of its
    owner is blocked for more than `blocked_s` seconds. If the owner is killed, another process of the machine takes its
    runs at once if it can see that the owner is dead, else when the lease expires. While the server restarts or fails
    over, calls wait for it; requests in progress are sent again, and executed once.
    """

    url: str = attrs.field(repr=False, validator=_check_url)
    """Address of the server: "redis://HOST:PORT/DATABASE", "rediss://..." for TLS, or "unix://PATH"."""

    accept_loss: Loss = attrs.field(default="nothing", kw_only=True, validator=require_choice(*LOSS_DESCRIPTIONS))
    """The most that a crash of the server may lose: "nothing" (the default), "seconds" (appendonly yes with another
    appendfsync), "snapshot" (snapshots without a log) or "everything" (neither). It applies to all writes, including
    posts and durability "full". The store refuses a server whose settings may lose more.
    """

    prefix: str = attrs.field(default=DEFAULT_PREFIX, kw_only=True)
    """Prefix of all keys, so that several stores can share a server. A prefix must not begin with another one. Default
    "agentfsm:".
    """

    ttl_s: float | None = attrs.field(default=None, kw_only=True, validator=SECONDS.or_none())
    """Seconds that a session, or a run without session, is kept after all of its runs are over, above 0, together with
    related runs (callers, subagents, predecessors and successors). A new run of the session keeps all of them again,
    and so does a follower that has not read them. The setting of the store that ends the last run applies. None, the
    default: for ever.
    """

    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=LEASE_SECONDS)
    """Seconds after which other workers take over the runs of a worker that vanished, up to 3,600."""

    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=SECONDS)
    """Seconds that calls wait for a server that was reached before and is away, above 0; then they fail."""

    @property
    def address(self) -> str:
        """Address of the server, without user and password."""
        return format_address(self.url)

    async def describe_durability(self) -> str:
        """Return a description of the server's durability, as of the last connection.

        Raises:
            StoreError: if the server cannot be reached, or is unsuitable.
            MisuseError: if it may lose more than `accept_loss`.
        """
        guarantee = await self._run_job(lambda backend: backend.read_guarantee(), writes=False)
        return f"{guarantee}; writes do not wait for replicas, so a failover may lose the newest ones"

    def _start_watching(self, writer: StoreWriter[_RedisBackend], topic: str) -> None:  # noqa: ARG002  it announces all
        if writer.listener is None:
            writer.listener = ChangeListener(
                subscriptions=writer.subscriptions,
                notifications=partial(iter_notifications, self.url, f"{self.prefix}changes"),
                match_topic=lambda topic, topics: topic if topic in topics else None,
            )
        writer.listener.start()

    def _create_backend(self) -> _RedisBackend:
        worker = str(OwnerIdentity.generate())
        ttl_s = "" if self.ttl_s is None else repr(self.ttl_s)
        settings = (self.prefix, worker, repr(self.lease_s), repr(MAX_LEASE_S), ttl_s)
        return _RedisBackend(
            url=self.url,
            script=_load_script(),
            script_args=tuple([setting.encode() for setting in settings]),
            accept_loss=self.accept_loss,
            patience_s=self.patience_s,
            worker_name=worker,
            lease_s=self.lease_s,
            leases=LeaseTable(self.lease_s, self.blocked_s, worker),
            outage=Outage(self.lease_s),
        )
