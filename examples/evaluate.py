"""An evaluation with a gate: a baseline, an equal candidate, and one that is 10 % worse; then a run becomes a case.

A model is simulated here, which makes mistakes at a given rate, so no API key is needed. For a real one, give its name.

    python examples/evaluate.py
"""

from __future__ import annotations

import json
from random import Random

import anyio

from agentfsm import Agent, Run, RunContext, ToolResult, tool
from agentfsm.evals import Case, Suite, compare, evaluate, gate
from agentfsm.evals.suite_files import describe_run
from agentfsm.ports.model import Request
from agentfsm.testing.models import FunctionModel, Line, call, say

CASES = 120
RUNS = 3
# Share of orders that are looked up twice.
REPEATS = 0.1


class Shop:
    """The world of one run: the refunds that were booked, in cents by order."""

    def __init__(self, _run: Run | None = None) -> None:
        self.refunds: dict[int, int] = {}


@tool(read_only=True)
def find_order(order: int) -> str:
    """Look up an order, with its total in cents."""
    return json.dumps({"order": order, "cents": 100 + order})


@tool
def refund(ctx: RunContext[Shop], order: int, cents: int) -> str:
    """Book a refund."""
    ctx.deps.refunds[order] = ctx.deps.refunds.get(order, 0) + cents
    return f"refunded {cents} cents of order {order}"


def simulate(seed: int, mistakes: float) -> FunctionModel:
    """Return a model that refunds what was asked for, except for mistakes: a wrong order, or a search too many."""
    streams: dict[str, Random] = {}

    def draw(what: str) -> float:
        """Return the next number of a stream, so that parallel runs do not change one another's luck."""
        return streams.setdefault(what, Random(f"{seed} {what}")).random()  # noqa: S311  a simulation

    def think(request: Request) -> Line | str:
        order = int("".join(filter(str.isdigit, request.messages[0].text)))
        done = [message for message in request.messages if isinstance(message, ToolResult)]
        names = [message.tool for message in done]
        if not done or (names == ["find_order"] and draw(f"search of {order}") < REPEATS):
            return say("", call("find_order", order=order))
        if "refund" not in names:
            wrong = draw(f"refund of {order}") < mistakes
            return say("", call("refund", order=order + wrong, cents=100 + order))
        return f"I have refunded order {order}. The error rate of refunds fell to 3 %."

    return FunctionModel(think)


def is_refunded(run: Run, shop: Shop) -> bool | str:
    """Check the effect, not the words of the answer: the refund of the order was booked once, and no other."""
    order = int("".join(filter(str.isdigit, run.messages[0].text)))
    return shop.refunds == {order: 100 + order} or f"booked: {shop.refunds}"


def build_suite() -> Suite:
    """Return the cases. Both paths are valid: an order may be looked up first, or not at all."""
    paths = [["find_order", "refund"], ["refund"]]
    cases = [
        Case(id=f"order {n}", input=f"Refund order {n}.", paths=paths, check=is_refunded, max_steps=3, tags=["refunds"])
        for n in range(1, CASES + 1)
    ]
    return Suite(cases, name="shop")


async def main() -> None:
    """Evaluate three versions of an agent, and gate two of them."""
    suite = build_suite()
    agent = Agent(simulate(1, mistakes=0.05), tools=[find_order, refund], name="shop", version="1.0")
    baseline = await evaluate(agent, suite, runs=RUNS, deps=Shop)
    print(f"baseline: outcome {baseline.mean():.1%}, path {baseline.mean('tool_path'):.1%}, pass^{RUNS} ", end="")
    print(f"{baseline.pass_hat(RUNS):.1%}")

    few = Suite(suite.cases[:20])
    same = await evaluate(agent, few, runs=RUNS, deps=Shop)  # these runs are over: nothing is called again
    print("20 cases:", compare(same, await evaluate(agent.with_(version="1.0b"), few, runs=RUNS, deps=Shop)))

    for version, mistakes in (("1.1", 0.05), ("1.2", 0.15)):
        changed = agent.with_(model=simulate(2, mistakes), version=version)
        candidate = await evaluate(changed, suite, runs=RUNS, deps=Shop)
        decided = gate(candidate, against=baseline)
        print(f"version {version}: {decided.decision}; {decided.reasons[0]}")

    run = await agent.run("Refund order 999. My key is sk-proj-abcdefghijklmnopqrstuvwxyz0123456789.", deps=Shop())
    made = Case(**describe_run(run))
    print("a case of a real run:", made.input)
    replayed = await evaluate(agent, [made], speed="replay")
    print("replayed, without a call:", replayed.mean("tool_path"))


if __name__ == "__main__":
    anyio.run(main)
