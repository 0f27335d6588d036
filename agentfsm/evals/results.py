"""Results of an evaluation, with the means and rates of all cases. A result is kept as a JSON file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from statistics import fmean
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.evals.scorers import GRADE, Grade, TurnResult, add_usd

# Version of the form of the file.
RESULT_FORMAT: Final = 1
# Grade of the outcome from which a run counts as passed.
PASSED: Final = "outcome"


@attrs.frozen(kw_only=True)
class CaseResult(Value):
    """Result of one run of a case."""

    case: str
    """Id of the case."""

    repeat: int
    """Number of the run among those of the case, from 1."""

    run_id: str
    """Id of the last run in the store, for `agentfsm show`."""

    grades: Mapping[str, Grade]
    """Grade by the name of the scorer."""

    total: float | None = attrs.field(validator=GRADE.or_none())
    """Mean of the grades, weighted as the case says; None if nothing was scored."""

    tags: tuple[str, ...] = ()
    """Tags of the case."""

    stop_reason: str = ""
    """Reason why the run ended; empty if it waits for a person."""

    turns: int = 0
    """Turns of the model."""

    tokens: int = 0
    """Input and output tokens, sub-agents included."""

    usd: float | None = None
    """US dollars, those of runs that were lost with their process and begun again included; None if a price is unknown.
    """

    estimated: bool = False
    """Whether tokens of the run were estimated, because the provider did not report them, and with them `usd`."""

    user_usd: float | None = 0.0
    """US dollars of the simulated user, 0 without one; None if a price is unknown."""

    seconds: float = 0.0
    """Active time of the run."""

    calls: tuple[str, ...] = ()
    """Tools that the run called, in order."""

    is_kept: bool = False
    """Whether the run was made by an earlier evaluation of the same version, and was only graded again."""

    conversation: tuple[TurnResult, ...] = ()
    """The turns of the user with their grades; empty if the case is a single text."""

    findings: tuple[str, ...] = ()
    """Reasons to doubt the result, such as a call that was not recorded."""

    @property
    def total_usd(self) -> float | None:
        """US dollars of the run, the simulated user and the judges; None if a price is unknown."""
        return add_usd([self.usd, self.user_usd, self.judge_usd])

    @property
    def judge_usd(self) -> float | None:
        """US dollars of the judges; None if a price is unknown."""
        grades = [self.grades, *[turn.grades for turn in self.conversation]]
        return add_usd(grade.usd for each in grades for grade in each.values())

    @property
    def passed(self) -> bool:
        """Whether the outcome is the expected one."""
        grade = self.grades.get(PASSED)
        return grade is not None and grade.value == 1


@attrs.frozen(kw_only=True)
class Evaluation(Value):
    """Results of all runs of a suite with one agent."""

    suite: str
    """Name of the suite."""

    agent: str
    """Name of the agent."""

    version: str = ""
    """Version of the agent; empty if it has none."""

    fingerprint: str = ""
    """Digest of the agent's fingerprint."""

    model: str = ""
    """Name of the model."""

    speed: str = "live"
    """"live", "recorded" or "replay"."""

    at: str = ""
    """Time of the end, in ISO 8601 and UTC."""

    runs: int
    """Runs of each case."""

    results: tuple[CaseResult, ...]
    """Results, by case and then by repeat."""

    cases: Mapping[str, str] = attrs.field(factory=dict)
    """Digest of each case of the suite by its id: of what the user says and of what is expected, functions by their
    code. Evaluations of different cases are not compared. Empty if it is unknown.
    """

    estimated_usd: float | None = None
    """US dollars that all of it was estimated to cost before it began; None if a price is unknown, or no estimate was
    asked for.
    """

    @property
    def usd(self) -> float | None:
        """US dollars of the runs, without simulated users and judges; None if a price is unknown."""
        return add_usd(each.usd for each in self.results)

    @property
    def estimated(self) -> bool:
        """Whether `usd` is in part that of estimated tokens."""
        return any(each.estimated for each in self.results)

    @property
    def user_usd(self) -> float | None:
        """US dollars of the simulated users; None if a price is unknown."""
        return add_usd(each.user_usd for each in self.results)

    @property
    def judge_usd(self) -> float | None:
        """US dollars of the judges; None if a price is unknown."""
        return add_usd(each.judge_usd for each in self.results)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the aspects that were scored, in the order of the scorers."""
        names = dict.fromkeys(name for each in self.results for name in each.grades)
        return tuple(name for name in names if self.by_case(name))

    def by_case(self, metric: str = PASSED, *, tag: str | None = None) -> dict[str, list[float]]:
        """Return the grades of an aspect by case, without those that were not scored.

        Args:
            metric: Name of the scorer; "total" for the weighted mean.
            tag: Only cases with this tag; None for all.
        """
        found: dict[str, list[float]] = {}
        for each in self.results:
            grade = each.total if metric == "total" else each.grades.get(metric, Grade(None)).value
            if grade is not None and (tag is None or tag in each.tags):
                found.setdefault(each.case, []).append(grade)
        return found

    def find_unscored(self, metric: str = PASSED) -> dict[str, str]:
        """Return the cases of which a run should be scored by an aspect and is not, with the first reason.

        A case of the suite of which not all runs were made is one of them. What a case does not ask for, such as steps
        without a limit, is not.
        """
        found: dict[str, str] = {}
        for each in self.results:
            for name, grade in each.grades.items():
                if metric in {name, "total"} and grade.value is None and grade.reason:
                    found.setdefault(each.case, grade.reason)
        made = Counter(each.case for each in self.results)
        missing = {case: made[case] for case in self.cases if made[case] < self.runs}
        return found | {case: f"{count} of {self.runs} runs were made" for case, count in missing.items()}

    def find_judges(self, metric: str) -> frozenset[str]:
        """Return the digests of the judges that have graded an aspect; "" for one that gives none, but a name."""
        found = [
            (name, grade)
            for each in self.results
            for name, grade in each.grades.items()
            if metric in {name, "total"} and grade.value is not None
        ]
        return frozenset([grade.judge for name, grade in found if grade.judge or name.startswith("judge")])

    def find_all_unscored(self) -> dict[str, dict[str, str]]:
        """Return what `find_unscored` returns for each aspect of which it finds something."""
        names = dict.fromkeys(name for each in self.results for name in each.grades)
        return {name: found for name in names if (found := self.find_unscored(name))}

    def mean(self, metric: str = PASSED, *, tag: str | None = None) -> float | None:
        """Return the mean over the cases of their mean grade, from 0 to 1; None if nothing was scored."""
        grades = self.by_case(metric, tag=tag).values()
        return fmean(map(fmean, grades)) if grades else None

    def pass_hat(self, k: int) -> float:
        """Return pass^k: the probability that all of `k` runs of a case pass, as the mean over the cases.

        The estimate C(c, k) / C(n, k) for c of n runs that passed is unbiased. Source: tau-bench, arXiv 2406.12045.

        Raises:
            MisuseError: if `k` is not from 1 to the number of runs.
        """
        if k not in range(1, self.runs + 1):
            raise MisuseError(f"pass^{k} of {self.runs} runs: give a number from 1 to {self.runs}")
        passed: dict[str, list[bool]] = {}
        for each in self.results:
            passed.setdefault(each.case, []).append(each.passed)
        return fmean(math.comb(sum(each), k) / math.comb(len(each), k) for each in passed.values())

    def save(self, path: str | Path) -> None:
        """Write the evaluation as JSON. A missing folder is created. After an error, an earlier file is as it was."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f".{file.name}.{token_hex(4)}")
        try:
            fresh.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
            fresh.replace(file)
        finally:
            fresh.unlink(missing_ok=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the evaluation as plain JSON."""
        return {"format": RESULT_FORMAT, **attrs.asdict(self)}

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Read an evaluation that `save` wrote.

        Raises:
            MisuseError: if the file cannot be read, or is something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            is_known = data.pop("format") == RESULT_FORMAT
            found = cls(**{**data, "results": tuple(map(_read_result, data["results"]))}) if is_known else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MisuseError) as error:
            raise MisuseError(f"{path} is not the result of an evaluation: {error}") from None
        if found is None:
            raise MisuseError(f"{path} has another format: evaluate again with this version of agentfsm")
        return found


def _read_result(data: Mapping[str, Any]) -> CaseResult:
    lists: dict[str, Any] = {name: tuple(data[name]) for name in ("tags", "calls", "findings")}
    turns = [TurnResult(**{**each, "grades": _read_grades(each["grades"])}) for each in data.get("conversation", ())]
    return CaseResult(**{**data, **lists, "conversation": tuple(turns), "grades": _read_grades(data["grades"])})


def _read_grades(data: Mapping[str, Any]) -> dict[str, Grade]:
    return {name: Grade(**grade) for name, grade in data.items()}
