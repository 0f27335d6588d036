"""Where journals live. A store that needs a driver is loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from agentfsm.stores.memory import MemoryStore

if TYPE_CHECKING:
    from agentfsm.stores.postgres.store import PostgresStore
    from agentfsm.stores.redis.store import RedisStore
    from agentfsm.stores.sqlite.store import SQLiteStore

__all__ = ["MemoryStore", "PostgresStore", "RedisStore", "SQLiteStore"]

_MODULES: Final = {"PostgresStore": "postgres.store", "RedisStore": "redis.store", "SQLiteStore": "sqlite.store"}
# The extras that bring them.
_EXTRAS: Final = {"psycopg": "postgres", "redis": "redis"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'agentfsm.stores' has no attribute {name!r}")
    try:
        return getattr(import_module(f"agentfsm.stores.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise ImportError(f"{name} needs a driver: pip install 'agentfsm[{_EXTRAS[error.name]}]'") from error
