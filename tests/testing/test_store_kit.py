"""The kit for stores, on stores with one fault each: what it is there to find it finds, and says what is wrong."""

from __future__ import annotations

from traceback import format_exception

import pytest

from agentfsm import ConflictError, StoreError
from agentfsm.core.events import EVENTS
from agentfsm.stores import MemoryStore
from agentfsm.stores.memory import WRITE_ACCEPTED
from agentfsm.testing import run_virtual
from agentfsm.testing.conformance import StoreConformance, helpers

KIT = StoreConformance()
# Held for ever.
leases = []


class LosesAppends(MemoryStore):
    """Says that it has written, and has not."""

    def append(self, lease, run, events, **how):
        return WRITE_ACCEPTED


class DropsReleases(MemoryStore):
    """Never lets go of a lease."""

    def release(self, lease):
        leases.append(lease)
        return WRITE_ACCEPTED


class SortsByKey(MemoryStore):
    """Reads the inbox by the rows' keys."""

    async def inbox(self, run_id):
        return tuple(sorted(await super().inbox(run_id), key=lambda row: row.key))


class CreatesOnce(MemoryStore):
    """Refuses the same request when it arrives again."""

    async def create(self, header, **how):
        if any(line.id == header.id for line in await self.runs()):
            raise ConflictError(f"run {header.id!r} exists")
        return await super().create(header, **how)


class PrunesAll(MemoryStore):
    """Prunes whatever is old."""

    async def prune(self, before, *, unread=False):
        old = [line.id for line in await self.runs() if line.updated_at < before]
        for run_id in old:
            self._forget(run_id)
        return len(old)


class ForgetsReads(MemoryStore):
    """Notes how far a follower has come, and not what it has read of each run."""

    async def confirm_read(self, name, *, versions, **how):
        return await super().confirm_read(name, versions={}, **how)


class ConfirmsAhead(MemoryStore):
    """Takes a request for a confirmation."""

    async def take_unread(self, name, *, holder, **how):
        found = await super().take_unread(name, holder=holder, **how)
        if found:
            await self.confirm_read(name, holder=holder, position=found[-1].change, versions={})
        return found


FAULTS = pytest.mark.parametrize(
    ("faulty", "promise", "words"),
    [
        (LosesAppends, "test_events_are_read_in_order", "Observed"),
        (DropsReleases, "test_a_lease_given_back_can_be_taken", "is being driven"),
        (DropsReleases, "test_of_many_one_drives_at_a_time", "a lease was not released"),
        (DropsReleases, "test_event_loops_in_several_threads_share_a_store", "a lease was not released"),
        (SortsByKey, "test_a_post_waits_in_the_inbox", "k3"),
        (CreatesOnce, "test_the_same_id_and_prompt_is_the_same_run", "exists"),
        (PrunesAll, "test_what_is_not_over_is_not_pruned", "1 == 0"),
        (PrunesAll, "test_what_a_follower_has_not_read_is_not_pruned", "1 == 0"),
        (ForgetsReads, "test_a_run_that_goes_on_is_delivered_from_where_it_was", "('r1', 0, 7)"),
        (ConfirmsAhead, "test_what_was_not_done_comes_again", "nothing is delivered"),
    ],
)


@FAULTS
def test_a_fault_is_found(faulty, promise, words, monkeypatch):
    """One promise is broken, and the failure tells by what."""
    monkeypatch.setattr(helpers, "STALL_TIMEOUT_S", 0.01)
    with pytest.raises((AssertionError, StoreError, ExceptionGroup)) as failure:
        run_virtual(lambda: checked(faulty(), promise))
    assert words in "\n".join(format_exception(failure.value))


@FAULTS
def test_a_store_without_a_fault_passes(faulty, promise, words):
    """The same promises are kept by the store that the others are made of."""
    run_virtual(lambda: checked(MemoryStore(), promise))


async def checked(store, promise):
    """Check one promise of a store."""
    await getattr(KIT, promise)(store)


def test_the_kit_stores_every_event():
    """An event that is added without a sample for stores fails here."""
    assert {type(event) for event in helpers.build_every_event()} == set(EVENTS)
