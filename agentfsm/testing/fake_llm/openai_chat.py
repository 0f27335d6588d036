"""Chat completions of `LocalServer`: builds replies, and refuses the histories that OpenAI refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from agentfsm.ports.model import FinishReason
from agentfsm.testing.fake_llm.script import join_text, split_text

if TYPE_CHECKING:
    from agentfsm.testing.fake_llm.script import WireReply


# Refused requests.


def find_history_error(messages: Sequence[Any]) -> str | None:
    """Return the reason for which OpenAI would refuse a list of messages, in words close to OpenAI's; None if valid.

    Each call of an assistant message needs exactly one tool message, after it and before any other message; ids are
    unique in the whole list.
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
        for call_id in waiting:
            if call_id in seen:
                return f"Invalid parameter: duplicate value {call_id!r} for 'id' in 'messages[{index}].tool_calls'."
            seen.add(call_id)
    return _format_unanswered(waiting) if waiting else None


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
    """Return the fields of the error with which OpenAI would refuse a request; None if its messages are valid."""
    messages = body.get("messages")
    reason = find_history_error(messages) if isinstance(messages, list) else "'messages' has to be an array."
    return None if reason is None else {"message": reason, "param": "messages"}


def find_newest_text(body: Mapping[str, Any]) -> str:
    """Return the text of the newest message of a request."""
    return join_text(body["messages"][-1].get("content"))


# Replies.


def build_reply(reply: WireReply, body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a reply in one piece."""
    calls = [_call(number, index, each.name, each.arguments) for index, each in enumerate(reply.calls)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.text or None,
        "refusal": reply.refusal_text or None,
    }
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}
    return _envelope("chat.completion", body, number, [choice]) | _usage_field(reply)


def stream_reply(reply: WireReply, body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Return a reply as the chunks of a stream."""

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _envelope("chat.completion.chunk", body, number, [choice])

    yield chunk({"role": "assistant", "content": "", "refusal": None})
    for piece in split_text(reply.text, reply.chunk_chars):
        yield chunk({"content": piece})
    for piece in split_text(reply.refusal_text, reply.chunk_chars):
        yield chunk({"refusal": piece})
    for delta in _call_deltas(reply, number):
        yield chunk({"tool_calls": [delta]})
    yield chunk({}, _finish_reason(reply))
    options = body.get("stream_options") or {}
    usage = _usage_field(reply)
    if options.get("include_usage") and usage:
        yield _envelope("chat.completion.chunk", body, number, []) | usage


def _call_deltas(reply: WireReply, number: int) -> Iterator[dict[str, Any]]:
    calls = []
    for index, each in enumerate(reply.calls):
        pieces = split_text(each.arguments, reply.chunk_chars)
        deltas = [{"index": index, "function": {"arguments": piece}} for piece in pieces]
        calls.append([{"index": index, **_call(number, index, each.name, "")}, *deltas])
    rows = zip_longest(*calls) if reply.interleave else calls
    return (delta for row in rows for delta in row if delta is not None)


def starts_call(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk of a stream is the first of a call."""
    return any("id" in call for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ()))


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


def _finish_reason(reply: WireReply) -> str:
    if reply.finish_reason is not None or reply.line.finish_reason in (None, FinishReason.REFUSAL):
        return reply.finish_reason or ("tool_calls" if reply.calls else "stop")
    return str(reply.line.finish_reason)


def _usage_field(reply: WireReply) -> dict[str, Any]:
    usage = build_usage(reply)
    return {} if usage is None else {"usage": usage}


def build_usage(reply: WireReply) -> dict[str, Any] | None:
    """Return the usage of a reply in the format of chat completions; None if the reply has none."""
    if reply.usage is not None:
        return dict(reply.usage)
    usage = reply.line.usage
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def build_error(reply: WireReply) -> dict[str, Any]:
    """Return the body of an error, for both protocols of OpenAI."""
    given = {"message": reply.error} if isinstance(reply.error, str) else reply.error
    kind = "server_error" if reply.status >= 500 else "invalid_request_error"
    usual = {
        "message": f"LocalServer was scripted to return status {reply.status}.",
        "type": kind,
        "param": None,
        "code": None,
    }
    return {"error": usual | {key: value for key, value in given.items() if value}}
