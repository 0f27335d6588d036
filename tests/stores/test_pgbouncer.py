"""PostgresStore behind a real PgBouncer that pools by transaction: each transaction may meet another connection."""

from contextlib import aclosing

import pytest
from anyio.to_thread import run_sync

from agentfsm import Agent, State, StoreError, tool
from agentfsm.stores import PostgresStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.testing.conformance import StoreConformance
from agentfsm.testing.conformance.helpers import make_header
from tests.support.database_servers import PgBouncer, empty_schema

# Fewer than there are workers, so that they share, and what one leaves behind another meets.
POOL = {"pool_mode": "transaction", "default_pool_size": "1", "server_reset_query": ""}


@pytest.fixture(scope="module")
def pooler(shared_postgres):
    with PgBouncer(POOL, of=shared_postgres) as pooler:
        yield pooler


class TestPooledPostgresStore(StoreConformance):
    """The published kit."""

    @pytest.fixture
    async def store(self, pooler, schema):
        async with aclosing(PostgresStore(pooler.url, schema=schema)) as store:
            yield store

    @pytest.fixture
    async def other(self, pooler, schema):
        async with aclosing(PostgresStore(pooler.url, schema=schema)) as store:
            yield store


async def test_a_pooler_that_is_killed_costs_time_and_nothing_else(shared_postgres, postgres_desk):
    """A run in mid-turn goes on once there is a PgBouncer again, and no call is made twice; the tables are new, too."""
    paid = []

    @tool
    async def pay(amount: int) -> str:
        """Pay an amount."""
        paid.append(amount)
        if amount == 2:
            await run_sync(pooler.kill)
            await run_sync(pooler.start)
        return f"paid {amount}"

    script = ScriptedModel(*[say("", call("pay", amount=amount)) for amount in range(4)], say("done"))
    with empty_schema(postgres_desk) as new, PgBouncer(POOL, of=shared_postgres) as pooler:
        async with aclosing(PostgresStore(pooler.url, schema=new)) as store:
            run = await Agent(script, tools=[pay], store=store).run("go")
            assert (run.state, paid) == (State.DONE, [0, 1, 2, 3])
            stored = await store.read(run.id)
    assert len(stored.events) == run.version


async def test_pooling_by_statement_is_refused_at_once(shared_postgres, schema):
    """No transaction is possible there, and none will be in a while."""
    with PgBouncer({"pool_mode": "statement"}, of=shared_postgres) as pooler:
        async with aclosing(PostgresStore(pooler.url, schema=schema, patience_s=3_600)) as store:
            with pytest.raises(StoreError, match="set pool_mode = transaction in PgBouncer"):
                await store.create(make_header())
