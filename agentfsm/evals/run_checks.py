"""Checks of what a run has done, beside those of its answer: calls that were not made, and questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.messages import Outcome
from agentfsm.core.pending import PendingKind
from agentfsm.core.validation import shorten_repr
from agentfsm.core.value import Value
from agentfsm.prompts import ReplyCheck
from agentfsm.prompts.assertions import as_checks
from agentfsm.tools.builtin import ASK_USER

if TYPE_CHECKING:
    from agentfsm.core.run import Run

_QUESTION_MARKS: Final = ("?", "？", "؟")  # noqa: RUF001  of other scripts


@attrs.frozen(kw_only=True)
class RunCheck(Value):
    """A check of the runs of a conversation, made by `not_called` or `no_question`."""

    name: str
    """Description of the check, for reports."""

    find_failure: Callable[[Sequence[Run[Any]]], str | None] = attrs.field(repr=False, eq=False)
    """Returns the reason why the runs fail, or None if they pass."""


Expectation: TypeAlias = ReplyCheck | RunCheck


def not_called(*tools: str) -> RunCheck:
    """Return the check that none of these tools is called; a call that was rejected or refused did not happen."""
    if not tools or not all(isinstance(tool, str) and tool for tool in tools):
        raise MisuseError(f"not_called({', '.join(map(repr, tools))}): give names of tools")

    def find(runs: Sequence[Run[Any]]) -> str | None:
        made = [call.name for run in runs for call in run.calls if call.outcome is not Outcome.SKIPPED]
        called = [tool for tool in tools if tool in made]
        return f"{', '.join(called)} was called" if called else None

    return RunCheck(name=f"not_called {', '.join(tools)}", find_failure=find)


def no_question() -> RunCheck:
    """Return the check that the user is asked nothing: by a tool, or by an answer that ends with a question mark."""

    def find(runs: Sequence[Run[Any]]) -> str | None:
        for run in runs:
            if any(call.name == ASK_USER for call in run.calls):
                return f"{ASK_USER} was called"
            if asked := next((item for item in run.pending if item.kind is PendingKind.QUESTION), None):
                return f"{asked.tool} asks the user"
            if run.state is State.DONE and run.answer.rstrip().endswith(_QUESTION_MARKS):
                return "an answer is a question"
        return None

    return RunCheck(name="no_question", find_failure=find)


def as_expectations(given: Iterable[object]) -> tuple[Expectation, ...]:
    """Convert what is expected: checks, a function of the answer, or as they stand in a file."""
    if isinstance(given, str | Mapping):
        raise MisuseError(f"expect={shorten_repr(given)}: give a list of checks")
    return tuple(map(_as_expectation, given))


def _as_expectation(data: Any) -> Expectation:
    match data:
        case RunCheck():
            return data
        case "no_question":
            return no_question()
        case {"not_called": str() as tool, **rest} if not rest:
            return not_called(tool)
        case {"not_called": [*tools], **rest} if not rest:
            return not_called(*tools)
    [check] = as_checks([data])
    return check
