"""Who watches a run that is driven: a view is told each event of the stream, and shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from agentfsm.cli.plain import NOTE_CHARS, VALUE_CHARS, seconds
from agentfsm.cli.show import CallView, turns_of
from agentfsm.cli.waits import wish
from agentfsm.core.clean import one_line
from agentfsm.core.machine import State
from agentfsm.streaming.stream import AgentEvent, AgentEventType, StateChanged, ToolEvent, ToolEventType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run
    from agentfsm.streaming.stream import StreamEvent


class View(Protocol):
    """Shows a run while it is driven, between `begin` and `end`; several times, where a person decides in between."""

    def begin(self, run: Run) -> None:
        """Show what is there when driving starts."""
        ...

    def see(self, event: StreamEvent, run: Run) -> None:
        """Show an event; `run` is the newest state."""
        ...

    def end(self, run: Run) -> None:
        """Leave the terminal in order."""
        ...


@attrs.define(eq=False, repr=False, kw_only=True)
class PlainView:
    """Writes a line for each thing that happens."""

    terminal: Terminal
    _offered: tuple[str, ...] | None = None
    # The newest choice of tools that was told.

    def begin(self, run: Run) -> None:
        """Say nothing: the first event will."""
        self._offered = run.offered

    def see(self, event: StreamEvent, run: Run) -> None:
        """Write a line, if the event deserves one."""
        if isinstance(event, StateChanged):
            for line in _state_lines(event, run):
                self.terminal.err(line)
        elif isinstance(event, AgentEvent):
            self.terminal.err(f"  {event.call_id}   {agent_line(event)}")
        elif isinstance(event, ToolEvent) and (tell := _TOLD.get(event.type)) is not None:
            self.terminal.err(f"  {event.call_id} {tell(event, run)}")
        if run.offered != self._offered:
            self._offered = run.offered
            if run.offered is not None:
                self.terminal.err(f"  {offer_line(run.offered)}")

    def end(self, run: Run) -> None:
        """Say nothing: the report will."""


def _state_lines(event: StateChanged, run: Run) -> list[str]:
    if event.state is State.THINK:
        return [f"turn {event.turn + 1}"]
    if event.state is not State.ACT:
        return []
    text = next((turn.text for turn in turns_of(run) if turn.number == event.turn), "")
    return [f"  | {line}" for line in text.splitlines()]


def call_of(run: Run, call_id: str) -> CallView | None:
    """Return the call of that id, open or closed."""
    return next((call for turn in reversed(turns_of(run)) for call in turn.calls if call.id == call_id), None)


def offer_line(tools: Sequence[str]) -> str:
    """Return which tools were chosen among many."""
    return one_line(f"{len(tools)} tools offered: {', '.join(tools)}", NOTE_CHARS)


def agent_line(event: AgentEvent) -> str:
    """Return how far a sub-agent is; it stands below its call."""
    agent = one_line(event.agent, VALUE_CHARS)
    if event.type is AgentEventType.STARTED:
        return f"{agent} works on it, run {event.child_id}"
    if event.type is AgentEventType.PROGRESS:
        return f"{agent}, turn {event.turn} of {event.limit}"
    if event.type is AgentEventType.PAUSED:
        return f"{agent} waits, after {seconds(event.duration_s or 0.0)}"
    how = "is done" if event.success else "stopped"
    return f"{agent} {how} after {seconds(event.duration_s or 0.0)}"


def _started(event: ToolEvent, run: Run) -> str:
    call = call_of(run, event.call_id)
    return event.tool if call is None else call.title


def _completed(event: ToolEvent, _run: Run) -> str:
    return f"done in {seconds(event.duration_s or 0.0)}"


def _failed(event: ToolEvent, _run: Run) -> str:
    message = one_line(event.message, NOTE_CHARS)
    return f"{event.tool} failed after {seconds(event.duration_s or 0.0)}: {message}"


def _progress(event: ToolEvent, _run: Run) -> str:
    return one_line(event.message, NOTE_CHARS)


def _paused(event: ToolEvent, run: Run) -> str:
    call = call_of(run, event.call_id)
    waits = () if call is None else call.waits
    return one_line(f"waits for {', '.join(wish(item, run.id) for item in waits)}", NOTE_CHARS)


_TOLD: Mapping[ToolEventType, Callable[[ToolEvent, Run], str]] = {
    ToolEventType.STARTED: _started,
    ToolEventType.COMPLETED: _completed,
    ToolEventType.ERROR: _failed,
    ToolEventType.PROGRESS: _progress,
    ToolEventType.PAUSED: _paused,
}
