"""What `LocalServer` says at /chat/completions: an answer as OpenAI writes it, and which histories it refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from agentfsm.testing.fake_llm.script import format_arguments, split_text

if TYPE_CHECKING:
    from agentfsm.testing.fake_llm.script import Say


# Which histories are refused


def find_history_error(messages: Sequence[Any]) -> str | None:
    """Say why OpenAI would refuse a list of messages.

    Each call of an assistant message needs exactly one tool message, behind it and before any other message; ids are
    unique in the whole list.

    Args:
        messages: As they stand in the body of a request.

    Returns:
        The reason, in words close to OpenAI's, or None where the list is in order.
    """
    if not messages:
        return "Invalid 'messages': empty array. Expected an array with minimum length 1."
    seen: set[str] = set()
    waiting: list[str] = []
    for index, message in enumerate(messages):
        if reason := _check_message(index, message):
            return reason
        if message["role"] == "tool":
            if reason := _check_result(index, message["tool_call_id"], seen, waiting):
                return reason
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return _format_unanswered(waiting)
        waiting = [call["id"] for call in message.get("tool_calls", ())]
        if again := _find_duplicate(waiting, seen):
            return f"Invalid parameter: duplicate value {again!r} for 'id' in 'messages[{index}].tool_calls'."
    return _format_unanswered(waiting) if waiting else None


def _find_duplicate(ids: list[str], seen: set[str]) -> str | None:
    for call_id in ids:
        if call_id in seen:
            return call_id
        seen.add(call_id)
    return None


def _format_unanswered(waiting: list[str]) -> str:
    return (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(waiting)}"
    )


def _check_result(index: int, call_id: str, seen: set[str], waiting: list[str]) -> str | None:
    if call_id in waiting:
        return None
    if call_id in seen:
        return f"Invalid parameter: duplicate value {call_id!r} for 'tool_call_id' in 'messages[{index}]'."
    return (
        f"Invalid parameter: 'messages[{index}]' with role 'tool' must be a response to a preceding message with "
        f"'tool_calls'; there is no call {call_id!r}."
    )


def _check_message(index: int, message: Any) -> str | None:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in {"system", "developer", "user", "assistant", "tool"}:
        return f"Invalid value for '{where}.role': supported are 'system', 'developer', 'user', 'assistant' and 'tool'."
    calls = message.get("tool_calls")
    if message["role"] == "assistant" and calls is not None:
        return _check_calls(where, calls)
    if not isinstance(message.get("content"), str | list):
        return f"Invalid value for '{where}.content': expected a string or an array of parts."
    if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
        return f"Missing required parameter: '{where}.tool_call_id'."
    return None


def _check_calls(where: str, calls: Any) -> str | None:
    if not isinstance(calls, list) or not calls:
        return f"Invalid '{where}.tool_calls': expected an array with minimum length 1."
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        texts = (function.get("name"), function.get("arguments"), call.get("id")) if isinstance(function, dict) else ()
        if not texts or not all(isinstance(text, str) for text in texts):
            return f"Invalid '{where}.tool_calls[{index}]': 'id', 'function.name' and 'function.arguments' are strings."
    return None


def find_request_error(body: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the error by which OpenAI would refuse a request, as its fields; None where its messages are in order."""
    messages = body.get("messages")
    reason = find_history_error(messages) if isinstance(messages, list) else "'messages' has to be an array."
    return None if reason is None else {"message": reason, "param": "messages"}


# What is sent


def build_reply(say: Say, body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return an answer in one piece."""
    calls = [_call(number, index, name, format_arguments(given)) for index, (name, given) in enumerate(say.calls)]
    message: dict[str, Any] = {"role": "assistant", "content": say.text or None, "refusal": say.refusal or None}
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(say)}
    return _envelope("chat.completion", body, number, [choice]) | _usage_field(say, body)


def stream_reply(say: Say, body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Return an answer as the chunks of a stream."""

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _envelope("chat.completion.chunk", body, number, [choice])

    yield chunk({"role": "assistant", "content": "", "refusal": None})
    for piece in split_text(say.text, say.chunk_chars):
        yield chunk({"content": piece})
    for piece in split_text(say.refusal, say.chunk_chars):
        yield chunk({"refusal": piece})
    for delta in _call_deltas(say, number):
        yield chunk({"tool_calls": [delta]})
    yield chunk({}, _finish_reason(say))
    options = body.get("stream_options") or {}
    usage = _usage_field(say, body)
    if options.get("include_usage") and usage:
        yield _envelope("chat.completion.chunk", body, number, []) | usage


def _call_deltas(say: Say, number: int) -> Iterator[dict[str, Any]]:
    calls = []
    for index, (name, given) in enumerate(say.calls):
        pieces = split_text(format_arguments(given), say.chunk_chars)
        deltas = [{"index": index, "function": {"arguments": piece}} for piece in pieces]
        calls.append([{"index": index, **_call(number, index, name, "")}, *deltas])
    rows = zip_longest(*calls) if say.interleave else calls
    return (delta for row in rows for delta in row if delta is not None)


def _envelope(kind: str, body: dict[str, Any], number: int, choices: list[Any]) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": choices,
    }


def _call(number: int, index: int, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{number}_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _finish_reason(say: Say) -> str:
    return say.finish_reason or ("tool_calls" if say.calls else "stop")


def _usage_field(say: Say, body: dict[str, Any]) -> dict[str, Any]:
    if say.without_usage:
        return {}
    if say.usage is not None:
        return {"usage": dict(say.usage)}
    words = say.text + say.refusal + "".join(format_arguments(given) for _, given in say.calls)
    prompt, completion = sum(map(_count_chars, body["messages"])) // 4, len(words) // 4
    details = {"cached_tokens": 0}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"usage": {**usage, "prompt_tokens_details": details}}


def _count_chars(message: dict[str, Any]) -> int:
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    texts += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return sum(map(len, texts))


def build_error(say: Say) -> dict[str, Any]:
    """Return the body of an error, which is the same on both wires of OpenAI's."""
    given = {"message": say.error} if isinstance(say.error, str) else say.error
    kind = "server_error" if say.status >= 500 else "invalid_request_error"  # noqa: PLR2004  HTTP's own
    usual = {"message": f"LocalServer was told to answer {say.status}.", "type": kind, "param": None, "code": None}
    return {"error": usual | {key: value for key, value in given.items() if value}}
