"""The tool execution queue by itself: batches, barriers, order, limits, isolation, events. Source: document C."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import (
    DuplicateToolError,
    MisuseError,
    ModelRetry,
    Outcome,
    ToolCall,
    ToolEvent,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    tool,
)
from agentfsm.core.labels import ToolKind
from agentfsm.testing import VirtualClock, run_virtual
from agentfsm.tools.queue.dispatch import QueueHost
from agentfsm.tools.queue.scheduler import QueueStatistics
from tests.support.checks import HANG_S, Keeping


def calls(*wanted: str | tuple[str, str]) -> list[ToolCall]:
    """Calls in order: a name, or a name with its arguments."""
    pairs = [(each, "{}") if isinstance(each, str) else each for each in wanted]
    return [ToolCall(id=f"t1.{i}", name=n, arguments=a, key=f"k{i}") for i, (n, a) in enumerate(pairs)]


def expert(name: str, seconds: float, *, safe: bool, log: list[tuple[str, float, float]] | None = None):
    """A tool of document C: it takes its time and says who it is."""

    async def work() -> str:
        begin = anyio.current_time()
        await anyio.sleep(seconds)
        if log is not None:
            log.append((name, begin, anyio.current_time()))
        return f"result of {name}"

    return tool(name=name, description=name, concurrency_safe=safe)(work)


def played(*experts, events: list[ToolEvent] | None = None, limit: int = 20):
    """Run one call of each expert in virtual time; return the results, and how long all took."""

    async def play() -> tuple[list[ToolResult], float]:
        queue = ToolQueue(
            registry=ToolRegistry.of(experts),
            clock=VirtualClock(),
            limit=limit,
            on_event=None if events is None else events.append,
        )
        begin = anyio.current_time()
        results = await queue.execute_all(calls(*[each.name for each in experts]))
        return results, anyio.current_time() - begin

    return run_virtual(play)


# Document C


def test_scenario_1_a_write_behind_a_read_gains_nothing():
    """Section 10.1: 3 s of policy expert, then 2 s of memory manager, which may write: 5 s."""
    results, took = played(
        expert("invoke_policy_expert", 3, safe=True),
        expert("invoke_memory_manager", 2, safe=False),
    )
    assert took == pytest.approx(5)
    assert [result.duration_s for result in results] == [pytest.approx(3), pytest.approx(2)]


def test_scenario_2_three_reads_take_as_long_as_the_slowest():
    """Section 10.1: 4 s, 2 s and 2 s together are 4 s, not the 8 s of a loop."""
    results, took = played(
        expert("invoke_assessment_expert", 4, safe=True),
        expert("invoke_case_analyst", 2, safe=True),
        expert("invoke_strategist", 2, safe=True),
    )
    assert took == pytest.approx(4)
    assert sum(result.duration_s for result in results) == pytest.approx(8)


def test_scenario_3_a_read_between_two_writes_gains_nothing():
    """Section 10.1: 1 s of saving, 4 s of assessing, 2 s of payment, one after the other: 7 s."""
    log: list[tuple[str, float, float]] = []
    _, took = played(
        expert("save_user_memory", 1, safe=False, log=log),
        expert("invoke_assessment_expert", 4, safe=True, log=log),
        expert("generate_payment", 2, safe=False, log=log),
    )
    assert took == pytest.approx(7)
    assert [name for name, _, _ in log] == ["save_user_memory", "invoke_assessment_expert", "generate_payment"]
    assert [(begin, end) for _, begin, end in log] == [(0, 1), (1, 5), (5, 7)]


def test_the_flow_of_four_calls():
    """Section 7: two experts together, then the memory alone, then the third expert, results in call order."""
    log: list[tuple[str, float, float]] = []
    experts = [
        expert("invoke_policy_expert", 3, safe=True, log=log),
        expert("invoke_case_analyst", 2, safe=True, log=log),
        expert("save_user_memory", 1, safe=False, log=log),
        expert("invoke_assessment_expert", 4, safe=True, log=log),
    ]
    results, took = played(*experts)
    assert took == pytest.approx(8)
    assert {name: (begin, end) for name, begin, end in log} == {
        "invoke_policy_expert": (0, 3),
        "invoke_case_analyst": (0, 2),
        "save_user_memory": (3, 4),
        "invoke_assessment_expert": (4, 8),
    }
    assert [result.tool for result in results] == [each.name for each in experts]
    assert [result.content for result in results] == [f"result of {each.name}" for each in experts]
    assert [result.call_id for result in results] == ["t1.0", "t1.1", "t1.2", "t1.3"]


def test_the_batches_of_section_4():
    """Neighbouring safe calls form a batch, any other call is one of its own, and looking at the plan runs nothing."""
    safe, unsafe = expert("read", 0, safe=True), expert("write", 0, safe=False)
    queue = ToolQueue(registry=ToolRegistry.of([safe, unsafe]))
    order = ["read", "read", "write", "read", "write", "write", "read", "nobody", "read"]
    plan = queue.plan(calls(*order))
    names = {call.call_id: call.tool for call in plan.calls}
    groups = [[names[call_id] for call_id in batch] for batch in plan.batches]
    assert list(names.values()) == order
    assert groups == [["read", "read"], ["write"], ["read"], ["write"], ["write"], ["read", "nobody", "read"]]
    assert queue.plan([]).batches == ()


def test_the_events_of_section_3():
    """Queued with its position, started, completed or error with its duration, and at last drained."""
    events: list[ToolEvent] = []
    slow, quick = expert("slow", 2, safe=True), expert("quick", 1, safe=True)
    broken = tool(name="broken", concurrency_safe=True)(_broken)
    played(slow, quick, broken, expert("alone", 1, safe=False), events=events)
    told = [(str(event.type), event.tool, event.call_id) for event in events]
    begun = slice(4, 8)  # in a batch the first steps may come in any order
    told[begun] = sorted(told[begun], reverse=True)
    assert told[:4] == [
        ("tool_queued", "slow", "t1.0"),
        ("tool_queued", "quick", "t1.1"),
        ("tool_queued", "broken", "t1.2"),
        ("tool_queued", "alone", "t1.3"),
    ]
    assert [event.position for event in events[:4]] == [0, 1, 2, 3]
    assert told[4:] == [
        ("tool_started", "slow", "t1.0"),
        ("tool_started", "quick", "t1.1"),
        ("tool_started", "broken", "t1.2"),
        ("tool_error", "broken", "t1.2"),
        ("tool_completed", "quick", "t1.1"),
        ("tool_completed", "slow", "t1.0"),
        ("tool_started", "alone", "t1.3"),
        ("tool_completed", "alone", "t1.3"),
        ("queue_drained", "", ""),
    ]
    completed = {event.tool: event for event in events if str(event.type) == "tool_completed"}
    assert completed["slow"].duration_s == pytest.approx(2)
    assert completed["slow"].success is True
    (error,) = [event for event in events if str(event.type) == "tool_error"]
    assert "RuntimeError: no luck" in error.message
    assert error.success is False
    assert error.duration_s == 0
    assert {event.kind for event in events[:-1]} == {ToolKind.DIRECT}


async def _broken() -> str:
    """Fail."""
    raise RuntimeError("no luck")


def test_no_calls_take_no_time_and_are_drained():
    """An empty list of calls has an empty list of results."""
    events: list[ToolEvent] = []
    assert played(events=events) == ([], 0)
    assert [str(event.type) for event in events] == ["queue_drained"]


def test_calls_that_cannot_run_have_their_error_event_too():
    """An unknown tool is queued, and its error is told; it was never started."""
    events: list[ToolEvent] = []

    async def play() -> None:
        queue = ToolQueue(registry=ToolRegistry.of([]), clock=VirtualClock(), on_event=events.append)
        await queue.execute_all(calls("nobody"))

    run_virtual(play)
    assert [str(event.type) for event in events] == ["tool_queued", "tool_error", "queue_drained"]


# Order and exclusivity


def test_a_call_is_not_starved_by_those_behind_it():
    """An unsafe call runs right after the batch before it, however many safe ones follow."""
    log: list[tuple[str, float, float]] = []
    reads = [expert(f"read{n}", 1, safe=True, log=log) for n in range(40)]
    _, took = played(*reads[:2], expert("write", 1, safe=False, log=log), *reads[2:], limit=4)
    assert log[2][:2] == ("write", 1)
    assert took == pytest.approx(1 + 1 + 38 / 4 + 0.5)


async def test_never_more_at_once_than_the_limit():
    """A thousand calls run, 32 at a time, and 32 indeed."""
    running = most = 0

    @tool(read_only=True)
    async def work(n: int) -> int:
        """Work."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(n % 5 + 1):
            await checkpoint()
        running -= 1
        return n

    queue = ToolQueue(registry=ToolRegistry.of([work]), limit=32)
    with anyio.fail_after(HANG_S):
        results = await queue.execute_all(calls(*[("work", f'{{"n": {n}}}') for n in range(1_000)]))
    assert [result.content for result in results] == [str(n) for n in range(1_000)]
    assert most == 32
    assert queue.statistics().running == 0


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_misuse(limit):
    """A queue that may run nothing is a mistake that shows at once."""
    with pytest.raises(MisuseError, match="limit"):
        ToolQueue(registry=ToolRegistry.of([]), limit=limit)


async def test_statistics_tell_what_runs():
    """The queue shows its inside as a value."""
    seen: list[int] = []

    @tool(read_only=True)
    async def work() -> str:
        """Work."""
        await anyio.wait_all_tasks_blocked()
        seen.append(queue.statistics().running)
        return "ok"

    queue = ToolQueue(registry=ToolRegistry.of([work]))
    await queue.execute_all(calls("work", "work", "work"))
    assert max(seen) == 3
    assert queue.statistics() == QueueStatistics(running=0, abandoned=0, missed=0)


# Isolation


async def test_one_failure_touches_no_sibling():
    """The others of a batch run on to their results."""
    ended: list[str] = []

    @tool(read_only=True)
    async def work(name: str) -> str:
        """Work."""
        if name == "bad":
            raise ValueError("bad luck")
        await anyio.wait_all_tasks_blocked()
        ended.append(name)
        return name

    queue = ToolQueue(registry=ToolRegistry.of([work]))
    wanted = ["a", "bad", "b", "bad", "c"]
    results = await queue.execute_all(calls(*[("work", f'{{"name": "{name}"}}') for name in wanted]))
    assert [result.outcome is Outcome.DONE for result in results] == [True, False, True, False, True]
    assert sorted(ended) == ["a", "b", "c"]


async def test_a_failure_before_a_barrier_does_not_hold_what_is_behind():
    """A failed call is over like any other."""
    ran: list[str] = []

    @tool
    async def first() -> None:
        """Fail."""
        raise ValueError("no")

    @tool
    async def second() -> None:
        """Run."""
        ran.append("second")

    queue = ToolQueue(registry=ToolRegistry.of([first, second]))
    results = await queue.execute_all(calls("first", "second"))
    assert [result.outcome for result in results] == [Outcome.FAILED, Outcome.DONE]
    assert ran == ["second"]


async def test_a_model_retry_is_told_as_it_is():
    """What the tool says to the model stands alone: no type, no advice of ours."""

    @tool
    async def book(day: str) -> str:
        """Book."""
        raise ModelRetry("use an ISO date, such as 2027-01-31")

    (result,) = await ToolQueue(registry=ToolRegistry.of([book])).execute_all(calls(("book", '{"day": "x"}')))
    assert (result.outcome, result.content) == (Outcome.FAILED, "use an ISO date, such as 2027-01-31")


@pytest.mark.parametrize(("options", "advice"), [({}, "may have happened"), ({"read_only": True}, "called again")])
async def test_a_failure_says_what_to_do_next(options, advice):
    """The text names the error, and tells a tool that may have acted from one that may be called again."""

    async def act() -> None:
        """Act."""
        raise ValueError("the line is down")

    (result,) = await ToolQueue(registry=ToolRegistry.of([tool(**options)(act)])).execute_all(calls("act"))
    assert result.content.startswith("ValueError: the line is down")
    assert advice in result.content
    assert "Traceback" not in result.content


async def test_the_host_is_told_in_the_order_of_events():
    """`starting` is awaited before the tool's first line; `finished` gets each result once."""
    told: list[str] = []

    @tool
    async def act() -> str:
        """Act."""
        told.append("act")
        return "ok"

    class Telling(QueueHost):
        async def on_start(self, call: ToolCall, tool: object) -> None:
            await checkpoint()
            told.append(f"starting {call.id}")

        def on_result(self, result: ToolResult) -> None:
            told.append(f"finished {result.call_id} {result.outcome}")

    queue = ToolQueue(registry=ToolRegistry.of([act]), host=Telling())
    await queue.execute_all(calls("act", ("act", "[]"), "act"))
    assert told == [
        "starting t1.0",
        "act",
        "finished t1.0 done",
        "finished t1.1 failed",
        "starting t1.2",
        "act",
        "finished t1.2 done",
    ]


@pytest.mark.parametrize("safe", [True, False])
async def test_what_starting_raises_stops_the_queue(safe):
    """The one error that is no tool's: nothing more is started, and it comes out as itself."""
    ran: list[str] = []

    async def act() -> str:
        """Act."""
        ran.append("act")
        await anyio.sleep_forever()
        return "never"

    class Full(QueueHost):
        async def on_start(self, call: ToolCall, tool: object) -> None:
            if call.id == "t1.1":
                raise OSError("the disk is full")

    made = tool(concurrency_safe=safe, timeout_s=0.001)(act)
    queue = ToolQueue(registry=ToolRegistry.of([made]), host=Full())
    with pytest.raises(OSError, match="disk is full"), anyio.fail_after(HANG_S):
        await queue.execute_all(calls("act", "act", "act"))
    assert len(ran) <= 2
    assert queue.statistics().running == 0


async def test_a_listener_that_raises_changes_nothing():
    """Whoever watches a queue cannot break it (Source: document C, section 4, `emitEvent`)."""

    def listen(_event: ToolEvent) -> None:
        raise RuntimeError("the watcher is broken")

    @tool(read_only=True)
    async def act() -> str:
        """Act."""
        return "ok"

    queue = ToolQueue(registry=ToolRegistry.of([act]), listen=listen)
    results = await queue.execute_all(calls("act", "act"))
    assert [result.content for result in results] == ["ok", "ok"]
    assert queue.statistics().missed == 3 * 2 + 1


@pytest.mark.parametrize("safe", [True, False])
async def test_a_cancelled_queue_keeps_what_was_finished(safe):
    """Results handed over before the cancel stand; no other call starts after it."""
    host = Keeping()
    started: list[str] = []

    async def act(n: int) -> int:
        """Act."""
        started.append(str(n))
        if n == 1:
            scope.cancel()
            await anyio.sleep_forever()
        return n

    made = tool(concurrency_safe=safe)(act)
    queue = ToolQueue(registry=ToolRegistry.of([made]), limit=1, host=host)
    with anyio.CancelScope() as scope:
        await queue.execute_all(calls(*[("act", f'{{"n": {n}}}') for n in range(4)]))
    assert scope.cancelled_caught
    assert ([result.call_id for result in host.kept], started) == (["t1.0"], ["0", "1"])
    assert queue.statistics().running == 0


@pytest.mark.parametrize("safe", [True, False])
async def test_no_call_starts_after_the_cancel_even_if_none_ever_waits(safe):
    """Tools that return at once give no chance to be cut off; the queue looks by itself before each."""
    started: list[int] = []

    async def act(n: int) -> int:
        """Act."""
        started.append(n)
        if n == 1:
            scope.cancel()
        return n

    queue = ToolQueue(registry=ToolRegistry.of([tool(concurrency_safe=safe)(act)]), limit=1)
    with anyio.CancelScope() as scope:
        await queue.execute_all(calls(*[("act", f'{{"n": {n}}}') for n in range(4)]))
    assert scope.cancelled_caught
    assert started == [0, 1]


def test_two_tools_of_one_name_are_refused():
    """A registry knows each name once."""
    with pytest.raises(DuplicateToolError, match="'read'"):
        ToolRegistry.of([expert("read", 0, safe=True), expert("read", 0, safe=True)])
