"""What a turn costs, in operations that no clock and no neighbour can change: each bound stands beside its count.

A count that has grown past its bound is a decision to be made, not a failure to be retried: find what grew, and take it
out or raise the bound with the reason. What it all takes in time is told by `make bench`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import anyio
import pytest

from agentfsm import Agent, Limits, TextPart, ToolCall, ToolQueue, ToolRegistry, Usage, UserMessage, tool
from agentfsm._lib.fairness import StepThrottle
from agentfsm.engine.execution.execution import Execution
from agentfsm.ports import Emit, FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.stores import SQLiteStore

WIDE = Limits(turns=1_000, tokens=100_000_000, tool_calls=1_000)
# Turns of two runs: their difference is the cost of turns alone.
SHORT, LONG = 20, 40
# Opcodes that Python 3.11 executes, without C functions and other threads. A count of function calls, as it was kept
# before, says nothing of a property that is read through `__getattr__`, nor of a longer function.
#
# | what | opcodes | bound |
# |---|---|---|
# | a turn with one call of a tool, the model's own included | 9,266 | 9,285 |
# | a run without tools | 7,801 | 7,801 |
# | each of 100 calls in one reply | 4,043 | 4,060 |
# 25 of both are the lines of the log that are made from events, and what a traced request reports.
# 34 of a run are the look for background runs.
# 190 of a turn are the key of the prompt cache, writes kept for an hour, waits, stop conditions and the profile.
OPCODES_PER_TURN = 9_285
OPCODES_PER_RUN = 7_802
OPCODES_PER_CALL = 4_060
# That stay in memory for a turn with one call, with the journal of the memory store: 1,785.
BYTES_PER_TURN = 1_850
# That are taken at once in such a turn, for a while or to stay: 4,060, with the longer record of a start.
BYTES_PER_PEAK = 4_200
# That a run holds while it waits for its first reply, with its task and its journal: 12,290.
BYTES_PER_WAIT = 12_800


@tool(read_only=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Scripted(Model):
    """Asks for `width` calls on each of `turns` turns, then answers."""

    name = "scripted"

    def __init__(self, turns: int, width: int = 1) -> None:
        self._turns, self._width = turns, width
        self._turn = 0

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        self._turn += 1
        usage = Usage(input_tokens=1, output_tokens=1)
        if self._turn > self._turns:
            self._turn = 0
            return Reply(text="done", usage=usage)
        calls = [
            ProposedCall(id=f"c{index}", name="add", arguments=f'{{"a": {self._turn}, "b": {index}}}')
            for index in range(self._width)
        ]
        return Reply(calls=tuple(calls), finish_reason=FinishReason.TOOL_CALLS, usage=usage)


class Held(Scripted):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__(0)
        self.let = anyio.Event()

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        await self.let.wait()
        return await super().reply(request, emit)


def frames_above(name: str) -> list[str]:
    """Return the functions on the stack from the last one with this name down to the caller of this function."""
    frame, names = sys._getframe(1), []
    while (frame := frame.f_back) is not None:
        names.append(frame.f_code.co_name)
        if frame.f_code.co_name == name:
            return names[::-1]
    return []


def agent_of(turns: int, width: int = 1, **options: Any) -> Agent:
    """Return an agent with everything on that is on by default."""
    return Agent(Scripted(turns, width), tools=[add] if turns else [], limits=WIDE, **options)


async def finished(agent: Agent, **start: Any) -> None:
    """Run the agent, and see that it did its work."""
    run = await agent.run("go", **start)
    assert run.output == "done"


async def counted(agent: Agent, **start: Any) -> Counter[str]:
    """Return which functions one run calls, and how often; a first run has filled the caches."""
    await finished(agent, **start)
    # To a new round of the event loop: a run waits for the next when it is full.
    await (await StepThrottle.enter()).acquire()
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[arg.__name__] += 1

    sys.setprofile(note)
    try:
        await finished(agent, **start)
    finally:
        sys.setprofile(None)
    return calls


async def executed(agent: Agent) -> int:
    """Return how many opcodes one run executes; a first run has filled the caches."""
    await finished(agent)
    await (await StepThrottle.enter()).acquire()
    count = 0

    def count_opcode(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return count_opcode

    def trace(frame: FrameType, _event: str, _arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count_opcode

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await finished(agent)
    finally:
        sys.settrace(before)
    return count


async def per_turn(start: int, end: int, **options: Any) -> dict[str, float]:
    """Return how often each function is called in a turn, between these two lengths of a run."""
    short, long = await counted(agent_of(start, **options)), await counted(agent_of(end, **options))
    return {name: (long[name] - short[name]) / (end - start) for name in long}


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Counts are those of one event loop."""
    return request.param


counts_opcodes = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="each version of Python has other opcodes")


@counts_opcodes
async def test_a_turn_executes_no_more_than_it_did():
    """A turn with one call of a tool stays below its bound of opcodes."""
    short, long = await executed(agent_of(SHORT)), await executed(agent_of(LONG))
    assert (long - short) / (LONG - SHORT) <= OPCODES_PER_TURN


@counts_opcodes
async def test_a_run_executes_no_more_than_it_did():
    """A run without tools stays below its bound of opcodes."""
    assert await executed(agent_of(0)) <= OPCODES_PER_RUN


@counts_opcodes
async def test_a_call_among_many_executes_no_more_than_it_did():
    """Each of 100 parallel calls stays below its bound of opcodes."""
    alone, many = await executed(agent_of(1, 1)), await executed(agent_of(1, 101))
    assert (many - alone) / 100 <= OPCODES_PER_CALL


async def test_a_late_turn_does_what_an_early_one_does():
    """Turn 400 makes as many calls as turn 30: nothing in a turn goes over the history."""
    early, late = await per_turn(SHORT, LONG), await per_turn(400, 420)
    assert sum(late.values()) == pytest.approx(sum(early.values()), rel=0.01)


async def test_a_late_message_of_a_conversation_does_what_an_early_one_does():
    """The 50th run of a session makes as many calls as the fourth: what was said is neither read nor counted again."""
    agent = agent_of(1)
    await finished(agent, session="ann")
    await finished(agent, session="ann")
    early = await counted(agent, session="ann")
    for _ in range(45):
        await finished(agent, session="ann")
    late = await counted(agent, session="ann")
    assert late.total() == pytest.approx(early.total(), rel=0.01)


async def test_each_thing_is_done_once(tmp_path: Path):
    """In a turn the arguments are validated once and read twice, and each event is encoded once, also late in a run."""
    store = SQLiteStore(tmp_path / "runs.db")
    try:
        turn = await per_turn(100, 120, store=store)
    finally:
        await store.aclose()
    done = {
        name: turn.get(name, 0.0) for name in ("validate_json", "from_json", "encode_event", "commit", "apply_event")
    }
    assert done == {"validate_json": 1, "from_json": 2, "encode_event": 5, "commit": 4, "apply_event": 5}


async def test_no_task_is_made_for_one_call():
    """A single call is awaited in place; of 100 calls at once no more are tasks than may run at once."""
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(work.__qualname__)
        return asyncio.Task(work, loop=loop, **options)

    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    loop.set_task_factory(factory)
    try:
        await finished(agent_of(SHORT, 1))
        assert made == []
        await finished(agent_of(1, 100))
        assert len(made) < Limits().parallel
    finally:
        loop.set_task_factory(before)


async def test_calls_that_follow_one_another_need_no_task_group(monkeypatch: pytest.MonkeyPatch):
    """It would make a turn with two of them a tenth dearer."""
    agent = Agent(Scripted(2, width=2), tools=[tool(add.function)], limits=WIDE)

    def none() -> None:
        raise AssertionError("a task group")

    monkeypatch.setattr("agentfsm.tools.queue.scheduler.anyio.create_task_group", none)
    assert (await agent.run("Add")).tool_call_count == 4


async def test_a_call_is_followed_in_few_steps():
    """From where a call is taken up to the function of its tool there are five functions at most, and four if alone."""
    steps: list[list[str]] = []

    @tool(read_only=True)
    async def look() -> None:
        """See from where the function is called."""
        steps.append(frames_above("_run_worker") or frames_above("execute_all"))

    queue = ToolQueue(ToolRegistry.of([look]))
    calls = [ToolCall(id=f"c{n}", name="look", arguments="{}", key=f"k{n}") for n in range(2)]
    await queue.execute_all(calls[:1])
    await queue.execute_all(calls)
    # The first of several is watched, so that further workers start when it waits.
    assert [len(names) for names in steps] == [4, 5, 4], steps


async def test_a_turn_leaves_no_more_in_memory_than_it_did():
    """What stays of a turn, with its journal in the memory store, stays below its bound."""

    async def kept(turns: int) -> int:
        agent = agent_of(turns)
        await finished(agent)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run = await agent.run("go")
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert run.turn == turns + 1
        return after - before

    tracemalloc.start()
    try:
        # Over 200 turns, since what other tests left is freed in between.
        assert (await kept(300) - await kept(100)) / 200 <= BYTES_PER_TURN
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("before", [100, 30_000])
async def test_a_turn_copies_nothing_of_the_history(before):
    """Behind 30,000 messages, a turn takes for itself no more memory than behind 100, when it takes most."""
    taken: list[int] = []

    class Watched(Scripted):
        async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
            _, most = tracemalloc.get_traced_memory()
            taken.append(most - start[-1])
            reply = await super().reply(request, emit)
            tracemalloc.reset_peak()
            start.append(tracemalloc.get_traced_memory()[0])
            return reply

    model = Watched(SHORT)
    model.window_tokens = 1_000_000_000
    start = [0]
    agent = Agent(model, tools=[add], limits=WIDE)
    said = [UserMessage(parts=(TextPart(text=f"message {number}"),)) for number in range(before)]
    tracemalloc.start()
    try:
        await finished(agent, messages=said)
    finally:
        tracemalloc.stop()
    assert median(taken[5:]) < BYTES_PER_PEAK


async def test_a_run_that_waits_holds_no_more_than_it_did():
    """What a run keeps in memory while its model thinks stays below its bound: many runs wait at once."""
    await finished(agent_of(0))
    model, runs = Held(), 100
    agent = Agent(model, limits=WIDE)
    tracemalloc.start()
    try:
        async with anyio.create_task_group() as tasks:
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(runs):
                tasks.start_soon(finished, agent)
            await anyio.wait_all_tasks_blocked()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            model.let.set()
            assert (after - before) / runs <= BYTES_PER_WAIT
    finally:
        tracemalloc.stop()


async def test_a_run_leaves_nothing_to_the_garbage_collector():
    """What a driving call was made of goes when it ends: what waits for the collector stays until it looks."""
    agent = Agent(Scripted(2, width=2), tools=[add], limits=WIDE)
    await agent.run("Add")
    gc.collect()
    held_by_others = [each for each in gc.get_objects() if isinstance(each, Execution | ToolQueue)]
    gc.disable()
    try:
        await agent.run("Add")
        alive = [each for each in gc.get_objects() if isinstance(each, Execution | ToolQueue)]
    finally:
        gc.enable()
    assert not {id(each) for each in alive} - {id(each) for each in held_by_others}
