"""Messages API of `LocalServer`: builds replies, and refuses the histories that Anthropic refuses.

A stream contains the arguments of a call as text, unchanged. In a whole reply, malformed arguments are a JSON string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from agentfsm.ports.model import FinishReason
from agentfsm.testing.fake_llm.script import join_text, split_text

if TYPE_CHECKING:
    from agentfsm.testing.fake_llm.script import WireReply

# Signature of all reasoning blocks.
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
_STOP_REASONS: Final = {
    FinishReason.STOP: "end_turn",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTENT_FILTER: "refusal",
    FinishReason.REFUSAL: "refusal",
}


# Refused requests.


def find_request_error(body: dict[str, Any]) -> dict[str, str] | None:
    """Return the fields of the error with which Anthropic would refuse a request; None if it is valid.

    Checked are the messages and the required fields. The words are close to Anthropic's.
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
    """Return whether any message contains a call or a result."""
    kinds = {block.get("type") for message in messages for block in _content_blocks(message)}
    return bool(kinds & {"tool_use", "tool_result"})


def _content_blocks(message: Any) -> list[dict[str, Any]]:
    """Return the blocks of a message; a plain text counts as one block."""
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


def find_newest_text(body: Mapping[str, Any]) -> str:
    """Return the text of the newest block of a request: of a message, or of a tool result."""
    block = _content_blocks(body["messages"][-1])[-1]
    return join_text(block.get("text") or block.get("content"))


# Replies.


def build_reply(reply: WireReply, body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a reply in one piece."""
    blocks = [{**block, **_block_body(block, text)} for block, text in _scripted_blocks(reply, number)]
    return {**_envelope(reply, body, number), "content": blocks, **_stop_fields(reply)}


def stream_reply(reply: WireReply, body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Return a reply as the events of a stream; calls are never interleaved."""
    yield {"type": "message_start", "message": {**_envelope(reply, body, number), "content": [], "stop_reason": None}}
    yield {"type": "ping"}
    for index, (block, text) in enumerate(_scripted_blocks(reply, number)):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for delta in _deltas(block, split_text(text, reply.chunk_chars)):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    usage = {"usage": _envelope(reply, body, number).get("usage", {})}
    yield {"type": "message_delta", "delta": _stop_fields(reply), **usage}
    yield {"type": "message_stop"}


def build_error(reply: WireReply) -> dict[str, Any]:
    """Return the body of an error."""
    given = {"message": reply.error} if isinstance(reply.error, str) else dict(reply.error)
    kind = _ERROR_TYPES.get(reply.status, "api_error" if reply.status >= 500 else _ERROR_TYPES[400])
    usual = {"type": kind, "message": f"LocalServer was scripted to return status {reply.status}."}
    return {"type": "error", "error": usual | {key: value for key, value in given.items() if value}}


def _scripted_blocks(reply: WireReply, number: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each block as a stream starts it, with the text that follows."""
    if reply.thinking:
        yield {"type": "thinking", "thinking": "", "signature": ""}, reply.thinking
    if reply.text:
        yield {"type": "text", "text": ""}, reply.text
    for index, each in enumerate(reply.calls):
        block = {"type": "tool_use", "id": f"toolu_{number}_{index}", "name": each.name, "input": {}}
        yield block, each.arguments


def starts_call(event: Mapping[str, Any]) -> bool:
    """Return whether an event of a stream is the first of a call."""
    return bool(event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use")


def _block_body(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] == "thinking":
        return {"thinking": text, "signature": SIGNATURE}
    if block["type"] != "tool_use":
        return {"text": text}
    try:
        return {"input": json.loads(text)}
    except ValueError:
        return {"input": text}


def _deltas(block: dict[str, Any], pieces: list[str]) -> Iterator[dict[str, Any]]:
    kinds = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
    names = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
    for piece in pieces:
        yield {"type": kinds[block["type"]], names[block["type"]]: piece}
    if block["type"] == "thinking":
        yield {"type": "signature_delta", "signature": SIGNATURE}


def _stop_fields(reply: WireReply) -> dict[str, Any]:
    refusal, given = reply.refusal_text, reply.line.finish_reason
    usual = "refusal" if refusal else "tool_use" if reply.calls else "end_turn"
    details = {"type": "refusal", "category": None, "explanation": refusal} if refusal else None
    reason = reply.finish_reason or (usual if given is None else _STOP_REASONS[given])
    return {"stop_reason": reason, "stop_sequence": None, "stop_details": details}


def _envelope(reply: WireReply, body: dict[str, Any], number: int) -> dict[str, Any]:
    usage = _usage(reply)
    named = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body.get("model"), **reply.fields}
    return named if usage is None else {**named, "usage": usage}


def _usage(reply: WireReply) -> dict[str, Any] | None:
    if reply.usage is not None:
        return dict(reply.usage)
    usage = reply.line.usage
    if usage is None:
        return None
    return {
        "input_tokens": usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "output_tokens": usage.output_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.cache_write_tokens - usage.cache_write_1h_tokens,
            "ephemeral_1h_input_tokens": usage.cache_write_1h_tokens,
        },
        "cache_read_input_tokens": usage.cached_tokens,
    }
