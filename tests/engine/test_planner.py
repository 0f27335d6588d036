"""Planning: a plan is made once, its steps run when they are ready, and the model answers from their results."""

from __future__ import annotations

import json
import random
from typing import Any

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    ConflictError,
    Limits,
    MisuseError,
    ModelRetry,
    PendingKind,
    Permissions,
    RunContext,
    Settings,
    tool,
)
from agentfsm.core import events as e
from agentfsm.planning import Plan, Planner, PlanStep
from agentfsm.testing import ScriptedModel, call, say
from tests.support.wire_rules import check_wires

pytestmark = pytest.mark.anyio

COMPARE = {
    "analysis": "two cities",
    "steps": [
        {"id": 1, "tool": "weather", "arguments": {"city": "Oslo"}},
        {"id": 2, "tool": "weather", "arguments": {"city": "Rome"}},
        {"id": 3, "question": "Which is warmer?", "after": [1, 2]},
        {"id": 4, "question": "What to pack?", "after": [3]},
    ],
}
BOOK = {
    "steps": [
        {"id": 1, "tool": "weather", "arguments": {"city": "Oslo"}},
        {
            "id": 2,
            "tool": "book",
            "arguments": {
                "city": {"$text": ["to ", {"$step": 1, "path": "/city"}]},
                "temp": {"$step": 1, "path": "/temp"},
            },
            "after": [1],
        },
    ]
}


class Desk:
    """Tools, and a record of their effects."""

    def __init__(self) -> None:
        self.booked: list[tuple[str, int]] = []
        self.order: list[str] = []
        self.failing = 0
        self.slow = anyio.Event()

        @tool(read_only=True)
        async def weather(city: str) -> dict[str, object]:
            """Return the weather."""
            self.order.append(f"+{city}")
            if city == "Slow":
                await self.slow.wait()
            await anyio.sleep(0.01)
            self.order.append(f"-{city}")
            return {"city": city, "temp": {"Oslo": 4}.get(city, 21)}

        @tool
        async def book(city: str, temp: int) -> str:
            """Book a journey."""
            if self.failing:
                self.failing -= 1
                raise ModelRetry("fully booked")
            self.booked.append((city, temp))
            self.slow.set()
            return f"booked {city}"

        self.tools = [weather, book]

    def agent(self, *script, planner=None, **options) -> Agent:
        return Agent(ScriptedModel(*script), tools=self.tools, planner=planner or Planner(), **options)


def plan_of(*steps, **more) -> str:
    return json.dumps({"steps": list(steps), **more})


async def kinds(agent, run):
    return [type(event).__name__ for event in (await agent.store.read(run.id)).events]


async def test_two_tools_a_comparison_and_advice_take_two_requests_and_two_questions(store):
    """The example of document A, 4.2."""
    desk = Desk()
    agent = desk.agent(json.dumps(COMPARE), "Rome", "A hat", "Rome is warmer: pack a hat.", store=store)
    run = await agent.run("Where should I go?")
    assert run.output == "Rome is warmer: pack a hat."
    assert desk.order[:2] == ["+Oslo", "+Rome"]
    assert run.turn == 1
    assert agent.model.requests[1].messages[-1].text == json.dumps(
        {
            "question": "Which is warmer?",
            "results": {"1": {"city": "Oslo", "temp": 4}, "2": {"city": "Rome", "temp": 21}},
        }
    )
    assert len(agent.model.requests) == 4
    assert [record.name for record in run.calls] == ["weather", "weather"]
    assert run.usage.input_tokens == 40  # all four requests are counted
    assert run == await agent.load(run.id)
    assert (await agent.replay(run.id)).is_faithful


async def test_results_are_bound_with_their_types(store):
    desk = Desk()
    run = await desk.agent(json.dumps(BOOK), "done", store=store).run("go")
    assert desk.booked == [("to Oslo", 4)]
    assert run.is_over


async def test_a_step_starts_when_its_own_dependencies_are_done(store):
    """With A before B beside a slow C, B ends before C: C here waits for B."""
    desk = Desk()
    first = [{"id": 1, "tool": "weather", "arguments": {"city": "Slow"}}, {**BOOK["steps"][0], "id": 2}]
    then = {
        **BOOK["steps"][1],
        "id": 3,
        "after": [2],
        "arguments": {"city": "x", "temp": {"$step": 2, "path": "/temp"}},
    }
    tools = [desk.tools[0], tool(desk.tools[1].function, concurrency_safe=True, name="book")]
    agent = Agent(ScriptedModel(plan_of(*first, then), "done"), tools=tools, planner=Planner(), store=store)
    run = await agent.run("go")
    assert run.is_over
    assert desk.order == ["+Slow", "+Oslo", "-Oslo", "-Slow"]
    assert desk.booked == [("x", 4)]


async def test_a_plan_is_reviewed_and_edited(store):
    desk = Desk()
    agent = desk.agent(json.dumps(BOOK), "done", planner=Planner(review=True), store=store)
    run = await agent.run("go")
    [item] = run.pending
    assert (item.kind, item.tool, item.call_id) == (PendingKind.APPROVAL, "agentfsm.plan", "p1")
    assert item.description.startswith('1. weather({"city": "Oslo"})')
    plan = Plan.from_json(item.arguments)
    bad = Plan(steps=(plan.steps[0], PlanStep(id=2, tool="book", arguments={"city": 5}, after=(1,))))
    with pytest.raises(MisuseError, match="not approved"):
        await agent.approve(run.id, "plan", plan=bad)
    with pytest.raises(MisuseError, match="names 7"):
        await agent.approve(run.id, "plan", plan=Plan(steps=(PlanStep(id=1, question="?", after=(7,)),)))
    with pytest.raises(ConflictError):
        await agent.approve(run.id, "plan", digest="other")
    edited = Plan(
        steps=(plan.steps[0], PlanStep(id=2, tool="book", arguments={"city": "Bergen", "temp": 9}, after=(1,)))
    )
    await agent.approve(run.id, "plan", plan=edited, by="ann")
    run = await agent.resume(run.id)
    assert desk.booked == [("Bergen", 9)]
    assert run.plan.plan == edited
    assert run.plan.is_approved
    with pytest.raises((ConflictError, MisuseError)):
        await agent.approve(run.id, "plan", by="bob")


async def test_a_plan_waits_for_a_review_while_the_agent_changes(store):
    """The tools of the engine belong to every agent with a planner."""
    agent = Desk().agent(plan_of({"id": 1, "tool": "weather", "arguments": {"city": "Oslo"}}), "Cold.", store=store)
    agent = agent.with_(planner=Planner(review=True))
    run = await agent.run("Oslo?")
    changed = agent.with_(limits=Limits(turns=9))
    await changed.approve(run.id, "p1")
    assert (await changed.resume(run.id)).output == "Cold."


async def test_a_rejected_plan_is_not_carried_out(store):
    desk = Desk()
    agent = desk.agent(json.dumps(BOOK), "Then I stop.", planner=Planner(review=True), store=store)
    run = await agent.run("go")
    await agent.reject(run.id, "plan", message="too far")
    run = await agent.resume(run.id)
    assert run.output == "Then I stop."
    assert not desk.booked
    assert "too far" in run.messages[1].text


async def test_calls_outside_an_approved_plan_need_an_approval(store):
    """An approved plan stays approved; whatever else the model asks for is shown to a person."""
    desk = Desk()
    extra = say("", call("book", city="Paris", temp=1))
    agent = desk.agent(json.dumps(BOOK), extra, "done", planner=Planner(review=True), store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "plan")
    run = await agent.resume(run.id)
    assert desk.booked == [("to Oslo", 4)]
    assert [item.arguments for item in run.pending] == [{"city": "Paris", "temp": 1}]
    await agent.approve(run.id, run.pending[0].call_id)
    run = await agent.resume(run.id)
    assert desk.booked == [("to Oslo", 4), ("Paris", 1)]
    assert run.is_over


async def test_review_may_depend_on_the_plan(store):
    desk = Desk()
    planner = Planner(review=lambda plan: any(step.tool == "book" for step in plan.steps))
    assert (await desk.agent(json.dumps(COMPARE), "a", "b", "c", planner=planner, store=store).run("go")).is_over
    assert (await desk.agent(json.dumps(BOOK), planner=planner, store=store).run("go")).is_waiting


FLAWED = [
    ("[]", "not a JSON object"),
    ('{"steps": 5}', "at least one step"),
    (plan_of({"id": 1, "tool": "fly"}), "there is no tool 'fly'; the tools are: weather, book"),
    (plan_of({"id": 1, "tool": "weather", "arguments": {"town": "Oslo"}}), "city"),
    (plan_of({"id": 1, "tool": "book", "arguments": {"city": {"$step": 1}, "temp": 1}}), "refers to step 1"),
    (plan_of({"id": 1, "question": "a", "after": [2]}, {"id": 2, "question": "b", "after": [1]}), "names 2"),
    (plan_of({"id": 1}), "either a tool or a question"),
    (plan_of({"id": 1, "question": "a"}, {"id": 1, "question": "b"}), "used already"),
    (plan_of(*[{"id": n, "question": "?"} for n in range(1, 10)]), "at most 8"),
    (plan_of({"id": 1, "question": 7}), "'question' is a text"),
    (plan_of({"id": "x", "question": "a"}), "'id' is a whole number"),
    (plan_of({"id": 1, "question": "a", "args": []}), "unknown key 'args'"),
    (plan_of({"id": 1, "goal": "a", "tools": ["weather"]}), "step 1: plan the calls of tools, not goals"),
    (plan_of({"id": 1, "question": "a", "tools": "weather"}), "'tools' is a list of names"),
    (plan_of({"id": 1, "question": "a", "tools": ["weather"]}), "a goal, and no other step, has 'tools'"),
    (
        plan_of({"id": 1, "tool": "book", "arguments": {"city": {"$step": 2}}, "after": [2]}),
        "needs the argument 'temp'",
    ),
]


@pytest.mark.parametrize(("text", "flaw"), FLAWED)
async def test_a_flawed_plan_is_sent_back_once_with_all_flaws(text, flaw):
    desk = Desk()
    agent = desk.agent(text, json.dumps(BOOK), "done")
    assert (await agent.run("go")).is_over
    assert flaw in agent.model.requests[1].messages[-1].text
    assert desk.booked == [("to Oslo", 4)]


async def test_after_two_flawed_plans_the_model_goes_on_step_by_step(store):
    desk = Desk()
    agent = desk.agent("no", "no", say("", call("book", city="Rome", temp=2)), "done", store=store)
    run = await agent.run("go")
    assert run.output == "done"
    assert desk.booked == [("Rome", 2)]
    assert "PlanDropped" in await kinds(agent, run)
    assert "Go on step by step" in agent.model.requests[2].messages[1].text


async def test_without_a_need_for_tools_no_plan_is_made():
    desk = Desk()
    run = await desk.agent('{"steps": []}', "Hello!").run("hi")
    assert (run.output, run.plan.plan) == ("Hello!", None)


async def test_a_new_plan_keeps_results(store):
    """Numbers go on, finished steps are not repeated, and the new plan refers to their results."""
    desk = Desk()
    desk.failing = 1
    again = plan_of(
        {"id": 3, "tool": "book", "arguments": {"city": "b", "temp": {"$step": 1, "path": "/temp"}}, "after": [1]}
    )
    agent = desk.agent(json.dumps(BOOK), again, "done", store=store)
    run = await agent.run("go")
    assert desk.booked == [("b", 4)]
    assert desk.order == ["+Oslo", "-Oslo"]
    assert run.plan.number == 2
    [replanned] = [
        event for event in (await store.read(run.id)).events if isinstance(event, e.Planned) and event.reason
    ]
    assert "step 2" in replanned.reason
    assert "fully booked" in replanned.reason
    assert (await agent.replay(run.id)).is_faithful


async def test_after_three_new_plans_a_person_is_asked(store):
    desk = Desk()
    desk.failing = 99
    step = {"tool": "book", "arguments": {"city": "x", "temp": 1}}
    plans = [plan_of({"id": number, **step}) for number in range(1, 5)]
    agent = desk.agent(*plans, plan_of({"id": 5, **step}), "done", store=store)
    run = await agent.run("go")
    assert [item.kind for item in run.pending] == [PendingKind.INPUT]
    assert "planned 4 times" in run.pending[0].description
    desk.failing = 0
    await agent.send(run.id, "try once more")
    run = await agent.resume(run.id)
    assert run.is_over
    assert len(desk.booked) == 1


async def test_without_replanning_the_model_reads_what_failed():
    desk = Desk()
    desk.failing = 1
    agent = desk.agent(json.dumps(BOOK), "It is full.", planner=Planner(replan="never"))
    run = await agent.run("go")
    assert run.output == "It is full."
    assert "fully booked" in agent.model.requests[-1].messages[-1].text


async def test_a_plan_may_be_checked_after_each_step(store):
    desk = Desk()
    steps = [{**BOOK["steps"][0]}, BOOK["steps"][1], {"id": 3, "question": "?", "after": [2]}]
    other = plan_of({"id": 3, "tool": "book", "arguments": {"city": "new", "temp": 1}, "after": [1]})
    agent = desk.agent(
        plan_of(*steps), '{"keep": true}', other, "done", planner=Planner(replan="each_step"), store=store
    )
    run = await agent.run("go")
    assert run.is_over
    assert desk.booked == [("to Oslo", 4), ("new", 1)]


async def test_a_frozen_plan_is_the_only_source_of_calls():
    desk = Desk()
    agent = desk.agent(json.dumps(BOOK), "done", planner=Planner(frozen=True, replan="never"))
    run = await agent.run("go")
    assert run.is_over
    assert agent.model.requests[-1].tools == ()


async def test_a_step_may_need_an_approval_while_others_run(store):
    desk = Desk()
    pay = tool(desk.tools[1].function, name="book", requires_approval=True)
    steps = [{"id": 1, "tool": "book", "arguments": {"city": "x", "temp": 1}}, {**BOOK["steps"][0], "id": 2}]
    agent = Agent(ScriptedModel(plan_of(*steps), "done"), tools=[desk.tools[0], pay], planner=Planner(), store=store)
    run = await agent.run("go")
    assert [item.call_id for item in run.pending] == ["p1.1"]
    assert desk.order == ["+Oslo", "-Oslo"]
    await agent.approve(run.id, "p1.1")
    assert (await agent.resume(run.id)).is_over
    assert desk.booked == [("x", 1)]


async def test_new_input_leads_to_a_new_plan(store):
    """In the next run of a conversation, and after a question in a run."""
    desk = Desk()
    other = plan_of({"id": 1, "tool": "weather", "arguments": {"city": "Rome"}})
    agent = desk.agent(json.dumps(BOOK), "first", other, "second", store=store)
    again = await agent.run("and Rome?", after=await agent.run("go"))
    assert again.output == "second"
    assert desk.order[-1] == "-Rome"


async def test_limits_of_tool_calls_hold():
    desk = Desk()
    steps = [{"id": n, "tool": "book", "arguments": {"city": str(n), "temp": n}} for n in range(1, 6)]
    agent = desk.agent(plan_of(*steps), "done", limits=Limits(tool_calls=3), planner=Planner(replan="never"))
    await agent.run("go")
    assert len(desk.booked) <= 3


async def test_only_permitted_tools_can_be_planned():
    desk = Desk()
    agent = desk.agent(json.dumps(BOOK), json.dumps(BOOK), "no", permissions=Permissions(level="read"))
    run = await agent.run("go")
    assert run.output == "no"
    assert "there is no tool 'book'" in agent.model.requests[1].messages[-1].text
    assert not desk.booked


async def test_a_model_cannot_call_the_tools_of_the_engine():
    desk = Desk()
    sneaky = say("", call("agentfsm.plan", steps=[{"id": 1, "tool": "book", "arguments": {"city": "x", "temp": 1}}]))
    agent = desk.agent('{"steps": []}', sneaky, "done")
    run = await agent.run("go")
    assert run.is_over
    assert not desk.booked
    assert run.plan.plan is None


async def test_steps_run_one_by_one_if_calls_may_not_overlap(store):
    desk = Desk()
    agent = desk.agent(json.dumps(COMPARE), "a", "b", "c", settings=Settings(parallel_tool_calls=False), store=store)
    assert (await agent.run("go")).output == "c"
    assert desk.order == ["+Oslo", "-Oslo", "+Rome", "-Rome"]


async def test_the_audit_has_the_plan_and_its_steps(store):
    desk = Desk()
    agent = desk.agent(json.dumps(BOOK), "done", planner=Planner(review=True), store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "plan", by="ann")
    run = await agent.resume(run.id)
    records = {record.call_id: record for record in await agent.audit(run.id)}
    assert list(records) == ["p1", "p1.1", "p1.2"]
    assert records["p1"].approved_by == "ann"
    assert records["p1.2"].result == "booked to Oslo"


async def test_a_fork_may_edit_the_plan(store):
    desk = Desk()
    agent = desk.agent(json.dumps(BOOK), "done", "again", store=store)
    run = await agent.run("go")
    events = (await store.read(run.id)).events
    at = next(version for version, event in enumerate(events, 1) if isinstance(event, e.Planned))
    forked = await agent.fork(run.id, at=at)
    forked = await agent.finish(forked)
    assert forked.is_over
    assert desk.booked == [("to Oslo", 4)] * 2


@pytest.mark.parametrize(
    "bad", [{"max_steps": 0}, {"replans": -1}, {"replan": "often"}, {"review": "yes"}, {"model": "gpt"}, {"when": 5}]
)
def test_options_are_checked(bad):
    with pytest.raises(MisuseError, match="give"):
        Planner(**bad)


async def test_all_wires_accept_the_history_of_a_plan(store):
    """The steps are no tool calls of the model, also between its own calls and thoughts."""
    desk = Desk()
    own = say("I book another.", call("book", city="Paris", temp=1))
    agent = desk.agent(json.dumps(BOOK), own, "done", json.dumps({"steps": []}), "more", store=store)
    run = await agent.run("go")
    run = await agent.run("and now?", after=run)
    check_wires(run.messages[:-1], "Be brief.")
    assert desk.booked == [("to Oslo", 4), ("Paris", 1)]
    assert [type(message).__name__ for message in run.messages[:3]] == [
        "UserMessage",
        "UserMessage",
        "AssistantMessage",
    ]


async def test_a_pause_holds_back_the_steps_that_follow(store):
    """Running steps end, the others start after the pause, and none is repeated."""
    desk = Desk()
    steps = [{"id": 1, "tool": "halt"}, {"id": 2, "tool": "book", "arguments": {"city": "x", "temp": 1}, "after": [1]}]

    @tool(read_only=True)
    async def halt(ctx: RunContext[None]) -> str:
        """Ask for a pause of this run, and see that it has heard of it."""
        await agent.pause(ctx.run_id, by="ann")
        await anyio.sleep(0.05)
        return "halted"

    agent = Agent(ScriptedModel(plan_of(*steps), "done"), tools=[*desk.tools, halt], planner=Planner(), store=store)
    run = await agent.run("go")
    if not run.is_over:  # the store reports the request with an append
        assert run.paused is not None
        run = await agent.resume(run.id)
    assert run.is_over
    assert desk.booked == [("x", 1)]


async def test_a_cancelled_plan_ends_with_its_open_steps_closed(store):
    desk = Desk()
    steps = [{"id": 1, "tool": "weather", "arguments": {"city": "Slow"}}, {"id": 2, "question": "?", "after": [1]}]
    agent = desk.agent(plan_of(*steps), store=store)
    async with anyio.create_task_group() as tasks:

        async def drive() -> None:
            nonlocal run
            run = await agent.run("go", id="r1")

        run = None
        tasks.start_soon(drive)
        while not desk.order:  # noqa: ASYNC110  the tool is elsewhere
            await anyio.sleep(0.01)
        await agent.cancel("r1", by="ann")
    assert (run.state.value, run.stop_reason.value) == ("error", "cancelled")
    assert [entry.call.id for entry in run.plan.closed] == ["p1", "p1.1"]
    assert run.plan.closed[1].result.outcome.value == "cancelled"
    assert run.open == ()
    check_wires(run.messages)


async def test_all_flaws_of_a_plan_are_named_at_once():
    """The model gets one attempt to correct them."""
    desk = Desk()
    flawed = [
        {"id": 1, "tool": "fly"},
        {"id": 2, "tool": "weather", "arguments": {"town": "Oslo"}},
        {"id": 3, "question": "a", "after": [4]},
        {"id": 4, "tool": "book", "arguments": {"city": {"$step": 1}, "temp": 1}},
        {"id": 4, "question": "b", "goal": "c"},
    ]
    agent = desk.agent(plan_of(*flawed), json.dumps(BOOK), "done", planner=Planner(max_steps=4))
    assert (await agent.run("go")).is_over
    asked = agent.model.requests[1].messages[-1].text
    for flaw in ("5 steps", "no tool 'fly'", "city", "names 4", "refers to step 1", "used already", "either a tool"):
        assert flaw in asked


async def test_steps_do_not_count_as_a_loop():
    """Eight equal calls of a plan are what was planned; eight turns with them would be a loop."""
    desk = Desk()
    steps = [{"id": 1, "tool": "weather", "arguments": {"city": "Oslo"}}]
    steps += [{**steps[0], "id": number, "after": [number - 1]} for number in range(2, 9)]
    run = await desk.agent(plan_of(*steps), "done").run("go")
    assert (run.output, run.loops, run.turn, len(run.calls)) == ("done", 0, 1, 8)


async def test_a_fork_replaces_a_plan_by_an_edited_one(store):
    """At the event that made it."""
    desk = Desk()
    agent = desk.agent(json.dumps(BOOK), "done", "again", store=store)
    run = await agent.run("go")
    events = await agent.history(run.id)
    at = next(version for version, event in enumerate(events, 1) if isinstance(event, e.Planned))
    edited = Plan(steps=(PlanStep(id=1, tool="book", arguments={"city": "Bergen", "temp": 9}),))
    made = events[at - 1]
    other = attrs.evolve(made, call=attrs.evolve(made.call, arguments=json.dumps(edited.to_json())))
    forked = await agent.finish(await agent.fork(run.id, at=at, edit={at: other}))
    assert forked.plan.plan == edited
    assert desk.booked == [("to Oslo", 4), ("Bergen", 9)]


async def test_a_fork_has_no_approval_of_its_plan(store):
    """Neither that of the forked run, nor one that an edit claims; where the plan waits, the fork asks again."""
    desk = Desk()
    agent = desk.agent(json.dumps(BOOK), "done", planner=Planner(review=True), store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "plan", by="ann")
    await agent.resume(run.id)
    events = await agent.history(run.id)
    at = {type(event): version for version, event in reversed(list(enumerate(events, 1)))}
    made = events[at[e.Planned] - 1]
    evil = Plan(steps=(PlanStep(id=1, tool="book", arguments={"city": "Bergen", "temp": 9}),)).to_json()
    other = attrs.evolve(made, call=attrs.evolve(made.call, arguments=json.dumps(evil)))
    accepted = events[at[e.ToolFinished] - 1]
    for version, edit in (
        (at[e.ApprovalGiven], {}),
        (at[e.ApprovalGiven], {at[e.Planned]: other}),
        (at[e.StepsReady], {}),
        (at[e.ToolFinished], {at[e.Planned]: other}),
        (at[e.ApprovalAsked], {at[e.ApprovalAsked]: accepted}),
    ):
        with pytest.raises(MisuseError, match="plan"):
            await agent.fork(run.id, at=version, edit=edit)
    [asked] = (await agent.fork(run.id, at=at[e.ApprovalAsked])).pending
    assert (asked.call_id, desk.booked) == ("p1", [("to Oslo", 4)])
    assert not (await agent.fork(run.id)).pending  # the steps are done


@pytest.mark.parametrize("seed", range(20))
async def test_the_order_of_effects_respects_the_plan(seed):
    """Random plans of eight steps, whose calls take random times: each once, after those that it depends on."""
    rng = random.Random(seed)
    order, running, most = [], set(), 0

    @tool(concurrency_safe=True)
    async def work(step: int, waits: int, before: list[Any]) -> int:
        """Work."""
        nonlocal most
        running.add(step)
        most = max(most, len(running))
        for _ in range(waits):
            await checkpoint()
        order.append(step)
        running.remove(step)
        return step

    steps = []
    for number in range(1, 9):
        after = rng.sample(range(1, number), k=rng.randint(0, min(2, number - 1)))
        references = [{"$step": each} for each in after]
        arguments = {"step": number, "waits": rng.randint(0, 30), "before": references}
        steps.append({"id": number, "tool": "work", "arguments": arguments, "after": sorted(after)})
    agent = Agent(ScriptedModel(plan_of(*steps), "done"), tools=[work], planner=Planner())
    assert (await agent.run("go")).output == "done"
    assert sorted(order) == list(range(1, 9))
    assert all(order.index(each) < order.index(step["id"]) for step in steps for each in step["after"])
    assert most > 1 or all(step["after"] for step in steps[1:])


async def test_a_replay_checks_what_the_planner_was_given(store):
    """With another planner, other tools or none, the plan would have been another one; nobody is asked."""
    desk = Desk()
    desk.failing = 1
    again = plan_of({"id": 3, "tool": "book", "arguments": {"city": "b", "temp": 1}, "after": [1]})
    agent = desk.agent(json.dumps(BOOK), again, "done", store=store)
    run = await agent.run("go")
    found = await agent.replay(run.id)
    assert (found.checked, found.divergences) == (3, ())
    for other in (agent.with_(planner=Planner(max_steps=5)), agent.with_(planner=None)):
        versions = [each.version for each in (await other.replay(run.id)).divergences]
        planned = [at for at, event in enumerate(await agent.history(run.id), 1) if isinstance(event, e.Planned)]
        assert versions == planned
    fewer = await agent.with_(tools=desk.tools[:1]).replay(run.id)
    assert len(fewer.divergences) == 3
    assert len(agent.model.requests) == 3
