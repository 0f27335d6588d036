"""The tool `note`: what the model has noted is in its requests to the end, whatever a compaction drops."""

from __future__ import annotations

import json

import pytest

from agentfsm import Agent, Outcome, Settings, note, tool
from agentfsm.context import SlidingWindow
from agentfsm.core import events as e
from agentfsm.core.notes import Note
from agentfsm.planning import Planner
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.word_counter import WordCounter

pytestmark = pytest.mark.anyio

TOTAL = say("", call("note", key="total", value="17 EUR"))


@pytest.fixture(autouse=True)
def _words(monkeypatch):
    async def load(_name):
        return WordCounter()

    monkeypatch.setattr("agentfsm.tokens.load_counter", load)


@tool(read_only=True)
async def look(at: int) -> str:
    """Look."""
    return f"stone {at} " * 60


def looks(*numbers):
    return [say("", call("look", at=number)) for number in numbers]


def agent_with(*script, **options):
    model = ScriptedModel(*script)
    model.window_tokens = 700
    return Agent(model, tools=[note, look], context=[SlidingWindow()], settings=Settings(max_tokens=50), **options)


def closings(agent):
    """What stands at the end of each request, outside the history."""
    return [request.messages[-1].text if request.passing else "" for request in agent.model.requests]


async def test_a_note_is_shown_again_when_its_call_is_not(store):
    """From the compaction on, at the end of each request, with the reminder behind it; and in a replay."""
    agent = agent_with(TOTAL, *looks(*range(8)), "done", store=store, reminder="Be brief.")
    run = await agent.run("count")
    assert run.notes == {"total": Note(text="17 EUR", call_id="t1.0")}
    assert run.calls[0].outcome is Outcome.DONE
    events = await agent.history(run.id)
    shown = closings(agent)
    first = next(place for place, text in enumerate(shown) if "17 EUR" in text)
    assert 1 < first < 8
    assert set(shown[:first]) == {"Be brief."}
    assert all(text.startswith("[Working memory]") and text.endswith("\n\nBe brief.") for text in shown[first:])
    assert all("- total: 17 EUR" in text for text in shown[first:])
    assert len([event for event in events if isinstance(event, e.Reminded)]) == 1
    assert any(isinstance(event, e.Compacted) for event in events)
    assert (await agent.replay(run.id)).is_faithful


async def test_a_note_that_was_made_again_is_shown_by_its_call(store):
    """The newest call has the text, so nothing is repeated; a removed note is gone."""
    again = say("", call("note", key="total", value="18 EUR"))
    agent = agent_with(
        TOTAL, *looks(*range(8)), again, say("", call("note", key="total", value="")), "done", store=store
    )
    run = await agent.run("count")
    assert "17 EUR" in closings(agent)[-3]
    assert closings(agent)[-2:] == ["", ""]
    assert run.notes == {}


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [("", "x", "key: 1 to 100 characters"), ("k" * 101, "x", "1 to 100"), ("k", "v" * 301, "301 characters, and 300")],
)
async def test_a_note_that_is_too_long_is_refused(key, value, error):
    """The model is told, and nothing is noted."""
    agent = agent_with(say("", call("note", key=key, value=value)), "done")
    run = await agent.run("count")
    assert run.notes == {}
    assert error in run.errors[0].message


async def test_steps_of_a_plan_outlive_a_compaction(store):
    """A step may make a note, and the results of the plan are repeated in short when their note is dropped."""
    noted = {"id": 2, "tool": "note", "arguments": {"key": "n", "value": "two"}}
    steps = json.dumps({"steps": [{"id": 1, "tool": "look", "arguments": {"at": 99}}, noted]})
    agent = agent_with(*looks(*range(8)), "done", store=store, planner=Planner(model=ScriptedModel(steps)))
    run = await agent.run("count")
    assert run.notes == {"n": Note(text="two", call_id="p1.2")}
    assert "[Working memory]" not in closings(agent)[0]
    assert "- n: two" in closings(agent)[-1]
    assert '[x] 1. look {"at": 99}: stone 99' in closings(agent)[-1]


async def test_another_run_of_the_conversation_begins_without_notes():
    """Working memory is that of one task."""
    agent = agent_with(TOTAL, "17 EUR", "what?", store=MemoryStore())
    await agent.run("count", session="s")
    assert (await agent.run("and now?", session="s")).notes == {}
