"""An agent runtime that never loses, repeats or hides an effect, and lets you step through every transition."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentfsm._lib.limiter import Limiter
from agentfsm.agents.agent import Agent
from agentfsm.core.claims import Claim, Claims
from agentfsm.core.errors import (
    AgentError,
    ArgumentsError,
    ClosedError,
    ConflictError,
    ContextTooLongError,
    CorruptError,
    DuplicateToolError,
    FourEyesError,
    IllegalTransitionError,
    IncompatibleProgramError,
    LeaseHeldError,
    LeaseLostError,
    LimitError,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelRetry,
    ModelUnavailableError,
    OutcomeUnknownError,
    PartlyDoneError,
    ReasoningRefusedError,
    RefusedError,
    RunNotFoundError,
    StepError,
    StoreError,
    ToolError,
    TooNewError,
    TransientError,
)
from agentfsm.core.inbox import InputKind, Priority
from agentfsm.core.labels import Label, Level
from agentfsm.core.limits import Limits, Spend, StopReason
from agentfsm.core.machine import TABLE, State, next_state
from agentfsm.core.messages import (
    AssistantMessage,
    AudioPart,
    ErrorType,
    FilePart,
    ImagePart,
    Outcome,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
)
from agentfsm.core.pending import Answer, Elicit, Pending, PendingKind, Question
from agentfsm.core.run import Run, RunError
from agentfsm.core.run_facts import usage_by_purpose
from agentfsm.core.settings import Settings
from agentfsm.core.stops import stop_after_tool
from agentfsm.core.usage import AgentCost, Purpose, SessionCost, Usage
from agentfsm.ports.store import Filter
from agentfsm.tools.permission import Permissions, Rule
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import Found, InputRequired, RunContext
from agentfsm.tools.tool import Tool, tool

if TYPE_CHECKING:
    from agentfsm.agents.runs import Runs
    from agentfsm.agents.subagent import COORDINATION
    from agentfsm.engine.execution.answer_cache import AnswerCache
    from agentfsm.engine.replay import Divergence, Replay
    from agentfsm.journal.audit import AuditRecord
    from agentfsm.journal.diff import Difference, difference
    from agentfsm.journal.follow import JournalEvent
    from agentfsm.streaming.stream import (
        AgentEvent,
        AgentEventType,
        BudgetWarning,
        CallDelta,
        RunEnded,
        StateChanged,
        StreamEvent,
        TextDelta,
        ThinkingDelta,
        ToolEvent,
        ToolEventType,
        UsageReported,
    )
    from agentfsm.tools.queue.scheduler import ToolQueue

    ask_user: Tool[..., Any]
    """Tool with which the model asks the user a question: the call waits for the answer, which is its result."""

    note: Tool[..., Any]
    """Tool with which the model makes notes for itself, which it reads also after a compaction."""

    wait: Tool[..., Any]
    """Tool with which the model waits until a message arrives or a time is up."""

__all__ = [
    "COORDINATION",
    "TABLE",
    "Agent",
    "AgentCost",
    "AgentError",
    "AgentEvent",
    "AgentEventType",
    "Answer",
    "AnswerCache",
    "ArgumentsError",
    "AssistantMessage",
    "AudioPart",
    "AuditRecord",
    "BudgetWarning",
    "CallDelta",
    "Claim",
    "Claims",
    "ClosedError",
    "ConflictError",
    "ContextTooLongError",
    "CorruptError",
    "Difference",
    "Divergence",
    "DuplicateToolError",
    "Elicit",
    "ErrorType",
    "FilePart",
    "Filter",
    "Found",
    "FourEyesError",
    "IllegalTransitionError",
    "ImagePart",
    "IncompatibleProgramError",
    "InputKind",
    "InputRequired",
    "JournalEvent",
    "Label",
    "LeaseHeldError",
    "LeaseLostError",
    "Level",
    "LimitError",
    "Limiter",
    "Limits",
    "MisuseError",
    "ModelError",
    "ModelReplyError",
    "ModelRetry",
    "ModelUnavailableError",
    "Outcome",
    "OutcomeUnknownError",
    "PartlyDoneError",
    "Pending",
    "PendingKind",
    "Permissions",
    "Priority",
    "Purpose",
    "Question",
    "ReasoningRefusedError",
    "RefusedError",
    "Replay",
    "Rule",
    "Run",
    "RunContext",
    "RunEnded",
    "RunError",
    "RunNotFoundError",
    "Runs",
    "SessionCost",
    "Settings",
    "Spend",
    "State",
    "StateChanged",
    "StepError",
    "StopReason",
    "StoreError",
    "StreamEvent",
    "SystemMessage",
    "TextDelta",
    "TextPart",
    "ThinkingDelta",
    "TooNewError",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolEvent",
    "ToolEventType",
    "ToolQueue",
    "ToolRegistry",
    "ToolResult",
    "TransientError",
    "Usage",
    "UsageReported",
    "UserMessage",
    "ask_user",
    "difference",
    "next_state",
    "note",
    "stop_after_tool",
    "tool",
    "usage_by_purpose",
    "wait",
]


# Loaded on first use, because they bring the engine, which is half of the package and is loaded with the first agent.
_MODULES = {
    "COORDINATION": "agents.subagent",
    "AgentEvent": "streaming.stream",
    "AgentEventType": "streaming.stream",
    "AnswerCache": "engine.execution.answer_cache",
    "AuditRecord": "journal.audit",
    "BudgetWarning": "streaming.stream",
    "CallDelta": "streaming.stream",
    "Difference": "journal.diff",
    "Divergence": "engine.replay",
    "JournalEvent": "journal.follow",
    "Replay": "engine.replay",
    "RunEnded": "streaming.stream",
    "Runs": "agents.runs",
    "StateChanged": "streaming.stream",
    "StreamEvent": "streaming.stream",
    "TextDelta": "streaming.stream",
    "ThinkingDelta": "streaming.stream",
    "ToolEvent": "streaming.stream",
    "ToolEventType": "streaming.stream",
    "ToolQueue": "tools.queue.scheduler",
    "UsageReported": "streaming.stream",
    "difference": "journal.diff",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f"agentfsm.{_MODULES[name]}"), name)
    if name in ("ask_user", "note", "wait"):  # built on first use, because their schemas import pydantic
        return getattr(import_module("agentfsm.tools.builtin"), name)()
    if name == "__version__":
        return import_module("importlib.metadata").version("agentfsm")
    raise AttributeError(
        f"module 'agentfsm' has no attribute {name!r}{'' if name[0] == '_' else _find_elsewhere(name)}"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find_elsewhere(name: str) -> str:
    """Return a hint if another module of the package exports the name."""
    for module in ("stores", "models", "testing", "context", "reflection", "ports", "planning", "prompts", "mcp"):
        try:
            exported = import_module(f"agentfsm.{module}").__all__
        except ImportError:  # an extra is not installed
            continue
        if name in exported:
            return f": write `from agentfsm.{module} import {name}`"
    return ""
