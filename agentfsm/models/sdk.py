"""The base of adapters of OpenAI's and Anthropic's packages, which have the same kind of client.

A request goes through the lower door of the vendor's package: `client.post` with a body that is ready, and the plain
response. That keeps its authentication, transport, errors and time-outs, and leaves out that it checks each message of
the history against its annotations (16 ms at 50 turns) and builds an object for each chunk. Its stream class is left
out too: at the end of each stream it leaves generators to the garbage collector, which trio warns of and asyncio starts
tasks for. Its retries are off: the engine retries, and two layers would multiply. What it sends goes through a
`GuardedClient`, and every body is read here, within bounds.
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
import httpx2  # what the vendors' packages themselves speak with; they raise its errors

from agentfsm._http import parse_retry_after, parse_wait_s
from agentfsm.core.errors import ClosedError, MisuseError, ModelError
from agentfsm.core.validation import STRING, require_type, shorten_repr
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

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from agentfsm.core.usage import Usage
    from agentfsm.models.prices import Prices
    from agentfsm.ports.model import Chunk, Emit, Reply, Request

# What the vendors' packages let through: a transport that breaks while the body is read, and what is no JSON.
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
    """What is used of a vendor's client."""

    def is_closed(self) -> bool:
        """Whether it was closed."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


@attrs.frozen(kw_only=True)
class SDKConnection(Value):
    """A vendor's client, and what was written of requests through it."""

    client: SDKClient
    encoding_cache: EncodingCache


class SDKModel(AdapterModel[SDKConnection]):
    """A model behind a vendor's package whose client has a `post` of raw bodies.

    A cancelled reply closes its connection. See `AdapterModel` for the rest.

    Args:
        name: The model, as the server knows it.
        base_url: Where the server answers.
        api_key: A checked key.
        headers: Sent with each request.
        http_client: A client of the user's, which stays theirs to close; None to open our own.
        window_tokens: The context window. None: that of the model's family.
        price: What the model costs, or a table that says it by the beginnings of models' names. None, or a table that
            does not name it: by the public list of genai-prices, where that package is installed.

    Raises:
        MisuseError: when an argument cannot be right.
    """

    path: ClassVar[str]
    """Of the request, behind the base URL."""

    provider: ClassVar[str]
    """Whose form a native reply is."""

    official_host: ClassVar[str] = ""
    """The address at which that name stands alone: the vendor's own."""

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
    ) -> None:
        url = parse_base_url(base_url)
        headers = {name: check_header(f"the header {name!r}", value) for name, value in (headers or {}).items()}
        self.host = url.host
        self._address = url.netloc.decode("ascii")  # without a password, and without the scheme's own port
        super().__init__(
            name,
            base_url=f"{url.scheme}://{self._address}{url.path}",
            secrets=(api_key, *headers.values()),
            window_tokens=window_tokens,
            price=price,
        )
        self._http_client = http_client
        self._is_client_shared = http_client is not None
        self._client_options: dict[str, Any] = {
            "base_url": str(url),
            "api_key": api_key,
            "default_headers": headers,
            "max_retries": 0,
        }
        if http_client is None:
            shared_ssl_context()  # here, where no event loop waits

    @property
    def _provider_id(self) -> str:
        """Whose native replies it takes back: many speak each wire, and what one has signed another refuses."""
        return self.provider if self._address == self.official_host else f"{self.provider} of {self._address}"

    # What each vendor has of its own.

    @abstractmethod
    def _make_client(self, http_client: httpx2.AsyncClient | None) -> SDKClient:
        """Make the vendor's client; over a client of the user's, where one is given."""

    @abstractmethod
    def _make_encoding_cache(self) -> EncodingCache:
        """Return a new memory for what is written of requests."""

    @abstractmethod
    def _encode_request(self, request: Request, encoding_cache: EncodingCache, *, streamed: bool) -> bytes:
        """Write the body of a request.

        Raises:
            MisuseError: when a tool's parameters or a setting are not JSON.
            ModelError: when the request holds what this model cannot take.
        """

    @abstractmethod
    def _decode(self, data: bytes) -> Reply:
        """Read a reply that came whole. Raises as `StreamAssembler.feed`."""

    @abstractmethod
    def _read_billed_usage(self, data: bytes) -> Usage | None:
        """Return what a reply that came whole, and could not be read, was billed; None where it does not say."""

    @abstractmethod
    def _make_assembler(self) -> StreamAssembler:
        """Return what a streamed reply is put together in."""

    # The port.

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask once, without retries; see `Model.reply`."""
        # Each read is translated where it happens and the assembler bounds streams, so `emit` is called as it is.
        return self._check_size(await self._ask(await self._get_client(), request, emit))

    async def _ask(self, client: SDKConnection, request: Request, emit: Emit | None) -> Reply:
        body = self._encode_request(request, client.encoding_cache, streamed=emit is not None)
        response = await self._send(client.client, body, request.timeout_s)
        return await (self._read_whole(response) if emit is None else self._read_stream(response, emit))

    # Clients

    def _open_client(self) -> SDKConnection:
        if self._http_client is not None and self._http_client.is_closed:
            of = type(self).__name__
            msg = f"the http_client given to {of} is closed: keep it open for as long as the model is used"
            raise ClosedError(msg)
        theirs = cast("httpx2.AsyncClient | None", self._http_client)  # the packages take either, and say only one
        try:
            client = self._make_client(theirs)
        except (ValueError, ImportError, httpx2.InvalidURL) as error:  # of what the environment says of proxies
            if theirs is not None:
                raise
            msg = (
                f"{type(self).__name__} cannot open connections ({error}): look at HTTP_PROXY, HTTPS_PROXY and "
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
        """Send a request; return the answer, whose body is not read yet."""
        post: Callable[..., Awaitable[httpx2.Response]] = client.post  # its types insist on a stream class
        options = {"timeout": timeout_s}
        try:
            return await post(self.path, content=body, cast_to=httpx2.Response, stream=True, options=options)
        except self._error_types as error:
            raise self._translate_error(error) from None

    async def _read_whole(self, response: httpx2.Response) -> Reply:
        data = await self._read_body(response)
        try:
            return self._decode_reply(data)
        except ModelError as error:
            error.usage = self._read_billed_usage(data)  # what was billed counts, though nothing came of it
            raise

    async def _read_body(self, response: httpx2.Response) -> bytes:
        """Read the body of a reply that comes whole."""
        try:
            parts, is_whole = await read_limited(response, MAX_BODY_BYTES)
        except self._error_types as error:
            raise self._translate_error(error) from None
        if not is_whole:
            raise self._build_size_error(f"more than {MAX_BODY_BYTES:,} bytes", None)
        return b"".join(parts)

    def _decode_reply(self, data: bytes) -> Reply:
        try:
            return self._decode(data)
        except self._error_types as error:
            raise self._translate_error(error) from None

    async def _read_stream(self, response: httpx2.Response, emit: Emit) -> Reply:
        assembly = self._make_assembler()
        try:
            return await self._assemble_stream(response, assembly, emit)
        except ModelError as error:
            error.usage = assembly.usage  # as above
            raise

    async def _assemble_stream(self, response: httpx2.Response, assembler: StreamAssembler, emit: Emit) -> Reply:
        data = iter_limited(response, MAX_STREAM_BYTES)
        try:
            # `emit` stands outside of what is translated: its errors are not the server's.
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
        except self._error_types as error:
            raise self._translate_error(error) from None

    def _build_incomplete_error(self, response: httpx2.Response, assembler: StreamAssembler) -> ModelError:
        # Some servers answer a request for a stream with their error as plain JSON, and with status 200.
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
    """Return the system's certificates, read once, and not by each client: that takes 20 ms of the event loop."""
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
    """Read the address of a server.

    Raises:
        MisuseError: when it is none.
    """
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


def check_header(what: str, value: str) -> str:
    """Check what is sent in a header: here, because the transport quotes a value that it refuses.

    Raises:
        MisuseError: when it cannot be sent.
    """
    if not value.isascii() or not value.isprintable() or value != value.strip():
        msg = (
            f"{what} holds a character that cannot be sent, such as a line break, a space at its end or a letter "
            "beyond ASCII: a value that was read from a file often ends in a line break, so try .strip()"
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


def read_error_message(body: object) -> str:
    """Return the words of an error's body; empty where there are none."""
    words = (body.get("message") or body.get("detail")) if isinstance(body, dict) else body
    return words if isinstance(words, str) else ""


def read_retry_after_headers(headers: Mapping[str, Any], now_s: float) -> float | None:
    """Return how long the server asks to wait, seconds; None where it says nothing that can be read.

    Both vendors' packages read it so, and the first of the two headers is their own.
    """
    asked_ms = parse_wait_s(headers.get("retry-after-ms", ""))
    return parse_retry_after(headers.get("retry-after", ""), now_s) if asked_ms is None else asked_ms * 0.001
