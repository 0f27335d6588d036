"""Deploys with the engine on DBOS: a worker executes the runs of other versions, or names those that it leaves."""

import logging
from functools import partial

import anyio

from agentfsm import Agent, State
from agentfsm.engines.dbos import DBOSEngine
from agentfsm.engines.executor_locks import ExecutorLocks
from agentfsm.stores import PostgresStore
from agentfsm.testing import FunctionModel, ScriptedModel
from tests.support.dbos_executor import make_engine


def make_agent(url, schema, version):
    return Agent(ScriptedModel(*["done"] * 9), name="clerk", version=version, store=PostgresStore(url, schema=schema))


async def work_until(agent, check, **options):
    """Work on the queue of an agent until a check holds."""
    async with make_engine(agent, **options) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.work)
        with anyio.fail_after(60):
            while not await check():  # noqa: ASYNC110  another process does it
                await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()


async def are_done(agent, *ids):
    return all([(await agent.load(run_id)).state is State.DONE for run_id in ids])


async def test_any_version_executes_what_another_version_queued(shared_postgres, schema):
    """Version 1 queues two runs, one of them delayed and with priority, and only version 2 works."""
    async with make_agent(shared_postgres, schema, "1") as old, make_engine(old) as engine:
        await engine.submit("go", id="plain")
        await engine.submit("go", id="delayed", delay_s=0.1, priority=1)
    async with make_agent(shared_postgres, schema, "2") as new:
        await work_until(new, partial(are_done, new, "plain", "delayed"))


async def test_a_run_in_a_queue_without_workers_is_moved(shared_postgres, schema, caplog):
    """The name of the queue was changed. While a worker of the old queue lives, its runs are left to it."""
    async with make_agent(shared_postgres, schema, "1") as old, make_engine(old, queue="old") as engine:
        await engine.submit("go", id="moved")
        address = engine._address
    living = ExecutorLocks(address, schema=f"{schema}_dbos", queues=("old",), executor_id="one that lives")
    await anyio.to_thread.run_sync(living.renew)

    async with make_agent(shared_postgres, schema, "2") as new:
        await new.submit("go", id="beside")
        await work_until(new, partial(are_done, new, "beside"))
        assert await anyio.to_thread.run_sync(living.find_served, ["old", "other"]) == {"old"}
        assert not await are_done(new, "moved")
        await anyio.to_thread.run_sync(living.close)
        await work_until(new, partial(are_done, new, "moved"))
    assert "1 runs in queue 'old', which no worker works on, are moved to 'agentfsm-clerk'" in caplog.text


async def test_a_release_that_no_worker_has_is_named_and_waits_for_one(shared_postgres, schema, caplog):
    """Only the workers of a release execute its runs, also those that another release has queued."""
    caplog.set_level(logging.WARNING, "agentfsm.worker")
    async with make_agent(shared_postgres, schema, "2") as new, make_agent(shared_postgres, schema, "1") as old:
        async with make_engine(new) as engine:
            await engine.submit("go", id="of-1", release="1")
            await new.submit("go", id="also-of-1", release="1")
            await engine.submit("go", id="of-2", release="2")

        async def is_named():
            return await are_done(new, "of-2") and "begun with release '1'" in caplog.text

        await work_until(new, is_named)
        assert caplog.text.count("begun with release '1'") == 1
        assert (await new.load("of-1")).version == 0
        await work_until(old, partial(are_done, old, "of-1", "also-of-1"))


async def test_runs_that_cannot_be_executed_here_leave_the_queue(shared_postgres, schema, postgres_desk, caplog):
    """One was deleted while it was queued, and only a newer agentfsm can read the other, which is named."""
    async with make_agent(shared_postgres, schema, "1") as agent, make_engine(agent) as engine:
        await engine.submit("go", id="deleted")
        await engine.submit("go", id="newer")
        await agent.runs.delete("deleted")
        postgres_desk.execute(f"UPDATE {schema}.runs SET format = 99 WHERE id = 'newer'".encode())  # noqa: S608
        with anyio.fail_after(60):
            await engine.work(until_idle=True)
        found = await engine._open_client.list_workflows_async(workflow_ids=["deleted", "newer"])
    outputs = {each.workflow_id: each.output for each in found}
    assert outputs == {"deleted": {"deleted": True}, "newer": {"left": "to a newer agentfsm"}}
    assert "it leaves them to workers of that version" in caplog.text


def test_the_queues_of_an_agent_are_named_after_it_and_its_releases(shared_postgres, schema):
    """All versions share a queue; a release of a roll-out has one beside it."""
    engines = [DBOSEngine(make_agent(shared_postgres, schema, version)) for version in ("1", "2")]
    assert {each.queue for each in engines} == {"agentfsm-clerk"}
    assert engines[0]._name_queue("1") == "agentfsm-clerk@1"


async def test_a_process_executes_as_many_runs_as_it_may_over_both_queues(shared_postgres, schema):
    """Runs with and without a release share the places of a worker."""
    together, most = [0], [0]

    async def answer(_request):
        together[0] += 1
        most[0] = max(most[0], together[0])
        await anyio.sleep(0.05)
        together[0] -= 1
        return "done"

    store = PostgresStore(shared_postgres, schema=schema)
    async with Agent(FunctionModel(answer), name="clerk", version="1", store=store) as agent:
        async with make_engine(agent) as engine:
            for number in range(4):
                await engine.submit("go", id=str(number), release="1" if number % 2 else "")
        await work_until(agent, partial(are_done, agent, *"0123"), worker_concurrency=1)
    assert most == [1]
