"""Find the limits that a run has reached or nears, and format them with the number reached and the limit to raise."""

from __future__ import annotations

from typing import Any

from agentfsm.core.limits import Limits, StopReason
from agentfsm.core.run import Run


def find_reached_limit(
    run: Run[Any], limits: Limits, *, reserves_last_answer: bool = False
) -> tuple[StopReason, str] | None:
    """Return the limit that the run has reached, and a message with the number and the limit to raise; None if none.

    Args:
        run: The run.
        limits: Limits of its agent.
        reserves_last_answer: Whether to reserve a turn and `last_answer_s` for a last answer. With a limit of one turn,
            no turn is reserved.
    """
    most, seconds = limits.turns, limits.seconds
    if reserves_last_answer:
        most, seconds = max(1, most - 1), seconds - limits.last_answer_s
    if run.consecutive_errors >= limits.errors:
        last = f"; the last: {run.errors[-1].message[:300]}" if run.errors else ""
        turns = "1 error turn" if run.consecutive_errors == 1 else f"{run.consecutive_errors} error turns in a row"
        return StopReason.TOO_MANY_ERRORS, f"{turns}{last}"
    if run.turn >= most:
        return StopReason.MAX_TURNS, f"{run.turn} of {limits.turns} turns used; a larger turns= allows more"
    if run.usage.tokens >= limits.tokens:
        return StopReason.TOKEN_BUDGET, format_tokens_used(run.usage.tokens, limits)
    if limits.usd is not None and (run.usage.cost_usd or 0.0) >= limits.usd:
        return StopReason.COST_BUDGET, format_usd_used(run.usage.cost_usd or 0.0, limits)
    if run.tool_call_count >= limits.tool_calls:
        return StopReason.TOOL_BUDGET, format_calls_used(run.tool_call_count, limits)
    if run.duration_s >= seconds:
        return StopReason.TIMEOUT, format_seconds_used(run.duration_s, limits)
    return None


def find_near_limits(run: Run[Any], limits: Limits) -> tuple[tuple[str, float, float], ...]:
    """Return the limits of which the run has used `warn_at` or more, each as (name, used, limit)."""
    share, usage = limits.warn_at, run.usage
    tokens = usage.input_tokens + usage.output_tokens
    # One comparison for most turns, because this is called in each of them.
    if (
        run.turn < limits.turns * share
        and tokens < limits.tokens * share
        and run.tool_call_count < limits.tool_calls * share
        and run.duration_s < limits.seconds * share
        and (limits.usd is None or (usage.cost_usd or 0.0) < limits.usd * share)
    ):
        return ()
    used = (
        ("turns", run.turn, limits.turns),
        ("tokens", tokens, limits.tokens),
        ("usd", usage.cost_usd or 0.0, limits.usd),
        ("tool_calls", run.tool_call_count, limits.tool_calls),
        ("seconds", run.duration_s, limits.seconds),
    )
    return tuple([(name, now, of) for name, now, of in used if of is not None and now >= of * share])


# Messages of exhausted limits: the number reached, and the limit to raise.


def format_tokens_used(tokens: int, limits: Limits) -> str:
    """Return the message for an exhausted token budget."""
    return f"{tokens:,} of {limits.tokens:,} tokens used; a larger tokens= allows more"


def format_usd_used(usd: float, limits: Limits) -> str:
    """Return the message for an exhausted cost budget."""
    return f"{usd:.4g} of {limits.usd or 0.0:.4g} US dollars used; a larger usd= allows more"


def format_calls_used(calls: int, limits: Limits) -> str:
    """Return the message for an exhausted budget of tool calls."""
    return f"{calls:,} of {limits.tool_calls:,} tool calls made; a larger tool_calls= allows more"


def format_seconds_used(seconds: float, limits: Limits) -> str:
    """Return the message for exhausted active time."""
    return f"{seconds:.1f} of {limits.seconds:.1f} seconds used; a larger seconds= allows more"
