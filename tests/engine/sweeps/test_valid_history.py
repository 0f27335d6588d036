"""A valid history, always: whatever ends a run, or cuts it short, both vendors take what is left of it.

A run is led through exits of every kind, one after the other, and gone on with until it is over. Then each request that
a model was ever sent, and the history after each event of each journal, is read as OpenAI and as Anthropic would read
it. A new exit is one more line of `EXITS`, a new thing to wait for one more of `WAYS`, a new call one of `CALLS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm import (
    Agent,
    ConflictError,
    ContextTooLongError,
    InputKind,
    Limits,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    Outcome,
    Pending,
    PendingKind,
    Run,
    Settings,
    StoreError,
    TextPart,
    Tool,
    Usage,
    UserMessage,
    ask_user,
    tool,
    wait,
)
from agentfsm.core.events import ToolFinished, ToolsChosen
from agentfsm.ports import (
    CallChunk,
    Emit,
    FinishChunk,
    FinishReason,
    Model,
    ProposedCall,
    Reply,
    Request,
    Store,
    TextChunk,
)
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, VirtualClock, call, run_virtual, say
from tests.support.checks import HANG_S, Trap, calls_of, no_leases, results_of, sound_run, valid_history
from tests.support.failing_stores import CancellingStore, CrashingStore, FullStore, WorkerKilled
from tests.support.valid_histories import IMAGE, NEXT, RUN, taken
from tests.support.wire_rules import check_wires
from tests.support.word_counter import WordCounter

COST = Usage(input_tokens=10, output_tokens=5)
# Between two moments at which a run is cut: tools take one second.
STEP_S = 0.35

# What a model says

# The name and the arguments of each call, as the model writes them.
CALLS: dict[str, tuple[str, str]] = {
    "read": ("read", '{"n": 1}'),
    "put": ("put", '{"n": 2}'),
    "pay": ("pay", '{"n": 3}'),
    "sign": ("sign", '{"n": 4}'),
    "fail": ("fail", '{"n": 5}'),
    "hang": ("hang", '{"n": 6}'),
    "odd": ("odd", '{"n": 7}'),
    "long": ("long", '{"n": 8}'),
    "helper": ("helper", '{"query": "help"}'),
    "ask": ("ask_user", '{"question": "which one?"}'),
    "nap": ("wait", '{"seconds": 9, "reason": "the rain"}'),
    "unknown": ("no such töol " * 9, "{}"),
    "unnamed": ("", ""),
    "malformed": ("pay", '{"n": '),
    "a list": ("read", "[1]"),
    "mended": ("read", "{'n': 1,}"),
    "misfit": ("put", '{"m": "\\ud83d\\ude00"}'),
    "half a pair": ("read", '{"n": "\\ud83d"}'),
}
Line = tuple[str, ...] | Exception | Reply
DONE = Reply(text="done", usage=COST)


@attrs.define(eq=False)
class Talker(Model):
    """Says line after line, and that it is done when there is none left; keeps what it was asked."""

    world: World
    next_line: Callable[[Request], Line]
    name: str = "talker"
    window_tokens: int = 128_000

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Say the next line, piece by piece where it is heard."""
        self.world.requests.append(request)
        await self.world.trap.visit()
        line = self.next_line(request)
        if isinstance(line, Exception):
            raise line
        if isinstance(line, Reply):
            return line
        calls = tuple(ProposedCall(id="same", name=CALLS[key][0], arguments=CALLS[key][1]) for key in line)
        reply = Reply(text=("Let me see.", "", "\n")[len(calls) % 3], calls=calls, usage=COST)
        if emit is not None:
            emit(TextChunk(text=reply.text))
            for index, each in enumerate(calls):
                emit(CallChunk(index=index, name=each.name, arguments=each.arguments))
                await anyio.sleep(STEP_S)
            emit(FinishChunk(reason=FinishReason.TOOL_CALLS))
        return reply

    def cost_usd(self, usage: Usage) -> float:
        """Tell a price."""
        return usage.tokens / 1_000


# The world


@tool
async def BASE(n: int) -> str:  # noqa: N802  a constant: the schema of all tools here, which takes long to make
    """Do something."""
    raise NotImplementedError


@attrs.define(eq=False)
class World:
    """A conversation, the store that outlives its workers, and what models were asked."""

    lines: list[Line]
    child: tuple[str, ...] = ("sign", "pay")
    # What a helper calls before it answers.
    choice: int = 0
    # What people say first, of the things that they may.
    is_streamed: bool = False
    window_tokens: int = 128_000
    store: FullStore = attrs.field(factory=lambda: FullStore(10**9))
    clock: VirtualClock = attrs.field(factory=VirtualClock)
    trap: Trap = attrs.field(factory=Trap)
    requests: list[Request] = attrs.field(factory=list)
    run_id: str = RUN
    after: dict[str, Any] = attrs.field(factory=dict)
    # What the run goes on from.

    _tools: list[Tool[..., Any]] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.store.clock = self.clock
        helper = Agent(Talker(self, self._child_line), name="helper", tools=self._acting())
        self._tools = [*self._acting(), helper.as_tool()]

    def worker(self, store: Store | None = None, **limits: Any) -> Agent:
        """A fresh worker on the same store."""
        return Agent(
            Talker(self, self._line, window_tokens=self.window_tokens),
            tools=self._tools,
            store=store or self.store,
            clock=self.clock,
            limits=Limits(**{"tool_timeout_s": 5.0, "model_retries": 1, **limits}),
            settings=Settings(stream=self.is_streamed, max_tokens=50),
        )

    def _line(self, _request: Request) -> Line:
        return self.lines.pop(0) if self.lines else DONE

    def _child_line(self, request: Request) -> Line:
        return DONE if calls_of(request.messages) else self.child

    def _acting(self) -> list[Tool[..., Any]]:
        def tool_of(name: str, result: str = "", error: Exception | None = None, **options: Any) -> Tool[..., Any]:
            async def act(n: int) -> str:
                await self.trap.visit()
                await (anyio.sleep_forever() if name == "hang" else anyio.sleep(1))
                await self.trap.visit()
                if error is not None:
                    raise error
                return result or f"{name} done"

            return attrs.evolve(BASE, function=act, name=name, **options)

        return [
            tool_of("read", read_only=True),
            tool_of("put", idempotent=True),
            tool_of("pay"),
            tool_of("sign", requires_approval=True),
            tool_of("fail", error=ValueError("no luck \ud800"), read_only=True),
            tool_of("hang"),
            tool_of("odd", "\ud800 half of a pair, \x00 and \u202e", read_only=True),
            tool_of("long", "many words " * 400, read_only=True, shown_tokens=400),
            ask_user,
            wait,
        ]

    async def go(self, agent: Agent) -> Run:
        """Begin the run or go on with it, and decide what it waits for, until it is over."""
        for turn in range(40):
            run = await self.once(agent)
            if run.is_over:
                return run
            await decide(self, self.choice + turn)
        raise AssertionError(f"it does not end: {run}")

    async def once(self, agent: Agent) -> Run:
        """Begin the run or go on with it, until it is over or waits."""
        return await agent.resume(self.run_id) if await self.exists() else await agent.finish(self.begun(agent))

    def begun(self, agent: Agent) -> Run:
        """A new run."""
        return agent.start((TextPart(text="go"), IMAGE), id=self.run_id, **self.after)

    async def exists(self) -> bool:
        """Whether the run was created."""
        return self.run_id in [summary.id for summary in await self.store.runs(limit=1_000)]


# Exits: each leaves the run over, waiting, or cut at a point

Exit = Callable[[World, int], Awaitable[None]]


async def _end(world: World, _at: int) -> None:
    """Nothing is in the way."""
    await world.go(world.worker())


async def _wait(world: World, at: int) -> None:
    """The run waits for people, who have decided so many things."""
    for turn in range(at):
        run = await world.once(world.worker())
        if run.is_over:
            break
        if turn < at - 1:
            await decide(world, world.choice + turn)


def _limit(**limits: float) -> Exit:
    """A limit, the larger the later the point."""

    async def reach(world: World, at: int) -> None:
        await world.go(world.worker(**{name: type(value)(value * at) for name, value in limits.items()}))

    return reach


def _said(*lines: Line) -> Exit:
    """The model says this after some of its lines."""

    async def say(world: World, at: int) -> None:
        place = (at - 1) % (len(world.lines) + 1)
        world.lines[place:place] = lines
        await world.go(world.worker())

    return say


async def _loop(world: World, _at: int) -> None:
    """The model calls the same things over and over."""
    world.lines[:0] = [("read", "put")] * 12
    await world.go(world.worker())


async def _cancel(world: World, at: int) -> None:
    """Somebody else ends the run, at some moment."""

    async def end() -> None:
        await anyio.sleep(at * STEP_S)
        if await world.exists():
            with contextlib.suppress(ConflictError):  # over
                await world.worker().cancel(world.run_id, by="ann")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end)
        await world.go(world.worker())


async def _pause(world: World, at: int) -> None:
    """Somebody lets the run rest, at some moment."""

    async def rest() -> None:
        await anyio.sleep(at * STEP_S)
        if await world.exists():
            with contextlib.suppress(ConflictError):  # over
                await world.worker().pause(world.run_id, by="ann")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rest)
        await world.once(world.worker())


async def _fork(world: World, at: int) -> None:
    """Another run begins as this one did, and goes its own way from there."""
    run = await world.go(world.worker())
    fork = await world.worker().fork(run.id, at=min(at, run.version - 1), id=f"{run.id}+{at}")
    world.run_id = fork.id


async def _send(world: World, at: int) -> None:
    """Somebody sends two more inputs, at some moment."""

    async def tell() -> None:
        await anyio.sleep(at * STEP_S)
        if await world.exists():
            with contextlib.suppress(ConflictError):  # over
                await world.worker().send(world.run_id, "and another thing")
                await world.worker().send(world.run_id, "the door is open", kind=InputKind.EVENT)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        await world.go(world.worker())


async def _cut(world: World, at: int) -> None:
    """The task is cancelled at an await."""
    world.trap = Trap(at)
    with anyio.CancelScope() as scope:
        world.trap.cancel = scope.cancel
        await world.go(world.worker(CancellingStore(world.store, world.trap)))
    world.trap = Trap()


async def _out_of_time(world: World, at: int) -> None:
    """The caller's patience ends, at some moment."""
    with anyio.move_on_after(at * STEP_S):
        await world.go(world.worker())


def _killed(*, written: bool) -> Exit:
    """The process is gone before an append, or right after."""

    async def kill(world: World, at: int) -> None:
        with contextlib.suppress(WorkerKilled):
            await world.go(world.worker(CrashingStore(world.store, at, written=written)))

    return kill


async def _full(world: World, at: int) -> None:
    """The disk is full from an append on."""
    world.store.at = world.store.count + at
    with contextlib.suppress(StoreError):
        await world.go(world.worker())
    world.store.make_room()


async def _steps(world: World, at: int) -> None:
    """The caller goes some steps and leaves."""
    agent = world.worker()
    run = await agent.load(world.run_id) if await world.exists() else world.begun(agent)
    for _ in range(at):
        run = await agent.step(run)


async def _cancel_at_rest(world: World, at: int) -> None:
    """Somebody ends the run when nobody drives it: right after it was created, or after some steps."""
    await (_cut(world, 2) if at == 1 else _steps(world, at - 1))
    with contextlib.suppress(ConflictError):  # over
        await world.worker().cancel(world.run_id)


async def _left(world: World, at: int) -> None:
    """Who watches leaves after some events."""
    agent = world.worker()
    run = await agent.load(world.run_id) if await world.exists() else world.begun(agent)
    if not run.is_over:
        async with agent.stream(run) as events:
            async for _ in events:
                at -= 1
                if not at:
                    break


# What happens, and at how many points of `TALK` it may: then the run has come to its end, or waits.
EXITS: dict[str, tuple[Exit, int]] = {
    "end": (_end, 1),
    "wait": (_wait, 5),
    "turns": (_limit(turns=1), 5),
    "tokens": (_limit(tokens=40), 5),
    "usd": (_limit(usd=0.04), 5),
    "seconds": (_limit(seconds=STEP_S), 24),
    "errors": (_limit(errors=1), 2),
    "loop": (_loop, 1),
    "model refuses": (_said(ModelError("401")), 5),
    "model is gone": (_said(*[ModelUnavailableError("503")] * 9), 5),
    "model comes back": (_said(*[ModelUnavailableError("503")] * 3), 5),
    "model says nothing": (_said(Reply()), 5),
    "model talks nonsense": (_said(ModelReplyError("<html>")), 5),
    "too long": (_said(ContextTooLongError("too long")), 5),
    "answer cut off": (_said(Reply(text="half an", finish_reason=FinishReason.LENGTH)), 5),
    "answer filtered": (_said(Reply(text="bad", finish_reason=FinishReason.CONTENT_FILTER)), 5),
    "model declines": (_said(Reply(text="I will not", finish_reason=FinishReason.REFUSAL)), 5),
    "cancel": (_cancel, 30),
    "cancel at rest": (_cancel_at_rest, 9),
    "pause": (_pause, 10),
    "fork": (_fork, 45),
    "send": (_send, 30),
    "task cancelled": (_cut, 90),
    "out of time": (_out_of_time, 30),
    "killed before a write": (_killed(written=False), 38),
    "killed after a write": (_killed(written=True), 38),
    "disk full": (_full, 38),
    "steps": (_steps, 8),
    "stream left": (_left, 40),
}


# Decisions: what people say to a run that waits

Way = Callable[[World, Pending], Awaitable[None]]


def _saying(**answer: Any) -> Way:
    async def settle(world: World, item: Pending) -> None:
        await world.worker().settle(item.run_id, item.call_id, by="ann", **answer)

    return settle


async def _approve(world: World, item: Pending) -> None:
    await world.worker().approve(item.run_id, item.call_id, by="ann")


async def _edit(world: World, item: Pending) -> None:
    await world.worker().approve(item.run_id, item.call_id, arguments={"n": 40})


async def _reject(world: World, item: Pending) -> None:
    await world.worker().reject(item.run_id, item.call_id, message="too dear \ud800")


async def _expire(world: World, item: Pending) -> None:
    assert item.expires_at is not None
    await anyio.sleep(max(0.0, item.expires_at - world.clock.now()))


async def _answer(world: World, item: Pending) -> None:
    await world.worker().answer(item.run_id, item.call_id, "the red one")


async def _answer_badly(world: World, item: Pending) -> None:
    await world.worker().answer(item.run_id, item.call_id, "", failed=True)


async def _tell(world: World, item: Pending) -> None:
    await world.worker().send(item.run_id, "it has stopped", kind=InputKind.EVENT)


async def _nothing(_world: World, _item: Pending) -> None:
    """To resume it is enough."""


WAYS: dict[PendingKind, tuple[Way, ...]] = {
    PendingKind.APPROVAL: (_approve, _edit, _reject, _expire),
    PendingKind.OUTCOME: (_saying(result="paid"), _saying(failed="no money"), _saying(rerun=True)),
    PendingKind.QUESTION: (_answer, _answer_badly, _expire),
    PendingKind.INPUT: (_tell, _expire),
    PendingKind.PAUSE: (_nothing,),
}


async def decide(world: World, choice: int) -> None:
    """Answer the first thing that the run waits for."""
    item = (await world.worker().load(world.run_id)).pending[0]
    ways = WAYS[item.kind]
    await ways[choice % len(ways)](world, item)


# What has to hold


@pytest.fixture(autouse=True, scope="module")
def _words():
    """Vocabularies are words here: virtual time would not wait for the thread that loads one."""

    async def load(_model_name: str) -> WordCounter:
        return WordCounter()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentfsm.tokens.load_counter", load)
        yield


async def check_run(world: World, run_id: str) -> None:
    """Fail unless the history was valid after each event, only grew, and says of each call what the journal says."""
    agent = world.worker()
    run, events = await agent.load(run_id), await agent.history(run_id)
    sound_run(run)
    then = await agent.load(run_id, at=0)
    for event in events:
        now = then.apply(event)
        if now.messages is not then.messages:
            assert now.messages[: len(then.messages)] == then.messages
            taken(now.messages)
        then = now
    assert then == run
    own = run.messages[run.own_start :]
    assert own[:1] == ((UserMessage(parts=run.header.prompt),) if run.version else ())
    finished = {each.result.call_id: each.result for each in events if isinstance(each, ToolFinished)}
    asked = [call.id for each in events if isinstance(each, ToolsChosen) for call in each.message.calls]
    closed = [call.id for call in calls_of(own)]
    assert closed == [result.call_id for result in results_of(own)]
    assert closed + [entry.call.id for entry in run.open] == asked
    for result in [*results_of(own), *[entry.result for entry in run.open if entry.result is not None]]:
        if result.call_id in finished:
            assert result == finished[result.call_id], "a finished result is kept"
        else:
            assert result.outcome in {Outcome.SKIPPED, Outcome.CANCELLED, Outcome.UNKNOWN}


async def check(world: World) -> None:
    """Fail unless all that was sent and all that is kept is valid."""
    await no_leases(world.store)
    for request in world.requests:
        valid_history(request.messages)
        check_wires(request.messages, request.instructions)
    for summary in await world.store.runs(limit=1_000):
        await check_run(world, summary.id)


# Every exit, at every point

TALK: tuple[tuple[str, ...], ...] = (
    ("read", "pay", "read", "unknown"),
    ("put", "helper", "sign", "ask"),
    ("malformed", "fail"),
)


@pytest.mark.parametrize("streamed", ["odd", pytest.param("even", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", EXITS)
def test_an_exit_at_any_point_leaves_a_valid_history(name, streamed):
    """After the exit, when the run is over, and in a run that goes on from it; every other point in a streamed run."""
    leave, points = EXITS[name]

    async def play() -> None:
        for at in range(1, points + 1):
            world = World(list(TALK), choice=at // 2, is_streamed=(at % 2 == 1) == (streamed == "odd"))
            await leave(world, at)
            run = await world.go(world.worker())
            world.run_id, world.after, world.lines = NEXT, {"after": run}, [("read", "pay")]
            assert (await world.go(world.worker())).output == "done"
            await check(world)

    run_virtual(play)


# All together

# Windows shall fill up.
any_calls = st.lists(st.sampled_from([*CALLS, *["long"] * 5]), min_size=1, max_size=4).map(tuple)
childs_calls = st.lists(st.sampled_from([key for key in CALLS if key != "helper"]), max_size=3).map(tuple)
talks = st.fixed_dictionaries(
    {
        "lines": st.lists(any_calls, min_size=1, max_size=4),
        "child": childs_calls,
        "choice": st.integers(0, 11),
        "is_streamed": st.booleans(),
        "window_tokens": st.just(128_000) | st.integers(800, 4_000),
    }
)
several_exits = st.lists(st.tuples(st.sampled_from(list(EXITS)), st.integers(0, 89)), min_size=1, max_size=3)


# Each a run that goes on from the one before.
chapters = st.lists(st.tuples(talks, several_exits), min_size=1, max_size=3)


def lead(story: Sequence[tuple[dict[str, Any], Sequence[tuple[str, int]]]], *, in_session: bool) -> None:
    """Lead each run through its exits to its end, and check all there is."""

    async def play() -> None:
        world, run = World([]), None
        for number, (talk, leaves) in enumerate(story):
            world.run_id, world.after = f"{RUN}{number}", {"session": "one"} if in_session else {"after": run}
            for name, value in talk.items():
                setattr(world, name, value)
            for name, at in leaves:
                leave, points = EXITS[name]
                await leave(world, 1 + at % points)
            run = await world.go(world.worker())
        await check(world)

    run_virtual(play)


@given(story=chapters, in_session=st.booleans())
def test_any_exits_of_any_conversation_leave_a_valid_history(story, in_session):
    """Whatever is called, several exits one after the other, and the same again in runs that go on from there."""
    lead(story, in_session=in_session)


@pytest.mark.soak
@settings(max_examples=10_000)
@given(story=chapters, in_session=st.booleans())
def test_ten_thousand_conversations_leave_a_valid_history(story, in_session):
    """The same for many more."""
    lead(story, in_session=in_session)


async def test_a_run_is_ended_from_another_handle_of_its_store(tmp_path):
    """What had finished is kept, what waited is closed, and another handle goes on from it."""
    pytest.importorskip("apsw")
    one, other = SQLiteStore(tmp_path / "runs.db"), SQLiteStore(tmp_path / "runs.db")
    reading, paying = tool(read_only=True)(_read), tool(requires_approval=True)(_pay)
    script = ScriptedModel(say("", call("_read"), call("_pay"), call("_read")), "done")
    async with Agent(script, tools=[reading, paying], store=one) as agent:
        waiting = await agent.run("go", id=RUN)
        taken(waiting.messages)
        async with agent.with_(store=other) as elsewhere:
            with anyio.fail_after(HANG_S):
                while (await other.runs())[0].driven:  # the lease is given back behind what the call returned
                    await checkpoint()
            await elsewhere.cancel(RUN)
            run = await agent.load(RUN)
            assert [result.outcome for result in results_of(run.messages)] == [
                Outcome.DONE,
                Outcome.SKIPPED,
                Outcome.SKIPPED,
            ]
            taken(run.messages)
            await elsewhere.run("and now?", after=await elsewhere.load(RUN))
        for request in script.requests:
            check_wires(request.messages)


async def _read() -> str:
    """Read."""
    return "words"


async def _pay() -> str:
    """Pay."""
    return "paid"
