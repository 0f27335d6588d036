"""Prices: the user's own, and the public list."""

import socket
import sys
import threading

import attrs
import pytest

from agentfsm import MisuseError, TextPart, Usage, UserMessage
from agentfsm.models import OpenAIChat, Price, prices
from agentfsm.models.prices import find_list_cost_usd, find_price
from agentfsm.ports import Request
from agentfsm.testing import LocalServer, say

OPENAI = "https://api.openai.com/v1"


@pytest.fixture
def _no_network(monkeypatch):
    def refuse(*_args):
        message = "the network was asked"
        raise AssertionError(message)

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_price_is_for_a_million_tokens():
    """Input, output and cached tokens each cost what their price says."""
    price = Price(input_usd_per_million=2, output_usd_per_million=10, cached_usd_per_million=1)
    usage = Usage(input_tokens=1_000_000, cached_tokens=500_000, output_tokens=100_000)
    assert price.cost_usd(usage) == pytest.approx(1.0 + 0.5 + 1.0)


def test_cached_tokens_cost_what_others_cost_unless_said():
    """Without a price of their own, cached tokens are input tokens."""
    price = Price(input_usd_per_million=2, output_usd_per_million=10)
    assert price.cost_usd(Usage(input_tokens=1_000_000, cached_tokens=500_000)) == pytest.approx(2.0)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "field", ["input_usd_per_million", "output_usd_per_million", "cached_usd_per_million", "reply_usd"]
)
def test_a_price_is_not_negative(field, wrong):
    """A price below 0, or one that is no number, is refused by the field's name."""
    fields = {"input_usd_per_million": 1.0, "output_usd_per_million": 1.0, field: wrong}
    with pytest.raises(MisuseError, match=field):
        Price(**fields)


@pytest.mark.usefixtures("_no_network")
def test_the_public_list_is_read_without_the_network():
    """A known model has a price, cached tokens cost less, and no connection is opened."""
    pytest.importorskip("genai_prices")
    fresh = find_list_cost_usd("gpt-4o", OPENAI, Usage(input_tokens=1000, output_tokens=100))
    cached = find_list_cost_usd("gpt-4o", OPENAI, Usage(input_tokens=1000, cached_tokens=1000, output_tokens=100))
    assert fresh == pytest.approx(0.0035)
    assert cached is not None
    assert 0 < cached < fresh


@pytest.mark.parametrize(
    ("model", "base_url"),
    [("no-such-model", OPENAI), ("gpt-4o", "http://127.0.0.1:8000/v1")],
    ids=["model", "provider"],
)
def test_what_the_list_does_not_know_has_no_price(model, base_url):
    """An unknown model has no price, nor has a known one at a server of one's own."""
    assert find_list_cost_usd(model, base_url, Usage(input_tokens=1000)) is None


def test_tokens_that_cannot_be_have_no_price():
    """More cached tokens than input tokens are not billed at all, and raise nothing."""
    assert find_list_cost_usd("gpt-4o", OPENAI, Usage(input_tokens=1, cached_tokens=2)) is None


def test_without_the_package_there_is_no_price(monkeypatch):
    """Where genai-prices is not installed, the cost is not known."""
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    prices._import_genai_prices.cache_clear()
    prices._load_price_tiers.cache_clear()
    try:
        assert find_list_cost_usd("gpt-4o", OPENAI, Usage(input_tokens=1000)) is None
    finally:
        prices._import_genai_prices.cache_clear()
        prices._load_price_tiers.cache_clear()


def test_tokens_written_into_the_cache_have_a_price_of_their_own():
    """Anthropic bills them higher, by the list and by a price of one's own; where none is said they are input."""
    usage = Usage(input_tokens=1_000_000, cached_tokens=200_000, cache_write_tokens=300_000)
    own = Price(
        input_usd_per_million=3,
        output_usd_per_million=15,
        cached_usd_per_million=0.3,
        cache_write_usd_per_million=3.75,
    )
    assert own.cost_usd(usage) == pytest.approx(0.5 * 3 + 0.2 * 0.3 + 0.3 * 3.75)
    assert Price(input_usd_per_million=3, output_usd_per_million=15).cost_usd(usage) == pytest.approx(3)
    kept = attrs.evolve(usage, cache_write_1h_tokens=100_000)  # twice the price of other input, if nothing else is said
    assert own.cost_usd(kept) == pytest.approx(0.5 * 3 + 0.2 * 0.3 + 0.2 * 3.75 + 0.1 * 6)
    told = attrs.evolve(own, cache_write_1h_usd_per_million=5)
    assert told.cost_usd(kept) == pytest.approx(0.5 * 3 + 0.2 * 0.3 + 0.2 * 3.75 + 0.1 * 5)
    pytest.importorskip("genai_prices")
    small = attrs.evolve(usage, input_tokens=1_000, cached_tokens=200, cache_write_tokens=300)
    listed = find_list_cost_usd("claude-haiku-4-5", "https://api.anthropic.com", small)
    assert listed == pytest.approx((500 * 1 + 200 * 0.1 + 300 * 1.25) / 1e6)
    kept = attrs.evolve(small, cache_write_1h_tokens=100)
    listed = find_list_cost_usd("claude-haiku-4-5", "https://api.anthropic.com", kept)
    assert listed == pytest.approx((500 * 1 + 200 * 0.1 + 200 * 1.25 + 100 * 2) / 1e6)


@pytest.mark.parametrize(
    "usage",
    [
        Usage(input_tokens=1_000, output_tokens=100),
        Usage(input_tokens=1_000, output_tokens=100, cached_tokens=300, cache_write_tokens=200),
        Usage(input_tokens=900_000, output_tokens=100, cached_tokens=300, cache_write_tokens=200),
        Usage(input_tokens=200_000, output_tokens=1),
        Usage(input_tokens=200_001, output_tokens=1),
        Usage(),
    ],
    ids=["plain", "cached", "long", "at a step", "above a step", "nothing"],
)
def test_the_sum_is_that_of_the_list_itself(usage):
    """For each model of the providers that have adapters here, and for one that bills each reply, to the last digit."""
    listed = pytest.importorskip("genai_prices")
    providers = {one.id: one for one in pytest.importorskip("genai_prices.data").providers}
    urls = {
        "openai": OPENAI,
        "anthropic": "https://api.anthropic.com",
        "google": "https://generativelanguage.googleapis.com",
        "perplexity": "https://api.perplexity.ai",
    }
    tokens = listed.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    seen = 0
    for provider, url in urls.items():
        for model in providers[provider].models:
            try:
                theirs = listed.calc_price(tokens, model.id, provider_api_url=url).total_price
            except LookupError:  # the list finds some of its own models by other names only
                continue
            assert find_list_cost_usd(model.id, url, usage) == pytest.approx(float(theirs), rel=1e-12, abs=1e-15), (
                model.id
            )
            seen += 1
    assert seen > 100


def test_the_list_is_searched_once_for_a_model(monkeypatch):
    """Each further reply is billed from what is known; an unknown model is not searched for again either."""
    searched = []

    class List:
        Usage = dict

        @staticmethod
        def calc_price(tokens, model, provider_api_url):
            searched.append(model)
            raise LookupError(model)

    monkeypatch.setattr(prices, "_import_genai_prices", lambda: List)
    prices._load_price_tiers.cache_clear()
    monkeypatch.setattr(prices.time, "time", lambda: 1_800_000_000.0)
    try:
        for _ in range(5):
            assert find_list_cost_usd("m", OPENAI, Usage(input_tokens=1)) is None
        assert searched == ["m"]
        monkeypatch.setattr(prices.time, "time", lambda: 1_800_000_900.0)  # prices may change with the hour
        assert find_list_cost_usd("m", OPENAI, Usage(input_tokens=1)) is None
        assert searched == ["m", "m"]
    finally:
        prices._load_price_tiers.cache_clear()


SMALL = Price(input_usd_per_million=1, output_usd_per_million=1)
LARGE = Price(input_usd_per_million=9, output_usd_per_million=9)


@pytest.mark.parametrize(
    ("model", "price"),
    [("gpt-4o-mini-2024", SMALL), ("gpt-4o", LARGE), ("gpt-4o-2024", LARGE), ("gpt-4", None), ("", None)],
)
def test_a_table_goes_by_the_longest_beginning(model, price):
    """So a table need not name each dated version of a model."""
    assert find_price(model, {"gpt-4o": LARGE, "gpt-4o-mini": SMALL}) is price


def test_a_price_alone_is_for_any_model():
    """And without one there is none."""
    assert find_price("any", SMALL) is SMALL
    assert find_price("any", None) is None


def test_a_table_of_something_else_is_misuse():
    """The name that is wrong is said."""
    with pytest.raises(MisuseError, match=r"the price of 'gpt-4o' is 2\.5"):
        find_price("other", {"gpt-4o": 2.5})


def test_a_model_that_the_table_does_not_name_goes_by_the_list():
    """The own price goes first, then the public one; a server of one's own has neither."""
    pytest.importorskip("genai_prices")
    usage = Usage(input_tokens=1_000_000)
    table = {"my-": SMALL}
    assert OpenAIChat("my-model", base_url="http://127.0.0.1:1/v1", price=table).cost_usd(usage) == 1
    assert OpenAIChat("gpt-4o", base_url=OPENAI, api_key="k", price=table).cost_usd(usage) == 2.5
    assert OpenAIChat("gpt-4o", base_url="http://127.0.0.1:1/v1", price=table).cost_usd(usage) is None


async def test_the_list_is_loaded_beside_the_event_loop(monkeypatch):
    """The first reply of a loop has it loaded in a thread: 0.4 s in which nothing else would run."""
    threads = []
    monkeypatch.setattr(
        "agentfsm.models.adapter.load_list_prices", lambda *_: threads.append(threading.current_thread())
    )
    with LocalServer([say("one"), say("two")]) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        await model.reply(Request(instructions="", messages=(UserMessage(parts=(TextPart(text="Hello"),)),)))
        assert threads
        assert threading.current_thread() not in threads
        await model.aclose()
