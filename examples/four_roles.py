"""Four roles, each with a model of its own: a router, a planner, an executor and a reflector.

    python examples/four_roles.py

Simple requests go from the router to the executor, others to the planner, whose plan the executor carries out and the
reflector reviews. At the end, the program draws how its runs went from role to role, read from their journals. Scripts
replace the models, so no key is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio

from agentfsm import Agent, Purpose, tool
from agentfsm.core import events as e
from agentfsm.patterns import Ask, IntentRouter, Route, plan_and_execute, reflect_until
from agentfsm.ports import Request
from agentfsm.prompts import Refuse
from agentfsm.testing.models import FunctionModel, Line, call, say

PRICES = {"Oslo": 120, "Rome": 90}
# From, to, and what is passed on.
Edge = tuple[str, str, str]


@tool(read_only=True)
async def price(city: str) -> int:
    """Return the price of a journey to a city, in euro."""
    return PRICES[city]


@tool
async def book(city: str) -> str:
    """Book a journey to a city."""
    return f"booked {city}"


# The scripts in place of the models.


def small(request: Request) -> str:
    """Route a request, or ask."""
    text = " ".join(message.text for message in request.messages)
    if "poem" in text:
        return pick("none", 0.9, reasoning="No route is about poems.")
    if "Book" in text and not any(city in text for city in PRICES):
        return pick("journey", 0.4, question="To which city?")
    return pick("journey" if "ook" in text else "price", 0.9)


def pick(route: str, confidence: float, reasoning: str = "It fits.", question: str = "") -> str:
    """Return what a router says."""
    return json.dumps({"reasoning": reasoning, "route": route, "confidence": confidence, "question": question})


def large(request: Request) -> str:
    """Plan, and answer the questions of plans."""
    if request.purpose is not Purpose.PLAN:
        return "Rome"
    work = json.loads(request.messages[-1].text)
    if not work["results"]:
        cities = [{"id": at, "tool": "price", "arguments": {"city": city}} for at, city in enumerate(PRICES, 1)]
        return json.dumps({"steps": [*cities, {"id": 3, "question": "Which is cheaper?", "after": [1, 2]}]})
    step = {"tool": "book", "arguments": {"city": {"$step": 3}}, "after": [3]}
    return json.dumps({"steps": [{"id": 1 + max(map(int, work["results"])), **step}]})


def middle(request: Request) -> Line | str:
    """Make a call for a simple request, and answer from results."""
    last = request.messages[-1].text
    if "booked" in last:
        return "Rome is cheaper, and it is booked."
    if "[Plan]" in last:
        return "Rome is cheaper."
    return say("", call("price", city="Oslo")) if len(request.messages) == 1 else "120 euro."


def other(request: Request) -> str:
    """Review an answer: a journey has to be booked."""
    work, answer = json.loads(request.messages[-1].text), request.messages[-3].text  # between them, the task
    is_done = "booked" in answer
    score = {"score": 5 if is_done else 2, "reason": "" if is_done else "nothing is booked"}
    said: dict[str, Any] = {"evaluation": dict.fromkeys(("completeness", "correctness", "format"), score)}
    action = "retry_step" if "whichever" in work["request"] else "replan"
    change = {"step_id": "3" if action == "retry_step" else "", "modification": "book the cheaper one"}
    if "Ask me" in work["request"]:
        return json.dumps({**said, "action": "escalate", "retry_details": {"step_id": "", "modification": "Book it?"}})
    return json.dumps({**said, "overall_pass": is_done, "action": action, "retry_details": change})


# The roles.

router = IntentRouter(
    FunctionModel(small),
    routes={"price": "Questions for one price.", "journey": "Comparisons and bookings."},
    rules=[lambda text: "price" if text.startswith("Price of") else None],
)
executor = Agent(FunctionModel(middle), tools=[price, book], name="executor")
traveller = reflect_until(
    plan_and_execute(executor, planner=FunctionModel(large)),
    reflector=FunctionModel(other),
    checks=[lambda answer: None if answer.endswith(".") else "answer in a sentence"],
)
AGENTS: Mapping[str, Agent[Any]] = {"price": executor, "journey": traveller.with_(name="traveller")}


async def handle(text: str, answers: Sequence[str] = ()) -> list[Edge]:
    """Route a request, let an agent work on it, and return the ways that it went."""
    edges: list[Edge] = [("User", "Router", "request")]
    decision = await router.route(text)
    for answer in answers:
        if isinstance(decision, Ask):
            print(f"  asks: {decision.question}")
            edges.append(("Router", "User", "ask"))
            decision = await router.answer(decision.run_id, answer)
            text += f" {answer}"
    match decision:
        case Route(name=name):
            agent = AGENTS[name]
            edges.append(("Router", "Planner" if agent.planner else "Executor", name))
            run = await agent.run(text)
            print(f"  {name}: {run.pending[0].description if run.is_waiting else run.output}")
            edges += read_edges(await agent.history(run.id))
        case Refuse(reason=reason):
            print(f"  refused: {reason}")
            edges.append(("Router", "User", "refuse"))
        case Ask():
            edges.append(("Router", "User", "ask"))
    return edges


def read_edges(events: Sequence[e.Event]) -> Iterator[Edge]:
    """Yield the ways of a run from role to role, as its journal has them."""
    for event in events:
        match event:
            case e.Planned():
                yield "Planner", "Executor", "plan"
            case e.AnswerGiven():
                yield "Executor", "User", "answer"
            case e.AnswerDrafted():
                yield "Executor", "Reflector", "answer"
            case e.Judged(verdict=verdict):
                target = "Planner" if verdict.action in ("replan", "retry_step") else "User"
                yield "Reflector", target, str(verdict.action)


def draw(edges: Sequence[Edge]) -> str:
    """Return a diagram in Mermaid's notation, each way once."""
    lines = [f"    {start} -->|{what}| {end}" for start, end, what in dict.fromkeys(edges)]
    return "\n".join(["flowchart LR", *lines])


async def main() -> str:
    """Handle some requests, and print and return the diagram."""
    edges: list[Edge] = []
    for text, *answers in (
        ("Price of a journey to Oslo?",),
        ("Compare Oslo and Rome, and book the cheaper one.",),
        ("Book a journey.", "To Oslo or Rome, whichever is cheaper."),
        ("Compare Oslo and Rome. Ask me before you book.",),
        ("Write a poem.",),
    ):
        print(text)
        edges += await handle(text, answers)
    diagram = draw(edges)
    print(f"\n{diagram}")
    return diagram


if __name__ == "__main__":
    anyio.run(main)
