"""Releases of agents, and their roll-outs: sticky arms, weights, roll-backs by hand and by rule, and flags."""

from agentfsm.releases.arm_results import ArmResults
from agentfsm.releases.experiment import Assignment, Experiment, Flag
from agentfsm.releases.release import Release
from agentfsm.releases.rollback_rules import RollbackRule
from agentfsm.releases.rollout import Rollout
from agentfsm.releases.rollout_log import RolloutChange, RolloutControl, RolloutPlan
from agentfsm.releases.targets import Target

__all__ = [
    "ArmResults",
    "Assignment",
    "Experiment",
    "Flag",
    "Release",
    "RollbackRule",
    "Rollout",
    "RolloutChange",
    "RolloutControl",
    "RolloutPlan",
    "Target",
]
