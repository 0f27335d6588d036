"""One execution of a run: its journal under a lease, the caller's dependencies, and the budget."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.engine.execution.answer_cache import AnswerClaim
from agentfsm.engine.execution.budget import Budget
from agentfsm.engine.execution.config import EngineConfig
from agentfsm.engine.execution.drain import Drain
from agentfsm.engine.execution.journal import Journal
from agentfsm.tokens.ledger import BYTE_COUNTER, TokenLedger, estimate_tokens
from agentfsm.tools.attendance import Attendant

if TYPE_CHECKING:
    from agentfsm.engine.execution.run_spend import RunSpend


@attrs.define(eq=False, repr=False, kw_only=True, on_setattr=attrs.setters.NO_OP)
class Execution:
    """Collaborators of one execution. Its fields do not change; ACT keeps its own state in `ToolCalls`."""

    config: EngineConfig
    journal: Journal
    deps: Any
    ledger: TokenLedger
    """Counts the tokens of the run's messages, each message once."""

    budget: Budget
    is_takeover: bool
    """Whether the run was taken from another worker; its child runs are then taken as well."""

    is_resumed: bool
    """Whether the caller resumed the run; child runs that were paused after crashes then continue as well."""

    orphaned_calls: frozenset[str]
    """Ids of the calls that were open when an earlier worker crashed."""

    attendant: Attendant | None
    """Asks the person who attends the execution; None if there is none."""

    drain: Drain | None = None
    """Ends the execution between two effects; None if only cancellation ends it."""

    renamed: Mapping[str, str] = MappingProxyType({})
    """New names of tools by their names in the journal, also for the runs below."""

    answer_claim: AnswerClaim | None = None
    """Part of the run in the answer cache; None if the agent has no cache."""

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text: exactly if a vocabulary is loaded, otherwise an estimate."""
        counter = self.ledger.counter
        return estimate_tokens(text) if counter is BYTE_COUNTER else counter.count(text)


def build_execution(
    config: EngineConfig,
    journal: Journal,
    deps: Any,
    ledger: TokenLedger,
    parent_budget: Budget | None = None,
    *,
    resume: bool = False,
    takeover: bool = False,
    attendant: Attendant | None = None,
    drain: Drain | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Execution:
    """Build the execution of a run.

    Args:
        config: Configuration of the agent.
        journal: Journal of the run, under its lease.
        deps: Dependencies for tools.
        ledger: Token counts of the run.
        parent_budget: Budget of the parent run.
        resume: Whether the caller resumes the run; False for a worker.
        takeover: Whether the run was taken from another worker.
        attendant: Asks the person who attends the execution; None if there is none.
        drain: Ends the execution between two effects; None if only cancellation ends it.
        renamed: New names of tools by their names in the journal, also for the runs below.
    """
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
        deps=deps,
        ledger=ledger,
        budget=Budget(config.limits, journal, parent_budget, config.last_answer, spend),
        is_resumed=resume,
        is_takeover=takeover,
        orphaned_calls=journal.list_orphaned_calls(),
        attendant=attendant,
        drain=drain,
        renamed=renamed,
        answer_claim=claim,
    )
