"""Evidence: files in which other commands recorded what they measured, each of one version of an agent."""

from __future__ import annotations

import json
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import COUNT, COUNT_OR_ZERO, NAME, NOT_NEGATIVE, STRING, require_choice
from agentfsm.core.value import Value
from agentfsm.evals.results import Evaluation

T = TypeVar("T")

# Names of the files in the folder of the evidence.
EVAL_FILE: Final = "eval.json"
LOAD_FILE: Final = "load.json"
ROLLBACK_FILE: Final = "rollback.json"
RESTORE_FILE: Final = "restore.json"


@attrs.frozen(kw_only=True)
class LoadReport(Value):
    """Times of runs at a stated concurrency, as `agentfsm load` writes them."""

    agent: str = attrs.field(validator=STRING)
    """Name of the agent."""

    fingerprint: str = attrs.field(validator=STRING)
    """Digest of the agent's fingerprint."""

    at: str = attrs.field(validator=STRING)
    """Time of the measurement, ISO 8601."""

    model: str = attrs.field(validator=STRING)
    """Name of the model."""

    runs: int = attrs.field(validator=COUNT)
    """Number of runs."""

    concurrency: int = attrs.field(validator=COUNT)
    """Number of runs at a time, `runs` at most."""

    failed: int = attrs.field(validator=COUNT_OR_ZERO)
    """Number of runs that ended without an answer, were left waiting for a person, or raised an error."""

    seconds: float = attrs.field(validator=NOT_NEGATIVE)
    """Seconds for all runs together."""

    p50_s: float = attrs.field(validator=NOT_NEGATIVE)
    """Seconds within which half of the runs ended."""

    p95_s: float = attrs.field(validator=NOT_NEGATIVE)
    """Seconds within which 95 % of the runs ended."""

    p99_s: float = attrs.field(validator=NOT_NEGATIVE)
    """Seconds within which 99 % of the runs ended."""

    tokens: int = attrs.field(validator=COUNT_OR_ZERO)
    """Tokens of all runs."""

    usd: float | None = None
    """Cost of all runs in US dollars; None if a price is unknown, or a run raised an error."""

    runs_per_day: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Runs that are expected in a day of production, for a forecast of the costs; None if not given."""

    stop_reasons: dict[str, int] = attrs.field(factory=dict)
    """Number of runs by the reason of their end: a stop reason, "waiting", or "raised" with the type of the error."""

    def save(self, path: str | Path) -> None:
        """Write the report as JSON. A missing folder is created."""
        write_evidence(path, attrs.asdict(self))


@attrs.frozen(kw_only=True)
class DrillReport(Value):
    """A practised procedure, as `agentfsm drill` writes it."""

    kind: Literal["rollback", "restore"] = attrs.field(validator=require_choice("rollback", "restore"))
    """Procedure: a roll-back of a release, or a restore of the store from a backup."""

    subject: str = attrs.field(validator=STRING)
    """Name of the agent whose release was rolled back; else name of the file, or kind of the store, of the backup."""

    at: str = attrs.field(validator=STRING)
    """Time of the end, ISO 8601."""

    seconds: float = attrs.field(validator=NOT_NEGATIVE)
    """Seconds from the decision until all new runs were begun with the old release, or all journals were read."""

    by: str = attrs.field(validator=NAME)
    """Person or program that did it."""

    checked: int = attrs.field(validator=COUNT_OR_ZERO)
    """Number of users whose arm was checked, or of runs whose journals were read."""

    note: str = ""
    """Facts of the drill, for people."""

    agents: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    """Of a restore: names of the agents with runs in the backup."""

    failure: str = ""
    """Why the procedure does not work; empty if it does. A drill that failed replaces an older one that passed."""

    def save(self, folder: str | Path) -> Path:
        """Write the report as JSON into the folder of the evidence, and return its path."""
        path = Path(folder) / {"rollback": ROLLBACK_FILE, "restore": RESTORE_FILE}[self.kind]
        write_evidence(path, attrs.asdict(self))
        return path

    def find_age_days(self, on: date) -> int:
        """Return the number of days from the drill to a day.

        Raises:
            MisuseError: if `at` is not a time.
        """
        try:
            return (on - datetime.fromisoformat(self.at).date()).days
        except ValueError as error:
            raise MisuseError(f"the time {self.at!r} of a drill is none: write it as 2027-01-31T12:00:00") from error


def write_evidence(path: str | Path, document: dict[str, Any]) -> None:
    """Write a file of evidence as JSON. A missing folder is created."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@attrs.frozen
class Evidence(Value):
    """The files of evidence in a folder. Each is read when it is asked for."""

    folder: Path
    """The folder; it may be missing."""

    def read_evaluation(self) -> Evaluation | None:
        """Return the result of `agentfsm eval run`; None if there is none.

        Raises:
            MisuseError: if the file is something else.
        """
        path = self.folder / EVAL_FILE
        return Evaluation.load(path) if path.exists() else None

    def read_load(self) -> LoadReport | None:
        """Return the result of `agentfsm load`; None if there is none.

        Raises:
            MisuseError: if the file is something else.
        """
        return self._read(LOAD_FILE, LoadReport)

    def read_drill(self, name: str) -> DrillReport | None:
        """Return the record of a drill; None if there is none.

        Raises:
            MisuseError: if the file is something else.
        """
        return self._read(name, DrillReport)

    def _read(self, name: str, kind: type[T]) -> T | None:
        path = self.folder / name
        if not path.exists():
            return None
        try:
            return kind(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError, MisuseError) as error:
            raise MisuseError(f"{path} is not a {kind.__name__}: {error}") from None
