"""Tasks of servers: the handle is in the journal, any process goes on with it, and no call begins a second one."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
from mcp import MCPError
from mcp.types import INTERNAL_ERROR

from agentfsm import Agent, Outcome, PendingKind, Runs, StopReason, ToolResult
from agentfsm.core import events as e
from agentfsm.mcp import MCPServer
from agentfsm.mcp.client.tasks import RemoteTask
from agentfsm.mcp.connection.request_errors import RequestError, RequestFault
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.run_context import TaskPending, ToolReturn
from tests.support import warm_python
from tests.support.port_servers import listening

SERVER = str(Path(__file__).parents[1] / "support" / "task_server.py")
WAY_S = 0.05
"""Seconds between two looks at a task."""


class Clerk(Model):
    """Makes one call, and repeats its result; in any process."""

    def __init__(self, tool: str, arguments: dict[str, object]) -> None:
        """Set the call."""
        self.name, self.call = "clerk", ProposedCall(id="a", name=f"jobs__{tool}", arguments=json.dumps(arguments))

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the call, or its result."""
        last = request.messages[-1]
        return Reply(text=last.content) if isinstance(last, ToolResult) else Reply(calls=(self.call,))


class Jobs:
    """A job at a server of tasks, and a store. Each agent is another process's."""

    def __init__(self, place: Path, store: Path, connect: Callable[[], MCPServer], tool: str, **arguments: object):
        self.place, self.store_path, self.connect = place, store, connect
        self.tool, self.name, self.arguments = tool, secrets.token_hex(8), arguments

    def agent(self) -> Agent:
        """Return an agent whose model calls the tool once."""
        model = Clerk(self.tool, {"job": self.name, **self.arguments})
        return Agent(model, name="clerk", tools=[self.connect()], store=self.store)

    @property
    def store(self):
        return SQLiteStore(self.store_path)

    @property
    def notes(self):
        """Return what the server has done for the job."""
        file = self.place / "notes"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{self.name}: ") for line in lines if line.startswith(self.name)]

    def end(self):
        """Let the task end."""
        (self.place / f"{self.name}.done").touch()

    async def park(self):
        """Have a worker begin the task of a call, and give the run back."""
        async with self.agent() as agent:
            run = await agent.submit("go")
            await agent.worker(until_idle=True)
            return await agent.load(run.id)

    async def work(self, run):
        """Have another worker go on with the run once the task is due."""
        due_at = max([item.expires_at for item in run.pending if item.kind is PendingKind.TASK], default=0)
        if run.awaits_tasks and due_at < time.time() + 30:
            await anyio.sleep(max(0, due_at - time.time()) + WAY_S)
        async with self.agent() as agent:
            await agent.worker(until_idle=True)
            return await agent.load(run.id)


def connect_http(url):
    return MCPServer.http(f"{url}/mcp", name="jobs", confirm=False, allow_private=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def url(place):
    with listening([sys.executable, SERVER, str(place)], {}) as found:
        yield found


@pytest.fixture
def job_of(url, place, tmp_path):
    """Make a job at the server over HTTP."""
    return lambda tool="report", **arguments: Jobs(
        place, tmp_path / "runs.db", partial(connect_http, url), tool, **arguments
    )


def result(run):
    """Return the result of the only call of a run."""
    [found] = [message for message in run.messages if isinstance(message, ToolResult)]
    return found


async def test_another_worker_finishes_the_task(job_of):
    """The first gives the run back with the handle. The next has a server of its own, and begins no second task."""
    jobs = job_of()
    run = await jobs.park()
    [item] = run.pending
    assert (item.kind, item.tool) == (PendingKind.TASK, "jobs__report")
    assert item.description.endswith("of the MCP server 'jobs' is working: at work")
    assert run.awaits_tasks
    still = await jobs.work(run)
    jobs.end()
    ended = await jobs.work(still)
    assert (ended.answer, jobs.notes) == (f"{jobs.name} is ready", ["began"])
    kinds = [type(event) for event in (await jobs.store.read(run.id)).events]
    assert kinds.count(e.ToolStarted) == 1
    assert kinds.count(e.ToolPaused) >= 2


async def test_a_driving_call_waits_for_the_task(job_of):
    """Without a worker, nobody else would go on with the run. It keeps the lease, and is cancelled meanwhile."""
    jobs = job_of()
    async with jobs.agent() as agent, anyio.create_task_group() as group:
        group.start_soon(_end_later, jobs)
        run = await agent.run("go")
    assert (run.answer, jobs.notes) == (f"{jobs.name} is ready", ["began"])
    jobs = job_of(poll_ms=60_000)
    async with jobs.agent() as agent, anyio.create_task_group() as group:
        run = agent.start("go")
        group.start_soon(_cancel_later, jobs, run.id)
        run = await agent.finish(run)
    assert (run.stop_reason, jobs.notes) == (StopReason.CANCELLED, ["began", "cancelled"])


@pytest.mark.parametrize("background", [False, True])
async def test_the_task_of_a_sub_agent(job_of, background):
    """Its run waits for the task, and its caller for the run: in this call, or in that of a worker."""
    jobs = job_of()
    async with jobs.agent() as clerk:
        said = say("", call("clerk", query="go"))
        boss = Agent(
            ScriptedModel(said, "done", "done"),
            name="boss",
            tools=[clerk.as_tool(background=background)],
            store=jobs.store,
        )
        async with boss, anyio.create_task_group() as group:
            group.start_soon(_end_later, jobs)
            run = await boss.run("go")
    assert (run.answer, jobs.notes) == ("done", ["began"])
    told = "".join(str(message) for message in run.messages)
    assert f"{jobs.name} is ready" in told


async def _begun(jobs):
    while True:
        if "began" in jobs.notes:
            return
        await anyio.sleep(WAY_S)


async def _end_later(jobs):
    await _begun(jobs)
    jobs.end()


async def _cancel_later(jobs, run_id):
    await _begun(jobs)
    await Runs(jobs.store).cancel(run_id)


async def test_a_cancellation_reaches_the_server(job_of):
    """Who cancels has only the store, and leaves it to a worker that has the tools."""
    jobs = job_of(poll_ms=60_000)
    run = await jobs.park()
    await Runs(jobs.store).cancel(run.id, by="ann")
    ended = await jobs.work(run)
    assert ended.stop_reason is StopReason.CANCELLED
    assert ended.stop_message == "cancelled by ann; unknown: jobs__report"
    assert "asked to end it" in result(ended).content
    assert jobs.notes == ["began", "cancelled"]


async def test_an_agent_that_has_not_listed_its_tools_cancels(job_of):
    """It does so first, so that no worker is needed. This server is a process of its own."""
    jobs = job_of(poll_ms=60_000)
    run = await jobs.park()
    python, *rest = warm_python.MCP.command(SERVER, str(jobs.place))
    jobs.connect = lambda: MCPServer.stdio(python, rest, name="jobs", confirm=False)
    async with jobs.agent() as agent:
        await agent.cancel(run.id)
        assert (await agent.load(run.id)).stop_reason is StopReason.CANCELLED
    assert jobs.notes == ["began", "cancelled"]


async def test_the_question_of_a_task(job_of):
    """It is a question of the run: a person answers with nothing but the store, and the server gets it once."""
    jobs = job_of("ask")
    jobs.end()
    run = await jobs.work(await jobs.park())
    [item] = run.pending
    assert (item.kind, item.questions[0].message) == (PendingKind.QUESTION, "Who travels?")
    await Runs(jobs.store).answer(run.id, item.call_id, {"name": "Ann"}, digest=item.digest)
    ended = await jobs.work(run)
    assert (ended.answer, jobs.notes) == ("a seat for Ann", ["began", "answer who"])


async def test_a_task_that_the_server_has_lost(job_of):
    """Its effect may have happened, and is not repeated."""
    jobs = job_of()
    run = await jobs.park()
    for file in jobs.place.glob("task-*"):
        file.unlink()
    ended = await jobs.work(run)
    assert result(ended).outcome is Outcome.UNKNOWN
    assert "has no result of it now (Task not found)" in ended.answer
    assert jobs.notes == ["began"]


async def test_a_task_that_outlives_its_time(job_of):
    """It is looked at a last time, and cancelled."""
    jobs = job_of(ttl_ms=1)
    ended = await jobs.work(await jobs.park())
    assert result(ended).outcome is Outcome.UNKNOWN
    assert "did not end within its time" in ended.answer
    assert jobs.notes == ["began", "cancelled"]


async def test_a_task_that_fails(job_of):
    """The model reads the error of the server."""
    jobs = job_of("fail")
    jobs.end()
    ended = await jobs.work(await jobs.park())
    assert (result(ended).outcome, "failed: the disk is full" in ended.answer) == (Outcome.FAILED, True)


async def test_errors_of_looks():
    """A server that cannot be reached is looked for until the end; one that answers with errors, only so often."""
    task = RemoteTask("1", began_at=time.time(), ends_at=time.time() + 3_600)
    away = RequestError(MCPError(0, "gone"), RequestFault.LOST, "gone")
    assert all(isinstance(task.resolve_error(away, "jobs"), TaskPending) for _ in range(100))
    ends = [task.resolve_error(MCPError(INTERNAL_ERROR, "oops"), "jobs") for _ in range(5)]
    assert [type(end) for end in ends] == [TaskPending] * 4 + [ToolReturn]
