"""The leases that a store holds in this process: their owners, their state, and their failures.

A lease belongs to the event loop that took it. A store's thread renews the leases of a loop only while that loop runs,
so that a loop which is blocked for good does not keep its runs from others.

The store's thread owns this table and updates the leases; their owners read them from the event loop.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import attrs

from agentfsm._lib.concurrency import current_native_loop, try_call_soon
from agentfsm.core.errors import AgentError, LeaseLostError, StoreError
from agentfsm.ports.store import Lease, LeaseTerm

_log = logging.getLogger("agentfsm.stores")

# Seconds between two probes of an event loop.
PROBE_INTERVAL_S: Final = 0.5
# Seconds without an answer after which the stack of a blocked loop is logged.
BLOCKED_LOG_S: Final = 1.0


@attrs.define(eq=False, repr=False)
class LeaseOwner(LeaseTerm):
    """An event loop that executes runs of one store: the owner of leases.

    Created in the loop, and then used by the store's thread.
    """

    # If `until` has passed, a store checks before a renewal which of the leases were taken over: afterwards all of them
    # would look valid.
    name: str = ""
    """Unique name of the owner in the store."""

    silent_s: float = attrs.field(default=0.0, init=False)
    """Seconds that the loop has not run, as observed by the store's thread."""

    is_closed: bool = attrs.field(default=False, init=False)
    """True if the loop was closed, so that it does not execute its runs any more."""

    _loop: weakref.ref[object] = attrs.field(factory=lambda: weakref.ref(current_native_loop()), init=False)
    _thread: int = attrs.field(factory=threading.get_ident, init=False)
    _is_probe_pending: bool = attrs.field(default=False, init=False)
    """True if the loop has not answered the last probe yet."""

    _probed_at: float = attrs.field(default=0.0, init=False)
    """Time of the last call of `probe`, by the caller's clock."""

    _probe_sent_at: float = attrs.field(default=0.0, init=False)
    """Time when the unanswered probe was sent, monotonic seconds."""

    _is_logged: bool = attrs.field(default=False, init=False)

    def probe(self, now: float) -> None:
        """Check whether the loop has answered the last probe, and send another if it has.

        Time in which this thread was stopped as well, with its process, does not count against the loop.

        Args:
            now: Seconds by a monotonic clock.
        """
        loop = self._loop()
        if self._is_probe_pending:
            self.silent_s += min(now - self._probed_at, 2 * PROBE_INTERVAL_S)
        else:
            self._is_probe_pending, self._probe_sent_at = True, time.monotonic()
        self.is_closed = loop is None or not try_call_soon(loop, self._on_probe_answer)
        if self.silent_s >= BLOCKED_LOG_S and not (self._is_logged or self.is_closed):
            self._log_block()
        self._probed_at = now

    def _on_probe_answer(self) -> None:
        """Record the answer; runs in the loop."""
        if self._is_logged:
            blocked_s = time.monotonic() - self._probe_sent_at
            _log.warning("the event loop of thread %d runs again after %.1f s", self._thread, blocked_s)
        self._is_probe_pending, self._is_logged, self.silent_s = False, False, 0.0

    def _log_block(self) -> None:
        self._is_logged = True
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001  the documented way to see another thread
        where = "".join(traceback.format_stack(frame)) if frame is not None else "its thread is gone\n"
        tool, cause, notice = _find_tool(frame), "some code in it blocks instead of awaiting", ""
        if tool:
            cause = f"the async function of tool {tool} blocks: make it a plain `def`, which runs in a thread"
            notice = f"agentfsm: the event loop stands still, because {cause}"
        _log.warning(
            "the event loop of thread %d has not run for %.1f s, so its runs stand still: %s. Its stack:\n%s",
            self._thread,
            self.silent_s,
            cause,
            where,
            extra={"notice": notice},
        )


def _find_tool(frame: FrameType | None) -> str:
    """Return the name of the tool whose function a stack is in; empty if there is none. The queue calls it `tool`."""
    while frame is not None:
        if frame.f_code.co_qualname == "AdmittedCall.run":
            return str(getattr(frame.f_locals.get("tool"), "name", ""))
        frame = frame.f_back
    return ""


def lease_owner(lease: Lease) -> LeaseOwner:
    """Return the event loop that owns a lease of a store with a thread."""
    owner = lease.term
    assert isinstance(owner, LeaseOwner)  # noqa: S101  the stores with a thread set it
    return owner


@attrs.define(eq=False, repr=False)
class HeldLease:
    """A lease that this store object holds."""

    lease_ref: Callable[[], Lease | None]
    """A weak reference to the lease, so that an owner whose coroutine was discarded holds nothing."""

    token: int
    owner: LeaseOwner
    failure: str = ""
    """The external reason why an append was not written. Later appends are then refused, so that there is no gap."""


@attrs.define(eq=False, repr=False)
class LeaseTable:
    """The leases of one store object, by run id."""

    lease_s: float
    """Seconds that a lease lasts without renewal."""

    blocked_s: float = 60.0
    """Seconds that an event loop may be blocked before its leases are not renewed any more. Default 60."""

    worker_name: str = ""
    """Name of the store object, and prefix of the names of its event loops."""

    _held: dict[str, HeldLease] = attrs.field(factory=dict, init=False)
    _undo_log: dict[str, HeldLease | None] | None = attrs.field(default=None, init=False)
    """Previous entries of the runs that changed in the transaction; None outside a transaction."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def renew_interval_s(self) -> float:
        """Seconds between two renewals: a lease survives two that fail."""
        return self.lease_s / 3

    def __iter__(self) -> Iterator[tuple[str, HeldLease]]:
        return iter(list(self._held.items()))

    def owners(self) -> list[LeaseOwner]:
        """Return the event loops that hold leases here."""
        return list({id(held.owner): held.owner for held in self._held.values()}.values())

    def probe(self, now: float) -> bool:
        """Probe the loops that hold leases. Return whether one is closed, whose leases are then dropped.

        Args:
            now: Seconds by a monotonic clock.
        """
        for owner in self.owners():
            owner.probe(now)
        closed = [(run_id, held) for run_id, held in self if held.owner.is_closed]
        for run_id, held in closed:
            self._put(run_id, HeldLease(lambda: None, held.token, held.owner))
        return bool(closed)

    def renewable_owners(self) -> list[LeaseOwner]:
        """Return the event loops that run, whose leases are renewed."""
        return [owner for owner in self.owners() if self.is_renewable(owner)]

    def is_renewable(self, owner: LeaseOwner) -> bool:
        """Return whether the loop runs, as far as the store's thread knows."""
        return owner.silent_s < self.blocked_s and not owner.is_closed

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block. If it fails, restore the leases that it added and removed."""
        self._undo_log = {}
        try:
            yield
        except BaseException:
            for run_id, held in self._undo_log.items():
                self._put(run_id, held)
            raise
        finally:
            self._undo_log = None

    def add(self, lease: Lease, owner: LeaseOwner) -> None:
        """Add a lease that was just taken."""
        self._put(lease.run_id, HeldLease(weakref.ref(lease), lease.token, owner))

    def remove(self, run_id: str) -> None:
        """Remove the lease of a run."""
        self._put(run_id, None)

    def abandon(self, lease: Lease) -> None:
        """Treat a lease that could not be released as dropped: the next renewal releases it."""
        if (held := self._find(lease)) is not None:
            self._put(lease.run_id, HeldLease(lambda: None, lease.token, held.owner))

    def find_leases(self, owner: LeaseOwner) -> list[Lease]:
        """Return the leases of an event loop that were not dropped."""
        leases = [held.lease_ref() for held in self._held.values() if held.owner is owner]
        return [lease for lease in leases if lease is not None]

    def clear(self) -> None:
        """Remove all leases."""
        self._held.clear()

    def find_lease(self, run_id: str) -> Lease | None:
        """Return the lease of the run if it is held here and was not dropped."""
        held = self._held.get(run_id)
        return None if held is None else held.lease_ref()

    def is_ours(self, owner: str) -> bool:
        """Return whether the owner is an event loop of this store object."""
        return owner.startswith(self.worker_name)

    def is_dropped(self, run_id: str, owner: str) -> bool:
        """Return whether the lease belongs to this store object, and its coroutine has dropped it."""
        return self.is_ours(owner) and self.find_lease(run_id) is None

    def has_lease(self, run_id: str, token: int) -> bool:
        """Return whether this table contains the lease, even if it was dropped."""
        held = self._held.get(run_id)
        return held is not None and held.token == token

    def release(self, lease: Lease) -> None:
        """Remove this lease if it is the current one of its run."""
        if self._find(lease) is not None:
            self._put(lease.run_id, None)

    def check(self, lease: Lease) -> None:
        """Refuse an append if the lease is not held any more, or an earlier append was not written.

        Raises:
            LeaseLostError: if the lease was released or lost.
            StoreError: if an earlier append was not written.
        """
        held = self._find(lease)
        if held is None:
            raise LeaseLostError(f"run {lease.run_id!r}: its lease was given back or taken over: load it to see")
        if held.failure:
            raise StoreError(
                f"run {lease.run_id!r}: an earlier append was not written, so this one is refused: {held.failure}"
            )

    def mark_failed(self, lease: Lease, error: AgentError) -> None:
        """Refuse the later appends of a lease after one that was not written."""
        held = self._find(lease)
        if held is not None:
            held.failure = held.failure or str(error)

    def notify_inbox(self, run_id: str, inbox_head: int, *, cancelled: bool) -> None:
        """Update the lease of a run with the state of its inbox."""
        lease = self.find_lease(run_id)
        if lease is None:
            return
        lease.inbox_head = max(lease.inbox_head, inbox_head)
        if cancelled and not lease.cancelled:
            lease.cancelled = True
            _wake(lease)

    def mark_lost(self, lease: Lease) -> None:
        """Inform the owner of a lease that another owner has taken over."""
        self.release(lease)
        if not lease.lost:
            lease.lost = True
            _wake(lease)

    def _find(self, lease: Lease) -> HeldLease | None:
        held = self._held.get(lease.run_id)
        return held if held is not None and held.lease_ref() is lease else None

    def _put(self, run_id: str, held: HeldLease | None) -> None:
        if self._undo_log is not None:
            self._undo_log.setdefault(run_id, self._held.get(run_id))
        if held is None:
            self._held.pop(run_id, None)
        else:
            self._held[run_id] = held


def _wake(lease: Lease) -> None:
    try:
        if lease.wake is not None:
            lease.wake()
    except Exception:  # noqa: BLE001  the thread must continue for the other leases
        _log.exception("run %s: the wake of its lease failed", lease.run_id)
