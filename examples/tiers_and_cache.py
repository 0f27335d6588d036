"""Two tiers of models, and a question that is asked twice: the tokens of each model, and their cost by its prices.

    python examples/tiers_and_cache.py

Turns that only look something up go to the small model. The answers of comparisons, and replies that the small model
refuses, go to the large one. At the end, the program counts the cost of the recorded tokens, and what the replies that
were used would cost with the large model alone. That is arithmetic: whether the answers are as good is a question for
evaluations. Scripts replace the models, so no key is needed.
"""

from __future__ import annotations

import anyio

from agentfsm import Agent, AnswerCache, Usage, tool
from agentfsm.core.run_facts import list_spending
from agentfsm.models import Price, Tiered
from agentfsm.ports import FinishReason, Request
from agentfsm.testing import ScriptedModel, call, say

# List prices, document H, 4.3.
SMALL = Price(input_usd_per_million=0.15, output_usd_per_million=0.6)
LARGE = Price(input_usd_per_million=2.5, output_usd_per_million=10)
RETURNS = "May I return it?"


class Small(ScriptedModel):
    """A script with a name and a price."""

    name, price = "small-1", SMALL

    def cost_usd(self, usage: Usage) -> float:
        """Return the price of this usage in US dollars."""
        return self.price.cost_usd(usage)


class Large(Small):
    """The expensive one."""

    name, price = "large-1", LARGE


@tool(read_only=True, cacheable=True, fresh_s=3_600)
def look_up(topic: str) -> str:
    """Look up the rules of the shop."""
    return f"the rules on {topic}"


def choose(request: Request) -> str:
    """Give the answer of a comparison to the large model, and all other turns to the small one."""
    run = request.run
    return "large" if run is not None and run.turn >= 1 and "Compare" in run.messages[0].text else "small"


async def main() -> tuple[float, float]:
    """Ask questions, and return their cost, and that of the same replies with the large model alone, in US dollars."""
    seek = say("", call("look_up", topic="tariffs"), usage=Usage(input_tokens=900, output_tokens=30))
    rules = say("", call("look_up", topic="returns"), usage=Usage(input_tokens=880, output_tokens=25))
    used = Usage(input_tokens=1_300, output_tokens=12)
    no = say("I cannot advise on that.", finish_reason=FinishReason.REFUSAL, usage=used)
    yes = say("Yes, within 14 days.", usage=Usage(input_tokens=1_300, output_tokens=40))
    best = say("Tariff B, if you call abroad.", usage=Usage(input_tokens=1_500, output_tokens=180))
    model = Tiered({"small": Small(seek, rules, no, rules, yes), "large": Large(best, yes)}, choose)
    agent = Agent(model, tools=[look_up], answer_cache=AnswerCache())

    tiered = alone = 0.0
    for user, question in (("ann", "Compare the tariffs."), ("ann", RETURNS), ("ann", RETURNS), ("bob", RETURNS)):
        run = await agent.run(question, user=user)
        source = "" if run.answered_from is None else ", from the answer cache"
        print(f"{user}: {question} {run.output} ({run.usage.tokens:,} tokens{source})")
        for event in await agent.history(run.id):
            for part in (parts := list_spending(event)):
                tiered += part.usage.cost_usd or 0.0
                if part is parts[-1]:  # the others are of replies that were not used
                    alone += LARGE.cost_usd(part.usage)
                if part.usage.tokens:
                    print(f"    {part.model}: {part.usage.tokens:,} tokens, {part.usage.cost_usd:.6f} US dollars")
    print(f"{tiered:.6f} US dollars; the same replies of the large model: {alone:.6f}. {1 - tiered / alone:.0%} less")
    return tiered, alone


if __name__ == "__main__":
    anyio.run(main)
