"""Limits of a run, finite and each with the reason for its number, and the closed set of stop reasons."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import attrs

from agentfsm.core.header import Header
from agentfsm.core.validation import COUNT, COUNT_OR_ZERO, POSITIVE, SHARE
from agentfsm.core.value import Value


class StopReason(StrEnum):
    """Why a run ended. Only COMPLETED goes with DONE."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"  # noqa: S105  a budget, not a secret
    COST_BUDGET = "cost_budget"
    TOOL_BUDGET = "tool_budget"
    TIMEOUT = "timeout"
    TOO_MANY_ERRORS = "too_many_errors"
    LOOP_DETECTED = "loop_detected"
    MODEL_ERROR = "model_error"
    CANCELLED = "cancelled"
    GUARD = "guard"
    PARKED = "parked"
    """Only in journals of format 3 and older: today such a run is paused."""


# The reasons that a larger limit would have prevented.
BUDGET_REASONS = frozenset(
    {
        StopReason.MAX_TURNS,
        StopReason.TOKEN_BUDGET,
        StopReason.COST_BUDGET,
        StopReason.TOOL_BUDGET,
        StopReason.TIMEOUT,
    },
)


# Attempts at the model after the first, in a run of its own and in one that works for another.
MODEL_RETRIES: Final = 3
SUBAGENT_MODEL_RETRIES: Final = 1
# Of the time and tokens of a run, the most that is kept back for its last answer: 4 of 5 parts are for its work.
LAST_ANSWER_SHARE: Final = 0.2
# Seconds for it at most: the reply of a large model takes 3 to 8 (document C, 10.2), and a slow one three times that.
LAST_ANSWER_S: Final = 30.0


_ABOVE_ZERO: Final = attrs.evolve(POSITIVE, wanted=f"{POSITIVE.wanted}; there is no 'unlimited'")


@attrs.frozen(kw_only=True)
class Limits(Value):
    """What one run may use. Every default is finite."""

    turns: int = attrs.field(default=20, validator=COUNT)
    """Model replies. Real tasks take 10 to 30; a run that needs more is usually lost."""

    tokens: int = attrs.field(default=200_000, validator=COUNT)
    """Input plus output of every call: ten turns over a well-filled history, below a dollar with most models."""

    seconds: float = attrs.field(default=300.0, validator=_ABOVE_ZERO)
    """Active time: a wait for a person does not count, one for a limit of a tool, a tag or a model does. The longest
    that somebody keeps watching.
    """

    usd: float | None = attrs.field(default=None, validator=_ABOVE_ZERO.or_none())
    """US dollars. None by default: only you know what an answer is worth."""

    tool_calls: int = attrs.field(default=200, validator=COUNT)
    """Calls of tools, those of the agents below included: ten in each of 20 turns, where most runs make one or two."""

    warn_at: float = attrs.field(default=0.8, validator=SHARE)
    """The share of turns, tokens, money, seconds and tool calls from which on a run says that it nears the limit, above
    0 and up to 1: what is left then does for an orderly end.
    """

    errors: int = attrs.field(default=3, validator=COUNT)
    """Error turns in a row. One is chance, two may be, three are the system."""

    tool_timeout_s: float = attrs.field(default=30.0, validator=_ABOVE_ZERO)
    """Seconds for a call whose tool sets none of its own: a slow HTTP request, not a hung one."""

    model_timeout_s: float = attrs.field(default=60.0, validator=_ABOVE_ZERO)
    """Seconds that a model may be silent: a working one is not, and a stream that goes on may take longer."""

    model_retries: int | None = attrs.field(default=None, validator=COUNT_OR_ZERO.or_none())
    """Attempts after the first. None: 3, which with the waits below span the usual overload; and 1 in a run that works
    for another, which then ends at once (Source: document C, 9.3), since its caller can go on without it.
    """

    retry_wait_s: float = attrs.field(default=1.0, validator=_ABOVE_ZERO)
    """Seconds before the first retry, doubled each time, plus up to half of it by chance, so that a crowd spreads out.
    """

    retry_wait_max_s: float = attrs.field(default=60.0, validator=_ABOVE_ZERO)
    """The longest wait, also where the server asks for a longer one."""

    parallel: int = attrs.field(default=20, validator=COUNT)
    """Tool calls of one run in flight at once; 1 runs them one by one."""

    retries_per_tool: int = attrs.field(default=2, validator=COUNT_OR_ZERO)
    """Attempts after the first at calls of one tool, for passing faults: a service that fails three times is down."""

    retries_per_run: int = attrs.field(default=3, validator=COUNT_OR_ZERO)
    """The same of all tools together."""

    depth: int = attrs.field(default=3, validator=COUNT_OR_ZERO)
    """Sub-agents below one another: a coordinator, its specialists, and their helpers."""

    answer_retries: int = attrs.field(default=2, validator=COUNT_OR_ZERO)
    """Corrections asked for, after an answer that does not fit its type or is refused by a validator: a model that errs
    three times has not understood.
    """

    crashes: int = attrs.field(default=5, validator=COUNT)
    """Workers that may die in one turn of a run while they drive it and no other; then the run is paused. One or two
    are chance or a roll-out, five are the run.
    """

    def max_model_retries(self, header: Header) -> int:
        """Return how many attempts at the model may follow the first in a turn of the run with this header."""
        if self.model_retries is not None:
            return self.model_retries
        return SUBAGENT_MODEL_RETRIES if self.fails_fast(header) else MODEL_RETRIES

    def fails_fast(self, header: Header) -> bool:
        """Whether the run ends once its model has failed: it works for another, and `model_retries` is not set."""
        return self.model_retries is None and header.parent is not None

    @property
    def last_answer_s(self) -> float:
        """Seconds that are kept back for the last answer, where the agent asks for one."""
        return min(LAST_ANSWER_S, LAST_ANSWER_SHARE * self.seconds)
