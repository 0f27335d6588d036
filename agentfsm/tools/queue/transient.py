"""Classify failures of a tool: whether they are transient, so that a retry may help, and how long to wait.

Errors of HTTP libraries are recognised by the class names in one table, so none of the libraries is imported. An error
with an HTTP status is classified by that status alone.
"""

from __future__ import annotations

import errno
import socket
import time
from contextlib import suppress
from typing import Any, Final

import attrs

from agentfsm._lib.retry_after import parse_retry_after, parse_wait_s
from agentfsm.core.errors import ModelUnavailableError, TransientError
from agentfsm.core.value import Value

# Status 529 means overloaded for some services, Anthropic among them.
TRANSIENT_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# The service works but limits this caller, unlike 503 and 529, which mean that the service has a problem.
RATE_LIMITED_STATUS: Final = 429

# Transient error numbers beyond the subclasses of ConnectionError and TimeoutError.
TRANSIENT_ERRNOS: Final = frozenset(
    getattr(errno, name)
    for name in (
        "EADDRNOTAVAIL",  # all local ports are in use
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ENETDOWN",
        "ENETRESET",
        "ENETUNREACH",
        "ENOBUFS",
    )
    if hasattr(errno, name)
)

# Table value: classify the error by its `reason` attribute.
_SAME_AS_REASON: Final = "reason"

# Library -> class -> whether the error is transient. Subclasses inherit the value unless they are listed.
TRANSIENT_BY_LIBRARY: Final[dict[str, dict[str, bool | str]]] = {
    "aiohttp": {
        "ClientConnectionError": True,
        "ClientPayloadError": True,
        "ClientSSLError": False,
        "ServerFingerprintMismatch": False,
    },
    "anthropic": {"APIConnectionError": True},
    "anyio": {"BrokenResourceError": True, "ConnectionFailed": True},
    "http": {"BadStatusLine": True, "IncompleteRead": True},
    "httpx": {"TransportError": True, "LocalProtocolError": False, "UnsupportedProtocol": False},
    "httpx2": {"TransportError": True, "LocalProtocolError": False, "UnsupportedProtocol": False, "SSEError": False},
    "openai": {"APIConnectionError": True},
    "requests": {
        "ChunkedEncodingError": True,
        "ConnectionError": True,
        "RetryError": True,
        "SSLError": False,
        "Timeout": True,
    },
    "ssl": {"SSLEOFError": True},
    "trio": {"BrokenResourceError": True, "TooSlowError": True},
    "urllib": {"ContentTooShortError": True, "URLError": _SAME_AS_REASON},
    "urllib3": {
        "EmptyPoolError": True,
        "IncompleteRead": True,
        "InvalidChunkLength": True,
        "MaxRetryError": _SAME_AS_REASON,
        "ProtocolError": True,
        "ProxyError": True,
        "ResponseNotChunked": False,
        "SSLError": False,
        "TimeoutError": True,
    },
}


@attrs.frozen
class TransientFailure(Value):
    """A transient failure: a retry may succeed."""

    retry_after_s: float | None
    """Seconds to wait before the retry, 0 or more, as the failed service requests. None: not stated."""

    rate_limited: bool
    """Whether the service works and has limited this caller's rate."""


def classify_failure(error: BaseException) -> TransientFailure | None:
    """Classify a failure as transient or not. Never raises, whatever the error's attributes do.

    A group is transient if all of its members are; the longest of their waits applies. Causes are ignored: an error
    raised from another is classified by itself.

    Returns:
        The classification, or None if a retry would not help or this is unknown.
    """
    with suppress(
        BaseException
    ):  # values from `_safe_getattr` may still raise: a number, a class, a group that contains itself
        return _classify_group(error) if isinstance(error, BaseExceptionGroup) else _classify_error(error)
    return None


def _classify_group(group: BaseExceptionGroup[BaseException]) -> TransientFailure | None:
    members = []
    for error in group.exceptions:
        if (member := classify_failure(error)) is None:
            return None
        members.append(member)
    return TransientFailure(
        retry_after_s=max((m.retry_after_s for m in members if m.retry_after_s is not None), default=None),
        rate_limited=any(member.rate_limited for member in members),
    )


def _classify_error(error: BaseException) -> TransientFailure | None:
    if not isinstance(error, Exception):
        return None  # a request to exit; and `sys.exit(500)` has a `code`
    status, asked_s = _find_status(error), _find_retry_after_s(error)
    if isinstance(error, TransientError | ModelUnavailableError):
        is_passing = True  # raised to report a transient failure
    elif status is not None:
        # OpenAI's 429 for an exhausted quota does not pass by waiting.
        is_passing = status in TRANSIENT_STATUSES and _safe_getattr(error, "code") != "insufficient_quota"
    else:
        is_passing = _is_transient(error) or asked_s is not None
    return TransientFailure(asked_s, status == RATE_LIMITED_STATUS) if is_passing else None


def _is_transient(error: BaseException) -> bool:
    for cls in type(error).__mro__:
        verdict = TRANSIENT_BY_LIBRARY.get(cls.__module__.partition(".")[0], {}).get(cls.__name__)
        if verdict == _SAME_AS_REASON:
            reason = _safe_getattr(error, _SAME_AS_REASON)
            return isinstance(reason, BaseException) and classify_failure(reason) is not None
        if verdict is not None:
            return bool(verdict)
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS
    )


def _find_status(error: BaseException) -> int | None:
    """Return the HTTP status, 400 or higher. Some errors carry the status of a stream that began well, or 0."""
    response = _safe_getattr(error, "response")
    for holder, name in (
        (error, "status_code"),
        (response, "status_code"),
        (error, "status"),
        (response, "status"),
        (error, "code"),
    ):
        status = _safe_getattr(holder, name)
        if isinstance(status, int) and 400 <= status <= 599:
            return int(status)
    return None


def _find_retry_after_s(error: BaseException) -> float | None:
    """Return the seconds that the error asks to wait, from its attributes or the headers of its response."""
    for name in ("retry_after_s", "retry_after"):
        number = _safe_getattr(error, name)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and (seconds := parse_wait_s(number)) is not None:
            return seconds
    headers = _safe_getattr(_safe_getattr(error, "response"), "headers") or _safe_getattr(error, "headers")
    with suppress(BaseException):  # not a mapping of strings
        return next(
            (parse_retry_after(value, time.time()) for name, value in headers.items() if name.lower() == "retry-after"),
            None,
        )
    return None


def _safe_getattr(holder: object, name: str) -> Any:
    with suppress(BaseException):  # a property may raise
        return getattr(holder, name, None)
    return None
