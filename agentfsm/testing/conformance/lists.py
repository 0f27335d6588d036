"""Lists of runs, claims by workers, and sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import anyio
import attrs
import pytest

from agentfsm.core.errors import ConflictError, LeaseHeldError, MisuseError, RunNotFoundError
from agentfsm.core.events import ApprovalAsked, ApprovalGiven, Failed, Observed, Paused, Resumed, ToolsChosen
from agentfsm.core.inbox import Approve, Cancel
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, ToolCall
from agentfsm.core.run import begin_run
from agentfsm.ports.store import Filter
from agentfsm.testing.conformance.helpers import (
    FAR_FUTURE,
    FINAL_ANSWER,
    LeasedRun,
    build_answer,
    create_finished_run,
    create_waiting_run,
    list_claimable,
    list_ids,
    make_header,
    make_input,
    wait_until,
)

if TYPE_CHECKING:
    from agentfsm.ports.store import RunOrder, Store


class ListConformance:
    """Lists of runs, claims by workers, and sessions."""

    # Lists.

    async def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        """An empty store lists no runs."""
        assert await store.runs() == ()

    async def test_the_list_is_newest_first(self, store: Store) -> None:
        """Runs are listed by creation time, newest first; at equal times the one created last comes first."""
        for run_id, at in (("a", 5.0), ("b", 9.0), ("c", 7.0), ("d", 7.0)):
            await LeasedRun.create(store, make_header(run_id, created_at=at))
        assert [summary.id for summary in await store.runs()] == ["b", "d", "c", "a"]

    async def test_the_list_can_be_cut(self, store: Store) -> None:
        """`limit` returns the newest runs."""
        for number in range(5):
            await LeasedRun.create(store, make_header(f"r{number}", created_at=float(number)))
        assert [summary.id for summary in await store.runs(limit=2)] == ["r4", "r3"]
        assert await store.runs(limit=0) == ()

    async def test_the_list_of_a_session(self, store: Store) -> None:
        """The filter `session` returns only runs of that session."""
        for number in range(4):
            await create_finished_run(
                store, make_header(f"r{number}", created_at=float(number), session="ab"[number % 2])
            )
        await create_finished_run(store, make_header("r9"))
        assert [summary.id for summary in await store.runs(Filter(session="a"))] == ["r2", "r0"]
        assert await store.runs(Filter(session="nowhere")) == ()

    async def test_a_line_of_the_list_says_how_the_run_is(self, store: Store) -> None:
        """A summary has the state, turn, version, tokens and times after the latest event, and a shortened prompt."""
        driver = await LeasedRun.create(store, make_header(prompt="p" * 500, agent="sorter", session="s"))
        await driver.append(Observed(at=3.0), *driver.build_turn()).wait()
        (line,) = await store.runs()
        assert (line.id, line.agent, line.session, line.prompt) == ("r1", "sorter", "s", "p" * 200)
        assert (line.state, line.stop_reason, line.waiting, line.driven) == (State.THINK, None, False, True)
        assert (line.turn, line.version, line.tokens) == (1, 6, 7)
        assert (line.created_at, line.updated_at) == (1_800_000_000.0, 7.0)
        await driver.append(attrs.evolve(FINAL_ANSWER, at=8.0)).wait()
        await driver.release()
        (line,) = await store.runs()
        assert (line.state, line.stop_reason, line.driven) == (State.DONE, StopReason.COMPLETED, False)
        assert (line.turn, line.version, line.tokens, line.updated_at) == (2, 7, 17, 8.0)

    async def test_one_run_is_found_by_its_id(self, store: Store) -> None:
        """`Filter(id=...)` lists one run, with its lease, if it matches the other fields too; or none."""
        for name in ("r1", "r2"):
            await create_finished_run(store, make_header(name, agent="a"))
        driver = await LeasedRun.create(store, make_header("r3", agent="a"))
        assert list_ids(await store.runs(Filter(id="r1"))) == ["r1"]
        assert [(line.id, line.driven) for line in await store.runs(Filter(id="r3", agent="a"))] == [("r3", True)]
        assert await store.runs(Filter(id="r1", agent="b")) == ()
        assert await store.runs(Filter(id="r9")) == ()
        assert await store.count(Filter(id="r1")) == 1
        await driver.release()

    async def test_the_list_shows_who_waits(self, store: Store) -> None:
        """`waiting` is True while a run waits for a decision."""
        driver = await LeasedRun.create(store)
        chosen, *_rest = driver.build_turn()
        await driver.append(Observed(), chosen, ApprovalAsked(call_id="t1.0", expires_at=9.0)).wait()
        assert [summary.waiting for summary in await store.runs()] == [True]
        await driver.append(ApprovalGiven(call_id="t1.0")).wait()
        assert [summary.waiting for summary in await store.runs()] == [False]

    async def test_a_line_of_the_list_says_whose_the_run_is(self, store: Store) -> None:
        """A summary has the user and the parent of the run, or None."""
        await create_finished_run(store, make_header("r1", user="ann", parent="r0"))
        await create_finished_run(store, make_header("r2"))
        lines = {line.id: line for line in await store.runs()}
        assert (lines["r1"].user, lines["r1"].parent) == ("ann", "r0")
        assert (lines["r2"].user, lines["r2"].parent, lines["r2"].session) == (None, None, None)

    async def test_a_list_can_be_of_one_kind(self, store: Store) -> None:
        """Each field of a filter selects the runs with its value; None selects all."""
        await create_finished_run(store, make_header("done", created_at=5.0, agent="a", session="s"))
        await create_waiting_run(store, make_header("waits", created_at=4.0, agent="a", user="ann"))
        await (await LeasedRun.create(store, make_header("fresh", created_at=3.0, agent="b", user="ann"))).release()
        await create_finished_run(store, make_header("below", created_at=2.0, agent="b", user="bob", parent="waits"))
        for where, expected in (
            (Filter(), ["done", "waits", "fresh", "below"]),
            (Filter(session="s"), ["done"]),
            (Filter(agent="a"), ["done", "waits"]),
            (Filter(user="ann"), ["waits", "fresh"]),
            (Filter(state=State.DONE), ["done", "below"]),
            (Filter(state=State.ACT), ["waits"]),
            (Filter(state=State.ERROR), []),
            (Filter(waiting=True), ["waits"]),
            (Filter(waiting=False), ["done", "fresh", "below"]),
            (Filter(parent="waits"), ["below"]),
            (Filter(before=4.0), ["fresh", "below"]),
            (Filter(user="' OR 1=1 --"), []),
        ):
            assert list_ids(await store.runs(where)) == expected, where

    async def test_a_filter_wants_all_that_it_says(self, store: Store) -> None:
        """All fields of a filter must match; `limit` counts the matching runs."""
        for number in range(8):
            head = make_header(f"r{number}", created_at=float(number), agent="ab"[number % 2], user="xy"[number // 4])
            await create_finished_run(store, head)
        assert list_ids(await store.runs(Filter(agent="a", user="x"))) == ["r2", "r0"]
        assert list_ids(await store.runs(Filter(agent="b", user="y", before=7.0, state=State.DONE))) == ["r5"]
        assert list_ids(await store.runs(Filter(agent="a", user="x", waiting=True))) == []
        assert list_ids(await store.runs(Filter(agent="a"), limit=3)) == ["r6", "r4", "r2"]

    async def test_a_list_can_be_of_one_tenant(self, store: Store) -> None:
        """`tenant` selects the runs of a tenant, or with an empty string those without one; a summary has it."""
        for number, tenant in enumerate(("acme", "zeta", None, "acme")):
            head = make_header(f"r{number}", created_at=float(number), tenant=tenant, user="ann")
            await create_finished_run(store, head)
        assert [line.tenant for line in await store.runs()] == ["acme", None, "zeta", "acme"]
        for where, expected in (
            (Filter(tenant="acme"), ["r3", "r0"]),
            (Filter(tenant=""), ["r2"]),
            (Filter(tenant="nobody"), []),
            (Filter(tenant="acme", before=3.0, user="ann"), ["r0"]),
        ):
            assert list_ids(await store.runs(where)) == expected, where
            assert await store.count(where) == len(expected), where
        assert await store.count(limit=3) == 3

    async def test_a_list_can_be_of_one_purpose(self, store: Store) -> None:
        """`purpose` selects the runs of a purpose, or with an empty string those of production; a summary has it."""
        for number, purpose in enumerate(("", "eval", "eval")):
            await create_finished_run(store, make_header(f"r{number}", created_at=float(number), purpose=purpose))
        assert [line.purpose for line in await store.runs()] == ["eval", "eval", ""]
        for where, expected in ((Filter(purpose="eval"), ["r2", "r1"]), (Filter(purpose=""), ["r0"])):
            assert list_ids(await store.runs(where)) == expected
            assert await store.count(where) == len(expected)

    async def test_a_list_can_be_of_what_needs_a_worker(self, store: Store) -> None:
        """`ready_by` selects what waits for a worker, `active_at` also what has one, and `over=False` what is open."""
        now = await store.now()
        await create_finished_run(store, make_header("over", agent="a"))
        await create_waiting_run(store, make_header("waits", agent="a"))
        await (await LeasedRun.create(store, make_header("ready", agent="a"))).release()
        await (await LeasedRun.create(store, make_header("child", agent="a", parent="driven"))).release()
        driven = await LeasedRun.create(store, make_header("driven", agent="a"))
        await driven.append(Observed()).wait()
        at = now + 60
        for where, expected in (
            (Filter(ready_by=at), {"ready"}),
            (Filter(ready_by=at, agent="a"), {"ready"}),
            (Filter(ready_by=at, agent="b"), set()),
            (Filter(ready_by=2 * FAR_FUTURE), {"ready", "waits"}),
            (Filter(active_at=at), {"ready", "driven"}),
            (Filter(active_at=0.0, agent="a"), {"driven"}),
            (Filter(user="", agent="a", ready_by=at), {"ready"}),
            (Filter(over=False), {"ready", "waits", "child", "driven"}),
            (Filter(over=True, agent="a"), {"over"}),
        ):
            assert {*list_ids(await store.runs(where))} == expected, where
        assert await store.count(Filter(ready_by=at, agent="a")) == 1
        assert await store.count(Filter(active_at=at)) == 2
        assert await store.count(Filter(over=False)) == 4
        await driven.release()
        assert {*list_ids(await store.runs(Filter(active_at=at)))} == {"ready", "driven"}
        assert await store.count(Filter(ready_by=at, agent="a"), limit=1) == 1

    async def test_a_line_says_what_a_run_has_cost_once_it_is_over(self, store: Store) -> None:
        """A summary has the cost and the duration of a run that is over; None if no price was known."""
        driver = await LeasedRun.create(store, make_header("r1"))
        await driver.append(Observed()).wait()
        (line,) = await store.runs()
        assert (line.cost_usd, line.duration_s) == (None, None)
        await driver.append(build_answer(0.25, 3.0)).wait()
        (line,) = await store.runs()
        assert (line.cost_usd, line.duration_s) == (0.25, 3.0)
        await create_finished_run(store, make_header("r2"))
        (line,) = await store.runs(Filter(id="r2"))
        assert (line.cost_usd, line.duration_s is None) == (None, False)

    async def test_a_list_can_be_of_what_was_dear_or_slow(self, store: Store) -> None:
        """Costs, durations, times and the reason of the end select runs, and a list may have the dearest first."""
        usd = (0.5, 2.0, 0.5, None, 1.0)
        for number, cost in enumerate(usd):
            parent = "r0" if number == 2 else None
            head = make_header(f"r{number}", created_at=float(number), agent="a", user="ann", parent=parent)
            driver = await LeasedRun.create(store, head)
            await driver.append(Observed(), build_answer(cost, 10.0 - number)).wait()
            await driver.release()
        failed = await LeasedRun.create(store, make_header("r5", created_at=5.0, agent="a"))
        await failed.append(Failed(reason=StopReason.MAX_TURNS, message="")).wait()
        await LeasedRun.create(store, make_header("r6", created_at=6.0, agent="b"))
        for where, expected in (
            (Filter(min_cost_usd=1.0), ["r4", "r1"]),
            (Filter(max_cost_usd=0.5), ["r2", "r0"]),
            (Filter(min_cost_usd=0.6, max_cost_usd=1.5), ["r4"]),
            (Filter(min_duration_s=9.0), ["r1", "r0"]),
            (Filter(max_duration_s=6.0, stop_reason=StopReason.COMPLETED), ["r4"]),
            (Filter(since=3.0), ["r6", "r5", "r4", "r3"]),
            (Filter(since=1.0, before=3.0), ["r2", "r1"]),
            (Filter(parent="", max_cost_usd=1.0), ["r4", "r0"]),
            (Filter(parent="", agent="b"), ["r6"]),
            (Filter(stop_reason=StopReason.MAX_TURNS), ["r5"]),
            (Filter(stop_reason=StopReason.TIMEOUT), []),
            (Filter(stop_reason=StopReason.COMPLETED, user="ann", min_cost_usd=0.6), ["r4", "r1"]),
        ):
            assert list_ids(await store.runs(where)) == expected, where
            assert await store.count(where) == len(expected), where
        orders: tuple[tuple[Filter, RunOrder, list[str]], ...] = (
            (Filter(), "cost", ["r1", "r4", "r2", "r0"]),
            (Filter(agent="a", parent=""), "cost", ["r1", "r4", "r0"]),
            (Filter(user="ann", max_cost_usd=1.0), "cost", ["r4", "r2", "r0"]),
            (Filter(state=State.DONE, min_duration_s=7.0), "duration", ["r0", "r1", "r2", "r3"]),
            (Filter(parent="r0"), "cost", ["r2"]),
            (Filter(agent="b"), "duration", []),
        )
        for where, order, expected in orders:
            assert list_ids(await store.runs(where, order=order)) == expected, (where, order)
        assert list_ids(await store.runs(order="cost", limit=2)) == ["r1", "r4"]
        assert list_ids(await store.runs(order="cost", after=(0.5, "r2"))) == ["r0"]
        assert list_ids(await store.runs(order="cost", after=(0.7, ""), limit=1)) == ["r2"]
        with pytest.raises(MisuseError, match="cheapest"):
            await store.runs(order=cast("RunOrder", "cheapest"))

    async def test_a_list_can_be_of_what_was_said(self, store: Store) -> None:
        """`text` selects the runs whose id, prompt and answer have all words of it; or the store refuses it."""
        said = (
            ("r1", "Refund order 10,000 for Zoë", "The REFUND was paid."),
            ("r2", "Where is my order?", "It has left the warehouse"),
            ("r3", "退款订单在哪里", "'; DROP TABLE runs --"),
        )
        for number, (run_id, prompt, answer) in enumerate(said):
            driver = await LeasedRun.create(store, make_header(run_id, prompt, created_at=float(number), user="ann"))
            message = AssistantMessage(text=answer)
            await driver.append(Observed(), attrs.evolve(FINAL_ANSWER, message=message)).wait()
            await driver.release()
        await LeasedRun.create(store, make_header("r4", "An order that nobody has answered", created_at=9.0))
        try:
            await store.runs(Filter(text="order"))
        except MisuseError:
            return
        for where, expected in (
            (Filter(text="order"), ["r4", "r2", "r1"]),
            (Filter(text="Order refund"), ["r1"]),
            (Filter(text="order", user="ann", before=1.0), ["r1"]),
            (Filter(text="ware", stop_reason=StopReason.COMPLETED), ["r2"]),
            (Filter(text="house"), []),
            (Filter(text="zoe 10000"), ["r1"]),
            (Filter(text="订单"), ["r3"]),
            (Filter(text="单"), ["r3"]),
            (Filter(text="drop table"), ["r3"]),
            (Filter(text="' OR 1=1 --"), []),
            (Filter(text="is"), ["r2"]),
            (Filter(text="r3"), ["r3"]),
            (Filter(text="?!"), []),
            (Filter(text=""), []),
        ):
            assert list_ids(await store.runs(where)) == expected, where
            assert await store.count(where) == len(expected), where
        assert list_ids(await store.runs(Filter(text="order"), order="duration")) == ["r2", "r1"]
        await store.delete("r2")
        assert list_ids(await store.runs(Filter(text="order"))) == ["r4", "r1"]

    async def test_a_thousand_runs_can_be_listed(self, store: Store) -> None:
        """1,000 runs are listed at once, or in pages by `before`, each run once."""

        async def create(number: int) -> None:
            _head, lease = await store.create(make_header(f"r{number}", created_at=float(number)), durability="normal")
            await store.release(lease).wait()

        async with anyio.create_task_group() as group:
            for number in range(1000):
                group.start_soon(create, number)
        expected = [f"r{number}" for number in reversed(range(1000))]
        assert list_ids(await store.runs(limit=2000)) == expected
        paged, page = [], await store.runs()
        while page:
            assert len(page) == 100
            paged += list_ids(page)
            page = await store.runs(Filter(before=page[-1].created_at))
        assert paged == expected

    # Claims.

    async def test_a_run_that_nobody_drives_is_due(self, store: Store) -> None:
        """An unfinished run without an owner can be claimed."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        await driver.append(Observed()).wait()
        assert await list_claimable(store, "a") == ()
        await driver.release()
        assert await list_claimable(store, "a") == ("r1",)
        driver = await LeasedRun.resume(store)
        assert await list_claimable(store, "a") == ()

    async def test_what_is_over_is_not_due(self, store: Store) -> None:
        """A run that is done or failed cannot be claimed."""
        await create_finished_run(store, make_header("r1", agent="a"))
        failed = await LeasedRun.create(store, make_header("r2", agent="a"))
        await store.post("r2", "k", make_input("x"))
        await failed.append(Failed(reason=StopReason.CANCELLED, message="")).wait()
        await failed.release()
        assert await list_claimable(store, "a") == ()

    async def test_what_other_agents_drive_is_not_due(self, store: Store) -> None:
        """A claim returns only runs of the given agent name, also if it is empty."""
        for run_id, agent in (("r1", "a"), ("r2", "b"), ("r3", "")):
            await (await LeasedRun.create(store, make_header(run_id, agent=agent))).release()
        assert (await list_claimable(store, "a"), await list_claimable(store, "")) == (("r1",), ("r3",))
        assert await list_claimable(store, "nobody") == ()

    async def test_what_a_run_calls_is_not_due(self, store: Store) -> None:
        """A child run cannot be claimed: its parent executes it."""
        await (await LeasedRun.create(store, make_header("r1.t1.0", agent="a", parent="r1"))).release()
        assert await list_claimable(store, "a") == ()

    async def test_a_run_that_waits_is_not_due(self, store: Store) -> None:
        """A run that waits for a decision cannot be claimed."""
        await create_waiting_run(store, make_header(agent="a"))
        assert await list_claimable(store, "a") == ()

    async def test_news_make_a_waiting_run_due(self, store: Store) -> None:
        """A post that the last owner has not read makes a waiting run claimable."""
        await create_waiting_run(store, make_header("r1", agent="a"))
        await create_waiting_run(store, make_header("r2", agent="a"))
        await store.post("r2", "k", Approve(call_id="t1.0"))
        assert await list_claimable(store, "a") == ("r2",)

    async def test_what_was_seen_is_no_news(self, store: Store) -> None:
        """A row that the last owner read and left does not make the run claimable; a later row does."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        await driver.request_approval()
        row = await store.post("r1", "k1", make_input("x"))
        await driver.release(inbox_read=row.number)
        assert await list_claimable(store, "a") == ()
        await store.post("r1", "k2", make_input("y"))
        assert await list_claimable(store, "a") == ("r1",)

    async def test_what_came_behind_the_last_look_is_news(self, store: Store) -> None:
        """A row posted during the lease that the owner did not read makes the run claimable after the release."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        await driver.request_approval()
        row = await store.post("r1", "k1", make_input("x"))
        await store.post("r1", "k2", Approve(call_id="t1.0"))
        await driver.release(inbox_read=row.number)
        assert await list_claimable(store, "a") == ("r1",)

    async def test_who_does_not_look_changes_nothing(self, store: Store) -> None:
        """A lease that did not read the inbox does not change which rows count as read."""
        driver = await LeasedRun.create(store, make_header("r1", agent="a"))
        await driver.request_approval()
        row = await store.post("r1", "k", make_input("x"))
        await driver.release(inbox_read=row.number)
        await create_waiting_run(store, make_header("r2", agent="a"))
        await store.post("r2", "k", make_input("x"))
        for run_id in ("r1", "r2"):
            await (await LeasedRun.resume(store, run_id)).release()
        assert await list_claimable(store, "a") == ("r2",)

    async def test_what_was_taken_is_no_news(self, store: Store) -> None:
        """A consumed row does not make the run claimable."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        row = await store.post("r1", "k", make_input("x"))
        chosen, *_rest = driver.build_turn()
        asked = ApprovalAsked(call_id="t1.0", expires_at=FAR_FUTURE)
        await driver.append(Observed(), chosen, asked, taken=[row.number]).wait()
        await driver.release()
        assert await list_claimable(store, "a") == ()

    async def test_a_timer_is_news_when_it_is_due(self, store: Store) -> None:
        """A row with `due_at` makes the run claimable from that time on."""
        for run_id in ("r1", "r2"):
            await create_waiting_run(store, make_header(run_id, agent="a"))
        await store.post("r1", "k", make_input("later", FAR_FUTURE))
        await store.post("r2", "k", make_input("now", await store.now() - 1.0))
        assert await list_claimable(store, "a") == ("r2",)

    async def test_a_timer_that_was_seen_before_its_time_is_news_then(self, store: Store) -> None:
        """A timer that was read before its time makes the run claimable at its time."""
        run_id, at = await self._create_early_seen_timer(store, delay_s=0.2)
        await wait_until(store, at)
        assert run_id in await list_claimable(store, "a")
        await (await LeasedRun.resume(store, run_id)).release()  # without reading the inbox: it stays unread
        assert run_id in await list_claimable(store, "a")

    async def _create_early_seen_timer(self, store: Store, delay_s: float) -> tuple[str, float]:
        driver = await LeasedRun.create(store, make_header(f"after-{delay_s}", agent="a"))
        await driver.request_approval()
        at = await store.now() + delay_s
        row = await store.post(driver.run.id, "k", make_input("later", at))
        seen_at = await store.now()
        await driver.release(row.number, seen_at)
        if seen_at < at:
            return driver.run.id, at
        return await self._create_early_seen_timer(store, delay_s * 10)  # the machine was too slow: it was due already

    async def test_a_timer_that_falls_due_behind_the_last_look_is_news(self, store: Store) -> None:
        """A timer that became due between the owner's read and the release makes the run claimable."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        await driver.request_approval()
        seen_at = await store.now()
        row = await store.post("r1", "k", make_input("later", seen_at + 0.01))
        await wait_until(store, seen_at + 0.01)
        await driver.release(row.number, seen_at)
        assert await list_claimable(store, "a") == ("r1",)

    async def test_a_timer_that_was_seen_when_it_was_due_is_no_news(self, store: Store) -> None:
        """A due timer that the owner read and left does not make the run claimable again."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        await driver.request_approval()
        at = await store.now() - 1.0
        row = await store.post("r1", "k", make_input("now", at))
        await driver.release(row.number, at + 0.5)
        assert await list_claimable(store, "a") == ()
        await (await LeasedRun.resume(store)).release()  # without reading the inbox: it stays read
        assert await list_claimable(store, "a") == ()

    async def test_an_expired_question_makes_a_run_due(self, store: Store) -> None:
        """A run is claimable once the time for a decision is up."""
        now = await store.now()
        await create_waiting_run(store, make_header("r1", agent="a"), expires_at=now - 1.0)
        await create_waiting_run(store, make_header("r2", agent="a"), expires_at=now + 3600.0)
        assert await list_claimable(store, "a") == ("r1",)

    async def test_the_first_of_several_expiries_makes_a_run_due(self, store: Store) -> None:
        """A run that waits for several decisions is claimable once the time for one of them is up."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        calls = tuple([ToolCall(id=f"t1.{n}", name="look", arguments="{}", key=f"k{n}") for n in range(2)])
        await driver.append(
            Observed(),
            ToolsChosen(message=AssistantMessage(calls=calls)),
            ApprovalAsked(call_id="t1.0", expires_at=FAR_FUTURE),
            ApprovalAsked(call_id="t1.1", expires_at=await store.now() - 1.0),
        ).wait()
        await driver.release()
        assert await list_claimable(store, "a") == ("r1",)

    async def test_a_paused_run_is_due_for_news_alone(self, store: Store) -> None:
        """A paused run is claimable after a post, but not when the time for a decision is up."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        await driver.request_approval(expires_at=await store.now() - 1.0)
        await driver.append(Paused(by="ann")).wait()
        await driver.release()
        assert [line.waiting for line in await store.runs()] == [True]
        assert await list_claimable(store, "a") == ()
        await store.post("r1", "k", Cancel())
        assert await list_claimable(store, "a") == ("r1",)

    async def test_a_run_that_was_paused_in_between_is_not_due(self, store: Store) -> None:
        """A pause in any state makes a run unclaimable until a Resumed event."""
        driver = await LeasedRun.create(store, make_header(agent="a"))
        await driver.append(Observed(), Paused()).wait()
        await driver.release()
        assert await list_claimable(store, "a") == ()
        driver = await LeasedRun.resume(store)
        await driver.append(Resumed()).wait()
        await driver.release()
        assert await list_claimable(store, "a") == ("r1",)

    async def test_what_could_be_claimed_for_longest_is_claimed_first(self, store: Store) -> None:
        """Runs are claimed in the order in which they became free, up to the limit."""
        for run_id in ("r1", "r3", "r2", "r4"):
            driver = await LeasedRun.create(store, make_header(run_id, agent="a"))
            await driver.append(Observed()).wait()
            await driver.release()
        assert await list_claimable(store, "a") == ("r1", "r3", "r2", "r4")
        assert await list_claimable(store, "a", 2) == ("r1", "r3")
        assert await list_claimable(store, "a", 0) == ()

    async def test_a_claim_takes_the_leases(self, store: Store) -> None:
        """A claim returns leases, and the runs cannot be claimed or leased again."""
        for run_id in ("r1", "r2"):
            await (await LeasedRun.create(store, make_header(run_id, agent="a"))).release()
        first = await store.claim("a", limit=1)
        assert [lease.run_id for lease in first.leases] == ["r1"]
        assert await list_claimable(store, "a") == ("r2",)
        driver = LeasedRun(store, first.leases[0], begin_run(make_header("r1", agent="a")))
        assert await driver.append(Observed()).wait()
        with pytest.raises(LeaseHeldError):
            await store.lease("r1")

    async def test_what_came_while_a_run_was_driven_ends_its_rest(self, store: Store) -> None:
        """A backoff does not delay a run if a row was posted that the owner had not read."""
        for run_id in ("r1", "r2"):
            await create_waiting_run(store, make_header(run_id, agent="a"))
            await store.post(run_id, "k", make_input("x"))
        for lease in (await store.claim("a", limit=2)).leases:
            lease.backoff_s, lease.backoff_inbox_head = 3600.0, lease.inbox_head
            if lease.run_id == "r2":
                await store.post("r2", "decision", Approve(call_id="t1.0"))
            await store.release(lease).wait()
        assert await list_claimable(store, "a") == ("r2",)

    async def test_a_run_that_is_to_rest_is_not_claimed(self, store: Store) -> None:
        """A run released with a backoff is not claimable until the backoff ends or a row is posted."""
        for run_id in ("r1", "r2"):
            driver = await LeasedRun.create(store, make_header(run_id, agent="a"))
            driver.lease.backoff_s = 3600.0
            await driver.release()
        assert await list_claimable(store, "a") == ()
        await store.post("r2", "k", make_input("x"))
        assert await list_claimable(store, "a") == ("r2",)

    async def test_driven_runs_do_not_use_up_the_limit(self, store: Store) -> None:
        """Runs with a held lease do not count towards the limit of a claim."""
        drivers = []
        for number in range(5):
            drivers.append(await LeasedRun.create(store, make_header(f"r{number}", agent="a")))
            await drivers[-1].append(Observed(at=float(number))).wait()
        await drivers[-1].release()
        assert await list_claimable(store, "a", 1) == ("r4",)

    # Sessions.

    async def test_the_first_run_of_a_session_goes_on_from_nothing(self, store: Store) -> None:
        """The first run of a session has no predecessor."""
        stored, _lease = await store.create(make_header(session="s"))
        assert stored.after is None

    async def test_the_next_run_goes_on_from_the_last(self, store: Store) -> None:
        """A run's `after` is the last run of its session, in the returned and in the stored header."""
        for number in range(3):
            await create_finished_run(store, make_header(f"r{number}", session="s"))
        await create_finished_run(store, make_header("other", session="t"))
        stored, _lease = await store.create(make_header("r3", session="s"))
        assert stored.after == "r2"
        assert (await store.read("r3")).header == stored

    async def test_a_session_has_one_run_at_a_time(self, store: Store) -> None:
        """A second run is refused while the first one is unfinished, and the error names the first one."""
        driver = await LeasedRun.create(store, make_header("first", session="s"))
        with pytest.raises(ConflictError, match="first"):
            await store.create(make_header("second", session="s"))
        await driver.release()
        with pytest.raises(ConflictError, match="first"):
            await store.create(make_header("second", session="s"))
        with pytest.raises(RunNotFoundError):
            await store.read("second")

    async def test_a_session_goes_on_after_an_error(self, store: Store) -> None:
        """A session continues from a failed run."""
        driver = await LeasedRun.create(store, make_header("first", session="s"))
        await driver.append(Failed(reason=StopReason.CANCELLED, message="")).wait()
        await driver.release()
        stored, _lease = await store.create(make_header("second", session="s"))
        assert stored.after == "first"

    async def test_of_many_that_start_in_a_session_one_wins(self, store: Store) -> None:
        """Of many concurrent creates in a session, exactly one succeeds."""
        started = []

        async def race(number: int) -> None:
            try:
                started.append(await store.create(make_header(f"r{number}", session="s")))
            except ConflictError:
                return

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(race, number)
        assert len(started) == 1
        assert len(await store.runs(Filter(session="s"))) == 1
