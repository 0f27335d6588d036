"""Base class of the adapters that use the SDK of OpenAI or Anthropic, whose clients have the same interface.

A request uses the SDK's low-level `client.post`, with an encoded body and a raw response. This keeps the SDK's
authentication, transport, errors and timeouts. It avoids that the SDK checks each message of the history against its
annotations (16 ms at 50 turns) and builds an object for each chunk. The SDK's stream class is not used either: at the
end of each stream it leaves generators to the garbage collector, which trio warns about and asyncio starts tasks for.
The SDK's retries are off, because they would multiply those of the engine. Requests go through a `GuardedClient`, and
this module reads every body, within limits.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, cast

import anyio
import attrs
import httpx
import httpx2  # the HTTP client of both SDKs, which raise its errors

from agentfsm._lib.retry_after import parse_retry_after, parse_wait_s
from agentfsm.core.errors import AgentError, ClosedError, MisuseError, ModelError
from agentfsm.core.messages import AssistantMessage
from agentfsm.core.usage import Purpose
from agentfsm.core.validation import BOOL, STRING, require_type, shorten_repr
from agentfsm.core.value import Value
from agentfsm.models import provider_errors as t
from agentfsm.models.adapter import MODEL_NAME, AdapterModel
from agentfsm.models.guarded_http import close_response, iter_limited, read_limited
from agentfsm.models.wire import (
    MAX_BODY_BYTES,
    MAX_STREAM_BYTES,
    EncodingCache,
    SizeLimitError,
    StreamAssembler,
    WireFormatError,
    find_error,
)
from agentfsm.tokens.billing import attach_usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from agentfsm.core.usage import Usage
    from agentfsm.models.prices import Prices
    from agentfsm.models.profiles import ModelProfile
    from agentfsm.ports.model import Chunk, Emit, Reply, Request

# Errors that the SDKs do not wrap: the transport breaks while the body is read, and invalid JSON.
TRANSPORT_ERRORS: Final[Mapping[type[Exception], t.Translate]] = {
    httpx.HTTPError: t.connection_error,
    httpx.TimeoutException: t.timeout_error,
    httpx.StreamError: t.connection_error,
    httpx2.HTTPError: t.connection_error,
    httpx2.TimeoutException: t.timeout_error,
    httpx2.StreamError: t.connection_error,
    OSError: t.connection_error,
    anyio.EndOfStream: t.connection_error,
    json.JSONDecodeError: t.invalid_reply_error,
    UnicodeDecodeError: t.invalid_reply_error,
    RecursionError: t.invalid_reply_error,
    WireFormatError: t.invalid_reply_error,
    SizeLimitError: t.reply_size_error,
}


_CONNECT_ERRORS: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx.ConnectError, httpx.ConnectTimeout)
_BASE_URL: Final = attrs.evolve(STRING, wanted="a string such as 'http://localhost:8000/v1'").or_none()
_HTTP_CLIENT: Final = require_type(
    httpx2.AsyncClient, httpx.AsyncClient, wanted="an AsyncClient of httpx2 or httpx"
).or_none()


class SDKClient(Protocol):
    """The part of an SDK's client that is used here."""

    def is_closed(self) -> bool:
        """Return whether the client was closed."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


@attrs.frozen(kw_only=True)
class SDKConnection(Value):
    """An SDK's client, and the cache of requests that were encoded for it."""

    client: SDKClient
    """The client of one event loop, or the user's."""

    encoding_cache: EncodingCache
    """Encoded messages and tools of earlier requests."""


class SDKModel(AdapterModel[SDKConnection]):
    """Model behind an SDK whose client has a `post` of raw bodies.

    A cancelled reply closes its connection. See `AdapterModel` for the rest.

    Args:
        name: Name of the model at the server.
        base_url: Address of the server.
        api_key: A checked key.
        headers: Headers of each request.
        http_client: HTTP client of the user, who closes it; None to open one per event loop.
        window_tokens: Context window in tokens. None: that of the model's family.
        price: Price of the model, or a table of prices by prefixes of models' names. None, or a table without the
            model: the public list of genai-prices, if that package is installed.
        profile: Abilities of the model. None: those of its family.
        cache_diagnostics: Whether the provider is asked why its prompt cache was missed. Only its own service is asked,
            and only for models with `ModelProfile.explains_cache`.

    Raises:
        MisuseError: if an argument is invalid.
    """

    path: ClassVar[str]
    """Path of a request, after the base URL."""

    provider: ClassVar[str]
    """Format of native replies, for `NativeReply.provider`."""

    official_host: ClassVar[str] = ""
    """Address of the provider's own service, whose native replies have the plain name of the format."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        api_key: str,
        headers: Mapping[str, str] | None = None,
        http_client: httpx.AsyncClient | httpx2.AsyncClient | None = None,
        window_tokens: int | None = None,
        price: Prices | None = None,
        profile: ModelProfile | None = None,
        cache_diagnostics: bool = False,
    ) -> None:
        BOOL.check(type(self).__name__, "cache_diagnostics", cache_diagnostics)
        url = parse_base_url(base_url)
        headers = {name: check_header(f"the header {name!r}", value) for name, value in (headers or {}).items()}
        self.host: str = url.host
        self.query: str = url.query.decode("ascii")
        self._address = url.netloc.decode("ascii")  # without a password, and without the scheme's own port
        super().__init__(
            name,
            base_url=f"{url.scheme}://{self._address}{url.path}",
            secrets=(api_key, *headers.values()),
            window_tokens=window_tokens,
            price=price,
            profile=profile,
        )
        is_official = self._address == self.official_host
        self._reports_cache: bool = cache_diagnostics and is_official and self.profile.explains_cache
        self._http_client = http_client
        self._is_client_shared = http_client is not None
        self._client_options: dict[str, Any] = {
            "base_url": str(url.copy_with(query=None)),
            "default_query": dict(url.params),
            "api_key": api_key,
            "default_headers": headers,
            "max_retries": 0,
        }
        if http_client is None:
            shared_ssl_context()  # read here, where no event loop waits

    @property
    def _provider_id(self) -> str:
        """The `NativeReply.provider` of replies that this server accepts back.

        Many servers speak each API, and a server refuses reasoning that another has signed.
        """
        return self.provider if self._address == self.official_host else f"{self.provider} of {self._address}"

    def _find_compared_id(self, request: Request) -> str | None:
        """Return the id of the reply that the provider compares a request with; "" for none, None not to ask.

        It is the newest of this provider in the history, also if a compaction has taken it out of the request. Side
        requests have other beginnings.
        """
        if not self._reports_cache or request.purpose not in (Purpose.TURN, Purpose.LAST_ANSWER):
            return None
        history = request.messages if request.run is None else request.run.messages
        reports = (each.cache_report for each in reversed(history) if isinstance(each, AssistantMessage))
        return next((each.response_id for each in reports if each and each.provider == self._provider_id), "")

    # Methods of each provider

    @abstractmethod
    def _make_client(self, http_client: httpx2.AsyncClient | None) -> SDKClient:
        """Create the SDK's client, over the user's HTTP client if there is one."""

    @abstractmethod
    def _make_encoding_cache(self) -> EncodingCache:
        """Create an empty cache for encoded requests."""

    @abstractmethod
    def _encode_request(self, request: Request, encoding_cache: EncodingCache, *, streamed: bool) -> bytes:
        """Encode the body of a request.

        Raises:
            MisuseError: if a tool's parameters or a setting are not JSON.
            ModelError: if the request contains a part or setting that this model does not support.
        """

    @abstractmethod
    def _decode(self, data: bytes) -> Reply:
        """Decode a reply that was not streamed. Raises as `StreamAssembler.feed`."""

    @abstractmethod
    def _read_billed_usage(self, data: bytes) -> Usage | None:
        """Return the billed usage of a reply that could not be decoded; None if it has none."""

    @abstractmethod
    def _make_assembler(self) -> StreamAssembler:
        """Create the assembler of one streamed reply."""

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask once, without retries; see `Model.reply`."""
        # Reads translate their own errors and the assembler limits streams, so `emit` is passed on unwrapped.
        reply = await self._ask(await self._get_client(), self._prepare_request(request), emit)
        return self._check_size(self._mark_native(reply))

    async def _ask(self, client: SDKConnection, request: Request, emit: Emit | None) -> Reply:
        body = self._encode_request(request, client.encoding_cache, streamed=emit is not None)
        response = await self._send(client.client, body, request.timeout_s)
        return await (self._read_whole(response) if emit is None else self._read_stream(response, emit))

    # Clients

    def _open_client(self) -> SDKConnection:
        if self._http_client is not None and self._http_client.is_closed:
            adapter = type(self).__name__
            msg = f"the http_client given to {adapter} is closed: keep it open for as long as the model is used"
            raise ClosedError(msg)
        http_client = cast("httpx2.AsyncClient | None", self._http_client)  # the SDKs take either, and declare one
        try:
            client = self._make_client(http_client)
        except (ValueError, ImportError, httpx2.InvalidURL) as error:  # from the proxies of the environment
            if http_client is not None:
                raise
            msg = (
                f"{type(self).__name__} cannot open connections ({error}): check HTTP_PROXY, HTTPS_PROXY and "
                "ALL_PROXY, or pass an http_client of your own"
            )
            raise MisuseError(msg) from None
        return SDKConnection(client=client, encoding_cache=self._make_encoding_cache())

    @staticmethod
    async def _close_client(client: SDKConnection) -> None:
        await client.client.close()

    def _is_client_closed(self, client: SDKConnection) -> bool:
        return client.client.is_closed()

    # One request

    async def _send(self, client: Any, body: bytes, timeout_s: float) -> httpx2.Response:
        """Send a request; return the response with an unread body."""
        post: Callable[..., Awaitable[httpx2.Response]] = client.post  # its annotations require a stream class
        options = {"timeout": timeout_s}
        try:
            return await post(self.path, content=body, cast_to=httpx2.Response, stream=True, options=options)
        except Exception as error:  # noqa: BLE001  translated
            raise self._translate_error(error) from None

    async def _read_whole(self, response: httpx2.Response) -> Reply:
        data = await self._read_body(response)
        try:
            return self._decode(data)
        except Exception as error:  # noqa: BLE001  translated
            translated = self._translate_error(error)
            if isinstance(translated, ModelError):
                translated.usage = self._read_billed_usage(data)  # an unusable reply is billed as well
            raise translated from None

    async def _read_body(self, response: httpx2.Response) -> bytes:
        """Read the body of a reply that is not streamed."""
        try:
            parts, is_whole = await read_limited(response, MAX_BODY_BYTES)
        except Exception as error:  # noqa: BLE001  translated
            raise self._translate_error(error) from None
        if not is_whole:
            raise self._build_size_error(f"more than {MAX_BODY_BYTES:,} bytes", None)
        return b"".join(parts)

    async def _read_stream(self, response: httpx2.Response, emit: Emit) -> Reply:
        assembler = self._make_assembler()
        try:
            return await self._assemble_stream(response, assembler, emit)
        except BaseException as error:  # a reply that is unusable or cut off is billed as well
            if assembler.usage is not None:
                attach_usage(error, assembler.usage)
            raise

    async def _assemble_stream(self, response: httpx2.Response, assembler: StreamAssembler, emit: Emit) -> Reply:
        data = iter_limited(response, MAX_STREAM_BYTES)
        try:
            # `emit` is called outside of `_next_chunks`, since its errors must not be translated.
            while not assembler.is_done and (pieces := await self._next_chunks(data, assembler)) is not None:
                for piece in pieces:
                    emit(piece)
        finally:
            await close_response(response, data, reusable=assembler.is_done)
        if not assembler.is_complete:
            raise self._build_incomplete_error(response, assembler)
        return assembler.build_reply()

    async def _next_chunks(self, data: AsyncIterator[bytes], assembler: StreamAssembler) -> list[Chunk] | None:
        try:
            part = await anext(data, None)
            return None if part is None else assembler.feed(part)
        except Exception as error:  # noqa: BLE001  translated
            raise self._translate_error(error) from None

    def _build_incomplete_error(self, response: httpx2.Response, assembler: StreamAssembler) -> AgentError:
        # Some servers answer a request for a stream with status 200 and an error as plain JSON.
        if (error := find_error(b"".join(assembler.unparsed))) is not None:
            return self._translate_error(error)
        kind = response.headers.get("content-type", "nothing")
        if not assembler.event_count and "event-stream" not in kind:
            return t.invalid_reply_error(self._build_failure(f"{kind} in place of a stream of events"))
        if assembler.event_count and not assembler.is_begun:
            return t.invalid_reply_error(self._build_failure("a stream without a reply"))
        return t.incomplete_stream_error(self._build_failure(""))


# Clients


@cache
def shared_ssl_context() -> ssl.SSLContext:
    """Return the system's certificates. They are read once, because reading blocks the event loop for 20 ms."""
    return httpx2.create_ssl_context()


# Arguments


def check_arguments(
    adapter: str, *, name: object, base_url: object, api_key: object, headers: object, http_client: object
) -> None:
    """Check the types of an adapter's arguments, before the environment variables and the SDK are involved.

    An error about the key or a header shows only the type of the value, which may be a secret.

    Args:
        adapter: Name of the class, for the error.
        name: A string that is not empty.
        base_url: A string, or None.
        api_key: A string, or None.
        headers: A mapping from strings to strings, or None.
        http_client: An AsyncClient of httpx2 or httpx, or None.

    Raises:
        MisuseError: if an argument has another type.
    """
    MODEL_NAME.check(adapter, "name", name)
    _BASE_URL.check(adapter, "base_url", base_url)
    if not isinstance(api_key, str | None):
        raise MisuseError(f"{adapter}(api_key=...) is of the type {type(api_key).__name__}: give a string, or None")
    if not isinstance(headers, Mapping | None):
        raise MisuseError(f"{adapter}(headers=...) is of the type {type(headers).__name__}: give a dict, or None")
    for key, value in (headers or {}).items():
        if not isinstance(key, str):
            raise MisuseError(f"{adapter}(headers=...) has the key {shorten_repr(key)}: give a string")
        if not isinstance(value, str):
            raise MisuseError(f"the header {key!r} is of the type {type(value).__name__}: give a string")
    _HTTP_CLIENT.check(adapter, "http_client", http_client)


def parse_base_url(text: str) -> httpx2.URL:
    """Parse the address of a server.

    Raises:
        MisuseError: if it is not a URL with http:// or https:// and a host.
    """
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        msg = f"base_url is not a URL ({error}): give one such as 'http://localhost:8000/v1'"
        raise MisuseError(msg) from None
    if url.scheme not in {"http", "https"} or not url.host:
        shown = text.rpartition("@")[2]  # without a password
        msg = f"base_url is {shown!r}, which lacks http:// or a host: give a URL such as 'http://localhost:8000/v1'"
        raise MisuseError(msg)
    return url


def check_header(label: str, value: str) -> str:
    """Check the value of a header, whose text the error of the transport would quote.

    Raises:
        MisuseError: if it cannot be sent; the error does not show the value.
    """
    if not value.isascii() or not value.isprintable() or value != value.strip():
        msg = (
            f"{label} contains a character that cannot be sent: a line break, a space at the end or a letter "
            "beyond ASCII. A value that was read from a file often ends in a line break: try .strip()"
        )
        raise MisuseError(msg)
    return value


# Failures


def read_transport_failure(error: BaseException) -> dict[str, Any]:
    """Return the fields of `ProviderFailure` for an error of the transport: `detail` and `is_unreachable`.

    If no connection could be made, `detail` is the operating system's reason, for example "connection refused".
    """
    detail = f"{type(error).__name__}: {error}"
    if not isinstance(error, _CONNECT_ERRORS):
        return {"detail": detail}
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):  # one error for each address of a host
            cause = cause.exceptions[0]
        if isinstance(cause, OSError) and cause.errno is not None:
            # These two have numbers of their own. For others, event loops replace the text of the number.
            is_own = isinstance(cause, ssl.SSLError | socket.gaierror)
            reason = str(cause.strerror) if is_own else os.strerror(cause.errno)
            detail = reason[:1].lower() + reason[1:]
        cause = cause.__cause__ or cause.__context__
    return {"detail": detail, "is_unreachable": True}


def read_retry_after_headers(headers: Mapping[str, Any], now_s: float) -> float | None:
    """Return the seconds that the server asks to wait; None if no header is readable.

    Both SDKs read these headers in this order. The header `retry-after-ms` is not standard.
    """
    asked_ms = parse_wait_s(headers.get("retry-after-ms", ""))
    return parse_retry_after(headers.get("retry-after", ""), now_s) if asked_ms is None else asked_ms * 0.001
