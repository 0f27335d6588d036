"""One SQLite file, opened, checked, and written in transactions. Knows what the file is, not what is in the tables.

WAL is what lets several processes share the file: readers never wait, writers wait for one another only while one
commits. Its checkpoint (moving pages from the log into the file) is kept out of commits, see `maintain`.

The log, its index and the file belong together. Where one of them is deleted or replaced while the file is open, the
next transaction notices it, see `_recover`.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

import attrs

from agentfsm.core.errors import AgentError, CorruptError, MisuseError, StoreError, TooNewError
from agentfsm.core.value import Value
from agentfsm.ports.store import Durability
from agentfsm.stores.threaded.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

T = TypeVar("T")
# Device and inode: which file it is, whatever its path.
Inode: TypeAlias = tuple[int, int]
# Of the database file, its log (-wal) and the index of the log (-shm); None for one that is not there.
FileInodes: TypeAlias = tuple[Inode | None, Inode | None, Inode | None]
# What stands in a statement for `?`, or by its name for `:name`. Not for `?1`, of which Python 3.12 warns.
Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]

# "afsm": tells our files from others that are SQLite's too.
APPLICATION_ID: Final = 0x6166736D
# Seconds of `patience_s` that SQLite waits by itself at a time. It gives up at once where waiting could be a deadlock:
# then we wait.
BUSY_TIMEOUT_S = 1.0
# Seconds between two looks for changes by other processes.
POLL_INTERVAL_S: Final = 0.01
# The mode of a file that is made here; SQLite gives the same one to the log and its index.
PRIVATE_MODE: Final = 0o600
# What the log is cut back to after a burst.
MAX_WAL_BYTES: Final = 16 * 1024 * 1024

_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
# What one job's own rows can bring about; all other codes speak of the file, the disk or the lock.
_JOB_ERRORS: Final = frozenset(
    {
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_TOOBIG,
    },
)
_GRANT_ADVICE: Final = (
    "this process may not write there: grant it the file, its folder, and the -wal and -shm beside it"
)
# By SQLite's primary result code: why, and what next.
_ADVICE: Final[Mapping[int, str]] = {
    sqlite3.SQLITE_BUSY: "another process holds the write lock: end the transaction that was left open there (a shell, "
    "a backup), then call again",
    sqlite3.SQLITE_LOCKED: "another connection holds a lock: end its transaction, then call again",
    sqlite3.SQLITE_FULL: "the disk is full: free some space, then resume the runs",
    sqlite3.SQLITE_IOERR: "the disk or its file system failed, or it or a quota is full: check it, then resume the "
    "runs",
    sqlite3.SQLITE_READONLY: _GRANT_ADVICE,
    sqlite3.SQLITE_PERM: _GRANT_ADVICE,
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: see whether it is there, whether this process may write its "
    "folder, and whether it has too many files open",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite database: give another path, or put the file back",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore a backup, or save what is left with `sqlite3 FILE .recover`",
    sqlite3.SQLITE_CONSTRAINT: "the journal holds records that this agentfsm did not write: restore a backup",
    sqlite3.SQLITE_NOMEM: "there is no memory left: free some, then call again",
    sqlite3.SQLITE_TOOBIG: "a value is larger than SQLite takes (1 GB): make it smaller",
    sqlite3.SQLITE_PROTOCOL: "the file's locks do not work: keep it on a local disk, not on a network share",
}
_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CONSTRAINT})

# The connections that are open: by id, the process that opened it, and its files. A forked child inherits the list.
_OPEN_CONNECTIONS: Final[dict[int, tuple[int, FileInodes]]] = {}
# The ids of those that are left open for good, since closing one would remove or overwrite what is now another's.
_LEAKED: Final[set[int]] = set()
# Held while a file is made: closing it would take the locks of another thread's connection to it.
_CREATION_LOCK: Final = threading.Lock()

_log = logging.getLogger("agentfsm.stores")


class SQLiteCursor(Protocol):
    """What `execute` returns, as in sqlite3."""

    def fetchone(self) -> Any:
        """Return the next row as a tuple, or None."""
        ...

    def fetchall(self) -> list[Any]:
        """Return the rows that are left, as tuples."""
        ...


class SQLiteConnection(Protocol):
    """What `connect` returns: as sqlite3's in autocommit mode; errors carry `sqlite_errorcode` as sqlite3's do."""

    def execute(self, sql: str, parameters: Parameters = ..., /) -> SQLiteCursor:
        """Run one statement."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


Connect: TypeAlias = Callable[[str], SQLiteConnection]


def connect_sqlite3(path: str) -> SQLiteConnection:
    """Open the file with the standard library, in autocommit mode: transactions are begun and ended here."""
    return sqlite3.connect(path, isolation_level=None)


@attrs.frozen(kw_only=True)
class SQLiteSchema(Value):
    """What a file of ours holds."""

    version: int
    """Of the tables, kept in the file as `user_version`."""

    tables: frozenset[str]
    statements: tuple[str, ...]
    """Make them in an empty file."""

    upgrades: Mapping[int, tuple[str, ...]]
    """By version: what makes the next one of it."""


class _DeletedLogError(StoreError):
    """A log that was deleted is still used by other connections. That passes, as a lock does."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY


@attrs.define(eq=False, repr=False, kw_only=True)
class DatabaseFile:
    """The file, opened when it is needed. It belongs to the thread that uses it."""

    path: str
    schema: SQLiteSchema
    connect: Connect
    patience_s: float
    """How long another process's transaction is waited for, seconds."""

    outage: Outage
    """Begins when another process's transaction has lasted too long."""

    _location: Path = attrs.field(default=attrs.Factory(lambda self: Path(self.path), takes_self=True), init=False)
    _db: SQLiteConnection | None = attrs.field(default=None, init=False)
    _inodes: FileInodes = attrs.field(default=(None, None, None), init=False)
    """Those of the connection; None where the path names no file of the operating system."""

    _data_version: int = attrs.field(default=0, init=False)
    """Changes when another connection has written."""

    _watched_files: tuple[tuple[str, Inode], ...] = attrs.field(default=(), init=False)
    """Those that are there, by path."""

    _durability: str = attrs.field(default="", init=False)
    """What the connection was told of durability."""

    _commit_callbacks: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    """What has to be done once the transaction is committed."""

    def execute(self, sql: str, parameters: Parameters = ()) -> SQLiteCursor:
        """Run one statement, inside a transaction."""
        assert self._db is not None  # noqa: S101  a transaction opened it
        return self._db.execute(sql, parameters)

    def after_commit(self, act: Callable[[], None]) -> None:
        """Do something once the transaction is committed; never when it is rolled back."""
        self._commit_callbacks.append(act)

    @contextmanager
    def transaction(
        self,
        *,
        write: bool,
        durability: Durability = "full",
        runs: Collection[str] = (),  # noqa: ARG002  the whole file is locked
    ) -> Iterator[None]:
        """Run the block in one transaction, committed at its end or rolled back; waits for other processes."""
        self._commit_callbacks.clear()
        self._begin(durability if write else None)
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        if write:
            self.outage.end()
        for act in self._commit_callbacks:
            act()

    def wait_to_retry(self, error: Exception) -> bool:
        """Return False: what passes was waited for where it occurred. What may not write is opened anew next time."""
        if _result_code(error) == sqlite3.SQLITE_READONLY:
            self.close_file()  # SQLite does not notice that the right was granted meanwhile
        return False

    def is_lock_error(self, error: Exception) -> bool:
        """Whether nothing but another connection's transaction is in the way."""
        return _result_code(error) in _BUSY

    def maintain(self) -> None:
        """Move the log's pages into the file, as far as no reader needs them. Never waits for another process."""
        if self._db is not None and not self._is_replaced():
            self.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two looks for changes by other processes; one takes some microseconds."""
        return POLL_INTERVAL_S

    def has_changed(self) -> bool:
        """Whether another process has committed something since the last look."""
        if self._db is None:
            with self.transaction(write=False):
                return True  # nobody has looked while it was closed
        before, (self._data_version,) = self._data_version, self.execute("PRAGMA data_version").fetchone()
        return before != self._data_version

    def vacuum(self) -> None:
        """Write the file anew without the room of what was removed, and empty the log; outside of a transaction.

        Raises:
            StoreError: when the log cannot be emptied, since another process is reading.
        """
        self._retry_while_busy(lambda: self.execute("VACUUM"))
        (is_busy, *_) = self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            raise StoreError(
                f"{self.path} was compacted, but its log could not be emptied, since another process was reading: call "
                "again"
            )

    def is_job_error(self, error: Exception) -> bool:
        """Whether the error came of one job's values or rows, not of the file, the disk or a lock."""
        code = _result_code(error)
        return not isinstance(error, AgentError) and (code is None or code in _JOB_ERRORS)

    def translate_error(self, error: Exception) -> AgentError:
        """Return what callers are told of an error of SQLite's, or of Python's."""
        if (code := _result_code(error)) is not None:
            kind = CorruptError if code in _CORRUPT else StoreError
            why = _ADVICE.get(code, "nothing of it was acknowledged: see SQLite's own words, then resume the runs")
            return kind(f"{self.path}: SQLite says {str(error)!r}; {why}")
        if isinstance(error, sqlite3.OperationalError | UnicodeDecodeError):  # no UTF-8 in the file: without a code
            return CorruptError(f"{self.path} holds a damaged text ({error}): restore a backup")
        if isinstance(error, ValueError | OverflowError | sqlite3.Error):
            return MisuseError(f"{self.path} cannot hold a value ({error}): ids, keys and names are plain text")
        return StoreError(f"{self.path}: the store failed by a fault of its own ({error!r}): please report it")

    def close_file(self) -> None:
        """Close the file; the next transaction opens it again. The last process to close it removes the log."""
        db, self._db = self._db, None
        if db is None:
            return
        if self._is_replaced():
            _leak_connection(db)
            return
        db.close()
        _OPEN_CONNECTIONS.pop(id(db), None)

    def _roll_back(self) -> None:
        try:
            self.execute("ROLLBACK")
        except Exception:  # noqa: BLE001  SQLite has ended it already, or the connection is of no more use
            with suppress(Exception):
                self.close_file()

    def _retry_while_busy(self, act: Callable[[], T]) -> T:
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                return act()
            except Exception as error:
                if _result_code(error) not in _BUSY:
                    raise
                self.outage.begin()
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)  # in the store's own thread; SQLite has waited longer where waiting can help

    # Opening.

    def _begin(self, durability: Durability | None) -> None:
        """Begin a transaction, to write with that durability, or to read.

        IMMEDIATE takes the write lock at once: what is then read holds until the commit, and nothing is done twice. The
        files are looked at under the lock: so all that was written to a log before it was deleted is in that log when
        `_recover` of any process saves it.
        """
        while True:
            self._open()
            if durability is not None and self._durability != durability:
                self.execute(_DURABILITY_SQL[durability])  # heeded outside of a transaction only
                self._durability = durability
            self._retry_while_busy(lambda: self.execute("BEGIN" if durability is None else "BEGIN IMMEDIATE"))
            if not self._is_stale():
                return
            self._roll_back()
            self._recover()

    def _open(self) -> None:
        if self._db is not None:
            return
        self._check_location()
        self._check_fork()
        self._retry_while_busy(self._check_deleted_log)
        self._create_file()
        db = self.connect(self.path)
        try:
            db.execute(f"PRAGMA busy_timeout = {int(min(BUSY_TIMEOUT_S, self.patience_s) * 1000)}")
            self._retry_while_busy(lambda: self._prepare(db))
            (self._data_version,) = db.execute("PRAGMA data_version").fetchone()
        except BaseException:
            db.close()
            raise
        self._db, self._inodes, self._durability = db, _read_inodes(self.path), ""
        paths = zip(_file_paths(self.path), self._inodes, strict=True)
        self._watched_files = tuple((path, inode) for path, inode in paths if inode is not None)
        _OPEN_CONNECTIONS[id(db)] = os.getpid(), self._inodes

    def _create_file(self) -> None:
        """Make the file, if it is not there, so that only its owner may read it. What SQLite makes is for everyone."""
        with _CREATION_LOCK, suppress(OSError):  # it is there, or cannot be made: SQLite's own error says why
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_MODE))

    # Files that were deleted or replaced.

    def _is_stale(self) -> bool:
        """Whether a path no longer names the file that was opened: others do not find what is written there.

        Asked in each transaction, so it makes nothing but the calls.
        """
        try:
            for path, inode in self._watched_files:
                found = os.stat(path)  # noqa: PTH116  a Path costs as much again
                if (found.st_dev, found.st_ino) != inode:
                    return True
        except OSError:
            return True
        return False

    def _is_replaced(self) -> bool:
        """Whether the file is another one or gone, or another process has begun a log of its own."""
        now = _read_inodes(self.path)
        file, *logs = _find_changed(self._inodes, now)
        return file or any(changed and log is not None for changed, log in zip(logs, now[1:], strict=True))

    def _recover(self) -> None:
        """Close the connection after a file of it was deleted or replaced; save what a deleted log holds.

        The connection can still read the log, so its pages are moved into the file. Not where another process has begun
        a new log meanwhile: that continues the file without them, and two logs cannot be joined.

        Raises:
            StoreError: when something may be lost, or cannot be saved now.
        """
        if self._is_replaced():
            (is_file_gone, *_) = _find_changed(self._inodes, _read_inodes(self.path))
            self.close_file()
            if is_file_gone:
                raise StoreError(
                    f"{self.path} was deleted or replaced while it was open, so nothing more was written to it: put it "
                    "back, or resume from what is there now",
                )
            raise self._foreign_log_error()
        self._retry_while_busy(self._checkpoint_deleted_log)
        self.close_file()
        index = f"{self.path}-shm"
        if _read_inode(index) == self._inodes[2]:  # for others that have the deleted log open: not for the next log
            Path(index).unlink(missing_ok=True)
        _log.error(
            "%s: its log (-wal, -shm) was deleted while it was open; nothing was lost, since what it held was saved. "
            "Leave these files alone while a process has the database open",
            self.path,
        )

    def _checkpoint_deleted_log(self) -> None:
        """Move all that a deleted log holds into the file."""
        (is_busy, pages, moved) = self.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        if is_busy or pages != moved:
            raise _DeletedLogError(
                f"the log of {self.path} was deleted while it was open, and what it holds cannot be saved now, since "
                "another process is writing or reading: leave this process running, and call again",
            )

    def _check_deleted_log(self) -> None:
        """Refuse to open a file while this process has it open with a log that was deleted.

        SQLite shares the log's index among the connections of a process: a new log would be read by the index of the
        deleted one.
        """
        now = _read_inodes(self.path)
        for number, (pid, files) in list(_OPEN_CONNECTIONS.items()):
            if pid == os.getpid() and files[0] == now[0] and any(_find_changed(files, now)):
                if number in _LEAKED:
                    raise self._foreign_log_error()
                raise _DeletedLogError(
                    f"the log of {self.path} was deleted, and another store of this process still uses it: close that "
                    "store, or call again",
                )

    def _foreign_log_error(self) -> StoreError:
        return StoreError(
            f"the log of {self.path} (-wal, -shm) was deleted or replaced while it was open, and another process has "
            "begun a new one, so what was written last may be missing from the file, and nothing more was written: "
            "stop all processes that have it open, compare its runs with what they did (or restore a backup), then "
            "start them again",
        )

    def _check_location(self) -> None:
        """Say what SQLite does not: it has one message for all of this."""
        folder = self._location.parent
        if self._location.is_dir():
            raise StoreError(f"{self.path} is a folder: give the path of a file in it")
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "does not exist"
            raise StoreError(f"{self.path} cannot be opened: {folder} {what}; make it first, or give another path")

    def _check_fork(self) -> None:
        """Refuse a file that was open when this process was forked.

        SQLite believes that this process holds the locks which its parent holds, and takes none: when the parent closes
        the file, what the child writes is lost (tried here; see also sqlite.org/howtocorrupt.html, 2.6).
        """
        here = _read_inode(self.path)
        if here is not None and any(
            files[0] == here and pid != os.getpid() for pid, files in list(_OPEN_CONNECTIONS.values())
        ):
            raise MisuseError(
                f"{self.path} was open when this process was forked, and SQLite cannot share it with its parent: fork "
                "before the store is used, or after aclose, or start the process by 'spawn'",
            )

    def _prepare(self, db: SQLiteConnection) -> None:
        """Check that the file is ours, before anything is changed in it; then set it up."""
        with _raw_transaction(db, "BEGIN"):  # one view of the file: another process may be making it
            version = self._read_version(db)
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(
                f"{self.path}: SQLite cannot keep a write-ahead log there (it offers {mode!r}): put the file on a "
                "local disk",
            )
        for pragma in _PRAGMAS:
            db.execute(pragma)
        if version != self.schema.version:
            self._migrate(db)

    def _read_version(self, db: SQLiteConnection) -> int:
        """Return the version of the tables, 0 where there are none, if the file is ours."""
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()}
        if not (application or version or tables):
            return 0
        if application != APPLICATION_ID:
            raise StoreError(f"{self.path} is the database of another program: give another path; it was left as it is")
        if version > self.schema.version:
            raise TooNewError(
                f"{self.path} was written by a newer agentfsm (tables {version}, this one knows {self.schema.version}):"
                " upgrade agentfsm",
            )
        if version == self.schema.version and (missing := self.schema.tables - tables):
            raise CorruptError(f"{self.path} lacks the tables {', '.join(sorted(missing))}: restore a backup")
        return int(version)

    def _migrate(self, db: SQLiteConnection) -> None:
        """Make the tables, or bring older ones up to date."""
        schema = self.schema
        with _raw_transaction(db, "BEGIN IMMEDIATE"):
            version = self._read_version(db)  # again: another process may have been first
            upgrades = [line for number in range(version, schema.version) for line in schema.upgrades.get(number, ())]
            for statement in upgrades if version else schema.statements:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {schema.version}")


_PRAGMAS: Final = (
    "PRAGMA wal_autocheckpoint = 0",
    f"PRAGMA journal_size_limit = {MAX_WAL_BYTES}",
    "PRAGMA fullfsync = ON",  # macOS has to be told that "the disk" is not the drive's own memory
    "PRAGMA secure_delete = ON",  # what is removed is overwritten: not each build of SQLite does so by itself
)
_DURABILITY_SQL: Final[Mapping[Durability, str]] = {
    "full": "PRAGMA synchronous = FULL",  # waits for the disk in each commit
    "normal": "PRAGMA synchronous = NORMAL",  # only before the log is moved into the file
}


@contextmanager
def _raw_transaction(db: SQLiteConnection, begin: str) -> Iterator[None]:
    db.execute(begin)
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(Exception):
            db.execute("ROLLBACK")
        raise


def _result_code(error: Exception) -> int | None:
    """Return SQLite's primary result code, or None where SQLite was not what failed."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _leak_connection(db: SQLiteConnection) -> None:
    """Leave a connection open until the process is gone; also the interpreter's own end would close it."""
    ctypes = import_module("ctypes")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))
    _LEAKED.add(id(db))


def _file_paths(path: str) -> tuple[str, str, str]:
    return path, f"{path}-wal", f"{path}-shm"


def _read_inodes(path: str) -> FileInodes:
    file, log, index = map(_read_inode, _file_paths(path))
    return file, log, index


def _find_changed(opened: FileInodes, now: FileInodes) -> list[bool]:
    """Return of each file whether it is another one, or gone."""
    return [before is not None and before != after for before, after in zip(opened, now, strict=True)]


def _read_inode(path: str) -> Inode | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
