"""Thinking that a provider binds to all that came before it, and reasoning that another model cannot read."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, AssistantMessage, Limits, note, tool
from agentfsm.core import events as e
from agentfsm.memory import Memory
from agentfsm.models import Anthropic, OpenAIResponses, Router, find_profile
from agentfsm.stores import MemoryStore
from agentfsm.testing import LocalServer, WireReply, call, say
from agentfsm.testing.models import Line

BOUND = "claude-fable-5-2"
MISMATCH = (
    "messages.1.content.0: Invalid `signature` in `thinking` block. The block is bound to a different conversation."
)


@tool(read_only=True)
async def look(at: int) -> str:
    """Look there."""
    return f"saw {at} " + "much " * 400


@tool(read_only=True)
async def turn(at: int) -> str:
    """Turn there."""
    return f"turned {at}"


def see(at: int) -> Line:
    """Return a reply that looks somewhere."""
    return say("", call("look", at=at))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if key != "cache_control"}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _sign(body: dict[str, Any], before: list[Any]) -> str:
    seen = [body.get("system"), body.get("tools"), before]
    return sha256(json.dumps(_plain(seen), sort_keys=True).encode()).hexdigest()


class Binding:
    """A server that refuses thinking whose prefix has changed, as Anthropic does, and thinks before each reply."""

    def __init__(self, *replies: str | Line) -> None:
        self.replies = list(replies)
        self.signed: dict[str, str] = {}
        self.shown: list[int] = []

    def __call__(self, body: dict[str, Any]) -> WireReply:
        """Refuse the request, or answer it with the next reply."""
        before: list[Any] = []
        thoughts = 0
        for message in body["messages"]:
            for block in message["content"]:
                if block["type"] == "thinking":
                    thoughts += 1
                    if self.signed[block["thinking"]] != _sign(body, before):
                        return WireReply(status=400, error=MISMATCH)
                before.append([message["role"], block])
        self.shown.append(thoughts)
        thought = f"Thought {len(self.shown)}."
        self.signed[thought] = _sign(body, before)
        return WireReply(self.replies.pop(0), thinking=thought)


async def list_events(agent: Agent[Any], *runs: Any, kind: type = e.AttemptFailed) -> list[Any]:
    """Return the events of a kind in the journals of runs; by default the failed attempts."""
    found = [each.event for run in runs async for each in agent.events(run.id)]
    return [event for event in found if isinstance(event, kind)]


async def test_thinking_is_sent_back_while_all_before_it_is_unchanged() -> None:
    """In a run and in the next one of the session."""
    server = Binding(see(1), see(2), "Done.", "Again.")
    with LocalServer(server) as local:
        async with Agent(Anthropic(BOUND, base_url=local.base_url), tools=[look], store=MemoryStore()) as agent:
            first = await agent.run("Look.", session="s")
            second = await agent.run("And?", session="s")
            assert not await list_events(agent, first, second)
    assert server.shown == [0, 1, 2, 3]


def _change_instructions(number: int) -> dict[str, Any]:
    return {"tools": [look], "instructions": f"Today is day {number}."}


def _add_a_tool(number: int) -> dict[str, Any]:
    return {"tools": [look, turn][: number + 1]}


@pytest.mark.parametrize("change", [_change_instructions, _add_a_tool])
async def test_thinking_after_a_change_is_left_out_and_the_session_lives(change: Any) -> None:
    """That which is thought after the change is sent back again."""
    server = Binding(see(1), "One.", see(2), "Two.")
    with LocalServer(server) as local:
        async with Agent(Anthropic(BOUND, base_url=local.base_url), store=MemoryStore()) as agent:
            for number in (0, 1):
                run = await agent.with_(**change(number)).run("Look.", session="s")
                assert not await list_events(agent, run)
    assert server.shown == [0, 1, 0, 1]


async def test_a_compacted_history_is_accepted() -> None:
    """The replies that are kept after a summary have no thinking."""
    server = Binding(*map(see, range(8)), "Done.", "Again.")
    with LocalServer(server) as local:
        model = Anthropic(BOUND, base_url=local.base_url, window_tokens=8_000)
        async with Agent(model, tools=[look], store=MemoryStore()) as agent:
            run = await agent.run("Look.", session="s")
            again = await agent.run("And?", session="s")
            assert await list_events(agent, run, kind=e.Compacted)
            assert not await list_events(agent, run, again)


async def test_a_tool_that_is_withdrawn_and_a_last_answer_without_tools_are_accepted() -> None:
    """Both change the tools in the middle of a run."""
    is_open = True

    @tool(read_only=True, enabled=lambda _: is_open)
    def door() -> str:
        """Go through."""
        nonlocal is_open
        is_open = False
        return "closed behind you"

    server = Binding(say("", call("door")), see(1), "Enough.")
    with LocalServer(server) as local:
        model = Anthropic(BOUND, base_url=local.base_url)
        limits = Limits(turns=3)
        async with Agent(model, tools=[look, door], limits=limits, last_answer=True, store=MemoryStore()) as agent:
            run = await agent.run("Go.")
            assert not await list_events(agent, run)
    assert run.partial == "Enough."


async def _count_kept(*replies: str | Line, prompts: tuple[str, ...] = ("Look.",), **options: Any) -> list[int]:
    """Return how many thoughts each request of a session sent back. Request n could send n, counted from 0."""
    server = Binding(*replies)
    window = {"window_tokens": options.pop("window_tokens")} if "window_tokens" in options else {}
    with LocalServer(server) as local:
        model = Anthropic(BOUND, base_url=local.base_url, **window)
        async with Agent(model, store=MemoryStore(), **{"tools": [look], **options}) as agent:
            runs = [await agent.run(prompt, session="s", user="ann") for prompt in prompts]
            assert not await list_events(agent, *runs)
    assert not server.replies
    return server.shown


@pytest.mark.parametrize(
    "reminder", ["Be brief.", lambda run: f"Turn {run.turn + 1}.", lambda run: "Odd." * (run.turn % 2)]
)
async def test_thinking_outlives_reminders(reminder: Any) -> None:
    """A reminder that a reply was written under stays before it, also in the next run, while others follow it."""
    kept = await _count_kept(see(1), see(2), "Done.", see(3), "Again.", prompts=("Look.", "And?"), reminder=reminder)
    assert kept == [0, 1, 2, 3, 4]


async def test_thinking_outlives_the_request_for_a_last_answer() -> None:
    """The tools stay defined, and may not be called."""
    server = Binding(see(1), see(2), "Enough.")
    with LocalServer(server) as local:
        model = Anthropic(BOUND, base_url=local.base_url)
        async with Agent(model, tools=[look], limits=Limits(turns=3), last_answer=True) as agent:
            run = await agent.run("Look.")
    assert run.partial == "Enough."
    assert server.shown == [0, 1, 2]
    bodies = [each.body for each in local.requests]
    assert [body["tools"] for body in bodies] == [bodies[0]["tools"]] * 3
    assert [body.get("tool_choice") for body in bodies] == [None, None, {"type": "none"}]


async def test_thinking_outlives_recalled_items(tmp_path: Path) -> None:
    """They are in the history, behind the input that they were found for."""
    memory = Memory(tmp_path / "memory.db")
    for text in ("Ann drinks tea", "Ann lives in Porto"):
        await memory.for_(user="ann").remember(text)
    kept = await _count_kept(see(1), "Tea.", see(2), "Porto.", prompts=("tea?", "Where lives Ann?"), memory=memory)
    await memory.aclose()
    assert kept == [0, 1, 2, 3]


async def test_thinking_outlives_what_a_compaction_hides() -> None:
    """Each of three compactions loses them once. The notes are shown once after each, and again only after a change."""
    first = say("", call("note", key="total", value="17 EUR"))
    script = [first, *map(see, range(13)), "Done.", "Again."]
    kept = await _count_kept(*script, prompts=("Look.", "And?"), tools=[note, look], window_tokens=8_000)
    assert [after for before, after in pairwise(kept) if after != before + 1] == [0, 0, 0]


def _refuse_thinking(body: dict[str, Any]) -> WireReply | Line:
    if any(block["type"] == "thinking" for message in body["messages"] for block in message["content"]):
        return WireReply(status=400, error=MISMATCH)
    results = [block for message in body["messages"] for block in message["content"] if block["type"] == "tool_result"]
    return say("Done.") if results else WireReply(see(1), thinking="Hm.")


async def test_a_refusal_is_repaired_once_and_journalled() -> None:
    """A provider that refuses reasoning for a reason of its own gets the request once more, without any."""
    with LocalServer(_refuse_thinking) as local:
        limits = Limits(model_retries=0)
        async with Agent(Anthropic("claude-opus-4-8", base_url=local.base_url), tools=[look], limits=limits) as agent:
            run = await agent.run("Look.")
            (failed,) = await list_events(agent, run)
    assert run.output == "Done."
    assert "reasoning of an earlier reply" in failed.error
    assert failed.usage.tokens == 0
    assert len(local.requests) == 3


async def test_a_refusal_without_reasoning_ends_the_run() -> None:
    """It is not sent a third time."""
    with LocalServer(lambda _: WireReply(status=400, error=MISMATCH)) as local:
        async with Agent(Anthropic(BOUND, base_url=local.base_url)) as agent:
            run = await agent.run("Look.")
    assert run.stop_reason == "model_error"
    assert len(local.requests) == 2


async def test_reasoning_is_sent_to_the_model_that_wrote_it_and_to_no_other() -> None:
    """At one address, within a run: a model without reasoning gets text and calls, and the first its own again."""

    def answer(body: dict[str, Any]) -> WireReply:
        seen = [each for each in body["input"] if each["type"] == "reasoning"]
        assert not seen or body["model"] == "gpt-5"
        calls = sum(each["type"] == "function_call" for each in body["input"])
        return WireReply(say("Done.") if calls == 3 else see(calls), thinking="Hm.")

    with LocalServer(answer) as local:
        models = {name: OpenAIResponses(name, base_url=local.base_url) for name in ("gpt-5", "gpt-4.1")}
        model = Router(lambda request: "gpt-4.1" if len(request.messages) == 3 else "gpt-5", models)
        async with Agent(model, tools=[look], store=MemoryStore()) as agent:
            run = await agent.run("Look.")
    assert run.output == "Done."
    asked = [(each.body["model"], str(each.body["input"]).count("encrypted_content")) for each in local.requests]
    assert asked == [("gpt-5", 0), ("gpt-4.1", 0), ("gpt-5", 1), ("gpt-5", 2)]
    writers = [each.native.model for each in run.messages if isinstance(each, AssistantMessage) and each.native]
    assert writers == ["gpt-5", "gpt-4.1", "gpt-5", "gpt-5"]


@pytest.mark.parametrize(
    ("model", "is_bound"),
    [
        ("claude-fable-5-2", True),
        ("anthropic/claude-opus-5-5-20261001", True),
        ("claude-sonnet-6", True),
        ("claude-fable-5", False),
        ("claude-opus-4-8", False),
        ("claude-sonnet-4-20250514", False),
        ("claude-3-5-haiku-latest", False),
        ("deepseek-v4", False),
    ],
)
def test_only_newer_models_bind_their_thinking(model: str, is_bound: bool) -> None:
    """Others keep all of it, whatever changes."""
    assert find_profile(model).binds_thinking is is_bound
