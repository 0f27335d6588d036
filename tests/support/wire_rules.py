"""What OpenAI and Anthropic accept as the messages of a request: strict readers, written from their own rules.

Where the vendors say a rule in public, it is cited; what only their servers say is cited from where people were told.
The readers share nothing with the package but its encoders, whose bytes they read back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import attrs

from agentfsm import AssistantMessage
from agentfsm.core.messages import Message, NativeReply
from agentfsm.models.anthropic import wire as anthropic_wire
from agentfsm.models.openai import chat_wire, responses_wire
from agentfsm.models.openai.dialects import OPENAI, Dialect, find_dialect
from agentfsm.ports import Request, ToolDefinition

# A message as JSON.
Wire = dict[str, Any]

# The name of a function. OpenAI's reference: "Must be a-z, A-Z, 0-9, or contain underscores and dashes, with a maximum
# length of 64" (quoted in microsoft/semantic-kernel#5320). Anthropic: '^[a-zA-Z0-9_-]{1,64}$'
# (apify/tester-mcp-client#11).
NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# OpenAI says "Invalid 'messages[2].tool_calls[0].id': string too long. Expected a string with maximum length 40"
# (langmanus/langmanus#119, openclaw/openclaw#875).
ID_CHARS: Final = 40
# "tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'" (tailcallhq/forgecode#1142). Bedrock, which serves the
# same models, adds the 64: https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ToolResultBlock.html
ANTHROPIC_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# "A maximum of 4 blocks with cache_control may be provided. Found 5." (oguzbilgic/kern-ai#317)
MAX_MARKS: Final = 4
# OpenAI says "Invalid 'messages[2].tool_calls': array too long. Expected an array with maximum length 128"
# (openai/openai-dotnet#317, github/copilot-cli#669).
MAX_CALLS: Final = 128
MISTRAL: Final = find_dialect("api.mistral.ai", "mistral-small-latest")


class RefusedError(AssertionError):
    """The vendor would answer 400."""


def _require(holds: object, *what: object) -> None:
    if not holds:
        raise RefusedError(" ".join(str(each)[:300] for each in what))


def check_wires(messages: Sequence[Message], instructions: str = "") -> None:
    """Fail unless the vendors take these messages as those of a request, OpenAI at both of its addresses.

    Raises:
        RefusedError: when one does not, with its rule.
    """
    check_openai(openai_of(messages, instructions))
    check_mistral(openai_of(messages, instructions, MISTRAL))
    check_responses(responses_of(thinking(messages), instructions))
    check_anthropic_body(anthropic_body(messages, instructions))


def openai_of(messages: Sequence[Message], instructions: str = "", dialect: Dialect = OPENAI) -> list[Wire]:
    """Return the messages as the package's own encoder writes them, read back from its bytes."""
    body = chat_wire.encode(
        Request(instructions=instructions, messages=messages),
        model="m",
        limit_field="n",
        streamed=False,
        encoding_cache=chat_wire.build_encoding_cache(dialect=dialect),
    )
    wire: list[Wire] = json.loads(body)["messages"]
    return wire


# OpenAI


def check_openai(messages: Sequence[Wire]) -> None:
    """Fail unless these are messages of a chat completion as OpenAI takes them.

    Raises:
        RefusedError: when they are not, with the rule.
    """
    _require(messages, "no messages")
    open_ids: list[str] = []  # of calls that have no result yet
    known: set[str] = set()
    for message in messages:
        role = message.get("role")
        if role == "tool":
            _check_tool_message(message, open_ids, known)
            continue
        # "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'.
        # The following tool_call_ids did not have response messages" (BerriAI/litellm#10083).
        _require(not open_ids, "no response messages for", open_ids, "before a message of the", role)
        if role == "assistant":
            open_ids = _check_assistant_message(message, known)
        else:
            _require(role in ("system", "user"), "unknown role", role)
            _check_content(message.get("content"), is_user=role == "user")
    _require(not open_ids, "no response messages for", open_ids)


# What may come after a message of a role. By mistral-common 1.13, but for the user after the tool, who is answered with
# "Unexpected role 'user' after role 'tool'" and 400 (NousResearch/hermes-agent#20154, zed-industries/zed#37021).
MISTRAL_ORDER: Final = {
    "system": {"user", "assistant", "system"},
    "user": {"assistant", "system", "user"},
    "assistant": {"assistant", "user", "tool"},
    "tool": {"assistant", "tool"},
}
# By mistral-common: "Tool call id was t1.0 but must be a-z, A-Z, 0-9, with a length of 9."
MISTRAL_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")


def check_mistral(messages: Sequence[Wire]) -> None:
    """Fail unless these are messages of a chat completion as Mistral takes them, who takes fewer than OpenAI.

    Raises:
        RefusedError: when they are not, with the rule.
    """
    check_openai(messages)
    for before, after in pairwise(messages):
        _require(after["role"] in MISTRAL_ORDER[before["role"]], "role", after["role"], "after", before["role"])
    for message in messages:
        ids = [call["id"] for call in message.get("tool_calls", ())] + [message.get("tool_call_id", "123456789")]
        _require(all(MISTRAL_ID.fullmatch(each) for each in ids), "ids", ids)
    # By mistral-common: "Expected last role User or Tool (or Assistant with prefix) for serving but got assistant"
    _require(messages[-1]["role"] in {"user", "tool", "system"}, "the last message is one of the assistant")


def _check_tool_message(message: Wire, open_ids: list[str], known: set[str]) -> None:
    call_id = message.get("tool_call_id")
    # "Duplicate value for 'tool_call_id' of 'call_...', in messages[7] and messages[8]" (agno-agi/agno#5116).
    _require(call_id in open_ids or call_id not in known, "a second result of", call_id)
    # "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'" (miurla/morphic#136).
    _require(call_id in open_ids, "a result of", call_id, "that the preceding message did not call")
    open_ids.remove(str(call_id))
    # "Invalid value for 'content': expected a string, got null" after tools that return nothing (vercel/ai#5535).
    _require(isinstance(message.get("content"), str), "a result that is no text:", message.get("content"))


def _check_assistant_message(message: Wire, known: set[str]) -> list[str]:
    """Check what the assistant said, and return the ids of its calls."""
    if "tool_calls" not in message:
        # The reference: content is "required unless tool_calls or function_call is specified". An empty text is taken
        # by OpenAI and by few who speak like it, and nobody can read anything in it.
        _require(message.get("content"), "an assistant message without content and calls")
        _check_content(message["content"])
        return []
    _require(message.get("content") != "", "empty content beside calls: null it is (vercel/ai#12605)")
    calls = message["tool_calls"]
    # OpenAI says "Invalid 'messages[1].tool_calls': empty array. Expected an array with minimum length 1"
    # (openai/openai-node#1341).
    _require(calls, "empty tool_calls")
    _require(len(calls) <= MAX_CALLS, len(calls), "tool_calls, at most", MAX_CALLS)
    for call in calls:
        _check_call(call, known)
    return [call["id"] for call in calls]


def _check_call(call: Wire, known: set[str]) -> None:
    call_id, function = call.get("id"), call.get("function", {})
    _require(call.get("type") == "function", "a call of the type", call.get("type"))
    _require(isinstance(call_id, str) and 0 < len(call_id) <= ID_CHARS, "a call with the id", repr(call_id))
    # Two calls of one id cannot have a result each (openclaw/openclaw#47136: "duplicate tool_call_id").
    _require(call_id not in known, "two calls have the id", call_id)
    known.add(str(call_id))
    _require(NAME.fullmatch(function.get("name", "")), "a function called", repr(function.get("name")))
    # The reference: "the arguments to call the function with, as generated by the model in JSON format". Whoever reads
    # them on the way to another vendor needs an object: a text that is none is answered with 400 there.
    _require(_is_object(function.get("arguments")), "arguments that are no JSON object:", function.get("arguments"))


def _is_object(text: object) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return isinstance(text, str) and isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


def _check_content(content: object, *, is_user: bool = False) -> None:
    if isinstance(content, str):
        _require(content, "empty content")
        return
    # "content: expected a string, got null", and "messages[N].content: empty array" (n8n-io/n8n#36774).
    _require(isinstance(content, list) and content, "content that is neither text nor parts:", content)
    assert isinstance(content, list)
    for part in content:
        kind = part.get("type")
        _require(kind == "text" or (is_user and kind in HELD), "a part of the type", kind)
        _require(part.get("text") if kind == "text" else part[kind].get(HELD[kind]), "an empty part")


# What a user's message may hold beside text, and where it is (types/chat/chat_completion_content_part_param.py of the
# openai package 3.54). A tool's message holds text only (chat_completion_tool_message_param.py).
HELD: Final = {"image_url": "url", "input_audio": "data", "file": "file_data"}


# OpenAI's Responses API


def responses_of(messages: Sequence[Message], instructions: str = "") -> list[Wire]:
    """Return the messages as the package's own encoder writes them as items, read back from its bytes."""
    request = Request(instructions=instructions, messages=messages)
    wire: list[Wire] = json.loads(responses_wire.encode(request, model="m", streamed=False))["input"]
    return wire


def thinking(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as they would be if every second reply had been thought about before its text and calls."""
    thought: list[Message] = []
    for index, message in enumerate(messages):
        if isinstance(message, AssistantMessage) and index % 2:
            said = [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": message.text}]}
            ]
            called = [{"type": "function_call", "call_id": "x", "name": "x", "arguments": "{"} for _ in message.calls]
            items = [
                {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
                *(said if message.text.strip() else []),
                *called,
            ]
            native = NativeReply(provider="openai-responses", content=json.dumps(items))
            thought.append(attrs.evolve(message, native=native))
        else:
            thought.append(message)
    return thought


# "Invalid 'input[95].call_id': string too long. Expected a string with maximum length 64" (AnswerDotAI/fastllm#45).
CALL_ID_CHARS: Final = 64
# The parts that a message of each role may hold. "Invalid value: 'input_text'. Supported values are: 'output_text' and
# 'refusal'." is said of the assistant's; a recording is no part of any (types/responses/response_input_content_param.py
# of the openai package 3.54; vllm-project/vllm#47659).
ROLES: Final = {
    "user": {"input_text", "input_image", "input_file"},
    "system": {"input_text"},
    "developer": {"input_text"},
    "assistant": {"output_text", "refusal"},
}
# What a client that has nothing stored may send of each. An id is looked for, and "Item with id 'rs_...' not found.
# Items are not persisted when `store` is set to false" is the answer (vercel/ai#7543, NousResearch/hermes-agent#10217);
# of the status of thinking it says "Unknown parameter: 'input[3].status'" (1jehuang/jcode#1028).
FIELDS: Final = {
    "message": {"type", "role", "content", "phase"},
    "function_call": {"type", "call_id", "name", "arguments", "namespace", "caller"},
    "function_call_output": {"type", "call_id", "output"},
    "reasoning": {"type", "summary", "content", "encrypted_content"},
}


def check_responses(items: Sequence[Wire]) -> None:
    """Fail unless these are the input of a response as OpenAI takes it, where it stores nothing.

    Raises:
        RefusedError: when they are not, with the rule.
    """
    _require(items, "no input")
    called: dict[str, bool] = {}  # whether each call has its output
    for item, after in zip(items, [*items[1:], {}], strict=True):
        kind = item.get("type")
        # An item of the server's own tools goes back as it came.
        _require(item.keys() <= FIELDS.get(str(kind), item.keys()), "fields of", kind, "that are refused:", *item)
        _require(_is_unicode(item), "half of a surrogate pair in an item of the type", kind)
        if kind == "message":
            _check_said(item)
        elif kind == "function_call":
            _check_function_call(item, called)
        elif kind == "function_call_output":
            _check_output(item, called)
        elif kind == "reasoning":
            _check_reasoning(item, after)
        else:
            _require(str(kind).endswith(("_call", "_output")) or kind == "compaction", "an item of the type", kind)
    # "No tool output found for function call call_..." (agentjido/req_llm#454).
    waiting = [call_id for call_id, is_answered in called.items() if not is_answered]
    _require(not waiting, "no tool output for", waiting)


def _check_said(item: Wire) -> None:
    role, content = item.get("role"), item.get("content")
    _require(role in ROLES, "unknown role", role)
    if isinstance(content, str):
        _require(content, "empty content")
        return
    _require(isinstance(content, list) and content, "content that is neither text nor parts:", content)
    assert isinstance(content, list)
    for part in content:
        _require(part.get("type") in ROLES[str(role)], "a part of the type", part.get("type"), "of the", role)
        _check_held(part)


def _check_held(part: Wire) -> None:
    given = [part.get(name) for name in ("text", "refusal", "image_url", "file_url", "file_data") if part.get(name)]
    _require(len(given) == 1, "a part that does not hold one thing:", part)
    # The reference lists `detail` of an image as required, and `filename` stands beside `file_data` in its examples.
    _require(
        part["type"] != "input_image" or part.get("detail") in {"low", "high", "auto", "original"}, "detail:", part
    )
    _require("file_data" not in part or part.get("filename"), "file_data without a filename")


def _check_function_call(item: Wire, called: dict[str, bool]) -> None:
    call_id = item.get("call_id")
    _require(isinstance(call_id, str) and 0 < len(call_id) <= CALL_ID_CHARS, "a call with the call_id", repr(call_id))
    _require(call_id not in called, "two calls have the call_id", call_id)
    called[str(call_id)] = False
    _require(NAME.fullmatch(item.get("name", "")), "a function called", repr(item.get("name")))
    _require(_is_object(item.get("arguments")), "arguments that are no JSON object:", item.get("arguments"))


def _check_output(item: Wire, called: dict[str, bool]) -> None:
    call_id = item.get("call_id")
    # "No tool call found for function call output with call_id call_..." (agentjido/req_llm#426).
    _require(call_id in called, "no tool call found for the output of", call_id)
    _require(not called[str(call_id)], "a second output of", call_id)
    called[str(call_id)] = True
    output = item.get("output")
    if isinstance(output, str):
        return
    # Text, images and files (types/responses/response_function_call_output_item_list_param.py).
    _require(isinstance(output, list) and output, "an output that is neither text nor parts:", output)
    assert isinstance(output, list)
    for part in output:
        _require(part.get("type") in ROLES["user"], "an output with a part of the type", part.get("type"))
        _check_held(part)


def _check_reasoning(item: Wire, after: Wire) -> None:
    # The reference (types/responses/response_reasoning_item_param.py): `summary` is required, and "be sure to include
    # these items in your input"; "missing required field `summary`" (newo-ether/Agora#141).
    _require(isinstance(item.get("summary"), list), "thinking without a summary")
    _require(item.get("encrypted_content"), "thinking that is not sealed")
    # "Item 'rs_...' of type 'reasoning' was provided without its required following item" (openai/openai-agents-python
    # #1611): what it led to, which is the model's own.
    is_own = after.get("role", "assistant") == "assistant" and not str(after.get("type")).endswith("_output")
    _require(after and is_own, "thinking without its following item, but", after.get("type"), after.get("role"))


# Anthropic


def anthropic_body(messages: Sequence[Message], instructions: str = "", tools: Sequence[ToolDefinition] = ()) -> Wire:
    """Return a request with these messages as the package's own encoder writes it, read back from its bytes."""
    request = Request(instructions=instructions, messages=messages, tools=tools)
    body: Wire = json.loads(anthropic_wire.encode(request, model="m", streamed=False))
    return body


def check_anthropic_body(body: Wire) -> None:
    """Fail unless this is a request as Anthropic takes it, as far as messages, tools and marks go.

    Raises:
        RefusedError: when it is not, with the rule.
    """
    check_anthropic(body["messages"])
    blocks = [block for message in body["messages"] for block in message["content"]]
    # "Requests which include `tool_use` or `tool_result` blocks must define tools." (BerriAI/litellm#4689)
    has_calls = any(block["type"] in ("tool_use", "tool_result") for block in blocks)
    _require(body.get("tools") or not has_calls, "calls, and no tools are defined")
    # "tool_choice may only be specified while providing tools" (autogen's _anthropic_client.py).
    _require(body.get("tools") or "tool_choice" not in body, "tool_choice without tools")
    marked = [block for block in [*body.get("system", []), *body.get("tools", []), *blocks] if "cache_control" in block]
    _require(len(marked) <= MAX_MARKS, len(marked), "marks, at most", MAX_MARKS)
    for block in marked:
        # "thinking.cache_control: Extra inputs are not permitted" (UKGovernmentBEIS/inspect_ai#3967).
        _require("thinking" not in block.get("type", ""), "a mark on thinking")
        # "cache_control cannot be set for empty text" (serialx/vibecore#8).
        _require(block.get("text", "x").strip(), "a mark on a blank block")


def check_anthropic(messages: Sequence[Wire]) -> None:
    """Fail unless these are the messages of a request as Anthropic takes them.

    Raises:
        RefusedError: when they are not, with the rule.
    """
    _require(messages, "no messages")
    # "first message must use the "user" role" (lobehub/lobehub#1601).
    _require(messages[0].get("role") == "user", "the first message is not the user's")
    # "This model does not support assistant message prefill. The conversation must end with a user message."
    # (smallmain/vscode-unify-chat-provider#249)
    _require(messages[-1].get("role") == "user", "the last message is not the user's")
    known: set[str] = set()
    for message in messages:
        _check_blocks(message, known)
    for before, after in pairwise([{"role": "", "content": []}, *messages]):
        # "roles must alternate between "user" and "assistant"" (mattermost/mattermost-plugin-agents#180); Anthropic's
        # own servers merge neighbours by now (anthropics/courses#79), others that speak like them do not.
        _require(before["role"] != after["role"], "two messages in a row of the role", after["role"])
        _check_results(before, after)


def _check_blocks(message: Wire, known: set[str]) -> None:
    role, blocks = message.get("role"), message.get("content")
    _require(role in ("user", "assistant"), "unknown role", role)
    # "all messages must have non-empty content except for the optional final assistant message"
    # (anthropics/claude-code#6774).
    _require(isinstance(blocks, list) and blocks, "a message of the", role, "without content")
    assert isinstance(blocks, list)
    takes = {
        "user": {"text", "image", "document", "tool_result"},
        "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    }[str(role)]
    for block in blocks:
        kind = block.get("type")
        _require(kind in takes, "a block of the type", kind, "in a message of the", role)
        if kind == "text":
            # "text content blocks must be non-empty" (anthropics/claude-code#59812), "text content blocks must contain
            # non-whitespace text" (anthropics/claude-code#23369).
            _require(str(block.get("text", "")).strip(), "a blank text block")
        if kind == "tool_use":
            _check_tool_use(block, known)
    # "The request body is not valid JSON: no low surrogate in string" (anthropics/claude-code#2108).
    _require(_is_unicode(blocks), "half of a surrogate pair in a message of the", role)


def _check_tool_use(block: Wire, known: set[str]) -> None:
    call_id, name = block.get("id", ""), block.get("name", "")
    _require(ANTHROPIC_ID.fullmatch(call_id), "a tool_use with the id", repr(call_id))
    # "messages.1.content.1: `tool_use` ids must be unique" (anthropics/claude-code#20901).
    _require(call_id not in known, "two tool_use blocks have the id", call_id)
    known.add(call_id)
    _require(NAME.fullmatch(name), "a tool called", repr(name))
    # "tool_use.input: Input should be a valid dictionary" (anthropics/anthropic-sdk-typescript#648).
    _require(isinstance(block.get("input"), dict), "input that is no dictionary:", block.get("input"))


def _check_results(before: Wire, after: Wire) -> None:
    """Check that the results of a message are those of the calls of the one before it.

    Source: https://platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls
    """
    called = [block["id"] for block in before["content"] if block["type"] == "tool_use"]
    kinds = [block["type"] for block in after["content"]]
    results = [block.get("tool_use_id") for block in after["content"] if block["type"] == "tool_result"]
    # "unexpected `tool_use_id` found in `tool_result` blocks. Each `tool_result` block must have a corresponding
    # `tool_use` block in the previous message." (anthropics/claude-code#13460)
    _require(set(results) <= set(called), "results of", results, "where", called, "were called")
    _require(len(set(results)) == len(results), "two results of one call among", results)
    # "`tool_use` ids were found without `tool_result` blocks immediately after. Each `tool_use` block must have a
    # corresponding `tool_result` block in the next message." (anthropics/claude-code#5060)
    _require(set(called) <= set(results), "no result of", set(called) - set(results), "in the next message")
    # They come first in the content, and any text after them; the error is the one above (QwenLM/qwen-code#8161).
    _require("tool_result" not in kinds[len(results) :], "a tool_result behind other content:", kinds)
    for block in after["content"][: len(results)]:
        _check_result_content(block)


def _check_result_content(block: Wire) -> None:
    content = block.get("content")
    if isinstance(content, str):
        return
    _require(isinstance(content, list) and content, "a result that is neither text nor blocks:", content)
    assert isinstance(content, list)
    kinds = {each.get("type") for each in content}
    # types/tool_result_block_param.py of the anthropic package.
    _require(kinds <= {"text", "image", "document"}, "a result with blocks of", kinds)
    # "all content must be type `text` if `is_error` is true" (vellum-ai/vellum-assistant#18387).
    _require(kinds == {"text"} or not block.get("is_error"), "an error with blocks of", kinds)
    for each in content:
        _require(each["type"] != "text" or str(each.get("text", "")).strip(), "a blank text block in a result")
        # "tool_result.content.1.image.source.base64: image cannot be empty" (anthropics/claude-code#8947).
        given = (each.get("source") or {}).keys() & {"url", "data"}
        _require(each["type"] == "text" or len(given) == 1, "a block of a result without a source")


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
