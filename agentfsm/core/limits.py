"""When a run has to stop: finite limits, with the reason for each number, and the closed set of stop reasons."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.errors import MisuseError

if TYPE_CHECKING:
    from agentfsm.core.run import Run


class StopReason(StrEnum):
    """Why a run ended. Only COMPLETED goes with DONE."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"  # noqa: S105  a budget, not a secret
    COST_BUDGET = "cost_budget"
    TIMEOUT = "timeout"
    TOO_MANY_ERRORS = "too_many_errors"
    LOOP_DETECTED = "loop_detected"
    MODEL_ERROR = "model_error"
    CANCELLED = "cancelled"
    GUARD = "guard"
    PARKED = "parked"


OUT_OF_BUDGET = frozenset(
    {StopReason.MAX_TURNS, StopReason.TOKEN_BUDGET, StopReason.COST_BUDGET, StopReason.TIMEOUT},
)
# The reasons that a larger limit would have prevented.


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive(_limits: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not _is_number(value) or not 0 < value < float("inf"):
        raise MisuseError(f"Limits({attribute.name}={value!r}): give a finite number above 0; there is no 'unlimited'")


def _not_negative(_limits: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not _is_number(value) or not 0 <= value < float("inf"):
        raise MisuseError(f"Limits({attribute.name}={value!r}): give a finite number, 0 or more")


@attrs.frozen(kw_only=True)
class Limits:
    """What one run may use. Every default is finite."""

    turns: int = attrs.field(default=20, validator=_positive)
    # Model replies. Real tasks take 10 to 30; a run that needs more is usually lost.
    tokens: int = attrs.field(default=200_000, validator=_positive)
    # Input plus output of every call: ten turns over a well-filled history, below a dollar with most models.
    seconds: float = attrs.field(default=300.0, validator=_positive)
    # Active time: waiting for a person does not count. The longest that somebody keeps watching.
    usd: float | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    # US dollars. None by default: only you know what an answer is worth.
    errors: int = attrs.field(default=3, validator=_positive)
    # Error turns in a row. One is chance, two may be, three are the system.
    tool_timeout_s: float = attrs.field(default=30.0, validator=_positive)
    # Seconds for a call whose tool sets none of its own: a slow HTTP request, not a hung one.
    model_timeout_s: float = attrs.field(default=60.0, validator=_positive)
    # Seconds that a model may be silent: a working one is not, and a stream that goes on may take longer.
    model_retries: int = attrs.field(default=3, validator=_not_negative)
    # Attempts after the first: with the waits below they span the usual overload.
    retry_wait_s: float = attrs.field(default=1.0, validator=_positive)
    # Seconds before the first retry, doubled each time, plus up to half of it by chance, so that a crowd spreads out.
    retry_wait_max_s: float = attrs.field(default=60.0, validator=_positive)
    # The longest wait, also where the server asks for a longer one.
    parallel: int = attrs.field(default=20, validator=_positive)
    # Tool calls of one run in flight at once; 1 runs them one by one.
    retries_per_tool: int = attrs.field(default=2, validator=_not_negative)
    # Attempts after the first at calls of one tool, for passing faults: a service that fails three times is down.
    retries_per_run: int = attrs.field(default=3, validator=_not_negative)
    # The same of all tools together.
    depth: int = attrs.field(default=3, validator=_not_negative)
    # Sub-agents below one another: a coordinator, its specialists, and their helpers.
    answer_retries: int = attrs.field(default=2, validator=_not_negative)
    # Corrections asked for, after an answer that does not fit its type or is refused by a validator: a model that errs
    # three times has not understood.
    crashes: int = attrs.field(default=5, validator=_positive)
    # Workers that may die over one turn of a run: one or two are chance or a roll-out, five are the run.

    def spent(self, run: Run) -> tuple[StopReason, str] | None:
        """Say which limit the run has reached, with the number reached, or None."""
        if run.consecutive_errors >= self.errors:
            last = f"; the last: {run.errors[-1].message[:300]}" if run.errors else ""
            return StopReason.TOO_MANY_ERRORS, f"{run.consecutive_errors} error turns in a row{last}"
        if run.turn >= self.turns:
            return StopReason.MAX_TURNS, f"{run.turn} of {self.turns} turns used"
        if run.usage.tokens >= self.tokens:
            return StopReason.TOKEN_BUDGET, f"{run.usage.tokens:,} of {self.tokens:,} tokens used"
        if self.usd is not None and (run.usage.cost_usd or 0.0) >= self.usd:
            return StopReason.COST_BUDGET, f"{run.usage.cost_usd:.4g} of {self.usd:.4g} US dollars used"
        if run.duration_s >= self.seconds:
            return StopReason.TIMEOUT, f"{run.duration_s:.1f} of {self.seconds:.1f} seconds used"
        return None
