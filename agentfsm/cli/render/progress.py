"""Views show the events of a run while it is executed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from agentfsm.cli.render.formatting import NOTE_CHARS, VALUE_CHARS, format_duration
from agentfsm.cli.render.pending import format_wait
from agentfsm.cli.render.text import CallView, build_turns
from agentfsm.core.machine import State
from agentfsm.core.plans import is_skipped
from agentfsm.core.text_safety import one_line
from agentfsm.streaming.stream import AgentEvent, AgentEventType, StateChanged, ToolEvent, ToolEventType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run
    from agentfsm.streaming.stream import StreamEvent


class RunView(Protocol):
    """Shows a run while it is executed, between `begin` and `end`. Both may be called several times."""

    def begin(self, run: Run) -> None:
        """Start showing the run, in its current state."""
        ...

    def on_event(self, event: StreamEvent, run: Run) -> None:
        """Show an event. `run` is the state after it."""
        ...

    def end(self, run: Run) -> None:
        """Stop showing the run, and restore the terminal."""
        ...


@attrs.define(eq=False, repr=False, kw_only=True)
class PlainView:
    """Writes a line for each event."""

    terminal: Terminal
    _offered: tuple[str, ...] | None = None
    """Tools of the newest selection that was shown."""

    def begin(self, run: Run) -> None:
        """Write nothing; the first event starts the output."""
        self._offered = run.offered

    def on_event(self, event: StreamEvent, run: Run) -> None:
        """Write a line for an event; some events have none."""
        if isinstance(event, StateChanged):
            for line in _format_state_change(event, run):
                self.terminal.err(line)
        elif isinstance(event, AgentEvent):
            self.terminal.err(f"  {event.call_id}   {format_agent_event(event)}")
        elif isinstance(event, ToolEvent) and (text := _format_tool_event(event, run)) is not None:
            self.terminal.err(f"  {event.call_id} {text}")
        if run.offered != self._offered:
            self._offered = run.offered
            if run.offered is not None:
                self.terminal.err(f"  {format_offer(run.offered)}")

    def end(self, run: Run) -> None:
        """Write nothing; the report follows."""


def _format_state_change(event: StateChanged, run: Run) -> list[str]:
    if event.state is State.THINK:
        return [f"turn {event.turn + 1}"]
    if event.state is not State.ACT:
        return []
    turns = [turn for turn in build_turns(run) if turn.number == event.turn and not turn.is_plan]
    text = turns[0].text if turns else ""
    return [f"  | {line}" for line in text.splitlines()]


def find_call(run: Run, call_id: str) -> CallView | None:
    """Return the call with this id; None if the run has no such call."""
    return next((call for turn in reversed(build_turns(run)) for call in turn.calls if call.id == call_id), None)


def format_offer(tools: Sequence[str]) -> str:
    """Return the tools that were selected for the model."""
    return one_line(f"{len(tools)} tools offered: {', '.join(tools)}", NOTE_CHARS)


def format_agent_event(event: AgentEvent) -> str:
    """Return the progress of a sub-agent, which is shown below its call."""
    agent = one_line(event.agent, VALUE_CHARS)
    if event.type is AgentEventType.STARTED:
        return f"{agent} started, run {event.child_id}"
    if event.type is AgentEventType.PROGRESS:
        return f"{agent}, turn {event.turn} of {event.limit}"
    if event.type is AgentEventType.PAUSED:
        return f"{agent} waits after {format_duration(event.duration_s or 0.0)}"
    how = "is done" if event.success else "failed"
    return f"{agent} {how} after {format_duration(event.duration_s or 0.0)}"


def _format_tool_event(event: ToolEvent, run: Run) -> str | None:
    """Return the line of a tool's event, without the id of its call; None for an event that has no line."""
    match event.type:
        case ToolEventType.STARTED:
            call = find_call(run, event.call_id)
            return event.tool if call is None else call.title
        case ToolEventType.COMPLETED:
            return f"done in {format_duration(event.duration_s or 0.0)}"
        case ToolEventType.ERROR:
            message = one_line(event.message, NOTE_CHARS)
            if any(entry.call.id == event.call_id and entry.result and is_skipped(entry.result) for entry in run.open):
                return f"{event.tool} {message}"
            return f"{event.tool} failed after {format_duration(event.duration_s or 0.0)}: {message}"
        case ToolEventType.PROGRESS:
            return one_line(event.message, NOTE_CHARS)
        case ToolEventType.PAUSED:
            call = find_call(run, event.call_id)
            waits = () if call is None else call.waits
            return one_line(f"waits for {', '.join(format_wait(item, run.id) for item in waits)}", NOTE_CHARS)
        case _:
            return None
