"""Long-term memory of agents: items that are kept across runs, by user, with search, validity and deletion."""

from agentfsm.memory.long_term import Expiry, Memory
from agentfsm.memory.memory_tools import build_memory_tools
from agentfsm.memory.ranking import Recollection, Weights
from agentfsm.memory.sqlite_index import SQLiteIndex

__all__ = ["Expiry", "Memory", "Recollection", "SQLiteIndex", "Weights", "build_memory_tools"]
