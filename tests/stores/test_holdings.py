"""The leases that a store holds in this process."""

import pytest

from agentfsm import StoreError
from agentfsm.ports import Lease
from agentfsm.stores.threaded.lease_table import LeaseOwner, LeaseTable


async def test_what_is_rolled_back_is_held_as_before():
    """A lease that was given back is still held, one that was taken is not; what came before stands."""
    holdings, owner = LeaseTable(lease_s=10.0), LeaseOwner(name="here")
    given, taken, dropped = (Lease(run_id=run_id, token=1, version=0) for run_id in ("given", "taken", "dropped"))
    with holdings.transaction():
        holdings.add(given, owner)
        holdings.add(dropped, owner)

    def work() -> None:
        with holdings.transaction():
            holdings.release(given)
            holdings.add(taken, owner)
            holdings.remove("dropped")
            raise StoreError("disk full")

    with pytest.raises(StoreError):
        work()
    assert {run_id for run_id, _ in holdings} == {"given", "dropped"}
    assert holdings.find_lease("given") is given
    holdings.check(given)
