"""A store calls its subscribers after what it has committed, in the process that wrote it."""

from __future__ import annotations

import logging

import anyio
import pytest

from agentfsm._lib.concurrency import make_waker
from agentfsm.core.events import Observed
from agentfsm.ports import Store
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.stores.subscriptions import ALL_AGENTS_TOPIC, Subscriptions, agent_topic, run_topic
from agentfsm.testing.conformance.helpers import FINAL_ANSWER, LeasedRun, list_claimable, make_header, make_input


@pytest.fixture(params=["memory", "sqlite"])
async def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")
    await made.runs()  # a file that is opened later may have changed until then, as far as anybody knows
    yield made
    await made.aclose()


class Ear:
    """A subscriber that an event loop waits for."""

    def __init__(self, store, topic):
        self.heard = anyio.Event()
        self.count = 0
        self.end = store.subscribe(topic, make_waker(self.hear))

    def hear(self):
        self.count += 1
        self.heard.set()

    async def wait(self):
        await self.heard.wait()
        self.heard = anyio.Event()


async def test_an_append_wakes_those_who_watch_the_run(store):
    """What was appended can be read by whoever was woken by it, and other runs wake nobody else."""
    driver = await LeasedRun.create(store)
    own, other = Ear(store, run_topic("r1")), Ear(store, run_topic("r2"))
    driver.append(Observed())
    await own.wait()
    assert len((await store.read("r1")).events) == 1
    assert other.count == 0


async def test_a_release_wakes_the_workers_of_the_runs_agent(store):
    """A run that was created and given back can be taken by its own agent's workers; others are left alone."""
    own, other = Ear(store, agent_topic("clerk")), Ear(store, agent_topic("cook"))
    _, lease = await store.create(make_header(agent="clerk"))
    await store.release(lease).wait()
    await own.wait()
    assert await list_claimable(store, "clerk") == ("r1",)
    assert other.count == 0


async def test_a_post_wakes_the_workers_and_those_who_watch_the_run(store):
    """A decision may make a run one that a worker can take."""
    driver = await LeasedRun.create(store, make_header(agent="clerk"))
    await driver.release()
    agent, run = Ear(store, agent_topic("clerk")), Ear(store, run_topic("r1"))
    await store.post("r1", "k", make_input("hello"))
    await agent.wait()
    await run.wait()


async def test_a_run_that_is_over_wakes_no_worker_when_it_is_given_back(store):
    """Its lease ends, and there is nothing to take."""
    driver = await LeasedRun.create(store, make_header(agent="clerk"))
    await driver.append(Observed()).wait()
    await driver.append(FINAL_ANSWER, final=True).wait()
    run, agent = Ear(store, run_topic("r1")), Ear(store, agent_topic("clerk"))
    await driver.release()
    await run.wait()
    assert agent.count == 0


async def test_a_subscription_ends(store):
    """Afterwards nothing is called and nothing is kept; ending it twice is harmless."""
    driver = await LeasedRun.create(store)
    ended, other = Ear(store, run_topic("r1")), Ear(store, run_topic("r1"))
    ended.end()
    ended.end()
    driver.append(Observed())
    await other.wait()
    assert ended.count == 0
    other.end()
    signals = store._subscriptions if isinstance(store, MemoryStore) else store._writer.subscriptions
    assert not signals.topics


async def test_a_subscriber_that_raises_stops_neither_the_store_nor_the_others(store, caplog):
    """What it raises is logged."""

    def broken():
        raise ValueError("not me")

    store.subscribe(run_topic("r1"), broken)
    other = Ear(store, run_topic("r1"))
    driver = await LeasedRun.create(store)
    await other.wait()
    with caplog.at_level(logging.ERROR, "agentfsm.stores"):
        await driver.append(Observed()).wait()
        await other.wait()
    assert "a subscriber of the store raised" in caplog.text
    assert (await store.read("r1")).events


def test_an_agent_that_is_not_named_stands_for_all():
    """A store that does not know whose run it was wakes the workers of every agent, and those of no run."""
    signals, heard = Subscriptions(), []
    for topic in ("agent:a", "agent:b", "run:agent:"):
        signals.subscribe(topic, lambda topic=topic: heard.append(topic))
    signals.notify([ALL_AGENTS_TOPIC, ALL_AGENTS_TOPIC])
    assert heard == ["agent:a", "agent:b"]


def test_a_store_that_never_wakes_is_a_store():
    """The port's own method lets stores without signals be polled."""

    class Quiet(MemoryStore):
        subscribe = Store.subscribe

    end = Quiet().subscribe("run:r1", lambda: None)
    end()
