"""The record is true: whatever ends a call, its result, the audit and the stream agree with what its tool's body did.

The tools note when their bodies begin and end. Every statement is checked against these notes alone: the outcome, the
words that the model reads, the times, the attempts, the events of the stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import attrs
import pytest

from agentfsm import (
    Agent,
    AgentError,
    AuditRecord,
    ConflictError,
    InputRequired,
    Limits,
    ModelError,
    Outcome,
    PendingKind,
    Question,
    RunContext,
    State,
    StopReason,
    ToolCall,
    ToolEvent,
    ToolEventType,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    TransientError,
    tool,
)
from agentfsm.core.events import ToolCutOff, ToolLost, ToolStarted
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.ports import (
    CallChunk,
    Clock,
    Emit,
    FinishChunk,
    FinishReason,
    Lease,
    Model,
    PendingWrite,
    ProposedCall,
    Reply,
    Request,
    Store,
    SystemClock,
)
from agentfsm.stores import MemoryStore
from tests.support.checks import HANG_S, Keeping, Wrapped, no_leases, sound, virtually

ASKS = Question(key="who", message="Who?", schema={"type": "object", "properties": {}})


@attrs.define(eq=False)
class Speaker(Model):
    """A model that is a function, which may stream."""

    answer: Callable[[Request, Emit | None], Awaitable[Reply]]
    name: str = "speaker"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer."""
        return await self.answer(request, emit)


class Killed(BaseException):
    """The process is gone."""


@attrs.define
class Note:
    """One time that the body of a tool ran."""

    begun_at: float
    ended_at: float | None = None
    returned: bool = False


@attrs.define(eq=False)
class World:
    """What the bodies of the tools did, and how the tool under test behaves."""

    clock: Clock
    kind: str
    takes_s: float
    notes: dict[tuple[str, str], list[Note]] = attrs.field(factory=dict)
    # By run and call.
    watched: list[ToolEvent] = attrs.field(factory=list)
    held: anyio.Event = attrs.field(factory=anyio.Event)
    # Set when the call under test is where the end finds it.
    is_free: bool = False
    # Whether bodies return at once: the first worker is gone.
    is_watched: bool = True
    # Whether somebody watches the first worker, so that replies are streamed and read-only calls start early.
    raises: BaseException | None = None
    # What a sibling raises once the call under test is held.

    @property
    def watch(self) -> Callable[[object], None] | None:
        """What keeps the events of tools."""
        return self.hear if self.is_watched else None

    def hear(self, event: object) -> None:
        """Keep the events of tools."""
        if isinstance(event, ToolEvent):
            self.watched.append(event)

    async def body(self, ctx: RunContext[None], deed: str) -> str:
        """Be the body of a tool, and note it."""
        note = Note(self.clock.now())
        self.notes.setdefault((ctx.run_id, ctx.call_id), []).append(note)
        try:
            await self.does(deed, ctx)
            note.returned = True
        finally:
            note.ended_at = self.clock.now()
        return "done"

    async def does(self, deed: str, ctx: RunContext[None]) -> None:
        """Do what the call asks for."""
        await anyio.lowlevel.checkpoint()
        if deed == "break" and not self.is_free:
            await self.held.wait()
            assert self.raises is not None
            raise self.raises
        if deed == "quick" or self.is_free:
            return
        await anyio.sleep(self.takes_s)
        if deed == "flaky" and ctx.attempt == 1:
            raise TransientError("come back later", retry_after_s=0)
        if deed == "ask" and not ctx.answers:
            raise InputRequired(ASKS)
        self.held.set()
        await anyio.sleep_forever()

    def tools(self, **options: object) -> list:
        """A tool of each kind; `options` are of those that are not read-only."""

        def acting(**own: object):
            async def act(ctx: RunContext[None], deed: str = "hold") -> str:
                return await self.body(ctx, deed)

            return tool(**own)(act)

        return [
            acting(name="look", read_only=True, timeout_s=60),
            acting(name="put", idempotent=True, timeout_s=60),
            acting(name="pay", timeout_s=60),
            acting(name="gated_look", read_only=True, requires_approval=True, timeout_s=60),
            acting(name="gated_pay", requires_approval=True, timeout_s=60),
            acting(name="brief_look", read_only=True, timeout_s=self.takes_s + 1),
            acting(name="brief_pay", timeout_s=self.takes_s + 1),
        ]

    def agent(self, store: Store, **options: object) -> Agent:
        """A worker."""
        own = {"limits": Limits(seconds=40), "store": store, "clock": self.clock, "name": "chief"} | options
        child = Agent(Speaker(self.child), tools=self.tools(), clock=self.clock, name="child")
        helpers = [child.as_tool(name="child", timeout_s=50), *self.tools()]
        return Agent(Speaker(self.chief), tools=helpers, **own)

    async def chief(self, request: Request, emit: Emit | None = None) -> Reply:
        """Call the tool under test with others around it, then answer."""
        return await self.said(request, emit, CALLS[self.kind])

    async def child(self, request: Request, emit: Emit | None = None) -> Reply:
        """Do the same below."""
        return await self.said(request, emit, [("look", "quick"), ("pay", "hold"), ("look", "quick")])

    async def said(self, request: Request, emit: Emit | None, calls: list[tuple[str, str]]) -> Reply:
        """Return the calls, or the answer behind them."""
        if any(isinstance(message, ToolResult) for message in request.messages):
            return Reply(text="all done")
        argument = {"child": "query"}
        proposed = [
            ProposedCall(id=f"p{n}", name=name, arguments=f'{{"{argument.get(name, "deed")}": "{deed}"}}')
            for n, (name, deed) in enumerate(calls)
        ]
        if emit is not None:
            for index, each in enumerate(proposed):
                emit(CallChunk(index=index, name=each.name, arguments=each.arguments))
            emit(FinishChunk(reason=FinishReason.TOOL_CALLS))
            await anyio.lowlevel.checkpoint()
        return Reply(calls=tuple(proposed))


# The calls of the chief's reply by what is under test: it is held, between calls that are done and calls that wait.
CALLS = {
    "look": [("look", "quick"), ("look", "hold"), ("pay", "quick"), ("look", "quick")],
    "put": [("look", "quick"), ("put", "hold"), ("look", "quick")],
    "pay": [("look", "quick"), ("pay", "hold"), ("pay", "quick")],
    "flaky look": [("look", "flaky"), ("pay", "quick")],
    "flaky put": [("put", "flaky"), ("pay", "quick")],
    "asking look": [("look", "ask"), ("pay", "quick")],
    "asking pay": [("pay", "ask"), ("look", "quick")],
    "gated look": [("gated_look", "hold"), ("pay", "quick")],
    "gated pay": [("gated_pay", "hold"), ("look", "quick")],
    "child": [("child", "hold"), ("look", "quick")],
    "brief look": [("brief_look", "hold"), ("look", "quick")],
    "brief pay": [("brief_pay", "hold"), ("look", "quick")],
    "broken": [("look", "hold"), ("look", "break"), ("pay", "quick")],
    "flushing": [("look", "quick"), ("put", "hold"), ("pay", "quick")],
}
READ_ONLY = {"look", "gated_look", "brief_look"}


# Stores.


class Mortal(Wrapped):
    """The store of a process that may be killed: nothing that it does then is written."""

    def __init__(self, inner: MemoryStore) -> None:
        """Take the real store."""
        self.inner = inner
        self.is_dead = False

    def append(self, *args: object, **options: object) -> PendingWrite:
        """Pass on what a living process writes."""
        if self.is_dead:
            raise Killed
        return self.inner.append(*args, **options)


class Heir(Wrapped):
    """The store of the next process, which tells that the one before never gave the lease back, as the real ones do."""

    def __init__(self, inner: MemoryStore) -> None:
        """Take the real store."""
        self.inner = inner

    async def lease(self, *args: object, **options: object) -> Lease:
        """Count the crash."""
        lease = await self.inner.lease(*args, **options)
        lease.abandoned = True
        return lease


@attrs.define
class _Stuck(PendingWrite):
    inner: PendingWrite
    held: anyio.Event

    async def wait(self) -> bool:
        self.held.set()
        await anyio.sleep_forever()
        return True


class Slow(Wrapped):
    """A store in which the start of the call under test is written, and not heard of for as long as it is watched."""

    def __init__(self, inner: MemoryStore, world: World) -> None:
        """Take the real store."""
        self.inner = inner
        self.world = world

    def append(self, lease: Lease, run: object, events: tuple, **options: object) -> PendingWrite:
        """Pass on."""
        commit = self.inner.append(lease, run, events, **options)
        starts = [event for event in events if isinstance(event, ToolStarted)]
        return _Stuck(commit, self.world.held) if starts and not self.world.held.is_set() else commit


# What must be true.


def check_call_id(world: World, record: AuditRecord, result: ToolResult | None, *, killed: bool) -> None:
    """Every statement about one call agrees with what its tool's body did."""
    notes, where = world.notes.get((record.run_id, record.call_id), []), f"{record.tool} {record.call_id}: {record}"
    is_agent = record.tool == "child"
    if is_agent:  # its body is the run of the child
        notes = [note for (run_id, _), below in world.notes.items() for note in below if run_id != record.run_id]
        assert bool(record.attempts) == (record.started_at is not None), where
    elif killed and record.tool in READ_ONLY:
        assert record.attempts <= len(notes), where
    else:
        assert record.attempts == len(notes), where
        assert bool(notes) == (record.started_at is not None), where
    if notes and record.started_at is not None and not killed:
        assert record.started_at <= notes[0].begun_at + 0.001, where
    if result is None:
        return
    text = result.content
    assert (result.outcome is Outcome.DONE) == (bool(notes) and notes[-1].returned) or "a person saw it" in text, where
    if not killed and not is_agent:
        assert (result.attempts > 0) == bool(notes), where
    if not notes:
        assert result.outcome not in (Outcome.UNKNOWN, Outcome.TIMED_OUT), where
        assert not any(words in text for words in ("cut off", "may have happened", "had begun,")), where
        assert (result.duration_s, record.duration_s) == (0, 0), where
        return
    denies = ("before the call started", "not run", "Nothing was run", "no answer")
    assert result.outcome not in (Outcome.SKIPPED, Outcome.REJECTED), where
    assert not any(words in text for words in denies), where
    if record.tool in READ_ONLY:
        assert result.outcome is not Outcome.UNKNOWN, where
        assert "may have happened" not in text, where
    elif not notes[-1].returned and not is_agent:
        assert "may have happened" in text or "a person saw it" in text, where
    if killed or is_agent:
        return
    last = notes[-1]
    assert last.ended_at is not None
    assert result.started_at <= last.begun_at + 0.001, where
    assert result.duration_s >= last.ended_at - last.begun_at - 0.001, where
    assert result.duration_s == record.duration_s, where
    assert record.ended_at is not None
    assert result.completed_at <= record.ended_at + 0.001, where


def check_stream(world: World) -> None:
    """A call is told as started and then as ended, for each dispatch; as completed only where its body returned."""
    asides = (ToolEventType.QUEUED, ToolEventType.DRAINED)
    seen = [event for event in world.watched if event.run_id == "run" and event.type not in asides]
    for call_id in {event.call_id for event in seen}:
        told = [event.type for event in seen if event.call_id == call_id]
        notes = [
            note for (run_id, call), each in world.notes.items() if (run_id, call) == ("run", call_id) for note in each
        ]
        starts, ends = told[::2], told[1::2]
        assert set(starts) == {ToolEventType.STARTED} or (not notes and told == [ToolEventType.ERROR]), told
        assert len(starts) == len(ends) or not notes, told
        completed = ToolEventType.COMPLETED in told
        assert not completed or world.kind == "child" or any(note.returned for note in notes), told


async def check(world: World, agent: Agent, run_id: str, *, killed: bool = False) -> None:
    """All that is said of a run, and of the run below it, is true."""
    run = await agent.load(run_id)
    results = {message.call_id: message for message in run.messages if isinstance(message, ToolResult)}
    below = await agent.load(f"{run_id}.t1.0") if world.kind == "child" else None
    results_below = {m.call_id: m for m in below.messages if isinstance(m, ToolResult)} if below else {}
    for record in await agent.audit(run_id):
        known = results if record.run_id == run_id else results_below
        check_call_id(world, record, known.get(record.call_id), killed=killed)
    check_stream(world)
    await sound(agent, run)


# The ends.


@attrs.define(eq=False)
class Story:
    """One run that is begun by one worker, and where it comes to."""

    world: World
    store: MemoryStore

    async def drive(self, agent: Agent, scope: anyio.CancelScope) -> None:
        """Be the first worker; people say yes to what it asks."""
        with scope:
            await agent.driver.run_until_blocked(
                agent.start("go", id="run"), ExecutionOptions(on_event=self.world.watch)
            )
            while (run := await agent.load("run")).is_waiting:
                await self.decide(agent, run)
                await agent.resume("run")

    async def decide(self, agent: Agent, run: object) -> None:
        """Say what a person would say."""
        for item in run.pending:
            if item.kind is PendingKind.APPROVAL:
                await agent.approve("run", item.call_id)
            elif item.kind is PendingKind.QUESTION:
                await agent.answer("run", item.call_id, {})
            else:
                await agent.settle(item.run_id, item.call_id, result="a person saw it")

    async def until_held(self, end: Callable[[anyio.CancelScope], Awaitable[None]], store: Store, **options: object):
        """Drive until the call under test is held, then let the end come; return the agent."""
        agent, scope = self.world.agent(store, **options), anyio.CancelScope()
        with anyio.fail_after(1_000):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.drive, agent, scope)
                await self.world.held.wait()
                await end(scope)
        self.world.is_free = True
        return self.world.agent(self.store)

    async def finished(self, agent: Agent) -> None:
        """Let another worker end the run."""
        while not (run := await agent.resume("run")).is_over:
            await self.decide(agent, run)
        assert run.state is State.DONE


async def nothing(_scope: anyio.CancelScope) -> None:
    """Wait for what the run does by itself."""


async def cancelled(scope: anyio.CancelScope) -> None:
    """End the task."""
    scope.cancel()


async def limit_of_time(story: Story) -> None:
    """The run's own time is up."""
    agent = await story.until_held(nothing, story.store)
    await check(story.world, agent, "run")


async def cancel_request(story: Story) -> None:
    """Somebody asks for the end of the run while it is driven."""
    other = story.world.agent(story.store)
    await story.until_held(lambda _scope: other.cancel("run"), story.store)
    await check(story.world, other, "run")


async def task_then_cancel(story: Story) -> None:
    """The task is cancelled, and later somebody ends the run."""
    agent = await story.until_held(cancelled, story.store)
    await check(story.world, agent, "run")
    await agent.cancel("run")
    await check(story.world, agent, "run")


async def task_then_resume(story: Story) -> None:
    """The task is cancelled, and another worker goes on."""
    agent = await story.until_held(cancelled, story.store)
    await story.finished(agent)
    await check(story.world, agent, "run")


async def twice_then_cancel(story: Story) -> None:
    """Two workers after one another are cancelled over the same call."""
    await story.until_held(cancelled, story.store)
    world = story.world
    world.is_free, world.held = False, anyio.Event()
    agent, scope = world.agent(story.store), anyio.CancelScope()

    async def again() -> None:
        with scope:
            await story.finished(agent)
        world.held.set()

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(again)
            await world.held.wait()
            scope.cancel()
    world.is_free = True
    with suppress(ConflictError):  # a person has settled it, and it is over
        await agent.cancel("run")
    await check(world, agent, "run")


async def killed_then_cancel(story: Story) -> None:
    """The process is killed, and somebody ends the run."""
    await killed(story)
    agent = story.world.agent(Heir(story.store))
    await agent.cancel("run")
    await check(story.world, agent, "run", killed=True)


async def killed_then_resume(story: Story) -> None:
    """The process is killed, and another goes on."""
    await killed(story)
    agent = story.world.agent(Heir(story.store))
    await story.finished(agent)
    await check(story.world, agent, "run", killed=True)


async def killed(story: Story) -> None:
    """Kill the process of the first worker."""
    store = Mortal(story.store)

    async def kill(scope: anyio.CancelScope) -> None:
        store.is_dead = True
        scope.cancel()

    with suppress(BaseExceptionGroup, Killed):
        await story.until_held(kill, store)
    story.world.is_free = True


async def lease_lost(story: Story) -> None:
    """Another worker takes the run over and ends it, while the first still works."""

    async def take_over(_scope: anyio.CancelScope) -> None:
        record = story.store._records["run"]
        lease, record.lease_ref = record.lease, None
        story.world.is_free = True
        other = story.world.agent(Heir(story.store))
        taken = await story.store.lease("run")
        story.store.release(taken)
        lease.lost = True
        lease.wake()
        await other.cancel("run")

    with suppress(BaseExceptionGroup, AgentError):
        await story.until_held(take_over, story.store)
    await check(story.world, story.world.agent(story.store), "run", killed=True)


ENDS = [
    limit_of_time,
    cancel_request,
    task_then_cancel,
    task_then_resume,
    twice_then_cancel,
    killed_then_cancel,
    killed_then_resume,
    lease_lost,
]
SPECIAL = ("brief look", "brief pay", "broken", "flushing")
KINDS = [kind for kind in CALLS if kind not in SPECIAL]


def media_label(value: object) -> str:
    return getattr(value, "__name__", str(value))


def played(kind: str, end: Callable[[Story], Awaitable[None]], *, is_watched: bool = True) -> World:
    """Play a story in virtual time, and return what happened."""

    async def play(store: MemoryStore, clock: Clock) -> World:
        world = World(clock, kind, takes_s=2, is_watched=is_watched)
        await end(Story(world, store))
        return world

    return virtually(play)


@pytest.mark.parametrize("end", ENDS, ids=media_label)
@pytest.mark.parametrize(("kind", "is_watched"), [*((kind, True) for kind in KINDS), ("look", False), ("pay", False)])
def test_what_is_said_of_a_call_is_what_its_body_did(kind, end, is_watched):
    """Every kind of call under every end of its run: the result, the audit and the stream say what the body noted."""
    assert played(kind, end, is_watched=is_watched).held.is_set()


@pytest.mark.parametrize("kind", ["look", "put", "pay", "asking look", "child"])
@pytest.mark.parametrize("end", [cancel_request, task_then_cancel, task_then_resume], ids=media_label)
async def test_the_same_in_real_time(kind, end, anyio_backend):
    """The ends that need no clock, on both event loops."""
    world, store = World(SystemClock(), kind, takes_s=0), MemoryStore()
    with anyio.fail_after(HANG_S):
        await end(Story(world, store))
    assert world.held.is_set()
    await no_leases(store)


@pytest.mark.parametrize("kind", ["brief look", "brief pay"])
def test_a_call_that_was_cut_off_at_its_own_time_says_so(kind):
    """The run goes on; the result is of a body that has begun and has not returned."""

    async def time_out(story: Story) -> None:
        agent = await story.until_held(nothing, story.store)
        await check(story.world, agent, "run")
        assert (await agent.audit("run"))[0].status is Outcome.TIMED_OUT

    played(kind, time_out)


def test_a_sibling_that_raises_what_no_tool_may():
    """Somebody at the keyboard ends all calls of the reply; the next worker's end of the run knows which had begun."""

    async def interrupted(story: Story) -> None:
        story.world.raises = KeyboardInterrupt()
        with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
            await story.until_held(nothing, story.store)
        agent = story.world.agent(story.store)
        await agent.cancel("run")
        await check(story.world, agent, "run")
        outcomes = [record.status for record in await agent.audit("run")]
        assert outcomes == [Outcome.CANCELLED, Outcome.CANCELLED, Outcome.SKIPPED]

    played("broken", interrupted)


@pytest.mark.parametrize("end", [limit_of_time, cancel_request, task_then_cancel, task_then_resume], ids=media_label)
def test_a_start_that_was_written_and_came_to_nothing_is_taken_back(end):
    """Who is cut off before the tool is called says so: nobody is asked about a call that never began."""

    async def flushing(story: Story) -> None:
        store, story.store = story.store, Slow(story.store, story.world)
        await end(story)
        events = await story.world.agent(store).history("run")
        assert [event.undone for event in events if isinstance(event, ToolCutOff)] == [True]
        assert not any(isinstance(event, ToolLost) for event in events)

    played("flushing", flushing)


@pytest.mark.parametrize("kind", ["gated look", "gated pay"])
def test_an_approval_that_nobody_gave_in_time(kind):
    """The call never began, and nothing that is said of it tells otherwise."""

    async def expired(story: Story) -> None:
        agent = story.world.agent(story.store)
        await agent.run("go", id="run")
        await anyio.sleep(10**7)
        story.world.is_free = True
        await story.finished(agent)
        await check(story.world, agent, "run")
        assert (await agent.audit("run"))[0].status is Outcome.REJECTED

    played(kind, expired)


def test_calls_that_began_early_and_whose_reply_failed():
    """The journal knows no such call, and those who watch are told that they were cut off."""

    async def failing(story: Story) -> None:
        world = story.world

        async def break_off(request: Request, emit: Emit | None = None) -> Reply:
            await world.chief(request, emit)
            await world.held.wait()
            raise ModelError("the line is cut")

        agent = world.agent(story.store).with_(model=Speaker(break_off))
        run = await agent.driver.run_until_blocked(agent.start("go", id="run"), ExecutionOptions(on_event=world.watch))
        assert (run.stop_reason, run.calls) == (StopReason.MODEL_ERROR, ())
        assert Counter(event.type for event in world.watched if event.call_id == "t1.1") == {
            ToolEventType.QUEUED: 1,
            ToolEventType.STARTED: 1,
            ToolEventType.ERROR: 1,
        }
        check_stream(world)

    assert played("look", failing).held.is_set()


def test_a_batch_that_is_cut_off_has_no_result_of_what_did_not_end():
    """A queue that works by itself hands over what was done, and says nothing of the others."""

    async def cut(story: Story) -> None:
        world, host = story.world, Keeping()
        queue = ToolQueue(ToolRegistry.of(world.tools()), host=host, clock=world.clock)
        names = [("look", "quick"), ("pay", "hold"), ("look", "quick")]
        calls = [
            ToolCall(id=f"t1.{n}", name=name, arguments=f'{{"deed": "{deed}"}}') for n, (name, deed) in enumerate(names)
        ]
        with anyio.move_on_after(5):
            await queue.execute_all(calls)
        assert [(result.call_id, result.outcome) for result in host.kept] == [("t1.0", Outcome.DONE)]
        assert sorted(call_id for _, call_id in world.notes) == ["t1.0", "t1.1"]

    played("pay", cut)
