"""One execution of a run: its journal under a lease, and the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from agentfsm.core.stops import RecentTurns
from agentfsm.engine.execution.answer_cache import AnswerClaim
from agentfsm.engine.execution.budget import Budget
from agentfsm.engine.execution.config import EngineConfig
from agentfsm.engine.execution.journal import Journal
from agentfsm.tokens.ledger import BYTE_COUNTER, TokenLedger, estimate_tokens

if TYPE_CHECKING:
    from agentfsm.core.events import ChildReported
    from agentfsm.engine.execution.options import ExecutionOptions
    from agentfsm.engine.execution.run_spend import RunSpend


class BackgroundRunsPort(Protocol):
    """The background runs of an execution, as its steps know them: `BackgroundRuns` of `engine/background_runs.py`."""

    async def advance(self, *, is_blocked: bool) -> bool:
        """Record what has stopped, and start what is new. Return whether the parent run has to look again."""
        ...

    def retry(self, call_id: str) -> None:
        """Drive a background run again that waited, because something was sent to it."""
        ...

    async def end(self) -> list[ChildReported]:
        """Cancel the background runs of a run that is about to end, and return what they did."""
        ...


@attrs.define(eq=False, repr=False, kw_only=True, on_setattr=attrs.setters.NO_OP)
class Execution:
    """Collaborators of one execution. Only `background` is set later; ACT keeps its own state in `ToolCalls`."""

    config: EngineConfig
    journal: Journal
    options: ExecutionOptions
    ledger: TokenLedger
    """Counts the tokens of the run's messages, each message once."""

    budget: Budget
    orphaned_calls: frozenset[str]
    """Ids of the calls that were open when an earlier worker crashed."""

    recent_turns: RecentTurns = attrs.field(factory=RecentTurns, init=False)
    """The newest turns, for the detection of loops."""

    answer_claim: AnswerClaim | None = None
    """Part of the run in the answer cache; None if the agent has no cache."""

    background: BackgroundRunsPort | None = attrs.field(default=None, init=False)
    """The background runs; None if the agent has no tools that begin some, and the run has none."""

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text: exactly if a vocabulary is loaded, otherwise an estimate."""
        counter = self.ledger.counter
        return estimate_tokens(text) if counter is BYTE_COUNTER else counter.count(text)


def build_execution(
    config: EngineConfig, journal: Journal, ledger: TokenLedger, options: ExecutionOptions
) -> Execution:
    """Build the execution of a run.

    Args:
        config: Configuration of the agent.
        journal: Journal of the run, under its lease.
        ledger: Token counts of the run.
        options: What the caller gives and asks for.
    """
    parent_budget = options.parent_budget
    above = None if parent_budget is None else parent_budget.spend
    spend: RunSpend | None = None
    if config.spend or above is not None:
        from agentfsm.engine.execution.run_spend import build_run_spend  # noqa: PLC0415  few agents limit spending

        spend = build_run_spend(config.spend, journal, above)
    claim: AnswerClaim | None = None
    if (cache := config.answer_cache) is not None:
        store = cache.store or journal.store
        claim = AnswerClaim(journal.run.id, cache, store, journal.log, has_runs=store is journal.store)
    return Execution(
        config=config.for_run(journal.run.header),
        journal=journal,
        options=options,
        ledger=ledger,
        budget=Budget(config.limits, journal, parent_budget, config.last_answer, spend),
        orphaned_calls=journal.list_orphaned_calls(),
        answer_claim=claim,
    )
