"""Journals in Redis or Valkey, for workers on several machines, on asyncio and trio alike.

One thread asks in groups (`threaded.group_commit`). `redis.server` connects to the server and judges it; `redis.lua`
says how an operation changes the keys. Here are the operations as the thread sees them, and how their answers are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import islice
from typing import Any, Final

import attrs

from agentfsm._concurrency import boot_clock
from agentfsm.core.codec import encode_header
from agentfsm.core.errors import (
    ConflictError,
    CorruptError,
    LeaseHeldError,
    MisuseError,
    RunNotFoundError,
    StoreError,
)
from agentfsm.core.header import Header
from agentfsm.core.inbox import Cancel, Input, PostedItem
from agentfsm.core.validation import SECONDS, require_choice
from agentfsm.ports.store import Claim, Filter, Lease, RunSummary, lease_lost_error
from agentfsm.stores.redis.server import (
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
    caller_open_error,
    check_deadline,
    check_inbox_capacity,
    check_not_over,
    check_same_prompt,
    continue_session,
    missing_predecessor_error,
    parse_summary,
    preview_prompt,
    resolve_duplicate_post,
    successor_exists_error,
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
    RunColumns,
    StoreWriter,
    ThreadedStore,
    decode_post,
    read_header,
)

DEFAULT_PREFIX: Final = "agentfsm:"
# Characters of the number with which an entry of an index begins; the id of the run follows.
INDEX_DIGITS: Final = 16

# The fields of a summary, and how they are read.
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
    "prompt": bytes.decode,
}
# Filters that have an index of their own, and its kind; for the others the list of all runs is searched.
_INDEXED_FILTERS: Final = {"session": "session", "parent": "below"}
_CANCEL_FIRST: Final = "is being driven; cancel it before you delete it"


@attrs.define(eq=False, repr=False, kw_only=True)
class _RedisBackend(RedisServer):
    """The operations. It belongs to the writer's thread.

    A group of jobs is run until its last question is answered, so what is held changes after it only.
    """

    worker_name: str
    lease_s: float
    leases: LeaseTable

    def now(self) -> float:
        """Seconds since 1970 by the server's clock."""
        _, now = self.call("now")
        return float(now)

    def read_guarantee(self) -> DurabilityGuarantee:
        """Return what the server promises."""
        self.call("now", at_once=True)
        assert self.guarantee is not None  # noqa: S101  it has just answered
        return self.guarantee

    # Runs and their leases.

    def create(self, request: CreateRequest, lease_request: LeaseRequest) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header, last = request.header, b""
        self._renew_if_due(lease_request.owner)
        while True:
            fields, records = _build_fields(header, request.columns), (encode_header(header), *request.bodies)
            words = (header.id, lease_request.owner.name, last, *_with_count(fields), *_with_count(records))
            how, *rest = self.call("create", *words)
            if how == b"taken":
                return header, self._build_lease(header.id, lease_request, rest)
            if how == b"alone":
                raise missing_predecessor_error(header)
            if how == b"exists":
                return self._read_stored_header(header, rest[0]), self.acquire_lease(header.id, lease_request)
            last, before, state = rest
            # It may have been deleted since.
            header = continue_session(request.header, (before.decode(), state.decode()) if last else None)

    def _read_stored_header(self, header: Header, record: bytes | None) -> Header:
        stored = read_header(header.id, record)
        check_same_prompt(stored, header)
        return stored

    def acquire_lease(self, run_id: str, lease_request: LeaseRequest, *, takeover: bool = False) -> Lease:
        """Take the lease of a run that exists."""
        if (held := self.leases.find_lease(run_id)) is not None:
            self._renew_if_due(lease_owner(held))
        self._renew_if_due(lease_request.owner)
        how, *facts = self._call_unleased(("take", run_id, lease_request.owner.name, takeover), LEASE_HELD_ADVICE)
        if how == b"gone":
            raise self._not_found_error(run_id)
        return self._build_lease(run_id, lease_request, facts)

    def claim(self, agent: str, limit: int, lease_request: LeaseRequest, *, suspects: bool) -> Claim:
        """Take the leases of runs that a worker can move on now."""
        for owner in self.leases.owners():
            self._renew_if_due(owner)  # else they could count as dead
        _, names = self.call("workers")
        if dead := [name for name in names if self._is_dead(name)]:
            self.call(
                "free", *_with_count(dead)
            )  # no part of the claim: asked in other words, that would be another one
        _, has_suspects, found = self.call("claim", agent, lease_request.owner.name, limit, suspects)
        leases = [self._build_lease(run_id.decode(), lease_request, facts) for run_id, *facts in found]
        return Claim(leases=tuple(leases), has_suspects=bool(has_suspects))

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
        """Renew the leases of an event loop that runs, where the machine has slept through the time for it."""
        if owner.until - boot_clock() > self.lease_s / 2 or not self.leases.is_renewable(owner):
            return
        if leases := self.leases.find_leases(owner):
            self._renew([owner], leases)

    def _renew(self, owners: Sequence[LeaseOwner], leases: Sequence[Lease]) -> list[list[bytes]]:
        """Renew what event loops hold, and tell leases what is new, those first that are lost.

        Returns:
            What the server knows of each loop: entries and tokens in turn.
        """
        now = boot_clock()
        news = [("renew", lease.run_id, lease_owner(lease).name, lease.token, lease.inbox_head) for lease in leases]
        answers = self.call_all([*news, *[("renew_owner", owner.name) for owner in owners]])
        for lease, (how, *told) in zip(leases, answers, strict=False):
            if how == b"lost":
                self.leases.mark_lost(lease)
            else:
                self.leases.notify_inbox(lease.run_id, told[0], cancelled=bool(told[1]))
        for owner in owners:
            owner.until = now + self.lease_s
        return [held for _, held in answers[len(leases) :]]

    def _call_unleased(self, args: Sequence[object], advice: str) -> list[Any]:
        """Ask for what is refused while a run is driven; ask again where its owner is no more.

        Raises:
            LeaseHeldError: when it is driven.
        """
        free: list[bytes] = []
        while (answer := self.call(*args, *_with_count(free)))[0] == b"driven":
            _, run_id, owner, token = answer
            if self._is_dropped(run_id.decode(), owner, token):
                free.append(token)
            elif self._is_dead(owner):
                free.append(owner)
            else:
                raise LeaseHeldError(f"run {run_id.decode()!r} {advice}")
        return answer

    def _is_dropped(self, run_id: str, owner: bytes, token: bytes) -> bool:
        """Whether the lease is ours, and whoever had it has thrown it away."""
        return self.leases.is_dropped(run_id, owner.decode()) and not self.is_answered(b"taken", token)

    def _is_dead(self, owner: bytes) -> bool:
        name = owner.decode()
        return not self.leases.is_ours(name) and OwnerIdentity.parse(name).is_dead

    def release(self, lease: Lease) -> bool:
        """Give the lease back."""
        looked = (lease.inbox_read, lease.timers_read_at, lease.backoff_s, lease.backoff_inbox_head)
        self.call("release", lease.run_id, lease_owner(lease).name, lease.token, *looked)
        self.after_commit(partial(self.leases.release, lease))
        return True

    # The journal.

    def append(self, request: AppendRequest) -> bool:
        """Write events and strike inbox rows."""
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
            answer = self.call("append", lease.run_id, *numbers, *lists)
        except (StoreError, MisuseError) as error:
            self.after_commit(partial(self.leases.mark_failed, lease, error))
            raise
        return self._parse_append_reply(request, *answer)

    def _parse_append_reply(self, request: AppendRequest, how: bytes, *rest: Any) -> bool:
        lease = request.lease
        if how == b"lost":
            self.after_commit(partial(self.leases.mark_lost, lease))
            raise lease_lost_error(lease)
        version, newest, cancelled = map(int, rest)
        self._notify_inbox(lease, newest, cancelled)
        if how == b"moved":
            raise ConflictError(
                f"run {lease.run_id!r} is at version {version}, not {request.expected_version}; load it again"
            )
        return how == b"written"

    def _notify_inbox(self, lease: Lease, inbox_head: int, cancelled: int) -> None:
        if inbox_head > lease.inbox_head:
            self.after_commit(partial(self.leases.notify_inbox, lease.run_id, inbox_head, cancelled=bool(cancelled)))

    def read(self, run_id: str, after: int) -> JournalRecords:
        """Return the run's version, and the records: the header as 0, and those after that version."""
        after = max(after, 0)
        _, version, header, events = self._call_for_run(run_id, "read", after)
        return int(version), [(0, header), *enumerate(events, after + 1)]

    # The inbox.

    def post(self, post: InboxPost) -> PostedItem:
        """Insert an item; the first of a key wins."""
        run_id, is_cancel = post.run_id, isinstance(post.item, Cancel)
        due_at = "-" if post.due_at is None else post.due_at
        most = MAX_INBOX_ROWS if isinstance(post.item, Input) else ""
        how, *rest = self._call_for_run(run_id, "post", post.key, due_at, is_cancel, post.before, post.text, most)
        if how == b"decided":
            number, item = _parse_post(run_id, post.key, rest[0])
            return resolve_duplicate_post(run_id, decode_post(run_id, number, post.key, item), post.item)
        if how == b"over":
            check_not_over(run_id, *[word.decode() for word in rest])
        if how == b"late":
            check_deadline(run_id, post.before, float(rest[0]))
        if how == b"full":
            check_inbox_capacity(run_id, post.item, int(rest[0]))
        number = rest[0]
        self.after_commit(partial(self.leases.notify_inbox, run_id, number, cancelled=is_cancel))
        return PostedItem(number=number, key=post.key, item=post.item)

    def inbox(self, run_id: str) -> list[tuple[int, str, bytes]]:
        """Return the rows that are not taken yet, oldest first."""
        _, rows = self._call_for_run(run_id, "inbox")
        posts = ((key.decode(), row) for key, row in rows)
        return [(number, key, item) for key, row in posts for number, item in [_parse_post(run_id, key, row)]]

    # Lists.

    def runs(self, where: Filter, limit: int) -> tuple[RunSummary, ...]:
        """Return the newest runs that the filter takes, newest first."""
        index = next((name for name in _INDEXED_FILTERS if getattr(where, name) is not None), None)
        lines = (line for line in self._iter_summaries(where, index) if where.matches(line))
        if index is None:
            return tuple(islice(lines, limit))
        # An index has the order in which the runs were created, whatever the time was said to be.
        return tuple(sorted(lines, key=lambda line: line.created_at, reverse=True)[:limit])

    def _iter_summaries(self, where: Filter, index: str | None) -> Iterator[RunSummary]:
        wanted = {name: value for name, value in attrs.asdict(where).items() if value is not None}
        before = wanted.pop("before", math.inf)
        key, score = ("runs", before) if index is None else (f"{_INDEXED_FILTERS[index]}:{wanted[index]}", math.inf)
        filters = [word for pair in wanted.items() for word in pair]
        entry, more = b"", 1
        while more:
            words = ("runs", key, entry, score, *_with_count(filters), *_with_count(_SUMMARY_PARSERS))
            _, more, entry, score, lines = self.call(*words, at_once=True)
            yield from (self._parse_summary(*line) for line in lines)

    def _parse_summary(self, run_id: bytes, fields: Sequence[bytes | None], *lease: bytes) -> RunSummary:
        values: dict[str, Any] = {"id": run_id.decode()}
        try:
            for (name, read), field in zip(_SUMMARY_PARSERS.items(), fields, strict=True):
                values[name] = None if field is None else read(field)
        except ValueError as error:
            raise CorruptError(f"run {values['id']!r}: {error}; restore a backup, or delete the run") from None
        return parse_summary(values, driven=self._is_driven(values["id"], *lease))

    def _is_driven(self, run_id: str, *lease: bytes) -> bool:
        return bool(lease) and not (self._is_dropped(run_id, *lease) or self._is_dead(lease[0]))

    # The end of runs.

    def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, and the runs below it."""
        answer = self._call_unleased(("delete", run_id), _CANCEL_FIRST)
        if answer[0] == b"gone":
            raise self._not_found_error(run_id)
        _parse_removed_count(answer)

    def delete_session(self, session: str) -> int:
        """Remove all runs of a session, and the runs below them."""
        return _parse_removed_count(self._call_unleased(("delete_session", session), _CANCEL_FIRST))

    def prune(self, before: float, start: int, limit: int) -> tuple[int, int]:
        """Remove a portion of what is over and old, and nothing still needs; a million runs take half a minute."""
        _, count, start = self.call("prune", before, start, limit)
        return count, start

    # Upkeep.

    def renew_leases(self) -> None:
        """Renew the leases that are held, let go of those that were dropped, learn of news and losses."""
        kept = [lease for _, held in self.leases if (lease := held.lease_ref()) is not None]
        dropped = [(run_id, held) for run_id, held in self.leases if held.lease_ref() is None]
        owners = self.leases.renewable_owners()
        known = self._renew(owners, kept)
        self.call_all([_build_release_args(*each) for each in dropped])
        for run_id, _ in dropped:
            self.leases.remove(run_id)
        self._disown(owners, [list(zip(words[::2], words[1::2], strict=True)) for words in known])

    def _disown(self, owners: Sequence[LeaseOwner], leases: Sequence[Sequence[tuple[bytes, bytes]]]) -> None:
        """Let go of leases that we do not know of: the answer that told of them was lost on its way."""
        stray = [
            ("disown", owner.name, entry, token)
            for owner, held in zip(owners, leases, strict=True)
            for entry, token in held
            if not self.leases.has_lease(entry[INDEX_DIGITS:].decode(), int(token))
        ]
        if stray:
            self.call_all(stray)

    def maintain(self) -> None:
        """Strike from the lists what has expired."""
        more = 1
        while more:
            ((_, more),) = self.call_all([("sweep",)])

    def close(self) -> None:
        """Let go of the leases, and hang up."""
        try:
            if self.leases:
                owners = self.leases.owners()
                leaving = [_build_release_args(run_id, held) for run_id, held in self.leases]
                self.call_all([*leaving, *[("forget", owner.name) for owner in owners]])
                for owner in owners:
                    owner.until = 0.0
        finally:
            self.leases.clear()
            self.disconnect()

    def _call_for_run(self, run_id: str, operation: str, *args: object) -> list[Any]:
        answer = self.call(operation, run_id, *args)
        if answer[0] == b"gone":
            raise self._not_found_error(run_id)
        return answer

    def _not_found_error(self, run_id: str) -> RunNotFoundError:
        return RunNotFoundError(f"{self.address} holds no run {run_id!r}; `agentfsm runs` lists those that it holds")


def _build_release_args(run_id: str, held: HeldLease) -> tuple[object, ...]:
    """Return the release of a lease by which nobody has seen anything new."""
    return "release", run_id, held.owner.name, held.token, 0, 0.0, 0.0, 0


def _with_count(values: Collection[object]) -> tuple[object, ...]:
    return len(values), *values


def _build_fields(header: Header, facts: RunColumns) -> list[object]:
    """Return what a list shows of a new run, names and values in turn; what is None is not kept."""
    names = ("session", "after", "parent", "agent", "user", "created_at")
    values = {name: getattr(header, name) for name in names}
    fields = {"prompt": preview_prompt(header)} | {name: value for name, value in values.items() if value is not None}
    return _flatten_pairs(fields | facts._asdict())


def _flatten_pairs(values: Mapping[str, object]) -> list[object]:
    return [word for pair in values.items() for word in pair]


def _parse_post(run_id: str, key: str, row: bytes) -> tuple[int, bytes]:
    """Return number and item of a row of an inbox."""
    try:
        number, _due_at, _cancel, item = row.split(b" ", 3)
        return int(number), item
    except ValueError:
        raise CorruptError(f"run {run_id!r}: post {key!r} is damaged: restore a backup, or delete the run") from None


def _parse_removed_count(answer: list[Any]) -> int:
    """Return how many runs were removed.

    Raises:
        ConflictError: when another run goes on from one of them, or the caller of one of them is not over.
    """
    if answer[0] == b"followed":
        raise successor_exists_error(answer[1].decode(), answer[2].decode())
    if answer[0] == b"called":
        raise caller_open_error(answer[1].decode(), answer[2].decode())
    return int(answer[1])


@cache
def _load_script() -> str:
    return files("agentfsm.stores.redis").joinpath("redis.lua").read_text(encoding="utf-8")


def _check_url(_store: object, _attribute: object, url: str) -> None:
    build_connection(url)


@attrs.define(eq=False, repr=False)
class RedisStore(ThreadedStore[_RedisBackend]):
    """Keeps journals in a Redis or Valkey that workers of several machines may share.

    Redis keeps what it was told to keep, so the store looks at its settings each time that it connects, and refuses a
    server that may lose more than was accepted. `describe_durability` says what it found. With appendonly yes,
    appendfsync always and no-appendfsync-on-rewrite no, what is acknowledged survives a crash of the server and a power
    cut: that is what is asked for unless `accept_loss` says otherwise. A server that throws keys away when its memory
    is full (maxmemory with a policy other than noeviction) is always refused. A change of settings under way goes
    unnoticed until the next connection.

    Replication is Redis's own, which does not wait: neither WAIT nor WAITAOF is used, as neither keeps a replica that
    lacks writes from being promoted. So a failover may lose the newest acknowledged writes, whatever the settings; the
    owner of a run of which something was lost is refused at its next append, and what it had done since is not undone.
    Redis Cluster is not supported, and is refused.

    A lease lasts `lease_s` seconds of the server's clock and is renewed by the store's thread, as long as the event
    loop of its owner does not stand still for more than `blocked_s` seconds. When an owner is killed its runs may be
    taken at once by another process of the machine that can see that it is dead, else when the lease ends. While the
    server restarts or fails over calls wait for it; what was under way is asked again, and done once.

    Args:
        url: "redis://HOST:PORT/DATABASE", "rediss://..." for TLS, or "unix://PATH".
        accept_loss: The most that a crash of the server may cost, in so many words: "nothing", "seconds" (appendonly
            yes with another appendfsync), "snapshot" (no log, but snapshots) or "everything" (neither). It holds for
            all that is written, posts and what is asked for with durability "full" included: Redis has one way for all.
        prefix: Of all keys; stores with different ones share a server and know nothing of each other. No prefix may
            begin with another one.
        ttl_s: Seconds that a session is kept after the last of its runs is over, and a run without session likewise,
            with what hangs together with it (callers and called, and what goes on from what). A new run of the session
            keeps all of it again. None: for ever. That of the store which ends the last run holds.
        lease_s: Seconds, up to 3,600: how long a worker that vanished keeps others waiting.
        blocked_s: Seconds above 0: how long an event loop that stands still keeps its runs.
        patience_s: Seconds for which a server that is away is waited for, once it was reached; then calls fail.
    """

    url: str = attrs.field(repr=False, validator=_check_url)
    """Address of the server: "redis://HOST:PORT/DATABASE", "rediss://..." for TLS, or "unix://PATH"."""

    accept_loss: Loss = attrs.field(default="nothing", kw_only=True, validator=require_choice(*LOSS_DESCRIPTIONS))
    """The most that a crash of the server may lose: "nothing" (the default), "seconds", "snapshot" or "everything". The
    store refuses a server whose settings may lose more.
    """

    prefix: str = attrs.field(default=DEFAULT_PREFIX, kw_only=True)
    """Prefix of all keys, so that several stores can share a server."""

    ttl_s: float | None = attrs.field(default=None, kw_only=True, validator=SECONDS.or_none())
    """Seconds that a session, or a run without session, is kept after it is over, above 0. None, the default, keeps it
    for ever.
    """

    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=LEASE_SECONDS)
    """Seconds after which other workers take over the runs of a worker that vanished, up to 3,600."""

    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=SECONDS)
    """Seconds that calls wait for a server that was reached before and is away, above 0; then they fail."""

    @property
    def address(self) -> str:
        """Where the server is, without user and password."""
        return format_address(self.url)

    async def describe_durability(self) -> str:
        """Return in words what the server promises, as it was when it was reached last.

        Raises:
            StoreError: when it cannot be reached, or is not one to rely on.
            MisuseError: when it may lose more than was accepted.
        """
        promise = await self._run_job(lambda ledger: ledger.read_guarantee(), writes=False)
        return f"{promise}; its replicas are not waited for, so a failover may cost the newest writes"

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
