"""Checks of what a run has done, beside those of its answer: calls that were not made, and questions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.messages import ErrorType, Outcome, ToolResult
from agentfsm.core.pending import PendingKind
from agentfsm.core.validation import shorten_repr
from agentfsm.core.value import Value
from agentfsm.prompts import ReplyCheck
from agentfsm.prompts.assertions import as_checks
from agentfsm.tools.builtin import ASK_USER

if TYPE_CHECKING:
    from agentfsm.core.run import Run

# A question mark at the end of a sentence, whatever marks follow it, such as those of Markdown; not one of an address.
_QUESTION: Final = re.compile(r"[？؟]|\?(?:[^\w\s]|_)*(?:\s|\Z)")  # noqa: RUF001  of other scripts
# Reasons why a call was refused before it could begin.
_REFUSED: Final = frozenset(
    {ErrorType.ARGUMENTS, ErrorType.UNKNOWN_TOOL, ErrorType.NOT_PERMITTED, ErrorType.WITHDRAWN, ErrorType.BLOCKED}
)


@attrs.frozen(kw_only=True)
class RunCheck(Value):
    """A check of the runs of a conversation, made by `not_called` or `no_question`."""

    name: str
    """Description of the check, for reports."""

    find_failure: Callable[[Sequence[Run[Any]], Sequence[Run[Any]]], str | None] = attrs.field(repr=False, eq=False)
    """Function of the runs, and of those of the agents that they called. It returns the reason why the runs fail, or
    None if they pass.
    """

    tools: tuple[str, ...] = ()
    """Tools that it is about: an agent that has none of such a name is a finding, since the name may be mistyped."""


Expectation: TypeAlias = ReplyCheck | RunCheck


def not_called(*tools: str) -> RunCheck:
    """Return the check that none of these tools runs, for the agent or an agent that it calls.

    A call that a person rejected, or that was refused before it began, did not happen.
    """
    if not tools or not all(isinstance(tool, str) and tool for tool in tools):
        raise MisuseError(f"not_called({', '.join(map(repr, tools))}): give names of tools")

    def find(runs: Sequence[Run[Any]], below: Sequence[Run[Any]]) -> str | None:
        whole = [*runs, *below]
        results = [each for run in whole for each in run.messages[run.own_start :] if isinstance(each, ToolResult)]
        results += [each.result for run in whole if run.plan for each in run.plan.closed if each.result is not None]
        never_ran = {Outcome.SKIPPED, Outcome.REJECTED}
        ran = {each.tool for each in results if each.outcome not in never_ran and each.error_type not in _REFUSED}
        called = [tool for tool in tools if tool in ran]
        return f"{', '.join(called)} was called" if called else None

    return RunCheck(name=f"not_called {', '.join(tools)}", find_failure=find, tools=tools)


def no_question() -> RunCheck:
    """Return the check that the user is asked nothing: by a tool, or by a sentence of an answer that is a question."""

    def find(runs: Sequence[Run[Any]], _below: Sequence[Run[Any]]) -> str | None:
        for run in runs:
            if any(call.name == ASK_USER for call in run.calls):
                return f"{ASK_USER} was called"
            if asked := next((item for item in run.pending if item.kind is PendingKind.QUESTION), None):
                return f"{asked.tool} asks the user"
            if run.state is State.DONE and _QUESTION.search(run.answer):
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
    [check] = as_checks([data], also=("not_called", "'no_question'"))
    return check
