"""What a server offers beside calls: resources, prompts, completions, and changes of its tools."""

import json
from base64 import b64encode
from pathlib import Path

import anyio
import attrs
import mcp.types as m
import pytest
from mcp import MCPError

from agentfsm import Agent, AssistantMessage, ImagePart, MisuseError, TextPart, ToolResult, UserMessage
from agentfsm.mcp import MCPServer, MCPServerError
from agentfsm.mcp.client import server_features
from agentfsm.mcp.connection import tool_changes
from agentfsm.mcp.errors import NoAnswerError
from agentfsm.testing import ScriptedModel, call, run_virtual, say
from tests.support import warm_python
from tests.support.mcp_calls import heard, one_call, rude

PNG = b64encode(b"\x89PNG\r\n\x1a\n").decode()


@pytest.fixture
async def shelf():
    """A server of today's protocol, in a process of its own."""
    python, *words = warm_python.MCP.command(str(Path(__file__).with_name("shelf.py")))
    server = MCPServer.stdio(python, words, name="shelf", confirm=False)
    yield server
    await server.aclose()


async def test_resources_are_listed_and_read(shelf):
    """Text is a text part, and data a part of its kind."""
    found = {resource.uri: resource for resource in await shelf.resources()}
    assert found["note://today"].description == "What is to be done"
    assert found["note://today"].media_type == "text/plain"
    (template,) = await shelf.resource_templates()
    assert template.uri_template == "note://day/{day}"
    assert await shelf.read("note://today") == (TextPart(text="buy milk"),)
    assert await shelf.read("note://picture") == (ImagePart.of(b"\x89PNG\r\n\x1a\n"),)
    assert await shelf.read("note://day/monday") == (TextPart(text="nothing on monday"),)


async def test_a_resource_that_is_not_there_is_told_of(shelf):
    """The server's words are in the error."""
    with pytest.raises(NoAnswerError, match="'shelf' did not return the resource 'note://gone'"):
        await shelf.read("note://gone")


async def test_a_prompt_becomes_messages_to_go_on_from(shelf):
    """A run starts behind them, as behind any history."""
    (prompt,) = await shelf.prompts()
    assert [(each.name, each.required) for each in prompt.arguments] == [("day", True), ("name", False)]
    messages = await shelf.prompt("plan", day="monday", name="Ada")
    assert messages == (
        UserMessage(parts=(TextPart(text="Plan monday for Ada."),)),
        AssistantMessage(text="With pleasure."),
    )
    run = await Agent(ScriptedModel(say("Done."))).run("Go on.", messages=messages)
    assert run.header.history == messages


async def test_what_a_prompt_takes_is_text(shelf):
    """The protocol knows no other arguments."""
    with pytest.raises(MisuseError, match=r"day=\.\.\.\) takes text, not int"):
        await shelf.prompt("plan", day=1)


async def test_arguments_are_completed(shelf):
    """Of prompts and of templates."""
    (prompt,) = await shelf.prompts()
    (template,) = await shelf.resource_templates()
    assert await shelf.complete(prompt, "day", "t") == ("tuesday", "thursday")
    assert await shelf.complete(template, "day", "mon", {"name": "Ada"}) == ("monday",)


async def test_resources_become_tools_on_request(shelf):
    """Without the request the model has no way to them, with it two tools that only read."""
    await shelf.update()
    assert [tool.name for tool in shelf.tools] == ["shelf__learn"]
    shelf.resources_as_tools, shelf.needs_refresh = True, True
    turns = [
        say("", call("shelf__list_resources"), call("shelf__read_resource", uri="note://today")),
        say("", call("shelf__read_resource", uri="note://picture"), call("shelf__read_resource", uri="note://gone")),
        say("ok"),
    ]
    async with Agent(ScriptedModel(*turns), tools=[shelf]) as agent:
        run = await agent.run("What is to be done?")
        assert agent.tools.get("shelf__read_resource").read_only
    listed, read, picture, gone = [each for each in run.messages if isinstance(each, ToolResult)]
    assert {each["uri"] for each in json.loads(listed.content)} == {"note://today", "note://picture"}
    assert read.content == "buy milk"
    assert "image/png" in picture.content
    assert gone.outcome == "failed"
    assert "untrusted" in run.labels


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
async def test_resources_of_others_are_untrusted(shelf, trusted):
    """As the results of the server's tools are."""
    shelf.resources_as_tools, shelf.needs_refresh = True, True
    shelf.tool_policy = attrs.evolve(shelf.tool_policy, trusted=trusted)
    await shelf.update()
    assert {tool.reads_untrusted for tool in shelf.tools if "resource" in tool.name} == {not trusted}


async def test_changes_are_heard_between_two_turns(shelf):
    """A tool that a call has added is there in the next turn, and fifty notices of it cost one listing."""
    turns = [say("", call("shelf__learn", name="dance")), say("", call("shelf__dance")), say("ok")]
    async with Agent(ScriptedModel(*turns), tools=[shelf]) as agent:
        run = await agent.run("Learn to dance.")
    assert [each.content for each in run.messages if isinstance(each, ToolResult)] == ["learned", "dance was done"]
    assert shelf.version <= 3  # one for each turn


async def test_changes_of_the_handshake_era_are_heard(tmp_path):
    """A thousand notices in one call cost one listing before the next turn."""
    await one_call(rude("changes", tmp_path / "record"))
    asked = [message["method"] for message in heard(tmp_path / "record")]
    assert asked.count("tools/list") == 2


async def test_changes_that_were_not_declared_are_not_heard(tmp_path):
    """A server that tells of them all the same is not listed anew."""
    await one_call(rude("silent-changes", tmp_path / "record"))
    asked = [message["method"] for message in heard(tmp_path / "record")]
    assert asked.count("tools/list") == 1


class _Listening:
    """A client whose stream of changes ends as a script says."""

    protocol_version = "2026-07-28"

    def __init__(self, *ends, declared=True):
        self.ends = list(ends)
        self.server_capabilities = m.ServerCapabilities(tools=m.ToolsCapability(list_changed=declared))
        self.opened = 0

    def listen(self, *, tools_list_changed):
        return self

    async def __aenter__(self):
        self.opened += 1
        return self

    async def __aexit__(self, *error):
        return None

    def __aiter__(self):
        return self

    async def __anext__(self):
        raise self.ends.pop(0)


def test_a_stream_of_changes_that_drops_is_opened_again_and_what_was_missed_fetched():
    """However it ended; a server that says it has none is not asked again."""
    lost = tool_changes.SubscriptionLost("gone")
    client = _Listening(lost, StopAsyncIteration(), MCPError(-32603, "oops"), MCPError(m.METHOD_NOT_FOUND, "none"))
    missed = []
    is_open = anyio.Event()

    async def play():
        await tool_changes.follow(client, is_open, lambda: missed.append(anyio.current_time()))

    run_virtual(play)
    first, *others = missed
    assert client.opened == 4
    assert [time - first for time in others] == pytest.approx([2, 6])
    assert is_open.is_set()


async def test_a_server_that_tells_of_no_changes_is_not_listened_to():
    """Neither one that has declared none, nor one of the handshake era, which tells without being asked."""
    client = _Listening(declared=False)
    await tool_changes.follow(client, anyio.Event(), lambda: None)
    old = _Listening()
    old.protocol_version = "2025-11-25"
    await tool_changes.follow(old, anyio.Event(), lambda: None)
    assert (client.opened, old.opened) == (0, 0)


def test_messages_of_a_prompt_that_say_nothing_are_left_out():
    """No provider takes them."""
    blank = m.PromptMessage(role="user", content=m.TextContent(text=" "))
    link = m.PromptMessage(role="user", content=m.ResourceLink(name="notes", uri="note://today"))
    drawn = m.PromptMessage(role="assistant", content=m.ImageContent(data=PNG, mime_type="image/png"))
    assert server_features._to_message(blank) is None
    told = TextPart(text="[link to a resource: note://today, notes]")
    assert server_features._to_message(link) == UserMessage(parts=(told,))
    assert server_features._to_message(drawn) == AssistantMessage(text="[image: image/png, 8 bytes]")


async def test_a_server_that_does_not_answer_in_time_is_told_of(tmp_path):
    """What the application asks has the time of a call."""
    server = rude("hangs-after-handshake", tmp_path / "record", timeout_s=0.2)
    with pytest.raises(MCPServerError, match=r"no answer within 0\.2 s"):
        await server_features.fetch_tools(server.connection, 0.2, server.catalogue, lambda: None)
    await server.aclose()
