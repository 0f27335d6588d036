"""What the version before has written is claimed, waited for and read as it was meant."""

from __future__ import annotations

import pytest

from agentfsm.core.errors import LeaseHeldError
from agentfsm.core.events import Observed
from agentfsm.ports import Filter
from agentfsm.testing.conformance.driving import FAR, Driver, claimable, finished, header, ids, rests, words

FAR_S = 3600.0


async def test_what_the_version_before_has_written_goes_on(place):
    """Open, waiting and finished runs are what they were; a living owner keeps its lease, and may end it."""
    old = place.make(lease_s=FAR_S)
    await (await Driver.of(old, header("open", agent="a", created_at=1.0))).release()
    await rests(old, header("waits", agent="a"))
    await rests(old, header("expired", agent="a"), expires_at=1.0)
    await rests(old, header("news", agent="a"))
    await old.post("news", "k", words("x"))
    await rests(old, header("seen", agent="a"))
    row = await old.post("seen", "k", words("x"))
    await (await Driver.again(old, "seen")).release(seen=row.number)
    await rests(old, header("timed", agent="a"))
    await old.post("timed", "k", words("x", await old.now() + FAR_S))
    await finished(old, header("over", agent="a"))
    await (await Driver.of(old, header("child", agent="a", parent="open"))).release()
    driven = await Driver.of(old, header("driven", agent="a"))
    version = place.version()
    place.age()
    assert place.version() == version - 1

    new = place.make()
    claim = await new.claim("a", limit=100)
    assert place.version() == version
    assert {lease.run_id for lease in claim.leases} == {"open", "expired", "news"}
    assert not claim.has_suspects
    assert {lease.crashes for lease in claim.leases} == {0}
    assert ids(await new.runs(Filter(agent="a", state="done"))) == ["over"]
    lines = {line.id: line for line in await new.runs()}
    assert {run_id for run_id, line in lines.items() if line.driven} == {"open", "expired", "news", "driven"}
    assert lines["timed"].ready_at == pytest.approx(await new.now() + FAR_S, abs=60)
    assert (lines["waits"].ready_at, lines["seen"].ready_at, lines["child"].ready_at) == (FAR, FAR, None)
    with pytest.raises(LeaseHeldError):
        await new.lease("driven")
    assert await driven.append(Observed()).wait()
    await driven.release()
    await new.post("waits", "k", words("x"))
    assert set(await claimable(new, "a")) == {"driven", "waits"}
    assert (await new.lease("child")).version == 0


async def test_the_crashes_of_the_version_before_count_on(place):
    """A run whose owner died there, and again here, is under suspicion; it was alone in neither."""
    old = place.make()
    drivers = [await Driver.of(old, header(run_id, agent="a")) for run_id in ("r1", "r2")]
    place.age()
    new = place.make()
    for driver in drivers:
        with pytest.raises(LeaseHeldError):
            await new.lease(driver.run.id)
    await old.aclose()
    claim = await new.claim("a", limit=100)
    assert [lease.run_id for lease in claim.leases] == ["r1", "r2"]
    assert {lease.crashes for lease in claim.leases} == {0}
