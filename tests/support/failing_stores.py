"""Stores that fail where a test wants it: the process dies at an append, the task is cancelled, the disk is full."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing

import attrs
from anyio.lowlevel import checkpoint

from agentfsm import (
    Run,
    StoreError,
)
from agentfsm.core.events import Event
from agentfsm.core.header import Header
from agentfsm.core.inbox import PostedItem
from agentfsm.ports import Lease, PendingWrite, Store, StoredRun
from agentfsm.stores import MemoryStore, SQLiteStore
from tests.support.checks import (
    Trap,
    Wrapped,
)


async def lose_run(store: MemoryStore | SQLiteStore, run_id: str) -> None:
    """Take a run out of a store behind its back, as a restored backup does."""
    if isinstance(store, MemoryStore):
        store._forget(run_id)
        return
    with closing(sqlite3.connect(store.path)) as db, db:
        (number,) = db.execute("SELECT number FROM runs WHERE id = ?", (run_id,)).fetchone()
        for table, column in (("posts", "run"), ("events", "run"), ("runs", "number")):
            db.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))  # noqa: S608


class WorkerKilled(BaseException):
    """The process is gone."""


class CrashingStore(Wrapped):
    """A store whose process is killed at the n-th append; what comes after reaches the real store no more."""

    def __init__(self, inner: Store, at: int, *, written: bool) -> None:
        """Take the real store, and when to die: after the n-th append was `written`, or before."""
        self.inner = inner
        self.left = at
        self.written = written
        self.dead = False

    def append(self, *args: object, **options: object) -> PendingWrite:
        """Pass on, until the time has come; a release is passed on, which stands for the end of the lease."""
        if self.dead:
            raise WorkerKilled
        self.left -= 1
        if self.left:
            return self.inner.append(*args, **options)
        self.dead = True
        if self.written:
            self.inner.append(*args, **options)
        raise WorkerKilled


class StoreFailingAt(Wrapped):
    """A store whose n-th call of one method, counted from `fail`, raises an error and does nothing."""

    def __init__(self, inner: Store) -> None:
        """Take the real store."""
        self.inner = inner
        self.calls: dict[str, int] = {}
        self.errors: dict[str, StoreError] = {}

    def fail(self, method: str, at: int, error: StoreError | None = None) -> None:
        """Let the call with this number fail, once, counted from 1."""
        self.calls[method] = at
        self.errors[method] = error or StoreError("made to fail")

    def __getattribute__(self, name: str) -> object:
        """Return the method of the real store, or one that fails."""
        if name.startswith("_") or name in {"inner", "calls", "errors", "fail"}:
            return super().__getattribute__(name)
        method = getattr(self.inner, name)
        if not (left := self.calls.get(name, 0)):
            return method

        async def count(*args: object, **options: object) -> object:
            self.calls[name] = left - 1
            if left == 1:
                raise self.errors[name]
            return await method(*args, **options)

        return count


@attrs.define
class _CancellingCommit(PendingWrite):
    inner: PendingWrite
    trap: Trap

    async def wait(self) -> bool:
        await self.trap.visit()
        value = await self.inner.wait()
        await self.trap.visit()
        return value


class CancellingStore(Wrapped):
    """A store with a trap before and after each of its awaits."""

    def __init__(self, inner: Store, trap: Trap) -> None:
        """Take the real store."""
        self.inner = inner
        self.trap = trap

    async def create(self, *args: object, **options: object) -> tuple[Header, Lease]:
        """Pass on."""
        await self.trap.visit()
        stored, lease = await self.inner.create(*args, **options)
        await self._or_let_go(lease)
        return stored, lease

    async def lease(self, *args: object, **options: object) -> Lease:
        """Pass on."""
        await self.trap.visit()
        lease = await self.inner.lease(*args, **options)
        await self._or_let_go(lease)
        return lease

    async def _or_let_go(self, lease: Lease) -> None:
        """Be at a place where a lease is taken and nobody has it yet: a store gives it back by itself."""
        try:
            await self.trap.visit()
        except BaseException:
            self.inner.release(lease)
            raise

    def append(self, *args: object, **options: object) -> PendingWrite:
        """Pass on."""
        return _CancellingCommit(self.inner.append(*args, **options), self.trap)

    async def now(self) -> float:
        """Pass on."""
        await self.trap.visit()
        value = await self.inner.now()
        await self.trap.visit()
        return value

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Pass on."""
        await self.trap.visit()
        value = await self.inner.inbox(run_id)
        await self.trap.visit()
        return value

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Pass on."""
        await self.trap.visit()
        value = await self.inner.read(run_id, after)
        await self.trap.visit()
        return value


@attrs.define
class _LostCommit(PendingWrite):
    """An append that never reached the disk; who waits for it is told."""

    async def wait(self) -> bool:
        await checkpoint()
        raise StoreError("the disk is full")


class FullStore(MemoryStore):
    """A disk that is full from the n-th append on, until there is room again: appends fail when they are waited for."""

    def __init__(self, at: int) -> None:
        """Take the n."""
        super().__init__()
        self.at = at
        self.count = 0

    def append(
        self, lease: Lease, run: Run, events: Sequence[Event], *, taken: Sequence[int] = (), final: bool = False
    ) -> PendingWrite:
        """Write, or do not."""
        self.count += 1
        if self.count >= self.at:
            return _LostCommit()
        return super().append(lease, run, events, taken=taken, final=final)

    @property
    def was_full(self) -> bool:
        """Whether an append was lost."""
        return self.count >= self.at

    def make_room(self) -> None:
        """Let it write again."""
        self.at = 10**9
