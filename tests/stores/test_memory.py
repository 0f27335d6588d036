"""MemoryStore keeps the promises of every store."""

import pytest

from agentfsm.core.errors import RunNotFoundError
from agentfsm.stores import MemoryStore
from agentfsm.stores.memory import KEEP_FINISHED
from agentfsm.testing.conformance import StoreConformance, finished, header


class TestMemoryStore(StoreConformance):
    """The published kit."""

    @pytest.fixture
    async def store(self):
        store = MemoryStore()
        yield store
        await store.aclose()


async def test_old_finished_runs_are_dropped():
    """A service that never restarts does not fill its memory with runs that are over."""
    store = MemoryStore()
    for number in range(KEEP_FINISHED + 2):
        await finished(store, header(f"r{number}"))
    assert len(await store.runs(limit=KEEP_FINISHED * 2)) == KEEP_FINISHED
    with pytest.raises(RunNotFoundError):
        await store.read("r1")
    assert len((await store.read("r2")).events) == 2
