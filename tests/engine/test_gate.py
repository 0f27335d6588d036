"""The gate: a crowd of runs shares the rounds of an event loop with whatever else lives in it."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, Limits, ToolCall, ToolQueue, ToolRegistry, tool
from agentfsm._lib.concurrency import SharedWork
from agentfsm._lib.fairness import STEPS_PER_TICK, StepThrottle
from agentfsm.flow import Flow, each, step
from agentfsm.ports import ProposedCall, Reply
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say

CROWD = 5 * STEPS_PER_TICK


async def crowd(agent):
    """Run the agent many times at once."""
    async with anyio.create_task_group() as runs:
        for _ in range(CROWD):
            runs.start_soon(agent.run, "go")


async def wait_in_turn(gate, count, arrived, passed):
    """Let so many tasks wait at a gate, and note who came and who passed."""

    async def step(number):
        arrived.append(number)
        await gate.acquire()
        passed.append(number)

    async with anyio.create_task_group() as steps:
        for number in range(count):
            steps.start_soon(step, number)


async def test_a_crowd_leaves_room_for_others_in_each_round_of_the_loop():
    """Between two looks of a task that always wants to run, no more steps are done than a round has room for."""
    asked, looks = 0, []

    def reply(_request):
        nonlocal asked
        asked += 1
        return "done"

    async def look():
        while True:
            looks.append(asked)
            await checkpoint()

    async with anyio.create_task_group() as others:
        others.start_soon(look)
        await crowd(Agent(FunctionModel(reply)))
        others.cancel_scope.cancel()
    assert asked == CROWD
    steps = [after - before for before, after in pairwise(looks)]
    assert max(steps) <= 2 * STEPS_PER_TICK  # trio does a round in any order, so parts of two may lie between two looks


async def watch_stretches(work):
    """Await the work, which is given a function to count with; return how much was counted between two looks at most.

    A task that always wants to run looks once in each round of the event loop.
    """
    done, looks = 0, []

    def count(_item=None):
        nonlocal done
        done += 1

    async def look():
        while True:
            looks.append(done)
            await checkpoint()

    async with anyio.create_task_group() as others:
        others.start_soon(look)
        await work(count)
        others.cancel_scope.cancel()
    assert done >= CROWD
    return max(after - before for before, after in pairwise([*looks, done]))


async def execute_calls(count):
    """Execute calls of one queue that end at once."""

    @tool(read_only=True)
    async def instant() -> None:
        """End at once."""
        count()

    calls = [ToolCall(id=f"c{number}", name="instant", arguments="{}", key=f"k{number}") for number in range(CROWD)]
    await ToolQueue(ToolRegistry.of([instant])).execute_all(calls)


async def execute_items(count):
    """Execute the items of a flow."""

    @step(read_only=True)
    async def load(item: int) -> None:
        count()

    run = await Flow([each(load, over="numbers", name="rows")], name="f").run({"numbers": list(range(CROWD))})
    assert run.state == "done"


async def follow_journal(count):
    """Follow a journal that is there already."""
    script = [say("", call("note", number=number)) for number in range(CROWD // 4)]

    @tool(read_only=True)
    async def note(number: int) -> None:
        """Note a number."""

    limits = Limits(turns=CROWD, tool_calls=CROWD)
    agent = Agent(ScriptedModel(*script, "done"), tools=[note], limits=limits, store=MemoryStore())
    async for event in agent.events((await agent.run("go")).id):
        count(event)


async def list_runs(count):
    """List the runs of a store in memory."""
    agent = Agent(FunctionModel(lambda _request: "done"), store=MemoryStore())
    for _ in range(CROWD):
        await agent.submit("go")
    async for row in agent.runs.iterate():
        count(row)


async def take_deliveries(count):
    """Take the changes of all runs of a store in memory."""
    agent = Agent(FunctionModel(lambda _request: "done"), store=MemoryStore())
    for _ in range(CROWD):
        await agent.run("go")
    async with agent.store.follow("f", wait=False) as deliveries:
        async for delivery in deliveries:
            count(delivery)
            await delivery.done()


@pytest.mark.parametrize("work", [execute_calls, execute_items, follow_journal, list_runs, take_deliveries])
async def test_work_without_a_wait_leaves_others_their_turn(work):
    """Of calls, items, events and runs that never wait, no more are taken in a round than a round has room for."""
    assert await watch_stretches(work) <= 2 * STEPS_PER_TICK


async def test_who_needs_the_same_work_waits_for_it_together():
    """One of them does it; if that one is cut off, another does; and then all go on in the same round of the loop."""
    shared, begun, ended, let, looks, went_on = SharedWork(), 0, False, anyio.Event(), 0, []
    first = anyio.CancelScope()

    async def work():
        nonlocal begun, ended
        begun += 1
        if begun == 1:
            first.cancel()
        await let.wait()
        ended = True

    async def need(scope):
        with scope:
            await shared.do_until(lambda: ended, work)
            went_on.append(looks)

    async with anyio.create_task_group() as tasks:
        await tasks.start(as_started, need, first)
        for _ in range(CROWD):
            tasks.start_soon(need, anyio.CancelScope())
        while begun < 2:
            await checkpoint()
        let.set()
        while len(went_on) < CROWD:
            looks += 1
            await checkpoint()
    assert begun == 2
    assert max(went_on) - min(went_on) <= 2


async def as_started(function, *args, task_status):
    """Report that a function is called, and call it."""
    task_status.started()
    await function(*args)


async def test_replies_that_come_together_are_taken_in_by_rounds():
    """Where all models answer in the same moment, others are heard in between, too."""
    let, waiting, went_on, looks = anyio.Event(), 0, 0, []

    @tool(read_only=True)
    async def note() -> str:
        """Take a note."""
        nonlocal went_on
        went_on += 1
        return "noted"

    async def reply(request):
        nonlocal waiting
        if len(request.messages) > 1:
            return "done"
        waiting += 1
        await let.wait()
        return Reply(calls=(ProposedCall(id="c", name="note", arguments="{}"),))

    async def look():
        while waiting < CROWD:
            await checkpoint()
        let.set()
        while True:
            looks.append(went_on)
            await checkpoint()

    async with anyio.create_task_group() as others:
        others.start_soon(look)
        await crowd(Agent(FunctionModel(reply), tools=[note]))
        others.cancel_scope.cancel()
    assert went_on == CROWD
    steps = [after - before for before, after in pairwise(looks)]
    assert max(steps) <= 2 * STEPS_PER_TICK


def test_a_round_has_room_for_so_many_steps():
    """No more, and no fewer."""
    gate = StepThrottle()
    assert [gate.try_acquire() for _ in range(STEPS_PER_TICK + 2)] == [True] * STEPS_PER_TICK + [False] * 2


async def test_who_waits_passes_in_the_order_of_coming():
    """A round takes those who came first."""
    arrived, passed = [], []
    await wait_in_turn(StepThrottle(), 2 * STEPS_PER_TICK + 5, arrived, passed)
    assert len(passed) == 2 * STEPS_PER_TICK + 5
    for start in range(0, len(passed), STEPS_PER_TICK):
        assert set(passed[start : start + STEPS_PER_TICK]) == set(arrived[start : start + STEPS_PER_TICK])


async def test_who_is_cancelled_leaves_the_others_their_turn():
    """Waiting steps that are cancelled are forgotten, and all others pass."""
    gate, arrived, passed = StepThrottle(), [], []
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await wait_in_turn(gate, STEPS_PER_TICK, [], passed)
        assert not passed
        tasks.start_soon(wait_in_turn, gate, 3 * STEPS_PER_TICK, arrived, passed)
    assert sorted(passed) == sorted(arrived)
    await gate.acquire()  # whoever comes later, too


async def test_runs_one_after_the_other_go_through_many_rounds():
    """Where nobody else is, more steps than a round has room for just go on."""
    agent = Agent(ScriptedModel(*["done"] * 50))
    for _ in range(50):
        assert (await agent.run("go")).output == "done"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_event_loops_in_several_threads_have_gates_of_their_own(backend):
    """One agent may be driven from many loops at once."""
    agent = Agent(FunctionModel(lambda _request: "done"))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: anyio.run(crowd, agent, backend=backend), range(4)))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_gate_of_a_loop_goes_with_it(backend):
    """Nothing is kept of an event loop that has ended."""

    async def seen():
        return weakref.ref(await StepThrottle.enter())

    gate = anyio.run(seen, backend=backend)
    gc.collect()
    assert gate() is None
