"""Tokens of tool definitions in the form in which a provider shows them to its model, as far as that is known.

OpenAI writes TypeScript, which was inferred from billed prompts (hmarr/openai-chat-tokens). Anthropic adds instructions
on how to call a tool, whose size its page on tool use gives for some models, and shows JSON. Other providers are
counted as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.ports.model import to_mutable_json

if TYPE_CHECKING:
    from agentfsm.ports.model import TokenCounter, ToolDefinition

_OPENAI_MODEL: Final = re.compile(r"(?:^|[/:.])(?:gpt-|o\d|chatgpt-)")
_CLAUDE_MODEL: Final = re.compile(r"claude-(?P<older>3|2|instant)?")

# Tokens of the message around the types, and of the start of the reply.
_OPENAI_FRAME: Final = 6

# Tokens of Anthropic's instructions about tools: 264 to 346 before Claude 4. Recorded replies of Claude 4.5 are billed
# 553 to 684 tokens for one small tool.
_CLAUDE_INSTRUCTIONS: Final = 500
_OLDER_CLAUDE_INSTRUCTIONS: Final = 300
# Claude's tokens per token of OpenAI's vocabulary, for JSON, in the recorded replies.
_CLAUDE_JSON_FACTOR: Final = 1.3

# Levels of a schema that are written as TypeScript; below them, and for a reference, the type is `any`.
_MAX_DEPTH: Final = 12
_TYPES: Final[Mapping[str, str]] = {"integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def count_tools(tools: Sequence[ToolDefinition], counter: TokenCounter, model_name: str = "") -> int:
    """Return the tokens of tool definitions in a request; 0 if there are none.

    Args:
        tools: The definitions.
        counter: Counts texts.
        model_name: Name of the model, which decides about the form; empty for JSON.
    """
    if not tools:
        return 0
    if _OPENAI_MODEL.search(model_name):
        return _OPENAI_FRAME + counter.count(_write_namespace(tools))
    fields = [attrs.asdict(each, recurse=False, filter=lambda _field, value: value is not False) for each in tools]
    as_json = counter.count(json.dumps(fields, ensure_ascii=False, default=dict))
    if (claude := _CLAUDE_MODEL.search(model_name)) is None:
        return as_json
    instructions = _OLDER_CLAUDE_INSTRUCTIONS if claude["older"] else _CLAUDE_INSTRUCTIONS
    return instructions + int(_CLAUDE_JSON_FACTOR * as_json)


def _write_namespace(tools: Sequence[ToolDefinition]) -> str:
    lines = ["# Tools", "", "## functions", "", "namespace functions {", ""]
    for tool in tools:
        lines += _write_comment(tool.description)
        schema: dict[str, Any] = to_mutable_json(tool.parameters)
        if schema.get("properties"):
            lines += [f"type {tool.name} = (_: {{", *_write_properties(schema, 0), "}) => any;", ""]
        else:
            lines += [f"type {tool.name} = () => any;", ""]
    return "\n".join([*lines, "} // namespace functions"])


def _write_comment(description: object) -> Iterator[str]:
    if isinstance(description, str) and description:
        yield from (f"// {line}" for line in description.splitlines())


def _write_properties(schema: Mapping[str, Any], depth: int) -> Iterator[str]:
    required = schema.get("required") or ()
    for name, each in schema["properties"].items():
        if isinstance(each, dict):
            yield from _write_comment(each.get("description"))
        yield f"{name}{'' if name in required else '?'}: {_write_type(each, depth)},"


def _write_type(schema: object, depth: int) -> str:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return "any"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join([_write_type(each, depth + 1) for each in choices])
    if "enum" in schema:
        return " | ".join([json.dumps(each, ensure_ascii=False) for each in schema["enum"]])
    match schema.get("type"):
        case "string":
            return "string"
        case "array":
            return f"{_write_type(schema.get('items'), depth + 1)}[]"
        case "object" if isinstance(schema.get("properties"), dict) and schema["properties"]:
            return "\n".join(["{", *_write_properties(schema, depth + 1), "}"])
        case "object":
            return "object"
        case str() as name:
            return _TYPES.get(name, "any")
        case list() as names:
            return " | ".join([_write_type({**schema, "type": name}, depth + 1) for name in names])
    return "any"
