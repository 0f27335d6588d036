"""Where workers begin, and the stores that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agentfsm.ports import Store
from agentfsm.stores import PostgresStore, RedisStore, SQLiteStore
from agentfsm.testing.crash import ForkServer, connect
from tests.support.crash_story import prepare
from tests.support.database_servers import empty_schema

# A killed process loses nothing that the kernel has, so a real disk would only take time.
MEMORY = Path("/dev/shm")  # noqa: S108  the folders in it have names of their own


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(prepare) as fork_server:
        yield fork_server


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as place:
        yield Path(place)


@pytest.fixture
def schema(request: pytest.FixtureRequest) -> Iterator[str]:
    with empty_schema(request.getfixturevalue("postgres_desk")) as name:
        yield name


@pytest.fixture
def store_of(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Store]:
    """Return what makes a store in any process, given further options; the test names the kind."""
    match request.param:
        case "sqlite":
            return partial(SQLiteStore, str(folder / "runs.db"), connect=connect)
        case "postgres":
            url = request.getfixturevalue("shared_postgres")
            return partial(PostgresStore, url, schema=request.getfixturevalue("schema"))
        case _:
            return partial(RedisStore, request.getfixturevalue("redis_url"), accept_loss="everything")
