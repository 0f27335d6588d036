"""A run whose script makes calls one by one and at once is killed at each commit and in each call."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent, Limits, PendingKind, RunContext, RunNotFoundError, State, tool
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from agentfsm.scripts import Script
from agentfsm.stores import SQLiteStore
from agentfsm.testing.crash import connect, crash_point

CODE = """
import asyncio, random, time
rates = await asyncio.gather(*[look(city) for city in "AB"])
receipt = await pay("Ann", sum(rates))
await asyncio.sleep(0.001)
await asyncio.gather(put(receipt), put(f"{random.random()} {time.time()}"))
"""


class WritingModel(Model):
    """Runs the script, then answers, in any process."""

    name = "writing"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the call, or the answer."""
        if len(request.messages) > 1:
            return Reply(text="done")
        return Reply(calls=(ProposedCall(id="a", name="run_python", arguments=json.dumps({"code": CODE})),))


def agent_in(folder: str) -> Agent:
    """Return the agent; its tools write into a file, which outlives its processes."""
    book = Path(folder, "book")

    def act(*words: object) -> None:
        crash_point("effect")
        with book.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")
        crash_point("effect")

    @tool(read_only=True)
    async def look(city: str) -> int:
        """Change nothing."""
        crash_point("effect")
        return {"A": 1, "B": 2}[city]

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

    store = SQLiteStore(str(Path(folder, "runs.db")), connect=connect)
    return Agent(WritingModel(), tools=[Script(look, pay, put)], store=store, limits=Limits(crashes=1_000_000))


async def work(folder: str) -> None:
    """Drive the run to its end, or until this process is killed; settle a call whose outcome is unknown."""
    async with agent_in(folder) as agent:
        try:
            run = await agent.load("r")
        except RunNotFoundError:
            run = await agent.run("Go", id="r")
        else:
            run = run if run.is_over else await agent.resume("r", takeover=True)
        for item in run.pending:
            assert item.kind is PendingKind.OUTCOME
            await agent.settle(item.run_id, item.call_id, result="paid")
            await agent.resume("r")


def read_book(folder: str) -> list[str]:
    """Return what was done, oldest first."""
    return Path(folder, "book").read_text().splitlines()


async def check(folder: str) -> None:
    """Check that the run is over, and that each effect is there once, with the arguments of the first attempt."""
    async with agent_in(folder) as agent:
        run = await agent.load("r")
    assert (run.state, run.output) == (State.DONE, "done")
    assert '"error":null' in str(run.messages)
    lines = [line.split(" ", 2) for line in read_book(folder)]
    paid = [line for line in lines if line[0] == "pay"]
    assert len(paid) <= 1
    puts = {tuple(line) for line in lines if line[0] == "put"}
    assert len(puts) == 2  # each has one key and one text, whatever the number of its attempts


def sweep(fork_server, folder: Path, where: str) -> int:
    """Kill one run at each crash point of a kind; return their number."""
    for at in count(1):
        place = folder / f"{where}{at}"
        place.mkdir()
        first = fork_server.run(partial(work, str(place)), kill_at=(where, at))
        if first.killed:
            assert not fork_server.run(partial(work, str(place))).killed
        anyio.run(check, str(place))
        if not first.killed:
            return at
    raise AssertionError


def test_a_script_may_be_killed_in_each_call(fork_server, tmp_path):
    """Before its effect, and after it."""
    assert sweep(fork_server, tmp_path, "effect") > 6


@pytest.mark.soak
def test_a_script_may_be_killed_at_each_commit(fork_server, tmp_path):
    """Before it, and after it."""
    assert sweep(fork_server, tmp_path, "commit") > 20
