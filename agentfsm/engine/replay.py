"""A replay: a run folded again from its journal, with no model and no tool called, and each request checked.

Each event that came of a request carries two hashes of it: of the agent's part (model, instructions, tools, settings)
and of the messages. A replay computes both anew. So it tells whether this agent, as it is now, would have asked the
model the very same; where it would, what the model answered then is what it may answer now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.run import Run, begin_run
from agentfsm.core.value import Value
from agentfsm.engine.execution.execution import build_execution
from agentfsm.engine.execution.journal import Journal, load_predecessor
from agentfsm.engine.model_calls.tool_selection import list_offered_tools
from agentfsm.ports.store import Lease, Store
from agentfsm.streaming.log import RunLogger
from agentfsm.tokens.ledger import TokenLedger

if TYPE_CHECKING:
    from agentfsm.engine.execution.config import EngineConfig

# What the two hashes of a request are of.
REQUEST_PARTS: Final = ("the agent: its model, instructions, tools or settings", "the messages")


@attrs.frozen(kw_only=True)
class Divergence(Value):
    """A request that would not be the same now."""

    version: int
    """Of the event that came of it."""

    turn: int
    what: tuple[str, ...]
    """The parts that differ, in words."""


@attrs.frozen(kw_only=True)
class Replay(Value):
    """What became of a replay."""

    run: Run
    """Folded from the journal."""

    checked: int
    """Requests that were compared; those of a journal of format 1 have no hash."""

    divergences: tuple[Divergence, ...]

    @property
    def is_faithful(self) -> bool:
        """Whether every request that was compared would be the same now."""
        return not self.divergences


async def replay(config: EngineConfig, store: Store, run_id: str, deps: Any = None) -> Replay:
    """Fold a run from its journal, and check each request.

    Args:
        config: What asks now.
        store: Where the journal lives.
        run_id: The run.
        deps: Handed to the tools' `enabled` functions, which decide what a request tells of.

    Raises:
        RunNotFoundError: when the store holds no such run.
    """
    stored = await store.read(run_id)
    run = begin_run(stored.header, await load_predecessor(store, stored.header))
    nobody = Lease(run_id=run_id, token=0, version=0)  # it is never appended to
    journal = Journal(store=store, lease=nobody, run=run, clock=config.clock, log=RunLogger(run_id, run.header.agent))
    drive = build_execution(config, journal, deps, TokenLedger(own_start=run.own_start))
    checked, found = 0, []
    for event in stored.events:
        run = journal.run
        if isinstance(event, e.Answered) and event.request:
            drive.ledger.update(run)
            now = config.request_digest(drive.ledger, list_offered_tools(drive), config.resolve_settings(run))
            pairs = zip(REQUEST_PARTS, event.request.split("-"), now.split("-"), strict=True)
            what = tuple([part for part, then, own in pairs if then != own])
            checked += 1
            if what:
                found.append(Divergence(version=run.version + 1, turn=run.turn + 1, what=what))
        journal.run = run.apply(event)
    return Replay(run=journal.run, checked=checked, divergences=tuple(found))
