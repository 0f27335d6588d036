"""Live view of a run as a tree.

Each closed turn is printed once; only the open turn is redrawn. So a long run stays readable in the scrollback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from agentfsm.cli.render.formatting import NOTE_CHARS
from agentfsm.cli.render.progress import format_agent_event, format_offer
from agentfsm.cli.render.text import CallView, TurnView, build_turns
from agentfsm.core.calls import Phase
from agentfsm.core.machine import State
from agentfsm.core.messages import Outcome
from agentfsm.core.run import Run
from agentfsm.core.text_safety import one_line, strip_unsafe
from agentfsm.core.value import Value
from agentfsm.streaming.stream import (
    AgentEvent,
    CallDelta,
    StateChanged,
    StreamEvent,
    TextDelta,
    ToolEvent,
    ToolEventType,
)

# Smooth to the eye, and little traffic for a slow connection.
REFRESHES_PER_S: Final = 12
# Characters that are kept of a text that streams in.
MAX_TEXT_CHARS: Final = 8_000
# Newest lines of that text that are shown.
MAX_TEXT_LINES: Final = 8

_STYLES: Final = {
    Outcome.DONE: "green",
    Outcome.REJECTED: "yellow",
    Outcome.SKIPPED: "yellow",
    Outcome.UNKNOWN: "bold red",
    Phase.AWAITING_APPROVAL: "yellow",
    Phase.OUTCOME_UNKNOWN: "bold red",
    Phase.PAUSED: "yellow",
    "running": "cyan",
}


@attrs.frozen(kw_only=True)
class OpenTurn(Value):
    """Streamed state of the open turn, which the run does not contain yet. Frozen, because another thread draws it."""

    attempt: int = 1
    text: str = ""
    calls: tuple[tuple[str, int], ...] = ()
    """Calls that stream in: name, and number of characters of the arguments so far."""

    notes: tuple[tuple[str, str], ...] = ()
    """Pairs of call id and newest progress message; the message is empty at the start of the call."""

    agents: tuple[tuple[str, str], ...] = ()
    """Pairs of call id and progress of its sub-agent."""

    def find_note(self, call_id: str) -> str | None:
        """Return the newest progress message of a call; None if it has not started."""
        return dict(self.notes).get(call_id)


class LiveView:
    """Shows the open turn while it runs."""

    def __init__(self) -> None:
        """Prepare the view. `begin` shows it."""
        self.console: Console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._run: Run | None = None
        self.open_turn: OpenTurn = OpenTurn()
        self._printed_turns: int | None = None  # number of closed turns printed; None before the first `begin`
        self._live: Live | None = None

    def begin(self, run: Run) -> None:
        """Start showing the open turn. Turns that closed before the first `begin` are not printed."""
        if self._printed_turns is None:
            self._printed_turns = len([turn for turn in build_turns(run) if turn.closed and not turn.is_plan])
        self._run, self.open_turn = run, OpenTurn()
        self._live = live = Live(
            console=self.console,
            get_renderable=self._render,
            transient=True,
            refresh_per_second=REFRESHES_PER_S,
        )
        live.start()

    def on_event(self, event: StreamEvent, run: Run) -> None:
        """Record an event. The thread of `Live` draws the tree."""
        if run is not self._run:
            self._run = run
            closed = [turn for turn in build_turns(run) if turn.closed and not turn.is_plan]
            shown = closed[:-1] if run.state is State.DONE else closed  # the answer is the result, which goes to stdout
            for turn in shown[self._printed_turns or 0 :]:
                self.console.print(self.render_turn(turn, OpenTurn()))
            self._printed_turns = max(self._printed_turns or 0, len(shown))
        self.open_turn = _apply_event(self.open_turn, event)

    def end(self, run: Run) -> None:
        """Remove the open turn from the screen."""
        self._run = run
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> RenderableType:
        run, draft = self._run, self.open_turn
        turns = () if run is None else build_turns(run)
        if (running := next((turn for turn in turns if not turn.closed), None)) is not None:
            return self.render_turn(running, draft)
        if run is None or run.state is not State.THINK:
            return Text("")
        return self.render_incoming_turn(run, draft)

    def render_turn(self, turn: TurnView, draft: OpenTurn) -> RenderableType:
        """Return the picture of a turn whose reply is complete.

        Args:
            turn: The turn.
            draft: Progress of its calls.
        """
        tree = Tree(Text(turn.title, style="bold"), guide_style="dim")
        if turn.fault:
            tree.add(render_fault(turn))
        if turn.text.strip():
            tree.add(Text(strip_unsafe(turn.text).strip()))
        for call in turn.calls:
            ending, style = describe_ending(call, draft.find_note(call.id))
            branch = tree.add(Text.assemble((f"{call.id} ", "dim"), call.title, "\n", (ending, style)))
            for line in list_details(call, draft):
                branch.add(Text(line, style="dim"))
        return tree

    def render_incoming_turn(self, run: Run, draft: OpenTurn) -> RenderableType:
        """Return the picture of a reply that streams in."""
        tree = Tree(Text(f"turn {run.turn + 1}", style="bold"), guide_style="dim")
        if run.offered is not None:
            tree.add(Text(format_offer(run.offered), style="dim"))
        lines = strip_unsafe(draft.text).splitlines()[-MAX_TEXT_LINES:]
        if lines:
            tree.add(Text("\n".join(lines)))
        for call in render_incoming_calls(draft):
            tree.add(call)
        if not lines and not draft.calls:
            tree.add(Text("thinking", style="dim"))
        return tree


def _apply_event(draft: OpenTurn, event: StreamEvent) -> OpenTurn:
    match event:
        case StateChanged(state=State.THINK):
            return OpenTurn()
        case TextDelta() | CallDelta() if event.attempt != draft.attempt:
            return _apply_event(OpenTurn(attempt=event.attempt), event)
        case TextDelta():
            return attrs.evolve(draft, text=(draft.text + event.text)[-MAX_TEXT_CHARS:])
        case CallDelta():
            calls = [*draft.calls, *[("", 0)] * (event.index + 1 - len(draft.calls))]
            name, size = calls[event.index]
            calls[event.index] = (name or event.name, size + len(event.arguments))
            return attrs.evolve(draft, calls=tuple(calls))
        case ToolEvent(type=ToolEventType.STARTED | ToolEventType.PROGRESS):
            return attrs.evolve(draft, notes=_set_note(draft.notes, event.call_id, event.message))
        case AgentEvent():
            return attrs.evolve(draft, agents=_set_note(draft.agents, event.call_id, format_agent_event(event)))
    return draft


def _set_note(notes: tuple[tuple[str, str], ...], call_id: str, note: str) -> tuple[tuple[str, str], ...]:
    return tuple((dict(notes) | {call_id: note}).items())


def render_fault(turn: TurnView) -> Text:
    """Return the error of the model."""
    return Text(f"no reply: {one_line(turn.fault, NOTE_CHARS)}", style="red")


def render_incoming_calls(draft: OpenTurn) -> Iterator[Text]:
    """Yield the calls that the model is writing."""
    for name, size in draft.calls:
        yield Text.assemble(one_line(name, NOTE_CHARS), (f"  being written, {size:,} characters", "dim"))


def list_details(call: CallView, draft: OpenTurn) -> list[str]:
    """Return the lines below a call: its decisions and waits, or the progress of its sub-agent."""
    return [*call.detail_lines] or [line for call_id, line in draft.agents if call_id == call.id]


def describe_ending(call: CallView, note: str | None) -> tuple[str, str]:
    """Return the ending or the progress of a call, and the style of that text.

    Args:
        call: The call.
        note: Newest progress message of the call, empty at its start; None if it has not started.
    """
    running = note is not None and call.duration_s is None and call.status != Phase.PAUSED
    ending = f"running {one_line(note or '', NOTE_CHARS)}".strip() if running else call.outcome_text
    return ending, _STYLES.get("running" if running else call.status, "red" if call.is_failed else "dim")
