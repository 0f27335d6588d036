"""What the version before has written is claimed, waited for and read as it was meant."""

from __future__ import annotations

import pytest

from agentfsm import LeaseHeldError, LeaseLostError, TooNewError
from agentfsm.core.events import Observed
from agentfsm.ports import Filter
from agentfsm.stores.rules import MINOR_VERSIONS, UNRECORDED_FORMAT
from agentfsm.testing.conformance.helpers import (
    FAR_FUTURE,
    LeasedRun,
    check_refused,
    create_finished_run,
    create_waiting_run,
    list_claimable,
    list_ids,
    make_header,
    make_input,
)

FAR_S = 3600.0


@pytest.mark.parametrize("steps", [1, 2])
async def test_what_the_version_before_has_written_goes_on(place, steps):
    """Open, waiting and finished runs are what they were; a living owner keeps its lease, and may end it."""
    old = place.make(lease_s=FAR_S)
    await (await LeasedRun.create(old, make_header("open", agent="a", created_at=1.0))).release()
    await create_waiting_run(old, make_header("waits", agent="a"))
    await create_waiting_run(old, make_header("expired", agent="a"), expires_at=1.0)
    await create_waiting_run(old, make_header("news", agent="a"))
    await old.post("news", "k", make_input("x"))
    await create_waiting_run(old, make_header("seen", agent="a"))
    row = await old.post("seen", "k", make_input("x"))
    await (await LeasedRun.resume(old, "seen")).release(inbox_read=row.number)
    await create_waiting_run(old, make_header("timed", agent="a"))
    await old.post("timed", "k", make_input("x", await old.now() + FAR_S))
    await create_finished_run(old, make_header("over", agent="a"))
    await (await LeasedRun.create(old, make_header("child", agent="a", parent="open"))).release()
    driven = await LeasedRun.create(old, make_header("driven", agent="a"))
    version = place.version()
    place.age(steps)
    assert place.version() < version

    new = place.make()
    claim = await new.claim("a", limit=100)
    assert place.version() == version
    # Workers of older scripts of Redis cannot notice the upgrade, so they lose their runs.
    lost = {"driven"} if place.frees_runs and steps == 1 else set()
    assert {lease.run_id for lease in claim.leases} == {"open", "expired", "news"} | lost
    assert not claim.has_suspects
    assert {lease.crashes for lease in claim.leases} == {0}
    assert list_ids(await new.runs(Filter(agent="a", state="done"))) == ["over"]
    lines = {line.id: line for line in await new.runs()}
    assert {run_id for run_id, line in lines.items() if line.driven} == {"open", "expired", "news", "driven"}
    assert lines["timed"].ready_at == pytest.approx(await new.now() + FAR_S, abs=60)
    assert {line.format for line in lines.values()} == {UNRECORDED_FORMAT}
    assert (lines["waits"].ready_at, lines["seen"].ready_at, lines["child"].ready_at) == (FAR_FUTURE, FAR_FUTURE, None)
    with pytest.raises(LeaseHeldError):
        await new.lease("driven")
    if lost:
        await check_refused(driven.append(Observed()), LeaseLostError)
    else:
        assert await driven.append(Observed()).wait()
        await driven.release()
    await new.post("waits", "k", make_input("x"))
    assert set(await list_claimable(new, "a")) == {"driven", "waits"} - lost
    assert (await new.lease("child")).version == 0


@pytest.mark.parametrize("steps", [1, 2])
async def test_the_crashes_of_the_version_before_count_on(place, steps):
    """A run whose owner died there, and again here, is under suspicion; it was alone in neither."""
    old = place.make()
    drivers = [await LeasedRun.create(old, make_header(run_id, agent="a")) for run_id in ("r1", "r2")]
    place.age(steps)
    new = place.make()
    for driver in drivers:
        if not (place.frees_runs and steps == 1):
            with pytest.raises(LeaseHeldError):
                await new.lease(driver.run.id)
    await old.aclose()
    claim = await new.claim("a", limit=100)
    assert [lease.run_id for lease in claim.leases] == ["r1", "r2"]
    assert {lease.crashes for lease in claim.leases} == {0}


async def test_a_follower_reads_what_the_version_before_has_written(place):
    """Runs that were over, or had no owner, have no number of a change there."""
    old = place.make()
    await create_finished_run(old, make_header("over"))
    await create_waiting_run(old, make_header("waits"))
    driven = await LeasedRun.create(old, make_header("driven"))
    await driven.append(Observed()).wait()
    place.age(1)
    new = place.make()
    async with new.follow("f", wait=False) as follower:
        found = {(each.run_id, each.version) async for each in follower}
        assert found == {("over", 2), ("waits", 3)} | ({("driven", 1)} if place.frees_runs else set())
    await driven.release()
    async with new.follow("g", start="now", wait=False) as follower:
        assert [each.run_id async for each in follower] == []


async def test_records_come_with_a_minor_version(place):
    """A store of the version before goes on beside one that has them."""
    old = place.make()
    await create_finished_run(old, make_header("before"))
    version = place.version()
    place.age(0)
    new = place.make()
    written = await new.write_record("kind", "key", {"a": 1}, revision=0)
    assert place.version() == version
    await create_finished_run(old, make_header("beside"))
    assert {*list_ids(await new.runs())} == {"before", "beside"}
    assert await place.make().read_record("kind", "key") == written


async def test_a_newer_minor_version_is_accepted_and_a_newer_major_one_refused(place):
    """Also by a store that was open before: it writes nothing more."""
    store = place.make()
    await create_finished_run(store, make_header("before"))
    version = place.version()
    place.set_version(version + 1)
    await create_finished_run(store, make_header("minor"))
    await create_finished_run(place.make(), make_header("opened"))
    assert place.version() == version + 1
    place.set_version(version + MINOR_VERSIONS)
    for each in (store, place.make()):
        with pytest.raises(TooNewError, match=r"newer agentfsm .*\.\d, this one knows up to .*\.x\): upgrade"):
            await each.create(make_header("major"))
    place.set_version(version)
    assert list_ids(await place.make().runs()) == ["opened", "minor", "before"]
