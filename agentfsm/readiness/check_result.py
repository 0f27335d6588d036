"""Results of the checks, and waivers."""

from __future__ import annotations

import tomllib
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value


class CheckStatus(StrEnum):
    """Status of a check."""

    PASS = "pass"  # noqa: S105  not a password
    """The requirement is met."""

    FAIL = "fail"
    """The requirement is not met."""

    UNKNOWN = "unknown"
    """It could not be found out. Counts as not met."""

    WAIVED = "waived"
    """It is not met, and a person has accepted that until a date."""


class CheckSource(StrEnum):
    """Source from which the status of a check was determined."""

    AGENT = "agent"
    """The agent object: its limits, tools, guards and policies."""

    STORE = "store"
    """The store and its server."""

    EVIDENCE = "evidence"
    """A file that another command wrote, such as `agentfsm eval run` and `agentfsm load`."""

    PROBE = "probe"
    """A run of the agent with a scripted model, tools without effects, and virtual time."""

    PROJECT = "project"
    """The files of the project."""


@attrs.frozen
class CheckFinding(Value):
    """Outcome of the function of a check."""

    status: CheckStatus
    """Status of the check."""

    detail: str
    """The facts, with numbers."""

    remedy: str = ""
    """The remedy; empty if the check passed."""


@attrs.frozen(kw_only=True)
class Waiver(Value):
    """Decision of a person to go live although a check is not met."""

    check: str
    """Id of the check."""

    by: str
    """Person who decided."""

    until: date
    """Last day on which the waiver counts."""

    reason: str
    """Reason of the decision."""


@attrs.frozen(kw_only=True)
class CheckResult(Value):
    """Result of one check."""

    id: str
    """Id of the check, such as "eval-cases"."""

    area: str
    """Area: "quality", "performance", "security", "cost", "observability" or "release"."""

    requirement: str
    """The requirement, in a few words."""

    source: CheckSource
    """Source of the status."""

    status: CheckStatus
    """Status, with waivers."""

    detail: str
    """The facts, with numbers."""

    remedy: str = ""
    """The remedy; empty if the check passed."""

    waiver: Waiver | None = None
    """Waiver of the check, also if it has expired; None if there is none."""

    @property
    def is_met(self) -> bool:
        """Whether the check passed or is waived."""
        return self.status in (CheckStatus.PASS, CheckStatus.WAIVED)


@attrs.frozen(kw_only=True)
class ReadinessReport(Value):
    """Results of all checks of an agent."""

    agent: str
    """Name of the agent."""

    version: str
    """Version of the agent; empty if not given."""

    fingerprint: str
    """Digest of the agent's fingerprint."""

    on: date
    """Day of the report."""

    checks: tuple[CheckResult, ...]
    """The results, by area."""

    @property
    def is_ready(self) -> bool:
        """Whether all checks passed or are waived."""
        return all(each.is_met for each in self.checks)

    def count(self, status: CheckStatus) -> int:
        """Return the number of checks with a status."""
        return sum(each.status is status for each in self.checks)


_WAIVER_FIELDS: Final = tuple(each.name for each in attrs.fields(Waiver))


def load_waivers(path: str | Path) -> dict[str, Waiver]:
    """Read a TOML file with a table `[[waiver]]` for each waiver: `check`, `by`, `until` (a date) and `reason`.

    Returns:
        The waivers by the id of their check.

    Raises:
        MisuseError: if the file cannot be read, a waiver lacks a field, or a check has two.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("waiver", [])
    except (OSError, ValueError) as error:
        raise MisuseError(f"{path} is not a file of waivers: {error}") from None
    if not isinstance(tables, list):
        raise MisuseError(f"{path}: begin each waiver with [[waiver]], in two brackets")
    waivers: dict[str, Waiver] = {}
    for table in tables:
        if not isinstance(table, dict) or sorted(table) != sorted(_WAIVER_FIELDS):
            given = ", ".join(table) if isinstance(table, dict) else repr(table)
            raise MisuseError(f"{path}: a waiver has the fields {', '.join(_WAIVER_FIELDS)}, not {given}")
        made = Waiver(**table)
        if type(made.until) is not date:
            raise MisuseError(f"{path}: until = {made.until!r} of {made.check!r} is no date: write it as 2027-01-31")
        if not all(isinstance(each, str) and each.strip() for each in (made.check, made.by, made.reason)):
            raise MisuseError(f"{path}: check, by and reason of a waiver are texts, and none is empty")
        if made.check in waivers:
            raise MisuseError(f"{path}: there are two waivers of {made.check!r}: keep the one that counts")
        waivers[made.check] = made
    return waivers
