"""What a run waits for, in words, and the command lines that end the wait."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from agentfsm.cli.inquiry import question_lines
from agentfsm.cli.plain import NOTE_CHARS, listed, moment
from agentfsm.core.clean import one_line
from agentfsm.core.effects import PendingKind
from agentfsm.core.text_safety import escape_hidden

if TYPE_CHECKING:
    from agentfsm.cli.place import Way
    from agentfsm.core.effects import Pending

# Characters of what a tool asks: its message, the address to open, and the fields to fill in.
INQUIRY_CHARS: Final = 1_000
# The built-in tool that asks the user.
ASK_USER: Final = "ask_user"
# Why nobody knows what became of a call.
WENT_UNSEEN: Final = "was under way when its worker died or was stopped, or when the run was forked"


def place_of(item: Pending, run_id: str = "") -> str:
    """Return which call it is about; of another run than this one with its id."""
    return item.call_id if item.run_id == run_id else f"{item.call_id} of run {item.run_id}"


_WISHES: Final = {
    PendingKind.APPROVAL: "the approval of",
    PendingKind.OUTCOME: "the outcome of",
    PendingKind.QUESTION: "an answer to",
    PendingKind.INPUT: "input for",
}


# What a run itself waits for.
_OF_A_RUN: Final = {
    PendingKind.INPUT: "your word",
    PendingKind.PAUSE: "the end of a pause",
    PendingKind.CRASH: "the end of a pause after crashes",
}


def wish(item: Pending, run_id: str = "") -> str:
    """Return what a run waits for in a few words: "the approval of t1.0"."""
    if not item.call_id:
        return f"{_OF_A_RUN[item.kind]}{_elsewhere(item, run_id)}"
    return f"{_WISHES[item.kind]} {place_of(item, run_id)}"


def _elsewhere(item: Pending, run_id: str) -> str:
    return "" if item.run_id == run_id else f" in run {item.run_id}"


def question_of(item: Pending) -> str | None:
    """Return what the user is asked in so many words; None where another tool's result is asked for."""
    question = item.arguments.get("question")
    return question if item.tool == ASK_USER and isinstance(question, str) else None


def pending_line(item: Pending, run_id: str) -> str:
    """Return what a run waits for, in a line.

    Args:
        item: One thing that it waits for.
        run_id: The run that waits; a sub-agent's is named.
    """
    told = _TOLD[item.kind](item)
    if not item.call_id:
        return told if item.run_id == run_id else f"run {item.run_id}: {told}"
    return f"{place_of(item, run_id)}: {told}"


def until(item: Pending, then: str) -> str:
    """Return what becomes of it when its time is up; nothing where it has no end."""
    return "" if item.expires_at is None else f" (no answer until {moment(item.expires_at)} {then})"


def _may_it_run(item: Pending) -> str:
    what = f" {one_line(item.description, NOTE_CHARS)}" if item.description.strip() else ""
    call = one_line(escape_hidden(f"{item.tool}({listed(item.arguments)})"), NOTE_CHARS)
    return f"may {call} run?{what}{until(item, 'is a no')}"


def _what_became_of_it(item: Pending) -> str:
    return f"{item.tool} {WENT_UNSEEN}; what became of it?"


def _what_is_the_answer(item: Pending) -> str:
    if item.questions:
        return one_line("; ".join(question_lines(item)), INQUIRY_CHARS) + until(item, "and the call goes without")
    question = question_of(item)
    asked = f"what does {item.tool}({listed(item.arguments)}) give?" if question is None else question
    return one_line(asked, NOTE_CHARS) + until(item, "and the run goes on without")


def _what_comes_in(item: Pending) -> str:
    if not item.call_id:
        return one_line(item.description, NOTE_CHARS)
    reason = item.arguments.get("reason")
    why = f" ({reason})" if isinstance(reason, str) and reason.strip() else ""
    end = "" if item.expires_at is None else f", until {moment(item.expires_at)} at the longest"
    return one_line(f"it waits until something is sent{end}{why}", NOTE_CHARS)


_TOLD: Final[Mapping[PendingKind, Callable[[Pending], str]]] = {
    PendingKind.APPROVAL: _may_it_run,
    PendingKind.OUTCOME: _what_became_of_it,
    PendingKind.QUESTION: _what_is_the_answer,
    PendingKind.INPUT: _what_comes_in,
    PendingKind.PAUSE: lambda item: one_line(item.description, NOTE_CHARS),
    PendingKind.CRASH: lambda item: one_line(item.description, NOTE_CHARS),
}


# How it is ended.


def ways(item: Pending, way: Way) -> list[str]:
    """Return the command lines that end the wait; none for a pause, which the line behind them ends."""
    if way.place is None and _WAYS[item.kind]:
        return [f"from Python, with {_METHODS[item.kind]}: its store is the agent's own"]
    forms = _INQUIRY_WAYS if item.questions else _WAYS[item.kind]
    shown = f" --digest {item.digest}" if item.digest else ""
    return [way.line(form.format(run=shlex.quote(item.run_id), call=item.call_id, shown=shown)) for form in forms]


_WAYS: Final = {
    PendingKind.APPROVAL: ("approve {run} {call}{shown}", "reject {run} {call} --message WHY"),
    PendingKind.OUTCOME: (
        "settle {run} {call} --result TEXT",
        "settle {run} {call} --failed TEXT",
        "settle {run} {call} --rerun",
    ),
    PendingKind.QUESTION: ("answer {run} {call} TEXT", "answer {run} {call} TEXT --failed"),
    PendingKind.INPUT: ("send {run} TEXT",),
    PendingKind.PAUSE: (),
    PendingKind.CRASH: (),
}
# What a tool asks in the middle of its call.
_INQUIRY_WAYS: Final = ("answer {run} {call} JSON", "answer {run} {call} --decline")
_METHODS: Final = {
    PendingKind.APPROVAL: "agent.approve or agent.reject",
    PendingKind.OUTCOME: "agent.settle",
    PendingKind.QUESTION: "agent.answer",
    PendingKind.INPUT: "agent.send",
}
