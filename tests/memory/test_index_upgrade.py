"""An index of earlier tables, whose terms the database made, is brought up to date at its first use."""

import sqlite3
from contextlib import closing

from agentfsm.memory import PostgresIndex, SQLiteIndex
from agentfsm.memory import sqlite_index as module
from agentfsm.testing.memory_conformance import OF_ANN, build_item
from tests.support.database_servers import empty_schema

# What the tables of version 100 of SQLite had, in place of those of today.
_SQLITE_100 = """
DROP TABLE items_words;
DROP TABLE items_text;
DROP TABLE text_terms;
ALTER TABLE items DROP COLUMN terms;
DROP INDEX items_followed;
ALTER TABLE items DROP COLUMN follows;
ALTER TABLE items DROP COLUMN imported_id;
ALTER TABLE items ADD COLUMN pairs TEXT NOT NULL DEFAULT '';
ALTER TABLE items ADD COLUMN day TEXT NOT NULL DEFAULT '';
CREATE VIRTUAL TABLE items_text USING fts5 (
    text, pairs, day, owner, content='items', content_rowid='number', tokenize='porter unicode61 remove_diacritics 2'
);
INSERT INTO items_text (items_text, rank) VALUES ('rank', 'bm25(1.0, 1.0, 1.0, 0.0)');
INSERT INTO items_text (items_text) VALUES ('rebuild');
PRAGMA user_version = 100;
"""
_POSTGRES_100 = (
    "ALTER TABLE {s}.items DROP COLUMN terms, DROP COLUMN follows, DROP COLUMN imported_id; "
    "DROP TABLE {s}.text_terms; UPDATE {s}.layout SET version = 100; "
    "UPDATE {s}.items SET words = to_tsvector('simple', text)"
)
ITEMS = [
    build_item("hindi", "मुझे किताबें पसंद हैं"),
    build_item("gone", "a violin"),
    build_item("cost", "it cost 10,000 yen"),
]


async def check(index):
    """Search what the earlier terms did not find; and forget, which needs the terms as they were written."""
    for query, found in (("किताबें", "hindi"), ("10000", "cost"), ("violins", "gone")):
        assert [match.item_id for match in (await index.search_text(query, OF_ANN, 10)).matches] == [found]
    assert await index.forget(["gone"], at=500.0, by="", reason="") == 1
    assert not (await index.search_text("violin", OF_ANN, 10)).matches
    await index.add([build_item("new", "a viola")])
    assert len((await index.search_text("viola", OF_ANN, 10)).matches) == 1
    await index.aclose()


async def test_a_file_of_earlier_tables(tmp_path):
    """Its items are found by terms of today."""
    index = SQLiteIndex(tmp_path / "memory.db")
    await index.add(ITEMS)
    await index.aclose()
    with closing(sqlite3.connect(tmp_path / "memory.db")) as db:
        db.executescript(_SQLITE_100)
    await check(SQLiteIndex(tmp_path / "memory.db"))


async def test_a_schema_of_earlier_tables(shared_postgres, postgres_desk):
    """Its items are found by terms of today."""
    with empty_schema(postgres_desk) as schema:
        index = PostgresIndex(shared_postgres, schema=schema)
        await index.add(ITEMS)
        await index.aclose()
        postgres_desk.execute(_POSTGRES_100.format(s=schema))
        await check(PostgresIndex(shared_postgres, schema=schema))


async def test_terms_of_another_version_are_written_again(tmp_path, monkeypatch):
    """As after an upgrade that cuts texts in another way, without a change of the tables."""
    with monkeypatch.context() as earlier:
        earlier.setattr(module, "write_terms", lambda _text, _valid_from: "nothing")
        index = SQLiteIndex(tmp_path / "memory.db")
        await index.add(ITEMS)
        await index.aclose()
    with closing(sqlite3.connect(tmp_path / "memory.db")) as db:
        db.execute("UPDATE text_terms SET version = 0")
        db.commit()
    await check(SQLiteIndex(tmp_path / "memory.db"))


async def test_common_words_do_not_hide_rare_ones(tmp_path, monkeypatch):
    """Common terms are left out of a large search; what has only them is found if nothing else is, or too little."""
    monkeypatch.setattr("agentfsm.memory.threaded_index.MAX_HITS", 20)
    index = SQLiteIndex(tmp_path / "memory.db")
    await index.add([build_item(f"{number}", "Ann drinks tea") for number in range(50)])
    await index.add([build_item("rare", "Ann plays the oboe")])
    found = (await index.search_text("Ann oboe", OF_ANN, 1)).matches
    assert [match.item_id for match in found] == ["rare"]
    assert len((await index.search_text("Ann oboe", OF_ANN, 100)).matches) == 51
    await index.aclose()
