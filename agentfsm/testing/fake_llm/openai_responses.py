"""Responses API of `LocalServer`: builds replies, and refuses the histories that OpenAI refuses.

Reasoning items have an `encrypted_content` that this server has issued; it accepts no other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, zip_longest
from typing import TYPE_CHECKING, Any, Final

from agentfsm.testing.fake_llm.openai_chat import build_usage
from agentfsm.testing.fake_llm.script import join_text, split_text

if TYPE_CHECKING:
    from agentfsm.testing.fake_llm.script import WireReply

Item = dict[str, Any]

_ENCRYPTED_PREFIX: Final = "sealed-by-local-server-"

# Finish reason of chat completions -> reason of an incomplete response.
_INCOMPLETE_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


# Refused requests.


def find_request_error(body: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the fields of the error with which OpenAI would refuse a request; None if its input is valid.

    Each function call needs exactly one output, anywhere after it; call ids are unique among calls; a reasoning item is
    encrypted and precedes the item that it led to. With `store` false, items cannot be referenced by id.
    """
    items = body.get("input")
    if not isinstance(items, list):
        reason: str | None = "'input' has to be an array."
    elif not items:
        reason = "Invalid 'input': empty array. Expected an array with minimum length 1."
    else:
        reason = _find_first_error(items, is_stored=body.get("store", True))
    return None if reason is None else {"message": reason, "param": "input"}


def _find_first_error(items: Sequence[Any], *, is_stored: bool) -> str | None:
    calls: dict[str, bool] = {}  # whether each has its output
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            return f"Invalid type for 'input[{index}]': expected an object."
        after = items[index + 1] if index + 1 < len(items) else None
        reason = _check_item(index, item, after, is_stored=is_stored) or _check_pairing(item, calls)
        if reason is not None:
            return reason
    waiting = next((call_id for call_id, is_answered in calls.items() if not is_answered), None)
    return None if waiting is None else f"No tool output found for function call {waiting}."


def _check_item(index: int, item: Item, after: Any, *, is_stored: bool) -> str | None:
    kind = item.get("type", "message")
    if "id" in item and not is_stored and kind in {"message", "function_call", "reasoning"}:
        return f"Item with id {item['id']!r} not found. Items are not persisted when `store` is set to false."
    if kind == "message":
        if item.get("role") not in {"system", "developer", "user", "assistant"}:
            return f"Invalid value for 'input[{index}].role'."
        if not isinstance(item.get("content"), str | list):
            return f"Invalid type for 'input[{index}].content': expected a string or an array of parts."
    if kind == "function_call" and not all(isinstance(item.get(name), str) for name in ("name", "arguments")):
        return f"Missing required parameter: 'input[{index}].name' or 'input[{index}].arguments'."
    if kind == "function_call_output" and not isinstance(item.get("output"), str | list):
        return f"Missing required parameter: 'input[{index}].output'."
    if kind == "reasoning":
        if not str(item.get("encrypted_content")).startswith(_ENCRYPTED_PREFIX):
            return "The encrypted content could not be verified."
        is_replied = isinstance(after, dict) and after.get("role", "assistant") == "assistant"
        if (after.get("type") if is_replied else None) in {None, "function_call_output"}:
            return "Item of type 'reasoning' was provided without its required following item."
    return None


def _check_pairing(item: Item, calls: dict[str, bool]) -> str | None:
    call_id = item.get("call_id")
    if item.get("type") == "function_call":
        if not isinstance(call_id, str) or call_id in calls:
            return f"Invalid or duplicate call_id {call_id!r} of a function call."
        calls[call_id] = False
    if item.get("type") == "function_call_output":
        if call_id not in calls:
            return f"No tool call found for function call output with call_id {call_id}."
        if calls[call_id]:
            return f"Duplicate function call output with call_id {call_id}."
        calls[call_id] = True
    return None


def find_newest_text(body: Mapping[str, Any]) -> str:
    """Return the text of the newest item of a request."""
    item = body["input"][-1]
    return join_text(item.get("output") or item.get("content"))


# Replies.


def build_reply(reply: WireReply, body: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a reply as one response."""
    return _response(reply, body, number, _status(reply), _output_items(reply, number))


def stream_reply(reply: WireReply, body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Return a reply as the events of a stream; the last event contains the whole response."""
    steps = count()
    for event in _events(reply, body, number):
        yield {**event, "sequence_number": next(steps)}


def _events(reply: WireReply, body: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    begun = _response(reply, body, number, "in_progress", [])
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    output = _output_items(reply, number)
    streams = [_item_events(place, item, reply.chunk_chars) for place, item in enumerate(output)]
    calls = [events for item, events in zip(output, streams, strict=True) if item["type"] == "function_call"]
    others = streams[: len(streams) - len(calls)]
    rows = [*others, *(zip_longest(*calls) if reply.interleave else calls)]
    yield from (event for row in rows for event in row if event is not None)
    status = _status(reply)
    yield {"type": f"response.{status}", "response": _response(reply, body, number, status, output)}


def starts_call(event: Mapping[str, Any]) -> bool:
    """Return whether an event of a stream is the first of a call."""
    return bool(event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call")


def _item_events(place: int, item: Item, size: int) -> list[dict[str, Any]]:
    """Return the events of an item, in order."""
    where = {"output_index": place, "item_id": item["id"]}
    if item["type"] == "function_call":
        bare: Item = {"arguments": ""}
        pieces = _text_events(
            "function_call_arguments", "arguments", item["arguments"], size, last={"name": item["name"]}
        )
    elif item["type"] == "reasoning":
        bare = {"summary": [], "encrypted_content": ""}
        pieces = [each for n, part in enumerate(item["summary"]) for each in _part_events("summary", n, part, size)]
    else:
        bare = {"content": []}
        pieces = [each for n, part in enumerate(item["content"]) for each in _part_events("content", n, part, size)]
    return [
        {"type": "response.output_item.added", "output_index": place, "item": item | bare | {"status": "in_progress"}},
        *[where | each for each in pieces],
        {"type": "response.output_item.done", "output_index": place, "item": item},
    ]


def _part_events(of: str, index: int, part: Item, size: int) -> list[dict[str, Any]]:
    kind, name, besides = _PART_KINDS[part["type"]]
    at = {f"{of}_index": index}
    place = f"response.{'reasoning_summary' if of == 'summary' else of}_part"
    return [
        {"type": f"{place}.added", **at, "part": {**part, name: ""}},
        *_text_events(kind, name, part[name], size, each=at | besides),
        {"type": f"{place}.done", **at, "part": part},
    ]


# By type of part: name of its events, field of its text, and additional fields of each event.
_PART_KINDS: Final[Mapping[str, tuple[str, str, Item]]] = {
    "output_text": ("output_text", "text", {"logprobs": []}),
    "refusal": ("refusal", "refusal", {}),
    "summary_text": ("reasoning_summary_text", "text", {}),
}


def _text_events(
    kind: str, name: str, text: str, size: int, *, each: Item | None = None, last: Item | None = None
) -> list[dict[str, Any]]:
    each, last = each or {}, last or {}
    deltas = [{"type": f"response.{kind}.delta", **each, "delta": piece} for piece in split_text(text, size)]
    return [*deltas, {"type": f"response.{kind}.done", **each, **last, name: text}]


def _output_items(reply: WireReply, number: int) -> list[Item]:
    items: list[Item] = []
    if reply.thinking:
        summary = [{"type": "summary_text", "text": reply.thinking}]
        items.append(
            {
                "id": f"rs_{number}",
                "type": "reasoning",
                "summary": summary,
                "encrypted_content": f"{_ENCRYPTED_PREFIX}{number}",
            }
        )
    parts: list[Item] = []
    if reply.text:
        parts.append({"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []})
    if reply.refusal_text:
        parts.append({"type": "refusal", "refusal": reply.refusal_text})
    if parts:
        message = {"id": f"msg_{number}", "type": "message", "status": "completed", "role": "assistant"}
        items.append({**message, "content": parts})
    for index, each in enumerate(reply.calls):
        call = {"id": f"fc_{number}_{index}", "type": "function_call", "status": "completed", "name": each.name}
        items.append({**call, "call_id": f"call_{number}_{index}", "arguments": each.arguments})
    return items


def _incomplete_reason(reply: WireReply) -> str | None:
    return _INCOMPLETE_REASONS.get(reply.finish_reason or str(reply.line.finish_reason))


def _status(reply: WireReply) -> str:
    return "completed" if _incomplete_reason(reply) is None else "incomplete"


def _response(reply: WireReply, body: dict[str, Any], number: int, status: str, output: list[Item]) -> dict[str, Any]:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": _incomplete_reason(reply)} if status == "incomplete" else None,
        "model": body.get("model"),
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "usage": None if status == "in_progress" else _usage(reply),
        **({} if status == "in_progress" else reply.fields),
    }


def _usage(reply: WireReply) -> dict[str, Any] | None:
    given = build_usage(reply)
    if given is None:
        return None
    read, written = given.get("prompt_tokens", 0), given.get("completion_tokens", 0)
    cached, thought = given.get("prompt_tokens_details", {}), given.get("completion_tokens_details", {})
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, **cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0, **thought},
        "total_tokens": read + written,
    }
