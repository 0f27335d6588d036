"""A flow whose workers are killed: each step has its effect once, and so have its compensations."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent, Limits, RunContext, RunNotFoundError, State
from agentfsm.flow import Flow, StepStatus, agent_step, step
from agentfsm.ports import Emit, Model, Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing.crash import connect
from tests.support.effect_book import EffectBook

DONE = ["charge 3", "label bad", "reserve 3"]
UNDONE = [*DONE, "refund 3", "return 3"]


class ReadingModel(Model):
    """Gives the same answer, in any process."""

    name = "reading"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return an answer that is not valid, so that the fallback is used."""
        return Reply(text="It depends.")


def flow_in(folder: str, *, fails: bool) -> Flow:
    """Return the flow."""
    book = EffectBook(folder)
    act, look_up = book.act, book.look_up

    @step(idempotent=True)
    async def put_back(ctx: RunContext[None], order: int) -> None:
        act(ctx.idempotency_key, f"return {order}")

    @step(key=lambda order: f"refund-{order}")
    async def refund(ctx: RunContext[None], order: int) -> None:
        act(ctx.idempotency_key, f"refund {order}")

    @step(on_unknown=look_up, compensate=put_back)
    async def reserve(ctx: RunContext[None], order: int) -> str:
        act(ctx.idempotency_key, f"reserve {order}")
        return ctx.idempotency_key

    @step(depends_on=[reserve], on_unknown=look_up, compensate=refund)
    async def charge(ctx: RunContext[None], order: int, reserve: str) -> str:
        act(ctx.idempotency_key, f"charge {order}")
        return ctx.idempotency_key

    @step(when=lambda order: order > 1_000)
    async def ask(order: int) -> str:
        raise AssertionError

    reader = Agent(ReadingModel(), name="reader")
    read = agent_step(reader, "Read it.", depends_on=[ask], validate={"good", "bad"}, fallback="bad")

    @step(depends_on=[read], idempotent=True)
    async def label(ctx: RunContext[None], reader: str) -> None:
        act(ctx.idempotency_key, f"label {reader}")

    @step(depends_on=[charge, label], read_only=True)
    async def ship(charge: str) -> str:
        if fails:
            raise LookupError("nothing there")
        return "shipped"

    return Flow(
        [reserve, charge, ask, read, label, ship],
        limits=Limits(crashes=1_000_000),
        store=SQLiteStore(str(Path(folder, "runs.db")), connect=connect),
    )


async def work(folder: str, fails: bool) -> None:
    """Drive the run to its end, or until this process is killed."""
    flow = flow_in(folder, fails=fails)
    try:
        run = await flow.load("flow")
    except RunNotFoundError:
        await flow.run({"order": 3}, id="flow")
    else:
        if not run.is_over:
            await flow.resume("flow", takeover=True)
    await flow.store.aclose()


async def check(folder: str, fails: bool) -> None:
    """Check the effects and the statuses of a run that is over."""
    flow = flow_in(folder, fails=fails)
    run = await flow.load("flow")
    assert run.state is (State.ERROR if fails else State.DONE)
    assert (await flow.replay("flow")).is_faithful
    statuses = flow.statuses(run)
    await flow.store.aclose()
    assert sorted(EffectBook(folder).read().values()) == sorted(UNDONE if fails else DONE)
    ends = {"ask": StepStatus.SKIPPED, "ship": StepStatus.FAILED if fails else StepStatus.SUCCESS}
    assert statuses == dict.fromkeys(statuses, StepStatus.SUCCESS) | ends


@pytest.mark.parametrize("kind", ["commit", pytest.param("effect", marks=pytest.mark.soak)])
def test_a_flow_may_be_killed_at_each_event(fork_server, tmp_path, kind):
    """Before and after each commit and each effect, also those of compensations."""
    for at in count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        first = fork_server.run(partial(work, str(folder), True), kill_at=(kind, at))
        if first.killed:
            assert not fork_server.run(partial(work, str(folder), True)).killed
        anyio.run(check, str(folder), True)
        if not first.killed:
            break
    assert at == 11 if kind == "effect" else at > 15


def test_a_flow_without_a_failure_undoes_nothing(fork_server, tmp_path):
    """The same flow, killed within its last effect."""
    assert fork_server.run(partial(work, str(tmp_path), False), kill_at=("effect", 6)).killed
    assert not fork_server.run(partial(work, str(tmp_path), False)).killed
    anyio.run(check, str(tmp_path), False)
