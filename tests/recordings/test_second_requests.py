"""The request after each recorded reply is valid by the vendor's own types, which strict servers check."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

import pytest
from anthropic.types import MessageParam
from anthropic.types.beta import BetaMessageParam
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputItemParam
from pydantic import TypeAdapter, ValidationError

from agentfsm import AssistantMessage, Outcome, TextPart, ToolCall, ToolResult, UserMessage
from agentfsm.models.anthropic import wire as anthropic_wire
from agentfsm.models.openai import chat_wire, responses_wire
from agentfsm.models.wire import InBandError, WireFormatError
from agentfsm.ports import Reply, Request
from tests.support.cassettes import Wire, of
from tests.support.recording_checks import fed

# Recorded errors, and replies that were cut off, have no next request.
READ_ERRORS = (WireFormatError, InBandError, AssertionError)
# Recordings with calls or content of the provider's own, at least.
LEAST = {Wire.CHAT: 63, Wire.RESPONSES: 151, Wire.MESSAGES: 71}
ASK = UserMessage(parts=(TextPart(text="go"),))
WIRES = {
    Wire.CHAT: (
        chat_wire.decode,
        chat_wire.ChatStreamAssembler,
        partial(chat_wire.encode, limit_field="max_tokens"),
        "messages",
        [ChatCompletionMessageParam],
    ),
    Wire.RESPONSES: (
        responses_wire.decode,
        responses_wire.ResponsesStreamAssembler,
        responses_wire.encode,
        "input",
        [ResponseInputItemParam],
    ),
    Wire.MESSAGES: (
        anthropic_wire.decode,
        anthropic_wire.AnthropicStreamAssembler,
        anthropic_wire.encode,
        "messages",
        [MessageParam, BetaMessageParam],
    ),
}


def continue_from(reply: Reply) -> Request:
    """Return the next request of a run: the results of the calls, and a word of the user."""
    calls = [
        ToolCall(id=f"t1.{n}", name=each.name or "f", arguments="{}", provider_id=each.id)
        for n, each in enumerate(reply.calls)
    ]
    results = [ToolResult(call_id=call.id, tool=call.name, outcome=Outcome.DONE, content="x") for call in calls]
    message = AssistantMessage(text=reply.text, calls=tuple(calls), native=reply.native)
    return Request(instructions="Help.", messages=(ASK, message, *results, ASK))


@cache
def load_types() -> dict[Wire, list[TypeAdapter[Any]]]:
    """Return the types of messages by wire. Some take seconds to build."""
    return {wire: [TypeAdapter(kind) for kind in kinds] for wire, (*_, kinds) in WIRES.items()}


def is_valid(wire: Wire, item: dict[str, Any]) -> bool:
    """Return whether an item is of a type of the vendor's package."""
    if item.get("type") == "reasoning" and "id" not in item:
        item = {**item, "id": "rs_1"}  # OpenAI itself refuses the id of sealed reasoning that it has not stored
    for adapter in load_types()[wire]:
        try:
            adapter.validate_python(item)
        except ValidationError:
            continue
        return True
    return False


@pytest.mark.parametrize("wire", WIRES)
def test_the_next_request_is_valid_by_the_vendors_types(wire: Wire) -> None:
    """Texts, calls, reasoning and hosted tools go back in a form that the vendor's package can read."""
    decode, assembler, encode, field, _ = WIRES[wire]
    faults, count = [], 0
    for streamed in (False, True):
        for recording in of(wire, streamed=streamed):
            try:
                reply = fed(assembler(), recording.body, 1 << 20) if streamed else decode(recording.body)
            except READ_ERRORS:  # an error, or a reply that was cut off
                continue
            if not (reply.calls or reply.native):
                continue
            count += 1
            body = json.loads(encode(continue_from(reply), model="m", streamed=False))
            faults += [
                f"{recording.name}: {json.dumps(item)[:300]}" for item in body[field] if not is_valid(wire, item)
            ]
    assert not faults
    assert count >= LEAST[wire]
