"""An agent runtime that never loses, repeats or hides an effect, and lets you step through every transition."""

from agentfsm.agent import Agent
from agentfsm.core.effects import Pending, PendingKind
from agentfsm.core.errors import (
    AgentError,
    ConflictError,
    IllegalTransitionError,
    MisuseError,
    ModelError,
    ModelRetry,
    RefusedError,
    RunError,
    StoreError,
    TransientError,
)
from agentfsm.core.inbox import InputKind
from agentfsm.core.limits import Limits, StopReason
from agentfsm.core.machine import TABLE, State, next_state
from agentfsm.core.messages import AgentCost, ErrorType, ImagePart, Outcome, TextPart, ToolCall, ToolResult, Usage
from agentfsm.core.run import Run
from agentfsm.engine.context import RunContext
from agentfsm.engine.permission import Level, Permissions, Rule
from agentfsm.engine.queue import ToolQueue
from agentfsm.engine.registry import ToolRegistry
from agentfsm.engine.tools import Tool, tool
from agentfsm.ports import Settings
from agentfsm.subagent import COORDINATION

__all__ = [
    "COORDINATION",
    "TABLE",
    "Agent",
    "AgentCost",
    "AgentError",
    "ConflictError",
    "ErrorType",
    "IllegalTransitionError",
    "ImagePart",
    "InputKind",
    "Level",
    "Limits",
    "MisuseError",
    "ModelError",
    "ModelRetry",
    "Outcome",
    "Pending",
    "PendingKind",
    "Permissions",
    "RefusedError",
    "Rule",
    "Run",
    "RunContext",
    "RunError",
    "Settings",
    "State",
    "StopReason",
    "StoreError",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolQueue",
    "ToolRegistry",
    "ToolResult",
    "TransientError",
    "Usage",
    "next_state",
    "tool",
]
