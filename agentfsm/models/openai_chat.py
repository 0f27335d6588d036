"""OpenAI's chat completions, and every other server that speaks the same wire.

The request goes through the lower door of the openai package: `client.post` with a body that is ready, and the plain
response. That keeps its authentication, transport, errors and time-outs, and leaves out that it checks each message of
the history against its annotations (16 ms at 50 turns) and builds an object for each chunk.
Its `AsyncStream` is left out too: at the end of each stream it leaves generators to the garbage collector, which trio
warns of and asyncio starts tasks for. Its retries are off: the engine retries, and two layers would multiply.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncGenerator  # attrs wants to see it
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import anyio
import attrs
import httpx
import httpx2  # what the openai package itself speaks with; it raises its errors
import openai
from anyio.lowlevel import current_token

from agentfsm.core.errors import (
    ClosedError,
    ContextTooLongError,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
)
from agentfsm.models.chat_wire import Assembly, FormError, SentError, Written, decode, encode
from agentfsm.models.prices import list_cost_usd
from agentfsm.ports import Model
from agentfsm.retry_after import finite_s, seconds_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from agentfsm.core.messages import Usage
    from agentfsm.models.prices import Price
    from agentfsm.ports import Chunk, Emit, Reply, Request

_PATH = "/chat/completions"
_OPENAI_URL = "https://api.openai.com/v1"

# Servers that are OpenAI's own software. They call the limit of an answer max_completion_tokens, and their reasoning
# models refuse the older max_tokens; everybody else knows max_tokens, and some (Mistral) refuse the newer name.
_OPENAI_HOSTS = ("api.openai.com", ".openai.azure.com")

# Context windows by the beginning of a model's name, tokens; the longest beginning that fits counts.
# Source: OpenAI's model pages and the list of genai-prices 0.2.3; where they differ, the smaller.
_WINDOWS = {
    "gpt-3.5-turbo": 16_385,
    "gpt-4": 8_192,
    "gpt-4-32k": 32_000,
    "gpt-4-turbo": 128_000,
    "gpt-4.1": 1_000_000,
    "gpt-4.5": 128_000,
    "gpt-4o": 128_000,
    "gpt-5": 400_000,
    "gpt-5-chat": 128_000,
    "gpt-5.3": 128_000,
    "gpt-5.3-codex": 400_000,
    "gpt-5.4": 1_050_000,
    "gpt-5.4-mini": 400_000,
    "gpt-5.4-nano": 400_000,
    "gpt-5.5": 1_000_000,
    "gpt-5.6": 1_050_000,
    "gpt-6": 1_050_000,
    "gpt-oss": 131_072,
    "o1": 200_000,
    "o1-mini": 128_000,
    "o1-preview": 128_000,
    "o3": 200_000,
    "o4-mini": 200_000,
}
_USUAL_WINDOW_TOKENS = 128_000

# How long the end of a stream's body may keep us, seconds. Some servers keep the connection open after the last event.
_DRAIN_S = 0.1

# Server words in our errors are cut here: a proxy may answer with a whole page.
_LONGEST_DETAIL = 500

# Shorter words of a key or a header are not taken out of the server's words, characters.
_SHORTEST_SECRET = 8

_STATUSES = {str(status): status for status in range(400, 600)}


class OpenAIChat(Model):
    """A model behind OpenAI's chat completions, for example `OpenAIChat("gpt-4o")`.

    Any server that speaks the same wire will do: `OpenAIChat("qwen3", base_url="http://localhost:11434/v1")`.

    Connections are opened at the first reply, one pool per event loop, and closed by `aclose()`, at the latest when
    their event loop ends. A cancelled reply closes its connection.

    Args:
        name: The model, as the server knows it.
        base_url: Where the server answers, usually ending in /v1. Default: OPENAI_BASE_URL, then OpenAI itself.
        api_key: Default: OPENAI_API_KEY. A server of your own may need none.
        headers: Sent with each request.
        http_client: A client of your own (proxies, certificates); it stays yours to close, and belongs to one event
            loop.
        window_tokens: The context window. Default: that of the model's family, else 128,000.
        price: What the model costs. Default: the public list of genai-prices, where that package is installed.

    Raises:
        MisuseError: when there is no key for OpenAI, or an argument cannot be right.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        http_client: httpx.AsyncClient | httpx2.AsyncClient | None = None,
        window_tokens: int | None = None,
        price: Price | None = None,
    ) -> None:
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        url = _checked_url(base_url or _OPENAI_URL)
        self.name = _checked_name(name)
        self.window_tokens = _checked_window(name, window_tokens)
        self._base_url = f"{url.scheme}://{url.netloc.decode('ascii')}{url.path}"  # without a password
        self._limit_field = "max_completion_tokens" if url.host.endswith(_OPENAI_HOSTS) else "max_tokens"
        self._price = price
        self._http_client = http_client
        key = _checked_key(api_key or os.environ.get("OPENAI_API_KEY"), needed=base_url is None)
        headers = {name: _checked_header(f"the header {name!r}", value) for name, value in (headers or {}).items()}
        self._secrets = _secret_words(key, *headers.values())
        self._options: dict[str, Any] = {
            "base_url": str(url),
            "api_key": key,
            "default_headers": headers,
            "max_retries": 0,
        }
        self._clients: dict[object, _Kept] = {}
        if http_client is None:
            _certificates()  # here, where no event loop waits

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask once, without retries; see `Model.reply`."""
        kept = await self._kept()
        body = encode(
            request,
            model=self.name,
            limit_field=self._limit_field,
            streamed=emit is not None,
            written=kept.written,
        )
        response = await self._answer(kept.client, body, request.timeout_s, streamed=emit is not None)
        return self._whole(response) if emit is None else await self._streamed(response, emit)

    def cost_usd(self, usage: Usage) -> float | None:
        """US dollars for the usage of one reply, or None where no price is known."""
        if self._price is not None:
            return self._price.cost_usd(usage)
        return list_cost_usd(self.name, self._base_url, usage)

    async def aclose(self) -> None:
        """Close the connections of the running event loop, but never a client of your own.

        A later reply opens new ones.
        """
        kept = self._clients.pop(self._loop(), None)
        if kept is not None and kept.keeper is not None:
            await kept.keeper.aclose()

    async def _kept(self) -> _Kept:
        if self._http_client is not None and self._http_client.is_closed:
            msg = "the http_client given to OpenAIChat is closed: keep it open for as long as the model is used"
            raise ClosedError(msg)
        loop = self._loop()
        kept = self._clients.get(loop)
        if kept is None or kept.client.is_closed():
            self._forget_closed()
            kept = self._clients[loop] = await self._opened()
        return kept

    def _loop(self) -> object:
        # A client of the user's is one for all; what is opened here belongs to the event loop that runs.
        return None if self._http_client is not None else current_token().native_token

    async def _opened(self) -> _Kept:
        if self._http_client is not None:
            theirs = cast("httpx2.AsyncClient", self._http_client)  # the package takes either, and says only one
            return _Kept(client=openai.AsyncOpenAI(**self._options, http_client=theirs))
        # Not the package's default client: when that one is forgotten, it starts a task on whatever loop runs then.
        ours = openai.DefaultAsyncHttpxClient(verify=_certificates())
        keeper = _keep(openai.AsyncOpenAI(**self._options, http_client=ours))
        return _Kept(client=await anext(keeper), keeper=keeper)

    def _forget_closed(self) -> None:
        for loop, kept in list(self._clients.items()):
            if kept.client.is_closed():
                self._clients.pop(loop, None)

    async def _answer(
        self,
        client: openai.AsyncOpenAI,
        body: bytes,
        timeout_s: float,
        *,
        streamed: bool,
    ) -> httpx2.Response:
        post = cast("Callable[..., Awaitable[httpx2.Response]]", client.post)  # its types insist on a stream class
        options = {"timeout": timeout_s}
        try:
            return await post(_PATH, content=body, cast_to=httpx2.Response, stream=streamed, options=options)
        except _FAILURES as error:
            raise self._translated(error) from None

    def _whole(self, response: httpx2.Response) -> Reply:
        try:
            return decode(response.content)
        except _FAILURES as error:
            raise self._translated(error) from None

    async def _streamed(self, response: httpx2.Response, emit: Emit) -> Reply:
        data, assembly = response.aiter_bytes(), Assembly()
        try:
            # `emit` stands outside of what is translated: its errors are not the server's.
            while not assembly.done and (pieces := await self._pulled(data, assembly)) is not None:
                for piece in pieces:
                    emit(piece)
        finally:
            await _finish(response, data, reusable=assembly.done)
        if assembly.finish is None:
            raise self._broken_off(response, assembly)
        return assembly.reply()

    async def _pulled(self, data: AsyncIterator[bytes], assembly: Assembly) -> list[Chunk] | None:
        try:
            part = await anext(data, None)
            return None if part is None else assembly.feed(part)
        except _FAILURES as error:
            raise self._translated(error) from None

    def _broken_off(self, response: httpx2.Response, assembly: Assembly) -> ModelError:
        kind = response.headers.get("content-type", "nothing")
        if not assembly.chunks and "event-stream" not in kind:
            return _garbled(self._trouble(f"{kind} in place of a stream of events"))
        if assembly.chunks and not assembly.choices:
            return _garbled(self._trouble("a stream without a choice"))
        return ModelUnavailableError(f"The stream of {self._where()} broke off before the reply was whole. Ask again.")

    # Errors

    def _translated(self, error: Exception) -> ModelError:
        # The chain is cut (`from None`) wherever this is raised: what is quoted there may hold the key.
        translate = next(_TRANSLATIONS[kind] for kind in type(error).__mro__ if kind in _TRANSLATIONS)
        return translate(self._told(error))

    def _told(self, error: Exception) -> _Trouble:
        match error:
            case SentError(body=body):
                code, kind = str(body.get("code") or ""), str(body.get("type") or "")
                # It came with status 200; other servers than OpenAI put the true one into the code.
                return self._trouble(_words(body), status=_STATUSES.get(code), code=code, kind=kind)
            case openai.APIStatusError(response=response):
                return self._trouble(
                    _words(error.body) or error.message,
                    status=error.status_code,
                    code=error.code or "",
                    request_id=error.request_id or "",
                    retry_after_s=_retry_after_s(response.headers, time.time()),
                )
            case openai.APIConnectionError(__cause__=BaseException() as cause):
                return self._trouble(f"{type(cause).__name__}: {cause}")
        return self._trouble(f"{type(error).__name__}: {error}")

    def _trouble(self, detail: str, **facts: Any) -> _Trouble:
        for secret in self._secrets:
            detail = detail.replace(secret, "***")
        return _Trouble(
            where=self._where(),
            model=self.name,
            base_url=self._base_url,
            detail=" ".join(detail.split())[:_LONGEST_DETAIL],
            **facts,
        )

    def _where(self) -> str:
        return f"{self.name!r} at {self._base_url}"


# Clients


@cache
def _certificates() -> ssl.SSLContext:
    # Read once, and not by each client: that takes 20 ms, in which the event loop stands still.
    return httpx2.create_ssl_context()


@attrs.frozen(kw_only=True)
class _Kept:
    client: openai.AsyncOpenAI
    keeper: AsyncGenerator[openai.AsyncOpenAI] | None = None
    # Closes the client; None where it is not ours to close.
    written: Written = attrs.field(factory=Written)
    # For the runs of its event loop.


async def _keep(client: openai.AsyncOpenAI) -> AsyncGenerator[openai.AsyncOpenAI]:
    # A generator, because those are the one thing that asyncio and trio both close when a loop ends: so nobody who
    # forgets `aclose()` leaves sockets behind.
    try:
        yield client
    finally:
        await client.close()


async def _finish(response: httpx2.Response, data: AsyncIterator[bytes], *, reusable: bool) -> None:
    if reusable:
        # What ends the body has to be read, or the connection cannot be used again.
        with anyio.move_on_after(_DRAIN_S):
            await _exhaust(data)
    await response.aclose()
    # A stream that is left half-way is made of generators within generators, which the garbage collector would finish
    # at its own time. With the connection closed, pulling on ends them all here, with an error.
    await _exhaust(data)


async def _exhaust(data: AsyncIterator[bytes]) -> None:
    with suppress(*_FAILURES):
        while await anext(data, None) is not None:
            pass


# Arguments


def _checked_name(name: str) -> str:
    if not name.strip():
        msg = "the model has no name: pass it as the server knows it, for example OpenAIChat('gpt-4o')"
        raise MisuseError(msg)
    return name


def _checked_url(text: str) -> httpx2.URL:
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        msg = f"base_url is no address ({error}): pass one like 'http://localhost:8000/v1'"
        raise MisuseError(msg) from None
    if url.scheme not in {"http", "https"} or not url.host:
        shown = text.rpartition("@")[2]  # without a password
        msg = f"base_url is {shown!r}, which lacks http:// or a host: write it like 'http://localhost:8000/v1'"
        raise MisuseError(msg)
    return url


def _checked_key(key: str | None, *, needed: bool) -> str:
    if key:
        return _checked_header("the API key", key)
    if needed:
        msg = (
            "there is no API key for OpenAI: none was passed and OPENAI_API_KEY is not set. Set it, or pass "
            "OpenAIChat(..., api_key=...); for a server of your own pass base_url, which needs no key"
        )
        raise MisuseError(msg)
    return "none"  # the package insists on one; a server that wants none does not read it


def _checked_header(what: str, value: str) -> str:
    # Checked here, because the transport quotes a value that it refuses.
    if not value.isascii() or not value.isprintable() or value != value.strip():
        msg = (
            f"{what} holds a character that cannot be sent, such as a line break, a space at its end or a letter "
            "beyond ASCII: a value that was read from a file often ends in a line break, so try .strip()"
        )
        raise MisuseError(msg)
    return value


def _secret_words(*values: str) -> list[str]:
    # Words, because "Bearer sk-..." is a value, and a server repeats the key. A short one would blot out plain words.
    words = {word for value in values for word in value.split() if len(word) >= _SHORTEST_SECRET}
    return sorted(words, key=len, reverse=True)


def _checked_window(name: str, window_tokens: int | None) -> int:
    if window_tokens is None:
        family = name.rpartition("/")[2].removeprefix("ft:")  # "openai/gpt-4o" of a router; a fine-tuned model
        beginnings = [beginning for beginning in _WINDOWS if family.startswith(beginning)]
        return _WINDOWS[max(beginnings, key=len)] if beginnings else _USUAL_WINDOW_TOKENS
    if window_tokens <= 0:
        msg = f"window_tokens is {window_tokens}, but it has to be more than 0; leave it out for the model's own"
        raise MisuseError(msg)
    return window_tokens


# The vendor's errors as ours


@attrs.frozen(kw_only=True)
class _Trouble:
    """What is known of a request that failed, free of secrets."""

    where: str
    # Model and address, for a sentence.
    model: str
    base_url: str
    detail: str
    # What the server or the transport said.
    status: int | None = None
    # Of HTTP, from 400 on.
    code: str = ""
    # OpenAI's name of the error, such as "insufficient_quota".
    kind: str = ""
    # OpenAI's type of an error that came without a status, such as "invalid_request_error".
    request_id: str = ""
    # What the provider's support asks for.
    retry_after_s: float | None = None

    @property
    def said(self) -> str:
        number = f"{self.status}: " if self.status else ""
        request = f", request {self.request_id}" if self.request_id else ""
        return f"({number}{self.detail}{request})"


def _words(body: object) -> str:
    words = (body.get("message") or body.get("detail")) if isinstance(body, dict) else body
    return words if isinstance(words, str) else ""


def _retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    with suppress(ValueError):  # OpenAI's and Azure's own
        return finite_s(float(headers.get("retry-after-ms", "")) * 0.001)
    return seconds_of(headers.get("retry-after", ""), now_s)


def _bad_request(trouble: _Trouble) -> ModelError:
    # Other servers say it in words: vLLM, for one, has no code for it.
    if trouble.code == "context_length_exceeded" or "maximum context length" in trouble.detail:
        return ContextTooLongError(
            f"The request is larger than the context window of {trouble.where} {trouble.said}. "
            "Shorten or compact the history, or take a model with a larger window."
        )
    return ModelError(
        f"{trouble.where} refused the request {trouble.said}. Mend what it names (a setting, a tool's parameters, a "
        "message): the same request will be refused again."
    )


def _key_refused(trouble: _Trouble) -> ModelError:
    return ModelError(
        f"{trouble.where} refused the API key {trouble.said}. Check the environment variable OPENAI_API_KEY, or the "
        "api_key given to OpenAIChat."
    )


def _forbidden(trouble: _Trouble) -> ModelError:
    return ModelError(
        f"{trouble.where} is not open to this API key {trouble.said}. Check what the key's project may use, or take "
        "another model."
    )


def _not_found(trouble: _Trouble) -> ModelError:
    return ModelError(
        f"There is no model {trouble.model!r} at {trouble.base_url}, or no such address {trouble.said}. Check the "
        "model's name, and base_url, which usually ends in /v1."
    )


def _unavailable(trouble: _Trouble) -> ModelError:
    if trouble.code == "insufficient_quota":  # a 429 by its status, but no matter of waiting
        return ModelError(
            f"The account has no quota left for {trouble.where} {trouble.said}. Add credit or use another key: asking "
            "again will not help."
        )
    return ModelUnavailableError(
        f"{trouble.where} cannot answer just now {trouble.said}. Ask again later.", trouble.retry_after_s
    )


def _unreachable(trouble: _Trouble) -> ModelError:
    return ModelUnavailableError(
        f"{trouble.where} was not reached, or the connection broke {trouble.said}. Ask again; if it stays, check "
        "base_url, the network and the proxy."
    )


def _timed_out(trouble: _Trouble) -> ModelError:
    return ModelUnavailableError(
        f"{trouble.where} was silent for too long {trouble.said}. Ask again, or allow more with "
        "Limits(model_timeout_s=...)."
    )


def _garbled(trouble: _Trouble) -> ModelError:
    return ModelReplyError(
        f"{trouble.where} answered with something else than a chat completion {trouble.said}. Ask again; if it stays, "
        "check that base_url leads to a server that speaks OpenAI's wire."
    )


def _unforeseen(trouble: _Trouble) -> ModelError:
    return ModelError(f"{trouble.where} could not be asked {trouble.said}. Check how OpenAIChat was made.")


_BY_STATUS: dict[int, Callable[[_Trouble], ModelError]] = {
    401: _key_refused,
    403: _forbidden,
    404: _not_found,
    408: _unavailable,
    409: _unavailable,
    429: _unavailable,
}


def _by_status(trouble: _Trouble) -> ModelError:
    status = trouble.status or (400 if trouble.kind == "invalid_request_error" else 500)
    return _BY_STATUS.get(status, _bad_request if status < 500 else _unavailable)(trouble)  # noqa: PLR2004  HTTP's own


# Every way in which the vendor fails, and what it is to us. A class that is not here goes by its nearest ancestor.
_TRANSLATIONS: dict[type[Exception], Callable[[_Trouble], ModelError]] = {
    openai.OpenAIError: _unforeseen,
    SentError: _by_status,
    openai.APIError: _by_status,
    openai.APIStatusError: _by_status,
    openai.BadRequestError: _bad_request,
    openai.AuthenticationError: _key_refused,
    openai.OAuthError: _key_refused,
    openai.PermissionDeniedError: _forbidden,
    openai.NotFoundError: _not_found,
    openai.ConflictError: _unavailable,
    openai.UnprocessableEntityError: _bad_request,
    openai.RateLimitError: _unavailable,
    openai.InternalServerError: _unavailable,
    openai.APIConnectionError: _unreachable,
    openai.APITimeoutError: _timed_out,
    openai.APIResponseValidationError: _garbled,
    # Of helpers that are not used here.
    openai.LengthFinishReasonError: _garbled,
    openai.ContentFilterFinishReasonError: _garbled,
    openai.WebSocketConnectionClosedError: _unreachable,
    openai.WebSocketQueueFullError: _unreachable,
    # What the package lets through: a transport that breaks while the body is read, and what is no JSON.
    httpx.HTTPError: _unreachable,
    httpx.TimeoutException: _timed_out,
    httpx.StreamError: _unreachable,
    httpx2.HTTPError: _unreachable,
    httpx2.TimeoutException: _timed_out,
    httpx2.StreamError: _unreachable,
    OSError: _unreachable,
    anyio.EndOfStream: _unreachable,
    json.JSONDecodeError: _garbled,
    UnicodeDecodeError: _garbled,
    RecursionError: _garbled,
    FormError: _garbled,
}
_FAILURES = tuple(_TRANSLATIONS)
