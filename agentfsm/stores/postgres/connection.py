"""Open and check one connection to a PostgreSQL server, and run transactions on it.

This module handles connections and their errors, but not journals. No state outlives a transaction (no prepared
statements, settings or locks of the session), so PgBouncer may stand in between and pool by transaction.

A statement and the commands before it are sent in one message of the simple protocol: a group of jobs costs two round
trips, one for its statement and one for the commit.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import md5
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import attrs
import psycopg
from psycopg import ClientCursor
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.string import StrDumper, TextLoader

from agentfsm.core.errors import AgentError, CorruptError, MisuseError, StoreError
from agentfsm.core.value import Value
from agentfsm.ports.store import Durability
from agentfsm.stores.rules import MINOR_VERSIONS, check_major_version
from agentfsm.stores.subscriptions import Subscriptions
from agentfsm.stores.threaded.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from psycopg.abc import Buffer, PQGen

T = TypeVar("T")

_log = logging.getLogger("agentfsm.stores")

# Seconds to wait for another session's lock. Locks of stores last milliseconds; one that lasts longer was left behind.
LOCK_TIMEOUT_S: Final = 5.0
# Seconds after which the server ends an idle transaction, whose worker was stopped in the middle while others wait for
# its locks. Less than LOCK_TIMEOUT_S, so that these do not fail first.
IDLE_TRANSACTION_TIMEOUT_S: Final = 2.0
# Seconds after which the server ends a statement whose client has given up. More than SILENCE_TIMEOUT_S: the limit also
# applies to a COMMIT, and one that waits for a standby would be acknowledged at its end, even if the standby lacks it.
STATEMENT_TIMEOUT_S: Final = 60.0
# Seconds of silence after which the connection counts as lost: a statement takes milliseconds, a batch of a prune a
# second, and a wait for a lock up to LOCK_TIMEOUT_S.
SILENCE_TIMEOUT_S: Final = 20.0
# Seconds between two looks whether the connection on which the server announces changes still exists.
RECONNECT_DELAY_S: Final = 1.0
# Start of the names of channels: that of a schema ends with a hash of its name, that of a store object with one of its.
LISTENER_PREFIX: Final = "agentfsm_"
# Minimum and maximum seconds between two attempts to reach a server that is away: a restart takes about one.
MIN_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0

# Seconds since 1970 by the server's clock, at the start of the statement: a group of jobs may have waited since the
# transaction began, and clock_timestamp() changes during a statement.
NOW: Final = "extract(epoch FROM statement_timestamp())::float8"

# Connection options, which the URL may override. Seconds, and milliseconds for the last.
_CONNECTION_DEFAULTS: Final[Mapping[str, str]] = {
    "application_name": "agentfsm",
    "connect_timeout": "5",
    "target_session_attrs": "read-write",  # a standby may be behind, and refuses writes
    # End the connection soon if the other machine vanishes without closing it.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
# Invalid number (see `_begin_write_sql`), missing table, and missing column.
_OUTDATED: Final = frozenset({"22P02", "42P01", "42703"})
# Id of the lock that allows only one worker at a time to create the tables.
_MIGRATION_LOCK_ID: Final = int.from_bytes(b"agentfsm", "big")

# Serialisation failure and deadlock: another transaction wins, and the connection stays usable.
_SERIALIZATION_FAILURES: Final = frozenset({"40001", "40P01"})
_TRANSIENT: Final = _SERIALIZATION_FAILURES | {
    "25006",  # read only: after a failover, while the address still leads to the old server
    "25P03",  # this worker was stopped within a transaction
    "53300",
    "57P01",
    "57P02",
    "57P03",
    "57P05",
}
# Classes of errors that the values or rows of one job can cause, including a lock on its run.
_JOB_ERRORS: Final = frozenset({"22", "23", "54", "55", "XX"})
# Cause and remedy by SQLSTATE or its class. "" stands for an error of the connection, for which libpq has no code; a
# pooler may pass on the code of the server's refusal.
_ADVICE: Final[Mapping[str, str]] = {
    "": "it cannot be reached, refuses connections, or the connection was lost: see its message, check that it runs "
    "and that the address is right, then resume the runs",
    "08": "the connection failed: check that the server runs, then resume the runs",
    "22": "ids, keys and names are plain text, and numbers finite",
    "23": "the tables contain rows that this agentfsm did not write: restore a backup",
    "25006": "it is a standby, or was set to read only: give the address of the primary, or those of all servers as "
    "'host=first,second', of which the one that accepts writes is taken",
    "25P03": "this process was stopped within a transaction: find out why, then resume the runs",
    "28": "give a user and a password that the server accepts",
    "3D": "the database does not exist: create it with `createdb`, or give another name",
    "40": "conflicts with other sessions persisted: call again",
    "42": "the tables are not as this agentfsm made them: restore a backup, or give another schema",
    "42501": "this user may not do that: grant it the schema and its tables, and CREATE on the database for the first "
    "use",
    "53": "the server lacks a resource: see its message, then resume the runs",
    "53100": "its disk is full: free some space, then resume the runs",
    "53300": "it has no connection left: raise max_connections, or put a pooler in between",
    "54": "a value is too long: an id, key or name may have some 2,000 bytes",
    "55P03": "another session holds a lock on the same rows: end its open transaction (see pg_stat_activity), "
    "then call again",
    "57": "the server is going down or coming up: wait until it runs, then resume the runs",
    "57014": f"the statement was ended after {STATEMENT_TIMEOUT_S:.0f} s, or by an administrator: check which lock it "
    "waited for",
    "58": "the server's disk or file system failed: check it, then resume the runs",
    "XX": "the server has an internal error: see its log; the write was not acknowledged",
    "XX001": "its files are damaged: restore a backup",
    "XX002": "an index is damaged: REINDEX the tables of this schema",
}
# Part of PgBouncer's message when it refuses transactions; it has one SQLSTATE for all of its errors.
_STATEMENT_POOLING: Final = "statement pooling mode"
# Part of libpq's message, which has no SQLSTATE, when it refuses a server that refuses writes.
_READ_ONLY: Final = "session is read-only"
_MISUSE: Final = ("22", "54")
_CORRUPT: Final = ("23", "XX001", "XX002")

RowCursor: TypeAlias = psycopg.Cursor[tuple[Any, ...]]


class WatchedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that counts as lost after too long a silence of its server; libpq would wait for ever."""

    def wait(self, gen: PQGen[T], *args: Any, **options: Any) -> T:
        """Run the generator, and wait for the server when it asks to."""
        return super().wait(self._with_silence_timeout(gen), *args, **options)

    def _with_silence_timeout(self, gen: PQGen[T]) -> PQGen[T]:
        heard_at = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:  # falsy after each tenth of a second of silence
                    heard_at = time.monotonic()
                elif time.monotonic() >= heard_at + SILENCE_TIMEOUT_S:
                    self.close()
                    raise psycopg.OperationalError(f"the server has not answered for {SILENCE_TIMEOUT_S:g} s")
                wanted = gen.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result


class _EscapingDumper(StrDumper):
    """Writes text that may contain NUL, which PostgreSQL refuses: U+0000 and U+0001 are escaped with U+0001."""

    def dump(self, obj: str) -> Buffer | None:
        if "\x00" in obj or "\x01" in obj:
            obj = obj.replace("\x01", "\x01\x01").replace("\x00", "\x01\x02")
        return super().dump(obj)


class _UnescapingLoader(TextLoader):
    """Reads text that `_EscapingDumper` wrote."""

    def load(self, data: Buffer) -> str:
        text = bytes(data).decode()
        return re.sub("\x01([\x01\x02])", _unescape, text) if "\x01" in text else text


def _unescape(found: re.Match[str]) -> str:
    return "\x01" if found[1] == "\x01" else "\x00"


@attrs.frozen(kw_only=True)
class PostgresTables(Value):
    """The tables of a schema. They include `layout (version)` and `workers (name, until, mark)`."""

    version: int
    """Version of the tables, stored in `layout`; see `rules.MINOR_VERSIONS`."""

    names: frozenset[str]
    """Names of the tables."""

    statements: str
    """Statements that create the tables in an empty schema."""

    upgrades: Mapping[int, str]
    """Statements that upgrade the tables, by the version to upgrade, in order. They hold locks that all workers wait
    for, so none scans a large table.
    """

    late_indexes: Mapping[str, str]
    """Table and columns of indexes that an upgrade builds after its commit, while others read and write, by name."""


@attrs.frozen
class PostgresAddress(Value):
    """Address of a server. Its `str` never contains the password."""

    settings: Mapping[str, Any] = attrs.field(repr=False)
    """Connection options of libpq."""

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Parse a URL or a connection string of libpq.

        Raises:
            MisuseError: if libpq cannot parse it; without libpq's message, which may quote the password.
        """
        try:
            given = conninfo_to_dict(url)
        except (psycopg.Error, AttributeError, UnicodeError):
            raise MisuseError(
                "PostgresStore(url): libpq cannot read this URL (it is not shown, since it may hold a password); give "
                "'postgresql://user:password@host:5432/database', with special characters of a password as %XX",
            ) from None
        return cls({**_CONNECTION_DEFAULTS, **given, "client_encoding": "UTF8"})

    def __str__(self) -> str:
        host, port = self.settings.get("host", "localhost"), self.settings.get("port", 5432)
        return f"PostgreSQL at {host}:{port}/{self.settings.get('dbname', '')}"

    def redact_password(self, text: str) -> str:
        """Return the text without the password, in case it contains it."""
        password = self.settings.get("password")
        return text.replace(str(password), "***") if password else text


@attrs.define(eq=False, repr=False, kw_only=True)
class PostgresConnection:
    """A connection, opened at its first transaction. Only the store's thread uses it.

    The server announces changes on the same connection, so that an idle worker needs no other.
    """

    address: PostgresAddress
    """Address of the server."""

    schema: str
    """Name of the schema of the tables."""

    tables: PostgresTables
    """Tables that the schema must have."""

    worker_name: str
    """Name of this store object in `workers`."""

    lease_s: float
    """Seconds that a lease lasts without renewal."""

    patience_s: float
    """Maximum wait for a server that is away, seconds."""

    subscriptions: Subscriptions | None = attrs.field(default=None, init=False)
    """Subscriptions to what the server announces; None before the first."""

    poll_interval_s: float = attrs.field(default=RECONNECT_DELAY_S, init=False)
    """Seconds between two calls of `has_changed` while there are subscriptions."""

    polled_topics: set[str] = attrs.field(factory=set, init=False)
    """Topics whose subscribers poll, because the server need not wake them."""

    _is_listening: bool = attrs.field(default=False, init=False)
    outage: Outage = attrs.field(default=attrs.Factory(lambda self: Outage(self.lease_s), takes_self=True), init=False)
    _db: WatchedConnection | None = attrs.field(default=None, init=False)
    _has_connected: bool = attrs.field(default=False, init=False)
    _has_fsync: bool = attrs.field(default=True, init=False)
    """True if the server waited for its disk when the connection was opened."""

    _prefix_sql: str = attrs.field(default="", init=False)
    """Statements to send before the first one of the transaction; empty once they were sent."""

    _prefix_values: tuple[Any, ...] = attrs.field(default=(), init=False)
    """Parameters of these statements."""

    _mark: int = attrs.field(default=0, init=False)
    """Number of the last write transaction."""

    _failing_since: float | None = attrs.field(default=None, init=False)
    """Start of the current series of transient errors, monotonic seconds."""

    _pause_s: float = attrs.field(default=MIN_PAUSE_S, init=False)
    _commit_callbacks: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    """Functions to call after the commit."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> RowCursor:
        """Run statements inside a transaction. Return the cursor of the last one."""
        assert self._db is not None  # noqa: S101  a transaction opened it
        begin, self._prefix_sql = self._prefix_sql, ""
        given, self._prefix_values = self._prefix_values, ()
        cursor = self._db.execute((begin + sql).encode(), (*given, *parameters) or None)
        while cursor.nextset():
            pass
        return cursor

    def check_durability(self, durability: Durability) -> None:
        """Check that the server provides the durability; inside a transaction.

        Raises:
            MisuseError: if the durability is "full", and the server does not wait for its disk.
        """
        if durability == "full" and not self._has_fsync:
            raise MisuseError(
                f"{self.address} does not wait for its disk (fsync = off), so a power cut may lose or damage writes "
                "that were acknowledged: set fsync = on there, or execute runs with durability='normal'",
            )

    def prepend(self, sql: str, *parameters: Any) -> None:
        """Run a statement before the first one of the transaction, in the same message."""
        self._prefix_sql, self._prefix_values = f"{self._prefix_sql}{sql};", (*self._prefix_values, *parameters)

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call a function once the transaction is committed; never if it is rolled back."""
        self._commit_callbacks.append(act)

    @property
    def channel(self) -> str:
        """Name of the channel for change notifications of this schema."""
        return LISTENER_PREFIX + hash_topic(self.schema)

    # Announcements of the server.

    def fileno(self) -> int:
        """Return the descriptor of the connection; -1 for none."""
        return -1 if self._db is None or self._db.closed else self._db.fileno()

    def receive(self) -> None:
        """Notify the subscribers of what the server has announced. `has_changed` replaces a lost connection."""
        if self._db is None:
            return
        try:
            self._db.pgconn.consume_input()
            while (notice := self._db.pgconn.notifies()) is not None:
                self._announce(notice.extra.decode())
        except psycopg.Error:
            self.outage.begin()
            self.disconnect()

    def has_changed(self) -> bool:
        """Open the connection again if it was lost. Return False: subscribers are notified once it is open."""
        try:
            with self.open_transaction(write=False, durability="normal"):
                pass
        except psycopg.Error as error:  # subscribers poll meanwhile, and the server may be back soon
            _log.info("changes by other processes are noticed late until the server is back: %s", type(error))
        return False

    def _announce(self, payload: str) -> None:
        if self.subscriptions is not None:
            self.subscriptions.notify([each for each in list(self.subscriptions.topics) if hash_topic(each) == payload])

    def listen(self, *, has_missed: bool = True) -> None:
        """Begin or end to listen, as the subscriptions need it; inside a transaction with its commit.

        Args:
            has_missed: Whether announcements may have been missed, so that subscribers are notified once.
        """
        if self.subscriptions is None:
            return
        topics = {*self.subscriptions.topics} - self.polled_topics
        if bool(topics) != self._is_listening:
            own = LISTENER_PREFIX + hash_topic(self.worker_name)
            self.execute(f"LISTEN {self.channel}; LISTEN {own}" if topics else "UNLISTEN *")
            self.after_commit(partial(setattr, self, "_is_listening", bool(topics)))
            if has_missed:
                self.after_commit(partial(self.subscriptions.notify, topics))

    @contextmanager
    def open_transaction(self, *, write: bool, durability: Durability) -> Iterator[None]:
        """Run the block in one transaction, committed at its end or rolled back.

        Reads use one snapshot. Writes are READ COMMITTED: each statement sees the commits before its start, and a run's
        row is locked before any decision about the run. So values read afterwards, in a separate statement, are valid
        until the commit. SERIALIZABLE would repeat whole groups for the same guarantee.
        """
        self._commit_callbacks.clear()
        self._prefix_sql, self._prefix_values = "", ()
        if self._db is None:
            self._open()
        self.listen()
        self._run_callbacks()
        self._prefix_sql, self._prefix_values = (
            self._begin_write_sql(durability)
            if write
            else f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {self._limits_sql()}",
            (),
        )
        try:
            yield
            if not self._prefix_sql:
                self._commit(write=write)
        except BaseException as error:
            self._roll_back(error)
            self.polled_topics.clear()  # whether the server would wake them is unknown
            self._check_not_upgraded(error)
            raise
        self._failing_since, self._pause_s = None, MIN_PAUSE_S
        self.outage.end()
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        acts, self._commit_callbacks = self._commit_callbacks, []
        for act in acts:
            act()

    def back_off(self, error: Exception) -> bool:
        """Wait a little if the error is transient and `patience_s` is not used up. Return whether to try again."""
        if not self._is_transient(error):
            return False
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        left_s = self._failing_since + self.patience_s - now
        if left_s <= 0:
            self._failing_since = None
            return False
        time.sleep(min(self._pause_s, left_s))  # in the store's own thread
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return True

    def is_lock_error(self, error: Exception) -> bool:  # noqa: ARG002  a file backend uses it
        """Return False: locks concern single runs, not the whole store."""
        return False

    def is_job_error(self, error: Exception) -> bool:
        """Return whether the values or rows of one job caused the error, not the server or the connection."""
        code = _sqlstate(error)
        if isinstance(error, psycopg.OperationalError) and not code:
            return False
        return not isinstance(error, AgentError) and (not code or code[:2] in _JOB_ERRORS or code == "57014")

    def translate_error(self, error: Exception) -> AgentError:
        """Return the AgentError that reports an error of the server or of Python to callers."""
        code = _sqlstate(error)
        if code or isinstance(error, psycopg.OperationalError):
            kind: type[AgentError] = CorruptError if code.startswith(_CORRUPT) else StoreError
            if code.startswith(_MISUSE):
                kind = MisuseError
            why = _ADVICE.get(code) or _ADVICE.get(code[:2], "see its message; the write was not acknowledged")
            if _READ_ONLY in str(error):
                why = _ADVICE["25006"]
            if _STATEMENT_POOLING in str(error):
                why = "a transaction has to keep its connection: set pool_mode = transaction in PgBouncer"
            return kind(f"{self.address} says {self._server_message(error)!r}; {why}")
        if isinstance(error, ValueError | OverflowError | psycopg.Error):
            return MisuseError(f"{self.address} cannot store a value ({self._server_message(error)}): {_ADVICE['22']}")
        return StoreError(f"{self.address}: the store failed because of a bug in it ({error!r}): please report it")

    def disconnect(self) -> None:
        """Close the connection; the next transaction opens another."""
        db, self._db, self._is_listening = self._db, None, False
        if db is not None:
            with suppress(Exception):
                db.close()

    # Transactions.

    def _begin_write_sql(self, durability: Durability) -> str:
        """Build the start of a write: it renews this worker, and sets a mark that shows whether it was committed.

        It fails if a newer agentfsm has upgraded the tables meanwhile: it casts a text to a number. An upgrade locks
        `layout` first, so none happens between this statement and the commit.
        """
        self._mark += 1
        return f"""
            BEGIN ISOLATION LEVEL READ COMMITTED;
            {self._limits_sql()}
            {_DURABILITY_SQL[durability]}
            INSERT INTO workers (name, until, mark) VALUES ('{self.worker_name}', {NOW} + {self.lease_s},
                (SELECT CASE WHEN coalesce(max(version), 0) < {self._first_unknown_version} THEN {self._mark}
                        ELSE ('tables of version ' || max(version))::bigint END FROM layout))
            ON CONFLICT (name) DO UPDATE SET until = excluded.until, mark = excluded.mark;
        """  # noqa: S608  of our own names and numbers

    def _limits_sql(self) -> str:
        """Build the settings of a transaction. JIT is off: compiling takes seconds, the statements milliseconds."""
        return f"""
            SET LOCAL jit = off;
            SET LOCAL search_path = "{self.schema}";
            SET LOCAL lock_timeout = {1000 * LOCK_TIMEOUT_S:.0f};
            SET LOCAL statement_timeout = {1000 * STATEMENT_TIMEOUT_S:.0f};
            SET LOCAL idle_in_transaction_session_timeout = {1000 * IDLE_TRANSACTION_TIMEOUT_S:.0f};
        """

    def _commit(self, *, write: bool) -> None:
        try:
            self._end_transaction("COMMIT")
        except psycopg.OperationalError as error:
            if not (write and self._is_disconnected(error) and self._was_committed(error)):
                raise

    def _end_transaction(self, command: str) -> None:
        assert self._db is not None  # noqa: S101  a transaction opened it
        status = self._db.execute(command.encode()).statusmessage
        if status != command:  # a COMMIT of a failed transaction is a ROLLBACK, without an error
            raise StoreError(
                f"{self.address} answered {command} with {status}, so nothing was written: please report it"
            )

    def _was_committed(self, cause: Exception) -> bool:
        """Return whether a commit whose reply was lost has succeeded, as soon as the server answers again.

        The worker's row was written in the same transaction, and is locked until that has ended. So this waits for a
        commit that is in progress, and a COMMIT that arrives later has no effect.

        Raises:
            StoreError: if the server did not answer within `patience_s`.
        """
        error = cause
        while self.back_off(cause):
            try:
                self.disconnect()
                self._open()
                self._prefix_sql = f"BEGIN ISOLATION LEVEL READ COMMITTED; {self._limits_sql()}"
                mark = self.execute(_READ_MARK, (self.worker_name,)).fetchone()
                self._end_transaction("COMMIT")
            except psycopg.Error as again:
                error = again
            else:
                return mark == (self._mark,)
        raise StoreError(f"{self.translate_error(error)}. It is unknown whether the last writes were made") from cause

    def _roll_back(self, error: BaseException) -> None:
        if self._is_disconnected(error):
            self.outage.begin()
            self.disconnect()  # another connection may lead to another server
        elif not self._prefix_sql:
            try:
                self._end_transaction("ROLLBACK")
            except Exception:  # noqa: BLE001  the connection is unusable
                self.disconnect()

    @property
    def _first_unknown_version(self) -> int:
        """First version of tables that this agentfsm does not know."""
        return (self.tables.version // MINOR_VERSIONS + 1) * MINOR_VERSIONS

    def _check_not_upgraded(self, cause: BaseException) -> None:
        """Find out whether a transaction failed because a newer agentfsm has upgraded the tables meanwhile.

        Raises:
            TooNewError: if that is so.
        """
        if self._db is None or self._db.closed or _sqlstate(cause) not in _OUTDATED:
            return
        with suppress(psycopg.Error):  # the cause says more
            found = self._read_layout()
            if found is not None and found >= self._first_unknown_version:
                self.disconnect()
                check_major_version(self._place, found, self.tables.version)

    def _read_layout(self) -> int | None:
        """Return the version that the schema's `layout` has; None if it has none."""
        (found,) = self.execute(f'SELECT max(version) FROM "{self.schema}".layout').fetchone() or (None,)  # noqa: S608
        return None if found is None else int(found)

    @property
    def _place(self) -> str:
        return f"{self.address}, schema {self.schema!r},"

    def _is_disconnected(self, error: BaseException) -> bool:
        """Return whether the connection was lost, or its server is shutting down."""
        return self._db is None or self._db.closed or _sqlstate(error) in _TRANSIENT - _SERIALIZATION_FAILURES

    # Open the connection.

    def _open(self) -> None:
        try:
            db = WatchedConnection.connect(
                **self.address.settings,
                autocommit=True,  # this class begins and ends transactions
                prepare_threshold=None,
                cursor_factory=ClientCursor,
            )
        except psycopg.Error:
            self.outage.begin()
            raise
        db.adapters.register_dumper(str, _EscapingDumper)
        db.adapters.register_loader("text", _UnescapingLoader)
        db.add_notify_handler(lambda notice: self._announce(notice.payload))
        self._db, self._is_listening = db, False
        try:
            if self._read_version() < self.tables.version:
                self._migrate()
            if not self._has_connected:
                self._build_late_indexes()
        except BaseException:
            self.disconnect()
            raise
        self._has_connected = True

    def _read_version(self) -> int:
        """Return the version of the tables, 0 if there are none, after checking that the schema is this package's.

        Raises:
            StoreError: if the schema belongs to another program, is too new, or lacks tables.
        """
        names, encoding, fsync, is_standby = self.execute(_INSPECT_SCHEMA, (f'"{self.schema}"',)).fetchone() or _NOTHING
        self._has_fsync = fsync != "off"
        if is_standby:  # it would refuse writes only, and show runs as they were
            raise psycopg.errors.ReadOnlySqlTransaction("the server is in recovery")
        if encoding != "UTF8":
            raise StoreError(f"{self.address} keeps text as {encoding}: create a database with ENCODING 'UTF8'")
        if not names:
            return 0
        if "layout" not in names:
            raise StoreError(
                f"{self.address} has a schema {self.schema!r} with the tables of another program: give another schema; "
                "this one was not changed",
            )
        found = self._read_layout()
        check_major_version(self._place, found or 0, self.tables.version)
        if (found is None or found >= self.tables.version) and (missing := self.tables.names - set(names)):
            raise CorruptError(
                f"{self._place} lacks the tables {', '.join(sorted(missing))}: restore a backup",
            )
        return found or self.tables.version

    def _migrate(self) -> None:
        """Create the tables, or upgrade older ones."""
        self._prefix_sql = f"BEGIN ISOLATION LEVEL READ COMMITTED; {self._limits_sql()}"
        self.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK_ID,))
        version = self._read_version()  # again: another worker may have been first
        if version:
            self.execute("LOCK TABLE layout IN ACCESS EXCLUSIVE MODE")  # see `_begin_write_sql`
            for number in sorted(self.tables.upgrades):
                if number >= version:
                    self.execute(self.tables.upgrades[number])
            self.execute("UPDATE layout SET version = greatest(version, %s)", (self.tables.version,))
        else:
            if self.execute("SELECT to_regnamespace(%s) IS NULL", (f'"{self.schema}"',)).fetchone() == (True,):
                self.execute(f'CREATE SCHEMA "{self.schema}"')  # IF NOT EXISTS always requires the right
            self.execute(self.tables.statements)
            self.execute("INSERT INTO layout (version) VALUES (%s)", (self.tables.version,))
        self._end_transaction("COMMIT")

    def _build_late_indexes(self) -> None:
        """Build the indexes that an upgrade has left out, unless another worker is doing so. Others write meanwhile."""
        (ready,) = self.execute(_SELECT_INDEXES, (f'"{self.schema}"',)).fetchone() or ((),)
        missing = self.tables.late_indexes.keys() - set(ready)
        if not missing:
            return
        # A connection of its own, because it may be silent for long. Part of an index may be left by a crashed worker.
        with psycopg.connect(**self.address.settings, autocommit=True) as db:
            for name in sorted(missing):
                table = f'"{self.schema}".{self.tables.late_indexes[name]}'
                db.execute(f'DROP INDEX CONCURRENTLY IF EXISTS "{self.schema}".{name}'.encode())
                db.execute(f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {table}".encode())

    # Errors.

    def _is_transient(self, error: Exception) -> bool:
        """Return whether a retry can help.

        libpq has no code for a failed connection. The first connection is not retried, so that a wrong address, user or
        password is reported at once.
        """
        code = _sqlstate(error)
        if code == "25006":
            return self._has_connected
        if code:
            return code in _TRANSIENT or (code.startswith("08") and _STATEMENT_POOLING not in str(error))
        return self._has_connected and isinstance(error, psycopg.OperationalError)

    def _server_message(self, error: Exception) -> str:
        """Return the server's message, without its details, which may quote values of rows."""
        primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
        return self.address.redact_password(" ".join((primary or str(error)).split()))


_DURABILITY_SQL: Final[Mapping[Durability, str]] = {
    # The server's setting, unless it does not wait for the disk.
    "full": """
        SELECT set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true);
    """,
    "normal": "SET LOCAL synchronous_commit = off;",
}
# Indexes that can be used, or that a connection is building.
_SELECT_INDEXES: Final = """
SELECT ARRAY(SELECT relname::text FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
             WHERE relnamespace = to_regnamespace(%s)
                   AND (indisvalid OR indexrelid IN (SELECT index_relid FROM pg_stat_progress_create_index)))
"""
_READ_MARK: Final = """
INSERT INTO workers (name, until, mark) VALUES (%s, 0, 0) ON CONFLICT (name) DO UPDATE SET mark = workers.mark
RETURNING mark
"""
_INSPECT_SCHEMA: Final = """
SELECT ARRAY(SELECT relname::text FROM pg_class
             WHERE relnamespace = to_regnamespace(%s) AND relkind IN ('r', 'p', 'v', 'm', 'f')),
       current_setting('server_encoding'), current_setting('fsync'), pg_is_in_recovery()
"""
_NOTHING: Final = ((), "", "", False)


def hash_topic(topic: str) -> str:
    """Return the notification of a topic: a hash, because a name may be too long for a notification."""
    return md5(topic.encode(), usedforsecurity=False).hexdigest()


def _sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE, or "" if the error has none."""
    return getattr(error, "sqlstate", None) or ""
