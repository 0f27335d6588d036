"""The leases that a store holds in this process: who has them, what they were told, and which have failed.

A store's thread owns this; what a lease is told, its owner reads from the event loop.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from agentfsm.core.errors import AgentError, LeaseLostError, StoreError
from agentfsm.ports import Lease

_log = logging.getLogger("agentfsm.stores")


@attrs.define(eq=False, repr=False)
class Held:
    """A lease of ours."""

    lease: Callable[[], Lease | None]
    # A weak reference, so that an owner whose coroutine was thrown away holds nothing.
    token: int
    failed: str = ""
    # Why an append of it was not written, by no word of ours; then no later one is either, so that there is no gap.


@attrs.define(eq=False, repr=False)
class Holdings:
    """The leases of one store object, by run id."""

    lease_s: float
    # How long one lasts that is not renewed, seconds.
    _held: dict[str, Held] = attrs.field(factory=dict, init=False)
    _before: dict[str, Held | None] | None = attrs.field(default=None, init=False)
    # What was held of each run that has changed in the transaction; None outside of one.

    def __len__(self) -> int:
        return len(self._held)

    @property
    def beat_s(self) -> float:
        """Seconds between two renewals: a lease outlives two that came to nothing."""
        return self.lease_s / 3

    def __iter__(self) -> Iterator[tuple[str, Held]]:
        return iter(list(self._held.items()))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block; where it fails, what it has taken and given back is held as before."""
        self._before = {}
        try:
            yield
        except BaseException:
            for run_id, held in self._before.items():
                self._put(run_id, held)
            raise
        finally:
            self._before = None

    def add(self, lease: Lease) -> None:
        """Hold a lease that was just taken."""
        self._put(lease.run_id, Held(weakref.ref(lease), lease.token))

    def drop(self, run_id: str) -> None:
        """Hold it no longer."""
        self._put(run_id, None)

    def abandon(self, lease: Lease) -> None:
        """Treat a lease that could not be given back as one that was thrown away: the next renewal lets go of it."""
        if self._find(lease) is not None:
            self._put(lease.run_id, Held(lambda: None, lease.token))

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()

    def is_held(self, run_id: str) -> bool:
        """Whether somebody here has the lease of the run, and has not thrown it away."""
        held = self._held.get(run_id)
        return held is not None and held.lease() is not None

    def give_back(self, lease: Lease) -> None:
        """Hold it no longer, if it is this one."""
        if self._find(lease) is not None:
            self._put(lease.run_id, None)

    def check(self, lease: Lease) -> None:
        """Refuse an append of a lease that is not held any more, or that comes after one which was not written.

        Raises:
            LeaseLostError: when it was given back or lost.
            StoreError: when an earlier append of it was not written.
        """
        held = self._find(lease)
        if held is None:
            raise LeaseLostError(f"run {lease.run_id!r}: this lease was given back or lost; take it again")
        if held.failed:
            raise StoreError(f"run {lease.run_id!r}: an earlier append was not written, nor is this one: {held.failed}")

    def spoil(self, lease: Lease, error: AgentError) -> None:
        """Let no later append of the lease be written after one that was not."""
        held = self._find(lease)
        if held is not None:
            held.failed = held.failed or str(error)

    def tell(self, run_id: str, newest: int, *, cancelled: bool) -> None:
        """Tell whoever drives a run here what its inbox holds."""
        held = self._held.get(run_id)
        lease = None if held is None else held.lease()
        if lease is None:
            return
        lease.newest = max(lease.newest, newest)
        if cancelled and not lease.cancelled:
            lease.cancelled = True
            _wake(lease)

    def lose(self, lease: Lease) -> None:
        """Tell whoever drives a run here that another owner has taken over."""
        self.give_back(lease)
        if not lease.lost:
            lease.lost = True
            _wake(lease)

    def _find(self, lease: Lease) -> Held | None:
        held = self._held.get(lease.run_id)
        return held if held is not None and held.lease() is lease else None

    def _put(self, run_id: str, held: Held | None) -> None:
        if self._before is not None:
            self._before.setdefault(run_id, self._held.get(run_id))
        if held is None:
            self._held.pop(run_id, None)
        else:
            self._held[run_id] = held


def _wake(lease: Lease) -> None:
    try:
        if lease.wake is not None:
            lease.wake()
    except Exception:  # noqa: BLE001  whatever it is, the thread lives on for the others
        _log.exception("run %s: the wake of its lease failed", lease.run_id)
