"""A coordinator and six specialist agents: the plan of parallel calls, the live events, and the cost of each agent.

The coordinator advises on moving to Hong Kong. Each model is a script, so no API key or network is needed, and the time
scale is 1 to 20. For real models, give each `Agent` a string such as "openai:gpt-5.4-mini" instead of its script.
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

PACE = 0.05  # seconds of this example for each second of real tools and models
PRICE = Price(input_usd_per_million=3, output_usd_per_million=15)
MEMORY: dict[str | None, list[str]] = {}

# Eight direct tools with their timeouts. Read-only tools run in parallel. Tools that write or cost money are declared
# neither as read-only nor as idempotent: they run alone, and a person decides whether to repeat them after a crash.


@tool(read_only=True, timeout_s=10, estimate_s=1)
async def search_knowledge(query: str) -> str:
    """Search the knowledge base of immigration rules and past cases."""
    await anyio.sleep(PACE)
    return f"3 passages on {query}"


@tool(read_only=True, estimate_s=0.5)
async def get_user_context(ctx: RunContext[None]) -> list[str]:
    """Return the facts about the user from earlier conversations."""
    return MEMORY.get(ctx.user, [])


@tool(timeout_s=5, estimate_s=1)
async def save_user_memory(ctx: RunContext[None], fact: str) -> str:
    """Store a fact about the user for later conversations."""
    MEMORY.setdefault(ctx.user, []).append(fact)
    return "saved"


@tool(timeout_s=10, estimate_s=2)
async def generate_payment(ctx: RunContext[None], service: str) -> str:
    """Return a payment link for a paid service. The key lets that service refuse a second order."""
    await anyio.sleep(2 * PACE)
    return f"https://pay.example/{service}?key={ctx.idempotency_key}"


@tool(read_only=True, timeout_s=1, estimate_s=0.005)
async def get_current_datetime() -> str:
    """Return the date and time in Hong Kong."""
    return datetime.now(timezone(timedelta(hours=8))).isoformat(timespec="minutes")


@tool(read_only=True, timeout_s=15, estimate_s=3)
async def web_search(query: str) -> str:
    """Search the web for news that the knowledge base does not have."""
    return f"nothing newer on {query}"


@tool(read_only=True, estimate_s=1)
async def get_exchange_rate(currency: str) -> float:
    """Return the price of one unit of a currency in Hong Kong dollars."""
    return {"EUR": 8.45, "USD": 7.8}[currency]


@tool(read_only=True, estimate_s=0.1)
async def check_off_topic(message: str) -> bool:
    """Return whether a message is about a topic other than moving to Hong Kong."""
    return "Hong Kong" not in message


# Six specialists. A specialist may run in parallel if all of its tools may, so its tool does not declare it.


class Script(ScriptedModel):
    """A scripted model with a price."""

    def cost_usd(self, usage: Usage) -> float:
        """Return the price of this usage in US dollars."""
        return PRICE.cost_usd(usage)


def after(seconds: float, text: str = "", *calls: Any) -> Line:
    """Return a scripted reply that takes the model this many seconds."""
    return say(text, *calls, delay_s=seconds * PACE, usage=Usage(input_tokens=1_200, output_tokens=150))


def ask(role: str, *script: Line, s: float, timeout_s: float = 30, own: Any = (search_knowledge,)) -> Tool[..., Any]:
    """Return a tool that calls a new agent, and usually takes `s` seconds."""
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
    """Print calls, and below each call the progress of its agent."""
    match event:
        case ToolEvent(type=ToolEventType.STARTED):
            print(f"  {event.call_id} {event.tool}")
        case AgentEvent(type=AgentEventType.PROGRESS):
            print(f"  {event.call_id}   {event.agent}: turn {event.turn} of {event.limit}")
        case ToolEvent(type=ToolEventType.COMPLETED | ToolEventType.ERROR):
            print(f"  {event.call_id} {f'failed: {event.message}' if event.message else 'done'}")


async def main() -> Run:
    """Ask a question, print the plan of the first calls, stream the run, and print the cost of each agent."""
    role = "You coordinate specialists who advise on moving to Hong Kong."
    model = Script(after(1, "Let me ask around.", *BATCH), after(2, ANSWER))
    agent = Agent(model, tools=TOOLS, name="coordinator", instructions=f"{role} {COORDINATION}")
    run = agent.start(QUESTION, user="user-17")
    while not isinstance(run.effect, RunTools):
        run = await agent.step(run)

    plan = ToolQueue(agent.tools).plan(run.effect.calls)  # it executes no call
    for each in plan.calls:
        print(f"batch {each.batch + 1}: {each.call_id} {each.tool:<25}{each.estimate_s or 0:>5g} s, {each.reason}")
    print(f"about {plan.estimate_s:g} s, and {sum(each.estimate_s or 0 for each in plan.calls):g} s one by one\n")

    async with agent.stream(run) as stream:
        async for event in stream:
            if event.run_id == run.id:  # the stream also has the events of the specialists' runs
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
