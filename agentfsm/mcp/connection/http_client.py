"""HTTP client that limits the size of messages, and in which a failed request does not affect the others.

In the SDK, an HTTP error ends the connection with all its other requests. Here it becomes a response to the failed
request only, and is recorded in `WireStatus` for the error text.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import httpx2
from mcp.types import CONNECTION_CLOSED, JSONRPCNotification

from agentfsm._lib.retry_after import parse_retry_after
from agentfsm.mcp.connection.request_errors import (
    BAD_REQUEST,
    FIRST_ERROR,
    NOT_FOUND,
    WIRE_STATUS,
    MessageTooLongError,
    WireStatus,
    describe_error,
)
from agentfsm.mcp.errors import AuthorizationServerError

# Maximum size of one message in bytes. A result of 10 MB has to fit; the journal keeps less of it than this.
MESSAGE_BYTES: Final = 64 * 1024 * 1024
# Notifications that are used. The SDK starts a task for each notification, and a server may send any number.
RELEVANT_NOTIFICATIONS: Final = frozenset(
    {
        "notifications/cancelled",
        "notifications/elicitation/complete",
        "notifications/progress",
        "notifications/subscriptions/acknowledged",
        "notifications/tools/list_changed",
    }
)
# Header with the session of the handshake revision.
SESSION_HEADER: Final = "mcp-session-id"
# Seconds to connect, or to send a part of a request; and seconds between two parts of a stream. Both are the values of
# the SDK's own client. The answer to a request has its own timeout.
CONNECT_TIMEOUT_S: Final = 30.0
READ_TIMEOUT_S: Final = 300.0
# HTTP status of a response that is built from an error.
_SYNTHETIC_STATUS: Final = 502


def is_relevant(message: object) -> bool:
    """Return whether a message is used: it is not a notification, or one of `RELEVANT_NOTIFICATIONS`."""
    return not isinstance(message, JSONRPCNotification) or message.method in RELEVANT_NOTIFICATIONS


class BoundedHTTPClient(httpx2.AsyncClient):
    """HTTP client that returns the error of a request as a response."""

    def __init__(self, *, on_failure: Callable[[], object] = lambda: None, **options: Any) -> None:
        """Create a client.

        Args:
            on_failure: Called when a request has failed.
            options: Options of `httpx2.AsyncClient`.
        """
        super().__init__(**options)
        self._on_failure = on_failure

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request. An error is recorded, and returned as a response."""
        asked = WIRE_STATUS.get(None) or WireStatus()
        # A failed follow-up does not show that the request itself was refused; it would be sent twice.
        seen = WireStatus()
        if _carries_request(request):  # it has a timeout of its own, which stops while a person is asked
            seen = asked
            request.extensions["timeout"] = {**request.extensions.get("timeout", {}), "read": None}
        seen.has_session = SESSION_HEADER in request.headers
        try:
            response = await super().send(request, **options)
        except Exception as caught:  # noqa: BLE001  also an error of a user's `auth` must not end other requests
            seen.error = error = _explain_auth_error(caught, request)
            self._on_failure()
            return _build_error_response(request, error)
        seen.error, seen.status, seen.retry_after_s = None, response.status_code, None
        if response.status_code >= FIRST_ERROR:
            wait = response.headers.get("retry-after")
            seen.retry_after_s = None if wait is None else parse_retry_after(wait, time.time())
            self._on_failure()
        if seen is not asked and (
            response.status_code == NOT_FOUND or (response.status_code == BAD_REQUEST and seen.has_session)
        ):
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
    """Create a client. It requests uncompressed answers, since the size of compressed ones is unknown."""
    sent = {"accept-encoding": "identity"} | dict(headers)
    timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
    return BoundedHTTPClient(on_failure=on_failure, headers=sent, auth=auth, timeout=timeout, transport=transport)


def _carries_request(request: httpx2.Request) -> bool:
    """Return whether the outcome of an HTTP request is that of our own request to the server.

    HTTP requests that fetch the rest of an answer, answer the server, or cancel a call are follow-ups.
    """
    if request.method != "POST":
        return "last-event-id" not in request.headers
    message = json.loads(request.content)
    return "method" in message and "id" in message


def _explain_auth_error(error: Exception, request: httpx2.Request) -> Exception:
    """Return the error of a request; another one if a request of its authorization failed, so that it was not sent."""
    if not isinstance(error, httpx2.RequestError):
        return error
    try:
        failed = error.request
    except RuntimeError:  # it has none
        return error
    if failed.url == request.url:
        return error
    return AuthorizationServerError(
        f"the authorization server {failed.url.host} cannot be reached: {describe_error(error)}", is_passing=True
    )


def _build_error_response(request: httpx2.Request, error: Exception) -> httpx2.Response:
    said = {"code": CONNECTION_CLOSED, "message": describe_error(error)}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": said})
    headers = {"content-type": "application/json"}
    return httpx2.Response(_SYNTHETIC_STATUS, headers=headers, content=body.encode("utf-8", "replace"), request=request)


class _BoundedStream(httpx2.AsyncByteStream):
    """Body of a response. It ends early if it is too long or interrupted, which is recorded."""

    def __init__(self, response: httpx2.Response, wire_status: WireStatus) -> None:
        self._stream: Any = response.stream
        self._wire_status = wire_status
        # The SDK limits the size of each event of an event stream.
        self._is_event_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        self._is_compressed = response.headers.get("content-encoding", "identity").lower() != "identity"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_compressed:
            self._wire_status.error = MessageTooLongError(
                "it is compressed, although uncompressed data was requested, so its size is unknown"
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
