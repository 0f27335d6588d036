"""The readers of both vendors' rules can say no: each rule by a list of messages that breaks it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from agentfsm import (
    AssistantMessage,
    FilePart,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
)
from agentfsm.core.messages import NativeReply
from tests.support.wire_rules import (
    MISTRAL,
    RefusedError,
    anthropic_body,
    check_anthropic,
    check_anthropic_body,
    check_mistral,
    check_openai,
    check_responses,
    openai_of,
    responses_of,
)

HISTORY = (
    UserMessage(parts=(TextPart(text="go"), ImagePart(url="https://a.b/c.png"))),
    AssistantMessage(text="I look.", calls=(ToolCall(id="t1.0", name="a", arguments="{}"),)),
    ToolResult(call_id="t1.0", tool="a", outcome=Outcome.DONE, content=""),
    SystemMessage(text="a note"),
    AssistantMessage(
        calls=(ToolCall(id="t2.0", name="a", arguments='{"n": 1}'), ToolCall(id="t2.1", name="b", arguments="{}"))
    ),
    ToolResult(call_id="t2.0", tool="a", outcome=Outcome.FAILED, content="no"),
    ToolResult(call_id="t2.1", tool="b", outcome=Outcome.UNKNOWN, content="?"),
    UserMessage(parts=(TextPart(text="go on"),)),
)
# Their places: 0 system, 1 user, 2 call, 3 result, 4 note, 5 two calls, 6 and 7 their results, 8 user.
GOOD = openai_of(HISTORY, "Be brief.")
Tear = Callable[[list[Any]], object]

TORN_OPENAI: dict[str, tuple[str, Tear]] = {
    "nothing": ("no messages", lambda m: m.clear()),
    "no result": ("no response messages", lambda m: m.pop(3)),
    "no result of the second": ("no response messages", lambda m: m.pop(7)),
    "no result at the end": ("no response messages", lambda m: m.__delitem__(slice(7, None))),
    "a result after a note": ("no response messages", lambda m: m.insert(4, m.pop(3))),
    "a result twice": ("a second result", lambda m: m.insert(4, m[3])),
    "a result of nothing": ("did not call", lambda m: m.insert(1, {**m[3], "tool_call_id": "x"})),
    "a result again later": ("a second result", lambda m: m.insert(7, m[3])),
    "a result of null": ("no text", lambda m: m[3].update(content=None)),
    "a call without its message": ("did not call", lambda m: m.pop(2)),
    "an id twice": ("two calls", lambda m: m[5]["tool_calls"][1].update(id="t2.0")),
    "an id again later": ("two calls", lambda m: m[5]["tool_calls"][0].update(id="t1.0")),
    "a long id": ("the id", lambda m: m[2]["tool_calls"][0].update(id="t" * 41)),
    "no id": ("the id", lambda m: m[2]["tool_calls"][0].update(id="")),
    "a call of no type": ("of the type", lambda m: m[2]["tool_calls"][0].update(type="tool")),
    "a name with a space": ("called", lambda m: m[2]["tool_calls"][0]["function"].update(name="a b")),
    "a long name": ("called", lambda m: m[2]["tool_calls"][0]["function"].update(name="a" * 65)),
    "no name": ("called", lambda m: m[2]["tool_calls"][0]["function"].update(name="")),
    "torn arguments": ("JSON object", lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"n": ')),
    "a list of arguments": ("JSON object", lambda m: m[2]["tool_calls"][0]["function"].update(arguments="[]")),
    "no number": ("JSON object", lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"n": NaN}')),
    "arguments that are no text": ("JSON object", lambda m: m[2]["tool_calls"][0]["function"].update(arguments={})),
    "no calls": ("empty tool_calls", lambda m: m[2].update(tool_calls=[])),
    "many calls": ("at most 128", lambda m: m[2].update(tool_calls=m[2]["tool_calls"] * 129)),
    "empty text beside calls": ("empty content", lambda m: m[5].update(content="")),
    "an empty answer": ("without content", lambda m: m.append({"role": "assistant", "content": ""})),
    "an answer of null": ("without content", lambda m: m.append({"role": "assistant", "content": None})),
    "an empty note": ("empty content", lambda m: m[4].update(content="")),
    "a prompt of null": ("neither", lambda m: m[1].update(content=None)),
    "a result that is a picture": ("no text", lambda m: m[3].update(content=[{"type": "image_url"}])),
    "a picture of nothing": ("empty part", lambda m: m[1]["content"][1].update(image_url={})),
    "a prompt of no parts": ("neither", lambda m: m[1].update(content=[])),
    "an empty part": ("an empty part", lambda m: m[1]["content"][0].update(text="")),
    "a part of no type": ("a part of", lambda m: m[1]["content"][0].update(type="words")),
    "an image of the system": ("a part of", lambda m: m[4].update(content=m[1]["content"])),
    "a role that there is not": ("unknown role", lambda m: m[4].update(role="narrator")),
}
GOOD_MISTRAL = openai_of(HISTORY, "be brief", MISTRAL)
# 0 instructions, 1 user, 2 call, 3 result, 4 bridge, 5 note.
TORN_MISTRAL: dict[str, tuple[str, Callable[[list[Any]], object]]] = {
    "a note after a result": ("role system after tool", lambda m: m.insert(4, {"role": "system", "content": "n"})),
    "a user after a result": ("role user after tool", lambda m: m.pop(4)),
    "a long id": ("ids", lambda m: (m[2]["tool_calls"][0].update(id="t1.0"), m[3].update(tool_call_id="t1.0"))),
    "an answer at the end": ("the last", lambda m: m.append({"role": "assistant", "content": "x"})),
}
SEALED = '{"type": "reasoning", "summary": [], "encrypted_content": "xyz"}'
SEARCHED = '{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}'
CALLED = '{"type": "function_call", "call_id": "", "name": "", "arguments": ""}'
SAID = '{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]}'
# 0 user, 1 thinking, 2 search, 3 call, 4 output, 5 note, 6 and 7 calls, 8 and 9 outputs, 10 user, 11 thinking, 12 said,
# 13 user.
GOOD_RESPONSES = responses_of(
    (
        UserMessage(parts=(TextPart(text="go"), ImagePart(url="https://a.b/c.png"), FilePart.of(b"%PDF"))),
        attrs.evolve(
            HISTORY[1], native=NativeReply(provider="openai-responses", content=f"[{SEALED}, {SEARCHED}, {CALLED}]")
        ),
        *HISTORY[2:],
        AssistantMessage(text="so", native=NativeReply(provider="openai-responses", content=f"[{SEALED}, {SAID}]")),
        UserMessage(parts=(TextPart(text="and now?"),)),
    ),
    "Be brief.",
)
TORN_RESPONSES: dict[str, tuple[str, Tear]] = {
    "nothing": ("no input", lambda m: m.clear()),
    "no output": ("no tool output", lambda m: m.pop(4)),
    "an output twice": ("a second output", lambda m: m.append(m[4])),
    "an output of nothing": ("no tool call found", lambda m: m.append({**m[4], "call_id": "x"})),
    "an output before its call": ("no tool call found", lambda m: m.insert(0, m.pop(4))),
    "an output of null": ("neither", lambda m: m[4].update(output=None)),
    "an output of no parts": ("neither", lambda m: m[4].update(output=[])),
    "a recording as output": ("with a part of", lambda m: m[4].update(output=[{"type": "input_audio"}])),
    "an empty image as output": ("one thing", lambda m: m[4].update(output=[{"type": "input_image"}])),
    "a call_id twice": ("two calls", lambda m: m[6].update(call_id="t1.0")),
    "a long call_id": ("the call_id", lambda m: m[3].update(call_id="t" * 65)),
    "no call_id": ("the call_id", lambda m: m[3].update(call_id="")),
    "a name with a space": ("called", lambda m: m[3].update(name="a b")),
    "torn arguments": ("JSON object", lambda m: m[3].update(arguments="{")),
    "an id of a call": ("refused", lambda m: m[3].update(id="fc_1")),
    "an id of a message": ("refused", lambda m: m[12].update(id="msg_1")),
    "an id of thinking": ("refused", lambda m: m[1].update(id="rs_1")),
    "the status of thinking": ("refused", lambda m: m[1].update(status="completed")),
    "thinking that is not sealed": ("not sealed", lambda m: m[1].update(encrypted_content=None)),
    "thinking without summary": ("without a summary", lambda m: m[1].pop("summary")),
    "thinking last": ("following item", lambda m: m.append(m[1])),
    "thinking before the user": ("following item", lambda m: m.pop(12)),
    "thinking before an output": ("following item", lambda m: m.insert(4, m[1])),
    "an item that there is not": ("of the type", lambda m: m[2].update(type="thought")),
    "a reference": ("of the type", lambda m: m.insert(0, {"type": "item_reference", "id": "rs_1"})),
    "a role that there is not": ("unknown role", lambda m: m[5].update(role="tool")),
    "an empty note": ("empty content", lambda m: m[5].update(content="")),
    "a prompt of null": ("neither", lambda m: m[10].update(content=None)),
    "a prompt of no parts": ("neither", lambda m: m[10].update(content=[])),
    "text of the assistant as input": (
        "a part of",
        lambda m: m[12].update(content=[{"type": "input_text", "text": "so"}]),
    ),
    "a recording": ("a part of", lambda m: m[0]["content"][0].update(type="input_audio")),
    "an empty part": ("one thing", lambda m: m[0]["content"][0].update(text="")),
    "an image without detail": ("detail", lambda m: m[0]["content"][1].pop("detail")),
    "a file without a name": ("filename", lambda m: m[0]["content"][2].pop("filename")),
    "half a pair": ("surrogate", lambda m: m[13].update(content="\ud800")),
}
GOOD_BODY = anthropic_body(HISTORY, "Be brief.")
# 0 user, 1 call, 2 result and note, 3 two calls, 4 two results and the user's text.
GOOD_ANTHROPIC = GOOD_BODY["messages"]
TORN_ANTHROPIC: dict[str, tuple[str, Tear]] = {
    "nothing": ("no messages", lambda m: m.clear()),
    "the assistant first": ("first message", lambda m: m.pop(0)),
    "the assistant last": ("last message", lambda m: m.append({"role": "assistant", "content": [_text("so")]})),
    "calls last": ("last message", lambda m: m.pop(4)),
    "two of the user": ("in a row", lambda m: m.insert(0, m[0])),
    "no result": ("no result of", lambda m: m[4]["content"].pop(0)),
    "no results": ("no result of", lambda m: m[4]["content"].__delitem__(slice(0, 2))),
    "a result later": ("no result of", lambda m: m.__setitem__(slice(2, 2), [_said("wait"), _said("?", "assistant")])),
    "a result twice": ("two results", lambda m: m[4]["content"].insert(0, m[4]["content"][0])),
    "a result of nothing": ("results of", lambda m: m[0]["content"].insert(0, m[2]["content"][0])),
    "text before a result": ("behind other content", lambda m: m[2]["content"].reverse()),
    "text between results": ("behind other content", lambda m: m[4]["content"].insert(1, _text("and"))),
    "a result of null": ("neither", lambda m: m[2]["content"][0].update(content=None)),
    "a result of no blocks": ("neither", lambda m: m[2]["content"][0].update(content=[])),
    "a result of a call": ("with blocks of", lambda m: m[2]["content"][0].update(content=[{"type": "tool_use"}])),
    "a result of blank text": ("blank text", lambda m: m[2]["content"][0].update(content=[_text(" ")])),
    "a result of an empty image": ("a source", lambda m: m[2]["content"][0].update(content=[{"type": "image"}])),
    "an error of an image": ("an error with", lambda m: m[4]["content"][0].update(content=[{"type": "image"}])),
    "an id twice": ("have the id", lambda m: m[3]["content"][1].update(id="t2-d0")),
    "an id again later": ("have the id", lambda m: m[3]["content"][0].update(id="t1-d0")),
    "an id with a dot": ("with the id", lambda m: m[1]["content"][1].update(id="t1.0")),
    "a name with a space": ("called", lambda m: m[1]["content"][1].update(name="a b")),
    "input as text": ("no dictionary", lambda m: m[1]["content"][1].update(input="{}")),
    "no content": ("without content", lambda m: m[0].update(content=[])),
    "empty text": ("blank text", lambda m: m[0]["content"][0].update(text="")),
    "blank text": ("blank text", lambda m: m[1]["content"][0].update(text=" \n")),
    "half a pair": ("surrogate", lambda m: m[1]["content"][1].update(input={"n": "\ud800"})),
    "a call of the user": ("a block of the type", lambda m: m[0]["content"].append(m[1]["content"][1])),
    "a result of the assistant": ("a block of the type", lambda m: m[1]["content"].append(m[2]["content"][0])),
    "a role that there is not": ("unknown role", lambda m: m[1].update(role="system")),
}


TORN_BODIES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "no tools": ("no tools are defined", lambda b: b.pop("tools")),
    "a choice of no tools": ("tool_choice", lambda b: b.update(tools=[], messages=[_said("go")])),
    "five marks": ("marks, at most", lambda b: [block.update(_MARK) for block in b["messages"][4]["content"]]),
    "a mark on thinking": ("on thinking", lambda b: b["messages"][1]["content"].insert(0, _THOUGHT | _MARK)),
    "a mark on nothing": ("on a blank", lambda b: b.update(system=[_text("") | _MARK])),
    "no messages": ("no messages", lambda b: b.update(messages=[])),
}
_MARK = {"cache_control": {"type": "ephemeral"}}
_THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [_text(text)]}


def test_the_readers_take_what_is_whole():
    """A history with all there is: parts, notes, calls with text and without, an image."""
    check_openai(GOOD)
    check_mistral(GOOD_MISTRAL)
    check_responses(GOOD_RESPONSES)
    check_anthropic_body(GOOD_BODY)
    roles = [message["role"] for message in GOOD_ANTHROPIC]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize("name", TORN_OPENAI)
def test_the_reader_of_openai_refuses(name):
    """Each rule by a list that breaks it and nothing else."""
    rule, tear = TORN_OPENAI[name]
    torn = copy.deepcopy(GOOD)
    tear(torn)
    with pytest.raises(RefusedError, match=rule):
        check_openai(torn)


@pytest.mark.parametrize("name", TORN_MISTRAL)
def test_the_reader_of_mistral_refuses(name):
    """Each rule by a list that breaks it and nothing else."""
    rule, tear = TORN_MISTRAL[name]
    torn = copy.deepcopy(GOOD_MISTRAL)
    tear(torn)
    with pytest.raises(RefusedError, match=rule):
        check_mistral(torn)


@pytest.mark.parametrize("name", TORN_RESPONSES)
def test_the_reader_of_responses_refuses(name):
    """Each rule by a list that breaks it and nothing else."""
    rule, tear = TORN_RESPONSES[name]
    torn = copy.deepcopy(GOOD_RESPONSES)
    tear(torn)
    with pytest.raises(RefusedError, match=rule):
        check_responses(torn)


@pytest.mark.parametrize("name", TORN_ANTHROPIC)
def test_the_reader_of_anthropic_refuses(name):
    """Each rule by a list that breaks it and nothing else."""
    rule, tear = TORN_ANTHROPIC[name]
    torn = copy.deepcopy(GOOD_ANTHROPIC)
    tear(torn)
    with pytest.raises(RefusedError, match=rule):
        check_anthropic(torn)


@pytest.mark.parametrize("name", TORN_BODIES)
def test_the_reader_of_anthropic_refuses_a_body(name):
    """Each rule on what stands beside the messages, by a body that breaks it and nothing else."""
    rule, tear = TORN_BODIES[name]
    torn = copy.deepcopy(GOOD_BODY)
    tear(torn)
    with pytest.raises(RefusedError, match=rule):
        check_anthropic_body(torn)
