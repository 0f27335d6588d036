"""No effect by a stale owner: a process that stands still past its lease makes no call, and tools can tell it apart."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import attrs
import pytest

from agentfsm import Agent, LeaseLostError, RunContext, TransientError, tool
from agentfsm.core.events import Event, ToolCutOff, ToolStarted
from agentfsm.engine.execution import journal as journals
from agentfsm.ports import Lease, PendingWrite, Store
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import HANG_S, Wrapped


@attrs.define
class _Stalled(PendingWrite):
    inner: PendingWrite
    stall: Callable[[], None]

    async def wait(self) -> bool:
        written = await self.inner.wait()
        self.stall()
        return written


class Stalling(Wrapped):
    """A store whose process stands still right after the n-th start of a call was written."""

    def __init__(self, inner: Store, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the real store."""
        self.inner = inner
        self.left = at
        self.monkeypatch = monkeypatch

    def append(self, lease: Lease, run: object, events: tuple[Event, ...], **options: object) -> PendingWrite:
        """Pass on."""
        commit = self.inner.append(lease, run, events, **options)
        self.left -= any(isinstance(event, ToolStarted) for event in events)
        return commit if self.left else _Stalled(commit, self.stall)

    def stall(self) -> None:
        """Stand still for so long that every lease has ended."""
        self.left = -1
        self.monkeypatch.setattr(journals, "boot_clock", lambda: math.inf)


def world(store: Store, flaky: bool = False, **options: object) -> tuple[Agent, list[RunContext]]:
    """An agent that pays once, and the calls that its tool has served."""
    seen: list[RunContext] = []

    @tool(**options)
    async def pay(ctx: RunContext[None]) -> str:
        """Pay."""
        seen.append(ctx)
        if flaky and len(seen) == 1:
            raise TransientError("come back later", retry_after_s=0)
        return "paid"

    script = ScriptedModel(say("", call("pay")), *["paid once"] * 3)
    return Agent(script, tools=[pay], store=store), seen


@pytest.mark.parametrize("options", [{}, {"idempotent": True}], ids=["unsafe", "put"])
async def test_who_stands_still_between_the_start_and_the_call_makes_no_call(store, options, monkeypatch):
    """The lease is looked at after the start was written, right before the tool is called; another worker calls it."""
    agent, seen = world(Stalling(store, 1, monkeypatch), **options)
    with anyio.fail_after(HANG_S), pytest.raises(LeaseLostError, match="was suspended"):
        await agent.run("go", id="run")
    assert seen == []
    [taken_back] = [event for event in await agent.history("run") if isinstance(event, ToolCutOff)]
    assert taken_back.undone
    monkeypatch.undo()
    run = await Agent(ScriptedModel("paid once"), tools=list(agent.tools), store=store).resume("run")
    assert (run.output, len(seen)) == ("paid once", 1)


async def test_the_lease_is_looked_at_before_each_attempt(store, monkeypatch):
    """A retry is an effect of its own; what the first attempt did is not taken back."""
    agent, seen = world(Stalling(store, 2, monkeypatch), flaky=True, idempotent=True)
    with anyio.fail_after(HANG_S), pytest.raises(LeaseLostError, match="was suspended"):
        await agent.run("go", id="run")
    assert len(seen) == 1
    assert (await agent.load("run")).open_call("t1.0").attempts == 1


async def test_the_fencing_token_grows_with_each_owner(store):
    """A system that refuses smaller tokens is changed by the newest owner of the run only."""
    held = anyio.Event()
    tokens: list[int] = []

    @tool(idempotent=True)
    async def put(ctx: RunContext[None]) -> str:
        """Write."""
        tokens.append(ctx.fencing_token)
        if len(tokens) < 3:
            held.set()
            await anyio.sleep_forever()
        return "written"

    agent = Agent(ScriptedModel(say("", call("put")), "done"), tools=[put], store=store)
    await agent.submit("go", id="run")
    for _ in range(2):
        held = anyio.Event()
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(agent.resume, "run")
                await held.wait()
                tasks.cancel_scope.cancel()
    run = await agent.resume("run")
    assert run.output == "done"
    assert 0 < tokens[0] < tokens[1] < tokens[2]
