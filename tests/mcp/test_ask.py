"""What a server asks in the middle of a call: the run waits in its store, and goes on in whatever process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import agentfsm
from agentfsm import Agent, MisuseError, Outcome, PendingKind, ToolResult
from agentfsm.mcp import MCPServer
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support import warm_python
from tests.support.port_servers import listening

HEAD = """
import os
import sys
from pathlib import Path
from typing import Annotated
from pydantic import BaseModel
import mcp.types as m
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import UrlElicitationRequiredError

LOG = Path(sys.argv[1])

def note(text):
    with LOG.open("a") as file:
        file.write(text + "\\n")

class Who(BaseModel):
    name: str

class Sure(BaseModel):
    sure: bool
"""
MODERN = (
    HEAD
    + """
from mcp.server.mcpserver import Elicit, Resolve, RequestStateSecurity

async def who(ctx: Context) -> Elicit[Who]:
    return Elicit("Who travels?", Who)

async def sure(ctx: Context, traveller: Annotated[Who, Resolve(who)]) -> Elicit[Sure]:
    return Elicit(f"Book it for {traveller.name}?", Sure)

keys = {"request_state_security": RequestStateSecurity(keys=[b"k" * 32])} if "keys" in sys.argv else {}
server = MCPServer("desk", **keys)

@server.tool()
async def book(to: str, traveller: Annotated[Who, Resolve(who)], word: Annotated[Sure, Resolve(sure)]) -> str:
    "Book a journey."
    note("booked")
    return f"booked {to} for {traveller.name}: {word.sure}"

@server.tool()
async def later(ctx: Context) -> str | m.InputRequiredResult:
    "Be asked again a few times."
    tries = int(ctx.request_state or "0")
    return m.InputRequiredResult(request_state=str(tries + 1)) if tries < 3 else "now"

@server.tool()
async def again(ctx: Context) -> str | m.InputRequiredResult:
    "Ask the very same until the answer is right."
    found = (ctx.input_responses or {}).get("n")
    if found is not None:
        note(found.content["name"])
    if found is not None and found.content == {"name": "right"}:
        return "right"
    ask = m.ElicitRequest(params=m.ElicitRequestFormParams(message="Which?", requested_schema=Who.model_json_schema()))
    return m.InputRequiredResult(input_requests={"n": ask}, request_state="x")

@server.tool()
async def pay(ctx: Context) -> str | m.InputRequiredResult:
    "Have something paid elsewhere."
    if ctx.input_responses:
        return str(ctx.input_responses["p"].action)
    ask = m.ElicitRequest(params=m.ElicitRequestURLParams(message="Pay.", url="https://pay.example.com/1"))
    return m.InputRequiredResult(input_requests={"p": ask})

@server.tool()
async def script(ctx: Context) -> str | m.InputRequiredResult:
    "Ask for what cannot be shown to a person."
    ask = m.ElicitRequest(params=m.ElicitRequestURLParams(message="Pay.", url="javascript:alert(1)"))
    return m.InputRequiredResult(input_requests={"p": ask})

@server.tool()
async def roots(ctx: Context) -> str | m.InputRequiredResult:
    "Ask for folders."
    return m.InputRequiredResult(input_requests={"r": m.ListRootsRequest()})

how = {"transport": "streamable-http", "port": int(os.environ["PORT"])} if "PORT" in os.environ else {}
server.run(**how)
"""
)
HANDSHAKE = (
    HEAD
    + """
import asyncio
from mcp.server import runner
from mcp.server.lowlevel import server as lowlevel

lowlevel.serve_dual_era_loop = runner.serve_loop  # it knows the handshake only, as servers did before 2026
server = MCPServer("desk")
paid = []

@server.tool()
async def book(to: str, ctx: Context) -> str:
    "Book a journey."
    note("began")
    try:
        who = await ctx.elicit("Who travels?", Who)
        if who.action != "accept":
            return f"nobody: {who.action}"
        sure = await ctx.elicit(f"Book it for {who.data.name}?", Sure)
    except asyncio.CancelledError:
        note("cancelled")
        raise
    note("booked")
    return f"booked {to} for {who.data.name}: {sure.action == 'accept' and sure.data.sure}"

@server.tool()
async def pay(ctx: Context) -> str:
    "Have something paid elsewhere."
    found = await ctx.elicit_url("Pay.", f"https://pay.example.com/{len(paid)}", "e1")
    paid.append(1)
    return found.action

@server.tool()
async def closed(ctx: Context) -> str:
    "Need something opened first."
    if LOG.exists():
        return "open"
    raise UrlElicitationRequiredError(
        [m.ElicitRequestURLParams(message="Log in.", url="https://example.com/login", elicitation_id="e1")]
    )

gate = asyncio.Event()

@server.tool()
async def slow(ctx: Context) -> str:
    "Take until the other call asks."
    await gate.wait()
    return "slow"

@server.tool()
async def asker(ctx: Context) -> str:
    "Ask while another is under way."
    asyncio.get_running_loop().call_later(0.05, gate.set)
    found = await ctx.elicit("Who?", Who)
    return f"{found.action} {found.data.name}"

server.run()
"""
)


@pytest.fixture
def log(tmp_path):
    """Where the server notes what it has done."""
    return tmp_path / "log"


@pytest.fixture
def server_of(tmp_path, log):
    """Make the server of a script, each time a new one."""

    def make(source, *words):
        path = tmp_path / "server.py"
        path.write_text(source)
        again = {"confirm": False, "repeat_for_input": ["*"]}  # what the calls do before they ask may be done twice
        python, *rest = warm_python.MCP.command(str(path), str(log), *words)
        return MCPServer.stdio(python, rest, name="desk", **again)

    return make


def results(run):
    """The results of a run, in order."""
    return [message for message in run.messages if isinstance(message, ToolResult)]


def agent_of(tmp_path, server, *replies):
    """An agent with the server's tools, on the file."""
    return Agent(ScriptedModel(*replies), tools=[server], store=SQLiteStore(tmp_path / "runs.db"))


async def answered(tmp_path, run, content=None, **more):
    """Answer as somebody who has nothing but the file."""
    (item,) = run.pending
    async with Agent(ScriptedModel(), store=SQLiteStore(tmp_path / "runs.db")) as person:
        await person.answer(item.run_id, item.call_id, content, digest=item.digest, **more)


async def through(tmp_path, server_of, source, tool, *contents, words=(), **arguments):
    """Let a call ask, and answer it, each round with an agent and a server of its own; return run and questions."""
    asked = []
    async with agent_of(
        tmp_path, server_of(source, *words), say("", call(f"desk__{tool}", **arguments)), "done"
    ) as agent:
        run = await agent.run("go", id="mine")
    for content in contents:
        (item,) = run.pending
        assert item.kind is PendingKind.QUESTION
        asked += item.questions
        await answered(tmp_path, run, **content)
        async with agent_of(tmp_path, server_of(source, *words), "done") as agent:
            run = await agent.resume("mine")
    return run, asked


ANN = {"content": {"name": "Ann"}}
YES = {"content": {"sure": True}}


@pytest.mark.parametrize("source", [MODERN, HANDSHAKE], ids=["2026", "2025"])
async def test_each_round_is_asked_and_answered_in_processes_of_their_own(tmp_path, server_of, log, source):
    """Also where the server that has asked is gone with all that it knew: nobody is asked the same twice."""
    run, asked = await through(tmp_path, server_of, source, "book", ANN, YES, to="Rome")
    assert [each.message for each in asked] == ["Who travels?", "Book it for Ann?"]
    assert asked[0].schema["properties"]["name"]["type"] == "string"
    assert (run.output, results(run)[0].content) == ("done", "booked Rome for Ann: True")
    assert log.read_text().split().count("booked") == 1


async def test_the_same_over_http(tmp_path, log):
    """A server that listens is asked and answered in just the same way, each round by another agent."""
    path = tmp_path / "server.py"
    path.write_text(MODERN)
    with listening(warm_python.MCP.command(str(path), str(log)), os.environ) as url:

        def at_url(_source, *_words):
            return MCPServer.http(f"{url}/mcp", name="desk", confirm=False)

        run, asked = await through(tmp_path, at_url, MODERN, "book", ANN, YES, to="Rome")
    assert [each.message for each in asked] == ["Who travels?", "Book it for Ann?"]
    assert (run.output, results(run)[0].content) == ("done", "booked Rome for Ann: True")
    assert log.read_text().split() == ["booked"]


async def test_a_server_that_keeps_its_state_is_taken_up_where_it_asked(tmp_path, server_of, log):
    """Its `request_state` comes back to it byte for byte, in another process."""
    run, asked = await through(tmp_path, server_of, MODERN, "book", ANN, YES, words=("keys",), to="Rome")
    assert (len(asked), results(run)[0].content) == (2, "booked Rome for Ann: True")
    assert log.read_text().split() == ["booked"]


@pytest.mark.parametrize("source", [MODERN, HANDSHAKE], ids=["2026", "2025"])
async def test_declining_is_told_to_the_server(tmp_path, server_of, source):
    """It says what comes of it."""
    run, _ = await through(tmp_path, server_of, source, "book", {"declined": True}, to="Rome")
    assert "decline" in results(run)[0].content


async def test_an_answer_that_does_not_fit_the_servers_schema_is_refused(tmp_path, server_of):
    """Before the server hears of it."""
    async with agent_of(tmp_path, server_of(MODERN), say("", call("desk__book", to="Rome")), "done") as agent:
        run = await agent.run("go")
        with pytest.raises(MisuseError, match="name: should be a string"):
            await agent.answer(run.id, "t1.0", {"name": 5})


async def test_the_same_question_asked_again_is_a_new_one(tmp_path, server_of, log):
    """An answer that the server was given serves no second time."""
    wrong, right = {"content": {"name": "wrong"}}, {"content": "right"}
    run, asked = await through(tmp_path, server_of, MODERN, "again", wrong, right, words=("keys",))
    assert ([each.key for each in asked], results(run)[0].content) == (["q1", "q2"], "right")
    assert log.read_text().split() == ["wrong", "right"]


@pytest.mark.parametrize("source", [MODERN, HANDSHAKE], ids=["2026", "2025"])
async def test_an_address_is_opened_by_the_person(tmp_path, server_of, source):
    """What is done there does not come by here: the answer is only that it was agreed to."""
    run, (asked,) = await through(tmp_path, server_of, source, "pay", {})
    assert asked.url.startswith("https://pay.example.com/")
    assert results(run)[0].content == "accept"


async def test_a_server_that_requires_an_address_to_be_opened_first(tmp_path, server_of, log):
    """The error is a question; the call is made again when it is answered, and asks again while it is not done."""
    async with agent_of(tmp_path, server_of(HANDSHAKE), say("", call("desk__closed")), "done") as agent:
        run = await agent.run("go")
        assert run.pending[0].questions[0].url == "https://example.com/login"
        await answered(tmp_path, run)
        run = await agent.resume(run.id)
        assert run.is_waiting
        log.touch()
        await answered(tmp_path, run)
        run = await agent.resume(run.id)
    assert results(run)[0].content == "open"


async def test_what_has_to_be_opened_and_is_declined(tmp_path, server_of):
    """The model is told, and the server is not asked again."""
    run, _ = await through(tmp_path, server_of, HANDSHAKE, "closed", {"declined": True})
    assert (results(run)[0].outcome, "declined" in results(run)[0].content) == (Outcome.FAILED, True)


@pytest.mark.parametrize(("tool", "words"), [("roots", "sampling or roots"), ("script", "cannot be shown to a person")])
async def test_what_is_not_given_is_refused_with_a_clear_result(tmp_path, server_of, tool, words):
    """Roots and sampling are not declared; and not every address is one to open."""
    run, _ = await through(tmp_path, server_of, MODERN, tool)
    assert (run.output, results(run)[0].outcome) == ("done", Outcome.FAILED)
    assert words in results(run)[0].content


async def test_a_server_that_only_wants_to_be_asked_later(tmp_path, server_of):
    """It is, within the attempt."""
    run, _ = await through(tmp_path, server_of, MODERN, "later", words=("keys",))
    assert results(run)[0].content == "now"


async def test_a_call_that_is_given_up_is_cancelled_at_the_server(tmp_path, server_of, log):
    """It hears that before it hears that nobody has answered, so it takes that for no answer."""
    async with agent_of(tmp_path, server_of(HANDSHAKE), say("", call("desk__book", to="Rome")), "done") as agent:
        run = await agent.run("go")
        assert run.is_waiting
        await answered(tmp_path, run, **ANN)
        run = await agent.resume(run.id)
        await answered(tmp_path, run, **YES)
        await agent.resume(run.id)
    assert log.read_text().split() == ["began", "cancelled", "began", "cancelled", "began", "booked"]


PROGRAM = """
import sys, anyio
from agentfsm import Agent
from agentfsm.mcp import MCPServer
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say

async def main():
    again = {"confirm": False, "repeat_for_input": ["book"]}
    server = MCPServer.stdio(sys.argv[2], sys.argv[3:], name="desk", **again)
    model = ScriptedModel(say("", call("desk__book", to="Rome")), "done")
    agent = Agent(model, tools=[server], store=SQLiteStore(sys.argv[1]))
    await agent.run("go", id="mine")
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@pytest.mark.parametrize("source", [MODERN, HANDSHAKE], ids=["2026", "2025"])
async def test_the_process_that_has_asked_is_killed(tmp_path, log, server_of, source):
    """Nothing that was asked, or answered, was only in its memory."""
    script = tmp_path / "server.py"
    server = server_of(source)
    env = {**os.environ, "PYTHONPATH": str(Path(agentfsm.__file__).parent.parent)}
    words = ("-c", PROGRAM, str(tmp_path / "runs.db"), *warm_python.MCP.command(str(script), str(log)))
    status, _, errors = warm_python.MCP.run(words, tmp_path, env)
    assert status == -9, errors
    async with agent_of(tmp_path, server, "done") as agent:
        run = await agent.load("mine")
        for content in (ANN, YES):
            await answered(tmp_path, run, **content)
            run = await agent.resume("mine")
    assert (run.output, results(run)[0].content) == ("done", "booked Rome for Ann: True")
