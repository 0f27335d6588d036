"""What comes from servers is bounded; and the HTTP client, in which a request that fails ends nothing else.

The SDK lets an error of HTTP through to the connection as a whole, and all other requests of that end with it. Here it
becomes a response that only the request itself is given, and is noted for the words that the model reads.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import httpx2
from mcp.types import CONNECTION_CLOSED, JSONRPCNotification

from agentfsm._http import parse_retry_after
from agentfsm.mcp.connection.trouble import ERROR, NOT_FOUND, SEEN, Seen, TooLongError, words

# Bytes of one message, any larger than which is not taken in: a result of 10 MB must come through, and what the journal
# keeps of one is less than this.
MESSAGE_BYTES: Final = 64 * 1024 * 1024
# Notifications that are of use here. The SDK starts a task for each that comes, and a server may send any number.
HEARD: Final = frozenset(
    {
        "notifications/cancelled",
        "notifications/elicitation/complete",
        "notifications/progress",
        "notifications/subscriptions/acknowledged",
        "notifications/tools/list_changed",
    }
)
# Seconds to connect, or to send a part of a request, and between two parts of an answer: those of the SDK's own client.
# A call has its own time.
CONNECT_S: Final = 30.0
SILENCE_S: Final = 300.0
# The status of a response that stands for an error.
_MADE_UP: Final = 502


def is_of_use(message: object) -> bool:
    """Whether a message is none of the notifications that nobody listens to."""
    return not isinstance(message, JSONRPCNotification) or message.method in HEARD


class BoundedClient(httpx2.AsyncClient):
    """An HTTP client that never raises what belongs to one request."""

    def __init__(self, *, failed: Callable[[], object] = lambda: None, **options: Any) -> None:
        """Make a client.

        Args:
            failed: Called when a request has failed.
            options: Those of the client.
        """
        super().__init__(**options)
        self._failed = failed

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; an error is noted, and answered with."""
        asked = SEEN.get(None) or Seen()
        # What follows a request that was taken tells nothing of whether that was: it would be made twice.
        seen = asked if _asks(request) else Seen()
        try:
            response = await super().send(request, **options)
        except Exception as error:  # noqa: BLE001  also what somebody's `auth` raises: it must not end other requests
            seen.error = error
            self._failed()
            return _made_up(request, error)
        seen.error, seen.status, seen.retry_after_s = None, response.status_code, None
        if response.status_code >= ERROR:
            wait = response.headers.get("retry-after")
            seen.retry_after_s = None if wait is None else parse_retry_after(wait, time.time())
            self._failed()
        if seen is not asked and response.status_code == NOT_FOUND:
            asked.is_forgotten = True
        if not response.is_stream_consumed:
            response.stream = _BoundedStream(response, seen)
        return response


def client_of(
    headers: Mapping[str, str],
    auth: httpx2.Auth | None,
    failed: Callable[[], object] = lambda: None,
    transport: httpx2.AsyncBaseTransport | None = None,
) -> BoundedClient:
    """Make a client; compressed answers are not asked for, whose size cannot be known."""
    told = {"accept-encoding": "identity"} | dict(headers)
    timeout = httpx2.Timeout(CONNECT_S, read=SILENCE_S)
    return BoundedClient(failed=failed, headers=told, auth=auth, timeout=timeout, transport=transport)


def _asks(request: httpx2.Request) -> bool:
    """Whether a request of HTTP tells what became of ours.

    What fetches the rest of an answer does not, nor what answers the server, or takes a request back, in mid-call.
    """
    if request.method != "POST":
        return "last-event-id" not in request.headers
    message = json.loads(request.content)
    return "method" in message and "id" in message


def _made_up(request: httpx2.Request, error: Exception) -> httpx2.Response:
    said = {"code": CONNECTION_CLOSED, "message": words(error)}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": said})
    headers = {"content-type": "application/json"}
    return httpx2.Response(_MADE_UP, headers=headers, content=body.encode("utf-8", "replace"), request=request)


class _BoundedStream(httpx2.AsyncByteStream):
    """The body of a response: it ends early, and that is noted, where it is too long or breaks off."""

    def __init__(self, response: httpx2.Response, seen: Seen) -> None:
        self._stream: Any = response.stream
        self._seen = seen
        self._is_endless = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        # Then each event of it is bounded, and the SDK does that.
        self._is_packed = response.headers.get("content-encoding", "identity").lower() != "identity"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_packed:
            self._seen.error = TooLongError("it is compressed, which was not asked for, and may be of any size")
            return
        size = 0
        try:
            async for chunk in self._stream:
                size += len(chunk)
                if size > MESSAGE_BYTES and not self._is_endless:
                    self._seen.error = TooLongError(f"it has more than {MESSAGE_BYTES >> 20} MiB")
                    return
                yield chunk
        except httpx2.TransportError as error:
            self._seen.error = error

    async def aclose(self) -> None:
        await self._stream.aclose()
