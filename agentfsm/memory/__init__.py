"""Long-term memory of agents: items that are kept across runs, by user, with search, validity and deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.memory.documents import DocumentChange
from agentfsm.memory.learner import Learner
from agentfsm.memory.long_term import Expiry, Memory, load_postgres_index
from agentfsm.memory.memory_tools import build_memory_tools
from agentfsm.memory.ranking import Recollection, Weights
from agentfsm.memory.reranking import TermReranker
from agentfsm.memory.sqlite_index import SQLiteIndex

if TYPE_CHECKING:
    from agentfsm.memory.postgres_index import PostgresIndex

__all__ = [
    "DocumentChange",
    "Expiry",
    "Learner",
    "Memory",
    "PostgresIndex",
    "Recollection",
    "SQLiteIndex",
    "TermReranker",
    "Weights",
    "build_memory_tools",
]


def __getattr__(name: str) -> object:
    if name != "PostgresIndex":
        raise AttributeError(f"module 'agentfsm.memory' has no attribute {name!r}")
    return load_postgres_index()
