"""One execution of a run: what its caller asks for, its journal under a lease, and the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from agentfsm.engine.execution.answer_cache import AnswerClaim
from agentfsm.engine.execution.budget import Budget
from agentfsm.engine.execution.config import EngineConfig
from agentfsm.engine.execution.journal import Journal
from agentfsm.tokens.ledger import BYTE_COUNTER, TokenLedger, estimate_tokens

if TYPE_CHECKING:
    from agentfsm._lib.fairness import StepThrottle
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.drain import Drain
    from agentfsm.engine.execution.run_spend import RunSpend
    from agentfsm.ports.store import Lease
    from agentfsm.streaming.stream import Listener
    from agentfsm.tools.attendance import Attendant


class ExecutionOptions(NamedTuple):
    """What the caller of an execution gives and asks for.

    A named tuple is built with 2 calls of functions, a frozen attrs class of these fields with 14.
    """

    deps: Any = None
    """Dependencies for tools, as `ctx.deps`; never stored."""

    once: bool = False
    """Whether to perform a single effect."""

    resume: bool = False
    """Whether to end a pause of the run; child runs that were paused after crashes then continue as well."""

    takeover: bool = False
    """Whether to take the run from the worker that executes it; its child runs are then taken as well."""

    renamed: Mapping[str, str] = MappingProxyType({})
    """New names of tools by their names in the journal, also for the runs below."""

    lease: Lease | None = None
    """Lease of this run, if the caller holds it; released at the end of the execution."""

    on_event: Listener | None = None
    """Called with each streamed event."""

    on_run: Callable[[Run], None] | None = None
    """Called with each new state of the run."""

    attendant: Attendant | None = None
    """Asks the person who attends the execution; None if there is none."""

    drain: Drain | None = None
    """Ends the execution between two effects; None if only cancellation ends it."""

    throttle: StepThrottle | None = None
    """Throttle of this event loop, if the caller has passed it already."""

    parent_budget: Budget | None = None
    """Budget of the parent run; None for a run without one."""


@attrs.define(eq=False, repr=False, kw_only=True, on_setattr=attrs.setters.NO_OP)
class Execution:
    """Collaborators of one execution. Its fields do not change; ACT keeps its own state in `ToolCalls`."""

    config: EngineConfig
    journal: Journal
    options: ExecutionOptions
    ledger: TokenLedger
    """Counts the tokens of the run's messages, each message once."""

    budget: Budget
    orphaned_calls: frozenset[str]
    """Ids of the calls that were open when an earlier worker crashed."""

    answer_claim: AnswerClaim | None = None
    """Part of the run in the answer cache; None if the agent has no cache."""

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
