"""Conformance tests that every store has to pass, for authors of custom stores.

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

Inherit, override the fixtures, and run pytest: the docstring of each `test_` method states one requirement. The tests
need anyio's pytest plugin and its fixture `anyio_backend`, which selects asyncio, trio or both. Without the fixture
`other`, tests with two store objects are skipped.

The tests do not crash processes, so they do not check that the lease of a crashed owner expires, that `Lease.crashes`
counts the crash, that a lost lease is reported (`lost`, `wake`), and that acknowledged data is on the disk. Use
`agentfsm.testing.crash` for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

# Before the imports: pytest shows the values of failed assertions only for registered modules.
_MODULES = ("appends", "creation", "deletion", "following", "helpers", "leases", "lists", "posts", "quotas", "records")
pytest.register_assert_rewrite(*[f"{__name__}.{room}" for room in _MODULES])

from agentfsm.testing.conformance.appends import AppendConformance  # noqa: E402
from agentfsm.testing.conformance.creation import CreationConformance  # noqa: E402
from agentfsm.testing.conformance.deletion import DeletionConformance  # noqa: E402
from agentfsm.testing.conformance.following import FollowerConformance  # noqa: E402
from agentfsm.testing.conformance.leases import LeaseConformance  # noqa: E402
from agentfsm.testing.conformance.lists import ListConformance  # noqa: E402
from agentfsm.testing.conformance.posts import InboxConformance  # noqa: E402
from agentfsm.testing.conformance.quotas import QuotaConformance  # noqa: E402
from agentfsm.testing.conformance.records import RecordConformance  # noqa: E402

if TYPE_CHECKING:
    from agentfsm.ports.store import Store


@pytest.mark.anyio
class StoreConformance(
    CreationConformance,
    LeaseConformance,
    AppendConformance,
    InboxConformance,
    ListConformance,
    DeletionConformance,
    FollowerConformance,
    QuotaConformance,
    RecordConformance,
):
    """Conformance tests of a store. Override the fixture `store` with one that yields a new, empty store."""

    @pytest.fixture
    async def store(self) -> Store:
        """Return the store to check."""
        raise NotImplementedError("the fixture `store` is missing: override it with one that yields a new, empty store")

    @pytest.fixture
    async def other(self) -> Store:
        """Return a second store object with the same data, as another process would have."""
        pytest.skip("needs a second store object: override the fixture `other` if the store supports several")
