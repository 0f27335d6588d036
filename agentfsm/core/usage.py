"""Token usage of model requests, and the cost of runs and sessions."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from math import floor, log10
from typing import Final

import attrs

from agentfsm.core.value import Value


class Purpose(StrEnum):
    """Purpose that tokens or money of a run were spent for. These are all that there are."""

    TURN = "turn"
    """A turn of the run."""

    LAST_ANSWER = "last_answer"
    """The last answer of a run that a limit stops."""

    SUMMARY = "summary"
    """A request of a context policy, such as a summary of old messages."""

    TOOL_SELECTION = "tool_selection"
    """A selection among many tools."""

    PLAN = "plan"
    """A plan, its correction, or the check of a plan between two steps."""

    PLAN_QUESTION = "plan_question"
    """A step of a plan that is a question."""

    MEMORY = "memory"
    """Embeddings for searches of the memory. Learning from a run is billed to an extraction run, as its turns."""

    ROUTING = "routing"
    """The choice of a model, by the classifier of a `Tiered`."""

    JUDGE = "judge"
    """A judgement on an answer or on results."""

    TOOL = "tool"
    """Calls of tools that cost money, beside the model."""

    AGENT = "agent"
    """Runs of sub-agents."""


def format_usd(usd: float | None, *, estimated: bool = False, unpriced: bool = False) -> str:
    """Return an amount of US dollars for people: "$1,234.50", "$0.0123", or "unknown price" for None.

    All places that show money use it. Amounts below a dollar have three significant digits, so that none looks like 0.

    Args:
        usd: The amount, US dollars, 0 or more.
        estimated: Whether it is an estimate, or that of estimated tokens: "about $0.0123".
        unpriced: Whether the price of a part of it is unknown: "$0.0123 and unknown prices".
    """
    if usd is None or (unpriced and not usd):
        return "unknown price"
    digits = f"{usd:.{2 - floor(log10(usd))}f}".rstrip("0") if 0 < usd < 1 else f"{usd:,.2f}"
    whole, _, cents = digits.partition(".")
    about = "about " if estimated and usd else ""
    return f"{about}${whole}.{cents:0<2}{' and unknown prices' if unpriced else ''}"


@attrs.frozen(kw_only=True)
class Usage(Value):
    """Tokens and cost of model requests. Two usages add up with `+`."""

    input_tokens: int = 0
    """Tokens of the requests, those read from and written to a cache included."""

    output_tokens: int = 0
    """Tokens of the replies, reasoning included."""

    cached_tokens: int = 0
    """Part of the input tokens that the provider read from its cache."""

    cache_write_tokens: int = 0
    """Part of the input tokens that the provider wrote into its cache. Some providers bill them at a higher rate."""

    cache_write_1h_tokens: int = 0
    """Part of `cache_write_tokens` that the provider keeps for an hour, at a higher rate than the rest."""

    reasoning_tokens: int = 0
    """Part of the output tokens that the model spent on reasoning."""

    cost_usd: float | None = None
    """US dollars for the replies whose price was known when they arrived; None if no price was known."""

    estimated: bool = False
    """Whether the tokens were estimated here because the provider did not report them."""

    unpriced: bool = False
    """Whether the price of some tokens was unknown, so that the real cost is higher than `cost_usd`."""

    cached_replies: int = 0
    """Number of replies from a reply cache (`CachedModel`). They have no tokens and cost nothing."""

    @property
    def tokens(self) -> int:
        """Input and output tokens together."""
        return self.input_tokens + self.output_tokens

    def format_cost(self) -> str:
        """Return the cost for people, with what is not known of it: "about $0.31 and unknown prices"."""
        usd = self.cost_usd if self.tokens else self.cost_usd or 0.0
        return format_usd(usd, estimated=self.estimated, unpriced=self.unpriced)

    def with_price(self, price: Callable[[Usage], float | None]) -> Usage:
        """Return the usage of one reply with its price filled in.

        Returns it unchanged if it has a price, is marked as unpriced, or has no tokens.
        """
        if self.cost_usd is not None or self.unpriced or not self.tokens:
            return self
        cost_usd = price(self)
        return Usage(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            cache_write_tokens=self.cache_write_tokens,
            cache_write_1h_tokens=self.cache_write_1h_tokens,
            reasoning_tokens=self.reasoning_tokens,
            cost_usd=cost_usd,
            unpriced=cost_usd is None,
            estimated=self.estimated,
        )

    def __add__(self, other: Usage) -> Usage:
        cost = self.cost_usd if other.cost_usd is None else other.cost_usd + (self.cost_usd or 0.0)
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            cache_write_1h_tokens=self.cache_write_1h_tokens + other.cache_write_1h_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cost_usd=cost,
            estimated=self.estimated or other.estimated,
            unpriced=self.unpriced or other.unpriced,
            cached_replies=self.cached_replies + other.cached_replies,
        )

    def without(self, part: Usage) -> Usage:
        """Return the rest of a sum of which `part` is a part. A mark of the sum stays, whichever part it is from."""
        return Usage(
            input_tokens=self.input_tokens - part.input_tokens,
            output_tokens=self.output_tokens - part.output_tokens,
            cached_tokens=self.cached_tokens - part.cached_tokens,
            cache_write_tokens=self.cache_write_tokens - part.cache_write_tokens,
            cache_write_1h_tokens=self.cache_write_1h_tokens - part.cache_write_1h_tokens,
            reasoning_tokens=self.reasoning_tokens - part.reasoning_tokens,
            cost_usd=None if self.cost_usd is None else self.cost_usd - (part.cost_usd or 0.0),
            estimated=self.estimated,
            unpriced=self.unpriced,
            cached_replies=self.cached_replies - part.cached_replies,
        )


@attrs.frozen(kw_only=True)
class CacheReport(Value):
    """Report of a provider on its prompt cache for one reply, which a model with `cache_diagnostics=True` requests."""

    provider: str
    """Name of the provider, as in `NativeReply.provider`."""

    response_id: str
    """Id of the reply at the provider, which compares the next request with it."""

    reason: str = ""
    """Why the request could not reuse the beginning of the one before, in the provider's word, such as "tools_changed";
    or why it does not tell, such as "unavailable", or "pending" while it compares. Empty: it has found no difference,
    or there was no request before.
    """

    missed_tokens: int = 0
    """Tokens behind the first difference, by the provider's estimate; 0 if it gives none."""

    @property
    def names_cause(self) -> bool:
        """Whether the reason is a change of the request, and not that the provider does not know."""
        return self.reason.endswith(("_changed", "_compacted"))


@attrs.frozen(kw_only=True)
class Spending(Value):
    """Usage for one purpose."""

    purpose: Purpose
    usage: Usage = Usage()
    model: str = ""
    """Name of the model that was asked, if it is not the agent's own; else empty. Several are separated by commas."""


@attrs.frozen(kw_only=True)
class AgentCost(Value):
    """Cost of one run of an agent."""

    agent: str
    """Name of the agent."""

    run_id: str
    """Id of the run."""

    usage: Usage
    """Tokens of the run, those of its sub-agents included."""

    usd: float | None
    """US dollars, sub-agents included; None if the price of a model that was used is unknown."""

    unpriced: tuple[str, ...] = ()
    """Names of the models whose price is unknown, each once."""

    turns: int
    """Number of turns of this run, without those of its sub-agents."""

    tool_calls: tuple[str, ...] = ()
    """Names of the tools that the run called, in order. Skipped calls are left out."""

    duration_s: float = 0.0
    """Active time of the run, seconds."""

    children: tuple[AgentCost, ...] = ()
    """Costs of the sub-agents that were called as tools, in call order."""

    counted: tuple[str, ...] = ()
    """Names of the tools of the calls that count toward a quota of a guard, once for each call, sub-agents included.
    Set in the result of a sub-agent.
    """

    @property
    def calls(self) -> int:
        """Number of tool calls, those of sub-agents included."""
        return len(self.tool_calls) + sum(child.calls for child in self.children)


@attrs.frozen(kw_only=True)
class SessionCost(Value):
    """Cost of all runs of a session."""

    session: str
    """Id of the session."""

    usage: Usage
    """Tokens of all runs of the session together."""

    usd: float | None
    """US dollars for all runs together; None if the price of a model that was used is unknown."""

    unpriced: tuple[str, ...] = ()
    """Names of the models whose price is unknown, each once."""

    runs: tuple[AgentCost, ...] = ()
    """Cost of each run, oldest first."""


# Reason of a choice that keeps the tier of the turn before.
KEPT: Final = "kept"


@attrs.frozen(kw_only=True)
class TierChoice(Value):
    """Choice of a tier by `Tiered`, as the journal records it."""

    name: str
    """Name of the tier that replied."""

    reason: str
    """Reason for the choice: "default", "rule", "classifier", "kept" for that of the turn before, "purpose summary", or
    "escalated from small: refusal".
    """

    spent: tuple[Spending, ...] = ()
    """Parts of the usage of this reply that other models took: the classifier, and the tiers below whose replies were
    not used, also in earlier attempts. The rest of it is that of the model that replied.
    """
