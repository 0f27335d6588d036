"""A SQLite store in a file of its own, and a schema of PostgreSQL with empty tables."""

import anyio
import pytest
import redis
from places import KINDS, place_of

from agentfsm.stores import PostgresStore, SQLiteStore
from tests.support.database_servers import empty_schema


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


@pytest.fixture
async def store(path):
    store = SQLiteStore(path)
    yield store
    await store.aclose()


@pytest.fixture(scope="module")
def tables(shared_postgres, postgres_desk):
    """Make a schema with the tables, for all tests: to empty them takes a tenth of the time."""
    with empty_schema(postgres_desk) as name:
        store = PostgresStore(shared_postgres, schema=name)
        anyio.run(store.runs)
        anyio.run(store.aclose)
        yield name


@pytest.fixture
def schema(tables, postgres_desk):
    yield tables
    for table in ("events", "posts", "runs", "workers", "sleepers", "followers", "reads", "feedback", "records"):
        postgres_desk.execute(f"DELETE FROM {tables}.{table}")  # noqa: S608  our own names


@pytest.fixture
def client(redis_url):
    """A look at the server from outside."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(params=KINDS)
def empty_place(request):
    return place_of(request.param, request.getfixturevalue)


@pytest.fixture
async def place(empty_place):
    """A database of each kind in turn."""
    yield empty_place
    for store in empty_place.stores:
        await store.aclose()
