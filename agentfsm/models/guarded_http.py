"""HTTP client for the SDKs that limits the size of responses, and follows redirects only within a server.

It sends through another client, which opens the connections: one of the adapter, or the user's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import httpx
import httpx2

from agentfsm.models.wire import MAX_BODY_BYTES, SizeLimitError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Bytes of an error's body that are read: messages are short, and the rest of a page is useless.
MAX_ERROR_BYTES: Final = 64 * 2**10

# Redirects that are followed within a server. One leads from an old path to the new one; more than these are a loop.
_MAX_REDIRECTS: Final = 5

# Seconds to wait for the end of a stream's body. Some servers keep the connection open after the last event.
_MAX_DRAIN_S: Final = 0.1
# Bytes that are read at most of an abandoned body.
_MAX_DRAIN_BYTES: Final = 2**20

# Errors of reading a body.
_READ_ERRORS: Final = (
    httpx.HTTPError,
    httpx.StreamError,
    httpx2.HTTPError,
    httpx2.StreamError,
    OSError,
    anyio.EndOfStream,
    SizeLimitError,
)


class _LimitedByteStream(httpx.AsyncByteStream, httpx2.AsyncByteStream):
    """Body as it arrives over the network, which fails beyond a number of bytes.

    Counting decompressed bytes is not enough: bytes after the end of a gzip member decompress to nothing.
    """

    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        parts = aiter(self._stream)
        try:
            async for part in parts:
                size += len(part)
                if size > self._max_bytes:
                    await self._stream.aclose()
                    await _drain(parts)  # as in `close_response`
                    msg = f"more than {self._max_bytes:,} bytes"
                    raise SizeLimitError(msg)
                yield part
        finally:
            if isinstance(parts, AsyncGenerator):
                await parts.aclose()

    async def aclose(self) -> None:
        await self._stream.aclose()


class LimitedTransport(httpx2.AsyncHTTPTransport):
    """Transport that limits the bytes of each response, for packages that read whole bodies themselves.

    The limit is `MAX_BODY_BYTES`, as they arrive over the network.
    """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; the body of the response raises SizeLimitError beyond the limit."""
        response = await super().handle_async_request(request)
        response.stream = _LimitedByteStream(cast("httpx2.AsyncByteStream", response.stream), MAX_BODY_BYTES)
        return response


class GuardedClient(httpx2.AsyncClient):
    """HTTP client that sends through another one, follows redirects only within an origin, and cuts error bodies.

    The body of a reply is returned unread, and its reader limits it (`read_limited`). The SDK would read the whole body
    of an error, so that body is read here, up to `MAX_ERROR_BYTES`.
    """

    def __init__(self, inner: httpx2.AsyncClient) -> None:
        super().__init__(transport=httpx2.AsyncBaseTransport())  # unused, and opens no connection
        self._inner = inner

    @property
    def is_closed(self) -> bool:
        """Whether the inner client was closed."""
        return self._inner.is_closed

    async def aclose(self) -> None:
        """Close the inner client."""
        await self._inner.aclose()

    def build_request(self, *args: Any, **options: Any) -> httpx2.Request:
        """Build a request as the other client does, with its headers and cookies."""
        return self._inner.build_request(*args, **options)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; return the unread response, or an error with a body that was read and cut.

        A redirect that was not followed is an error, too.
        """
        options |= {"stream": True, "follow_redirects": False}
        response = await self._inner.send(request, **options)
        for _ in range(_MAX_REDIRECTS):
            following = _find_redirect_request(response)
            if following is None:
                break
            await read_limited(response, MAX_ERROR_BYTES)
            response = await self._inner.send(following, **options)
        return response if response.is_success else await _truncate_error(response)


def _find_redirect_request(response: httpx2.Response) -> httpx2.Request | None:
    """Return the request that follows a redirect; None if there is no redirect, or it must not be followed."""
    following = response.next_request
    # After 301, 302 and 303 the next request would be a GET, without the conversation.
    if following is None or following.method != response.request.method:
        return None
    is_same_origin = _strip_url(following).origin == _strip_url(response.request).origin
    return following if is_same_origin else None


def read_redirect_url(response: httpx2.Response) -> str:
    """Return the target of an unfollowed redirect, without its possibly secret parts; else an empty string."""
    return "" if response.next_request is None else str(_strip_url(response.next_request))


def _strip_url(request: httpx2.Request) -> httpx2.URL:
    url = httpx2.URL(str(request.url))  # the request may be one of httpx
    return url.copy_with(userinfo=b"", query=None, fragment=None)


async def _truncate_error(response: httpx2.Response) -> httpx2.Response:
    parts, _ = await read_limited(response, MAX_ERROR_BYTES)
    # The parts are decompressed, and the rest of the body is dropped.
    left_out = {"content-encoding", "content-length", "transfer-encoding"}
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in left_out]
    cut = httpx2.Response(
        response.status_code, headers=headers, content=b"".join(parts)[:MAX_ERROR_BYTES], request=response.request
    )
    cut.next_request = response.next_request
    return cut


def iter_limited(response: httpx2.Response, max_bytes: int) -> AsyncGenerator[bytes]:
    """Iterate over a body after decompression, and limit the bytes that arrive over the network.

    Raises:
        SizeLimitError: while iterating, if more than `max_bytes` bytes arrive; the connection is closed.
        httpx2.HTTPError, httpx.HTTPError: while iterating, as `read_limited`.
    """
    response.stream = _LimitedByteStream(cast("httpx2.AsyncByteStream", response.stream), max_bytes)
    return response.aiter_bytes()


async def read_limited(response: httpx2.Response, max_bytes: int) -> tuple[list[bytes], bool]:
    """Read a body up to a number of bytes, and close the connection if there are more.

    Both limits are `max_bytes`: of the bytes from the network, and of the decompressed bytes.

    Returns:
        The body in parts, of which the last may exceed `max_bytes`; and whether the body ended within the limit.

    Raises:
        httpx2.HTTPError, httpx.HTTPError: if the transport breaks, or the body cannot be decompressed.
    """
    parts: list[bytes] = []
    size = 0
    data = iter_limited(response, max_bytes)
    is_over = False
    try:
        with suppress(SizeLimitError):
            while size <= max_bytes:
                part = await anext(data, None)
                if part is None:
                    is_over = True
                    break
                parts.append(part)
                size += len(part)
    finally:
        if not is_over:
            await close_response(response, data, reusable=False)
    return parts, is_over


async def close_response(response: httpx2.Response, data: AsyncGenerator[bytes], *, reusable: bool) -> None:
    """Close a body, and its connection unless `reusable` and the rest of the body arrives at once."""
    if reusable:
        # A connection can be reused only if the end of the body was read.
        with anyio.move_on_after(_MAX_DRAIN_S):
            await _drain(data)
    await response.aclose()
    # An abandoned stream consists of nested generators, which the garbage collector would finish later. After the
    # connection is closed, reading on ends them here with an error. Decompressed data may be almost endless, so the
    # number of bytes is limited.
    await _drain(data)
    await data.aclose()


async def _drain(data: AsyncIterator[bytes]) -> None:
    size = 0
    with suppress(*_READ_ERRORS):
        while size < _MAX_DRAIN_BYTES and (part := await anext(data, None)) is not None:
            size += len(part)
