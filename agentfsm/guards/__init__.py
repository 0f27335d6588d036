"""Guards: rules that decide on each call before it starts, and whose decisions the journal records."""

from agentfsm.core.guarding import GuardVerdict
from agentfsm.guards.call_rules import (
    ClearanceRule,
    LabelRule,
    QuotaRule,
    ToolRule,
    allow,
    ask,
    max_calls,
    no,
    refuse,
    two_of,
    within_clearance,
)
from agentfsm.guards.guard import Guard
from agentfsm.ports.guards import CallGuard, GuardDecision, GuardedCall, ToolTraits

__all__ = [
    "CallGuard",
    "ClearanceRule",
    "Guard",
    "GuardDecision",
    "GuardVerdict",
    "GuardedCall",
    "LabelRule",
    "QuotaRule",
    "ToolRule",
    "ToolTraits",
    "allow",
    "ask",
    "max_calls",
    "no",
    "refuse",
    "two_of",
    "within_clearance",
]
