"""One driving call: a journal under its lease, and what its caller brought along."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.inbox import PostedItem
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import Outcome
from agentfsm.core.pending import Pending
from agentfsm.engine.execution.budget import Budget
from agentfsm.engine.execution.config import EngineConfig
from agentfsm.engine.execution.journal import Journal
from agentfsm.tokens.ledger import TokenLedger
from agentfsm.tools.queue.result_text import build_decided_result
from agentfsm.tools.queue.scheduler import ToolQueue
from agentfsm.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from agentfsm.core.run import Run

_LAST_ANSWER_PROMPT: Final = (
    "This run has to stop ({reason}). This is your last reply, and no tool can be called: give the best answer that "
    "you can with what you have, and say what is missing."
)
_UNSTARTED: Final = frozenset({Phase.INTENDED, Phase.APPROVED})
_DOUBTFUL_TEXT: Final = (
    "no result: the run was stopped ({reason}). Whether the call had begun when an earlier worker died is not known; "
    "nothing was changed by it."
)


@attrs.define(eq=False, repr=False, kw_only=True)
class Execution:
    """One driving call."""

    config: EngineConfig
    journal: Journal
    deps: Any
    ledger: TokenLedger
    # Counts the run's messages, each once.
    budget: Budget
    is_takeover: bool = False
    # Whether the run was taken from the worker that drove it; the runs of its agents are then taken, too.
    is_resumed: bool = False
    # Whether somebody has resumed the run: what rests below it for crashes goes on as well.
    make_queue: Callable[[Execution], ToolQueue]
    approvals: dict[str, PostedItem] = attrs.field(factory=dict)
    # Approvals that were read and not spent yet, by call id.
    resumable: frozenset[str] = frozenset()
    # Paused calls that may go on.
    unfinished_calls: int = 0
    # Calls of the turn that have no result yet.
    drained_pending: bool = False
    # Whether calls have run early and those who watch were not told yet that no other may run.
    last_waits: dict[str, tuple[Pending, ...]] = attrs.field(factory=dict)
    # What paused calls waited for when they were last woken.
    warned_limits: frozenset[str] = frozenset()
    # Limits of which it was told that the run nears them.
    restarted_calls: frozenset[str] = frozenset()
    # Calls that have started before and are taken up again.
    orphaned_calls: frozenset[str] = frozenset()
    # Calls that were open when an earlier worker died over the run.

    _queue: ToolQueue | None = None

    @property
    def queue(self) -> ToolQueue:
        """Runs the calls; made with the first of them, since many runs have none."""
        if self._queue is None:
            self._queue = self.make_queue(self)
        return self._queue

    def close(self) -> None:
        """Part with the queue, which knows this call: as a ring, both would stay in memory until somebody looks."""
        self._queue = None

    def stop_at_limit(self, reason: StopReason, message: str, *before: e.Event, note: str = "") -> None:
        """End the run at a limit; where the agent has a last answer, and a turn is left, ask for that first.

        Args:
            reason: The limit.
            message: For people: the number reached.
            *before: What happened before it.
            note: What the model is told beside the request for its last answer.
        """
        if not self.config.last_answer or self.journal.run.fold(before).turn >= self.config.limits.turns:
            return self.fail(reason, message, *before)
        self.journal.log.warning("limit_reached", reason=reason.value, turn=self.journal.run.turn)
        told = f"{note}\n{_LAST_ANSWER_PROMPT.format(reason=reason)}".lstrip()
        reached = e.LimitReached(reason=reason, message=message, note=told)
        return self.journal.commit(*before, *self._find_doubtful_ends(reason, before), reached)

    def end_after_last_answer(self, reached: e.LimitReached, outcome: str, *before: e.Event) -> None:
        """Commit the end of a run whose last answer was asked for, with what became of that."""
        self.fail(reached.reason, f"{reached.message}; {outcome}", *before)

    def fail(self, reason: StopReason, message: str, *before: e.Event) -> None:
        """Commit the end of the run, with what happened before it."""
        self.journal.log.error("run_failed", reason=reason.value, turn=self.journal.run.turn)
        doubtful = self._find_doubtful_ends(reason, before)
        self.journal.commit(*before, *doubtful, e.Failed(reason=reason, message=message))

    def _find_doubtful_ends(self, reason: StopReason, before: Iterable[e.Event]) -> list[e.Event]:
        return build_doubtful_ends(self.journal.run, self.orphaned_calls, self.config.registry, reason, before)


def build_doubtful_ends(
    run: Run, orphaned_calls: frozenset[str], tools: ToolRegistry, reason: StopReason, before: Iterable[e.Event]
) -> list[e.Event]:
    """Return the ends of calls of which it is not known whether a worker that died had begun them.

    Args:
        run: The run, which is about to end.
        orphaned_calls: Calls that were open when an earlier worker died over the run, by id.
        tools: Tools of the run's agent, as far as they are known.
        reason: Why the run ends.
        before: Events that are committed before these: a call that ends with one of them is left out.
    """
    ended = {event.result.call_id for event in before if isinstance(event, e.ToolFinished)}
    return [
        e.ToolFinished(result=build_decided_result(entry, Outcome.CANCELLED, _DOUBTFUL_TEXT.format(reason=reason)))
        for entry in run.open
        if entry.call.id in orphaned_calls - ended and _may_have_started(entry, tools)
    ]


def _may_have_started(entry: OpenCall, tools: ToolRegistry) -> bool:
    """Whether a worker that died may have begun a call of which the journal tells no start."""
    tool = tools.get(entry.call.name)
    is_known = tool is not None and not tool.read_only  # its start would be in the journal
    return entry.phase in _UNSTARTED and not (entry.attempts or is_known)
