"""`agentfsm runs --stranded` and `agentfsm metrics`: runs that no worker takes are named, with the reason."""

import time

import anyio
import attrs

from agentfsm import Agent
from agentfsm.ports import SystemClock
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel


@attrs.frozen
class TwoMinutesAgo(SystemClock):
    """A clock that is two minutes late."""

    def now(self):
        return time.time() - 120


async def submit_two(path):
    """Submit a run without a release, and one of a release, two minutes ago."""
    async with Agent(ScriptedModel(), name="clerk", store=SQLiteStore(path, clock=TwoMinutesAgo())) as agent:
        await agent.submit("go", id="plain")
        await agent.submit("go", id="of-1", release="1")


def test_stranded_runs_are_listed_and_counted(here):
    """A line for each with the reason; the fields of a run and the reason as JSON; a count by reason."""
    path = str(here.folder / "late.db")
    anyio.run(submit_two, path)
    lines = here("runs", "--stranded", "--store", path).splitlines()
    assert [line.split("  ready since ")[0] for line in lines] == ["of-1", "plain"]
    assert lines[0].endswith(": no worker has release '1' of agent 'clerk': start one, or cancel the run")
    rows = here.json("runs", "--stranded", "--store", path)["runs"]
    assert [(each["id"], each["stranded"]["reason"]) for each in rows] == [("of-1", "release"), ("plain", "no_worker")]
    assert here("runs", "--stranded", "--agent", "other", "--store", path) == ""
    assert here.err.endswith("no runs are stranded\n")
    assert here.json("metrics", "--store", path)["stranded"] == {"no_worker": 1, "release": 1}
    shown = here("metrics", "--store", path)
    assert "stranded now         1 no_worker, 1 release; `agentfsm runs --stranded` names them\n" in shown
