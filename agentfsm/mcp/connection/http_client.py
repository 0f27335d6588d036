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
from agentfsm.mcp.connection.request_errors import (
    FIRST_ERROR,
    NOT_FOUND,
    WIRE_STATUS,
    MessageTooLongError,
    WireStatus,
    describe_error,
)

# Bytes of one message, any larger than which is not taken in: a result of 10 MB must come through, and what the journal
# keeps of one is less than this.
MESSAGE_BYTES: Final = 64 * 1024 * 1024
# Notifications that are of use here. The SDK starts a task for each that comes, and a server may send any number.
RELEVANT_NOTIFICATIONS: Final = frozenset(
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
CONNECT_TIMEOUT_S: Final = 30.0
READ_TIMEOUT_S: Final = 300.0
# The status of a response that stands for an error.
_SYNTHETIC_STATUS: Final = 502


def is_relevant(message: object) -> bool:
    """Whether a message is none of the notifications that nobody listens to."""
    return not isinstance(message, JSONRPCNotification) or message.method in RELEVANT_NOTIFICATIONS


class BoundedHTTPClient(httpx2.AsyncClient):
    """An HTTP client that never raises what belongs to one request."""

    def __init__(self, *, on_failure: Callable[[], object] = lambda: None, **options: Any) -> None:
        """Make a client.

        Args:
            on_failure: Called when a request has failed.
            options: Those of the client.
        """
        super().__init__(**options)
        self._on_failure = on_failure

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; an error is noted, and answered with."""
        asked = WIRE_STATUS.get(None) or WireStatus()
        # What follows a request that was taken tells nothing of whether that was: it would be made twice.
        seen = asked if _carries_request(request) else WireStatus()
        try:
            response = await super().send(request, **options)
        except Exception as error:  # noqa: BLE001  also what somebody's `auth` raises: it must not end other requests
            seen.error = error
            self._on_failure()
            return _build_error_response(request, error)
        seen.error, seen.status, seen.retry_after_s = None, response.status_code, None
        if response.status_code >= FIRST_ERROR:
            wait = response.headers.get("retry-after")
            seen.retry_after_s = None if wait is None else parse_retry_after(wait, time.time())
            self._on_failure()
        if seen is not asked and response.status_code == NOT_FOUND:
            asked.is_session_lost = True
        if not response.is_stream_consumed:
            response.stream = _BoundedStream(response, seen)
        return response


def build_http_client(
    headers: Mapping[str, str],
    auth: httpx2.Auth | None,
    on_failure: Callable[[], object] = lambda: None,
    transport: httpx2.AsyncBaseTransport | None = None,
) -> BoundedHTTPClient:
    """Make a client; compressed answers are not asked for, whose size cannot be known."""
    told = {"accept-encoding": "identity"} | dict(headers)
    timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
    return BoundedHTTPClient(on_failure=on_failure, headers=told, auth=auth, timeout=timeout, transport=transport)


def _carries_request(request: httpx2.Request) -> bool:
    """Whether a request of HTTP tells what became of ours.

    What fetches the rest of an answer does not, nor what answers the server, or takes a request back, in mid-call.
    """
    if request.method != "POST":
        return "last-event-id" not in request.headers
    message = json.loads(request.content)
    return "method" in message and "id" in message


def _build_error_response(request: httpx2.Request, error: Exception) -> httpx2.Response:
    said = {"code": CONNECTION_CLOSED, "message": describe_error(error)}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": said})
    headers = {"content-type": "application/json"}
    return httpx2.Response(_SYNTHETIC_STATUS, headers=headers, content=body.encode("utf-8", "replace"), request=request)


class _BoundedStream(httpx2.AsyncByteStream):
    """The body of a response: it ends early, and that is noted, where it is too long or breaks off."""

    def __init__(self, response: httpx2.Response, wire_status: WireStatus) -> None:
        self._stream: Any = response.stream
        self._wire_status = wire_status
        self._is_event_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        # Then each event of it is bounded, and the SDK does that.
        self._is_compressed = response.headers.get("content-encoding", "identity").lower() != "identity"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_compressed:
            self._wire_status.error = MessageTooLongError(
                "it is compressed, which was not asked for, and may be of any size"
            )
            return
        size = 0
        try:
            async for chunk in self._stream:
                size += len(chunk)
                if size > MESSAGE_BYTES and not self._is_event_stream:
                    self._wire_status.error = MessageTooLongError(f"it has more than {MESSAGE_BYTES >> 20} MiB")
                    return
                yield chunk
        except httpx2.TransportError as error:
            self._wire_status.error = error

    async def aclose(self) -> None:
        await self._stream.aclose()
