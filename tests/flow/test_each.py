"""Steps that are repeated: for each item of a list, until a condition holds, and flows as steps of others."""

from __future__ import annotations

import json
import sys

import anyio
import pytest

from agentfsm import Agent, ErrorType, Limits, MisuseError, RunContext, State, TransientError
from agentfsm.agents.subagent import find_inner_agent
from agentfsm.core.events import Resumed
from agentfsm.flow import Flow, Step, StepStatus, agent_step, each, step, until
from agentfsm.ports import Reply, Request
from agentfsm.testing import FunctionModel, ScriptedModel

pytestmark = pytest.mark.anyio
Review = dict[str, str]


@step(read_only=True)
async def extract(texts: list[str]) -> list[Review]:
    """Read the reviews."""
    return [{"id": f"r{number}", "text": text} for number, text in enumerate(texts, 1)]


def judge(request: Request) -> Reply:
    """Judge a review in its own words."""
    return Reply(text=request.messages[-1].text.partition(": ")[2])


reader = Agent(FunctionModel(judge), name="mood")
mood = agent_step(
    reader,
    lambda review: f"The mood: {review['text']}",
    validate={"positive", "negative", "neutral"},
    fallback="neutral",
)


class Warehouse:
    """Steps that load reviews, and a record of their effects."""

    def __init__(self, *, refuses: str = "", publishes: bool = True, **options: object) -> None:
        self.effects: list[str] = []

        def remove(review: Review, load: str) -> None:
            self.effects.append(f"remove {review['id']} {load}")

        @step(compensate=remove, when=lambda review: review["text"] != "spam")
        async def load(review: Review, day: str) -> str:
            self.effects.append(f"load {review['id']}")
            if review["id"] == refuses:
                raise LookupError(review["text"])
            return f"{day}-{review['id']}"

        @step(depends_on=["rows"])
        async def publish(rows: list[str | None]) -> list[str | None]:
            if not publishes:
                raise PermissionError("closed")
            return rows

        rows = each(load, over=extract, key=lambda review: review["id"], name="rows", **options)
        self.flow = Flow([extract, rows, publish])


async def test_each_item_is_a_call_of_a_child_run_and_results_keep_the_order():
    """Further parameters take inputs, and an item whose step was skipped has None."""
    flow = (shop := Warehouse()).flow
    assert flow.inputs == ("texts", "day")
    run = await flow.run({"texts": ["a", "spam", "c"], "day": "mon"})
    assert json.loads(run.output) == {"publish": ["mon-r1", None, "mon-r3"]}
    assert sorted(shop.effects) == ["load r1", "load r3"]
    child = await flow.load(f"{run.id}.p1.2")
    assert [entry.call.id for entry in child.plan.steps] == ["p1.1", "p1.2", "p1.3"]
    assert (await flow.replay(run.id)).is_faithful
    assert (await flow.run({"texts": [], "day": "mon"})).output == '{"publish": []}'


async def test_an_agent_judges_each_review_and_a_fallback_is_marked_and_logged(caplog):
    """The journal of the flow has the mark, and the log the key of the item."""
    flow = Flow([extract, each(mood, over=extract, key=lambda review: review["id"], name="moods")])
    run = await flow.run({"texts": ["Positive", "It depends", "negative "]})
    assert json.loads(run.output) == {"moods": ["positive", "neutral", "negative"]}
    assert run.plan.steps[-1].result.error_type is ErrorType.FALLBACK
    assert f"item r2 of step moods of run {run.id} has its fallback" in caplog.text
    below = await flow.load(f"{run.id}.p1.2.p1.2")
    assert (below.answer, below.header.depth) == ("It depends", 2)
    assert run.usage.tokens >= 0
    run = await flow.run({"texts": ["positive"]})
    assert run.plan.steps[-1].result.error_type is None


async def test_failed_items_fail_the_step_once_the_others_have_ended():
    """What has succeeded is undone, in the child run, and the message names the items."""
    shop = Warehouse(refuses="r2")
    run = await shop.flow.run({"texts": ["a", "b", "spam", "d"], "day": "mon"})
    assert run.state is State.ERROR
    assert sorted(shop.effects[:3]) == ["load r1", "load r2", "load r4"]
    assert sorted(shop.effects[3:]) == ["remove r1 mon-r1", "remove r4 mon-r4"]
    assert run.stop_message.startswith("step rows failed (1 of 4 items failed: r2 (LookupError: b")
    assert "compensated: 2 of 2 items that had succeeded" in run.stop_message


async def test_items_are_undone_if_a_later_step_fails():
    """In a child run of its own; an item that was skipped has nothing to undo."""
    shop = Warehouse(publishes=False)
    run = await shop.flow.run({"texts": ["a", "spam", "c"], "day": "mon"})
    assert run.stop_message.endswith("compensated by: compensate_rows")
    assert sorted(shop.effects) == ["load r1", "load r3", "remove r1 mon-r1", "remove r3 mon-r3"]
    shop.effects.clear()
    await shop.flow.run({"texts": ["spam"], "day": "mon"})
    assert shop.effects == []


async def test_a_list_may_be_named_by_the_text_of_its_step():
    """It comes first, as if the step itself were given, also within a loop."""

    @step
    async def numbers() -> list[int]:
        return [1, 2]

    @step
    async def add(item: int) -> int:
        return item + 1

    assert (await Flow([each(add, over="numbers"), numbers]).run({})).output == '{"add": [2, 3]}'
    loop = until(each(add, over="numbers"), lambda add: True, times=2)
    assert (await Flow([loop, numbers]).run({})).output == '{"add": [2, 3]}'


async def test_a_fallback_stands_for_failed_items(caplog):
    """The step succeeds, with the mark."""

    @step(read_only=True)
    async def half(item: int) -> int:
        if item % 2:
            raise ValueError(f"{item} is odd")
        return item // 2

    flow = Flow([each(half, over="numbers", fallback=-1)])
    run = await flow.run({"numbers": [2, 3]})
    assert run.output == '{"half": [1, -1]}'
    assert run.plan.steps[0].result.error_type is ErrorType.FALLBACK
    assert "item 1 of step half" in caplog.text
    assert "ValueError: 3 is odd" in caplog.text


async def test_a_list_that_cannot_be_used_fails_the_step_before_anything_runs():
    """Duplicate keys, too many items, and what is no list."""

    @step
    async def act(item: object) -> None:
        raise AssertionError

    flow = Flow([each(act, over="items", key=lambda item: item["id"], max_items=2)])
    for items, words in {
        '[{"id": 7}, {"id": 7}]': "two items of items have the key '7', at the positions 0 and 1",
        "[1, 2, 3]": "items has 3 items, and max_items= allows 2",
        "[1]": "the key of an item of items could not be determined: TypeError",
    }.items():
        run = await flow.run({"items": json.loads(items)})
        assert words in run.stop_message

    @step(read_only=True)
    async def odd() -> list[dict[str, int]]:
        return [{"$step": 1}]

    run = await Flow([odd, each(act, over=odd)]).run({})
    assert "cannot have the keys '$step' and '$text'" in run.stop_message


async def test_a_list_whose_step_was_skipped_has_no_items():
    """As a skipped step never blocks."""

    @step(when=lambda day: day != "sunday")
    async def look(day: str) -> list[str]:
        return [day]

    @step
    async def act(item: str) -> str:
        return item

    flow = Flow([look, each(act, over=look)])
    assert (await flow.run({"day": "sunday"})).output == '{"act": []}'
    assert (await flow.run({"day": "monday"})).output == '{"act": ["monday"]}'


def test_items_without_a_call_have_not_run():
    """The step fails if their plan was refused, instead of a list without results."""
    agent = find_inner_agent(each(mood, over="items").tool)
    assert agent.planner.conclude(agent.start('{"items": ["a", "b"]}')).failure == "2 of 2 items did not run"


async def test_an_item_waits_for_a_person_and_the_others_do_not():
    """The flow waits with the approval of the item; it may be given with other arguments."""
    paid = []

    @step(requires_approval=lambda arguments: arguments.order > 10)
    async def pay(order: int) -> int:
        paid.append(order)
        return order

    flow = Flow([each(pay, over="orders")])
    run = await flow.run({"orders": [5, 50, 60]})
    assert flow.statuses(run) == {"pay": StepStatus.WAITING}
    assert paid == [5]
    first, second = run.pending
    assert (first.run_id, first.arguments) == (f"{run.id}.p1.1", {"order": 50})
    await flow.approve(first.run_id, first.call_id, arguments={"order": 9})
    await flow.approve(second.run_id, second.call_id)
    run = await flow.resume(run.id)
    assert (run.output, paid) == ('{"pay": [5, 9, 60]}', [5, 9, 60])
    events = await flow.history(first.run_id)
    assert not [event for event in events if isinstance(event, Resumed)], "the child run is that of the same flow"


async def test_a_rejected_item_counts_as_failed():
    """The message has the reason of the person."""

    @step(requires_approval=True)
    async def pay(order: int) -> int:
        raise AssertionError

    flow = Flow([each(pay, over="orders")])
    run = await flow.run({"orders": [5]})
    await flow.reject(run.pending[0].run_id, run.pending[0].call_id, by="bob", message="too much")
    run = await flow.resume(run.id)
    assert "1 of 1 items failed: 0 (rejected: " in run.stop_message
    assert "too much" in run.stop_message


async def test_no_more_items_run_at_once_than_is_said():
    """And each may be retried."""
    now, most, failed = 0, 0, set[int]()

    @step(idempotent=True, retry=1)
    async def work(ctx: RunContext[None], item: int) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.sleep(0.001)
        now -= 1
        if item not in failed:
            failed.add(item)
            raise TransientError("busy", retry_after_s=0.001)
        return ctx.idempotency_key

    flow = Flow([each(work, over="items", parallel=3)])
    run = await flow.run({"items": list(range(5))})
    assert len(set(flow.results(run)["work"])) == 5
    assert most == 3


def test_options_that_do_not_fit_the_step_are_refused_at_once():
    """With the reason."""

    @step
    async def nothing() -> None: ...

    @step
    async def whole(item: int, items: list[int]) -> None: ...

    with pytest.raises(MisuseError, match="step 'nothing' has no parameter None for the item"):
        each(nothing, over="items")
    with pytest.raises(MisuseError, match="its parameters are item, items"):
        each(whole, over="list", item="row")
    with pytest.raises(MisuseError, match="takes the whole list 'items' for each item"):
        each(whole, over="items")
    with pytest.raises(MisuseError, match="a whole number from 1 to 10,000"):
        each(mood, over="items", max_items=20_000)
    with pytest.raises(MisuseError, match="parallel"):
        each(mood, over="items", parallel=0)
    with pytest.raises(MisuseError, match="give a step"):
        each(len, over="items")
    with pytest.raises(MisuseError, match="it is unknown which items 'compensate_load' has to undo"):
        Warehouse(fallback=None)


async def test_the_limits_of_a_flow_have_room_for_the_items():
    """By default; given ones bound the items, too."""

    @step(read_only=True)
    async def work(item: int) -> int:
        return item

    flow = Flow([each(work, over="items", max_items=400)])
    assert flow.limits.tool_calls >= 400
    agent = Agent(ScriptedModel(), name="clerk", tools=[grow.tool])
    assert Flow([each(agent_step(agent, lambda item: item), over="items")]).limits.tool_calls >= 31_000
    assert (await flow.run({"items": list(range(300))})).state is State.DONE
    run = await flow.with_(limits=Limits(tool_calls=20)).run({"items": list(range(30))})
    assert run.state is State.ERROR


@step
async def grow(start: int, grow: int | None = None) -> int:
    """Add one to the result before."""
    return (start if grow is None else grow) + 1


async def test_a_step_is_repeated_until_its_result_is_good():
    """Each repetition takes the result of the one before, and is a call of its own."""
    flow = Flow([until(grow, lambda grow, goal: grow >= goal, times=5)])
    assert flow.inputs == ("start", "goal")
    run = await flow.run({"start": 0, "goal": 3})
    assert run.output == '{"grow": 3}'
    child = await flow.load(f"{run.id}.p1.1")
    assert [entry.call.id for entry in child.plan.steps] == ["p1.1", "p2.2", "p3.3"]
    assert [entry.call.arguments for entry in child.plan.steps][:2] == ['{"start": 0}', '{"start": 0, "grow": 1}']
    run = await flow.run({"start": 0, "goal": 9})
    assert "the condition did not hold after 5 repetitions; the last result: 5" in run.stop_message


async def test_a_loop_that_reaches_its_limit_may_accept_its_result(caplog):
    """With a mark. A repetition or a condition that fails ends it."""
    flow = Flow([until(grow, lambda grow: grow > 9, times=2, on_limit="accept")])
    run = await flow.run({"start": 0})
    assert run.output == '{"grow": 2}'
    assert run.plan.steps[0].result.error_type is ErrorType.FALLBACK
    assert "accepts its result after 2 times" in caplog.text
    run = await Flow([until(grow, lambda grow: grow["x"], times=2)]).run({"start": 0})
    assert "the condition raised TypeError after repetition 1" in run.stop_message

    @step
    async def fail() -> None:
        raise OSError("gone")

    run = await Flow([until(fail, lambda fail: True, times=2)]).run({})
    assert "repetition 1 failed (OSError: gone. Its effect may" in run.stop_message


def test_loops_that_cannot_work_are_refused():
    """Their bound is given, and conditions and compensations belong to the loop."""
    with pytest.raises(MisuseError, match="a whole number from 1 to 1,000"):
        until(grow, lambda grow: True, times=0)
    with pytest.raises(MisuseError, match="give compensate= to until"):
        until(step(grow.tool.function.__self__.function, compensate=print_nothing), lambda grow: True, times=1)
    with pytest.raises(MisuseError, match="on_limit"):
        until(grow, lambda grow: True, times=1, on_limit="stop")
    with pytest.raises(MisuseError, match="give a step"):
        until(len, lambda: True, times=1)

    with pytest.raises(MisuseError, match=r"takes the result of 'grow': repeat it with until\(grow"):
        Flow([grow])

    async def later(grow: int) -> bool:
        return True

    with pytest.raises(MisuseError, match="done= is a plain function"):
        until(grow, later, times=1)


def print_nothing() -> None:
    """Undo nothing."""


async def test_a_flow_is_a_step_whose_inputs_are_taken_by_name():
    """Of results and of inputs; it can be repeated, and applied to each item of a list."""

    @step
    async def first() -> int:
        return 4

    @step
    async def double(first: int, times: int = 2) -> int:
        return first * times

    inner = Flow([double], name="inner")
    run = await Flow([first, inner.as_step(depends_on=[first])]).run({})
    assert json.loads(run.output) == {"inner": {"double": 8}}
    run = await Flow([each(inner.as_step(), over="numbers", item="first")]).run({"numbers": [1, 2], "times": 5})
    assert json.loads(run.output) == {"inner": [{"double": 5}, {"double": 10}]}
    flow = Flow([until(inner.as_step(), lambda inner: inner["double"] > 1, times=3)])
    assert (await flow.run({"first": 1})).output == '{"inner": {"double": 2}}'


def repeated(times: int) -> Step:
    """Return a step that is repeated for each item."""
    return each(until(grow, lambda grow: grow > 1, times=times), over="starts", item="start")


async def test_loops_and_lists_can_be_nested():
    """Each level is a child run."""
    flow = Flow([repeated(3)])
    run = await flow.run({"starts": [0, 1, 5]})
    assert run.output == '{"grow": [2, 2, 6]}'
    assert flow.ordered_steps[0].description == "for each of starts, up to 3 times"


async def test_an_item_costs_the_same_in_a_long_list():
    """In Python calls, which do not depend on the machine."""

    @step(read_only=True)
    async def work(item: int) -> int:
        return item

    async def count_calls(items: int) -> float:
        calls = 0

        def count(_frame: object, kind: str, _argument: object) -> None:
            nonlocal calls
            calls += kind == "call"

        flow = Flow([each(work, over="items", parallel=1)])
        sys.setprofile(count)
        try:
            run = await flow.run({"items": list(range(items))})
        finally:
            sys.setprofile(None)
        assert run.state is State.DONE
        return calls / items

    await count_calls(10)
    assert await count_calls(120) < 1.2 * await count_calls(30)
