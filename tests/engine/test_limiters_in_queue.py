"""Limiters in the queue, over runs: shared limits, who comes first, threads that hang, cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import attrs
import pytest
import trio
from anyio.lowlevel import checkpoint

from agentfsm import ErrorType, Limiter, MisuseError, Outcome, Tool, ToolCall, ToolQueue, ToolRegistry, ToolResult, tool
from agentfsm.testing import VirtualClock, run_virtual
from agentfsm.testing.clock import EPOCH
from agentfsm.tools.breaker import FAILURE_THRESHOLD, OPEN_S
from agentfsm.tools.queue.dispatch import QueueHost
from agentfsm.tools.queue.scheduler import Scheduler
from tests.support.checks import HANG_S, settled

# Long enough to start a thread, short enough to wait for.
SHORT_S = 0.01


def calls(*wanted: str | tuple[str, float]) -> list[ToolCall]:
    """Calls in order: a name, or a name with the seconds that it takes."""
    pairs = [(each, None) if isinstance(each, str) else each for each in wanted]
    return [
        ToolCall(id=f"{name}{n}", name=name, arguments="{}" if seconds is None else f'{{"seconds": {seconds}}}')
        for n, (name, seconds) in enumerate(pairs)
    ]


@attrs.define
class Watch:
    """Who began when, and how many ran at once."""

    begun: list[tuple[str, float]] = attrs.field(factory=list)
    running: Counter[str] = attrs.field(factory=Counter)
    most: Counter[str] = attrs.field(factory=Counter)

    def tool(self, name: str, **options: Any) -> Tool[..., Any]:
        """A tool that is watched, and takes a second."""

        async def work(seconds: float = 1, who: str = "") -> str:
            self.begun.append((who or name, anyio.current_time()))
            counted = ("all", name, *options.get("tags", ()))
            self.running.update(counted)
            self.most |= self.running
            try:
                await anyio.sleep(seconds)
            finally:
                self.running.subtract(counted)
            return name

        return tool(name=name, **{"concurrency_safe": True, **options})(work)


def queue_of(*tools: Tool[..., Any], tag_limits: dict[str, Any] | None = None, **options: Any) -> ToolQueue:
    """A queue in virtual time, of a run of its own."""
    registry = ToolRegistry(tag_limits=tag_limits or {})
    for each in tools:
        registry.register(each)
    return ToolQueue(registry, clock=VirtualClock(), **options)


def spans(results: list[ToolResult]) -> list[tuple[float, float]]:
    """When each call began and ended, in virtual seconds."""
    return [(result.started_at - EPOCH, result.completed_at - EPOCH) for result in results]


def is_free(*limiters: Limiter | None) -> bool:
    """Whether nobody is in any of them, nor waits."""
    return all(each is not None and (each.in_use, each.waiting) == (0, 0) for each in limiters)


# Room


def test_two_runs_share_the_limit_of_a_tool():
    """Never more than the tool allows, over both; and both come to their end."""
    watch = Watch()
    made = watch.tool("search", limit=2)

    async def play() -> float:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(queue_of(made).execute_all, calls(*["search"] * 6))
        return anyio.current_time()

    assert run_virtual(play) == 6
    assert watch.most["search"] == 2
    assert is_free(made.limiter)


def test_who_comes_first_goes_first():
    """Over runs too: a run with many calls does not pass one that came in between."""
    watch = Watch()
    made = watch.tool("search", limit=1)

    async def run(who: str, count: int, at: float) -> None:
        await anyio.sleep(at)
        wanted = [ToolCall(id=f"c{n}", name="search", arguments=f'{{"who": "{who}"}}') for n in range(count)]
        await queue_of(made).execute_all(wanted)

    async def play() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "first", 3, 0)
            tasks.start_soon(run, "second", 2, 0.5)
            tasks.start_soon(run, "third", 2, 0.7)
            tasks.start_soon(run, "fourth", 1, 3.2)

    run_virtual(play)
    order = ["first"] * 3 + ["second"] * 2 + ["third"] * 2 + ["fourth"]
    assert watch.begun == [(who, n) for n, who in enumerate(order)]


def test_a_tag_bounds_several_tools_together():
    """Tools of one tag share its places; others pass."""
    watch = Watch()
    tools = [watch.tool(name, tags=["db"]) for name in ("read", "count")] + [watch.tool("free")]

    async def play() -> float:
        await queue_of(*tools, tag_limits={"db": 2, "unused": 1}).execute_all(calls(*["read", "count", "free"] * 4))
        return anyio.current_time()

    assert run_virtual(play) == 4
    assert watch.most["db"] == 2
    assert [at for name, at in watch.begun if name == "free"] == [0] * 4


def test_registries_that_are_given_one_limiter_share_it():
    """Two agents with the same service behind different tools stay within what it bears."""
    watch, shared = Watch(), Limiter(1)

    async def play() -> float:
        async with anyio.create_task_group() as tasks:
            for name in ("read", "write"):
                queue = queue_of(watch.tool(name, tags=["db"]), tag_limits={"db": shared})
                tasks.start_soon(queue.execute_all, calls(name, name))
        return anyio.current_time()

    assert run_virtual(play) == 4
    assert watch.most["db"] == 1
    assert is_free(shared)


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks, and cuts off what goes round in a ring."""

    def __init__(self, most: int) -> None:
        """Allow so many."""
        self.left = most
        self.scope = anyio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count."""
        self.left -= 1
        if not self.left:
            self.scope.cancel()


def test_runs_that_need_several_places_all_end():
    """Runs that need the same places in part do not wait for each other, or turn each other away, for ever."""

    async def once() -> None:
        watch, steps = Watch(), Steps(20_000)  # some hundreds will do
        tag_limits = {"db": Limiter(1), "net": Limiter(1)}
        tools = [
            watch.tool("a", limit=1, tags=["db", "net"]),
            watch.tool("b", limit=1, tags=["net"]),
            watch.tool("c", limit=2, tags=["db"]),
        ]
        trio.lowlevel.add_instrument(steps)
        with steps.scope:
            async with anyio.create_task_group() as tasks:
                for names in ("abcabc", "cbacba", "bcabca"):
                    tasks.start_soon(queue_of(*tools, tag_limits=tag_limits, limit=2).execute_all, calls(*names))
        trio.lowlevel.remove_instrument(steps)
        assert not steps.scope.cancelled_caught, "they go round in a ring"
        assert [watch.most[tag] for tag in tag_limits] == [1, 1]
        assert len(watch.begun) == 18
        assert is_free(*tag_limits.values(), *[each.limiter for each in tools])

    async def play() -> None:
        for _ in range(100):  # trio decides by chance who comes first
            await once()

    run_virtual(play)


def test_who_waits_for_room_takes_no_worker_from_others():
    """With a limit of two calls at once, three that wait leave both to those that need not."""
    watch = Watch()
    narrow, wide = watch.tool("narrow", limit=1), watch.tool("wide")

    async def play() -> list[ToolResult]:
        assert narrow.limiter is not None
        assert narrow.limiter.try_acquire(print)

        async def later() -> None:
            await anyio.sleep(10)
            narrow.limiter.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            return await queue_of(narrow, wide, limit=2).execute_all(calls(*["narrow"] * 3, *["wide"] * 4))

    results = run_virtual(play)
    assert spans(results) == [(10, 11), (11, 12), (12, 13), (0, 1), (0, 1), (1, 2), (1, 2)]


def test_who_waits_for_room_starts_when_there_is_some():
    """At once, also while every other call of its run takes its time."""
    watch = Watch()
    narrow, slow = watch.tool("narrow", limit=1), watch.tool("slow", timeout_s=100)

    async def play() -> list[ToolResult]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(queue_of(narrow).execute_all, calls(("narrow", 3)))
            await anyio.sleep(1)
            return await queue_of(narrow, slow).execute_all(calls("narrow", ("slow", 50), "narrow"))

    assert spans(run_virtual(play)) == [(3, 4), (1, 51), (4, 5)]


def test_room_that_comes_does_not_lift_the_limit_of_the_queue():
    """A call that waited for room waits for a worker, too."""
    watch = Watch()
    tools = [watch.tool("narrow", limit=1), watch.tool("lead"), watch.tool("follow", after=["lead"])]
    narrow = tools[0].limiter
    assert narrow is not None
    assert narrow.try_acquire(print)

    async def play() -> None:
        async def later() -> None:
            await anyio.sleep(3.5)
            narrow.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            wanted = calls(("narrow", 5), ("lead", 1), ("lead", 2), *[("follow", 9)] * 3)
            await queue_of(*tools, limit=2).execute_all(wanted)

    run_virtual(play)
    assert watch.most["all"] == 2


def test_calls_that_started_early_count_for_the_limit():
    """Whoever waits for calls that others have started takes one himself only where there is room."""
    watch = Watch()

    async def play() -> list[ToolResult]:
        async with anyio.create_task_group() as tasks:
            session = Scheduler(queue_of(watch.tool("work"), limit=2), tasks.create_task)
            for call in calls(*["work"] * 5):
                session.add(call)
                session.start_workers()
            await anyio.sleep(0.5)
            await session.drain()
            return session.results

    assert spans(run_virtual(play)) == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3)]
    assert watch.most["all"] == 2


def test_calls_in_a_line_pass_their_limiters():
    """Calls that run one by one wait for room in the same way: limit 1, a single call, a chain."""
    watch = Watch()
    made = watch.tool("write", concurrency_safe=False, limit=1)

    async def play() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(queue_of(made, limit=1).execute_all, calls(*["write"] * 2))
            tasks.start_soon(queue_of(made).execute_all, calls(*["write"] * 2))
            tasks.start_soon(queue_of(made).execute_all, calls("write"))

    run_virtual(play)
    assert [at for _, at in watch.begun] == [0, 1, 2, 3, 4]
    assert watch.most["write"] == 1


@pytest.mark.parametrize("ending", ["fails", "times out", "has wrong arguments"])
def test_a_place_is_given_back_however_a_call_ends(ending):
    """A failure, a time-out and a refusal leave the place to the next."""
    seconds = {"fails": '"x"', "times out": "9", "has wrong arguments": "[]"}[ending]

    async def work(seconds: float | str) -> str:
        await anyio.sleep(float(seconds))
        return "ok"

    made = tool(name="work", concurrency_safe=True, limit=1, timeout_s=1)(work)

    async def play() -> list[ToolResult]:
        wanted = [ToolCall(id="c0", name="work", arguments=f'{{"seconds": {seconds}}}'), *calls(("work", 0))]
        return await queue_of(made).execute_all(wanted)

    results = run_virtual(play)
    assert [result.outcome is Outcome.DONE for result in results] == [False, True]
    assert is_free(made.limiter)


# Places that are not given back


def test_who_waits_in_vain_is_told_so_after_his_time():
    """All that wait for a place that nobody gives back are blocked when their own time is over, and not in turn."""
    watch = Watch()
    made, other = watch.tool("hang", limit=1, timeout_s=5), watch.tool("other", timeout_s=600)
    assert made.limiter is not None
    assert made.limiter.try_acquire(print)
    made.limiter.mark_abandoned()

    async def play() -> list[ToolResult]:
        results = await queue_of(made, other).execute_all(calls("hang", "hang", "other", "hang"))
        assert anyio.current_time() <= 1 + 5
        return results

    results = run_virtual(play)
    assert [result.outcome for result in results] == [Outcome.FAILED, Outcome.FAILED, Outcome.DONE, Outcome.FAILED]
    for result in (results[0], results[1], results[3]):
        assert (result.error_type, result.retryable) == (ErrorType.BLOCKED, True)
        assert "blocked: hang is still running" in result.content
    assert [name for name, _ in watch.begun] == ["other"]
    made.limiter.release_abandoned()
    assert is_free(made.limiter)


def test_what_is_behind_a_blocked_call_goes_on():
    """It has a result, so whatever waited for it starts."""
    watch = Watch()
    tools = [watch.tool("hang", limit=1, timeout_s=5), watch.tool("write", concurrency_safe=False)]
    assert tools[0].limiter is not None
    assert tools[0].limiter.try_acquire(print)
    tools[0].limiter.mark_abandoned()
    results = run_virtual(lambda: queue_of(*tools).execute_all(calls("hang", "write", "hang")))
    assert [result.error_type for result in results] == [ErrorType.BLOCKED, None, ErrorType.BLOCKED]


def test_room_in_the_very_moment_of_giving_up():
    """A call is given up or run, never both: it has one result, whichever comes first."""

    async def once(clock: trio.testing.MockClock) -> None:
        ran: list[str] = []
        handed: list[ToolResult] = []

        class Witness(QueueHost):
            """A host that notes each result."""

            def on_result(self, result: ToolResult) -> None:
                """Note."""
                handed.append(result)

        @tool(read_only=True, limit=1, timeout_s=5)
        async def narrow() -> str:
            """Run."""
            ran.append("narrow")
            return "ok"

        assert narrow.limiter is not None
        assert narrow.limiter.try_acquire(print)
        narrow.limiter.mark_abandoned()

        async def leave_late() -> None:
            await anyio.sleep(4)
            narrow.limiter.release_abandoned()
            clock.jump(2)  # both at once: there is room, and the time is over

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave_late)
            results = await queue_of(narrow, host=Witness()).execute_all(calls("narrow"))
        assert results == handed
        assert [result.outcome is Outcome.DONE for result in handed] == [bool(ran)]
        assert is_free(narrow.limiter)

    for _ in range(30):  # trio decides by chance who goes first
        clock = trio.testing.MockClock(autojump_threshold=0)
        anyio.run(once, clock, backend="trio", backend_options={"clock": clock})


class Gate:
    """A plain function that hangs until it is let go."""

    def __init__(self) -> None:
        """Close the gate."""
        self.leave = threading.Event()
        self.inside = 0

    def __call__(self) -> str:
        """Hang."""
        self.inside += 1
        assert self.leave.wait(HANG_S)
        self.inside -= 1
        return "late"


@pytest.fixture
def gate():
    """A gate that is open when the test is over."""
    made = Gate()
    yield made
    made.leave.set()
    settled(lambda: not made.inside)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks and threads go on until the condition is true."""
    with anyio.fail_after(HANG_S):
        while not condition():
            await checkpoint()


def hanging(gate: Gate, **options: Any) -> Tool[..., Any]:
    """A plain tool that hangs at a gate."""

    def hang() -> str:
        """Hang."""
        return gate()

    return tool(name="hang", read_only=True, timeout_s=SHORT_S, **options)(hang)


@pytest.mark.parametrize("by", ["limit", "tag"])
async def test_a_thread_left_behind_keeps_its_place(gate, by):
    """Until it ends: other calls are blocked after their time, in this run and in others; then there is room again."""
    made = hanging(gate, limit=1) if by == "limit" else hanging(gate, tags=["slow"])
    shared = Limiter(1)
    limiter = made.limiter or shared

    def queue() -> ToolQueue:
        registry = ToolRegistry(tag_limits={"slow": shared})
        registry.register(made)
        return ToolQueue(registry)

    with anyio.fail_after(HANG_S):
        first = await queue().execute_all(calls("hang", "hang", "hang"))
        second = await queue().execute_all(calls("hang"))
    kinds = [result.error_type for result in first]
    assert kinds == [ErrorType.TIMEOUT, ErrorType.BLOCKED, ErrorType.BLOCKED]
    assert [result.error_type for result in second] == [ErrorType.BLOCKED]
    assert gate.inside == 1
    assert (limiter.in_use, limiter.waiting) == (1, 0)
    gate.leave.set()
    await until(lambda: is_free(limiter))
    with anyio.fail_after(HANG_S):
        (again,) = await queue().execute_all(calls("hang"))
    assert again.outcome in (Outcome.DONE, Outcome.TIMED_OUT)  # its time is short, and threads take what they take
    await until(lambda: is_free(limiter))


async def test_who_waits_for_a_thread_runs_when_it_ends(gate):
    """The place goes to him in the moment in which the thread gives it back."""
    made = hanging(gate, limit=1)
    patient = attrs.evolve(made, timeout_s=HANG_S)
    patient.limiter = made.limiter
    results: list[ToolResult] = []

    async def wait() -> None:
        results.extend(await ToolQueue(ToolRegistry.of([patient])).execute_all(calls("hang")))

    with anyio.fail_after(HANG_S):
        (first,) = await ToolQueue(ToolRegistry.of([made])).execute_all(calls("hang"))
        assert first.outcome is Outcome.TIMED_OUT
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: made.limiter is not None and made.limiter.waiting == 1)
            assert gate.inside == 1
            gate.leave.set()
    assert [result.content for result in results] == ["late"]
    await until(lambda: is_free(made.limiter))


# Cancellation


async def test_threads_that_outlive_a_cancelled_batch_keep_their_places(gate):
    """Until they end, and no longer; who waits for them comes in then."""
    made = hanging(gate, limit=2)
    assert made.limiter is not None
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ToolQueue(ToolRegistry.of([attrs_like(made, HANG_S)])).execute_all, calls(*["hang"] * 5))
            await until(lambda: gate.inside == 2 and made.limiter is not None and made.limiter.waiting == 3)
            tasks.cancel_scope.cancel()
    assert (made.limiter.in_use, made.limiter.waiting) == (2, 0)
    gate.leave.set()
    await until(lambda: is_free(made.limiter))


def attrs_like(made: Tool[..., Any], timeout_s: float) -> Tool[..., Any]:
    """The same tool with the same places, and another time."""
    other = attrs.evolve(made, timeout_s=timeout_s)
    other.limiter = made.limiter
    return other


async def test_a_timed_out_probe_decides_and_a_cancelled_one_does_not():
    """The breaker opens again after the one, and lets the next call probe after the other."""
    hang = anyio.Event()
    broken = tool(name="probe", read_only=True, timeout_s=HANG_S)(_until(hang))
    queue = ToolQueue(ToolRegistry.of([broken]))
    for _ in range(FAILURE_THRESHOLD):
        ticket = broken.breaker.admit(0)
        assert not isinstance(ticket, float)
        broken.breaker.record_failure(ticket, queue.clock.monotonic() - 2 * OPEN_S)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(queue.execute_all, calls("probe", "probe"))
            await until(lambda: queue.statistics().running > 0)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert str(broken.breaker.state) == "half_open"
        hang.set()
        results = await queue.execute_all(calls("probe"))
    assert [result.content for result in results] == ["done"]
    assert str(broken.breaker.state) == "closed"


def _until(event: anyio.Event) -> Any:
    async def probe() -> str:
        await event.wait()
        return "done"

    return probe


def test_a_queue_that_moves_refuses_nobody():
    """However long others are before it: only a place that nobody will give back is waited for in vain."""
    watch = Watch()
    one = watch.tool("one", limit=1, timeout_s=5)

    async def play() -> list[ToolResult]:
        return await queue_of(one).execute_all(calls(*[("one", 4)] * 5))

    assert [result.outcome for result in run_virtual(play)] == [Outcome.DONE] * 5


def test_who_waits_for_a_stuck_place_is_told_while_others_run():
    """Neither what else is in flight keeps it waiting, nor what waits in vain for longer."""
    watch = Watch()
    stuck = [watch.tool("hang", limit=1, timeout_s=5), watch.tool("slow", limit=1, timeout_s=20)]
    for each in stuck:
        assert each.limiter is not None
        assert each.limiter.try_acquire(print)
        each.limiter.mark_abandoned()
    ends: dict[str, float] = {}

    class Witness(QueueHost):
        """A host that notes when each result comes."""

        def on_result(self, result: ToolResult) -> None:
            """Note."""
            ends[result.tool] = anyio.current_time()

    queue = queue_of(*stuck, watch.tool("long", timeout_s=600), host=Witness())
    run_virtual(lambda: queue.execute_all(calls("hang", "slow", ("long", 50))))
    assert ends == {"hang": 6.0, "slow": 21.0, "long": 50.0}
    for each in stuck:
        assert each.limiter is not None
        each.limiter.release_abandoned()


# Rates.


@pytest.mark.parametrize("in_a_row", [False, True])
def test_a_rate_spreads_the_calls(in_a_row: bool) -> None:
    """No minute has more starts of a tag than allowed, and the calls come in their order."""

    async def play() -> None:
        watch = Watch()
        work = watch.tool("work", tags={"api"}, concurrency_safe=not in_a_row)
        queue = queue_of(work, tag_limits={"api": Limiter(per_minute=2)})
        results = await queue.execute_all(calls(*[("work", 0.5)] * 5))
        assert [result.outcome for result in results] == [Outcome.DONE] * 5
        starts = [moment for _, moment in watch.begun]
        for first, third in zip(starts, starts[2:], strict=False):
            assert third - first >= 60
        assert starts[-1] <= 121
        assert is_free(queue.registry.tag_limits["api"])

    run_virtual(play)


def test_a_rate_counts_a_call_from_its_start() -> None:
    """A call that keeps its permit while it waits for another limit does not begin with those of a later minute."""

    async def play() -> None:
        watch = Watch()
        work = watch.tool("work", tags={"db"}, per_minute=2)
        hog = watch.tool("hog", tags={"db"}, timeout_s=100)
        async with anyio.create_task_group() as tasks:
            shared = Limiter(1)
            tasks.start_soon(queue_of(hog, tag_limits={"db": shared}).execute_all, calls(("hog", 70)))
            await anyio.wait_all_tasks_blocked()
            await queue_of(work, tag_limits={"db": shared}).execute_all(calls(*[("work", 0)] * 6))
        starts = [moment for name, moment in watch.begun if name == "work"]
        assert starts == pytest.approx([70, 70, 130, 130, 190, 190])

    run_virtual(play)


def test_what_comes_between_the_permit_and_the_start_counts_for_no_minute() -> None:
    """A host may take its time over the start of a call, and a call that does not start leaves its place."""

    class Slow(QueueHost):
        """The first call's start is slow to be written."""

        async def on_start(self, call: ToolCall, tool: Tool[..., Any]) -> None:
            """Write."""
            await anyio.sleep(70 if call.id == "work0" else 0)

    async def play() -> None:
        watch = Watch()
        work = watch.tool("work", per_minute=1)
        wrong = ToolCall(id="wrong", name="work", arguments='{"seconds": "x"}')
        results = await queue_of(work, host=Slow()).execute_all([wrong, *calls(("work", 0), ("work", 0))])
        assert [result.outcome for result in results] == [Outcome.FAILED, Outcome.DONE, Outcome.DONE]
        assert [moment for _, moment in watch.begun] == pytest.approx([70, 130])
        assert is_free(work.limiter)

    run_virtual(play)


def test_a_call_that_is_cancelled_before_its_start_counts_for_no_minute() -> None:
    """Though it had a permit already, and waited for that of its tag."""

    async def play() -> None:
        watch = Watch()
        work = watch.tool("work", tags={"db"}, per_minute=2)
        shared = Limiter(1)
        assert shared.try_acquire(print)
        with anyio.move_on_after(30):
            await queue_of(work, tag_limits={"db": shared}).execute_all(calls("work", "work", "work"))
        assert work.limiter is not None
        assert is_free(work.limiter)
        assert (work.limiter.statistics().recent, shared.in_use, shared.waiting) == (0, 1, 0)

    run_virtual(play)


def test_limits_that_are_shared_crosswise_make_no_ring() -> None:
    """Two registries may give the same limiters to tags of other names, or one limiter to two tags of a tool."""

    async def play() -> None:
        watch = Watch()
        work = watch.tool("work", tags={"a", "b"})
        one, other = Limiter(1), Limiter(1)
        async with anyio.create_task_group() as tasks:
            for tag_limits in ({"a": one, "b": other}, {"a": other, "b": one}, {"a": one, "b": one}):
                tasks.start_soon(queue_of(work, tag_limits=tag_limits).execute_all, calls("work", "work"))
        assert len(watch.begun) == 6
        assert is_free(one, other)

    run_virtual(play)


async def test_a_call_whose_loop_was_closed_keeps_no_place() -> None:
    """Other runs of the process go on, though its task is still referenced."""
    watch = Watch()
    narrow = watch.tool("narrow", limit=1)
    assert narrow.limiter is not None
    assert narrow.limiter.try_acquire(print)
    lost = ToolQueue(ToolRegistry.of([narrow])).execute_all(calls("narrow"))

    def lose() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(lost)
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        assert not task.done()

    await anyio.to_thread.run_sync(lose)
    assert narrow.limiter.waiting == 1
    narrow.limiter.release()
    with anyio.fail_after(HANG_S):
        await ToolQueue(ToolRegistry.of([narrow])).execute_all(calls(("narrow", 0)))
    with suppress(RuntimeError):  # anyio, for which there is no task here
        lost.close()  # else anyio keeps it for ever
    assert is_free(narrow.limiter)


def test_waiting_for_a_rate_takes_nothing_of_the_time_of_a_call() -> None:
    """A call that waits two minutes for its turn runs within its time-out all the same."""

    async def play() -> None:
        watch = Watch()
        work = watch.tool("work", tags={"api"}, timeout_s=2)
        queue = queue_of(work, tag_limits={"api": Limiter(per_minute=1)})
        results = await queue.execute_all(calls("work", "work", "work"))
        assert [result.outcome for result in results] == [Outcome.DONE] * 3

    run_virtual(play)


def test_a_cancelled_call_leaves_the_line() -> None:
    """Who is cancelled while it waits for its minute leaves the limiter as it was."""

    async def play() -> None:
        watch = Watch()
        work = watch.tool("work", tags={"api"})
        queue = queue_of(work, tag_limits={"api": Limiter(per_minute=1)})
        with anyio.move_on_after(30):
            await queue.execute_all(calls("work", "work", "work"))
        limiter = queue.registry.tag_limits["api"]
        assert is_free(limiter)
        assert limiter.statistics().recent == 1

    run_virtual(play)


def test_a_tool_has_a_rate_of_its_own() -> None:
    """`per_minute` makes the limiter, alone or beside `limit`."""
    search = tool(name="search", per_minute=30)(lambda: "")
    both = tool(name="both", limit=2, per_minute=30)(lambda: "")
    assert search.limiter is not None
    assert both.limiter is not None
    assert (search.limiter.concurrency, search.limiter.per_minute) == (None, 30)
    assert (both.limiter.concurrency, both.limiter.per_minute) == (2, 30)


def test_a_limiter_is_shared_by_a_tag() -> None:
    """A tool takes none for itself, and its error says where it belongs."""
    with pytest.raises(MisuseError, match=r"to share a Limiter, use a tag: .*ToolRegistry\(tag_limits="):
        tool(name="work", limit=Limiter(1))(lambda: "")  # type: ignore[call-overload]


@pytest.mark.parametrize("options", [{"per_minute": 0}, {"limit": 0}, {"per_minute": 1.5}, {"limit": True}], ids=str)
def test_a_limit_is_a_whole_number(options: dict[str, Any]) -> None:
    """The error names the tool and the option."""
    with pytest.raises(MisuseError, match=r"'work'\((per_minute|limit)=.* give a whole number, 1 or more"):
        tool(name="work", **options)(lambda: "")
