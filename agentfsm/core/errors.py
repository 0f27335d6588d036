"""Error hierarchy: one root, and one branch for each reaction that a caller should have.

AgentError
    MisuseError              a bug in the calling code: fix it, do not retry
        IllegalTransitionError   the event does not fit the state
        DuplicateToolError       two tools have the same name
        ClosedError              used after it was closed
        FourEyesError            a person may not decide on a call that he has shaped: another person has to
        IncompatibleProgramError this program cannot continue the run; nothing was changed
    RunError                 the run did not end in DONE; carries the run (defined in `run`)
    StepError                something outside failed inside a step; the engine turns it into an event
        ModelError               the request failed, or its reply cannot be used
            ModelUnavailableError    overload, outage, timeout: a retry may help
            ReasoningRefusedError    the reasoning of earlier replies was refused: the engine asks again without it
            ModelReplyError          the reply cannot be used (not JSON, empty, cut short)
            ContextTooLongError      the request is larger than the model's window
        LimitError               a limit was reached inside a step
    StoreError               the journal could not be read or written
        RunNotFoundError         the store has no run of that id
        ConflictError            another caller executes the run, or has decided or changed it
            LeaseHeldError           another worker executes the run right now
        LeaseLostError           this worker no longer owns the run
        CorruptError             a record cannot be read
        TooNewError              a record was written by a newer version
        PartlyDoneError          a deletion or write was done in part; the message says which
    ToolError                an error that the model reads; never leaves a run
        ModelRetry               raised by a tool: the model should call it differently
        TransientError           raised by a tool: it failed for a temporary reason
            RefusedError             the same, and the tool has had no effect
        OutcomeUnknownError      raised by a tool: its call broke off, and may have had its effect
        ArgumentsError           the arguments do not fit the tool's schema

Cancellation is not among them: it stays the exception of the event loop.
"""

from __future__ import annotations

import traceback
from typing import Literal, TypeAlias

from agentfsm.core.usage import TierChoice, Usage


class AgentError(Exception):
    """Base class of all errors of this package."""


class MisuseError(AgentError):
    """The calling code is wrong. The error is never retried and never suppressed.

    Attributes:
        usage: Usage of model replies that were billed before the mistake appeared; None if there were none or it is
            unknown.
    """

    usage: Usage | None = None
    """Usage of model replies that were billed before the mistake appeared; None if there were none or it is unknown."""


class IllegalTransitionError(MisuseError):
    """An event was applied to a run whose state does not accept it. The run is unchanged.

    Attributes:
        state: State of the run.
        event: Name of the event class.
        takes: Names of the event classes that the state accepts; empty for a final state.
    """

    def __init__(self, state: str, event: str, takes: tuple[str, ...]) -> None:
        super().__init__(state, event, takes)
        self.state = state
        self.event = event
        self.takes = takes

    def __str__(self) -> str:
        accepted = f"it takes {', '.join(self.takes)}" if self.takes else "it is final and takes no event"
        return f"{self.event} does not fit the state {self.state.upper()}: {accepted}."


class DuplicateToolError(MisuseError):
    """Two tools of one agent have the same name."""


class IncompatibleProgramError(MisuseError):
    """This program cannot continue a run that another version of it began. Nothing was changed.

    It lacks the tool of an open call, or is of another kind; also in a run below. The other program continues the run.
    """


class ClosedError(MisuseError):
    """A store, model, stream or agent was used after it was closed."""


class FourEyesError(MisuseError):
    """A person may not decide on a call that he has shaped: another person has to. Nothing was recorded."""


class StepError(AgentError):
    """Something outside of the package failed inside a step. The engine records it as an event."""


# Refusals of a request by a provider, as `ModelError.refusal` names them.
Refusal: TypeAlias = Literal["api_key", "permission", "not_found", "quota", "bad_request", "context_too_long"]


class ModelError(StepError):
    """The model request failed for good, for example with status 400, 401, 403 or 404.

    Args:
        message: The text.
        refusal: Reason for which the provider refused the request, for `Fallback(on=...)`; None if the failure is
            another one.

    Attributes:
        refusal: As given.
        usage: Usage of replies that could not be used but were billed; None if it is not known: it is then estimated if
            the request may have been billed.
        tier: Tier of a `Tiered` that failed, with which a retry begins; None from other models.
    """

    refusal: Refusal | None = None
    """Reason for which the provider refused the request; None if the failure is another one."""

    usage: Usage | None = None
    """Usage of replies that could not be used but were billed; None if it is not known: it is then estimated if the
    request may have been billed. `Usage()` says that nothing was billed.
    """

    tier: TierChoice | None = None
    """Tier of a `Tiered` that failed, with which a retry begins; None from other models. The usage of its `spent` is
    part of the usage of this error.
    """

    def __init__(self, message: str = "", *, refusal: Refusal | None = None) -> None:
        super().__init__(message)
        if refusal is not None:
            self.refusal = refusal


class ModelUnavailableError(ModelError):
    """The model is overloaded, down or did not reply in time. A retry may help.

    Attributes:
        retry_after_s: Seconds that the server asked to wait; None if it did not.
        status: HTTP status of the response, for example 429 for a rate limit, 503 or 529 for overload; None if there
            was no response.
        is_unreachable: Whether no connection to the server could be made.
    """

    def __init__(
        self,
        message: str,
        retry_after_s: float | None = None,
        *,
        status: int | None = None,
        is_unreachable: bool = False,
    ) -> None:
        self.retry_after_s = retry_after_s
        self.status = status
        self.is_unreachable = is_unreachable
        super().__init__(message)


class ReasoningRefusedError(ModelError):
    """The provider refused reasoning of earlier replies, which the request sent back. A retry leaves it out."""


class ModelReplyError(ModelError):
    """The model's reply cannot be used: it has no choice, is not JSON, or was cut short. A retry may help."""

    def __init__(self, message: str, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.usage = usage


class ContextTooLongError(ModelError):
    """The request is larger than the model's context window."""

    refusal: Refusal | None = "context_too_long"
    """Reason for which the provider refused the request."""


class LimitError(StepError):
    """A limit was reached inside a step.

    Attributes:
        reason: The value of `StopReason` that the run ends with.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


class StoreError(AgentError):
    """The journal could not be read or written. No acknowledged write is lost."""


class RunNotFoundError(StoreError):
    """The store has no run of that id."""


class ConflictError(StoreError):
    """Another caller executes the run, or has decided or changed it. Load the run again."""


class LeaseHeldError(ConflictError):
    """Another worker executes the run right now. Wait for it, or let `resume` wait."""


class LeaseLostError(StoreError):
    """This worker no longer owns the run. It stops before its next effect."""


class CorruptError(StoreError):
    """A record of the journal cannot be read."""


class TooNewError(StoreError):
    """A record was written by a newer version of agentfsm. Upgrade to read it."""


class PartlyDoneError(StoreError):
    """A deletion or write was done in part. The message says which part was done, and how to do the rest.

    Any other `StoreError` of a deletion or write means that nothing was done, unless the connection was lost before the
    store could answer. The cause of this error (`__cause__`) is the error that stopped the operation.
    """


class ToolError(AgentError):
    """An error of a tool that the model reads. It becomes a result and never leaves a run."""


class ModelRetry(ToolError):  # noqa: N818  the name is part of the contract
    """Raise this in a tool to make the model correct its call, for example `ModelRetry("use an ISO date")`."""


class TransientError(ToolError):
    """Raise this in a tool that failed for a temporary reason. The call is retried if the tool may be repeated.

    Attributes:
        retry_after_s: Seconds to wait before the retry; None for the default.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefusedError(TransientError):
    """Raise this in a tool whose request was refused before it had an effect, so that any tool may be retried."""


class OutcomeUnknownError(ToolError):
    """Raise this in a tool whose call broke off, so that it is unknown whether it had its effect.

    The call follows the `on_unknown` of its tool, as one whose worker died. Sandboxes and MCP servers raise it when a
    process or connection is lost in the middle of a call.
    """


class ArgumentsError(ToolError):
    """The arguments do not fit the tool's schema. The message says which arguments do."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, so that callers handle one error whether or not tasks were involved."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def ensure_printable(error: BaseException) -> BaseException:
    """Return the error, or a substitute if its traceback cannot be formatted, which would make a log handler raise."""
    try:
        traceback.format_exception(error)
    except BaseException:  # noqa: BLE001  an attribute of the error or its cause can raise anything
        text = f"{type(error).__name__}, whose traceback cannot be formatted"
        return RuntimeError(text).with_traceback(error.__traceback__)
    return error
