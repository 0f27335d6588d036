"""The store fails, or another worker takes over: the driver stops before its next effect, and says why."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    CorruptError,
    LeaseLostError,
    MisuseError,
    Run,
    RunContext,
    State,
    StopReason,
    StoreError,
    tool,
)
from agentfsm.core.events import Event
from agentfsm.core.inbox import PostedItem
from agentfsm.ports import Lease, PendingWrite, ProposedCall, Reply, Request, StoredRun
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, no_leases, sound
from tests.support.failing_stores import FullStore


class World:
    """Tools that note what they did."""

    def __init__(self) -> None:
        """Begin with nothing done."""
        self.did: list[tuple[str, str]] = []

    def agent(self, store) -> Agent:
        """A new worker."""

        def acting(name: str):
            async def act(ctx: RunContext[None]) -> str:
                self.did.append((name, ctx.idempotency_key))
                await checkpoint()
                return f"{name} done"

            return act

        tools = [tool(name="read", read_only=True)(acting("read")), tool(name="pay")(acting("pay"))]
        return Agent(FunctionModel(_answer), tools=tools, store=store)

    def paid(self) -> list[str]:
        """The keys under which it was paid."""
        return [key for name, key in self.did if name == "pay"]


def _answer(request: Request) -> Reply:
    asked = any(getattr(message, "calls", ()) for message in request.messages)
    wanted = [] if asked else ["read", "pay", "read", "read", "pay"]
    calls = tuple(ProposedCall(id=f"p{n}", name=name, arguments="{}") for n, name in enumerate(wanted))
    return Reply(text="" if calls else "done", calls=calls)


async def test_a_disk_that_is_full_at_any_write_costs_no_effect_unseen():
    """The error is the store's own, no unsafe call starts that the journal does not know, and the run goes on later."""
    at = 0
    while True:
        at += 1
        store, world = FullStore(at), World()
        agent = world.agent(store)
        try:
            with anyio.fail_after(HANG_S):
                run = await agent.run("go", id="mine")
        except StoreError as error:
            assert "disk is full" in str(error)  # noqa: PT017  the loop ends where none is raised
        else:
            assert not store.was_full
            assert run.output == "done"
            break
        await no_leases(store)
        journalled = [event for event in (await store.read("mine")).events if type(event).__name__ == "ToolStarted"]
        assert len(world.paid()) <= len(journalled)
        store.make_room()
        fresh = world.agent(store)
        while not (run := await fresh.resume("mine")).is_over:
            for item in run.pending:
                await fresh.settle("mine", item.call_id, result="a person saw it")
        assert run.output == "done"
        assert len(world.paid()) == len(set(world.paid()))
        await sound(fresh, run)
    assert at > 6


async def test_an_end_that_is_not_written_is_not_said_to_be():
    """Whoever ends a run hears that it could not be written; it is asked for all the same, and comes."""
    store = FullStore(10**9)

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent(ScriptedModel(say("", call("pay"))), tools=[pay], store=store)
    assert (await agent.run("go", id="mine")).is_waiting
    store.at = store.count + 1
    with pytest.raises(StoreError, match="disk is full"):
        await agent.cancel("mine")
    store.make_room()
    assert (await agent.resume("mine")).stop_reason is StopReason.CANCELLED


class Taken(MemoryStore):
    """A store whose lease another worker takes over while a call runs."""

    lease_now: Lease | None = None

    def append(
        self, lease: Lease, run: Run, events: Sequence[Event], *, taken: Sequence[int] = (), final: bool = False
    ) -> PendingWrite:
        """Refuse, once the lease is lost."""
        self.lease_now = lease
        if lease.lost:
            raise LeaseLostError("taken over by another worker")
        return super().append(lease, run, events, taken=taken, final=final)

    def take_over(self) -> None:
        """Tell the driver that it has lost."""
        assert self.lease_now is not None
        self.lease_now.lost = True
        assert self.lease_now.wake is not None
        self.lease_now.wake()


@pytest.mark.parametrize("where", ["model", "tool"])
async def test_a_worker_that_lost_its_lease_stops(where):
    """It is told while it waits, ends with LeaseLostError, and claims nothing about what was in flight."""
    store = Taken()

    async def work() -> str:
        store.take_over()
        await anyio.sleep_forever()
        return "never"

    async def answer(_request: Request) -> Reply:
        if where == "model":
            await work()
        return Reply(calls=(ProposedCall(id="p", name="work", arguments="{}"),) * 2)

    agent = Agent(FunctionModel(answer), tools=[tool(work)], store=store)
    with pytest.raises(LeaseLostError, match="taken over"), anyio.fail_after(HANG_S):
        await agent.run("go", id="mine")
    run = await agent.load("mine")
    assert run.state is (State.THINK if where == "model" else State.ACT)
    assert not run.is_over


async def test_a_worker_that_lost_its_lease_starts_no_other_call():
    """A call that had begun may end; the next unsafe one does not start."""
    store, did = Taken(), []

    @tool
    async def work(n: int) -> str:
        """Work."""
        did.append(n)
        with anyio.CancelScope(shield=True):
            store.take_over()
            await anyio.wait_all_tasks_blocked()
        return "done"

    model = ScriptedModel(say("", call("work", n=1), call("work", n=2)))
    with pytest.raises(LeaseLostError), anyio.fail_after(HANG_S):
        await Agent(model, tools=[work], store=store).run("go")
    assert did == [1]


class Broken(MemoryStore):
    """A store in which one method fails."""

    broken = ""

    async def read(self, run_id: str, after: int = 0) -> StoredRun:
        """Fail, or pass on."""
        if self.broken == "read":
            raise CorruptError("record 2 cannot be read")
        return await super().read(run_id, after)

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Fail, or pass on."""
        if self.broken == "inbox":
            raise StoreError("the connection was lost")
        return await super().inbox(run_id)


async def test_a_journal_that_cannot_be_read_gives_the_lease_back():
    """`resume` raises what the store says, and the run is not held by anybody."""
    store = Broken()
    agent = Agent(ScriptedModel("done"), store=store)
    run = await agent.step(agent.start("go"))
    store.broken = "read"
    for drive in (agent.resume, agent.load, agent.history, agent.cancel):
        with pytest.raises(CorruptError, match="record 2"):
            await drive(run.id)
    store.broken = ""
    await no_leases(store)


async def test_an_inbox_that_cannot_be_read_stops_the_step():
    """The error is the store's, the run stands where it stood, and input is not lost."""
    store = Broken()
    agent = Agent(ScriptedModel("draft", "done"), store=store)
    run = await agent.step(agent.start("go"))
    await agent.send(run.id, "more")
    store.broken = "inbox"
    with pytest.raises(StoreError, match="connection was lost"):
        await agent.finish(run)
    store.broken = ""
    await no_leases(store)
    done = await agent.resume(run.id)
    assert [message.text for message in done.messages] == ["go", "draft", "more", "done"]


async def test_a_live_run_keeps_what_it_goes_on_from():
    """A run that waits for a person can be decided however many others end meanwhile."""

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    store = MemoryStore()
    agent = Agent(ScriptedModel("hello", say("", call("pay")), "done"), tools=[pay], store=store)
    first = await agent.run("one")
    waiting = await agent.run("two", after=first)
    noise = Agent(FunctionModel(lambda _r: "noise"), store=store)
    for _ in range(1_001):
        await noise.run("noise")
    await agent.approve(waiting.id, "t1.0")
    run = await agent.resume(waiting.id)
    assert [message.text for message in run.messages[:3]] == ["one", "hello", "two"]
    assert run.output == "done"


async def test_the_memory_store_forgets_finished_runs():
    """A service that runs for ever does not fill its memory, with sessions or without."""
    store = MemoryStore()
    agent = Agent(FunctionModel(lambda _r: "done"), store=store)
    for number in range(1_500):
        await agent.run("go", session=f"user-{number}" if number % 2 else None)
    assert len(await store.runs(limit=10_000)) <= 1_100


async def test_metadata_that_no_store_can_hold_is_refused_at_the_start(store):
    """What would fail in the store fails before it, and nothing is created."""
    with pytest.raises(MisuseError, match="JSON"):
        Agent(ScriptedModel(), store=store).start("go", metadata={"a": object()})
    assert await store.runs() == ()
