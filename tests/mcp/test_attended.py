"""A server that acts, then asks: with `elicit=` a person answers inside the call, otherwise the question is refused."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

import agentfsm
from agentfsm import Agent, Answer, Limits, MisuseError, Outcome, PendingKind, StopReason, ToolResult
from agentfsm.core.events import InputGiven, ToolFinished, ToolPaused, ToolStarted
from agentfsm.mcp import MCPServer
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support import warm_python
from tests.support.port_servers import listening

SEATS = str(Path(__file__).parents[1] / "support" / "seat_server.py")


@pytest.fixture
def log(tmp_path):
    """Where the server notes what it has done."""
    return tmp_path / "log"


@contextmanager
def by_stdio(log, **options):
    python, *words = warm_python.MCP.command(SEATS, str(log))
    yield MCPServer.stdio(python, words, name="desk", **{"confirm": False} | options)


@contextmanager
def by_http(log, **options):
    with listening(warm_python.MCP.command(SEATS, str(log)), os.environ) as url:
        yield MCPServer.http(f"{url}/mcp", name="desk", **{"confirm": False} | options)


def agent_of(server, *replies, **fields):
    """An agent with the server's tools."""
    return Agent(ScriptedModel(*(replies or (say("", call("desk__reserve")), "done"))), tools=[server], **fields)


def result_of(run):
    """The only result of a run."""
    [result] = [message for message in run.messages if isinstance(message, ToolResult)]
    return result


def ann(_item):
    """Answer as Ann would."""
    return Answer(content={"name": "Ann"}, by="ann")


@pytest.mark.parametrize("reached", [by_stdio, by_http], ids=["stdio", "http"])
async def test_a_seat_is_reserved_once(log, reached):
    """The question is answered inside the call, and the answer is in the journal."""
    asked = []

    async def elicit(item):
        await checkpoint()
        asked.append(item)
        return ann(item)

    with reached(log) as server:
        async with agent_of(server) as agent:
            run = await agent.run("go", elicit=elicit)
            events = await agent.history(run.id)
            [record] = await agent.audit(run.id)
    assert log.read_text().split() == ["reserved", "answer:Ann"]
    assert (run.output, result_of(run).content, result_of(run).attempts) == ("done", "a seat for Ann", 1)
    [item] = asked
    assert (item.kind, item.tool, item.questions[0].message) == (PendingKind.QUESTION, "desk__reserve", "Who travels?")
    acted = [event for event in events if isinstance(event, ToolStarted | ToolPaused | InputGiven | ToolFinished)]
    assert [type(event) for event in acted] == [ToolStarted, InputGiven, ToolFinished]
    assert (acted[1].by, acted[1].answers, acted[1].questions) == ("ann", {"q1": {"name": "Ann"}}, item.questions)
    assert record.informed_by == ("ann",)


@pytest.mark.parametrize("reached", [by_stdio, by_http], ids=["stdio", "http"])
async def test_an_unattended_call_is_refused_the_question(log, reached, caplog):
    """It is neither made twice nor cut off: the server is told that no answer comes, and the model reads why."""
    with reached(log) as server, caplog.at_level(logging.WARNING, "agentfsm.mcp"):
        async with agent_of(server) as agent:
            run = await agent.run("go")
    assert log.read_text().split() == ["reserved", "answer:cancel"]
    content = result_of(run).content
    assert content.startswith("a seat for cancel")
    assert "'Who travels?' (no person attends this run" in content
    assert [line for line in caplog.messages if "give the driving call elicit=" in line.lower()]


async def test_a_worker_is_unattended(log, tmp_path):
    """Also one that executes a run that a person has begun."""
    with by_stdio(log) as server:
        async with agent_of(server, store=SQLiteStore(tmp_path / "runs.db")) as agent:
            run = await agent.submit("go")
            await agent.worker(until_idle=True)
            run = await agent.load(run.id)
    assert log.read_text().split() == ["reserved", "answer:cancel"]
    assert "no person attends" in result_of(run).content


@pytest.mark.parametrize(
    ("tool", "options"), [("look", {"hints": True}), ("reserve", {"repeat_for_input": ["res*"]})], ids=str
)
async def test_what_may_be_repeated_waits_in_the_store(log, tool, options):
    """A read-only tool of a server whose hints are believed, and one that the user names."""
    with by_stdio(log, **options) as server:
        async with agent_of(server, say("", call(f"desk__{tool}")), "done") as agent:
            run = await agent.run("go")
            [item] = run.pending
            await agent.answer(run.id, item.call_id, {"name": "Ann"}, digest=item.digest)
            run = await agent.resume(run.id)
    assert result_of(run).content in {"seats of Ann", "a seat for Ann"}


async def test_a_read_only_call_is_attended_too(log):
    """Its start was not in the journal; it is there before the answer."""
    with by_stdio(log, hints=True) as server:
        async with agent_of(server, say("", call("desk__look")), "done") as agent:
            run = await agent.run("go", elicit=ann)
            acted = [type(event) for event in await agent.history(run.id)]
    assert (result_of(run).content, log.read_text().split()) == ("seats of Ann", ["looked"])
    assert acted.index(ToolStarted) < acted.index(InputGiven) < acted.index(ToolFinished)


async def test_each_question_of_a_call_has_its_own_answer(log):
    """In their order."""
    names = iter(["Ann", "Bob"])
    with by_stdio(log) as server:
        async with agent_of(server, say("", call("desk__twice")), "done") as agent:
            run = await agent.run("go", elicit=lambda _item: Answer(content={"name": next(names)}))
    assert (result_of(run).content, log.read_text().split()) == ("Ann and Bob", ["reserved"])


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        (Answer(), "decline"),
        (None, "cancel"),
        (Answer(content={"name": 5}), "cancel"),
        ({"name": "Ann"}, "cancel"),
        (Answer(content="Ann"), "Ann"),
    ],
    ids=str,
)
async def test_no_answer_is_told_to_the_server(log, answer, heard):
    """A decline, a dismissal, and what does not fit the form."""
    with by_stdio(log) as server:
        async with agent_of(server) as agent:
            run = await agent.run("go", elicit=lambda _item: answer)
            assert len([e for e in await agent.history(run.id) if isinstance(e, InputGiven)]) == 1
    assert result_of(run).content == f"a seat for {heard}"


async def test_a_callback_that_fails_counts_as_no_answer(log, caplog):
    """Its traceback is in the log."""

    def elicit(_item):
        raise ValueError("no screen")

    with by_stdio(log) as server:
        async with agent_of(server) as agent:
            run = await agent.run("go", elicit=elicit)
    assert result_of(run).content == "a seat for cancel"
    assert "no screen" in caplog.text


async def test_a_persons_time_is_not_the_calls(log):
    """Neither the limit of the call nor that of the run counts it."""

    async def elicit(item):
        await anyio.sleep(2.0)
        return ann(item)

    with by_stdio(log, timeout_s=1.5) as server:
        await server.update()
        async with agent_of(server, limits=Limits(seconds=1.9)) as agent:
            run = await agent.run("go", elicit=elicit)
    assert (run.output, result_of(run).content) == ("done", "a seat for Ann")
    assert run.duration_s < 1.9


async def test_a_stream_that_is_silent_while_a_person_is_asked(log, monkeypatch):
    """The call stays open for longer than other streams may be silent."""
    monkeypatch.setattr("agentfsm.mcp.connection.http_client.READ_TIMEOUT_S", 0.3)

    async def elicit(item):
        await anyio.sleep(1.0)
        return ann(item)

    with by_http(log) as server:
        async with agent_of(server) as agent:
            run = await agent.run("go", elicit=elicit)
    assert (result_of(run).content, log.read_text().split()) == ("a seat for Ann", ["reserved", "answer:Ann"])


async def test_the_limit_of_the_call_counts_again_after_the_answer(log):
    """What was left of it is left."""
    with by_stdio(log, timeout_s=1.0) as server:
        await server.update()

        async def elicit(item):
            await anyio.sleep(1.2)
            return ann(item)

        async with agent_of(server, say("", call("desk__twice")), "done") as agent:
            run = await agent.run("go", elicit=elicit)
    assert result_of(run).content == "Ann and Ann"


async def test_a_question_that_the_server_withdraws(log):
    """The person is not asked any longer."""
    withdrawn = []

    async def elicit(_item):
        try:
            await anyio.sleep_forever()
        finally:
            withdrawn.append(True)

    with by_stdio(log) as server:
        async with agent_of(server, say("", call("desk__impatient")), "done") as agent:
            run = await agent.run("go", elicit=elicit)
    assert (result_of(run).content, withdrawn) == ("nobody answered in time", [True])


async def test_a_run_that_is_cancelled_while_it_asks(log):
    """The server hears that the call is cancelled, and the journal says that its effect may have happened."""
    asked = anyio.Event()

    async def elicit(_item):
        asked.set()
        await anyio.sleep_forever()

    with by_stdio(log) as server:
        async with agent_of(server) as agent, anyio.create_task_group() as tasks:
            run = agent.start("go", id="mine")
            tasks.start_soon(lambda: agent.finish(run, elicit=elicit))
            await asked.wait()
            await agent.cancel("mine")
            run = await agent.wait("mine")
            tasks.cancel_scope.cancel()
    assert run.stop_reason is StopReason.CANCELLED
    assert result_of(run).outcome is Outcome.UNKNOWN
    assert log.read_text().split() == ["reserved", "cancelled"]


async def test_a_question_below(log):
    """A sub-agent's tool asks the person who attends the run at the top; no limit above counts the time."""

    async def elicit(item):
        await anyio.sleep(1.2)
        return ann(item)

    with by_stdio(log) as server:
        await server.update()
        clerk = agent_of(server, name="clerk")
        boss = Agent(
            ScriptedModel(say("", call("clerk", query="go")), "done"),
            tools=[clerk.as_tool(timeout_s=1.0)],
            limits=Limits(seconds=1.1),
        )
        async with boss, clerk:
            run = await boss.run("go", elicit=elicit)
    assert (run.output, log.read_text().split()) == ("done", ["reserved", "answer:Ann"])


@pytest.mark.parametrize("way", ["run", "finish", "resume", "step", "steps", "stream"])
async def test_each_driving_call_may_be_attended(log, way):
    """By the same callback."""
    with by_stdio(log) as server:
        async with agent_of(server) as agent:
            run = agent.start("go", id="mine")
            match way:
                case "run":
                    await agent.run("go", id="mine", elicit=ann)
                case "finish":
                    await agent.finish(run, elicit=ann)
                case "resume":
                    await agent.submit(run)
                    await agent.resume("mine", elicit=ann)
                case "step":
                    while not run.is_over:
                        run = await agent.step(run, elicit=ann)
                case "steps":
                    [_ async for _ in agent.steps(run, elicit=ann)]
                case "stream":
                    async with agent.stream(run, elicit=ann) as stream:
                        [_ async for _ in stream]
            run = await agent.load("mine")
    assert result_of(run).content == "a seat for Ann"


async def test_what_is_no_callback_is_refused():
    """Before anything is done."""
    async with Agent(ScriptedModel("done")) as agent:
        with pytest.raises(MisuseError, match="elicit= must be a function"):
            await agent.run("go", elicit="ann")


PROGRAM = """
import os, signal, sys, anyio
from agentfsm import Agent, Answer
from agentfsm.core.events import InputGiven
from agentfsm.mcp import MCPServer
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say

moment = sys.argv[2]

class Store(SQLiteStore):
    def append(self, lease, run, events, **more):
        written = super().append(lease, run, events, **more)
        if moment == "recorded" and any(isinstance(event, InputGiven) for event in events):
            while not written.is_done:  # the answer is on its way to the disk, and was not sent
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return written

def elicit(item):
    if moment == "asked":
        os.kill(os.getpid(), signal.SIGKILL)
    return Answer(content={"name": "Ann"}, by="ann")

async def main():
    server = MCPServer.stdio(sys.argv[3], sys.argv[4:], name="desk", confirm=False)
    agent = Agent(ScriptedModel(say("", call("desk__reserve")), "done"), tools=[server], store=Store(sys.argv[1]))
    await agent.run("go", id="mine", elicit=elicit)

anyio.run(main)
"""


@pytest.mark.parametrize("moment", ["asked", "recorded"])
async def test_the_process_is_killed_while_a_person_is_asked(tmp_path, log, moment):
    """The outcome of the call is unknown, and a person settles it: it is not made a second time by itself."""
    env = {**os.environ, "PYTHONPATH": str(Path(agentfsm.__file__).parent.parent)}
    words = ("-c", PROGRAM, str(tmp_path / "runs.db"), moment, *warm_python.MCP.command(SEATS, str(log)))
    status, _, errors = warm_python.MCP.run(words, tmp_path, env)
    assert status == -9, errors
    with by_stdio(log) as server:
        async with agent_of(server, "done", store=SQLiteStore(tmp_path / "runs.db")) as agent:
            run = await agent.resume("mine", elicit=ann)
            [item] = run.pending
            assert item.kind is PendingKind.OUTCOME
            given = [event for event in await agent.history("mine") if isinstance(event, InputGiven)]
            assert len(given) == (moment == "recorded")
            assert log.read_text().split().count("reserved") == 1
            await agent.settle("mine", item.call_id, result="a seat for Ann")
            run = await agent.resume("mine")
    assert (run.output, log.read_text().split().count("reserved")) == ("done", 1)
