"""The checks that every store has to pass, for users who write one of their own.

    from agentfsm.testing.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        @pytest.fixture
        async def store(self):
            store = MyStore(...)  # new and empty for each test
            yield store
            await store.aclose()

        @pytest.fixture
        async def other(self, store):
            other = MyStore(...)  # on the same data, as another process would have it
            yield other
            await other.aclose()

Inherit, override the fixtures, and run pytest: each `test_` method is one promise, told in its docstring. They need
anyio's pytest plugin and its fixture `anyio_backend`, which decides whether they run on asyncio, on trio, or on both.
Without the fixture `other` what takes two store objects is skipped.

What the kit does not check, since no process dies in it: that the lease of an owner who died ends by itself, that the
next one's `Lease.crashes` counts it, that a lease which was lost says so (`lost`, `wake`), and that what was
acknowledged is on the disk. `agentfsm.testing.crash` has processes for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

# Before they are imported: pytest shows the values in an assertion that failed only for modules that it was told of.
_MODULES = ("appends", "creation", "deletion", "helpers", "leases", "lists", "posts")
pytest.register_assert_rewrite(*[f"{__name__}.{room}" for room in _MODULES])

from agentfsm.testing.conformance.appends import AppendConformance  # noqa: E402
from agentfsm.testing.conformance.creation import CreationConformance  # noqa: E402
from agentfsm.testing.conformance.deletion import DeletionConformance  # noqa: E402
from agentfsm.testing.conformance.leases import LeaseConformance  # noqa: E402
from agentfsm.testing.conformance.lists import ListConformance  # noqa: E402
from agentfsm.testing.conformance.posts import InboxConformance  # noqa: E402

if TYPE_CHECKING:
    from agentfsm.ports.store import Store


@pytest.mark.anyio
class StoreConformance(
    CreationConformance, LeaseConformance, AppendConformance, InboxConformance, ListConformance, DeletionConformance
):
    """What a store promises. Override `store` with a fixture that yields a new and empty one."""

    @pytest.fixture
    async def store(self) -> Store:
        """Return the store to check."""
        raise NotImplementedError("override the fixture `store` with one that yields your store, new and empty")

    @pytest.fixture
    async def other(self) -> Store:
        """Return a second store object on the data of the first, as another process would have it."""
        pytest.skip("this store has one object for its data; else override the fixture `other`")
