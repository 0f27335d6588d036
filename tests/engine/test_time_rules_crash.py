"""Rules over time after a crash: what they know is read from the journals, and is that of a run that was not killed."""

from __future__ import annotations

import contextlib

import attrs
import pytest

from agentfsm import Agent, AssistantMessage, RunNotFoundError, tool
from agentfsm.core.value import Value
from agentfsm.guards import CallGuard, at_most, before, never, only_if
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, call, say
from tests.support.checks import names
from tests.support.failing_stores import CrashingStore, WorkerKilled

RULES = (
    before("pay", "verify", same="account"),
    at_most(2, "pay", same="account"),
    never("finish", after="lock", until="unlock"),
    only_if("finish", outcome="pay"),
)


@attrs.frozen
class Probe(CallGuard, Value):
    """Notes what the rules know when the last call is decided on."""

    seen: list[object] = attrs.field(factory=list, eq=False)

    def concerns(self, tool):
        return tool.name == "finish"

    def reads_calls(self):
        return True

    def decide(self, call):
        self.seen.append([describe(call.history.fold(rule)) for rule in RULES])

    def for_sub_agent(self, header):
        return self


def describe(state):
    """Return the state of a rule without times."""
    if isinstance(state, dict):
        return dict(sorted(state.items()))
    return [
        {
            value: sorted((run_id, moment.place) for run_id, moment in runs.items())
            for value, runs in sorted(each.items())
        }
        for each in (state.forbidden, state.permitted)
    ]


def by_turn(*script):
    """Return a model that plays the line of its turn, also in another process."""
    return FunctionModel(lambda request: script[sum(isinstance(m, AssistantMessage) for m in request.messages)])


def build(store):
    made, probe = [], Probe()

    @tool(read_only=True)
    async def verify(account: str) -> str:
        """Verify an account."""
        return "verified"

    @tool(idempotent=True, requires_approval=lambda a: a.cents > 5)
    async def pay(account: str, cents: int = 1) -> str:
        """Pay."""
        made.append(cents)
        return "paid"

    @tool(idempotent=True)
    async def lock() -> str:
        """Lock."""
        return "locked"

    @tool(idempotent=True)
    async def unlock() -> str:
        """Unlock."""
        return "unlocked"

    @tool(idempotent=True)
    async def finish() -> str:
        """Finish."""
        return "finished"

    helper = (say("", call("verify", account="A"), call("lock")), say("", call("pay", account="A")), "helped")
    clerk = Agent(by_turn(*helper), tools=[verify, pay, lock], name="clerk").as_tool()
    script = (
        say("", call("clerk", query="help")),
        say("", call("pay", account="A", cents=9), call("unlock")),
        say("", call("pay", account="A", cents=2)),
        say("", call("finish")),
        "done",
    )
    tools = [clerk, pay, lock, unlock, finish]
    return Agent(by_turn(*script), tools=tools, store=store, guards=[*RULES, probe]), probe, made


async def play(store, mortal, run_id):
    """Run until the worker is killed, then to the end by another one; return the agent, what it knew and did."""
    agent, _, begun = build(mortal)
    with contextlib.suppress(WorkerKilled):
        run = await agent.run("go", id=run_id)
        await approve(agent, run)
        await agent.resume(run_id)
    agent, probe, made = build(store)
    try:
        run = await agent.resume(run_id)
    except RunNotFoundError:
        return agent, None, []
    if run.pending:
        await approve(agent, run)
        run = await agent.resume(run_id)
    assert run.output == "done"
    return agent, probe.seen, [*begun, *made]


async def approve(agent, run):
    for item in run.pending:
        await agent.approve(run.id, item.call_id, by="ann")


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.soak)])
async def test_a_worker_that_is_killed_at_any_append(written, every):
    """Between verdict and start, while a person is asked, and in a sub-agent: the rules know the same."""
    store = MemoryStore()
    wanted_agent, wanted_probe, _ = build(store)
    run = await wanted_agent.run("go", id="run-0")
    await approve(wanted_agent, run)
    await wanted_agent.resume("run-0")
    [wanted, *again] = wanted_probe.seen
    assert all(each == wanted for each in again)
    assert wanted[1] == {"a": 2}
    for at in range(3, 100, every):
        mortal, run_id = CrashingStore(store, at, written=written), f"run-{at}"
        agent, seen, made = await play(store, mortal, run_id)
        if seen is None:
            continue
        told = str(wanted).replace("run-0", run_id)
        assert {str(each) for each in seen} <= {told}, at
        assert set(made) == {1, 9}, at
        assert "Guarded" in names(await agent.history(run_id))
        if not mortal.dead:
            break
    assert at > 20
