"""A worker that is drained claims nothing more, cuts off no effect, and releases its runs between two steps."""

from __future__ import annotations

import logging
from functools import partial

import anyio
import pytest

from agentfsm import Agent, ConflictError, Runs, tool
from agentfsm.agents.worker import Worker
from agentfsm.core.events import ToolCutOff, ToolLost
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, VirtualClock, call, run_virtual, say


class Story:
    """Calls that take 10 s, and the worker of their agent."""

    def __init__(self, *script, answer_s=0.0, is_safe=False, **options):
        self.made = []
        self.clock = VirtualClock()

        @tool(concurrency_safe=is_safe)
        async def pay(name: str) -> str:
            """Pay, without a promise that it may be repeated."""
            self.made.append(f"{name} begins")
            await anyio.sleep(10)
            self.made.append(f"{name} ends")
            return "paid"

        lines = iter(script)

        async def answer(_request):
            await anyio.sleep(answer_s)
            return next(lines)

        store = MemoryStore(clock=self.clock)
        self.agent = Agent(FunctionModel(answer), name="payer", tools=[pay], store=store, clock=self.clock, **options)

    def build_worker(self, drain_s=25.0):
        execute = self.agent.driver.run_until_blocked
        return Worker(agent=self.agent, execute=execute, deps=None, parallel=10, poll_s=1.0, drain_s=drain_s)

    async def work(self, worker, *, stop_after_s=5.0):
        """Run the worker, and drain it after a while. Return the seconds that it took from there."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(worker.run, until_idle=False))
            await anyio.sleep(stop_after_s)
            worker.drain()
            since = anyio.current_time()
        return anyio.current_time() - since

    async def check_released(self, run_id, *, is_lost=False):
        """The next worker could take the run at once, and no outcome is unknown."""
        [row] = [each for each in await self.agent.runs.list() if each.id == run_id]
        assert (row.driven, row.ready_at is not None) == (False, True)
        events = await self.agent.history(run_id)
        assert any(isinstance(each, ToolCutOff | ToolLost) for each in events) is is_lost


def pays(*names):
    return say("", *[call("pay", name=each) for each in names])


def test_calls_in_flight_end_and_no_other_begins():
    """The run is released after the call, also in the middle of a turn, and the next worker makes the others."""

    async def main():
        story = Story(pays("ann", "bob"), "All paid.")
        await story.agent.submit("Pay.", id="r")
        worker = story.build_worker()
        assert await story.work(worker) == pytest.approx(5.0)
        assert (story.made, worker.cut_off) == (["ann begins", "ann ends"], [])
        await story.check_released("r")
        await story.agent.worker(until_idle=True)
        assert story.made == ["ann begins", "ann ends", "bob begins", "bob ends"]
        assert (await story.agent.load("r")).output == "All paid."

    run_virtual(main)


def test_a_request_in_flight_ends_and_its_reply_is_kept():
    """It is paid for once."""

    async def main():
        story = Story(pays("ann"), "Paid.", answer_s=8.0)
        await story.agent.submit("Pay.", id="r")
        assert await story.work(story.build_worker()) == pytest.approx(3.0)
        run = await story.agent.load("r")
        assert (run.state, run.turn, story.made) == ("act", 1, [])
        await story.check_released("r")

    run_virtual(main)


def test_a_drain_claims_nothing_more():
    """Runs that come meanwhile are left to others, and the end of one run does not make room for the next."""

    async def main():
        story = Story(pays("ann"), "Paid.", pays("bob"), "Paid.")
        await story.agent.submit("Pay.", id="r")
        async with anyio.create_task_group() as tasks:
            worker = story.build_worker()
            tasks.start_soon(partial(worker.run, until_idle=False))
            await anyio.sleep(5)
            worker.drain()
            await story.agent.submit("Pay.", id="late")
        assert (await story.agent.load("late")).version == 0
        assert story.made == ["ann begins", "ann ends"]

    run_virtual(main)


@pytest.mark.parametrize("way", ["time", "signal"])
def test_a_drain_has_an_end(way, caplog):
    """Effects that are still in flight then are cut off, as without a drain. One line of the log names the runs."""

    async def main():
        story = Story(pays("ann"), "Paid.")
        await story.agent.submit("Pay.", id="r")
        worker = story.build_worker(drain_s=2.0)
        async with anyio.create_task_group() as tasks:
            if way == "signal":
                worker.drain_s = 1_000.0

                async def end_drain():
                    await anyio.sleep(7)
                    worker.end_drain()

                tasks.start_soon(end_drain)
            assert await story.work(worker) == pytest.approx(2.0)
        assert (story.made, worker.cut_off) == (["ann begins"], ["r"])
        await story.check_released("r", is_lost=True)

    with caplog.at_level(logging.WARNING, "agentfsm.worker"):
        run_virtual(main)
    [line] = [each.getMessage() for each in caplog.records if each.name == "agentfsm.worker"]
    assert line.startswith("the drain is over, and runs were cut off within a step (1): r; any worker continues them")


@pytest.mark.parametrize(("drain_s", "made"), [(0.0, ["ann begins"]), (25.0, ["ann begins", "ann ends"])])
def test_a_cancellation_drains_a_worker_that_has_time_for_it(drain_s, made):
    """As at the shutdown of an application that runs `agent.worker(drain_s=25)` in a task of its own."""

    async def main():
        story = Story(pays("ann"), "Paid.")
        await story.agent.submit("Pay.", id="r")
        with anyio.move_on_after(5):
            await story.agent.worker(drain_s=drain_s)
        assert story.made == made
        await story.check_released("r", is_lost=not drain_s)

    run_virtual(main)


def test_a_run_below_ends_its_step_too():
    """The call of an agent is not waited for: the run of the agent stops between two steps, and is continued."""

    async def main():
        story = Story(pays("ann"), pays("bob"), "Paid both.")
        lines = say("", call("payer", query="Pay both.")), "Done."
        boss = Agent(
            ScriptedModel(*lines),
            name="boss",
            tools=[story.agent.as_tool(turns=5, timeout_s=100.0)],
            store=story.agent.store,
            clock=story.clock,
        )
        await boss.submit("Go.", id="r")
        with anyio.move_on_after(5):
            await boss.worker(drain_s=25.0)
        assert story.made == ["ann begins", "ann ends"]
        await boss.worker(until_idle=True)
        assert story.made == ["ann begins", "ann ends", "bob begins", "bob ends"]
        assert (await boss.load("r")).output == "Done."

    run_virtual(main)


def test_calls_side_by_side_all_end():
    """The drain takes as long as the longest of them."""

    async def main():
        story = Story(pays("ann", "bob"), "Paid.", is_safe=True)
        await story.agent.submit("Pay.", id="r")
        assert await story.work(story.build_worker()) == pytest.approx(5.0)
        assert sorted(story.made[2:]) == ["ann ends", "bob ends"]
        await story.check_released("r")

    run_virtual(main)


@pytest.mark.parametrize("decision", [{"result": "paid"}, {"rerun": True}], ids=str)
def test_a_call_that_was_cut_off_can_be_settled_before_a_worker_comes(decision):
    """While a worker executes the run, it cannot; afterwards a person who knows the outcome needs no worker for it."""

    async def main():
        story = Story(pays("ann"), "Paid.")
        await story.agent.submit("Pay.", id="r")
        worker = story.build_worker(drain_s=2.0)
        runs = Runs(story.agent.store, clock=story.clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(worker.run, until_idle=False))
            await anyio.sleep(5.0)
            with pytest.raises(ConflictError, match="a worker executes it; wait for its result"):
                await runs.settle("r", "t1.0", **decision)
            worker.drain()
        await runs.settle("r", "t1.0", **decision, by="ann")
        with pytest.raises(ConflictError, match="already"):
            await runs.settle("r", "t1.0", failed="not paid", by="bob")
        await story.agent.worker(until_idle=True)
        assert (await story.agent.load("r")).output == "Paid."
        assert story.made == ["ann begins"] if "result" in decision else ["ann begins", "ann begins", "ann ends"]

    run_virtual(main)
