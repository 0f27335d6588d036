"""Open, check and lock one SQLite file, and run transactions in it. The tables are defined elsewhere.

WAL mode lets several processes share the file: readers never wait, and writers wait for each other only during a
commit. Its checkpoint (moving pages from the log into the file) is kept out of commits, see `maintain`.

The log, its index and the file belong together. If one of them is deleted or replaced while the file is open, the next
transaction notices it, see `_recover`.

SQLite cannot create a log in a folder that is read-only. Such a file is read as it is, without locks, see
`_open_snapshot`.
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import attrs

from agentfsm.core.errors import AgentError, CorruptError, MisuseError, StoreError
from agentfsm.core.value import Value
from agentfsm.ports.store import Durability
from agentfsm.stores.home import HOME_FOLDER, create_private_folder
from agentfsm.stores.rules import MINOR_VERSIONS, check_major_version, format_version
from agentfsm.stores.threaded.outage import Outage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

T = TypeVar("T")
# Device and inode, which identify a file whatever its path.
Inode: TypeAlias = tuple[int, int]
# Those of the database file, its log (-wal) and the index of the log (-shm); None for a file that does not exist.
FileInodes: TypeAlias = tuple[Inode | None, Inode | None, Inode | None]
# Device, inode, size and modification time (ns) of the database file, and the sizes of its log and rollback journal.
Snapshot: TypeAlias = tuple[int, int, int, int, int, int]
# Values of a statement: for each `?`, or by name for `:name`. Not for `?1`, for which Python 3.12 warns.
Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]

# "afsm": marks the SQLite files of this package.
APPLICATION_ID: Final = 0x6166736D
# Maximum seconds of `patience_s` that SQLite itself waits at a time. If waiting could be a deadlock, it gives up at
# once, and `_retry_while_busy` waits.
BUSY_TIMEOUT_S = 1.0
# Attempts to empty the log, each of which waits for readers as long as other statements do.
EMPTYING_ATTEMPTS: Final = 5
# Seconds between two polls for changes by other processes.
POLL_INTERVAL_S: Final = 0.01
# Mode of a new file; SQLite gives the same mode to the log and its index.
PRIVATE_MODE: Final = 0o600
# Size to which SQLite truncates the log after a burst.
MAX_WAL_BYTES: Final = 16 * 1024 * 1024

_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
# Errors that the rows of one job can cause; all other codes concern the file, the disk or the lock.
_JOB_ERRORS: Final = frozenset(
    {
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_TOOBIG,
    },
)
_GRANT_ADVICE: Final = (
    "the file is read-only here: to write, mount its file system read-write, or grant this process the file, its "
    "folder, and the -wal and -shm files beside it"
)
# Cause and remedy by SQLite's primary result code.
_ADVICE: Final[Mapping[int, str]] = {
    sqlite3.SQLITE_BUSY: "another process holds the write lock: end its open transaction (a shell, a backup), then "
    "call again",
    sqlite3.SQLITE_LOCKED: "another connection holds a lock: end its transaction, then call again",
    sqlite3.SQLITE_FULL: "the disk is full: free some space, then resume the runs",
    sqlite3.SQLITE_IOERR: "the disk or its file system failed, or it or a quota is full: check it, then resume the "
    "runs",
    sqlite3.SQLITE_READONLY: _GRANT_ADVICE,
    sqlite3.SQLITE_PERM: _GRANT_ADVICE,
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check that it exists, that this process may write its folder, "
    "and that it does not have too many files open",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite database: give another path, or restore the file",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore a backup, or recover rows with `sqlite3 FILE .recover`",
    sqlite3.SQLITE_CONSTRAINT: "the journal holds records that this agentfsm did not write: restore a backup",
    sqlite3.SQLITE_NOMEM: "out of memory: free some, then call again",
    sqlite3.SQLITE_TOOBIG: "a value is larger than SQLite's limit (1 GB): make it smaller",
    sqlite3.SQLITE_PROTOCOL: "the file's locks do not work: keep it on a local disk, not on a network share",
}
_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CONSTRAINT})
# Errors of opening a file that cannot be written, or whose log cannot be created.
_READ_ONLY: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})


class _OpenFile(NamedTuple):
    """Process, files and SQLite library of an open connection."""

    pid: int
    files: FileInodes
    library: str


# Open connections by id. A forked child inherits the list.
_OPEN_CONNECTIONS: Final[dict[int, _OpenFile]] = {}
# Ids of the connections that stay open for good: closing one would remove or overwrite files of another process.
_LEAKED: Final[set[int]] = set()
# Held while a file is created: closing it would drop the locks of another thread's connection to it.
_CREATION_LOCK: Final = threading.Lock()

_log = logging.getLogger("agentfsm.stores")


class SQLiteCursor(Protocol):
    """Result of `execute`, as in sqlite3."""

    def fetchone(self) -> Any:
        """Return the next row as a tuple, or None."""
        ...

    def fetchall(self) -> list[Any]:
        """Return the remaining rows as tuples."""
        ...


class SQLiteConnection(Protocol):
    """Result of `connect`, as sqlite3's in autocommit mode; its errors have `sqlite_errorcode` as sqlite3's do."""

    def execute(self, sql: str, parameters: Parameters = ..., /) -> SQLiteCursor:
        """Run one statement."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


Connect: TypeAlias = Callable[[str], SQLiteConnection]


def connect_sqlite3(path: str) -> SQLiteConnection:
    """Open an absolute path or a `file:` URI with the standard library, in autocommit mode."""
    return sqlite3.connect(path, isolation_level=None, uri=path.startswith("file:"))


@attrs.frozen(kw_only=True)
class SQLiteSchema(Value):
    """The tables of a file, and the statements that create and upgrade them."""

    version: int
    """Version of the tables, stored in the file as `user_version`; see `rules.MINOR_VERSIONS`."""

    tables: frozenset[str]
    """Names of the tables that a file of this version must have."""

    statements: tuple[str, ...]
    """Statements that create the tables in an empty file."""

    upgrades: Mapping[int, tuple[str, ...]]
    """Statements that upgrade the tables, by the version to upgrade, in order."""


class _DeletedLogError(StoreError):
    """A deleted log is still used by other connections. This is transient, like a lock."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY


class _ReadOnlyError(StoreError):
    """A write was requested while the file is read as a snapshot."""

    sqlite_errorcode = sqlite3.SQLITE_READONLY


@attrs.define(eq=False, repr=False, kw_only=True)
class DatabaseFile:
    """A database file, opened at its first transaction. Only the store's thread uses it."""

    path: str
    """Absolute path of the file."""

    schema: SQLiteSchema
    """Tables that the file must have."""

    connect: Connect
    """Function that opens the file, given its path, or a `file:` URI to read it as a snapshot."""

    patience_s: float
    """Maximum wait for the transaction of another process, seconds."""

    outage: Outage
    """Begins when another process holds a lock."""

    library: str = "sqlite3"
    """Module whose SQLite library `connect` uses. A file is opened by one library of a process only."""

    _location: Path = attrs.field(default=attrs.Factory(lambda self: Path(self.path), takes_self=True), init=False)
    _db: SQLiteConnection | None = attrs.field(default=None, init=False)
    _inodes: FileInodes = attrs.field(default=(None, None, None), init=False)
    """Inodes of the connection's files; None for a file that does not exist."""

    _snapshot: Snapshot | None = attrs.field(default=None, init=False)
    """State of a read-only file at its opening, if SQLite reads it without a log and without locks; else None."""

    _data_version: int = attrs.field(default=0, init=False)
    """SQLite's counter of commits by other connections, at the last poll."""

    _watched_files: tuple[tuple[str, Inode], ...] = attrs.field(default=(), init=False)
    """Path and inode of each file that existed when the connection was opened."""

    _durability: str = attrs.field(default="", init=False)
    """Durability that is set on the connection; empty before the first write."""

    _commit_callbacks: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    """Functions to call after the commit."""

    def execute(self, sql: str, parameters: Parameters = ()) -> SQLiteCursor:
        """Run one statement, inside a transaction."""
        assert self._db is not None  # noqa: S101  a transaction opened it
        return self._db.execute(sql, parameters)

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call a function once the transaction is committed; never if it is rolled back."""
        self._commit_callbacks.append(act)

    @contextmanager
    def transaction(
        self,
        *,
        write: bool,
        durability: Durability = "full",
        runs: Collection[str] = (),  # noqa: ARG002  the whole file is locked
    ) -> Iterator[None]:
        """Run the block in one transaction, committed at its end or rolled back. Wait for other processes' locks."""
        self._commit_callbacks.clear()
        self._begin(durability if write else None)
        try:
            yield
            self._check_snapshot()
            self.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        if write:
            self.outage.end()
        for act in self._commit_callbacks:
            act()

    def wait_to_retry(self, error: Exception) -> bool:
        """Return False: locks were waited for where they occurred. Close a read-only file, to reopen it next time."""
        if _result_code(error) == sqlite3.SQLITE_READONLY:
            self.close_file()  # an open connection does not notice that the permission was granted meanwhile
        return False

    def is_lock_error(self, error: Exception) -> bool:
        """Return whether the only cause is another connection's transaction."""
        return _result_code(error) in _BUSY

    def maintain(self) -> None:
        """Move the log's pages into the file, except those that readers still need. Never wait for another process."""
        if self._db is not None and self._snapshot is None and not self._is_replaced():
            self.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two polls for changes by other processes; a poll takes some microseconds."""
        return POLL_INTERVAL_S

    def has_changed(self) -> bool:
        """Return whether another process has committed something since the last poll."""
        if self._db is None:
            with self.transaction(write=False):
                return True  # changes may have been missed while it was closed
        if self._snapshot is not None:
            return self._is_stale()
        before, (self._data_version,) = self._data_version, self.execute("PRAGMA data_version").fetchone()
        return before != self._data_version

    def vacuum(self) -> None:
        """Rewrite the file without its free pages, and empty the log; outside of a transaction.

        Raises:
            StoreError: if the log cannot be emptied because another process is reading.
        """
        self._retry_while_busy(lambda: self.execute("VACUUM"))
        for _ in range(EMPTYING_ATTEMPTS):
            (is_busy, *_) = self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not is_busy:
                return
        raise StoreError(
            f"{self.path} was compacted, but its log could not be emptied, because another process was reading: "
            "call again"
        )

    def is_job_error(self, error: Exception) -> bool:
        """Return whether the values or rows of one job caused the error, not the file, the disk or a lock."""
        code = _result_code(error)
        return not isinstance(error, AgentError) and (code is None or code in _JOB_ERRORS)

    def translate_error(self, error: Exception) -> AgentError:
        """Return the AgentError that reports an error of SQLite or Python to callers."""
        if (code := _result_code(error)) is not None:
            kind = CorruptError if code in _CORRUPT else StoreError
            why = _ADVICE.get(code, "the write was not acknowledged: see SQLite's message, then resume the runs")
            return kind(f"{self.path}: SQLite says {str(error)!r}; {why}")
        if isinstance(error, sqlite3.OperationalError | UnicodeDecodeError):  # invalid UTF-8 in the file has no code
            return CorruptError(f"{self.path} holds a damaged text ({error}): restore a backup")
        if isinstance(error, ValueError | OverflowError | sqlite3.Error):
            return MisuseError(f"{self.path} cannot store a value ({error}): ids, keys and names are plain text")
        return StoreError(f"{self.path}: the store failed because of a bug in it ({error!r}): please report it")

    def close_file(self) -> None:
        """Close the file; the next transaction opens it again. The last process to close it removes the log."""
        db, self._db = self._db, None
        self._snapshot = None
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
        except Exception:  # noqa: BLE001  SQLite has ended it already, or the connection is unusable
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
                time.sleep(0.01)  # in the store's own thread; SQLite waits longer itself if waiting can help

    # Open the file.

    def _begin(self, durability: Durability | None) -> None:
        """Begin a transaction, to write with that durability, or to read if it is None.

        IMMEDIATE takes the write lock at once, so rows that are read stay valid until the commit. The files are checked
        under the lock: all commits before the deletion of a log are then in that log when `_recover` of any process
        saves it.
        """
        while True:
            self._open()
            if durability is not None and self._snapshot is not None:
                raise _ReadOnlyError(f"{self.path} cannot be written: {_GRANT_ADVICE}")
            if durability is not None and self._durability != durability:
                self.execute(_DURABILITY_SQL[durability])  # has no effect inside a transaction
                self._durability = durability
            self._retry_while_busy(lambda: self.execute("BEGIN" if durability is None else "BEGIN IMMEDIATE"))
            if not self._is_stale():
                self._check_not_upgraded()
                return
            self._roll_back()
            if self._snapshot is None:
                self._recover()
            else:
                self.close_file()

    def _check_not_upgraded(self) -> None:
        """Refuse to go on with a file whose tables a newer agentfsm has changed since it was opened.

        Raises:
            TooNewError: if the tables are of another major version now.
        """
        (version,) = self.execute("PRAGMA user_version").fetchone()
        if version // MINOR_VERSIONS > self.schema.version // MINOR_VERSIONS:
            self._roll_back()
            self.close_file()
            check_major_version(self.path, version, self.schema.version)

    def _open(self) -> None:
        if self._db is not None:
            return
        self._check_location()
        self._check_fork()
        self._check_library()
        self._retry_while_busy(self._check_deleted_log)
        self._create_file()
        try:
            self._connect(self.path, self._prepare)
        except Exception as error:
            # Without the right to create a log in its folder, the file cannot be written either.
            is_writable = _may_write(self._location) and _may_write(self._location.parent)
            if _result_code(error) not in _READ_ONLY or is_writable:
                raise
            self._open_snapshot(error)

    def _connect(self, path: str, prepare: Callable[[SQLiteConnection], None]) -> None:
        db = self.connect(path)
        try:
            db.execute(f"PRAGMA busy_timeout = {int(min(BUSY_TIMEOUT_S, self.patience_s) * 1000)}")
            self._retry_while_busy(lambda: prepare(db))
            (self._data_version,) = db.execute("PRAGMA data_version").fetchone()
        except BaseException:
            db.close()
            raise
        self._db, self._inodes, self._durability = db, _read_inodes(self.path), ""
        paths = zip(_file_paths(self.path), self._inodes, strict=True)
        self._watched_files = tuple((path, inode) for path, inode in paths if inode is not None)
        _OPEN_CONNECTIONS[id(db)] = _OpenFile(os.getpid(), self._inodes, self.library)

    def _create_file(self) -> None:
        """Create the file, if it does not exist, readable only for its owner. SQLite would use the process's umask."""
        with _CREATION_LOCK, suppress(OSError):  # it exists, or cannot be created: SQLite's own error says why
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_MODE))

    # Read a file that cannot be written.

    def _open_snapshot(self, cause: Exception) -> None:
        """Open the file without a log and without locks, which is correct as long as no other process writes it.

        `_is_stale` reopens the file after a change, and `_check_snapshot` fails a transaction that a change overlaps.

        Raises:
            StoreError: if the newest commits are in a log that cannot be read.
        """
        snapshot = _read_snapshot(self.path)
        if snapshot is None:
            raise cause
        if any(snapshot[-2:]):
            raise StoreError(
                f"{self.path} is read-only, and its newest changes are in a log (-wal or -journal) beside it that "
                "SQLite cannot read without writing: copy the file and the log to a folder that this process may write"
            ) from cause
        self._connect(f"{self._location.absolute().as_uri()}?mode=ro&immutable=1", self._check_tables)
        self._snapshot = snapshot

    def _check_snapshot(self) -> None:
        """Check that the file did not change during the transaction, if no lock protects it.

        Raises:
            StoreError: if it changed.
        """
        if self._snapshot is not None and self._is_stale():
            raise StoreError(f"{self.path} is read-only here, and another process changed it meanwhile: call again")

    def _check_tables(self, db: SQLiteConnection) -> None:
        """Check that the file has the tables of this version, without changing it.

        Raises:
            StoreError: if the tables are missing or of an older version.
        """
        version = self._read_version(db)
        if version < self.schema.version:
            state = (
                f"has tables of version {format_version(version)}, which must be upgraded" if version else "is empty"
            )
            raise StoreError(f"{self.path} {state}, and it is read-only: copy it to a folder that can be written")

    # Files that were deleted or replaced.

    def _is_stale(self) -> bool:
        """Return whether a path no longer names the opened file, so that other processes would not find new writes.

        Each transaction calls this, so it does nothing else.
        """
        if self._snapshot is not None:
            return self._snapshot != _read_snapshot(self.path)
        try:
            for path, inode in self._watched_files:
                found = os.stat(path)  # noqa: PTH116  a Path doubles the time
                if (found.st_dev, found.st_ino) != inode:
                    return True
        except OSError:
            return True
        return False

    def _is_replaced(self) -> bool:
        """Return whether the file was replaced or deleted, or another process has created a new log."""
        now = _read_inodes(self.path)
        file, *logs = _find_changed(self._inodes, now)
        return file or any(changed and log is not None for changed, log in zip(logs, now[1:], strict=True))

    def _recover(self) -> None:
        """Close the connection after one of its files was deleted or replaced; save the pages of a deleted log.

        The connection can still read a deleted log, so it moves the log's pages into the file. It cannot do so if
        another process has created a new log meanwhile: two logs cannot be joined.

        Raises:
            StoreError: if commits may be lost, or cannot be saved now.
        """
        if self._is_replaced():
            (is_file_gone, *_) = _find_changed(self._inodes, _read_inodes(self.path))
            self.close_file()
            if is_file_gone:
                raise StoreError(
                    f"{self.path} was deleted or replaced while it was open, so nothing more was written to it: put it "
                    "back, or resume the runs from the file that is there now",
                )
            raise self._foreign_log_error()
        self._retry_while_busy(self._checkpoint_deleted_log)
        self.close_file()
        index = f"{self.path}-shm"
        if _read_inode(index) == self._inodes[2]:  # the index of the deleted log must not be used with the next log
            Path(index).unlink(missing_ok=True)
        _log.error(
            "%s: its log (-wal, -shm) was deleted while it was open; nothing was lost, since its content was saved. "
            "Do not delete these files while a process has the database open",
            self.path,
        )

    def _checkpoint_deleted_log(self) -> None:
        """Move all pages of a deleted log into the file."""
        (is_busy, pages, moved) = self.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        if is_busy or pages != moved:
            raise _DeletedLogError(
                f"the log of {self.path} was deleted while it was open, and its content cannot be saved now, because "
                "another process is writing or reading: keep this process running, and call again",
            )

    def _check_deleted_log(self) -> None:
        """Refuse to open a file while this process has it open with a log that was deleted.

        SQLite shares the log's index among the connections of a process, so a new log would be read with the index of
        the deleted log.
        """
        now = _read_inodes(self.path)
        for number, (pid, files, _library) in list(_OPEN_CONNECTIONS.items()):
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
            "begun a new one, so the last writes may be missing from the file, and nothing more was written: stop all "
            "processes that have it open, compare its runs with their effects (or restore a backup), then start the "
            "processes again",
        )

    def _check_location(self) -> None:
        """Check the path. SQLite has the same message for all of these faults.

        Raises:
            StoreError: if the path names a folder, or a file that does not exist and cannot be created.
        """
        folder = self._location.parent
        if self._location.is_dir():
            raise StoreError(f"{self.path} is a folder: give the path of a file in it")
        if folder.name == HOME_FOLDER:
            with suppress(OSError):  # the checks below say why
                create_private_folder(folder)
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise StoreError(f"{self.path} cannot be opened: {folder} {problem}; create it first, or give another path")
        if not self._location.exists() and not _may_write(folder):
            raise StoreError(f"{self.path} does not exist, and its folder is read-only here: give another path")

    def _check_fork(self) -> None:
        """Refuse a file that was open when this process was forked.

        SQLite assumes that this process holds the locks of its parent, and takes none: when the parent closes the file,
        the writes of the child are lost (see sqlite.org/howtocorrupt.html, 2.6).
        """
        here = _read_inode(self.path)
        if here is not None and any(
            each.files[0] == here and each.pid != os.getpid() for each in list(_OPEN_CONNECTIONS.values())
        ):
            raise MisuseError(
                f"{self.path} was open when this process was forked, and SQLite cannot share it with the parent: fork "
                "before the store is used, or after aclose, or start the process by 'spawn'",
            )

    def _check_library(self) -> None:
        """Refuse a file that this process has open with another SQLite library.

        Each library drops the locks of the other when it closes the file (see sqlite.org/howtocorrupt.html, 2.2.1).
        """
        here = _read_inode(self.path)
        same = [each for each in list(_OPEN_CONNECTIONS.values()) if here is not None and each.files[0] == here]
        if others := [each.library for each in same if each.library != self.library]:
            raise MisuseError(
                f"{self.path} is open in this process with another SQLite library, {others[0]}, so it cannot be opened "
                f"with {self.library}: give another path"
            )

    def _prepare(self, db: SQLiteConnection) -> None:
        """Check that the file belongs to this package, before it is changed; then create or upgrade its tables."""
        with raw_transaction(db, "BEGIN"):  # a consistent view: another process may be creating the tables
            version = self._read_version(db)
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(
                f"{self.path}: SQLite cannot keep a write-ahead log there (it offers {mode!r}): put the file on a "
                "local disk",
            )
        for pragma in _PRAGMAS:
            db.execute(pragma)
        if version < self.schema.version:
            self._migrate(db)

    def _read_version(self, db: SQLiteConnection) -> int:
        """Return the version of the tables, 0 if there are none, after checking that the file is this package's.

        Raises:
            StoreError: if it is the database of another program, too new, or lacks tables.
        """
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()}
        if not (application or version or tables):
            return 0
        if application != APPLICATION_ID:
            raise StoreError(f"{self.path} is the database of another program: give another path; it was not changed")
        check_major_version(self.path, version, self.schema.version)
        if version >= self.schema.version and (missing := self.schema.tables - tables):
            raise CorruptError(f"{self.path} lacks the tables {', '.join(sorted(missing))}: restore a backup")
        return int(version)

    def _migrate(self, db: SQLiteConnection) -> None:
        """Create the tables, or upgrade older ones."""
        schema = self.schema
        with raw_transaction(db, "BEGIN IMMEDIATE"):
            version = self._read_version(db)  # again: another process may have been first
            if version >= schema.version:
                return
            upgrades = [
                line for number in sorted(schema.upgrades) if number >= version for line in schema.upgrades[number]
            ]
            for statement in upgrades if version else schema.statements:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {schema.version}")


_PRAGMAS: Final = (
    "PRAGMA wal_autocheckpoint = 0",
    f"PRAGMA journal_size_limit = {MAX_WAL_BYTES}",
    "PRAGMA fullfsync = ON",  # on macOS, a sync must reach the disk, not only the drive's cache
    "PRAGMA secure_delete = ON",  # overwrite removed rows: not every build of SQLite does so by default
)
_DURABILITY_SQL: Final[Mapping[Durability, str]] = {
    "full": "PRAGMA synchronous = FULL",  # waits for the disk in each commit
    "normal": "PRAGMA synchronous = NORMAL",  # only before the log is moved into the file
}


@contextmanager
def raw_transaction(db: SQLiteConnection, begin: str) -> Iterator[None]:
    """Run the block in a transaction of a connection that is being opened."""
    db.execute(begin)
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(Exception):
            db.execute("ROLLBACK")
        raise


def _result_code(error: Exception) -> int | None:
    """Return SQLite's primary result code; None if the error is not SQLite's."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _leak_connection(db: SQLiteConnection) -> None:
    """Keep a connection open until the process ends; the interpreter's shutdown would close it otherwise."""
    ctypes = import_module("ctypes")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))
    _LEAKED.add(id(db))


def _file_paths(path: str) -> tuple[str, str, str]:
    return path, f"{path}-wal", f"{path}-shm"


def _read_inodes(path: str) -> FileInodes:
    file, log, index = map(_read_inode, _file_paths(path))
    return file, log, index


def _find_changed(opened: FileInodes, now: FileInodes) -> list[bool]:
    """Return for each file whether it was replaced or deleted."""
    return [before is not None and before != after for before, after in zip(opened, now, strict=True)]


def _read_inode(path: str) -> Inode | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _read_snapshot(path: str) -> Snapshot | None:
    """Return the current state of a database file; None if it does not exist."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    log, journal = _read_size(f"{path}-wal"), _read_size(f"{path}-journal")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, log, journal


def _read_size(path: str) -> int:
    """Return the size of a file; 0 if it does not exist."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
