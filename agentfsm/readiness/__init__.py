"""Checks before an agent goes live: `agentfsm doctor --production`, and the load test that one of them reads."""

from agentfsm.readiness.check_result import (
    CheckResult,
    CheckSource,
    CheckStatus,
    ReadinessReport,
    Waiver,
    load_waivers,
)
from agentfsm.readiness.drills import drill_restore, drill_rollback
from agentfsm.readiness.evidence import DrillReport, LoadReport
from agentfsm.readiness.examination import examine_readiness
from agentfsm.readiness.load_test import measure_load

__all__ = [
    "CheckResult",
    "CheckSource",
    "CheckStatus",
    "DrillReport",
    "LoadReport",
    "ReadinessReport",
    "Waiver",
    "drill_restore",
    "drill_rollback",
    "examine_readiness",
    "load_waivers",
    "measure_load",
]
