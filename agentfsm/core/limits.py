"""Limits of a run, spending limits over all runs, and the closed set of stop reasons."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import Header
from agentfsm.core.messages import replace_surrogates
from agentfsm.core.validation import (
    COUNT,
    COUNT_OR_ZERO,
    POSITIVE,
    SHARE,
    STRING,
    require_choice,
    require_whole_number,
    suggest_fields,
)
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo


class StopReason(StrEnum):
    """Reason why a run ended. COMPLETED belongs to the state DONE, all others to ERROR."""

    COMPLETED = "completed"
    """The model answered, and the answer was accepted."""

    MAX_TURNS = "max_turns"
    """The run used `Limits.turns`."""

    TOKEN_BUDGET = "token_budget"  # noqa: S105  a budget, not a secret
    """The run used `Limits.tokens`."""

    COST_BUDGET = "cost_budget"
    """The run used `Limits.usd`, or its next request would exceed a spending limit (`Agent.spend`)."""

    TOOL_BUDGET = "tool_budget"
    """The run used `Limits.tool_calls`."""

    TIMEOUT = "timeout"
    """The run used `Limits.seconds` of active time."""

    TOO_MANY_ERRORS = "too_many_errors"
    """`Limits.errors` turns in a row failed, or more than `Limits.answer_retries` answers were refused."""

    LOOP_DETECTED = "loop_detected"
    """The model repeated itself after every warning."""

    MODEL_ERROR = "model_error"
    """The model refused the request permanently, or its answer was cut off."""

    CANCELLED = "cancelled"
    """A caller cancelled the run."""

    GUARD = "guard"
    """A guard ended the run, because it has read data that it must not read."""

    STOP_CONDITION = "stop_condition"
    """A function of `Agent.stop_when` said so, without an answer."""

    STEP_FAILED = "step_failed"
    """A step of a flow failed."""

    PARKED = "parked"
    """Only in journals of format 3 and older. Newer versions pause the run instead."""


# Reasons that a larger limit would have prevented.
BUDGET_REASONS = frozenset(
    {
        StopReason.MAX_TURNS,
        StopReason.TOKEN_BUDGET,
        StopReason.COST_BUDGET,
        StopReason.TOOL_BUDGET,
        StopReason.TIMEOUT,
    },
)


# Retries of a model request, in a top-level run and in a run that works for another run.
MODEL_RETRIES: Final = 3
SUBAGENT_MODEL_RETRIES: Final = 1
# Largest share of a run's time and tokens that is reserved for the last answer. The work keeps the other 80 %.
LAST_ANSWER_SHARE: Final = 0.2
# Largest reserve for the last answer, seconds: a large model replies in 3 to 8 (document C, 10.2), a slow one in
# three times that.
LAST_ANSWER_S: Final = 30.0


_TWO_OR_MORE: Final = require_whole_number(2)
_ABOVE_ZERO: Final = attrs.evolve(POSITIVE, wanted=f"{POSITIVE.wanted}; there is no 'unlimited'")


@attrs.frozen(kw_only=True)
class Limits(Value):
    """Resources that one run may use. Every default is finite.

    Args:
        turns: Number of turns, 1 or more.
        tokens: Input plus output tokens of all model requests, 1 or more.
        seconds: Seconds of active time, above 0.
        usd: Cost in US dollars, above 0.
        tool_calls: Number of tool calls, those of sub-agents included, 1 or more.
        warn_at: Share of a limit (turns, tokens, cost, seconds or tool calls) at which the run warns that it nears the
            limit, above 0 and up to 1.
        errors: Number of consecutive error turns that ends the run, 1 or more.
        tool_timeout_s: Seconds for a call of a tool that sets no timeout of its own, above 0.
        model_timeout_s: Seconds that the model may stay silent, above 0.
        model_retries: Number of retries of a model request, 0 or more.
        retry_wait_s: Seconds before the first retry of a model request, above 0.
        retry_wait_max_s: Longest wait before a retry of a model request, seconds above 0, even if the server asks for
            more.
        parallel: Number of tool calls of one run in flight at once, 1 or more.
        retries_per_tool: Number of retries after transient errors, for all calls of one tool, 0 or more.
        retries_per_run: Number of retries after transient errors, for all tools of a run together, 0 or more.
        depth: Number of levels of sub-agents below the run, 0 or more.
        answer_retries: Number of corrections that the model is asked for when its answer does not fit the output type
            or a validator refuses it, 0 or more.
        crashes: Number of workers that may die in one turn of the run while they execute only this run, 1 or more.
        loop_turns: Number of equal turns that makes a loop, 2 or more.
        loop_window: Number of newest turns among which equal calls are counted; never fewer than `loop_turns`.

    Raises:
        MisuseError: when a value is out of its range or of a wrong type.
    """

    turns: int = attrs.field(default=20, validator=COUNT)
    """Number of turns, 1 or more. A turn is a model reply, or a request that failed in spite of retries. Default 20:
    real tasks take 10 to 30, and a run that needs more is usually lost.
    """

    tokens: int = attrs.field(default=200_000, validator=COUNT)
    """Input plus output tokens of all model requests, 1 or more. Default 200,000: ten turns over a long history, which
    costs less than a dollar with most models.
    """

    seconds: float = attrs.field(default=300.0, validator=_ABOVE_ZERO)
    """Seconds of active time, above 0. Waiting for a person does not count; waiting for a limiter of a tool, a tag or
    a model does. Default 300: few users watch a run for longer.
    """

    usd: float | None = attrs.field(default=None, validator=_ABOVE_ZERO.or_none())
    """Cost in US dollars, above 0. None, the default, sets no limit, because the value of an answer is not known here.
    """

    tool_calls: int = attrs.field(default=200, validator=COUNT)
    """Number of tool calls, those of sub-agents included, 1 or more. Default 200: ten in each of 20 turns; most runs
    make one or two.
    """

    warn_at: float = attrs.field(default=0.8, validator=SHARE)
    """Share of a limit (turns, tokens, cost, seconds or tool calls) at which the run warns that it nears the limit,
    above 0 and up to 1. Default 0.8: the rest is enough for an orderly end.
    """

    errors: int = attrs.field(default=3, validator=COUNT)
    """Number of consecutive error turns that ends the run, 1 or more. Default 3: one or two may be chance."""

    tool_timeout_s: float = attrs.field(default=30.0, validator=_ABOVE_ZERO)
    """Seconds for a call of a tool that sets no timeout of its own, above 0. Default 30: enough for a slow HTTP
    request.
    """

    model_timeout_s: float = attrs.field(default=60.0, validator=_ABOVE_ZERO)
    """Seconds that the model may stay silent, above 0. Default 60. A stream that keeps sending may take longer in all.
    """

    model_retries: int | None = attrs.field(default=None, validator=COUNT_OR_ZERO.or_none())
    """Number of retries of a model request, 0 or more. None, the default, means 3, which with the waits between them
    span the usual overload. In a run that works for another run None means 1, and the run then ends at once (Source:
    document C, 9.3), since its caller can go on without it.
    """

    retry_wait_s: float = attrs.field(default=1.0, validator=_ABOVE_ZERO)
    """Seconds before the first retry of a model request, above 0. Each further wait is twice as long, plus a random
    part of up to a half, so that clients do not retry at the same time. Default 1.
    """

    retry_wait_max_s: float = attrs.field(default=60.0, validator=_ABOVE_ZERO)
    """Longest wait before a retry of a model request, seconds above 0, even if the server asks for more. Default 60."""

    parallel: int = attrs.field(default=20, validator=COUNT)
    """Number of tool calls of one run in flight at once, 1 or more. 1 runs them one by one. Default 20."""

    retries_per_tool: int = attrs.field(default=2, validator=COUNT_OR_ZERO)
    """Number of retries after transient errors, for all calls of one tool, 0 or more. Default 2: a service that fails
    three times is down.
    """

    retries_per_run: int = attrs.field(default=3, validator=COUNT_OR_ZERO)
    """Number of retries after transient errors, for all tools of a run together, 0 or more. Default 3."""

    depth: int = attrs.field(default=3, validator=COUNT_OR_ZERO)
    """Number of levels of sub-agents below the run, 0 or more. Default 3: a coordinator, its specialists and their
    helpers.
    """

    answer_retries: int = attrs.field(default=2, validator=COUNT_OR_ZERO)
    """Number of corrections that the model is asked for when its answer does not fit the output type or a validator
    refuses it, 0 or more. Default 2: a model that fails three times has not understood.
    """

    crashes: int = attrs.field(default=5, validator=COUNT)
    """Number of workers that may die in one turn of the run while they execute only this run, 1 or more. Then the run
    is paused. Default 5: one or two deaths are chance or a roll-out, five are caused by the run.
    """

    loop_turns: int = attrs.field(default=3, validator=_TWO_OR_MORE)
    """Number of equal turns that makes a loop, 2 or more. A sequence of turns makes one if it comes one time less, at
    least twice. Default 3: two are a retry (Source: document B, 4).
    """

    loop_window: int = attrs.field(default=4, validator=COUNT)
    """Number of newest turns among which equal calls are counted; never fewer than `loop_turns`. Default 4, so that
    another turn in between hides no loop (Source: document B, 4).
    """

    def max_model_retries(self, header: Header) -> int:
        """Return the number of model retries in a turn of the run with this header."""
        if self.model_retries is not None:
            return self.model_retries
        return SUBAGENT_MODEL_RETRIES if self.fails_fast(header) else MODEL_RETRIES

    def fails_fast(self, header: Header) -> bool:
        """Return whether the run ends at its first failed turn: it is a sub-agent's, and `model_retries` is not set."""
        return self.model_retries is None and header.parent is not None

    @property
    def last_answer_s(self) -> float:
        """Seconds that are reserved for the last answer, if the agent asks for one."""
        return min(LAST_ANSWER_S, LAST_ANSWER_SHARE * self.seconds)


suggest_fields(
    Limits,
    **dict.fromkeys(("max_steps", "max_iterations", "recursion_limit", "steps"), "turns"),
    **dict.fromkeys(("timeout", "timeout_s", "max_time"), "seconds"),
    **dict.fromkeys(("max_cost", "cost", "budget"), "usd"),
    max_errors="errors",
    max_concurrency="parallel",
)


SpendPeriod = Literal["day", "month"]
SpendScope = Literal["agent", "user", "tenant"]
SPEND_SCOPES: Final[tuple[SpendScope, ...]] = ("agent", "user", "tenant")

# Kind of the records of windows in the store.
SPEND_RECORDS: Final = "spend"
# Characters of a subject in the key of a record; longer ones are hashed, because keys have at most 500.
_MAX_KEY_PART_CHARS: Final = 120
# Days of the longest month, so that a date this much later is in the next one.
_LONGEST_MONTH_DAYS: Final = 31


def load_zone(name: str) -> ZoneInfo:
    """Return a time zone by its name in the IANA database.

    Raises:
        MisuseError: if the name is unknown.
    """
    from zoneinfo import ZoneInfo  # noqa: PLC0415  few agents limit spending

    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, TypeError, OSError) as error:
        raise MisuseError(
            f"tz={name!r:.80}: give a time zone of the IANA database, such as 'Europe/Berlin' or 'UTC'; "
            "on Windows, install the package tzdata"
        ) from error


def _check_zone(_instance: object, _attribute: object, name: str) -> None:
    load_zone(name)


def _shorten(part: str) -> str:
    return part if len(part) <= _MAX_KEY_PART_CHARS else f"~{sha256(part.encode()).hexdigest()}"


@attrs.frozen(kw_only=True)
class SpendWindow(Value):
    """One calendar day or month of one agent, user or tenant."""

    scope: SpendScope
    """Kind of the subject."""

    subject: str
    """Name of the agent, or id of the user or tenant; empty for runs without one."""

    tenant: str = ""
    """Tenant of a user; empty if there is none, and for the other scopes."""

    per: SpendPeriod
    """Length of the window."""

    tz: str
    """Time zone of the calendar."""

    start: str
    """The day, as "2026-11-26", or the month, as "2026-11"."""

    ends_at: float
    """End of the window, seconds since 1970."""

    purpose: str | None = None
    """Purpose of the runs that count in it; empty for production. None: all runs."""

    @property
    def key(self) -> str:
        """Key of the record of the window in the store."""
        parts = [self.scope, self.start, self.per, self.tz, self.tenant, self.subject]
        parts += [] if self.purpose is None else [self.purpose]
        return "|".join([_shorten(quote(part, safe="/")) for part in parts])

    def describe(self) -> str:
        """Return the name of the window for people: "the agent shop on 2026-11-26 (UTC)"."""
        subject = f"the {self.scope} {self.subject}" if self.subject else f"runs without a {self.scope}"
        tenant = f" of the tenant {self.tenant}" if self.tenant else ""
        purpose = "" if self.purpose is None else f" for {self.purpose or 'production'}"
        return f"{subject}{tenant}{purpose} {'on' if self.per == 'day' else 'in'} {self.start} ({self.tz})"

    def format_end(self) -> str:
        """Return the end of the window in its time zone: "2026-11-27 00:00 +01:00"."""
        end = datetime.fromtimestamp(self.ends_at, load_zone(self.tz))
        offset = end.strftime("%z")
        return f"{end:%Y-%m-%d %H:%M} {offset[:3]}:{offset[3:5]}"


@attrs.frozen(kw_only=True)
class Spend(Value):
    """Spending limit of an agent, a user or a tenant for a calendar day or month: `Spend(per="day", usd=20)`.

    All processes that share a store share it. The requests of runs count whose agent, or a calling agent, has a limit
    with the same period, scope, time zone and purpose. It holds over production and evaluations together, unless it
    names a purpose.

    Args:
        per: Length of the window: "day" or "month" of the calendar.
        scope: Subject of a window: the "agent", each "user", or each "tenant".
        usd: US dollars for models and tools in a window, above 0.
        tz: Time zone of the calendar, a name of the IANA database.
        warn_at: Share of `usd` at which a warning is logged, once per window, above 0 and up to 1.
        purpose: Purpose of the runs that it is about, such as "eval"; empty for production. None: all runs.

    Raises:
        MisuseError: when a value is out of its range or of a wrong type, or the time zone is unknown.
    """

    per: SpendPeriod = attrs.field(validator=require_choice("day", "month"))
    """Length of the window: "day" or "month" of the calendar."""

    scope: SpendScope = attrs.field(default="agent", validator=require_choice(*SPEND_SCOPES))
    """Subject of a window: the "agent", each "user" of a tenant, or each "tenant". Agents with
    different names have windows of their own; a user's and a tenant's are shared by all agents that limit them. Runs
    without a user (or tenant) share one window. Default "agent".
    """

    usd: float = attrs.field(validator=POSITIVE)
    """US dollars for models and tools in a window, above 0. It is exceeded by one answer at most."""

    tz: str = attrs.field(default="UTC", validator=_check_zone)
    """Time zone of the calendar, a name of the IANA database such as "Europe/Berlin". Default "UTC"."""

    warn_at: float = attrs.field(default=0.8, validator=SHARE)
    """Share of `usd` at which a warning is logged, once per window, above 0 and up to 1. Default 0.8."""

    purpose: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Purpose of the runs that it is about, such as "eval"; an empty string for production. Only these are limited, and
    count. Default None: all runs.
    """

    def find_window(self, header: Header, now: float) -> SpendWindow:
        """Return the window of a run with this header at a time, in seconds since 1970."""
        zone = load_zone(self.tz)
        today = datetime.fromtimestamp(now, zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
        if self.per == "day":
            start, end = today, today + timedelta(days=1)  # of the calendar: 23 or 25 hours when the clocks change
        else:
            start = today.replace(day=1)
            end = (start + timedelta(days=_LONGEST_MONTH_DAYS)).replace(day=1)
        subject = {"agent": header.agent, "user": header.user, "tenant": header.tenant}[self.scope]
        return SpendWindow(
            scope=self.scope,
            subject=replace_surrogates(subject or ""),  # as the journal has it
            tenant=replace_surrogates(header.tenant or "") if self.scope == "user" else "",
            per=self.per,
            tz=self.tz,
            start=f"{start:%Y-%m-%d}" if self.per == "day" else f"{start:%Y-%m}",
            ends_at=end.astimezone(UTC).timestamp(),
            purpose=self.purpose,
        )
