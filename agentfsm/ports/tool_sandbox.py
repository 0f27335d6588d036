"""The port of sandboxes, in which the functions of tools run apart from the process of the agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import attrs

from agentfsm.core.value import Value


class SandboxEnd(StrEnum):
    """End of a call in a sandbox."""

    DONE = "done"
    """The function returned a value."""

    FAILED = "failed"
    """The function raised an error, or a limit of the sandbox ended its process."""

    TIMED_OUT = "timed_out"
    """The time was up, and the processes of the call were ended."""

    RETRY = "retry"
    """The function raised `ModelRetry`: the model should call it differently."""

    LOST = "lost"
    """The process ended without a result, and not by a limit of the sandbox: the call may have had its effect."""

    NOT_STARTED = "not_started"
    """The sandbox could not be set up, and nothing was run."""


@attrs.frozen(kw_only=True)
class SandboxOutcome(Value):
    """Outcome of a call in a sandbox."""

    end: SandboxEnd
    """Kind of the end."""

    level: str
    """Isolation that was reached, such as "bubblewrap"; empty if nothing was run."""

    value: Any = None
    """Return value of the function, as JSON values."""

    error: str = ""
    """Reason for another end than DONE, for the model."""

    trace: str = ""
    """Traceback of the function, or the output of its process, for people."""


class ToolSandbox(Protocol):
    """Place in which the function of a tool runs: `agentfsm.sandbox.Sandbox`, or your own."""

    @property
    def seconds(self) -> float:
        """Seconds that a call may take."""
        ...

    def check_function(self, function: Callable[..., Any]) -> None:
        """Check that the function can run in the sandbox; called when the tool is made.

        Raises:
            MisuseError: if it cannot.
        """
        ...

    async def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> SandboxOutcome:
        """Call the function. When this returns, raises or is cancelled, nothing of the call is running any more."""
        ...
