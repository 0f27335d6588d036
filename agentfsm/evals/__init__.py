"""Evaluate agents: cases with several valid paths, repeated runs, and comparisons that know what they do not know."""

from agentfsm.evals.case import Case, ExpectedCall, Suite
from agentfsm.evals.comparison import Comparison, Conclusion, compare
from agentfsm.evals.evaluation_runner import evaluate
from agentfsm.evals.results import CaseResult, Evaluation
from agentfsm.evals.scorers import Grade, GradedRun, RunScorer
from agentfsm.evals.suite_files import load_suite

__all__ = [
    "Case",
    "CaseResult",
    "Comparison",
    "Conclusion",
    "Evaluation",
    "ExpectedCall",
    "Grade",
    "GradedRun",
    "RunScorer",
    "Suite",
    "compare",
    "evaluate",
    "load_suite",
]
