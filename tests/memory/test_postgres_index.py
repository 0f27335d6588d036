"""The index in PostgreSQL, on a server."""

import pytest

from agentfsm.core.errors import MisuseError
from agentfsm.memory import Memory, PostgresIndex
from agentfsm.testing.memory_conformance import OF_ANN, MemoryIndexConformance, build_item
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
