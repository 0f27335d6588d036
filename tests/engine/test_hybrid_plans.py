"""Goals in plans: the plan stays outside, and within a step the agent works turn by turn, in a run of its own."""

from __future__ import annotations

import json

import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, Limits, MisuseError, Permissions, State, tool
from agentfsm.core import events as e
from agentfsm.planning import Planner
from agentfsm.testing import FunctionModel, ScriptedModel, call, say

pytestmark = pytest.mark.anyio

FIND = {"id": 1, "goal": "Find the cheapest.", "tools": ["search"]}
BOOK = {"id": 2, "tool": "book", "arguments": {"hotel": {"$step": 1}}, "after": [1]}


class Desk:
    """Tools, and a record of their calls."""

    def __init__(self, **options) -> None:
        self.order: list[str] = []
        self.running = self.most = 0

        @tool(read_only=True)
        async def search(query: str) -> str:
            """Search hotels."""
            await self.work(query)
            return f"{query} costs 90"

        @tool(**options)
        async def book(hotel: str) -> str:
            """Book a hotel."""
            await self.work(f"book {hotel}")
            return f"booked {hotel}"

        self.tools = [search, book]

    async def work(self, what: str) -> None:
        """Take long enough for another call to begin, if it may."""
        self.order.append(f"+{what}")
        self.running += 1
        for _ in range(200):
            self.most = max(self.most, self.running)
            if self.most > 1:
                break
            await checkpoint()
        self.running -= 1
        self.order.append(f"-{what}")

    def agent(self, *script, planner=None, **options) -> Agent:
        return Agent(ScriptedModel(*script), tools=self.tools, planner=planner or Planner(mode="hybrid"), **options)


def plan_of(*steps) -> str:
    return json.dumps({"steps": steps})


async def test_a_goal_is_worked_on_turn_by_turn_and_its_answer_is_the_result(store):
    """The goal's run sees the goal, the named results and the named tools, and nothing else of the plan's run."""
    desk = Desk()
    look = {"id": 1, "tool": "search", "arguments": {"query": "all"}}
    goal, book = {**FIND, "id": 2, "after": [1]}, {**BOOK, "id": 3, "after": [2], "arguments": {"hotel": {"$step": 2}}}
    turns = [say("", call("search", query="a")), say("", call("search", query="b")), "Central"]
    agent = desk.agent(plan_of(look, goal, book), *turns, "All done.", store=store, instructions="Be brief.")
    run = await agent.run("Book the cheapest.", user="ann")
    assert run.output == "All done."
    assert desk.order == ["+all", "-all", "+a", "-a", "+b", "-b", "+book Central", "-book Central"]
    first = agent.model.requests[1]
    assert first.instructions == "Be brief."
    assert [each.name for each in first.tools] == ["search"]
    assert first.messages[0].text.startswith("Find the cheapest.\n\nResults of earlier steps")
    assert '{"1": "all costs 90"}' in first.messages[0].text
    [child] = await agent.runs.children(run.id)
    assert (child.id, child.turn) == (f"{run.id}.p1.2", 3)
    assert (await agent.load(child.id)).header.user == "ann"
    assert [record.name for record in run.calls] == ["search", "agentfsm.goal", "book"]
    assert (run.turn, run.tool_call_count) == (1, 5)  # the goal is a call, and two calls were made for it
    assert run.usage.input_tokens == 10 * len(agent.model.requests)
    assert (await agent.replay(run.id)).is_faithful
    assert (await agent.replay(child.id)).checked == 3


async def test_a_goal_may_use_the_named_tools_only(store):
    """Another one does not exist for it, though the agent has it."""
    desk = Desk()
    agent = desk.agent(plan_of(FIND), say("", call("book", hotel="x")), "Central", "done", store=store)
    assert (await agent.run("go")).is_over
    assert desk.order == []


async def test_an_approval_within_a_goal_waits_as_that_of_a_sub_agent(store):
    desk = Desk(requires_approval=True)
    goal = {"id": 1, "goal": "Book the best.", "tools": ["search", "book"]}
    agent = desk.agent(plan_of(goal), say("", call("book", hotel="Aurora")), "Aurora", "done", store=store)
    run = await agent.run("go")
    [item] = run.pending
    assert (item.run_id, item.tool) == (f"{run.id}.p1.1", "book")
    await agent.approve(item.run_id, item.call_id, by="ann")
    run = await agent.resume(run.id)
    assert run.output == "done"
    assert desk.order == ["+book Aurora", "-book Aurora"]


async def test_a_reviewed_plan_shows_the_tools_of_a_goal(store):
    """They are approved with the plan: its goal does not ask again, and a call outside of the plan does."""
    desk = Desk()
    goal = {"id": 1, "goal": "Book the best.", "tools": ["book"]}
    script = [plan_of(goal), say("", call("book", hotel="a")), "a", say("", call("book", hotel="b"))]
    agent = desk.agent(*script, planner=Planner(mode="hybrid", review=True), store=store)
    run = await agent.run("go")
    assert run.pending[0].description == "1. Book the best. (with book)"
    await agent.approve(run.id, "plan", by="ann")
    run = await agent.resume(run.id)
    assert desk.order == ["+book a", "-book a"]
    assert [item.arguments for item in run.pending] == [{"hotel": "b"}]


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_goal_without_an_answer_in_its_turns_has_failed(store, is_silent):
    """Its partial result is the reason for a new plan, and is not passed on as if it were the answer."""
    desk = Desk()
    more = say("" if is_silent else "It may be Aurora.", call("search", query="a"))
    again = plan_of({"id": 3, "tool": "book", "arguments": {"hotel": "Central"}})
    planner = Planner(mode="hybrid", goal_turns=2)
    agent = desk.agent(plan_of(FIND, BOOK), more, more, again, "done", planner=planner, store=store)
    run = await agent.run("go")
    assert run.output == "done"
    assert desk.order[-1] == "-book Central"
    assert "+book Aurora" not in desk.order
    reasons = [event.reason for event in (await store.read(run.id)).events if isinstance(event, e.Planned)]
    assert "step 1" in reasons[1]
    assert ("It may be Aurora" in reasons[1]) != is_silent


@pytest.mark.parametrize(
    ("step", "flaw"),
    [
        ({"id": 1, "goal": "a"}, "has 'tools'"),
        ({"id": 1, "goal": "a", "tools": ["fly"]}, "there is no tool 'fly'"),
        ({"id": 1, "goal": "a", "tools": ["search"], "question": "b"}, "either a tool or a question or a goal"),
        ({"id": 1, "goal": "a", "tools": [5]}, "'tools' is a list of names"),
        ({"id": 1, "goal": 5, "tools": ["search"]}, "'goal' is a text"),
    ],
)
async def test_a_flawed_goal_is_sent_back(step, flaw):
    agent = Desk().agent(plan_of(step), plan_of(FIND), "Central", "done")
    assert (await agent.run("go")).is_over
    assert flaw in agent.model.requests[1].messages[-1].text


async def test_permissions_hold_within_a_goal():
    """A goal itself needs none."""
    desk = Desk()
    agent = desk.agent(plan_of(FIND), "Central", "done", permissions=Permissions(level="read"))
    assert (await agent.run("go")).is_over
    agent = desk.agent(
        plan_of({**FIND, "tools": ["book"]}), plan_of(FIND), "a", "b", permissions=Permissions(level="read")
    )
    assert (await agent.run("go")).is_over
    assert "there is no tool 'book'" in agent.model.requests[1].messages[-1].text


def working(goals, seen=None):
    """Return a model that plans these goals and works on each with one call, of the tool that the goal names."""

    def reply(request):
        task = "".join([message.text for message in request.messages[-2:-1]])
        if "You plan" in task:
            return plan_of(*goals)
        if seen is not None:
            seen.append(request.instructions)
        text = request.messages[-1].text
        if len(request.messages) > 1 or "[Plan]" in text:
            return "done"
        name, _, value = text.partition(" ")
        return say("", call(name, **({"query": value} if name == "search" else {"hotel": value})))

    return FunctionModel(reply)


@pytest.mark.parametrize(("name", "overlaps"), [("search", True), ("book", False)])
async def test_goals_overlap_if_their_tools_may(name, overlaps):
    desk = Desk()
    goals = [{"id": number, "goal": f"{name} {number}", "tools": [name]} for number in (1, 2)]
    agent = Agent(working(goals), tools=desk.tools, planner=Planner(mode="hybrid"))
    assert (await agent.run("go")).output == "done"
    assert len(desk.order) == 4
    assert desk.most == (2 if overlaps else 1)


async def test_a_goal_spends_from_the_budget_of_its_run():
    desk = Desk()
    turns = [say("", call("search", query=str(number))) for number in range(4)]
    agent = desk.agent(plan_of(FIND, BOOK), *turns, *turns, limits=Limits(tool_calls=3), planner=Planner(mode="hybrid"))
    await agent.run("go")
    assert len(desk.order) <= 6


async def test_cancelling_the_run_ends_the_run_of_its_goal(store):
    desk = Desk(requires_approval=True)
    goal = {"id": 1, "goal": "Book.", "tools": ["book"]}
    agent = desk.agent(plan_of(goal), say("", call("book", hotel="Aurora")), store=store)
    run = await agent.run("go")
    await agent.cancel(run.id)
    assert (await agent.load(run.id)).state is State.ERROR
    [child] = await agent.runs.children(run.id)
    assert child.state is State.ERROR
    assert desk.order == []


async def test_the_instructions_of_a_goal_are_those_of_its_run(store):
    """Also if another version is active by then."""
    seen, versions = [], iter(["one", "two", "three"])
    agent = Agent(
        working([{"id": 1, "goal": "search x", "tools": ["search"]}], seen),
        tools=Desk().tools,
        planner=Planner(mode="hybrid"),
        instructions=lambda _header: next(versions),
        store=store,
    )
    assert (await agent.run("go")).is_over
    assert seen == ["one"] * 3


def test_a_frozen_plan_has_no_goals():
    with pytest.raises(MisuseError, match="goal"):
        Planner(frozen=True, mode="hybrid")
    for bad in ({"mode": "react"}, {"goal_turns": 0}, {"goal_timeout_s": 0}):
        with pytest.raises(MisuseError, match="give"):
            Planner(**bad)
