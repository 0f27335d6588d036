"""Have screens read the texts of a run before guards decide on its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.core.labels import Label, LabelSource
from agentfsm.core.messages import ToolResult, UserMessage
from agentfsm.engine.tool_calls.call_guards import Finding, is_undecided
from agentfsm.ports.screening import ScreenedText

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution


async def screen_texts(execution: Execution) -> tuple[Finding, ...]:
    """Return the decisions of screens that concern a call without a decision. Nothing is committed."""
    config, run = execution.config, execution.journal.run
    undecided = [entry for entry in run.open if is_undecided(execution, entry)]
    tools = [tool for entry in undecided if (tool := config.find_tool(entry.call.name)) is not None]
    screens = [screen for screen in config.screens if any(screen.concerns(tool.traits) for tool in tools)]
    if not screens:
        return ()
    texts = list_texts(run)
    found = [(screen, await screen.screen(texts)) for screen in screens]
    return tuple([(screen, decision) for screen, decision in found if decision is not None])


def list_texts(run: Run) -> tuple[ScreenedText, ...]:
    """Return the untrusted results and the inputs that a run has read, newest first, also those before a compaction."""
    texts: list[ScreenedText] = []
    steps = () if run.plan is None else run.plan.closed
    for message in (*run.messages, *[entry.result for entry in steps]):
        if isinstance(message, ToolResult) and Label.UNTRUSTED in message.labels:
            source = LabelSource(label=Label.UNTRUSTED, run_id=run.id, call_id=message.call_id, name=message.tool)
            texts.append(ScreenedText(text=message.content, source=source))
        elif isinstance(message, UserMessage) and not message.is_note:
            texts.append(ScreenedText(text=message.text, source=None))
    return tuple(reversed(texts))
