"""Releases of agents: roll-outs with sticky arms, roll-backs by hand and by rule, flags, and upgrades of open runs."""

from agentfsm.releases.arm_results import ArmResults
from agentfsm.releases.experiment import Assignment, Experiment, Flag
from agentfsm.releases.release import Release
from agentfsm.releases.rollback_rules import RollbackRule
from agentfsm.releases.rollout import Rollout
from agentfsm.releases.rollout_log import RolloutChange, RolloutControl, RolloutPlan
from agentfsm.releases.targets import Target
from agentfsm.releases.upgrade_check import RunUpgrade, UpgradeChange, UpgradeVerdict
from agentfsm.releases.upgrade_report import UpgradeReport, check_upgrade

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
    "RunUpgrade",
    "Target",
    "UpgradeChange",
    "UpgradeReport",
    "UpgradeVerdict",
    "check_upgrade",
]
