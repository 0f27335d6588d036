"""Which failures of a tool are passing ones, so that calling again may help, and how long they ask to wait.

The HTTP libraries are known by the names of their errors, in one table: none is imported for it, and a tool may use
any of them. What has an HTTP status is judged by that alone.
"""

from __future__ import annotations

import errno
import socket
import time
from contextlib import suppress
from typing import Any, Final

import attrs

from agentfsm._http import parse_retry_after, parse_wait_s
from agentfsm.core.errors import ModelUnavailableError, TransientError
from agentfsm.core.value import Value

# 529 is what some services (Anthropic's among them) say when they are overloaded.
TRANSIENT_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# Alone: the service is well and means this caller. 503 and 529 say that it is not well, whoever calls.
RATE_LIMITED_STATUS: Final = 429

# Beside those for which Python has classes of their own, under ConnectionError and TimeoutError.
TRANSIENT_ERRNOS: Final = frozenset(
    number
    for name in (
        "EADDRNOTAVAIL",  # all local ports are in use
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ENETDOWN",
        "ENETRESET",
        "ENETUNREACH",
        "ENOBUFS",
    )
    if (number := getattr(errno, name, None)) is not None
)

# In the table: as passing as the error's `reason`.
_SAME_AS_REASON: Final = "reason"

# Library -> class -> whether it is passing, for its subclasses too unless they have a line of their own.
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
    """A failure that may have passed when the call is made again."""

    retry_after_s: float | None
    """Seconds to wait before that, 0 or more, as asked by whoever failed; None where nothing was said."""

    rate_limited: bool
    """Whether the service is well, and it was this caller who asked too often."""


def classify_failure(error: BaseException) -> TransientFailure | None:
    """Say whether a failure is a passing one; never raises, whatever the error's attributes do.

    A group is passing when all of its members are, and asks for the longest wait of theirs. Causes are not looked at:
    whoever raised one error from another chose what to say.

    Returns:
        What is known of it, or None where calling again would not help, or nobody knows.
    """
    with suppress(
        BaseException
    ):  # what `_safe_getattr` lets through may still be a trap: a number, a class, a group in itself
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
        return None  # a wish to stop; and `sys.exit(500)` has a `code`
    status, asked_s = _find_status(error), _find_retry_after_s(error)
    if isinstance(error, TransientError | ModelUnavailableError):
        is_passing = True  # it was raised to say so
    elif status is not None:
        # A 429 of OpenAI's that no waiting helps.
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
    """The HTTP status, from 400 on: some errors carry one of a stream that began well, or a 0."""
    response = _safe_getattr(error, "response")
    for holder, name in (
        (error, "status_code"),
        (response, "status_code"),
        (error, "status"),
        (response, "status"),
        (error, "code"),
    ):
        status = _safe_getattr(holder, name)
        if isinstance(status, int) and 400 <= status <= 599:  # noqa: PLR2004  HTTP's errors
            return int(status)
    return None


def _find_retry_after_s(error: BaseException) -> float | None:
    """What it asks to wait: as a number of its own, or in the headers of its response."""
    for name in ("retry_after_s", "retry_after"):
        number = _safe_getattr(error, name)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and (seconds := parse_wait_s(number)) is not None:
            return seconds
    headers = _safe_getattr(_safe_getattr(error, "response"), "headers") or _safe_getattr(error, "headers")
    with suppress(BaseException):  # no mapping, or one of something else than text
        return next(
            (parse_retry_after(value, time.time()) for name, value in headers.items() if name.lower() == "retry-after"),
            None,
        )
    return None


def _safe_getattr(holder: object, name: str) -> Any:
    with suppress(BaseException):  # a property may raise, and a response not be there
        return getattr(holder, name, None)
    return None
