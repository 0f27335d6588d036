"""Decide whether a candidate may replace a baseline, and keep the history of decisions.

The baseline is pinned: a file that changes only by decision. Compared with the version before it only, an agent could
lose 4 % with each release and pass each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm._lib.shared_files import append_line, open_log
from agentfsm.core.errors import MisuseError
from agentfsm.core.usage import format_usd
from agentfsm.core.validation import is_number, shorten_repr
from agentfsm.core.value import Value
from agentfsm.evals.comparison import WORSE_BY, Comparison, Conclusion, compare, name_cases
from agentfsm.evals.results import PASSED, Evaluation
from agentfsm.evals.scorers import add_usd
from agentfsm.evals.statistics import CONFIDENCE

if TYPE_CHECKING:
    from agentfsm.evals.rubric_judge import JudgeCalibration


class GateDecision(StrEnum):
    """Decision of a gate."""

    PASS = "pass"  # noqa: S105  not a password
    """No aspect is shown to be worse, and the loss that is not accepted is excluded for each."""

    WORSE = "worse"
    """An aspect is worse by more than is accepted, or is below its floor."""

    UNDECIDED = "undecided"
    """The cases do not suffice to decide."""


@attrs.frozen(kw_only=True)
class GateReport(Value):
    """Decision of a gate, with its reasons."""

    decision: GateDecision
    """The decision."""

    comparisons: tuple[Comparison, ...]
    """Comparison of each aspect."""

    reasons: tuple[str, ...]
    """Reasons for the decision, one sentence for each aspect."""

    missing: int = 0
    """Number of further cases that would settle all aspects, with as many runs of each; 0 unless it is undecided."""

    missing_usd: float | None = 0.0
    """US dollars that they are likely to cost, with simulated users and judges; None if a price is unknown."""

    unscored: tuple[str, ...] = ()
    """Cases that are missing or were not scored, in any of the aspects; with one, the gate is not passed."""

    def __str__(self) -> str:
        if self.decision is not GateDecision.UNDECIDED:
            return f"gate: {self.decision}"
        if self.unscored:
            return f"gate: {self.decision}; {name_cases(self.unscored)} missing or not scored"
        cost = format_usd(self.missing_usd, estimated=True)
        return f"gate: {self.decision}; {self.missing} more cases would decide ({cost})"


def gate(
    candidate: Evaluation,
    against: Evaluation,
    *,
    metrics: Iterable[str] = (PASSED,),
    worse_by: float = WORSE_BY,
    confidence: float = CONFIDENCE,
    floors: Mapping[str, float] | None = None,
    calibration: JudgeCalibration | None = None,
) -> GateReport:
    """Decide whether a candidate may replace a baseline.

    Args:
        candidate: Evaluation of the candidate.
        against: Evaluation of the pinned baseline, of the same suite.
        metrics: Aspects that may not become worse. With several, each is tested more strictly, so that the
            probability of a false alarm is that of one (Bonferroni).
        worse_by: Relative loss that is not accepted.
        confidence: Confidence of all aspects together, above 0 and below 1.
        floors: Lowest accepted mean by aspect, from 0 to 1, whatever the baseline has.
        calibration: JudgeCalibration of the judge; needed for an aspect that a judge grades.

    Raises:
        MisuseError: if a judge is not calibrated, an aspect was not scored, or the cases are not those of the baseline.
    """
    names, limits = tuple(dict.fromkeys(metrics)), dict(floors or {})
    if not names:
        raise MisuseError("gate(metrics=()): name one aspect or more")
    for each in (candidate, against):
        check_judges(each, (*names, *limits), calibration)
    share = 1 - (1 - confidence) / len(names)
    found = [compare(against, candidate, metric=each, worse_by=worse_by, confidence=share) for each in names]
    decisions = [(_decide_aspect(each), str(each)) for each in found]
    decisions += check_floors(candidate, limits)
    order = (GateDecision.WORSE, GateDecision.UNDECIDED, GateDecision.PASS)
    decision = min((each for each, _reason in decisions), key=order.index)
    missing = 0
    if decision is GateDecision.UNDECIDED:
        missing = max([max(1, each.needed - each.cases) for each in found if _is_undecided(each)], default=0)
    unscored = [case for each in found for case in each.unscored]
    unscored += [case for name in limits for case in candidate.find_unscored(name)]
    spent = add_usd([candidate.usd, candidate.user_usd, candidate.judge_usd])
    cases = len({each.case for each in candidate.results})
    return GateReport(
        decision=decision,
        comparisons=tuple(found),
        reasons=tuple(reason for _decision, reason in decisions),
        missing=missing,
        missing_usd=None if spent is None else missing * spent / cases,
        unscored=tuple(dict.fromkeys(unscored)),
    )


def check_judges(evaluation: Evaluation, names: Iterable[str], calibration: JudgeCalibration | None) -> None:
    """Raise a MisuseError if a judge has graded one of these aspects, and the calibration does not allow it."""
    for name in names:
        for judge in evaluation.find_judges(name):
            if calibration is None:
                raise MisuseError(
                    f"{name}: a judge that is not calibrated decides nothing: see `agentfsm eval calibrate`"
                )
            if (why := calibration.find_doubt()) is not None:
                raise MisuseError(why)
            if judge and judge != calibration.judge:
                raise MisuseError(
                    f"{name}: the calibration is of {calibration.judge or 'an unknown judge'}, and the judge here is "
                    f"{judge}, of another model or rubric: calibrate this judge"
                )


def check_floors(evaluation: Evaluation, floors: Mapping[str, float]) -> list[tuple[GateDecision, str]]:
    """Return a decision with its reason for each floor that is not shown to hold: "worse" below it, else "undecided".

    Raises:
        MisuseError: if a floor is not a mean, or an aspect was not scored.
    """
    found = []
    for name, floor in floors.items():
        if not is_number(floor) or not 0 <= floor <= 1:
            raise MisuseError(f"floor of {name!r}: {shorten_repr(floor)} is not a mean: give numbers from 0 to 1")
        mean = evaluation.mean(name)
        if mean is None:
            raise MisuseError(f"no case has a grade of {name!r}, so its floor cannot be checked")
        if mean < floor:
            found.append((GateDecision.WORSE, f"{name}: {mean:.1%} is below the floor of {floor:.1%}"))
        elif unscored := [*evaluation.find_unscored(name)]:
            why = f"{name}: {name_cases(unscored)} not scored, so the floor of {floor:.1%} is not shown to hold"
            found.append((GateDecision.UNDECIDED, why))
    return found


def _is_undecided(found: Comparison) -> bool:
    return _decide_aspect(found) is GateDecision.UNDECIDED


def _decide_aspect(found: Comparison) -> GateDecision:
    """Return the decision on one aspect: a loss below the margin is accepted, even if it is certain."""
    if found.conclusion is Conclusion.WORSE:
        if found.excludes_margin:
            return GateDecision.PASS
        return GateDecision.WORSE if found.difference <= -found.margin else GateDecision.UNDECIDED
    return GateDecision.UNDECIDED if found.conclusion is Conclusion.UNDECIDED else GateDecision.PASS


@attrs.frozen(kw_only=True)
class HistoryEntry(Value):
    """Means of one evaluation, in a history of versions."""

    at: str
    """Time of the evaluation, in ISO 8601 and UTC."""

    version: str
    """Version of the agent; empty if it has none."""

    model: str
    """Name of the model."""

    means: Mapping[str, float]
    """Mean by aspect."""

    decision: str
    """Decision of the gate: "pass", "worse" or "undecided"."""


def append_history(path: str | Path, evaluation: Evaluation, decision: GateDecision) -> tuple[HistoryEntry, ...]:
    """Append an evaluation to a history in JSON Lines, and return all of it, oldest first.

    Raises:
        MisuseError: if the file is not a history.
    """
    means = {name: mean for name in evaluation.metrics if (mean := evaluation.mean(name)) is not None}
    entry = HistoryEntry(
        at=evaluation.at, version=evaluation.version, model=evaluation.model, means=means, decision=str(decision)
    )
    try:
        with open_log(Path(path)) as log:
            entries = (*_parse_history(path, log.read().decode()), entry)
            append_line(log, json.dumps(attrs.asdict(entry), ensure_ascii=False))
    except (OSError, UnicodeError) as error:
        raise MisuseError(f"{path} is not a history of evaluations: {error}") from None
    return entries


def load_history(path: str | Path) -> tuple[HistoryEntry, ...]:
    """Return a history, oldest first; empty if there is no such file.

    Raises:
        MisuseError: if the file is not a history.
    """
    try:
        return _parse_history(path, Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeError) as error:
        raise MisuseError(f"{path} is not a history of evaluations: {error}") from None


def _parse_history(path: str | Path, text: str) -> tuple[HistoryEntry, ...]:
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        return tuple(HistoryEntry(**line) for line in lines)
    except (ValueError, TypeError) as error:
        raise MisuseError(f"{path} is not a history of evaluations: {error}") from None


def find_creep(entries: Iterable[HistoryEntry], worse_by: float = WORSE_BY) -> tuple[str, ...]:
    """Return a sentence for each aspect whose newest mean is below the best one by more than a relative loss."""
    *earlier, newest = entries
    found = []
    for name, mean in newest.means.items():
        best = max(earlier, key=lambda each: each.means.get(name, 0.0), default=newest)
        top = best.means.get(name, 0.0)
        if mean < top * (1 - worse_by):
            found.append(f"{name}: {mean:.1%}, and it was {top:.1%} in version {best.version or '-'} at {best.at}")
    return tuple(found)
