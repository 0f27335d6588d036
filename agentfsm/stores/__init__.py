"""Stores of journals. Each is imported at its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.stores.loading import MODULES, load_store_class, open_store

if TYPE_CHECKING:
    from agentfsm.stores.memory import MemoryStore
    from agentfsm.stores.postgres.store import PostgresStore
    from agentfsm.stores.redis.store import RedisStore
    from agentfsm.stores.sqlite.store import SQLiteStore

__all__ = ["MemoryStore", "PostgresStore", "RedisStore", "SQLiteStore", "open_store"]


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module 'agentfsm.stores' has no attribute {name!r}")
    return load_store_class(name)
