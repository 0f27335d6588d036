"""ACT: decide on the open calls, and run those that may run.

ACT commits while it runs, through `OpenCalls.record`: each stage of a call is in the journal before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentfsm.core.effects import RunTools, Wait
from agentfsm.core.messages import ToolCall

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.tool_calls.host import ToolCalls


async def act(execution: Execution, effect: RunTools | Wait, calls: ToolCalls) -> None:
    """Run the calls that may run. If no call may run and some are open, the run waits for a person."""
    host, run = calls.host, execution.journal.run
    host.unfinished = len(run.open)
    ready: Sequence[ToolCall] = effect.calls if isinstance(effect, RunTools) else ()
    for decide in calls.line.open_calls:
        ready = await decide(host, ready)
    host.has_decided = True
    if calls.drained_pending and not (ready and host.unfinished):
        await calls.queue.emit_drained()
    calls.drained_pending = False
    if not host.unfinished:
        host.record()
    elif ready:
        running = calls.execute_steps(ready) if run.reply is None else calls.queue.execute_all(ready)
        await calls.run_deferring_changes(running)
