"""The index in PostgreSQL, on a server."""

import json

import psycopg
import pytest

from agentfsm import Agent, MisuseError
from agentfsm.memory import Learner, Memory, PostgresIndex
from agentfsm.stores import PostgresStore
from agentfsm.testing import HashEmbedder, ScriptedModel
from agentfsm.testing.memory_conformance import (
    OF_ANN,
    MemoryIndexConformance,
    VectorIndexConformance,
    build_item,
)
from tests.support.database_servers import empty_schema


@pytest.fixture
def schema(postgres_desk):
    with empty_schema(postgres_desk) as name:
        yield name


@pytest.fixture
async def index(shared_postgres, schema):
    index = PostgresIndex(shared_postgres, schema=schema)
    yield index
    await index.aclose()


class TestPostgresIndex(MemoryIndexConformance):
    """The index passes the kit."""

    @pytest.fixture
    async def index(self, shared_postgres, schema):
        index = PostgresIndex(shared_postgres, schema=schema)
        yield index
        await index.aclose()

    @pytest.fixture
    async def other(self, shared_postgres, schema):
        other = PostgresIndex(shared_postgres, schema=schema)
        yield other
        await other.aclose()


async def test_a_url_opens_it(shared_postgres):
    """A URL is opened with PostgreSQL, and one of something else is refused, without its password."""
    memory = Memory(shared_postgres)
    assert isinstance(memory.index, PostgresIndex)
    await memory.aclose()
    with pytest.raises(MisuseError, match="postgresql://") as caught:
        Memory("mysql://ann:secret@host/db")
    assert "secret" not in str(caught.value)


async def test_rare_words_count_more(index):
    """A short item with the rare word comes before a long one with a common word that is repeated."""
    await index.add([build_item(f"c{number}", "coffee coffee coffee and milk") for number in range(20)])
    await index.add([build_item("rare", "coffee from the samovar")])
    found = (await index.search_text("coffee samovar", OF_ANN, 3)).matches
    assert found[0].item_id == "rare"


@pytest.fixture
async def vector_index(vector_postgres):
    with psycopg.connect(vector_postgres, autocommit=True) as desk, empty_schema(desk) as name:
        index = PostgresIndex(vector_postgres, schema=name)
        yield index
        await index.aclose()


class TestVectors(VectorIndexConformance):
    """The index passes the kit of vectors."""

    @pytest.fixture
    async def index(self, vector_index):
        return vector_index

    @pytest.fixture
    async def other(self, vector_index):
        other = PostgresIndex(vector_index.url, schema=vector_index.schema)
        yield other
        await other.aclose()


async def test_a_server_without_pgvector_is_named(index, postgres_desk):
    """The error says how to install it; a server that has it needs no advice."""
    if postgres_desk.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone():
        pytest.skip("the shared server has pgvector")
    with pytest.raises(MisuseError, match="install it on the server"):
        await Memory(index, embedder=HashEmbedder()).remember("text")


async def test_a_server_without_pgvector_is_refused(shared_postgres, postgres_desk, schema):
    """If it is to keep vectors; the error says what to install. Without an embedder it does not matter."""
    if postgres_desk.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone():
        pytest.skip("this server has pgvector")
    memory = Memory(PostgresIndex(shared_postgres, schema=schema), embedder=HashEmbedder())
    with pytest.raises(MisuseError, match=r"has no pgvector.*install it"):
        await memory.remember("Ann drinks tea")
    await memory.aclose()


def count_rows(desk, schema, word):
    """Return the number of rows of each table of a schema that contain a word, as text or as bytes."""
    tables = desk.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
    counts = {}
    for (table,) in tables:
        sql = f"SELECT count(*) FROM {schema}.{table} t WHERE t::text LIKE %s OR t::text LIKE %s"  # noqa: S608
        (counts[table],) = desk.execute(sql, (f"%{word}%", f"%{word.encode().hex()}%")).fetchone()
    return counts


async def test_no_row_has_the_words_of_a_forgotten_user(vector_postgres):
    """Not in the items, their words, their vectors and notes, and not in the journals, if these are deleted as well."""
    learned = json.dumps({"facts": [{"text": "Ann works in Zanzibar"}]})
    with (
        psycopg.connect(vector_postgres, autocommit=True) as desk,
        empty_schema(desk) as schema,
        empty_schema(desk) as runs,
    ):
        memory = Memory(PostgresIndex(vector_postgres, schema=schema), embedder=HashEmbedder())
        store = PostgresStore(vector_postgres, schema=runs)
        async with Agent(ScriptedModel("Done."), memory=memory, store=store) as agent:
            await agent.run("I work in Zanzibar. Write a report.", user="ann")
            await Learner(memory, ScriptedModel(learned), store).run(until_idle=True)
            assert count_rows(desk, schema, "Zanzibar")["items"] == 2
            assert count_rows(desk, schema, "")["item_vectors"] == 2
            assert sum(count_rows(desk, runs, "Zanzibar").values()) >= 2
            assert await memory.for_(user="ann").forget_all(runs="delete", store=store) == 2
            for word in ("Zanzibar", "zanzibar", "ann"):
                assert not any(count_rows(desk, schema, word).values()), word
            assert not any(count_rows(desk, runs, "Zanzibar").values())
            assert count_rows(desk, schema, "")["item_vectors"] == 0
        await memory.aclose()
