"""The engine on DBOS: what it dispatches happens once, whatever dies, and what waits goes on, however it is decided."""

import time
from collections import Counter
from functools import partial

import anyio
import pytest

from agentfsm import Agent, MisuseError, RunContext, Runs, State, tool
from agentfsm.engines.dbos import DBOSEngine
from agentfsm.stores import MemoryStore, PostgresStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.dbos_executor import make_clerk, make_engine, start


async def until(check):
    with anyio.fail_after(60):
        while not await check():  # noqa: ASYNC110  another process does it
            await anyio.sleep(0.02)


async def workflows_of(engine, **where):
    return await engine._open_client.list_workflows_async(**where)


async def test_an_executor_is_killed_and_live_runs_are_started_twice(shared_postgres, schema, books):
    """Each call is made once; each run is done, or waits by name for the outcome of the call that was cut off."""
    ids = [f"order-{number}" for number in range(24)]
    agent = make_clerk(shared_postgres, schema, books)
    async with agent, make_engine(agent, worker_concurrency=20) as engine, anyio.create_task_group() as tasks:
        for run_id in ids:
            await engine.submit("0.7", id=run_id)

        async def has_begun(process, number):
            return books.read_text().count(f"{process.pid} ") >= number

        async def met_a_lease():
            return any("busy" in (each.output or ()) for each in await workflows_of(engine))

        async def all_settled():
            runs = await agent.store.runs(limit=len(ids))
            return all(each.waiting or each.state is State.DONE for each in runs) and not await workflows_of(
                engine, status=["ENQUEUED", "PENDING"]
            )

        with start(shared_postgres, schema, books, 8) as other:
            await until(partial(has_begun, other, 8))
            tasks.start_soon(engine.work)
            await until(partial(is_supervised, engine))
            live = [each.workflow_id for each in await workflows_of(engine, status="PENDING")]
            await engine._open_client.resume_workflows_async(live, queue_name=engine.queue)
            await until(met_a_lease)
            begun = books.read_text().count(f"{other.pid} ")
            await until(partial(has_begun, other, begun + 1))
            other.kill()
        await until(all_settled)
        outcomes = [each.output for each in await workflows_of(engine)]
        tasks.cancel_scope.cancel()
    keys = Counter(line.split()[1] for line in books.read_text().splitlines())
    assert max(keys.values()) == 1
    assert any(each.get("state") == "done" for each in outcomes)
    assert "outcome" in [each["waiting"][0]["kind"] for each in outcomes if each.get("state") == "act"]


@tool(requires_approval=True)
async def refund(amount: int) -> str:
    """Refund."""
    return f"refunded {amount}"


@tool(requires_approval=True, approval_expires_s=1.0)
async def discount() -> str:
    """Grant a discount."""
    return "granted"


async def test_what_waits_leaves_the_queue_and_a_decision_of_anyone_brings_it_back(shared_postgres, schema):
    """An approval by another client of the store, a timer that nobody acts on, and a run that the agent submitted."""
    script = {"refund": call("refund", amount=3), "discount": call("discount"), "plain": None}

    def answer(request):
        wanted = script[request.messages[0].text]
        return say("", wanted) if wanted and len(request.messages) == 1 else "done"

    store = PostgresStore(shared_postgres, schema=schema)
    agent = Agent(FunctionModel(answer), tools=[refund, discount], store=store, name="clerk")
    async with agent, make_engine(agent) as engine, anyio.create_task_group() as tasks:
        assert (await engine.submit("refund", id="r")).version == 0
        await engine.submit("refund", id="r")  # again, as after a lost reply
        await engine.submit("discount", id="d")
        await agent.submit("plain", id="p")  # not by the engine
        tasks.start_soon(engine.work)

        async def is_parked():
            found = await workflows_of(engine, workflow_ids=["r"])
            return found and found[0].status == "SUCCESS"

        await until(is_parked)
        [first] = await workflows_of(engine, workflow_ids=["r"])
        assert first.output == {"state": "act", "waiting": [{"kind": "approval", "call": "t1.0", "tool": "refund"}]}
        elsewhere = PostgresStore(shared_postgres, schema=schema)
        await Runs(elsewhere).approve("r", "t1.0", by="ann")
        await elsewhere.aclose()
        for run_id in ("r", "d", "p"):
            await until(partial(is_over, agent, run_id))
        tasks.cancel_scope.cancel()
        assert (await agent.load("r")).output == "done"
        assert [record.approved_by for record in await agent.audit("r")] == ["ann"]


async def is_over(agent, run_id):
    return (await agent.load(run_id)).is_over


async def test_priorities_delays_and_tenants_are_those_of_dbos(shared_postgres, schema):
    """The most urgent run first, no two of one tenant at once, and a delayed run not before its time."""
    begun, together, overlaps = {}, [], []

    @tool
    async def work(ctx: RunContext) -> str:
        """Work."""
        begun[ctx.run_id] = time.time()
        together.append(ctx.user)
        overlaps.append(together.count(ctx.user) - 1)
        await anyio.sleep(0.1)
        together.remove(ctx.user)
        return "worked"

    agent = Agent(
        FunctionModel(lambda request: say("", call("work")) if len(request.messages) == 1 else "done"),
        tools=[work],
        store=PostgresStore(shared_postgres, schema=schema),
        name="clerk",
    )
    async with agent, make_engine(agent, tenant_concurrency=1) as engine:
        due_at = time.time() + 0.5
        await engine.submit("go", id="late", user="bob", tenant="b", delay_s=0.5)
        for number, (who, priority) in enumerate([("ann", 9), ("ann", 1), ("ann", None), ("bob", 5)]):
            await engine.submit("go", id=f"{who}-{number}", user=who, tenant=who[0], priority=priority)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.work)
            for run_id in ("late", "ann-0", "ann-1", "ann-2", "bob-3"):
                await until(partial(is_over, agent, run_id))
            tasks.cancel_scope.cancel()
    assert [each for each in begun if each.startswith("ann")] == ["ann-2", "ann-1", "ann-0"]
    assert overlaps == [0] * 5
    assert begun["late"] >= due_at - 0.001  # DBOS rounds to milliseconds


async def is_supervised(engine):
    return engine._client is not None and await engine._client.retrieve_queue_async(engine.queue) is not None


async def test_misuse_is_refused_before_anything_is_stored(shared_postgres, schema):
    """A store that is no PostgreSQL, and options that make no sense."""
    with pytest.raises(MisuseError, match="the agent's store is a MemoryStore: give the agent store=PostgresStore"):
        DBOSEngine(Agent(ScriptedModel(), store=MemoryStore()))
    agent = Agent(ScriptedModel(), store=PostgresStore(shared_postgres, schema=schema))
    for options in ({"limiter": 300}, {"worker_concurrency": 0}, {"schema": "Robert'; --"}, {"url": "host=db"}):
        with pytest.raises(MisuseError, match=next(iter(options))):
            DBOSEngine(agent, **options)
    async with make_engine(agent) as engine:
        with pytest.raises(MisuseError, match="priority"):
            await engine.submit("go", priority=0)


async def test_an_executor_that_is_stopped_leaves_its_runs_to_the_next(shared_postgres, schema):
    """It gives back their leases, no crash is counted, and a second engine beside it is refused."""
    asked, may_answer = anyio.Event(), anyio.Event()

    async def answer(request):
        asked.set()
        await may_answer.wait()
        return "Here."

    agent = Agent(FunctionModel(answer), store=PostgresStore(shared_postgres, schema=schema))
    async with agent, make_engine(agent) as engine, make_engine(agent) as second:
        await engine.submit("go", id="interrupted")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.work)
            with anyio.fail_after(60):
                await asked.wait()
            with pytest.raises(MisuseError, match="DBOS is in use in this process"):
                await second.work()
            tasks.cancel_scope.cancel()
        [left] = await agent.store.runs()
        assert (left.driven, left.crashes) == (False, 0)
        may_answer.set()
        await engine.work(until_idle=True)
        assert (await agent.load("interrupted")).output == "Here."
        [workflow] = [each for each in await workflows_of(engine) if each.workflow_id == "interrupted"]
        assert workflow.output["state"] == "done"


async def test_a_drain_cuts_off_no_call_and_takes_no_further_run(shared_postgres, schema):
    """The run stays in the queue between two steps, and the next executor goes on with it at once."""
    paying, may_end, paid = anyio.Event(), anyio.Event(), []

    @tool
    async def pay(name: str) -> str:
        """Pay, without a promise that it may be repeated."""
        paying.set()
        await may_end.wait()
        paid.append(name)
        return "paid"

    def answer(request):
        return say("", call("pay", name=request.messages[0].text)) if len(request.messages) == 1 else "Paid."

    agent = Agent(FunctionModel(answer), tools=[pay], name="payer", store=PostgresStore(shared_postgres, schema=schema))
    async with agent, make_engine(agent) as engine:
        await engine.submit("ann", id="r")
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:

                async def stop():
                    await paying.wait()
                    scope.cancel()
                    await engine.submit("bob", id="late")
                    may_end.set()

                tasks.start_soon(stop)
                with anyio.fail_after(60):
                    await engine.work(drain_s=1_000)
        assert paid == ["ann"]
        run, late = await agent.load("r"), await agent.load("late")
        assert (run.is_over, run.is_waiting, late.version) == (False, False, 0)
        with anyio.fail_after(60):
            await engine.work(until_idle=True)
        assert [(await agent.load(each)).output for each in ("r", "late")] == ["Paid.", "Paid."]
        assert paid == ["ann", "bob"]


def test_it_says_that_it_needs_asyncio(shared_postgres, schema):
    """On trio the worker of the store does it."""
    agent = Agent(ScriptedModel(), store=PostgresStore(shared_postgres, schema=schema))
    with pytest.raises(MisuseError, match=r"use Agent\.submit and Agent\.worker on trio"):
        anyio.run(DBOSEngine(agent).submit, "go", backend="trio")
