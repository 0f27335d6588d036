"""Anthropic's messages as `LocalServer` speaks them: what is refused, and a scripted answer, whole and streamed.

Arguments that are scripted as text are sent as that text in a stream; whole, they have to be a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from agentfsm.testing.fake_llm.script import format_arguments, split_text

if TYPE_CHECKING:
    from agentfsm.testing.fake_llm.script import Say

# The signature of all that is thought here.
SIGNATURE: Final = "c2lnbmVk"

_ID_PATTERN: Final = re.compile(r"[a-zA-Z0-9_-]+")
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# What is refused


def find_request_error(body: dict[str, Any]) -> dict[str, str] | None:
    """Return the error by which Anthropic refuses a request for its messages, or for fields that it needs.

    Args:
        body: The JSON of the request.

    Returns:
        The fields of the error, in words close to Anthropic's, or None where the request is in order.
    """
    reason = _find_reason(body)
    return None if reason is None else {"message": reason}


def _find_reason(body: dict[str, Any]) -> str | None:
    for name, kind in (("model", str), ("max_tokens", int), ("messages", list)):
        if not isinstance(body.get(name), kind):
            return f"{name}: Field required"
    messages = body["messages"]
    if not messages or not isinstance(messages[0], dict) or messages[0].get("role") != "user":
        return "messages: first message must use the user role"
    if has_calls(messages) and not body.get("tools"):
        return "Requests which include `tool_use` or `tool_result` blocks must define tools."
    return _check_messages(messages)


def has_calls(messages: list[Any]) -> bool:
    """Whether any of the messages holds a call or its result."""
    kinds = {block.get("type") for message in messages for block in _content_blocks(message)}
    return bool(kinds & {"tool_use", "tool_result"})


def _content_blocks(message: Any) -> list[dict[str, Any]]:
    """Return the blocks of a message; text alone is one block."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _check_messages(messages: list[Any]) -> str | None:
    called: list[str] = []  # by the message before
    seen: set[str] = set()
    for index, message in enumerate(messages):
        blocks = _content_blocks(message)
        role = message.get("role") if isinstance(message, dict) else None
        if role not in {"user", "assistant"} or not blocks:
            return f"messages.{index}: all messages must have a role of 'user' or 'assistant' and non-empty content"
        if any(block.get("type") == "text" and not str(block.get("text") or "").strip() for block in blocks):
            return f"messages.{index}: text content blocks must contain non-whitespace text"
        if reason := _check_results(index, blocks, called):
            return reason
        called = [str(block.get("id")) for block in blocks if block.get("type") == "tool_use"]
        if not all(_ID_PATTERN.fullmatch(call_id) for call_id in called):
            return f"messages.{index}: tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
        if len(seen | set(called)) < len(seen) + len(called):
            return f"messages.{index}: `tool_use` ids must be unique"
        seen.update(called)
    return _format_unanswered(len(messages), called) if called else None


def _check_results(index: int, blocks: list[dict[str, Any]], called: list[str]) -> str | None:
    kinds = [block.get("type") for block in blocks]
    results = [str(block.get("tool_use_id")) for block in blocks if block.get("type") == "tool_result"]
    if set(results) - set(called):
        return (
            f"messages.{index}: unexpected `tool_use_id` found in `tool_result` blocks. Each `tool_result` block must "
            "have a corresponding `tool_use` block in the previous message."
        )
    if sorted(results) != sorted(called) or "tool_result" in kinds[len(results) :]:
        return _format_unanswered(index, called)
    return None


def _format_unanswered(index: int, called: list[str]) -> str:
    return (
        f"messages.{index - 1}: `tool_use` ids were found without `tool_result` blocks immediately after: "
        f"{', '.join(called)}. Each `tool_use` block must have a corresponding `tool_result` block in the next message."
    )


# What is sent


def build_reply(say: Say, body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the answer in one piece."""
    blocks = [{**block, **_block_body(block, text)} for block, text in _scripted_blocks(say, number)]
    return {**_envelope(say, body, number), "content": blocks, **_stop_fields(say)}


def stream_reply(say: Say, body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Return the answer as the events of a stream; calls are never mixed."""
    yield {"type": "message_start", "message": {**_envelope(say, body, number), "content": [], "stop_reason": None}}
    yield {"type": "ping"}
    for index, (block, text) in enumerate(_scripted_blocks(say, number)):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for delta in _deltas(block, split_text(text, say.chunk_chars)):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    usage = {"usage": _envelope(say, body, number).get("usage", {})}
    yield {"type": "message_delta", "delta": _stop_fields(say), **usage}
    yield {"type": "message_stop"}


def build_error(say: Say) -> dict[str, Any]:
    """Return the body of an error."""
    given = {"message": say.error} if isinstance(say.error, str) else dict(say.error)
    kind = _ERROR_TYPES.get(say.status, "api_error" if say.status >= 500 else _ERROR_TYPES[400])  # noqa: PLR2004  HTTP's own
    usual = {"type": kind, "message": f"LocalServer was told to answer {say.status}."}
    return {"type": "error", "error": usual | {key: value for key, value in given.items() if value}}


def _scripted_blocks(say: Say, number: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Each block as a stream begins it, and the text that fills it."""
    if say.thinking:
        yield {"type": "thinking", "thinking": "", "signature": ""}, say.thinking
    if say.text:
        yield {"type": "text", "text": ""}, say.text
    for index, (name, given) in enumerate(say.calls):
        block = {"type": "tool_use", "id": f"toolu_{number}_{index}", "name": name, "input": {}}
        yield block, format_arguments(given)


def _block_body(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] == "thinking":
        return {"thinking": text, "signature": SIGNATURE}
    return {"input": json.loads(text)} if block["type"] == "tool_use" else {"text": text}


def _deltas(block: dict[str, Any], pieces: list[str]) -> Iterator[dict[str, Any]]:
    kinds = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
    names = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
    for piece in pieces:
        yield {"type": kinds[block["type"]], names[block["type"]]: piece}
    if block["type"] == "thinking":
        yield {"type": "signature_delta", "signature": SIGNATURE}


def _stop_fields(say: Say) -> dict[str, Any]:
    usual = "refusal" if say.refusal else "tool_use" if say.calls else "end_turn"
    details = {"type": "refusal", "category": None, "explanation": say.refusal} if say.refusal else None
    return {"stop_reason": say.finish_reason or usual, "stop_sequence": None, "stop_details": details}


def _envelope(say: Say, body: dict[str, Any], number: int) -> dict[str, Any]:
    named = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body.get("model")}
    if say.without_usage:
        return named
    words = say.thinking + say.text + "".join(format_arguments(given) for _, given in say.calls)
    asked = len(json.dumps(body["messages"], ensure_ascii=False)) // 4
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    usual = {"input_tokens": asked, "output_tokens": len(words) // 4, **cached}
    return {**named, "usage": usual if say.usage is None else dict(say.usage)}
