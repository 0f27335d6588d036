"""The index in PostgreSQL, on a server."""

import psycopg
import pytest

from agentfsm.core.errors import MisuseError
from agentfsm.memory import Memory, PostgresIndex
from agentfsm.testing import HashEmbedder
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
    found = await index.search_text("coffee samovar", OF_ANN, 3)
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
