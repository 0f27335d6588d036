"""Flows: steps in a declared order, their conditions and joins, agents as steps, failures and compensations."""

from __future__ import annotations

import json
from io import StringIO
from itertools import product

import attrs
import pytest

from agentfsm import (
    Agent,
    ErrorType,
    Limits,
    MisuseError,
    PendingKind,
    RunContext,
    Runs,
    State,
    StopReason,
    TransientError,
    tool,
)
from agentfsm.core import events as e
from agentfsm.flow import Flow, Step, StepStatus, agent_step, each, step
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say

pytestmark = pytest.mark.anyio


@step
async def extract(day: str) -> list[dict[str, str]]:
    """Read the reviews of a day."""
    return [{"id": "r1", "text": f"good {day}"}, {"id": "r2", "text": "bad"}]


@step(depends_on=[extract])
def count(extract: list[dict[str, str]]) -> int:
    """Count the reviews."""
    return len(extract)


@step(depends_on=[extract], when=lambda extract: len(extract) > 100)
async def alarm(extract: list[dict[str, str]]) -> str:
    """Tell somebody about many reviews."""
    return f"{len(extract)} reviews"


@step(depends_on=["count", "alarm"])
async def report(ctx: RunContext[str], count: int, alarm: str | None, title: str = "Reviews") -> str:
    """Write the report."""
    return f"{ctx.deps} {title}: {count}, alarm: {alarm}"


ETL = Flow([report, alarm, count, extract], name="etl")


async def test_steps_run_in_their_order_and_a_skipped_one_does_not_block():
    """Results are bound by name, a plain function runs in a thread, and the answer has the last results."""
    run = await ETL.run({"day": "Monday"}, deps="My")
    assert json.loads(run.output) == {"report": "My Reviews: 2, alarm: None"}
    assert ETL.statuses(run) == {
        "extract": StepStatus.SUCCESS,
        "count": StepStatus.SUCCESS,
        "alarm": StepStatus.SKIPPED,
        "report": StepStatus.SUCCESS,
    }
    assert ETL.results(run)["count"] == 2
    skipped = run.plan.closed[[each.call.name for each in run.plan.closed].index("alarm")].result
    assert skipped.error_type is ErrorType.CONDITION
    assert run.usage.tokens == 0
    assert (await ETL.replay(run.id)).is_faithful


async def test_inputs_are_checked_before_a_run_begins():
    """Those of all steps are known, and may come as text, as from the command line."""
    assert ETL.inputs == ("day",)
    assert (await ETL.run('{"day": "Monday", "title": "T"}', deps="")).output == '{"report": " T: 2, alarm: None"}'
    for given, words in {
        "{}": "the flow needs the input 'day'; its inputs are: day, title",
        '{"day": "x", "date": 1}': "no step takes the input 'date'",
        '{"day": {"$step": 1}}': "inputs cannot have the keys",
        "Monday": "the prompt of a flow is a mapping of its inputs",
    }.items():
        with pytest.raises(MisuseError, match=words):
            ETL.start(given)
    with pytest.raises(MisuseError, match="inputs are JSON values"):
        await ETL.submit({"day": object()})
    run = await ETL.submit({"day": "Monday"}, id="monday")
    await ETL.worker(until_idle=True, deps="")
    assert (await ETL.load(run.id)).state is State.DONE


def named(name: str, *after: str, **options: object) -> Step:
    """Return a step without effect that takes nothing."""

    async def act() -> str:
        return name

    return step(act, name=name, depends_on=after, **options)


def test_what_could_never_run_is_refused_at_once():
    """Circles, unknown names, undeclared dependencies, and options that fit no step."""
    with pytest.raises(MisuseError, match=r"in a circle: (a -> b -> a|b -> a -> b)"):
        Flow([named("a", "b"), named("b", "a")])
    with pytest.raises(MisuseError, match="step 'a' depends on 'x'; the steps are: a"):
        Flow([named("a", "x")])
    with pytest.raises(MisuseError, match="step 'count' takes the result of 'extract': add it to depends_on="):
        Flow([extract, step(count.tool.function.__self__.function, name="count")])
    with pytest.raises(MisuseError, match="two steps are called 'a'"):
        Flow([named("a"), named("a")])
    with pytest.raises(MisuseError, match="join='any' says how depends_on= is met, and there is none"):
        Flow([named("a", join="any")])
    with pytest.raises(MisuseError, match="join"):
        named("a", join="some")
    with pytest.raises(MisuseError, match="at least one"):
        Flow([])
    with pytest.raises(MisuseError, match=r"give flow\.as_step\("):
        Flow([ETL])
    with pytest.raises(MisuseError, match="leave out model="):
        ETL.with_(model=ScriptedModel())
    with pytest.raises(MisuseError, match="retry=3 would repeat its effect"):
        named("a", retry=3)
    with pytest.raises(MisuseError, match="do not list it as a step of the flow"):
        Flow([named("a"), named("b", compensate=named("a"))])
    with pytest.raises(MisuseError, match="has no depends_on="):
        named("a", compensate=named("b", "c"))


class Shop:
    """The steps of an order, and a record of their effects."""

    def __init__(self, *, stock: int = 0) -> None:
        self.effects: list[str] = []
        self.attempts = 0

        def refund(charge: str) -> None:
            self.effects.append(f"refund {charge}")

        @step(idempotent=True)
        async def put_back(ctx: RunContext[None], reserve: int, order: int) -> None:
            assert ctx.idempotency_key
            self.effects.append(f"put back {reserve} of {order}")

        @step(compensate=put_back)
        async def reserve(order: int) -> int:
            return order + 1

        @step(depends_on=[reserve], compensate=refund)
        async def charge(reserve: int) -> str:
            self.effects.append(f"charge {reserve}")
            return "c1"

        @step(depends_on=[charge])
        async def ship(charge: str) -> str:
            if not stock:
                raise LookupError("nothing there")
            return charge

        @step(depends_on=[charge])
        async def mail(charge: str) -> str:
            self.effects.append(f"mail {charge}")
            return "sent"

        @step(depends_on=[ship])
        async def track(ship: str) -> str:
            return ship

        @step(depends_on=[track], join="all_done")
        async def close(track: str | None) -> str:
            return f"closed {track}"

        self.flow = Flow([reserve, charge, ship, mail, track, close], name="order")


async def test_siblings_finish_and_what_finished_is_compensated_in_reverse_order():
    """The compensations are calls like the steps, so the journal has them."""
    shop = Shop()
    run = await shop.flow.run({"order": 6})
    assert (run.state, run.stop_reason) == (State.ERROR, StopReason.STEP_FAILED)
    assert shop.effects == ["charge 7", "mail c1", "refund c1", "put back 7 of 6"]
    assert {name: str(status) for name, status in shop.flow.statuses(run).items()} == {
        "reserve": "success",
        "charge": "success",
        "ship": "failed",
        "mail": "success",
        "track": "not_run",
        "close": "success",
    }
    assert run.stop_message.startswith("step ship failed (LookupError: nothing there. Its effect may have happened,")
    assert run.stop_message.endswith("not run: track; compensated by: compensate_charge, put_back")
    events = await shop.flow.history(run.id)
    ended = [event.result.call_id for event in events if isinstance(event, e.ToolFinished)]
    assert [each for each in ended if each.startswith("p2")] == ["p2", "p2.7", "p2.8"]


async def test_nothing_is_compensated_without_a_failure():
    """The run is over as soon as its steps are."""
    shop = Shop(stock=1)
    run = await shop.flow.run({"order": 6})
    assert (run.output, shop.effects) == ('{"mail": "sent", "close": "closed c1"}', ["charge 7", "mail c1"])


async def test_a_compensation_that_fails_keeps_no_other_from_running():
    """The message names both kinds of failures."""
    effects = []

    def undo_first(first: str) -> None:
        effects.append(first)

    def undo_second() -> None:
        raise OSError("the service is gone for good")

    async def give() -> str:
        return "given"

    async def break_off() -> str:
        raise KeyError("k")

    flow = Flow(
        [
            step(give, name="first", compensate=undo_first),
            step(give, name="second", depends_on=["first"], compensate=undo_second),
            step(break_off, name="third", depends_on=["second"]),
        ]
    )
    run = await flow.run({})
    assert effects == ["given"]
    assert "compensated by: compensate_first; compensation compensate_second failed" in run.stop_message


async def test_one_of_several_sources_is_enough_with_any():
    """The failure that the join stands in for does not fail the flow; another one would."""

    async def broken() -> str:
        raise KeyError("down")

    async def good() -> str:
        return "data"

    def use(first: str | None, second: str | None) -> str | None:
        return first or second

    def build(*sources: Step) -> Flow:
        return Flow([*sources, step(use, depends_on=["first", "second"], join="any")])

    run = await build(step(broken, name="first"), step(good, name="second")).run({})
    assert run.output == '{"use": "data"}'
    run = await build(step(broken, name="first"), step(broken, name="second")).run({})
    assert run.state is State.ERROR
    assert run.stop_message.endswith("not run: use")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (object, "object is none of the types that it can have"),
        (lambda: {"rows": [1.5, float("nan")]}, "NaN is no JSON number"),
        (lambda: float("-inf"), "-Infinity is no JSON number"),
        (lambda: [StringIO("text")], "an iterator or an open file can be read only once"),
        (lambda: {1: "one", "1": "uno"}, 'two keys of an object are both "1" as text'),
    ],
    ids=["object", "nan", "inf", "file", "equal keys"],
)
async def test_a_step_whose_result_is_not_json_fails_and_those_before_it_are_undone(build, reason):
    """Its result never becomes a sentence about it that the next step takes for data."""
    effects = []

    @step(compensate=lambda: effects.append("undone") or object())
    def first() -> str:
        return "NaN, Infinity"

    @step(depends_on=[first])
    def weird(first: str) -> object:
        effects.append(first)
        return build()

    @step(depends_on=[weird])
    def down(weird: object) -> object:
        raise AssertionError(weird)

    run = await Flow([first, weird, down]).run({})
    assert "weird failed (its function was called and has returned, so its effect has happened, but" in run.stop_message
    assert f"cannot be written as JSON: {reason}" in run.stop_message
    assert run.stop_message.endswith("not run: down; compensated by: compensate_first")
    assert effects == ["NaN, Infinity", "undone"]


async def test_the_message_says_that_a_step_was_not_called_and_is_for_people():
    """No effect is suspected of a function that was not called, and no advice to a model is in the message."""

    def act(number: int) -> None:
        raise OSError("It broke.")

    async def stop_message(given: object = 1, **options: object) -> str:
        @step(read_only=True)
        def number() -> object:
            return given

        return (await Flow([number, step(act, depends_on=[number], **options)]).run({})).stop_message

    uncalled = "step act failed (its function was not called, since "
    assert await stop_message(when=lambda number: {}[number]) == f"{uncalled}its condition when= raised KeyError: 1)"
    found = await stop_message("x")
    assert found.startswith(f"{uncalled}the arguments of act do not fit: - number: should be a valid integer")
    assert found.endswith('got "x")')
    assert await stop_message(read_only=True) == "step act failed (OSError: It broke)"
    found = await stop_message()
    assert found == "step act failed (OSError: It broke. Its effect may have happened, in whole or in part)"


ENDS = ("success", "skipped", "failed", "not_run")


@pytest.mark.parametrize("ends", list(product(ENDS, repeat=2)), ids="-".join)
async def test_the_joins_of_a_step_and_the_ends_of_two_before_it(ends):
    """A skipped step never blocks; one that failed or was not run blocks only where all have to succeed."""

    async def fail() -> str:
        raise LookupError

    def build(name: str, end: str) -> Step:
        if end == "failed":
            return step(fail, name=name)
        return named(name, *["broken"] * (end == "not_run"), when=lambda: end != "skipped")

    joins = {join: named(join, "a", "b", join=join) for join in ("all_success", "all_done", "any")}
    flow = Flow([step(fail, name="broken"), *map(build, "ab", ends), *joins.values()])
    statuses = flow.statuses(await flow.run({}))
    assert (statuses["a"], statuses["b"]) == ends
    runs = {
        "all_success": set(ends) <= {"success", "skipped"},
        "all_done": True,
        "any": "success" in ends or set(ends) == {"skipped"},
    }
    assert {join: statuses[join] for join in joins} == {join: "success" if runs[join] else "not_run" for join in joins}


async def test_a_step_is_retried_and_its_key_stays():
    """A step with a key has it on each attempt, instead of one of this run."""
    seen = []

    @step(retry=1, key=lambda order: f"order-{order}")
    async def pay(ctx: RunContext[None], order: int) -> str:
        seen.append((ctx.attempt, ctx.idempotency_key))
        if order == 2 or len(seen) == 1:
            raise TransientError("busy", retry_after_s=0.001)
        if order == 3:
            raise ValueError("no")
        return "paid"

    flow = Flow([pay])
    assert (await flow.run({"order": 1})).output == '{"pay": "paid"}'
    assert seen == [(1, "order-1"), (2, "order-1")]
    assert flow.limits.retries_per_tool == 2
    run = await flow.run({"order": 3})
    assert [attempt for attempt, key in seen if key == "order-3"] == [1, 2]
    assert "ValueError: no" in run.stop_message


async def test_a_person_approves_a_step_unless_it_is_skipped():
    """Approvals are those of tools; the other steps do not wait."""
    done = []

    def build(amount: int) -> Flow:
        @step(requires_approval=True, when=lambda amount: amount > 10, on_unknown="fail")
        async def pay(amount: int) -> str:
            done.append(amount)
            return "paid"

        return Flow([pay, named("other")], store=store)

    store = MemoryStore()
    flow = build(50)
    run = await flow.run({"amount": 50})
    assert [item.call_id for item in run.pending] == ["p1.1"]
    assert flow.statuses(run) == {"pay": StepStatus.WAITING, "other": StepStatus.SUCCESS}
    await flow.approve(run.id, "p1.1", by="ann")
    assert (await flow.resume(run.id)).output == '{"pay": "paid", "other": "other"}'
    assert (await flow.run({"amount": 5})).output == '{"other": "other"}'
    assert done == [50]


def sentiment(*script: object, **options: object) -> Step:
    """Return a step of an agent that reads a review."""
    agent = Agent(ScriptedModel(*script), name="reader", **options.pop("agent", {}))
    return agent_step(agent, lambda review: f"Sentiment of: {review}", **options)


async def test_the_answer_of_an_agent_is_checked_before_others_read_it(caplog):
    """A valid one in its own form, the fallback for another one with a line in the log, or a failed step."""
    valid = {"positive", "negative", "neutral"}
    flow = Flow([sentiment(say(" Positive\n"), validate=valid)])
    run = await flow.run({"review": "great"})
    assert run.output == '{"reader": "positive"}'
    child = await flow.load(f"{run.id}.p1.1")
    assert child.header.prompt[0].text == "Sentiment of: great"
    run = await Flow([sentiment(say("It depends"), validate=valid, fallback="neutral")]).run({"review": "hm"})
    assert run.output == '{"reader": "neutral"}'
    assert (
        f"step reader (p1.1) of run {run.id} uses its fallback: the answer is not valid: 'It depends' is none"
        in caplog.text
    )
    run = await Flow([sentiment(say("It depends"), validate=valid)]).run({"review": "hm"})
    assert "the answer is not valid" in run.stop_message
    run = await Flow([sentiment(say("5"), validate=int)]).run({"review": "hm"})
    assert run.output == '{"reader": 5}'
    run = await Flow([sentiment(say("5"))]).run({"review": "hm"})
    assert run.output == '{"reader": "5"}'


def fail_on_bug(request: object) -> str:
    """Answer, or raise as a model with a bug does."""
    if "bug" in request.messages[-1].text:
        raise KeyError("bug in the adapter")
    return "good"


async def test_the_fallback_applies_if_there_is_no_answer_for_any_reason(caplog):
    """A model or a prompt that raises costs one item of a list its answer, and not the list."""
    agent = Agent(FunctionModel(fail_on_bug), name="judge")

    def build(**options: object) -> Flow:
        return Flow([each(agent_step(agent, lambda review: review["text"], **options), over="reviews")])

    reviews = [{"text": "fine"}, {"text": "a bug"}, {"title": "no text"}, {"text": 5}]
    flow = build(validate={"good", "bad"}, fallback="bad")
    run = await flow.run({"reviews": reviews})
    assert run.output == '{"judge": ["good", "bad", "bad", "bad"]}'
    assert (await flow.replay(run.id)).is_faithful
    assert "uses its fallback: KeyError: 'bug in the adapter'" in caplog.text
    assert "uses its fallback: the agent was not called, since its prompt= raised KeyError: 'text'" in caplog.text
    below = await flow.load(f"{run.id}.p1.1.p1.2")
    assert below.is_over
    assert (await build(validate=lambda answer: {}[answer], fallback=None).run({"reviews": reviews[:1]})).output == (
        '{"judge": [null]}'
    )
    run = await build().run({"reviews": reviews})
    assert "3 of 4 items failed: 1 (KeyError: 'bug in the adapter'" in run.stop_message


def test_a_closed_set_has_texts_and_the_fallback_is_one_of_them():
    """What else the next step would have to expect is refused at once."""
    with pytest.raises(MisuseError, match="a set of texts, at least one"):
        sentiment(validate=set())
    with pytest.raises(MisuseError, match="fallback='none' has to be one of them"):
        sentiment(validate={"good", "bad"}, fallback="none")


async def test_an_agent_that_reaches_its_limit_or_has_a_type():
    """A partial result is no answer; a typed one is JSON. An agent is skipped like a function."""

    @tool(read_only=True)
    async def look() -> str:
        return "x"

    tools = {"tools": [look]}
    run = await Flow([sentiment(say("so far", call("look")), turns=1, fallback="none", agent=tools)]).run(
        {"review": "r"}
    )
    assert run.output == '{"reader": "none"}'
    run = await Flow(
        [sentiment(say('{"result": [1, 2]}'), agent={"output_type": list[int], "output_mode": "prompt"})]
    ).run({"review": "r"})
    assert json.loads(run.output) == {"reader": [1, 2]}
    flow = Flow([sentiment(when=lambda review: len(review) > 0), named("last", "reader")])
    run = await flow.run({"review": ""})
    assert (run.output, flow.statuses(run)["reader"]) == ('{"last": "last"}', StepStatus.SKIPPED)


async def test_a_flow_is_a_step_of_another():
    """It is a child run with its own plan, and its answer is the result."""
    inner = agent_step(Flow([named("a"), named("b", "a")], name="inner"), lambda day: {})
    run = await Flow([inner]).run({"day": "x"})
    assert json.loads(run.output) == {"inner": {"b": "b"}}


async def test_a_message_does_not_replace_the_plan():
    """Input that arrives while a person decides is read, and the steps that are left run all the same."""
    flow = Flow([named("ask", requires_approval=True), named("then", "ask")])
    run = await flow.run({})
    await flow.send(run.id, "what is going on?")
    await flow.approve(run.id, run.pending[0].call_id)
    run = await flow.resume(run.id)
    assert (run.output, run.plan.number) == ('{"then": "then"}', 1)


def test_calling_a_step_calls_its_function():
    """So that steps can be tested without a run."""
    assert count([{"id": "1"}]) == 1
    assert repr(ETL) == "<Flow etl, steps: extract, alarm, count, report>"


async def test_the_answer_of_a_flow_has_a_type_if_one_is_given():
    """It is checked like that of an agent."""

    @attrs.frozen
    class Answer:
        a: str

    flow = Flow([named("a")], output_type=Answer, output_mode="prompt")
    assert (await flow.run({})).output == Answer("a")


async def test_an_agent_step_waits_for_a_person_and_goes_on():
    """The approval is asked for by the child run, and the flow waits for it."""
    paid = []

    @tool(requires_approval=True)
    async def pay(cents: int) -> str:
        paid.append(cents)
        return "paid"

    agent = Agent(ScriptedModel(say("", call("pay", cents=5)), say("done")), name="payer", tools=[pay])
    flow = Flow([agent_step(agent, "Pay."), named("last", "payer")])
    run = await flow.run({})
    assert flow.statuses(run) == {"payer": StepStatus.WAITING, "last": StepStatus.PENDING}
    await flow.approve(run.pending[0].run_id, run.pending[0].call_id)
    run = await flow.resume(run.id)
    assert (run.output, paid, flow.results(run)["payer"]) == ('{"last": "last"}', [5], "done")


async def test_a_changed_flow_carries_out_the_plan_of_the_journal():
    """A step that it no longer has waits, until it is settled or a program has it; the compensation is the old one."""
    undone = []

    def undo(first: str) -> None:
        undone.append(first)

    store = MemoryStore()
    first = named("first", requires_approval=True, compensate=undo)
    run = await Flow([first, named("gone", "first")], store=store).run({})
    flow = Flow([named("new"), named("newer"), first], store=store)
    await flow.approve(run.id, run.pending[0].call_id)
    run = await flow.resume(run.id)
    [item] = run.pending
    assert (item.kind, item.tool, undone) == (PendingKind.OUTCOME, "gone", [])
    assert "this program has no tool 'gone'" in item.error
    await flow.settle(run.id, item.call_id, failed="there is no courier")
    run = await flow.resume(run.id)
    assert run.stop_reason is StopReason.STEP_FAILED
    assert "step gone failed" in run.stop_message
    assert undone == ["first"]


async def test_a_renamed_step_and_compensation_are_named_at_the_resume():
    """The names that the journal has stand for those of the program; the rename is an event, and nothing runs twice."""
    done = []

    def program(suffix):
        def undo(order: str) -> None:
            done.append(f"undo{suffix}")

        def charge(order: str) -> str:
            done.append(f"charge{suffix}")
            return "charged"

        def ship(order: str) -> str:
            raise RuntimeError("no courier")

        first = step(name=f"charge{suffix}", requires_approval=True, compensate=step(name=f"undo{suffix}")(undo))(
            charge
        )
        return Flow([first, step(name=f"ship{suffix}", depends_on=[first])(ship)], store=store)

    store = MemoryStore()
    run = await program("").run({"order": "o1"})
    await program("").approve(run.id, run.pending[0].call_id)
    renamed = {"charge": "charge_2", "ship": "ship_2", "undo": "undo_2"}
    with pytest.raises(MisuseError, match="no tool 'nothing'"):
        await program("_2").resume(run.id, renamed={"ship": "nothing"})
    run = await program("_2").resume(run.id, renamed=renamed)
    assert [item.kind for item in run.pending] == [PendingKind.APPROVAL]  # that of another tool does not count
    await program("_2").approve(run.id, run.pending[0].call_id)
    run = await program("_2").resume(run.id)
    assert (run.stop_reason, done) == (StopReason.STEP_FAILED, ["charge_2", "undo_2"])
    assert [dict(each.renamed) for each in await program("_2").history(run.id) if isinstance(each, e.Resumed)] == [
        renamed
    ]


@pytest.mark.parametrize(
    "changed",
    [{"when": lambda item: False}, {"key": lambda item: "same"}, {"max_items": 1}],
    ids=["when", "key", "max_items"],
)
async def test_a_list_that_was_carried_out_is_undone_whatever_the_program_says_now(changed):
    """The results show the items that were carried out; conditions, keys and bounds are those of the start."""
    done, store = [], MemoryStore()

    def program(**more):
        def undo(item: str) -> None:
            done.append(f"undo {item}")

        def load(item: str) -> str:
            done.append(f"load {item}")
            return item

        def ship(rows: list[str]) -> str:
            raise RuntimeError("no courier")

        inner = {name: more.pop(name) for name in ("when",) if name in more}
        loads = each(step(name="load", compensate=undo, **inner)(load), over="items", name="rows", **more)
        return Flow([loads, step(depends_on=["rows"], requires_approval=True)(ship)], store=store)

    run = await program().run({"items": ["a", "b"]})
    await program(**changed).approve(run.id, run.pending[0].call_id)
    run = await program(**changed).resume(run.id)
    assert (run.stop_reason, sorted(done)) == (StopReason.STEP_FAILED, ["load a", "load b", "undo a", "undo b"])


async def test_a_rename_reaches_the_steps_behind_and_takes_no_other_step():
    """A step takes results by the names of their steps. Two steps cannot have one name."""
    store = MemoryStore()

    def program(name):
        def charge() -> str:
            return "C"

        def ship(charge: str) -> str:
            return f"ship {charge}"

        def ship_renamed(charge_card: str) -> str:
            return f"ship {charge_card}"

        last = ship if name == "charge" else ship_renamed
        return Flow(
            [step(name=name, requires_approval=True)(charge), step(name="ship", depends_on=[name])(last)], store=store
        )

    run = await program("charge").run({})
    with pytest.raises(MisuseError, match="'ship' is another tool of the plan already"):
        await program("charge_card").resume(run.id, renamed={"charge": "ship"})
    run = await program("charge_card").resume(run.id, renamed={"charge": "charge_card"})
    await program("charge_card").approve(run.id, run.pending[0].call_id)
    assert (await program("charge_card").resume(run.id)).output == '{"ship": "ship C"}'


@pytest.mark.parametrize("stop", ["limit", "cancel"])
async def test_a_run_that_ends_between_a_failure_and_its_compensations_names_those_that_are_left(stop):
    """No compensation has been planned by then. A failure that another step stands in for leaves none."""
    store = MemoryStore()

    def charge() -> str:
        return "charged"

    def ship() -> str:
        raise RuntimeError("no courier")

    async def stand_in(ship: str | None) -> str:
        await Runs(store).cancel("mine", by="op")
        return "sent by mail"

    charging = step(compensate=step(name="refund")(charge))(charge)
    last = step(name="stand_in", depends_on=["charge", "ship"], join="any")(stand_in)
    if stop == "limit":
        flow = Flow([charging, step(depends_on=["charge"])(ship)], store=store, limits=Limits(tool_calls=2))
    else:
        flow = Flow([charging, step()(ship), last], store=store)
    run = await flow.run({}, id="mine")
    assert (run.stop_reason, "left: charge" in run.stop_message) == (
        (StopReason.TOOL_BUDGET, True) if stop == "limit" else (StopReason.CANCELLED, False)
    )
    assert "done: charge" in run.stop_message
