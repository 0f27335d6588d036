"""A program that is killed at each append around a login: the order is made once, and nobody logs in twice."""

import contextlib

import attrs
import pytest

from agentfsm import PendingKind, State, ToolResult
from agentfsm.core import events as e
from agentfsm.logins import MemoryTokens
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, call, say
from tests.support.failing_stores import CrashingStore, WorkerKilled
from tests.support.oauth_server import log_in


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
async def test_killed_at_each_append(shop, program, written):
    """Before the start of the call a kill costs nothing. After it, a person is asked how the call ended."""

    def answer(request):
        is_over = any(isinstance(message, ToolResult) for message in request.messages)
        return "done" if is_over else say("", call("order", url=f"{shop.url}/orders"))

    async def drive(agent, run):
        while not run.is_over and run.pending[0].kind is PendingKind.LOGIN:
            await program.come_back(agent, log_in(shop, run.pending[0].questions[0].url))
            run = await agent.resume(run.id)
        return run

    store, died, lost = SQLiteStore(program.folder / "runs.db"), 0, 0
    for at in range(1, 30):
        shop.reset()
        program.settings = attrs.evolve(program.settings, tokens=MemoryTokens())
        mortal, name = CrashingStore(store, at, written=written), f"run-{at}"
        dying = program.go_on(store=mortal).with_(model=FunctionModel(answer))
        with contextlib.suppress(WorkerKilled):
            await drive(dying, await dying.run("order it", id=name, user="ann"))
        fresh = program.go_on(store=store).with_(model=FunctionModel(answer))
        run = await drive(fresh, await fresh.resume(name))
        assert shop.seen["exchanged"] == 1
        if run.is_over:
            assert (run.state, len(shop.orders)) == (State.DONE, 1)
        else:  # it had started, and may have ordered: it is not repeated without asking
            lost += 1
            assert run.pending[0].kind is PendingKind.OUTCOME
            assert any(isinstance(each, e.ToolStarted) for each in await fresh.history(name))
            assert len(shop.orders) <= 1
        if not mortal.dead:
            break
        died += 1
    await store.aclose()
    assert died > 4
    assert lost <= 2
