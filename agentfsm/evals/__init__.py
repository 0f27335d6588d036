"""Evaluate agents: cases with several valid paths, repeated runs, and comparisons that know what they do not know."""

from agentfsm.evals.case import Case, ExpectedCall, Suite
from agentfsm.evals.comparison import Answer, Comparison, compare
from agentfsm.evals.evaluate import evaluate
from agentfsm.evals.results import CaseResult, Evaluation
from agentfsm.evals.scorers import Grade, GradedRun, Scorer
from agentfsm.evals.suite_files import load_suite

__all__ = [
    "Answer",
    "Case",
    "CaseResult",
    "Comparison",
    "Evaluation",
    "ExpectedCall",
    "Grade",
    "GradedRun",
    "Scorer",
    "Suite",
    "compare",
    "evaluate",
    "load_suite",
]
