"""A payment agent is killed during its calls, and two other processes finish its run.

The processes and the kill -9 are real, and files stand for the bank and the post office. The model is a script, so no
API key is needed. For a real model, give `Agent` the string "openai:gpt-5.4-mini" instead.
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
# Folder of the runs and of two files that stand for external systems: the bank and the post office.
FOLDER = Path(os.environ.get("CRASH_FOLDER", "."))


def write(book: str, key: str, effect: str) -> None:
    """Record an effect in the file of an external system."""
    with (FOLDER / book).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"key": key, "effect": effect}) + "\n")


def read(book: str) -> list[dict[str, str]]:
    """Return the effects in the file of an external system."""
    path = FOLDER / book
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@tool(read_only=True)  # it changes nothing, so it may be repeated
async def look_up(order: int) -> str:
    """Look up an order.

    Args:
        order: Number of the order.
    """
    print(f"    look_up({order}) runs")
    return f"order {order}: 17.00 EUR from account DE02"


@tool(idempotent=True)  # the post office ignores a key that it knows, so it may be repeated
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


@tool  # not declared as repeatable, so a person decides
async def pay(ctx: RunContext[None], account: str, cents: int) -> str:
    """Pay money.

    Args:
        ctx: Knows the key of the call.
        account: Account of the recipient.
        cents: Amount in cents, 1 or more.
    """
    print(f"    pay({account}, {cents}) runs: the money is on its way ...")
    write("bank.jsonl", ctx.idempotency_key, f"{cents} cents to {account}")
    if "KILL" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"


def think(request: Request) -> Reply | str:
    """Reply as the model: first with three calls, then with an answer about their results."""
    results = [message for message in request.messages if isinstance(message, ToolResult)]
    if not results:
        calls = {
            "look_up": {"order": 17},
            "write_letter": {"text": "Your refund is on its way."},
            "pay": {"account": "DE02", "cents": 1700},
        }
        proposed = [ProposedCall(id=name, name=name, arguments=json.dumps(each)) for name, each in calls.items()]
        return Reply(calls=tuple(proposed))
    return f"Order 17 is refunded. The result of the payment: {results[-1].text!r}"


AGENT = Agent(
    FunctionModel(think),
    tools=[look_up, write_letter, pay],
    name="refunds",
    store=SQLiteStore(FOLDER / "runs.db"),
)


def show(run: Run) -> None:
    """Print the state of a run."""
    print(f"    the run is in {run.state.upper()}", end="")
    print(f" and waits for the {run.pending[0].kind} of {run.pending[0].tool}" if run.pending else "")


async def first() -> None:
    """Begin the run. This process is killed before the run ends."""
    await AGENT.run("Refund order 17", id=RUN)


async def second() -> None:
    """Take the run over."""
    run = await AGENT.resume(RUN)
    show(run)
    for entry in run.open:
        print(f"    {entry.call.name:<13}{entry.phase:<9} key {entry.call.key}")


async def third() -> None:
    """Record the outcome that the bank reports, and finish the run."""
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
    """Run one of the three functions in its own process, and return the exit code."""
    command = [sys.executable, __file__, name]
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode  # noqa: S603  our own file


def announce(text: str) -> None:
    """Print the next part of the story."""
    print(f"\n{text}", flush=True)


def main() -> None:
    """Run the three processes, and print the effects."""
    with tempfile.TemporaryDirectory() as folder:
        world = {"CRASH_FOLDER": folder}
        announce("1. A worker begins. The model asks for three calls; the worker is killed while the third one pays.")
        ended = process("first", KILL="yes", **world)
        print(f"    killed by signal {-ended}")
        announce("2. Another worker takes over. Finished calls are kept. It is unknown whether the payment was made,")
        print("   and its tool is not declared as repeatable. So the run waits for a person.")
        process("second", **world)
        announce("3. A person asks the bank and records the outcome, and a third worker finishes the run.")
        process("third", **world)
        announce("The effects in the external systems:")
        for book in ("post.jsonl", "bank.jsonl"):
            for line in (Path(folder) / book).read_text(encoding="utf-8").splitlines():
                print(f"    {book:<12}{line}")
        print("One letter, one payment; the model knows the outcome, and every step is in the journal.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run({"first": first, "second": second, "third": third}[sys.argv[1]])
    else:
        main()
