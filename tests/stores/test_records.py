"""Records of several processes, one of which is killed, and what is left of them in the database."""

import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from record_writer import count

ARGUMENTS = {"sqlite": ("path", ""), "postgres": ("shared_postgres", "schema"), "redis": ("redis_url", "")}


def start_child(kind, address, schema):
    command = [sys.executable, Path(__file__).with_name("record_writer.py"), kind, str(address), schema]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_two_processes_lose_no_change(place, request):
    """Both count in the same records, in opposite orders, until one is killed: each count that was told is there."""
    kind = request.node.callspec.params["empty_place"]
    address, schema = (request.getfixturevalue(name) if name else "" for name in ARGUMENTS[kind])
    store = place.make()
    await store.write_record("count", "x", {}, revision=0)
    with start_child(kind, address, schema) as child:
        first = child.stdout.readline()
        await count(store, "parent", ("x", "y"), 25)
        child.kill()
        lines = [first, *child.stdout]
    told = {}
    for line in lines:
        if line.endswith("\n"):
            key, number = line.split()
            told[key] = int(number)
    for key in ("x", "y"):
        found = await store.read_record("count", key)
        assert found.value["parent"] == 25
        # The last write may be acknowledged by the database and not told.
        assert found.value.get("child", 0) - told.get(key, 0) in (0, 1)


async def test_expired_records_leave_the_database(place):
    """`prune` deletes them, in portions."""
    store = place.make()
    soon = await store.now() + 0.5
    async with anyio.create_task_group() as group:
        for number in range(210):
            expires_at = soon if number else None
            group.start_soon(
                lambda n=number, at=expires_at: store.write_record("k", str(n), n, revision=0, expires_at=at)
            )
    await anyio.sleep(soon - await store.now() + 0.05 if soon > await store.now() else 0)
    await store.prune(0)
    assert place.count_records() == 1


async def test_a_cache_stays_small_without_a_prune(place):
    """A write with an expiry deletes expired records."""
    store = place.make()
    past = await store.now() - 1
    for number in range(30):
        await store.write_record("k", str(number), number, revision=0, expires_at=past)
    assert place.count_records() <= 1
