"""A file of older tables is brought up to date when it is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from agentfsm import Agent, State, TooNewError
from agentfsm.core.header import FORMAT
from agentfsm.ports import Filter
from agentfsm.stores import SQLiteStore
from agentfsm.stores.sqlite.file import APPLICATION_ID
from agentfsm.stores.sqlite.store import SCHEMA
from agentfsm.testing import ScriptedModel

RECORDS = Path(__file__).parent.parent / "core" / "fixtures" / "v1.jsonl"
# As agentfsm made them before it had timers, workers and forks.
TABLES_1 = """
CREATE TABLE runs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session TEXT, agent TEXT NOT NULL, prompt TEXT NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, state TEXT NOT NULL, stop_reason TEXT,
    waiting INTEGER NOT NULL, turn INTEGER NOT NULL, version INTEGER NOT NULL, tokens INTEGER NOT NULL,
    token INTEGER NOT NULL, owner TEXT, until REAL
);
CREATE INDEX runs_by_time ON runs (created_at);
CREATE INDEX runs_by_session ON runs (session) WHERE session IS NOT NULL;
CREATE TABLE events (run INTEGER NOT NULL, version INTEGER NOT NULL, body TEXT NOT NULL, UNIQUE (run, version));
CREATE TABLE inbox (
    run INTEGER NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL, item TEXT NOT NULL, cancel INTEGER NOT NULL,
    taken INTEGER NOT NULL, PRIMARY KEY (run, number), UNIQUE (run, key)
) WITHOUT ROWID;
CREATE INDEX inbox_open ON inbox (run, number) WHERE NOT taken;
"""


@pytest.fixture
def old(path):
    """A file of version 1 with one run that is in the middle, of the fixture that the codec's test reads."""
    header, *events = RECORDS.read_text(encoding="utf-8").split("\n")[:-1]
    with sqlite3.connect(path) as db:
        db.executescript(TABLES_1)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute("PRAGMA user_version = 1")
        db.execute(
            "INSERT INTO runs VALUES (1, 'order-17', 'user-7', 'billing', 'Refund', 1.0, 2.0, 'observe', NULL, 0, 0, 1,"
            " 0, 3, NULL, NULL)"
        )
        db.execute(
            "INSERT INTO runs VALUES (2, 'lost', NULL, 'billing', '', 1.0, 2.0, 'observe', NULL, 0, 0, 0, 0, 1,"
            " NULL, NULL)"
        )
        db.execute("INSERT INTO events VALUES (2, 0, 'no JSON')")
        db.execute("INSERT INTO events VALUES (1, 0, ?)", (header.replace('"after":"order-16",', ""),))
        db.execute("INSERT INTO events VALUES (1, 1, ?)", (events[0],))
        db.execute(
            'INSERT INTO inbox VALUES (1, 1, \'input:a\', \'{"parts":[{"text":"And 18?","is":"TextPart"}],'
            '"is":"Input"}\', 0, 0)'
        )
    db.close()
    return path


async def test_an_older_file_is_read_and_written(old):
    """The run is listed with what its header says, and goes on; its next events say which format they are in."""
    store = SQLiteStore(old)
    [line] = await store.runs(Filter(user="ann", parent="desk-3"))
    assert (line.id, line.driven) == ("order-17", False)
    agent = Agent(ScriptedModel("Too early.", "Done."), store=store, name="billing")
    run = await agent.resume("order-17")
    assert (run.state, run.output) == (State.DONE, "Done.")
    assert [message.text for message in run.messages if "18" in message.text]
    assert run.header.format == 1
    await agent.aclose()
    with sqlite3.connect(old) as db:
        bodies = [body for (body,) in db.execute("SELECT body FROM events WHERE run = 1 ORDER BY version")]
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA.version,)
    db.close()
    assert [body.startswith(f'{{"v":{FORMAT},') for body in bodies[:3]] == [False, False, True]
    again = SQLiteStore(old)
    assert (await again.read("order-17")).events == tuple(await agent.with_(store=again).history("order-17"))
    await again.aclose()


async def test_two_open_an_older_file_at_once(old):
    """One brings it up to date, and the other finds it so."""
    stores = [SQLiteStore(old) for _ in range(2)]
    assert [len(await store.runs()) for store in stores] == [2, 2]
    for store in stores:
        await store.aclose()


async def test_the_upgraded_tables_are_the_new_ones(old, tmp_path):
    """An upgraded file has every column and index of a new one."""

    def shape(path):
        with sqlite3.connect(path) as db:
            tables = {table: {row[1] for row in db.execute(f"PRAGMA table_info({table})")} for table in SCHEMA.tables}
            indexes = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        db.close()
        return tables, indexes

    new = tmp_path / "new.db"
    for path in (old, new):
        store = SQLiteStore(path)
        await store.runs()
        await store.aclose()
    assert shape(old) == shape(new)


async def test_newer_tables_are_refused(path):
    """And left as they are."""
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute("PRAGMA user_version = 9900")
    db.close()
    store = SQLiteStore(path)
    with pytest.raises(TooNewError, match="99"):
        await store.runs()
    await store.aclose()
