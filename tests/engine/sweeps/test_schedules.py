"""Ten thousand random schedules in virtual time, and the serial outcome of any batch that locks its keys.

Each schedule is made of its seed alone: tools of random kinds, calls of random tools, random times, failures and
time-outs. When one fails its seed is told; `SEED=4711 pytest tests/engine/sweeps/test_schedules.py -k schedules`
plays that one again.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import ErrorType, Outcome, Tool, ToolCall, ToolQueue, ToolRegistry, ToolResult, tool
from agentfsm.testing import VirtualClock, run_virtual
from agentfsm.testing.clock import EPOCH
from agentfsm.tools.queue.call_order import CallOrder
from agentfsm.tools.queue.dispatch import QueueHost

SEEDS = [int(os.environ["SEED"])] if "SEED" in os.environ else range(10_000)
# In the usual suite.
FEW = 1_000
# Schedules in one event loop: starting a loop takes as long as a schedule.
IN_A_ROW = 250
TIMEOUT_S = 2.0
KEYS = "abcde"
MODES = ("alone", "reads", "safe", "locks", "shares", "either", "maybe", "broken")
TAGS = ("db", "net")


# Random tools and calls


@attrs.frozen
class Kind:
    """A tool as it was thrown."""

    name: str
    mode: str
    after: tuple[str, ...]
    limit: int | None
    tags: tuple[str, ...]

    def touches(self, call: Asked) -> frozenset[str] | None:
        """The keys that a call touches; None where that may be anything."""
        return frozenset(call.keys) if self.mode in ("locks", "shares", "either") else None

    def leaves_to_others(self, call: Asked) -> bool:
        """Whether a call leaves what it touches to others as well."""
        return self.mode in ("reads", "safe", "shares") or (self.mode in ("either", "maybe") and call.shared)


@attrs.frozen
class Asked:
    """A call as it was thrown."""

    name: str
    keys: tuple[str, ...]
    shared: bool
    seconds: float
    # At or above TIMEOUT_S it is cut off; 0: it never waits.
    fails: bool
    valid: bool


@attrs.define
class Schedule:
    """What a seed stands for, and what came of it."""

    seed: int
    kinds: dict[str, Kind]
    calls: list[Asked]
    limit: int
    tag_limits: dict[str, int]
    log: list[tuple[int, bool]] = attrs.field(factory=list)
    # Which call began (True) or ended (False), in the order of the deeds.
    handed: list[ToolResult] = attrs.field(factory=list)
    # As they came to the host.

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """Throw the dice."""
        dice = random.Random(seed)
        names = [f"tool{n}" for n in range(dice.randint(1, 5))]
        kinds = {name: _kind(dice, name, names) for name in names}
        calls = [_asked(dice, names) for _ in range(dice.randint(2, 14))]
        tag_limits = {tag: dice.randint(1, 3) for tag in TAGS if dice.random() < 0.5}
        return cls(seed, kinds, calls, dice.randint(1, 8), tag_limits)

    def tools(self) -> list[Tool[..., Any]]:
        """The tools, each of which does what the call that it serves was thrown to do."""

        async def work(index: int, keys: list[str], shared: bool) -> str:
            asked = self.calls[index]
            self.log.append((index, True))
            try:
                if asked.seconds:
                    await anyio.sleep(asked.seconds)
                if asked.fails:
                    raise ValueError(f"no luck with {index}")
            finally:
                self.log.append((index, False))
            return str(index)

        return [_tool(work, kind) for kind in self.kinds.values()]

    def wanted(self) -> list[ToolCall]:
        """The calls as the model would write them."""
        return [
            ToolCall(
                id=f"c{n}",
                name=asked.name,
                arguments=json.dumps({"index": n if asked.valid else "?", "keys": asked.keys, "shared": asked.shared}),
            )
            for n, asked in enumerate(self.calls)
        ]

    def clash(self, one: Asked, other: Asked) -> bool:
        """Whether two calls must not overlap, said in another way than the package says it."""
        first, second = self.kinds[one.name], self.kinds[other.name]
        if first.leaves_to_others(one) and second.leaves_to_others(other):
            return False
        keys, others = first.touches(one), second.touches(other)
        return keys is None or others is None or bool(keys & others)


def _kind(dice: random.Random, name: str, names: Sequence[str]) -> Kind:
    return Kind(
        name=name,
        mode=dice.choice(MODES),
        after=tuple(each for each in [*names, "nobody"] if dice.random() < 0.1),
        limit=dice.randint(1, 3) if dice.random() < 0.3 else None,
        tags=tuple(tag for tag in TAGS if dice.random() < 0.4),
    )


def _asked(dice: random.Random, names: Sequence[str]) -> Asked:
    return Asked(
        name=dice.choice(names) if dice.random() < 0.97 else "nobody",
        keys=tuple(dice.sample(KEYS, dice.randint(0, 3))),
        shared=dice.random() < 0.5,
        seconds=dice.choice((0, 0, 0.25, 0.5, 0.5, 1, 1, 1.75, 3)),
        fails=dice.random() < 0.15,
        valid=dice.random() < 0.95,
    )


def _raise(_arguments: object) -> list[str]:
    raise LookupError("broken")


def _tool(work: Any, kind: Kind) -> Tool[..., Any]:
    """A tool of a kind; the schema is made once, the rest is what the dice say."""
    keyed = {"locks": lambda a: a.keys}
    options: dict[str, Any] = {
        "alone": {},
        "reads": {"read_only": True, "concurrency_safe": True},
        "safe": {"concurrency_safe": True},
        "locks": keyed,
        "shares": {**keyed, "concurrency_safe": True},
        "either": {**keyed, "concurrency_safe": lambda a: a.shared},
        "maybe": {"concurrency_safe": lambda a: a.shared},
        "broken": {"locks": _raise},
    }[kind.mode]
    return attrs.evolve(
        BASE,
        function=work,
        name=kind.name,
        after=kind.after,
        limit=kind.limit,
        tags=kind.tags,
        timeout_s=TIMEOUT_S,
        **options,
    )


@tool
async def BASE(index: int, keys: list[str], shared: bool) -> str:  # noqa: N802  a constant: the schema of all tools here
    """Do what was thrown."""
    raise NotImplementedError


# Playing


class _Host(QueueHost):
    """Notes each result as it comes."""

    def __init__(self, schedule: Schedule) -> None:
        """Take the schedule."""
        self.schedule = schedule

    def on_result(self, result: ToolResult) -> None:
        """Note."""
        self.schedule.handed.append(result)


def play(seeds: Sequence[int]) -> None:
    """Play schedules one after the other in virtual time, and check each."""

    async def all_of_them() -> None:
        for seed in seeds:
            trio._core._run._r.seed(seed)  # the order in which trio takes tasks that could go on at the same time
            schedule = Schedule.of(seed)
            try:
                await _play(schedule)
            except BaseException as error:
                error.add_note(f"play it again with SEED={seed}: {schedule}")
                raise

    run_virtual(all_of_them)


async def _play(schedule: Schedule) -> None:
    registry = ToolRegistry(tag_limits=schedule.tag_limits)
    for each in schedule.tools():
        registry.register(each)
    queue = ToolQueue(registry, clock=VirtualClock(), limit=schedule.limit, host=_Host(schedule))
    began, wanted = anyio.current_time(), schedule.wanted()
    plan = queue.plan(wanted)
    with anyio.fail_after(1_000):  # of virtual time: it costs nothing, and ends what would wait for ever
        results = await queue.execute_all(wanted)
    assert queue.statistics().running == 0
    for limiter in {each for one in registry for each in registry.limiters_for(one)}:
        assert (limiter.in_use, limiter.waiting) == (0, 0)
    check(schedule, plan, [_at(result, began) for result in results])


def _at(result: ToolResult, began: float) -> ToolResult:
    """The same result, in seconds since its schedule began."""
    return attrs.evolve(result, started_at=result.started_at - EPOCH - began)


# What has to hold


def check(schedule: Schedule, plan: CallOrder, results: list[ToolResult]) -> None:
    """Fail unless the schedule was kept."""
    ids = [call.id for call in schedule.wanted()]
    assert [result.call_id for result in results] == ids, "one result for each call, in call order"
    assert sorted(result.call_id for result in schedule.handed) == sorted(ids), "each was handed over, once"
    for index, (asked, result) in enumerate(zip(schedule.calls, results, strict=True)):
        check_result(schedule, index, asked, result)
    check_order(schedule)
    check_at_once(schedule)
    check_no_idling(schedule, plan, results)


def check_result(schedule: Schedule, index: int, asked: Asked, result: ToolResult) -> None:
    """Each call ended as it was thrown."""
    ran = (index, True) in schedule.log
    if asked.name == "nobody":
        expected: object = ErrorType.UNKNOWN_TOOL
    elif not asked.valid:
        expected = ErrorType.ARGUMENTS
    elif not ran:
        expected = ErrorType.CIRCUIT_OPEN  # after five time-outs in a row
    elif asked.seconds > TIMEOUT_S:
        expected = ErrorType.TIMEOUT
        assert result.duration_s == TIMEOUT_S
    else:
        expected = ErrorType.TOOL if asked.fails else None
        assert result.duration_s == asked.seconds
        assert str(index) in result.content
    assert result.error_type is expected
    assert (result.outcome is Outcome.DONE) == (expected is None)
    assert ran == (expected in (ErrorType.TIMEOUT, ErrorType.TOOL, None)), "what runs is what may"
    assert schedule.log.count((index, True)) == schedule.log.count((index, False)) <= 1


def check_order(schedule: Schedule) -> None:
    """Of two calls that must not overlap, the later begins when the earlier has ended; so does what comes after."""
    place = {deed: n for n, deed in enumerate(schedule.log)}
    ran = sorted({index for index, _ in schedule.log})
    for later in ran:
        asked = schedule.calls[later]
        for earlier in ran[: ran.index(later)]:
            other = schedule.calls[earlier]
            if other.name in schedule.kinds[asked.name].after or schedule.clash(asked, other):
                assert place[earlier, False] < place[later, True], f"{later} began before {earlier} had ended"


def check_at_once(schedule: Schedule) -> None:
    """Never more at once than the queue, the tool and its tags allow."""
    running: Counter[str] = Counter()
    for index, begins in schedule.log:
        kind = schedule.kinds[schedule.calls[index].name]
        for what in ("all", kind.name, *kind.tags):
            running[what] += 1 if begins else -1
        assert running["all"] <= schedule.limit
        assert running[kind.name] <= (kind.limit or schedule.limit)
        assert all(running[tag] <= schedule.tag_limits.get(tag, schedule.limit) for tag in kind.tags)
    assert not +running


def check_no_idling(schedule: Schedule, plan: CallOrder, results: list[ToolResult]) -> None:
    """No call starts before what the plan says it waits for has ended, nor later if there was room for it."""
    start = [result.started_at for result in results]
    end = [result.started_at + result.duration_s for result in results]
    ready = [max((end[int(each[1:])] for each in call.waits), default=0.0) for call in plan.calls]
    for call in plan.calls:
        assert start[call.index] >= ready[call.index], f"{call.index} began before {call.waits} had ended"
    for moment in sorted({*start, *end}):
        running = [n for n in range(len(start)) if start[n] <= moment < end[n]]
        waiting = [n for n in range(len(start)) if ready[n] <= moment < start[n]]
        if waiting and len(running) < schedule.limit:
            full = full_places(schedule, running, waiting)
            for index in waiting:
                assert not full.isdisjoint(places(schedule, index)), f"{index} idled at {moment}"


def places(schedule: Schedule, index: int) -> list[str]:
    """What a call needs a place in, in the order in which it takes them."""
    kind = schedule.kinds.get(schedule.calls[index].name)
    if kind is None:
        return []
    own = [kind.name] if kind.limit is not None else []
    return [*own, *(tag for tag in sorted(kind.tags) if tag in schedule.tag_limits)]


def full_places(schedule: Schedule, running: list[int], waiting: list[int]) -> set[str]:
    """Where there is no room: a call that waits for its second place keeps its first."""
    room = {kind.name: kind.limit for kind in schedule.kinds.values() if kind.limit is not None} | schedule.tag_limits
    full: set[str] = set()
    while True:
        taken = Counter(place for index in running for place in places(schedule, index))
        for index in waiting:
            needed = places(schedule, index)
            last = max((n for n, place in enumerate(needed) if place in full), default=0)
            taken.update(needed[:last])
        found = {place for place, limit in room.items() if taken[place] >= limit}
        if found == full:
            return full
        full = found


@pytest.fixture(autouse=True)
def _same_order_each_time(monkeypatch):
    """Have trio take its tasks in an order that a seed decides."""
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)


@pytest.mark.parametrize("first", range(0, FEW, IN_A_ROW))
def test_random_schedules_are_kept(first):
    """Nothing overlaps that must not, all limits hold, nobody idles or starves, and results come in call order."""
    seeds = [seed for seed in SEEDS if first <= seed < first + IN_A_ROW] if "SEED" not in os.environ else SEEDS
    play(seeds)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(FEW, 10_000, IN_A_ROW))
def test_ten_thousand_random_schedules_are_kept(first):
    """The same for all the others of ten thousand."""
    play([seed for seed in SEEDS if first <= seed < first + IN_A_ROW])


def test_the_dice_throw_everything():
    """The schedules of the usual suite hold what they are meant to try: they could fail."""
    thrown = [Schedule.of(seed) for seed in range(FEW)]
    modes = Counter(kind.mode for each in thrown for kind in each.kinds.values())
    assert set(modes) == set(MODES)
    assert min(modes.values()) > FEW / 10
    assert {each.limit for each in thrown} == set(range(1, 9))
    clashes = sum(
        each.clash(one, other)
        for each in thrown
        for n, one in enumerate(each.calls)
        for other in each.calls[:n]
        if "nobody" not in (one.name, other.name)
    )
    pairs = sum(len(each.calls) * (len(each.calls) - 1) // 2 for each in thrown)
    assert 0.2 < clashes / pairs < 0.8
    assert sum(bool(kind.after) for each in thrown for kind in each.kinds.values()) > FEW / 2
    assert sum(bool(each.tag_limits) for each in thrown) > FEW / 2


def test_a_seed_is_played_the_same_way_each_time():
    """What the dice decide includes the order of the event loop, so that a failure comes again."""

    def log_of(seed: int) -> list[tuple[int, bool]]:
        schedule = Schedule.of(seed)

        async def once() -> None:
            trio._core._run._r.seed(seed)
            await _play(schedule)

        run_virtual(once)
        return schedule.log

    for seed in range(40):
        assert log_of(seed) == log_of(seed)


# Locks: the outcome is that of one call after the other


@attrs.frozen
class Step:
    """A call on a shared table of numbers."""

    do: str
    key: str
    other: str
    value: int
    naps: tuple[float, ...]
    # Between reading and writing, and before and behind them.


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["get", "put", "add", "move", "total", "clear", "touch"]),
        st.sampled_from("abc"),
        st.sampled_from("abc"),
        st.integers(-9, 9),
        st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 3),
    ),
    max_size=16,
)


def serial(steps: Sequence[Step]) -> tuple[list[object], dict[str, int]]:
    """Do the steps one after the other; return what each says, and what is left."""
    table: dict[str, int] = {}
    said: list[object] = []
    for step in steps:
        match step.do:
            case "get":
                said.append(table.get(step.key, 0))
            case "put":
                said.append(table.get(step.key, 0))
                table[step.key] = step.value
            case "add":
                table[step.key] = table.get(step.key, 0) + step.value
                said.append(table[step.key])
            case "move":
                moved = table.pop(step.key, 0)
                table[step.other] = table.get(step.other, 0) + moved
                said.append(moved)
            case "total":
                said.append(sum(table.values()))
            case "clear":
                said.append(len(table))
                table.clear()
            case "touch":
                said.append("touched")
    return said, table


def table_tools(steps: Sequence[Step], table: dict[str, int]) -> list[Tool[..., Any]]:
    """The same as tools that wait between reading and writing, and declare which keys they touch."""

    async def nap(n: int, which: int) -> None:
        if steps[n].naps[which]:
            await anyio.sleep(steps[n].naps[which])

    async def get(n: int, key: str) -> int:
        await nap(n, 0)
        found = table.get(key, 0)
        await nap(n, 1)
        assert table.get(key, 0) == found, "it changed under the reader"
        return found

    async def put(n: int, key: str) -> int:
        await nap(n, 0)
        before = table.get(key, 0)
        await nap(n, 1)
        table[key] = steps[n].value
        await nap(n, 2)
        return before

    async def add(n: int, key: str) -> int:
        before = table.get(key, 0)
        await nap(n, 1)
        table[key] = before + steps[n].value
        await nap(n, 2)
        return table[key]

    async def move(n: int, key: str, other: str) -> int:
        moved = table.pop(key, 0)
        await nap(n, 0)
        there = table.get(other, 0)
        await nap(n, 1)
        table[other] = there + moved
        return moved

    async def total(n: int) -> int:
        await nap(n, 0)
        found = sum(table.values())
        await nap(n, 1)
        assert sum(table.values()) == found, "it changed under the reader"
        return found

    async def clear(n: int) -> int:
        size = len(table)
        await nap(n, 1)
        table.clear()
        await nap(n, 2)
        return size

    async def touch(n: int) -> str:
        await nap(n, 0)
        return "touched"

    return [
        tool(read_only=True, locks=lambda a: a.key)(get),
        tool(locks=lambda a: [a.key])(put),
        tool(locks=lambda a: {a.key})(add),
        tool(locks=lambda a: (a.key, a.other))(move),
        tool(read_only=True)(total),
        tool(clear),
        tool(locks=lambda _a: [])(touch),
    ]


@given(steps=STEPS, limit=st.integers(1, 8), seed=st.integers(0, 1_000))
def test_what_locks_its_keys_does_what_it_would_do_alone(steps, limit, seed):
    """The same results, and the same state in the end, as one call after the other: for any batch, at any pace."""

    async def once() -> tuple[list[str], dict[str, int]]:
        trio._core._run._r.seed(seed)
        table: dict[str, int] = {}
        queue = ToolQueue(ToolRegistry.of(table_tools(steps, table)), clock=VirtualClock(), limit=limit)
        wanted = [_call(n, step) for n, step in enumerate(steps)]
        return [result.content for result in await queue.execute_all(wanted)], table

    said, table = run_virtual(once)
    expected, left = serial(steps)
    assert said == [str(each) for each in expected]
    assert table == left


def _call(n: int, step: Step) -> ToolCall:
    given_: dict[str, object] = {"n": n}
    if step.do in ("get", "put", "add", "move"):
        given_["key"] = step.key
    if step.do == "move":
        given_["other"] = step.other
    return ToolCall(id=f"c{n}", name=step.do, arguments=json.dumps(given_))
