"""One database of each kind, as several processes see it: for tests of what all stores with a thread have in common."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import attrs

from agentfsm.stores import PostgresStore, RedisStore, SQLiteStore
from agentfsm.stores.threaded.store import ThreadedStore
from tests.support.older_tables import (
    to_postgres_1,
    to_postgres_2,
    to_postgres_400,
    to_redis_1,
    to_redis_2,
    to_sqlite_3,
    to_sqlite_4,
    to_sqlite_600,
)

KINDS = ("sqlite", "postgres", "redis")


@attrs.define(eq=False)
class Place:
    """A database that is empty at first."""

    open: Callable[..., ThreadedStore[Any]]
    # Makes a store, given its options.
    age: Callable[[int], object]
    # Makes the tables, or keys, those of the first or second major version before, or for 0 of the first minor version.
    end_leases: Callable[[], object]
    # Lets the time of all leases be up.
    version: Callable[[], int]
    # Of the tables, or keys.
    set_version: Callable[[int], object]
    # Sets that version, as an upgrade by another agentfsm does.
    rewrite: Callable[[str, str], object]
    # Replaces a text of the same length in all events, as somebody does who can write the database.
    count_records: Callable[[], int]
    # Records in the database, expired ones included.
    frees_runs: bool = False
    # Whether an upgrade takes the runs from the workers of the version before.
    stores: list[ThreadedStore[Any]] = attrs.field(factory=list)

    def make(self, **options: Any) -> ThreadedStore[Any]:
        """Return a store of another process, as far as the database can tell; it is closed with the test."""
        self.stores.append(self.open(**options))
        return self.stores[-1]


def place_of(kind: str, given: Callable[[str], Any]) -> Place:
    """Return the place of a kind; `given` returns the value of a fixture."""
    match kind:
        case "sqlite":
            path = given("path")
            return Place(
                lambda **options: SQLiteStore(path, **options),
                lambda steps: {0: to_sqlite_600, 1: to_sqlite_4, 2: to_sqlite_3}[steps](path),
                lambda: _ask(path, "UPDATE workers SET until = 0 RETURNING 1"),
                lambda: _ask(path, "PRAGMA user_version"),
                lambda version: _set_version(path, version),
                lambda old, new: _rewrite_sqlite(path, old, new),
                lambda: _ask(path, "SELECT count(*) FROM records"),
            )
        case "postgres":
            url, schema, desk = given("shared_postgres"), given("schema"), given("postgres_desk")
            return Place(
                lambda **options: PostgresStore(url, schema=schema, **options),
                lambda steps: {0: to_postgres_400, 1: to_postgres_2, 2: to_postgres_1}[steps](desk, schema),
                lambda: desk.execute(f"UPDATE {schema}.workers SET until = 0"),  # noqa: S608  our own name
                lambda: desk.execute(f"SELECT version FROM {schema}.layout").fetchone()[0],  # noqa: S608  our own name
                lambda version: desk.execute(f"UPDATE {schema}.layout SET version = {version}"),  # noqa: S608  our own name
                lambda *texts: desk.execute(f"UPDATE {schema}.events SET body = replace(body, %s, %s)", texts),  # noqa: S608  our own name
                lambda: desk.execute(f"SELECT count(*) FROM {schema}.records").fetchone()[0],  # noqa: S608  our own name
            )
        case _:
            url, client = given("redis_url"), given("client")
            return Place(
                lambda **options: RedisStore(url, accept_loss="everything", **options),
                lambda steps: {0: lambda _client: None, 1: to_redis_2, 2: to_redis_1}[steps](client),
                lambda: [client.hset("agentfsm:workers", owner, 1) for owner in client.hkeys("agentfsm:workers")],
                lambda: int(client.get("agentfsm:schema")),
                lambda version: client.set("agentfsm:schema", version),
                lambda old, new: _rewrite_redis(client, old, new),
                lambda: client.zcard("agentfsm:records:k"),
                frees_runs=True,
            )


def _ask(path: Any, statement: str) -> int:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        return int(db.execute(statement).fetchall()[0][0])


def _set_version(path: Any, version: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"PRAGMA user_version = {version}")


def _rewrite_sqlite(path: Any, old: str, new: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE events SET body = replace(body, ?, ?) WHERE typeof(body) = 'text'", (old, new))


def _rewrite_redis(client: Any, old: str, new: str) -> None:
    for key in client.keys("agentfsm:*"):
        if client.type(key) == b"list":
            for index, body in enumerate(client.lrange(key, 0, -1)):
                client.lset(key, index, body.replace(old.encode(), new.encode()))
