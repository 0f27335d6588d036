"""A wrong deploy that was rolled back: workers that have the tools take its runs up at their next look."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentfsm import Agent, MisuseError, PendingKind, tool
from agentfsm.flow import Flow, step
from agentfsm.ports import SystemClock
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, VirtualClock, call, run_virtual, say
from tests.support.checks import HANG_S


class Releases:
    """Two programs of one agent or flow, of which one lacks a tool, and the effects."""

    def __init__(self, kind: str) -> None:
        self.paid: list[str] = []
        self.clock = VirtualClock()
        self.store: Any = Counting(clock=self.clock)
        self.kind = kind

    def build(self, *, is_right: bool) -> Agent[Any]:
        """Return the program with the tool, or the one without."""

        async def look() -> str:
            """Look."""
            return "seen"

        async def pay() -> str:
            """Pay."""
            self.paid.append("pay")
            return "paid"

        if self.kind == "flow":
            last = step(depends_on=["look"], read_only=not is_right)(pay) if is_right else step(name="other")(look)
            gate = step(requires_approval=True, read_only=True)(look)
            return Flow([gate, last], name="a", store=self.store, clock=self.clock)
        tools = [tool(requires_approval=True)(pay)] if is_right else []
        model = ScriptedModel("done") if self.paid or not is_right else ScriptedModel(say("", call("pay")), "done")
        return Agent(model, name="a", tools=tools, store=self.store, clock=self.clock)


class Counting(MemoryStore):
    """A store that counts how often a lease was taken."""

    leases = 0

    def _grant_lease(self, *args: Any, **options: Any) -> Any:
        self.leases += 1
        return super()._grant_lease(*args, **options)


@pytest.mark.parametrize("kind", ["agent", "flow"])
@pytest.mark.parametrize("order", ["later", "at once"])
def test_a_worker_with_the_tool_takes_the_run_up(kind, order):
    """It comes after the wrong one, or works beside it all the time; the wrong one does not spin on the run."""
    world = Releases(kind)

    async def play() -> None:
        right, wrong = world.build(is_right=True), world.build(is_right=False)
        run = await right.run({} if kind == "flow" else "go", id="mine")
        await right.approve("mine", run.pending[0].call_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: wrong.worker(poll_s=1.0))
            await anyio.sleep(900.0)  # none has the tool
            assert world.paid == []
            assert world.store.leases < 20
            if order == "later":
                await right.worker(poll_s=1.0, until_idle=True)
            else:
                tasks.start_soon(lambda: right.worker(poll_s=1.0))
                await anyio.sleep(10.0)
            assert world.paid == ["pay"]
            assert (await right.load("mine")).is_over
            tasks.cancel_scope.cancel()

    run_virtual(play)


async def test_a_parked_step_is_ready_in_every_store(store):
    """A worker of the right program needs no `resume` for a run that was parked by hand."""
    world = Releases("flow")
    world.store, world.clock = store, store.clock if hasattr(store, "clock") else SystemClock()
    right, wrong = world.build(is_right=True), world.build(is_right=False)
    run = await right.run({}, id="mine")
    await right.approve("mine", run.pending[0].call_id)
    run = await wrong.resume("mine")
    assert [item.kind for item in run.pending] == [PendingKind.OUTCOME]
    with anyio.fail_after(HANG_S):
        while not (await right.load("mine")).is_over:  # due at a time that is rounded, perhaps a moment from now
            await right.worker(until_idle=True)
    assert world.paid == ["pay"]


def build_outer(store: Any, done: list[str], name: str) -> Flow:
    """Return a flow with a flow as a step, whose last step has this name."""

    async def look() -> str:
        return "seen"

    async def pay(look: str) -> str:
        done.append(name)
        return name

    steps = [step(requires_approval=True, read_only=True)(look), step(name=name, depends_on=["look"])(pay)]
    return Flow([Flow(steps, name="inner").as_step(name="inner")], name="outer", store=store)


@pytest.mark.parametrize("way", ["rolled back", "resumed", "renamed"])
async def test_a_step_of_an_inner_flow_that_lacks_its_tool(way):
    """It is taken up by a program that has it, by a worker or by hand, or under its new name."""
    store, done = MemoryStore(), list[str]()
    old, new = build_outer(store, done, "charge"), build_outer(store, done, "charge_card")
    run = await old.run({}, id="mine")
    (item,) = run.pending
    await old.approve(item.run_id, item.call_id)
    run = await new.resume("mine")
    assert [item.lacks_tool for item in run.pending] == [True]
    await new.worker(until_idle=True)
    version = (await new.load("mine")).version
    assert (await new.resume("mine")).version == version
    if way == "rolled back":
        await old.worker(until_idle=True)
    elif way == "resumed":
        await old.resume("mine")
    else:
        with pytest.raises(MisuseError, match="no tool 'other'"):
            await new.resume("mine", renamed={"charge": "other"})
        await new.resume("mine", renamed={"charge": "charge_card"})
    assert ((await old.load("mine")).is_over, done) == (True, ["charge_card" if way == "renamed" else "charge"])
