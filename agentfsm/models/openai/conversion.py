"""Convert histories from and to the message format of OpenAI's chat completions."""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.json_text import normalise_arguments
from agentfsm.core.messages import (
    CALL_ID_PATTERN,
    AssistantMessage,
    AudioPart,
    FilePart,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    check_history,
    media_kind,
    replace_surrogates,
)
from agentfsm.models.openai.chat_wire import unsupported_part, wire_messages
from agentfsm.models.openai.dialects import OPENAI
from agentfsm.models.wire import WireFormatError, read_arguments, read_field

if TYPE_CHECKING:
    from agentfsm.core.messages import Message, Part

# Beginning of the text of a result that agentfsm encoded.
_OUTCOME_PREFIX: Final = re.compile(rf"\[([^\n]+): ({'|'.join(Outcome)})\]\n")
# Media subtype of an audio format, if it has another name.
_AUDIO_SUBTYPES: Final = {"mp3": "mpeg"}


def read_message_text(content: object) -> str:
    """Return the texts of the content of a message, as a string or a list of parts of any API; "" if it has none."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    texts = [each.get("text") if isinstance(each, Mapping) else each for each in parts]
    return "\n".join([text for text in texts if isinstance(text, str)])


def to_openai(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Convert a history to messages of chat completions.

    Reasoning is left out, because it is only for the provider that wrote it. The agent's instructions are not part of
    the messages.

    Args:
        messages: A history, for example `run.messages`.

    Raises:
        MisuseError: if they are not a history, or contain a recording or a file that chat completions do not support.
    """
    history = tuple(messages)
    check_history(history)
    try:
        return list(wire_messages("", unsupported_part, OPENAI, history))
    except ModelError as error:
        raise MisuseError(str(error)) from None


def from_openai(messages: Iterable[Any]) -> tuple[Message, ...]:
    """Convert messages of chat completions to a history, for `agent.start(messages=...)`.

    Empty messages, reasoning and the names of speakers are left out. Ids of calls are kept if they are unique and
    OpenAI accepts them; otherwise all calls get new ids, and keep the old ones as `provider_id`.

    Args:
        messages: Dicts, or messages of the `openai` package.

    Raises:
        MisuseError: if a message has another form, naming its index; or if no model would accept the history, for
            example because the result of a call is missing.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise MisuseError(f"a history is a list of messages, not {type(messages).__name__}")
    history: list[Message] = []
    for place, message in enumerate(messages):
        try:
            _add_message(history, message.model_dump() if hasattr(message, "model_dump") else message)
        except (WireFormatError, MisuseError) as error:
            raise MisuseError(f"messages[{place}]: {error}") from None
    ids = [call.id for message in history if isinstance(message, AssistantMessage) for call in message.calls]
    if len(set(ids)) < len(ids) or not all(map(CALL_ID_PATTERN.fullmatch, ids)):
        history = list(_renumber_calls(history))
    check_history(history)
    return tuple(history)


def _add_message(history: list[Message], fields: Any) -> None:
    """Add a message to the history; a result is inserted in the order of its call."""
    match read_field(fields, "role", str, ""):
        case "system" | "developer":
            if text := _parse_text(fields):
                history.append(SystemMessage(text=text))
        case "user":
            if parts := tuple(_parse_parts(fields)):
                history.append(UserMessage(parts=parts))
        case "assistant":
            text = _parse_text(fields) or replace_surrogates(read_field(fields, "refusal", str, ""))
            calls = [_parse_call(call) for call in read_field(fields, "tool_calls", list, [])]
            if text or calls:
                history.append(AssistantMessage(text=text, calls=tuple(calls)))
        case "tool":
            _add_result(history, fields)
        case role:
            msg = f"the role {role!r}: give system, developer, user, assistant or tool"
            raise WireFormatError(msg)


def _add_result(history: list[Message], fields: dict[str, Any]) -> None:
    first = len(history)
    while first and isinstance(history[first - 1], ToolResult):
        first -= 1
    answered = {result.index for result in history[first:] if isinstance(result, ToolResult)}
    reply = history[first - 1] if first else None
    call_id = read_field(fields, "tool_call_id", str, "")
    for index, call in enumerate(reply.calls if isinstance(reply, AssistantMessage) else ()):
        if call.id == call_id and index not in answered:
            insort(history, _parse_result(fields, index, call), lo=first, key=attrgetter("index"))
            return
    msg = f"a result of {call_id!r}, which is not an open call of the reply before it"
    raise WireFormatError(msg)


def _parse_result(fields: dict[str, Any], index: int, call: ToolCall) -> ToolResult:
    """Return a result. Its outcome is read from the text if agentfsm encoded it, and is DONE otherwise."""
    parts = list(_parse_parts(fields))
    content, outcome = "\n".join([part.text for part in parts if isinstance(part, TextPart)]), Outcome.DONE
    if (head := _OUTCOME_PREFIX.match(content)) and head[1] == call.name:
        content, outcome = content[head.end() :], Outcome(head[2])
    media = tuple([part for part in parts if not isinstance(part, TextPart)])
    return ToolResult(call_id=call.id, tool=call.name, outcome=outcome, content=content, index=index, parts=media)


def _parse_call(call: object) -> ToolCall:
    function = read_field(call, "function", dict, None)
    if function is None:
        msg = f"a call of the type {read_field(call, 'type', str, '')!r}: agentfsm supports calls of functions only"
        raise WireFormatError(msg)
    call_id = read_field(call, "id", str, "")
    name = read_field(function, "name", str, "")
    arguments = normalise_arguments(replace_surrogates(read_arguments(function)))
    return ToolCall(id=call_id, name=name, arguments=arguments, provider_id=replace_surrogates(call_id))


def _parse_text(fields: dict[str, Any]) -> str:
    """Return the text of a message that may contain only text; empty if there is none."""
    texts = []
    for part in _parse_parts(fields):
        if not isinstance(part, TextPart):
            msg = f"a part that is not text ({media_kind(part)}): only messages of users and tools may have it"
            raise WireFormatError(msg)
        texts.append(part.text)
    return "\n".join(texts)


def _parse_parts(fields: dict[str, Any]) -> Iterator[Part]:
    """Yield the parts of a message, without blank texts."""
    content = fields.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for part in read_field({"content": content}, "content", list, []):
        read = _parse_part(part)
        if not isinstance(read, TextPart) or read.text.strip():
            yield read


def _parse_part(part: object) -> Part:
    match kind := read_field(part, "type", str, ""):
        case "text" | "refusal":
            return TextPart(text=replace_surrogates(read_field(part, kind, str, "")))
        case "image_url":
            image = read_field(part, "image_url", dict, {})
            return ImagePart(url=read_field(image, "url", str, ""), detail=read_field(image, "detail", str, "auto"))
        case "input_audio":
            audio = read_field(part, "input_audio", dict, {})
            form = read_field(audio, "format", str, "")
            return AudioPart(
                url=f"data:audio/{_AUDIO_SUBTYPES.get(form, form)};base64,{read_field(audio, 'data', str, '')}"
            )
        case "file":
            file = read_field(part, "file", dict, {})
            return FilePart(url=read_field(file, "file_data", str, ""), name=read_field(file, "filename", str, ""))
        case _:
            msg = f"a part of the type {kind!r}: give text, image_url, input_audio or file"
            raise WireFormatError(msg)


def _renumber_calls(history: Sequence[Message]) -> Iterator[Message]:
    """Yield the history with call ids in the form of a run: t2.0 is the first call of the second reply."""
    turn = 0
    for message in history:
        match message:
            case AssistantMessage(calls=calls):
                turn += 1
                ids = [f"t{turn}.{index}" for index in range(len(calls))]
                renamed = [attrs.evolve(call, id=new, key=new) for call, new in zip(calls, ids, strict=True)]
                yield attrs.evolve(message, calls=tuple(renamed))
            case ToolResult(index=index):
                yield attrs.evolve(message, call_id=f"t{turn}.{index}")
            case _:
                yield message
