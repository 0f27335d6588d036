"""One connection to a PostgreSQL server: opened when it is needed, checked, and used in transactions.

Knows how a server is asked and how it fails, not what a journal is. Nothing outlives a transaction (no prepared
statements, no settings, no locks of the session), so PgBouncer may stand in between and pool by transaction.

A statement goes out together with what has to come before it, in one message of the simple protocol: a group of jobs
costs two round trips, one for its statement and one for the commit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from hashlib import md5
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import attrs
import psycopg
from psycopg import ClientCursor
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.string import StrDumper, TextLoader

from agentfsm.core.errors import AgentError, CorruptError, MisuseError, StoreError, TooNewError
from agentfsm.core.value import Value
from agentfsm.ports.store import Durability
from agentfsm.stores.threaded.change_listener import CHECK_INTERVAL_S, PushNotificationMixin
from agentfsm.stores.threaded.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from psycopg.abc import Buffer, PQGen

T = TypeVar("T")

# Seconds to wait for another session's lock. Ours last milliseconds: one that lasts longer was left behind.
LOCK_TIMEOUT_S: Final = 5.0
# Seconds after which the server ends a transaction in which nothing is asked: its worker was stopped in the middle, and
# others wait for its locks. Less than LOCK_S, so that they do not fail before.
IDLE_TRANSACTION_TIMEOUT_S: Final = 2.0
# Seconds after which the server ends a statement that nobody waits for any more. More than SILENT_S: it holds for a
# COMMIT too, and one that waits for a standby would be acknowledged at its end, whether the standby has it or not.
STATEMENT_TIMEOUT_S: Final = 60.0
# Seconds of silence after which a server is given up that stands still: a statement takes milliseconds, a portion of a
# prune a second, and a wait for a lock LOCK_S.
SILENCE_TIMEOUT_S: Final = 20.0
# Seconds between two attempts to reach a server that is away: a restart takes about one.
MIN_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0

# Seconds since 1970 by the server's clock. Not the time at which the transaction began, since a group of jobs may have
# waited in it; and not clock_timestamp(), which moves on while one statement runs.
NOW: Final = "extract(epoch FROM statement_timestamp())::float8"

# What the URL may say otherwise. Seconds, and milliseconds for the last.
_CONNECTION_DEFAULTS: Final[Mapping[str, str]] = {
    "application_name": "agentfsm",
    "connect_timeout": "5",
    "target_session_attrs": "read-write",  # a standby may be behind, and takes no writes
    # The connection must end before long where the other machine vanished without a word.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
# The number of the lock that lets one worker at a time make the tables.
_MIGRATION_LOCK_ID: Final = int.from_bytes(b"agentfsm", "big")

# Serialisation failure and deadlock: the other one goes first, and the connection is as good as before.
_SERIALIZATION_FAILURES: Final = frozenset({"40001", "40P01"})
_TRANSIENT: Final = _SERIALIZATION_FAILURES | {
    "25006",  # read only: after a failover, while the address still leads to the old server
    "25P03",  # this worker stood still in mid-transaction
    "53300",
    "57P01",
    "57P02",
    "57P03",
    "57P05",
}
# Classes of what one job's own values or rows can bring about, a lock on its run too; and a statement cut short.
_JOB_ERRORS: Final = frozenset({"22", "23", "54", "55", "XX"})
# By SQLSTATE, or its class: why, and what next. "" is for an error of the connection, of which libpq tells none; a
# pooler may tell the one with which the server refused it.
_ADVICE: Final[Mapping[str, str]] = {
    "": "it cannot be reached, lets nobody in, or the connection was lost: see its own words, whether it runs, and "
    "whether the address is right, then resume the runs",
    "08": "the connection failed: see whether the server runs, then resume the runs",
    "22": "ids, keys and names are plain text, and numbers finite",
    "23": "the tables hold what this agentfsm did not write: restore a backup",
    "25006": "it is a standby, or was set to read only: give the address of the primary",
    "25P03": "this process stood still in the middle of a transaction: see why, then resume the runs",
    "28": "give a user and a password that the server takes",
    "3D": "there is no such database: make it with `createdb`, or give another name",
    "40": "other sessions were in the way again and again: call again",
    "42": "the tables are not as this agentfsm made them: restore a backup, or give another schema",
    "42501": "this user may not do that: grant it the schema and its tables, and CREATE on the database for the first "
    "use",
    "53": "the server lacks something: see its own words, then resume the runs",
    "53100": "its disk is full: free some space, then resume the runs",
    "53300": "it has no connection left: raise max_connections, or put a pooler in between",
    "54": "a value is too long: an id, key or name may have some 2,000 bytes",
    "55P03": "another session holds a lock on the same rows: end the transaction that was left open there (see "
    "pg_stat_activity), then call again",
    "57": "the server is going down or coming up: wait until it runs, then resume the runs",
    "57014": f"the statement was cut short after {STATEMENT_TIMEOUT_S:.0f} s, or by an administrator: see what it "
    "waited for",
    "58": "the server's disk or file system failed: check it, then resume the runs",
    "XX": "the server is at fault: see its log; nothing of it was acknowledged",
    "XX001": "its files are damaged: restore a backup",
    "XX002": "an index is damaged: REINDEX the tables of this schema",
}
# PgBouncer's own words where it lets no transaction begin; its SQLSTATE is that of all its troubles.
_STATEMENT_POOLING: Final = "statement pooling mode"
_MISUSE: Final = ("22", "54")
_CORRUPT: Final = ("23", "XX001", "XX002")

RowCursor: TypeAlias = psycopg.Cursor[tuple[Any, ...]]


class WatchedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that is lost once its server has said nothing for too long; libpq would wait without end."""

    def wait(self, gen: PQGen[T], *args: Any, **options: Any) -> T:
        """Do what the generator does, and wait for the server where it has to."""
        return super().wait(self._with_silence_timeout(gen), *args, **options)

    def _with_silence_timeout(self, gen: PQGen[T]) -> PQGen[T]:
        heard_at = time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if ready:  # nothing after each tenth of a second without a sign of the server
                    heard_at = time.monotonic()
                elif time.monotonic() >= heard_at + SILENCE_TIMEOUT_S:
                    self.close()
                    raise psycopg.OperationalError(f"the server has not answered for {SILENCE_TIMEOUT_S:g} s")
                wanted = gen.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result


class _EscapingDumper(StrDumper):
    """Writes text, NUL included, which PostgreSQL refuses: U+0001 stands before what was a 0 or a 1."""

    def dump(self, obj: str) -> Buffer | None:
        if "\x00" in obj or "\x01" in obj:
            obj = obj.replace("\x01", "\x01\x01").replace("\x00", "\x01\x02")
        return super().dump(obj)


class _UnescapingLoader(TextLoader):
    """Reads what `_EscapingDumper` wrote."""

    def load(self, data: Buffer) -> str:
        text = bytes(data).decode()
        return re.sub("\x01([\x01\x02])", _unescape, text) if "\x01" in text else text


def _unescape(found: re.Match[str]) -> str:
    return "\x01" if found[1] == "\x01" else "\x00"


@attrs.frozen(kw_only=True)
class PostgresTables(Value):
    """What a schema of ours holds. One is `layout (version)`, one is `workers (name, until, mark)`."""

    version: int
    """Kept in `layout`."""

    names: frozenset[str]
    statements: str
    """Make them in an empty schema."""

    upgrades: Mapping[int, str]
    """By version: what makes the next one of it."""


@attrs.frozen
class PostgresAddress(Value):
    """Where a server is. Its text never shows the password."""

    settings: Mapping[str, Any] = attrs.field(repr=False)

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Read a URL or a connection string of libpq.

        Raises:
            MisuseError: when libpq cannot read it. Its words are left out, since they may quote the password.
        """
        try:
            given = conninfo_to_dict(url)
        except (psycopg.Error, AttributeError, UnicodeError):
            raise MisuseError(
                "PostgresStore(url): libpq cannot read this URL (it is not shown, since it may hold a password); give "
                "'postgresql://user:password@host:5432/database', with %XX for what is special in a password",
            ) from None
        return cls({**_CONNECTION_DEFAULTS, **given, "client_encoding": "UTF8"})

    def __str__(self) -> str:
        host, port = self.settings.get("host", "localhost"), self.settings.get("port", 5432)
        return f"PostgreSQL at {host}:{port}/{self.settings.get('dbname', '')}"

    def redact_password(self, text: str) -> str:
        """Return the text without the password, should somebody have put it there."""
        password = self.settings.get("password")
        return text.replace(str(password), "***") if password else text


@attrs.define(eq=False, repr=False, kw_only=True)
class PostgresConnection(PushNotificationMixin):
    """The connection. It belongs to the thread that uses it."""

    address: PostgresAddress
    schema: str
    tables: PostgresTables
    worker_name: str
    """The name of this store in `workers`."""

    lease_s: float
    patience_s: float
    outage: Outage = attrs.field(default=attrs.Factory(lambda self: Outage(self.lease_s), takes_self=True), init=False)
    _db: WatchedConnection | None = attrs.field(default=None, init=False)
    _has_connected: bool = attrs.field(default=False, init=False)
    _has_fsync: bool = attrs.field(default=True, init=False)
    """Whether the server does, as it was when the connection was made."""

    _prefix_sql: str = attrs.field(default="", init=False)
    """What has to come before the first statement of the transaction; empty once it was sent."""

    _prefix_values: tuple[Any, ...] = attrs.field(default=(), init=False)
    """Its parameters."""

    _mark: int = attrs.field(default=0, init=False)
    """The number of the last transaction that was to write."""

    _failing_since: float | None = attrs.field(default=None, init=False)
    """Monotonic seconds: when the trouble began that is being waited for."""

    _pause_s: float = attrs.field(default=MIN_PAUSE_S, init=False)
    _commit_callbacks: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    """What has to be done once the transaction is committed."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> RowCursor:
        """Run statements inside a transaction; return what the last of them did."""
        assert self._db is not None  # noqa: S101  a transaction opened it
        begin, self._prefix_sql = self._prefix_sql, ""
        given, self._prefix_values = self._prefix_values, ()
        cursor = self._db.execute((begin + sql).encode(), (*given, *parameters) or None)
        while cursor.nextset():
            pass
        return cursor

    def check_durability(self, durability: Durability) -> None:
        """Refuse to promise more than the server does; inside a transaction.

        Raises:
            MisuseError: when runs are to be durable in full, and the server does not wait for its disk.
        """
        if durability == "full" and not self._has_fsync:
            raise MisuseError(
                f"{self.address} does not wait for its disk (fsync = off), so a power cut may take or damage what "
                "durability='full' has acknowledged: set fsync = on there, or drive runs with durability='normal'",
            )

    def prepend(self, sql: str, *parameters: Any) -> None:
        """Have a statement run before the first of the transaction, and be sent with it."""
        self._prefix_sql, self._prefix_values = f"{self._prefix_sql}{sql};", (*self._prefix_values, *parameters)

    def after_commit(self, act: Callable[[], None]) -> None:
        """Do something once the transaction is committed; never when it is rolled back."""
        self._commit_callbacks.append(act)

    @property
    def channel(self) -> str:
        """The channel on which the stores of this schema announce changes."""
        return f"agentfsm_{md5(self.schema.encode(), usedforsecurity=False).hexdigest()}"

    @contextmanager
    def open_transaction(self, *, write: bool, durability: Durability) -> Iterator[None]:
        """Run the block in one transaction, committed at its end or rolled back.

        Reads see one moment. Writes are READ COMMITTED: each statement sees what was committed before it began, and a
        run's row is locked before anything is decided on it. So what is then read of the run, in a statement of its
        own, holds until the commit; SERIALIZABLE would have whole groups done again to learn the same.
        """
        self._commit_callbacks.clear()
        if self._db is None:
            self._open()
        self._prefix_sql, self._prefix_values = (
            self._begin_write_sql(durability) if write else self._begin_read_sql(),
            (),
        )
        try:
            yield
            if not self._prefix_sql:
                self._commit(write=write)
        except BaseException as error:
            self._roll_back(error)
            raise
        self._failing_since, self._pause_s = None, MIN_PAUSE_S
        self.outage.end()
        for act in self._commit_callbacks:
            act()

    def back_off(self, error: Exception) -> bool:
        """Wait a little where the error will pass and has not lasted too long; return whether to try again."""
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
        """Return False: what waits for a lock is one run, and not the store."""
        return False

    def is_job_error(self, error: Exception) -> bool:
        """Whether the error came of one job's values or rows, not of the server or the connection."""
        code = _sqlstate(error)
        if isinstance(error, psycopg.OperationalError) and not code:
            return False
        return not isinstance(error, AgentError) and (not code or code[:2] in _JOB_ERRORS or code == "57014")

    def translate_error(self, error: Exception) -> AgentError:
        """Return what callers are told of an error of the server's, or of Python's."""
        code = _sqlstate(error)
        if code or isinstance(error, psycopg.OperationalError):
            kind = _error_class(code)
            why = _ADVICE.get(code) or _ADVICE.get(code[:2], "see its own words; nothing of it was acknowledged")
            if _STATEMENT_POOLING in str(error):
                why = "a transaction has to keep its connection: set pool_mode = transaction in PgBouncer"
            return kind(f"{self.address} says {self._server_message(error)!r}; {why}")
        if isinstance(error, ValueError | OverflowError | psycopg.Error):
            return MisuseError(f"{self.address} cannot hold a value ({self._server_message(error)}): {_ADVICE['22']}")
        return StoreError(f"{self.address}: the store failed by a fault of its own ({error!r}): please report it")

    def disconnect(self) -> None:
        """Close the connection; the next transaction opens another."""
        db, self._db = self._db, None
        if db is not None:
            with suppress(Exception):
                db.close()

    # Transactions.

    def _begin_write_sql(self, durability: Durability) -> str:
        """Begin what writes: it renews this worker's leases, and leaves a mark to find out whether it was committed."""
        self._mark += 1
        return f"""
            BEGIN ISOLATION LEVEL READ COMMITTED;
            {self._limits_sql()}
            {_DURABILITY_SQL[durability]}
            INSERT INTO workers (name, until, mark) VALUES ('{self.worker_name}', {NOW} + {self.lease_s}, {self._mark})
            ON CONFLICT (name) DO UPDATE SET until = excluded.until, mark = excluded.mark;
        """  # noqa: S608  of our own names and numbers

    def _begin_read_sql(self) -> str:
        return f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {self._limits_sql()}"

    def _limits_sql(self) -> str:
        """Set what holds for one transaction. No JIT: it compiles for seconds what then runs for milliseconds."""
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
        said = self._db.execute(command.encode()).statusmessage
        if said != command:  # a COMMIT of what has failed is a ROLLBACK, without an error
            raise StoreError(f"{self.address} answered {command} with {said}, so nothing was written: please report it")

    def _was_committed(self, why: Exception) -> bool:
        """Find out about a commit whose reply was lost, as soon as the server can be asked.

        Its row in `workers` was written in the same transaction, and is locked until that has ended either way. So this
        waits for a commit that is still being made, and one that arrives later finds no transaction any more.

        Raises:
            StoreError: when the server could not be asked for too long.
        """
        error = why
        while self.back_off(why):
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
        raise StoreError(f"{self.translate_error(error)}. Whether the last writes were made is not known") from why

    def _roll_back(self, error: BaseException) -> None:
        if self._is_disconnected(error):
            self.outage.begin()
            self.disconnect()  # another connection may lead to another server
        elif not self._prefix_sql:
            try:
                self._end_transaction("ROLLBACK")
            except Exception:  # noqa: BLE001  the connection is of no more use
                self.disconnect()

    def _is_disconnected(self, error: BaseException) -> bool:
        """Whether the connection was lost, or its server says that it goes away."""
        return self._db is None or self._db.closed or _sqlstate(error) in _TRANSIENT - _SERIALIZATION_FAILURES

    # Opening.

    def _open(self) -> None:
        try:
            db = WatchedConnection.connect(
                **self.address.settings,
                autocommit=True,  # transactions are begun and ended here
                prepare_threshold=None,
                cursor_factory=ClientCursor,
            )
        except psycopg.Error:
            self.outage.begin()
            raise
        db.adapters.register_dumper(str, _EscapingDumper)
        db.adapters.register_loader("text", _UnescapingLoader)
        self._db = db
        try:
            if self._read_version() < self.tables.version:
                self._migrate()
        except BaseException:
            self.disconnect()
            raise
        self._has_connected = True

    def _read_version(self) -> int:
        """Return the version of the tables, 0 where there are none, if the schema is ours; nothing is changed."""
        names, encoding, fsync = self.execute(_INSPECT_SCHEMA, (f'"{self.schema}"',)).fetchone() or ((), "", "")
        self._has_fsync = fsync != "off"
        if encoding != "UTF8":
            raise StoreError(f"{self.address} keeps text as {encoding}: make a database with ENCODING 'UTF8'")
        if not names:
            return 0
        if "layout" not in names:
            raise StoreError(
                f"{self.address} has a schema {self.schema!r} with the tables of another program: give another schema; "
                "it was left as it is",
            )
        (found,) = self.execute(f'SELECT max(version) FROM "{self.schema}".layout').fetchone() or (None,)  # noqa: S608
        if found is not None and found > self.tables.version:
            raise TooNewError(
                f"{self.address}, schema {self.schema!r}, was written by a newer agentfsm (tables {found}, this one "
                f"knows {self.tables.version}): upgrade agentfsm",
            )
        if missing := self.tables.names - set(names):
            raise CorruptError(
                f"{self.address}, schema {self.schema!r}, lacks the tables {', '.join(sorted(missing))}: restore a "
                "backup",
            )
        return int(found or self.tables.version)

    def _migrate(self) -> None:
        """Make the tables, or bring older ones up to date."""
        self._prefix_sql = f"BEGIN ISOLATION LEVEL READ COMMITTED; {self._limits_sql()}"
        self.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK_ID,))
        version = self._read_version()  # again: another worker may have been first
        if version:
            for number in range(version, self.tables.version):
                self.execute(self.tables.upgrades[number])
            self.execute("UPDATE layout SET version = %s", (self.tables.version,))
        else:
            if self.execute("SELECT to_regnamespace(%s) IS NULL", (f'"{self.schema}"',)).fetchone() == (True,):
                self.execute(f'CREATE SCHEMA "{self.schema}"')  # with IF NOT EXISTS it asks for rights also where it is
            self.execute(self.tables.statements)
            self.execute("INSERT INTO layout (version) VALUES (%s)", (self.tables.version,))
        self._end_transaction("COMMIT")

    # Errors.

    def _is_transient(self, error: Exception) -> bool:
        """Whether waiting can help.

        libpq gives no code for a connection that failed, so a first one is not tried again: a wrong address, user or
        password shall be told at once.
        """
        code = _sqlstate(error)
        if code:
            return code in _TRANSIENT or (code.startswith("08") and _STATEMENT_POOLING not in str(error))
        return self._has_connected and isinstance(error, psycopg.OperationalError)

    def _server_message(self, error: Exception) -> str:
        """Return the server's own words, but not the values of rows that its details may quote."""
        primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
        return self.address.redact_password(" ".join((primary or str(error)).split()))


_DURABILITY_SQL: Final[Mapping[Durability, str]] = {
    # What the server is set to, unless that does not wait for the disk.
    "full": """
        SELECT set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true);
    """,
    "normal": "SET LOCAL synchronous_commit = off;",
}
_READ_MARK: Final = """
INSERT INTO workers (name, until, mark) VALUES (%s, 0, 0) ON CONFLICT (name) DO UPDATE SET mark = workers.mark
RETURNING mark
"""
_INSPECT_SCHEMA: Final = """
SELECT ARRAY(SELECT relname::text FROM pg_class
             WHERE relnamespace = to_regnamespace(%s) AND relkind IN ('r', 'p', 'v', 'm', 'f')),
       current_setting('server_encoding'), current_setting('fsync')
"""


def hash_topic(topic: str) -> str:
    """Return what a topic is announced as: a name may be longer than an announcement."""
    return md5(topic.encode(), usedforsecurity=False).hexdigest()


def iter_notifications(address: PostgresAddress, channel: str) -> Iterator[str]:
    """Listen to a channel, on a connection of its own; see `NotificationSource`."""
    with psycopg.connect(**address.settings, autocommit=True) as db:
        db.execute(f"LISTEN {channel}".encode())
        yield ""
        while True:
            for notice in db.notifies(timeout=CHECK_INTERVAL_S):
                yield notice.payload
            yield ""


def _sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE, or nothing where the server did not say one."""
    return getattr(error, "sqlstate", None) or ""


def _error_class(code: str) -> type[AgentError]:
    if code.startswith(_MISUSE):
        return MisuseError
    return CorruptError if code.startswith(_CORRUPT) else StoreError
