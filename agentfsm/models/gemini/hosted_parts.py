"""Google's own tools in Gemini's API: how they are requested, and their outcome in a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from google.genai import types

from agentfsm.core.errors import ModelError
from agentfsm.core.hosted_tools import CodeExecution, HostedTool, URLContext, WebSearch
from agentfsm.core.messages import Citation, HostedCall, HostedContent, ImagePart
from agentfsm.models.profiles import ModelProfile
from agentfsm.ports.model import Request

_TOOLS: Final[Mapping[type[HostedTool], types.Tool]] = {
    WebSearch: types.Tool(google_search=types.GoogleSearch()),
    URLContext: types.Tool(url_context=types.UrlContext()),
    CodeExecution: types.Tool(code_execution=types.ToolCodeExecution()),
}
# Names of tools by their type in a reply; others have the type as their name, in lower case.
_NAMES: Final = {
    types.ToolType.GOOGLE_SEARCH_WEB: WebSearch.kind,
    types.ToolType.URL_CONTEXT: URLContext.kind,
}
_FETCHED: Final = types.UrlRetrievalStatus.URL_RETRIEVAL_STATUS_SUCCESS


def unsupported_hosted_tool(tool: HostedTool) -> str | None:
    """Return the reason why the API does not have the tool or its options; None if it has."""
    if type(tool) not in _TOOLS:
        names = ", ".join(kind.__name__ for kind in _TOOLS)
        return f"Gemini's API has no {tool.name!r}, only {names}: use agentfsm.models.OpenAIResponses, or leave it out"
    if isinstance(tool, WebSearch) and tool != WebSearch(labels=tool.labels):
        return "Gemini's web search has no options: give WebSearch() without any"
    return None


def build_hosted_tools(request: Request, profile: ModelProfile) -> list[types.Tool]:
    """Return the hosted tools of a request in the form of the API.

    Raises:
        ModelError: if the model does not have one of them, or not together with the rest of the request.
    """
    for tool in request.hosted_tools:
        if (why := unsupported_hosted_tool(tool)) is not None:
            raise ModelError(why)
    if request.hosted_tools and (request.tools or request.output) and not profile.combines_tools:
        others = "tools of the agent" if request.tools else "an output_type"
        raise ModelError(
            f"This model does not combine Google's own tools with {others}: use a model from Gemini 3 on, or leave out "
            f"{type(request.hosted_tools[0]).__name__}()"
        )
    return [_TOOLS[type(tool)] for tool in request.hosted_tools]


def read_hosted(parts: Sequence[types.Part], text: str, candidate: types.Candidate) -> HostedContent | None:
    """Return the outcome of Google's own tools in a reply; None if there is none.

    Args:
        parts: Parts of the reply.
        text: Its text.
        candidate: Newest candidate of the reply, with the metadata of searches and pages.
    """
    calls = [*_read_calls(parts)]
    named = {call.tool for call in calls}
    # Older models have no parts for these two.
    grounding, pages = candidate.grounding_metadata, candidate.url_context_metadata
    if grounding is not None and grounding.web_search_queries and WebSearch.kind not in named:
        calls.append(HostedCall(tool=WebSearch.kind, arguments=_dump({"queries": grounding.web_search_queries})))
    if pages is not None and URLContext.kind not in named:
        for page in pages.url_metadata or ():
            status = page.url_retrieval_status
            error = None if status in (_FETCHED, None) else status.value
            calls.append(HostedCall(tool=URLContext.kind, arguments=_dump({"url": page.retrieved_url}), error=error))
    citations = [] if grounding is None else _read_citations(grounding, text)
    return HostedContent(calls=tuple(calls), citations=tuple(citations), images=tuple(_read_images(parts))) or None


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""


def _read_calls(parts: Sequence[types.Part]) -> Iterator[HostedCall]:
    results = [part.code_execution_result for part in parts if part.code_execution_result is not None]
    responses = {part.tool_response.id: part.tool_response for part in parts if part.tool_response is not None}
    for part in parts:
        if (code := part.executable_code) is not None:
            result = results.pop(0) if results else None  # each follows its code
            output = "" if result is None else result.output or ""
            failed = result is not None and result.outcome not in (types.Outcome.OUTCOME_OK, None)
            yield HostedCall(
                tool=CodeExecution.kind,
                id=code.id or "",
                arguments=code.code or "",
                output="" if failed else output,
                error=(output or str(result.outcome.value)) if failed and result and result.outcome else None,
            )
        elif (call := part.tool_call) is not None:
            kind, response = call.tool_type, responses.get(call.id)
            yield HostedCall(
                tool="" if kind is None else _NAMES.get(kind, kind.value.lower()),
                id=call.id or "",
                arguments=_dump(call.args),
                output="" if response is None else _dump(response.response),
            )


def _read_citations(grounding: types.GroundingMetadata, text: str) -> Iterator[Citation]:
    chunks, start = grounding.grounding_chunks or [], 0
    for support in grounding.grounding_supports or ():
        # Its indices count bytes of a part; the passages are in order.
        passage = (support.segment and support.segment.text) or ""
        start = max(text.find(passage, start), 0)
        known = bool(passage) and text.startswith(passage, start)
        for index in support.grounding_chunk_indices or ():
            web = chunks[index].web if 0 <= index < len(chunks) else None
            if web is not None:
                yield Citation(
                    url=web.uri or "",
                    title=web.title or "",
                    start=start if known else None,
                    end=start + len(passage) if known else None,
                )


def _read_images(parts: Sequence[types.Part]) -> Iterator[ImagePart]:
    for part in parts:
        blob = None if part.thought else part.inline_data
        if blob is not None and blob.data and (blob.mime_type or "").startswith("image/"):
            yield ImagePart.of(blob.data, blob.mime_type or "")
