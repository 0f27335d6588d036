"""`agentfsm.models`: names to models, and nothing loaded before it is asked for."""

import subprocess
import sys

import pytest

from agentfsm import models
from agentfsm.core.errors import MisuseError
from agentfsm.models import Fallback, OpenAIChat, OpenAIResponses, Price, Router, Throttled, resolve


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def test_a_name_becomes_a_model():
    """The prefix picks the adapter, and the rest is the model's name."""
    for prefix, adapter in (("openai", OpenAIChat), ("openai-responses", OpenAIResponses)):
        model = resolve(f"{prefix}:gpt-4o")
        assert type(model) is adapter
        assert model.name == "gpt-4o"


def test_only_the_first_colon_counts():
    """The name of a fine-tuned model holds colons of its own."""
    assert resolve("openai:ft:gpt-4o:me::1").name == "ft:gpt-4o:me::1"


@pytest.mark.parametrize("name", ["gpt-4o", "openai:", "acme:gpt-4o", ""])
def test_other_names_are_refused(name):
    """Without a known prefix and a name, the error says what is known and how to write it."""
    with pytest.raises(MisuseError, match=r"'openai:gpt-4o'.*'openai:'"):
        resolve(name)


def test_the_package_names_what_it_has():
    """Each public name is there, and another one is an AttributeError."""
    assert {name: getattr(models, name) for name in models.__all__} == {
        "Fallback": Fallback,
        "OpenAIChat": OpenAIChat,
        "OpenAIResponses": OpenAIResponses,
        "Price": Price,
        "Router": Router,
        "Throttled": Throttled,
        "resolve": resolve,
    }
    assert set(models.__all__) <= set(dir(models))
    with pytest.raises(AttributeError, match="Nonesuch"):
        models.Nonesuch  # noqa: B018  reading it is the test


def test_importing_the_package_loads_no_vendor():
    """`import agentfsm.models` loads neither openai nor an HTTP client nor genai-prices."""
    code = (
        "import sys, agentfsm.models; "
        "print([name for name in ('openai', 'httpx', 'httpx2', 'genai_prices') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
