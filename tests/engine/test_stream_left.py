"""Every way to leave a stream, in any task: the run is cut off and can be resumed, and the caller is not touched."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, ClosedError, StreamEvent, ToolCall, ToolEvent, ToolQueue, ToolRegistry, tool
from agentfsm.journal.seals import SealFile
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, no_leases, sound

# trio warns of a generator that its garbage collector finalises; that is one of the ways.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")

place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="")


class Holding:
    """An agent whose tool does not end while `is_held`, and what became of its calls."""

    def __init__(self, store: Any, until: Callable[[], Awaitable[object]] = anyio.sleep_forever) -> None:
        self.is_held = True
        self.begun = 0
        self.cut_off = 0

        @tool(read_only=True)
        async def hold() -> str:
            """Hold."""
            self.begun += 1
            if self.is_held:
                try:
                    await until()
                finally:
                    self.cut_off += 1
            return place.get()

        self.agent = Agent(FunctionModel(_hold_once), tools=[hold], store=store)

    async def events(self, run_id: str) -> AsyncIterator[StreamEvent]:
        """As services write it: a generator around a stream, without `aclosing`."""
        async with self.agent.stream("go", id=run_id) as stream:
            async for event in stream:
                yield event

    async def start(self, run_id: str) -> Any:
        """Return a generator that has been read up to the call."""
        generator = self.events(run_id)
        while not isinstance(await anext(generator), ToolEvent):
            pass
        return generator

    async def is_idle(self) -> None:
        """Return when no run has a lease."""
        while [run for run in await self.agent.store.runs() if run.driven]:
            await checkpoint()

    async def resumes(self, *run_ids: str) -> None:
        """Fail unless the runs go on to their ends."""
        await no_leases(self.agent.store)
        self.is_held = False
        for run_id in run_ids:
            run = await self.agent.resume(run_id)
            assert run.output == "done"
            await sound(self.agent, run)


def _hold_once(request: Any) -> Any:
    return say("one two", call("hold")) if len(request.messages) == 1 else say("done")


async def read_all(events: AsyncIterator[object]) -> None:
    """Read to the end."""
    async for _ in events:
        pass


async def in_another_task(function: Callable[[], Awaitable[object]]) -> None:
    """Await something in a task that is neither the reader's nor the run's."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(function)


async def undisturbed() -> None:
    """Fail if the task of the caller was cancelled, now or at its next wait."""
    for _ in range(3):
        await checkpoint()
    await anyio.wait_all_tasks_blocked()
    with suppress(RuntimeError):  # trio
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()


async def finalised(held: Holding) -> tuple[str, ...]:
    """The reader breaks off, and the event loop closes the generator in a task of its own."""
    async for event in held.events("a"):
        if isinstance(event, ToolEvent):
            break
    gc.collect()
    await held.is_idle()
    return ("a",)


async def closed_elsewhere(held: Holding) -> tuple[str, ...]:
    """Another task closes the generator."""
    generator = await held.start("a")
    await in_another_task(generator.aclose)
    return ("a",)


async def closed_in_order(held: Holding) -> tuple[str, ...]:
    """Two generators are closed in the order in which they were opened."""
    first, second = await held.start("a"), await held.start("b")
    await first.aclose()
    await second.aclose()
    return ("a", "b")


async def read_in_tasks(held: Holding) -> tuple[str, ...]:
    """Each event is read in a task of its own, as `asyncio.wait_for` did."""
    generator = held.events("a")
    for _ in range(3):
        await in_another_task(generator.__anext__)
    await generator.aclose()
    return ("a",)


async def failed(held: Holding) -> tuple[str, ...]:
    """The body raises, in another task."""
    generator = await held.start("a")

    async def fail() -> None:
        with pytest.raises(LookupError, match="my own"):
            await generator.athrow(LookupError("my own"))

    await in_another_task(fail)
    return ("a",)


async def cancelled(held: Holding) -> tuple[str, ...]:
    """The scope of the reader is cancelled: it ends when the run is cut off."""
    with anyio.CancelScope() as scope:
        async for event in held.events("a"):
            if isinstance(event, ToolEvent):
                scope.cancel()
    assert scope.cancelled_caught
    await held.is_idle()
    return ("a",)


async def timed_out(held: Holding) -> tuple[str, ...]:
    """The deadline of the reader is over while it waits for an event."""
    with anyio.CancelScope() as scope:
        async with held.agent.stream("go", id="a") as stream:
            async for event in stream:
                if isinstance(event, ToolEvent):
                    scope.deadline = anyio.current_time()
    assert scope.cancelled_caught
    return ("a",)


async def collected(held: Holding) -> tuple[str, ...]:
    """The stream is entered by hand, and collected without being left."""
    stream = await held.agent.stream("go", id="a").__aenter__()
    async for event in stream:
        if isinstance(event, ToolEvent):
            break
    del stream
    gc.collect()
    await held.is_idle()
    return ("a",)


WAYS = [
    finalised,
    closed_elsewhere,
    closed_in_order,
    read_in_tasks,
    failed,
    cancelled,
    timed_out,
    collected,
]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
async def test_a_stream_may_be_left_in_any_way(store, leave):
    """The run is cut off, its lease is free, it can be resumed, and no task of the reader is cancelled."""
    held = Holding(store)
    bystander = anyio.Event()
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bystander.wait)
            run_ids = await leave(held)
            assert held.cut_off == held.begun == len(run_ids)
            await undisturbed()
            await held.resumes(*run_ids)
            bystander.set()


class Kept(MemoryStore):
    """A store that can be read after its agent was closed."""

    async def aclose(self) -> None:
        """Stay open."""


async def test_closing_the_agent_cuts_its_streams_off():
    """Those of its variants too: their generators were kept, and have the end of the stream as an error."""
    held = Holding(Kept())
    with anyio.fail_after(HANG_S):
        generator = await held.start("a")
        await held.agent.with_(name="variant").aclose()
        await no_leases(held.agent.store)
        with pytest.raises(ClosedError, match="stream of run 'a' was closed while it was read"):
            await read_all(generator)
        await held.resumes("a")


async def test_a_stream_is_closed_under_its_reader(store):
    """`aclose` in another task: it waits for the cut-off, and the reader gets an error instead of an end."""
    held = Holding(store)
    with anyio.fail_after(HANG_S):
        async with held.agent.stream("go", id="a") as stream:
            while not isinstance(await anext(stream), ToolEvent):
                pass
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.aclose)
                with pytest.raises(ClosedError, match="was closed while it was read"):
                    await read_all(stream)
            await no_leases(store)
            await stream.aclose()
        assert [event async for event in stream] == []
        await held.resumes("a")


@pytest.mark.parametrize("target", ["stream", "agent"])
async def test_a_tool_may_close_the_stream_of_its_own_run(target):
    """It cannot wait for itself: the stream is cut off at once; closing the agent leaves the run that does it alone."""
    targets: dict[str, Any] = {}

    async def close() -> None:
        await targets[target].aclose()
        await checkpoint()

    held = Holding(Kept(), close)
    targets["agent"] = held.agent
    with anyio.fail_after(HANG_S):
        async with held.agent.stream("go", id="a") as targets["stream"]:
            with suppress(ClosedError):
                await read_all(targets["stream"])
        assert held.begun == 1
        assert targets["stream"].run.is_over == (target == "agent")
        await held.resumes("a")


async def test_the_run_has_the_context_of_its_reader(store):
    """Context variables are those at the beginning of the block."""
    held = Holding(store)
    held.is_held = False
    place.set("here")
    async with held.agent.stream("go") as stream:
        place.set("there")
        results = [event.result async for event in stream if isinstance(event, ToolEvent) and event.is_end]
    assert results == ["here"]


async def test_an_error_that_was_not_read_is_logged(store, caplog):
    """The body has an error of its own, or the stream was collected; both name the run."""
    begun = anyio.Event()

    async def answer(_request: Any) -> Any:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            raise ZeroDivisionError("a bug")

    agent = Agent(FunctionModel(answer), store=store)

    async def fails() -> None:
        async with agent.stream("go", id="a"):
            await begun.wait()
            raise LookupError("my own")

    with anyio.fail_after(HANG_S), caplog.at_level(logging.ERROR, "agentfsm"):
        with pytest.raises(LookupError, match="my own"):
            await fails()
        begun = anyio.Event()
        stream = await agent.stream("go", id="b").__aenter__()
        await begun.wait()
        stream = None
        gc.collect()
        while not caplog.records[1:]:
            await checkpoint()
    assert stream is None
    assert [(record.args, record.exc_info[0]) for record in caplog.records] == [
        (("run 'a'",), ZeroDivisionError),
        (("run 'b'",), ZeroDivisionError),
    ]


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_an_interrupt_in_a_run_is_raised_to_the_reader():
    """On trio a task of this kind cannot end the event loop; asyncio's loop ends at once (`test_interrupts`)."""

    def press(_request: Any) -> Any:
        raise KeyboardInterrupt

    async def read() -> None:
        async with Agent(FunctionModel(press)).stream("go") as stream:
            await read_all(stream)

    with pytest.raises(KeyboardInterrupt):
        await read()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_second_cancellation_does_not_end_the_wait(store):
    """The reader returns when the call in flight has ended, however often it is cancelled, and is cancelled then."""
    let = anyio.Event()

    async def stubborn() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await let.wait()

    held = Holding(store, stubborn)

    with anyio.fail_after(HANG_S):
        task = asyncio.create_task(read_all(held.events("a")))
        while not held.begun:
            await checkpoint()
        for _ in range(3):
            task.cancel()
            await checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert not task.done()
        let.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await held.resumes("a")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_other_code_cancels_the_task_of_a_run(store, has_begun):
    """As programs do that cancel all tasks: the reader gets an error instead of an end, also before the first step."""
    held = Holding(store)
    with anyio.fail_after(HANG_S):
        await held.agent.submit("go", id="a")
        others = asyncio.all_tasks()
        async with held.agent.stream(await held.agent.load("a")) as stream:
            while has_begun and not held.begun:
                await checkpoint()
            for task in asyncio.all_tasks() - others:
                task.cancel()
            with pytest.raises(ClosedError, match="was closed while it was read"):
                await read_all(stream)
        await held.resumes("a")


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_the_end_of_the_event_loop_cuts_a_stream_off(loop):
    """A generator that was kept until then: its run goes on in the next event loop."""
    held = Holding(MemoryStore())
    kept: list[object] = []

    async def leave_open() -> None:
        kept.append(await held.start("a"))

    anyio.run(leave_open, backend=loop)
    assert held.cut_off == 1
    anyio.run(held.resumes, "a", backend=loop)


async def test_a_stream_of_a_queue_may_be_left_in_another_task():
    """As that of a run: its calls are cut off."""
    ended = anyio.Event()

    @tool
    async def hold() -> None:
        """Hold."""
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def events() -> AsyncIterator[StreamEvent]:
        queue = ToolQueue(ToolRegistry.of([hold]))
        async with queue.stream([ToolCall(id="t1.0", name="hold", arguments="{}")]) as stream:
            async for event in stream:
                yield event

    with anyio.fail_after(HANG_S):
        generator = events()
        assert [await anext(generator), await anext(generator)]
        await anyio.wait_all_tasks_blocked()
        await in_another_task(generator.aclose)
    assert ended.is_set()
    await undisturbed()


# The iterators beside the streams: their scopes and leases, too, belong to no task of the reader.


async def _events(agent: Agent, _folder: Any) -> AsyncIterator[object]:
    async for event in agent.events("a"):
        yield event


async def _steps(agent: Agent, _folder: Any) -> AsyncIterator[object]:
    async for run in agent.steps(agent.start("go")):
        yield run


async def _deliveries(agent: Agent, _folder: Any) -> AsyncIterator[object]:
    async with agent.store.follow("reader") as follower:
        async for delivery in follower:
            yield delivery


async def _seals(agent: Agent, folder: Any) -> AsyncIterator[object]:
    async for seal in SealFile(folder / "seals", key=b"").seal(agent.store):
        yield seal


@pytest.mark.parametrize("leave", ["finalised", "elsewhere", "in order", "tasks"])
@pytest.mark.parametrize("iterate", [_events, _steps, _deliveries, _seals], ids=lambda iterate: iterate.__name__)
async def test_other_iterators_may_be_left_in_any_way(store, tmp_path, iterate, leave):
    """A generator around each is left early; the reader is not touched, and the next one begins at once."""
    agent = Agent(ScriptedModel(*["done"] * 9), store=store)
    await agent.run("go", id="a")
    with anyio.fail_after(HANG_S):
        first = iterate(agent, tmp_path)
        if leave == "tasks":
            await in_another_task(first.__anext__)
            await first.aclose()
        else:
            await anext(first)
        if leave == "finalised":
            del first
            gc.collect()
        elif leave == "elsewhere":
            await in_another_task(first.aclose)
        elif leave == "in order":
            second = _events(agent, tmp_path)
            await anext(second)
            await first.aclose()
            await second.aclose()
        await undisturbed()
        again = iterate(agent, tmp_path)
        assert await anext(again)
        await again.aclose()
