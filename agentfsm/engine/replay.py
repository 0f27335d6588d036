"""Replay a run from its journal without calling a model or a tool, and compare each request.

Each event that came from a model request carries two hashes of the request: one of the agent's part (model,
instructions, tools, settings) and one of the messages; a plan carries those of what its planner was given. A replay
computes both again and so shows whether the current agent would have sent the same request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm._lib.fairness import StepThrottle
from agentfsm.core import events as e
from agentfsm.core.run import Run, begin_run
from agentfsm.core.value import Value
from agentfsm.engine.deciders.plans import hash_plan_request
from agentfsm.engine.execution.execution import build_execution
from agentfsm.engine.execution.journal import Journal
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.engine.model_calls.view import build_view
from agentfsm.journal.load import load_predecessor
from agentfsm.ports.store import Lease, Store
from agentfsm.streaming.log import RunLogger
from agentfsm.tokens.ledger import TokenLedger

if TYPE_CHECKING:
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.stored import StoredRun

# The parts of a request that the two hashes cover.
REQUEST_PARTS: Final = ("the agent: its model, instructions, tools, settings or planner", "the messages")


@attrs.frozen(kw_only=True)
class Divergence(Value):
    """A request that the current agent would send differently."""

    version: int
    """Version of the event that recorded the reply to the request, from 1."""

    turn: int
    """Number of the turn of the request, from 1."""

    what: tuple[str, ...]
    """Descriptions of the parts that differ, from `REQUEST_PARTS`."""


@attrs.frozen(kw_only=True)
class Replay(Value):
    """Result of a replay."""

    run: Run
    """The run rebuilt from the journal."""

    checked: int
    """Number of requests that were compared. Journals of format 1 have no hashes, so their requests are not counted."""

    divergences: tuple[Divergence, ...]
    """The requests that differ, in the order of the journal."""

    @property
    def is_faithful(self) -> bool:
        """Whether every compared request would be the same now."""
        return not self.divergences


async def replay(config: EngineConfig, store: Store, run_id: str, deps: Any = None) -> Replay:
    """Rebuild a run from its journal and compare each request with the current agent's.

    Args:
        config: The current agent's configuration.
        store: The store of the journal.
        run_id: The id of the run.
        deps: Dependencies for the tools' `enabled` functions, which decide the tools of a request.

    Raises:
        RunNotFoundError: if the store has no such run.
    """
    return await replay_stored(config, store, await store.read(run_id), deps)


async def replay_stored(config: EngineConfig, store: Store, stored: StoredRun, deps: Any = None) -> Replay:
    """Replay a journal that was read already, as `replay` does."""
    run = begin_run(stored.header, await load_predecessor(store, stored.header))
    drive = build_replay(config, store, run, deps, TokenLedger(own_start=run.own_start))
    journal = drive.journal
    checked, found = 0, []
    for event in stored.events:
        await StepThrottle.enter()
        run = journal.run
        if isinstance(event, e.Answered | e.Planned) and event.request:
            drive.ledger.update(run)
            now = build_view(drive).digest if isinstance(event, e.Answered) else hash_plan_request(drive, event.reason)
            pairs = zip(REQUEST_PARTS, event.request.split("-"), now.split("-"), strict=True)
            differing = tuple([part for part, then, own in pairs if then != own])
            checked += 1
            if differing:
                found.append(Divergence(version=run.version + 1, turn=run.turn + 1, what=differing))
        journal.run = run.apply(event)
    return Replay(run=journal.run, checked=checked, divergences=tuple(found))


def build_replay(config: EngineConfig, store: Store, run: Run, deps: Any, ledger: TokenLedger) -> Execution:
    """Return an execution of a run that appends nothing, whose run the caller moves on."""
    unowned = Lease(run_id=run.id, token=0, version=0)
    log = RunLogger(run.id, run.header.agent)
    journal = Journal(store=store, lease=unowned, run=run, clock=config.clock, log=log)
    return build_execution(config, journal, ledger, ExecutionOptions(deps=deps))
