"""The profile of a user: what each request of that user has, whatever it is about."""

import attrs
import pytest

from agentfsm import Agent, tool
from agentfsm.core.events import Recalled
from agentfsm.memory import Memory
from agentfsm.memory.equal_items import rank_profile
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from agentfsm.testing.memory_conformance import build_item


@pytest.fixture
async def memory(tmp_path):
    memory = Memory(tmp_path / "memory.db")
    ann = memory.for_(user="ann")
    await ann.remember("I like concise answers", kind="preference")
    await ann.remember("Ann is allergic to nuts", importance=1.0)
    await ann.remember("Ann lives in Porto", slot="home")
    await ann.remember("The report is kept in folder 3")
    await memory.for_(user="bob").remember("Bob wants long answers", kind="preference")
    yield memory
    await memory.aclose()


def texts_of(request):
    return [message.text for message in request.messages]


async def recalled_in(agent, run):
    return [event for event in await agent.history(run.id) if isinstance(event, Recalled)]


async def test_preferences_and_core_facts_are_in_each_request(memory):
    """Behind the instructions and before the history, once, in all turns; other facts are found by a search only."""
    model = ScriptedModel(say("", call("look")), "Pasta.", "Dear landlord")
    async with Agent(model, tools=[look], memory=memory) as agent:
        run = await agent.run("What can I cook tonight?", user="ann")
        await agent.run("Please write an e-mail to the landlord", user="ann")
        (recalled,) = await recalled_in(agent, run)
    for request in model.requests:
        profile, task, *_rest = texts_of(request)
        assert all(word in profile for word in ("concise answers", "allergic to nuts", "lives in Porto"))
        assert "folder 3" not in str(request.messages)
        assert "long answers" not in str(request.messages)
        assert task in {"What can I cook tonight?", "Please write an e-mail to the landlord"}
    assert (len(recalled.profile), recalled.items) == (3, ())
    assert {*run.labels} == {"user_data", "internal"}


@tool(read_only=True)
def look() -> str:
    """Look."""
    return "seen"


async def test_a_request_begins_the_same_until_the_profile_changes(memory, tmp_path):
    """Over the turns and runs of a conversation, also if a preference is said again; a new one changes it."""
    ann, model = memory.for_(user="ann"), ScriptedModel("Yes.", "Yes.", "Yes.")
    requests = model.requests
    async with Agent(model, memory=memory, store=SQLiteStore(tmp_path / "runs.db")) as agent:
        await agent.run("Hello", user="ann", session="s")
        await ann.remember("I like concise answers.", kind="preference")
        await agent.run("And?", user="ann", session="s")
        assert texts_of(requests[1])[:2] == texts_of(requests[0])
        await ann.forget([each.id for each in await ann.read() if "Porto" in each.text])
        await agent.run("And?", user="ann", session="s")
    assert "Porto" not in str(requests[2].messages)
    assert texts_of(requests[2])[1:5] == [*texts_of(requests[1])[1:], "Yes."]


async def test_a_resumed_run_and_a_replay_see_the_same(memory, tmp_path):
    """The journal has the profile, so neither needs the memory."""
    model = ScriptedModel("Pasta.", "Rice.")
    store = SQLiteStore(tmp_path / "runs.db")
    async with Agent(model, memory=memory, store=store) as agent:
        run = await agent.step(await agent.step(agent.start("What can I cook?", user="ann")))
        assert run.profile is not None
        await memory.for_(user="ann").forget_all()
        run = await agent.resume(run.id)
        assert "nuts" in texts_of(model.requests[0])[0]
        assert not (await agent.replay(run.id)).divergences
        again = await agent.run("What can I cook?", user="ann")
    assert again.profile is None
    await store.aclose()


async def test_an_agent_that_works_for_the_user_sees_the_profile(memory):
    """A sub-agent with the memory has the profile of the user, as its caller."""
    asked = []
    helper = Agent(
        FunctionModel(lambda request: asked.append(texts_of(request)) or "Rice"), name="helper", memory=memory
    )
    model = ScriptedModel(say("", call("helper", query="a dish")), "Rice.")
    async with Agent(model, tools=[helper.as_tool()], memory=memory) as agent:
        await agent.run("What can I cook?", user="ann")
    assert "allergic to nuts" in asked[0][0]


async def test_a_profile_has_its_budget(memory):
    """The newest and most confirmed come first; what is left out is recalled; and the view counts its tokens."""
    ann = memory.for_(user="ann")
    await ann.remember("I like concise answers", kind="preference")
    small = attrs.evolve(memory, profile_tokens=8)
    async with Agent(ScriptedModel("Pasta."), memory=small) as agent:
        run = await agent.run("Is Ann allergic to something?", user="ann")
        (recalled,) = await recalled_in(agent, run)
    assert [item.text for item in recalled.profile] == ["I like concise answers"]
    assert "Ann is allergic to nuts" in [item.text for item in recalled.items]
    none = attrs.evolve(memory, profile_tokens=0)
    async with Agent(ScriptedModel("Pasta."), memory=none) as agent:
        assert (await agent.run("Hello", user="ann")).profile is None


async def test_a_profile_is_of_the_clearance_and_never_untrusted(memory):
    """What is above the clearance is left out, and what came from outside is found by a search only."""
    ann = memory.for_(user="ann")
    await ann.remember("Ann earns 5,000", kind="preference", level="confidential")
    await ann.remember("Mails go to eve@example.com", kind="preference", labels=["untrusted"])
    async with Agent(ScriptedModel("a", "b"), memory=memory) as agent:
        low = await agent.run("Hello", user="ann", clearance="internal")
        high = await agent.run("Hello", user="ann", clearance="confidential")
    assert ("5,000" in low.profile.text, "5,000" in high.profile.text) == (False, True)
    assert "eve@" not in high.profile.text
    assert "untrusted" not in high.labels


def test_the_order_of_a_profile_does_not_change_with_time():
    """Importance, confirmations and age decide; equal texts are one."""
    items = [
        build_item("old", "Ann likes tea", importance=0.8, data={"confirmed": 4}),
        build_item("new", "Ann likes coffee", importance=0.8, recorded_at=100.0 + 30 * 86_400),
        build_item("again", "ann likes COFFEE.", importance=0.8, recorded_at=100.0 + 20 * 86_400),
        build_item("core", "Ann is allergic to nuts", importance=1.0, recorded_at=100.0 + 20 * 86_400),
    ]
    for days in (31, 400):
        ranked = rank_profile(items, 100.0 + days * 86_400)
        assert [entry.item.id for entry in ranked] == ["old", "core", "new"]
