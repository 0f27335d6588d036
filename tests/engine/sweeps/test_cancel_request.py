"""`agent.cancel`: somebody ends a run, whoever drives it and whatever it does at that moment."""

from __future__ import annotations

import contextlib

import anyio
import pytest

from agentfsm import Agent, ConflictError, InputKind, Outcome, Run, State, StopReason, tool
from agentfsm.core.inbox import Cancel, InboxItem, PostedItem
from agentfsm.ports import Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, names, results_of, sound, virtually


@tool(requires_approval=True)
async def pay() -> str:
    """Pay."""
    return "paid"


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "seen"


async def cancelled(agent: Agent, run_id: str) -> Run:
    """The run, after a check that it ended as a cancelled run does."""
    run = await agent.load(run_id)
    assert (run.state, run.stop_reason) == (State.ERROR, StopReason.CANCELLED)
    await sound(agent, run)
    return run


async def cancelled_while(store, agent: Agent, entered: anyio.Event) -> Run:
    """Drive a run until `entered`, cancel it through another agent, and return what the driver returned."""
    ends: list[Run] = []

    async def drive() -> None:
        ends.append(await agent.run("go", id="mine"))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive)
            await entered.wait()
            await Agent(ScriptedModel(), store=store).cancel("mine", by="ann")
    (run,) = ends
    assert await cancelled(agent, "mine") == run
    assert run.stop_message.startswith("cancelled by ann")
    return run


async def test_an_idle_run_is_ended_at_once(store):
    """Nobody drives it, so the canceller writes its end."""
    agent = Agent(ScriptedModel(), tools=[look], store=store)
    run = await agent.step(agent.start("go"))
    await agent.cancel(run.id)
    run = await cancelled(agent, run.id)
    assert run.stop_message == "cancelled"


async def test_a_waiting_run_is_ended_at_once(store):
    """Its open calls are closed, and nobody is asked any more."""
    agent = Agent(ScriptedModel(say("", call("look"), call("pay"))), tools=[look, pay], store=store)
    run = await agent.run("go")
    await agent.cancel(run.id, by="ann", message="wrong order")
    run = await cancelled(agent, run.id)
    assert run.stop_message == "cancelled by ann: wrong order"
    assert [r.outcome for r in run.calls] == [Outcome.DONE, Outcome.SKIPPED]
    assert run.pending == ()


async def test_a_model_call_is_cut(store):
    """The driver hears of it while the model thinks, and returns the run."""
    entered = anyio.Event()

    async def answer(_request: Request) -> str:
        entered.set()
        await anyio.sleep_forever()
        return "never"

    run = await cancelled_while(store, Agent(FunctionModel(answer), store=store), entered)
    assert run.turn == 0


@pytest.mark.parametrize(
    ("options", "outcomes"),
    [
        ({}, {Outcome.UNKNOWN}),
        ({"idempotent": True}, {Outcome.UNKNOWN}),
        ({"read_only": True}, {Outcome.CANCELLED, Outcome.SKIPPED}),
    ],
    ids=str,
)
async def test_a_tool_in_flight_is_cut(store, options, outcomes):
    """What had finished is kept; the call in flight is unknown only where it may not be repeated."""
    entered = anyio.Event()

    async def work() -> str:
        entered.set()
        await anyio.sleep_forever()
        return "never"

    model = ScriptedModel(say("", call("look"), call("work"), call("look")))
    agent = Agent(model, tools=[look, tool(**options)(work)], store=store)
    run = await cancelled_while(store, agent, entered)
    first, cut, behind = results_of(run.messages)
    assert first.outcome is Outcome.DONE
    assert cut.outcome in outcomes
    assert behind.outcome in ({Outcome.DONE} if options.get("read_only") else {Outcome.SKIPPED})


def test_a_wait_before_a_retry_is_cut():
    """See test_retry for the wait itself; here the end is at once, in virtual time."""

    async def play(store, clock):
        async def answer(_request: Request) -> str:
            await anyio.sleep(30)
            raise ConnectionError("down")

        agent = Agent(FunctionModel(answer), store=store, clock=clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: agent.run("go", id="mine"))
            await anyio.sleep(30.5)
            await agent.cancel("mine")
        assert anyio.current_time() == 30.5
        await cancelled(agent, "mine")

    virtually(play)


async def test_cancelling_twice_is_cancelling_once(store):
    """The second request finds the first, or a run that is over."""
    entered = anyio.Event()

    async def answer(_request: Request) -> str:
        entered.set()
        await anyio.sleep_forever()
        return "never"

    agent = Agent(FunctionModel(answer), store=store)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: agent.run("go", id="mine"))
            await entered.wait()
            await agent.cancel("mine", by="ann")
            with contextlib.suppress(ConflictError):  # over already
                await agent.cancel("mine", by="bob")
    run = await cancelled(agent, "mine")
    assert run.stop_message.startswith("cancelled by ann")
    assert names(await agent.history("mine")).count("Failed") == 1


async def test_a_run_that_cancels_itself_by_a_tool(store):
    """A tool may end its own run."""
    agent: Agent

    @tool
    async def stop() -> str:
        """Stop."""
        await agent.cancel("mine", by="the tool")
        await anyio.sleep_forever()
        return "never"

    agent = Agent(ScriptedModel(say("", call("stop"))), tools=[stop], store=store)
    with anyio.fail_after(HANG_S):
        run = await agent.run("go", id="mine")
    assert (run.stop_reason, run.stop_message) == (StopReason.CANCELLED, "cancelled by the tool; unknown: stop")
    assert [r.outcome for r in run.calls] == [Outcome.UNKNOWN]
    await sound(agent, run)


async def test_a_tool_that_returns_after_the_cancel_keeps_its_result(store):
    """A request that comes while a call ends does not undo the call."""
    agent: Agent

    @tool
    async def last() -> str:
        """Do it, and ask for the end."""
        with anyio.CancelScope(shield=True):
            await agent.cancel("mine")
            await anyio.wait_all_tasks_blocked()
        return "did it"

    agent = Agent(ScriptedModel(say("", call("last"), call("look"))), tools=[last, look], store=store)
    with anyio.fail_after(HANG_S):
        run = await agent.run("go", id="mine")
    assert run.stop_reason is StopReason.CANCELLED
    first, second = results_of(run.messages)
    assert (first.outcome, first.content) == (Outcome.DONE, "did it")
    assert second.outcome is Outcome.SKIPPED
    await sound(agent, run)


class Sudden(MemoryStore):
    """A store in which a cancel arrives at the very moment at which the inbox is read."""

    armed = False

    async def inbox(self, run_id: str) -> tuple[PostedItem, ...]:
        """Post, and read."""
        if self.armed:
            self.armed = False
            item: InboxItem = Cancel(by="ann", message="at once")
            await self.post(run_id, "cancel", item)
        return await super().inbox(run_id)


@pytest.mark.parametrize("state", [State.OBSERVE, State.REFLECT])
async def test_a_cancel_that_arrives_while_the_inbox_is_read_is_not_swallowed(state):
    """OBSERVE and REFLECT take in input; a request for the end stays until it is obeyed, with its author."""
    store = Sudden()
    agent = Agent(FunctionModel(lambda request: f"answer to {request.messages[-1].text}"), store=store)
    run = await agent.step(agent.start("one"))
    await agent.send(run.id, "two", kind=InputKind.USER)
    run = await agent.step(run)
    assert run.state is State.REFLECT
    if state is State.OBSERVE:
        run = await agent.step(run)
    assert run.state is state
    store.armed = True
    run = await agent.step(run)
    if not run.is_over:
        run = await agent.finish(run)
    assert run.stop_reason is StopReason.CANCELLED
    assert run.stop_message == "cancelled by ann: at once"
    await sound(agent, run)


async def test_a_cancelled_run_cannot_be_resumed(store):
    """ERROR is final."""
    agent = Agent(ScriptedModel(), store=store)
    run = await agent.step(agent.start("go"))
    await agent.cancel(run.id)
    done = await agent.resume(run.id)
    assert done.stop_reason is StopReason.CANCELLED
    assert await agent.finish(done) is done
