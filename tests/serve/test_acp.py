"""The Agent Client Protocol: the official clients, of PyPI in this process and of npm for a process that is killed."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import acp
import anyio
import pytest
from acp import schema as s

import agentfsm
from agentfsm import Agent, MisuseError, ModelError, tool
from agentfsm.planning import Planner
from agentfsm.serve import Caller, serve
from agentfsm.serve.dialects.acp import serve_editor, serve_stdio
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say
from tests.support import node_packages
from tests.support.doors import ESCAPED, HIDDEN, TOO_LONG, find_raw, read_store

PROGRAM = Path(node_packages.__file__).parent / "node" / "acp_client.mjs"
CALLER = Caller(user="ann", scopes={"run", "approve"})


@pytest.fixture
def anyio_backend():
    """Return the one that the official package runs on."""
    return "asyncio"


class Editor:
    """The editor's side: keeps the updates, and answers requests for permission as told."""

    def __init__(self):
        self.updates, self.asked = [], []
        self.answers, self.decide = [], None

    async def session_update(self, session_id, update, **_others):
        self.updates.append(update)

    async def request_permission(self, session_id, tool_call, options, **_others):
        self.asked.append((tool_call, options))
        answer = self.answers.pop(0) if self.answers else await self.decide()
        outcome = {"outcome": "cancelled"} if answer is None else {"outcome": "selected", "optionId": answer}
        return s.RequestPermissionResponse.model_validate({"outcome": outcome})

    def on_connect(self, _connection):
        """Do nothing."""

    def shown(self):
        """Return the updates in short, with the pieces of a text as one."""
        short = []
        for each in self.updates:
            kind = each.session_update
            if kind.endswith("_chunk"):
                text = getattr(each.content, "text", None) or each.content.type
                if short and short[-1][0] == kind:
                    short[-1] = (kind, short[-1][1] + text)
                else:
                    short.append((kind, text))
            elif kind == "plan":
                short.append((kind, *[entry.status for entry in each.entries]))
            else:
                short.append((kind, getattr(each, "title", None) or each.raw_output or each.status))
        self.updates.clear()
        return short


@asynccontextmanager
async def editing(agent, caller=CALLER):
    """Connect an editor to an agent, as `agentfsm acp` does, and yield both sides."""
    gateway = serve([agent], auth=lambda _request: caller).gateway
    ends = [await asyncio.open_connection(sock=each) for each in socket.socketpair()]
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_editor, gateway, caller, *ends[0])
            editor = Editor()
            connection = acp.connect_to_agent(editor, *reversed(ends[1]))
            await connection.initialize(protocol_version=acp.PROTOCOL_VERSION)
            yield editor, connection
            await connection.close()
            ends[1][1].close()
    finally:
        for _, writer in ends:
            writer.close()
            await writer.wait_closed()


class Wire:
    """An editor without a package, which writes what it likes."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def ask(self, *lines):
        """Write lines, the last of which has an answer; return the messages up to that."""
        self.writer.write(b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines))
        self.writer.write(b"\n")
        return await self.read(lambda message: "method" not in message and message["id"] == lines[-1]["id"])

    async def read(self, is_last):
        messages = []
        while not messages or not is_last(messages[-1]):
            messages.append(json.loads(await self.reader.readline()))
        return messages

    async def begin(self):
        await self.ask({"id": "i", "method": "initialize", "params": {"protocolVersion": 1}})
        params = {"cwd": "/", "mcpServers": []}
        [answer] = await self.ask({"id": "n", "method": "session/new", "params": params})
        return answer["result"]["sessionId"]


@asynccontextmanager
async def wired(agent):
    """Connect raw streams to an agent, and yield the editor's side; the agent ends in order when they are closed."""
    gateway = serve([agent], auth=lambda _request: CALLER).gateway
    ends = [await asyncio.open_connection(sock=each) for each in socket.socketpair()]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_editor, gateway, CALLER, *ends[0])
        yield Wire(*ends[1])
        ends[1][1].close()
    ends[0][1].close()


def prompt(session, text, number="p"):
    params = {"sessionId": session, "prompt": [{"type": "text", "text": text}]}
    return {"id": number, "method": "session/prompt", "params": params}


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@tool(external=True)
async def look_up(key: str) -> str:
    """Look a value up elsewhere."""
    raise AssertionError


@tool(read_only=True)
async def find(what: str) -> str:
    """Find something."""
    return f"found {what}"


def shop(*replies, tools=(pay,), store=None, **options):
    return Agent(ScriptedModel(*replies), tools=list(tools), name="shop", store=store or MemoryStore(), **options)


async def test_a_session_is_one_of_the_store():
    """Each prompt is a run of it, with the editor's folder, and another process shows it from the store."""
    agent = shop(say("one two three"), say("again"), say("third"))
    async with editing(agent) as (editor, connection):
        session = (await connection.new_session(cwd="/work", mcp_servers=[])).session_id
        parts = [acp.text_block("read"), acp.resource_link_block("notes", "file:///notes.md")]
        parts.append(acp.resource_block(acp.embedded_text_resource("file:///a.py", "x = 1")))
        answer = await connection.prompt(session_id=session, prompt=parts)
        assert answer.stop_reason == "end_turn"
        assert editor.shown() == [("agent_message_chunk", "one two three")]
        await connection.prompt(session_id=session, prompt=[acp.text_block("more")])
        [newest, first] = [await agent.load(row.id) for row in await agent.runs.list()]
        assert first.metadata == newest.metadata == {"cwd": "/work"}
        texts = [part.text for part in first.header.prompt]
        assert texts == ["read", "[notes]: file:///notes.md", "Content of file:///a.py:\n\nx = 1"]
    async with editing(agent) as (editor, connection):
        with pytest.raises(acp.RequestError, match="not open: load it first"):
            await connection.prompt(session_id=session, prompt=[acp.text_block("more")])
        await connection.load_session(cwd="/work", session_id=session, mcp_servers=[])
        shown = editor.shown()
        assert [kind for kind, _ in shown] == ["user_message_chunk", "agent_message_chunk"] * 2
        assert [text for _, text in shown][1:] == ["one two three", "more", "again"]
        await connection.prompt(session_id=session, prompt=[acp.text_block("last")])
        assert editor.shown() == [("agent_message_chunk", "third")]
    async with editing(agent, Caller(user="eve", scopes={"run"})) as (_, connection):
        with pytest.raises(acp.RequestError, match="there is no session"):
            await connection.load_session(cwd="/work", session_id=session, mcp_servers=[])


@pytest.mark.parametrize(("answer", "result"), [("allow", "paid 5"), ("always", "paid 5"), ("reject", "rejected")])
async def test_a_permission_is_an_approval(answer, result):
    """It is for the call that is shown; "always" is an allowance of the session for equal calls."""
    replies = [say("", call("pay", amount=5)), say("done")] * 2
    agent = shop(*replies)
    async with editing(agent) as (editor, connection):
        session = (await connection.new_session(cwd="/", mcp_servers=[])).session_id
        editor.answers = [answer, answer]
        for _ in range(2):
            await connection.prompt(session_id=session, prompt=[acp.text_block("pay")])
            called, *progress, ended, said = editor.shown()
            assert (called, said) == (("tool_call", "pay"), ("agent_message_chunk", "done"))
            assert result in ended[1]
            assert progress == ([] if answer == "reject" else [("tool_call_update", "in_progress")])
        assert len(editor.asked) == (1 if answer == "always" else 2)
        shown, options = editor.asked[0]
        assert (shown.title, shown.raw_input) == ("pay", {"amount": 5})
        assert [each.kind for each in options] == ["allow_once", "allow_always", "reject_once"]
        assert "amount" in options[1].name
        audit = await agent.runs.audit((await agent.runs.list())[-1].id)
        assert {each.approved_by or each.decided_by for each in audit} == {"ann"}


async def test_a_cancelled_turn_ends_its_run():
    """While the editor is asked, too; the session goes on with the next prompt."""
    agent = shop(say("", call("pay", amount=5)), say("next"))
    async with editing(agent) as (editor, connection):
        session = (await connection.new_session(cwd="/", mcp_servers=[])).session_id

        async def cancel():
            await connection.cancel(session_id=session)

        editor.decide = cancel
        answer = await connection.prompt(session_id=session, prompt=[acp.text_block("pay")])
        assert answer.stop_reason == "cancelled"
        assert editor.shown()[-1][0] == "tool_call_update"
        answer = await connection.prompt(session_id=session, prompt=[acp.text_block("on")])
        assert (answer.stop_reason, editor.shown()) == ("end_turn", [("agent_message_chunk", "next")])
        await connection.cancel(session_id=session)  # which has nothing to end
        await connection.cancel(session_id="unknown")
        assert (await agent.runs.list())[0].state == "done"


async def test_a_question_is_text():
    """The turn ends with it, and the next prompt is its answer."""
    async with editing(shop(say("", call("look_up", key="k")), say("done"), tools=[look_up])) as (editor, connection):
        session = (await connection.new_session(cwd="/", mcp_servers=[])).session_id
        answer = await connection.prompt(session_id=session, prompt=[acp.text_block("go")])
        assert answer.stop_reason == "end_turn"
        assert "answer here" in editor.shown()[-1][1]
        await connection.prompt(session_id=session, prompt=[acp.text_block("42")])
        assert editor.shown() == [("tool_call_update", "42"), ("agent_message_chunk", "done")]


async def test_failures_are_errors_of_the_prompt():
    """With the reason; what a run cannot read starts none."""
    async with editing(shop(fail(ModelError("no key")))) as (_, connection):
        session = (await connection.new_session(cwd="/", mcp_servers=[])).session_id
        with pytest.raises(acp.RequestError, match="no key"):
            await connection.prompt(session_id=session, prompt=[acp.text_block("go")])
        with pytest.raises(acp.RequestError, match="image"):
            await connection.prompt(session_id=session, prompt=[acp.image_block("AAAA", "image/png")])
        with pytest.raises(acp.RequestError):
            await connection.prompt(session_id=session, prompt=[])


async def test_a_prompt_passes_the_checks_of_every_door():
    """Hidden characters are read as their escapes, and what is too long is refused."""
    agent = shop("ok")
    async with editing(agent) as (_, connection):
        session = (await connection.new_session(cwd="/", mcp_servers=[])).session_id
        await connection.prompt(session_id=session, prompt=[acp.text_block(HIDDEN)])
        with pytest.raises(acp.RequestError, match="characters"):
            await connection.prompt(session_id=session, prompt=[acp.text_block(TOO_LONG)])
        texts = await read_store(agent.store)
        assert find_raw(texts) == []
        assert ESCAPED in texts


GARBAGE = {
    b"nonsense": -32700,
    b"\xff\xfe": -32700,
    b"[" * 200_000: -32700,
    b"x" * 3_000: -32700,
    b"[1, 2]": -32600,
    b"null": -32600,
    b'{"id": [1], "result": 1}': -32600,
    b'{"id": 1, "method": 5}': -32600,
}


async def test_lines_that_are_no_messages_are_refused(monkeypatch):
    """Each by its code, and the agent goes on, also after responses that nobody has asked for, or of no known form."""
    async with wired(shop("hello")) as wire:
        session = await wire.begin()
        more = [b'{"id": 99, "result": {}}\n', b'{"id": 0, "error": "x"}\n', b"\n", prompt(session, "hi")]
        *refused, _, answer = await wire.ask(b"\n".join(GARBAGE) + b"\n", *more)
        assert [each["error"]["code"] for each in refused] == [*GARBAGE.values()]
        assert [each["id"] for each in refused] == [*[None] * (len(GARBAGE) - 1), 1]
        assert answer["result"] == {"stopReason": "end_turn"}
        lost = {"cwd": "/", "mcpServers": [], "sessionId": "\ud800"}
        [missing] = await wire.ask({"id": "m", "method": "session/load", "params": lost})
        assert missing["error"]["code"] == -32002
    monkeypatch.setattr("agentfsm.serve.dialects.acp._MAX_MESSAGE_BYTES", 100_000)
    async with wired(shop()) as wire:
        wire.writer.write(b"x" * 200_000 + b"\n")
        [refused] = await wire.read(lambda _: True)
        assert refused["error"]["message"] == "a message has 100,000 bytes at most, not 200,001"


@pytest.mark.parametrize(
    "answer",
    [
        {"result": 5},
        {"result": {"outcome": {"outcome": "selected", "optionId": "other"}}},
        {"error": "x"},
        {"error": {"code": 1, "message": "no dialog"}},
    ],
    ids=range(4),
)
async def test_an_answer_that_is_no_decision_decides_nothing(answer):
    """The prompt ends with an error, and the call waits, and is asked for again when the session is loaded."""
    agent = shop(say("", call("pay", amount=5)), say("done"))
    async with wired(agent) as wire:
        session = await wire.begin()
        wire.writer.write(json.dumps(prompt(session, "pay")).encode() + b"\n")
        [*_, asked] = await wire.read(lambda each: each.get("method") == "session/request_permission")
        wire.writer.write(json.dumps({"id": asked["id"], **answer}).encode() + b"\n")
        [*_, failed] = await wire.read(lambda each: each.get("id") == "p")
        assert failed["error"]["code"] < 2
        load = {"cwd": "/", "mcpServers": [], "sessionId": session}
        wire.writer.write(json.dumps({"id": "l", "method": "session/load", "params": load}).encode() + b"\n")
        [*_, asked] = await wire.read(lambda each: each.get("method") == "session/request_permission")
        allowed = {"outcome": {"outcome": "selected", "optionId": "allow"}}
        wire.writer.write(json.dumps({"id": asked["id"], "result": allowed}).encode() + b"\n")
        await wire.read(lambda each: "done" in json.dumps(each.get("params", {})))


async def test_an_editor_that_reads_no_more_is_left():
    """Its agent ends when it closes its stream, whatever was not read; the run is in the store."""
    asked = anyio.Event()

    def reply(_request):
        asked.set()
        return "x" * 5_000_000

    agent = Agent(FunctionModel(reply), name="shop", store=MemoryStore())
    with anyio.fail_after(20):
        async with wired(agent) as wire:
            session = await wire.begin()
            wire.writer.write(json.dumps(prompt(session, "go")).encode() + b"\n")
            await asked.wait()
            [row] = await agent.runs.list()
            await agent.runs.wait(row.id)
            await wire.reader.readexactly(1)


async def test_prompts_at_once_are_one_run():
    """The second is input of the run that the first begins, and not refused."""
    gate = anyio.Event()

    async def reply(_request):
        await gate.wait()
        return "done"

    agent = Agent(FunctionModel(reply), name="shop", store=MemoryStore())
    async with editing(agent) as (_, connection):
        session = (await connection.new_session(cwd="/", mcp_servers=[])).session_id
        stops = []

        async def send(text):
            answer = await connection.prompt(session_id=session, prompt=[acp.text_block(text)])
            stops.append(answer.stop_reason)
            gate.set()  # the first is over once the second is input

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, "one")
            tasks.start_soon(send, "two")
        [row] = await agent.runs.list()
        assert stops == ["end_turn"] * 2
        texts = [each.text for each in (await agent.load(row.id)).messages]
        assert [each for each in texts if each != "done"] == ["one", "two"]


async def test_files_are_no_editor(tmp_path, monkeypatch):
    """A file as input would never be read, and one as output has no reader."""
    gateway = serve([shop()], auth=lambda _request: CALLER).gateway
    with (tmp_path / "file").open("w+") as file:
        monkeypatch.setattr("sys.stdin", file)
        with pytest.raises(MisuseError, match="an editor starts `agentfsm acp`"):
            await serve_stdio(gateway, CALLER, file)


async def test_a_plan_has_its_steps():
    """They are updates of the plan, with their progress."""
    first = {"id": 1, "tool": "find", "arguments": {"what": "a"}}
    steps = [first, {"id": 2, "tool": "find", "arguments": {"what": "b"}, "after": [1]}]
    planner = Planner(model=ScriptedModel(json.dumps({"steps": steps})))
    async with editing(shop("done", tools=[find], planner=planner)) as (editor, connection):
        session = (await connection.new_session(cwd="/", mcp_servers=[])).session_id
        await connection.prompt(session_id=session, prompt=[acp.text_block("find both")])
        plans = [each for each in editor.shown() if each[0] == "plan"]
        assert plans[0] == ("plan", "pending", "pending")
        assert plans[-1] == ("plan", "completed", "completed")
        assert ("plan", "completed", "in_progress") in plans


SHOP = """
import json
from pathlib import Path

from agentfsm import Agent, ToolResult, tool
from agentfsm.testing import FunctionModel, call, say


@tool(requires_approval=True)
def pay(amount: int) -> str:
    "Pay an amount."
    print("this is not the protocol")
    with Path("book.txt").open("a") as book:
        book.write(f"{amount}\\n")
    return f"paid {amount}"


def think(request):
    return say("all done") if isinstance(request.messages[-1], ToolResult) else say("", call("pay", amount=5))


agent = Agent(FunctionModel(think), tools=[pay], name="shop")
"""


def test_a_killed_process_goes_on_when_its_session_is_loaded(tmp_path):
    """The official client of npm sees the session, is asked again, and the effect happens once."""
    (tmp_path / "shop.py").write_text(SHOP, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENTFSM_")}

    def edit(**asked):
        command = [sys.executable, "-m", "agentfsm", "acp", "shop:agent", "--store", "runs.db", "--drain", "0"]
        request = {
            "command": command,
            "cwd": str(tmp_path),
            "env": kept | {"PYTHONPATH": str(Path(agentfsm.__file__).parents[1])},
            **asked,
        }
        program = [str(node_packages.node()), str(PROGRAM), str(node_packages.packages().parent), json.dumps(request)]
        done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=30)
        return json.loads(done.stdout), done.stderr

    first, _ = edit(prompt="pay 5", answer="kill")
    assert (first["error"] is None, first["code"]) == (False, None), first
    assert first["agent"]["name"] == "shop"
    second, noise = edit(load=first["session"], answer="allow", until="all done")
    assert (second["error"], second["code"]) == (None, 0), (second, noise)
    kinds = [each["sessionUpdate"] for each in second["updates"]]
    assert kinds[:4] == ["user_message_chunk", "tool_call", "tool_call_update", "tool_call_update"]
    texts = [each["content"]["text"] for each in second["updates"][4:]]
    assert second["asked"] == first["asked"]
    assert "".join(texts) == "all done"
    assert (tmp_path / "book.txt").read_text() == "5\n"
    assert "this is not the protocol" in noise
