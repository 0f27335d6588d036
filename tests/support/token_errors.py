"""How far our count of a request is from the provider's bill, by the recorded requests with tools of the agent's own.

    python -m tests.support.token_errors

Plain is the count of the tools as JSON; shown, in the form in which the provider shows them; corrected, the count of a
conversation's second request after the bill of its first.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Final

import attrs
import tiktoken

from agentfsm import AssistantMessage, Outcome, TextPart, ToolCall, ToolResult, UserMessage
from agentfsm.core.messages import Message
from agentfsm.models.anthropic.wire import AnthropicStreamAssembler
from agentfsm.models.anthropic.wire import decode as decode_message
from agentfsm.models.openai.chat_wire import ChatStreamAssembler
from agentfsm.models.openai.chat_wire import decode as decode_chat
from agentfsm.models.openai.responses_wire import ResponsesStreamAssembler
from agentfsm.models.openai.responses_wire import decode as decode_response
from agentfsm.ports import TokenCounter, ToolDefinition
from agentfsm.tokens.ledger import TokenLedger
from agentfsm.tokens.tiktoken_counter import FALLBACK_ENCODING, TiktokenCounter
from agentfsm.tokens.tool_prompts import count_tools
from tests.support.cassettes import OK, Recording, Wire, recordings
from tests.support.histories import run_of
from tests.support.recording_checks import fed
from tests.support.vocabulary import vocabulary_dir

READERS: Final[Mapping[Wire, Any]] = {
    Wire.CHAT: (decode_chat, ChatStreamAssembler),
    Wire.RESPONSES: (decode_response, ResponsesStreamAssembler),
    Wire.MESSAGES: (decode_message, AnthropicStreamAssembler),
}
# Fields of a request that add tokens which are not counted here: schemas of answers, and what the server keeps.
OTHERS: Final = {"response_format", "text", "output_config", "previous_response_id", "functions"}


class OtherContentError(Exception):
    """A request has content that is not counted here: pictures, files, thinking, tools of the provider."""


@attrs.frozen(kw_only=True)
class Counted:
    """A recorded request."""

    name: str
    family: str
    billed: int
    # Tokens.
    plain: int
    shown: int
    corrected: int | None
    # None for a first request.


def measure() -> list[Counted]:
    """Count each recorded request that has tools of the agent's own, and no content of another kind."""
    counters = _counters()
    found: list[Counted] = []
    firsts: dict[str, tuple[_Asked, TokenLedger]] = {}
    bodies: set[str] = set()
    for recording in recordings():
        body = json.dumps(recording.request, sort_keys=True)
        if recording.status != OK or recording.wire not in READERS or body in bodies:
            continue
        bodies.add(body)
        try:
            asked = _read(recording)
        except OtherContentError:
            continue
        if not asked.billed or not asked.tools:
            continue
        counter = counters[_encoding(asked.model)]
        instructions = counter.count(asked.instructions)
        ledger = TokenLedger(counter, overhead_tokens=instructions + count_tools(asked.tools, counter, asked.model))
        ledger.update(run_of(tuple(asked.messages)))
        cassette = recording.name.rpartition(" #")[0]
        first, before = firsts.get(cassette, (None, None))
        corrected = None
        if first is None or before is None or not asked.follows(first):
            firsts[cassette] = asked, ledger
        else:
            before.calibrate(first.billed)
            corrected = ledger.request_tokens + before.correction_tokens
        found.append(
            Counted(
                name=recording.name,
                family="Claude" if recording.wire is Wire.MESSAGES else "OpenAI",
                billed=asked.billed,
                plain=instructions + ledger.shown_tokens + count_tools(asked.tools, counter),
                shown=ledger.request_tokens,
                corrected=corrected,
            )
        )
    return found


def summarise(found: list[Counted]) -> dict[tuple[str, str], tuple[int, float, float, float]]:
    """Return the number of requests, and the least, median and greatest error in per cent, by family and count."""
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in found:
        for count in ("plain", "shown", "corrected"):
            if (tokens := getattr(each, count)) is not None:
                errors[each.family, count].append(100 * (tokens / each.billed - 1))
    return {key: (len(all_), min(all_), median(all_), max(all_)) for key, all_ in sorted(errors.items())}


@attrs.frozen(kw_only=True)
class _Asked:
    model: str
    instructions: str
    messages: list[Message]
    tools: tuple[ToolDefinition, ...]
    billed: int

    def follows(self, first: _Asked) -> bool:
        return self.tools == first.tools and self.messages[: len(first.messages)] == first.messages != self.messages


def _counters() -> dict[str, TokenCounter]:
    os.environ["TIKTOKEN_CACHE_DIR"] = str(vocabulary_dir())
    return {
        name: TiktokenCounter(encoding=name, exact=True, vocabulary=tiktoken.get_encoding(name))
        for name in ("cl100k_base", "o200k_base")
    }


def _encoding(model: str) -> str:
    try:
        return tiktoken.encoding_name_for_model(model)
    except KeyError:
        return FALLBACK_ENCODING


def _read(recording: Recording) -> _Asked:
    request = recording.request
    if OTHERS & request.keys():
        raise OtherContentError
    decode, assembler = READERS[recording.wire]
    tools = tuple(_tool(each) for each in request.get("tools") or ())
    reply = fed(assembler(), recording.body, 1 << 20) if recording.is_streamed else decode(recording.body)
    given = request.get("messages") or request.get("input") or []
    entries = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = _text(request.get("system") or request.get("instructions"))
    instructions += "".join(
        _text(each.get("content")) for each in entries if each.get("role") in {"system", "developer"}
    )
    return _Asked(
        model=request.get("model") or "claude-3",
        instructions=instructions,
        messages=[message for each in entries for message in _messages(each)],
        tools=tools,
        billed=0 if reply.usage is None else reply.usage.input_tokens,
    )


def _tool(entry: Mapping[str, Any]) -> ToolDefinition:
    if entry.get("type") not in {None, "function", "custom"} or entry.get("format"):
        raise OtherContentError
    fields = entry.get("function") or entry
    schema = fields.get("input_schema") or fields.get("parameters") or {}
    return ToolDefinition(name=fields["name"], description=fields.get("description") or "", parameters=schema)


def _messages(entry: Mapping[str, Any]) -> Iterator[Message]:
    kind, role, content = entry.get("type", "message"), entry.get("role"), entry.get("content")
    if kind == "function_call":
        yield AssistantMessage(calls=(_call(entry["name"], entry["arguments"]),))
    elif kind == "function_call_output":
        yield _result(entry["output"])
    elif kind != "message":
        raise OtherContentError
    elif role == "tool":
        yield _result(content)
    elif role == "assistant":
        calls = [_call(**_only(each["function"])) for each in entry.get("tool_calls") or ()]
        blocks = content if isinstance(content, list) else ()
        calls += [_call(each["name"], json.dumps(each["input"])) for each in blocks if each["type"] == "tool_use"]
        yield AssistantMessage(text=_text(content), calls=tuple(calls))
    elif role == "user":
        if isinstance(content, list):
            yield from [_result(each["content"]) for each in content if each["type"] == "tool_result"]
        if text := _text(content):
            yield UserMessage(parts=(TextPart(text=text),))


def _only(function: Mapping[str, Any]) -> dict[str, str]:
    return {"name": function["name"], "arguments": function["arguments"]}


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="t1.0", name=name, arguments=arguments)


def _result(content: Any) -> ToolResult:
    return ToolResult(call_id="t1.0", tool="tool", outcome=Outcome.DONE, content=_text(content))


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for block in content:
        if block["type"] in {"text", "input_text", "output_text"}:
            texts.append(block["text"])
        elif block["type"] not in {"tool_use", "tool_result"}:
            raise OtherContentError
    return "\n".join(texts)


def main() -> None:
    """Print the errors."""
    print("Error of the count of a request against the bill: requests, least, median, greatest")  # noqa: T201
    for (family, count), (requests, *errors) in summarise(measure()).items():
        print(f"{family:8}{count:11}{requests:4}", *[f"{error:+7.1f} %" for error in errors])  # noqa: T201


if __name__ == "__main__":
    main()
