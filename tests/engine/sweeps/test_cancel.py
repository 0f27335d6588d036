"""Task cancellation at every await in turn: it stays the loop's own, and leaves a run that another worker ends.

A `Trap` stands at each place where the run may wait: in the model, in the tools, in the store. At its n-th visit it
cancels the task that drives the run. The tests let n grow until a run gets through untouched.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, Outcome, PendingKind, Run, RunContext, State, tool
from agentfsm.core.events import Event, Failed, ToolCutOff, ToolFinished
from agentfsm.ports import ProposedCall, Reply, Request, Store
from agentfsm.testing import FunctionModel
from tests.support.checks import (
    HANG_S,
    Trap,
    calls_of,
    no_leases,
    results_of,
    sound,
    sound_run,
    starts_of,
    valid_history,
)
from tests.support.failing_stores import CancellingStore


@attrs.define
class World:
    """What happened outside of any run."""

    trap: Trap
    begun: list[tuple[str, str]] = attrs.field(factory=list)
    # Tool and idempotency key.
    ended: list[tuple[str, str]] = attrs.field(factory=list)

    def tools(self) -> list:
        """A tool of each kind, with a trap before and after what it does."""

        def acting(name: str):
            async def act(ctx: RunContext[None]) -> str:
                self.begun.append((name, ctx.idempotency_key))
                await self.trap.visit()
                self.ended.append((name, ctx.idempotency_key))
                await self.trap.visit()
                return f"{name} done"

            return act

        kinds = {"read": {"read_only": True}, "put": {"idempotent": True}, "pay": {}}
        return [tool(name=name, **options)(acting(name)) for name, options in kinds.items()]

    async def answer(self, request: Request) -> Reply:
        """Call everything in the first turn, then say that it is done."""
        await self.trap.visit()
        asked = any(getattr(message, "calls", ()) for message in request.messages)
        wanted = [] if asked else ["read", "read", "pay", "read", "put", "pay", "read", "read", "read"]
        calls = tuple(ProposedCall(id=f"p{n}", name=name, arguments="{}") for n, name in enumerate(wanted))
        return Reply(text="" if calls else "all done", calls=calls)

    def worker(self, store: Store) -> Agent:
        """A new agent."""
        return Agent(FunctionModel(self.answer), tools=self.tools(), store=store, name="worker")


async def ended_by_another(store: Store, world: World, run_id: str) -> Run:
    """Let another worker end the run; a person says of unknown calls that they were done."""
    agent = world.worker(store)
    with anyio.fail_after(HANG_S):
        while not (run := await agent.resume(run_id)).is_over:
            sound_run(run)
            assert {(item.kind, item.tool) for item in run.pending} == {(PendingKind.OUTCOME, "pay")}
            for item in run.pending:
                await agent.settle(run_id, item.call_id, result="a person saw it")
    return run


async def check_cut(store: Store, world: World, run_id: str) -> None:
    """Fail unless the run was left as a cancellation has to leave it, and can be ended."""
    await no_leases(store)
    if run_id not in [summary.id for summary in await store.runs(limit=1_000)]:
        return  # cut before it was created
    agent = world.worker(store)
    cut = await agent.load(run_id)
    valid_history(cut.messages)
    before = await agent.history(run_id)
    assert not any(isinstance(event, Failed) for event in before)
    kept = {event.result.call_id: event.result for event in before if isinstance(event, ToolFinished)}
    assert all(result.outcome == Outcome.DONE for result in kept.values())
    ended = Counter(world.ended)
    done = await ended_by_another(store, world, run_id)
    assert done.output == "all done"
    for result in results_of(done.messages):
        if result.call_id in kept:
            assert result == kept[result.call_id], "a finished result is kept"
    keys = {asked.id: asked.key for asked in calls_of(done.messages)}
    again = Counter(world.ended) - ended
    for call_id, result in kept.items():
        assert not again[result.tool, keys[call_id]], "a finished call is not run again"
    assert all(count == 1 for (name, _), count in Counter(world.begun).items() if name == "pay")
    events = await agent.history(run_id)
    for entry in calls_of(done.messages):
        begun, starts = Counter(world.begun)[entry.name, entry.key], starts_of(events, entry.id)
        undone = sum(isinstance(event, ToolCutOff) and event.undone for event in events if _is_of(event, entry.id))
        assert starts - undone <= begun <= 2
        assert starts - undone == begun or entry.name == "read", "the start of a read-only call may be left out"
    await sound(agent, done)


def _is_of(event: Event, call_id: str) -> bool:
    return getattr(event, "call_id", "") == call_id


async def sweep(store: Store, drive: Callable[[Agent, str], Awaitable[Run]], first: str | None = None) -> int:
    """Cancel at every visit in turn; return how many there are."""
    at = 0
    while True:
        at += 1
        assert at < 500
        trap = Trap(at)
        world, run_id = World(trap), f"{first or 'run'}-{at}"
        agent = world.worker(CancellingStore(store, trap))
        run = None
        with anyio.fail_after(HANG_S), anyio.CancelScope() as scope:
            trap.cancel = scope.cancel
            run = await drive(agent, run_id)
            await checkpoint()
        if not trap.sprung:
            assert run is not None
            assert run.output == "all done"
            return at
        assert scope.cancelled_caught
        world.trap = Trap(10**9)
        await check_cut(store, world, run_id)


async def test_a_run_may_be_cancelled_at_any_await(store):
    """`run`, cut at each place where it waits: model, tools, and every wait for the store."""
    visits = await sweep(store, lambda agent, run_id: agent.run("go", id=run_id))
    assert visits > 30


async def test_a_run_driven_step_by_step_may_be_cancelled_at_any_await(store):
    """The same by single steps, each with a lease of its own."""

    async def drive(agent: Agent, run_id: str) -> Run:
        run = agent.start("go", id=run_id)
        while not run.is_over:
            run = await agent.step(run)
        return run

    assert await sweep(store, drive) > 30


async def test_a_resumed_run_may_be_cancelled_at_any_await(store):
    """The same for `resume` of a run that was begun."""

    async def drive(agent: Agent, run_id: str) -> Run:
        if run_id not in [summary.id for summary in await store.runs(limit=1_000)]:
            plain = World(Trap(10**9)).worker(store)
            await plain.step(plain.start("go", id=run_id))
        return await agent.resume(run_id)

    assert await sweep(store, drive) > 30


async def test_a_watched_run_may_be_cancelled_at_any_await(store):
    """The same for `stream`, where the run is driven by a task of its own."""

    async def drive(agent: Agent, run_id: str) -> Run:
        async with agent.stream("go", id=run_id) as stream:
            async for _ in stream:
                pass
        return stream.run

    assert await sweep(store, drive) > 30


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncios_own_cancellation_at_any_await(store, anyio_backend):
    """`task.cancel()` raises CancelledError, once, and leaves the same kind of run."""
    at = 0
    while True:
        at += 1
        trap = Trap(at)
        world, run_id = World(trap), f"run-{at}"
        task = asyncio.ensure_future(world.worker(CancellingStore(store, trap)).run("go", id=run_id))
        trap.cancel = task.cancel
        with anyio.fail_after(HANG_S):
            await asyncio.wait([task])
        if not trap.sprung:
            assert task.result().output == "all done"
            break
        world.trap = Trap(10**9)
        if not task.cancelled():
            # Cancelled in the last shielded moments: the run was through, and says so.
            assert task.result().is_over
            continue
        await check_cut(store, world, run_id)
    assert at > 30


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncios_timeout_works_around_a_run(store, anyio_backend):
    """`asyncio.timeout` is task cancellation too: it raises TimeoutError, as anywhere else."""
    world = World(Trap(10**9))

    async def never(_request: Request) -> str:
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(3_600)
        return "never"

    agent = Agent(FunctionModel(never), store=store)
    limit = asyncio.timeout(None)

    async def drive() -> None:
        async with limit:
            await agent.run("go", id="mine")

    with pytest.raises(TimeoutError):
        await drive()
    await no_leases(store)
    assert (await world.worker(store).load("mine")).state is State.THINK


async def test_a_cancel_while_the_store_is_at_work_leaves_no_lease(store):
    """Cut while the lease is being taken, the run is free at once, and not only when garbage is collected."""
    gc.disable()
    try:
        for waits in range(40):
            world, run_id = World(Trap(10**9)), f"run-{waits}"
            with anyio.fail_after(HANG_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(partial(world.worker(store).run, "go", id=run_id))
                    for _ in range(waits):
                        await checkpoint()
                    tasks.cancel_scope.cancel()
            await check_cut(store, world, run_id)
    finally:
        gc.enable()


async def test_a_run_cancelled_before_it_began_leaves_nothing(store):
    """A scope that is cancelled already lets nothing happen."""
    world = World(Trap(10**9))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await world.worker(CancellingStore(store, world.trap)).run("go")
    assert scope.cancelled_caught
    assert await store.runs() == ()
    assert world.begun == []


async def test_calls_in_flight_are_not_journalled_by_a_cancellation(store):
    """Cancellation is a crash with manners: what had finished is written, and nothing is claimed of the rest."""
    inside = anyio.Event()

    @tool(read_only=True)
    async def quick() -> str:
        """Be quick."""
        return "ok"

    @tool
    async def slow() -> str:
        """Be slow."""
        inside.set()
        await anyio.sleep_forever()
        return "never"

    reply = Reply(calls=tuple(ProposedCall(id=n, name=n, arguments="{}") for n in ("quick", "slow", "quick")))
    agent = Agent(FunctionModel(lambda _request: reply), tools=[quick, slow], store=store)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: agent.run("go", id="mine"))
            await inside.wait()
            tasks.cancel_scope.cancel()
    run = await agent.load("mine")
    assert run.state is State.ACT
    assert [entry.phase.value for entry in run.open] == ["finished", "running", "intended"]
    finished = [event.result.call_id for event in await agent.history("mine") if isinstance(event, ToolFinished)]
    assert finished == ["t1.0"]
    resumed = await agent.resume("mine")
    assert [item.call_id for item in resumed.pending] == ["t1.1"]


@pytest.mark.parametrize("safe", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("where", ["itself", "tasks", "both"])
async def test_a_clean_up_that_fails_does_not_replace_the_cancellation(store, safe, where):
    """Tools that answer their cancellation with errors of their own: the caller sees its cancellation, and no more."""
    inside = anyio.Event()

    async def messy() -> None:
        try:
            inside.set()
            await anyio.sleep_forever()
        finally:
            raise RuntimeError("clean-up failed")

    async def act() -> None:
        """Act."""
        if where == "itself":
            await messy()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(messy)
            tasks.start_soon(messy)
            if where == "both":
                await anyio.sleep_forever()

    reply = Reply(calls=(ProposedCall(id="x", name="act", arguments="{}"),) * 3)
    agent = Agent(FunctionModel(lambda _request: reply), tools=[tool(concurrency_safe=safe)(act)], store=store)

    async def cancel() -> None:
        await inside.wait()
        await anyio.wait_all_tasks_blocked()
        scope.cancel()

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            with anyio.CancelScope() as scope:
                await agent.run("go", id="mine")
    assert scope.cancelled_caught
    await no_leases(store)
    sound_run(await agent.load("mine"))
