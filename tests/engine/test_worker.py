"""A worker drives whatever can be moved on, and nothing else."""

from __future__ import annotations

import logging
from itertools import pairwise

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    InputKind,
    MisuseError,
    PendingKind,
    RunContext,
    State,
    StoreError,
    ToolResult,
    ask_user,
    tool,
    wait,
)
from agentfsm.agents.worker import Worker
from agentfsm.ports import ProposedCall, Reply
from agentfsm.schedules import due_runs
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, VirtualClock, run_virtual
from agentfsm.testing.conformance.helpers import list_claimable
from tests.support.checks import sound


@attrs.define
class Desk:
    """What the tools of these tests know, and whom they belong to."""

    seen: list[str] = attrs.field(factory=list)
    gate: anyio.Event | None = None
    inside: int = 0
    most: int = 0


@tool
async def work(ctx: RunContext[Desk]) -> str:
    """Work."""
    desk = ctx.deps
    desk.seen.append(ctx.run_id)
    desk.inside += 1
    desk.most = max(desk.most, desk.inside)
    try:
        if desk.gate is not None:
            await desk.gate.wait()
    finally:
        desk.inside -= 1
    return "worked"


@tool(requires_approval=True)
async def pay() -> str:
    """Pay."""
    return "paid"


def think(request):
    """Call the tool that the prompt names, once; then answer with what it said."""
    last = request.messages[-1]
    results = [message for message in request.messages if isinstance(message, ToolResult)]
    if not results:
        name = request.messages[0].text.split()[0]
        arguments = {"ask_user": '{"question":"who?"}', "wait": '{"seconds":60,"reason":"r"}'}.get(name, "{}")
        return Reply(calls=(ProposedCall(id="c", name=name, arguments=arguments),))
    return last.text or "done"


def agent_of(store, **options):
    """Return an agent of the usual name."""
    return Agent(FunctionModel(think), tools=[work, pay, ask_user, wait], store=store, name="clerk", **options)


async def until(condition):
    """Wait for what other tasks do."""
    while not condition():
        await checkpoint()


async def over(agent, pause_s):
    """Wait until the run "r" is over."""
    while not (await agent.load("r")).is_over:  # noqa: ASYNC110  others end it, through the store
        await anyio.sleep(pause_s)


async def as_states(agent, ids):
    """The states of runs."""
    return [(await agent.load(run_id)).state for run_id in ids]


async def test_submitted_runs_are_driven(store):
    """All of them, each once; and what was submitted is in the store before."""
    agent = agent_of(store)
    ids = [(await agent.submit("work", id=f"r{n}")).id for n in range(5)]
    assert await as_states(agent, ids) == [State.OBSERVE] * 5
    desk = Desk()
    await agent.worker(deps=desk, until_idle=True)
    assert await as_states(agent, ids) == [State.DONE] * 5
    assert sorted(desk.seen) == ids
    for run_id in ids:
        await sound(agent, await agent.load(run_id))


async def test_a_run_is_submitted_once(store):
    """The same id and prompt again finds the run, also while it is driven and when it is over."""
    agent = agent_of(store)
    first = await agent.submit("work", id="r")
    assert (await agent.submit("work", id="r")) == first
    gate = Desk(gate=anyio.Event())
    async with anyio.create_task_group() as others:
        others.start_soon(lambda: agent.resume("r", deps=gate))
        await until(lambda: gate.seen)
        assert (await agent.submit("work", id="r")).state is State.ACT
        gate.gate.set()
    assert (await agent.submit("work", id="r")).state is State.DONE


async def test_runs_of_other_agents_are_left_alone(store):
    """A worker has the tools of its own agent only."""
    mine, other = agent_of(store), agent_of(store).with_(name="other")
    await other.submit("work", id="theirs")
    await mine.worker(deps=Desk(), until_idle=True)
    assert await as_states(mine, ["theirs"]) == [State.OBSERVE]


async def test_a_waiting_run_is_driven_when_it_was_decided(store):
    """And not before."""
    agent = agent_of(store)
    await agent.submit("pay", id="r")
    await agent.worker(until_idle=True)
    waiting = await agent.load("r")
    assert [item.kind for item in waiting.pending] == [PendingKind.APPROVAL]
    await agent.worker(until_idle=True)
    assert (await agent.load("r")).version == waiting.version
    await agent.send("r", "hurry")  # it cannot help the run, and must not keep the worker busy
    await agent.worker(until_idle=True)
    assert await list_claimable(store, "clerk") == ()
    await agent.approve("r", "t1.0", by="ann")
    await agent.worker(until_idle=True)
    run = await agent.load("r")
    assert run.state is State.DONE
    assert "hurry" in [message.text for message in run.messages]


async def test_a_paused_run_is_left_alone(store):
    """Only resume ends a pause."""
    agent = agent_of(store, pause_before={State.ACT})
    await agent.submit("work", id="r")
    desk = Desk()
    for _ in range(2):
        await agent.worker(deps=desk, until_idle=True)
    await agent.send("r", "more")
    await agent.worker(deps=desk, until_idle=True)
    assert desk.seen == []
    assert (await agent.with_(pause_before=()).resume("r", deps=desk)).state is State.DONE


async def test_deps_are_made_for_each_run(store):
    """By a function of the run, plain or async."""
    agent = agent_of(store)
    desks = {}

    async def desk_for(run):
        return desks.setdefault(run.id, Desk())

    await agent.submit("work", id="a")
    await agent.submit("work", id="b")
    await agent.worker(deps=desk_for, until_idle=True)
    assert {run_id: desk.seen for run_id, desk in desks.items()} == {"a": ["a"], "b": ["b"]}


async def test_so_many_run_at_once(store):
    """No more than `parallel`, and all in the end."""
    agent, desk = agent_of(store), Desk(gate=anyio.Event())
    for n in range(6):
        await agent.submit("work", id=f"r{n}")
    async with anyio.create_task_group() as others:
        others.start_soon(lambda: agent.worker(deps=desk, parallel=2, until_idle=True))
        await until(lambda: desk.inside == 2)
        desk.gate.set()
    assert (desk.most, len(desk.seen)) == (2, 6)


async def test_two_workers_share_the_work(store):
    """Each run is driven by one of them, and none is forgotten."""
    agent, desk = agent_of(store), Desk()
    ids = [(await agent.submit("work", id=f"r{n}")).id for n in range(20)]
    async with anyio.create_task_group() as workers:
        for _ in range(2):
            workers.start_soon(lambda: agent_of(store).worker(deps=desk, until_idle=True))
    await agent.worker(deps=desk, until_idle=True)
    assert await as_states(agent, ids) == [State.DONE] * 20
    assert sorted(desk.seen) == sorted(ids)


async def test_one_broken_run_does_not_stop_the_others(store, caplog):
    """It is logged, and rests."""
    agent, desk = agent_of(store), Desk()

    def desk_for(run):
        if run.id == "broken":
            raise ValueError("no desk for you")
        return desk

    await agent.submit("work", id="broken")
    await agent.submit("work", id="whole")
    with caplog.at_level(logging.ERROR, "agentfsm.worker"):
        await agent.worker(deps=desk_for, until_idle=True)
    assert await as_states(agent, ["broken", "whole"]) == [State.OBSERVE, State.DONE]
    assert [record.message for record in caplog.records] == ["run broken was not executed"]


async def test_a_worker_that_is_cancelled_gives_its_runs_back(store):
    """What it drove is taken up by the next one; the unsafe call waits for a person."""
    agent, desk = agent_of(store), Desk(gate=anyio.Event())
    await agent.submit("work", id="r")
    async with anyio.create_task_group() as others:
        others.start_soon(lambda: agent.worker(deps=desk))
        await until(lambda: desk.inside)
        others.cancel_scope.cancel()
    assert await list_claimable(store, "clerk") == ("r",)
    await agent.worker(deps=Desk(), until_idle=True)
    assert [item.kind for item in (await agent.load("r")).pending] == [PendingKind.OUTCOME]


async def test_a_worker_outlives_a_store_that_fails(caplog):
    """It says so, and asks again."""

    @attrs.define(eq=False)
    class Shaky(MemoryStore):
        asked: int = 0

        async def claim(self, agent, **options):
            self.asked += 1
            if self.asked < 3:
                raise StoreError("gone for a moment")
            return await MemoryStore.claim(self, agent, **options)

    agent, desk = agent_of(Shaky()), Desk()
    await agent.submit("work", id="r")
    with caplog.at_level(logging.WARNING, "agentfsm.worker"):
        async with anyio.create_task_group() as others:
            others.start_soon(lambda: agent.worker(deps=desk, poll_s=0.001))
            await over(agent, 0.001)
            others.cancel_scope.cancel()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


@pytest.mark.parametrize("options", [{"parallel": 0}, {"poll_s": 0}])
async def test_a_worker_that_could_not_work_is_refused(store, options):
    """With what to give."""
    with pytest.raises(MisuseError, match="give"):
        await agent_of(store).worker(**options)


# What time brings.


def in_time(main):
    """Run an agent and its clock in virtual time."""

    async def whole():
        clock = VirtualClock()
        await main(agent_of(MemoryStore(clock=clock), clock=clock), clock)

    run_virtual(whole)


def test_a_timer_wakes_a_run():
    """A run that waits for input goes on when its timer is due, though nobody drives it."""

    async def main(agent, clock):
        await agent.submit("wait", id="r")
        await agent.worker(until_idle=True)
        begun = clock.now()
        await agent.send("r", "it is time", kind=InputKind.TIMER, at=begun + 30)
        async with anyio.create_task_group() as others:
            others.start_soon(agent.worker)
            await over(agent, 1)
            others.cancel_scope.cancel()
        run = await agent.load("r")
        assert 30 <= clock.now() - begun < 35
        assert any("it is time" in message.text for message in run.messages)

    in_time(main)


@pytest.mark.parametrize(
    ("prompt", "after_s", "poll_s"), [("wait", 60, 10), ("pay", 7 * 86_400, 21_600), ("ask_user", 7 * 86_400, 21_600)]
)
def test_a_wait_ends_by_itself(monkeypatch, prompt, after_s, poll_s):
    """When its time is up the run is due, and goes on without what it waited for."""
    monkeypatch.setattr(due_runs, "LOOK_INTERVAL_S", poll_s)  # a week has 60,000 looks for schedules

    async def main(agent, clock):
        await agent.submit(prompt, id="r")
        begun = clock.now()
        async with anyio.create_task_group() as others:
            others.start_soon(lambda: agent.worker(poll_s=poll_s))
            await over(agent, 2 * poll_s)
            others.cancel_scope.cancel()
        assert after_s <= clock.now() - begun < after_s + 6 * poll_s

    in_time(main)


def test_a_run_that_cannot_be_driven_rests_longer_each_time():
    """So that it costs less and less, and is still tried."""

    async def main(agent, clock):
        tried = []

        def no_desk(run):
            tried.append(clock.monotonic())
            raise MisuseError(f"no desk for {run.id}")

        await agent.submit("work", id="r")
        with anyio.move_on_after(600):
            await agent.worker(deps=no_desk)
        pauses = [after - before for before, after in pairwise(tried)]
        assert 5 <= len(tried) <= 12
        assert pauses[-1] > pauses[0]
        assert max(pauses) < 500

    in_time(main)


class OthersListen(MemoryStore):
    """A store that wakes other workers for new runs, while there are any."""

    others = True

    async def claim(self, agent, **options):
        return attrs.evolve(await super().claim(agent, **options), stands_by=self.others)


@attrs.define
class Starter:
    """A starter that notes when it is asked, and has to be asked every ten seconds."""

    asked: list[float] = attrs.field(factory=list)

    @property
    def wait_s(self):
        return max(self.asked[-1] + 10.0 - anyio.current_time(), 0.0) if self.asked else 0.0

    async def create(self):
        if not self.wait_s:
            self.asked.append(anyio.current_time())


@pytest.mark.parametrize(("others", "asked"), [(True, [0, 30]), (False, [0, 10, 20, 30, 40, 50])])
def test_a_worker_that_stands_by_leaves_schedules_to_others(others, asked):
    """It looks every thirty seconds all the same, since the others may have been killed, and as usual without them."""
    starter, store = Starter(), OthersListen()
    store.others = others
    agent = Agent(FunctionModel(lambda _: "done"), name="clerk", store=store)
    worker = Worker(
        agent=agent, execute=agent.driver.run_until_blocked, deps=None, parallel=1, poll_s=5, starter=starter
    )

    async def whole():
        begun = anyio.current_time()
        with anyio.move_on_after(59):
            await worker.run(until_idle=False)
        assert [round(each - begun) for each in starter.asked] == asked

    run_virtual(whole)
