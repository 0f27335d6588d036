"""Results of the tests of a prompt: pass rates with their confidence intervals. `agentfsm.evals` runs the tests.

Source: document F, 6.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import NormalDist
from typing import Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.prompts.assertions import CountTokens, ReplyCheck

# Pass rate of each test (document F, 6.3).
PASS_RATE: Final = 0.9


def wilson_interval(passed: int, runs: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of a pass rate: its limits, from 0 to 1.

    Args:
        passed: Number of runs that passed.
        runs: Number of runs, 1 or more.
        confidence: Confidence, above 0 and below 1.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, spread = passed / runs, z * z / runs
    middle = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


@attrs.frozen(kw_only=True)
class PromptTestResult(Value):
    """Results of one test."""

    name: str
    """Name of the test."""

    runs: int
    """Number of runs."""

    passed: int
    """Number of runs whose reply passed all checks."""

    failures: Mapping[str, int]
    """Number of runs by failed check and reason."""

    @property
    def rate(self) -> float:
        """Pass rate, from 0 to 1."""
        return self.passed / self.runs

    @property
    def interval(self) -> tuple[float, float]:
        """Interval that contains the true pass rate with a confidence of 95 % (Wilson)."""
        return wilson_interval(self.passed, self.runs)


@attrs.frozen(kw_only=True)
class PromptReport(Value):
    """Results of the tests of one version of a prompt."""

    name: str
    """Name of the prompt."""

    version: str
    """Version of the prompt."""

    digest: str
    """Digest of the version."""

    model: str
    """Name of the model; empty if unknown."""

    at: str
    """Time of the tests, in ISO 8601 and UTC."""

    tests: tuple[PromptTestResult, ...]
    """Results by test."""

    pass_rate: float = PASS_RATE
    """Pass rate that each test needs."""

    usd: float | None = None
    """US dollars of the runs and of the judge; None if a price is unknown."""

    @property
    def rate(self) -> float:
        """Pass rate of all runs of all tests, from 0 to 1."""
        return sum(test.passed for test in self.tests) / sum(test.runs for test in self.tests)

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of `rate` with a confidence of 95 % (Wilson), about these tests alone."""
        return wilson_interval(sum(test.passed for test in self.tests), sum(test.runs for test in self.tests))

    @property
    def passed(self) -> bool:
        """Whether each test reached the pass rate."""
        return all(test.rate >= self.pass_rate for test in self.tests)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PromptReport:
        """Return the report that `to_dict` wrote."""
        return cls(**{**data, "tests": tuple(PromptTestResult(**test) for test in data["tests"])})


def find_failures(checks: Iterable[ReplyCheck], reply: str, count: CountTokens | None = None) -> tuple[str, ...]:
    """Return the failed checks of a reply, each with the reason; empty if all pass.

    Args:
        checks: The checks, such as those of a `PromptTest`.
        reply: Text of the reply.
        count: Function that counts tokens for `max_tokens`; None: tokens are estimated.
    """
    found = [(check, check.find_failure(reply, count)) for check in checks]
    return tuple(f"{check.name}: {why}" for check, why in found if why is not None)
