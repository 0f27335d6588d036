"""Evaluate agents: cases with several turns and valid paths, repeated runs, and comparisons that may be undecided."""

from agentfsm.evals.case import Case, ExpectedCall, SimulatedUser, Suite, ToolFixture, Turn
from agentfsm.evals.comparison import Comparison, Conclusion, compare
from agentfsm.evals.evaluation_runner import evaluate
from agentfsm.evals.online import grade_stored
from agentfsm.evals.release_gate import GateDecision, GateReport, gate
from agentfsm.evals.results import CaseResult, Evaluation
from agentfsm.evals.rubric_judge import JudgeCalibration, RubricJudge, calibrate
from agentfsm.evals.run_checks import RunCheck, no_question, not_called
from agentfsm.evals.scorers import SCORERS, Grade, GradedRun, RunScorer, TurnResult
from agentfsm.evals.suite_files import add_case, evaluate_prompt, evaluate_prompts, load_suite
from agentfsm.evals.what_if_report import Trial, WhatIfReport, WhatIfVerdict
from agentfsm.evals.what_if_runs import whatif

__all__ = [
    "SCORERS",
    "Case",
    "CaseResult",
    "Comparison",
    "Conclusion",
    "Evaluation",
    "ExpectedCall",
    "GateDecision",
    "GateReport",
    "Grade",
    "GradedRun",
    "JudgeCalibration",
    "RubricJudge",
    "RunCheck",
    "RunScorer",
    "SimulatedUser",
    "Suite",
    "ToolFixture",
    "Trial",
    "Turn",
    "TurnResult",
    "WhatIfReport",
    "WhatIfVerdict",
    "add_case",
    "calibrate",
    "compare",
    "evaluate",
    "evaluate_prompt",
    "evaluate_prompts",
    "gate",
    "grade_stored",
    "load_suite",
    "no_question",
    "not_called",
    "whatif",
]
