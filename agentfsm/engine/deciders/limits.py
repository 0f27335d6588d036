"""Limits of a run: the turns, calls, tokens, money and time that it may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.messages import ErrorType, Outcome
from agentfsm.core.stops import find_near_limits
from agentfsm.engine.execution.run_end import stop_at_limit
from agentfsm.streaming.stream import BudgetWarning
from agentfsm.tools.queue.result_text import build_decided_result

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.core.messages import ToolCall
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.open_calls import OpenCalls
    from agentfsm.engine.execution.outcome import StepOutcome
    from agentfsm.engine.model_calls.request import PreparedRequest


async def check_before_request(request: PreparedRequest) -> StepOutcome | None:
    """Return the end of a run that has reached a limit; report limits that it nears, each once in an execution."""
    execution = request.execution
    journal, run, budget = execution.journal, execution.journal.run, execution.budget
    if (stop := budget.find_stop_reason()) is not None:
        return stop_at_limit(execution, *stop)
    for limit, used, of in find_near_limits(run, execution.config.limits):
        if limit in budget.warned_limits:
            continue
        budget.warned_limits |= {limit}
        journal.log.warning("budget_warning", which=limit, used=used, limit=of)
        if journal.on_event is not None:
            journal.on_event(BudgetWarning(run_id=run.id, turn=run.turn, limit=limit, used=used, of=of))
    return None


async def admit_calls(calls: OpenCalls, ready: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Refuse the open calls for which the budget has none left, before a person is asked about them."""
    execution, run, budget = calls.execution, calls.execution.journal.run, calls.execution.budget
    refused = budget.admit_calls([entry for entry in run.open if entry.phase is not Phase.FINISHED])
    if refused:
        text = budget.format_refusal()
        results = [build_decided_result(entry, Outcome.SKIPPED, text) for entry in refused]
        execution.journal.log.warning("calls_refused", turn=run.turn, calls=len(results))
        ends = [e.ToolFinished(result=attrs.evolve(each, error_type=ErrorType.BUDGET)) for each in results]
        calls.record(*ends)
    return ready


async def check_results(execution: Execution, _effect: Reflect) -> StepOutcome | None:
    """Return the end of a run that has reached a limit with the results of its calls."""
    stop = execution.budget.find_stop_reason()
    return None if stop is None else stop_at_limit(execution, *stop)
