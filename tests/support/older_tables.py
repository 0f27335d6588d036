"""Tables and keys as earlier versions made them, from those of today: for tests of the upgrade."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from agentfsm.stores.rules import LIST_INDEXES, SEARCH_INDEXES

# What tables 6.6 of SQLite have and tables 6.0 had not, undone: records, releases, purposes, costs and durations of
# runs, and indexes.
_SQLITE_600 = f"""
DROP INDEX runs_unfinished;
{"".join(f"DROP INDEX {name};" for name in (*LIST_INDEXES, *SEARCH_INDEXES))}
CREATE INDEX IF NOT EXISTS runs_by_time ON runs (created_at);
DROP TABLE records;
DROP TRIGGER words_removed;
DROP TABLE run_words;
ALTER TABLE runs DROP COLUMN release;
ALTER TABLE runs DROP COLUMN purpose;
ALTER TABLE runs DROP COLUMN cost_usd;
ALTER TABLE runs DROP COLUMN duration_s;
PRAGMA user_version = 600
"""
# The same of tables 4.5 of PostgreSQL.
_POSTGRES_400 = (
    "DROP INDEX {s}.runs_unfinished; DROP TABLE {s}.records, {s}.sleepers, {s}.run_words; DROP SEQUENCE {s}.revisions; "
    "ALTER TABLE {s}.runs DROP COLUMN release, DROP COLUMN purpose, DROP COLUMN cost_usd, "
    "DROP COLUMN duration_s; CREATE INDEX IF NOT EXISTS runs_by_time ON {s}.runs (created_at, number); "
    "UPDATE {s}.layout SET version = 400"
)
# What tables 6.0 of SQLite have and tables 4 had not, undone: the formats of runs, and the followers.
_SQLITE_4 = """
ALTER TABLE posts RENAME TO inbox;
ALTER TABLE runs DROP COLUMN format;
DROP INDEX runs_by_change;
ALTER TABLE runs DROP COLUMN change;
ALTER TABLE runs DROP COLUMN rating;
DROP INDEX runs_by_tenant;
ALTER TABLE runs DROP COLUMN tenant;
DROP TABLE quotas;
DROP TABLE feedback;
DROP TABLE changes;
DROP TABLE followers;
DROP TABLE reads;
PRAGMA user_version = 4
"""
# What tables 4 of SQLite have and tables 3 had not, undone. Who drove a run was in its row alone.
_SQLITE_3 = """
ALTER TABLE runs ADD COLUMN until REAL;
UPDATE runs SET until = (SELECT until FROM workers WHERE name = owner);
DROP INDEX runs_ready;
DROP INDEX runs_by_owner;
DROP TABLE workers;
ALTER TABLE runs DROP COLUMN alone;
ALTER TABLE runs DROP COLUMN company;
ALTER TABLE runs DROP COLUMN suspect;
ALTER TABLE runs DROP COLUMN ready_at;
CREATE INDEX runs_open ON runs (agent, updated_at) WHERE state NOT IN ('done', 'error');
"""
# The same of tables 2 of PostgreSQL.
_POSTGRES_1 = """
DROP INDEX {s}.runs_ready;
DROP INDEX {s}.runs_by_owner;
ALTER TABLE {s}.workers DROP COLUMN company;
ALTER TABLE {s}.runs DROP COLUMN alone, DROP COLUMN company, DROP COLUMN suspect, DROP COLUMN ready_at,
    DROP COLUMN watched_until;
CREATE INDEX runs_open ON {s}.runs (agent) WHERE NOT over;
UPDATE {s}.layout SET version = 1
"""
# The same of tables 4.0 of PostgreSQL.
_POSTGRES_2 = """
ALTER TABLE {s}.posts RENAME TO inbox;
ALTER TABLE {s}.runs DROP COLUMN format;
DROP INDEX {s}.runs_by_change;
DROP INDEX {s}.runs_unnumbered;
DROP INDEX {s}.runs_by_tenant;
ALTER TABLE {s}.runs DROP COLUMN change, DROP COLUMN rating, DROP COLUMN tenant;
DROP TABLE {s}.quotas;
DROP TABLE {s}.feedback;
DROP SEQUENCE {s}.changes;
DROP TABLE {s}.followers;
DROP TABLE {s}.reads;
UPDATE {s}.layout SET version = 2
"""


def to_sqlite_600(path):
    """Make a file one of tables 6.0."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_SQLITE_600)


def to_sqlite_4(path):
    """Make a file one of tables 4."""
    to_sqlite_600(path)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(_SQLITE_4)


def to_sqlite_3(path, version=3):
    """Make a file one of tables 3; those of 2 were the same."""
    to_sqlite_4(path)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(f"{_SQLITE_3}PRAGMA user_version = {version}")


def to_postgres_400(desk, schema):
    """Make a schema one of tables 4.0."""
    for name in (*LIST_INDEXES, *SEARCH_INDEXES):
        desk.execute(f"DROP INDEX {schema}.{name}")
    desk.execute(_POSTGRES_400.replace("{s}", schema))


def to_postgres_2(desk, schema):
    """Make a schema one of tables 2."""
    to_postgres_400(desk, schema)
    desk.execute(_POSTGRES_2.replace("{s}", schema))


def to_postgres_1(desk, schema):
    """Make a schema one of tables 1."""
    to_postgres_2(desk, schema)
    desk.execute(_POSTGRES_1.replace("{s}", schema))


def to_redis_2(client):
    """Make the keys of the usual prefix those of schema 2."""
    for pattern in ("changed", "readers", "reader:*", "read:*", "unfinished"):
        for key in client.scan_iter(match=f"agentfsm:{pattern}"):
            client.delete(key)
    client.rename("agentfsm:counter", "agentfsm:count")
    for key in client.scan_iter(match="agentfsm:run:*"):
        client.hdel(key, "format")
    client.set("agentfsm:schema", 2)


def to_redis_1(client):
    """Make the keys of the usual prefix those of schema 1: there, a run's hash said until when its lease held."""
    to_redis_2(client)
    for key in client.scan_iter(match="agentfsm:run:*"):
        run = client.hgetall(key)
        client.hdel(key, "alone", "company", "claim", "ready_at")
        if b"owner" in run:
            client.hset(key, "until", client.hget("agentfsm:workers", run[b"owner"]))
        entry = run[b"number"] + key.removeprefix(b"agentfsm:run:")
        if run[b"state"] not in (b"done", b"error") and b"parent" not in run:
            client.zadd(b"agentfsm:agent:" + run[b"agent"], {entry: run[b"updated_at"]})
    for pattern in ("held:*", "ready:*", "suspects:*", "workers"):
        for key in client.scan_iter(match=f"agentfsm:{pattern}"):
            client.delete(key)
    client.set("agentfsm:schema", 1)
