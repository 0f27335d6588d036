"""What a tool may know of its call: progress to whoever watches, how long it has, and whether it is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from agentfsm import Agent, Limits, Outcome, Run, RunContext, State, ToolEvent, ToolEventType, tool
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.run_context import CancelFlag
from tests.support.checks import HANG_S, results_of, settled, sound, virtually

Event = Any


async def watched(agent: Agent, prompt: str = "go", **options: Any) -> tuple[Run, list[ToolEvent]]:
    """Run it while somebody watches, and return the events of its tools."""
    with anyio.fail_after(HANG_S):
        async with agent.stream(prompt, **options) as stream:
            events = [event async for event in stream]
    return stream.run, [event for event in events if isinstance(event, ToolEvent)]


def progress(events: list[ToolEvent]) -> list[str]:
    """What was told of progress."""
    return [event.message for event in events if event.type is ToolEventType.PROGRESS]


# Progress


def plain(ctx: RunContext[Any]) -> str:
    """Tell from a thread of its own."""
    for part in ("a third", "two thirds"):
        ctx.progress(part)
    return "done"


async def asynchronous(ctx: RunContext[Any]) -> str:
    """Tell from the event loop, awaited or not."""
    await ctx.progress("a third")
    ctx.progress("two thirds")
    return "done"


async def with_a_helper(ctx: RunContext[Any]) -> str:
    """Tell from a thread that an async tool uses, while nothing else happens in the event loop."""

    def help_out() -> None:
        ctx.progress("a third")
        ctx.progress("two thirds")

    await anyio.to_thread.run_sync(help_out)
    return "done"


async def with_tasks(ctx: RunContext[Any]) -> str:
    """Tell from a task of its own."""

    async def tell() -> None:
        await ctx.progress("a third")
        await ctx.progress("two thirds")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
    return "done"


@pytest.mark.parametrize("function", [plain, asynchronous, with_a_helper, with_tasks])
@pytest.mark.parametrize("options", [{}, {"read_only": True}], ids=str)
async def test_progress_is_told_from_wherever_the_tool_works(store, function, options):
    """In order, with its call and its turn, between the call's start and its end."""
    acting = tool(name="act", **options)(function)
    agent = Agent(ScriptedModel(say("", call("act")), "done"), tools=[acting], store=store)
    run, events = await watched(agent)
    assert run.output == "done"
    assert progress(events) == ["a third", "two thirds"]
    kinds = [event.type.value for event in events]
    assert kinds == ["tool_queued", "tool_started", "tool_progress", "tool_progress", "tool_completed", "queue_drained"]
    assert {(event.call_id, event.turn, event.run_id) for event in events[:-1]} == {("t1.0", 1, run.id)}


@pytest.mark.parametrize("function", [plain, asynchronous, with_a_helper, with_tasks])
async def test_progress_where_nobody_watches_is_nothing(store, function):
    """The tool need not know."""
    agent = Agent(ScriptedModel(say("", call("act")), "done"), tools=[tool(name="act")(function)], store=store)
    assert results_of((await agent.run("go")).messages)[0].content == "done"


async def test_progress_is_not_journalled(store):
    """It is for whoever watches, and no fact of the run."""
    agent = Agent(ScriptedModel(say("", call("act")), "done"), tools=[tool(name="act")(asynchronous)], store=store)
    run, _ = await watched(agent)
    assert "two thirds" not in repr(await agent.history(run.id))
    await sound(agent, run)


async def test_a_thread_that_outlived_its_call_tells_nothing_more(store):
    """Its call has ended for all who watch: nothing comes behind its end, and no later turn gets the blame."""
    resume_from, told = threading.Event(), threading.Event()

    @tool(timeout_s=0.05, read_only=True)
    def slow(ctx: RunContext[Any]) -> None:
        resume_from.wait(HANG_S)
        ctx.progress("too late")
        told.set()

    @tool(read_only=True)
    async def wait() -> str:
        resume_from.set()
        await anyio.to_thread.run_sync(partial(told.wait, HANG_S))
        await anyio.lowlevel.checkpoint()
        return "waited"

    agent = Agent(ScriptedModel(say("", call("slow")), say("", call("wait")), "done"), tools=[slow, wait], store=store)
    run, events = await watched(agent)
    assert [each.outcome for each in results_of(run.messages)] == [Outcome.TIMED_OUT, Outcome.DONE]
    assert progress(events) == []


async def test_progress_behind_the_end_of_the_run_harms_nobody(store):
    """A thread that is left behind may tell what it likes, when the stream is long closed."""
    resume_from, ended = threading.Event(), threading.Event()

    @tool(timeout_s=0.05)
    def slow(ctx: RunContext[Any]) -> None:
        resume_from.wait(HANG_S)
        try:
            ctx.progress("too late")
        finally:
            ended.set()

    agent = Agent(ScriptedModel(say("", call("slow")), "done"), tools=[slow], store=store)
    run, _ = await watched(agent)
    resume_from.set()
    settled(ended.is_set)
    assert run.output == "done"


# Deadline


@pytest.mark.parametrize(
    ("own_s", "runs_s", "wanted_s"), [(None, 30.0, 30.0), (None, 7.0, 7.0), (5.0, 30.0, 5.0), (90.0, 30.0, 90.0)]
)
def test_the_deadline_is_when_the_call_is_cut_off(own_s, runs_s, wanted_s):
    """The tool's own time, or the run's for tools that say none; counted from the call's start."""

    async def play(store, clock):
        seen: list[tuple[float, float]] = []

        @tool(timeout_s=own_s)
        async def slow(ctx: RunContext[Any]) -> None:
            seen.append((clock.now(), ctx.deadline))
            await anyio.sleep_forever()

        model = ScriptedModel(say("", call("slow"), call("slow")), "done")
        agent = Agent(model, tools=[slow], store=store, clock=clock, limits=Limits(tool_timeout_s=runs_s))
        run = await agent.run("go")
        assert [deadline - now for now, deadline in seen] == [pytest.approx(wanted_s)] * 2
        ended = [each.completed_at for each in results_of(run.messages)]
        assert ended == [pytest.approx(deadline) for _, deadline in seen]

    virtually(play)


def test_the_run_may_end_before_the_calls_deadline():
    """What is left of the run's own time cuts all calls off, and ends the run."""

    async def play(store, clock):
        @tool
        async def slow() -> None:
            await anyio.sleep_forever()

        agent = Agent(
            ScriptedModel(say("", call("slow"))), tools=[slow], store=store, clock=clock, limits=Limits(seconds=10)
        )
        run = await agent.run("go")
        assert (run.state, run.duration_s) == (State.ERROR, pytest.approx(10))
        assert results_of(run.messages)[0].outcome is Outcome.UNKNOWN

    virtually(play)


# Given up


class Looking:
    """A plain function that looks, until it is told to go on, whether its call was given up."""

    def __init__(self, **options: Any) -> None:
        """Take the tool's options."""
        self.began = threading.Event()
        self.look = threading.Event()
        self.seen: list[bool] = []

        @tool(**options)
        def act(ctx: RunContext[Any]) -> str:
            self.seen.append(ctx.cancelled)
            self.began.set()
            self.look.wait(HANG_S)
            self.seen.append(ctx.cancelled)
            return "done"

        self.tool = act

    def agent(self, store: Any, *more: Any) -> Agent:
        """An agent that calls it."""
        return Agent(ScriptedModel(say("", call("act")), *more), tools=[self.tool], store=store)


async def test_a_call_that_comes_to_its_end_was_not_given_up(store):
    """Neither before nor after."""
    looking = Looking()
    looking.look.set()
    assert (await looking.agent(store, "done").run("go")).output == "done"
    assert looking.seen == [False, False]


async def test_a_plain_function_sees_that_its_time_is_up(store):
    """Its call has its result; it may stop now."""
    looking = Looking(timeout_s=0.05)
    run = await looking.agent(store, "done").run("go")
    looking.look.set()
    settled(lambda: len(looking.seen) == 2)
    assert results_of(run.messages)[0].outcome is Outcome.TIMED_OUT
    assert looking.seen == [False, True]


async def began(looking: Looking) -> None:
    """Wait until the function is at work."""
    await anyio.to_thread.run_sync(partial(looking.began.wait, HANG_S))


async def by_request(agent: Agent, run: Run, looking: Looking, _scope: anyio.CancelScope) -> None:
    """End the run as anybody may."""
    await began(looking)
    await agent.cancel(run.id)


async def by_the_task(_agent: Agent, _run: Run, looking: Looking, scope: anyio.CancelScope) -> None:
    """Cancel the task that drives the run."""
    await began(looking)
    scope.cancel()


@pytest.mark.parametrize("cancel", [by_request, by_the_task])
async def test_a_plain_function_sees_that_its_run_is_cancelled(store, cancel):
    """By request or with its task; the driving call does not wait for it."""
    looking = Looking()
    agent = looking.agent(store)
    run = agent.start("go")
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(cancel, agent, run, looking, scope)
                await agent.finish(run)
    looking.look.set()
    settled(lambda: len(looking.seen) == 2)
    assert looking.seen == [False, True]


def test_each_call_is_given_up_by_itself():
    """A sibling in time has not been."""

    async def play(store, clock):
        seen: dict[str, RunContext[Any]] = {}

        @tool(timeout_s=5, read_only=True)
        async def act(ctx: RunContext[Any], seconds: int) -> str:
            seen[ctx.call_id] = ctx
            await anyio.sleep(seconds)
            return "done"

        calls = say("", call("act", seconds=1), call("act", seconds=9))
        agent = Agent(ScriptedModel(calls, "done"), tools=[act], store=store, clock=clock)
        await agent.run("go")
        assert {call_id: ctx.cancelled for call_id, ctx in seen.items()} == {"t1.0": False, "t1.1": True}

    virtually(play)


# By itself


def test_a_context_can_be_made_in_a_users_own_tests():
    """With nothing but the dependencies; progress goes nowhere, or into a list."""
    told: list[str] = []
    bare: RunContext[str] = RunContext(deps="db")
    bare.progress("nobody hears")
    listening: RunContext[str] = RunContext(deps="db", on_progress=told.append, cancel_flag=CancelFlag(is_set=True))
    listening.progress("half")
    assert (bare.deps, bare.attempt, bare.cancelled, told, listening.cancelled) == ("db", 1, False, ["half"], True)


async def test_progress_may_be_awaited_and_does_not_wait():
    """Also in a context of one's own."""
    told: list[str] = []
    report: Callable[[str], None] = told.append
    ctx: RunContext[None] = RunContext(deps=None, on_progress=report)
    await ctx.progress("half")
    assert told == ["half"]
