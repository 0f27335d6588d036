"""Working memory: the notes of a run, and the text of notes and plan steps that a compaction hides from the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import attrs

from agentfsm.core.calls import format_names, may_have_happened, parse_arguments
from agentfsm.core.history import Segment, Span
from agentfsm.core.messages import AssistantMessage, Message, MessageOrigin, Outcome, ToolCall, ToolResult, UserMessage
from agentfsm.core.plans import PlanProgress, find_step_number
from agentfsm.core.text_safety import fence_untrusted, strip_unsafe
from agentfsm.core.value import Value

NOTE_TOOL: Final = "note"
# Beginning of the text of hidden notes and steps.
WORK_START: Final = "[Working memory]"
# Notes of a run: the oldest are dropped.
MAX_NOTES: Final = 50
MAX_KEY_CHARS: Final = 100
# Source: document G, 3.
MAX_NOTE_CHARS: Final = 300
MAX_RESULT_CHARS: Final = 200
# Calls with effects in the note of a compaction, and characters of the arguments and of the result of each: about 1,200
# tokens in all.
MAX_EFFECTS: Final = 20
MAX_EFFECT_CHARS: Final = 100


@attrs.frozen(kw_only=True)
class Note(Value):
    """A note that the model has made for itself, by a call of the tool `note`."""

    text: str
    """The note."""

    call_id: str
    """Id of the call that made it."""


def update_notes(notes: Mapping[str, Note], calls: Iterable[ToolCall]) -> Mapping[str, Note]:
    """Return the notes after calls of `note` that succeeded, in their order. A note without a text is removed.

    Calls of another tool with the name `note`, whose arguments are not a key and a value, change nothing.
    """
    for call in calls:
        arguments = parse_arguments(call)
        key, value = arguments.get("key"), arguments.get("value")
        if len(arguments) != 2 or not isinstance(key, str) or not isinstance(value, str):
            continue
        others = {name: note for name, note in notes.items() if name != key}
        kept = [*others.items(), *([(key, Note(text=value, call_id=call.id))] if value.strip() else [])]
        notes = dict(kept[-MAX_NOTES:])
    return notes


def describe_hidden_work(
    notes: Mapping[str, Note], plan: PlanProgress | None, messages: Sequence[Message], shown: Sequence[Message]
) -> str:
    """Return the notes and the steps of the plan as the model reads them, if it is not shown them; else nothing.

    If one note is hidden, all are returned, and the same holds for steps.

    Args:
        notes: The notes, by key.
        plan: The plans of the run; None if there are none.
        messages: The whole history.
        shown: The messages that the model is shown.
    """
    is_plan_hidden = plan is not None and _count_plan_notes(shown) < _count_plan_notes(messages)
    calls = {call.id for message in shown if isinstance(message, AssistantMessage) for call in message.calls}
    lines: list[str] = []
    # The note of a step is shown with the results of its plan, any other one with its call.
    hidden = [
        note.call_id not in calls if find_step_number(note.call_id) is None else is_plan_hidden
        for note in notes.values()
    ]
    if any(hidden):
        lines += ["Your notes:", *[f"- {_shorten(key)}: {_shorten(note.text)}" for key, note in notes.items()]]
    if plan is not None and is_plan_hidden:
        lines.append("The steps of your plan:")
        closed: set[int | None] = set()
        for call, result in [(entry.call, entry.result) for entry in plan.steps if entry.result is not None]:
            number = find_step_number(call.id)
            closed.add(number)
            mark = "[x]" if result.outcome is Outcome.DONE else "[!]"
            done = _shorten(f"{call.name} {call.arguments}", MAX_RESULT_CHARS)
            lines.append(f"{mark} {number}. {done}: {_shorten(result.content, MAX_RESULT_CHARS)}")
        left = () if plan.plan is None else [step for step in plan.plan.steps if step.id not in closed]
        lines += [f"[ ] {_shorten(step.describe(), MAX_RESULT_CHARS)}" for step in left]
    text = "\n".join(lines)
    return f"{WORK_START} From messages that are not shown any more. {fence_untrusted(text)}" if lines else ""


def describe_hidden_effects(
    acted: Collection[str], messages: Sequence[Message], layout: tuple[Sequence[Segment], int]
) -> str:
    """Return the calls with effects that a compaction hides, as the model reads them in its note; empty without any.

    The newest 20 have their arguments and outcome, shortened; older ones are counted.

    Args:
        acted: Ids of the calls that may have had an effect.
        messages: The whole history.
        layout: The segments of the compaction, and the index of the first message after them.
    """
    if not acted:
        return ""
    (segments, start), ids = layout, frozenset(acted)
    shown = {place for entry in segments if isinstance(entry, Span) for place in range(entry.start, entry.end)}
    calls: dict[str, ToolCall] = {}
    lines: list[tuple[str, str]] = []
    for place, message in enumerate(messages[:start]):
        if place in shown:
            continue
        if isinstance(message, AssistantMessage):
            calls |= {call.id: call for call in message.calls}
        elif isinstance(message, ToolResult) and message.call_id in ids and message.call_id in calls:
            is_done = message.outcome is Outcome.DONE
            if is_done or may_have_happened(message):
                end = "done" if is_done else "its outcome is unknown"
                asked = _shorten(calls[message.call_id].arguments, MAX_EFFECT_CHARS)
                said = _shorten(message.content, MAX_EFFECT_CHARS)
                lines.append((message.tool, f"- {message.tool} {asked}: {end}: {said}"))
    if not lines:
        return ""
    older = format_names([name for name, _ in lines[:-MAX_EFFECTS]])
    listed = [*([f"- before these: {older}"] if older else []), *[line for _, line in lines[-MAX_EFFECTS:]]]
    text = fence_untrusted("\n".join(listed))
    return f"[Calls in them that had effects, which remain; do not repeat them.] {text}"


def _count_plan_notes(messages: Iterable[Message]) -> int:
    return sum(isinstance(each, UserMessage) and each.origin is MessageOrigin.PLAN for each in messages)


def _shorten(text: str, chars: int = MAX_NOTE_CHARS) -> str:
    line = " ".join(strip_unsafe(text).split())
    return line if len(line) <= chars else f"{line[: chars - 3]}..."
