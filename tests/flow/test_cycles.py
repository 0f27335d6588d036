"""Cycles of several steps: `until([draft, review, ...], ...)`."""

from __future__ import annotations

import json

import pytest

from agentfsm import IncompatibleProgramError, MisuseError, Run
from agentfsm.cli.render import flowchart
from agentfsm.flow import Flow, Step, StepStatus, each, step, until
from agentfsm.stores import MemoryStore

pytestmark = pytest.mark.anyio


@step
async def facts(topic: str) -> str:
    """Read up on a topic."""
    return f"facts on {topic}"


@step(depends_on=[facts])
async def draft(facts: str, draft: str | None, review: int = -1) -> str:
    """Write a text, or make the one before better."""
    return f"{facts}." if draft is None else f"{draft}{review}"


@step(depends_on=[draft])
async def review(draft: str, review: int | None) -> int:
    """Judge the text."""
    return 1 if review is None else review + 1


@step(depends_on=[draft, review], when=lambda review, goal: review >= goal)
async def page(draft: str, review: int) -> dict[str, object]:
    """Put the text on a page."""
    return {"text": draft, "score": review}


def build(**options: object) -> Flow:
    """Return a flow with a cycle of three steps behind another step."""
    loop = until([page, review, draft], lambda review, goal: review >= goal, times=4, **options)
    return Flow([loop, facts])


async def test_each_repetition_is_a_plan_whose_steps_take_results_of_this_one_and_of_the_one_before():
    """Those in `depends_on` are of this one. The result is that of the last step."""
    flow = build(name="text")
    assert flow.inputs == ("topic", "goal")
    run = await flow.run({"topic": "x", "goal": 3})
    assert json.loads(run.output) == {"text": {"text": "facts on x.12", "score": 3}}
    child = await flow.load(f"{run.id}.p1.2")
    assert [(entry.call.id, entry.call.name, json.loads(entry.call.arguments)) for entry in child.plan.steps] == [
        ("p1.1", "draft", {"facts": "facts on x", "draft": None}),
        ("p1.2", "review", {"draft": "facts on x.", "review": None}),
        ("p1.3", "page", {"draft": "facts on x.", "review": 1, "goal": 3}),
        ("p2.4", "draft", {"facts": "facts on x", "draft": "facts on x.", "review": 1}),
        ("p2.5", "review", {"draft": "facts on x.1", "review": 1}),
        ("p2.6", "page", {"draft": "facts on x.1", "review": 2, "goal": 3}),
        ("p3.7", "draft", {"facts": "facts on x", "draft": "facts on x.1", "review": 2}),
        ("p3.8", "review", {"draft": "facts on x.12", "review": 2}),
        ("p3.9", "page", {"draft": "facts on x.12", "review": 3, "goal": 3}),
    ]
    assert (await flow.replay(run.id)).is_faithful
    assert "page" in flowchart.render_mermaid(flowchart.draw_plans(child, await flow.history(child.id)))
    assert flow.ordered_steps[1].description == "draft, review, page, up to 4 times"


async def test_a_cycle_that_reaches_its_limit_or_fails_says_which_step_it_was():
    """A step that was skipped has None."""
    run = await build().run({"topic": "x", "goal": 9})
    assert "step page failed (the condition did not hold after 4 repetitions; the last result: null" in run.stop_message
    assert (await build(on_limit="accept").run({"topic": "x", "goal": 9})).output == '{"page": null}'

    @step
    async def good(bad: int | None) -> int:
        return 1

    @step(depends_on=[good])
    async def bad(good: int, bad: int | None) -> int:
        if bad:
            raise OSError("gone")
        return 1

    @step(depends_on=[bad])
    async def after(bad: int) -> int:
        return bad

    flow = Flow([until([good, bad, after], lambda after: False, times=5)])
    run = await flow.run({})
    assert "(repetition 2 failed (step bad failed (OSError: gone. Its effect may" in run.stop_message
    assert "not run: after" in run.stop_message
    assert flow.statuses(run) == {"after": StepStatus.FAILED}


async def test_several_last_steps_give_an_object_and_the_loop_is_undone_as_a_whole():
    """A compensation takes the result of the loop."""
    undone = []

    @step
    async def left(right: int | None) -> int:
        return (right or 0) + 1

    @step
    async def right(left: int | None) -> int:
        return (left or 0) + 10

    def undo(both: dict[str, int]) -> None:
        undone.append(both)

    @step(depends_on=["both"])
    async def fail(both: dict[str, int]) -> None:
        raise LookupError

    loop = until([left, right], lambda left, right: left > 10, times=3, name="both", compensate=undo)
    assert json.loads((await Flow([loop]).run({})).output) == {"both": {"left": 11, "right": 11}}
    assert "compensated by: compensate_both" in (await Flow([loop, fail]).run({})).stop_message
    assert undone == [{"left": 11, "right": 11}]


async def test_a_cycle_may_have_a_list_and_a_loop_within():
    """A list that a step of the cycle makes is that of this repetition; another one comes from the flow."""

    @step
    async def numbers(total: int | None) -> list[int]:
        return [1, total or 0]

    @step
    async def double(number: int) -> int:
        return 2 * number

    @step
    async def grow(grow: int | None) -> int:
        return (grow or 0) + 1

    @step(depends_on=["doubled", "grow", "fixed"])
    async def total(doubled: list[int], grow: int, fixed: list[int]) -> int:
        return sum(doubled) + grow + sum(fixed)

    @step
    async def base() -> list[int]:
        return [50]

    cycle = [
        total,
        each(double, over="numbers", name="doubled"),
        until(grow, lambda grow: grow > 1, times=3),
        each(double, over="base", name="fixed"),
        numbers,
    ]
    flow = Flow([until(cycle, lambda total: total > 200, times=5, name="sum"), base])
    assert flow.ordered_steps[1].depends_on == ("base",)
    assert (await flow.run({})).output == '{"sum": 312}'


async def test_a_repetition_in_flight_is_continued_by_another_program():
    """The steps and their order are those of the journal, the functions those of the program."""
    done, store = [], MemoryStore()

    def program(*, factor: int = 10, has_mid: bool = True, is_new: bool = False) -> Flow:
        @step
        async def first(last: int | None) -> int:
            done.append(f"first {last}")
            return 1 if last is None else last + 1

        @step(depends_on=["first"], requires_approval=True)
        async def mid(first: int, mid: int | None) -> int:
            done.append(f"mid {first} {mid}")
            return first * factor

        @step(depends_on=["mid"])
        async def last(mid: int) -> int:
            return mid

        @step(name="last", depends_on=["first"])
        async def early(first: int) -> int:
            raise AssertionError

        @step(depends_on=["last"])
        async def new(last: int) -> int:
            raise AssertionError

        cycle = [first, *([mid, last] if has_mid else [early]), *([new] if is_new else [])]
        return Flow([until(cycle, lambda last: last > 50, times=4, name="loop")], store=store)

    async def approve(run: Run[str]) -> None:
        await program().approve(run.pending[0].run_id, run.pending[0].call_id)

    run = await program().run({})
    await approve(run)
    run = await program(factor=20, is_new=True).resume(run.id)
    await approve(run)
    with pytest.raises(IncompatibleProgramError, match=r"an open call p2\.5 of the tool 'mid'"):
        await program(has_mid=False).resume(run.id)
    run = await program().resume(run.id)
    assert run.output == '{"loop": 210}'
    assert done == ["first None", "mid 1 None", "first 20", "mid 21 20"]


def test_cycles_that_cannot_work_are_refused():
    """With the reason; what belongs to the loop as a whole is not said of a step."""

    def named(name: str, *after: str, **options: object) -> Step:
        async def act() -> str:
            return name

        return step(act, name=name, depends_on=after, **options)

    def loop(*steps: Step, **options: object) -> Step:
        return until(steps, lambda: True, times=1, **options)

    with pytest.raises(MisuseError, match=r"several last steps \(a, b\): give name="):
        loop(named("a"), named("b"))
    with pytest.raises(MisuseError, match="in a circle"):
        loop(named("a", "b"), named("b", "a"))
    with pytest.raises(MisuseError, match="two steps are called 'a'"):
        loop(named("a"), named("a"))
    with pytest.raises(MisuseError, match="leave out join='any'"):
        loop(named("a"), named("b", "a", join="any"))
    with pytest.raises(MisuseError, match="give compensate= to until"):
        loop(named("a", compensate=lambda: None), named("b", "a"))
    with pytest.raises(MisuseError, match="or a list of steps"):
        loop()
    with pytest.raises(MisuseError, match="depends on 'x'"):
        Flow([loop(named("a", "x"), name="l")])
