"""`agentfsm show` and `audit` say where the answer of a run came from."""

import anyio

from agentfsm import Agent, AnswerCache, tool
from agentfsm.models import Tiered
from agentfsm.ports import FinishReason
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say


@tool(read_only=True, cacheable=True)
def look() -> str:
    """Look."""
    return "nothing"


def test_a_repeated_answer_and_the_tiers(here):
    """The run that gave the answer has the tiers and the calls; the one that repeats it names that run."""

    async def drive():
        small = ScriptedModel(say("No.", finish_reason=FinishReason.REFUSAL))
        large = ScriptedModel(say("", call("look")), "Nothing.")
        model = Tiered({"small": small, "large": large}, choose=lambda request: "small")
        store = SQLiteStore(here.folder / ".agentfsm" / "runs.db")
        async with Agent(model, tools=[look], store=store, answer_cache=AnswerCache()) as agent:
            for run_id in ("asked", "again"):
                await agent.run("What is there?", id=run_id, user="ann")

    anyio.run(drive)
    shown = here("show", "asked").splitlines()
    assert "tier     large from turn 1 on: escalated from small: refusal" in shown
    assert not [line for line in shown if line.startswith("answer ")]
    [line] = [line for line in here("show", "again").splitlines() if line.startswith("answer ")]
    assert line.startswith("answer   of run asked, ")
    assert here.json("show", "again")["answered_from"]["run_id"] == "asked"
    assert here.json("show", "asked")["answered_from"] is None
    here("audit", "again")
    assert "the answer is that of run asked" in here.err
    assert here.json("audit", "again") == {"calls": [], "more": False, "answered_from": "asked"}
    assert len(here.json("audit", "asked")["calls"]) == 1
