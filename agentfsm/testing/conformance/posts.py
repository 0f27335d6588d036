"""Posts to the inbox of a run, and their consumption."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import attrs
import pytest

from agentfsm.core.errors import ConflictError, RunNotFoundError
from agentfsm.core.events import AnswerDrafted, Failed, Observed
from agentfsm.core.inbox import (
    Approve,
    Cancel,
    GiveInput,
    Input,
    InputKind,
    Pause,
    Priority,
    Reject,
    Rerun,
    Settle,
    Wake,
)
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import AssistantMessage, ImagePart, Outcome, TextPart
from agentfsm.testing.conformance.helpers import (
    FAR_FUTURE,
    FINAL_ANSWER,
    HOSTILE_TEXT,
    LeasedRun,
    create_finished_run,
    make_header,
    make_input,
)

if TYPE_CHECKING:
    from agentfsm.core.inbox import InboxItem
    from agentfsm.ports.store import Store


class InboxConformance:
    """Posts to the inbox of a run, and their consumption."""

    # The inbox.

    async def test_a_post_waits_in_the_inbox(self, store: Store) -> None:
        """Rows are read in the order of their posts, with the numbers that `post` returned."""
        await LeasedRun.create(store)
        rows = [await store.post("r1", key, make_input(key)) for key in ("k3", "k1", "k10", "k4", "k2")]
        assert await store.inbox("r1") == tuple(rows)
        numbers = [row.number for row in rows]
        assert numbers == sorted(set(numbers))
        assert numbers[0] > 0

    async def test_an_inbox_is_bounded(self, store: Store) -> None:
        """While 1,000 posts wait, input is refused; decisions are always accepted."""
        driver = await LeasedRun.create(store)
        most = 1_000
        async with anyio.create_task_group() as tasks:
            for number in range(most):
                tasks.start_soon(
                    store.post, "r1", f"k{number}", make_input("more", due_at=FAR_FUTURE if number % 2 else None)
                )
        with pytest.raises(ConflictError, match=r"1,000 posts waiting"):
            await store.post("r1", "one more", make_input("more"))
        assert (await store.post("r1", "k7", make_input("more", due_at=FAR_FUTURE))).key == "k7"  # a repeated post
        await store.post("r1", "approval:t1.0", Approve(call_id="t1.0"))
        await store.post("r1", "cancel", Cancel())
        rows = await store.inbox("r1")
        assert len(rows) == most + 2
        await driver.append(Observed(), taken=[row.number for row in rows[:3]]).wait()
        await store.post("r1", "one more", make_input("more"))

    async def test_every_item_comes_back_as_it_was(self, store: Store) -> None:
        """All fields of all items are stored."""
        items: list[InboxItem] = [
            Input(kind=InputKind.WEBHOOK, parts=(TextPart(text=HOSTILE_TEXT), ImagePart(url="https://example.org/x"))),
            Input(parts=(TextPart(text="later"),), priority=Priority.LOW, due_at=FAR_FUTURE + 0.25),
            Approve(call_id="t1.0", by="ann", arguments='{"a":1}', digest="d"),
            Reject(call_id="t1.0", by="ann", message=HOSTILE_TEXT),
            Settle(call_id="t1.0", by="ann", outcome=Outcome.FAILED, content=HOSTILE_TEXT),
            GiveInput(call_id="t1.0", by="ann", answers={"who": {"a": HOSTILE_TEXT}, "pay": None}, digest="d"),
            Rerun(call_id="t1.0", by="ann"),
            Cancel(by="ann", message=HOSTILE_TEXT),
            Pause(by="ann", message=HOSTILE_TEXT),
            Wake(run_id="r1.t1.0"),
        ]
        await LeasedRun.create(store)
        for number, item in enumerate(items):
            await store.post("r1", f"k{number}", item)
        assert [row.item for row in await store.inbox("r1")] == items

    async def test_the_first_post_of_a_key_wins(self, store: Store) -> None:
        """A second, equal decision returns the first one and adds no row."""
        await LeasedRun.create(store)
        first = await store.post("r1", "approval:t1.0", Approve(call_id="t1.0", by="ann"))
        second = await store.post("r1", "approval:t1.0", Approve(call_id="t1.0", by="bob"))
        assert second == first
        assert await store.inbox("r1") == (first,)

    async def test_the_opposite_decision_is_refused(self, store: Store) -> None:
        """A second, different decision is refused, with the author of the first one in the error."""
        await LeasedRun.create(store)
        await store.post("r1", "approval:t1.0", Approve(call_id="t1.0", by="ann"))
        with pytest.raises(ConflictError, match="ann"):
            await store.post("r1", "approval:t1.0", Reject(call_id="t1.0", by="bob"))

    async def test_a_decision_is_what_it_comes_down_to(self, store: Store) -> None:
        """Decisions with the same effect are equal, regardless of the author; other outcomes or arguments differ."""
        await LeasedRun.create(store)
        sent = Settle(call_id="t1.0", by="ann", outcome=Outcome.DONE, content="sent")
        edited = Approve(call_id="t1.1", by="ann", arguments='{"a":1}')
        first = {"k0": await store.post("r1", "k0", sent), "k1": await store.post("r1", "k1", edited)}
        assert await store.post("r1", "k0", attrs.evolve(sent, by="bob")) == first["k0"]
        assert await store.post("r1", "k1", attrs.evolve(edited, by="bob")) == first["k1"]
        given = GiveInput(call_id="t1.2", by="ann", answers={"a": {"n": 1}})
        first["k2"] = await store.post("r1", "k2", given)
        assert await store.post("r1", "k2", attrs.evolve(given, by="bob")) == first["k2"]
        others: tuple[tuple[str, InboxItem], ...] = (
            ("k0", attrs.evolve(sent, outcome=Outcome.FAILED)),
            ("k0", attrs.evolve(sent, content="lost")),
            ("k0", Rerun(call_id="t1.0")),
            ("k1", attrs.evolve(edited, arguments=None)),
            ("k2", attrs.evolve(given, answers={"a": {"n": True}})),
            ("k2", attrs.evolve(given, answers={"a": None})),
        )
        for key, item in others:
            with pytest.raises(ConflictError, match="ann"):
                await store.post("r1", key, item)
        assert await store.inbox("r1") == tuple(first.values())

    async def test_of_many_posts_of_a_key_one_wins(self, store: Store) -> None:
        """Many concurrent posts of a key return the same winner."""
        await LeasedRun.create(store)
        winners = []

        async def race(number: int) -> None:
            winners.append(await store.post("r1", "k", make_input(str(number))))

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(race, number)
        assert len(winners) == 30
        assert winners == [winners[0]] * 30

    async def test_keys_are_of_one_run(self, store: Store) -> None:
        """A key is unique within its run only."""
        await LeasedRun.create(store, make_header("r1"))
        await LeasedRun.create(store, make_header("r2"))
        await store.post("r1", "k", make_input("one"))
        await store.post("r2", "k", make_input("two"))
        assert [row.item for row in await store.inbox("r2")] == [make_input("two")]

    async def test_awkward_keys_are_keys(self, store: Store) -> None:
        """A key may contain any text."""
        await LeasedRun.create(store)
        row = await store.post("r1", HOSTILE_TEXT, make_input("x"))
        assert (row.key, await store.inbox("r1")) == (HOSTILE_TEXT, (row,))

    async def test_taken_rows_are_struck(self, store: Store) -> None:
        """An append removes the rows passed as `taken`, and no others."""
        driver = await LeasedRun.create(store)
        rows = [await store.post("r1", f"k{n}", make_input(str(n))) for n in range(4)]
        await driver.append(Observed(), taken=[rows[0].number, rows[2].number]).wait()
        assert await store.inbox("r1") == (rows[1], rows[3])

    async def test_a_key_stays_taken(self, store: Store) -> None:
        """A repeated post of a consumed row returns that row and adds none."""
        driver = await LeasedRun.create(store)
        row = await store.post("r1", "k", make_input("x"))
        await driver.append(Observed(), taken=[row.number]).wait()
        assert await store.post("r1", "k", make_input("x")) == row
        assert await store.inbox("r1") == ()

    async def test_numbers_grow_after_rows_were_taken(self, store: Store) -> None:
        """Numbers of rows are never reused."""
        driver = await LeasedRun.create(store)
        first = await store.post("r1", "k1", make_input("x"))
        await driver.append(Observed(), taken=[first.number]).wait()
        assert (await store.post("r1", "k2", make_input("y"))).number > first.number

    async def test_unknown_runs_are_said_to_be_unknown(self, store: Store) -> None:
        """Operations on an unknown run raise RunNotFoundError and create no run."""
        for operation in (
            store.post("nowhere", "k", make_input("x")),
            store.inbox("nowhere"),
            store.read("nowhere"),
            store.delete("nowhere"),
        ):
            with pytest.raises(RunNotFoundError, match="nowhere"):
                await operation
        assert await store.runs() == ()

    async def test_a_finished_run_takes_no_posts(self, store: Store) -> None:
        """Posts to a run that is done or failed are refused."""
        await create_finished_run(store)
        with pytest.raises(ConflictError, match="over"):
            await store.post("r1", "k", make_input("x"))
        failed = await LeasedRun.create(store, make_header("r2"))
        await failed.append(Failed(reason=StopReason.CANCELLED, message="")).wait()
        with pytest.raises(ConflictError, match="cancelled"):
            await store.post("r2", "k", make_input("x"))

    async def test_a_finished_run_still_shows_winners(self, store: Store) -> None:
        """A repeated decision returns the first one, even after the run is over."""
        driver = await LeasedRun.create(store)
        row = await store.post("r1", "k", Approve(call_id="t1.0", by="ann"))
        await driver.append(Observed(), FINAL_ANSWER, taken=[row.number]).wait()
        assert await store.post("r1", "k", Approve(call_id="t1.0", by="bob")) == row

    async def test_a_run_does_not_end_over_its_inbox(self, store: Store) -> None:
        """A final append writes nothing and returns False if the inbox has rows."""
        driver = await LeasedRun.create(store)
        await driver.append(Observed()).wait()
        row = await store.post("r1", "k", make_input("wait!"))
        before = driver.run
        assert await driver.append(FINAL_ANSWER, final=True).wait() is False
        assert ((await store.read("r1")).events, await store.inbox("r1")) == ((Observed(),), (row,))
        driver.run = before
        drafted = AnswerDrafted(message=AssistantMessage(text="done"))
        assert await driver.append(drafted, taken=[row.number]).wait()

    async def test_a_final_append_may_take_what_is_left(self, store: Store) -> None:
        """Rows consumed by a final append do not block it; all others do."""
        driver = await LeasedRun.create(store)
        rows = [await store.post("r1", f"k{n}", make_input(str(n))) for n in range(2)]
        before = driver.run
        assert await driver.append(Observed(), FINAL_ANSWER, taken=[rows[0].number], final=True).wait() is False
        assert len(await store.inbox("r1")) == 2
        driver.run = before
        taken = [row.number for row in rows]
        assert await driver.append(Observed(), FINAL_ANSWER, taken=taken, final=True).wait() is True

    async def test_an_empty_inbox_lets_a_run_end(self, store: Store) -> None:
        """A final append is written if the inbox is empty, also after rows were consumed."""
        driver = await LeasedRun.create(store)
        row = await store.post("r1", "k", make_input("x"))
        await driver.append(Observed(), taken=[row.number]).wait()
        assert await driver.append(FINAL_ANSWER, final=True).wait() is True

    async def test_input_at_the_last_moment_is_not_lost(self, store: Store) -> None:
        """Of a concurrent post and final append, exactly one succeeds, so that no accepted post stays unread."""
        for number in range(20):
            driver = await LeasedRun.create(store, make_header(f"r{number}"))
            await driver.append(Observed()).wait()
            posted, ended = await self._race_post_and_end(driver, post_first=bool(number % 2))
            assert posted is not ended

    async def _race_post_and_end(self, driver: LeasedRun, *, post_first: bool) -> tuple[bool, bool]:
        outcome = {}

        async def post() -> None:
            try:
                await driver.store.post(driver.run.id, "k", make_input("x"))
            except ConflictError:
                outcome["posted"] = False
            else:
                outcome["posted"] = True

        async def end() -> None:
            outcome["ended"] = await driver.append(FINAL_ANSWER, final=True).wait()

        async with anyio.create_task_group() as group:
            for racer in (post, end) if post_first else (end, post):
                group.start_soon(racer)
        return outcome["posted"], outcome["ended"]

    # Time and the inbox.

    async def test_a_post_that_comes_too_late_is_refused(self, store: Store) -> None:
        """A decision after its deadline is refused: it is not in the inbox, and its key stays free."""
        await LeasedRun.create(store)
        now = await store.now()
        with pytest.raises(ConflictError, match="time"):
            await store.post("r1", "k", Approve(call_id="t1.0", by="ann"), before=now - 1.0)
        assert await store.inbox("r1") == ()
        row = await store.post("r1", "k", Reject(call_id="t1.0", by="bob"))
        assert await store.inbox("r1") == (row,)

    async def test_a_post_in_time_is_accepted(self, store: Store) -> None:
        """A decision before its deadline is accepted."""
        await LeasedRun.create(store)
        row = await store.post("r1", "k", Approve(call_id="t1.0"), before=await store.now() + 3600.0)
        assert await store.inbox("r1") == (row,)

    async def test_who_comes_too_late_is_shown_the_winner(self, store: Store) -> None:
        """A repeated decision returns the first one, even after the deadline."""
        await LeasedRun.create(store)
        row = await store.post("r1", "k", Approve(call_id="t1.0", by="ann"))
        assert await store.post("r1", "k", Approve(call_id="t1.0", by="bob"), before=1.0) == row
        with pytest.raises(ConflictError, match="ann"):
            await store.post("r1", "k", Reject(call_id="t1.0", by="bob"), before=1.0)

    async def test_a_timer_does_not_hold_up_the_end(self, store: Store) -> None:
        """A timer that is not due is in the inbox and counts in `inbox_head`, but does not block a final append."""
        driver = await LeasedRun.create(store)
        row = await store.post("r1", "k", make_input("later", FAR_FUTURE))
        assert (await store.inbox("r1"), driver.lease.inbox_head) == ((row,), row.number)
        assert await driver.append(Observed(), FINAL_ANSWER, final=True).wait() is True

    async def test_a_timer_that_is_due_holds_up_the_end(self, store: Store) -> None:
        """A due timer blocks a final append until it is consumed."""
        driver = await LeasedRun.create(store)
        for number in range(3):
            await store.post("r1", f"later{number}", make_input("later", FAR_FUTURE))
        row = await store.post("r1", "k", make_input("now", await store.now() - 1.0))
        before = driver.run
        assert await driver.append(Observed(), FINAL_ANSWER, final=True).wait() is False
        driver.run = before
        assert await driver.append(Observed(), FINAL_ANSWER, taken=[row.number], final=True).wait() is True

    async def test_a_timer_may_be_taken_before_its_time(self, store: Store) -> None:
        """A timer may be consumed before its time; the other rows still block a final append."""
        driver = await LeasedRun.create(store)
        later = await store.post("r1", "later", make_input("later", FAR_FUTURE))
        row = await store.post("r1", "k", make_input("now"))
        before = driver.run
        assert await driver.append(Observed(), FINAL_ANSWER, taken=[later.number], final=True).wait() is False
        driver.run = before
        assert await driver.append(Observed(), taken=[later.number]).wait()
        assert await store.inbox("r1") == (row,)
