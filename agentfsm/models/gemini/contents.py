"""Requests and replies as google-genai has them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, Final

import attrs
from google.genai import types

from agentfsm.core.errors import ModelReplyError
from agentfsm.core.messages import (
    AssistantMessage,
    FilePart,
    Message,
    NativeReply,
    Outcome,
    Part,
    SystemMessage,
    TextPart,
    ToolResult,
    UserMessage,
    read_inline_data,
)
from agentfsm.core.settings import Settings
from agentfsm.core.usage import Usage
from agentfsm.models.gemini.hosted_parts import build_hosted_tools, read_hosted
from agentfsm.models.profiles import ModelProfile, Thinking
from agentfsm.ports.model import (
    CallChunk,
    Chunk,
    FinishChunk,
    FinishReason,
    ProposedCall,
    Reply,
    Request,
    TextChunk,
    ThinkingChunk,
    ToolDefinition,
    to_mutable_json,
)

_LEVELS: Final = {"minimal": "MINIMAL", "low": "LOW", "medium": "MEDIUM", "high": "HIGH"}
# Signature of calls that Gemini did not make. Gemini 3 refuses calls of the current turn without a signature, and skips
# the check for this one (Source: Google's documentation of thought signatures).
_NO_SIGNATURE: Final = b"skip_thought_signature_validator"
_BLOCKED: Final = frozenset(
    {"SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "MODEL_ARMOR"}
    | {"IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION"}
)
# The model wrote something that is not a call, or not a reply: another attempt may help.
_MALFORMED: Final = frozenset(
    {"MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS", "MALFORMED_RESPONSE", "OTHER"}
    | {"IMAGE_OTHER", "NO_IMAGE"}
)


def build_contents(messages: Sequence[Message], provider: str) -> list[types.Content]:
    """Return the history as contents of alternating roles.

    Args:
        messages: The history. Replies of the same provider are sent back as they came, with their thought signatures.
        provider: Identity of the server, as in `NativeReply.provider`.
    """
    contents: list[types.Content] = []
    ids: dict[str, str | None] = {}  # of calls: a response has the id of its call as Gemini gave it, or none
    for message in messages:
        content = _build_content(message, provider, ids)
        if contents and contents[-1].role == content.role == "user":
            contents[-1].parts = [*(contents[-1].parts or ()), *(content.parts or ())]
        else:
            contents.append(content)
    return contents


def _build_content(message: Message, provider: str, ids: dict[str, str | None]) -> types.Content:
    match message:
        case SystemMessage(text=text):
            return types.Content(role="user", parts=[types.Part(text=f"<system>{text}</system>")])
        case UserMessage():
            return types.Content(role="user", parts=[_build_part(part) for part in message.parts])
        case ToolResult():
            response = types.FunctionResponse(
                id=ids.get(message.call_id, message.call_id),
                name=message.tool,
                response={"output" if message.outcome is Outcome.DONE else "error": message.text},
            )
            parts = [types.Part(function_response=response), *map(_build_part, message.parts)]
            return types.Content(role="user", parts=parts)
        case AssistantMessage(text=text, calls=calls):
            content = _build_native_content(message, provider)
            if content is None:
                said = [types.Part(text=text)] if text or not calls else []
                for call in calls:
                    wanted = types.FunctionCall(id=call.id, name=call.name, args=json.loads(call.arguments))
                    said.append(types.Part(function_call=wanted, thought_signature=_NO_SIGNATURE))
                content = types.Content(role="model", parts=said)
            called = [part.function_call for part in content.parts or () if part.function_call is not None]
            ids |= {call.id: made.id for call, made in zip(calls, called, strict=True)}
            return content
    raise AssertionError(message)


def _build_native_content(message: AssistantMessage, provider: str) -> types.Content | None:
    """Return the content of a native reply, with the calls of the message; None if there is none, or it does not fit.

    A person may have edited arguments: such a call has no signature of Gemini's any more.
    """
    if message.native is None or message.native.provider != provider:
        return None
    content = types.Content.model_validate_json(message.native.content)
    parts = [part for part in content.parts or () if part.function_call is not None]
    if len(parts) != len(message.calls):
        return None
    for part, call in zip(parts, message.calls, strict=True):
        made, arguments = part.function_call, json.loads(call.arguments)
        assert made is not None  # noqa: S101  as filtered above
        if (made.args or {}) != arguments:
            made.args, part.thought_signature = arguments, _NO_SIGNATURE
    return content


def _build_part(part: Part) -> types.Part:
    if isinstance(part, TextPart):
        return types.Part(text=part.text)
    if (inline := read_inline_data(part)) is not None:
        media_type, data = inline
        return types.Part(inline_data=types.Blob(mime_type=media_type, data=base64.b64decode(data)))
    return types.Part(file_data=types.FileData(file_uri=part.url))


def unsupported_part(part: Part) -> str | None:
    """Return the reason why Gemini does not support a part; None if it does."""
    if isinstance(part, TextPart) or part.url.startswith(
        ("data:", "gs://", "https://generativelanguage.googleapis.com/")
    ):
        return None
    kind = "a file" if isinstance(part, FilePart) else "media"
    return f"Gemini fetches {kind} only from Google's own storage: give its content, {type(part).__name__}.of(data)"


def unsupported_settings(settings: Settings) -> str | None:
    """Return the reason why the API does not support one of the settings; None if it supports all."""
    if settings.parallel_tool_calls is False:
        return "Gemini's API cannot limit a reply to one call: leave out Settings(parallel_tool_calls=False)"
    effort = settings.reasoning_effort
    if effort is not None and effort not in {*_LEVELS, "none"}:
        return f"Gemini has no reasoning effort {effort!r}: give 'none', {', '.join(map(repr, _LEVELS))}"
    return None


def build_config(request: Request, profile: ModelProfile) -> types.GenerateContentConfig:
    """Return the settings, instructions and tools of a request."""
    settings, output = request.settings, request.output
    fields: dict[str, Any] = {
        "system_instruction": request.instructions or None,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_output_tokens": settings.max_tokens,
        "seed": settings.seed,
        "stop_sequences": list(settings.stop) or None,
        "tools": [*build_hosted_tools(request, profile), *_declare_tools(request.tools)] or None,
        "tool_config": _build_tool_config(request) if request.tools else None,
        "thinking_config": _build_thinking(settings.reasoning_effort, profile),
        "response_mime_type": None if output is None else "application/json",
        "response_json_schema": None if output is None else to_mutable_json(output.schema),
        "automatic_function_calling": types.AutomaticFunctionCallingConfig(disable=True),
        "http_options": types.HttpOptions(extra_body=settings.extra_body) if settings.extra_body else None,
    }
    return types.GenerateContentConfig(**{name: value for name, value in fields.items() if value is not None})


def _declare_tools(tools: Sequence[ToolDefinition]) -> list[types.Tool]:
    functions = [
        types.FunctionDeclaration(
            name=tool.name, description=tool.description, parameters_json_schema=to_mutable_json(tool.parameters)
        )
        for tool in tools
    ]
    return [types.Tool(function_declarations=functions)] if functions else []


def _build_tool_config(request: Request) -> types.ToolConfig | None:
    # Google's own tools beside functions need this: https://ai.google.dev/gemini-api/docs/tool-combination
    shows_own = True if request.hosted_tools else None
    choice, calling = request.settings.tool_choice, None
    if choice is not None:
        modes = {"auto": "AUTO", "none": "NONE", "required": "ANY"}
        names = None if choice in modes else [choice]
        mode = types.FunctionCallingConfigMode(modes.get(choice, "ANY"))
        calling = types.FunctionCallingConfig(mode=mode, allowed_function_names=names)
    if calling is None and shows_own is None:
        return None
    return types.ToolConfig(function_calling_config=calling, include_server_side_tool_invocations=shows_own)


def _build_thinking(effort: str | None, profile: ModelProfile) -> types.ThinkingConfig | None:
    if profile.thinking is Thinking.NONE:
        return None
    if effort is None:
        return types.ThinkingConfig(include_thoughts=True)
    if effort == "none":
        return types.ThinkingConfig(thinking_budget=0)
    if profile.budgets:
        return types.ThinkingConfig(include_thoughts=True, thinking_budget=profile.budgets[effort])
    return types.ThinkingConfig(include_thoughts=True, thinking_level=types.ThinkingLevel(_LEVELS[effort]))


@attrs.define(eq=False, repr=False)
class ReplyBuilder:
    """Builder of a reply from one or several responses."""

    provider: str
    """Identity of the server, for the native reply."""

    parts: list[types.Part] = attrs.field(factory=list, init=False)
    """Parts so far; pieces of a text are joined."""

    calls: list[ProposedCall] = attrs.field(factory=list, init=False)
    """Calls so far."""

    finish: str = attrs.field(default="", init=False)
    """Finish reason of the API; empty until it arrives."""

    blocked: str = attrs.field(default="", init=False)
    """Reason why the prompt was refused; empty if it was not."""

    usage: Usage | None = attrs.field(default=None, init=False)
    """Usage of the whole reply, as the newest response has it."""

    candidate: types.Candidate = attrs.field(factory=types.Candidate, init=False)
    """Metadata of searches and pages, as the newest response with them has it."""

    served_model: str = attrs.field(default="", init=False)
    """Name of the model in the responses; empty if none had one yet."""

    response_id: str = attrs.field(default="", init=False)
    """Id of the reply in the responses; empty if none had one yet."""

    def add(self, response: types.GenerateContentResponse) -> list[Chunk]:
        """Add a response, and return its chunks."""
        self.served_model = self.served_model or response.model_version or ""
        self.response_id = self.response_id or response.response_id or ""
        if response.usage_metadata is not None:
            usage = _read_usage(response.usage_metadata)
            self.usage = usage if usage.tokens else self.usage  # the engine estimates where nothing was counted
        feedback = response.prompt_feedback
        if feedback is not None and feedback.block_reason is not None:
            self.blocked = str(feedback.block_reason.value)
        chunks: list[Chunk] = []
        for candidate in (response.candidates or ())[:1]:
            for part in (candidate.content.parts if candidate.content else None) or ():
                chunks += self._add_part(part)
            if candidate.grounding_metadata is not None:
                self.candidate.grounding_metadata = candidate.grounding_metadata
            if candidate.url_context_metadata is not None:
                self.candidate.url_context_metadata = candidate.url_context_metadata
            if candidate.finish_reason is not None:
                self.finish = str(candidate.finish_reason.value)
                chunks.append(FinishChunk(reason=self._read_finish()))
        return chunks

    def _add_part(self, part: types.Part) -> list[Chunk]:
        if part.function_call is not None:
            called = part.function_call
            arguments = json.dumps(called.args or {}, ensure_ascii=False)
            self.parts.append(part)
            self.calls.append(ProposedCall(id=called.id or "", name=called.name or "", arguments=arguments))
            index = len(self.calls) - 1
            return [CallChunk(index=index, name=called.name or "", arguments=arguments, is_complete=True)]
        last = self.parts[-1] if self.parts else None
        if last is not None and _is_plain_text(last) and _is_plain_text(part) and last.thought == part.thought:
            self.parts[-1] = last.model_copy(update={"text": f"{last.text}{part.text}"})
        else:
            self.parts.append(part)
        if not part.text:
            return []
        return [ThinkingChunk(part.text) if part.thought else TextChunk(part.text)]

    def _read_finish(self) -> FinishReason:
        if self.calls:
            return FinishReason.TOOL_CALLS
        if self.finish == "MAX_TOKENS":
            return FinishReason.LENGTH
        return FinishReason.CONTENT_FILTER if self.blocked or self.finish in _BLOCKED else FinishReason.STOP

    def build(self) -> Reply:
        """Return the reply.

        Raises:
            ModelReplyError: if the reply has not ended, or the model wrote something that is not a reply.
        """
        if self.finish in _MALFORMED and not self.calls:
            raise self._build_error(f"the model wrote an invalid reply ({self.finish})")
        if not self.finish and not self.blocked:
            raise self._build_error("the reply ended without a finish reason")
        content = types.Content(role="model", parts=self.parts)
        native = NativeReply(provider=self.provider, content=content.model_dump_json(exclude_none=True))
        text = "".join(part.text or "" for part in self.parts if not part.thought)
        return Reply(
            text=text,
            thinking="".join(part.text or "" for part in self.parts if part.thought),
            calls=tuple(self.calls),
            finish_reason=self._read_finish(),
            usage=self.usage,
            native=native if self.parts else None,
            hosted=read_hosted(self.parts, text, self.candidate),
            served_model=self.served_model,
            response_id=self.response_id,
        )

    def _build_error(self, message: str) -> ModelReplyError:
        error = ModelReplyError(f"Gemini: {message}")
        error.usage = self.usage
        return error


def _is_plain_text(part: types.Part) -> bool:
    """Return whether a part is a text that may be joined with another: a signature belongs to its own part."""
    return part.text is not None and part.thought_signature is None


def _read_usage(counts: types.GenerateContentResponseUsageMetadata) -> Usage:
    thinking = counts.thoughts_token_count or 0
    return Usage(
        input_tokens=(counts.prompt_token_count or 0) + (counts.tool_use_prompt_token_count or 0),
        output_tokens=(counts.candidates_token_count or 0) + thinking,
        cached_tokens=counts.cached_content_token_count or 0,
        reasoning_tokens=thinking,
    )
