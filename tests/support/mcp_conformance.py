"""The official conformance suite: its scenarios run against ours, and what has failed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import yaml

from tests.support.node_packages import packages, program

PACKAGE: Final = "@modelcontextprotocol/conformance"
REVISIONS: Final = ("2025-11-25", "2026-07-28")
# Where the package is that is tested.
AGENTFSM: Final = str(Path(__file__).parents[2])
# For a scenario: a guard against hanging. They are played all at once, on a machine that may have little time for them.
PATIENCE_MS: Final = 200_000
BAD: Final = {"FAILURE", "WARNING"}
# Scenarios that are tried once more; where more fail, it is not for the clock.
MAX_AGAIN: Final = 3
_STAMP: Final = re.compile(r"-\d{4}-\d\d-\d\dT[\d-]+Z$")

Side = Literal["client", "server"]


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of the scenarios of a revision."""

    scenarios: frozenset[str]
    # Those that ran.
    failures: Mapping[str, str]
    # What failed, by "scenario:check", and what the suite says of it.
    passed: int
    # Checks.

    def unlike(self, expected: Mapping[str, str]) -> dict[str, str]:
        """Return the failures that are not expected, and the expected ones that are none.

        Args:
            expected: Why it fails, by "scenario:check", or by "scenario" for all checks of one.
        """
        explained = {name: {name, name.partition(":")[0]} & expected.keys() for name in self.failures}
        new = {name: said for name, said in self.failures.items() if not explained[name]}
        hit = {key for keys in explained.values() for key in keys}
        return new | dict.fromkeys(expected.keys() - hit, "it is listed as a failure and has not failed")


def lasting(outcome: Outcome, expected: Mapping[str, str], again: Callable[[str], Outcome]) -> dict[str, str]:
    """Return what is unlike the expected, after a few scenarios have had another try, each by itself.

    Some look at the clock, and all clients run at once.

    Args:
        outcome: Of all.
        expected: As for `Outcome.unlike`.
        again: Runs one scenario.
    """
    unlike = outcome.unlike(expected)
    failed = {name.partition(":")[0] for name in unlike if name in outcome.failures}
    if len(failed) > MAX_AGAIN:
        return unlike
    rest = {name: said for name, said in unlike.items() if name.partition(":")[0] not in failed}
    for scenario in failed:
        known = {name: why for name, why in expected.items() if name.partition(":")[0] == scenario}
        rest |= again(scenario).unlike(known)
    return rest


def environment() -> dict[str, str]:
    """Return the environment for what the suite talks to: this package is imported, and no proxy comes between."""
    return {**os.environ, "PYTHONPATH": AGENTFSM, "NO_PROXY": "localhost,127.0.0.1", "no_proxy": "localhost,127.0.0.1"}


def wanted(side: Side, revision: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the scenarios that a revision requires of a side, and those that only run with them."""
    text = (packages() / PACKAGE / "requirements" / f"{revision}.yaml").read_text()
    content: Any = yaml.safe_load(text)
    others = [each["scenario"] for each in content["not_scored"] if each["leg"] == side]
    return frozenset(content[side]), frozenset(others)


def run_clients(revision: str, door: Path, results: Path) -> Outcome:
    """Run all client scenarios at once; each is played by who listens at the door."""
    return _run("client", *_through(door), "--requirements", revision, results=results)


def run_client(scenario: str, revision: str, door: Path, results: Path) -> Outcome:
    """Run one client scenario by itself."""
    options = ["--scenario", scenario, "--spec-version", revision, "--force"]
    return _run("client", *_through(door), *options, results=results)


def _through(door: Path) -> list[str]:
    script = Path(__file__).parent / "conformance_door.py"
    return ["--command", shlex.join([sys.executable, "-I", "-S", str(script), str(door)])]


def run_servers(revision: str, url: str, results: Path) -> Outcome:
    """Run all server scenarios, one after another, against the server at a URL."""
    return _run("server", "--url", url, "--requirements", revision, results=results)


def run_server(scenario: str, revision: str, url: str, results: Path) -> Outcome:
    """Run one server scenario by itself."""
    options = ["--scenario", scenario, "--spec-version", revision, "--force"]
    return _run("server", "--url", url, *options, results=results)


def _run(side: Side, *options: str, results: Path) -> Outcome:
    done = subprocess.run(
        [*program(PACKAGE), side, *options, "--timeout", str(PATIENCE_MS), "--output-dir", str(results)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    checks = {_scenario(path, results, side): json.loads(path.read_text()) for path in results.rglob("checks.json")}
    assert checks, f"the suite ran nothing: {done.stdout[-2_000:]}{done.stderr[-2_000:]}"
    failures = {
        f"{name}:{check['id']}": str(check.get("errorMessage") or check.get("details") or check["description"])
        for name, listed in checks.items()
        for check in listed
        if check["status"] in BAD
    }
    passed = sum(check["status"] == "SUCCESS" for listed in checks.values() for check in listed)
    return Outcome(scenarios=frozenset(checks), failures=failures, passed=passed)


def _scenario(checks: Path, results: Path, side: Side) -> str:
    """Return the scenario whose results these are: the folder is called after it and the moment."""
    folder = str(checks.parent.relative_to(results))
    return _STAMP.sub("", folder).removeprefix("server-" if side == "server" else "")
