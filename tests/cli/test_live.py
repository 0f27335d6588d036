"""What the live tree draws, of runs at rest: the terminal's tests only see what stays long enough."""

import io

from rich.console import Console

from agentfsm import Agent, AgentEvent, AgentEventType, ToolEvent, ToolEventType, tool
from agentfsm.cli.render.live import LiveView
from agentfsm.testing import ScriptedModel, call, say


@tool(requires_approval=True, describe=lambda a: f"Pay {a.cents} cents.")
def pay(cents: int) -> str:
    """Pay an amount."""
    return f"paid {cents}"


@tool(read_only=True)
def look() -> str:
    """Look around."""
    return "nothing"


def drawn(view, run, *events):
    """Return what the view draws after these events."""
    for event in events:
        view.on_event(event, run)
    view.end(run)
    console = Console(file=io.StringIO(), width=120)
    console.print(view._render())
    return console.file.getvalue()


def asking():
    return Agent(ScriptedModel(say("", call("pay", cents=5))), tools=[pay], name="payer")


def told(kind, **details):
    return ToolEvent(type=kind, call_id="t1.0", tool="payer", **details)


def agent_told(kind, turn):
    return AgentEvent(type=kind, run_id="r", call_id="t1.0", agent="payer", child_id="r.t1.0", turn=turn, limit=3)


async def test_a_call_that_is_paused_does_not_run():
    """Though it had begun; below it stands what it waits for, and no more how far its agent had come."""
    agent = Agent(ScriptedModel(say("", call("payer", query="Pay."))), tools=[asking().as_tool()])
    run = await agent.run("Pay.", id="r")
    events = told(ToolEventType.STARTED), agent_told(AgentEventType.PROGRESS, 1), told(ToolEventType.PAUSED)
    text = drawn(LiveView(), run, *events)
    assert "paused" in text
    assert "running" not in text
    assert "waits for the approval of t1.0 of run r.t1.0, pay" in text
    assert "turn 1 of 3" not in text


async def test_what_a_call_asks_stands_with_it():
    """The description of what it will do."""
    run = await asking().run("Pay.")
    assert "asked: Pay 5 cents." in drawn(LiveView(), run)


async def test_a_sub_agent_is_drawn_below_its_call():
    """The newest of what is known of it."""
    agent = Agent(ScriptedModel(say("", call("payer", query="Pay."))), tools=[asking().as_tool()])
    run = agent.start("Pay.", id="r")
    while not run.open:
        run = await agent.step(run)
    progress = [agent_told(AgentEventType.PROGRESS, turn) for turn in (1, 2)]
    text = drawn(LiveView(), run, told(ToolEventType.STARTED), *progress)
    lines = [line.rstrip() for line in text.splitlines()]
    at = next(n for n, line in enumerate(lines) if line.endswith("running"))
    assert lines[at + 1].endswith("payer, turn 2 of 3")
    assert "turn 1 of 3" not in text


async def test_a_choice_among_many_tools_is_drawn():
    """While the model thinks, and the first line of its turn."""
    names = [f"look_{n}" for n in range(25)]
    agent = Agent(ScriptedModel("Done."), tools=[tool(name=name, read_only=True)(look.function) for name in names])
    run = agent.start("Look at number 7.")
    while run.offered is None:
        run = await agent.step(run)
    assert "20 tools offered: look_" in drawn(LiveView(), run)
