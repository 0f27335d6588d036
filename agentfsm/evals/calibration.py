"""Calibrate a judge: compare its grades with the labels of people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.evals.statistics import cohen_kappa, spearman

# Labels that a calibration needs, and the rank correlation from which a judge is trusted (document H, 3.2: 50 to 100).
MIN_LABELS: Final = 50
MIN_AGREEMENT: Final = 0.6
# Grade from which an answer counts as good.
GOOD: Final = 0.75


@attrs.frozen(kw_only=True)
class JudgeCalibration(Value):
    """Agreement of a judge with people."""

    labels: int
    """Number of answers that both have graded."""

    spearman: float
    """Rank correlation of the grades, from -1 to 1."""

    kappa: float
    """Agreement beyond chance on which answers are good (Cohen), up to 1."""

    false_passes: int
    """Answers that only the judge finds good."""

    false_fails: int
    """Answers that only people find good."""

    unscored: int = 0
    """Answers that the judge has not scored."""

    def find_doubt(self) -> str | None:
        """Return the reason why the judge may not decide; None if it has 50 labels or more, and agrees with them."""
        if self.labels < MIN_LABELS:
            return f"the judge is calibrated with {self.labels} labels: collect {MIN_LABELS} or more"
        if min(self.spearman, self.kappa) < MIN_AGREEMENT:
            return (
                f"the judge does not agree with people (Spearman {self.spearman:.2f}, kappa {self.kappa:.2f}; both "
                f"have to be {MIN_AGREEMENT} or more): improve its rubric or take another model"
            )
        return None


def calibrate(judged: Sequence[float | None], labels: Sequence[float], *, good: float = GOOD) -> JudgeCalibration:
    """Compare the grades of a judge with the labels of people for the same answers.

    Args:
        judged: Grades of the judge, from 0 to 1; None for an answer that it has not scored.
        labels: Labels of people on the same scale.
        good: Grade from which an answer counts as good.

    Raises:
        MisuseError: if the lists have different lengths, or nothing in common.
    """
    if len(judged) != len(labels):
        raise MisuseError(f"{len(judged)} grades and {len(labels)} labels: give one label for each grade")
    pairs = [(grade, label) for grade, label in zip(judged, labels, strict=True) if grade is not None]
    if not pairs:
        raise MisuseError("no answer has both a grade of the judge and a label")
    grades, own = [grade for grade, _label in pairs], [label for _grade, label in pairs]
    passes, wanted = [grade >= good for grade in grades], [label >= good for label in own]
    return JudgeCalibration(
        labels=len(pairs),
        spearman=spearman(grades, own) if len(pairs) > 1 else 0.0,
        kappa=cohen_kappa(passes, wanted),
        false_passes=sum(a and not b for a, b in zip(passes, wanted, strict=True)),
        false_fails=sum(b and not a for a, b in zip(passes, wanted, strict=True)),
        unscored=len(judged) - len(pairs),
    )
