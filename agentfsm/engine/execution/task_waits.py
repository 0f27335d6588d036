"""Tasks of calls at servers: the wait of a call, the time to look at its task again, and an execution that waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio

from agentfsm.core.calls import Phase, parse_arguments
from agentfsm.core.json_text import round_timestamp
from agentfsm.core.pending import Pending, PendingKind

if TYPE_CHECKING:
    from agentfsm.core.calls import OpenCall
    from agentfsm.core.messages import ToolCall
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.tools.run_context import TaskPending

# Seconds between two looks at the inbox of a run whose execution waits for a task.
_INBOX_POLL_S: Final = 1.0


def build_task_wait(run: Run, call: ToolCall, pause: TaskPending, now: float) -> Pending:
    """Return the wait of a call for its task, `now` by the store's clock."""
    return Pending(
        kind=PendingKind.TASK,
        run_id=run.id,
        call_id=call.id,
        tool=call.name,
        arguments=parse_arguments(call),
        description=pause.message,
        expires_at=round_timestamp(now + pause.wait_s),
    )


def waits_for_task(entry: OpenCall) -> bool:
    """Return whether a call waits for its own task; that of a run below has a wait of that run."""
    return entry.has_task and entry.phase is Phase.PAUSED and entry.pending[0].kind is PendingKind.TASK


def is_task_due(entry: OpenCall, now: float) -> bool:
    """Return whether the task of a call is to be looked at again, `now` by the store's clock."""
    due_at = entry.pending[0].expires_at if waits_for_task(entry) else None
    return due_at is not None and now >= due_at


async def wait_for_tasks(execution: Execution) -> bool:
    """Wait until a task is due if the run waits for tasks only, and return whether it is to go on.

    A worker gives the run back instead, and any takes it when a task is due. So does the run of a sub-agent, whose
    parent run waits.
    """
    journal, options = execution.journal, execution.options
    if options.lease is not None or options.parent_budget is not None or options.once or not journal.run.awaits_tasks:
        return False
    await journal.flush()
    due_at = min([item.expires_at or 0.0 for item in journal.run.pending])
    with journal.stop_active_time():
        while not journal.has_unread_inbox and (left_s := due_at - await journal.store.now()) > 0:
            await anyio.sleep(min(left_s, _INBOX_POLL_S))
            await journal.look_at_inbox()
    if execution.background is not None:
        for each in journal.run.open_background:
            execution.background.retry(each.call.id)
    return True
