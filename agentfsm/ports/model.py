"""What the engine needs of a language model and of a token counter, what a reply holds, and how large it may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import UnionType
from typing import Any, Final, Protocol, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import JSON, Message, NativeReply, Part
from agentfsm.core.settings import DEFAULT_SETTINGS, Settings
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, NAME, ValueRule
from agentfsm.core.value import Value

# What follows "e.g." is small, what follows a sentence is not.
_FIRST_SENTENCE: Final = re.compile(r".+?(?:[。！？]|[.!?](?=\s+[^\sa-z]|$)|$)")  # noqa: RUF001  Chinese ends sentences so


# Characters of a sentence in a summary, about 50 tokens: somebody else's tool may say all it has to say in one.
SENTENCE_CHARS: Final = 200


# Characters of the names of parameters in a summary: some ten names.
NAMES_CHARS: Final = 120


class FinishReason(StrEnum):
    """Why the model stopped talking."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    REFUSAL = "refusal"


def to_mutable_json(value: Any) -> Any:
    """Return a schema as dicts and lists, which json writes and a caller may change; it may hold read-only views."""
    if isinstance(value, Mapping):
        return {key: to_mutable_json(each) for key, each in value.items()}
    return [to_mutable_json(each) for each in value] if isinstance(value, list | tuple) else value


@attrs.frozen(kw_only=True)
class ToolDefinition(Value):
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: Mapping[str, JSON]
    """A JSON Schema of type "object"."""

    strict: bool = False
    """Whether the provider shall hold the model to the schema while it writes."""

    @property
    def summary(self) -> str:
        """One line, as `name(city, unit?): First sentence.`: what may be left out is marked."""
        schema: Mapping[str, Any] = self.parameters
        named, needed = schema.get("properties"), schema.get("required") or ()
        names = [name if name in needed else f"{name}?" for name in named] if isinstance(named, Mapping) else []
        paragraph = " ".join(self.description.strip().partition("\n\n")[0].split())
        sentence = found[0] if (found := _FIRST_SENTENCE.match(paragraph)) else ""
        line = f"{self.name}({_truncate(', '.join(names), NAMES_CHARS)}): {_truncate(sentence, SENTENCE_CHARS)}"
        # A name out of somebody else's schema may hold a line break.
        return " ".join(line.rstrip(": ").split())

    def openai(self) -> dict[str, Any]:
        """Return a copy as OpenAI's chat completions take it, and whatever speaks like them."""
        return {"type": "function", "function": self._to_dict("parameters")}

    def anthropic(self) -> dict[str, Any]:
        """Return a copy as Anthropic's messages take it."""
        return self._to_dict("input_schema")

    def _to_dict(self, schema: str) -> dict[str, Any]:
        told = {"name": self.name, "description": self.description, schema: to_mutable_json(self.parameters)}
        # Only where it is set: servers that speak like these two refuse a field that they do not know.
        return {**told, "strict": True} if self.strict else told


def _truncate(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars]}..."


class OutputMode(StrEnum):
    """How a model is held to the form of an answer."""

    SCHEMA = "schema"
    """The provider holds the model to a JSON Schema while it writes."""

    TOOL = "tool"
    """The answer is the arguments of a tool."""

    JSON = "json"
    """The provider holds the model to JSON, and the instructions tell the schema."""

    PROMPT = "prompt"
    """The instructions tell the schema."""


@attrs.frozen(kw_only=True)
class OutputForm(Value):
    """The form that an answer shall have, where the provider is to see to it."""

    name: str
    """Of the schema: 1 to 64 letters, digits, "_" or "-"."""

    schema: Mapping[str, JSON] | None
    """A JSON Schema of type "object", closed and with all properties required; None for any JSON object."""


@attrs.frozen(kw_only=True)
class Request(Value):
    """One question to a model."""

    instructions: str
    """The system prompt; may be empty."""

    messages: Sequence[Message]
    """A valid history: each call has its result."""

    tools: Sequence[ToolDefinition] = ()
    settings: Settings = DEFAULT_SETTINGS
    output: OutputForm | None = None
    """The form of the answer, for modes SCHEMA and JSON."""

    timeout_s: float = 60.0
    """The longest silence, seconds, after which the model gives up; a stream that goes on may take longer."""


@attrs.frozen(kw_only=True)
class ProposedCall(Value):
    """A tool call as the provider wrote it."""

    id: str
    name: str
    arguments: str
    """The text as it arrived; whether it is JSON is for the engine to find out."""


@attrs.frozen(kw_only=True)
class Reply(Value):
    """What the model answered, whole."""

    text: str = ""
    calls: tuple[ProposedCall, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    usage: Usage | None = None
    """None where the provider did not say: the engine then counts, and marks the figures as estimated."""

    native: NativeReply | None = None
    """What this provider wants back beside text and calls, such as its thinking; it goes into the message."""

    model: str = ""
    """The name of the model that answered, where it is one of several; empty for the one that was asked."""


@attrs.frozen
class TextChunk(Value):
    """A piece of the answer's text, as it streams in."""

    text: str
    """Its only field, and so given without its name: that takes two thirds of the time, for each token of a reply."""


@attrs.frozen(kw_only=True)
class CallChunk(Value):
    """A piece of a tool call, as it streams in."""

    index: int
    """Which call of the reply, from 0."""

    name: str = ""
    """The tool's name, with the first piece."""

    arguments: str = ""
    """The next piece of the arguments' JSON text."""


@attrs.frozen(kw_only=True)
class FinishChunk(Value):
    """The model has said why it stops; what follows is its bill. A model that does not tell may leave it out."""

    reason: FinishReason


@attrs.frozen
class ThinkingChunk(Value):
    """A piece of what the model thinks, or of its summary, as it streams in; no part of the answer."""

    text: str


Chunk: TypeAlias = TextChunk | ThinkingChunk | CallChunk | FinishChunk


Emit: TypeAlias = Callable[[Chunk], None]


class Model(Protocol):
    """A language model. `name` and `reply` are all that a model of your own has to have."""

    name: str
    """As the provider knows it, for example "gpt-4o"."""

    window_tokens: int = 128_000
    """The context window: input and output together, tokens."""

    output_modes: tuple[OutputMode, ...] = (OutputMode.TOOL, OutputMode.PROMPT)
    """How it can be held to the form of an answer, the best first."""

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask once, without retries.

        Args:
            request: The whole question.
            emit: Where given, the reply is streamed: it is called with each chunk, in order, and never blocks.

        Returns:
            The whole reply, streamed or not.

        Raises:
            ModelUnavailableError: when asking again may help (429, 5xx, time-out, connection lost).
            ModelReplyError: when the reply cannot be used.
            ContextTooLongError: when the request is too large.
            ModelError: when the provider refused the request for good (400, 401, 403, 404).
        """
        ...

    def unsupported_part(self, part: Part) -> str | None:  # noqa: ARG002  a default for those that take everything
        """Say why the model cannot take this part of a user's message, or of a tool's result; None where it can."""
        return None

    def unsupported_settings(self, settings: Settings) -> str | None:  # noqa: ARG002  as above
        """Say which of the settings the wire has no word for, and what to do; None where it has one for all."""
        return None

    def unsupported_schema(self, schema: Mapping[str, JSON]) -> str | None:  # noqa: ARG002  as above
        """Say why the provider cannot hold the model to this schema, in OutputMode.SCHEMA; None where it can."""
        return None

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  a default for those that know no prices
        """US dollars for the usage of one reply, or None where no price is known; it is asked for after each reply."""
        return None

    def prepare(self) -> None:
        """Load what would hold up the event loop later, such as a price list. May block; the default loads nothing."""
        return

    async def aclose(self) -> None:
        """Close what the model holds open; the default holds nothing."""
        return


# What the engine and other models ask of a model.
_MODEL_MEMBERS: Final = (
    "name",
    "reply",
    "window_tokens",
    "output_modes",
    "unsupported_part",
    "unsupported_settings",
    "unsupported_schema",
    "cost_usd",
    "prepare",
    "aclose",
)


_OUTPUT_MODES: Final = ValueRule(
    fits=lambda modes: (
        isinstance(modes, tuple | list) and modes != () and all(isinstance(each, OutputMode) for each in modes)
    ),
    wanted="a tuple of at least one OutputMode",
)


def ensure_model(model: Model) -> Model:
    """Return what is a model.

    Raises:
        MisuseError: when it is none; it says what it lacks, and what to give.
    """
    if isinstance(model, str):
        raise MisuseError(f"{model!r} is a name and no model: give resolve({model!r}), of agentfsm.models")
    if isinstance(model, type):
        raise MisuseError(
            f"{model.__name__} is a class, and a model is one of its objects: write {model.__name__}(...)"
        )
    if missing := [name for name in _MODEL_MEMBERS if not hasattr(model, name)]:
        raise MisuseError(
            f"{type(model).__name__} is no model, since it has no {', '.join(missing)}: give one such as "
            "OpenAIChat('gpt-4o'), or of your own subclass of agentfsm.ports.Model, with a name and an async reply",
        )
    what = type(model).__name__
    NAME.check(what, "name", model.name)
    COUNT.check(what, "window_tokens", model.window_tokens)
    _OUTPUT_MODES.check(what, "output_modes", model.output_modes)
    return model


def check_model(_owner: object, _attribute: object, model: Model | None) -> None:
    """Refuse what is no model in a field that may hold one."""
    if model is not None:
        ensure_model(model)


class TokenCounter(Protocol):
    """Counts tokens of text."""

    encoding: str
    """The vocabulary's name, for example "o200k_base", or what the estimate is made of."""

    exact: bool
    """False for an estimate."""

    def count(self, text: str) -> int:
        """Tokens in the text, 0 or more; never raises for any str."""
        ...


# How large a reply may be, whoever wrote the model. Each bound is many times what a model writes in one reply: 128,000
# tokens are some 600,000 characters, and OpenAI takes at most 128 calls in one message. What is larger comes from a
# server that does not end, or from a model that repeats itself.

# Calls of tools in one reply. Each is an entry of one record of the journal, and costs the event loop about 0.1 ms.
MAX_REPLY_CALLS: Final = 512
TOO_MANY_CALLS: Final = f"more than {MAX_REPLY_CALLS:,} calls"

# Characters of one reply: of its text, its thinking and the arguments of its calls together.
MAX_REPLY_CHARS: Final = 8 * 2**20
TOO_MANY_CHARS: Final = f"more than {MAX_REPLY_CHARS:,} characters of text, thinking and arguments"

# Characters of what the provider wants back beside them, such as pictures: 24 MB of them in base64. A record of the
# journal holds twice that.
MAX_NATIVE_REPLY_CHARS: Final = 32 * 2**20

# A reply of at most MAX_CALLS calls whose text and whose arguments of each call are no longer than these is within
# MAX_CHARS, and need not be counted.
USUAL_TEXT_CHARS: Final = MAX_REPLY_CHARS // 2
USUAL_ARGUMENTS_CHARS: Final = MAX_REPLY_CHARS // 2 // MAX_REPLY_CALLS


def find_reply_excess(reply: Reply) -> str | None:
    """Say which bound a reply is over, with its figure; None where it is within all."""
    if len(reply.calls) > MAX_REPLY_CALLS:
        return TOO_MANY_CALLS
    chars = len(reply.text) + sum(len(call.arguments) for call in reply.calls)
    if chars > MAX_REPLY_CHARS:
        return TOO_MANY_CHARS
    if reply.native is not None and len(reply.native.content) > MAX_NATIVE_REPLY_CHARS:
        return f"more than {MAX_NATIVE_REPLY_CHARS:,} characters in native"
    return None


# What the fields of a reply, and of each of its calls, have to be, and what to give where one is not.
FieldRules: TypeAlias = Mapping[str, tuple[type | UnionType, str]]
_REPLY_FIELDS: Final[FieldRules] = {
    "text": (str, "'' where it says nothing"),
    "calls": (tuple | list, "a tuple of ProposedCall"),
    "finish_reason": (FinishReason, "a FinishReason, for example FinishReason.LENGTH for a reply that was cut off"),
    "native": (NativeReply | None, "NativeReply(provider=..., content=...), or None"),
    "model": (str, "the name of the model that answered, or ''"),
}
_NATIVE_FIELDS: Final[FieldRules] = {"provider": (str, "a text"), "content": (str, "the JSON text")}
_CALL_FIELDS: Final[FieldRules] = {"id": (str, "a text"), "name": (str, "a text"), "arguments": (str, "the JSON text")}


def check_reply(method: str, reply: object) -> None:
    """Check what a method of a model has returned, but for its calls and its usage.

    Raises:
        MisuseError: when it is no reply, or one whose fields are of other types; it says what to give.
    """
    if not isinstance(reply, Reply):
        raise MisuseError(f"{method} returned {type(reply).__name__}: return a Reply, for example Reply(text='...')")
    check_fields(f"{method} returned a Reply whose", reply, _REPLY_FIELDS)
    if reply.native is not None:
        check_fields(f"{method} returned a Reply with a native whose", reply.native, _NATIVE_FIELDS)


def check_call(method: str, call: object) -> None:
    """Check a call of a reply that a method of a model has returned.

    Raises:
        MisuseError: when it is none, or its fields are of other types; it says what to give.
    """
    what = f"{method} returned a Reply with"
    if not isinstance(call, ProposedCall):
        raise MisuseError(f"{what} calls that are {type(call).__name__}: give a tuple of ProposedCall")
    check_fields(f"{what} a call whose", call, _CALL_FIELDS)


def check_fields(what: str, given: object, fields: FieldRules) -> None:
    """Check the types of fields.

    Raises:
        MisuseError: naming the first that is of another type, and what to give.
    """
    for name, (kind, wanted) in fields.items():
        value = getattr(given, name)
        if not isinstance(value, kind):
            raise MisuseError(f"{what} {name} is of the type {type(value).__name__}: give {wanted}")
