"""Errors as answers over HTTP: one table of statuses, for the gateway and for applications with routes of their own."""

from __future__ import annotations

import logging
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import (
    AgentError,
    ClosedError,
    ConflictError,
    CorruptError,
    FourEyesError,
    MisuseError,
    RunNotFoundError,
    StoreError,
    TooNewError,
)
from agentfsm.core.run import RunError
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_log = logging.getLogger("agentfsm.serve")

# Seconds after which a client should repeat a request that met a store that was down, or a full queue.
STORE_RETRY_S: Final = 2
QUEUE_RETRY_S: Final = 10.0
# Text for a client whose request failed for a reason that is not the client's.
SERVER_FAILED: Final = "the server failed; its log has the details"
UNREADABLE: Final = "a journal is damaged, or of a newer agentfsm, and cannot be read; the log has the details"


class ForbiddenError(AgentError):
    """The caller may see the run, but not do this with it."""


class LimitExceededError(AgentError):
    """The caller has sent too many requests, has too many open ones, used too many tokens, or has too many runs.

    Attributes:
        retry_after_s: Seconds after which to try again.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(AgentError):
    """Too many runs wait for a worker."""

    retry_after_s = QUEUE_RETRY_S


# Status and code of each kind of error, the most specific first.
_STATUSES: Final = (
    (RunNotFoundError, 404, "not_found"),
    (ForbiddenError, 403, "forbidden"),
    (FourEyesError, 403, "forbidden"),
    (ConflictError, 409, "conflict"),
    (RunError, 409, "no_output"),
    (LimitExceededError, 429, "limit_exceeded"),
    (OverloadedError, 503, "overloaded"),
    (CorruptError, 500, "unreadable"),
    (TooNewError, 500, "unreadable"),
    (ClosedError, 503, "unavailable"),
    (StoreError, 503, "unavailable"),
    (MisuseError, 400, "invalid"),
    (AgentError, 500, "error"),
)


@attrs.frozen(kw_only=True)
class ErrorAnswer(Value):
    """Answer to a request that an error has ended."""

    status: int
    """Status of the response, 400 to 503."""

    code: str
    """Word for programs, such as "conflict"."""

    message: str
    """Text for people. It names neither hosts nor files."""

    headers: dict[str, str] = attrs.field(factory=dict)
    """`retry-after`, in seconds, where it helps to try again."""

    def to_dict(self) -> dict[str, Any]:
        """Return the body of the response."""
        return {"error": {"code": self.code, "message": self.message}}


def explain_error(error: AgentError) -> ErrorAnswer:
    """Return the answer to a request that an error has ended. An error that is not the client's fault is logged."""
    status, code = next((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
    if code == "error":
        _log.error("a request failed", exc_info=error)
        return ErrorAnswer(status=status, code=code, message=SERVER_FAILED)
    if code == "unreadable":  # to try again would not help
        _log.error("a request failed: %s", error)
        return ErrorAnswer(status=status, code=code, message=UNREADABLE)
    if code == "unavailable":  # the text may name hosts
        _log.warning("a request failed: %s", error)
        retry = {"retry-after": str(STORE_RETRY_S)}
        return ErrorAnswer(status=status, code=code, message="the store does not answer: try again", headers=retry)
    wait_s = error.retry_after_s if isinstance(error, LimitExceededError | OverloadedError) else None
    retry = {} if wait_s is None else {"retry-after": str(max(1, ceil(wait_s)))}
    return ErrorAnswer(status=status, code=code, message=str(error), headers=retry)


def add_error_handlers(app: Starlette) -> None:
    """Let an application answer the errors of agentfsm as the gateway does: 404, 409, 503 and so on.

    An error that a route raises becomes `{"error": {"code": ..., "message": ...}}` with the status of its class.

    Args:
        app: The FastAPI or Starlette application.
    """
    app.add_exception_handler(AgentError, _answer_error)


async def _answer_error(_request: Request, error: Exception) -> Response:
    from starlette.responses import JSONResponse  # noqa: PLC0415

    assert isinstance(error, AgentError)  # noqa: S101  Starlette's types allow any exception
    answer = explain_error(error)
    return JSONResponse(answer.to_dict(), answer.status, answer.headers)
