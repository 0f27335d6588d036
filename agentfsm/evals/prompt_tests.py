"""Run the tests of a prompt as cases, and report pass rates with their intervals.

Source: document F, 6.3.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import SHARE
from agentfsm.evals.case import Case
from agentfsm.evals.evaluation_runner import PARALLEL, RUNS, evaluate
from agentfsm.evals.results import PASSED
from agentfsm.evals.scorers import OutcomeScorer
from agentfsm.prompts import PromptReport, PromptTemplate, PromptTestResult
from agentfsm.prompts.evaluation import PASS_RATE

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent


async def evaluate_prompt(
    agent: Agent[Any],
    prompt: PromptTemplate,
    *,
    runs: int = RUNS,
    pass_rate: float = PASS_RATE,
    label: str = "",
    parallel: int = PARALLEL,
) -> PromptReport:
    """Run all tests of a prompt with an agent, each several times, as `evaluate` does.

    Args:
        agent: The agent. Its instructions are replaced: by the prompt, if the test has an `input`; else they are empty,
            and the prompt is the user message.
        prompt: The prompt.
        runs: Runs of each test, 1 or more; replies of models vary.
        pass_rate: Pass rate that each test needs, above 0 and up to 1.
        label: As in `evaluate`: tests with the same agent, prompt and label are not run again.
        parallel: Maximum of runs at a time, 1 or more.

    Raises:
        MisuseError: if the prompt has no tests, or a test lacks a value; nothing was run.
        AgentError: as `evaluate`.
    """
    SHARE.check("evaluate_prompt", "pass_rate", pass_rate)
    if not prompt.tests:
        raise MisuseError(f"prompt {prompt.name} {prompt.version} has no tests: add [[tests]] to its front matter")
    texts = [prompt.render(**test.values) for test in prompt.tests]  # all of them before the first request
    tests, at = [], ""
    for test, text in zip(prompt.tests, texts, strict=True):
        case = Case(id=test.name, input=test.input or str(text), expect=test.checks)
        tested = agent.with_(instructions=text if test.input else "")
        found = await evaluate(
            tested, [case], runs=runs, scorers=[OutcomeScorer()], label=f"{label}{prompt.reference}", parallel=parallel
        )
        failures = Counter(each.grades[PASSED].reason for each in found.results if not each.passed)
        passed = sum(each.passed for each in found.results)
        tests.append(PromptTestResult(name=test.name, runs=runs, passed=passed, failures=dict(failures)))
        at = found.at
    return PromptReport(
        name=prompt.name,
        version=prompt.version,
        digest=prompt.digest,
        model=agent.model.name,
        at=at,
        tests=tuple(tests),
        pass_rate=pass_rate,
    )
