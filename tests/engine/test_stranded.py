"""Runs that are ready and that no worker takes: which they are, and why."""

import anyio
import attrs
import pytest

from agentfsm import Agent, MisuseError, Runs, tool
from agentfsm.core.header import FORMAT
from agentfsm.ports import Filter
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, VirtualClock, call, run_virtual, say
from tests.support.checks import Wrapped


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


def make_agent(store, name="clerk", **options):
    """Return an agent that asks before it pays."""
    return Agent(
        ScriptedModel(*[say("", call("pay", cents=1)), "done"] * 9), tools=[pay], store=store, name=name, **options
    )


async def list_reasons(store, where=None):
    """Return the reasons by run."""
    found = await Runs(store).list_stranded(*(() if where is None else (where,)))
    return {each.run.id: each.reason for each in found}


def test_a_ready_run_is_stranded_after_a_minute_unless_a_worker_works_on_its_kind():
    """A run that waits for a person is not ready; one that is executed shows that the others will be."""
    clock = VirtualClock()

    async def story():
        store = MemoryStore(clock=clock)
        agent = make_agent(store, clock=clock)
        await agent.run("go", id="waits")
        for run_id, release in (("plain", ""), ("of-1", "1"), ("of-2", "2")):
            await agent.submit("go", id=run_id, release=release)
        await anyio.sleep(59)
        assert await list_reasons(store) == {}
        await anyio.sleep(1)
        assert await list_reasons(store) == {"plain": "no_worker", "of-1": "release", "of-2": "release"}
        assert await list_reasons(store, Filter(release="1")) == {"of-1": "release"}
        lease = await store.lease("of-1")
        assert await list_reasons(store) == {"of-2": "release"}  # the worker of release 1 takes those without one, too
        await store.release(lease).wait()
        await agent.with_(name="other").submit("go", id="other")
        await anyio.sleep(60)
        lease = await store.lease("plain")
        assert await list_reasons(store) == {"other": "no_worker", "of-1": "release", "of-2": "release"}
        await store.release(lease).wait()
        [found] = await Runs(store).list_stranded(Filter(agent="other"))
        assert str(found) == "no worker executes runs of agent 'other': start one"
        assert found.since == found.run.ready_at

    run_virtual(story)


@attrs.define
class NewerStore(Wrapped):
    """A store in which a newer agentfsm has continued one run."""

    inner: MemoryStore

    async def runs(self, *args, **options):
        """Raise the format of that run."""
        found = await self.inner.runs(*args, **options)
        return tuple([attrs.evolve(each, format=FORMAT + 1) if each.id == "newer" else each for each in found])


def test_a_worker_of_an_older_format_is_no_sign_that_a_newer_run_is_taken():
    """The run needs the agentfsm that has written it, although a worker of its agent works."""
    clock = VirtualClock()

    async def story():
        store = MemoryStore(clock=clock)
        agent = make_agent(store, clock=clock)
        await agent.submit("go", id="newer")
        await agent.submit("go", id="old")
        lease = await store.lease("old")
        await anyio.sleep(60)
        [found] = await Runs(NewerStore(store)).list_stranded()
        assert (found.run.id, found.reason) == ("newer", "format")
        assert str(found).startswith(f"its records have format {FORMAT + 1}: start workers of the newer agentfsm")
        await store.release(lease).wait()

    run_virtual(story)


def test_a_run_that_workers_refuse():
    """It rests longer after each attempt, so it is not ready for long; another run of the agent proves nothing."""

    async def play():
        clock = VirtualClock()
        store = MemoryStore(clock=clock)
        agent = make_agent(store, clock=clock)
        await agent.submit("go", id="r")
        await agent.submit("go", id="other")
        held = await store.lease("other")
        for _ in range(3):
            lease = await store.lease("r")
            lease.backoff_s = 45.0
            await store.release(lease).wait()
            await anyio.sleep(30)
        assert await list_reasons(store) == {"r": "refused"}
        [found] = await Runs(store).list_stranded()
        assert "refuse it or fail to execute it" in str(found)
        await store.release(held).wait()

    run_virtual(play)


@pytest.mark.anyio
async def test_the_run_of_a_dead_worker_that_no_other_takes(tmp_path):
    """Its lease has ended, and no worker has claimed runs of the agent since."""
    path = tmp_path / "runs.db"
    store, other = SQLiteStore(path, lease_s=0.1), SQLiteStore(path)
    async with make_agent(store) as agent:
        run = await agent.submit("go", id="r")
        lease = await store.lease(run.id)
        assert await Runs(other).list_stranded(after_s=0.001) == ()
        store._writer.backend.leases.clear()  # as if the process had died: nothing renews the lease
        with anyio.fail_after(60):
            while not (found := await Runs(other).list_stranded(after_s=0.001)):  # noqa: ASYNC110  the lease ends
                await anyio.sleep(0.05)
        assert lease.run_id == found[0].run.id
    assert [(each.run.id, each.reason, each.since) for each in found] == [("r", "worker_died", found[0].run.updated_at)]
    await other.aclose()


@pytest.mark.anyio
async def test_the_arguments_are_checked():
    """A filter that is none, and a time that makes no sense."""
    runs = Runs(MemoryStore())
    with pytest.raises(MisuseError, match="where"):
        await runs.list_stranded("clerk")
    with pytest.raises(MisuseError, match="after_s"):
        await runs.list_stranded(after_s=0)
