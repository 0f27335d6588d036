"""What goes wrong with a request to a server, in words for the model: what it is, and what to do about it.

The SDK knows an error by its JSON-RPC code, and makes one up for what has none: an HTTP status, a connection that is
gone. What was seen on the wire is noted beside it (`Seen`), and both together tell which `Fault` it is. One table then
says for each fault which way it goes: tried again, back to the model, or the end of the call.

Source: document D, 7.4.
"""

from __future__ import annotations

from contextvars import ContextVar
from enum import StrEnum
from http import HTTPStatus
from typing import Final

import attrs
import httpx2
from mcp import MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
)
from pydantic import ValidationError

from agentfsm.core.errors import AgentError, ModelRetry, RefusedError, TransientError
from agentfsm.core.messages import ErrorType, Outcome, replace_surrogates
from agentfsm.core.value import Value
from agentfsm.mcp.errors import MCPServerError, NoAnswerError, RestingError
from agentfsm.tools.queue.transient import TRANSIENT_STATUSES
from agentfsm.tools.run_context import ToolReturn

# Characters of what a server, or a library, says of an error: the cause stands at its beginning.
SAID_CHARS: Final = 500

# Places of an answer that could not be read, as they are told.
PLACES_SHOWN: Final = 5


class TooLongError(Exception):
    """A message is longer than any that is taken in."""


@attrs.define(eq=False, repr=False)
class Seen:
    """What a request has met on the wire, which the SDK does not tell of."""

    status: int | None = None
    # Of the newest response, of HTTP.
    retry_after_s: float | None = None
    # Seconds that it asked to wait, or None.
    error: Exception | None = None
    # What came instead of a response, or cut it off.
    was_taken: bool = False
    # Whether the server has taken the call in a request before, and has only put it off.
    is_forgotten: bool = False
    # Whether the server, which has taken the request, has forgotten the session since.


# What was seen of the request at hand. Whatever the SDK sends for a request, it sends in a copy of the context of who
# asked.
SEEN: Final[ContextVar[Seen]] = ContextVar("SEEN")


class Fault(StrEnum):
    """What is wrong."""

    UNREACHABLE = "unreachable"
    LOST = "lost"
    LATE = "late"
    BUSY = "busy"
    DOWN = "down"
    SESSION = "session"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    ADDRESS = "address"
    UNKNOWN = "unknown"
    ARGUMENTS = "arguments"
    REQUEST = "request"
    INTERNAL = "internal"
    MALFORMED = "malformed"
    TOO_LONG = "too_long"
    OTHER = "other"


class Way(StrEnum):
    """What comes of it."""

    REFUSED = "refused"
    # It was not done, and may be tried again.
    PASSING = "passing"
    # It may have been done; what may be repeated may be tried again.
    HINT = "hint"
    # The model is told how to call instead.
    FAILED = "failed"
    # Trying the same again does not help.


@attrs.frozen
class Row(Value):
    """A fault's way, and its words."""

    way: Way
    words: str
    # With the names of the server and of what was asked of it, and what was said of the error.
    error_type: ErrorType = ErrorType.TOOL


FAULTS: Final[dict[Fault, Row]] = {
    Fault.UNREACHABLE: Row(Way.REFUSED, "the MCP server {server!r} cannot be reached: {said}"),
    Fault.LOST: Row(Way.PASSING, "the connection to the MCP server {server!r} was lost in mid-call: {said}"),
    Fault.LATE: Row(Way.PASSING, "the MCP server {server!r} did not answer in time: {said}"),
    Fault.BUSY: Row(Way.REFUSED, "the MCP server {server!r} has too many requests: {said}"),
    Fault.DOWN: Row(Way.PASSING, "the MCP server {server!r} is having trouble: {said}"),
    Fault.SESSION: Row(Way.REFUSED, "the MCP server {server!r} has forgotten the session, and gets a new one: {said}"),
    Fault.UNAUTHORIZED: Row(
        Way.FAILED,
        "The MCP server {server!r} does not accept our credentials: {said}. Nothing was run, and trying again will not "
        "help: tell the user that the access to {server!r} has to be renewed.",
        ErrorType.NOT_PERMITTED,
    ),
    Fault.FORBIDDEN: Row(
        Way.FAILED,
        "The MCP server {server!r} does not allow this call: {said}. Nothing was run, and trying again will not help: "
        "do something else, or tell the user.",
        ErrorType.NOT_PERMITTED,
    ),
    Fault.ADDRESS: Row(
        Way.FAILED,
        "The address of the MCP server {server!r} does not take calls: {said}. Nothing was run, and trying again will "
        "not help: go on without it, and tell the user that the server has to be set up anew.",
        ErrorType.UNAVAILABLE,
    ),
    Fault.UNKNOWN: Row(
        Way.FAILED,
        "The MCP server {server!r} does not know {asked!r}: {said}. Nothing was run, and trying again will not help: "
        "use another tool, or tell the user.",
    ),
    Fault.ARGUMENTS: Row(
        Way.HINT,
        "The MCP server {server!r} refused the arguments of {asked!r}: {said}. Nothing was run: call again with "
        "arguments that fit its description, or use another tool.",
    ),
    Fault.REQUEST: Row(
        Way.FAILED,
        "The MCP server {server!r} refused the request of {asked!r}: {said}. Nothing was run, and trying the same "
        "again will not help: use another tool, or tell the user.",
    ),
    Fault.INTERNAL: Row(
        Way.FAILED,
        "{asked!r} failed inside of the MCP server {server!r}: {said}. Its effect may have happened, in whole or in "
        "part. Other arguments or another tool may do better; else tell the user.",
    ),
    Fault.MALFORMED: Row(
        Way.FAILED,
        "The answer of the MCP server {server!r} cannot be read, since it does not fit the protocol: {said}. The "
        "effect of {asked!r} may have happened. Trying again will not help: use another tool, or tell the user.",
    ),
    Fault.TOO_LONG: Row(
        Way.FAILED,
        "The answer of the MCP server {server!r} is too long to be taken in: {said}. The effect of {asked!r} may have "
        "happened. Ask for less, for example for a narrower range or a smaller page.",
    ),
    Fault.OTHER: Row(
        Way.FAILED,
        "{asked!r} ended in an error of the MCP server {server!r}: {said}. Its effect may have happened, in whole or "
        "in part. Trying the same again will not help: try other arguments or another tool, or tell the user.",
    ),
}

# With which nothing was run.
UNDONE: Final = frozenset(
    {
        Fault.UNREACHABLE,
        Fault.BUSY,
        Fault.SESSION,
        Fault.UNAUTHORIZED,
        Fault.FORBIDDEN,
        Fault.ADDRESS,
        Fault.UNKNOWN,
        Fault.ARGUMENTS,
        Fault.REQUEST,
    }
)

# Those that say more than the JSON-RPC error that may come with them. With 400 and 404 that one says more.
STATUSES: Final[dict[int, Fault]] = dict.fromkeys(TRANSIENT_STATUSES, Fault.DOWN) | {
    401: Fault.UNAUTHORIZED,
    403: Fault.FORBIDDEN,
    405: Fault.ADDRESS,
    429: Fault.BUSY,
}
NOT_FOUND: Final = 404
# The first status of each kind.
REDIRECT: Final = 300
ERROR: Final = 400
# What the SDK says where the server has said nothing.
_STAND_IN: Final = "Server returned an error response"

# Every other code is the server's own, and does not say how far the call had come.
CODES: Final[dict[int, Fault]] = {
    CONNECTION_CLOSED: Fault.LOST,
    REQUEST_TIMEOUT: Fault.LATE,
    PARSE_ERROR: Fault.MALFORMED,
    INVALID_REQUEST: Fault.REQUEST,
    METHOD_NOT_FOUND: Fault.UNKNOWN,
    INVALID_PARAMS: Fault.ARGUMENTS,
    INTERNAL_ERROR: Fault.INTERNAL,
}

# How the SDK's words begin where it has no code of its own for what it says.
SAYINGS: Final[dict[str, Fault]] = {
    "SSE stream failed: Server-sent event exceeded": Fault.TOO_LONG,
    "Unexpected content type": Fault.MALFORMED,
    "server answered a request with 202 Accepted": Fault.MALFORMED,
}

_UNSENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class RequestError(MCPError):
    """What the SDK says of a request that failed, with the fault that it is.

    Attributes:
        fault: What is wrong.
        said: What was said of it, at most `SAID_CHARS` characters.
        retry_after_s: Seconds that the server asked to wait, or None.
    """

    def __init__(self, error: MCPError, fault: Fault, said: str, retry_after_s: float | None = None) -> None:
        super().__init__(error.code, error.message, error.data)
        self.fault = fault
        self.said = said
        self.retry_after_s = retry_after_s

    @property
    def is_passing(self) -> bool:
        """Whether it speaks of the server's health, and not of what was asked."""
        return FAULTS[self.fault].way in {Way.REFUSED, Way.PASSING}


class BusyError(RefusedError):
    """Too many requests: more attempts would not make them fewer."""

    status_code = 429
    # Read by name, as those of HTTP libraries are.


def taken() -> None:
    """Note that the server has taken the call at hand: what is refused from now on is not the call."""
    SEEN.get(Seen()).was_taken = True


def explained(error: MCPError, seen: Seen, end: str | None = None) -> RequestError:
    """Say what is wrong with a request.

    Args:
        error: Of the SDK.
        seen: What was seen on the wire.
        end: How the connection ended, where it did.
    """
    if isinstance(error, RequestError):
        return error
    failed = _explained(error, seen, end)
    if seen.was_taken and failed.fault in UNDONE:
        failed.fault = Fault.LOST if failed.is_passing else Fault.OTHER
    return failed


def _explained(error: MCPError, seen: Seen, end: str | None) -> RequestError:
    if seen.error is not None:
        return RequestError(error, _fault_of_transport(seen.error), words(seen.error), seen.retry_after_s)
    said = brief(_first_of(error.message) if error.code == PARSE_ERROR else error.message)
    if seen.status == NOT_FOUND and error.code != METHOD_NOT_FOUND:
        return RequestError(error, Fault.SESSION, said)
    if seen.status is not None and seen.status in STATUSES:
        return RequestError(error, STATUSES[seen.status], _status_text(seen.status, said), seen.retry_after_s)
    if seen.status is not None and REDIRECT <= seen.status < ERROR:
        return RequestError(error, Fault.ADDRESS, said)
    if end is not None:
        return RequestError(error, Fault.LOST, end)
    fault = next((fault for beginning, fault in SAYINGS.items() if said.startswith(beginning)), None)
    return RequestError(error, fault or CODES.get(error.code, Fault.OTHER), said)


def _first_of(message: str) -> str:
    """Return what cannot be read, without what pydantic says of it."""
    return message.partition(":")[0]


def of_status(status: int) -> MCPError:
    """Return what the SDK would say of a status, where it did not come to that."""
    return MCPError(METHOD_NOT_FOUND, _status_text(status, _STAND_IN))


def _status_text(status: int, said: str) -> str:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    text = f"HTTP {status} {phrase}".strip()
    return text if said in {_STAND_IN, text} else f"{text}: {said}"


def _fault_of_transport(error: Exception) -> Fault:
    if isinstance(error, TooLongError):
        return Fault.TOO_LONG
    if isinstance(error, AgentError):
        return Fault.FORBIDDEN
    if isinstance(error, _UNSENT):
        return Fault.UNREACHABLE
    return Fault.LOST if isinstance(error, httpx2.HTTPError) else Fault.UNAUTHORIZED  # what an `auth` of a user raises


def ended(error: Exception, server: str, asked: str, *, is_sent: bool = True) -> ToolReturn:
    """Return the end of a call that failed.

    Args:
        error: What `Link.ask` has raised.
        server: The server's name.
        asked: What was asked of it: the tool's name there.
        is_sent: Whether it came to that; else it is the listing of the tools before it that failed.

    Raises:
        RefusedError: when nothing was done, and it may be tried again.
        TransientError: when it may have been done, and what may be repeated may be tried again.
        ModelRetry: when other arguments would do.
        Exception: the error itself, when it is not one of a request.
    """
    if isinstance(error, RestingError):
        return _failed(str(error), ErrorType.CIRCUIT_OPEN, retryable=True)
    if isinstance(error, NoAnswerError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, MCPServerError):
        if error.is_passing:
            raise RefusedError(error.why) from error
        return _failed(error.why, ErrorType.UNAVAILABLE)
    fault, said = _known(error)
    row = FAULTS[fault]
    text = row.words.format(server=server, asked=asked, said=said)
    if not is_sent:
        return _unlisted(
            error, row, f"the MCP server {server!r} was connected to anew and did not list its tools: {said}"
        )
    match row.way:
        case Way.REFUSED:
            refused = BusyError if fault is Fault.BUSY else RefusedError
            raise refused(text, getattr(error, "retry_after_s", None)) from error
        case Way.PASSING:
            raise TransientError(text, getattr(error, "retry_after_s", None)) from error
        case Way.HINT:
            raise ModelRetry(text) from error
        case Way.FAILED:
            return _failed(text, row.error_type)


def _unlisted(error: Exception, row: Row, text: str) -> ToolReturn:
    if row.way in {Way.REFUSED, Way.PASSING}:
        raise RefusedError(text, getattr(error, "retry_after_s", None)) from error
    return _failed(f"{text}. Nothing was run: use another tool, or tell the user.", row.error_type)


def said_of(error: Exception) -> str:
    """Return what is said of a request that failed: what `Link.ask` has raised, and no `MCPServerError`."""
    return _known(error)[1]


def _known(error: Exception) -> tuple[Fault, str]:
    match error:
        case RequestError():
            return error.fault, error.said
        case MCPError():  # of the question itself
            return CODES.get(error.code, Fault.OTHER), brief(error.message)
        case ValidationError():
            return Fault.MALFORMED, brief(_unread(error))
        case TimeoutError():
            return Fault.LATE, words(error)
        case RuntimeError():  # of the SDK: structured content that does not fit the schema that the server gave
            return Fault.MALFORMED, brief(str(error))
        case _:
            raise error


def _unread(error: ValidationError) -> str:
    """Say where an answer is of no form that the protocol has; why is said of each form that it might be, to no use."""
    errors = error.errors(include_url=False, include_input=False)
    places = [*dict.fromkeys(".".join(map(str, each["loc"][:2])) for each in errors)]
    more = f" and {len(places) - PLACES_SHOWN} more" if len(places) > PLACES_SHOWN else ""
    return f"the protocol has no such form as {', '.join(places[:PLACES_SHOWN])}{more}"


def _failed(text: str, error_type: ErrorType, *, retryable: bool = False) -> ToolReturn:
    return ToolReturn(
        outcome=Outcome.FAILED, content=replace_surrogates(text), error_type=error_type, retryable=retryable
    )


def words(error: BaseException) -> str:
    """Return what an error says; of a group, what its members say."""
    if isinstance(error, BaseExceptionGroup):
        return brief("; ".join(dict.fromkeys(words(each) for each in error.exceptions)))
    text = str(error)
    if isinstance(error, TooLongError | AgentError):
        return brief(text)
    return brief(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def brief(text: str) -> str:
    """Return the beginning of a text, on one line, and without a full stop behind it."""
    line = " ".join(text[: 4 * SAID_CHARS].split())
    return line.rstrip(".") if len(line) <= SAID_CHARS else f"{line[:SAID_CHARS]}..."
