"""Calls as facts: what a run and those that it continues have called, with the outcomes, for guards and validators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from agentfsm.core.calls import OpenCall, Phase, may_have_happened, parse_arguments
from agentfsm.core.events import GuardVerdict
from agentfsm.core.labels import Label
from agentfsm.core.messages import JSON, AssistantMessage, Outcome, ToolCall, ToolResult
from agentfsm.core.plans import ENGINE_TOOLS
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.run_fields import RunFields


@attrs.frozen(kw_only=True)
class CallFact(Value):
    """A call of a run, as its journal has it."""

    run_id: str
    """Id of the run that knows the call. A call of an earlier run of the conversation has the id of the later one."""

    is_earlier: bool = False
    """Whether an earlier run of the conversation made it."""

    call_id: str
    """Id of the call, unique in the run and those that it continues."""

    tool: str
    """Name of the tool."""

    arguments: Mapping[str, JSON]
    """Arguments with which it was called: those of a person who edited them, else the model's."""

    outcome: Outcome | None
    """Outcome; None while the call is open."""

    is_started: bool
    """Whether its tool was started."""

    is_decided: bool = False
    """Whether the call is open and guards have decided on it."""

    is_refused: bool = False
    """Whether the call is open and will not start, because guards refused it."""

    may_have_happened: bool
    """Whether its effect is not known: it was started and is open, was lost, or broke while its tool was running."""

    result: str = ""
    """Text of the result; empty while the call is open."""

    labels: tuple[Label, ...] = ()
    """Labels of what the call has read and done."""

    approved_by: str | None = None
    """Name of the person who approved the call, empty if the person gave no name; None if the call has no approval."""

    started_at: float = 0.0
    """Time of its start, seconds since 1970; 0 if it never started."""

    ended_at: float = 0.0
    """Time of its end, seconds since 1970; 0 while it is open."""

    is_agent: bool = False
    """Whether an agent did the work, in a run of its own."""

    @property
    def is_done(self) -> bool:
        """Whether the call has happened: its outcome is DONE."""
        return self.outcome is Outcome.DONE


def list_call_facts(run: RunFields) -> tuple[CallFact, ...]:
    """Return the calls of a run and of the runs that it continues, in order: the closed ones, then the open ones.

    Calls in messages that its caller gave (`messages=`) are not among them: no journal has them. Nor are those of
    sub-agents, which have journals of their own.
    """
    return (*iterate_closed_calls(run), *list_open_calls(run))


def iterate_closed_calls(run: RunFields, start: int = 0, steps: int = 0) -> Iterator[CallFact]:
    """Yield the closed calls of a run, from a message on, then those of its plans, from a step on.

    Args:
        run: The run.
        start: Index of the first message. No call is separated from its results.
        steps: Index of the first closed step, those of the runs that it continues included.
    """
    calls: dict[str, ToolCall] = {}
    start, earlier = max(start, run.given), len(run.prior)
    for place, message in enumerate(run.messages[start:], start):
        if isinstance(message, AssistantMessage):
            calls = {call.id: call for call in message.calls}
        elif isinstance(message, ToolResult) and message.tool not in ENGINE_TOOLS:
            yield _build_fact(run, calls[message.call_id], message, is_earlier=place < earlier)
    for place, entry in enumerate(run.closed_steps[steps:], steps):
        if entry.result is not None and entry.call.name not in ENGINE_TOOLS:
            yield _build_fact(run, entry.call, entry.result, is_earlier=place < len(run.earlier_steps))


def list_open_calls(run: RunFields) -> list[CallFact]:
    """Return the open calls of a run in call order, also those that have their result."""
    return [
        _build_open_fact(run, entry) if entry.result is None else _build_fact(run, entry.call, entry.result)
        for entry in run.open
        if entry.call.name not in ENGINE_TOOLS
    ]


def _build_fact(run: RunFields, call: ToolCall, result: ToolResult, *, is_earlier: bool = False) -> CallFact:
    background = run.background.get(call.id) if run.background else None
    if background is not None:
        if background.result is None:
            open_fact = _build_open_fact(run, OpenCall(call=call))
            return attrs.evolve(open_fact, is_started=True, may_have_happened=True, is_agent=True)
        result = background.result
    return CallFact(
        run_id=run.id,
        is_earlier=is_earlier,
        call_id=call.id,
        tool=call.name,
        arguments=parse_arguments(call),
        outcome=result.outcome,
        is_started=result.attempts > 0,
        may_have_happened=may_have_happened(result),
        result=result.content,
        labels=result.labels,
        approved_by=run.approvals.get(call.id),
        started_at=result.started_at,
        ended_at=result.completed_at,
        is_agent=result.child is not None or background is not None,
    )


def _build_open_fact(run: RunFields, entry: OpenCall) -> CallFact:
    guarded, is_started = entry.guarded, entry.attempts > 0
    return CallFact(
        run_id=run.id,
        call_id=entry.call.id,
        tool=entry.call.name,
        arguments=parse_arguments(entry.call),
        outcome=None,
        is_started=is_started,
        is_decided=guarded is not None,
        is_refused=guarded is not None and guarded.verdict is GuardVerdict.REFUSE and not is_started,
        may_have_happened=is_started or entry.phase is Phase.OUTCOME_UNKNOWN,
        approved_by=run.approvals.get(entry.call.id),
        started_at=entry.started_at,
    )
