"""A run whose script makes twenty calls, one by one and at once, is killed at each moment, and nothing else differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from agentfsm import Agent, Limits, Outcome, Pending, RunContext, State, tool
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request, Store
from agentfsm.scripts import Script
from agentfsm.testing.crash import crash_point
from tests.support.crash_story import count_statements
from tests.support.killed_runs import drive, kill_at_each

CODE = """
import asyncio, random, time
rates = await asyncio.gather(*[look(city) for city in "ABCDEF"])
receipts = [await pay(f"account-{number}", rate) for number, rate in enumerate(rates[:5])]
await asyncio.sleep(0.001)
try:
    await look("nowhere")
except RuntimeError as error:
    receipts.append(str(error)[:8])
notes = await asyncio.gather(*[put(f"{number} {random.random()} {time.time()}") for number in range(4)])
for note in notes[:3]:
    await put(note)
receipts
"""
CALLS = ["look"] * 6 + ["pay"] * 5 + ["sleep", "look"] + ["put"] * 7
ANSWER = json.dumps({"printed": "", "result": [*["paid"] * 5, "KeyError"], "error": None}, separators=(",", ":"))


class WritingModel(Model):
    """Runs the script, then answers with its result, in any process."""

    name = "writing"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the call, or the answer."""
        if len(request.messages) > 1:
            return Reply(text=request.messages[-1].content)
        return Reply(calls=(ProposedCall(id="a", name="run_python", arguments=json.dumps({"code": CODE})),))


def agent_on(store: Store, place: Path) -> Agent:
    """Return the agent; its tools write into a file, which outlives its processes."""

    def act(*words: object) -> None:
        crash_point("effect")
        with (place / "book").open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")
        crash_point("effect")

    @tool(read_only=True)
    async def look(city: str) -> int:
        """Change nothing."""
        crash_point("effect")
        return {"A": 1, "B": 2, "C": 3, "D": 4, "E": 5, "F": 6}[city]

    @tool
    async def pay(ctx: RunContext, account: str, cents: int) -> str:
        """Act once."""
        act("pay", ctx.idempotency_key, account, cents)
        return "paid"

    @tool(idempotent=True)
    async def put(ctx: RunContext, text: str) -> str:
        """Write what another try would write likewise."""
        act("put", ctx.idempotency_key, text)
        return text

    return Agent(WritingModel(), tools=[Script(look, pay, put)], store=store, limits=Limits(crashes=1_000_000))


def know(_item: Pending) -> str:
    """Say as a person that the payment was made."""
    return "paid"


async def work(store_of: Callable[[], Store], place: Path) -> None:
    """Drive the run to its end, or until this process is killed."""
    count_statements()
    await drive(agent_on(store_of(), place), place.name, know)


async def check(store_of: Callable[[], Store], place: Path) -> None:
    """Check that the answer and the audit are the same wherever the run was killed, and that no effect is repeated."""
    async with agent_on(store_of(), place) as agent:
        run = await agent.load(place.name)
        outer, *calls = await agent.audit(place.name)
    assert (run.state, run.output) == (State.DONE, ANSWER)
    assert (outer.tool, outer.status, [call.tool for call in calls]) == ("run_python", Outcome.DONE, CALLS)
    assert [call.tool for call in calls if call.status is not Outcome.DONE] == ["look"]
    assert len({call.key for call in calls}) == len(calls)
    done = [line.split(" ", 2) for line in (place / "book").read_text().splitlines()]
    paid = [key for name, key, _text in done if name == "pay"]
    assert len(paid) == len(set(paid)) <= 5
    lost = {call.key for call in calls if call.tool == "pay"} - set(paid)
    assert len(lost) <= 1  # killed before its effect, and then settled
    written = {(key, text) for name, key, text in done if name == "put"}
    assert len(written) == 7  # each key has one text, whatever the number of its attempts


SOAK = pytest.mark.soak
EACH = [
    pytest.param(store, kind, 1, marks=SOAK)
    for store, kinds in (
        ("sqlite", ("effect", "commit", "await")),
        ("postgres", ("effect", "commit", "await")),
        ("redis", ("effect", "await")),
    )
    for kind in kinds
]


@pytest.mark.parametrize(
    ("store_of", "kind", "apart"),
    [("sqlite", "effect", 17), ("postgres", "commit", 60), ("redis", "effect", 19), *EACH],
    indirect=["store_of"],
)
def test_a_script_may_be_killed_at_each_moment(fork_server, folder, store_of, kind, apart):
    """In each call before and after its effect, before and after each commit, and at each await."""
    at = kill_at_each(fork_server, folder, partial(work, store_of), partial(check, store_of), kind, apart=apart)
    assert at > {"effect": 30, "commit": 60, "await": 40}[kind], at
