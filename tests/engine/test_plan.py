"""The plan of a reply: batches, waits, locks, reasons, time; what a broken declaration counts for; what it costs."""

from __future__ import annotations

import json
import logging
import warnings

import anyio
import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import ErrorType, Outcome, ToolCall, ToolQueue, ToolRegistry, tool
from agentfsm.core.labels import ToolKind
from agentfsm.testing import VirtualClock, run_virtual
from agentfsm.tools.queue.call_order import (
    CONCURRENCY_SAFE,
    EXCLUSIVE,
    NO_ACCESS,
    READ_ONLY,
    Access,
    CallOrder,
    DependencyTracker,
    resolve_access,
)
from agentfsm.tools.queue.dispatch import QueueHost


async def on_keys(keys: list[str], shared: bool = False, seconds: float = 0) -> str:
    """Touch some keys."""
    await anyio.sleep(seconds)
    return ",".join(keys)


async def plain(seconds: float = 0) -> str:
    """Touch anything."""
    await anyio.sleep(seconds)
    return "done"


READ = tool(name="read", read_only=True, estimate_s=1)(plain)
SAFE_TOOL = tool(name="safe", concurrency_safe=True, estimate_s=2)(plain)
WRITE = tool(name="write", estimate_s=4)(plain)
LOCK = tool(name="lock", locks=lambda a: a.keys)(on_keys)
SHARE = tool(name="share", locks=lambda a: a.keys, read_only=True)(on_keys)
EITHER = tool(name="either", locks=lambda a: a.keys, concurrency_safe=lambda a: a.shared)(on_keys)
MAYBE = tool(name="maybe", concurrency_safe=lambda a: a.shared)(on_keys)
LATE = tool(name="late", concurrency_safe=True, after=["read", "lock", "late"])(plain)
TOOLS = (READ, SAFE_TOOL, WRITE, LOCK, SHARE, EITHER, MAYBE, LATE)


def args(*keys: str, shared: bool = False) -> str:
    """The arguments of a tool with keys."""
    return json.dumps({"keys": keys, "shared": shared})


def calls(*wanted: str | tuple[str, str]) -> list[ToolCall]:
    """Calls in order: a name, or a name with its arguments."""
    pairs = [(each, "{}") if isinstance(each, str) else each for each in wanted]
    return [ToolCall(id=f"c{n}", name=name, arguments=text) for n, (name, text) in enumerate(pairs)]


def planned(*wanted: str | tuple[str, str], tools=TOOLS, limit: int = 20) -> CallOrder:
    """The plan of these calls."""
    return ToolQueue(ToolRegistry.of(tools), limit=limit).plan(calls(*wanted))


def waits(plan: CallOrder) -> list[tuple[str, ...]]:
    """For each call what it waits for."""
    return [call.waits for call in plan.calls]


# What may overlap


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        (EXCLUSIVE, EXCLUSIVE, False),
        (EXCLUSIVE, READ_ONLY, False),
        (EXCLUSIVE, NO_ACCESS, False),
        (READ_ONLY, CONCURRENCY_SAFE, True),
        (READ_ONLY, NO_ACCESS, True),
        (Access(False, frozenset("ab"), ""), Access(False, frozenset("bc"), ""), False),
        (Access(False, frozenset("ab"), ""), Access(False, frozenset("cd"), ""), True),
        (Access(True, frozenset("ab"), ""), Access(False, frozenset("bc"), ""), False),
        (Access(True, frozenset("ab"), ""), Access(True, frozenset("bc"), ""), True),
        (Access(False, frozenset("a"), ""), READ_ONLY, False),
        (Access(True, frozenset("a"), ""), READ_ONLY, True),
        (Access(False, frozenset("a"), ""), EXCLUSIVE, False),
        (Access(False, frozenset("a"), ""), NO_ACCESS, True),
        (Access(False, frozenset(), ""), Access(False, frozenset("a"), ""), True),
    ],
)
def test_who_may_overlap_whom(one, other, may):
    """Both share, or they touch nothing in common; and it does not matter who asks."""
    assert one.may_overlap(other) is may
    assert other.may_overlap(one) is may


def test_reasons_and_locks_are_told():
    """Each call says what it touches, whether it shares it, and why."""
    plan = planned(
        "read",
        "safe",
        "write",
        ("lock", args("b", "a")),
        ("share", args("a")),
        ("either", args("a", shared=True)),
        ("either", args("a")),
        ("maybe", args(shared=True)),
        ("maybe", args()),
        ("lock", args()),
        "nobody",
    )
    assert [(call.locks, call.shared, call.reason) for call in plan.calls] == [
        (None, True, "read-only"),
        (None, True, "declared concurrency-safe"),
        (None, False, "declares nothing, so it runs alone"),
        (frozenset("ab"), False, "locks a, b"),
        (frozenset("a"), True, "shares a"),
        (frozenset("a"), True, "shares a"),
        (frozenset("a"), False, "locks a"),
        (None, True, "concurrency-safe with these arguments"),
        (None, False, "not safe with these arguments, so it runs alone"),
        (frozenset(), False, "locks nothing"),
        (frozenset(), True, "will not run"),
    ]
    assert [call.index for call in plan.calls] == list(range(11))
    assert [call.call_id for call in plan.calls] == [f"c{n}" for n in range(11)]
    assert [call.kind for call in plan.calls] == [ToolKind.DIRECT] * 10 + [None]
    assert [call.estimate_s for call in plan.calls][:4] == [1, 2, 4, None]
    assert plan.limit == 20


def test_an_agent_is_told_from_a_plain_tool():
    """The plan says what is behind a tool."""
    expert = attrs.evolve(SAFE_TOOL, name="expert", kind=ToolKind.AGENT)
    (call,) = planned("expert", tools=[expert]).calls
    assert (call.kind, call.tool) == (ToolKind.AGENT, "expert")


def test_no_calls_have_an_empty_plan():
    """Nothing takes no time."""
    plan = planned()
    assert (plan.calls, plan.batches, plan.estimate_s) == ((), (), 0.0)


def test_batches_of_readers_and_writers():
    """Document C, section 4: neighbours that are safe together, any other by itself."""
    plan = planned("read", "safe", "write", "read", "write", "write", "safe", "read")
    assert plan.batches == (("c0", "c1"), ("c2",), ("c3",), ("c4",), ("c5",), ("c6", "c7"))
    assert waits(plan) == [(), (), ("c0", "c1"), ("c2",), ("c2", "c3"), ("c4",), ("c5",), ("c5",)]


def test_locks_let_different_keys_pass_each_other():
    """Writers of different keys run together; one of the same key waits for the newest before it."""
    plan = planned(("lock", args("a")), ("lock", args("b")), ("lock", args("a")), ("lock", args("a", "b")))
    assert waits(plan) == [(), (), ("c0",), ("c1", "c2")]
    assert plan.batches == (("c0", "c1"), ("c2",), ("c3",))


def test_readers_of_a_key_share_it():
    """Readers run together behind the writer; the next writer waits for them all, and not for the one before them."""
    plan = planned(("lock", args("a")), ("share", args("a")), ("share", args("a")), ("lock", args("a")))
    assert waits(plan) == [(), ("c0",), ("c0",), ("c1", "c2")]


def test_a_reader_of_all_stands_between_the_writers_of_keys():
    """What may read anything overlaps no writer, but every reader."""
    plan = planned(("lock", args("a")), "read", ("share", args("b")), ("lock", args("c")), "safe")
    assert waits(plan) == [(), ("c0",), (), ("c1",), ("c3",)]


def test_who_runs_alone_stands_for_all_before_it():
    """What is behind it waits for it, and names none of those that it has waited for."""
    plan = planned(("lock", args("a")), ("share", args("b")), "read", "write", ("lock", args("a", "b")), "read")
    assert waits(plan)[3:] == [("c0", "c1", "c2"), ("c3",), ("c3", "c4")]


def test_after_waits_for_earlier_calls_of_the_named_tools_only():
    """Calls of other tools, and later ones of the same, are not waited for."""
    plan = planned("safe", "late", "read", ("lock", args("x")), "late", "read")
    assert waits(plan)[1] == ()
    assert set(waits(plan)[4]) == {"c1", "c2", "c3"}
    assert waits(plan)[5] == ("c3",)


def test_after_waits_for_every_earlier_call_of_the_named_tool():
    """Also for those before the newest that somebody waited for, which do not wait for each other."""
    follow = tool(name="follow", read_only=True, after=["read"])(plain)
    plan = planned("read", "follow", "read", "follow", tools=[READ, follow])
    assert waits(plan) == [(), ("c0",), (), ("c0", "c2")]


def test_a_call_that_will_not_run_holds_nobody_up():
    """Wrong arguments, broken JSON and unknown names touch nothing, whatever the tool declares."""
    wrong = ToolCall(id="c1", name="lock", arguments='{"keys": 3}')
    broken = attrs.evolve(wrong, id="c2", malformed="no object")
    first, last = calls(("lock", args("a")), "nobody", "nobody", ("lock", args("b")))[::3]
    plan = ToolQueue(ToolRegistry.of(TOOLS)).plan([first, wrong, broken, last])
    assert [call.reason for call in plan.calls[1:3]] == ["will not run"] * 2
    assert plan.batches == (("c0", "c1", "c2", "c3"),)


# Time


def test_the_estimate_is_that_of_the_longest_line():
    """Neighbours overlap, what waits adds up; a tool that says nothing takes no time."""
    plan = planned("read", "safe", "write", "safe", ("lock", args("a")))
    assert plan.estimate_s == 2 + 4 + 2


NAPS = st.lists(
    st.tuples(st.sampled_from(["read", "write", "lock a", "lock b", "share a", "after"]), st.integers(0, 5)),
    max_size=12,
)


@given(naps=NAPS)
def test_the_estimate_is_what_the_calls_take(naps):
    """With room for all, calls that take what they say take together what the plan says: the queue follows it."""
    options = {
        "read": {"read_only": True},
        "write": {},
        "lock a": {"locks": lambda _a: "a"},
        "lock b": {"locks": lambda _a: "b"},
        "share a": {"locks": lambda _a: "a", "read_only": True},
        "after": {"concurrency_safe": True, "after": ["read0", "lock a1", "after2"]},
    }
    made = {}
    for kind, seconds in naps:
        named = {**options[kind], "estimate_s": float(seconds)}
        named["after"] = [each.replace(" ", "_") for each in named.get("after", [])]
        made[kind, seconds] = tool(name=f"{kind}{seconds}".replace(" ", "_"), **named)(plain)
    wanted = calls(*[(made[nap].name, f'{{"seconds": {nap[1]}}}') for nap in naps])

    async def play() -> float:
        queue = ToolQueue(ToolRegistry.of(made.values()), clock=VirtualClock())
        plan = queue.plan(wanted)
        await queue.execute_all(wanted)
        assert plan.estimate_s == anyio.current_time()
        return plan.estimate_s

    assert run_virtual(play) <= sum(seconds for _, seconds in naps)


# Any reply, against what the words of the document say

KEYED = ("lock", "share", "either", "maybe")

CALLS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["read", "safe", "write", "late", "nobody"]), st.just(()), st.just(False)),
        st.tuples(
            st.sampled_from(KEYED),
            st.lists(st.sampled_from("abcd"), max_size=3).map(tuple),
            st.booleans(),
        ),
    ),
    max_size=25,
)


def shares(name: str, shared: bool) -> bool:
    """Whether such a call leaves what it touches to others as well."""
    return name in ("read", "safe", "late", "share", "nobody") or (name in ("either", "maybe") and shared)


def clash(one: tuple[str, tuple[str, ...], bool], other: tuple[str, tuple[str, ...], bool]) -> bool:
    """Whether two such calls must not overlap, said in another way than the package says it."""
    if shares(one[0], one[2]) and shares(other[0], other[2]):
        return False
    keyed = ("lock", "share", "either")
    if one[0] in keyed and other[0] in keyed:
        return any(key in other[1] for key in one[1])
    anything = ("read", "safe", "write", "late", "maybe")
    return one[0] in anything or other[0] in anything


def closed(direct: list[set[int]]) -> list[set[int]]:
    """Add what is waited for by way of others."""
    found: list[set[int]] = []
    for own in direct:
        found.append(own.union(*[found[each] for each in own]))
    return found


@given(wanted=CALLS)
def test_the_plan_is_the_naive_one(wanted):
    """Each call waits, by itself or through others, for exactly those before it that it must not overlap."""
    plan = planned(*[(name, args(*keys, shared=shared)) if name in KEYED else name for name, keys, shared in wanted])
    naive: list[set[int]] = []
    for index, call in enumerate(wanted):
        after = ("read", "lock", "late") if call[0] == "late" else ()
        naive.append({i for i, other in enumerate(wanted[:index]) if clash(call, other) or other[0] in after})
    direct = [{int(call_id[1:]) for call_id in each} for each in waits(plan)]
    assert all(own <= allowed for own, allowed in zip(direct, naive, strict=True)), "it waits for who may overlap it"
    assert closed(direct) == closed(naive)
    for call, before in zip(plan.calls, naive, strict=True):
        assert call.batch == 1 + max([plan.calls[each].batch for each in before], default=-1)
    assert sorted(id_ for batch in plan.batches for id_ in batch) == sorted(call.call_id for call in plan.calls)


# Declarations that break


class Unreadable:
    """A key whose text cannot be had."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("no words")


async def _later() -> bool:
    return True


def _raise(_arguments: object) -> bool:
    raise KeyError("no such field")


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        ({"locks": _raise}, "KeyError"),
        ({"locks": lambda _a: None}, "TypeError"),
        ({"locks": lambda _a: 7}, "TypeError"),
        ({"locks": lambda _a: [["unhashable"]]}, "TypeError"),
        ({"locks": lambda _a: [{}]}, "TypeError"),
        ({"locks": lambda _a: [Unreadable()]}, "RuntimeError"),
        ({"locks": lambda a: [a.misspelt]}, "AttributeError"),
        ({"locks": lambda _a: _later()}, "TypeError"),
        ({"concurrency_safe": _raise}, "KeyError"),
        ({"concurrency_safe": lambda _a: "no"}, "TypeError"),
        ({"concurrency_safe": lambda _a: _later()}, "TypeError"),
        ({"concurrency_safe": _raise, "locks": lambda _a: ["a"]}, "KeyError"),
        ({"concurrency_safe": True, "locks": _raise}, "KeyError"),
        ({"read_only": True, "locks": lambda _a: None}, "TypeError"),
    ],
)
def test_a_declaration_that_breaks_leaves_the_call_alone(caplog, declared, error):
    """What a function raises, or returns where it makes no sense, counts for nothing said; the plan says so."""
    odd = tool(name="odd", **declared)(plain)
    # A line that is kept would keep the coroutine beyond the test.
    with warnings.catch_warnings(), caplog.at_level(logging.CRITICAL, "agentfsm.tools"):
        warnings.simplefilter("ignore", RuntimeWarning)  # a coroutine that nobody awaits
        plan = planned("read", "odd", "read", tools=[READ, odd])
    call = plan.calls[1]
    assert (call.locks, call.shared) == (None, False)
    assert call.reason == f"its declaration failed ({error}), so it is alone"
    assert waits(plan) == [(), ("c0",), ("c1",)]


def test_no_answer_is_no_yes():
    """A `concurrency_safe` that returns nothing leaves the call alone."""
    (call,) = planned("odd", tools=[tool(name="odd", concurrency_safe=lambda _a: None)(plain)]).calls
    assert (call.locks, call.shared) == (None, False)
    assert "alone" in call.reason


def test_a_declaration_that_breaks_spoils_no_call():
    """The calls run, each to its result; the odd one by itself."""
    running: list[int] = []

    async def work() -> str:
        running.append(1)
        at_once = len(running)
        await anyio.sleep(1)
        running.pop()
        return str(at_once)

    tools = [tool(name="odd", locks=_raise)(work), tool(name="read", read_only=True)(work)]

    async def play() -> list[str]:
        queue = ToolQueue(ToolRegistry.of(tools), clock=VirtualClock())
        return [result.content for result in await queue.execute_all(calls("read", "odd", "read", "read"))]

    assert run_virtual(play) == ["1", "1", "1", "2"]


def test_one_text_is_one_key():
    """`locks=lambda a: a.path` means the path, and not its letters."""
    plan = planned(
        ("file", args("ab")), ("file", args("ba")), tools=[tool(name="file", locks=lambda a: a.keys[0])(on_keys)]
    )
    assert [call.locks for call in plan.calls] == [frozenset({"ab"}), frozenset({"ba"})]
    assert waits(plan) == [(), ()]


def test_any_iterable_of_any_keys_will_do():
    """Keys are whatever can be hashed: tuples, numbers, text; from a list, a set, a generator."""
    made = tool(name="file", locks=lambda a: (("file", key) for key in a.keys))(on_keys)
    (call,) = planned(("file", args("b", "a", "a")), tools=[made]).calls
    assert call.locks == {("file", "a"), ("file", "b")}
    assert call.reason == "locks ('file', 'a'), ('file', 'b')"


def test_declarations_see_defaults():
    """They are given the validated arguments, with what the model left out."""
    found = []
    made = tool(name="file", locks=lambda a: found.append(vars(a)) or a.keys)(on_keys)
    planned(("file", '{"keys": ["a"]}'), tools=[made])
    assert found == [{"keys": ["a"], "shared": False, "seconds": 0}]


def test_arguments_are_read_only_where_a_declaration_needs_them():
    """A tool without functions is planned without a look at its arguments."""

    def unwanted():
        raise AssertionError("nobody needs them")

    assert [resolve_access(each, unwanted) for each in (READ, SAFE_TOOL, WRITE)] == [
        READ_ONLY,
        CONCURRENCY_SAFE,
        EXCLUSIVE,
    ]


# It runs nothing, and costs little


async def test_a_plan_runs_nothing():
    """Neither a tool nor the host hears of it, and nobody is told; the calls run as usual afterwards."""
    ran: list[str] = []
    told: list[object] = []

    class Witness(QueueHost):
        """A host that notes what it is told."""

        async def on_start(self, call, tool):
            """Note."""
            ran.append(f"starting {call.id}")

        def on_result(self, result):
            """Note."""
            ran.append(f"finished {result.call_id}")

    async def act() -> str:
        ran.append("act")
        return "ok"

    def act_in_thread() -> str:
        ran.append("act_in_thread")
        return "ok"

    made = [tool(locks=lambda _a: ["a"], limit=1)(act), tool(read_only=True)(act_in_thread)]
    queue = ToolQueue(ToolRegistry.of(made), host=Witness(), on_event=told.append)
    wanted = calls("act", "act_in_thread", "act", "nobody")
    plan = queue.plan(wanted)
    assert queue.plan(wanted) == plan
    assert (ran, told, queue.statistics().running) == ([], [], 0)
    assert made[0].limiter.in_use == 0
    results = await queue.execute_all(wanted)
    assert [result.outcome for result in results] == [Outcome.DONE] * 3 + [Outcome.FAILED]
    assert results[3].error_type is ErrorType.UNKNOWN_TOOL
    assert queue.plan(wanted) == plan


LOCKED = [Access(False, frozenset({n}), "") for n in range(100)]
SHARED = [Access(True, frozenset({n}), "") for n in range(100)]
PATTERNS = {
    "readers": lambda n: ("read", READ_ONLY, ()),
    "writers": lambda n: ("write", EXCLUSIVE, ()),
    "readers and writers": lambda n: ("any", (READ_ONLY, EXCLUSIVE)[n % 2], ()),
    "one key": lambda n: ("lock", LOCKED[0], ()),
    "locks and readers of all": lambda n: ("any", (LOCKED[n % 100], READ_ONLY)[n % 2], ()),
    "readers of all, then locks": lambda n: ("any", READ_ONLY if n < 500 else LOCKED[n % 100], ()),
    "locks and shares of a key": lambda n: ("any", (LOCKED[3], SHARED[3])[n % 2], ()),
    "locks and shares of many": lambda n: ("any", (LOCKED, SHARED)[n // 100 % 2][n % 100], ()),
    "all kinds": lambda n: ("any", (READ_ONLY, LOCKED[n % 7], SHARED[n % 5], EXCLUSIVE, NO_ACCESS)[n % 5], ()),
    "each after the other": lambda n: (("a", READ_ONLY, ("b",)), ("b", READ_ONLY, ("a",)))[n % 2],
    "after itself": lambda n: ("a", READ_ONLY, ("a",)),
    "leaders and followers": lambda n: (("a", READ_ONLY, ()), ("b", READ_ONLY, ("a",)))[n % 2],
    "leaders, then followers": lambda n: ("a", READ_ONLY, ()) if n < 500 else ("b", READ_ONLY, ("a", "a")),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_thousands_of_calls_cost_each_what_hundreds_do(pattern):
    """What is touched for a call, groups to wait for and to join, does not grow with the calls before it."""

    def cost(count: int) -> int:
        order = DependencyTracker(frozenset("ab"))
        placed = [order.add(*PATTERNS[pattern](n)) for n in range(count)]
        seen: list[object] = []
        for each in placed:
            seen += [*each.waits, *each.groups]
        chained = sum(len(group.on_done) for group in dict.fromkeys(seen))
        return len(seen) + chained

    assert cost(600) <= 600 * 6
    assert cost(4_000) <= 4_000 * 6


@pytest.mark.parametrize("pattern", [each for each in PATTERNS if "then" not in each and "leaders" not in each])
def test_a_plan_of_thousands_of_calls_is_told_at_once(pattern):
    """Waits that others imply are left out, so that the text of a plan does not grow with the square of its calls."""
    kinds = {id(READ_ONLY): "read", id(EXCLUSIVE): "write", id(NO_ACCESS): "nobody"}
    both = [
        tool(name="a", read_only=True, after=["a", "b"])(plain),
        tool(name="b", read_only=True, after=["a", "b"])(plain),
    ]

    def call(n: int) -> tuple[str, str]:
        name, access, after = PATTERNS[pattern](n)
        if after:
            return name, "{}"
        if access.keys:
            return "share" if access.shared else "lock", args(*map(str, access.keys))
        return kinds[id(access)], "{}"

    plan = planned(*map(call, range(2_000)), tools=[*TOOLS, *both])
    assert sum(map(len, waits(plan))) <= 2_000 * 4
    assert len(plan.calls) == 2_000
