"""What goes wrong with a request to a server, in words for the model: what it is, and what to do about it.

The SDK knows an error by its JSON-RPC code, and makes one up for what has none: an HTTP status, a connection that is
gone. What was seen on the wire is noted beside it (`WireStatus`), and both together tell which `RequestFault` it is.
One table then says for each fault which way it goes: tried again, back to the model, or the end of the call.

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
from agentfsm.mcp.errors import MCPServerError, NoAnswerError, ServerCircuitOpenError
from agentfsm.tools.queue.transient import TRANSIENT_STATUSES
from agentfsm.tools.run_context import ToolReturn

# Characters of what a server, or a library, says of an error: the cause stands at its beginning.
MAX_DETAIL_CHARS: Final = 500

# Places of an answer that could not be read, as they are told.
MAX_LOCATIONS: Final = 5


class MessageTooLongError(Exception):
    """A message is longer than any that is taken in."""


@attrs.define(eq=False, repr=False)
class WireStatus:
    """What a request has met on the wire, which the SDK does not tell of."""

    status: int | None = None
    """Of the newest response, of HTTP."""

    retry_after_s: float | None = None
    """Seconds that it asked to wait, or None."""

    error: Exception | None = None
    """What came instead of a response, or cut it off."""

    was_accepted: bool = False
    """Whether the server has taken the call in a request before, and has only put it off."""

    is_session_lost: bool = False
    """Whether the server, which has taken the request, has forgotten the session since."""


# What was seen of the request at hand. Whatever the SDK sends for a request, it sends in a copy of the context of who
# asked.
WIRE_STATUS: Final[ContextVar[WireStatus]] = ContextVar("SEEN")


class RequestFault(StrEnum):
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


class Disposition(StrEnum):
    """What comes of it."""

    REFUSED = "refused"
    """It was not done, and may be tried again."""

    PASSING = "passing"
    """It may have been done; what may be repeated may be tried again."""

    HINT = "hint"
    """The model is told how to call instead."""

    FAILED = "failed"
    """Trying the same again does not help."""


@attrs.frozen
class FaultRule(Value):
    """A fault's way, and its words."""

    disposition: Disposition
    template: str
    """With the names of the server and of what was asked of it, and what was said of the error."""

    error_type: ErrorType = ErrorType.TOOL


FAULT_RULES: Final[dict[RequestFault, FaultRule]] = {
    RequestFault.UNREACHABLE: FaultRule(Disposition.REFUSED, "the MCP server {server!r} cannot be reached: {said}"),
    RequestFault.LOST: FaultRule(
        Disposition.PASSING, "the connection to the MCP server {server!r} was lost in mid-call: {said}"
    ),
    RequestFault.LATE: FaultRule(Disposition.PASSING, "the MCP server {server!r} did not answer in time: {said}"),
    RequestFault.BUSY: FaultRule(Disposition.REFUSED, "the MCP server {server!r} has too many requests: {said}"),
    RequestFault.DOWN: FaultRule(Disposition.PASSING, "the MCP server {server!r} is having trouble: {said}"),
    RequestFault.SESSION: FaultRule(
        Disposition.REFUSED, "the MCP server {server!r} has forgotten the session, and gets a new one: {said}"
    ),
    RequestFault.UNAUTHORIZED: FaultRule(
        Disposition.FAILED,
        "The MCP server {server!r} does not accept our credentials: {said}. Nothing was run, and trying again will not "
        "help: tell the user that the access to {server!r} has to be renewed.",
        ErrorType.NOT_PERMITTED,
    ),
    RequestFault.FORBIDDEN: FaultRule(
        Disposition.FAILED,
        "The MCP server {server!r} does not allow this call: {said}. Nothing was run, and trying again will not help: "
        "do something else, or tell the user.",
        ErrorType.NOT_PERMITTED,
    ),
    RequestFault.ADDRESS: FaultRule(
        Disposition.FAILED,
        "The address of the MCP server {server!r} does not take calls: {said}. Nothing was run, and trying again will "
        "not help: go on without it, and tell the user that the server has to be set up anew.",
        ErrorType.UNAVAILABLE,
    ),
    RequestFault.UNKNOWN: FaultRule(
        Disposition.FAILED,
        "The MCP server {server!r} does not know {asked!r}: {said}. Nothing was run, and trying again will not help: "
        "use another tool, or tell the user.",
    ),
    RequestFault.ARGUMENTS: FaultRule(
        Disposition.HINT,
        "The MCP server {server!r} refused the arguments of {asked!r}: {said}. Nothing was run: call again with "
        "arguments that fit its description, or use another tool.",
    ),
    RequestFault.REQUEST: FaultRule(
        Disposition.FAILED,
        "The MCP server {server!r} refused the request of {asked!r}: {said}. Nothing was run, and trying the same "
        "again will not help: use another tool, or tell the user.",
    ),
    RequestFault.INTERNAL: FaultRule(
        Disposition.FAILED,
        "{asked!r} failed inside of the MCP server {server!r}: {said}. Its effect may have happened, in whole or in "
        "part. Other arguments or another tool may do better; else tell the user.",
    ),
    RequestFault.MALFORMED: FaultRule(
        Disposition.FAILED,
        "The answer of the MCP server {server!r} cannot be read, since it does not fit the protocol: {said}. The "
        "effect of {asked!r} may have happened. Trying again will not help: use another tool, or tell the user.",
    ),
    RequestFault.TOO_LONG: FaultRule(
        Disposition.FAILED,
        "The answer of the MCP server {server!r} is too long to be taken in: {said}. The effect of {asked!r} may have "
        "happened. Ask for less, for example for a narrower range or a smaller page.",
    ),
    RequestFault.OTHER: FaultRule(
        Disposition.FAILED,
        "{asked!r} ended in an error of the MCP server {server!r}: {said}. Its effect may have happened, in whole or "
        "in part. Trying the same again will not help: try other arguments or another tool, or tell the user.",
    ),
}

# With which nothing was run.
NOT_EXECUTED: Final = frozenset(
    {
        RequestFault.UNREACHABLE,
        RequestFault.BUSY,
        RequestFault.SESSION,
        RequestFault.UNAUTHORIZED,
        RequestFault.FORBIDDEN,
        RequestFault.ADDRESS,
        RequestFault.UNKNOWN,
        RequestFault.ARGUMENTS,
        RequestFault.REQUEST,
    }
)

# Those that say more than the JSON-RPC error that may come with them. With 400 and 404 that one says more.
FAULT_BY_STATUS: Final[dict[int, RequestFault]] = dict.fromkeys(TRANSIENT_STATUSES, RequestFault.DOWN) | {
    401: RequestFault.UNAUTHORIZED,
    403: RequestFault.FORBIDDEN,
    405: RequestFault.ADDRESS,
    429: RequestFault.BUSY,
}
NOT_FOUND: Final = 404
# The first status of each kind.
FIRST_REDIRECT: Final = 300
FIRST_ERROR: Final = 400
# What the SDK says where the server has said nothing.
_SDK_PLACEHOLDER: Final = "Server returned an error response"

# Every other code is the server's own, and does not say how far the call had come.
FAULT_BY_CODE: Final[dict[int, RequestFault]] = {
    CONNECTION_CLOSED: RequestFault.LOST,
    REQUEST_TIMEOUT: RequestFault.LATE,
    PARSE_ERROR: RequestFault.MALFORMED,
    INVALID_REQUEST: RequestFault.REQUEST,
    METHOD_NOT_FOUND: RequestFault.UNKNOWN,
    INVALID_PARAMS: RequestFault.ARGUMENTS,
    INTERNAL_ERROR: RequestFault.INTERNAL,
}

# How the SDK's words begin where it has no code of its own for what it says.
FAULT_BY_MESSAGE: Final[dict[str, RequestFault]] = {
    "SSE stream failed: Server-sent event exceeded": RequestFault.TOO_LONG,
    "Unexpected content type": RequestFault.MALFORMED,
    "server answered a request with 202 Accepted": RequestFault.MALFORMED,
}

_NEVER_SENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class RequestError(MCPError):
    """What the SDK says of a request that failed, with the fault that it is.

    Attributes:
        fault: What is wrong.
        said: What was said of it, at most `MAX_DETAIL_CHARS` characters.
        retry_after_s: Seconds that the server asked to wait, or None.
    """

    def __init__(self, error: MCPError, fault: RequestFault, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(error.code, error.message, error.data)
        self.fault = fault
        self.detail = detail
        self.retry_after_s = retry_after_s

    @property
    def is_passing(self) -> bool:
        """Whether it speaks of the server's health, and not of what was asked."""
        return FAULT_RULES[self.fault].disposition in {Disposition.REFUSED, Disposition.PASSING}


class TooManyRequestsError(RefusedError):
    """Too many requests: more attempts would not make them fewer."""

    status_code = 429
    """Read by name, as those of HTTP libraries are."""


def mark_accepted() -> None:
    """Note that the server has taken the call at hand: what is refused from now on is not the call."""
    WIRE_STATUS.get(WireStatus()).was_accepted = True


def classify_error(error: MCPError, wire_status: WireStatus, end_reason: str | None = None) -> RequestError:
    """Say what is wrong with a request.

    Args:
        error: Of the SDK.
        wire_status: What was seen on the wire.
        end_reason: How the connection ended, where it did.
    """
    if isinstance(error, RequestError):
        return error
    failed = _classify(error, wire_status, end_reason)
    if wire_status.was_accepted and failed.fault in NOT_EXECUTED:
        failed.fault = RequestFault.LOST if failed.is_passing else RequestFault.OTHER
    return failed


def _classify(error: MCPError, wire_status: WireStatus, end_reason: str | None) -> RequestError:
    if wire_status.error is not None:
        return RequestError(
            error,
            _classify_transport_error(wire_status.error),
            describe_error(wire_status.error),
            wire_status.retry_after_s,
        )
    said = shorten(_drop_validation_detail(error.message) if error.code == PARSE_ERROR else error.message)
    if wire_status.status == NOT_FOUND and error.code != METHOD_NOT_FOUND:
        return RequestError(error, RequestFault.SESSION, said)
    if wire_status.status is not None and wire_status.status in FAULT_BY_STATUS:
        return RequestError(
            error,
            FAULT_BY_STATUS[wire_status.status],
            _format_status(wire_status.status, said),
            wire_status.retry_after_s,
        )
    if wire_status.status is not None and FIRST_REDIRECT <= wire_status.status < FIRST_ERROR:
        return RequestError(error, RequestFault.ADDRESS, said)
    if end_reason is not None:
        return RequestError(error, RequestFault.LOST, end_reason)
    fault = next((fault for beginning, fault in FAULT_BY_MESSAGE.items() if said.startswith(beginning)), None)
    return RequestError(error, fault or FAULT_BY_CODE.get(error.code, RequestFault.OTHER), said)


def _drop_validation_detail(message: str) -> str:
    """Return what cannot be read, without what pydantic says of it."""
    return message.partition(":")[0]


def build_status_error(status: int) -> MCPError:
    """Return what the SDK would say of a status, where it did not come to that."""
    return MCPError(METHOD_NOT_FOUND, _format_status(status, _SDK_PLACEHOLDER))


def _format_status(status: int, detail: str) -> str:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    text = f"HTTP {status} {phrase}".strip()
    return text if detail in {_SDK_PLACEHOLDER, text} else f"{text}: {detail}"


def _classify_transport_error(error: Exception) -> RequestFault:
    if isinstance(error, MessageTooLongError):
        return RequestFault.TOO_LONG
    if isinstance(error, AgentError):
        return RequestFault.FORBIDDEN
    if isinstance(error, _NEVER_SENT):
        return RequestFault.UNREACHABLE
    return (
        RequestFault.LOST if isinstance(error, httpx2.HTTPError) else RequestFault.UNAUTHORIZED
    )  # what an `auth` of a user raises


def resolve_failure(error: Exception, server: str, asked: str, *, is_sent: bool = True) -> ToolReturn:
    """Return the end of a call that failed.

    Args:
        error: What `ServerConnection.request` has raised.
        server: The server's name.
        asked: What was asked of it: the tool's name there.
        is_sent: Whether it came to that; else it is the listing of the tools before it that failed.

    Raises:
        RefusedError: when nothing was done, and it may be tried again.
        TransientError: when it may have been done, and what may be repeated may be tried again.
        ModelRetry: when other arguments would do.
        Exception: the error itself, when it is not one of a request.
    """
    if isinstance(error, ServerCircuitOpenError):
        return _build_failed_result(str(error), ErrorType.CIRCUIT_OPEN, retryable=True)
    if isinstance(error, NoAnswerError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, MCPServerError):
        if error.is_passing:
            raise RefusedError(error.why) from error
        return _build_failed_result(error.why, ErrorType.UNAVAILABLE)
    fault, said = _identify(error)
    row = FAULT_RULES[fault]
    text = row.template.format(server=server, asked=asked, said=said)
    if not is_sent:
        return _resolve_listing_failure(
            error, row, f"the MCP server {server!r} was connected to anew and did not list its tools: {said}"
        )
    match row.disposition:
        case Disposition.REFUSED:
            refused = TooManyRequestsError if fault is RequestFault.BUSY else RefusedError
            raise refused(text, getattr(error, "retry_after_s", None)) from error
        case Disposition.PASSING:
            raise TransientError(text, getattr(error, "retry_after_s", None)) from error
        case Disposition.HINT:
            raise ModelRetry(text) from error
        case Disposition.FAILED:
            return _build_failed_result(text, row.error_type)


def _resolve_listing_failure(error: Exception, rule: FaultRule, text: str) -> ToolReturn:
    if rule.disposition in {Disposition.REFUSED, Disposition.PASSING}:
        raise RefusedError(text, getattr(error, "retry_after_s", None)) from error
    return _build_failed_result(f"{text}. Nothing was run: use another tool, or tell the user.", rule.error_type)


def describe_request_error(error: Exception) -> str:
    """Return what is said of a request that failed: what `ServerConnection.request` raised, and no `MCPServerError`."""
    return _identify(error)[1]


def _identify(error: Exception) -> tuple[RequestFault, str]:
    match error:
        case RequestError():
            return error.fault, error.detail
        case MCPError():  # of the question itself
            return FAULT_BY_CODE.get(error.code, RequestFault.OTHER), shorten(error.message)
        case ValidationError():
            return RequestFault.MALFORMED, shorten(_describe_validation_error(error))
        case TimeoutError():
            return RequestFault.LATE, describe_error(error)
        case RuntimeError():  # of the SDK: structured content that does not fit the schema that the server gave
            return RequestFault.MALFORMED, shorten(str(error))
        case _:
            raise error


def _describe_validation_error(error: ValidationError) -> str:
    """Say where an answer is of no form that the protocol has; why is said of each form that it might be, to no use."""
    errors = error.errors(include_url=False, include_input=False)
    places = [*dict.fromkeys(".".join(map(str, each["loc"][:2])) for each in errors)]
    more = f" and {len(places) - MAX_LOCATIONS} more" if len(places) > MAX_LOCATIONS else ""
    return f"the protocol has no such form as {', '.join(places[:MAX_LOCATIONS])}{more}"


def _build_failed_result(text: str, error_type: ErrorType, *, retryable: bool = False) -> ToolReturn:
    return ToolReturn(
        outcome=Outcome.FAILED, content=replace_surrogates(text), error_type=error_type, retryable=retryable
    )


def describe_error(error: BaseException) -> str:
    """Return what an error says; of a group, what its members say."""
    if isinstance(error, BaseExceptionGroup):
        return shorten("; ".join(dict.fromkeys(describe_error(each) for each in error.exceptions)))
    text = str(error)
    if isinstance(error, MessageTooLongError | AgentError):
        return shorten(text)
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def shorten(text: str) -> str:
    """Return the beginning of a text, on one line, and without a full stop behind it."""
    line = " ".join(text[: 4 * MAX_DETAIL_CHARS].split())
    return line.rstrip(".") if len(line) <= MAX_DETAIL_CHARS else f"{line[:MAX_DETAIL_CHARS]}..."
