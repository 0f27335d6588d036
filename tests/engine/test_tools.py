"""Tools and their registry: a decorator that leaves a function a function."""

from __future__ import annotations

import functools

import pytest

from agentfsm import Agent, DuplicateToolError, MisuseError, RunContext, Tool, ToolCall, ToolQueue, ToolRegistry, tool
from agentfsm.testing import ScriptedModel, call, say


@tool
async def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tool(name="say-it", read_only=True, timeout_s=3, shown_bytes=10)
def speak(ctx: RunContext[str], word: str) -> str:
    """Speak."""
    return f"{ctx.deps}: {word}"


async def test_a_tool_is_still_its_function():
    """It can be called, and so be tested, without any run."""
    assert await add(1, 2) == 3
    assert speak(RunContext(deps="ann"), "hi") == "ann: hi"


def test_bare_and_with_options():
    """What is not declared is not assumed."""
    assert isinstance(add, Tool)
    assert (add.name, add.is_async, add.takes_context) == ("add", True, False)
    assert (add.read_only, add.idempotent, add.concurrency_safe, add.repeatable) == (False, False, False, False)
    assert (speak.name, speak.is_async, speak.takes_context) == ("say-it", False, True)
    assert (speak.read_only, speak.concurrency_safe, speak.repeatable) == (True, True, True)
    assert (speak.timeout_s, speak.shown_bytes) == (3, 10)


def test_read_only_may_be_kept_from_running_beside_others():
    """The declaration of concurrency prevails, both ways."""

    def act() -> None:
        """Act."""

    assert tool(read_only=True, concurrency_safe=False)(act).concurrency_safe is False
    assert tool(concurrency_safe=True)(act).concurrency_safe is True
    assert tool(idempotent=True)(act).repeatable is True


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "naïve", "a.b", "a/b"])
def test_a_name_that_no_provider_takes_is_refused(name):
    """The error says which letters there are."""
    with pytest.raises(MisuseError, match="ASCII"):
        tool(name=name or " ")(lambda: None)


async def test_a_plain_tool_may_run_another_agent():
    """No event loop runs in its thread, whatever runs the first agent."""
    helper = Agent(ScriptedModel("42"))

    @tool
    def ask(question: str) -> str:
        """Ask."""
        return helper.run_sync(question).output

    run = await Agent(ScriptedModel(say("", call("ask", question="?")), "done"), tools=[ask]).run("go")
    assert run.messages[2].content == "42"


class Tail:
    async def __call__(self):
        yield 1


def plain():
    yield 1


async def asynchronous():
    yield 1


@pytest.mark.parametrize(
    "function", [plain, asynchronous, functools.partial(plain), Tail()], ids=["plain", "async", "partial", "object"]
)
def test_a_generator_is_no_tool(function):
    """It has no one result, and its body would run when the result is read, if at all."""
    with pytest.raises(MisuseError, match="return a list"):
        tool(name="act")(function)


@pytest.mark.parametrize("limit", [{"shown_tokens": 0}, {"shown_bytes": 0}, {"shown_bytes": -1}], ids=str)
def test_a_tool_that_may_show_nothing_is_refused(limit):
    """A result of which the model reads nothing is a mistake that shows at once."""
    with pytest.raises(MisuseError):
        tool(**limit)(lambda: None)


async def test_a_partial_and_an_object_that_can_be_called_are_tools():
    """Whatever can be called with named parameters can be a tool."""

    class Greeter:
        """Greets."""

        async def __call__(self, name: str) -> str:
            """Greet."""
            return f"hello {name}"

    async def multiply(a: int, by: int) -> int:
        """Multiply."""
        return a * by

    double = tool(name="double")(functools.partial(multiply, by=2))
    greet = tool(name="greet")(Greeter())
    queue = ToolQueue(registry=ToolRegistry.of([double, greet]))
    results = await queue.execute_all(
        [
            ToolCall(id="t1.0", name="double", arguments='{"a": 4}', key="k0"),
            ToolCall(id="t1.1", name="greet", arguments='{"name": "ann"}', key="k1"),
        ]
    )
    assert [result.content for result in results] == ["8", "hello ann"]


def test_the_registry_knows_its_tools_in_order():
    """Names, membership, length, iteration, and the nearest name."""

    def plain(word: str) -> str:
        """Say."""
        return word

    registry = ToolRegistry.of([add, plain, speak])
    assert registry.names == ("add", "plain", "say-it")
    assert len(registry) == 3
    assert "add" in registry
    assert "sub" not in registry
    assert [each.name for each in registry] == ["add", "plain", "say-it"]
    assert registry.get("plain") is not None
    assert registry.get("sub") is None
    assert registry.nearest("ad") == "add"
    assert registry.nearest("xyz") is None


def test_what_is_no_tool_is_refused():
    """A registry takes functions and tools, each name once."""
    with pytest.raises(MisuseError, match="not int"):
        ToolRegistry.of([17])
    with pytest.raises(DuplicateToolError, match="add_2"):
        ToolRegistry.of([add, add])
    with pytest.raises(DuplicateToolError, match="add_2"):
        Agent(ScriptedModel(), tools=[add, add])


async def test_a_tool_that_is_registered_later_is_offered_to_the_model():
    """What the agent can run, the model is told of."""
    model = ScriptedModel("nothing", say("", call("add", a=1, b=2)), "3")
    agent = Agent(model)
    await agent.run("go")
    agent.tools.register(add)
    run = await agent.run("go")
    assert [[each.name for each in request.tools] for request in model.requests] == [[], ["add"], ["add"]]
    assert run.output == "3"
    assert run.header.fingerprint != Agent(ScriptedModel()).fingerprint
