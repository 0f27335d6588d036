"""Journals in Redis or Valkey, for workers on several machines, on asyncio and trio alike.

One thread asks in groups (`writer`); the server is reached and judged by `redis_server`, and what an operation does to
the keys stands in `redis.lua`. Here are the operations as the thread sees them, and what their answers mean.
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
from agentfsm.core.inbox import Cancel, Input, PostedItem
from agentfsm.core.run import Header
from agentfsm.ports import Claim, Filter, Lease, RunSummary, lease_lost_error
from agentfsm.stores.common import (
    DRIVEN,
    INBOX_ROWS,
    PATIENCE_S,
    check_in_time,
    check_not_over,
    check_room,
    check_same_prompt,
    checked_session,
    checked_winner,
    followed,
    prompt_of,
    summary_from,
    without_history,
)
from agentfsm.stores.holdings import Held, Holdings, LoopOwner, owner_of
from agentfsm.stores.listener import Listener
from agentfsm.stores.outage import Outage
from agentfsm.stores.owner import Owner
from agentfsm.stores.redis_server import LOSSES, Loss, Promise, RedisServer, announcements, dial, place_of
from agentfsm.stores.threaded import (
    LEASE_S,
    MAX_LEASE_S,
    Entry,
    Facts,
    LedgerWriter,
    Opening,
    Post,
    Records,
    Taker,
    ThreadedStore,
    check_lease_s,
    posted,
    read_header,
)

PREFIX: Final = "agentfsm:"
# Characters of the number with which an entry of an index begins; the id of the run follows.
DIGITS: Final = 16

# The fields of a summary, and how they are read.
_LISTED: Final[dict[str, Callable[[bytes], Any]]] = {
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
_INDEXED: Final = {"session": "session", "parent": "below"}
_CANCEL_FIRST: Final = "is being driven; cancel it before you delete it"


@attrs.define(eq=False, repr=False, kw_only=True)
class _RedisLedger(RedisServer):
    """The operations. It belongs to the writer's thread.

    A group of jobs is run until its last question is answered, so what is held changes after it only.
    """

    worker: str
    lease_s: float
    holdings: Holdings

    def now(self) -> float:
        """Seconds since 1970 by the server's clock."""
        _, now = self.ask("now")
        return float(now)

    def promised(self) -> Promise:
        """Return what the server promises."""
        self.ask("now", at_once=True)
        assert self.promise is not None  # noqa: S101  it has just answered
        return self.promise

    # Runs and their leases.

    def create(self, opening: Opening, taker: Taker) -> tuple[Header, Lease]:
        """Insert the run if its id is new, and take its lease."""
        header, last = opening.header, b""
        self._keep(taker.owner)
        while True:
            fields, records = _fields_of(header, opening.facts), (encode_header(header), *opening.bodies)
            words = (header.id, taker.owner.name, last, *_counted(fields), *_counted(records))
            how, *rest = self.ask("create", *words)
            if how == b"taken":
                return header, self._lease(header.id, taker, rest)
            if how == b"alone":
                raise without_history(header)
            if how == b"exists":
                return self._stored(header, rest[0]), self.take(header.id, taker)
            last, before, state = rest
            # It may have been deleted since.
            header = checked_session(opening.header, (before.decode(), state.decode()) if last else None)

    def _stored(self, header: Header, record: bytes | None) -> Header:
        stored = read_header(header.id, record)
        check_same_prompt(stored, header)
        return stored

    def take(self, run_id: str, taker: Taker, *, takeover: bool = False) -> Lease:
        """Take the lease of a run that exists."""
        if (held := self.holdings.lease_of(run_id)) is not None:
            self._keep(owner_of(held))
        self._keep(taker.owner)
        how, *facts = self._ask_idle(("take", run_id, taker.owner.name, takeover), DRIVEN)
        if how == b"gone":
            raise self._not_found(run_id)
        return self._lease(run_id, taker, facts)

    def claim(self, agent: str, limit: int, taker: Taker, *, suspects: bool) -> Claim:
        """Take the leases of runs that a worker can move on now."""
        for owner in self.holdings.owners():
            self._keep(owner)  # else they could count as dead
        _, names = self.ask("workers")
        if dead := [name for name in names if self._is_dead(name)]:
            self.ask("free", *_counted(dead))  # no part of the claim: asked in other words, that would be another one
        _, has_suspects, found = self.ask("claim", agent, taker.owner.name, limit, suspects)
        leases = [self._lease(run_id.decode(), taker, facts) for run_id, *facts in found]
        return Claim(leases=tuple(leases), has_suspects=bool(has_suspects))

    def _lease(self, run_id: str, taker: Taker, facts: Sequence[bytes]) -> Lease:
        token, version, crashes, abandoned, newest, cancelled = map(int, facts)
        lease = Lease(
            run_id=run_id,
            token=token,
            version=version,
            durability=taker.durability,
            term=taker.owner,
            crashes=crashes,
            abandoned=bool(abandoned),
            inbox_head=newest,
            cancelled=bool(cancelled),
        )
        self.after_commit(partial(self._hold, lease, taker.owner, self.asked_at + self.lease_s))
        return lease

    def _hold(self, lease: Lease, owner: LoopOwner, until: float) -> None:
        before = self.holdings.lease_of(lease.run_id)
        self.holdings.add(lease, owner)
        owner.until = max(owner.until, until)
        if before is not None:
            self.holdings.lose(before)

    def _keep(self, owner: LoopOwner) -> None:
        """Renew the leases of an event loop that runs, where the machine has slept through the time for it."""
        if owner.until - boot_clock() > self.lease_s / 2 or not self.holdings.is_renewable(owner):
            return
        if leases := self.holdings.leases_of(owner):
            self._renew([owner], leases)

    def _renew(self, owners: Sequence[LoopOwner], leases: Sequence[Lease]) -> list[list[bytes]]:
        """Renew what event loops hold, and tell leases what is new, those first that are lost.

        Returns:
            What the server knows of each loop: entries and tokens in turn.
        """
        now = boot_clock()
        news = [("renew", lease.run_id, owner_of(lease).name, lease.token, lease.inbox_head) for lease in leases]
        answers = self.ask_all([*news, *[("renew_owner", owner.name) for owner in owners]])
        for lease, (how, *told) in zip(leases, answers, strict=False):
            if how == b"lost":
                self.holdings.lose(lease)
            else:
                self.holdings.tell(lease.run_id, told[0], cancelled=bool(told[1]))
        for owner in owners:
            owner.until = now + self.lease_s
        return [held for _, held in answers[len(leases) :]]

    def _ask_idle(self, words: Sequence[object], advice: str) -> list[Any]:
        """Ask for what is refused while a run is driven; ask again where its owner is no more.

        Raises:
            LeaseHeldError: when it is driven.
        """
        free: list[bytes] = []
        while (answer := self.ask(*words, *_counted(free)))[0] == b"driven":
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
        return self.holdings.is_dropped(run_id, owner.decode()) and not self.is_answered(b"taken", token)

    def _is_dead(self, owner: bytes) -> bool:
        name = owner.decode()
        return not self.holdings.is_ours(name) and Owner.parse(name).is_dead

    def release(self, lease: Lease) -> bool:
        """Give the lease back."""
        looked = (lease.inbox_read, lease.timers_read_at, lease.backoff_s, lease.backoff_inbox_head)
        self.ask("release", lease.run_id, owner_of(lease).name, lease.token, *looked)
        self.after_commit(partial(self.holdings.give_back, lease))
        return True

    # The journal.

    def append(self, entry: Entry) -> bool:
        """Write events and strike inbox rows."""
        lease = entry.lease
        self.holdings.check(lease)
        self._keep(owner_of(lease))
        numbers = (owner_of(lease).name, lease.token, entry.before, lease.inbox_head, entry.final)
        lists = (*_counted(entry.taken), *_counted(_in_turn(entry.facts._asdict())), *_counted(entry.bodies))
        try:
            answer = self.ask("append", lease.run_id, *numbers, *lists)
        except (StoreError, MisuseError) as error:
            self.after_commit(partial(self.holdings.spoil, lease, error))
            raise
        return self._appended(entry, *answer)

    def _appended(self, entry: Entry, how: bytes, *rest: Any) -> bool:
        lease = entry.lease
        if how == b"lost":
            self.after_commit(partial(self.holdings.lose, lease))
            raise lease_lost_error(lease)
        version, newest, cancelled = map(int, rest)
        self._tell(lease, newest, cancelled)
        if how == b"moved":
            raise ConflictError(f"run {lease.run_id!r} is at version {version}, not {entry.before}; load it again")
        return how == b"written"

    def _tell(self, lease: Lease, newest: int, cancelled: int) -> None:
        if newest > lease.inbox_head:
            self.after_commit(partial(self.holdings.tell, lease.run_id, newest, cancelled=bool(cancelled)))

    def read(self, run_id: str, after: int) -> Records:
        """Return the run's version, and the records: the header as 0, and those after that version."""
        after = max(after, 0)
        _, version, header, events = self._ask_of(run_id, "read", after)
        return int(version), [(0, header), *enumerate(events, after + 1)]

    # The inbox.

    def post(self, post: Post) -> PostedItem:
        """Insert an item; the first of a key wins."""
        run_id, is_cancel = post.run_id, isinstance(post.item, Cancel)
        due_at = "-" if post.due_at is None else post.due_at
        most = INBOX_ROWS if isinstance(post.item, Input) else ""
        how, *rest = self._ask_of(run_id, "post", post.key, due_at, is_cancel, post.before, post.text, most)
        if how == b"decided":
            number, item = _post(run_id, post.key, rest[0])
            return checked_winner(run_id, posted(run_id, number, post.key, item), post.item)
        if how == b"over":
            check_not_over(run_id, *[word.decode() for word in rest])
        if how == b"late":
            check_in_time(run_id, post.before, float(rest[0]))
        if how == b"full":
            check_room(run_id, post.item, int(rest[0]))
        number = rest[0]
        self.after_commit(partial(self.holdings.tell, run_id, number, cancelled=is_cancel))
        return PostedItem(number=number, key=post.key, item=post.item)

    def inbox(self, run_id: str) -> list[tuple[int, str, bytes]]:
        """Return the rows that are not taken yet, oldest first."""
        _, rows = self._ask_of(run_id, "inbox")
        posts = ((key.decode(), row) for key, row in rows)
        return [(number, key, item) for key, row in posts for number, item in [_post(run_id, key, row)]]

    # Lists.

    def runs(self, where: Filter, limit: int) -> tuple[RunSummary, ...]:
        """Return the newest runs that the filter takes, newest first."""
        index = next((name for name in _INDEXED if getattr(where, name) is not None), None)
        lines = (line for line in self._lines(where, index) if where.matches(line))
        if index is None:
            return tuple(islice(lines, limit))
        # An index has the order in which the runs were created, whatever the time was said to be.
        return tuple(sorted(lines, key=lambda line: line.created_at, reverse=True)[:limit])

    def _lines(self, where: Filter, index: str | None) -> Iterator[RunSummary]:
        wanted = {name: value for name, value in attrs.asdict(where).items() if value is not None}
        before = wanted.pop("before", math.inf)
        key, score = ("runs", before) if index is None else (f"{_INDEXED[index]}:{wanted[index]}", math.inf)
        filters = [word for pair in wanted.items() for word in pair]
        entry, more = b"", 1
        while more:
            words = ("runs", key, entry, score, *_counted(filters), *_counted(_LISTED))
            _, more, entry, score, lines = self.ask(*words, at_once=True)
            yield from (self._summary(*line) for line in lines)

    def _summary(self, run_id: bytes, fields: Sequence[bytes | None], *lease: bytes) -> RunSummary:
        values: dict[str, Any] = {"id": run_id.decode()}
        try:
            for (name, read), field in zip(_LISTED.items(), fields, strict=True):
                values[name] = None if field is None else read(field)
        except ValueError as error:
            raise CorruptError(f"run {values['id']!r}: {error}; restore a backup, or delete the run") from None
        return summary_from(values, driven=self._is_driven(values["id"], *lease))

    def _is_driven(self, run_id: str, *lease: bytes) -> bool:
        return bool(lease) and not (self._is_dropped(run_id, *lease) or self._is_dead(lease[0]))

    # The end of runs.

    def delete(self, run_id: str) -> None:
        """Remove a run that nobody drives, and the runs below it."""
        answer = self._ask_idle(("delete", run_id), _CANCEL_FIRST)
        if answer[0] == b"gone":
            raise self._not_found(run_id)
        _removed(answer)

    def delete_session(self, session: str) -> int:
        """Remove all runs of a session, and the runs below them."""
        return _removed(self._ask_idle(("delete_session", session), _CANCEL_FIRST))

    def prune(self, before: float, start: int, limit: int) -> tuple[int, int]:
        """Remove a portion of what is over and old, and nothing still needs; a million runs take half a minute."""
        _, count, start = self.ask("prune", before, start, limit)
        return count, start

    # Upkeep.

    def beat(self) -> None:
        """Renew the leases that are held, let go of those that were dropped, learn of news and losses."""
        kept = [lease for _, held in self.holdings if (lease := held.lease()) is not None]
        dropped = [(run_id, held) for run_id, held in self.holdings if held.lease() is None]
        owners = self.holdings.renewable()
        known = self._renew(owners, kept)
        self.ask_all([_let_go(*each) for each in dropped])
        for run_id, _ in dropped:
            self.holdings.drop(run_id)
        self._disown(owners, [list(zip(words[::2], words[1::2], strict=True)) for words in known])

    def _disown(self, owners: Sequence[LoopOwner], leases: Sequence[Sequence[tuple[bytes, bytes]]]) -> None:
        """Let go of leases that we do not know of: the answer that told of them was lost on its way."""
        stray = [
            ("disown", owner.name, entry, token)
            for owner, held in zip(owners, leases, strict=True)
            for entry, token in held
            if not self.holdings.holds(entry[DIGITS:].decode(), int(token))
        ]
        if stray:
            self.ask_all(stray)

    def tidy(self) -> None:
        """Strike from the lists what has expired."""
        more = 1
        while more:
            ((_, more),) = self.ask_all([("sweep",)])

    def close(self) -> None:
        """Let go of the leases, and hang up."""
        try:
            if self.holdings:
                owners = self.holdings.owners()
                leaving = [_let_go(run_id, held) for run_id, held in self.holdings]
                self.ask_all([*leaving, *[("forget", owner.name) for owner in owners]])
                for owner in owners:
                    owner.until = 0.0
        finally:
            self.holdings.clear()
            self.shut()

    def _ask_of(self, run_id: str, operation: str, *words: object) -> list[Any]:
        answer = self.ask(operation, run_id, *words)
        if answer[0] == b"gone":
            raise self._not_found(run_id)
        return answer

    def _not_found(self, run_id: str) -> RunNotFoundError:
        return RunNotFoundError(f"{self.place} holds no run {run_id!r}; `agentfsm runs` lists those that it holds")


def _let_go(run_id: str, held: Held) -> tuple[object, ...]:
    """Return the release of a lease by which nobody has seen anything new."""
    return "release", run_id, held.owner.name, held.token, 0, 0.0, 0.0, 0


def _counted(words: Collection[object]) -> tuple[object, ...]:
    return len(words), *words


def _fields_of(header: Header, facts: Facts) -> list[object]:
    """Return what a list shows of a new run, names and values in turn; what is None is not kept."""
    names = ("session", "after", "parent", "agent", "user", "created_at")
    values = {name: getattr(header, name) for name in names}
    fields = {"prompt": prompt_of(header)} | {name: value for name, value in values.items() if value is not None}
    return _in_turn(fields | facts._asdict())


def _in_turn(values: Mapping[str, object]) -> list[object]:
    return [word for pair in values.items() for word in pair]


def _post(run_id: str, key: str, row: bytes) -> tuple[int, bytes]:
    """Return number and item of a row of an inbox."""
    try:
        number, _due_at, _cancel, item = row.split(b" ", 3)
        return int(number), item
    except ValueError:
        raise CorruptError(f"run {run_id!r}: post {key!r} is damaged: restore a backup, or delete the run") from None


def _removed(answer: list[Any]) -> int:
    """Return how many runs were removed.

    Raises:
        ConflictError: when another run goes on from one of them.
    """
    if answer[0] == b"followed":
        raise followed(answer[1].decode(), answer[2].decode())
    return int(answer[1])


@cache
def _script() -> str:
    return files("agentfsm.stores").joinpath("redis.lua").read_text(encoding="utf-8")


def _check_url(_store: object, _attribute: object, url: str) -> None:
    dial(url)


def _check_loss(_store: object, _attribute: object, loss: str) -> None:
    if loss not in LOSSES:
        raise MisuseError(f"RedisStore(accept_loss={loss!r}): give one of {', '.join(map(repr, LOSSES))}")


def _check_seconds(_store: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise MisuseError(f"RedisStore({attribute.name}={value!r}): give seconds above 0")


@attrs.define(eq=False, repr=False)
class RedisStore(ThreadedStore[_RedisLedger]):
    """Keeps journals in a Redis or Valkey that workers of several machines may share.

    Redis keeps what it was told to keep, so the store looks at its settings each time that it connects, and refuses a
    server that may lose more than was accepted. `promise` tells what it found. With appendonly yes, appendfsync always
    and no-appendfsync-on-rewrite no, what is acknowledged survives a crash of the server and a power cut: that is what
    is asked for unless `accept_loss` says otherwise. A server that throws keys away when its memory is full
    (maxmemory with a policy other than noeviction) is always refused. A change of settings under way goes unnoticed
    until the next connection.

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
    accept_loss: Loss = attrs.field(default="nothing", kw_only=True, validator=_check_loss)
    prefix: str = attrs.field(default=PREFIX, kw_only=True)
    ttl_s: float | None = attrs.field(default=None, kw_only=True, validator=_check_seconds)
    lease_s: float = attrs.field(default=LEASE_S, kw_only=True, validator=check_lease_s)
    patience_s: float = attrs.field(default=PATIENCE_S, kw_only=True, validator=_check_seconds)

    @property
    def place(self) -> str:
        """Where the server is, without user and password."""
        return place_of(self.url)

    async def promise(self) -> str:
        """Return in words what the server promises, as it was when it was reached last.

        Raises:
            StoreError: when it cannot be reached, or is not one to rely on.
            MisuseError: when it may lose more than was accepted.
        """
        promise = await self._do(lambda ledger: ledger.promised(), writes=False)
        return f"{promise}; its replicas are not waited for, so a failover may cost the newest writes"

    def _hear(self, writer: LedgerWriter[_RedisLedger], topic: str) -> None:  # noqa: ARG002  it announces all
        if writer.listener is None:
            writer.listener = Listener(
                signals=writer.signals,
                announcements=partial(announcements, self.url, f"{self.prefix}changes"),
                read=lambda topic, topics: topic if topic in topics else None,
            )
        writer.listener.start()

    def _ledger(self) -> _RedisLedger:
        worker = str(Owner.here())
        ttl_s = "" if self.ttl_s is None else repr(self.ttl_s)
        settings = (self.prefix, worker, repr(self.lease_s), repr(MAX_LEASE_S), ttl_s)
        return _RedisLedger(
            url=self.url,
            script=_script(),
            settings=tuple([setting.encode() for setting in settings]),
            accept_loss=self.accept_loss,
            patience_s=self.patience_s,
            worker=worker,
            lease_s=self.lease_s,
            holdings=Holdings(self.lease_s, self.blocked_s, worker),
            outage=Outage(self.lease_s),
        )
