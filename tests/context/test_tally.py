"""Counting: each message once, along a history that grows and of what a compaction makes of it."""

import json
from types import MappingProxyType

import attrs
import pytest
from hypothesis import given

from agentfsm import (
    AssistantMessage,
    AudioPart,
    FilePart,
    ImagePart,
    MisuseError,
    Outcome,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
)
from agentfsm.core import events as e
from agentfsm.core.history import Removed, Span
from agentfsm.core.messages import NativeReply
from agentfsm.ports import ToolDefinition
from agentfsm.tokens.estimate import EstimatedCounter
from agentfsm.tokens.ledger import (
    BYTE_COUNTER,
    BYTES_PER_TOKEN,
    CALL_TOKENS,
    IMAGE_TOKENS,
    LOW_IMAGE_TOKENS,
    MESSAGE_TOKENS,
    MIN_MEDIA_TOKENS,
    PART_TOKENS,
    TokenLedger,
    count_message,
)
from agentfsm.tokens.tool_prompts import count_tools
from tests.support.histories import GROUPS, group_of, history_of, run_of, tally_of, turn, user
from tests.support.wire_rules import anthropic_body, openai_of, responses_of
from tests.support.word_counter import WordCounter


@given(groups=GROUPS)
def test_a_history_that_grows_counts_each_message_once(groups):
    """However often it is followed; and a head whose messages are shown whole costs only its note."""
    words, messages = WordCounter(), ()
    tally = TokenLedger(words)
    for number, drawn in enumerate([("user", 3), *groups], 1):
        messages = (*messages, *group_of(number, drawn))
        tally.update(run_of(messages))
        tally.update(run_of(messages))
    pieces = [1 + 2 * len(m.calls) if isinstance(m, AssistantMessage) else 1 for m in messages]
    assert words.asked.total() == sum(pieces)
    assert tally.shown_tokens == sum(count_message(message, WordCounter()) for message in messages)
    if len(messages) < 3:
        return
    head = (Span(start=0, end=1), Removed(count=len(messages) - 2))
    cut = run_of(messages, e.Compacted(start=len(messages) - 1, head=head, tokens_before=9, tokens_after=8, why=""))
    tally.update(cut)
    assert words.asked.total() == sum(pieces) + 1
    assert tally.shown_tokens == sum(count_message(message, WordCounter()) for message in cut.shown)


def test_bytes_are_a_bound_until_there_is_a_vocabulary():
    """They say a third of their number is tokens; a vocabulary counts all again, and shortened results as shown."""
    history = (user("task"), *turn(0, [50]), user("more"))
    run = run_of(
        history, e.Compacted(start=3, head=(Span(start=0, end=3, chars=60),), tokens_before=9, tokens_after=8, why="")
    )
    tally = TokenLedger()
    tally.update(run)
    assert tally.shown_tokens == sum(count_message(message, BYTE_COUNTER) for message in run.shown)
    assert tally.request_tokens == tally.shown_tokens // BYTES_PER_TOKEN
    list(tally.recount_in_batches(run, WordCounter()))
    assert (
        tally.request_tokens
        == tally.shown_tokens
        == sum(count_message(message, WordCounter()) for message in run.shown)
    )


@given(groups=GROUPS)
def test_no_counter_exceeds_the_bound(groups):
    """That a byte holds at most one token is what makes skipping the vocabulary safe."""
    for message in history_of(groups):
        assert count_message(message, EstimatedCounter()) <= count_message(message, BYTE_COUNTER)


def test_a_lone_surrogate_has_three_bytes():
    """It is sent as U+FFFD."""
    assert BYTE_COUNTER.count("a\ud800中") == 7


def test_all_that_a_message_carries_is_counted():
    """Calls count with their ids, names and arguments; results as the model reads them; images at a flat rate."""
    call = ToolCall(id="t1.0", name="look", arguments='{"at": 1}', key="k")
    said = AssistantMessage(text="two words", calls=(call, call))
    assert count_message(said, WordCounter()) == MESSAGE_TOKENS + 2 + 2 * (CALL_TOKENS + 3)
    result = ToolResult(call_id="t1.0", tool="look", outcome=Outcome.DONE, content="x" * 900, shown_chars=100)
    assert count_message(result, BYTE_COUNTER) == MESSAGE_TOKENS + CALL_TOKENS + len(result.text) < 300
    url = "data:image/png;base64," + "A" * 10_000
    seen = UserMessage(parts=(TextPart(text="see"), ImagePart(url=url), ImagePart(url=url, detail="low")))
    assert count_message(seen, WordCounter()) == MESSAGE_TOKENS + 1 + IMAGE_TOKENS + LOW_IMAGE_TOKENS


def test_thinking_that_goes_back_counts():
    """By its length, whatever a vocabulary finds in what is sealed; a short one is in what is said already."""
    thought = NativeReply(provider="anthropic", content="x" * 3_000)
    said = AssistantMessage(text="two words", native=thought)
    assert count_message(said, BYTE_COUNTER) == MESSAGE_TOKENS + 3_000
    assert count_message(said, WordCounter()) == MESSAGE_TOKENS + 3_000 // BYTES_PER_TOKEN
    short = attrs.evolve(said, native=attrs.evolve(thought, content="x"))
    assert count_message(short, WordCounter()) == MESSAGE_TOKENS + 2


def test_parts_of_results_count_like_those_of_the_user():
    """And with what a wire says of each."""
    url = "data:image/png;base64," + "A" * 10_000
    parts = (ImagePart(url=url), ImagePart(url=url, detail="low"), FilePart(url="https://a.test/a.pdf"))
    bare = ToolResult(call_id="t1.0", tool="look", outcome=Outcome.DONE, content="seen")
    held = IMAGE_TOKENS + LOW_IMAGE_TOKENS + MIN_MEDIA_TOKENS + 3 * PART_TOKENS
    assert count_message(attrs.evolve(bare, parts=parts), WordCounter()) == count_message(bare, WordCounter()) + held


@pytest.mark.parametrize("wire", [openai_of, responses_of, anthropic_body])
def test_what_a_wire_says_of_a_part_is_in_its_count(wire):
    """Also where it says that the model cannot be shown it: bytes are a bound of tokens, without the data."""
    call = ToolCall(id="t12345.67", name="a" * 64, arguments="{}")
    parts = (AudioPart(url="https://a.test/a.wav"), ImagePart(url="https://a.test/a.png"))
    result = ToolResult(call_id=call.id, tool=call.name, outcome=Outcome.DONE, content="seen")
    sizes = [
        len(json.dumps(wire([user("go"), AssistantMessage(calls=(call,)), attrs.evolve(result, parts=held)])))
        for held in ((), parts)
    ]
    assert sizes[1] - sizes[0] < len(parts) * PART_TOKENS * BYTES_PER_TOKEN


def test_tools_count_as_the_json_they_are_sent_as():
    """Schemas may be read-only mappings; no tools cost nothing."""
    schema = MappingProxyType({"type": "object", "properties": MappingProxyType({})})
    tool = ToolDefinition(name="look", description="看", parameters=schema)
    text = '[{"name": "look", "description": "看", "parameters": {"type": "object", "properties": {}}}]'
    assert count_tools([tool], BYTE_COUNTER) == len(text.encode())
    assert count_tools([], BYTE_COUNTER) == 0


def test_a_tally_refuses_a_history_that_has_shrunk():
    """A fork has other messages, so its own tally."""
    tally = tally_of(run_of((user("a"), user("b"))), BYTE_COUNTER)
    with pytest.raises(MisuseError, match=r"1 messages, but 2 were counted: a fork needs its own TokenLedger"):
        tally.update(run_of((user("a"),)))
