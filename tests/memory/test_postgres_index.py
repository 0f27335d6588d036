"""The index in PostgreSQL, on a server."""

import psycopg
import pytest
from psycopg import sql

from agentfsm import Agent
from agentfsm.core.errors import MisuseError
from agentfsm.core.events import Recalled
from agentfsm.memory import Memory, PostgresIndex
from agentfsm.testing import HashEmbedder, ScriptedModel
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


@pytest.fixture
async def vector_index(vector_postgres):
    with psycopg.connect(vector_postgres, autocommit=True) as desk, empty_schema(desk) as name:
        index = PostgresIndex(vector_postgres, schema=name)
        yield index
        await index.aclose()


async def test_a_vector_finds_items_of_the_owner(vector_index):
    """The filter comes before the ranking, only new items are embedded, and forgetting an item deletes its vector."""
    embedder = HashEmbedder()
    memory = Memory(vector_index, embedder=embedder)
    ann, bob = memory.for_(user="ann"), memory.for_(user="bob")
    for number in range(30):
        await bob.remember(f"the violin {number}")
    item = await ann.remember("a violin and a cello")
    assert len(embedder.texts) == 31
    (found,) = await ann.recall("violin", k=3)
    assert found.item.id == item.id
    assert found.why["vector"] == 1
    assert await ann.forget([item.id]) == 1
    with psycopg.connect(vector_index.url) as desk:
        count = sql.SQL("SELECT count(*) FROM {}.item_vectors").format(sql.Identifier(vector_index.schema))
        assert desk.execute(count).fetchone() == (30,)
    assert await ann.recall("violin") == []


async def test_another_model_is_refused(vector_index):
    """Vectors of two models, or of other dimensions, are not mixed; reindex makes them anew."""
    await Memory(vector_index, embedder=HashEmbedder()).remember("text")
    for other in (HashEmbedder(name="other"), HashEmbedder(dims=8)):
        with pytest.raises(MisuseError, match="cannot be compared"):
            await Memory(vector_index, embedder=other).recall("text")
    memory = Memory(vector_index, embedder=HashEmbedder(dims=8))
    assert await memory.reindex() == 1
    assert (await memory.recall("text"))[0].why["vector"] == 1


async def test_the_search_by_words_goes_on_without_the_embedder(vector_index):
    """Items are kept and found while the embedder is down, and embedded with the next one."""
    embedder = HashEmbedder(fault=OSError("away"))
    memory = Memory(vector_index, embedder=embedder)
    await memory.remember("a violin")
    assert "vector" not in (await memory.recall("violin"))[0].why
    embedder.fault = None
    await memory.remember("a cello")
    assert embedder.texts == ["a violin", "a cello"]


@pytest.mark.parametrize("fault", [None, OSError("away")])
async def test_a_run_records_the_embedder(vector_index, fault):
    """The event of the search has the usage of the embedder, or the reason why only words were searched."""
    embedder = HashEmbedder()
    memory = Memory(vector_index, embedder=embedder)
    await memory.for_(user="ann").remember("a violin")
    embedder.fault = fault
    async with Agent(ScriptedModel("yes"), memory=memory) as agent:
        run = await agent.run("Who plays the violin?", user="ann")
        (event,) = [each for each in await agent.history(run.id) if isinstance(each, Recalled)]
    assert [item.text for item in event.items] == ["a violin"]
    if fault is None:
        assert (event.fault, event.model, event.usage.input_tokens) == ("", "hash", 4)
    else:
        assert (event.fault, event.model) == ("the embedder hash failed: OSError: away", "")


async def test_sqlite_keeps_no_vectors():
    """An embedder that could not be used is refused."""
    with pytest.raises(MisuseError, match="keeps no vectors"):
        Memory(embedder=HashEmbedder())


async def test_a_server_without_pgvector_is_named(index, postgres_desk):
    """The error says how to install it; a server that has it needs no advice."""
    if postgres_desk.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone():
        pytest.skip("the shared server has pgvector")
    with pytest.raises(MisuseError, match="install it on the server"):
        await Memory(index, embedder=HashEmbedder()).remember("text")
