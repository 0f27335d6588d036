"""Where journals live. A store that needs a driver is loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from agentfsm.stores.memory import MemoryStore

if TYPE_CHECKING:
    from agentfsm.stores.sqlite import SQLiteStore

__all__ = ["MemoryStore", "SQLiteStore"]


def __getattr__(name: str) -> object:
    if name == "SQLiteStore":
        return import_module("agentfsm.stores.sqlite").SQLiteStore
    raise AttributeError(f"module 'agentfsm.stores' has no attribute {name!r}")
