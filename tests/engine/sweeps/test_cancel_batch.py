"""A mixed batch cancelled at every await: results that were handed over stand, and nothing is left behind.

No place taken, nobody waiting, no breaker half open for ever: the next batch of the same tools runs as if nothing had
been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm import ErrorType, Limiter, Outcome, Tool, ToolCall, ToolQueue, ToolRegistry, ToolResult, tool
from agentfsm.tools.breaker import FAILURE_THRESHOLD, OPEN_S
from agentfsm.tools.queue.dispatch import QueueHost
from tests.support.checks import HANG_S, Trap


def is_free(*limiters: Limiter | None) -> bool:
    """Whether nobody is in any of them, nor waits."""
    return all(each is not None and (each.in_use, each.waiting) == (0, 0) for each in limiters)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks and threads go on until the condition is true."""
    with anyio.fail_after(HANG_S):
        while not condition():
            await checkpoint()


@attrs.define
class World(QueueHost):
    """Tools of every kind, what they did, and what the host was handed."""

    trap: Trap
    begun: list[str] = attrs.field(factory=list)
    ended: list[str] = attrs.field(factory=list)
    over: list[str] = attrs.field(factory=list)
    # Ended, or cut off.
    handed: list[ToolResult] = attrs.field(factory=list)
    registry: ToolRegistry = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        kinds: dict[str, dict[str, Any]] = {
            "alone": {},
            "safe": {"read_only": True},
            "locked": {"locks": lambda _a: ["key"]},
            "narrow": {"read_only": True, "limit": 1},
            "tagged": {"concurrency_safe": True, "tags": ["db"], "limit": 2},
            "probe": {"read_only": True, "tags": ["db"]},
        }
        self.registry = ToolRegistry(tag_limits={"db": 2, "pool": 1})
        for name, options in kinds.items():
            self.registry.register(tool(name=name, **options)(self._acting()))
        self.registry.register(tool(name="thread", read_only=True, tags=["pool"])(self._act_in_thread))
        self._break("probe")

    def _acting(self) -> Any:
        async def act(who: str) -> str:
            self.begun.append(who)
            try:
                await self.trap.visit()
                self.ended.append(who)
                await self.trap.visit()
            finally:
                self.over.append(who)
            return who

        return act

    def _act_in_thread(self, who: str) -> str:
        """Act in a thread."""
        self.begun.append(who)
        self.ended.append(who)
        self.over.append(who)
        return who

    def _break(self, name: str) -> None:
        """Open the breaker of a tool so long ago that its next call is the probe."""
        broken = self.registry.get(name)
        assert broken is not None
        for _ in range(FAILURE_THRESHOLD):
            ticket = broken.breaker.admit(0)
            assert not isinstance(ticket, float)
            broken.breaker.record_failure(ticket, ToolQueue(self.registry).clock.monotonic() - 2 * OPEN_S)

    async def on_start(self, call: ToolCall, tool: Tool[..., Any]) -> None:
        """Wait, as for a disk."""
        await self.trap.visit()

    def on_result(self, result: ToolResult) -> None:
        """Note."""
        self.handed.append(result)

    def queue(self) -> ToolQueue:
        """A queue of a run of its own; four calls at once, so that some wait for a worker."""
        return ToolQueue(self.registry, host=self, limit=4)

    @property
    def limiters(self) -> set[Limiter]:
        """All limiters of all tools."""
        return {each for one in self.registry for each in self.registry.limiters_for(one)}


BATCH = (
    *("narrow", "safe", "narrow", "tagged", "thread", "narrow", "thread", "tagged", "probe", "tagged", "locked"),
    *("locked", "safe", "alone", "safe", "narrow", "thread", "narrow", "probe", "alone", "alone", "narrow", "tagged"),
)


def asked(prefix: str) -> list[ToolCall]:
    """A mixed batch."""
    ids = [f"{prefix}{n}" for n in range(len(BATCH))]
    return [ToolCall(id=id_, name=name, arguments=f'{{"who": "{id_}"}}') for id_, name in zip(ids, BATCH, strict=True)]


def is_refused_probe(result: ToolResult) -> bool:
    """Whether another run's probe was on its way, so that this call was not let go."""
    return result.tool == "probe" and result.error_type is ErrorType.CIRCUIT_OPEN


async def check_cut(world: World) -> None:
    """Fail unless a batch that was cut left only what it may, and nothing in the way of the next."""
    begun = list(world.begun)
    for result in world.handed:
        if not is_refused_probe(result):
            assert result.outcome is Outcome.DONE
            assert result.call_id in world.ended, "what was handed over stands"
    await until(lambda: is_free(*world.limiters))
    for _ in range(5):
        await checkpoint()
    threads = {call.id for call in asked("a") if call.name == "thread"}
    assert {*world.begun} - {*begun} <= threads, "nothing begins when the batch was cut"
    await until(lambda: sorted(world.over) == sorted(world.begun))
    assert max(Counter(world.begun).values(), default=1) == 1
    probe = world.registry.get("probe")
    assert probe is not None
    ticket = probe.breaker.admit(ToolQueue(world.registry).clock.monotonic())
    assert not isinstance(ticket, float), "the breaker is stuck half open"
    probe.breaker.discard(ticket)
    results = await world.queue().execute_all(asked("again"))
    assert [result.content for result in results] == [f"again{n}" for n in range(len(BATCH))]
    assert is_free(*world.limiters)


async def cut(world: World, drive: Callable[[ToolQueue], Any]) -> bool:
    """Drive a batch with a trap; return whether it was cut."""
    queue = world.queue()
    results: list[ToolResult] | None = None
    with anyio.fail_after(HANG_S), anyio.CancelScope() as scope:
        world.trap.cancel = scope.cancel
        results = await drive(queue)
        await checkpoint()
    assert queue.statistics().running == 0
    if not scope.cancelled_caught:
        assert results is not None
        assert [result.content for result in results] == [f"a{n}" for n in range(len(BATCH))]
    world.trap = Trap(0)
    with anyio.fail_after(HANG_S):
        await check_cut(world)
    return scope.cancelled_caught


async def test_a_mixed_batch_may_be_cancelled_at_any_await():
    """At each place where a tool or the host waits: results stand, places and probes are given back."""
    at = 1
    while await cut(World(Trap(at)), lambda queue: queue.execute_all(asked("a"))):
        at += 1
    assert at > 2 * len(BATCH)


async def test_a_watched_batch_may_be_cancelled_at_any_await():
    """The same for one that is streamed."""

    async def stream(queue: ToolQueue) -> list[ToolResult]:
        async with queue.stream(asked("a")) as events:
            async for _ in events:
                pass
        return events.results

    at = 1
    while await cut(World(Trap(at)), stream):
        at += 1
    assert at > 2 * len(BATCH)


async def test_a_mixed_batch_may_be_cancelled_in_any_round_of_the_loop():
    """The same for every moment between, seen from outside, beside a run that shares all limits and is let be."""
    rounds = 0
    was_cut = True
    while was_cut:
        world = World(Trap(0))
        others: list[ToolResult] = []
        done = anyio.Event()

        async def beside(world: World = world, others: list[ToolResult] = others) -> None:
            others.extend(await ToolQueue(world.registry).execute_all(asked("b")))

        async def batch(scope: anyio.CancelScope, world: World = world, done: anyio.Event = done) -> None:
            with scope:
                await world.queue().execute_all(asked("a"))
                done.set()

        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                scope = anyio.CancelScope()
                tasks.start_soon(batch, scope)
                tasks.start_soon(beside)
                for _ in range(rounds):
                    if done.is_set():
                        break
                    await checkpoint()
                was_cut = not done.is_set()
                scope.cancel()
            assert [result.call_id for result in others] == [f"b{n}" for n in range(len(BATCH))]
            assert all(result.content == result.call_id or is_refused_probe(result) for result in others)
            await check_cut(world)
        rounds += 1 + rounds // 20
    assert rounds > 30
