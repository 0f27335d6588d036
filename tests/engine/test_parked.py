"""A run that one worker after another dies of is paused, with the reason, until a person resumes it."""

from __future__ import annotations

import os

import pytest

from agentfsm import (
    Agent,
    Limits,
    MisuseError,
    Outcome,
    PendingKind,
    RunContext,
    State,
    StopReason,
    TextPart,
    ask_user,
    tool,
)
from agentfsm.core.events import Failed, Observed
from agentfsm.core.header import Header
from agentfsm.core.run import begin_run
from agentfsm.ports import Lease
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import Wrapped, names, sound
from tests.support.failing_stores import CrashingStore, WorkerKilled
from tests.support.warm_python import PLAIN


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
    mortal = CrashingStore(store, 1_000, written=False)

    @tool(name="crunch", idempotent=True)
    async def dies(_ctx: RunContext[None]) -> str:
        """Crunch."""
        mortal.dead = True
        raise WorkerKilled

    with pytest.raises(WorkerKilled):
        await agent_on(mortal).with_(tools=[dies, ask_user]).run("go", id="mine")
    return "mine"


def is_parked(run) -> bool:
    return [item.kind for item in run.pending] == [PendingKind.CRASH]


async def test_a_run_that_kills_its_workers_is_paused(store):
    """It rests with the number, the place and the call, and says what can be done; nothing is run once more."""
    run_id = await in_flight(store)
    agent = agent_on(Haunted(store, 5), "done")
    rests = await agent.resume(run_id)
    assert is_parked(rests)
    for words in ("5 workers died", "in ACT", "turn 1", "crunch (t1.0)", "resume"):
        assert words in rests.pending[0].description
    assert not rests.calls
    assert names(await agent.history(run_id))[-1] == "Paused"
    await sound(agent, rests)


async def test_a_person_resumes_it(store):
    """What it died of was mended: it goes on where it was, and has all its chances again."""
    run_id = await in_flight(store)
    await agent_on(Haunted(store, 5)).resume(run_id)
    agent = agent_on(store, "done")
    assert is_parked(await agent.load(run_id))
    done = await agent.resume(run_id)
    assert (done.stop_reason, done.output) == (StopReason.COMPLETED, "done")
    assert names(await agent.history(run_id)).count("Resumed") == 1


async def test_another_pause_does_not_hide_why(store):
    """Somebody pauses it as well: the reason stays, beside who that was; one resume ends both."""
    run_id = await in_flight(store)
    agent = agent_on(Haunted(store, 5), "done")
    why = (await agent.resume(run_id)).pending[0].description
    await agent.pause(run_id, by="ann", message="lunch")
    run = await agent.load(run_id)
    assert is_parked(run)
    assert run.pending[0].description == f"{why}; paused by ann: lunch"
    run = await agent_on(store, "done").resume(run_id)
    assert (run.output, run.pending) == ("done", ())


async def test_a_worker_leaves_it_alone(store):
    """No worker resumes it by itself."""
    run_id = await in_flight(store)
    agent = agent_on(Haunted(store, 5))
    rests = await agent.resume(run_id)
    await agent.with_(store=store).worker(until_idle=True)
    assert await agent.load(run_id) == rests


@pytest.mark.parametrize(("crashes", "limit", "parked"), [(4, 5, False), (0, 1, False), (1, 1, True), (7, 5, True)])
async def test_it_takes_as_many_as_the_limit_says(store, crashes, limit, parked):
    """Fewer are chance or a roll-out; the limit is the agent's own."""
    run_id = await in_flight(store)
    agent = agent_on(Haunted(store, crashes), "done", limits=Limits(crashes=limit))
    assert is_parked(await agent.resume(run_id)) == parked


async def test_a_run_between_two_turns_is_paused_too(store):
    """The model's client may be what kills: no call is named then."""
    agent = agent_on(store)
    run = await agent.step(agent.start("go"))
    rests = await agent_on(Haunted(store, 9)).resume(run.id)
    assert "9 workers died while they executed only this run, in THINK, turn 0; find" in rests.pending[0].description


async def test_a_run_that_is_over_is_left_alone(store):
    """Whatever its workers died of, there is nothing left to pause."""
    agent = agent_on(store)
    done = await agent.run("go")
    assert await agent_on(Haunted(store, 9)).resume(done.id) == done


async def test_an_agent_below_is_paused_in_sight_of_its_caller(store):
    """The caller waits for the paused run of its agent, and resuming the caller resumes that as well."""
    child = Agent(ScriptedModel(say("", call("crunch")), "painted"), tools=[crunch], name="painter")
    mortal = CrashingStore(store, 1_000, written=False)

    @tool(name="crunch", idempotent=True)
    async def dies() -> str:
        """Crunch."""
        mortal.dead = True
        raise WorkerKilled

    script = (say("", call("painter", query="x")), "done")
    deadly = child.with_(tools=[dies], model=ScriptedModel(say("", call("crunch"))))
    with pytest.raises(WorkerKilled):
        await Agent(ScriptedModel(*script), tools=[deadly.as_tool()], store=mortal).run("go", id="mine")

    class HauntedBelow(Haunted):
        async def lease(self, run_id: str, **options: object) -> Lease:
            """Pass on; it is the run below that its workers died of."""
            lease = await self.inner.lease(run_id, **options)
            lease.crashes = self.crashes if ".t" in run_id else 0
            return lease

        async def create(self, header: object, **options: object) -> tuple[object, Lease]:
            """Pass on; it is the run below that its workers died of."""
            found, lease = await self.inner.create(header, **options)
            lease.crashes = self.crashes if ".t" in lease.run_id else 0
            return found, lease

    agent = Agent(ScriptedModel("done"), tools=[child.as_tool()], store=store)
    rests = await agent.with_(store=HauntedBelow(store, 5)).resume("mine")
    assert [(item.kind, item.run_id) for item in rests.pending] == [(PendingKind.CRASH, "mine.t1.0")]
    done = await agent.with_(tools=[child.with_(model=ScriptedModel("painted")).as_tool()]).resume("mine")
    assert (done.stop_reason, [r.outcome for r in done.calls]) == (StopReason.COMPLETED, [Outcome.DONE])
    await sound(agent, done)


def test_a_journal_that_ended_with_a_parked_run_stays_so():
    """Before format 4 such a run ended in ERROR: that is final."""
    run = begin_run(Header(id="r", prompt=(TextPart(text="go"),), created_at=1.0))
    over = run.fold([Observed(), Failed(reason=StopReason.PARKED, message="5 workers died over it")])
    assert (over.state, over.stop_reason, over.is_over) == (State.ERROR, StopReason.PARKED, True)


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
    "Crunch numbers."
    lives = [int(each) for each in (folder / "deaths").read_text().split()]
    if lives and lives[0]:
        (folder / "deaths").write_text(" ".join(map(str, [lives[0] - 1, *lives[1:]])))
        os._exit(9)
    (folder / "deaths").write_text(" ".join(map(str, lives[1:])))
    return "crunched"

async def main():
    store = SQLiteStore(folder / "runs.db")
    agent = Agent(FunctionModel(answer), tools=[crunch], store=store, limits=Limits(crashes=2))
    run = await agent.finish(agent.start("go", id="mine"))
    print(run.stop_reason or run.pending[0].kind)

anyio.run(main)
"""


@pytest.mark.parametrize(
    ("deaths", "ending"),
    [("1 1", StopReason.COMPLETED), ("9", PendingKind.CRASH)],
    ids=["one in each turn", "one after another"],
)
def test_workers_that_really_die_are_counted_by_turn(tmp_path, deaths, ending):
    """Processes die in mid-call; a turn that was finished shows that the run does not kill whoever drives it."""
    (tmp_path / "deaths").write_text(deaths)
    codes, said = [], ""
    while not said:
        code, out, errors = PLAIN.run(("-c", WORKER, str(tmp_path)), tmp_path, dict(os.environ))
        assert (code, errors) in {(0, ""), (9, "")}
        codes.append(code)
        said = out.strip()
    assert (said, codes) == (ending, [9, 9, 0])


@pytest.mark.parametrize("crashes", [0, -1, "many", None, float("inf")], ids=str)
def test_the_limit_is_a_number_above_zero(crashes):
    """No run may kill workers without end."""
    with pytest.raises(MisuseError, match="crashes"):
        Limits(crashes=crashes)
