"""Document C as it is written: its three scenarios, its flow of four calls, and a batch of a thousand."""

from __future__ import annotations

import asyncio

import anyio
import attrs
import pytest
import trio
from anyio.lowlevel import checkpoint

from agentfsm import Outcome, ToolCall, ToolEvent, ToolEventType, ToolQueue, ToolRegistry, ToolResult, tool
from agentfsm.testing import VirtualClock, run_virtual

# How long each takes in section 10.1.
SECONDS = {
    "invoke_policy_expert": 3,
    "invoke_memory_manager": 2,
    "invoke_assessment_expert": 4,
    "invoke_case_analyst": 2,
    "invoke_strategist": 2,
    "save_user_memory": 1,
    "generate_payment": 2,
}
# Section 2.1: what may write.
UNSAFE = {"invoke_memory_manager", "save_user_memory", "generate_payment"}


@attrs.frozen
class Played:
    """What came of a reply."""

    results: list[ToolResult]
    told: list[tuple[float, str, str]]
    # When, what, of which tool.
    took_s: float


def expert(name: str):
    """A tool of document C: it takes its time and says who it is."""

    async def work() -> str:
        await anyio.sleep(SECONDS[name])
        return f"{name} says"

    return tool(name=name, description=name, concurrency_safe=name not in UNSAFE, estimate_s=SECONDS[name])(work)


def calls(*names: str) -> list[ToolCall]:
    """A reply with one call of each."""
    return [ToolCall(id=f"t1.{n}", name=name, arguments="{}") for n, name in enumerate(names)]


def played(*names: str, limit: int = 20) -> Played:
    """Run a reply in virtual time."""

    async def play() -> Played:
        told: list[tuple[float, str, str]] = []

        def note(event: ToolEvent) -> None:
            told.append((anyio.current_time(), str(event.type), event.tool))

        registry = ToolRegistry.of(map(expert, dict.fromkeys(names)))
        queue = ToolQueue(registry, clock=VirtualClock(), limit=limit, on_event=note)
        assert queue.plan(calls(*names)).estimate_s == document_s(*names)
        results = await queue.execute_all(calls(*names))
        return Played(results, told, anyio.current_time())

    return run_virtual(play)


def document_s(*names: str) -> float:
    """Section 4 by hand: neighbouring safe calls take as long as the longest of them, all others their own time."""
    total, batch = 0.0, 0.0
    for name in names:
        if name in UNSAFE:
            total, batch = total + batch + SECONDS[name], 0.0
        else:
            batch = max(batch, SECONDS[name])
    return total + batch


def in_order(results: list[ToolResult], *names: str) -> bool:
    """Whether the results are those of the calls, in call order."""
    ids = [result.call_id for result in results] == [f"t1.{n}" for n in range(len(names))]
    return ids and [result.content for result in results] == [f"{name} says" for name in names]


@pytest.mark.parametrize(
    ("names", "took_s"),
    [
        (("invoke_policy_expert", "invoke_memory_manager"), 5),
        (("invoke_assessment_expert", "invoke_case_analyst", "invoke_strategist"), 4),
        (("save_user_memory", "invoke_assessment_expert", "generate_payment"), 7),
    ],
    ids=["1", "2", "3"],
)
def test_the_scenarios_take_the_times_that_the_document_states(names, took_s):
    """Section 10.1: 5 s, 4 s and 7 s, and the serial sum with a limit of one call at once."""
    run = played(*names)
    assert run.took_s == took_s
    assert in_order(run.results, *names)
    serial = played(*names, limit=1)
    assert serial.took_s == sum(SECONDS[name] for name in names)
    assert in_order(serial.results, *names)


def test_the_second_scenario_saves_half_the_time():
    """8 s one by one become 4 s together, and each result tells its own time."""
    run = played("invoke_assessment_expert", "invoke_case_analyst", "invoke_strategist")
    assert [result.duration_s for result in run.results] == [4, 2, 2]
    assert sum(result.duration_s for result in run.results) == 2 * run.took_s
    assert {result.started_at for result in run.results} == {run.results[0].started_at}
    assert run.results[0].completed_at - run.results[0].started_at == 4


def test_the_flow_of_four_calls_moment_by_moment():
    """Section 7: batch A together, the memory alone, batch B; every event at its second, then the drain."""
    names = ("invoke_policy_expert", "invoke_case_analyst", "save_user_memory", "invoke_assessment_expert")
    run = played(*names)
    assert run.took_s == 8
    assert in_order(run.results, *names)
    assert run.told[:4] == [(0, "tool_queued", name) for name in names]
    assert sorted(run.told[4:6]) == [(0, "tool_started", name) for name in sorted(names[:2])]
    assert run.told[6:] == [
        (2, "tool_completed", "invoke_case_analyst"),
        (3, "tool_completed", "invoke_policy_expert"),
        (3, "tool_started", "save_user_memory"),
        (4, "tool_completed", "save_user_memory"),
        (4, "tool_started", "invoke_assessment_expert"),
        (8, "tool_completed", "invoke_assessment_expert"),
        (8, "queue_drained", ""),
    ]


def test_the_plan_of_the_flow_is_that_of_the_document():
    """Section 7: batch A, the memory, batch B; each waits for those before it."""
    names = ("invoke_policy_expert", "invoke_case_analyst", "save_user_memory", "invoke_assessment_expert")
    plan = ToolQueue(ToolRegistry.of(map(expert, names))).plan(calls(*names))
    assert plan.batches == (("t1.0", "t1.1"), ("t1.2",), ("t1.3",))
    assert [call.waits for call in plan.calls] == [(), (), ("t1.0", "t1.1"), ("t1.2",)]


def test_one_failure_leaves_the_batch_as_it_is():
    """Section 9.2: of two experts one runs out of time, the other's result stands, and what is behind them runs."""

    async def play() -> list[ToolResult]:
        @tool(concurrency_safe=True, timeout_s=2.5)
        async def hanging() -> str:
            """Hang."""
            await anyio.sleep_forever()
            return "never"

        @tool(concurrency_safe=True)
        async def broken() -> str:
            """Fail."""
            raise RuntimeError("no luck")

        tools = [hanging, broken, expert("invoke_case_analyst"), expert("save_user_memory")]
        queue = ToolQueue(ToolRegistry.of(tools), clock=VirtualClock())
        results = await queue.execute_all(calls(*[each.name for each in tools], "nobody"))
        assert anyio.current_time() == 3.5
        return results

    results = run_virtual(play)
    assert [result.outcome for result in results] == [
        Outcome.TIMED_OUT,
        Outcome.FAILED,
        Outcome.DONE,
        Outcome.DONE,
        Outcome.FAILED,
    ]
    assert "no luck" in results[1].content
    assert "nobody" in results[4].content


# A thousand calls


def _tasks(backend: str) -> int:
    """How many tasks there are below this one's parents, or in the loop."""
    if backend == "asyncio":
        return len([task for task in asyncio.all_tasks() if not task.done()])
    root = trio.lowlevel.current_task()
    while root.parent_nursery is not None:
        root = root.parent_nursery.parent_task
    return _below(root)


def _below(task: trio.lowlevel.Task) -> int:
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return len(children) + sum(map(_below, children))


async def test_a_thousand_calls_take_no_more_tasks_than_may_run(anyio_backend_name):
    """32 at once, never more, and 32 indeed; no more than 32 workers exist; all results, in call order."""
    running = most = tasks = 0

    @tool(read_only=True)
    async def work(n: int) -> int:
        """Work."""
        nonlocal running, most, tasks
        running += 1
        most = max(most, running)
        tasks = max(tasks, _tasks(anyio_backend_name))
        for _ in range(n % 7):
            await checkpoint()
        running -= 1
        return n

    wanted = [ToolCall(id=f"t1.{n}", name="work", arguments=f'{{"n": {n}}}') for n in range(1_000)]
    before = _tasks(anyio_backend_name)
    results = await ToolQueue(ToolRegistry.of([work]), limit=32).execute_all(wanted)
    assert [result.call_id for result in results] == [call.id for call in wanted]
    assert [result.content for result in results] == [str(n) for n in range(1_000)]
    assert (most, running) == (32, 0)
    assert 16 < tasks - before <= 32
    assert _tasks(anyio_backend_name) == before


def test_a_thousand_calls_of_every_kind_end():
    """Readers, writers of one key, writers of all, and calls behind others: a result for each, in order, none lost."""
    state = {"running": 0, "most": 0}

    async def work(key: str) -> str:
        state["running"] += 1
        state["most"] = max(state["most"], state["running"])
        await anyio.sleep(len(key))
        state["running"] -= 1
        return key

    tools = [
        tool(name="read", read_only=True)(work),
        tool(name="write", locks=lambda a: [a.key])(work),
        tool(name="alone")(work),
        tool(name="last", concurrency_safe=True, after=["read", "last"], limit=3)(work),
    ]
    names = ["write"] * 30 + ["read"] * 20 + ["last"] * 6 + ["alone"]

    async def play() -> list[ToolResult]:
        queue = ToolQueue(ToolRegistry.of(tools), clock=VirtualClock(), limit=16)
        wanted = [
            ToolCall(id=f"t1.{n}", name=names[n % len(names)], arguments=f'{{"key": "{"k" * (n % 5)}"}}')
            for n in range(1_000)
        ]
        return await queue.execute_all(wanted)

    results = run_virtual(play)
    assert [result.call_id for result in results] == [f"t1.{n}" for n in range(1_000)]
    assert [result.content for result in results] == ["k" * (n % 5) for n in range(1_000)]
    assert state["most"] == 16


def test_thousands_of_calls_that_follow_each_other_end():
    """A call that ends last of thousands lets all that wait for it go, however long their line is."""

    async def lead(seconds: int) -> str:
        await anyio.sleep(seconds)
        return "led"

    async def follow() -> str:
        return "followed"

    tools = [tool(read_only=True)(lead), tool(read_only=True, after=["lead"])(follow)]
    pair = [("lead", '{"seconds": 0}'), ("follow", "{}")]
    wanted = [("lead", '{"seconds": 9}'), ("follow", "{}"), *pair * 1_500]

    async def play() -> list[ToolResult]:
        queue = ToolQueue(ToolRegistry.of(tools), clock=VirtualClock())
        return await queue.execute_all(
            [ToolCall(id=f"t1.{n}", name=name, arguments=args) for n, (name, args) in enumerate(wanted)]
        )

    results = run_virtual(play)
    assert [result.content for result in results] == ["led", "followed"] * 1_501


def test_events_of_a_thousand_calls_are_told_in_order():
    """Each call is queued, then started, then completed, once each; the drain is the last word."""
    seen: list[ToolEvent] = []

    async def nap() -> None:
        await anyio.sleep(1)

    async def play() -> None:
        queue = ToolQueue(
            ToolRegistry.of([tool(read_only=True)(nap)]), clock=VirtualClock(), limit=32, on_event=seen.append
        )
        await queue.execute_all(calls(*["nap"] * 1_000))

    run_virtual(play)
    assert seen.pop().type is ToolEventType.DRAINED
    lives: dict[str, list[str]] = {}
    for event in seen:
        lives.setdefault(event.call_id, []).append(str(event.type))
    assert list(lives) == [f"t1.{n}" for n in range(1_000)]
    assert all(life == ["tool_queued", "tool_started", "tool_completed"] for life in lives.values())
