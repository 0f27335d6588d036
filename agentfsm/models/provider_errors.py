"""Build the `ModelError` of a failed request from its status and body: the reason and the next step."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import attrs

from agentfsm._lib.public_network import is_local_host
from agentfsm.core.errors import (
    ContextTooLongError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    ReasoningRefusedError,
)
from agentfsm.core.value import Value
from agentfsm.models.wire import parse_json

# Characters of a server's message that an error quotes: a proxy may answer with a whole page.
MAX_DETAIL_CHARS: Final = 500

# The lowest HTTP status of a server error.
FIRST_SERVER_ERROR_STATUS: Final = 500


@attrs.frozen(kw_only=True)
class ProviderFailure(Value):
    """Facts of a failed request, without secrets."""

    adapter: str
    """Name of the adapter's class, for example "OpenAIChat"."""

    api_key_env: str
    """Environment variable of the API key; empty if there is none."""

    expected_reply: str
    """Description of a valid reply, for example "a chat completion"."""

    model: str
    """Name of the model."""

    base_url: str
    """Address of the service; empty if the provider's package has none."""

    detail: str
    """Message of the server or the transport."""

    status: int | None = None
    """HTTP status of an error, 300 or more; None if there was no response."""

    code: str = ""
    """Error code of the provider, for example "insufficient_quota" or "overloaded_error"."""

    request_id: str = ""
    """Request id, which the provider's support asks for; empty if unknown."""

    retry_after_s: float | None = None
    """Seconds that the server asked to wait; None if it did not."""

    is_unreachable: bool = False
    """Whether no connection to the server could be made."""

    @property
    def model_and_url(self) -> str:
        """The model, and its address if there is one."""
        return f"{self.model!r} at {self.base_url}" if self.base_url else repr(self.model)

    @property
    def server_message(self) -> str:
        """The status, message and request id, in brackets."""
        number = f"{self.status}: " if self.status else ""
        request = f", request {self.request_id}" if self.request_id else ""
        return f"({number}{self.detail}{request})"


Translate: TypeAlias = Callable[[ProviderFailure], ModelError]


def context_length_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a request that is larger than the context window."""
    return ContextTooLongError(
        f"The request is larger than the context window of {failure.model_and_url} {failure.server_message}. "
        "Shorten or compact the history, or use a model with a larger window."
    )


def bad_request_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a request that the provider refuses for its content."""
    return ModelError(
        f"{failure.model_and_url} refused the request {failure.server_message}. Correct the setting, tool "
        "parameter or message that it names: the same request would be refused again.",
        refusal="bad_request",
    )


def reasoning_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a request whose reasoning of earlier replies the provider does not accept back."""
    return ReasoningRefusedError(
        f"{failure.model_and_url} refused the reasoning of an earlier reply {failure.server_message}. The engine sends "
        "the request once more without reasoning.",
        refusal="bad_request",
    )


def api_key_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a missing or unknown API key."""
    variable = f"the environment variable {failure.api_key_env}, or " if failure.api_key_env else ""
    return ModelError(
        f"{failure.model_and_url} refused the API key {failure.server_message}. Check {variable}the api_key given to "
        f"{failure.adapter}.",
        refusal="api_key",
    )


def permission_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a key without access to the model."""
    return ModelError(
        f"{failure.model_and_url} is not open to this API key {failure.server_message}. Check the permissions of the "
        "key's project, or use another model.",
        refusal="permission",
    )


def not_found_error(failure: ProviderFailure) -> ModelError:
    """Build the error of an unknown model or address."""
    if not failure.base_url:
        return ModelError(
            f"There is no model {failure.model!r} {failure.server_message}. Check the model's name.",
            refusal="not_found",
        )
    return ModelError(
        f"There is no model {failure.model!r} at {failure.base_url}, or no such address {failure.server_message}. "
        "Check the model's name and base_url.",
        refusal="not_found",
    )


def quota_error(failure: ProviderFailure) -> ModelError:
    """Build the error of an account without credit."""
    return ModelError(
        f"The account has no quota left for {failure.model_and_url} {failure.server_message}. Add credit or use "
        "another key: a retry will not help.",
        refusal="quota",
    )


def unavailable_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a model that is overloaded or down, which a retry may mend."""
    return ModelUnavailableError(
        f"{failure.model_and_url} is unavailable {failure.server_message}. Retry later.",
        failure.retry_after_s,
        status=failure.status,
    )


def connection_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a connection that could not be made, or that broke."""
    if failure.is_unreachable:
        advice = (
            "No server listens there: start the model server (`ollama serve`, `vllm serve`, ...), or correct base_url."
            if is_local_host(urlsplit(failure.base_url).hostname or "")
            and failure.detail == os.strerror(errno.ECONNREFUSED).lower()
            else "Check that the server runs, base_url, the network and the proxy."
        )
        return ModelUnavailableError(
            f"Cannot connect to {failure.model_and_url} {failure.server_message}. {advice}", is_unreachable=True
        )
    return ModelUnavailableError(
        f"{failure.model_and_url} was not reached, or the connection broke {failure.server_message}. Retry; if it "
        "persists, check base_url, the network and the proxy."
    )


def timeout_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a server that sent nothing within `Request.timeout_s`."""
    return ModelUnavailableError(
        f"{failure.model_and_url} was silent for too long {failure.server_message}. Retry, or allow more time with "
        "Limits(model_timeout_s=...)."
    )


def incomplete_stream_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a stream that ended before its reply was complete."""
    return ModelUnavailableError(f"The stream of {failure.model_and_url} ended before the reply was complete. Retry.")


def invalid_reply_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a response that is not a reply."""
    return ModelReplyError(
        f"{failure.model_and_url} answered with something else than {failure.expected_reply} {failure.server_message}. "
        "Retry; if it persists, check that base_url leads to a server that speaks this API."
    )


def unreadable_call_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a model that wrote a call or an object that its own server cannot read."""
    return ModelReplyError(
        f"{failure.model_and_url} wrote a call or JSON that its server could not read {failure.server_message}. Retry; "
        "if it persists, simplify the parameters of the tools, or use another model."
    )


def reply_size_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a reply that exceeds a size limit."""
    return ModelReplyError(
        f"The reply of {failure.model_and_url} was aborted because it is too large {failure.server_message}. Limit it "
        "with Settings(max_tokens=...); if it persists, check that base_url leads to a server that speaks this API."
    )


def sdk_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a request that the SDK refused to send."""
    return ModelError(
        f"{failure.model_and_url} could not be asked {failure.server_message}. Check the arguments of "
        f"{failure.adapter}."
    )


def unexpected_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a request in which the provider's package raised an error that it does not document."""
    return ModelError(
        f"The package behind {failure.adapter} raised an unexpected error when {failure.model_and_url} was asked "
        f"{failure.server_message}. Check the http_client, and tools that patch the package; if there are none, report "
        "it to the author of the adapter."
    )


def redirect_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a redirect to another server, which is not followed."""
    return ModelError(
        f"{failure.model_and_url} answered with a redirect {failure.server_message}, which is not followed, so that "
        "the conversation and the key reach no other server. Give the server's new address as base_url."
    )


def proxy_auth_error(failure: ProviderFailure) -> ModelError:
    """Build the error of a proxy that requires a login."""
    return ModelError(
        f"A proxy on the way to {failure.model_and_url} requires a login {failure.server_message}. Put it into the "
        "proxy's address: HTTPS_PROXY=http://user:password@host:port."
    )


# Messages of servers about a request that is larger than the window. Most have no code for it, and many servers speak
# another provider's API. Sources: ggml-org/llama.cpp#19774, earendil-works/pi#4943 and #5929, and that client's list.
_CONTEXT_LENGTH_PHRASES: Final = (
    "context_length_exceeded",  # OpenAI's code
    "maximum context length",  # OpenAI, vLLM, SGLang, Mistral, OpenRouter, Fireworks
    "exceeds? (the )?context (window|limit)",  # OpenAI, Anthropic, llama-cpp-python
    "exceed(s|ed|ing)? (the )?(max |maximum )?context length",  # Ollama
    "context ?window ?exceed",  # LiteLLM, MiniMax
    "context size",  # llama.cpp
    "greater than the context length",  # LM Studio
    "longer than the model'?s context length",  # Together
    "prompt (is )?too long",  # Anthropic, Ollama
    "input is too long",  # Bedrock
    "input token count",  # Gemini: "exceeds the maximum", and Vertex: "is 40000 but model only supports up to 32768"
    "maximum (prompt|allowed input) length",  # xAI, Poolside
    "exceeded model token limit",  # Kimi
    "reduce the length of the messages",  # Groq
    "`?inputs`? tokens \\+ `?max_new_tokens`? must be",  # TGI, Together
    "`?inputs`? must have less than \\d+ tokens",  # TGI
)
_find_context_length_phrase: Final = re.compile("|".join(_CONTEXT_LENGTH_PHRASES), re.IGNORECASE).search

# Messages of servers about reasoning that they signed or sealed, in a history that they do not accept.
_REASONING_PHRASES: Final = (
    "bound to a different conversation",  # Anthropic: the page "Fix a thinking block bound to a different conversation"
    "invalid `?signature`? in `?thinking",  # Anthropic
    "`?(redacted_)?thinking`? blocks in the latest assistant message cannot be modified",  # Anthropic
    "invalid_encrypted_content",  # OpenAI's code: openai/codex#8128
    "encrypted content .*could not be verified",  # OpenAI, without the code
    "reasoning input items can only be provided to a reasoning",  # OpenAI, of another model
    "(corrupted|invalid) thought signature",  # Gemini: google-gemini/gemini-cli#13467
    "thought signature is not valid",  # Gemini: decolua/9router#301
)
_find_reasoning_phrase: Final = re.compile("|".join(_REASONING_PHRASES), re.IGNORECASE).search

# Codes of Groq for a reply of the model, not for the request: it answers with 400 (vercel/ai#6916, groq-typescript#28).
_REPLY_CODES: Final = frozenset({"tool_use_failed", "json_validate_failed", "output_parse_failed"})

_BAD_REQUEST: Final = 400
# A rate limit may mention lengths as well: tokens per minute.
_TOO_MANY_REQUESTS: Final = 429

# Meaning of a status with all providers.
_TRANSLATE_BY_STATUS: Final[Mapping[int, Translate]] = {
    **dict.fromkeys(range(300, 400), redirect_error),
    401: api_key_error,
    402: quota_error,
    403: permission_error,
    404: not_found_error,
    407: proxy_auth_error,
    413: context_length_error,
}


def build_status_translator(
    client_error: Translate, retryable_error: Translate, overrides: Mapping[int, Translate] = MappingProxyType({})
) -> Translate:
    """Build a function that translates a failure by its status.

    A request that is too long and refused reasoning are found by their messages, and an unreadable reply by its code.

    Args:
        client_error: Translates the other client errors, 400 to 499.
        retryable_error: Translates server errors and those that a retry may mend.
        overrides: Translations of further statuses of the provider.
    """
    known = {**_TRANSLATE_BY_STATUS, **dict.fromkeys((408, 409, _TOO_MANY_REQUESTS), retryable_error), **overrides}

    def translate(failure: ProviderFailure) -> ModelError:
        status = failure.status or FIRST_SERVER_ERROR_STATUS
        if status != _TOO_MANY_REQUESTS and _find_context_length_phrase(f"{failure.code} {failure.detail}"):
            return context_length_error(failure)
        if failure.code in _REPLY_CODES:
            return unreadable_call_error(failure)
        if status == _BAD_REQUEST and _find_reasoning_phrase(f"{failure.code} {failure.detail}"):
            return reasoning_error(failure)
        return known.get(status, client_error if status < FIRST_SERVER_ERROR_STATUS else retryable_error)(failure)

    return translate


# Fields with the message, or with the object or list that has it: OpenAI, Anthropic and Google; FastAPI and Mistral;
# Ollama; Cloudflare; an entry of a list of FastAPI.
_MESSAGE_FIELDS: Final = ("message", "detail", "error", "errors", "msg")
# Levels of objects, lists and texts of JSON. OpenRouter's body with Mistral's in it has seven.
_MAX_DEPTH: Final = 10
# Entries of a list that are read: FastAPI has one for each wrong field.
_MAX_ENTRIES: Final = 8


def read_error_message(body: object) -> str:
    """Return the message in the body of an error; empty if there is none.

    Args:
        body: The body, parsed, whole or without an outer `error`; or its text.
    """
    return _read(body, _MAX_DEPTH)


def _read(source: object, depth: int) -> str:
    if not depth:
        return ""
    match source:
        case str():
            return _read_text(source, depth)
        case list():
            return "; ".join(filter(None, [_read(each, depth - 1) for each in source[:_MAX_ENTRIES]]))
        case dict():
            return ": ".join(filter(None, _read_object(source, depth)))
    return ""


def _read_text(text: str, depth: int) -> str:
    """Return a text, or the message in it if it is JSON: gateways quote the bodies of other servers."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return _read(parse_json(text.encode("utf-8", "surrogatepass")), depth - 1) or text
    except (ValueError, RecursionError):
        return text


def _read_object(source: dict[str, object], depth: int) -> Iterable[str]:
    """Yield the place of the fault, the message, and what the server adds to it."""
    place = source.get("loc")
    yield ".".join(map(str, place)) if isinstance(place, list) and "msg" in source else ""  # FastAPI
    yield next(filter(None, [_read(source.get(name), depth - 1) for name in _MESSAGE_FIELDS]), "")
    if isinstance(metadata := source.get("metadata"), dict) and (raw := metadata.get("raw")):
        # OpenRouter: the message is "Provider returned error", and this is the body of that error.
        yield str(metadata.get("provider_name") or "")
        yield _read(raw, depth - 1)
    yield _read(source.get("failed_generation"), 1)  # Groq: the text in which it found no call
