"""The view of a run: the parts of its next request, of which the request is a rendering."""

from __future__ import annotations

import pytest

from agentfsm import Agent, Label, tool
from agentfsm.core.view_parts import ViewPart, ViewSource
from agentfsm.engine.deciders import recall, window
from agentfsm.guards import exit_filter
from agentfsm.memory import Memory
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tokens.ledger import read_text

pytestmark = pytest.mark.anyio


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "17"


@pytest.fixture
def seen(monkeypatch):
    """Return the parts of the view and the request of each turn, as the engine builds them."""
    views: list[tuple[tuple[ViewPart, ...], int]] = []

    def build(execution):
        view = build_view(execution)
        ledger = execution.ledger
        ledger.update(view.run)
        views.append((view.parts, view.measure_overhead() + ledger.shown_tokens))
        return view

    build_view = window.build_view
    for user in (recall, window):
        monkeypatch.setattr(user, "build_view", build)
    return views


async def test_each_part_of_a_request_has_its_source_labels_and_tokens(seen, tmp_path):
    """In the order of the request, whose text they make up; and their tokens are those that the engine counts."""
    memory = Memory(tmp_path / "memory.db")
    await memory.for_(user="ann").remember("Ann drinks green tea")
    await memory.for_(user="ann").remember("Ann likes short answers", kind="preference")
    model = ScriptedModel(say("", call("look")), "Green.")
    agent = Agent(
        model,
        instructions="Answer.",
        tools=[look],
        memory=memory,
        guards=[exit_filter()],
        reminder="Be brief.",
    )
    async with agent:
        await agent.run("tea?", user="ann")
    await memory.aclose()
    del seen[:-2]  # with which the memory was searched
    first, second = seen
    fixed = [ViewSource.TOOLS, ViewSource.AGENT, ViewSource.GUARDS]
    asked = [*fixed, ViewSource.PROFILE, ViewSource.HISTORY, ViewSource.MEMORY]
    assert [part.source for part in first[0]] == [*asked, ViewSource.NOTE]
    assert [part.source for part in second[0]] == [*asked, ViewSource.HISTORY, ViewSource.HISTORY, ViewSource.NOTE]
    assert "Ann likes short answers" in first[0][3].text
    assert "Ann drinks green tea" in first[0][5].text
    assert Label.USER_DATA in first[0][3].labels
    assert Label.USER_DATA in first[0][5].labels
    for (parts, counted), request in zip(seen, model.requests, strict=True):
        assert sum(part.tokens for part in parts) == counted
        assert request.instructions == f"{parts[1].text}\n\n{parts[2].text}"
        assert [part.text for part in parts[3:-1]] == list(map(read_text, request.messages[:-1]))
        assert parts[-1].text == request.messages[-1].text


async def test_equal_beginnings_have_equal_digests(seen):
    """Up to the part that changed, and not behind it: a note at the end costs no prefix, other instructions all."""
    texts = iter("abc")
    agent = Agent(ScriptedModel(say("", call("look")), "17."), tools=[look], reminder=lambda _run: next(texts))
    await agent.run("go")
    await agent.with_(instructions="Be kind.", model=ScriptedModel("17.")).run("go")
    one, two, other = [[part.prefix for part in parts] for parts, _ in seen]
    assert one[:-1] == two[: len(one) - 1]
    assert one[-1] not in two
    assert other[0] == one[0]
    assert not {*other[1:]} & {*one, *two}
