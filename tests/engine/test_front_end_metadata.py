"""The front end of a run as its metadata have it, without a server: any program that starts runs may give one."""

import pytest

from agentfsm import Agent, MisuseError, ToolResult, tool
from agentfsm.core.header import FRONT_END
from agentfsm.core.messages import Outcome
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.front_end import MAX_CHARS, Page, describe_change, read_page

PAINT = {"name": "paint", "parameters": {"type": "object", "properties": {"color": {"type": "string"}}}}


async def test_a_tool_that_the_agent_gets_later_is_kept(store):
    """It replaces that of the front end for later calls; one that waits for the front end goes on waiting for it."""
    painted = []

    @tool
    async def paint(color: str) -> str:
        """Paint on the server."""
        painted.append(color)
        return "done here"

    model = ScriptedModel(say("", call("paint", color="red")), say("", call("paint", color="blue")), say("done"))
    run = await Agent(model, name="shop", store=store).run("go", metadata={FRONT_END: {"tools": [PAINT]}})
    later = Agent(model, name="shop", store=store, tools=[paint])
    run = await later.resume(run.id)
    assert ([each.tool for each in run.pending], painted) == (["paint"], [])
    await later.answer(run.id, "t1.0", "done in the page")
    assert (await later.resume(run.id)).answer == "done"
    assert painted == ["blue"]


async def test_a_run_does_not_change_the_tools_of_its_agent(store):
    """Other runs of the agent are offered its own tools only, and its registry stays as it is."""
    model = ScriptedModel(say("", call("paint", color="red")), say("other"))
    agent = Agent(model, name="shop", store=store)
    version = agent.tools.version
    await agent.run("go", metadata={FRONT_END: {"tools": [PAINT]}})
    await agent.run("go")
    assert [[each.name for each in request.tools] for request in model.requests] == [["paint"], []]
    assert (agent.tools.names, agent.tools.version) == ((), version)


async def test_changes_of_both_sides_are_merged(store):
    """Each side sends only the fields that it changes, so that the other's stay."""
    turns = say("", call("update_state", changes={"b": 2, "n": None})), say("", call("paint", color="red")), say("done")
    agent = Agent(ScriptedModel(*turns), name="shop", store=store)
    begun = {"a": 1, "b": 1, "c\u2028": {"d": 1}}
    run = await agent.run("go", metadata={FRONT_END: {"tools": [PAINT], "state": begun}})
    assert read_page(run) == Page(state={**begun, "b": 2, "n": None})
    changed = Page(state=begun).changes_to(Page(state={"a": 5, "b": 1, "x": None}, context=("now",)))
    assert changed == {"state": {"a": 5, "x": None}, "removed": ["c\u2028"], "context": ["now"]}
    await agent.send(run.id, describe_change(changed), kind="event")
    await agent.answer(run.id, "t2.0", "ok")
    run = await agent.resume(run.id)
    assert read_page(run) == Page(state={"a": 5, "b": 2, "n": None, "x": None}, context=("now",))


async def test_the_model_cannot_make_the_state_too_large(store):
    """A change is refused after which no run could begin with the state; it stays, and smaller changes are taken."""
    half = "x" * (MAX_CHARS // 2)
    both = call("update_state", changes={"a": half}), call("update_state", changes={"b": half})
    turns = say("", *both), say("", call("update_state", changes={"a": "", "b": half})), say("done"), say("hi")
    agent = Agent(ScriptedModel(*turns), name="shop", store=store)
    run = await agent.run("go", metadata={FRONT_END: {"tools": [PAINT], "state": {"n": 1}}})
    outcomes = [each.outcome for each in run.messages if isinstance(each, ToolResult)]
    assert outcomes == [Outcome.DONE, Outcome.FAILED, Outcome.DONE]
    assert "and 200,000 is the most. Set smaller values" in run.messages[3].content
    page = read_page(run)
    assert page == Page(state={"n": 1, "a": "", "b": half})
    assert (await agent.run("go on", metadata={FRONT_END: {"tools": [PAINT], "state": page.state}})).answer == "hi"
    with pytest.raises(MisuseError, match="Send a smaller state"):
        agent.start("go", metadata={FRONT_END: {"state": {"a": half, "b": half}}})
    with pytest.raises(MisuseError, match="send them in parts"):
        describe_change({"state": {"a": half, "b": half}})
