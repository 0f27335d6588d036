"""Idempotency keys: the same on every attempt at one effect, never the same for two, also where an id comes back."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import anyio
import attrs
import pytest

from agentfsm import Agent, AssistantMessage, RunContext, ToolCall, tool
from agentfsm.core.events import ApprovalGiven, Observed, ToolsChosen
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, raw_call, say
from tests.support.checks import keys_of, sound
from tests.support.failing_stores import lose_run


class Provider:
    """A payment service that honours keys: a second payment under a known key is not made."""

    def __init__(self, **options: Any) -> None:
        """Begin with empty books."""
        self.books: dict[str, int] = {}
        self.options = options

    def agent(self, *script: Any, **options: Any) -> Agent:
        """Return an agent that pays here."""

        @tool(**self.options)
        async def pay(ctx: RunContext[Any], cents: int) -> str:
            """Pay."""
            return f"paid {self.books.setdefault(ctx.idempotency_key, cents)}"

        return Agent(ScriptedModel(*script), tools=[pay], name="payer", **options)


def paying(cents: int) -> Any:
    """Return the reply that pays so much."""
    return say("", call("pay", cents=cents))


async def test_an_id_that_is_used_again_mints_other_keys(store):
    """A run that was pruned and begun anew under its id is another run: its payment is made, whatever it is."""
    provider = Provider()
    for cents in (500, 500, 900):
        run = await provider.agent(paying(cents), "done", store=store).run("Pay", id="nightly-payout")
        await store.prune(math.inf)
    assert list(provider.books.values()) == [500, 500, 900]
    assert keys_of(run)["t1.0"] == list(provider.books)[-1]


async def test_the_same_id_and_prompt_are_the_same_run(store):
    """Whoever starts a run that is in the store gets the nonce that is stored there, and so its keys."""
    provider = Provider()
    agent = provider.agent(paying(500), "done", store=store)
    first, second = agent.start("Pay", id="mine"), agent.start("Pay", id="mine")
    assert first.header.nonce != second.header.nonce
    await agent.submit(first)
    run = await agent.finish(second)
    assert run.header.nonce == first.header.nonce
    assert [key.split(":")[0] for key in provider.books] == [first.header.nonce]


async def test_a_restored_backup_keeps_the_keys_of_the_same_calls(tmp_path):
    """A payment that the restored journal has forgotten is made under its old key, and another one under another."""
    provider, live, backup = Provider(), tmp_path / "runs.db", tmp_path / "backup.db"
    store = SQLiteStore(live)
    agent = provider.agent(paying(500), "done", store=store)
    await agent.submit("Pay", id="mine")
    await store.aclose()
    shutil.copy(live, backup)
    written_otherwise = say("", raw_call("pay", '{ "cents" : 500 }'))
    for script in (paying(500), written_otherwise, paying(900)):
        path = tmp_path / f"restored-{len(list(tmp_path.iterdir()))}.db"
        shutil.copy(backup, path)
        restored = SQLiteStore(path)
        assert (await provider.agent(script, "done", store=restored).resume("mine")).output == "done"
        await restored.aclose()
    assert list(provider.books.values()) == [500, 900]


async def test_arguments_that_a_person_changed_have_a_key_of_their_own(store):
    """It is minted with the approval; the same arguments again keep the key that the call was proposed with."""
    for arguments, is_same in (({"cents": 9}, False), ({"cents": 500}, True), (None, True)):
        provider = Provider(requires_approval=True)
        agent = provider.agent(paying(500), "done", store=store)
        run = await agent.run("Pay")
        await agent.approve(run.id, "t1.0", arguments=arguments)
        done = await agent.resume(run.id)
        assert list(provider.books) == [keys_of(done)["t1.0"]]
        assert (keys_of(done) == keys_of(run)) is is_same
        await sound(agent, done)


async def test_a_call_that_an_edit_of_a_fork_changes_gets_a_key_of_the_fork(store):
    """Other arguments are another effect; what the edit leaves as it was keeps its key."""
    provider = Provider()
    two = say("", call("pay", cents=1), call("pay", cents=2))
    agent = provider.agent(two, "done", store=store)
    run = await agent.run("Pay")
    chosen = (await agent.history(run.id))[1]
    assert isinstance(chosen, ToolsChosen)
    first, second = chosen.message.calls
    calls = (first, attrs.evolve(second, arguments='{"cents": 3}'))
    fork = await agent.fork(
        run.id, at=2, edit={2: attrs.evolve(chosen, message=attrs.evolve(chosen.message, calls=calls))}
    )
    keys = keys_of(fork)
    assert keys["t1.0"] == first.key
    assert keys["t1.1"].startswith(f"{fork.header.nonce}:t1.1:")


async def test_an_approval_that_an_edit_of_a_fork_changes_gets_a_key_of_the_fork(store):
    """So do the arguments that a person is said to have given instead."""
    provider = Provider(requires_approval=True)
    agent = provider.agent(paying(500), "done", store=store)
    run = await agent.run("Pay")
    await agent.approve(run.id, "t1.0", arguments={"cents": 9})
    await agent.resume(run.id)
    events = await agent.history(run.id)
    (at,) = [version for version, event in enumerate(events, 1) if isinstance(event, ApprovalGiven)]
    fork = await agent.fork(run.id, at=at, edit={at: attrs.evolve(events[at - 1], arguments='{"cents": 7}')})
    assert keys_of(fork)["t1.0"].startswith(f"{fork.header.nonce}:t1.0:")
    assert keys_of(await agent.fork(run.id, at=at))["t1.0"] == next(iter(provider.books))


async def test_a_run_of_an_older_format_keeps_its_keys(store):
    """A call that was proposed under the rule of format 3 keeps its key; later ones begin with the run's id as well."""
    provider = Provider()
    agent = provider.agent(paying(500), "done", store=store)
    header = attrs.evolve(agent.start("Pay", id="old").header, nonce="", format=3)
    proposed = ToolCall(id="t1.0", name="pay", arguments='{"cents": 5}', key="old:t1.0")
    events = [Observed(), ToolsChosen(message=AssistantMessage(calls=(proposed,)))]
    _, lease = await store.create(header, events=events)
    await store.release(lease).wait()
    run = await agent.resume("old")
    keys = keys_of(run)
    assert list(provider.books.items()) == [("old:t1.0", 5), (keys["t2.0"], 500)]
    assert keys["t2.0"].startswith("old:t2.0:")


async def test_the_run_of_an_agent_that_is_lost_is_made_again_with_its_keys(store):
    """The nonce of a sub-agent's run follows from the key of the call: what it did is not done twice."""
    provider, inside = Provider(idempotent=True), anyio.Event()

    @tool(read_only=True)
    async def think_long(ctx: RunContext[Any]) -> str:
        """Think."""
        inside.set()
        return "thought" if ctx.deps else await anyio.sleep_forever()

    def caller(*script: Any) -> Agent:
        child = provider.agent(paying(500), say("", call("think_long")), "paid")
        child = child.with_(tools=[*child.tools, think_long])
        return Agent(ScriptedModel(*script), tools=[child.as_tool()], store=store)

    async with anyio.create_task_group() as tasks:
        agent = caller(say("", call("payer", query="go")))
        tasks.start_soon(agent.finish, agent.start("go", id="mine"))
        await inside.wait()
        tasks.cancel_scope.cancel()
    await lose_run(store, "mine.t1.0")
    assert (await caller("done").resume("mine", deps="go on")).output == "done"
    assert list(provider.books.values()) == [500]


async def test_an_early_call_has_the_key_that_the_journal_tells(store):
    """A call that starts while the reply streams is minted twice, and alike."""
    seen: list[str] = []

    @tool(read_only=True)
    async def look(ctx: RunContext[Any], at: str) -> str:
        """Look."""
        seen.append(ctx.idempotency_key)
        return at

    agent = Agent(ScriptedModel(say("", call("look", at="x")), "done"), tools=[look], store=store)
    async with agent.stream("go") as stream:
        async for _ in stream:
            pass
    assert seen == [keys_of(stream.run)["t1.0"]]


@pytest.mark.parametrize("other", [{"b": [{"y": 1, "x": {}}], "a": 1}, {"a": 1, "b": [{"x": {}, "y": 1}]}])
def test_equal_arguments_are_canonically_equal(other):
    """The order of keys and white space tell no calls apart; an empty object is no empty list."""
    one = ToolCall(id="t1.0", name="pay", arguments='{"a":1,"b":[{"x":{},"y":1}]}')
    assert one.canonical == ToolCall(id="t1.0", name="pay", arguments=json.dumps(other, indent=1)).canonical
    assert one.canonical != ToolCall(id="t1.0", name="pay", arguments='{"a":1,"b":[{"x":[],"y":1}]}').canonical
