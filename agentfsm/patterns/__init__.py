"""Patterns over agents: a router, a planner, an executor and a reflector, each with a model of its own."""

from agentfsm.patterns.roles import plan_and_execute, reflect_until
from agentfsm.patterns.routing import Ask, Calibration, IntentRouter, ReliabilityBin, Route, calibrate

__all__ = [
    "Ask",
    "Calibration",
    "IntentRouter",
    "ReliabilityBin",
    "Route",
    "calibrate",
    "plan_and_execute",
    "reflect_until",
]
