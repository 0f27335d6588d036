"""A schema for the runs, one for DBOS, and an agent with its engine. DBOS needs asyncio."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.database_servers import empty_schema


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def schema(postgres_desk: psycopg.Connection) -> Iterator[str]:
    with empty_schema(postgres_desk) as name:
        yield name
        postgres_desk.execute(f"DROP SCHEMA IF EXISTS {name}_dbos CASCADE".encode())


@pytest.fixture
def books(tmp_path: Path) -> Path:
    path = tmp_path / "books"
    path.touch()
    return path
