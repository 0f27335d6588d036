"""Tokens and US dollars: the usage of model calls, and the cost of runs and sessions."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class Usage(Value):
    """What model calls cost. Adds up with `+`."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """The share of the input tokens that the provider read from its cache."""

    cache_write_tokens: int = 0
    """The share of the input tokens that it wrote into its cache, which some bill higher."""

    reasoning_tokens: int = 0
    """The share of the output tokens that the model spent on thinking."""

    cost_usd: float | None = None
    """US dollars, of the replies whose price was known when they came; None where none was."""

    estimated: bool = False
    """Whether the tokens were counted here because the provider did not say."""

    unpriced: bool = False
    """Whether the price of some of the tokens was not known, so that all of them cost more than `cost_usd`."""

    @property
    def tokens(self) -> int:
        """Input and output tokens together."""
        return self.input_tokens + self.output_tokens

    def with_price(self, price: Callable[[Usage], float | None]) -> Usage:
        """Return the usage of a reply with its price; as it is where that is known, or known by nobody, or nothing."""
        if self.cost_usd is not None or self.unpriced or not self.tokens:
            return self
        cost_usd = price(self)
        return Usage(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            cache_write_tokens=self.cache_write_tokens,
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
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cost_usd=cost,
            estimated=self.estimated or other.estimated,
            unpriced=self.unpriced or other.unpriced,
        )


@attrs.frozen(kw_only=True)
class AgentCost(Value):
    """What a run of an agent cost."""

    agent: str
    run_id: str
    usage: Usage
    """Its own sub-agents' included, as `usd`."""

    usd: float | None
    """US dollars; None where the price of a model in it is unknown."""

    unpriced: tuple[str, ...] = ()
    """The names of those models, each once."""

    turns: int
    tool_calls: tuple[str, ...] = ()
    """The tools that it called, in order; calls that were skipped are none."""

    duration_s: float = 0.0
    """Active seconds."""

    children: tuple[AgentCost, ...] = ()
    """The sub-agents among its tools, in call order."""

    @property
    def calls(self) -> int:
        """How many calls of tools were made, its own sub-agents' included."""
        return len(self.tool_calls) + sum(child.calls for child in self.children)


@attrs.frozen(kw_only=True)
class SessionCost(Value):
    """What the runs of a session cost."""

    session: str
    usage: Usage
    """Of all of them, as `usd`."""

    usd: float | None
    """US dollars; None where the price of a model in it is unknown."""

    unpriced: tuple[str, ...] = ()
    """The names of those models, each once."""

    runs: tuple[AgentCost, ...] = ()
    """Oldest first."""
