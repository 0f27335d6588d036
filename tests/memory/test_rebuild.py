"""A memory is a projection of the journals: derived again, it is the same, whatever happened to it."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm import Agent, ConflictError, Limits, RunNotFoundError, Runs, tool
from agentfsm.memory import Learner, Memory
from agentfsm.ports import Clock
from agentfsm.ports.memory_items import MemoryItem
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say

USERS = ("ann", "bob")
SLOTS = ("", "home", "work")
DAY = 86_400.0


@attrs.define(eq=False)
class Calendar(Clock):
    """A clock that a test moves by hand."""

    time: float = 1_800_000_000.0

    def now(self) -> float:
        return self.time

    monotonic = now


@tool(read_only=True, reads_untrusted=True)
def read_page() -> str:
    """Read a web page."""
    return "a page"


@attrs.define(eq=False)
class Diary:
    """A store and a memory, to which things happen."""

    store: MemoryStore
    memory: Memory
    clock: Calendar
    taught: int = 0
    runs: list[str] = attrs.field(factory=list)

    async def work(self, user: str, end: str, slots: list[str], session: str | None) -> None:
        """Run an agent, and learn from the run."""
        self.clock.time += DAY
        replies = {
            "done": ["The report."],
            "untrusted": [say("", call("read_page")), "The report."],
            "failed": [say("", call("read_page"))],
        }[end]
        limits = Limits(turns=1 if end == "failed" else 3)
        agent = Agent(ScriptedModel(*replies), tools=[read_page], store=self.store, limits=limits, clock=self.clock)
        run_id = f"r{len(self.runs)}"
        self.runs.append(run_id)
        await agent.run("Write a report", user=user, session=session, id=run_id)
        facts = []
        for slot in slots:
            self.taught += 1
            action = ("add", "update", "delete", "none")[self.taught % 4]  # of one of the known items, if there are any
            facts.append({"text": f"word {self.taught}", "slot": slot, "action": action, "item": self.taught % 3})
        answer = json.dumps({"approach": "wrote it", "lessons": [], "facts": facts, "importance": 0.3})
        await Learner(self.memory, ScriptedModel(answer), self.store).learn(run_id)

    async def rate(self, number: int, rating: int) -> None:
        """Rate a run, and learn from it again."""
        if self.runs:
            run_id = self.runs[number % len(self.runs)]
            try:
                await Runs(self.store).feedback(run_id, rating=rating)
                await Learner(self.memory, ScriptedModel(), self.store).learn(run_id)
            except RunNotFoundError:
                return

    async def act_on_item(self, user: str, number: int, act: str) -> None:
        """Correct, release or forget an item of a user."""
        self.clock.time += 1
        mine = self.memory.for_(user=user)
        items = await mine.read(include_held=True)
        if items:
            item_id = items[number % len(items)].id
            match act:
                case "revise":
                    self.taught += 1
                    await mine.revise(item_id, text=f"word {self.taught}")
                case "release":
                    await mine.release([item_id])
                case _:
                    await mine.forget([item_id])

    async def remember(self, user: str, slot: str, day: int) -> None:
        """Tell the memory directly."""
        self.clock.time += 1
        self.taught += 1
        await self.memory.for_(user=user).remember(
            f"word {self.taught}", slot=slot, valid_from=self.clock.time - day * DAY
        )

    async def forget_user(self, user: str) -> None:
        self.clock.time += 1
        await self.memory.for_(user=user).forget_all()

    async def delete_run(self, number: int) -> None:
        """Delete a run, and what it taught."""
        if self.runs:
            try:
                await self.store.delete(self.runs[number % len(self.runs)])
            except (ConflictError, RunNotFoundError):  # a later run continues it, or it is gone
                return
            await self.memory.forget_deleted_runs(self.store)

    async def look(self) -> dict[str, object]:
        """Return all that can be read: the items, what is found now, and what was found on earlier days."""
        seen: dict[str, object] = {}
        for user in USERS:
            mine = self.memory.for_(user=user)
            seen[f"items of {user}"] = [without_place(item) for item in await mine.read(include_held=True)]
            for day in (None, 1, 3, 6):
                when = None if day is None else self.clock.time - day * DAY
                found = await mine.recall("word report", k=50, as_of=when)
                seen[f"{user}, {day} days ago"] = {each.item.id for each in found}
        return seen


def without_place(item: MemoryItem) -> MemoryItem:
    return attrs.evolve(item, place=0)


user, number = st.sampled_from(USERS), st.integers(0, 20)
step = st.one_of(
    st.tuples(
        st.just(Diary.work),
        user,
        st.sampled_from(["done", "done", "untrusted", "failed"]),
        st.lists(st.sampled_from(SLOTS), max_size=3),
        st.sampled_from([None, "talk"]),
    ),
    st.tuples(st.just(Diary.rate), number, st.integers(1, 5)),
    st.tuples(st.just(Diary.act_on_item), user, number, st.sampled_from(["revise", "release", "forget"])),
    st.tuples(st.just(Diary.remember), user, st.sampled_from(SLOTS), st.integers(0, 9)),
    st.tuples(st.just(Diary.forget_user), user),
    st.tuples(st.just(Diary.delete_run), number),
)
# So that there is something to rate, correct, release and forget.
BEGINNING = (
    (Diary.work, "ann", "done", ["home", ""], "talk"),
    (Diary.work, "ann", "untrusted", ["home"], "talk"),
    (Diary.work, "bob", "failed", ["work", "work"], None),
)


@settings(max_examples=settings.default.max_examples // 4)  # an example is several runs
@given(st.lists(step, min_size=3, max_size=9))
def test_a_rebuild_is_the_same_memory(steps):
    """After any runs, ratings, corrections, releases and deletions: the same items, now and as of earlier days."""
    anyio.run(live, [*BEGINNING, *steps])


async def live(steps):
    with TemporaryDirectory() as folder:
        clock = Calendar()
        diary = Diary(MemoryStore(), Memory(Path(folder, "memory.db"), clock=clock), clock)
        for act, *arguments in steps:
            await act(diary, *arguments)
        before = await diary.look()
        await diary.memory.rebuild(diary.store)
        assert await diary.look() == before
        await diary.memory.rebuild(diary.store)
        assert await diary.look() == before
        await diary.memory.aclose()
