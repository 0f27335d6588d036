"""The reminder: a note at the end of each request, which is not part of the history and of no cached prefix."""

from __future__ import annotations

import json
from itertools import pairwise

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    AssistantMessage,
    MisuseError,
    RunContext,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    tool,
)
from agentfsm.core import events as e
from agentfsm.models.anthropic import wire as anthropic
from agentfsm.models.openai import chat_wire, responses_wire
from agentfsm.planning import Planner
from agentfsm.ports import Request
from agentfsm.prompts import PromptTemplate
from agentfsm.testing import ScriptedModel, call, say
from tests.support.wire_rules import check_wires

pytestmark = pytest.mark.anyio


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "17"


LOOKS = [say("", call("look")), say("", call("look")), "done"]


def agent_with(reminder, *script, **options):
    return Agent(ScriptedModel(*(script or LOOKS)), tools=[look], reminder=reminder, **options)


async def reminded(agent, run):
    return [event for event in await agent.history(run.id) if isinstance(event, e.Reminded)]


async def test_it_ends_each_request_and_is_in_no_history(store):
    agent = agent_with("Answer in JSON.", store=store)
    run = await agent.run("go")
    note = SystemMessage(text="Answer in JSON.")
    requests = agent.model.requests
    assert [request.messages[-1] for request in requests] == [note] * 3
    assert [request.messages[:-1].count(note) for request in requests] == [0] * 3
    assert [request.passing for request in requests] == [1] * 3
    assert note not in run.messages
    assert [event.text for event in await reminded(agent, run)] == ["Answer in JSON."]  # once, since it never changes


async def test_a_function_is_asked_in_each_turn_and_changes_are_recorded(store):
    agent = agent_with(lambda run: f"Turn {run.turn + 1} of 3." if run.turn != 1 else "", store=store)
    run = await agent.run("go")
    assert [event.text for event in await reminded(agent, run)] == ["Turn 1 of 3.", "", "Turn 3 of 3."]
    assert [request.passing for request in agent.model.requests] == [1, 0, 1]
    assert run.reminder == "Turn 3 of 3."


async def test_a_replay_uses_the_recorded_text(store):
    """So it is faithful whatever the function says now; another text in the journal would be another request."""
    agent = agent_with(lambda run: f"Turn {run.turn + 1}", store=store)
    run = await agent.run("go")
    assert (await agent.replay(run.id)).checked == 3
    assert (await agent.with_(reminder="").replay(run.id)).is_faithful
    plain = Agent(ScriptedModel(*LOOKS), tools=[look])
    digests = [
        [event.request for event in await each.history(each_run.id) if isinstance(event, e.Answered)]
        for each, each_run in ((agent, run), (plain, await plain.run("go")))
    ]
    assert all(one.split("-")[0] != other.split("-")[0] for one, other in zip(*digests, strict=True))
    assert [one.split("-")[1] for one in digests[0]] == [other.split("-")[1] for other in digests[1]]


async def test_a_function_that_never_gives_the_same_is_asked_once_in_a_turn(store):
    texts = iter(map(str, range(100)))
    agent = agent_with(lambda _run: next(texts), store=store)
    run = await agent.run("go")
    assert [event.text for event in await reminded(agent, run)] == ["0", "1", "2"]


async def test_another_worker_goes_on_with_the_recorded_text_of_the_turn(store):
    asked = []
    agent = agent_with(lambda run: asked.append(run.turn) or "old", store=store)
    run = agent.start("go")
    while not run.reminder:
        run = await agent.step(run)
    again = agent.with_(reminder=lambda run: f"new {run.turn}")
    await again.resume(run.id)
    assert [request.messages[-1].text for request in agent.model.requests] == ["old", "new 1", "new 2"]


async def test_a_prompt_is_recorded_with_its_version(store):
    today = PromptTemplate(
        name="today", version="1.2", text="No refunds over {{most}} euro.", variables={"most": "text"}
    )
    agent = agent_with(lambda _run: today.render(most="50"), store=store)
    [event] = await reminded(agent, await agent.run("go"))
    assert (event.text, event.prompts) == ("No refunds over 50 euro.", (today.reference,))
    fixed = PromptTemplate(name="fixed", version="1.0", text="Be brief.")
    agent = agent_with(fixed)
    assert (await reminded(agent, await agent.run("go")))[0].text == "Be brief."


async def test_values_that_are_no_text_are_refused():
    with pytest.raises(MisuseError, match=r"the function reminder= returned int"):
        await agent_with(lambda _run: 5).run("go")
    with pytest.raises(MisuseError, match=r"reminder="):
        agent_with(5)
    with pytest.raises(MisuseError, match=r"reminder=: prompt a 1 has the variables x"):
        await agent_with(PromptTemplate(name="a", version="1", text="{{x}}", variables={"x": "text"})).run("go")


# The wires


def history(turns):
    """Return a history of so many turns with a call each."""
    messages = [UserMessage(parts=(TextPart(text="go"),))]
    for turn in range(1, turns + 1):
        asked = ToolCall(id=f"t{turn}.0", name="look", arguments="{}")
        messages += [
            AssistantMessage(text=f"look {turn}", calls=(asked,)),
            ToolResult(call_id=asked.id, tool="look", outcome="done", content=f"result {turn}", index=0),
        ]
    return messages


HISTORY = history(3)


def request_of(turns):
    """Return the request after so many turns, with a note of its own."""
    messages = (*HISTORY[: 1 + 2 * turns], SystemMessage(text=f"note {turns}"))
    return Request(instructions="Be brief.", messages=messages, passing=1)


def blocks(body):
    """Return the content blocks of a request to Anthropic, with the role of each."""
    return [(message["role"], block) for message in json.loads(body)["messages"] for block in message["content"]]


def unmarked(block):
    """Return a block with its role, without the mark."""
    return block[0], {name: value for name, value in block[1].items() if name != "cache_control"}


def test_anthropics_cache_ends_before_the_note():
    """What is marked in one request is the beginning of the next, whatever the notes say."""
    cache = anthropic.build_encoding_cache()
    bodies = [
        blocks(anthropic.encode(request_of(turns), model="m", streamed=False, encoding_cache=cache))
        for turns in (1, 2, 3)
    ]
    for turns, body in enumerate(bodies, 1):
        role, last = body[-1]
        assert (role, last) == ("user", {"type": "text", "text": f"<system>note {turns}</system>"})
        assert "cache_control" in body[-2][1]
    for before, after in pairwise([[unmarked(each) for each in body] for body in bodies]):
        assert after[: len(before) - 1] == before[:-1]
    fresh = anthropic.encode(request_of(3), model="m", streamed=False)
    assert blocks(fresh) == bodies[-1]


def encode_chat(request, cache):
    body = chat_wire.encode(request, model="m", limit_field="max_tokens", streamed=False, encoding_cache=cache)
    return json.loads(body)["messages"]


def encode_responses(request, cache):
    return json.loads(responses_wire.encode(request, model="m", streamed=False, encoding_cache=cache))["input"]


@pytest.mark.parametrize(("wire", "encode"), [(chat_wire, encode_chat), (responses_wire, encode_responses)])
def test_openais_prefix_stays_the_same(wire, encode):
    """The note is encoded behind the cached history, which the next request goes on from."""
    cache = wire.build_encoding_cache()
    bodies = [encode(request_of(turns), cache) for turns in (1, 2, 3)]
    for before, after in pairwise(bodies):
        assert after[: len(before) - 1] == before[:-1]
        assert "note" in str(before[-1])
    [(known, _text)] = cache.messages.entries.values()
    assert known == tuple(HISTORY)


def test_a_dialect_that_sees_neighbours_is_encoded_with_them():
    """The media of results stand behind the last one, so the note cannot be encoded by itself."""
    cache = chat_wire.build_encoding_cache(dialect=attrs.evolve(chat_wire.OPENAI, sees_neighbours=True))
    assert encode_chat(request_of(2), cache) == encode_chat(request_of(2), chat_wire.build_encoding_cache())


def test_all_wires_accept_the_note():
    check_wires((*HISTORY, SystemMessage(text="note")), "Be brief.")


async def test_a_run_of_many_turns_with_a_note_is_over_in_each_loop(anyio_backend):
    agent = agent_with(lambda run: f"{run.turn}")
    with anyio.fail_after(60):
        assert (await agent.run("go")).output == "done"


async def by_context(ctx: RunContext[list[str]], run) -> str:
    """Return the next text of the dependencies."""
    await checkpoint()
    return f"{ctx.deps.pop(0)} {run.turn} {ctx.turn}"


async def test_an_async_function_of_the_context_is_asked_once_a_turn(store):
    """With the dependencies of the execution; the journal has what it returned."""
    agent = Agent(ScriptedModel(say("", call("look")), "17."), tools=[look], reminder=by_context, store=store)
    run = await agent.run("go", deps=["one", "two"])
    assert [request.messages[-1].text for request in agent.model.requests] == ["one 0 1", "two 1 2"]
    texts = [event.text for event in await agent.history(run.id) if isinstance(event, e.Reminded)]
    assert texts == ["one 0 1", "two 1 2"]
    assert (await agent.replay(run.id)).is_faithful


async def test_the_steps_of_a_plan_may_change_the_note():
    """The planner is shown it before the plan, and the model as it is after the steps."""
    plan = '{"steps": [{"id": 1, "tool": "look", "arguments": {}}]}'
    agent = Agent(
        ScriptedModel(plan, "17."), tools=[look], planner=Planner(), reminder=lambda run: f"{len(run.calls)} calls made"
    )
    await agent.run("go")
    planned, turn = agent.model.requests
    assert planned.messages[-3].text == "0 calls made"
    assert turn.messages[-1].text == "1 calls made"
