"""What the stores have in common whose leases a thread renews, beyond what the kit can ask of any store."""

from __future__ import annotations

import math

from agentfsm.core.inbox import Cancel
from agentfsm.testing.conformance.helpers import LeasedRun, make_input


async def beat(store):
    """Let the store's thread renew its leases now."""
    store._writer._renewed_at = -math.inf
    await store.runs()
    await store.runs()  # jobs and upkeep take turns: what was due behind the first is done


class Renewal:
    """A renewal brings the news; `pair` is two stores on the same data."""

    async def test_a_renewal_learns_of_posts_and_cancel(self, pair):
        """What was posted by another process reaches the owner within one renewal; cancel wakes it, once."""
        first, second = pair
        driver = await LeasedRun.create(first)
        woken = []
        driver.lease.wake = lambda: woken.append(True)
        row = await second.post("r1", "k", make_input("x"))
        await beat(first)
        assert (driver.lease.inbox_head, driver.lease.cancelled, woken) == (row.number, False, [])
        await second.post("r1", "cancel", Cancel())
        await beat(first)
        await beat(first)
        assert (driver.lease.cancelled, woken) == (True, [True])
