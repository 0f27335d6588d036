"""Why a model could not be asked, in sentences: what went wrong, and what to do next; the same for all providers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import attrs

from agentfsm.core.errors import ContextTooLongError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.core.value import Value

# Server words in our errors are cut here, characters: a proxy may answer with a whole page.
MAX_DETAIL_CHARS: Final = 500

# The first status that says that the server is at fault.
FIRST_SERVER_ERROR_STATUS: Final = 500


@attrs.frozen(kw_only=True)
class ProviderFailure(Value):
    """What is known of a request that failed, free of secrets."""

    adapter: str
    """The class that asked, for example "OpenAIChat"."""

    api_key_env: str
    """The environment variable that holds the key; empty where there is none."""

    expected_reply: str
    """What belonged in place of what came, for example "a chat completion"."""

    model: str
    base_url: str
    """Empty where the vendor's package has no address."""

    detail: str
    """What the server or the transport said."""

    status: int | None = None
    """Of HTTP, from 400 on."""

    code: str = ""
    """The provider's name of the error, such as "insufficient_quota" or "overloaded_error"."""

    request_id: str = ""
    """What the provider's support asks for."""

    retry_after_s: float | None = None
    """Seconds to wait that the server asked for; None if it did not."""

    is_unreachable: bool = False
    """Whether no connection to the server could be made."""

    @property
    def model_and_url(self) -> str:
        """Model and address, where there is one, for a sentence."""
        return f"{self.model!r} at {self.base_url}" if self.base_url else repr(self.model)

    @property
    def server_message(self) -> str:
        """What the server said, in brackets."""
        number = f"{self.status}: " if self.status else ""
        request = f", request {self.request_id}" if self.request_id else ""
        return f"({number}{self.detail}{request})"


Translate: TypeAlias = Callable[[ProviderFailure], ModelError]


def context_length_error(failure: ProviderFailure) -> ModelError:
    """The request is larger than the window."""
    return ContextTooLongError(
        f"The request is larger than the context window of {failure.model_and_url} {failure.server_message}. "
        "Shorten or compact the history, or take a model with a larger window."
    )


def bad_request_error(failure: ProviderFailure) -> ModelError:
    """Something in the request is wrong for this provider, and stays so."""
    return ModelError(
        f"{failure.model_and_url} refused the request {failure.server_message}. Mend what it names (a setting, a "
        "tool's parameters, a message): the same request will be refused again."
    )


def api_key_error(failure: ProviderFailure) -> ModelError:
    """The provider does not know the key."""
    variable = f"the environment variable {failure.api_key_env}, or " if failure.api_key_env else ""
    return ModelError(
        f"{failure.model_and_url} refused the API key {failure.server_message}. Check {variable}the api_key given to "
        f"{failure.adapter}."
    )


def permission_error(failure: ProviderFailure) -> ModelError:
    """The key may not use this model."""
    return ModelError(
        f"{failure.model_and_url} is not open to this API key {failure.server_message}. Check what the key's project "
        "may use, or take another model."
    )


def not_found_error(failure: ProviderFailure) -> ModelError:
    """There is no such model, or no such address."""
    if not failure.base_url:
        return ModelError(f"There is no model {failure.model!r} {failure.server_message}. Check the model's name.")
    return ModelError(
        f"There is no model {failure.model!r} at {failure.base_url}, or no such address {failure.server_message}. "
        "Check the model's name and base_url."
    )


def quota_error(failure: ProviderFailure) -> ModelError:
    """The account is empty."""
    return ModelError(
        f"The account has no quota left for {failure.model_and_url} {failure.server_message}. Add credit or use "
        "another key: asking again will not help."
    )


def unavailable_error(failure: ProviderFailure) -> ModelError:
    """It may do better later."""
    return ModelUnavailableError(
        f"{failure.model_and_url} cannot answer just now {failure.server_message}. Ask again later.",
        failure.retry_after_s,
        status=failure.status,
    )


def connection_error(failure: ProviderFailure) -> ModelError:
    """No connection could be made, or it broke."""
    if failure.is_unreachable:
        return ModelUnavailableError(
            f"Cannot connect to {failure.model_and_url} {failure.server_message}. Check that the server runs, "
            "base_url, the network and the proxy.",
            is_unreachable=True,
        )
    return ModelUnavailableError(
        f"{failure.model_and_url} was not reached, or the connection broke {failure.server_message}. Ask again; if it "
        "stays, check base_url, the network and the proxy."
    )


def timeout_error(failure: ProviderFailure) -> ModelError:
    """It was silent for too long."""
    return ModelUnavailableError(
        f"{failure.model_and_url} was silent for too long {failure.server_message}. Ask again, or allow more with "
        "Limits(model_timeout_s=...)."
    )


def incomplete_stream_error(failure: ProviderFailure) -> ModelError:
    """The stream ended before the reply was whole."""
    return ModelUnavailableError(
        f"The stream of {failure.model_and_url} broke off before the reply was whole. Ask again."
    )


def invalid_reply_error(failure: ProviderFailure) -> ModelError:
    """What came is no reply."""
    return ModelReplyError(
        f"{failure.model_and_url} answered with something else than {failure.expected_reply} {failure.server_message}. "
        "Ask again; if it stays, check that base_url leads to a server that speaks this wire."
    )


def reply_size_error(failure: ProviderFailure) -> ModelError:
    """More came than a reply may have."""
    return ModelReplyError(
        f"The reply of {failure.model_and_url} was broken off, because it is too large {failure.server_message}. Limit "
        "it with Settings(max_tokens=...); if it stays, check that base_url leads to a server that speaks this wire."
    )


def sdk_error(failure: ProviderFailure) -> ModelError:
    """The vendor's package would not ask."""
    return ModelError(
        f"{failure.model_and_url} could not be asked {failure.server_message}. Check how {failure.adapter} was made."
    )


def redirect_error(failure: ProviderFailure) -> ModelError:
    """The server sends the request elsewhere, and the conversation does not go there."""
    return ModelError(
        f"{failure.model_and_url} answered with a redirect {failure.server_message}, which is not followed, so that "
        "the conversation and the key reach no other server. Give the address where the server is now as base_url."
    )


def proxy_auth_error(failure: ProviderFailure) -> ModelError:
    """A proxy on the way wants to know who asks."""
    return ModelError(
        f"A proxy on the way to {failure.model_and_url} wants a login {failure.server_message}. Put it into the "
        "proxy's address: HTTPS_PROXY=http://user:password@host:port."
    )


# How servers say that a request is larger than the window. Most have no code for it, and many speak another's wire.
# Sources: ggml-org/llama.cpp#19774, earendil-works/pi#4943 and #5929, and what that client knows of the others.
_CONTEXT_LENGTH_PHRASES: Final = (
    "context_length_exceeded",  # OpenAI's code
    "maximum context length",  # OpenAI, vLLM, SGLang, Mistral, OpenRouter
    "exceeds? (the )?context (window|limit)",  # OpenAI, Anthropic, llama-cpp-python
    "context ?window ?exceed",  # LiteLLM, MiniMax
    "context size",  # llama.cpp
    "greater than the context length",  # LM Studio
    "prompt (is )?too long",  # Anthropic, Ollama
    "input is too long",  # Bedrock
    "input token count.*exceeds",  # Gemini
    "maximum (prompt|allowed input) length",  # xAI, Poolside
    "exceeded model token limit",  # Kimi
    "reduce the length of the messages",  # Groq
)
_find_context_length_phrase: Final = re.compile("|".join(_CONTEXT_LENGTH_PHRASES), re.IGNORECASE).search

# A server that wants one to wait may speak of lengths, too: of tokens per minute.
_TOO_MANY_REQUESTS: Final = 429

# What a status says, whoever the provider is.
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
    """Return what goes by the status, but for a request that is too long, of which servers say so with any.

    Args:
        client_error: A client's fault that nothing else is known of.
        retryable_error: A server's fault, and what waiting may mend.
        overrides: What the provider says by some other status.
    """
    known = {**_TRANSLATE_BY_STATUS, **dict.fromkeys((408, 409, _TOO_MANY_REQUESTS), retryable_error), **overrides}

    def translate(trouble: ProviderFailure) -> ModelError:
        status = trouble.status or FIRST_SERVER_ERROR_STATUS
        if status != _TOO_MANY_REQUESTS and _find_context_length_phrase(f"{trouble.code} {trouble.detail}"):
            return context_length_error(trouble)
        return known.get(status, client_error if status < FIRST_SERVER_ERROR_STATUS else retryable_error)(trouble)

    return translate
