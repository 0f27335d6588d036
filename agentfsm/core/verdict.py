"""Verdict of a judge on an answer or on results: scores and the next action."""

from __future__ import annotations

from enum import StrEnum

import attrs

from agentfsm.core.value import Value


class Action(StrEnum):
    """Next action after a judgement."""

    ACCEPT = "accept"
    RETRY_STEP = "retry_step"
    REPLAN = "replan"
    ESCALATE = "escalate"


@attrs.frozen(kw_only=True)
class Score(Value):
    """Score of one criterion."""

    criterion: str
    """Name of the criterion: "completeness", "correctness", "format", or one of your own."""

    score: int
    """Degree to which the criterion is met, from 1 (not at all) to 5 (fully)."""

    reason: str = ""
    """Reason for the score; empty if the judge gave none."""


@attrs.frozen(kw_only=True)
class Verdict(Value):
    """Verdict of a judge."""

    action: Action
    """Next action of the run."""

    scores: tuple[Score, ...] = ()
    """Scores by criterion, in the order of the rubric; empty if the judge gives none."""

    passed: bool | None = None
    """Whether the work passes as a whole, as the judge says; None if it does not say. The scores take precedence."""

    step: str = ""
    """Step to repeat, under the judge's name for it; empty for the whole answer."""

    note: str = ""
    """Change that is needed; or the reason why a person is asked, which is the question to that person if there are no
    scores.
    """
