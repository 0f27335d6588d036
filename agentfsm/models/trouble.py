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
SERVER_ERRORS: Final = 500


@attrs.frozen(kw_only=True)
class Trouble(Value):
    """What is known of a request that failed, free of secrets."""

    adapter: str
    # The class that asked, for example "OpenAIChat".
    key_name: str
    # The environment variable that holds the key.
    wire: str
    # What belonged in place of what came, for example "a chat completion".
    model: str
    base_url: str
    detail: str
    # What the server or the transport said.
    status: int | None = None
    # Of HTTP, from 400 on.
    code: str = ""
    # The provider's name of the error, such as "insufficient_quota" or "overloaded_error".
    request_id: str = ""
    # What the provider's support asks for.
    retry_after_s: float | None = None

    @property
    def where(self) -> str:
        """Model and address, for a sentence."""
        return f"{self.model!r} at {self.base_url}"

    @property
    def said(self) -> str:
        """What the server said, in brackets."""
        number = f"{self.status}: " if self.status else ""
        request = f", request {self.request_id}" if self.request_id else ""
        return f"({number}{self.detail}{request})"


Translate: TypeAlias = Callable[[Trouble], ModelError]


def too_long(trouble: Trouble) -> ModelError:
    """The request is larger than the window."""
    return ContextTooLongError(
        f"The request is larger than the context window of {trouble.where} {trouble.said}. "
        "Shorten or compact the history, or take a model with a larger window."
    )


def bad_request(trouble: Trouble) -> ModelError:
    """Something in the request is wrong for this provider, and stays so."""
    return ModelError(
        f"{trouble.where} refused the request {trouble.said}. Mend what it names (a setting, a tool's parameters, a "
        "message): the same request will be refused again."
    )


def key_refused(trouble: Trouble) -> ModelError:
    """The provider does not know the key."""
    return ModelError(
        f"{trouble.where} refused the API key {trouble.said}. Check the environment variable {trouble.key_name}, or "
        f"the api_key given to {trouble.adapter}."
    )


def forbidden(trouble: Trouble) -> ModelError:
    """The key may not use this model."""
    return ModelError(
        f"{trouble.where} is not open to this API key {trouble.said}. Check what the key's project may use, or take "
        "another model."
    )


def not_found(trouble: Trouble) -> ModelError:
    """There is no such model, or no such address."""
    return ModelError(
        f"There is no model {trouble.model!r} at {trouble.base_url}, or no such address {trouble.said}. Check the "
        "model's name and base_url."
    )


def no_credit(trouble: Trouble) -> ModelError:
    """The account is empty."""
    return ModelError(
        f"The account has no quota left for {trouble.where} {trouble.said}. Add credit or use another key: asking "
        "again will not help."
    )


def unavailable(trouble: Trouble) -> ModelError:
    """It may do better later."""
    return ModelUnavailableError(
        f"{trouble.where} cannot answer just now {trouble.said}. Ask again later.",
        trouble.retry_after_s,
        status=trouble.status,
    )


def unreachable(trouble: Trouble) -> ModelError:
    """The network is at fault, or the address."""
    return ModelUnavailableError(
        f"{trouble.where} was not reached, or the connection broke {trouble.said}. Ask again; if it stays, check "
        "base_url, the network and the proxy."
    )


def timed_out(trouble: Trouble) -> ModelError:
    """It was silent for too long."""
    return ModelUnavailableError(
        f"{trouble.where} was silent for too long {trouble.said}. Ask again, or allow more with "
        "Limits(model_timeout_s=...)."
    )


def broken_off(trouble: Trouble) -> ModelError:
    """The stream ended before the reply was whole."""
    return ModelUnavailableError(f"The stream of {trouble.where} broke off before the reply was whole. Ask again.")


def garbled(trouble: Trouble) -> ModelError:
    """What came is no reply."""
    return ModelReplyError(
        f"{trouble.where} answered with something else than {trouble.wire} {trouble.said}. Ask again; if it stays, "
        "check that base_url leads to a server that speaks this wire."
    )


def too_large(trouble: Trouble) -> ModelError:
    """More came than a reply may have."""
    return ModelReplyError(
        f"The reply of {trouble.where} was broken off, because it is too large {trouble.said}. Limit it with "
        "Settings(max_tokens=...); if it stays, check that base_url leads to a server that speaks this wire."
    )


def unforeseen(trouble: Trouble) -> ModelError:
    """The vendor's package would not ask."""
    return ModelError(f"{trouble.where} could not be asked {trouble.said}. Check how {trouble.adapter} was made.")


def moved(trouble: Trouble) -> ModelError:
    """The server sends the request elsewhere, and the conversation does not go there."""
    return ModelError(
        f"{trouble.where} answered with a redirect {trouble.said}, which is not followed, so that the conversation and "
        "the key reach no other server. Give the address where the server is now as base_url."
    )


def proxy_refused(trouble: Trouble) -> ModelError:
    """A proxy on the way wants to know who asks."""
    return ModelError(
        f"A proxy on the way to {trouble.where} wants a login {trouble.said}. Put it into the proxy's address: "
        "HTTPS_PROXY=http://user:password@host:port."
    )


# How servers say that a request is larger than the window. Most have no code for it, and many speak another's wire.
# Sources: ggml-org/llama.cpp#19774, earendil-works/pi#4943 and #5929, and what that client knows of the others.
_TOO_LONG: Final = (
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
_too_long_in: Final = re.compile("|".join(_TOO_LONG), re.IGNORECASE).search

# A server that wants one to wait may speak of lengths, too: of tokens per minute.
_WAIT: Final = 429

# What a status says, whoever the provider is.
_KNOWN: Final[Mapping[int, Translate]] = {
    **dict.fromkeys(range(300, 400), moved),
    401: key_refused,
    402: no_credit,
    403: forbidden,
    404: not_found,
    407: proxy_refused,
    413: too_long,
}


def by_status(bad: Translate, busy: Translate, more: Mapping[int, Translate] = MappingProxyType({})) -> Translate:
    """Return what goes by the status, but for a request that is too long, of which servers say so with any.

    Args:
        bad: A client's fault that nothing else is known of.
        busy: A server's fault, and what waiting may mend.
        more: What the provider says by some other status.
    """
    known = {**_KNOWN, **dict.fromkeys((408, 409, _WAIT), busy), **more}

    def translate(trouble: Trouble) -> ModelError:
        status = trouble.status or SERVER_ERRORS
        if status != _WAIT and _too_long_in(f"{trouble.code} {trouble.detail}"):
            return too_long(trouble)
        return known.get(status, bad if status < SERVER_ERRORS else busy)(trouble)

    return translate
