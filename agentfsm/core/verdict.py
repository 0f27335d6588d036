"""What a judge said of an answer or of results: scores, and what shall happen next."""

from __future__ import annotations

from enum import StrEnum

import attrs

from agentfsm.core.value import Value


class Action(StrEnum):
    """What shall happen after a judgement."""

    ACCEPT = "accept"
    RETRY_STEP = "retry_step"
    REPLAN = "replan"
    ESCALATE = "escalate"


@attrs.frozen(kw_only=True)
class Score(Value):
    """How well one criterion is met."""

    criterion: str
    """"completeness", "correctness", "format", or one of your own."""

    score: int
    """1 (not at all) to 5 (fully)."""

    reason: str = ""


@attrs.frozen(kw_only=True)
class Verdict(Value):
    """What a judge said."""

    action: Action
    scores: tuple[Score, ...] = ()
    """By criterion, in the order of the rubric; empty where the judge gives none."""

    step: str = ""
    """What is to be done again: the judge's name for it; empty for the whole."""

    note: str = ""
    """What has to change, or why a person is asked."""
