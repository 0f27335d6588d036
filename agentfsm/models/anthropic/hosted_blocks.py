"""Anthropic's own tools in the Messages API: how they are requested, and the outcome in the blocks of a reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core.errors import ModelError
from agentfsm.core.hosted_tools import CodeExecution, HostedMCP, HostedTool, WebSearch
from agentfsm.core.messages import AssistantMessage, Citation, HostedCall, HostedContent, HostedFile

if TYPE_CHECKING:
    from agentfsm.core.messages import Message
    from agentfsm.ports.model import Request

Block = dict[str, Any]

# Value of the header `anthropic-beta` that requests with MCP servers need.
MCP_BETA: Final = "mcp-client-2025-11-20"


# Encoding


def _encode_web_search(tool: WebSearch) -> Block:
    place = {name: value for name, value in (("country", tool.country), ("city", tool.city)) if value}
    options = {
        "allowed_domains": tool.allowed_domains,
        "blocked_domains": tool.blocked_domains,
        "max_uses": tool.max_uses,
        "user_location": {"type": "approximate", **place} if place else None,
    }
    # The version that all models support.
    return {"type": "web_search_20250305", "name": "web_search"} | {
        name: value for name, value in options.items() if value
    }


def _encode_code_execution(_tool: CodeExecution) -> Block:
    return {"type": "code_execution_20250825", "name": "code_execution"}


def _encode_mcp_toolset(tool: HostedMCP) -> Block:
    toolset: Block = {"type": "mcp_toolset", "mcp_server_name": tool.server}
    if tool.allowed_tools:
        toolset["default_config"] = {"enabled": False}
        toolset["configs"] = {name: {"enabled": True} for name in tool.allowed_tools}
    return toolset


_ENCODERS: Final[Mapping[type[HostedTool], Callable[[Any], Block]]] = {
    WebSearch: _encode_web_search,
    CodeExecution: _encode_code_execution,
    HostedMCP: _encode_mcp_toolset,
}


def unsupported_hosted_tool(tool: HostedTool) -> str | None:
    """Return the reason why the API does not have the tool or its options; None if it has."""
    if type(tool) not in _ENCODERS:
        names = ", ".join(kind.__name__ for kind in _ENCODERS)
        return (
            f"Anthropic's API has no {tool.name!r}, only {names}: use agentfsm.models.OpenAIResponses, or leave it out"
        )
    if isinstance(tool, WebSearch) and tool.allowed_domains and tool.blocked_domains:
        return "Anthropic's web search takes allowed_domains or blocked_domains, and not both: give one of them"
    return None


def encode_hosted_tools(request: Request) -> list[Block]:
    """Return the hosted tools of a request in the form of the API.

    Raises:
        ModelError: if the API does not have one of them.
    """
    for tool in request.hosted_tools:
        if (why := unsupported_hosted_tool(tool)) is not None:
            raise ModelError(why)
    return list(map(_encode, request.hosted_tools))


def _encode(tool: Any) -> Block:
    return _ENCODERS[type(tool)](tool)


def hosted_fields(request: Request, provider: str) -> Block:
    """Return the fields of the body that hosted tools need beside their definitions: servers, and the container."""
    servers = [_encode_server(tool) for tool in request.hosted_tools if isinstance(tool, HostedMCP)]
    container = "" if CodeExecution() not in request.hosted_tools else _find_container(request.messages, provider)
    return ({"mcp_servers": servers} if servers else {}) | ({"container": container} if container else {})


def _encode_server(tool: HostedMCP) -> Block:
    server = {"type": "url", "name": tool.server, "url": tool.url}
    return {**server, "authorization_token": tool.authorization} if tool.authorization else server


def _find_container(messages: Sequence[Message], provider: str) -> str:
    """Return the container of the newest reply that has one: its files are there, and its paused calls."""
    for message in reversed(messages):
        if isinstance(message, AssistantMessage) and message.hosted is not None and message.hosted.container:
            is_own = message.native is not None and message.native.provider == provider
            return message.hosted.container if is_own else ""
    return ""


# Decoding. Details of another form than expected are left out: an error would have the request sent again, and the
# provider would act again.


def _text(source: object, key: str) -> str:
    value = source.get(key) if isinstance(source, dict) else None
    return value if isinstance(value, str) else ""


def _dicts(value: object) -> list[Block]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, dict)]


# Blocks of the model itself.
_OWN_BLOCKS: Final = frozenset({"text", "tool_use", "thinking", "redacted_thinking"})
_USES: Final = frozenset({"server_tool_use", "mcp_tool_use"})
# Fields of results that only the provider can read.
_SEALED: Final = frozenset({"encrypted_content", "encrypted_stdout", "encrypted_index", "type"})


def read_hosted(blocks: Sequence[Block], container: str) -> HostedContent | None:
    """Return the outcome of Anthropic's own tools in the blocks of a reply; None if there is none."""
    content = HostedContent(
        calls=tuple(_read_calls(blocks)),
        citations=tuple(_read_citations(blocks)),
        files=tuple(_read_files(blocks)),
        container=container,
    )
    return content or None


def _read_calls(blocks: Sequence[Block]) -> Iterable[HostedCall]:
    results = {_text(block, "tool_use_id"): block for block in blocks if "tool_use_id" in block}
    used = {_text(block, "id") for block in blocks if block["type"] in _USES}
    for block in blocks:
        kind = block["type"]
        if kind in _USES:
            call_id = _text(block, "id")
            name = _text(block, "name")
            name = f"{_text(block, 'server_name')}.{name}" if kind == "mcp_tool_use" else _short_name(name)
            yield _build_call(name, call_id, block.get("input"), results.get(call_id))
        elif "tool_use_id" in block:
            if (call_id := _text(block, "tool_use_id")) not in used:  # its call is in the reply that was paused
                yield _build_call(_short_name(kind.removesuffix("_tool_result")), call_id, None, block)
        elif kind not in _OWN_BLOCKS:
            yield HostedCall(tool=kind)


def _short_name(name: str) -> str:
    return "code_execution" if name.endswith("code_execution") else name  # by bash or by an editor


def _build_call(tool: str, call_id: str, arguments: object, result: Block | None) -> HostedCall:
    parts = [] if result is None else _dicts(result.get("content"))
    codes = [code for part in parts if (code := _text(part, "error_code"))]
    output = "\n".join(filter(None, map(_render_part, parts))) or _text(result, "content")
    is_error = result is not None and result.get("is_error") is True
    return HostedCall(
        tool=tool,
        id=call_id,
        arguments=json.dumps(arguments, ensure_ascii=False) if arguments else "",
        output="" if codes or is_error else output,
        error=", ".join(codes) or (output or "failed" if is_error else None),
    )


def _render_part(part: Block) -> str:
    if "stdout" in part or "text" in part:
        return _text(part, "stdout") + _text(part, "stderr") + _text(part, "text")
    fields = {name: value for name, value in part.items() if name not in _SEALED and value is not None}
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def _read_citations(blocks: Sequence[Block]) -> Iterable[Citation]:
    start = 0
    for block in blocks:
        if block["type"] != "text":
            continue
        end = start + len(_text(block, "text"))
        for source in _dicts(block.get("citations")):
            yield Citation(
                url=_text(source, "url") or _text(source, "source"),
                title=_text(source, "title") or _text(source, "document_title"),
                file_id=_text(source, "file_id"),
                quote=_text(source, "cited_text"),
                start=start,
                end=end,
            )
        start = end


def _read_files(blocks: Sequence[Block]) -> Iterable[HostedFile]:
    for block in blocks:
        for result in _dicts(block.get("content")) if "tool_use_id" in block else ():
            for output in _dicts(result.get("content")):
                if file_id := _text(output, "file_id"):
                    yield HostedFile(id=file_id)
