"""The view of a conversation in a capable terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from agentfsm.cli.render.live import (
    LiveView,
    OpenTurn,
    describe_ending,
    list_details,
    render_fault,
    render_incoming_calls,
)
from agentfsm.core.machine import State
from agentfsm.core.messages import Outcome
from agentfsm.core.text_safety import one_line, strip_unsafe

if TYPE_CHECKING:
    from agentfsm.cli.render.text import CallView, TurnView
    from agentfsm.core.run import Run

# Rows of the terminal that the text of an incoming reply leaves to the calls below it.
SPARE_ROWS: Final = 8
# Characters of a result that are shown below its call.
RESULT_CHARS: Final = 100


class RichChatView(LiveView):
    """Shows replies as they stream in, then as Markdown; calls of tools as they run."""

    def __init__(self) -> None:
        """Prepare the view."""
        super().__init__()
        self._spinner = Spinner("line", text=Text("thinking", style="dim"), style="dim")

    def render_turn(self, turn: TurnView, draft: OpenTurn) -> RenderableType:
        """Return the text of the turn, and a line for each call."""
        parts: list[RenderableType] = []
        if turn.fault:
            parts.append(render_fault(turn))
        if turn.text.strip():
            parts.append(_render_markdown(turn.text))
        for call in turn.calls:
            parts.append(_render_call(call, draft.find_note(call.id)))
            parts += [Text(f"    {line}", style="dim") for line in list_details(call, draft)]
        return Group(*parts)

    def render_incoming_turn(self, run: Run, draft: OpenTurn) -> RenderableType:  # noqa: ARG002  the tree names the turn
        """Return the end of the text that streams in, as much as the terminal has room for."""
        rows = max(self.console.size.height - SPARE_ROWS, 1)
        lines = Text(strip_unsafe(draft.text).lstrip()).wrap(self.console, self.console.width)
        calls = [Text.assemble(("* ", "cyan"), call) for call in render_incoming_calls(draft)]
        return Group(*lines[-rows:], *calls) if calls else Group(*lines[-rows:], self._spinner)

    def end(self, run: Run) -> None:
        """Remove the live part, and keep the text of a reply that was cut off."""
        super().end(run)
        if run.state is State.THINK and self.open_turn.text.strip():
            self.console.print(_render_markdown(self.open_turn.text))

    def show_message(self, text: str) -> None:
        """Print a message of the person."""
        self.console.print(Text(f"> {strip_unsafe(text)}", style="bold"))

    def show_answer(self, text: str, *, is_new: bool = True) -> None:  # noqa: ARG002  the streamed text is gone
        """Print an answer as Markdown."""
        self.console.print(_render_markdown(text))

    def show_note(self, text: str) -> None:
        """Print a remark."""
        self.console.print(Text(strip_unsafe(text), style="dim"))


def _render_markdown(text: str) -> RenderableType:
    """Return Markdown, with the addresses of links in full, so that no text can stand for another address."""
    return Padding(Markdown(strip_unsafe(text).strip(), hyperlinks=False), (0, 0, 1, 0))


def _render_call(call: CallView, note: str | None) -> Text:
    ending, style = describe_ending(call, note)
    result = one_line(call.content, RESULT_CHARS) if call.status == Outcome.DONE else ""
    shown = f"{ending}: {result}" if result else ending
    return Text.assemble(("* ", style), call.title, "\n", (f"    {shown}", "dim" if result else style))
