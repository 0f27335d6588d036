"""Protocols between the engine and its adapters: models, stores, clocks and policies.

Subclass a Protocol to get its defaults: a custom model is a subclass of `Model` with a `name` and a `reply`. Import the
names from this module; only the package itself imports from the files below.
"""

from agentfsm.ports.context import CompactionBudget, Context, ContextPolicy, GroupKind, MessageGroup, PolicyAsk
from agentfsm.ports.followers import Delivery, Follower, FollowerStart
from agentfsm.ports.model import (
    CallChunk,
    Chunk,
    Emit,
    FinishChunk,
    FinishReason,
    Model,
    OutputForm,
    OutputMode,
    ProposedCall,
    Reply,
    Request,
    TextChunk,
    ThinkingChunk,
    TokenCounter,
    ToolDefinition,
)
from agentfsm.ports.policies import Judge, JudgeAsk, Scorer, Selection, SelectorAsk, ToolSelector
from agentfsm.ports.store import (
    ALL_RUNS,
    NO_EXPIRY,
    Claim,
    Clock,
    Durability,
    Filter,
    Lease,
    LeaseTerm,
    PendingWrite,
    RunSummary,
    Store,
    SystemClock,
)
from agentfsm.ports.stored import FollowerStatus, StoredRun, UnreadRun

__all__ = [
    "ALL_RUNS",
    "NO_EXPIRY",
    "CallChunk",
    "Chunk",
    "Claim",
    "Clock",
    "CompactionBudget",
    "Context",
    "ContextPolicy",
    "Delivery",
    "Durability",
    "Emit",
    "Filter",
    "FinishChunk",
    "FinishReason",
    "Follower",
    "FollowerStart",
    "FollowerStatus",
    "GroupKind",
    "Judge",
    "JudgeAsk",
    "Lease",
    "LeaseTerm",
    "MessageGroup",
    "Model",
    "OutputForm",
    "OutputMode",
    "PendingWrite",
    "PolicyAsk",
    "ProposedCall",
    "Reply",
    "Request",
    "RunSummary",
    "Scorer",
    "Selection",
    "SelectorAsk",
    "Store",
    "StoredRun",
    "SystemClock",
    "TextChunk",
    "ThinkingChunk",
    "TokenCounter",
    "ToolDefinition",
    "ToolSelector",
    "UnreadRun",
]
