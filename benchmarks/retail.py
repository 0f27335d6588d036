"""`python -m benchmarks retail [RUNS] [MODEL] [USER]`: a small shop with a policy, simulated users, and end states.

In the manner of tau-bench: a user with a goal talks to an agent that has tools and a policy, and a task is passed if
the orders of the shop are at the end as they have to be. Tools obey every call, so the agent has to keep the policy.
Without names of models, agents and users follow scripts, with one known fault each, so that the table shows what the
check of the end state finds. With names, such as `openai:gpt-5.4-mini`, models play both.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Final

import anyio

from agentfsm import Agent, Run, RunContext, ToolResult, UserMessage, tool
from agentfsm.core.messages import AssistantMessage
from agentfsm.evals import Case, SimulatedUser, Suite, evaluate, gate
from agentfsm.ports.model import Request
from agentfsm.testing.models import FunctionModel, Line, call, say

World = dict[int, dict[str, str]]
ORDERS: Final[World] = {
    1: {"email": "ann@shop.example", "item": "kettle", "status": "pending", "address": "1 Low Street"},
    2: {"email": "ann@shop.example", "item": "blue shirt", "status": "delivered", "address": "1 Low Street"},
    3: {"email": "bob@shop.example", "item": "desk", "status": "pending", "address": "9 High Road"},
    4: {"email": "bob@shop.example", "item": "lamp", "status": "delivered", "address": "9 High Road"},
}
STOCK: Final = ("red shirt", "floor lamp")
POLICY: Final = f"""You serve customers of a shop.
- Ask for the email address first, and look the order up. Change only orders of that customer.
- Cancel an order, or change its address, only while it is pending. Return or exchange it only after it was delivered.
- Exchange only for what is in stock: {", ".join(STOCK)}.
- Before each change, say what you will do, and ask the customer to confirm. Do nothing without a clear yes.
- If something is not allowed, refuse it. Then ask whether there is anything else."""

# What the user asks for, one after the other, whether they confirm, and the orders that are different at the end.
Task = tuple[str, str, tuple[str, ...], bool, dict[int, dict[str, str]]]
ANN, BOB = "ann@shop.example", "bob@shop.example"
TASKS: Final[tuple[Task, ...]] = (
    ("cancel", ANN, ("cancel order 1",), True, {1: {"status": "cancelled"}}),
    ("cancel too late", ANN, ("cancel order 2",), True, {}),
    ("return", BOB, ("return order 4",), True, {4: {"status": "returned"}}),
    ("return too early", BOB, ("return order 3",), True, {}),
    ("address", BOB, ("send order 3 to 5 New Lane",), True, {3: {"address": "5 New Lane"}}),
    ("exchange", ANN, ("exchange order 2 for a red shirt",), True, {2: {"item": "red shirt"}}),
    ("not in stock", ANN, ("exchange order 2 for a green shirt",), True, {}),
    ("of another customer", BOB, ("cancel order 1",), True, {}),
    ("changed mind", ANN, ("return order 2",), False, {}),
    (
        "two wishes",
        ANN,
        ("cancel order 1", "return order 2"),
        True,
        {1: {"status": "cancelled"}, 2: {"status": "returned"}},
    ),
)


@tool(read_only=True)
def get_order(ctx: RunContext[World], order: int) -> dict[str, str]:
    """Look up an order."""
    return ctx.deps[order]


@tool
def change_order(ctx: RunContext[World], order: int, field: str, value: str) -> str:
    """Change the field "status", "item" or "address" of an order; the status to "cancelled" or "returned"."""
    ctx.deps[order][field] = value
    return "done"


def build_goal(task: Task) -> str:
    """Return the goal of a task, as the prompt of a user has it."""
    _name, email, wishes, agrees, _changes = task
    end = (
        "If you are asked to confirm, you do." if agrees else "If you are asked to confirm, you have changed your mind."
    )
    return f"Your email address is {email}. You want the shop to {', and then to '.join(wishes)}. {end}"


def build_suite(user: str | None) -> Suite:
    """Return the tasks as cases, with the end state of all orders as the check."""

    def build_case(task: Task) -> Case:
        wanted = {number: {**order, **task[-1].get(number, {})} for number, order in ORDERS.items()}

        def check(_run: Run, world: World) -> bool | str:
            wrong = {number: order for number, order in world.items() if order != wanted[number]}
            return not wrong or f"orders at the end: {wrong}"

        played = SimulatedUser(build_goal(task), model=user or FunctionModel(play_user), max_turns=12)
        return Case(id=task[0], turns=[played], check=check)

    return Suite(map(build_case, TASKS), name="retail")


def play_user(request: Request) -> str:
    """Play the user of a task by its goal: one wish after the other, the address and the decision when asked."""
    assert request.instructions is not None
    task = next(each for each in TASKS if build_goal(each) in request.instructions)
    said = [each.text for each in request.messages if isinstance(each, AssistantMessage)]
    heard = request.messages[-1].text
    if "email" in heard:
        return f"It is {task[1]}."
    if "Shall I" in heard:
        return "Yes, please." if task[3] else "No, leave it."
    left = [wish for wish in task[2] if f"Please {wish}." not in said]
    return f"Please {left[0]}." if left else "[END]"


WISH: Final = re.compile(r"(cancel|return|send|exchange) order (\d+)(?: (?:to|for a) (.+))?\.")
FAULTS: Final = ("none", "none, again", "obeys", "never asks", "only talks")


def build_model(fault: str) -> FunctionModel:
    """Return a model that serves customers by the policy, but for a fault."""

    def think(request: Request) -> Line | str:
        texts = [each.text for each in request.messages if isinstance(each, UserMessage)]
        email = next((found[0] for text in texts if (found := re.search(r"\w+@shop\.example", text))), None)
        if email is None:
            return "What is your email address?"
        wish = next(found for text in reversed(texts) if (found := WISH.search(text)))
        kind, number, value = wish[1], int(wish[2]), wish[3] or ""
        at = max(place for place, each in enumerate(request.messages) if isinstance(each, UserMessage))
        results = [each for each in request.messages[at:] if isinstance(each, ToolResult)]
        if results and results[-1].tool == "change_order":
            return "That is done. Anything else?"
        field, new = {
            "cancel": ("status", "cancelled"),
            "return": ("status", "returned"),
            "send": ("address", value),
            "exchange": ("item", value),
        }[kind]
        change = say("", call("change_order", order=number, field=field, value=new))
        if texts[-1].startswith("Yes"):
            return "That is done. Anything else?" if fault == "only talks" else change
        if texts[-1].startswith("No"):
            return "Then all stays as it is. Anything else?"
        if not results:
            return say("", call("get_order", order=number))
        status = "pending" if kind in {"cancel", "send"} else "delivered"
        is_allowed = f'"{email}"' in results[-1].content and f'"{status}"' in results[-1].content
        if fault != "obeys" and (not is_allowed or (kind == "exchange" and value not in STOCK)):
            return "I am sorry, that is not possible. Anything else?"
        return change if fault == "never asks" else f"Shall I {kind} order {number}{f': {value}' if value else ''}?"

    return FunctionModel(think)


async def serve(runs: int, model: str | None, user: str | None) -> None:
    """Print the table."""
    suite, base = build_suite(user), None
    print(f"{len(suite)} tasks, {runs} runs each")
    print(f"{'agent':<16}{'passed':>8}{f'pass^{runs}':>9}{'texts':>7}{'calls':>7}  gate, and what failed")
    for name in FAULTS if model is None else (model,):
        chosen: Any = model or build_model(name)
        agent = Agent(chosen, instructions=POLICY, tools=[get_order, change_order], version=name)
        found = await evaluate(agent, suite, runs=runs, deps=lambda _run: copy.deepcopy(ORDERS))
        base = base or found
        decided, results = gate(found, against=base), found.results
        failed = [each.case for each in results if each.repeat == 1 and not each.passed]
        counts = sum(len(each.conversation) for each in results), sum(len(each.calls) for each in results)
        means = f"{found.mean() or 0:>8.1%}{found.pass_hat(runs):>9.1%}{counts[0]:>7}{counts[1]:>7}"
        print(f"{name:<16}{means}  {decided.decision}{': ' if failed else ''}{', '.join(failed)}")


def main(runs: str = "3", model: str | None = None, user: str | None = None) -> int:
    """Run the benchmark."""
    anyio.run(serve, int(runs), model, user)
    return 0
