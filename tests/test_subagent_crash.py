"""The worker dies at every write of a family of agents, and another one goes on: nothing is lost, nothing done twice.

A store that is killed at its n-th append stands for the process, whichever run that append belongs to: the caller, an
agent below it, or one below that.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, LeaseLostError, Outcome, PendingKind, Run, RunContext, StoreError, Usage, tool
from agentfsm.core import events as e
from agentfsm.ports import ProposedCall, Reply, Request
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, Trap, Wrapped, calls_of, no_leases, results_of, sound, sound_run

# The runs by their ids: the caller, two agents, and a third with an agent of its own.
FAMILY = ["", ".t1.0", ".t1.1", ".t1.2", ".t1.2.t1.0"]
COST = Usage(input_tokens=3, output_tokens=4)
# Replies of all runs together.
REPLIES = 2 + 2 + 2 + 2 + 2


@pytest.fixture
async def store(request, tmp_path):
    """A store, closed afterwards; no run in it may be leased then."""
    on_disk = getattr(request, "param", "memory") == "sqlite"
    made = SQLiteStore(tmp_path / "runs.db") if on_disk else MemoryStore()
    yield made
    await no_leases(made)
    await made.aclose()


class Killed(BaseException):
    """The process is gone."""


class Mortal(Wrapped):
    """A store whose process is killed at the n-th append; what comes after reaches the real store no more."""

    def __init__(self, inner: Any, at: int, *, written: bool) -> None:
        """Take the real store, and when to die: after the n-th append was `written`, or before."""
        self.inner, self.left, self.written, self.dead = inner, at, written, False

    def append(self, *args: Any, **options: Any) -> Any:
        """Pass on, until the time has come."""
        if self.dead:
            raise Killed
        self.left -= 1
        if self.left:
            return self.inner.append(*args, **options)
        self.dead = True
        if self.written:
            self.inner.append(*args, **options)
        raise Killed


@attrs.define
class _Trapped:
    inner: Any
    trap: Trap

    @property
    def is_done(self) -> bool:
        return False

    async def wait(self) -> bool:
        await self.trap.visit()
        return await self.inner.wait()


class Trapped:
    """A store with a trap before each of its awaits."""

    def __init__(self, inner: Any, trap: Trap) -> None:
        """Take the real store."""
        self.inner, self.trap = inner, trap

    def append(self, *args: Any, **options: Any) -> Any:
        """Pass on, with a trap in the wait for the disk."""
        return _Trapped(self.inner.append(*args, **options), self.trap)

    def __getattr__(self, name: str) -> Any:
        """Pass on, by way of the trap where it waits."""
        method = getattr(self.inner, name)
        if name not in ("create", "lease", "now", "read", "inbox", "post"):
            return method

        async def trapped(*args: Any, **options: Any) -> Any:
            await self.trap.visit()
            return await method(*args, **options)

        return trapped


async def act(ctx: RunContext[None]) -> str:
    """Act."""
    raise NotImplementedError


# The tools, with what takes long to make: their schemas. Each world has functions of its own.
TOOLS = {
    "read": tool(name="read", read_only=True)(act),
    "ask": tool(name="ask", read_only=True)(act),
    "put": tool(name="put", idempotent=True)(act),
    "pay": tool(name="pay")(act),
}


@attrs.define
class World:
    """What the tools did, counted outside of any run."""

    trap: Trap = attrs.field(factory=Trap)
    approval: bool = False
    # Whether a person has to allow each payment.
    effects: list[tuple[str, str]] = attrs.field(factory=list)
    # Tool and idempotency key.

    def tools(self, *names: str) -> list:
        """Tools that act: read-only, idempotent, and without a promise."""

        def made(name: str):
            async def act(ctx: RunContext[None]) -> str:
                self.effects.append((name, ctx.idempotency_key))
                await self.trap.visit()
                return f"{name} done"

            approval = self.approval and name in ("ask", "pay")
            return attrs.evolve(TOOLS[name], function=act, requires_approval=approval)

        return [made(name) for name in names]

    def says(self, *wanted: str) -> FunctionModel:
        """A model that calls all that is wanted in its first turn, and then says that it is done."""

        async def answer(request: Request) -> Reply:
            await self.trap.visit()
            asked = any(getattr(message, "calls", ()) for message in request.messages)
            calls = tuple(
                ProposedCall(id=f"p{n}", name=name, arguments='{"query": "go"}' if name in AGENTS else "{}")
                for n, name in enumerate(() if asked else wanted)
            )
            return Reply(text="" if calls else "all done", calls=calls, usage=COST)

        return FunctionModel(answer)

    def worker(self, store: Any) -> Agent:
        """A fresh worker: new agents with new tools on the same store."""
        scout = Agent(self.says("read", "ask"), tools=self.tools("read", "ask"), name="scout")
        clerk = Agent(self.says("put", "pay", "read"), tools=self.tools("read", "put", "pay"), name="clerk")
        chief = Agent(self.says("clerk", "read"), tools=[clerk.as_tool(), *self.tools("read")], name="chief")
        tools = [scout.as_tool(), clerk.as_tool(), chief.as_tool(), *self.tools("put")]
        return Agent(self.says("scout", "clerk", "chief", "put"), tools=tools, store=store, name="worker")


AGENTS = {"scout", "clerk", "chief"}


async def end(agent: Agent, run_id: str) -> tuple[Run, set[tuple[str, str]]]:
    """Resume until the run is over; a person allows what is asked, and says of unknown payments that they were made."""
    asked: Counter[tuple[str, str, str]] = Counter()
    lost: set[tuple[str, str]] = set()
    with anyio.fail_after(HANG_S):
        while not (run := await agent.resume(run_id)).is_over:
            sound_run(run)
            assert run.is_waiting
            item = run.pending[0]
            asked[item.kind, item.run_id, item.call_id] += 1
            assert max(asked.values()) == 1, "nobody is asked the same thing twice"
            if item.kind is PendingKind.APPROVAL:
                await agent.approve(item.run_id, item.call_id)
            else:
                assert item.tool == "pay"
                lost.add((item.run_id, item.call_id))
                await agent.settle(item.run_id, item.call_id, result="it was paid")
    return run, lost


async def forget(store: Any) -> None:
    """Empty the store, so that the next family is alone in it."""
    for summary in await store.runs():
        await store.delete(summary.id)


async def read_events(agent: Agent, run: Run) -> list[e.Event]:
    """Return the events of a run and of the runs below."""
    ids = [each.id for each in await agent.store.runs() if each.id.startswith(run.id)]
    return [event for run_id in ids for event in await agent.history(run_id)]


async def check(agent: Agent, world: World, run: Run, lost: set[tuple[str, str]]) -> None:
    """Fail unless the family ended as it would have without any crash, and each effect is what its run says."""
    assert run.output == "all done"
    spent = Usage(input_tokens=3 * REPLIES, output_tokens=4 * REPLIES, unpriced=True)
    # A request that was cut off is charged besides: its input, as it was counted.
    cut = [each.usage for each in await read_events(agent, run) if isinstance(each, e.AttemptFailed)]
    assert run.usage == sum(cut, spent), "each reply is counted once"
    assert not any(usage.output_tokens for usage in cut)
    ids = {summary.id for summary in await agent.store.runs() if summary.id.startswith(run.id)}
    assert ids == {run.id + suffix for suffix in FAMILY}, "an agent goes on under its id, and is not begun anew"
    by_key = Counter(key for _, key in world.effects)
    keys: set[str] = set()
    for name in ids:
        each = await agent.load(name)
        await sound(agent, each)
        called = {asked.id: asked for asked in calls_of(each.messages)}
        for result in results_of(each.messages):
            assert result.outcome is Outcome.DONE
            key = called[result.call_id].key
            if result.tool in AGENTS:
                below = await agent.load(f"{name}.{result.call_id}")
                assert result.child is not None
                assert (result.child.run_id, result.child.usage) == (below.id, below.usage)
                continue
            keys.add(key)
            assert by_key[key] >= 1 or (name, result.call_id) in lost
            if result.tool == "pay":
                assert by_key[key] <= 1, "a payment was made twice"
    assert set(by_key) <= keys, "an effect under a key that no call has"
    await no_leases(agent.store)


both_stores = pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)


@pytest.mark.parametrize(
    ("written", "approval"), [(False, False), (True, True)], ids=["before", "after, with approvals"]
)
async def test_a_worker_that_is_killed_at_any_write_loses_nothing(store, written, approval):
    """At every append of any run of the family in turn: the next worker ends all, and no payment is made twice."""
    for at in range(1, 300):
        world, name = World(approval=approval), f"run-{at}-"
        mortal = Mortal(store, at, written=written)
        with contextlib.suppress(Killed):
            agent = world.worker(mortal)
            await agent.run("go", id=name)
            await end(agent, name)
        before = {each.id: (await store.read(each.id)).events for each in await store.runs()}
        run, lost = await end(world.worker(store), name)
        await check(world.worker(store), world, run, lost)
        for each, events in before.items():
            assert (await store.read(each)).events[: len(events)] == events, "what was written is kept"
        if not mortal.dead:
            break
        await forget(store)
    assert 30 < at < 299


@both_stores
async def test_a_worker_that_is_killed_again_and_again_gets_there(store):
    """Each life writes a few entries; the family still ends as it would have."""
    world, lives, run = World(), 0, None
    lost: set[tuple[str, str]] = set()
    while run is None:
        lives += 1
        assert lives < 100
        agent = world.worker(Mortal(store, 6, written=True))
        try:
            current = await (agent.run("go", id="mine") if lives == 1 else agent.resume("mine"))
        except Killed:
            continue
        for item in current.pending:
            lost.add((item.run_id, item.call_id))
            await agent.settle(item.run_id, item.call_id, result="it was paid")
        run = current if current.is_over else None
    assert lives > 5
    await check(world.worker(store), world, run, lost)


async def sweep(store: Any, drive: Callable[[Agent, str], Awaitable[Run]], *, approval: bool = False) -> int:
    """Cancel the task at every visit in turn; return how many there are."""
    for at in range(1, 1_000):
        trap = Trap(at)
        world, name = World(trap, approval), f"run-{at}-"
        with anyio.fail_after(HANG_S), anyio.CancelScope() as scope:
            trap.cancel = scope.cancel
            await drive(world.worker(Trapped(store, trap)), name)
            await checkpoint()
        await no_leases(store)
        done = trap.visits < at
        assert scope.cancelled_caught is not done
        world.trap = Trap()
        agent = world.worker(store)
        if name in [summary.id for summary in await store.runs()]:
            before = Counter(world.effects)
            kept = await finished(agent, name)
            run, lost = await end(agent, name)
            await check(agent, world, run, lost)
            again = Counter(key for _, key in (Counter(world.effects) - before).elements())
            assert not kept & again.keys(), "what had its result is not done again"
        if done:
            return at
        await forget(store)
    raise AssertionError("no end")


async def finished(agent: Agent, run_id: str) -> set[str]:
    """The keys of all calls of a family that have their result."""
    keys: set[str] = set()
    for summary in await agent.store.runs():
        if summary.id.startswith(run_id):
            run = await agent.load(summary.id)
            keys |= {asked.key for asked in calls_of(run.messages)}
            keys |= {entry.call.key for entry in run.open if entry.result is not None}
    return keys


@pytest.mark.parametrize(
    "approval", [pytest.param(False, marks=pytest.mark.soak, id=""), pytest.param(True, id="approved")]
)
async def test_a_family_may_be_cancelled_at_any_await(store, approval):
    """Task cancellation is a crash with manners: all runs are left so that they can be resumed, and nothing repeats."""

    async def drive(agent: Agent, run_id: str) -> Run:
        run = await agent.run("go", id=run_id)
        return run if run.is_over else (await end(agent, run_id))[0]

    assert await sweep(store, drive, approval=approval) > 30


async def test_a_family_driven_step_by_step_may_be_cancelled_at_any_await(store):
    """The same by single steps of the caller."""

    async def drive(agent: Agent, run_id: str) -> Run:
        return [each async for each in agent.steps(agent.start("go", id=run_id))][-1]

    assert await sweep(store, drive) > 30


@pytest.mark.parametrize("who", FAMILY[1:])
async def test_a_journal_that_fails_below_ends_the_driving_call(store, who):
    """At every append of an agent's run in turn: no result is made up for it, and a resume goes on where it was."""

    class Faulty(Mortal):
        def append(self, lease: Any, run: Run, *args: Any, **options: Any) -> Any:
            """Fail for one run, from the n-th append on."""
            if run.id != name + who:
                return self.inner.append(lease, run, *args, **options)
            self.left -= 1
            self.dead = self.dead or not self.left
            if self.dead:
                raise StoreError("disk full")
            return self.inner.append(lease, run, *args, **options)

    for at in range(1, 100):
        world, name = World(), f"run-{at}-"
        faulty = Faulty(store, at, written=False)
        with contextlib.suppress(StoreError):
            await world.worker(faulty).run("go", id=name)
            assert not faulty.dead, "the caller went on as if nothing had happened"
        run, lost = await end(world.worker(store), name)
        await check(world.worker(store), world, run, lost)
        if not faulty.dead:
            break
        await forget(store)
    assert 3 < at < 99


@both_stores
@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
async def test_a_worker_that_is_killed_while_it_cancels_leaves_what_can_be_ended(store, written):
    """At every append in turn: a second cancel, or a resume, brings every run of the family to its end."""
    for at in range(1, 100):
        world, name = World(approval=True), f"run-{at}-"
        agent = world.worker(store)
        waiting = await agent.run("go", id=name)
        assert waiting.is_waiting
        while name + ".t1.2.t1.0" not in [summary.id for summary in await store.runs()]:
            item = waiting.pending[0]
            await agent.approve(item.run_id, item.call_id)
            waiting = await agent.resume(name)
        mortal = Mortal(store, at, written=written)
        with contextlib.suppress(Killed):
            await world.worker(mortal).cancel(name)
        run = await agent.resume(name)
        assert run.stop_reason == "cancelled"
        for suffix in FAMILY:
            each = await agent.load(name + suffix)
            assert each.is_over, f"{each.id} was left behind"
            await sound(agent, each)
        if not mortal.dead:
            break
        await forget(store)
    assert 2 < at < 99


async def test_a_family_that_hangs_is_taken_over_whole(tmp_path):
    """Who takes a run from a worker that hangs takes the runs of its agents, too."""
    begun: list[str] = []
    entered = anyio.Event()

    @tool(idempotent=True)
    async def paint() -> str:
        """Paint."""
        begun.append("paint")
        if len(begun) == 1:
            entered.set()
            await anyio.sleep_forever()
        return "painted"

    def family(store: SQLiteStore, said: list[Any], below: list[Any]) -> Agent:
        child = Agent(ScriptedModel(*below), tools=[paint], name="painter")
        return Agent(ScriptedModel(*said), tools=[child.as_tool()], store=store, name="boss")

    one, two = (SQLiteStore(tmp_path / "runs.db") for _ in range(2))
    first = family(one, [say("", call("painter", query="x")), "done"], [say("", call("paint")), "done"])

    async def hang() -> None:
        with pytest.raises(LeaseLostError):
            await first.run("go", id="r")

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            await entered.wait()
            run = await family(two, ["done"], ["painted"]).resume("r", takeover=True)
    assert (run.output, begun) == ("done", ["paint", "paint"])
    for store in (one, two):
        await store.aclose()
