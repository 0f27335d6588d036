"""Status and output of a run as JSON values, for clients of the MCP server and of the gateway."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agentfsm.core.errors import ArgumentsError
from agentfsm.core.machine import State
from agentfsm.tools.queue import result_text

if TYPE_CHECKING:
    from agentfsm.core.run import Run


def describe_status(state: State, *, is_waiting: bool) -> str:
    """Return the status of a run in one word: running, waiting, done or stopped."""
    if state in (State.DONE, State.ERROR):
        return "done" if state is State.DONE else "stopped"
    return "waiting" if is_waiting else "running"


def read_output(run: Run) -> Any:
    """Return the answer as JSON values; the text itself if it does not match the agent's output type any more."""
    try:
        value = run.output
    except ArgumentsError:
        return run.answer
    return value if isinstance(value, str) else json.loads(result_text.render_text(value))
