"""The calls that guards read: before a call of a run, and before its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from agentfsm.engine.execution.call_tree import CallTree
from agentfsm.ports.call_history import CallHistory

if TYPE_CHECKING:
    from agentfsm.core.events import Guarded, GuardVerdict
    from agentfsm.engine.execution.execution import Execution


def _find_tree(execution: Execution) -> CallTree | None:
    return getattr(execution.budget.tree, "calls", None)


async def read_calls(execution: Execution) -> None:
    """Make the calls of a run, and of the runs around it, known to guards that read them."""
    budget, journal = execution.budget, execution.journal
    if (tree := _find_tree(execution)) is None:
        tree = budget.tree.calls = CallTree()
    await tree.add(journal.store, journal, [each.source for each in budget.ancestors])


_NO_HISTORY: Final = CallHistory()


def view_calls(
    execution: Execution, call_id: str = "", decided: Iterable[tuple[str, GuardVerdict]] = ()
) -> CallHistory:
    """Return the calls before one of a run, or before its end. Without rules over time nothing was read."""
    tree, journal = _find_tree(execution), execution.journal
    if tree is None:
        return _NO_HISTORY
    return tree.view(journal.run, call_id, now=journal.clock.now(), decided=decided)


def may_differ(execution: Execution, decided: Guarded) -> bool:
    """Return whether a decision on a call may be another one now.

    What stands before a call in its reply is known with the first decision, whatever becomes of it. So only time that
    passes, other runs, and steps of a plan that start beside it can make a difference.
    """
    tree, journal = _find_tree(execution), execution.journal
    is_alone = tree is None or len(tree.recorder.runs) == 1
    return not is_alone or journal.run.reply is None or journal.clock.now() - decided.at > _SAME_TIME_S


# Seconds in which a time limit of a rule is not looked at again.
_SAME_TIME_S: Final = 1.0


def list_due(execution: Execution) -> tuple[str, ...]:
    """Return what has to happen before a run ends, as far as its calls were read."""
    binding = [guard for guard in execution.config.guards if guard.binds_end()]
    history = view_calls(execution) if binding else _NO_HISTORY
    return tuple([text for guard in binding for text in guard.list_due(history)])
