"""`queue.stream(calls)`, and listeners that raise, hang or are slow: what is told, and in which order."""

from __future__ import annotations

import threading

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Outcome, RunContext, ToolCall, ToolEvent, ToolEventType, ToolQueue, ToolRegistry, tool
from agentfsm.core.labels import ToolKind
from agentfsm.streaming.callbacks import MAX_BUFFERED_EVENTS
from agentfsm.testing import VirtualClock, run_virtual
from agentfsm.tools.queue.dispatch import QueueHost
from tests.support.checks import HANG_S

ENDS = {"tool_completed", "tool_error"}


def calls(*names: str) -> list[ToolCall]:
    """Calls without arguments, in order."""
    return [ToolCall(id=f"t1.{n}", name=name, arguments="{}") for n, name in enumerate(names)]


@tool(read_only=True, estimate_s=2.5)
async def talk(ctx: RunContext[None]) -> str:
    """Say how far it is."""
    await ctx.progress("half")
    await checkpoint()
    ctx.progress("nearly")
    return "talked"


@tool(read_only=True)
def talk_in_thread(ctx: RunContext[None]) -> str:
    """Say how far it is, from a thread."""
    for words in ("one", "two", "three"):
        ctx.progress(words)
    return "talked in a thread"


@tool
async def write() -> str:
    """Write."""
    return "written"


@tool(concurrency_safe=True)
async def broken() -> str:
    """Fail."""
    raise ValueError("no luck")


def queue_of(*tools, **options) -> ToolQueue:
    """A queue for these tools."""
    return ToolQueue(ToolRegistry.of(tools), **options)


def told(events: list[ToolEvent], call_id: str) -> list[tuple[str, str]]:
    """What was told of a call: what, and which words."""
    return [(str(event.type).removeprefix("tool_"), event.message) for event in events if event.call_id == call_id]


# The stream


async def test_the_events_of_a_stream_come_in_order():
    """Queued with their places, then each call's start, progress and end, then the drain; numbered without gaps."""
    wanted = calls("talk", "talk_in_thread", "broken", "write", "nobody")
    with anyio.fail_after(HANG_S):
        async with queue_of(talk, talk_in_thread, broken, write).stream(wanted) as stream:
            assert stream.results == []
            events = [event async for event in stream]
    assert [(str(event.type), event.position) for event in events[:5]] == [("tool_queued", n) for n in range(5)]
    assert [event.kind for event in events[:5]] == [ToolKind.DIRECT] * 4 + [None]
    assert [event.estimate_s for event in events[:5]] == [2.5, None, None, None, None]
    assert events[-1].type is ToolEventType.DRAINED
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    begun = [("queued", ""), ("started", "")]
    assert told(events, "t1.0") == [*begun, ("progress", "half"), ("progress", "nearly"), ("completed", "")]
    spoken = [("progress", words) for words in ("one", "two", "three")]
    assert told(events, "t1.1") == [*begun, *spoken, ("completed", "")]
    assert told(events, "t1.2") == [*begun, ("error", stream.results[2].content)]
    assert told(events, "t1.3") == [*begun, ("completed", "")]
    assert told(events, "t1.4") == [("queued", ""), ("error", stream.results[4].content)]
    order = [(event.call_id, str(event.type)) for event in events]
    before = max(order.index((f"t1.{n}", kind)) for n in range(3) for kind in ENDS if (f"t1.{n}", kind) in order)
    assert before < order.index(("t1.3", "tool_started"))
    assert [result.call_id for result in stream.results] == [call.id for call in wanted]
    assert [result.outcome is Outcome.DONE for result in stream.results] == [True, True, False, True, False]


async def test_a_stream_of_no_calls_is_drained():
    """Nothing to run is told as such."""
    async with queue_of().stream([]) as stream:
        events = [event async for event in stream]
    assert [(event.type, event.seq) for event in events] == [(ToolEventType.DRAINED, 1)]
    assert stream.results == []


async def test_a_single_call_is_told_like_many():
    """The short way for one call does not leave out its events."""
    async with queue_of(write).stream(calls("write")) as stream:
        kinds = [str(event.type) for event in [event async for event in stream]]
    assert kinds == ["tool_queued", "tool_started", "tool_completed", "queue_drained"]
    assert [result.content for result in stream.results] == ["written"]


def test_ends_carry_how_long_and_how_well():
    """Durations are the calls' own, in virtual time; a time-out is an error that says so."""

    async def play() -> list[ToolEvent]:
        async def nap(seconds: float = 2) -> str:
            await anyio.sleep(seconds)
            return "rested"

        tools = [tool(name="nap", read_only=True)(nap), tool(name="cut", read_only=True, timeout_s=1)(nap)]
        async with queue_of(*tools, clock=VirtualClock()).stream(calls("nap", "cut")) as stream:
            return [event async for event in stream]

    events = run_virtual(play)
    ends = [event for event in events if str(event.type) in ENDS]
    assert [(event.tool, event.duration_s, event.success) for event in ends] == [("cut", 1, False), ("nap", 2, True)]
    assert "no result within 1 s" in ends[0].message
    assert ends[1].to_dict()["type"] == "tool_completed"


async def test_progress_that_nobody_hears_costs_nothing():
    """Without a watcher the same tools give the same results."""
    results = await queue_of(talk, talk_in_thread).execute_all(calls("talk", "talk_in_thread"))
    assert [result.content for result in results] == ["talked", "talked in a thread"]


async def test_leaving_the_stream_early_cancels_what_runs():
    """After a `break` nothing of the calls runs on, and what had not begun never begins."""
    begun: list[str] = []
    ended: list[str] = []

    async def hang() -> str:
        begun.append("hang")
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("hang")
        return "never"

    @tool
    async def behind() -> None:
        """Run behind the others."""
        begun.append("behind")

    queue = queue_of(tool(read_only=True)(hang), behind)
    with anyio.fail_after(HANG_S):
        async with queue.stream(calls("hang", "hang", "behind")) as stream:
            async for _ in stream:
                if len(begun) == 2:
                    break
                await checkpoint()
    assert begun == ended == ["hang", "hang"]
    assert stream.results == []
    assert queue.statistics().running == 0


async def test_a_stream_that_nobody_reads_is_cancelled_at_its_end():
    """Entering and leaving the block is leaving early."""
    async with queue_of(write).stream(calls("write", "write")) as stream:
        pass
    assert stream.results == []


async def test_an_error_of_the_reader_comes_out_as_itself():
    """What the reader raises is not wrapped, and ends the calls."""

    @tool(read_only=True)
    async def hang() -> None:
        """Hang."""
        await anyio.sleep_forever()

    async def read() -> None:
        async with queue_of(hang).stream(calls("hang")) as stream:
            async for _ in stream:
                raise ZeroDivisionError

    with anyio.fail_after(HANG_S), pytest.raises(ZeroDivisionError):
        await read()


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_of_the_host_is_raised_to_the_reader(count):
    """The one error that is no tool's comes out where the events end."""

    class Full(QueueHost):
        """A host whose disk is full."""

        def on_result(self, result):
            """Fail."""
            raise OSError("disk full")

    async def read() -> None:
        async with queue_of(talk, host=Full()).stream(calls(*["talk"] * count)) as stream:
            async for _ in stream:
                pass

    with anyio.fail_after(HANG_S), pytest.raises(OSError, match="disk full"):
        await read()


async def test_a_slow_reader_misses_nothing():
    """Events wait for who reads them late, however many they are."""

    @tool(read_only=True)
    async def chatter(ctx: RunContext[None]) -> None:
        """Talk a lot."""
        for n in range(400):
            await ctx.progress(str(n))

    with anyio.fail_after(HANG_S):
        async with queue_of(chatter).stream(calls("chatter", "chatter")) as stream:
            while len(stream.results) < 2:
                await checkpoint()
            events = [event async for event in stream]
    for call_id in ("t1.0", "t1.1"):
        words = [words for kind, words in told(events, call_id) if kind == "progress"]
        assert words == [str(n) for n in range(400)]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_two_streams_of_one_queue_at_once():
    """Each tells of its own calls only."""
    queue = queue_of(talk)
    seen: dict[str, set[str]] = {}

    async def read(prefix: str) -> None:
        wanted = [ToolCall(id=f"{prefix}{n}", name="talk", arguments="{}") for n in range(5)]
        async with queue.stream(wanted) as stream:
            seen[prefix] = {event.call_id async for event in stream} - {""}
        assert [result.call_id for result in stream.results] == [call.id for call in wanted]

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, "a")
            tasks.start_soon(read, "b")
    assert seen == {prefix: {f"{prefix}{n}" for n in range(5)} for prefix in "ab"}


# Listeners


async def test_a_listener_hears_what_a_watcher_hears():
    """The same events, in the same order, all of them before the caller goes on."""
    heard: list[tuple[str, str]] = []
    seen: list[tuple[str, str]] = []
    queue = queue_of(
        talk,
        talk_in_thread,
        broken,
        write,
        listen=lambda event: heard.append((event.type, event.call_id)),
        on_event=lambda event: seen.append((event.type, event.call_id)),
    )
    with anyio.fail_after(HANG_S):
        await queue.execute_all(calls("talk", "talk_in_thread", "broken", "write"))
    assert heard == seen
    assert seen[-1] == (ToolEventType.DRAINED, "")
    assert queue.statistics().missed == 0


async def test_a_stream_leaves_the_listener_what_is_its_own():
    """Who listens hears all that the stream hands out."""
    heard: list[tuple[str, str]] = []
    queue = queue_of(talk, write, listen=lambda event: heard.append((event.type, event.call_id)))
    with anyio.fail_after(HANG_S):
        async with queue.stream(calls("talk", "write")) as stream:
            read = [(event.type, event.call_id) async for event in stream]
    assert heard == read


class Listeners:
    """Callbacks that misbehave, each in its way."""

    def __init__(self) -> None:
        """Close the gate."""
        self.gate = threading.Event()
        self.turns = 0

    def raises(self, event: ToolEvent) -> None:
        """Raise."""
        raise RuntimeError(f"cannot take {event.type}")

    def exits(self, event: ToolEvent) -> None:
        """Exit."""
        raise SystemExit(event.type)

    def hangs(self, _event: ToolEvent) -> None:
        """Hang until the test is over."""
        assert self.gate.wait(HANG_S)

    def is_slow(self, _event: ToolEvent) -> None:
        """Let every other thread go first, many times."""
        for _ in range(50):
            self.turns += 1
            self.gate.wait(0)


@pytest.fixture
def listeners():
    """Listeners that are let go when the test is over."""
    made = Listeners()
    yield made
    made.gate.set()


@pytest.mark.parametrize("kind", ["raises", "exits", "hangs", "is_slow"])
@pytest.mark.parametrize("watched", ["execute_all", "stream"])
async def test_a_bad_listener_changes_no_result(listeners, kind, watched):
    """Whatever it does, the calls run to the same results, and what it missed is counted."""
    wanted = calls("talk", "broken", "talk_in_thread", "write", "talk")
    tools = (talk, broken, talk_in_thread, write)
    plain = await queue_of(*tools).execute_all(wanted)
    queue = queue_of(*tools, listen=getattr(listeners, kind))
    with anyio.fail_after(HANG_S):
        if watched == "execute_all":
            results = await queue.execute_all(wanted)
        else:
            async with queue.stream(wanted) as stream:
                assert [event.seq async for event in stream]
            results = stream.results
    assert [(r.call_id, r.outcome, r.content) for r in results] == [(r.call_id, r.outcome, r.content) for r in plain]
    if kind in ("raises", "exits"):
        assert queue.statistics().missed >= 5 * 3
    if kind == "is_slow":
        assert queue.statistics().missed == 0


async def test_a_hanging_listener_keeps_a_bounded_buffer(listeners):
    """It costs a second at the end and no more; what it could not take is counted, not kept."""

    @tool(read_only=True)
    async def chatter(ctx: RunContext[None]) -> str:
        """Talk a lot."""
        for n in range(3 * MAX_BUFFERED_EVENTS):
            await ctx.progress(str(n))
        return "talked"

    queue = queue_of(chatter, listen=listeners.hangs)
    with anyio.fail_after(HANG_S):
        results = await queue.execute_all(calls("chatter", "chatter"))
    assert [result.content for result in results] == ["talked", "talked"]
    assert queue.statistics().missed >= 4 * MAX_BUFFERED_EVENTS
