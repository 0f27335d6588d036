"""What the vendors' own packages make of a recording, told in the words of our replies.

The recording is played to the vendor's client in place of the network, and its own classes read it and put its streams
together. Nothing here uses the package under test but the names of the reasons for which a model stops.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

import anthropic
import attrs
import httpx2
import openai
from anthropic.types import Message
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from agentfsm.ports import FinishReason, Reply
from tests.support.cassettes import Recording

BASE_URL: Final = "http://recorded.test/v1"
# What is asked does not matter: the answer is recorded.
ASK: Final[list[Any]] = [{"role": "user", "content": "x"}]
# Items of a response that wait for what the caller makes of them. A function's are calls.
CALLERS_TOOLS: Final = {"apply_patch_call", "computer_call", "custom_tool_call", "local_shell_call", "shell_call"}


@attrs.frozen(kw_only=True)
class Reading:
    """What a reply says."""

    text: str
    calls: tuple[tuple[str, str, str], ...]
    # Ids, names and arguments, in order.
    finish_reason: FinishReason
    usage: dict[str, int] | None
    # Tokens by our names for them; those that are zero are left out.


def ours(reply: Reply) -> Reading:
    """Return a reply of ours in the same form."""
    usage = reply.usage
    counts = None if usage is None else attrs.asdict(usage, filter=lambda at, _value: at.name.endswith("_tokens"))
    return Reading(
        text=reply.text,
        calls=tuple([(call.id, call.name, call.arguments) for call in reply.calls]),
        finish_reason=reply.finish_reason,
        usage=None if counts is None else _counted(**counts),
    )


def with_parsed_arguments(reading: Reading) -> Reading:
    """Return the reading with the arguments as JSON in one form, for vendors that keep no text of them."""
    calls = [(call_id, name, json.dumps(json.loads(text or "{}"))) for call_id, name, text in reading.calls]
    return attrs.evolve(reading, calls=tuple(calls))


def _counted(**counts: int | None) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _client(recording: Recording) -> httpx2.Client:
    def respond(_request: httpx2.Request) -> httpx2.Response:
        headers = {**recording.headers, "content-type": recording.content_type}
        return httpx2.Response(recording.status, headers=headers, content=recording.body)

    return httpx2.Client(transport=httpx2.MockTransport(respond), trust_env=False)


def _openai(recording: Recording) -> openai.OpenAI:
    return openai.OpenAI(api_key="x", base_url=BASE_URL, max_retries=0, http_client=_client(recording))


# Chat completions


@cache
def chat(recording: Recording) -> Reading:
    """Return what the openai package reads in a chat completion."""
    with _openai(recording) as client:
        if not recording.is_streamed:
            return _of_completion(client.chat.completions.create(model="m", messages=ASK))
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        with client.chat.completions.create(model="m", messages=ASK, stream=True) as chunks:
            for chunk in chunks:
                state.handle_chunk(chunk)
        return _of_completion(state.current_completion_snapshot)


def _of_completion(completion: ChatCompletion) -> Reading:
    choice, usage = completion.choices[0], completion.usage
    message = choice.message
    tokens = None
    if usage is not None:
        into, out = usage.prompt_tokens_details, usage.completion_tokens_details
        tokens = _counted(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=into and into.cached_tokens,
            cache_write_tokens=into and into.cache_write_tokens,
            reasoning_tokens=out and out.reasoning_tokens,
        )
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(("", message.function_call.name, message.function_call.arguments))
    return Reading(
        text=(message.content or "") + (message.refusal or ""),
        calls=tuple(calls),
        finish_reason=_finish_of_chat(choice.finish_reason, calls=bool(calls), refused=bool(message.refusal)),
        usage=tokens,
    )


def _finish_of_chat(word: str | None, *, calls: bool, refused: bool) -> FinishReason:
    if refused:
        return FinishReason.REFUSAL
    if word in ("length", "content_filter"):
        return FinishReason(word)
    return FinishReason.TOOL_CALLS if calls else FinishReason.STOP


# Responses


def responses(recording: Recording) -> Reading:
    """Return what the openai package reads in a response."""
    return _of_response(_response(recording))


def wants_the_caller(recording: Recording) -> bool:
    """Whether the response asks its caller to carry out something else than a function."""
    response = _response(recording)
    answered = {getattr(item, "call_id", None) for item in response.output if item.type.endswith("_output")}
    return any(item.type in CALLERS_TOOLS and item.call_id not in answered for item in response.output)


@cache
def _response(recording: Recording) -> Response:
    with _openai(recording) as client:
        if not recording.is_streamed:
            return client.responses.create(model="m", input="x")
        last = None
        with client.responses.stream(model="m", input="x") as events:
            for event in events:
                if event.type in ("response.completed", "response.incomplete"):
                    last = event.response
        assert last is not None, f"{recording.name} has no end"
        return last


def _of_response(response: Response) -> Reading:
    texts: list[str] = []
    calls: list[tuple[str, str, str]] = []
    refused = False
    for item in response.output:
        if item.type == "function_call":
            calls.append((item.call_id, item.name, item.arguments))
        if item.type == "message":
            for part in item.content:
                texts.append(part.text if part.type == "output_text" else part.refusal)
                refused = refused or part.type == "refusal"
    usage = response.usage
    tokens = None
    if usage is not None:
        tokens = _counted(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.input_tokens_details.cached_tokens,
            cache_write_tokens=getattr(usage.input_tokens_details, "cache_write_tokens", None),  # older ones lack it
            reasoning_tokens=usage.output_tokens_details.reasoning_tokens,
        )
    return Reading(
        text="".join(texts),
        calls=tuple(calls),
        finish_reason=_finish_of_response(response, calls=bool(calls), refused=refused),
        usage=tokens,
    )


def _finish_of_response(response: Response, *, calls: bool, refused: bool) -> FinishReason:
    if refused:
        return FinishReason.REFUSAL
    reason = response.incomplete_details.reason if response.incomplete_details else None
    if reason is not None:
        return {"max_output_tokens": FinishReason.LENGTH, "content_filter": FinishReason.CONTENT_FILTER}[reason]
    return FinishReason.TOOL_CALLS if calls else FinishReason.STOP


# Messages


@cache
def messages(recording: Recording) -> Reading:
    """Return what the anthropic package reads in a message; the arguments of its calls are JSON in one form."""
    with anthropic.Anthropic(api_key="x", base_url=BASE_URL, max_retries=0, http_client=_client(recording)) as client:
        if not recording.is_streamed:
            return _of_message(client.messages.create(model="m", max_tokens=9, messages=ASK))
        with client.messages.stream(model="m", max_tokens=9, messages=ASK) as events:
            return _of_message(events.get_final_message())


def _of_message(message: Message) -> Reading:
    usage = message.usage
    written, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
    details = usage.output_tokens_details
    calls = [(each.id, each.name, json.dumps(each.input)) for each in message.content if each.type == "tool_use"]
    reasons = {
        "max_tokens": FinishReason.LENGTH,
        "model_context_window_exceeded": FinishReason.LENGTH,
        "refusal": FinishReason.REFUSAL,
        "pause_turn": FinishReason.PAUSED,
        "compaction": FinishReason.PAUSED,
    }
    usual = FinishReason.TOOL_CALLS if calls else FinishReason.STOP
    return Reading(
        text="".join([each.text for each in message.content if each.type == "text"]),
        calls=tuple(calls),
        finish_reason=reasons.get(message.stop_reason or "", usual),
        usage=_counted(
            input_tokens=usage.input_tokens + written + read,
            output_tokens=usage.output_tokens,
            cached_tokens=read,
            cache_write_tokens=written,
            reasoning_tokens=details and details.thinking_tokens,
        )
        or None,  # a server that does not count
    )
