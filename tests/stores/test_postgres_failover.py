"""A standby of PostgreSQL: it is refused, and takes over when its primary is killed."""

from contextlib import AsyncExitStack, aclosing

import anyio
import anyio.lowlevel
import psycopg
import pytest
from anyio.to_thread import run_sync
from psycopg.conninfo import make_conninfo

from agentfsm import Agent, State, StoreError, UserMessage, tool
from agentfsm.stores import PostgresStore
from agentfsm.testing import FunctionModel, call, say
from tests.support.database_servers import PostgresServer
from tests.support.server_reaper import await_that

# Of each of the three phases: before the primary is killed, while no server accepts writes, and afterwards.
RUNS = 30
CONFIRMED = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
REFUSED = "it is a standby, or was set to read only: give the address of the primary, or those of all servers"


async def test_a_server_that_refuses_writes_is_refused(shared_postgres, schema):
    """At the first use, with the reason, as a standby is."""
    url = make_conninfo(shared_postgres, options="-c default_transaction_read_only=on")
    async with aclosing(PostgresStore(url, schema=schema, patience_s=0.0)) as store:
        with pytest.raises(StoreError, match=REFUSED):
            await store.runs()


@pytest.mark.soak
async def test_a_failover_loses_nothing_that_was_acknowledged():
    """With synchronous replication: each run ends, none is lost, no payment is made twice, and workers go on."""
    paid = []

    @tool
    async def pay(amount: int) -> str:
        """Pay an amount."""
        paid.append(amount)
        await anyio.lowlevel.checkpoint()
        return "paid"

    def reply(request):
        last = request.messages[-1]
        return say("", call("pay", amount=int(last.text))) if isinstance(last, UserMessage) else "done"

    with PostgresServer() as primary, PostgresServer(standby_of=primary.url) as standby:
        with psycopg.connect(primary.url, autocommit=True) as desk:
            desk.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            desk.execute("SELECT pg_reload_conf()")
            await run_sync(await_that, lambda: desk.execute(CONFIRMED).fetchone() == (1,), "the standby is synchronous")
        for attributes in ("read-write", "any"):
            async with aclosing(PostgresStore(f"{standby.url}?target_session_attrs={attributes}")) as store:
                with pytest.raises(StoreError, match=REFUSED):
                    await store.runs()
        url = make_conninfo(primary.url, host="127.0.0.1,127.0.0.1", port=f"{primary.port},{standby.port}")
        acknowledged = []
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            stores = [await stack.enter_async_context(aclosing(PostgresStore(url))) for _ in range(3)]
            clerk, *workers = [Agent(FunctionModel(reply), name="clerk", tools=[pay], store=each) for each in stores]

            async def submit(amounts):
                for amount in amounts:
                    run = await clerk.submit(str(amount))
                    acknowledged.append(run.id)

            for each in workers:
                tasks.start_soon(each.worker)
            await submit(range(RUNS))
            tasks.start_soon(submit, range(RUNS, 2 * RUNS))
            await run_sync(primary.kill)
            with psycopg.connect(standby.url, autocommit=True) as desk:
                desk.execute("SELECT pg_promote()")
            await submit(range(2 * RUNS, 3 * RUNS))
            while len(acknowledged) < 3 * RUNS:  # noqa: ASYNC110  a few, that wait for the new primary
                await anyio.sleep(0.1)
            for run_id in acknowledged:
                while not (run := await clerk.load(run_id)).is_over:  # noqa: ASYNC110  the workers drive it
                    await anyio.sleep(0.1)
                assert run.state is State.DONE
            tasks.cancel_scope.cancel()
    assert sorted(paid) == list(range(3 * RUNS))
