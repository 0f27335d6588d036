"""Histories by chance, words for tokens, and a run of them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from hypothesis import strategies as st

from agentfsm import (
    AssistantMessage,
    ImagePart,
    Outcome,
    Run,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
)
from agentfsm.core import events as e
from agentfsm.core.header import Header
from agentfsm.core.messages import Message
from agentfsm.core.run import begin_run
from agentfsm.ports import CompactionBudget, Model, PolicyAsk, TokenCounter
from agentfsm.testing import ScriptedModel
from agentfsm.tokens.ledger import TokenLedger, count_message
from tests.support.word_counter import WordCounter

IMAGE = ImagePart(url="https://a.b/c.png", detail="low")


def user(text: str) -> UserMessage:
    """What the user says."""
    return UserMessage(parts=(TextPart(text=text),))


def turn(number: int, sizes: list[int], outcome: Outcome = Outcome.DONE, kind: str = "text") -> list[Message]:
    """An assistant message with a call for each size, and the results: each of so many words, or items of a list."""
    calls = tuple(ToolCall(id=f"t{number}.{place}", name="look", arguments="{}") for place in range(len(sizes)))
    results = [
        ToolResult(call_id=call.id, tool="look", outcome=outcome, content=content_of(call.id, size, kind))
        for call, size in zip(calls, sizes, strict=True)
    ]
    return [AssistantMessage(text=f"turn {number}", calls=calls), *results]


def content_of(name: str, size: int, kind: str) -> str:
    """A result: a text of so many words that begins with the name, a list of so many items, or what others say, too."""
    if kind == "list":
        return json.dumps([{"name": name, "at": at} for at in range(size)])
    return "the same for all " + "word " * size if kind == "same" else f"{name} " + "word " * size


SIZES = st.sampled_from([0, 1, 9, 30, 60, 120, 400])
TURNS = st.tuples(
    st.lists(SIZES, min_size=1, max_size=5),
    st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.TIMED_OUT]),
    st.sampled_from(["text", "list", "same"]),
)
WORDS = st.tuples(st.sampled_from(["user", "system", "assistant", "image", "ok"]), SIZES)
# Each the results of a turn, or a message of that kind and size.
GROUPS = st.lists(TURNS | WORDS, max_size=30) | st.lists(TURNS | WORDS, min_size=20, max_size=30)


def group_of(number: int, drawn: Any) -> list[Message]:
    """Return a group as messages."""
    if len(drawn) == 3:
        return turn(number, *drawn)
    kind, size = drawn
    text = f"{kind} {number} " + "word " * size
    match kind:
        case "user":
            return [user(text)]
        case "image":
            return [UserMessage(parts=(TextPart(text=text), IMAGE))]
        case "system":
            return [SystemMessage(text=text)]
        case "ok":
            return [AssistantMessage(text="OK, got it.")]
    return [AssistantMessage(text=text)]


def history_of(groups: list[Any]) -> tuple[Message, ...]:
    """Return the groups as one history that a provider takes: somebody else than the model begins."""
    messages = [message for number, drawn in enumerate(groups, 1) for message in group_of(number, drawn)]
    while messages and isinstance(messages[0], AssistantMessage | ToolResult):
        del messages[0]
    return tuple(messages)


def run_of(messages: tuple[Message, ...], *events: e.Event) -> Run:
    """Return a run with exactly these messages, of which the first user's is the task, after these events."""
    header = Header(id="r", prompt=(), created_at=0.0)
    run = begin_run(header)
    shown = run.apply(e.Observed())
    fields = shown.__dict__ | {"messages": messages}
    after = object.__new__(Run)
    object.__setattr__(after, "__dict__", fields)
    return after.fold(events)


def tally_of(run: Run, counter: TokenCounter) -> TokenLedger:
    """Return a count of the run."""
    tally = TokenLedger(counter)
    tally.update(run)
    return tally


async def nobody(_model: Model | None, _instructions: str, _question: str, _tokens: int) -> str:
    """Stand for a model that is not to be asked."""
    raise AssertionError("no model is asked here")


def room_of(
    run: Run, tokens: int, limit: int | None = None, ask: PolicyAsk = nobody, model: Model | None = None
) -> CompactionBudget:
    """Return a room in words."""
    return CompactionBudget(
        target_tokens=tokens,
        limit_tokens=tokens * 2 if limit is None else limit,
        history=run.messages,
        model=model or ScriptedModel(),
        count=partial(count_message, counter=WordCounter()),
        ask=ask,
    )


def newest_group(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the last message, or the call whose results come last, with them."""
    start = len(messages) - 1
    while isinstance(messages[start], ToolResult):
        start -= 1
    return messages[start:]
