"""Compute the cost of a model's tokens in US dollars, from the user's prices or the list of genai-prices."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import NOT_NEGATIVE
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.usage import Usage

_THOUSAND: Final = 1_000
_MILLION: Final = 1_000_000
# Seconds for which a model's list price is cached: a lookup takes 250 us, and a few prices change with the hour of the
# day.
_CACHE_S: Final = 900
# Models whose list price is cached: more than a process uses in a quarter of an hour.
_MAX_CACHED_MODELS: Final = 1_024


_USD: Final = attrs.evolve(NOT_NEGATIVE, wanted="US dollars, 0 or more")


@attrs.frozen(kw_only=True)
class Price(Value):
    """Price of a model, for example `Price(input_usd_per_million=2.5, output_usd_per_million=10)`."""

    input_usd_per_million: float = attrs.field(validator=_USD)
    """US dollars for a million input tokens, 0 or more."""

    output_usd_per_million: float = attrs.field(validator=_USD)
    """US dollars for a million output tokens, 0 or more."""

    cached_usd_per_million: float | None = attrs.field(default=None, validator=_USD.or_none())
    """US dollars for a million input tokens read from the provider's cache. None: the price of other input."""

    cache_write_usd_per_million: float | None = attrs.field(default=None, validator=_USD.or_none())
    """US dollars for a million input tokens written into the provider's cache. None: the price of other input."""

    cache_write_1h_usd_per_million: float | None = attrs.field(default=None, validator=_USD.or_none())
    """US dollars for a million of them that it keeps for an hour. None: twice the price of other input, as Anthropic
    has it.
    """

    reply_usd: float = attrs.field(default=0.0, validator=_USD)
    """US dollars for each reply in addition to its tokens, 0 or more: some providers charge this for web search."""

    def cost_usd(self, usage: Usage) -> float:
        """Return the cost of one reply in US dollars."""
        price = self.input_usd_per_million
        cached = price if self.cached_usd_per_million is None else self.cached_usd_per_million
        written = price if self.cache_write_usd_per_million is None else self.cache_write_usd_per_million
        fresh_tokens = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
        dollars_in = fresh_tokens * price + usage.cached_tokens * cached + usage.cache_write_tokens * written
        if usage.cache_write_1h_tokens:
            kept = self.cache_write_1h_usd_per_million
            dollars_in += usage.cache_write_1h_tokens * ((2 * price if kept is None else kept) - written)
        dollars = (dollars_in + usage.output_tokens * self.output_usd_per_million) / _MILLION
        return dollars + self.reply_usd


# A price, or a table of prices by prefixes of models' names.
Prices: TypeAlias = Price | Mapping[str, Price]


def find_price(model: str, prices: Prices | None) -> Price | None:
    """Return the user's own price of a model; from a table, the price with the longest matching prefix.

    Raises:
        MisuseError: when `prices` is neither a price nor a table of prices by prefixes of names.
    """
    if prices is None or isinstance(prices, Price):
        return prices
    if not isinstance(prices, Mapping):
        msg = (
            f"price={prices!r:.100}: give a Price(input_usd_per_million=..., ...), or a dict of prices by models' names"
        )
        raise MisuseError(msg)
    for name, price in prices.items():
        if not isinstance(name, str):
            msg = f"the table of prices has the key {name!r:.100}: give the beginning of a model's name"
            raise MisuseError(msg)
        if not isinstance(price, Price):
            msg = f"the price of {name!r} is {price!r}: give a Price(input_usd_per_million=..., ...)"
            raise MisuseError(msg)
    beginnings = [beginning for beginning in prices if model.startswith(beginning)]
    return prices[max(beginnings, key=len)] if beginnings else None


def load_list_prices(model: str, base_url: str) -> None:
    """Load the list of genai-prices and cache a model's price. The first call in a process takes 0.4 s."""
    _load_price_tiers(model, base_url, int(time.time() // _CACHE_S))


def find_list_cost_usd(model: str, base_url: str, usage: Usage) -> float | None:
    """Look up the cost in the list that comes with genai-prices, without network access.

    The address identifies the provider, so a local model never has a provider's price. The first call in a process
    loads the list, which takes 0.4 s.

    Args:
        model: Name of the model at the provider.
        base_url: Address of the provider; without one the price is unknown.
        usage: Tokens of one reply: some models cost more per token if the input is long.

    Returns:
        US dollars; None if the package is missing, does not list the provider or model, or the tokens are inconsistent.
    """
    steps = _load_price_tiers(model, base_url, int(time.time() // _CACHE_S))
    if steps is None or usage.cached_tokens + usage.cache_write_tokens > usage.input_tokens:
        return None
    return next(price for start, price in steps if usage.input_tokens > start).cost_usd(usage)


@lru_cache(maxsize=_MAX_CACHED_MODELS)
def _load_price_tiers(model: str, base_url: str, _period: int) -> tuple[tuple[int, Price], ...] | None:
    """Return the current prices of a model: the input tokens above which each applies, and the price; highest first.

    The package's own calculation takes 230 us per reply, `Price.cost_usd` 6 us.
    """
    prices = _import_genai_prices() if base_url else None  # without an address the package would guess from the name
    if prices is None:
        return None
    try:
        listed = prices.calc_price(prices.Usage(input_tokens=0), model, provider_api_url=base_url).model_price
    except LookupError:
        return None
    kinds = {field: getattr(listed, kind, None) for field, kind in _GENAI_PRICE_FIELDS.items()}
    starts = {tier.start for price in kinds.values() for tier in getattr(price, "tiers", ())}
    return tuple([(start, _build_tier_price(start, kinds)) for start in (*sorted(starts, reverse=True), -1)])


# The list's name of each price. `Usage` does not count the other items of the list (audio, searches).
_GENAI_PRICE_FIELDS: Final = {
    "input_usd_per_million": "input_mtok",
    "output_usd_per_million": "output_mtok",
    "cached_usd_per_million": "cache_read_mtok",
    "cache_write_usd_per_million": "cache_write_mtok",
    "cache_write_1h_usd_per_million": "cache_write_1h_mtok",
    "reply_usd": "requests_kcount",
}


def _build_tier_price(start: int, kinds: Mapping[str, Any]) -> Price:
    """Return the price of requests whose input is longer than `start`."""
    numbers = {field: _read_price(price, start) for field, price in kinds.items()}
    return Price(
        input_usd_per_million=numbers["input_usd_per_million"] or 0.0,
        output_usd_per_million=numbers["output_usd_per_million"] or 0.0,
        cached_usd_per_million=numbers["cached_usd_per_million"],
        cache_write_usd_per_million=numbers["cache_write_usd_per_million"],
        cache_write_1h_usd_per_million=numbers["cache_write_1h_usd_per_million"],
        reply_usd=(numbers["reply_usd"] or 0.0) / _THOUSAND,
    )


def _read_price(price: Any, start: int) -> float | None:
    """Return a price of the list, which may have tiers, for inputs longer than `start`; None if it has none."""
    if price is None:
        return None
    reached = [tier.price for tier in getattr(price, "tiers", ()) if tier.start <= start]  # in rising order
    return float(reached[-1] if reached else getattr(price, "base", price))


@cache
def _import_genai_prices() -> Any | None:
    # Imported on first use: the package is optional, and its import takes 0.3 s.
    try:
        return importlib.import_module("genai_prices")
    except ImportError:
        return None
