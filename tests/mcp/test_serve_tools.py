"""A registry as a server: its tools, as the SDK's own client sees them, in both revisions of the protocol."""

import json

import anyio
import anyio.lowlevel
import pytest
from mcp import Client, MCPError
from mcp.types import ElicitResult, ToolListChangedNotification

from agentfsm import ModelRetry, Permissions, Rule, RunContext, ToolRegistry, tool
from agentfsm.mcp import MCPServerError, MCPService
from agentfsm.mcp.server import call_sequencer as serve_turns
from agentfsm.mcp.server import service as serve
from agentfsm.tools.builtin import ask_user
from agentfsm.tools.tool import make_tool

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


@tool(read_only=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(idempotent=True)
async def put(key: str) -> dict[str, str]:
    """Put something there."""
    return {"put": key}


@tool
async def choose(city: str) -> str:
    """Choose a city."""
    raise ModelRetry(f"{city} is not served, choose Paris")


@tool
def broken() -> str:
    """Fail."""
    raise RuntimeError("no disk")


WIPED = []


@tool(requires_approval=lambda a: a.path != "/scratch/x", describe=lambda a: f"removes {a.path}")
async def wipe(path: str) -> str:
    """Remove a file."""
    WIPED.append(path)
    return f"removed {path}"


@pytest.fixture
def service():
    WIPED.clear()
    return MCPService([add, put, choose, broken, wipe], name="demo")


def as_text(result):
    (block,) = result.content
    return block.text


@MODES
async def test_tools_are_listed_with_what_is_declared_of_them(service, mode):
    """Schema and description are the tool's, hints are its declarations, and nothing is claimed that nobody said."""
    async with Client(service.server, mode=mode) as client:
        tools = {each.name: each for each in (await client.list_tools()).tools}
    assert tools["add"].input_schema == add.parameters
    assert tools["add"].description == "Add two numbers."
    assert tools["add"].output_schema == {
        "type": "object",
        "properties": {"result": {"type": "integer"}},
        "required": ["result"],
    }
    assert tools["choose"].output_schema is None
    hints = {
        name: (each.annotations.read_only_hint, each.annotations.idempotent_hint, each.annotations.destructive_hint)
        for name, each in tools.items()
    }
    assert hints == {
        "add": (True, None, None),
        "put": (False, True, True),
        "choose": (False, False, True),
        "broken": (False, False, True),
        "wipe": (False, False, True),
    }


@MODES
@pytest.mark.parametrize(
    "draft", ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
)
async def test_the_draft_of_a_schema_is_listed(draft, mode):
    """Else a client would read it by the rules of 2020-12, where `items` as a list means nothing."""
    pair = {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]}
    schema = {"$schema": draft, "type": "object", "properties": {"pair": pair if "07" in draft else {"type": "array"}}}
    drafted = make_tool(lambda **arguments: str(arguments), name="drafted", parameters=schema)
    async with Client(MCPService([drafted, add], name="demo").server, mode=mode) as client:
        tools = {each.name: each.input_schema for each in (await client.list_tools()).tools}
    assert tools == {"drafted": schema, "add": add.parameters}
    assert "$schema" not in drafted.definition.parameters


@MODES
async def test_a_call_has_its_result(service, mode):
    """Text is text, and what is no text is JSON."""
    async with Client(service.server, mode=mode) as client:
        three = await client.call_tool("add", {"a": 1, "b": 2})
        put_there = await client.call_tool("put", {"key": "é"})
    assert (three.is_error, as_text(three)) == (False, "3")
    assert json.loads(as_text(put_there)) == {"put": "é"}


@MODES
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("add", {"a": "x"}, "b: required, but missing"),
        ("choose", {"city": "Rome"}, "Rome is not served, choose Paris"),
        ("broken", {}, "no disk"),
        ("add", {"a": 1, "b": float("1e400")}, "add"),
        ("put", {"key": "\ud800"}, "\ufffd"),
    ],
)
async def test_what_goes_wrong_is_a_result_in_our_words(service, name, arguments, words, mode):
    """Wrong arguments, a hint of the tool and a bug are results that a model can read; half a character is replaced."""
    async with Client(service.server, mode=mode) as client:
        result = await client.call_tool(name, arguments)
    assert result.is_error is (name != "put")
    assert words in as_text(result)


@MODES
async def test_an_unknown_tool_is_an_error_that_names_the_known_ones(service, mode):
    """The protocol has an error of its own for it."""
    async with Client(service.server, mode=mode) as client:
        with pytest.raises(MCPError, match="Did you mean 'add'") as caught:
            await client.call_tool("ad", {})
    assert caught.value.code == -32602


async def test_tools_without_a_body_and_agents_are_left_out():
    """A call whose result comes from outside needs a run that waits, so clients are not told of such tools."""
    service = MCPService([add, ask_user()], name="demo")
    async with Client(service.server) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["add"]
        with pytest.raises(MCPError, match="no tool 'ask_user'"):
            await client.call_tool("ask_user", {"question": "?"})


async def test_permissions_hold_for_clients():
    """What is not permitted is not listed, and with forbidden arguments not run."""
    WIPED.clear()
    allowed = Permissions(allow=("add", Rule("wipe", lambda a: a.path == "/scratch/x")))
    service = MCPService([add, put, wipe], name="demo", permissions=allowed)
    async with Client(service.server) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["add", "wipe"]
        refused = await client.call_tool("wipe", {"path": "/etc"})
        done = await client.call_tool("wipe", {"path": "/scratch/x"})
    assert "not permitted with these arguments" in as_text(refused)
    assert (as_text(done), WIPED) == ("removed /scratch/x", ["/scratch/x"])


async def test_a_tool_that_is_not_there_now_is_not_listed():
    """`enabled` is asked with the deps of the server, and a tool that fails to answer is not there."""

    @tool(read_only=True, enabled=lambda ctx: ctx.deps["on"])
    async def sometimes(ctx: RunContext[dict]) -> str:
        """Be there sometimes."""
        return ctx.deps["who"]

    for deps, names in [({"on": True, "who": "me"}, ["sometimes"]), ({"on": False}, []), ({}, [])]:
        async with Client(MCPService([sometimes], name="demo", deps=deps).server) as client:
            assert [each.name for each in (await client.list_tools()).tools] == names
            if names:
                assert as_text(await client.call_tool("sometimes", {})) == "me"


@MODES
async def test_progress_is_told_while_a_call_runs(mode):
    """What a tool says of its progress comes to the client that asked for it, in order."""

    @tool(read_only=True)
    async def work(ctx: RunContext[None]) -> str:
        """Work."""
        ctx.progress("half")
        await anyio.lowlevel.checkpoint()
        ctx.progress("nearly")
        return "done"

    told, both = [], anyio.Event()

    async def progress(number, _total, message):
        told.append((number, message))
        if len(told) == 2:
            both.set()

    async with Client(MCPService([work], name="demo").server, mode=mode) as client:
        assert as_text(await client.call_tool("work", {}, progress_callback=progress)) == "done"
        with anyio.fail_after(5):
            await both.wait()
    assert told == [(1, "half"), (2, "nearly")]


@MODES
async def test_cancelling_a_call_cancels_the_tool(mode):
    """The client's cancellation is the tool's own, and the server goes on."""
    begun, cancelled = anyio.Event(), anyio.Event()

    @tool
    async def hang() -> str:
        """Hang."""
        begun.set()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            cancelled.set()
            raise

    async with Client(MCPService([hang, add], name="demo").server, mode=mode) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "hang", {})
            await begun.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await cancelled.wait()
        assert as_text(await client.call_tool("add", {"a": 1, "b": 2})) == "3"


class Overlap:
    """Counts who is inside."""

    def __init__(self):
        self.now, self.most = 0, 0

    async def pass_through(self):
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        self.now -= 1


async def overlap_of(service, calls):
    async with Client(service.server) as client, anyio.create_task_group() as tasks:
        for name, arguments in calls:
            tasks.start_soon(client.call_tool, name, arguments)


@pytest.mark.parametrize(
    ("declared", "most"),
    [({}, 1), ({"read_only": True}, 5), ({"locks": lambda a: [a.key % 2]}, 2)],
)
async def test_calls_overlap_where_their_tools_let_them(declared, most):
    """Calls of separate requests keep the rules that a reply's calls keep: alone, shared, or by keys."""
    inside = Overlap()

    @tool(**declared)
    async def visit(key: int) -> str:
        """Visit."""
        await inside.pass_through()
        return "seen"

    await overlap_of(MCPService([visit], name="demo"), [("visit", {"key": n}) for n in range(5)])
    assert inside.most == most


async def test_no_more_calls_are_in_flight_than_the_limit():
    """Also of tools that may all overlap."""
    inside = Overlap()

    @tool(read_only=True)
    async def visit(key: int) -> str:
        """Visit."""
        await inside.pass_through()
        return "seen"

    await overlap_of(MCPService([visit], name="demo", limit=2), [("visit", {"key": n}) for n in range(5)])
    assert inside.most == 2


async def test_a_flood_is_told_to_come_later(monkeypatch):
    """More calls than can be held are refused at once, and none of them is run."""
    monkeypatch.setattr(serve_turns, "MAX_CALLS", 10)
    ran = []

    @tool
    async def slow(n: int) -> str:
        """Be slow."""
        ran.append(n)
        await anyio.sleep_forever()

    refused = []
    service = MCPService([slow], name="demo")

    async def one(client, n):
        refused.append(as_text(await client.call_tool("slow", {"n": n})))
        tasks.cancel_scope.cancel()

    async with Client(service.server) as client, anyio.create_task_group() as tasks:
        for n in range(11):
            tasks.start_soon(one, client, n)
    assert "too many calls" in refused[0]
    assert len(ran) <= 1


# Approval.


def asked_by(answer, seen):
    async def ask(_context, params):
        seen.append(params.message)
        return answer

    return ask


YES = ElicitResult(action="accept", content={"approve": True})


@MODES
async def test_a_person_is_asked_before_a_call_that_needs_it(service, mode):
    """The question says what will be done with which arguments; a yes runs it, once."""
    seen = []
    async with Client(service.server, mode=mode, elicitation_callback=asked_by(YES, seen)) as client:
        result = await client.call_tool("wipe", {"path": "/etc/x\u202e"})
    assert (result.is_error, WIPED) == (False, ["/etc/x\u202e"])
    (question,) = seen
    assert "May wipe run?" in question
    assert "removes /etc/x" in question
    assert '"/etc/x\\u202e"' in question


@MODES
@pytest.mark.parametrize(
    "answer",
    [
        ElicitResult(action="decline"),
        ElicitResult(action="cancel"),
        ElicitResult(action="accept", content={"approve": False}),
        ElicitResult(action="accept", content={}),
        ElicitResult(action="accept", content={"approve": "true"}),
    ],
)
async def test_anything_but_a_yes_is_a_no(service, mode, answer):
    """A refusal, a dismissal and a form that says nothing run nothing, and the model is told."""
    async with Client(service.server, mode=mode, elicitation_callback=asked_by(answer, [])) as client:
        result = await client.call_tool("wipe", {"path": "/etc"})
    assert (result.is_error, WIPED) == (True, [])
    assert "wipe was not run" in as_text(result)


@MODES
async def test_nobody_is_asked_where_nobody_need_be(service, mode):
    """Arguments that need no approval, and those that do not fit, are not put to anybody."""
    seen = []
    async with Client(service.server, mode=mode, elicitation_callback=asked_by(YES, seen)) as client:
        assert as_text(await client.call_tool("wipe", {"path": "/scratch/x"})) == "removed /scratch/x"
        assert "path: required" in as_text(await client.call_tool("wipe", {}))
    assert seen == []


async def test_a_client_that_cannot_ask_runs_nothing(service):
    """It is told why, and what to do: by an error in 2026-07-28, by a result before."""
    words = "has not declared elicitation"
    async with Client(service.server) as client:
        with pytest.raises(MCPError, match=words) as caught:
            await client.call_tool("wipe", {"path": "/etc"})
    async with Client(service.server, mode="legacy") as client:
        result = await client.call_tool("wipe", {"path": "/etc"})
    assert (caught.value.error.code, result.is_error, WIPED) == (-32021, True, [])
    assert words in as_text(result)


async def test_arguments_too_long_to_be_read_are_put_to_nobody(service):
    """A person who cannot read what will be done cannot approve it."""
    seen = []
    async with Client(service.server, elicitation_callback=asked_by(YES, seen)) as client:
        result = await client.call_tool("wipe", {"path": "x" * 30_000})
    assert (result.is_error, seen, WIPED) == (True, [], [])


async def test_a_yes_counts_once_and_for_what_was_asked(service):
    """An answer that is sent again, to another call, or to a question that nobody put, runs nothing."""

    async def asked(client, path):
        result = await client.session.call_tool("wipe", {"path": path}, allow_input_required=True)
        return result.request_state

    async def answered(client, path, state):
        return await client.session.call_tool(
            "wipe", {"path": path}, input_responses={"approval": YES}, request_state=state, allow_input_required=True
        )

    async with Client(service.server, elicitation_callback=asked_by(YES, [])) as client:
        first = await asked(client, "/a")
        assert not (await answered(client, "/a", first)).is_error
        other = await asked(client, "/b")
        for path, state in [("/a", first), ("/c", other), ("/b", other), ("/a", "made up")]:
            with pytest.raises(MCPError, match="requestState"):
                await answered(client, path, state)
        unasked = await client.session.call_tool(
            "wipe", {"path": "/d"}, input_responses={"approval": YES}, allow_input_required=True
        )
        assert unasked.result_type == "input_required"
    assert WIPED == ["/a"]


async def test_tools_that_come_later_are_told_to_those_who_listen():
    """A client that listens hears that there are other tools, when the server has learnt of them."""
    registry = ToolRegistry.of([add])
    service = MCPService(registry, name="demo")
    async with Client(service.server) as client, client.listen(tools_list_changed=True) as events:
        registry.register(put)
        assert len((await client.list_tools()).tools) == 2
        async for event in events:
            assert type(event).__name__ == "ToolsListChanged"
            break


async def test_a_tool_that_brings_others_is_heard_at_once():
    """Those who listen need not wait until somebody asks which tools there are."""
    registry = ToolRegistry.of([add])

    @tool
    async def grow() -> str:
        """Bring another tool."""
        registry.register(put)
        return "grown"

    registry.register(grow)
    async with (
        Client(MCPService(registry, name="demo").server) as client,
        client.listen(tools_list_changed=True) as news,
    ):
        await client.list_tools()  # so that the client need not ask for them after the call
        await client.call_tool("grow", {})
        async for event in news:
            assert type(event).__name__ == "ToolsListChanged"
            break


class Ear:
    """Waits until a client of the handshake revision is told of a change."""

    def __init__(self, kind):
        self.kind, self.heard = kind, anyio.Event()

    async def __call__(self, message):
        if isinstance(message, self.kind):
            self.heard.set()


@pytest.mark.parametrize("grows", ["in a call", "by itself"])
async def test_clients_of_the_handshake_are_told_of_tools(grows, monkeypatch):
    """That they will be is part of the handshake; they need not subscribe, nor ask for anything meanwhile."""
    monkeypatch.setattr(serve, "WATCH_S", 0.01)
    registry = ToolRegistry.of([add])

    @tool
    async def grow() -> str:
        """Bring another tool."""
        registry.register(put)
        return "grown"

    registry.register(grow)
    ear = Ear(ToolListChangedNotification)
    async with Client(MCPService(registry, name="demo").server, mode="legacy", message_handler=ear) as client:
        assert client.server_capabilities.tools.list_changed
        if grows == "in a call":
            await client.call_tool("grow", {})
        else:
            registry.register(put)
        with anyio.fail_after(10):
            await ear.heard.wait()


async def test_a_client_that_listens_need_not_ask_for_tools(monkeypatch):
    """The server looks by itself whether there are others."""
    monkeypatch.setattr(serve, "WATCH_S", 0.01)
    registry = ToolRegistry.of([add])
    async with (
        Client(MCPService(registry, name="demo").server) as client,
        client.listen(tools_list_changed=True) as news,
    ):
        registry.register(put)
        with anyio.fail_after(10):
            assert type(await anext(aiter(news))).__name__ == "ToolsListChanged"


class Away:
    """A source of tools that cannot be asked."""

    is_stale, version, tools = True, 0, ()

    async def update(self):
        raise MCPServerError("the server 'far' is away")

    async def aclose(self):
        """Close nothing."""


async def test_a_source_that_cannot_be_asked_hides_no_other_tools():
    """They are listed and called; who calls one of the source's learns why it is not there."""
    async with Client(MCPService([add, Away()], name="demo").server) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["add"]
        assert as_text(await client.call_tool("add", {"a": 1, "b": 2})) == "3"
        with pytest.raises(MCPError, match="the server 'far' is away"):
            await client.call_tool("far__add", {})
