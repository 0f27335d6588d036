"""A call begins a task at a server: it is made again to look at it, by any process, and ends it with its run."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    InputRequired,
    Limits,
    MisuseError,
    PendingKind,
    Question,
    RunContext,
    Runs,
    StopReason,
    tool,
)
from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.run_context import TaskPending
from tests.support.checks import results_of

WAY_S = 0.02


class Server:
    """A server with one task, and a tool that looks at it."""

    def __init__(self, *, asks: bool = False, reaches: bool = True, **options: Any) -> None:
        """Say whether the task asks a person, and whether the server can be reached to end it."""
        self.began, self.looks = 0, 0
        self.is_done, self.hangs, self.reaches = False, False, reaches
        self.ended: list[tuple[Any, str | None, str | None]] = []

        async def work(ctx: RunContext[Any]) -> str:
            await anyio.lowlevel.checkpoint()
            if ctx.state is None:
                self.began += 1
                raise TaskPending("it has begun", state={"id": 17}, wait_s=WAY_S)
            self.looks += 1
            if self.hangs and ctx.answers:
                await anyio.sleep_forever()
            if asks and not ctx.answers:
                raise InputRequired(Question(key="sure", message="Sure?"), state=ctx.state)
            if not self.is_done:
                raise TaskPending("it is at work", state=ctx.state, wait_s=WAY_S)
            return f"task {ctx.state['id']} at attempt {ctx.attempt}"

        async def end(state: Any, *, tenant: str | None, user: str | None) -> bool:
            if not self.reaches:
                raise ConflictError("it is away")
            self.ended.append((state, tenant, user))
            return True

        self.tool = tool(**{"end_task": end, **options})(work)

    def agent(self, store: Any, **options: Any) -> Agent:
        """Return an agent with the tool: another process's."""
        script = say("", call("work")), "done"
        return Agent(ScriptedModel(*script), name="clerk", tools=[self.tool], store=store, **options)

    async def park(self, store: Any) -> Any:
        """Have a worker begin the task."""
        agent = self.agent(store)
        run = await agent.submit("go", user="ann", tenant="acme")
        await agent.worker(until_idle=True)
        return await agent.load(run.id)

    async def work(self, store: Any, run: Any) -> Any:
        """Have another worker look, once it is time."""
        await anyio.sleep(2 * WAY_S)
        agent = self.agent(store).with_(model=ScriptedModel("done"))
        await agent.worker(until_idle=True)
        return await agent.load(run.id)


@pytest.mark.parametrize("read_only", [False, True])
async def test_workers_look_in_turn(store, read_only):
    """Each gives the run back. A look is no start, and the result is the same call's."""
    server = Server(read_only=read_only)
    run = await server.park(store)
    assert (run.awaits_tasks, [item.kind for item in run.pending]) == (True, [PendingKind.TASK])
    run = await server.work(store, run)
    assert run.pending[0].description == "it is at work"
    server.is_done = True
    run = await server.work(store, run)
    assert (run.answer, [each.content for each in results_of(run.messages)]) == ("done", ["task 17 at attempt 1"])
    assert (server.began, server.looks >= 2) == (1, True)
    events = (await store.read(run.id)).events
    assert [type(event) for event in events].count(e.ToolStarted) == 1


async def test_a_driving_call_waits(store):
    """It does so with its clock stopped, and hears of what comes in."""
    server = Server()
    agent = server.agent(store, limits=Limits(seconds=5))
    async with anyio.create_task_group() as group:

        async def finish() -> None:
            await anyio.sleep(3 * WAY_S)
            server.is_done = True

        group.start_soon(finish)
        run = await agent.run("go")
    assert (run.answer, server.began, server.looks >= 1) == ("done", 1, True)


async def test_a_cancelled_run_ends_its_task(store):
    """At once with the tools, also in a process that has only these; without them a worker does."""
    server = Server()
    run = await server.park(store)
    await Runs(store).cancel(run.id)
    assert not (await Runs(store).load(run.id)).is_over
    run = await server.work(store, run)
    assert (run.stop_reason, server.ended) == (StopReason.CANCELLED, [({"id": 17}, "acme", "ann")])
    assert "was asked to end it" in results_of(run.messages)[0].content
    away = Server(reaches=False)
    run = await away.park(store)
    agent = away.agent(store)
    await agent.cancel(run.id)
    run = await agent.load(run.id)
    assert run.stop_reason is StopReason.CANCELLED
    assert "could not be asked to end it" in results_of(run.messages)[0].content


async def test_a_question_of_a_task(store):
    """A look that is cut off after the answer is made again, whatever `on_unknown` says of calls with an effect."""
    server = Server(asks=True)
    run = await server.work(store, await server.park(store))
    [item] = run.pending
    assert item.kind is PendingKind.QUESTION
    with pytest.raises(MisuseError, match="does not wait for the outcome"):
        await Runs(store).settle(run.id, item.call_id, result="x")
    await Runs(store).answer(run.id, item.call_id, digest=item.digest)
    server.hangs = True
    with anyio.move_on_after(5 * WAY_S):
        await server.agent(store).resume(run.id)
    run = await Runs(store).load(run.id)
    assert run.open_call("t1.0").phase is Phase.RUNNING
    server.hangs, server.is_done = False, True
    run = await server.work(store, run)
    assert (run.answer, server.began) == ("done", 1)


async def test_a_question_that_nobody_answers_ends_the_task(store):
    """The server would wait for ever."""
    server = Server(asks=True, answer_expires_s=WAY_S)
    run = await server.work(store, await server.park(store))
    run = await server.work(store, run)
    assert "Nobody answered in time" in results_of(run.messages)[0].content
    assert len(server.ended) == 1


async def test_a_fork_leaves_the_task_alone(store):
    """It is the task of the run that has begun it, and a person decides on the fork's call."""
    server = Server()
    run = await server.park(store)
    agent = server.agent(store)
    fork = await agent.fork(run.id)
    fork = await agent.resume(fork.id)
    assert [item.kind for item in fork.pending] == [PendingKind.OUTCOME]
    await agent.cancel(fork.id)
    assert server.ended == []
