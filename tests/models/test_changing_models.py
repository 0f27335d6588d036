"""One session whose model changes at every turn over four wires, with thinking, calls, images and compaction."""

import base64
import json
from itertools import pairwise

import anyio
import pytest
from google.genai import types

from agentfsm import Agent, ImagePart, Settings, TextPart, tool
from agentfsm.core.events import Compacted
from agentfsm.models import Anthropic, Gemini, OpenAIChat, OpenAIResponses, Router
from agentfsm.testing import LocalServer, WireReply, call, say
from tests.support.checks import HANG_S
from tests.support.google_server import reply, serve_google

PNG = b"\x89PNG\r\n\x1a\n"
SIGNATURE = base64.b64encode(b"signed by google").decode()
WIRES = ("chat", "responses", "anthropic", "gemini")
CALLED_TURNS = 5
# How the reasoning of each wire is recognised in a request.
MARKS = {
    "chat": '"reasoning_content":',
    "responses": '"encrypted_content":',
    "anthropic": '"signature":',
    "gemini": SIGNATURE,
}


@tool(read_only=True)
def look(place: str) -> list:
    """Look somewhere."""
    return [f"A photo of {place}. " * 40, ImagePart.of(PNG)]


def build_chat(number, *, calls, stream):
    """Return a reply of chat completions with reasoning, which the local server does not have."""
    made = {"name": "look", "arguments": json.dumps({"place": f"Rome {number}"})}
    message = {"role": "assistant", "reasoning_content": f"thought {number}"}
    message |= (
        {"content": None, "tool_calls": [{"index": 0, "id": f"call_{number}", "type": "function", "function": made}]}
        if calls
        else {"content": f"answer {number}"}
    )
    choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "delta" if stream else "message": message}
    body = json.dumps({"object": "chat.completion", "choices": [choice]})
    return WireReply(raw=f"data: {body}\n\ndata: [DONE]\n\n" if stream else body)


def check_gemini(body):
    """Assert that Google would take the request: roles alternate, and calls have signatures and results."""
    contents = [types.Content.model_validate(each) for each in body["contents"]]
    assert [each.role for each in contents] == [("user", "model")[n % 2] for n in range(len(contents))]
    for said, answered in pairwise(contents):
        called = [part for part in said.parts if part.function_call]
        assert all(part.thought_signature for part in called)
        results = [part.function_response for part in answered.parts if part.function_response]
        assert [(each.id, each.name) for each in results] == [
            (part.function_call.id, part.function_call.name) for part in called
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_over_four_wires(stream):
    """Each server gets its own reasoning back and that of no other; no request is refused, and no call is lost."""
    asked = []

    def choose(request):
        asked.append(WIRES[len(asked) % 4])
        return asked[-1]

    def answer(_body):
        number = len(asked)
        calls = number % (CALLED_TURNS + 1) != 0
        if asked[-1] == "chat":
            return build_chat(number, calls=calls, stream=stream)
        line = say("", call("look", place=f"Rome {number}")) if calls else f"answer {number}"
        return WireReply(line, thinking=f"thought {number}")

    def answer_google(body):
        check_gemini(body)
        number = len(asked)
        thought = {"text": f"thought {number}", "thought": True}
        made = {"functionCall": {"name": "look", "args": {"place": f"Rome {number}"}}, "thoughtSignature": SIGNATURE}
        said = {"text": f"answer {number}", "thoughtSignature": SIGNATURE}
        whole = reply(thought, said if number % (CALLED_TURNS + 1) == 0 else made)
        return [whole] if stream else whole

    options = {"api_key": "key", "window_tokens": 30_000}
    with LocalServer(answer) as server, serve_google() as google, anyio.fail_after(HANG_S):
        google.answer = answer_google
        models = {
            "chat": OpenAIChat("deepseek-reasoner", base_url=server.base_url, **options),
            "responses": OpenAIResponses("gpt-5", base_url=server.base_url, **options),
            "anthropic": Anthropic("claude-opus-5-5", base_url=server.base_url.removesuffix("/v1"), **options),
            "gemini": Gemini("gemini-3-pro", base_url=google.url, **options),
        }
        async with Agent(Router(choose, models), tools=[look], settings=Settings(stream=stream)) as agent:
            prompts = [[TextPart(text=f"Where is photo {number}?"), ImagePart.of(PNG)] for number in range(3)]
            runs = [await agent.run(prompt, session="one") for prompt in prompts]
            events = [event for run in runs for event in await agent.history(run.id)]
    assert [run.output for run in runs] == ["answer 6", "answer 12", "answer 18"]
    assert [len(run.calls) for run in runs] == [CALLED_TURNS] * 3
    assert {each.outcome for run in runs for each in run.calls} == {"done"}
    assert any(isinstance(event, Compacted) for event in events)
    others, googles = iter(server.requests), iter(google.seen)
    texts = [(wire, json.dumps(next(googles) if wire == "gemini" else next(others).body)) for wire in asked]
    for wire, text in texts:
        foreign = [name for name, mark in MARKS.items() if name != wire and mark in text]
        assert not foreign
        assert "image" in text
    for wire, mark in MARKS.items():
        assert any(mark in text for name, text in texts[4:] if name == wire)
