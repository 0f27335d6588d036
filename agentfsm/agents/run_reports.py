"""Output of a run, and the run itself, as JSON values, for clients of the MCP server and of the gateway."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.claims import format_claims
from agentfsm.core.errors import ArgumentsError
from agentfsm.core.machine import State
from agentfsm.tools.queue.result_json import encode_value

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.journal.run_status import RunStatus


def read_output(run: Run) -> Any:
    """Return the answer as JSON values; the text itself if it does not match the agent's output type any more."""
    try:
        value = run.output
    except ArgumentsError:
        return run.answer
    return value if isinstance(value, str) else json.loads(encode_value(value, set()))


def describe_run(run: Run, status: RunStatus, standstill: str) -> dict[str, Any]:
    """Return a run for the model of a client: its status, its answer or why it failed, and what it waits for."""
    view: dict[str, Any] = {
        "run_id": run.id,
        "status": status,
        "turn": run.turn,
        "tokens": run.usage.tokens,
    }
    if run.state is State.DONE:
        view["answer"] = read_output(run)
    elif run.stop_reason is not None:
        view |= {"stop_reason": str(run.stop_reason), "stop_message": run.stop_message}
    if run.findings:
        view["findings"] = [*run.findings]
    if run.not_done:
        view["not_done"] = format_claims(run.not_done)
    if standstill:
        view["standstill"] = standstill
    if run.pending:
        view["pending"] = [attrs.asdict(item) for item in run.pending]
    return view


def describe_progress(run: Run) -> str:
    """Return the turn of a run and what it does, for people."""
    names = ", ".join(entry.call.name for entry in run.open)
    return f"turn {run.turn}: {names or run.state}"
