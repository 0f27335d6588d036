"""Prices: the user's own, and the public list."""

import socket
import sys

import pytest

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import Usage
from agentfsm.models import prices
from agentfsm.models.prices import Price, list_cost_usd

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
@pytest.mark.parametrize("field", ["input_usd_per_million", "output_usd_per_million", "cached_usd_per_million"])
def test_a_price_is_not_negative(field, wrong):
    """A price below 0, or one that is no number, is refused by the field's name."""
    fields = {"input_usd_per_million": 1.0, "output_usd_per_million": 1.0, field: wrong}
    with pytest.raises(MisuseError, match=field):
        Price(**fields)


@pytest.mark.usefixtures("_no_network")
def test_the_public_list_is_read_without_the_network():
    """A known model has a price, cached tokens cost less, and no connection is opened."""
    pytest.importorskip("genai_prices")
    fresh = list_cost_usd("gpt-4o", OPENAI, Usage(input_tokens=1000, output_tokens=100))
    cached = list_cost_usd("gpt-4o", OPENAI, Usage(input_tokens=1000, cached_tokens=1000, output_tokens=100))
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
    assert list_cost_usd(model, base_url, Usage(input_tokens=1000)) is None


def test_tokens_that_cannot_be_have_no_price():
    """More cached tokens than input tokens are not billed at all, and raise nothing."""
    assert list_cost_usd("gpt-4o", OPENAI, Usage(input_tokens=1, cached_tokens=2)) is None


def test_without_the_package_there_is_no_price(monkeypatch):
    """Where genai-prices is not installed, the cost is not known."""
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    prices._genai_prices.cache_clear()
    try:
        assert list_cost_usd("gpt-4o", OPENAI, Usage(input_tokens=1000)) is None
    finally:
        prices._genai_prices.cache_clear()
