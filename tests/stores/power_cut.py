"""A disk that can lose power: a layer over SQLite's own access to files that knows what was synced and what was not.

The layer lets the operating system do what SQLite asks, locks and shared memory included, and keeps a log of it. A cut
is made afterwards, out of the log: `Disk.cut(at, seed)` gives the files as a power cut after `at` entries may leave
them. So one run of a program can be cut at each of its moments, and each cut be made worse in many ways.

What a cut leaves. What was written to a file before its last sync is there. Of what was written since, any part is, in
any order: sectors are new, old, half new or garbage, a file may have grown without its content, be cut short or not.
Likewise for the folder: a file that was made or deleted since the folder was last synced may be gone, or back. Bytes
that nobody wrote to are safe (SQLite relies on that too: sqlite.org/psow.html). Shared memory (-shm) is never there.

When a folder is synced was looked up with `strace`, and is alike in the SQLite of `sqlite3` and of `apsw`: at the first
sync of a journal or log that was opened to be made, and at a deletion that asks for it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import apsw
import attrs

# The seed of a cut that leaves nothing but what was synced.
LOSE_ALL: Final = 0
# The seed of a cut that leaves everything that was written, as a killed process does.
KEEP_ALL: Final = 1

# Bytes that a disk writes at once: old ones, new ones.
_SECTORS: Final = (512, 4096)
# The part of the sectors that were not synced: how many are garbage, and how many half written.
_DAMAGED: Final = 0.1
# How often a file has grown, though what was written to its end is lost.
_HOLLOW: Final = 0.3
# Kinds of files with whose first sync SQLite syncs the folder.
_MAKE_FOR_GOOD: Final = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL | apsw.SQLITE_OPEN_WAL

_numbers = itertools.count()


# What the log holds.


@attrs.frozen
class Opened:
    """A file was opened, and made if there was none; `file` stands for it in what follows."""

    file: int
    name: str


@attrs.frozen
class Wrote:
    file: int
    at: int
    data: bytes


@attrs.frozen
class Resized:
    file: int
    size: int


@attrs.frozen
class Synced:
    file: int
    folder: bool


@attrs.frozen
class Deleted:
    name: str
    folder: bool
    # Whether the folder was synced after it.


@attrs.frozen
class Told:
    """The world outside learned something, which no power cut makes it forget."""

    fact: Any


Entry: TypeAlias = Opened | Wrote | Resized | Synced | Deleted | Told


@attrs.define(eq=False)
class Disk:
    """A folder on a disk that keeps a log. Give `connect` to the store whose power is to be cut."""

    folder: Path
    files: Mapping[str, bytes] = attrs.field(factory=dict)
    # What is there at the start, and safe: for example what the last cut has left.
    lies: bool = False
    # Whether it says that it synced and does not, as a drive with a cache of its own may.
    log: list[Entry] = attrs.field(factory=list, init=False)
    _vfs: _Layer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._vfs = _Layer(self)
        put(self.folder, self.files)

    def connect(self, path: str) -> Connection:
        """Open a file of the folder through the layer."""
        assert Path(path).parent == self.folder
        return Connection(apsw.Connection(path, vfs=self._vfs.name))

    def tell(self, fact: Any) -> None:
        """Let the world outside know: an acknowledgement, or an effect."""
        self.log.append(Told(fact))

    def told(self, at: int) -> list[Any]:
        """Return what the world knew before a moment of the log."""
        return [entry.fact for entry in self.log[:at] if isinstance(entry, Told)]

    def moments(self, start: int = 0) -> list[int]:
        """Return the moments of the log from `start` on: before each thing that was done to the disk, and the end."""
        done = [at for at in range(start, len(self.log)) if not isinstance(self.log[at], Told)]
        return [*done, len(self.log)]

    def cut(self, at: int, seed: int) -> dict[str, bytes]:
        """Return the files, by name, as a power cut may leave them.

        Args:
            at: How much of the log had happened; a write that is its last entry was under way.
            seed: `LOSE_ALL`, `KEEP_ALL`, or any other number for its own mixture.
        """
        platter = _Platter({name: _File(bytearray(content)) for name, content in self.files.items()})
        for entry in self.log[:at]:
            platter.do(entry)
        return platter.after(_Luck(seed))


def put(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder that holds these files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


# What the log comes to.


class _Luck(random.Random):
    """Decides what survives of all that was not synced."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.sector = self.choice(_SECTORS)
        self.odds = {LOSE_ALL: 0.0, KEEP_ALL: 1.0}.get(seed, self.choice((0.05, 0.3, 0.5, 0.7, 0.95)))
        self.is_mean = seed not in (LOSE_ALL, KEEP_ALL)

    def has(self, odds: float) -> bool:
        """Whether something comes about."""
        return self.random() < odds

    def pieces(self, at: int, size: int) -> Iterator[tuple[int, int]]:
        """Cut a range of a file at the borders of sectors, where that matters: start and end of each piece."""
        borders = range(at - at % self.sector + self.sector, at + size, self.sector) if self.is_mean else ()
        return itertools.pairwise((at, *borders, at + size))

    def mangled(self, data: bytes) -> bytes:
        """Return what of a piece that was under way is on the disk: all as a rule, else its beginning, or garbage."""
        if not self.is_mean or not self.has(2 * _DAMAGED):
            return data
        return self.randbytes(len(data)) if self.has(0.5) else data[: self.randrange(len(data))]


@attrs.define(eq=False)
class _File:
    """The content of a file, whatever its name, and whether it has one."""

    safe: bytearray = attrs.field(factory=bytearray)
    loose: list[Wrote | Resized] = attrs.field(factory=list)
    # Done since the last sync, oldest first.

    def sync(self) -> None:
        self.safe = self.after(_Luck(KEEP_ALL))
        self.loose.clear()

    def after(self, luck: _Luck) -> bytearray:
        content = bytearray(self.safe)
        for entry in self.loose:
            if isinstance(entry, Wrote):
                self._write(content, entry, luck)
            elif luck.has(luck.odds):
                _resize(content, entry.size)
        return content

    def _write(self, content: bytearray, entry: Wrote, luck: _Luck) -> None:
        for start, end in luck.pieces(entry.at, len(entry.data)):
            data = entry.data[start - entry.at : end - entry.at]
            if luck.has(luck.odds):
                kept = luck.mangled(data)
                _resize(content, max(len(content), start))
                content[start : start + len(kept)] = kept
            elif luck.is_mean and luck.has(_HOLLOW):
                _resize(content, max(len(content), end))


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


@attrs.define(eq=False)
class _Platter:
    """Files and their folder, as they are on the disk and as programs see them."""

    safe: dict[str, _File | None]
    # The folder when it was last synced.
    loose: dict[str, list[_File | None]] = attrs.field(factory=dict)
    # What each name has stood for since, oldest first; None for no file.
    files: dict[int, _File] = attrs.field(factory=dict)
    # By their numbers in the log.

    def do(self, entry: Entry) -> None:
        match entry:
            case Opened(number, name):
                file = self._named(name)
                if file is None:
                    file = _File()
                    self.loose.setdefault(name, []).append(file)
                self.files[number] = file
            case Wrote() | Resized():
                self.files[entry.file].loose.append(entry)
            case Synced(number, folder):
                self.files[number].sync()
                self._sync_folder(folder)
            case Deleted(name, folder):
                self.loose.setdefault(name, []).append(None)
                self._sync_folder(folder)
            case Told():
                pass

    def _named(self, name: str) -> _File | None:
        return self.loose[name][-1] if name in self.loose else self.safe.get(name)

    def _sync_folder(self, really: bool) -> None:
        if really:
            self.safe.update({name: files[-1] for name, files in self.loose.items()})
            self.loose.clear()

    def after(self, luck: _Luck) -> dict[str, bytes]:
        folder = dict(self.safe)
        for name, files in self.loose.items():
            for file in files:  # one name changes in order; which names have changed is left to luck
                if not luck.has(luck.odds):
                    break
                folder[name] = file
        return {name: bytes(file.after(luck)) for name, file in folder.items() if file is not None}


# The layer.


class _Layer(apsw.VFS):
    """Opens the operating system's files and logs what is done to them."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.name = f"power-cut-{next(_numbers)}"
        super().__init__(self.name, base="")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802  apsw's name, as below
        """Open a file; one without a name is temporary, and no power cut's business."""
        return super().xOpen(name, flags) if name is None else _LoggedFile(self.disk, name, flags)

    def xDelete(self, name: str, folder: bool) -> None:  # noqa: N802
        """Delete a file; `folder` asks for a sync of the folder as well."""
        super().xDelete(name, folder)
        self.disk.log.append(Deleted(Path(name).name, folder and not self.disk.lies))


class _LoggedFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name)
        assert path.parent == disk.folder
        super().__init__("", name, flags)
        self.log = disk.log
        self.number = next(_numbers)
        self.lies = disk.lies
        self.makes_for_good = bool(flags[0] & _MAKE_FOR_GOOD and flags[0] & apsw.SQLITE_OPEN_CREATE)
        self.log.append(Opened(self.number, path.name))

    def xWrite(self, data: Any, at: int) -> None:  # noqa: N802
        self.log.append(Wrote(self.number, at, bytes(data)))
        super().xWrite(data, at)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self.log.append(Resized(self.number, size))
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:  # noqa: N802
        """Sync in the log only: the disk beneath need not wait as well."""
        if not self.lies:
            self.log.append(Synced(self.number, self.makes_for_good))
            self.makes_for_good = False


# What a store takes for sqlite3.


@attrs.frozen
class Connection:
    """An apsw connection that a store takes for one of sqlite3's."""

    inner: apsw.Connection

    def execute(self, sql: str, parameters: Any = ()) -> _Cursor:
        """Run one statement."""
        with _coded():
            return _Cursor(self.inner.execute(sql, parameters))

    def close(self) -> None:
        """Close the file."""
        with _coded():
            self.inner.close()


@attrs.frozen
class _Cursor:
    inner: apsw.Cursor

    def fetchone(self) -> Any:
        with _coded():
            return self.inner.fetchone()

    def fetchall(self) -> list[Any]:
        with _coded():
            return self.inner.fetchall()


@contextmanager
def _coded() -> Iterator[None]:
    """Let errors carry SQLite's code as those of sqlite3 do."""
    try:
        yield
    except apsw.Error as error:
        error.sqlite_errorcode = getattr(error, "extendedresult", None)
        raise
