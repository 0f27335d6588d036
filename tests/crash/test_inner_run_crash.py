"""A call whose function starts runs is killed at each commit and each effect: the repeated call resumes its runs."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent, Limits, RunContext, RunNotFoundError, State, tool
from agentfsm.core.run_ids import find_caller
from agentfsm.flow import Flow, step
from agentfsm.ports import ALL_RUNS, Emit, Model, ProposedCall, Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing.crash import connect
from tests.support.effect_book import EffectBook


class PayingModel(Model):
    """Pays once and says so, in any process."""

    name = "paying"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the call, or the answer once there is a result."""
        if len(request.messages) == 1:
            return Reply(calls=(ProposedCall(id="a", name="pay", arguments="{}"),))
        return Reply(text="paid")


def flow_in(folder: str) -> Flow:
    """Return a flow of one step, which has two runs of an agent pay, one of them in a thread."""
    book = EffectBook(folder)
    store = SQLiteStore(str(Path(folder, "runs.db")), connect=connect)

    @tool(on_unknown=book.look_up)
    async def pay(ctx: RunContext[None]) -> str:
        """Pay."""
        book.act(ctx.idempotency_key, "pay")
        return ctx.idempotency_key

    limits = Limits(crashes=1_000_000)
    payer = Agent(PayingModel(), name="payer", tools=[pay], store=store, limits=limits)

    @step(idempotent=True)
    async def order() -> str:
        return (await payer.run("Pay Ann")).answer

    @step(idempotent=True, depends_on=[order])
    def again(order: str) -> str:
        return payer.run_sync("Pay Bob").answer

    return Flow([order, again], limits=limits, store=store)


async def work(folder: str) -> None:
    """Drive the run to its end, or until this process is killed."""
    flow = flow_in(folder)
    try:
        run = await flow.load("flow")
    except RunNotFoundError:
        await flow.run({}, id="flow")
    else:
        if not run.is_over:
            await flow.resume("flow", takeover=True)
    await flow.store.aclose()


async def check(folder: str) -> None:
    """Check that each step has started one run, which has paid once."""
    flow = flow_in(folder)
    run = await flow.load("flow")
    assert (run.state, run.output) == (State.DONE, '{"again": "paid"}')
    rows = [row for row in await flow.store.runs(ALL_RUNS) if row.id != "flow"]
    assert sorted(str(find_caller(row.id)) for row in rows) == [
        f"CallOfRun(run_id='flow', call_id='p1.{n}')" for n in (1, 2)
    ]
    assert {row.state for row in rows} == {State.DONE}
    await flow.store.aclose()
    assert list(EffectBook(folder).read().values()) == ["pay", "pay"]


@pytest.mark.parametrize("kind", ["commit", pytest.param("effect", marks=pytest.mark.soak)])
@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.soak)])
def test_a_call_that_starts_runs_may_be_killed(fork_server, folder, kind, backend):
    """Before and after each commit, of the flow as well as of the runs in it, and each effect."""
    for at in count(1):
        place = folder / str(at)
        place.mkdir()
        first = fork_server.run(partial(work, str(place)), kill_at=(kind, at), backend=backend)
        if first.killed:
            assert not fork_server.run(partial(work, str(place)), backend=backend).killed
        anyio.run(check, str(place))
        if not first.killed:
            break
    assert at == 5 if kind == "effect" else at > 10
