"""The example's server in the three layers of document D, 10.3: its logic, the protocol, the choice of a model."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

import agentfsm
from agentfsm import Agent
from agentfsm.context import BySimilarity
from agentfsm.mcp import MCPServer
from agentfsm.ports import ProposedCall, Reply
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support import warm_python

ROOT = Path(agentfsm.__file__).parents[1]
FILE = ROOT / "examples" / "project_manager.py"
QUESTION = "Please look up which tasks alice still has to do"


@pytest.fixture
def example():
    """Load it anew, with its tasks as they are at first."""
    spec = importlib.util.spec_from_file_location("example_project_manager", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[module.__name__]


# Its logic.


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, ["TASK-001", "TASK-002", "TASK-003"]),
        ({"status": "in_progress"}, ["TASK-002"]),
        ({"assignee": "alice"}, ["TASK-001", "TASK-003"]),
        ({"status": "todo", "assignee": "alice"}, ["TASK-003"]),
        ({"assignee": "carol"}, []),
    ],
)
def test_tasks_are_filtered(example, wanted, found):
    """By status, by person, by both."""
    assert list(example.filter_tasks(example.TASKS, **wanted)) == found


def test_a_status_is_changed(example):
    """And what it was is told."""
    assert example.set_status(example.TASKS, "TASK-003", "done") == "todo"
    assert example.TASKS["TASK-003"]["status"] == "done"


def test_a_task_that_does_not_exist_is_an_error(example):
    """Nothing is changed, and the error tells what to do."""
    with pytest.raises(example.TaskNotFoundError, match="TASK-999 does not exist, use list_tasks"):
        example.set_status(example.TASKS, "TASK-999", "done")
    assert "TASK-999" not in example.TASKS


def test_the_summary_counts(example):
    """All, by status, by person."""
    assert example.summary_of(example.TASKS) == {
        "total": 3,
        "by_status": {"done": 1, "in_progress": 1, "todo": 1},
        "by_assignee": {"alice": 2, "bob": 1},
    }


# The protocol.

ENV = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_whole_server_through_the_protocol(tmp_path, mode):
    """The SDK's own client over stdio: tools, an error, the resource, the prompt."""
    python, *words = warm_python.MCP.command(str(FILE))
    parameters = StdioServerParameters(command=python, args=words, env=ENV)
    with (tmp_path / "errors.txt").open("w") as errors:
        async with Client(stdio_client(parameters, errlog=errors), mode=mode) as client:
            tools = {each.name: each for each in (await client.list_tools()).tools}
            assert list(tools) == ["list_tasks", "update_task_status"]
            assert tools["list_tasks"].annotations.read_only_hint
            assert tools["update_task_status"].input_schema["properties"]["new_status"]["enum"] == [
                "todo",
                "in_progress",
                "done",
            ]
            found = await client.call_tool("list_tasks", {"status": "todo"})
            assert list(json.loads(found.content[0].text)) == ["TASK-003"]
            done = await client.call_tool("update_task_status", {"task_id": "TASK-003", "new_status": "done"})
            assert done.content[0].text == "TASK-003 was todo and is done now"
            missing = await client.call_tool("update_task_status", {"task_id": "TASK-999", "new_status": "done"})
            assert missing.is_error
            assert "TASK-999 does not exist, use list_tasks" in missing.content[0].text
            wrong = await client.call_tool("update_task_status", {"task_id": "TASK-003", "new_status": "lost"})
            assert wrong.is_error
            assert "todo" in wrong.content[0].text
            (listed,) = (await client.list_resources()).resources
            assert (listed.uri, listed.mime_type) == ("project://tasks/summary", "application/json")
            (content,) = (await client.read_resource(listed.uri)).contents
            assert json.loads(content.text)["by_status"] == {"done": 2, "in_progress": 1}
            prompt = await client.get_prompt("standup", {"assignee": "alice"})
            assert "tasks of alice" in prompt.messages[0].content.text


async def test_an_agent_of_ours_uses_the_server():
    """Our own client over stdio: the model reads what the server says, errors as well."""
    server = MCPServer.stdio(sys.executable, [str(FILE)], env=ENV, name="pm", confirm=False)
    model = ScriptedModel(
        say("", call("pm__update_task_status", task_id="TASK-999", new_status="done")),
        say("", call("pm__list_tasks", status="todo", assignee="alice"), expect="use list_tasks"),
        say("TASK-003", expect="Write the API documentation"),
    )
    async with Agent(model, tools=[server]) as agent:
        assert (await agent.run(QUESTION)).output == "TASK-003"
    model.assert_done()


# The choice of a model.


def by_words(request):
    """Choose as a model does, by what it is told of the tools and nothing else: the most words in common."""
    if any(type(message).__name__ == "ToolResult" for message in request.messages):
        return request.messages[-1].content
    words = set(QUESTION.lower().split())
    chosen = max(request.tools, key=lambda tool: len(words & set(tool.description.lower().split())))
    wanted = {"status": "todo", "assignee": "alice"}
    arguments = {name: wanted[name] for name in chosen.parameters["properties"] if name in wanted}
    return Reply(text="", calls=(ProposedCall(id="c1", name=chosen.name, arguments=json.dumps(arguments)),))


async def test_a_model_that_chooses_by_the_descriptions_chooses_right():
    """The model gets the server's names, descriptions and schemas, and its choice comes to the server and back.

    It is a function that compares words. So this shows that what a model needs for the choice gets to it, and not how
    well any real model chooses.
    """
    python, *words = warm_python.MCP.command(str(FILE))
    server = MCPServer.stdio(python, words, env=ENV, name="pm", confirm=False)
    async with Agent(FunctionModel(by_words), tools=[server]) as agent:
        run = await agent.run(QUESTION)
    (made,) = run.calls
    assert (made.name, made.arguments) == ("pm__list_tasks", {"status": "todo", "assignee": "alice"})
    assert list(json.loads(run.output)) == ["TASK-003"]


@pytest.mark.parametrize(
    ("question", "name"), [(QUESTION, "list_tasks"), ("Change the status of TASK-002 to done", "update_task_status")]
)
async def test_similarity_chooses_the_right_tool(example, question, name):
    """Where there are too many tools to tell a model of all, the words of the question find the right one."""
    selection = await BySimilarity(top=1).select(question, example.registry.definitions, None)
    assert selection.tools == (name,)
