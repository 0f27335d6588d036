"""A SQLite store in a file of its own."""

import pytest

from agentfsm.stores import SQLiteStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


@pytest.fixture
async def store(path):
    store = SQLiteStore(path)
    yield store
    await store.aclose()
