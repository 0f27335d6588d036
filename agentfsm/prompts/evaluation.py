"""Run the tests of a prompt several times, and report pass rates with their confidence intervals.

Source: document F, 6.3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from statistics import NormalDist
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import COUNT, FUNCTION, SHARE
from agentfsm.core.value import Value
from agentfsm.prompts.assertions import CountTokens
from agentfsm.prompts.template import PromptTemplate, PromptTest

# Runs of each test, and the pass rate of each (document F, 6.3: 5 to 10 runs, 90 %).
RUNS: Final = 5
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


async def run_tests(
    prompt: PromptTemplate,
    ask: Callable[[str, str], Awaitable[str]],
    *,
    runs: int = RUNS,
    model: str = "",
    pass_rate: float = PASS_RATE,
    count: CountTokens | None = None,
) -> PromptReport:
    """Run all tests of a prompt.

    Args:
        prompt: The prompt.
        ask: Function that takes instructions and a user message, and returns the model's reply. For a test without
            `input`, the prompt is the user message and the instructions are empty.
        runs: Runs of each test, 1 or more; replies of models vary.
        model: Name of the model, for the report.
        pass_rate: Pass rate that each test needs, above 0 and up to 1.
        count: Function that counts tokens for `max_tokens`; None: tokens are estimated.

    Raises:
        MisuseError: if the prompt has no tests, or a test lacks a value.
    """
    FUNCTION.check("run_tests", "ask", ask)
    COUNT.check("run_tests", "runs", runs)
    SHARE.check("run_tests", "pass_rate", pass_rate)
    if not prompt.tests:
        raise MisuseError(f"prompt {prompt.name} {prompt.version} has no tests: add [[tests]] to its front matter")
    texts = [prompt.render(**test.values) for test in prompt.tests]  # all of them before the first request
    results = []
    for test, text in zip(prompt.tests, texts, strict=True):
        asked = (text, test.input) if test.input else ("", text)
        outcomes = [find_failures(test, await ask(*asked), count) for _ in range(runs)]
        failures = Counter(failure for each in outcomes for failure in each)
        passed = sum(not each for each in outcomes)
        results.append(PromptTestResult(name=test.name, runs=runs, passed=passed, failures=dict(failures)))
    return PromptReport(
        name=prompt.name,
        version=prompt.version,
        digest=prompt.digest,
        model=model,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        tests=tuple(results),
        pass_rate=pass_rate,
    )


def find_failures(test: PromptTest, reply: str, count: CountTokens | None = None) -> tuple[str, ...]:
    """Return the failed checks of a reply, each with the reason; empty if all pass."""
    found = [(check, check.find_failure(reply, count)) for check in test.checks]
    return tuple(f"{check.name}: {why}" for check, why in found if why is not None)
