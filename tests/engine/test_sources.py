"""Sources of tools: what comes from elsewhere is taken in before a run and between two turns, and harms nothing."""

import anyio
import attrs
import pytest

from agentfsm import Agent, AgentError, DuplicateToolError, RunNotFoundError, ToolRegistry, tool
from agentfsm.testing import ScriptedModel, call, say


def named(name):
    return tool(name=name, read_only=True)(lambda: name)


@attrs.define(eq=False)
class Shelf:
    """A source whose tools a test puts in; it may wait for another, or fail."""

    tools: tuple = ()
    version: int = 0
    is_stale: bool = True
    update_with: object = None
    closed: int = 0

    def put(self, *names):
        self.update_with, self.is_stale = names, True

    async def update(self):
        if callable(self.update_with):
            await self.update_with()
        elif self.update_with is not None:
            self.tools, self.version = tuple(map(named, self.update_with)), self.version + 1
        self.is_stale = False

    async def aclose(self):
        self.closed += 1


def shelf(*names):
    made = Shelf()
    made.put(*names)
    return made


async def fail():
    raise AgentError("the shelf is locked")


async def test_tools_of_sources_stand_behind_ones_own():
    """They come with the first refresh, each source's in its place, and plain tools are there before."""
    registry = ToolRegistry.of([shelf("a", "b"), named("own"), shelf("c")])
    assert registry.names == ("own",)
    await registry.refresh()
    assert registry.names == ("own", "a", "b", "c")
    version = registry.version
    await registry.refresh()
    assert registry.version == version


async def test_sources_are_asked_at_once():
    """Two that wait for each other both come to their end."""
    first, second = anyio.Event(), anyio.Event()

    async def one():
        first.set()
        await second.wait()

    async def other():
        second.set()
        await first.wait()

    await ToolRegistry.of([Shelf(update_with=one), Shelf(update_with=other)]).refresh()


async def test_what_has_changed_takes_the_place_of_what_was():
    """Tools that are gone are gone, new ones are there, and those of others stay."""
    changing = shelf("a", "b")
    registry = ToolRegistry.of([changing, shelf("c")])
    await registry.refresh()
    changing.put("b", "d")
    await registry.refresh()
    assert set(registry.names) == {"b", "c", "d"}


async def test_a_taken_name_is_refused_and_harms_nobody():
    """One's own tool stays, also when the source comes up with something else later."""
    clashing = shelf("a", "own", "b")
    own = named("own")
    registry = ToolRegistry.of([own, clashing])
    with pytest.raises(DuplicateToolError, match="two tools are called 'own'"):
        await registry.refresh()
    assert registry.get("own") is own
    clashing.put("b")
    await registry.refresh()
    assert registry.names == ("own", "b")
    assert registry.get("own") is own


@pytest.mark.parametrize("others", [(), ("x",)])
async def test_a_source_that_fails_is_told_of_and_hides_no_other(others):
    """Its error is raised; with the next refresh the others are there."""
    failing = Shelf(update_with=fail)
    registry = ToolRegistry.of([failing, *map(shelf, others)])
    with pytest.raises(AgentError, match="locked"):
        await registry.refresh()
    failing.put()
    await registry.refresh()
    assert registry.names == others


async def test_an_agent_takes_in_changes_between_two_turns():
    """A tool that appears while a call runs is offered in the next turn; the run's header knows those it began with."""
    source = shelf("first")

    @tool(read_only=True)
    def learn() -> str:
        """Learn."""
        source.put("first", "second")
        return "learned"

    script = ScriptedModel(say("", call("learn")), say("", call("second")), say("ok", expect="second"))
    async with Agent(script, tools=[learn, source]) as agent:
        run = await agent.run("go")
    assert run.output == "ok"
    assert [sorted(each.name for each in request.tools) for request in script.requests[:2]] == [
        ["first", "learn"],
        ["first", "learn", "second"],
    ]
    assert sorted(run.header.fingerprint.tools) == ["first", "learn"]
    assert source.closed == 1


async def test_a_source_that_fails_in_a_run_leaves_what_was_known():
    """The run goes on with the tools as they were last told of."""
    source = shelf("first")

    @tool(read_only=True)
    def lock() -> str:
        """Lock the shelf."""
        source.update_with, source.is_stale = fail, True
        return "locked"

    script = ScriptedModel(say("", call("lock")), say("", call("first")), say("ok", expect="first"))
    run = await Agent(script, tools=[lock, source]).run("go")
    assert run.output == "ok"


async def test_a_run_does_not_begin_without_its_sources():
    """One that was never asked with success is an error before there is a run."""
    agent = Agent(ScriptedModel(say("x")), tools=[Shelf(update_with=fail)])
    with pytest.raises(AgentError, match="locked"):
        await agent.run("go", id="r1")
    with pytest.raises(RunNotFoundError):
        await agent.load("r1")


def test_an_agent_with_sources_is_not_read_only_as_a_tool():
    """Nobody knows yet what they bring."""
    assert not Agent(ScriptedModel(say("x")), tools=[shelf("a")]).as_tool().read_only
    assert Agent(ScriptedModel(say("x")), tools=[named("a")]).as_tool().read_only
