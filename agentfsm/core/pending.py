"""Things that a run waits for: approvals, outcomes, answers, tasks, input and the end of a pause."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any, Final, TypeAlias

import attrs

from agentfsm.core.value import Value

# Beginning of the result of a call that a person rejected without a reason.
BARE_REJECTION: Final = "not run: a person rejected it."
# Beginning of the reason of a call that has not started and waits for a program with its tool.
NOT_STARTED: Final = "it has not started"


class PendingKind(StrEnum):
    """Kind of thing that a run waits for. `Pending.kind` describes each."""

    APPROVAL = "approval"
    OUTCOME = "outcome"
    QUESTION = "question"
    LOGIN = "login"
    TASK = "task"
    INPUT = "input"
    PAUSE = "pause"
    CRASH = "crash"


@attrs.frozen(kw_only=True)
class Question(Value):
    """A question that a tool asks a person in the middle of its call. The tool is called again with the answer."""

    key: str
    """Key under which the tool finds the answer, unique among the questions of one pause."""

    message: str
    """Text of the question, for the person."""

    schema: dict[str, Any] | None = None
    """JSON Schema of the answer: an object whose properties are plain values. None: the person agrees or declines."""

    url: str = ""
    """URL that the person has to open, if the answer is given elsewhere; its data does not pass through the run."""


@attrs.frozen(kw_only=True)
class Answer(Value):
    """Answer of a person who attends a run, to the questions that a tool asks during its call."""

    content: Mapping[str, Any] | str | None = None
    """Answer to a single question: a dict that fits its schema, or a text if the schema has one property that takes it.
    For several questions: a dict of answers by the key of the question, where None declines one. None: the person
    declines all of them.
    """

    by: str = ""
    """Name of the person, for the journal."""


@attrs.frozen(kw_only=True)
class Pending(Value):
    """One thing that must come from outside before the run can continue."""

    kind: PendingKind
    """Kind of the wait, and the method that ends it. APPROVAL: a person decides whether the call runs (`approve`,
    `reject`). OUTCOME: a person records how a call ended whose worker died (`settle`), or which this program cannot
    carry out. QUESTION: a person or system gives the answer or the result (`answer`). LOGIN: the user of the run logs
    in to the server of the tool, by the URL of the question or with a key, and the call goes on by itself. TASK: a
    server works on a task of the call, and the run looks at it again at `expires_at` without a decision. INPUT: any
    input (`send`), for a call also the end of its time. PAUSE: only `resume`. CRASH: workers died while they executed
    only this run; use `resume` once the cause is known.
    """

    run_id: str
    """Id of the run to decide in: this run, or the run of a sub-agent."""

    call_id: str = ""
    """Id of the call that waits. Empty for a PAUSE or a CRASH, and for a run that itself waits for INPUT."""

    tool: str = ""
    """Name of the tool of the call; empty without a call."""

    arguments: dict[str, Any] = attrs.field(factory=dict)
    """The exact arguments that the tool will be, or was, called with, as JSON values."""

    description: str = ""
    """Effect of the call, as the tool describes it; for a run that waits, the reason. Empty if not given."""

    reason: str = ""
    """Reason why a guard wants an approval, with the sources of the labels that it is about; empty if none does."""

    expires_at: float | None = None
    """Time at which the wait ends, seconds since 1970 by the store's clock. An approval that is not given by then
    counts as a rejection, and a question as not answered. None: no end.
    """

    digest: str = ""
    """Hash of the call or of the tool's questions. An approval or answer is valid only for this digest. Empty if there
    is none.
    """

    error: str = ""
    """Reason why the last approval was not carried out: its arguments did not fit the tool, or a person would be shown
    something else now. For an OUTCOME, the reason why the call is not simply run again. Empty if there is none.
    """

    questions: tuple[Question, ...] = ()
    """Questions that a tool asks in the middle of its call, to be answered together. Empty if the answer is the result
    of the call.
    """

    @property
    def lacks_tool(self) -> bool:
        """Whether this is a step that has not started, because the program has no tool of its name."""
        return self.kind is PendingKind.OUTCOME and self.error.startswith(NOT_STARTED)


Elicit: TypeAlias = Callable[[Pending], "Answer | Awaitable[Answer | None] | None"]
"""Asks a person the questions of a running call. Returns the answer, or an awaitable of it; None for no answer."""
