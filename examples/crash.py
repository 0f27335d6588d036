"""A payment agent is killed in the middle of its calls, and two other processes take its run to its end.

It runs without a key, and what it shows is real: the processes, the kill -9, the files that play the outside world.
The model is a script; give `Agent` the string "openai:gpt-4o" instead, and it is a real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from agentfsm import Agent, Run, RunContext, ToolResult, tool
from agentfsm.ports import ProposedCall, Reply, Request
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel

RUN = "refund-17"
# Holds the runs, and two books of the outside world: the bank's and the post office's.
FOLDER = Path(os.environ.get("CRASH_FOLDER", "."))


def write(book: str, key: str, what: str) -> None:
    """Note in a book of the outside world that something has happened there."""
    with (FOLDER / book).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"key": key, "what": what}) + "\n")


def read(book: str) -> list[dict[str, str]]:
    """Read a book of the outside world."""
    path = FOLDER / book
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@tool(read_only=True)  # changes nothing, so it may simply be run again
async def look_up(order: int) -> str:
    """Look up an order.

    Args:
        order: Its number.
    """
    print(f"    look_up({order}) runs")
    return f"order {order}: 17.00 EUR from account DE02"


@tool(idempotent=True)  # the post office knows each key, so running it again does nothing more
async def write_letter(ctx: RunContext[None], text: str) -> str:
    """Write to the customer.

    Args:
        ctx: Knows the key of the call.
        text: The letter.
    """
    print("    write_letter(...) runs")
    if all(entry["key"] != ctx.idempotency_key for entry in read("post.jsonl")):
        write("post.jsonl", ctx.idempotency_key, text)
    return "sent"


@tool  # no promise is made, so it is never repeated unasked
async def pay(ctx: RunContext[None], account: str, cents: int) -> str:
    """Pay money.

    Args:
        ctx: Knows the key of the call.
        account: Whom to pay.
        cents: How much.
    """
    print(f"    pay({account}, {cents}) runs: the money is on its way ...")
    write("bank.jsonl", ctx.idempotency_key, f"{cents} cents to {account}")
    if "KILL" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"


def think(request: Request) -> Reply | str:
    """Play the model: three calls at once, then an answer to what became of them."""
    results = [message for message in request.messages if isinstance(message, ToolResult)]
    if not results:
        calls = {
            "look_up": {"order": 17},
            "write_letter": {"text": "Your refund is on its way."},
            "pay": {"account": "DE02", "cents": 1700},
        }
        proposed = [ProposedCall(id=name, name=name, arguments=json.dumps(each)) for name, each in calls.items()]
        return Reply(calls=tuple(proposed))
    return f"Order 17 is refunded. Of the payment I was told: {results[-1].text!r}"


AGENT = Agent(
    FunctionModel(think),
    tools=[look_up, write_letter, pay],
    name="refunds",
    store=SQLiteStore(FOLDER / "runs.db"),
)


def show(run: Run) -> None:
    """Print how a run stands."""
    print(f"    the run is in {run.state.upper()}", end="")
    print(f" and waits for the {run.pending[0].kind} of {run.pending[0].tool}" if run.pending else "")


async def first() -> None:
    """Begin the run; this process does not live to see its end."""
    await AGENT.run("Refund order 17", id=RUN)


async def second() -> None:
    """Take the run over."""
    run = await AGENT.resume(RUN)
    show(run)
    for entry in run.open:
        print(f"    {entry.call.name:<13}{entry.phase:<9} key {entry.call.key}")


async def third() -> None:
    """Say what the bank has said, and take the run to its end."""
    [entry] = read("bank.jsonl")
    call = next(item.call_id for item in (await AGENT.load(RUN)).pending)
    await AGENT.settle(RUN, call, result=f"paid, the bank has it under {entry['key']}", by="ann")
    run = await AGENT.resume(RUN)
    show(run)
    print(f"    answer: {run.output}")
    for number, event in enumerate(await AGENT.history(RUN), 1):
        about = getattr(event, "call_id", "") or getattr(getattr(event, "result", None), "call_id", "")
        by = getattr(event, "by", "")
        print(f"    {number:>2} {type(event).__name__:<14}{about}{f'  by {by}' if by else ''}")


def process(name: str, **environment: str) -> int:
    """Run one of the above in a process of its own; return how it ended."""
    command = [sys.executable, __file__, name]
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode  # noqa: S603  our own file


def tell(text: str) -> None:
    """Print what comes next."""
    print(f"\n{text}", flush=True)


def main() -> None:
    """Tell the story."""
    with tempfile.TemporaryDirectory() as folder:
        world = {"CRASH_FOLDER": folder}
        tell("1. A worker begins. The model asks for three calls; the worker is killed while the third one pays.")
        ended = process("first", KILL="yes", **world)
        print(f"    killed by signal {-ended}")
        tell("2. Another worker takes over. What was done is kept. The payment is not repeated: nobody knows whether")
        print("   it was made, and its tool does not say that it may be run twice. So the run waits for a person.")
        process("second", **world)
        tell("3. A person asks the bank, says what it said, and a third worker takes the run to its end.")
        process("third", **world)
        tell("The books of the outside world:")
        for book in ("post.jsonl", "bank.jsonl"):
            for line in (Path(folder) / book).read_text(encoding="utf-8").splitlines():
                print(f"    {book:<12}{line}")
        print("One letter, one payment; the model was told what happened, and every step is in the journal.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run({"first": first, "second": second, "third": third}[sys.argv[1]])
    else:
        main()
