"""Telemetry: traces of runs for OpenTelemetry, and metrics, derived from the journals."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from agentfsm._lib.plugins import require_extra
from agentfsm.telemetry.costs import CostEstimate, CostReport, SpendStatus, estimate, read_costs, read_spend
from agentfsm.telemetry.spans import Content, TraceSpan, trace_of

if TYPE_CHECKING:
    from agentfsm.telemetry.span_watcher import Telemetry

__all__ = [
    "Content",
    "CostEstimate",
    "CostReport",
    "SpendStatus",
    "Telemetry",
    "TraceSpan",
    "estimate",
    "read_costs",
    "read_spend",
    "trace_of",
]


def __getattr__(name: str) -> object:
    if name != "Telemetry":
        raise AttributeError(f"module 'agentfsm.telemetry' has no attribute {name!r}")
    with require_extra("agentfsm.telemetry.Telemetry", "otel", "opentelemetry"):
        return import_module("agentfsm.telemetry.span_watcher").Telemetry
