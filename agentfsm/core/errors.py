"""The error tree: one root, branches by what the caller should do.

AgentError
    MisuseError              a bug in the calling code: mend it, never retry
        IllegalTransitionError   the event does not fit the state
        DuplicateToolError       two tools of one name
        ClosedError              used after it was closed
    RunError                 the run did not end in DONE; carries the run (defined in `run`)
    StepError                the world failed inside a step; the engine turns it into an event
        ModelError               the model could not be asked, or its answer not be used
            ModelUnavailableError    overload, outage, time-out: asking again may help
            ModelReplyError          the reply cannot be used (not JSON, empty, cut short)
            ContextTooLongError      the request is larger than the model's window
        LimitError               a limit was reached inside a step
    StoreError               the journal could not be read or written
        RunNotFoundError         the store holds no run of that id
        ConflictError            somebody else drives, decided or moved on
            LeaseHeldError           another worker drives the run right now
        LeaseLostError           this worker no longer owns the run
        CorruptError             a record cannot be read
        TooNewError              a record was written by a newer version
    ToolError                what a tool says to the model; never leaves a run
        ModelRetry               raised by a tool: "not like this, try so"
        TransientError           raised by a tool: it failed for a passing reason
            RefusedError             the same, and nothing was done
        ArgumentsError           the arguments do not fit the tool's schema

Cancellation belongs to none of these: it stays the event loop's own exception.
"""

from __future__ import annotations

import traceback

from agentfsm.core.usage import Usage


class AgentError(Exception):
    """The root of all errors of this package."""


class MisuseError(AgentError):
    """The calling code is wrong; it is never retried and never absorbed."""


class IllegalTransitionError(MisuseError):
    """An event was applied to a state that does not take it; the run is untouched."""

    def __init__(self, state: str, event: str, takes: tuple[str, ...]) -> None:
        super().__init__(state, event, takes)
        self.state = state
        self.event = event
        self.takes = takes

    def __str__(self) -> str:
        accepted = f"it takes {', '.join(self.takes)}" if self.takes else "it is final and takes no event"
        return f"{self.event} does not fit the state {self.state.upper()}: {accepted}."


class DuplicateToolError(MisuseError):
    """Two tools of one agent share a name."""


class ClosedError(MisuseError):
    """A store, model or agent was used after it was closed."""


class StepError(AgentError):
    """The world failed inside a step; the engine records it as an event."""


class ModelError(StepError):
    """The model could not be asked, or refused the request for good (400, 401, 403, 404).

    Attributes:
        usage: What was paid all the same, for replies that could not be used; None where nothing was.
    """

    usage: Usage | None = None


class ModelUnavailableError(ModelError):
    """Overload, outage or time-out: asking again may help.

    Attributes:
        retry_after_s: Seconds that the server asked to wait, or None.
        status: Of HTTP, where the server answered with one: 429 for a rate limit, 503 or 529 for overload; else None.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, *, status: int | None = None) -> None:
        self.retry_after_s = retry_after_s
        self.status = status
        super().__init__(message)


class ModelReplyError(ModelError):
    """The model answered, but the reply cannot be used: no choice, not JSON, cut short. Asking again may help."""

    def __init__(self, message: str, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.usage = usage


class ContextTooLongError(ModelError):
    """The request is larger than the model's context window."""


class LimitError(StepError):
    """A limit was reached inside a step.

    Attributes:
        reason: The value of `StopReason` that the run ends with.
        usage: What was paid before in the same step, for replies that could not be used; None where nothing was.
    """

    usage: Usage | None = None

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


class StoreError(AgentError):
    """The journal could not be read or written; nothing that was acknowledged is lost."""


class RunNotFoundError(StoreError):
    """The store holds no run of that id."""


class ConflictError(StoreError):
    """Somebody else drives the run, took the decision, or moved it on; load it again."""


class LeaseHeldError(ConflictError):
    """Another worker drives the run right now; wait for it, or let `resume` wait."""


class LeaseLostError(StoreError):
    """This worker no longer owns the run: it stops before its next effect."""


class CorruptError(StoreError):
    """A record of the journal cannot be read."""


class TooNewError(StoreError):
    """A record was written by a newer version of agentfsm; upgrade to read it."""


class ToolError(AgentError):
    """What a tool says to the model; it becomes a result and never leaves a run."""


class ModelRetry(ToolError):  # noqa: N818  the name is part of the contract
    """Raise it inside a tool to tell the model what to do instead, for example `ModelRetry("use an ISO date")`."""


class TransientError(ToolError):
    """Raise it inside a tool that failed for a passing reason: a call that may be repeated is.

    Attributes:
        retry_after_s: Seconds to wait before that, or None.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefusedError(TransientError):
    """Raise it inside a tool that was refused before it did anything: any tool may then be called again."""


class ArgumentsError(ToolError):
    """The arguments do not fit the tool's schema; the text tells the model what does."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group: who calls something handles one error, whether it has tasks inside or not."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def ensure_printable(error: BaseException) -> BaseException:
    """Return the error, or what stands for it where its traceback cannot be written: a handler would raise at it."""
    try:
        traceback.format_exception(error)
    except BaseException:  # noqa: BLE001  an attribute of it, or of what it comes from, can raise anything
        told = f"{type(error).__name__}, which cannot be written"
        return RuntimeError(told).with_traceback(error.__traceback__)
    return error
