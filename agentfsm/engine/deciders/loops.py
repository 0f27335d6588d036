"""Loops: calls and answers that repeat themselves, and equal calls in one reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core import stops as loop_detection
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import ToolResult
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.run_end import stop_at_limit

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.engine.execution.execution import Execution

# Texts for the first and the second finding of a loop; the third stops the run.
_LOOP_WARNINGS: Final = (
    "You are repeating yourself: {loop}. The results will not change. Do something else, or answer with what you have.",
    "You are repeating yourself: {loop}. {tools} may not be called any more in this run. Answer with what you have.",
)
# The same texts for repeated answers, where no tool can be withdrawn.
_ANSWER_LOOP_WARNINGS: Final = 2 * (
    "You are repeating yourself: {loop}. It would be refused again: give another answer.",
)
_EQUAL_CALLS_NOTE: Final = (
    "Note: your last reply had equal calls, and each of them was run: {calls}. If you wanted only one, say so, and "
    "undo the others if you can."
)
_LOOP_STOP_NOTE: Final = "You are repeating yourself: {loop}."


async def review_calls(execution: Execution, _effect: Reflect) -> StepOutcome | None:
    """Return the warning of calls that repeat themselves, or the end of the run."""
    run = execution.journal.run
    if run.turn < execution.config.limits.loop_turns:
        return None
    seen = run.messages, execution.config.registry.polling_tools, execution.config.limits
    loop = loop_detection.find_loop(*seen) if execution.recent_turns.may_loop(*seen) else None
    return None if loop is None else _warn_of_loop(execution, loop, note_equal_calls(execution, e.Continued()))


def send_back(execution: Execution, note: e.Continued) -> e.Continued | StepOutcome:
    """Return an objection to a draft, with a warning if the same draft was given before."""
    run = execution.journal.run
    if note.asks or run.turn < execution.config.limits.loop_turns:  # a person reviews the next step
        return note
    loop = loop_detection.find_loop(run.messages, execution.config.registry.polling_tools, execution.config.limits)
    return note if loop is None else _warn_of_loop(execution, loop, note)


def note_equal_calls(execution: Execution, note: e.Continued) -> e.Continued:
    """Add to a note that the reply called tools that are not read-only several times with equal arguments.

    The calls run, since that may be meant: two payments of the same amount need not be a mistake.
    """
    config, journal, run = execution.config, execution.journal, execution.journal.run
    last = run.messages[-1]
    if type(last) is not ToolResult or last.index == 0 or run.plan is not None or note.asks:  # most turns: one call
        return note
    turn = run.messages[-1 - last.index :]
    names = [each.tool for each in turn if type(each) is ToolResult and each.attempts]
    writes = {
        name
        for name in set(names)
        if names.count(name) > 1 and (tool := config.find_tool(name)) and not tool.read_only and not tool.poll
    }
    equal = loop_detection.count_equal_calls(run.messages, writes) if writes else {}
    if not equal:
        return note
    calls = ", ".join(f"{name} {count} times" for name, count in equal.items())
    journal.log.warning("equal_calls", turn=run.turn, tools=equal)
    text = _EQUAL_CALLS_NOTE.format(calls=calls)
    return attrs.evolve(note, note=f"{note.note}\n{text}".lstrip())


def _warn_of_loop(execution: Execution, loop: loop_detection.DetectedLoop, note: e.Continued) -> StepOutcome:
    """Add a loop warning to a note: first a hint, then the tools are withdrawn, then the run stops."""
    journal, run = execution.journal, execution.journal.run
    change: dict[str, Any] = {}
    if loop.is_hint:
        text = f"Note: {loop.description}{', though the arguments differ' if loop.tools else ''}."
    elif run.loops < len(_LOOP_WARNINGS):
        text = (_LOOP_WARNINGS if loop.tools else _ANSWER_LOOP_WARNINGS)[run.loops].format(
            loop=loop.description, tools=", ".join(loop.tools)
        )
        change = {"loop": True, "disabled": loop.tools if run.loops else ()}
    else:
        text = f"{note.note}\n{_LOOP_STOP_NOTE.format(loop=loop.description)}".lstrip()
        message = f"{loop.description}, after {run.loops} warnings"
        return stop_at_limit(execution, StopReason.LOOP_DETECTED, message, note=text)
    journal.log.warning("loop", turn=run.turn, what=loop.description)
    return StepOutcome((attrs.evolve(note, note=f"{note.note}\n{text}".lstrip(), **change),))
