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
    RunError,
    StoreError,
)
from agentfsm.core.inbox import InputKind
from agentfsm.core.limits import Limits, StopReason
from agentfsm.core.machine import TABLE, State, next_state
from agentfsm.core.messages import ImagePart, Outcome, TextPart, Usage
from agentfsm.core.run import Run
from agentfsm.engine.queue import ToolQueue
from agentfsm.engine.tools import RunContext, Tool, ToolRegistry, tool
from agentfsm.ports import Settings

__all__ = [
    "TABLE",
    "Agent",
    "AgentError",
    "ConflictError",
    "IllegalTransitionError",
    "ImagePart",
    "InputKind",
    "Limits",
    "MisuseError",
    "ModelError",
    "ModelRetry",
    "Outcome",
    "Pending",
    "PendingKind",
    "Run",
    "RunContext",
    "RunError",
    "Settings",
    "State",
    "StopReason",
    "StoreError",
    "TextPart",
    "Tool",
    "ToolQueue",
    "ToolRegistry",
    "Usage",
    "next_state",
    "tool",
]
