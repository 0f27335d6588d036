"""A cancel or a pause that comes when a holder of the lease has looked at the inbox, and has not given it back yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest

from agentfsm import Agent, ConflictError, Runs, State, StopReason, StoreError, tool
from agentfsm.core.events import Paused
from agentfsm.core.inbox import Cancel
from agentfsm.ports import Lease, PendingWrite
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import Wrapped, names, sound


@tool(requires_approval=True)
async def pay() -> str:
    """Pay."""
    return "paid"


@attrs.define
class _LateRelease(PendingWrite):
    """A release that is made when it is waited for, after what others do in between."""

    inner: Any
    lease: Lease
    before: Callable[[], Awaitable[object]] | None
    is_done: bool = False

    async def wait(self) -> bool:
        before, self.before = self.before, None
        if before is not None:
            await before()
        return await self.inner.release(self.lease).wait()


class MeddlingStore(Wrapped):
    """A store in which somebody else acts before the next release, as another process may."""

    def __init__(self, inner: Any) -> None:
        """Take the real store."""
        self.inner = inner
        self.before_release: list[Callable[[], Awaitable[object]]] = []

    def release(self, lease: Lease) -> PendingWrite:
        """Give the lease back, after the next act."""
        return _LateRelease(self.inner, lease, self.before_release.pop(0) if self.before_release else None)


def clerk(store: Any, *replies: object, **options: Any) -> Agent:
    """An agent that asks before it pays."""
    model = ScriptedModel(*(replies or (say("", call("pay")), "done")))
    return Agent(model, tools=[pay], store=store, **options)


def cancel(store: Any, run_id: str = "r") -> Callable[[], Awaitable[object]]:
    """Let another client cancel the run."""
    return lambda: Runs(store).cancel(run_id, by="ann")


def pause(store: Any, run_id: str = "r") -> Callable[[], Awaitable[object]]:
    """Let another client pause the run."""
    return lambda: Runs(store).pause(run_id, by="ann")


async def test_a_cancel_while_another_client_pauses(store):
    """The client that pauses holds the lease for a moment: it applies the cancel that came meanwhile."""
    run = await clerk(store).run("go", id="r")
    meddled = MeddlingStore(store)
    meddled.before_release = [cancel(store)]
    await Runs(meddled).pause("r", by="bob")
    over = await Runs(store).load("r")
    assert (over.stop_reason, over.stop_message) == (StopReason.CANCELLED, "cancelled by ann")
    assert names((await Runs(store).history("r"))[run.version :]) == ["Paused", "Failed"]


async def test_a_pause_while_another_client_pauses(store):
    """Both are in the journal, and the inbox is empty."""
    await clerk(store).run("go", id="r")
    meddled = MeddlingStore(store)
    meddled.before_release = [pause(store)]
    await Runs(meddled).pause("r", by="bob")
    assert [event.by for event in await Runs(store).history("r") if isinstance(event, Paused)] == ["bob", "ann"]
    assert await store.inbox("r") == ()


async def test_a_pause_while_another_client_cancels(store):
    """The run is over, whatever comes after."""
    await clerk(store).run("go", id="r")
    meddled = MeddlingStore(store)
    meddled.before_release = [lambda: _expect_conflict(Runs(store).pause("r"))]
    await Runs(meddled).cancel("r", by="bob")
    assert (await Runs(store).load("r")).stop_message == "cancelled by bob"


async def _expect_conflict(act: Awaitable[object]) -> None:
    with pytest.raises(ConflictError, match="is over"):
        await act


@pytest.mark.parametrize("kind", ["cancel", "pause"])
async def test_a_request_while_a_run_goes_to_rest(store, kind):
    """Whoever drove the run applies it, and returns the run as it stands; listeners hear of it."""
    meddled = MeddlingStore(store)
    meddled.before_release = [{"cancel": cancel, "pause": pause}[kind](store)]
    agent, states = clerk(meddled), []
    async with agent.stream("go", id="r") as stream:
        states = [event.state async for event in stream if hasattr(event, "state")]
    run = stream.run
    assert run == await Runs(store).load("r")
    if kind == "cancel":
        assert (run.stop_reason, run.stop_message) == (StopReason.CANCELLED, "cancelled by ann")
        assert states[-1] is State.ERROR
        await sound(clerk(store), run)
    else:
        assert run.paused is not None
        assert not run.is_over
    assert not [row for row in await store.inbox("r") if not isinstance(row.item, Cancel)]


async def test_a_cancel_while_a_step_ends(store):
    """The run after the step is the newest one."""
    meddled = MeddlingStore(store)
    meddled.before_release = [cancel(store)]
    agent = clerk(meddled)
    run = await agent.step(agent.start("go", id="r"))
    assert run.stop_reason is StopReason.CANCELLED
    assert run == await Runs(store).load("r")


async def test_a_cancel_while_a_run_breaks_off(store):
    """The error is raised, and the run is over."""
    meddled = MeddlingStore(store)
    meddled.before_release = [cancel(store)]

    def check(_answer: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await clerk(meddled, "done", output_validators=[check]).run("go", id="r")
    assert (await Runs(store).load("r")).stop_reason is StopReason.CANCELLED


async def test_a_cancel_while_a_stale_run_is_refused(store):
    """The one who is refused held the lease for a moment as well."""
    agent = clerk(store)
    stale = agent.start("go", id="r")
    stale = await agent.step(stale)
    await agent.step(stale)
    meddled = MeddlingStore(store)
    meddled.before_release = [cancel(store)]
    with pytest.raises(ConflictError, match="at version 1"):
        await clerk(meddled).step(stale)
    assert (await Runs(store).load("r")).stop_reason is StopReason.CANCELLED


async def test_a_cancel_while_a_run_is_submitted(store):
    """No worker need come."""
    meddled = MeddlingStore(store)
    meddled.before_release = [cancel(store)]
    run = await clerk(meddled).submit("go", id="r")
    assert run.stop_reason is StopReason.CANCELLED


async def test_a_cancel_while_a_run_is_forked(store):
    """The fork that is returned is the newest one."""
    agent = clerk(store)
    await agent.run("go", id="r")
    meddled = MeddlingStore(store)
    meddled.before_release = [cancel(store, "f")]
    fork = await clerk(meddled).fork("r", id="f")
    assert fork.stop_reason is StopReason.CANCELLED


async def test_a_run_that_is_deleted_at_once(store):
    """Who drove it has what it came to."""
    meddled = MeddlingStore(store)
    agent = clerk(meddled)
    run = await agent.run("go", id="r")
    inbox = meddled.inner.inbox

    class Deleted(Wrapped):
        inner = store

        async def inbox(self, run_id: str) -> Any:
            await store.delete(run_id)
            return await inbox(run_id)

    assert (await clerk(Deleted()).resume(run.id)).is_waiting


async def test_a_store_that_fails_after_the_release(store):
    """What was done is durable: the run is returned, and a request that came late waits for who comes next."""

    class Unread(Wrapped):
        inner = store

        async def inbox(self, run_id: str) -> Any:
            raise StoreError("away")

    assert (await clerk(Unread()).run("go", id="r")).is_waiting
