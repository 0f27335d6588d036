"""Replies that have no end, of each wire: bodies, compressed ones, lines, events, text, arguments and calls."""

import json
import zlib

from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses
from tests.support.endless_server import Endless

KIB = 2**10
ADAPTERS = {"chat": OpenAIChat, "responses": OpenAIResponses, "anthropic": Anthropic}

FILLING = b"x" * (64 * KIB)
# What each wire says before the text of a reply that comes whole.
WHOLE = {
    "chat": b'{"choices": [{"message": {"content": "',
    "responses": b'{"output": [{"type": "message", "content": [{"type": "output_text", "text": "',
    "anthropic": b'{"content": [{"type": "text", "text": "',
}


def event(**fields):
    """Return an event of a stream."""
    return f"data: {json.dumps(fields)}\n\n".encode()


def delta(**fields):
    """Return a piece of a chat completion."""
    return event(choices=[{"index": 0, "delta": fields}])


def block(**fields):
    """Return the beginning of a block of Anthropic's."""
    return event(type="content_block_start", index=0, content_block=fields)


def addition(**fields):
    """Return a piece of a block of Anthropic's."""
    return event(type="content_block_delta", index=0, delta=fields)


def function(arguments):
    """Return a call of a chat completion."""
    return {"index": 0, "id": "c", "function": {"name": "f", "arguments": arguments}}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TEXT = "x" * (16 * KIB)
# What begins without end, for each wire: the head of the stream, and what follows again and again.
TEXTS = {
    "chat": (b"", delta(content=TEXT)),
    "responses": (b"", event(type="response.output_text.delta", delta=TEXT)),
    "anthropic": (block(type="text", text=""), addition(type="text_delta", text=TEXT)),
}
THOUGHTS = {
    "chat": (b"", delta(reasoning_content=TEXT)),
    "responses": (b"", event(type="response.reasoning_text.delta", delta=TEXT)),
    "anthropic": (block(type="thinking", thinking=""), addition(type="thinking_delta", thinking=TEXT)),
}
ARGUMENTS = {
    "chat": (b"", delta(tool_calls=[function(TEXT)])),
    "responses": (
        event(type="response.output_item.added", output_index=0, item=CALL),
        event(type="response.function_call_arguments.delta", output_index=0, delta=TEXT),
    ),
    "anthropic": (
        block(type="tool_use", id="c", name="f", input={}),
        addition(type="input_json_delta", partial_json=TEXT),
    ),
}
MANY = range(10_000)
CALLS = {
    "chat": [delta(tool_calls=[{**function("{}"), "index": n, "id": f"c{n}"}]) for n in MANY],
    "responses": [event(type="response.output_item.added", output_index=n, item=CALL) for n in MANY],
    "anthropic": [
        event(type="content_block_start", index=n, content_block={"type": "tool_use", "id": f"c{n}", "name": "f"})
        for n in MANY
    ],
}
CALLS_AT_ONCE = {
    "chat": {"choices": [{"message": {"tool_calls": [function("{}") for _ in MANY]}}]},
    "responses": {"output": [CALL for _ in MANY]},
    "anthropic": {"content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}} for _ in MANY]},
}


def compressed(*parts):
    """Return parts of a body in gzip, each of which may be said again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    # A full flush leaves nothing behind that the next part would refer to.
    return [packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH) for part in parts]


GZIP = b"content-encoding: gzip\r\n"
EVENTS = b"content-type: text/event-stream\r\n"
HEAD, BOMB = compressed(WHOLE["responses"], FILLING * 64)
STREAM_HEAD, STREAM_BOMB = compressed(b"data: ", FILLING * 64)

# Many values behind few commas.
NESTED = (b"[" * 12 + b"]" * 12 + b",") * 2**18
OBJECTS = b"[{}]," * 2**21

# By the wire, the way of asking and what has no end; each would take hundreds of megabytes.
ANSWERS = {
    "chat-whole-body": Endless(WHOLE["chat"], FILLING),
    "responses-whole-gzip": Endless(HEAD, BOMB, times=128, headers=GZIP),
    "anthropic-streamed-gzip": Endless(STREAM_HEAD, STREAM_BOMB, times=128, headers=GZIP + EVENTS),
    "chat-whole-values": Endless(b'{"choices": [', b"[]," * 2**20, times=20),
    "chat-whole-nested": Endless(b'{"choices": [', NESTED, times=1),
    "chat-whole-objects": Endless(b'{"choices": [', OBJECTS, times=1),
    "responses-streamed-nested": Endless(b"data: [", NESTED + b"0]\n\n", times=1, headers=EVENTS),
    "anthropic-streamed-objects": Endless(b"data: [", OBJECTS + b"0]\n\n", times=1, headers=EVENTS),
    "chat-streamed-line": Endless(b"data: ", FILLING, headers=EVENTS),
    **{
        f"{wire}-streamed-{what}": Endless(head, piece, headers=EVENTS)
        for what, wires in {"text": TEXTS, "thinking": THOUGHTS, "arguments": ARGUMENTS}.items()
        for wire, (head, piece) in wires.items()
    },
    **{f"{wire}-whole-calls": Endless(json.dumps(body).encode(), times=0) for wire, body in CALLS_AT_ONCE.items()},
    **{f"{wire}-streamed-calls": Endless(b"".join(each), times=0, headers=EVENTS) for wire, each in CALLS.items()},
}
# Errors, whose words are enough; the vendors' packages read these themselves.
ERRORS: dict[str, Endless] = {
    "chat-whole-error": Endless(b"", FILLING, status=b"500 Oops"),
    "responses-streamed-error": Endless(HEAD, BOMB, times=128, headers=GZIP, status=b"429 Slow down"),
    "anthropic-whole-error": Endless(b"", FILLING, status=b"529 Busy"),
}

# The same for each adapter, by what comes again and again.
STREAMS = {
    "lines": b"data: " + FILLING + b"\n",
    "comments": b": " + FILLING + b"\n\n",
    "events": event(type="ping", filling="x" * 64 * KIB),
}


def adapter_of(name):
    """Return the adapter that asks for an answer, and whether it asks for a stream."""
    wire, way, _what = name.split("-")
    return ADAPTERS[wire], way == "streamed"
