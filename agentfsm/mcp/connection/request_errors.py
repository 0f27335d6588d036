"""Classify failed requests to a server, and describe each for the model: the fault, and a remedy.

The SDK identifies errors by JSON-RPC codes, and makes up codes for HTTP statuses and lost connections. `WireStatus`
records the HTTP state of a request; the `RequestFault` follows from both. The table `FAULT_RULES` then decides whether
the call is retried, goes back to the model, or fails.
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

from agentfsm.core.errors import AgentError, ModelRetry, OutcomeUnknownError, RefusedError, TransientError
from agentfsm.core.messages import ErrorType, Outcome, replace_surrogates
from agentfsm.core.value import Value
from agentfsm.mcp.errors import LoginRequiredError, MCPServerError, NoAnswerError, ServerCircuitOpenError
from agentfsm.tools.queue.transient import TRANSIENT_STATUSES
from agentfsm.tools.run_context import ToolReturn

# Characters kept of an error text of a server or library; the cause is usually at its beginning.
MAX_DETAIL_CHARS: Final = 500

# Maximum of invalid fields of an answer that are listed.
MAX_LOCATIONS: Final = 5


class MessageTooLongError(Exception):
    """A message exceeds the maximum size, or may exceed it."""


@attrs.define(eq=False, repr=False)
class WireStatus:
    """State of a request on the wire, which the SDK does not report."""

    status: int | None = None
    """HTTP status of the newest response. None: no response."""

    retry_after_s: float | None = None
    """Seconds that the newest response asked to wait. None: it did not ask."""

    error: Exception | None = None
    """Error that prevented or interrupted the response, or None."""

    was_accepted: bool = False
    """Whether the server accepted the call in an earlier request, and only postponed it."""

    has_session: bool = False
    """Whether the newest HTTP request named a session of the handshake revision."""

    is_session_lost: bool = False
    """Whether the server accepted the request, but has lost the session since."""


# State of the current request. All messages that the SDK sends for a request have a copy of its caller's context.
WIRE_STATUS: Final[ContextVar[WireStatus]] = ContextVar("SEEN")


class RequestFault(StrEnum):
    """Kind of failure of a request."""

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
    """Consequence of a fault for the call."""

    REFUSED = "refused"
    """The call was not executed, and may be retried."""

    PASSING = "passing"
    """The server answered that it has trouble. The call may have been executed, and may be retried if it is safe."""

    UNKNOWN = "unknown"
    """There is no answer, and it is unknown whether the call was executed: the tool's `on_unknown` decides."""

    HINT = "hint"
    """The model gets a hint for a correct call."""

    FAILED = "failed"
    """Retrying the same call would not help."""


@attrs.frozen
class FaultRule(Value):
    """Disposition and error text of a fault."""

    disposition: Disposition
    template: str
    """Format string with `server`, `asked` (the requested tool) and `said` (details of the error)."""

    error_type: ErrorType = ErrorType.TOOL


FAULT_RULES: Final[dict[RequestFault, FaultRule]] = {
    RequestFault.UNREACHABLE: FaultRule(Disposition.REFUSED, "the MCP server {server!r} cannot be reached: {said}"),
    RequestFault.LOST: FaultRule(
        Disposition.UNKNOWN, "the connection to the MCP server {server!r} was lost during the call: {said}"
    ),
    RequestFault.LATE: FaultRule(Disposition.UNKNOWN, "the MCP server {server!r} did not answer in time: {said}"),
    RequestFault.BUSY: FaultRule(Disposition.REFUSED, "the MCP server {server!r} has too many requests: {said}"),
    RequestFault.DOWN: FaultRule(Disposition.PASSING, "the MCP server {server!r} is having trouble: {said}"),
    RequestFault.SESSION: FaultRule(
        Disposition.REFUSED, "the MCP server {server!r} has lost the session, and a new one is opened: {said}"
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
        "The address of the MCP server {server!r} does not accept calls: {said}. Nothing was run, and trying again "
        "will not help: continue without it, and tell the user that the server's address has to be corrected.",
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
        "{asked!r} failed inside the MCP server {server!r}: {said}. Its effect may have happened, in whole or in "
        "part. Try other arguments or another tool, or tell the user.",
    ),
    RequestFault.MALFORMED: FaultRule(
        Disposition.FAILED,
        "The answer of the MCP server {server!r} violates the protocol: {said}. The effect of {asked!r} may have "
        "happened. Trying again will not help: use another tool, or tell the user.",
    ),
    RequestFault.TOO_LONG: FaultRule(
        Disposition.FAILED,
        "The answer of the MCP server {server!r} is too long: {said}. The effect of {asked!r} may have "
        "happened. Ask for less, for example for a narrower range or a smaller page.",
    ),
    RequestFault.OTHER: FaultRule(
        Disposition.FAILED,
        "{asked!r} ended in an error of the MCP server {server!r}: {said}. Its effect may have happened, in whole or "
        "in part. Trying the same again will not help: try other arguments or another tool, or tell the user.",
    ),
}

# Faults of calls that were not executed.
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

# HTTP statuses that are more specific than the JSON-RPC error in the response. For 400 and 404 the error is.
FAULT_BY_STATUS: Final[dict[int, RequestFault]] = dict.fromkeys(TRANSIENT_STATUSES, RequestFault.DOWN) | {
    401: RequestFault.UNAUTHORIZED,
    403: RequestFault.FORBIDDEN,
    405: RequestFault.ADDRESS,
    429: RequestFault.BUSY,
}
BAD_REQUEST: Final = 400
NOT_FOUND: Final = 404
# First HTTP status of redirects, and of errors.
FIRST_REDIRECT: Final = 300
FIRST_ERROR: Final = 400
# Text of the SDK for a response without a text.
_SDK_PLACEHOLDER: Final = "Server returned an error response"

# Codes of errors with which servers refuse an HTTP request itself. The SDK's own meaning of the first, a closed
# connection, does not occur with a status.
_REFUSAL_CODES: Final = frozenset({CONNECTION_CLOSED, INVALID_REQUEST})

# All other codes are defined by the server, and do not show whether the call was executed.
FAULT_BY_CODE: Final[dict[int, RequestFault]] = {
    CONNECTION_CLOSED: RequestFault.DOWN,  # an answer of the server; what the SDK makes up is known by its texts
    REQUEST_TIMEOUT: RequestFault.DOWN,  # as above
    PARSE_ERROR: RequestFault.MALFORMED,
    INVALID_REQUEST: RequestFault.REQUEST,
    METHOD_NOT_FOUND: RequestFault.UNKNOWN,
    INVALID_PARAMS: RequestFault.ARGUMENTS,
    INTERNAL_ERROR: RequestFault.INTERNAL,
}

# Beginnings of the SDK's texts for faults without a code of their own.
FAULT_BY_MESSAGE: Final[dict[str, RequestFault]] = {
    "SSE stream failed: Server-sent event exceeded": RequestFault.TOO_LONG,
    "SSE stream failed": RequestFault.LOST,
    "SSE stream ended": RequestFault.LOST,
    "Connection closed": RequestFault.LOST,
    "Request 'tools/call' timed out": RequestFault.LATE,
    "Unexpected content type": RequestFault.MALFORMED,
    "server answered a request with 202 Accepted": RequestFault.MALFORMED,
}

_NEVER_SENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class RequestError(MCPError):
    """Error of the SDK for a failed request, with its fault.

    Attributes:
        fault: Kind of failure.
        detail: Description of the error, about `MAX_DETAIL_CHARS` characters at most.
        retry_after_s: Seconds that the server asked to wait, or None.
        login: Error of a request that needs a person's login first, or None.
    """

    login: LoginRequiredError | None = None

    def __init__(self, error: MCPError, fault: RequestFault, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(error.code, error.message, error.data)
        self.fault = fault
        self.detail = detail
        self.retry_after_s = retry_after_s

    @property
    def is_passing(self) -> bool:
        """Whether the fault concerns the server's health, and not this request."""
        return FAULT_RULES[self.fault].disposition in {
            Disposition.REFUSED,
            Disposition.PASSING,
            Disposition.UNKNOWN,
        }


class TooManyRequestsError(RefusedError):
    """The server has too many requests; immediate attempts would add to them."""

    status_code = 429
    """HTTP status; the queue reads it by this name, as on errors of HTTP libraries."""


def mark_accepted() -> None:
    """Record that the server has accepted the current call: a later refusal does not mean that nothing was run."""
    WIRE_STATUS.get(WireStatus()).was_accepted = True


def classify_error(error: MCPError, wire_status: WireStatus, end_reason: str | None = None) -> RequestError:
    """Classify the failure of a request.

    Args:
        error: The error of the SDK.
        wire_status: State of the request on the wire.
        end_reason: Reason why the connection ended. None: it is open.
    """
    if isinstance(error, RequestError):
        return error
    failed = _classify(error, wire_status, end_reason)
    if wire_status.was_accepted and failed.fault in NOT_EXECUTED:
        failed.fault = RequestFault.LOST if failed.is_passing else RequestFault.OTHER
    return failed


def _classify(error: MCPError, wire_status: WireStatus, end_reason: str | None) -> RequestError:
    if wire_status.error is not None:
        failed = RequestError(
            error,
            _classify_transport_error(wire_status.error),
            describe_error(wire_status.error),
            wire_status.retry_after_s,
        )
        failed.login = wire_status.error if isinstance(wire_status.error, LoginRequiredError) else None
        return failed
    # The text of a parse error goes on with the details of pydantic.
    said = shorten(error.message.partition(":")[0] if error.code == PARSE_ERROR else error.message)
    if wire_status.status == NOT_FOUND and error.code != METHOD_NOT_FOUND:
        return RequestError(error, RequestFault.SESSION, said)
    if wire_status.status == BAD_REQUEST and (fault := _classify_bad_request(error, wire_status)) is not None:
        return RequestError(error, fault, _format_status(BAD_REQUEST, said))
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


def _classify_bad_request(error: MCPError, wire_status: WireStatus) -> RequestFault | None:
    """Return the fault of a request that was refused with HTTP 400, or None if the code of the error is more specific.

    The specification has 404 for a session that the server does not know. Many servers answer 400, with an error of
    their own or none, among them those that follow the examples of the official SDKs.
    """
    has_placeholder = error.message == _SDK_PLACEHOLDER
    if not has_placeholder and error.code not in _REFUSAL_CODES:
        return None
    if wire_status.has_session and (has_placeholder or "session" in error.message.lower()):
        return RequestFault.SESSION
    return RequestFault.REQUEST


def build_status_error(status: int) -> MCPError:
    """Build the error that the SDK would raise for an HTTP status."""
    return MCPError(METHOD_NOT_FOUND, _format_status(status, _SDK_PLACEHOLDER))


def _format_status(status: int, detail: str) -> str:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    text = f"HTTP {status} {phrase}".strip()
    return text if detail in {_SDK_PLACEHOLDER, text} else f"{text}: {detail}"


def _classify_transport_error(error: Exception) -> RequestFault:
    if isinstance(error, MessageTooLongError):
        return RequestFault.TOO_LONG
    if isinstance(error, LoginRequiredError):
        return RequestFault.UNAUTHORIZED
    if isinstance(error, AgentError):
        is_passing = isinstance(error, MCPServerError) and error.is_passing
        return RequestFault.UNREACHABLE if is_passing else RequestFault.FORBIDDEN
    if isinstance(error, _NEVER_SENT):
        return RequestFault.UNREACHABLE
    # Any other error comes from the `auth` of a user.
    return RequestFault.LOST if isinstance(error, httpx2.HTTPError) else RequestFault.UNAUTHORIZED


def resolve_failure(error: Exception, server: str, asked: str, *, is_sent: bool = True) -> ToolReturn:
    """Return the result of a failed call, or raise an error that has it retried.

    Args:
        error: The error that `ServerConnection.request` raised.
        server: The server's name.
        asked: The tool's name on the server.
        is_sent: Whether the call was sent. False: the tools could not be listed before it.

    Raises:
        RefusedError: when nothing was executed, and a retry may succeed.
        OutcomeUnknownError: when the call was sent, and the connection was lost or no answer came in time.
        TransientError: when the server has trouble, and may have executed the call.
        ModelRetry: when other arguments may succeed.
        Exception: the error itself, when it does not come from a request.
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
            error, row, f"the MCP server {server!r} was reconnected, but did not list its tools: {said}"
        )
    match row.disposition:
        case Disposition.REFUSED:
            refused = TooManyRequestsError if fault is RequestFault.BUSY else RefusedError
            raise refused(text, getattr(error, "retry_after_s", None)) from error
        case Disposition.PASSING:
            raise TransientError(text, getattr(error, "retry_after_s", None)) from error
        case Disposition.UNKNOWN:
            raise OutcomeUnknownError(text) from error
        case Disposition.HINT:
            raise ModelRetry(text) from error
        case Disposition.FAILED:
            return _build_failed_result(text, row.error_type)


def _resolve_listing_failure(error: Exception, rule: FaultRule, text: str) -> ToolReturn:
    if rule.disposition in {Disposition.REFUSED, Disposition.PASSING, Disposition.UNKNOWN}:
        raise RefusedError(text, getattr(error, "retry_after_s", None)) from error
    return _build_failed_result(f"{text}. Nothing was run: use another tool, or tell the user.", rule.error_type)


def describe_request_error(error: Exception) -> str:
    """Describe an error that `ServerConnection.request` raised, other than an `MCPServerError`."""
    return _identify(error)[1]


def _identify(error: Exception) -> tuple[RequestFault, str]:
    match error:
        case RequestError():
            return error.fault, error.detail
        case MCPError():  # raised by the operation itself
            return FAULT_BY_CODE.get(error.code, RequestFault.OTHER), shorten(error.message)
        case ValidationError():
            return RequestFault.MALFORMED, shorten(_describe_validation_error(error))
        case TimeoutError():
            return RequestFault.LATE, describe_error(error)
        case RuntimeError():  # of the SDK: structured content does not match the server's schema
            return RequestFault.MALFORMED, shorten(str(error))
        case _:
            raise error


def _describe_validation_error(error: ValidationError) -> str:
    """Return the invalid fields of an answer. The reasons are left out: pydantic gives one for each possible type."""
    errors = error.errors(include_url=False, include_input=False)
    places = [*dict.fromkeys(".".join(map(str, each["loc"][:2])) for each in errors)]
    more = f" and {len(places) - MAX_LOCATIONS} more" if len(places) > MAX_LOCATIONS else ""
    return f"invalid fields: {', '.join(places[:MAX_LOCATIONS])}{more}"


def _build_failed_result(text: str, error_type: ErrorType, *, retryable: bool = False) -> ToolReturn:
    return ToolReturn(
        outcome=Outcome.FAILED, content=replace_surrogates(text), error_type=error_type, retryable=retryable
    )


def describe_error(error: BaseException) -> str:
    """Return the text of an error; for a group, the texts of its members."""
    if isinstance(error, BaseExceptionGroup):
        return shorten("; ".join(dict.fromkeys(describe_error(each) for each in error.exceptions)))
    text = str(error)
    if isinstance(error, MessageTooLongError | AgentError):
        return shorten(text)
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def shorten(text: str) -> str:
    """Return the beginning of a text on one line, without a final full stop."""
    line = " ".join(text[: 4 * MAX_DETAIL_CHARS].split())
    return line.rstrip(".") if len(line) <= MAX_DETAIL_CHARS else f"{line[:MAX_DETAIL_CHARS]}..."
