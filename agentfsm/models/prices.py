"""What a model's tokens cost, in US dollars: the user's own price, or the public list of the package genai-prices."""

from __future__ import annotations

import importlib
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.errors import MisuseError

if TYPE_CHECKING:
    from agentfsm.core.messages import Usage

_MILLION = 1_000_000


def _check_price(_price: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        msg = f"{attribute.name} is {value}, but a price is 0 or more US dollars for a million tokens"
        raise MisuseError(msg)


@attrs.frozen(kw_only=True)
class Price:
    """What a model costs, for example `Price(input_usd_per_million=2.5, output_usd_per_million=10)`."""

    input_usd_per_million: float = attrs.field(validator=_check_price)
    # US dollars for a million input tokens, 0 or more.
    output_usd_per_million: float = attrs.field(validator=_check_price)
    # US dollars for a million output tokens, 0 or more.
    cached_usd_per_million: float | None = attrs.field(default=None, validator=_check_price)
    # US dollars for a million input tokens read from the provider's cache; None where they cost what others cost.

    def cost_usd(self, usage: Usage) -> float:
        """US dollars for this usage."""
        cached = self.input_usd_per_million if self.cached_usd_per_million is None else self.cached_usd_per_million
        fresh_tokens = usage.input_tokens - usage.cached_tokens
        dollars_in = fresh_tokens * self.input_usd_per_million + usage.cached_tokens * cached
        return (dollars_in + usage.output_tokens * self.output_usd_per_million) / _MILLION


def list_cost_usd(model: str, base_url: str, usage: Usage) -> float | None:
    """Look the cost up in the list that comes with genai-prices; the network is never asked.

    The provider is told by its address, so a model that runs at home is never billed at a provider's price.

    Args:
        model: As the provider knows it.
        base_url: Where the provider answers.
        usage: The tokens of one reply: some models cost more per token when the input is long.

    Returns:
        US dollars, or None where the package is missing, or knows no such provider or model.
    """
    prices = _genai_prices()
    if prices is None:
        return None
    tokens = prices.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_tokens,
    )
    try:
        return float(prices.calc_price(tokens, model, provider_api_url=base_url).total_price)
    except (LookupError, ValueError):  # no such model; or tokens that cannot be, such as more cached than read
        return None


@cache
def _genai_prices() -> Any | None:
    # Imported when the first price is asked for: it takes 0.3 s, and it is an optional package.
    try:
        return importlib.import_module("genai_prices")
    except ImportError:
        return None
