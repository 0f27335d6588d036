"""Workers of the engine on DBOS, from the command line."""

import pytest

from tests.support.database_servers import empty_schema


@pytest.fixture
def store(shared_postgres, postgres_desk):
    with empty_schema(postgres_desk) as name:
        yield f"{shared_postgres}?schema={name}"
        postgres_desk.execute(f"DROP SCHEMA IF EXISTS {name}_dbos CASCADE".encode())


def test_runs_pass_through_dbos(here, store):
    """Submitted, executed until it waits, approved without a word of the engine, and executed to its end."""
    submitted = here(
        "submit", "app:teller", "Pay.", "--id", "p", "--engine", "dbos", "--priority", "2", "--store", store
    )
    assert submitted == "p\n"
    assert "agentfsm worker --engine dbos app:teller" in here.err
    work = ("worker", "app:teller", "--engine", "dbos", "--until-idle", "--rate", "100/60", "--store", store)
    assert here.json(*work)["runs"] == {"done": 0, "failed": 0, "waiting": 1}
    here("approve", "p", "t1.0", "--by", "ann", "--store", store)
    assert here.json(*work)["runs"] == {"done": 1, "failed": 0, "waiting": 0}


def test_options_of_an_engine_need_one(here):
    """The worker of the store has neither priorities nor limits."""
    assert here("submit", "app:teller", "Pay.", "--priority", "1", code=2) == ""
    assert "--priority needs an engine that has it, and the store has not: add --engine dbos" in here.err
    assert here("worker", "app:teller", "--rate", "many", code=2) == ""
    assert "'many' is not valid" in here.err
