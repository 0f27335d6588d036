"""A run that costs one worker after another is parked, with the reason, and not tried for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest
from checks import Wrapped, names, sound
from test_crash import Killed, Mortal

from agentfsm import Agent, Limits, MisuseError, Outcome, RunContext, State, StopReason, ask_user, tool
from agentfsm.ports import Lease
from agentfsm.testing.models import ScriptedModel, call, say


class Haunted(Wrapped):
    """A store that knows of workers that never gave the lease of a run back; agents below are another matter."""

    def __init__(self, inner: object, crashes: int) -> None:
        """Take the real store, and how many they were."""
        self.inner, self.crashes = inner, crashes

    async def lease(self, run_id: str, **options: object) -> Lease:
        """Pass on."""
        lease = await self.inner.lease(run_id, **options)
        lease.crashes = self.crashes if ".t" not in run_id else 0
        return lease


@tool(idempotent=True)
async def crunch() -> str:
    """Crunch."""
    return "crunched"


def agent_on(store, *script: object, **options: object) -> Agent:
    lines = script or (say("", call("crunch")), "done")
    return Agent(ScriptedModel(*lines), tools=[crunch, ask_user], store=store, **options)


async def in_flight(store) -> str:
    """Kill a worker in mid-call."""
    mortal = Mortal(store, 1_000, written=False)

    @tool(name="crunch", idempotent=True)
    async def dies(_ctx: RunContext[None]) -> str:
        """Crunch."""
        mortal.dead = True
        raise Killed

    with pytest.raises(Killed):
        await agent_on(mortal).with_(tools=[dies, ask_user]).run("go", id="mine")
    return "mine"


async def test_a_run_that_kills_its_workers_is_parked(store):
    """It ends with the number, the place and the call, and says what can be done; nothing is run once more."""
    run_id = await in_flight(store)
    agent = agent_on(Haunted(store, 5), "done")
    done = await agent.resume(run_id)
    assert (done.state, done.stop_reason) == (State.ERROR, StopReason.PARKED)
    for words in ("5 workers died", "in ACT", "turn 1", "crunch (t1.0)", "fork"):
        assert words in done.stop_message
    assert [r.outcome for r in done.calls] == [Outcome.UNKNOWN]
    assert names(await agent.history(run_id))[-1] == "Failed"
    await sound(agent, done)


@pytest.mark.parametrize(("crashes", "limit", "parked"), [(4, 5, False), (0, 1, False), (1, 1, True), (7, 5, True)])
async def test_it_takes_as_many_as_the_limit_says(store, crashes, limit, parked):
    """Fewer are chance or a roll-out; the limit is the agent's own."""
    run_id = await in_flight(store)
    agent = agent_on(Haunted(store, crashes), "done", limits=Limits(crashes=limit))
    done = await agent.resume(run_id)
    assert (done.stop_reason is StopReason.PARKED) == parked


async def test_a_run_between_two_turns_is_parked_too(store):
    """The model's client may be what kills: no call is named then."""
    agent = agent_on(store)
    run = await agent.step(agent.start("go"))
    done = await agent_on(Haunted(store, 9)).resume(run.id)
    assert done.stop_reason is StopReason.PARKED
    assert "9 workers died over it in THINK, turn 0; see" in done.stop_message


async def test_a_run_that_is_over_is_left_alone(store):
    """Whatever its workers died of, there is nothing left to park."""
    agent = agent_on(store)
    done = await agent.run("go")
    assert await agent_on(Haunted(store, 9)).resume(done.id) == done


async def test_the_agents_below_end_with_it(store):
    """No sub-agent goes on, or is asked about, after its caller was parked."""
    child = Agent(ScriptedModel(say("", call("ask_user", question="?"))), tools=[ask_user], name="painter")
    agent = Agent(ScriptedModel(say("", call("painter", query="x"))), tools=[child.as_tool()], store=store)
    await agent.run("go", id="mine")
    done = await agent.with_(store=Haunted(store, 5)).resume("mine")
    assert done.stop_reason is StopReason.PARKED
    below = await agent.load("mine.t1.0")
    assert (below.stop_reason, below.is_over) == (StopReason.CANCELLED, True)
    await sound(agent, done)


WORKER = """
import os, sys
from pathlib import Path
import anyio
from agentfsm import Agent, Limits, tool
from agentfsm.ports import ProposedCall, Reply
from agentfsm.stores import SQLiteStore
from agentfsm.testing.models import FunctionModel

folder = Path(sys.argv[1])

def answer(request):
    turn = sum(message.text.endswith("crunched") for message in request.messages)
    return "done" if turn == 2 else Reply(calls=(ProposedCall(id="p", name="crunch", arguments="{}"),))

@tool(idempotent=True)
async def crunch():
    lives = [int(each) for each in (folder / "deaths").read_text().split()]
    if lives and lives[0]:
        (folder / "deaths").write_text(" ".join(map(str, [lives[0] - 1, *lives[1:]])))
        os._exit(9)
    (folder / "deaths").write_text(" ".join(map(str, lives[1:])))
    return "crunched"

async def main():
    store = SQLiteStore(folder / "runs.db")
    agent = Agent(FunctionModel(answer), tools=[crunch], store=store, limits=Limits(crashes=2))
    print((await agent.finish(agent.start("go", id="mine"))).stop_reason)

anyio.run(main)
"""


@pytest.mark.parametrize(
    ("deaths", "ending"),
    [("1 1", StopReason.COMPLETED), ("9", StopReason.PARKED)],
    ids=["one in each turn", "one after another"],
)
def test_workers_that_really_die_are_counted_by_turn(tmp_path, deaths, ending):
    """Processes die in mid-call; a turn that was finished shows that the run does not kill whoever drives it."""
    (tmp_path / "deaths").write_text(deaths)
    codes, said = [], ""
    while not said:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) in {(0, ""), (9, "")}
        codes.append(done.returncode)
        said = done.stdout.strip()
    assert (said, codes) == (ending, [9, 9, 0])


@pytest.mark.parametrize("crashes", [0, -1, "many", None, float("inf")], ids=str)
def test_the_limit_is_a_number_above_zero(crashes):
    """No run may kill workers without end."""
    with pytest.raises(MisuseError, match="crashes"):
        Limits(crashes=crashes)
