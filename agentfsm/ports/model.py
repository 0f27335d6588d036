"""Protocols of language models and token counters, requests and replies, and the limits on the size of a reply."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import UnionType
from typing import Any, Final, Protocol, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError, ModelUnavailableError
from agentfsm.core.hosted_tools import HostedTool
from agentfsm.core.messages import JSON, HostedContent, Message, NativeReply, Part
from agentfsm.core.run import Run
from agentfsm.core.settings import DEFAULT_SETTINGS, Settings
from agentfsm.core.shortening import shorten
from agentfsm.core.usage import CacheReport, Purpose, TierChoice, Usage
from agentfsm.core.validation import COUNT, NAME, ValueRule
from agentfsm.core.value import Value

# A sentence ends where the next word does not begin in lower case: "e.g." does not end one.
_FIRST_SENTENCE: Final = re.compile(r".+?(?:[。！？]|[.!?](?=\s+[^\sa-z]|$)|$)")  # noqa: RUF001  Chinese ends sentences so


# Maximum characters of the sentence in a summary, about 50 tokens: third-party tools may have very long sentences.
SENTENCE_CHARS: Final = 200


# Maximum characters of the parameter names in a summary: about ten names.
NAMES_CHARS: Final = 120


class FinishReason(StrEnum):
    """The reason why the model stopped writing."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    REFUSAL = "refusal"
    PAUSED = "paused"
    """The provider paused the reply, to be continued by the next request, which has this reply at its end."""


def to_mutable_json(value: Any) -> Any:
    """Copy a schema, which may hold read-only views, into dicts and lists that json can write."""
    if isinstance(value, Mapping):
        return {key: to_mutable_json(each) for key, each in value.items()}
    return [to_mutable_json(each) for each in value] if isinstance(value, list | tuple) else value


@attrs.frozen(kw_only=True)
class ToolDefinition(Value):
    """The definition of a tool that a request sends to the model."""

    name: str
    """Name of the tool, which the model's calls refer to."""

    description: str
    """Description of the tool for the model; its first sentence is used in `summary`."""

    parameters: Mapping[str, JSON]
    """JSON Schema of the arguments, of type "object"."""

    strict: bool = False
    """Whether the provider constrains the model to the schema while it writes. Default False."""

    @property
    def summary(self) -> str:
        """One line of the form `name(city, unit?): First sentence.`; "?" marks optional parameters."""
        schema: Mapping[str, Any] = self.parameters
        named, needed = schema.get("properties"), schema.get("required") or ()
        names = [name if name in needed else f"{name}?" for name in named] if isinstance(named, Mapping) else []
        paragraph = " ".join(self.description.strip().partition("\n\n")[0].split())
        sentence = found[0] if (found := _FIRST_SENTENCE.match(paragraph)) else ""
        line = f"{self.name}({shorten(', '.join(names), NAMES_CHARS)}): {shorten(sentence, SENTENCE_CHARS)}"
        # A name in a third-party schema may contain a line break.
        return " ".join(line.rstrip(": ").split())

    def openai(self) -> dict[str, Any]:
        """Return the definition in the format of OpenAI's chat completions and compatible servers."""
        return {"type": "function", "function": self._to_dict("parameters")}

    def anthropic(self) -> dict[str, Any]:
        """Return the definition in the format of Anthropic's messages."""
        return self._to_dict("input_schema")

    def _to_dict(self, schema: str) -> dict[str, Any]:
        fields = {"name": self.name, "description": self.description, schema: to_mutable_json(self.parameters)}
        # Sent only if set: some compatible servers refuse unknown fields.
        return {**fields, "strict": True} if self.strict else fields


class OutputMode(StrEnum):
    """The way in which a model is constrained to the form of an answer."""

    SCHEMA = "schema"
    """The provider constrains the model to a JSON Schema while it writes."""

    TOOL = "tool"
    """The model answers with the arguments of a tool call."""

    JSON = "json"
    """The provider constrains the model to JSON, and the instructions contain the schema."""

    PROMPT = "prompt"
    """The instructions contain the schema; the provider does not constrain the model."""


@attrs.frozen(kw_only=True)
class OutputForm(Value):
    """The form of an answer that the provider enforces."""

    name: str
    """Name of the schema: 1 to 64 letters, digits, "_" or "-"."""

    schema: Mapping[str, JSON] | None
    """JSON Schema of type "object", closed and with all properties required; None for any JSON object."""


@attrs.frozen(kw_only=True, slots=False)  # as `OpenCall`
class Request(Value):
    """One request to a model."""

    instructions: str
    """The system prompt; may be empty."""

    messages: Sequence[Message]
    """The history, oldest first, in which each call has its result."""

    passing: int = 0
    """Number of messages at the end that later requests will not have; all of them if none will follow. Default 0. A
    cache of the provider should end before them: writing to it may cost more than other input.
    """

    keep_longer: bool = False
    """Whether a cache of the provider should keep the request beyond the usual minutes, if it can: the conversation has
    stood still for longer than these before, and may do so again. Default False.
    """

    cache_key: str = ""
    """Key that requests with the same tools and instructions share, of one tenant; letters, digits and "-". A provider
    may use it to send them to the same cache. Default empty: none.
    """

    tools: Sequence[ToolDefinition] = ()
    """Definitions of the tools that the model may call. Default none."""

    withheld_tools: Sequence[ToolDefinition] = ()
    """Tools that earlier requests offered, if this one, for a last answer, offers none. Default none. An
    adapter may define these for a provider whose cache and thinking depend on the tools, if it can forbid their calls.
    """

    hosted_tools: Sequence[HostedTool] = ()
    """Tools of the provider's own that the model may use. Default none."""

    settings: Settings = DEFAULT_SETTINGS
    """Settings of the model, such as its temperature. By default, those of the provider."""

    output: OutputForm | None = None
    """Form of the answer in the modes SCHEMA and JSON; None in the other modes."""

    timeout_s: float = 60.0
    """Seconds that the provider may stay silent before the request fails. Default 60. A stream may take longer."""

    purpose: Purpose = Purpose.TURN
    """Purpose of the request, for models that choose among several. Default TURN. Providers are not sent it."""

    run: Run[Any] | None = attrs.field(default=None, eq=False, repr=False)
    """The run that the request is for, as it is before the reply, for models that choose among several. Providers are
    not sent it. None outside of a run.
    """

    is_plain: bool = False
    """Whether replies of the history are sent back as texts and calls alone, without reasoning: in a retry after a
    `ReasoningRefusedError`. Default False.
    """

    tier: TierChoice | None = attrs.field(default=None, eq=False, repr=False)
    """In a retry, the tier of a `Tiered` that failed in the attempt before (`ModelError.tier`). Providers are not sent
    it. Default None.
    """


@attrs.frozen(kw_only=True)
class ProposedCall(Value):
    """A tool call in a reply, exactly as the provider returned it."""

    id: str
    """Id of the call at the provider."""

    name: str
    """Name of the tool, as the model wrote it; a tool of this name need not exist."""

    arguments: str
    """The arguments as they arrived, normally JSON text. The engine parses and validates them."""


@attrs.frozen(kw_only=True, slots=False)  # as `OpenCall`
class Reply(Value):
    """The complete reply of a model to one request."""

    text: str = ""
    """Text of the answer; empty if the model only calls tools."""

    calls: tuple[ProposedCall, ...] = ()
    """Tool calls that the model proposes, in its order."""

    finish_reason: FinishReason = FinishReason.STOP
    """The reason why the model stopped. Default STOP."""

    usage: Usage | None = None
    """Tokens reported by the provider. None if it reports none: the engine then estimates them and marks them so."""

    native: NativeReply | None = None
    """Content that the provider expects back besides text and calls, such as its thinking, stored in the message."""

    model: str = ""
    """Name of the model that answered, for wrappers that choose among several; empty for the model that was asked."""

    tier: TierChoice | None = None
    """Choice of a `Tiered`, for the journal; None from other models."""

    served_model: str = ""
    """Name of the model in the provider's reply; empty if the reply has none."""

    response_id: str = attrs.field(default="", eq=False)
    """Id of the reply at the provider; empty if it has none. Not compared, because no two replies share one."""

    thinking: str = ""
    """The model's thinking, or a summary of it, also if it was streamed; empty if the provider does not show it."""

    hosted: HostedContent | None = None
    """Outcome of the provider's own tools. A reply that has one is never retried, because they may have had effects."""

    unanswered: str = ""
    """A request of the provider to the caller that agentfsm cannot answer, such as for an approval, as a sentence that
    ends with the remedy. The run records the reply and ends with this message. Empty: none.
    """

    cache_report: CacheReport | None = None
    """Report of the provider on its prompt cache, for the journal and the next request; None if none was requested."""

    @property
    def is_empty(self) -> bool:
        """Whether the reply has neither text nor calls, nor anything of the provider's own tools."""
        return not (self.calls or self.text.strip() or self.hosted or self.unanswered)


@attrs.frozen
class TextChunk(Value):
    """A piece of the answer's text, as it streams in."""

    text: str
    """The piece of text. The field is positional because that takes two thirds of the time, for each token of a reply.
    """


@attrs.frozen(kw_only=True)
class CallChunk(Value):
    """A piece of a tool call, as it streams in."""

    index: int
    """Position of the call in the reply, from 0."""

    name: str = ""
    """Name of the tool, sent with the first piece of the call."""

    arguments: str = ""
    """The next piece of the JSON text of the arguments."""

    is_complete: bool = False
    """Whether this is the last piece of the call, so that a read-only call may start. A model that does not know it
    may omit it: then a call is complete when the next one begins, or the reply ends.
    """


@attrs.frozen(kw_only=True)
class FinishChunk(Value):
    """The end of the streamed answer; only its usage may follow. A model that does not report a reason may omit it."""

    reason: FinishReason
    """The reason why the model stopped."""


@attrs.frozen
class ThinkingChunk(Value):
    """A piece of the model's thinking, or of a summary of it, as it streams in. It is not part of the answer."""

    text: str
    """The piece of thinking text."""


Chunk: TypeAlias = TextChunk | ThinkingChunk | CallChunk | FinishChunk
"""Any piece of a reply that a model streams."""


Emit: TypeAlias = Callable[[Chunk], None]
"""Function that a model calls with each piece of a reply as it arrives."""


class Model(Protocol):
    """A language model. A custom model is a subclass that defines at least `name` and `reply`."""

    name: str
    """Name of the model at its provider, for example "gpt-5.4-mini"."""

    window_tokens: int = 128_000
    """Size of the context window in tokens, input and output together. Default 128,000."""

    takes_tokens: bool = True
    """Whether requests take tokens. False for code of this process, such as the interpreter of a script: its requests
    then need no room in the budget. Default True.
    """

    output_modes: tuple[OutputMode, ...] = (OutputMode.TOOL, OutputMode.PROMPT)
    """Ways in which the model can be constrained to the form of an answer, best first; at least one. The default needs
    no support by the provider beyond tools.
    """

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Send one request, without retries.

        Args:
            request: The request.
            emit: If given, the reply is streamed: call it with each chunk, in order. It never blocks.

        Returns:
            The complete reply, streamed or not.

        Raises:
            ModelUnavailableError: if a retry may help (429, 5xx, timeout, connection lost).
            ModelReplyError: if the reply cannot be used.
            ContextTooLongError: if the request is too large.
            ModelError: if the provider refused the request permanently (400, 401, 403, 404).
        """
        ...

    def unsupported_part(self, part: Part) -> str | None:  # noqa: ARG002  a default for those that take everything
        """Return why the model cannot take this part of a user message or a tool result; None if it can."""
        return None

    def unsupported_settings(self, settings: Settings) -> str | None:  # noqa: ARG002  as above
        """Return the settings that the provider's API does not support, and a remedy; None if it supports all."""
        return None

    def unsupported_hosted_tool(self, tool: HostedTool) -> str | None:
        """Return why the provider does not have this tool or one of its options; None if it has. Default: no tool."""
        return (
            f"{self.name} has no {tool.name!r}: {type(tool).__name__} is executed by the provider, here of "
            "agentfsm.models.OpenAIResponses, Anthropic or Gemini. Use one of these, or leave the tool out"
        )

    def unsupported_schema(self, schema: Mapping[str, JSON]) -> str | None:  # noqa: ARG002  as above
        """Return why the provider cannot enforce this schema in OutputMode.SCHEMA; None if it can."""
        return None

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  a default for those that know no prices
        """Return the price of one reply in US dollars, or None if no price is known. Called after each reply."""
        return None

    def prepare(self) -> None:
        """Load resources that would block the event loop later, such as a price list. May block."""
        return

    async def aclose(self) -> None:
        """Release the resources of the model; the default has none."""
        return


# The members that the engine and wrapping models use.
_MODEL_MEMBERS: Final = (
    "name",
    "reply",
    "window_tokens",
    "takes_tokens",
    "output_modes",
    "unsupported_part",
    "unsupported_settings",
    "unsupported_schema",
    "unsupported_hosted_tool",
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
    """Return `model` unchanged if it implements `Model`.

    Raises:
        MisuseError: naming the missing members, or the attribute that is invalid.
    """
    if isinstance(model, str):
        raise MisuseError(f"{model!r} is a name, not a model: give agentfsm.models.resolve({model!r})")
    if isinstance(model, type):
        raise MisuseError(f"{model.__name__} is a class; a model is an instance of it: write {model.__name__}(...)")
    if missing := [name for name in _MODEL_MEMBERS if not hasattr(model, name)]:
        raise MisuseError(
            f"{type(model).__name__} is not a model, since it has no {', '.join(missing)}: give one such as "
            "OpenAIChat('gpt-5.4-mini'), or an instance of a subclass of agentfsm.ports.Model with a name and an async "
            "reply",
        )
    kind = type(model).__name__
    NAME.check(kind, "name", model.name)
    COUNT.check(kind, "window_tokens", model.window_tokens)
    _OUTPUT_MODES.check(kind, "output_modes", model.output_modes)
    return model


def check_model(_owner: object, _attribute: object, model: Model | None) -> None:
    """Validate a field that holds a model or None."""
    if model is not None:
        ensure_model(model)


def identify_model(model: Model) -> list[Any]:
    """Return the class, the name and the address of a model with its query, and those of the models that it wraps."""
    inner: object = getattr(model, "models", ())
    wrapped = [each for each in inner if Model in type(each).__mro__] if isinstance(inner, tuple) else []
    address = [getattr(model, "base_url", ""), getattr(model, "query", "")]
    return [type(model).__qualname__, model.name, address, [*map(identify_model, wrapped)]]


class TokenCounter(Protocol):
    """Counts tokens of text."""

    encoding: str
    """Name of the vocabulary, for example "o200k_base", or a description of the estimate."""

    exact: bool
    """Whether the counts are exact; False for an estimate."""

    def count(self, text: str) -> int:
        """Return the tokens of the text, 0 or more. Does not raise for any str."""
        ...


# Limits on the size of a reply, for all models. Each is many times the size of a real reply: 128,000 tokens are about
# 600,000 characters, and OpenAI takes at most 128 calls in one message. A larger reply comes from a server that does
# not end its stream, or from a model that repeats itself.

# Maximum tool calls in one reply. Each is an entry of one journal record, and costs the event loop about 0.1 ms.
MAX_REPLY_CALLS: Final = 512
TOO_MANY_CALLS: Final = f"more than {MAX_REPLY_CALLS:,} calls"

# Maximum characters of one reply: text, thinking and arguments of the calls together.
MAX_REPLY_CHARS: Final = 8 * 2**20
TOO_MANY_CHARS: Final = f"more than {MAX_REPLY_CHARS:,} characters of text, thinking and arguments"

# Maximum characters of a reply's native content and of its images: images of 12 MB, which are in both. A record of the
# journal holds twice that.
MAX_NATIVE_REPLY_CHARS: Final = 32 * 2**20

# A reply of at most MAX_REPLY_CALLS calls is within MAX_REPLY_CHARS, and need not be counted, if its text and the
# arguments of each call are not longer than these.
USUAL_TEXT_CHARS: Final = MAX_REPLY_CHARS // 2
USUAL_ARGUMENTS_CHARS: Final = MAX_REPLY_CHARS // 2 // MAX_REPLY_CALLS


def find_reply_excess(reply: Reply) -> str | None:
    """Return a description of the limit that a reply exceeds; None if it is within all of them."""
    if len(reply.calls) > MAX_REPLY_CALLS:
        return TOO_MANY_CALLS
    chars = len(reply.text) + len(reply.thinking) + sum(len(call.arguments) for call in reply.calls)
    if chars > MAX_REPLY_CHARS:
        return TOO_MANY_CHARS
    kept = 0 if reply.native is None else len(reply.native.content)
    kept += 0 if reply.hosted is None else sum(len(image.url) for image in reply.hosted.images)
    if kept > MAX_NATIVE_REPLY_CHARS:
        return f"more than {MAX_NATIVE_REPLY_CHARS:,} characters in native and in images"
    return None


# The expected types of the fields of a reply and of its calls, each with the advice for the error message.
FieldRules: TypeAlias = Mapping[str, tuple[type | UnionType, str]]
_REPLY_FIELDS: Final[FieldRules] = {
    "text": (str, "'' for a reply without text"),
    "calls": (tuple | list, "a tuple of ProposedCall"),
    "finish_reason": (FinishReason, "a FinishReason, for example FinishReason.LENGTH for a reply that was cut off"),
    "native": (NativeReply | None, "NativeReply(provider=..., content=...), or None"),
    "model": (str, "the name of the model that answered, or ''"),
    "thinking": (str, "the thinking as text, or ''"),
    "served_model": (str, "the name of a model, or ''"),
    "response_id": (str, "the id of the reply, or ''"),
    "tier": (TierChoice | None, "a TierChoice, or None"),
    "hosted": (HostedContent | None, "a HostedContent, or None"),
    "unanswered": (str, "a sentence, or ''"),
    "cache_report": (CacheReport | None, "a CacheReport, or None"),
}
_NATIVE_FIELDS: Final[FieldRules] = {"provider": (str, "a string"), "content": (str, "the JSON text")}
_CALL_FIELDS: Final[FieldRules] = {
    "id": (str, "a string"),
    "name": (str, "a string"),
    "arguments": (str, "the JSON text"),
}


def check_reply(method: str, reply: object) -> None:
    """Check the value that a method of a model returned, except for its calls and its usage.

    Raises:
        MisuseError: if it is not a Reply, or a field has the wrong type; the message names the value to return.
    """
    if not isinstance(reply, Reply):
        raise MisuseError(f"{method} returned {type(reply).__name__}: return a Reply, for example Reply(text='...')")
    check_fields(f"{method} returned a Reply whose", reply, _REPLY_FIELDS)
    if reply.native is not None:
        check_fields(f"{method} returned a Reply with a native whose", reply.native, _NATIVE_FIELDS)


def check_call(method: str, call: object) -> None:
    """Check a call in a reply that a method of a model returned.

    Raises:
        MisuseError: if it is not a ProposedCall, or a field has the wrong type; the message names the value to return.
    """
    subject = f"{method} returned a Reply with"
    if not isinstance(call, ProposedCall):
        raise MisuseError(f"{subject} calls that are {type(call).__name__}: give a tuple of ProposedCall")
    check_fields(f"{subject} a call whose", call, _CALL_FIELDS)


def build_os_failure(model: Model, error: OSError) -> ModelUnavailableError:
    """Build the error of a request whose model, one of the user's own, raised an error of the operating system."""
    return ModelUnavailableError(
        f"{model.name} cannot be reached: {str(error) or type(error).__name__}",
        is_unreachable=isinstance(error, ConnectionRefusedError | socket.gaierror),
    )


def check_fields(subject: str, given: object, fields: FieldRules) -> None:
    """Check the types of fields.

    Raises:
        MisuseError: naming the first field of the wrong type, and the value to give.
    """
    for name, (kind, wanted) in fields.items():
        value = getattr(given, name)
        if not isinstance(value, kind):
            raise MisuseError(f"{subject} {name} is of the type {type(value).__name__}: give {wanted}")
