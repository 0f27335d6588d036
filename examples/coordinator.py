"""A coordinator and its specialists, after document C: who may run beside whom, live, and what each of them cost.

It advises on moving to Hong Kong. No key and no network: each model is a script, and a second of document C takes a
twentieth here. Give each `Agent` a string such as "openai:gpt-4o" in place of its script, and it is a real one.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import anyio

from agentfsm import (
    COORDINATION,
    Agent,
    AgentEvent,
    AgentEventType,
    ModelError,
    Run,
    RunContext,
    StreamEvent,
    Tool,
    ToolEvent,
    ToolEventType,
    ToolQueue,
    Usage,
    tool,
)
from agentfsm.core.effects import RunTools
from agentfsm.models import Price
from agentfsm.testing import ScriptedModel, call, fail, say
from agentfsm.testing.models import Line

PACE = 0.05  # seconds here for each second that the real thing takes
PRICE = Price(input_usd_per_million=3, output_usd_per_million=15)
MEMORY: dict[str | None, list[str]] = {}

# Eight direct tools (document C, 2.1) with their time-outs (10.2). What changes nothing runs beside others; what writes
# or costs money says nothing, so it runs alone and is never repeated unasked.


@tool(read_only=True, timeout_s=10, estimate_s=1)
async def search_knowledge(query: str) -> str:
    """Search the knowledge base of immigration rules and past cases."""
    await anyio.sleep(PACE)
    return f"3 passages on {query}"


@tool(read_only=True, estimate_s=0.5)
async def get_user_context(ctx: RunContext[None]) -> list[str]:
    """Tell what is known of the user from earlier conversations."""
    return MEMORY.get(ctx.user, [])


@tool(timeout_s=5, estimate_s=1)
async def save_user_memory(ctx: RunContext[None], fact: str) -> str:
    """Keep a fact about the user for later conversations."""
    MEMORY.setdefault(ctx.user, []).append(fact)
    return "saved"


@tool(timeout_s=10, estimate_s=2)
async def generate_payment(ctx: RunContext[None], service: str) -> str:
    """Make a payment link for a paid service; the key lets that service refuse a second order."""
    await anyio.sleep(2 * PACE)
    return f"https://pay.example/{service}?key={ctx.idempotency_key}"


@tool(read_only=True, timeout_s=1, estimate_s=0.005)
async def get_current_datetime() -> str:
    """Tell date and time in Hong Kong."""
    return datetime.now(timezone(timedelta(hours=8))).isoformat(timespec="minutes")


@tool(read_only=True, timeout_s=15, estimate_s=3)
async def web_search(query: str) -> str:
    """Search the web, for what the knowledge base is too old to know."""
    return f"nothing newer on {query}"


@tool(read_only=True, estimate_s=1)
async def get_exchange_rate(currency: str) -> float:
    """Tell how many Hong Kong dollars one unit of a currency is worth."""
    return {"EUR": 8.45, "USD": 7.8}[currency]


@tool(read_only=True, estimate_s=0.1)
async def check_off_topic(message: str) -> bool:
    """Tell whether a message is about anything else than moving to Hong Kong."""
    return "Hong Kong" not in message


# Six specialists. Whether one may run beside others is not said: it may exactly when all of its own tools may.


class Script(ScriptedModel):
    """A script in place of a model, at a model's price."""

    def cost_usd(self, usage: Usage) -> float:
        """US dollars for this usage."""
        return PRICE.cost_usd(usage)


def after(seconds: float, text: str = "", *calls: Any) -> Line:
    """Write a reply that takes a model so long."""
    return say(text, *calls, delay_s=seconds * PACE, usage=Usage(input_tokens=1_200, output_tokens=150))


def ask(role: str, *script: Line, s: float, timeout_s: float = 30, own: Any = (search_knowledge,)) -> Tool[..., Any]:
    """Make an agent, and a tool of it that usually takes `s` seconds."""
    agent = Agent(Script(*script), name=role, tools=own, instructions=f"You are a consultancy's {role}. Be brief.")
    return agent.as_tool(name=f"invoke_{role}", description=f"Ask the {role}.", timeout_s=timeout_s, estimate_s=s)


LOOK = after(1, "", call("search_knowledge", query="talent schemes"))
SAVE = after(1, "", call("save_user_memory", fact="34, data engineer, Lisbon, two degrees"))
TOOLS = [
    ask("policy_expert", LOOK, after(3, "The Top Talent scheme, category B."), s=5),
    ask("assessment_expert", LOOK, after(4, "75 of 100: likely."), s=6),
    ask("strategist", after(2, "Apply now, move in spring."), s=2),
    ask("objection_handler", fail(ModelError("529: overloaded")), s=2),
    ask("case_analyst", LOOK, after(0, "A similar case took six weeks."), s=2),
    ask("memory_manager", SAVE, after(1, "Saved."), s=3, timeout_s=15, own=(save_user_memory,)),  # a small model
    *(search_knowledge, get_user_context, save_user_memory, generate_payment),
    *(get_current_datetime, web_search, get_exchange_rate, check_off_topic),
]
QUESTION = "I am 34, a data engineer from Lisbon with two degrees. Can I move to Hong Kong, and what does it cost?"
BATCH = (
    call("get_user_context"),
    call("invoke_policy_expert", query="Which schemes are open to a data engineer?"),
    call("invoke_assessment_expert", query="34, data engineer, two degrees"),
    call("invoke_objection_handler", query="What may be held against it?"),
    call("invoke_case_analyst", query="Engineers from Portugal"),
    call("invoke_memory_manager", query="Keep what the user said."),
    call("invoke_strategist", query="When to apply?"),
    call("get_exchange_rate", currency="EUR"),
    call("generate_payment", service="detailed_assessment"),
)
ANSWER = """Very likely, by the Top Talent scheme; a similar case took six weeks. Apply now, move in spring.
I could not find out what may be held against you. A detailed assessment is 120 EUR; I made you a link."""


def show(event: StreamEvent) -> None:
    """Print what happens: the calls, and below each what the agent behind it does."""
    match event:
        case ToolEvent(type=ToolEventType.STARTED):
            print(f"  {event.call_id} {event.tool}")
        case AgentEvent(type=AgentEventType.PROGRESS):
            print(f"  {event.call_id}   {event.agent}: turn {event.turn} of {event.limit}")
        case ToolEvent(type=ToolEventType.COMPLETED | ToolEventType.ERROR):
            print(f"  {event.call_id} {f'failed: {event.message}' if event.message else 'done'}")


async def main() -> Run:
    """Ask, show the plan of the first batch, watch it run, and tell what it cost, the specialists included."""
    role = "You coordinate specialists who advise on moving to Hong Kong."
    model = Script(after(1, "Let me ask around.", *BATCH), after(2, ANSWER))
    agent = Agent(model, tools=TOOLS, name="coordinator", instructions=f"{role} {COORDINATION}")
    run = agent.start(QUESTION, user="user-17")
    while not isinstance(run.effect, RunTools):
        run = await agent.step(run)

    plan = ToolQueue(agent.tools).plan(run.effect.calls)  # runs nothing
    for each in plan.calls:
        print(f"batch {each.batch + 1}: {each.call_id} {each.tool:<25}{each.estimate_s or 0:>5g} s, {each.reason}")
    print(f"about {plan.estimate_s:g} s, and {sum(each.estimate_s or 0 for each in plan.calls):g} s one by one\n")

    async with agent.stream(run) as stream:
        async for event in stream:
            if event.run_id == run.id:  # the specialists' own events come by as well
                show(event)
    run = stream.run or run
    print(f"\n{run.output}\n\n{'agent':<18} turns  tokens  seconds     USD")

    cost = agent.cost(run)
    for spent in (*cost.children, cost):
        seconds, usd = f"{spent.duration_s:.2f}", f"{spent.usd or 0:.4f}"
        print(f"{spent.agent:<18} {spent.turns:>5}  {spent.usage.tokens:>6,}  {seconds:>7}  {usd:>6}")
    return run


if __name__ == "__main__":
    anyio.run(main)
