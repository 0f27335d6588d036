"""Totals: each event of each journal counts once, whenever their follower dies, and reports from them are right."""

from __future__ import annotations

import pytest

from agentfsm import Agent, Usage, tool
from agentfsm.core.errors import AgentError
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.telemetry import totals as t
from agentfsm.testing import ScriptedModel, call, say

pytestmark = pytest.mark.anyio


class Priced(ScriptedModel):
    """A scripted model whose output costs a cent per token."""

    name = "priced"

    def cost_usd(self, usage):
        return usage.output_tokens * 0.01


@tool(read_only=True, cost_usd=0.005)
async def search(query: str) -> str:
    """Search."""
    return query


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@pytest.fixture(params=("memory", "sqlite"))
async def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")
    yield made
    await made.aclose()


def script():
    """Return two turns with a call."""
    return say("", call("search", query="x"), usage=Usage(input_tokens=10, output_tokens=2)), say(
        "done", usage=Usage(input_tokens=20, cached_tokens=5, output_tokens=1)
    )


def build(store, **options):
    return Agent(Priced(*script()), tools=[search], name="shop", store=store, **options)


async def fill(store, count):
    """Execute runs of several users, one with a sub-agent, and one that waits for an approval."""
    for index in range(count):
        await build(store).run(f"task {index}", user=f"u{index % 3}", tenant=None if index % 2 else "acme")
    child = Agent(Priced(say("ok", usage=Usage(output_tokens=3))), name="child", store=store)
    asks = say("", call("child", query="?"), usage=Usage(output_tokens=1))
    await Agent(Priced(asks, "done"), name="parent", tools=[child.as_tool()], store=store).run("x", id="parent")
    paying = Agent(Priced(say("", call("pay", cents=1)), "paid"), name="payer", tools=[pay], store=store)
    await paying.run("x", id="waits")


async def fold(store):
    """Return what all journals give, by cell with users, apart from any totals."""
    cells = {}
    for row in await store.runs(limit=10_000):
        stored = await store.read(row.id)
        root = await t.read_root_agent(store, stored.header)
        before = await t.read_previous_header(store, stored.header)
        for subject, cell in t.measure_cells(stored, root=root, previous=before).items():
            for series, fields in cell.items():
                found = cells.setdefault(subject, {}).setdefault(series, {})
                for name, value in fields.items():
                    found[name] = found.get(name, 0) + value
    return {
        subject: {series: t._join_slots(fields) for series, fields in cell.items()} for subject, cell in cells.items()
    }


async def counted(store, level="user"):
    status = await t.read_status(store)
    return {subject: cell async for subject, cell in t.iter_cells(store, status.generation, level)}


async def test_they_are_the_sums_of_the_journals(store):
    """Of hours with users; those without users and of days have the same sums, and a second look adds nothing."""
    await fill(store, 5)
    totals = t.Totals(store)
    await totals.catch_up()
    await t.Totals(store).catch_up()
    assert await counted(store) == await fold(store)
    status = await t.read_status(store)
    assert (status.is_whole, status.uncounted) == (True, 0)
    for level in ("hour", "day"):
        cells = await counted(store, level)
        assert sum(cell['["events"]']["n"] for cell in cells.values()) == sum(
            row.version for row in await store.runs(limit=100)
        )
        assert {subject.user for subject in cells} == {""}
    await build(store).run("later")
    await totals.catch_up()
    assert await counted(store) == await fold(store)


class Killed(Exception):
    """Stands for the end of a process."""


class Passage:
    """A store that stops its caller at one of its operations: before it is done, or after."""

    def __init__(self, store, stop_at, after, act):
        self._store, self._stop_at, self._after, self._act, self.count = store, stop_at, after, act, 0

    def __getattr__(self, name):
        member = getattr(self._store, name)
        if name not in {"read_record", "write_record", "take_unread", "confirm_read", "read", "followers"}:
            return member

        async def passed(*args, **options):
            self.count += 1
            is_chosen = self.count == self._stop_at
            if is_chosen and not self._after:
                await self._act()
            found = await member(*args, **options)
            if is_chosen and self._after:
                await self._act()
            return found

        return passed


@pytest.fixture
def no_lease(monkeypatch):
    """Let another process count at once, and many small batches be made."""
    monkeypatch.setattr(t, "FOLLOWER_LEASE_S", 0.0)
    monkeypatch.setattr(t, "BATCH", 2)
    monkeypatch.setattr(t, "_MAX_EVENTS", 5)
    monkeypatch.setattr(t, "can_keep_totals", lambda _store: True)


async def play(passage, store):
    """Count in a process, execute more, and count again."""
    totals = t.Totals(passage)
    await totals.catch_up()
    await build(store).run("later", user="u1")
    await totals.catch_up()


@pytest.mark.parametrize("after", [False, True])
async def test_a_process_that_is_killed_neither_loses_nor_doubles(after, no_lease):
    """At each operation in turn; the next process goes on."""

    async def die():
        raise Killed

    stop_at = 0
    while True:
        stop_at += 1
        store = MemoryStore()
        await fill(store, 3)
        passage = Passage(store, stop_at, after, die)
        try:
            await play(passage, store)
        except* Killed:
            pass
        await t.Totals(store).catch_up()
        assert await counted(store) == await fold(store), stop_at
        if passage.count < stop_at:
            break
    assert stop_at > 60


async def test_a_process_that_was_overtaken_counts_nothing_twice(no_lease):
    """It stops at each operation in turn, while another one counts all, and a run changes."""
    stop_at = 0
    while True:
        stop_at += 1
        store = MemoryStore()
        await fill(store, 3)

        async def overtake(store=store):
            await t.Totals(store).catch_up()
            await build(store).run("meanwhile", user="u2")
            await t.Totals(store).catch_up()

        passage = Passage(store, stop_at, stop_at % 2, overtake)
        try:
            await play(passage, store)
        except AgentError:  # the lease, or the record, is that of the other one
            pass
        await t.Totals(store).catch_up()
        assert await counted(store) == await fold(store), stop_at
        if passage.count < stop_at:
            break
