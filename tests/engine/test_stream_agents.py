"""What a stream carries: arguments and results of calls, the events of agents that are tools, and all of it as JSON."""

from __future__ import annotations

import json
from typing import get_args

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    AgentEvent,
    AgentEventType,
    BudgetWarning,
    CallDelta,
    Run,
    RunEnded,
    State,
    StateChanged,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    ToolEvent,
    ToolEventType,
    ToolResult,
    Usage,
    UsageReported,
    ask_user,
    tool,
)
from agentfsm.core.events import Observed
from agentfsm.core.header import Header
from agentfsm.core.labels import ToolKind
from agentfsm.core.run import begin_run
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import HANG_S


@tool(read_only=True)
async def look(at: str = "") -> str:
    """Look."""
    return f"saw {at}"


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


async def told(agent: Agent, start: str | Run, **options: object) -> tuple[list[StreamEvent], Run]:
    """All events of a stream, and the run that it ends with."""
    with anyio.fail_after(HANG_S):
        async with agent.stream(start, **options) as stream:
            return [event async for event in stream], stream.run


def of(events: list[StreamEvent], kind: type, run_id: str) -> list:
    """The events of a kind that belong to a run."""
    return [event for event in events if isinstance(event, kind) and event.run_id == run_id]


async def test_tool_events_carry_arguments_and_result(store):
    """Nobody has to keep the start of a call to understand its end, nor to read the history for its result."""
    lines = [say("", call("look", at="x"), call("look", wrong=1)), "done"]
    events, run = await told(Agent(ScriptedModel(*lines), tools=[look], store=store), "go")
    tools = of(events, ToolEvent, run.id)
    for call_id, arguments in (("t1.0", {"at": "x"}), ("t1.1", {"wrong": 1})):
        assert all(event.arguments == arguments for event in tools if event.call_id == call_id)
    results = {event.call_id: event.result for event in tools if event.result is not None}
    assert results == {m.call_id: m.content for m in run.messages if isinstance(m, ToolResult)}
    assert results["t1.0"] == "saw x"


async def test_an_approved_call_is_told_with_the_arguments_that_it_runs_with(store):
    """What a person has put in place of the model's words is what a watcher sees."""
    agent = Agent(ScriptedModel(say("", call("pay", cents=500)), "done"), tools=[pay], store=store)
    _, run = await told(agent, "go")
    await agent.approve(run.id, "t1.0", arguments={"cents": 5})
    events, run = await told(agent, run)
    tools = [event for event in of(events, ToolEvent, run.id) if event.call_id]
    assert {event.arguments["cents"] for event in tools} == {5}
    assert tools[-1].result == "paid 5"


# Agents that are tools


@attrs.frozen
class Place:
    """A typed answer."""

    where: str


def family(store, *child: object, tools=(), options=None) -> Agent:
    """An agent that asks another one, once."""
    scout = Agent(ScriptedModel(*child), tools=tools, name="scout")
    model = ScriptedModel(say("Let me ask.", call("scout", query="where?")), "It is there.")
    return Agent(model, tools=[scout.as_tool(**(options or {}))], store=store)


async def test_the_events_of_an_agent_reach_the_stream_of_its_caller(store):
    """Under its own run's id, whole, and between its start and its end."""
    lines = [say("I look.", call("look", at="x")), "Over there."]
    events, run = await told(family(store, *lines, tools=[look]), "go")
    child = f"{run.id}.t1.0"
    assert {event.run_id for event in events} == {run.id, child}
    assert "".join(event.text for event in of(events, TextDelta, child)) == "I look.Over there."
    assert "".join(event.text for event in of(events, TextDelta, run.id)) == "Let me ask.It is there."
    moves = [type(event.event).__name__ for event in of(events, StateChanged, child)]
    assert moves == ["Observed", "ToolsChosen", "ToolsReturned", "Continued", "Observed", "AnswerGiven"]
    calls = [(event.type.value, event.call_id) for event in of(events, ToolEvent, child)]
    assert calls == [
        ("tool_queued", "t1.0"),
        ("tool_started", "t1.0"),
        ("tool_completed", "t1.0"),
        ("queue_drained", ""),
    ]
    assert len(of(events, UsageReported, child)) == 2
    own = [n for n, event in enumerate(events) if event.run_id == child]
    start, *_, end = [n for n, event in enumerate(events) if isinstance(event, AgentEvent)]
    assert start < min(own) < max(own) < end
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_the_events_of_an_agent_below_an_agent_reach_the_stream(store):
    """However deep it is."""
    low = Agent(ScriptedModel("Deep."), name="low")
    mid = Agent(ScriptedModel(say("", call("low", query="?")), "Middle."), tools=[low.as_tool()], name="mid")
    model = ScriptedModel(say("", call("mid", query="?")), "High.")
    events, run = await told(Agent(model, tools=[mid.as_tool()], store=store), "go")
    texts = {event.run_id: event.text for event in events if isinstance(event, TextDelta)}
    assert set(texts) == {run.id, f"{run.id}.t1.0", f"{run.id}.t1.0.t1.0"}


async def test_agents_side_by_side_are_not_mixed_up(store):
    """A slow reader gets the pieces of each text together, and each with its own run."""
    first = Agent(ScriptedModel("a" * 2_000), name="first")
    second = Agent(ScriptedModel("b" * 2_000), name="second")
    model = ScriptedModel(say("", call("first", query="?"), call("second", query="?")), "done")
    agent = Agent(model, tools=[first.as_tool(), second.as_tool()], store=store)
    with anyio.fail_after(HANG_S):
        async with agent.stream("go", id="r") as stream:
            while not stream.run.is_over:
                await checkpoint()
            events = [event async for event in stream]
    for n, letter in enumerate("ab"):
        assert "".join(event.text for event in of(events, TextDelta, f"r.t1.{n}")) == letter * 2_000


async def test_an_agent_that_waits_is_told_as_paused(store):
    """It has not failed: it is started again, and completes, once somebody has decided."""
    agent = family(store, say("", call("pay", cents=5)), "Paid.", tools=[pay])
    events, run = await told(agent, "go")
    kinds = [event.type.value for event in of(events, AgentEvent, run.id)]
    assert kinds == ["agent_started", "agent_progress", "agent_paused"]
    paused = of(events, AgentEvent, run.id)[-1]
    assert (paused.success, paused.duration_s is not None) == (None, True)
    assert of(events, ToolEvent, run.id)[-2].type is ToolEventType.PAUSED
    (item,) = run.pending
    await agent.approve(item.run_id, item.call_id)
    events, run = await told(agent, run)
    last = of(events, AgentEvent, run.id)[-1]
    assert (last.type.value, last.success) == ("agent_completed", True)
    assert run.output == "It is there."


async def test_an_unwatched_agent_below_streams_nothing(store):
    """Where nobody watches the caller, the model of the agent is asked for a whole reply."""
    emits: list[object] = []

    class Noting(ScriptedModel):
        async def reply(self, request, emit=None):
            emits.append(emit)
            return await super().reply(request, emit)

    scout = Agent(Noting("Over there."), name="scout")
    model = ScriptedModel(say("", call("scout", query="where?")), "done")
    await Agent(model, tools=[scout.as_tool()], store=store).run("go")
    assert emits == [None]


async def test_the_partial_answer_is_the_callers_own(store):
    """What an agent below writes is no part of it."""
    scout = Agent(ScriptedModel('{"where": "wrong"}'), name="scout")
    model = ScriptedModel(say("", call("scout", query="?")), '{"where": "here"}')
    agent = Agent(model, tools=[scout.as_tool()], store=store, output_type=Place, output_mode="prompt")
    with anyio.fail_after(HANG_S):
        async with agent.stream("go") as stream:
            seen = [stream.partial async for _ in stream]
    assert {"where": "wrong"} not in seen
    assert seen[-1] == {"where": "here"}


# As JSON


def samples() -> list[StreamEvent]:
    """One event of each class."""
    where = {"run_id": "r", "turn": 1}
    run = begin_run(Header(id="r", prompt=(), created_at=0.0))
    tool_event = ToolEvent(type=ToolEventType.ERROR, kind=ToolKind.DIRECT, arguments={"a": [1]}, result="no", **where)
    return [
        StateChanged(state=State.THINK, event=Observed(), **where),
        TextDelta(attempt=1, text="x", **where),
        ThinkingDelta(attempt=1, text="x", **where),
        CallDelta(attempt=1, index=0, call_id="t1.0", name="look", arguments="{", **where),
        tool_event,
        AgentEvent(type=AgentEventType.PAUSED, call_id="t1.0", agent="scout", child_id="r.t1.0", limit=3, **where),
        UsageReported(usage=Usage(input_tokens=1), total=Usage(input_tokens=2), **where),
        BudgetWarning(limit="turns", used=4, of=5, **where),
        RunEnded(run=attrs.evolve(run, asks="Shall I?"), **where),
    ]


def test_every_event_of_a_stream_is_json():
    """Each class has the form: it says its type, its number, its run and its turn, and then its own fields."""
    assert {type(event) for event in samples()} == set(get_args(StreamEvent))
    forms = [event.to_dict() for event in samples()]
    for form in forms:
        assert json.loads(json.dumps(form)) == form
        assert list(form)[:4] == ["type", "seq", "run_id", "turn"]
    assert len({form["type"] for form in forms}) == len(forms)
    assert forms[4] == {
        "type": "tool_error",
        "seq": 0,
        "run_id": "r",
        "turn": 1,
        "call_id": "",
        "tool": "",
        "kind": "direct",
        "arguments": {"a": [1]},
        "message": "",
        "result": "no",
    }
    assert (forms[0]["state"], forms[0]["event"]) == ("think", Observed().to_dict())
    assert forms[-1]["pending"][0]["kind"] == "input"


async def test_the_events_of_a_run_are_json(store):
    """All of those that a run with an agent, a pause and a question brings along."""
    agent = family(store, say("", call("ask_user", question="who?")), "Ann.", tools=[ask_user])
    events, _ = await told(agent, "go")
    for event in events:
        form = event.to_dict()
        assert json.loads(json.dumps(form)) == form
