"""OpenAI's own tools in the Responses API: how they are requested, and the outcome in the items of a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import ModelError
from agentfsm.core.hosted_tools import CodeExecution, FileSearch, HostedMCP, HostedTool, ImageGeneration, WebSearch
from agentfsm.core.messages import Citation, HostedCall, HostedContent, HostedFile, ImagePart
from agentfsm.models.openai.shared import explain_foreign_call

if TYPE_CHECKING:
    from agentfsm.ports.model import Request

Item = dict[str, Any]


# Encoding


def _drop_empty(fields: Mapping[str, object]) -> Item:
    return {name: value for name, value in fields.items() if value not in (None, "", (), [], {})}


def _encode_web_search(tool: WebSearch) -> Item:
    place = _drop_empty({"country": tool.country, "city": tool.city})
    return _drop_empty(
        {
            "type": "web_search",
            "filters": _drop_empty({"allowed_domains": tool.allowed_domains}),
            "user_location": {"type": "approximate", **place} if place else None,
        }
    )


def _encode_code_execution(_tool: CodeExecution) -> Item:
    return {"type": "code_interpreter", "container": {"type": "auto"}}


def _encode_image_generation(tool: ImageGeneration) -> Item:
    return _drop_empty({"type": "image_generation", **attrs.asdict(tool)})


def _encode_file_search(tool: FileSearch) -> Item:
    ids = tool.vector_store_ids
    return _drop_empty({"type": "file_search", "vector_store_ids": ids, "max_num_results": tool.max_results})


def _encode_mcp(tool: HostedMCP) -> Item:
    return _drop_empty(
        {
            "type": "mcp",
            "server_label": tool.server,
            "server_url": tool.url,
            "authorization": tool.authorization,
            "allowed_tools": tool.allowed_tools,
            "require_approval": "never",
        }
    )


_ENCODERS: Final[Mapping[type[HostedTool], Callable[[Any], Item]]] = {
    WebSearch: _encode_web_search,
    CodeExecution: _encode_code_execution,
    ImageGeneration: _encode_image_generation,
    FileSearch: _encode_file_search,
    HostedMCP: _encode_mcp,
}
# Values of `include` that request the results of a tool.
_RESULTS: Final[Mapping[type[HostedTool], str]] = {
    WebSearch: "web_search_call.action.sources",
    CodeExecution: "code_interpreter_call.outputs",
    FileSearch: "file_search_call.results",
}


def unsupported_hosted_tool(tool: HostedTool) -> str | None:
    """Return the reason why the API does not have the tool or one of its options; None if it has all."""
    if type(tool) not in _ENCODERS:
        return f"OpenAI's Responses API has no {tool.name!r}: leave it out of the agent's tools"
    if isinstance(tool, WebSearch):
        for option, value in (("blocked_domains", tool.blocked_domains), ("max_uses", tool.max_uses)):
            if value:
                return f"OpenAI's web search has no {option}: leave it out of WebSearch(...)"
    return None


def encode_hosted_tools(request: Request) -> list[Item]:
    """Return the hosted tools of a request in the form of the API.

    Raises:
        ModelError: if the API does not have one of them.
    """
    for tool in request.hosted_tools:
        if (why := unsupported_hosted_tool(tool)) is not None:
            raise ModelError(why)
    return list(map(_encode, request.hosted_tools))


def _encode(tool: Any) -> Item:
    return _ENCODERS[type(tool)](tool)


def list_result_fields(request: Request) -> list[str]:
    """Return the values of `include` that request the results of the hosted tools."""
    return [_RESULTS[type(tool)] for tool in request.hosted_tools if type(tool) in _RESULTS]


# Decoding. Details of another form than expected are left out: an error would have the request sent again, and the
# provider would act again.


def _text(source: object, key: str) -> str:
    value = source.get(key) if isinstance(source, dict) else None
    return value if isinstance(value, str) else ""


def _number(source: Item, key: str) -> int | None:
    value = source.get(key)
    return value if isinstance(value, int) else None


def _dicts(source: object, key: str) -> list[Item]:
    values = source.get(key) if isinstance(source, dict) else None
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""


def _read_web_search(item: Item) -> HostedCall:
    action = item.get("action")
    action = dict(action) if isinstance(action, dict) else {}
    sources = action.pop("sources", None)
    return HostedCall(tool="web_search", arguments=_as_json(_drop_empty(action)), output=_as_json(sources))


def _read_file_search(item: Item) -> HostedCall:
    queries = _drop_empty({"queries": item.get("queries")})
    return HostedCall(tool="file_search", arguments=_as_json(queries), output=_as_json(item.get("results")))


def _read_code(item: Item) -> HostedCall:
    logs = "".join([_text(output, "logs") for output in _dicts(item, "outputs")])
    return HostedCall(tool="code_execution", arguments=_text(item, "code"), output=logs)


def _read_image(item: Item) -> HostedCall:
    return HostedCall(tool="image_generation", arguments=_text(item, "revised_prompt"))


def _read_mcp_call(item: Item) -> HostedCall:
    error = item.get("error")
    return HostedCall(
        tool=_mcp_name(item),
        arguments=_text(item, "arguments"),
        output=_text(item, "output"),
        error=error if isinstance(error, str) else _as_json(error) or None,
    )


def _mcp_name(item: Item) -> str:
    return f"{_text(item, 'server_label')}.{_text(item, 'name')}"


_READERS: Final[Mapping[str, Callable[[Item], HostedCall]]] = {
    "web_search_call": _read_web_search,
    "file_search_call": _read_file_search,
    "code_interpreter_call": _read_code,
    "image_generation_call": _read_image,
    "mcp_call": _read_mcp_call,
}
# Items of the model itself.
_OWN_ITEMS: Final = frozenset({"message", "function_call", "reasoning"})


def read_hosted(items: Sequence[Item]) -> HostedContent | None:
    """Return the outcome of OpenAI's own tools in the items of a reply; None if there is none."""
    content = HostedContent(
        calls=tuple([_read_call(item) for item in items if item["type"] not in _OWN_ITEMS]),
        citations=tuple(_read_citations(items)),
        files=tuple(dict.fromkeys(_read_files(items))),
        images=tuple(_read_images(items)),
    )
    return content or None


def _read_call(item: Item) -> HostedCall:
    kind = item["type"]
    call = _READERS[kind](item) if kind in _READERS else HostedCall(tool=kind, arguments=_text(item, "arguments"))
    error = call.error or ("failed" if item.get("status") == "failed" else None)
    return attrs.evolve(call, id=_text(item, "id"), error=error)


def _read_citations(items: Sequence[Item]) -> Iterable[Citation]:
    before = 0  # characters of the parts before: positions are relative to their part
    for part in _message_parts(items):
        for note in _dicts(part, "annotations"):
            if note.get("type") == "url_citation":
                start, end = _number(note, "start_index"), _number(note, "end_index")
                yield Citation(
                    url=_text(note, "url"),
                    title=_text(note, "title"),
                    start=None if start is None else before + start,
                    end=None if end is None else before + end,
                )
            elif note.get("type") == "file_citation":
                place = _number(note, "index")
                place = None if place is None else before + place
                yield Citation(file_id=_text(note, "file_id"), title=_text(note, "filename"), start=place, end=place)
        before += len(_text(part, "text")) + len(_text(part, "refusal"))


def _read_files(items: Sequence[Item]) -> Iterable[HostedFile]:
    for part in _message_parts(items):
        for note in _dicts(part, "annotations"):
            if _text(note, "type") in {"container_file_citation", "file_path"} and _text(note, "file_id"):
                yield HostedFile(
                    id=_text(note, "file_id"), name=_text(note, "filename"), container=_text(note, "container_id")
                )


def _message_parts(items: Sequence[Item]) -> list[Item]:
    return [part for item in items if item["type"] == "message" for part in _dicts(item, "content")]


# Subtypes of media types by the names of formats.
_IMAGE_TYPES: Final = {"jpeg": "jpeg", "webp": "webp", "gif": "gif", "svg": "svg+xml"}
_IMAGE_URL: Final = re.compile(r"https://|data:image/[a-z+.-]{1,40};base64,")


def _read_images(items: Sequence[Item]) -> Iterable[ImagePart]:
    for item in items:
        if item["type"] == "image_generation_call" and (data := _text(item, "result")):
            kind = _IMAGE_TYPES.get(_text(item, "output_format"), "png")
            yield ImagePart(url=f"data:image/{kind};base64,{data}")
        if item["type"] == "code_interpreter_call":
            urls = [_text(output, "url") for output in _dicts(item, "outputs") if output.get("type") == "image"]
            yield from [ImagePart(url=url) for url in urls if _IMAGE_URL.match(url)]


# Calls that the caller has to answer: without an answer in the history OpenAI says "No tool output found for ...".
_CLIENT_SIDE_CALLS: Final = frozenset(
    {"apply_patch_call", "computer_call", "custom_tool_call", "local_shell_call", "shell_call"}
)


def find_unanswered(items: Sequence[Item]) -> list[Item]:
    """Return the items that only the caller can answer: they may not be sent back without an answer."""
    answered = {_text(item, "call_id") for item in items if item["type"].endswith("_output")}
    answered |= {_text(item, "approval_request_id") for item in items}
    return [
        item for item in items if _needs_caller(item) and (_text(item, "call_id") or _text(item, "id")) not in answered
    ]


def _needs_caller(item: Item) -> bool:
    if item["type"] == "tool_search_call":
        return item.get("execution") == "client"
    return item["type"] in _CLIENT_SIDE_CALLS or item["type"] == "mcp_approval_request"


def explain_unanswered(item: Item) -> str:
    """Return what the provider asked of the caller, and the remedy."""
    if item["type"] == "mcp_approval_request":
        return (
            f"The provider asks for an approval of {_mcp_name(item)}({_text(item, 'arguments'):.200}), which agentfsm "
            "cannot give, so the call was not made. HostedMCP(...) is called without approvals; for approvals by "
            "people, connect to the server with agentfsm.mcp.MCPServer."
        )
    return explain_foreign_call(item["type"])
