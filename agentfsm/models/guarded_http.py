"""The HTTP client that a vendor's package is given: what a server may make it read, and where it may send it.

It sends by another client, which opens the connections: one of ours, or one of the user's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import httpx
import httpx2

from agentfsm.models.wire import SizeLimitError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Of the body of an error, bytes: the words of a server are few, and a page behind them is of no use.
MAX_ERROR_BYTES: Final = 64 * 2**10

# How often a request is sent on within its server. One leads from an old path to the new one; more are a circle.
_MAX_REDIRECTS: Final = 5

# How long the end of a stream's body may keep us. Some servers keep the connection open after the last event.
_MAX_DRAIN_S: Final = 0.1
# What is read at most of a body that is left, bytes.
_MAX_DRAIN_BYTES: Final = 2**20

# How reading fails.
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
    """A body as it came over the network, which fails beyond a number of bytes.

    What is decompressed cannot be counted alone: nothing comes of the bytes behind the end of a gzip member.
    """

    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._most = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        parts = aiter(self._stream)
        try:
            async for part in parts:
                size += len(part)
                if size > self._most:
                    await self._stream.aclose()
                    await _drain(parts)  # as in `finish`
                    msg = f"more than {self._most:,} bytes"
                    raise SizeLimitError(msg)
                yield part
        finally:
            if isinstance(parts, AsyncGenerator):
                await parts.aclose()

    async def aclose(self) -> None:
        await self._stream.aclose()


class GuardedClient(httpx2.AsyncClient):
    """Sends by another client, follows no redirect to another origin, and cuts the body of an error.

    A reply is handed out unread, and its reader bounds it (`read_limited`). The vendor's package reads an error itself
    and whole, so that one is read here, up to `MAX_ERROR_BYTES`.
    """

    def __init__(self, inner: httpx2.AsyncClient) -> None:
        super().__init__(transport=httpx2.AsyncBaseTransport())  # which is not used, and opens nothing
        self._inner = inner

    @property
    def is_closed(self) -> bool:
        """Whether the other client was closed."""
        return self._inner.is_closed

    async def aclose(self) -> None:
        """Close the other client."""
        await self._inner.aclose()

    def build_request(self, *args: Any, **options: Any) -> httpx2.Request:
        """Build a request as the other client does, with its headers and cookies."""
        return self._inner.build_request(*args, **options)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; return the answer unread, or an error whose body is read and cut.

        A redirect that was not followed is an error too.
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
    """Return the request that a redirect asks for; None where there is none, or it is not to be sent."""
    following = response.next_request
    # After 301, 302 and 303 it would be a GET, without the conversation.
    if following is None or following.method != response.request.method:
        return None
    is_same_origin = _strip_url(following).origin == _strip_url(response.request).origin
    return following if is_same_origin else None


def read_redirect_url(response: httpx2.Response) -> str:
    """Return where a redirect leads that was not followed, without what may be secret in it; else an empty text."""
    return "" if response.next_request is None else str(_strip_url(response.next_request))


def _strip_url(request: httpx2.Request) -> httpx2.URL:
    url = httpx2.URL(str(request.url))  # the request may be one of httpx
    return url.copy_with(userinfo=b"", query=None, fragment=None)


async def _truncate_error(response: httpx2.Response) -> httpx2.Response:
    parts, _ = await read_limited(response, MAX_ERROR_BYTES)
    # The parts are decoded, and no more of the body is to come.
    left_out = {"content-encoding", "content-length", "transfer-encoding"}
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in left_out]
    cut = httpx2.Response(
        response.status_code, headers=headers, content=b"".join(parts)[:MAX_ERROR_BYTES], request=response.request
    )
    cut.next_request = response.next_request
    return cut


def iter_limited(response: httpx2.Response, max_bytes: int) -> AsyncGenerator[bytes]:
    """Iterate over a body after decompression, and bound the bytes that come over the network.

    Raises:
        SizeError: while iterating, when more than `max_bytes` bytes came; the connection is closed.
        httpx2.HTTPError, httpx.HTTPError: while iterating, as `read_limited`.
    """
    response.stream = _LimitedByteStream(cast("httpx2.AsyncByteStream", response.stream), max_bytes)
    return response.aiter_bytes()


async def read_limited(response: httpx2.Response, max_bytes: int) -> tuple[list[bytes], bool]:
    """Read a body up to a number of bytes, and drop the connection where more come.

    The bytes are counted twice: as they come over the network, and after decompression.

    Returns:
        The body in parts, of which the last may go beyond `max_bytes`; and whether the body ended within it.

    Raises:
        httpx2.HTTPError, httpx.HTTPError: when the transport breaks, or what came cannot be decompressed.
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
    """Leave a body: close its connection, unless that can be used again and the rest of the body comes at once."""
    if reusable:
        # What ends the body has to be read, or the connection cannot be used again.
        with anyio.move_on_after(_MAX_DRAIN_S):
            await _drain(data)
    await response.aclose()
    # A stream that is left half-way is made of generators within generators, which the garbage collector would finish
    # at its own time. With the connection closed, pulling on ends them all here, with an error; but what was
    # decompressed of a small part may be without end, and is left.
    await _drain(data)
    await data.aclose()


async def _drain(data: AsyncIterator[bytes]) -> None:
    size = 0
    with suppress(*_READ_ERRORS):
        while size < _MAX_DRAIN_BYTES and (part := await anext(data, None)) is not None:
            size += len(part)
