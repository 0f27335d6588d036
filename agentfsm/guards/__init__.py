"""Guards: rules that decide on each call before it starts, and whose decisions the journal records."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from agentfsm.core.call_facts import CallFact
from agentfsm.core.events import GuardVerdict
from agentfsm.core.sensitive_text import DataKind, redact_sensitive
from agentfsm.guards.call_rules import (
    ChangeRule,
    ClearanceRule,
    LabelRule,
    QuotaRule,
    RoleRule,
    ToolRule,
    allow,
    ask,
    max_calls,
    no,
    no_change_after_untrusted,
    only_for,
    refuse,
    two_of,
    within_clearance,
)
from agentfsm.guards.country_data import load_country_data
from agentfsm.guards.detection import Detection, PatternDetector, calibrate, score_windows
from agentfsm.guards.exit_rules import ExitFilter, exit_filter
from agentfsm.guards.guard import FenceRule, Guard, fence_untrusted
from agentfsm.guards.leak_rule import LeakRule, no_leaks
from agentfsm.guards.time_rules import (
    Calls,
    CountRule,
    DutyRule,
    TimeRule,
    approved,
    at_most,
    before,
    eventually,
    never,
    only_if,
    within,
)
from agentfsm.guards.vault import Vault
from agentfsm.ports.call_history import CallHistory
from agentfsm.ports.guards import (
    CallGuard,
    FilteredText,
    GuardDecision,
    GuardedCall,
    KnownText,
    OutgoingText,
    ToolTraits,
)
from agentfsm.ports.screening import Detector, ScreenedText, TextScreen

if TYPE_CHECKING:
    from agentfsm.guards.egress_client import EgressError, open_http_client
    from agentfsm.guards.http_tool import build_http_tool

__all__ = [
    "CallFact",
    "CallGuard",
    "CallHistory",
    "Calls",
    "ChangeRule",
    "ClearanceRule",
    "CountRule",
    "DataKind",
    "Detection",
    "Detector",
    "DutyRule",
    "EgressError",
    "ExitFilter",
    "FenceRule",
    "FilteredText",
    "Guard",
    "GuardDecision",
    "GuardVerdict",
    "GuardedCall",
    "KnownText",
    "LabelRule",
    "LeakRule",
    "OutgoingText",
    "PatternDetector",
    "QuotaRule",
    "RoleRule",
    "ScreenedText",
    "TextScreen",
    "TimeRule",
    "ToolRule",
    "ToolTraits",
    "Vault",
    "allow",
    "approved",
    "ask",
    "at_most",
    "before",
    "build_http_tool",
    "calibrate",
    "eventually",
    "exit_filter",
    "fence_untrusted",
    "load_country_data",
    "max_calls",
    "never",
    "no",
    "no_change_after_untrusted",
    "no_leaks",
    "only_for",
    "only_if",
    "open_http_client",
    "redact_sensitive",
    "refuse",
    "score_windows",
    "two_of",
    "within",
    "within_clearance",
]

# Loaded on first use: rules need no HTTP.
_HTTP_MODULES = {"EgressError": "egress_client", "build_http_tool": "http_tool", "open_http_client": "egress_client"}


def __getattr__(name: str) -> object:
    if name not in _HTTP_MODULES:
        raise AttributeError(f"module 'agentfsm.guards' has no attribute {name!r}")
    return getattr(import_module(f"agentfsm.guards.{_HTTP_MODULES[name]}"), name)
