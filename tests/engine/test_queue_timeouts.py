"""Calls that take too long: async ones are cut off, threads are left behind, counted, and keep their place."""

from __future__ import annotations

import threading

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    ErrorType,
    Limits,
    Outcome,
    PendingKind,
    RunContext,
    ToolCall,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    tool,
)
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.attendance import Attendance
from agentfsm.tools.queue.dispatch import QueueHost
from tests.support.checks import HANG_S, Keeping, settled, sound, virtually

# Long enough to start a thread, short enough to wait for.
SHORT_S = 0.01


def asked(*names: str) -> list[ToolCall]:
    """Calls without arguments, in order."""
    return [ToolCall(id=f"t1.{n}", name=name, arguments="{}", key=f"k{n}") for n, name in enumerate(names)]


async def until(condition) -> None:
    """Let other tasks and threads go on until the condition is true."""
    with anyio.fail_after(HANG_S):
        while not condition():
            await checkpoint()


class Gate:
    """A plain function that hangs until it is let go, and says when it is inside."""

    def __init__(self) -> None:
        """Close the gate."""
        self.leave = threading.Event()
        self.inside = 0
        self.passed = 0

    def __call__(self) -> str:
        """Hang."""
        self.inside += 1
        assert self.leave.wait(HANG_S)
        self.passed += 1
        self.inside -= 1
        return "late"

    def open(self) -> None:
        """Let everybody go, and wait until they are gone."""
        self.leave.set()
        settled(lambda: not self.inside)


@pytest.fixture
def gate():
    """A gate that is open when the test is over."""
    made = Gate()
    yield made
    made.open()


def hanging(gate: Gate, name: str = "hang", **options: object):
    """A plain tool that hangs at a gate."""

    def hang() -> str:
        """Hang."""
        return gate()

    return tool(name=name, timeout_s=SHORT_S, **options)(hang)


# Async tools


@pytest.mark.parametrize(
    ("options", "advice"), [({"idempotent": True}, "may have happened"), ({"read_only": True}, "called again")]
)
def test_an_async_call_is_cut_off_at_its_timeout(options, advice):
    """The result says after how long, and whether its effect may have happened."""

    async def play(store, clock):
        ended: list[str] = []

        @tool(timeout_s=3, **options)
        async def slow() -> str:
            """Take long."""
            try:
                await anyio.sleep(100)
            finally:
                ended.append("cut off")
            return "never"

        queue = ToolQueue(registry=ToolRegistry.of([slow]), clock=clock)
        (result,) = await queue.execute_all(asked("slow"))
        assert (result.outcome, result.duration_s) == (Outcome.TIMED_OUT, 3)
        assert "no result within 3 s" in result.content
        assert advice in result.content
        assert ended == ["cut off"]
        assert anyio.current_time() == 3

    virtually(play)


def test_a_tool_without_a_timeout_has_the_queues():
    """The queue's own is the default, and `Limits.tool_timeout_s` sets it for an agent."""

    @tool
    async def slow() -> str:
        """Take long."""
        await anyio.sleep(100)
        return "never"

    async def play(store, clock):
        queue = ToolQueue(registry=ToolRegistry.of([slow]), clock=clock, timeout_s=7)
        (result,) = await queue.execute_all(asked("slow"))
        assert result.duration_s == 7
        limits = Limits(tool_timeout_s=5)
        agent = Agent(ScriptedModel(say("", call("slow")), "done"), tools=[slow], limits=limits, clock=clock)
        run = await agent.run("go")
        assert [(r.outcome, r.duration_s) for r in run.calls] == [(Outcome.TIMED_OUT, 5)]

    virtually(play)


def test_a_call_that_asks_a_person_first_has_all_its_time_left():
    """Also if the function waits for the first time when the person is asked."""

    class Attended(QueueHost):
        def build_context(self, call, tool, deadline):
            async def attendant(item):
                await anyio.sleep(60)

            async def record(attendant, asked):
                await attendant(asked)

            return RunContext(deps=None, attendance=Attendance(attendant, record))

    @tool(timeout_s=3)
    async def ask(ctx: RunContext, work_s: float) -> str:
        """Ask, then work."""
        await ctx.attendance.ask(None)
        await anyio.sleep(work_s)
        return "asked"

    async def play(store, clock):
        queue = ToolQueue(registry=ToolRegistry.of([ask]), host=Attended(), clock=clock)
        calls = [ToolCall(id=f"t1.{s}", name="ask", arguments=f'{{"work_s": {s}}}', key=f"k{s}") for s in (2, 4)]
        results = await queue.execute_all(calls)
        assert [(r.outcome, r.duration_s) for r in results] == [(Outcome.DONE, 62), (Outcome.TIMED_OUT, 63)]

    virtually(play)


def test_a_timeout_touches_no_sibling():
    """The others of the batch have all the time that is theirs."""

    async def play(store, clock):
        @tool(read_only=True, timeout_s=2)
        async def slow() -> str:
            """Take long."""
            await anyio.sleep(100)
            return "never"

        @tool(read_only=True, timeout_s=10)
        async def quick() -> str:
            """Take 5 s."""
            await anyio.sleep(5)
            return "ok"

        queue = ToolQueue(registry=ToolRegistry.of([slow, quick]), clock=clock)
        results = await queue.execute_all(asked("slow", "quick", "slow"))
        assert [result.outcome for result in results] == [Outcome.TIMED_OUT, Outcome.DONE, Outcome.TIMED_OUT]
        assert anyio.current_time() == 5

    virtually(play)


def test_a_tool_with_a_timeout_of_its_own():
    """An inner time-out that ends first is an error of the tool, and one at the same moment is either."""

    async def play(store, clock):
        for inner, outcomes in ((1, {Outcome.FAILED}), (3, {Outcome.FAILED, Outcome.TIMED_OUT})):

            @tool(name="own", timeout_s=3)
            async def own(inner: int = inner) -> str:
                """Give up."""
                with anyio.fail_after(inner):
                    await anyio.sleep(100)
                return "never"

            queue = ToolQueue(registry=ToolRegistry.of([own]), clock=clock)
            (result,) = await queue.execute_all(asked("own"))
            assert result.outcome in outcomes
            assert result.duration_s == inner

    virtually(play)


def test_a_tool_that_swallows_its_cancellation():
    """It cannot be abandoned; what it returns in the end is its result, and the queue goes on."""

    async def play(store, clock):
        @tool(timeout_s=1)
        async def stubborn() -> str:
            """Take it easy."""
            with anyio.CancelScope(shield=True):
                await anyio.sleep(4)
            return "ready"

        queue = ToolQueue(registry=ToolRegistry.of([stubborn]), clock=clock)
        results = await queue.execute_all(asked("stubborn", "stubborn"))
        assert [result.content for result in results] == ["ready", "ready"]
        assert anyio.current_time() == 8

    virtually(play)


def test_a_tool_that_answers_its_cancellation_with_an_error():
    """The time was up all the same: that is what is told, and nothing escapes."""

    async def play(store, clock):
        @tool(timeout_s=1)
        async def messy() -> str:
            """Fail to clean up."""
            try:
                await anyio.sleep(100)
            finally:
                raise RuntimeError("clean-up failed")

        queue = ToolQueue(registry=ToolRegistry.of([messy]), clock=clock)
        (result,) = await queue.execute_all(asked("messy"))
        assert (result.outcome, result.error_type) == (Outcome.TIMED_OUT, ErrorType.TIMEOUT)
        assert "no result within 1 s" in result.content

    virtually(play)


# Plain tools


async def test_the_caller_of_a_hanging_thread_is_freed(gate):
    """The call times out, its thread is counted as abandoned, and what it returns later is not used."""
    host = Keeping()
    queue = ToolQueue(registry=ToolRegistry.of([hanging(gate)]), host=host)
    with anyio.fail_after(HANG_S):
        results = await queue.execute_all(asked("hang"))
    assert [result.outcome for result in results] == [Outcome.TIMED_OUT]
    assert queue.statistics().abandoned == 1
    gate.open()
    await until(lambda: queue.statistics().abandoned == 0)
    assert gate.passed == 1
    assert host.kept == results


async def test_an_unsafe_call_waits_for_a_thread_left_behind(gate):
    """An abandoned thread keeps its exclusivity until it ends; the next call then runs."""
    seen: list[int] = []

    @tool(timeout_s=HANG_S)
    async def write() -> str:
        """Write."""
        seen.append(gate.inside)
        return "written"

    queue = ToolQueue(registry=ToolRegistry.of([hanging(gate), write]))
    results: list[ToolResult] = []

    async def run() -> None:
        results.extend(await queue.execute_all(asked("hang", "write")))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await until(lambda: queue.statistics().abandoned == 1)
            await anyio.wait_all_tasks_blocked()
            assert not seen
            gate.leave.set()
    assert [result.outcome for result in results] == [Outcome.TIMED_OUT, Outcome.DONE]
    assert seen == [0]


@pytest.mark.parametrize("safe", [False, True])
async def test_a_call_that_would_overlap_a_thread_is_blocked(gate, safe):
    """When the thread does not end in time the call is not run, and its result names what is in the way."""
    ran: list[str] = []

    async def write() -> str:
        """Write."""
        ran.append("write")
        return "written"

    made = tool(concurrency_safe=safe, timeout_s=SHORT_S)(write)
    queue = ToolQueue(registry=ToolRegistry.of([hanging(gate), made]))
    with anyio.fail_after(HANG_S):
        results = await queue.execute_all(asked("hang", "write"))
    assert [result.outcome for result in results] == [Outcome.TIMED_OUT, Outcome.FAILED]
    assert "blocked: hang is still running" in results[1].content
    assert not ran
    gate.open()
    (result,) = await queue.execute_all(asked("write"))
    assert result.outcome is Outcome.DONE


async def test_threads_of_safe_tools_block_no_safe_call(gate):
    """Two tools that may run beside others may run beside a thread left behind, too."""

    @tool(read_only=True)
    async def read() -> str:
        """Read."""
        await until(lambda: gate.inside == 1)  # its thread may begin after its time is up
        return "beside it"

    queue = ToolQueue(registry=ToolRegistry.of([hanging(gate, read_only=True), read]))
    with anyio.fail_after(HANG_S):
        results = await queue.execute_all([*asked("hang"), *asked("read")])
        (again,) = await queue.execute_all(asked("read"))
    assert results[0].outcome is Outcome.TIMED_OUT
    assert again.content == "beside it"


async def test_a_thread_left_behind_blocks_the_next_step_too(store, gate):
    """The place is the thread's until it ends, also when the run is driven step by step, or resumed."""
    ran: list[int] = []

    @tool(timeout_s=SHORT_S)
    async def write() -> str:
        """Write."""
        ran.append(gate.inside)
        return "written"

    model = ScriptedModel(say("", call("hang")), say("", call("write")), say("", call("write")), "done")
    agent = Agent(model, tools=[hanging(gate), write], store=store)
    run = agent.start("go")
    with anyio.fail_after(HANG_S):
        while run.turn < 3:
            run = await agent.step(run)
    assert ran == []
    gate.open()
    run = await agent.finish(run)
    assert ran == [0]
    assert [r.outcome for r in run.calls] == [Outcome.TIMED_OUT, Outcome.FAILED, Outcome.DONE]
    await sound(agent, run)


async def test_a_thread_left_by_a_cancelled_run_blocks_the_resumed_one(store, gate):
    """After a task cancellation the thread goes on; a resumed run does not run an unsafe tool beside it."""
    ran: list[int] = []

    @tool(idempotent=True)
    def write() -> str:
        """Write."""
        ran.append(gate.inside)
        return gate()

    agent = Agent(ScriptedModel(say("", call("write")), "done"), tools=[write], store=store)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: agent.run("go", id="mine"))
            await until(lambda: gate.inside == 1)
            tasks.cancel_scope.cancel()
        run = await agent.with_(limits=Limits(tool_timeout_s=SHORT_S)).resume("mine")
    assert ran == [0]
    [item] = run.pending  # it had started, so its outcome is unknown
    assert (item.kind, "blocked" in item.error) == (PendingKind.OUTCOME, True)
    gate.open()
    await agent.settle("mine", item.call_id, result="written")
    run = await agent.resume("mine")
    assert [r.outcome for r in run.calls] == [Outcome.DONE]
    await sound(agent, run)


async def test_plain_tools_run_beside_each_other():
    """Threads do not wait for each other: three that need each other all come through."""
    meet = threading.Barrier(3, timeout=HANG_S)

    @tool(read_only=True)
    def together() -> str:
        """Meet."""
        meet.wait()
        return threading.current_thread().name

    queue = ToolQueue(registry=ToolRegistry.of([together]))
    results = await queue.execute_all(asked("together", "together", "together"))
    assert [result.outcome for result in results] == [Outcome.DONE] * 3
    assert all(result.content != threading.main_thread().name for result in results)


async def test_a_plain_tool_has_its_context():
    """The context is injected into plain functions as into async ones."""

    @tool
    def who(ctx: RunContext[None], name: str) -> str:
        """Say who."""
        return f"{name} {ctx.call_id} {ctx.idempotency_key}"

    call_ = ToolCall(id="t1.0", name="who", arguments='{"name": "ann"}', key="k")
    (result,) = await ToolQueue(registry=ToolRegistry.of([who])).execute_all([call_])
    assert result.content == "ann t1.0 k"


async def test_hundreds_of_abandoned_threads_are_counted(gate):
    """The count is exact, and goes back to nothing."""
    names = [f"hang_{number}" for number in range(200)]  # each with a circuit breaker of its own
    tools = [hanging(gate, name, concurrency_safe=True) for name in names]
    queue = ToolQueue(registry=ToolRegistry.of(tools), limit=200)
    with anyio.fail_after(HANG_S):
        results = await queue.execute_all(asked(*names))
    assert {result.outcome for result in results} == {Outcome.TIMED_OUT}
    assert queue.statistics().abandoned == 200
    gate.leave.set()
    await until(lambda: queue.statistics().abandoned == 0)
