"""What a run waits for: approvals, outcomes, answers, input and the end of a pause."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import attrs

from agentfsm.core.value import Value


class PendingKind(StrEnum):
    """What a run waits for."""

    APPROVAL = "approval"
    OUTCOME = "outcome"
    QUESTION = "question"
    INPUT = "input"
    PAUSE = "pause"
    CRASH = "crash"


@attrs.frozen(kw_only=True)
class Question(Value):
    """What a tool asks a person in the middle of its call; the call is made again with the answer."""

    key: str
    """By which the tool finds the answer again; unique among the questions of a pause."""

    message: str
    """What the person reads."""

    schema: dict[str, Any] | None = None
    """JSON Schema of the answer: an object whose properties are plain values. None: it is agreed to, or declined."""

    url: str = ""
    """What the person has to open, where it is done elsewhere; what is done there does not come by here."""


@attrs.frozen(kw_only=True)
class Pending(Value):
    """One thing that has to come from outside before the run goes on."""

    kind: PendingKind
    """APPROVAL: may it run? (`approve`, `reject`). OUTCOME: what became of it? (`settle`). QUESTION: what is its
    result? (`answer`). INPUT: anything that is sent (`send`), for a call also the end of its time. PAUSE: only
    `resume`. CRASH: workers died while they drove this run and no other; only `resume`, when it is known why.
    """

    run_id: str
    """The run to decide in: this one, or a sub-agent's."""

    call_id: str = ""
    """The call that waits, and below what it calls; a PAUSE has none, nor has a run that itself waits for INPUT."""

    tool: str = ""
    arguments: dict[str, Any] = attrs.field(factory=dict)
    """Exactly what the tool will be, or was, given, as JSON values."""

    description: str = ""
    """What the call will do, where the tool says so."""

    expires_at: float | None = None
    """Seconds since 1970 by the store's clock; an approval not given by then is a no, as a question is not answered.
    None: it waits for ever.
    """

    digest: str = ""
    """Of what is asked: what an approval, or the answer to a tool's questions, is bound to."""

    error: str = ""
    """Why the last approval was not carried out: its arguments did not fit the tool. Empty otherwise."""

    questions: tuple[Question, ...] = ()
    """What a tool asks in the middle of its call, all answered at once; empty where the answer is the call's result."""
