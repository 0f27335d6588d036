"""Mistakes of the first hour are answered with the place to go to."""

import inspect
from importlib.metadata import version
from typing import Any

import pytest

import agentfsm
from agentfsm import (
    Agent,
    AssistantMessage,
    Filter,
    Limits,
    MisuseError,
    Outcome,
    Settings,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    tool,
)
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say


def test_the_version_is_that_of_the_package():
    """`agentfsm.__version__`, as other packages have it."""
    assert agentfsm.__version__ == version("agentfsm")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("SQLiteStore", "stores"),
        ("OpenAIChat", "models"),
        ("ScriptedModel", "testing"),
        ("Reflector", "reflection"),
        ("SlidingWindow", "context"),
        ("MCPServer", "mcp"),
    ],
)
def test_a_name_of_another_module_is_found(name, module):
    """The error says how to import it."""
    with pytest.raises(AttributeError, match=f"write `from agentfsm.{module} import {name}`"):
        getattr(agentfsm, name)


def test_an_unknown_name_is_an_attribute_error():
    """`hasattr` answers False, and nothing is imported for private names."""
    assert not hasattr(agentfsm, "nothing_of_this_name")
    assert not hasattr(agentfsm, "__wrapped__")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Filter(state="DONE"), r"^Filter\(state='DONE'\): give 'observe', .*'done' or 'error', or None$"),
        (lambda: SQLiteStore(None), r"^SQLiteStore\(path=None\): give the path of a file"),
        (lambda: SQLiteStore("runs.db", lease_s="x"), r"^SQLiteStore\(lease_s='x'\): give seconds above 0"),
        (lambda: FunctionModel(3), r"^FunctionModel\(function=3\): give a function$"),
        (lambda: tool(after=3)(print), r"^tool 'print'\(after=3\): give a tuple of strings"),
        (lambda: tool(estimate_s="x")(print), r"^tool 'print'\(estimate_s='x'\): give a finite number, 0 or more"),
    ],
)
def test_a_wrong_type_is_refused_where_it_is_given(make: Any, message):
    """It is no error out of the depths."""
    with pytest.raises(MisuseError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextPart(text=3), r"^TextPart\(text=3\): give a string$"),
        (lambda: SystemMessage(text=None), r"^SystemMessage\(text=None\): give a string$"),
        (lambda: UserMessage(parts="x"), r"^UserMessage\(parts='x'\): give a tuple of parts"),
        (lambda: UserMessage(parts=("x",)), r"^UserMessage\(parts=\('x',\)\): give a tuple of parts"),
    ],
)
def test_a_message_of_a_wrong_type_is_refused_where_it_is_built(make: Any, message):
    """The values that users build for a prompt or a history check their own fields."""
    with pytest.raises(MisuseError, match=message):
        make()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([AssistantMessage(text=3)], r"^AssistantMessage\(text=3\): give a string$"),
        ([AssistantMessage(calls="x")], r"^AssistantMessage\(calls='x'\): give a tuple of ToolCall$"),
        ([AssistantMessage(calls=(ToolCall(id=1, name="a", arguments="{}"),))], r"^ToolCall\(id=1\): give a string$"),
        (
            [ToolResult(call_id="t1.0", tool="a", outcome="good", content="x")],
            r"^ToolResult\(outcome='good'\): give an Outcome",
        ),
    ],
)
def test_a_history_of_wrong_types_is_refused_where_it_is_given(messages, message):
    """The values that the engine builds on every turn are checked when a user hands in a history."""
    with pytest.raises(MisuseError, match=message):
        Agent(FunctionModel(lambda _request: "x")).start("go", messages=messages)


class Weather:
    """A class without a text of its own."""


@pytest.mark.parametrize("value", [Weather(), [Weather()], {"now": Weather()}], ids=["alone", "list", "dict"])
async def test_a_result_without_content_says_its_type(value, caplog):
    """The call is done and not repeated; the result and the log name the type in place of a memory address."""
    calls = []

    @tool
    def look() -> Any:
        """Look."""
        calls.append(1)
        return value

    agent = Agent(ScriptedModel(say("", call("look")), say("done")), tools=[look])
    run = await agent.run("go")
    [result] = [message for message in run.messages if isinstance(message, ToolResult)]
    assert (run.output, result.outcome, len(calls)) == ("done", Outcome.DONE, 1)
    assert "the type Weather has no readable content; the tool has to return plain values" in result.content
    assert "0x" not in result.content
    assert "the type Weather has no readable content" in caplog.text


@pytest.mark.parametrize("function", [lambda ctx, x: x, lambda context: context], ids=["ctx", "context"])
def test_a_context_without_a_hint_is_explained(function):
    """The error says how to annotate it."""
    with pytest.raises(MisuseError, match=r"has no type hint. If .* annotate it as `RunContext\[\.\.\.\]`"):
        tool(name="f")(function)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (Limits, "max_turns", r"^Limits\(\) has no field 'max_turns'; did you mean 'turns'\?$"),
        (Limits, "max_tokens", "did you mean 'tokens'"),
        (Limits, "max_tool_calls", "did you mean 'tool_calls'"),
        (Limits, "max_steps", "did you mean 'turns'"),
        (Limits, "timeout", "did you mean 'seconds'"),
        (Limits, "zzz", r"its fields are turns, tokens,"),
        (Settings, "max_output_tokens", "did you mean 'max_tokens'"),
        (Settings, "stop_sequences", "did you mean 'stop'"),
        (Filter, "status", "did you mean 'state'"),
    ],
)
def test_a_foreign_name_of_a_field_is_corrected(kind, name, message):
    """The error names the field that was probably meant."""
    with pytest.raises(TypeError, match=message):
        kind(**{name: 3})


def test_limits_keep_their_signature():
    """`help(Limits)` and editors read the fields from it."""
    assert "turns" in inspect.signature(Limits).parameters
    with pytest.raises(TypeError, match="positional"):
        Limits(3)


@pytest.mark.parametrize("method", ["run", "run_sync", "start", "stream", "submit"])
@pytest.mark.parametrize("field", ["instructions", "limits", "model", "tools"])
async def test_a_field_of_the_agent_is_not_an_option_of_a_run(method: Any, field):
    """The error names the method, and says how to change the field for one run."""
    agent = Agent(ScriptedModel("Hello."))
    hint = rf"^Agent\.{method}\(\) got .* '{field}'; .* write agent\.with_\({field}=\.\.\.\)\.{method}\("
    with pytest.raises(TypeError, match=hint):
        await getattr(agent, method)("Hi.", **{field: None})


@pytest.mark.parametrize("method", ["run", "start", "stream", "submit"])
async def test_an_unknown_option_of_a_run_is_refused_with_the_valid_ones(method: Any):
    """Also `driver` and `runs`, which are fields that no caller gives."""
    agent = Agent(ScriptedModel("Hello."))
    for name in ("max_turns", "runs"):
        with pytest.raises(TypeError, match=rf"^Agent\.{method}\(\) got .* '{name}'; valid options: id, after"):
            await getattr(agent, method)("Hi.", **{name: 3})


async def test_start_takes_its_prompt_by_name():
    """The check of the options knows the prompt."""
    run = Agent(ScriptedModel("Hello.")).start(prompt="Hi.", user="ann")
    assert (run.header.prompt[0].text, run.header.user) == ("Hi.", "ann")
