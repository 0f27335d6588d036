"""What results hold beside text, on each wire: where it stands, what is left out, and that it is written once."""

from __future__ import annotations

import json

import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    AudioPart,
    FilePart,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    tool,
)
from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses
from agentfsm.models.anthropic import wire as anthropic_wire
from agentfsm.models.anthropic.wire import unsupported_part
from agentfsm.models.openai import chat_wire, responses_wire
from agentfsm.ports import Request, ToolDefinition
from agentfsm.testing import LocalServer, call, say
from tests.support.wire_rules import (
    anthropic_body,
    check_anthropic_body,
    check_openai,
    check_responses,
    openai_of,
    responses_of,
)

ASK = UserMessage(parts=(TextPart(text="go"),))
IMAGE = ImagePart.of(b"\x89PNG")
REMOTE = ImagePart(url="https://a.test/x.png", detail="low")
PDF = FilePart.of(b"%PDF-1.7", name="a.pdf")
SOUND = AudioPart.of(b"RIFF")
TOOL = ToolDefinition(name="look", description="Look.", parameters={"type": "object"})


def turn(number, *parts_of_each, outcome=Outcome.DONE):
    """A reply with a call for each tuple of parts, and the results."""
    calls = tuple(ToolCall(id=f"t{number}.{place}", name="look", arguments="{}") for place in range(len(parts_of_each)))
    results = [
        ToolResult(call_id=call.id, tool="look", outcome=outcome, content=f"seen {call.id}", parts=parts)
        for call, parts in zip(calls, parts_of_each, strict=True)
    ]
    return AssistantMessage(calls=calls), *results


HISTORIES = {
    "at the end": (ASK, *turn(1, (IMAGE,))),
    "among others": (ASK, *turn(1, (), (IMAGE, PDF), (), (REMOTE,)), *turn(2, ()), ASK),
    "before the user": (ASK, *turn(1, (REMOTE,)), ASK),
    "before a note": (ASK, *turn(1, (IMAGE,)), SystemMessage(text="a note"), *turn(2, (IMAGE,))),
    "with what not every wire takes": (ASK, *turn(1, (SOUND, IMAGE), (SOUND,)), *turn(2, ())),
    "of a call that failed": (ASK, *turn(1, (IMAGE,), (), outcome=Outcome.FAILED)),
    "of very many calls": (ASK, *turn(1, *[(IMAGE,) if n % 50 == 0 else () for n in range(300)]), *turn(2, ())),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_each_vendor_takes_it(name):
    """Wherever such results stand, the history is one that the vendor accepts."""
    check_openai(openai_of(HISTORIES[name], "Help."))
    check_responses(responses_of(HISTORIES[name], "Help."))
    check_anthropic_body(anthropic_body(HISTORIES[name], "Help.", [TOOL]))


def test_chat_completions_show_them_behind_the_last_result():
    """A tool's message holds text only: the user's message behind them says of each part whose it is."""
    messages = openai_of(HISTORIES["among others"])
    assert [message["role"] for message in messages[2:8]] == ["tool", "tool", "tool", "tool", "user", "assistant"]
    assert messages[3]["content"] == "[look: done]\nseen t1.1"
    assert messages[6]["content"] == [
        {"type": "text", "text": "[image 1 of result t1.1, by the tool look; not from the user]"},
        {"type": "image_url", "image_url": {"url": IMAGE.url, "detail": "auto"}},
        {"type": "text", "text": "[file 2 of result t1.1, by the tool look; not from the user]"},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF.url}},
        {"type": "text", "text": "[image 1 of result t1.3, by the tool look; not from the user]"},
        {"type": "image_url", "image_url": {"url": REMOTE.url, "detail": "low"}},
    ]


def test_chat_completions_show_a_recording():
    """As the user's message would."""
    messages = openai_of(HISTORIES["with what not every wire takes"])
    kinds = [part["type"] for part in messages[4]["content"]]
    assert kinds == ["text", "input_audio", "text", "image_url", "text", "input_audio"]


def test_responses_show_them_in_the_output():
    """Text, images and files are its parts; what it cannot hold is noted in the text."""
    items = responses_of(HISTORIES["among others"])
    outputs = [item["output"] for item in items if item["type"] == "function_call_output"]
    assert outputs[0] == "[look: done]\nseen t1.0"
    assert outputs[1] == [
        {"type": "input_text", "text": "[look: done]\nseen t1.1"},
        {"type": "input_image", "image_url": IMAGE.url, "detail": "auto"},
        {"type": "input_file", "filename": "a.pdf", "file_data": PDF.url},
    ]
    items = responses_of(HISTORIES["with what not every wire takes"])
    mixed, only = [item["output"] for item in items if item["type"] == "function_call_output"][:2]
    assert "[recording 1: this model cannot be shown it (OpenAI's Responses API accepts no" in mixed[0]["text"]
    assert [part["type"] for part in mixed] == ["input_text", "input_image"]
    assert only.startswith("[look: done]\nseen t1.1\n[recording 1: this model cannot be shown it (")


def test_anthropic_shows_them_as_blocks_of_the_result():
    """Beside pictures no result may be an error: the text says that the call has failed."""
    [done] = anthropic_body((ASK, *turn(1, (IMAGE, PDF, REMOTE))))["messages"][-1]["content"]
    assert [block["type"] for block in done["content"]] == ["text", "image", "document", "image"]
    assert done["content"][0]["text"] == "[look: done]\nseen t1.0"
    assert done["content"][2]["title"] == "a.pdf"
    seen, blind = anthropic_body(HISTORIES["of a call that failed"])["messages"][-1]["content"]
    assert ("is_error" in seen, blind["is_error"]) == (False, True)
    assert seen["content"][0]["text"].startswith("[look: failed]")
    blind = anthropic_body((ASK, *turn(1, (SOUND,), outcome=Outcome.FAILED)))["messages"][-1]["content"][0]
    assert (blind["is_error"], "cannot be shown it" in blind["content"]) == (True, True)


def test_the_mark_of_the_cache_is_on_the_result_and_not_inside():
    """The last block of the message is what the provider keeps up to."""
    [result] = anthropic_body((ASK, *turn(1, (IMAGE,))))["messages"][-1]["content"]
    assert result["cache_control"] == {"type": "ephemeral"}
    assert all("cache_control" not in block for block in result["content"])


def test_anthropic_refuses_an_image_that_it_would_answer_with_400():
    """Its bound is on the base64 text."""
    assert unsupported_part(ImagePart.of(b"x" * (5 * 2**20 * 3 // 4))) is None
    assert "3,932,160 bytes at most" in unsupported_part(ImagePart.of(b"x" * (5 * 2**20 * 3 // 4 + 1)))


WIRES = {
    "chat": (chat_wire, {"limit_field": "n"}),
    "responses": (responses_wire, {}),
    "anthropic": (anthropic_wire, {}),
}


@pytest.mark.parametrize("name", WIRES)
def test_a_history_that_grows_is_written_as_if_it_were_the_first(name):
    """At every length at which a model may be asked, and also where one ends amid results."""
    wire, options = WIRES[name]
    whole = (ASK, *turn(1, (IMAGE,), ()), *turn(2, (), (REMOTE,)), ASK, *turn(3, (PDF,)), *turn(4, ()))
    written = wire.build_encoding_cache()
    for end in range(1, len(whole) + 1):
        request = Request(instructions="Help.", messages=whole[:end], tools=(TOOL,))
        body = wire.encode(request, model="m", streamed=False, encoding_cache=written, **options)
        assert body == wire.encode(request, model="m", streamed=False, **options), end


@pytest.mark.parametrize("name", WIRES)
def test_a_picture_is_written_once(name, monkeypatch):
    """However often the history goes on; of Anthropic's, the newest turn once more."""
    wire, options = WIRES[name]
    asked = []
    writer = "_part_block" if name == "anthropic" else "_wire_part"
    write = getattr(wire, writer)
    monkeypatch.setattr(wire, writer, lambda part: asked.append(part) or write(part))
    written, messages = wire.build_encoding_cache(), (ASK, *turn(0, (IMAGE,)))
    for number in range(1, 6):
        request = Request(instructions="Help.", messages=messages, tools=(TOOL,))
        wire.encode(request, model="m", streamed=False, encoding_cache=written, **options)
        messages = (*messages, *turn(number, ()))
    assert asked.count(IMAGE) == (2 if name == "anthropic" else 1)


@pytest.mark.parametrize("kind", [OpenAIChat, OpenAIResponses, Anthropic])
async def test_a_run_with_pictures_over_a_socket(kind):
    """Two turns of them, in parallel and alone, and the server finds no fault with any request."""

    @tool(read_only=True)
    async def look(number: int) -> list[object]:
        """Look."""
        return [f"picture {number}", ImagePart.of(b"\x89PNG\r\n\x1a\n" + bytes([number]))]

    says = [
        say("", call("look", number=1), call("look", number=2)),
        say("", call("look", number=3)),
        say("Seen."),
    ]
    with LocalServer(says) as server:
        model = kind("local", base_url=server.base_url, api_key="none-needed")
        async with Agent(model, tools=[look]) as agent:
            run = await agent.run("Look at 1, 2, then 3.")
        bodies = [json.dumps(request.body) for request in server.requests]
    assert run.output == "Seen."
    assert [body.count("iVBORw0KGgo") for body in bodies] == [0, 2, 3]


class Reader:
    """Takes text only."""

    def unsupported_part(self, part):
        """Refuse all else."""
        return None if isinstance(part, TextPart) else "it reads text only"


@pytest.mark.parametrize("kind", [OpenAIChat, OpenAIResponses, Anthropic])
def test_a_model_of_ones_own_without_eyes_is_shown_words(kind):
    """What `refuses` says of a model goes for its results too, and not what the wire could carry."""
    model = type("Blind", (Reader, kind), {})("m", api_key="none-needed")
    request = Request(instructions="", messages=(ASK, *turn(1, (IMAGE, PDF))), tools=(TOOL,))
    body = model._encode_request(request, model._make_encoding_cache(), streamed=False).decode()
    assert "data:" not in body
    assert "base64" not in body
    told = json.dumps("[image 1: this model cannot be shown it (it reads text only)]")[1:-1]
    assert told in body
    assert "[file 2: this model cannot be shown it" in body
