"""Quotas that several processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agentfsm.ports.stored import QUOTA_WINDOW_S, QuotaUse

if TYPE_CHECKING:
    from agentfsm.ports.store import Store


class QuotaConformance:
    """Quotas that several processes share."""

    async def test_a_quota_has_a_limit(self, store: Store) -> None:
        """Amounts are taken until the limit; then the wait is until the first of them is a minute old."""
        use = QuotaUse(name="user:ann", limit=3)
        assert [await store.take_quotas([use]) for _ in range(3)] == [0.0] * 3
        assert 0 < await store.take_quotas([use]) <= QUOTA_WINDOW_S
        assert await store.take_quotas([QuotaUse(name="user:bob", limit=3)]) == 0.0
        assert await store.take_quotas([QuotaUse(name="user:ann", limit=4)]) == 0.0
        assert await store.take_quotas([QuotaUse(name="none", limit=0)]) == QUOTA_WINDOW_S

    async def test_quotas_are_taken_together(self, store: Store) -> None:
        """If one of several has no room, nothing is taken from the others."""
        own, shared = QuotaUse(name="own", limit=5), QuotaUse(name="shared", limit=1)
        assert await store.take_quotas([own, shared]) == 0.0
        for _ in range(9):
            assert await store.take_quotas([own, shared]) > 0
        assert await store.take_quotas([QuotaUse(name="own", amount=4, limit=5)]) == 0.0

    async def test_what_was_used_is_taken_in_any_case(self, store: Store) -> None:
        """With `force` the sum may exceed the limit, and then nothing more is taken."""
        assert await store.take_quotas([QuotaUse(name="tokens", amount=900, limit=100)], force=True) == 0.0
        assert 0 < await store.take_quotas([QuotaUse(name="tokens", limit=100)]) <= QUOTA_WINDOW_S
        assert await store.take_quotas([QuotaUse(name="tokens", limit=901)]) == 0.0

    async def test_many_take_at_once(self, store: Store) -> None:
        """Of 40 callers in one process, as many are accepted as the limit says."""
        taken = []

        async def take() -> None:
            taken.append(await store.take_quotas([QuotaUse(name="busy", limit=15)]))

        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(take)
        assert len([wait_s for wait_s in taken if not wait_s]) == 15
