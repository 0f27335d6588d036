"""Histories of other programs: messages as OpenAI's chat completions have them, read and written."""

import pytest
from openai.types.chat import ChatCompletionMessage

from agentfsm import (
    Agent,
    AssistantMessage,
    AudioPart,
    FilePart,
    ImagePart,
    MisuseError,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    tool,
)
from agentfsm.models import from_openai, to_openai
from agentfsm.testing import ScriptedModel, call, say
from tests.support.wire_rules import check_openai

PDF = "data:application/pdf;base64,JVBERg=="
PICTURE = {"type": "image_url", "image_url": {"url": "https://a.test/a.png", "detail": "low"}}
ASK = {"role": "user", "content": "Go."}


def asking(*calls):
    """A reply with calls, each given as (id, name) or (id, name, arguments)."""
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
        for call_id, name, *arguments in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call_id, content="ok"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_a_history_is_read():
    """All roles, text whole or in parts, and what stands beside it."""
    parts = [
        {"type": "text", "text": "Look:"},
        PICTURE,
        {"type": "input_audio", "input_audio": {"data": "SUQz", "format": "mp3"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}},
    ]
    history = from_openai(
        [
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
            {"role": "user", "name": "ann", "content": parts},
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "system", "content": "Try again."},
        ]
    )
    assert history == (
        SystemMessage(text="Be\nbrief."),
        UserMessage(
            parts=(
                TextPart(text="Look:"),
                ImagePart(url="https://a.test/a.png", detail="low"),
                AudioPart(url="data:audio/mpeg;base64,SUQz"),
                FilePart(url=PDF, name="a.pdf"),
            )
        ),
        AssistantMessage(text="No."),
        SystemMessage(text="Try again."),
    )


def test_results_are_put_in_the_order_of_their_calls():
    """OpenAI takes them in any, and a history here has one. Arguments that were left out are none."""
    answered = [result("b", "2"), result("a", [{"type": "text", "text": "1"}])]
    reply, *results = from_openai([asking(("a", "f"), ("b", "g", '{"x": 1}')), *answered])
    assert reply.calls == (
        ToolCall(id="a", name="f", arguments="{}", provider_id="a"),
        ToolCall(id="b", name="g", arguments='{"x": 1}', provider_id="b"),
    )
    assert results == [
        ToolResult(call_id="a", tool="f", outcome=Outcome.DONE, content="1"),
        ToolResult(call_id="b", tool="g", outcome=Outcome.DONE, content="2", index=1),
    ]


@pytest.mark.parametrize("ids", [("c0", "c0"), ("chatcmpl-tool-0123456789abcdef0123456789abcdef", "b"), ("", "")])
def test_ids_that_do_not_serve_are_numbered_anew(ids):
    """Some servers begin anew in each reply, and some make ids that OpenAI does not take back."""
    first, second = ids
    _, reply, seen, _, again, seen_again = from_openai(
        [ASK, asking((first, "f")), result(first), ASK, asking((second, "f")), result(second)]
    )
    assert [call.id for call in (*reply.calls, *again.calls)] == ["t1.0", "t2.0"]
    assert [seen.call_id, seen_again.call_id] == ["t1.0", "t2.0"]
    assert reply.calls[0].provider_id == first


def test_what_says_nothing_is_left_out():
    """Servers give such messages, and take none back."""
    blank = [{"role": role, "content": content} for role in ("system", "user", "assistant") for content in ("", None)]
    half = {"role": "user", "content": [{"type": "text", "text": " "}, {"type": "text", "text": "Go."}]}
    assert from_openai([*blank, half]) == (UserMessage(parts=(TextPart(text="Go."),)),)


@pytest.mark.parametrize("said", ["", "null", " null\n", "\ufeffnull", "\ufeff {} "])
def test_a_call_without_arguments_has_none(said):
    """However the server wrote that; as in replies."""
    (_, reply, _) = from_openai([ASK, asking(("a", "look", said)), result("a")])
    assert reply.calls[0].arguments == "{}"


def test_messages_of_the_openai_package_are_read():
    """A program that calls the package keeps its replies among its dicts."""
    reply = ChatCompletionMessage.model_validate(asking(("a", "f", "{}")))
    assert from_openai([ASK, reply, result("a")]) == from_openai([ASK, asking(("a", "f", "{}")), result("a")])


async def test_the_history_of_a_run_comes_back_as_it_was():
    """Written, read, and gone on from: the model is sent the very same, and ids count on."""

    @tool(read_only=True)
    def look(at: int) -> int:
        if at > 1:
            raise ValueError("too far")
        return at

    agent = Agent(ScriptedModel(say("", call("look", at=1), call("look", at=2)), "One is there."), tools=[look])
    run = await agent.run("Look around.")
    written = to_openai(run.messages)
    check_openai(written)
    assert [message["role"] for message in written] == ["user", "assistant", "tool", "tool", "assistant"]
    history = from_openai(written)
    assert to_openai(history) == written
    assert [(each.content, each.outcome) for each in history if isinstance(each, ToolResult)] == [
        (each.content, each.outcome) for each in run.messages if isinstance(each, ToolResult)
    ]
    more = agent.with_(model=ScriptedModel(say("", call("look", at=0)), "So is zero."))
    went_on = await more.run("And below?", messages=history)
    assert went_on.messages[: len(history)] == history
    assert [call.id for call in went_on.messages[len(history) + 1].calls] == ["t2.0"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Go.", "a history is a list of messages, not str"),
        ({"messages": [ASK]}, "a history is a list of messages, not dict"),
        ([ASK, "Go."], r"messages\[1\]: str where an object belongs"),
        ([ASK, {"role": "function"}], r"messages\[1\]: the role 'function': give system, developer, user"),
        ([{"role": "user", "content": 5}], r"messages\[0\]: 'content' is int where list belongs"),
        ([{"role": "user", "content": [{"type": "video"}]}], r"messages\[0\]: a part of the type 'video': give text"),
        ([{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}], "FilePart takes"),
        ([{"role": "assistant", "content": [PICTURE]}], r"messages\[0\]: a part that is not text \(image\)"),
        ([asking(("a", "f")) | {"tool_calls": [{"type": "custom"}]}], "a call of the type 'custom'"),
        ([asking(("a", "f")), ASK, result("a")], r"messages\[2\]: a result of 'a', which is not an open call"),
        ([asking(("a", "f")), result("a"), result("a")], r"messages\[2\]: a result of 'a', which is not an open call"),
        ([asking(("a", "f"), ("b", "f")), result("b")], "no result of 'a'"),
        ([asking(("a", "f", "{")), result("a")], r"'a' are not a JSON object: '\{'"),
    ],
)
def test_what_is_no_history_is_refused(messages, words):
    """The error says which message, and what is wrong with it."""
    with pytest.raises(MisuseError, match=words):
        from_openai(messages)


def test_what_chat_completions_cannot_carry_is_refused():
    """As a request with it would be."""
    with pytest.raises(MisuseError, match="cannot be sent: chat completions accept a file only"):
        to_openai([UserMessage(parts=(FilePart(url="https://a.test/a.pdf"),))])
    with pytest.raises(MisuseError, match=r"not dict; .*from_openai"):
        to_openai([ASK])
