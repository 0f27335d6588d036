"""Journals of tasks with chosen durations, turns, tokens, costs and outcomes, built without an engine."""

from __future__ import annotations

from agentfsm import AssistantMessage, Outcome, StopReason, TextPart, ToolCall, ToolResult, Usage
from agentfsm.core import events as e
from agentfsm.core.header import Fingerprint, Header
from agentfsm.ports import StoredRun


def record_task(
    number: int,
    at: float,
    *,
    seconds: float = 2.0,
    turns: int = 1,
    tokens: int = 100,
    usd: float = 0.01,
    failed: StopReason | None = None,
    outcome: Outcome = Outcome.DONE,
    agent: str = "shop",
    served: str = "",
) -> StoredRun:
    """Return the journal of a task that was created at a time; each turn but the last has one call of `search`."""
    header = Header(
        id=f"r{number}", prompt=(TextPart(text="go"),), created_at=at, agent=agent, fingerprint=Fingerprint(model="m")
    )
    step = seconds / (2 * turns)
    usage = Usage(input_tokens=tokens // turns - 1, output_tokens=1, cost_usd=usd / turns)
    events: list[e.Event] = [e.Observed(at=at)]
    for turn in range(1, turns):
        call = ToolCall(id=f"t{turn}.0", name="search", arguments="{}", key=f"k{turn}")
        now = at + 2 * step * turn
        result = ToolResult(
            call_id=call.id, tool="search", outcome=outcome, content="x", started_at=now - step, duration_s=step
        )
        message = AssistantMessage(text="", calls=(call,))
        events += [
            e.ToolsChosen(message=message, usage=usage, at=now - step, took_s=step),
            e.ToolStarted(call_id=call.id, at=now - step),
            e.ToolFinished(result=result, at=now, took_s=step),
            e.ToolsReturned(at=now),
            e.Continued(at=now),
            e.Observed(at=now),
        ]
    end = at + seconds
    if failed is None:
        message = AssistantMessage(text="done")
        events.append(e.AnswerGiven(message=message, usage=usage, at=end, took_s=2 * step, served_model=served))
    else:
        events.append(e.Failed(reason=failed, message="it failed", at=end, took_s=2 * step))
    return StoredRun(header=header, events=tuple(events))
