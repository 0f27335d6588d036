"""`agentfsm.models`: names to models, and nothing loaded before it is asked for."""

import subprocess
import sys

import pytest

from agentfsm import MisuseError, models
from agentfsm.core import hosted_tools, messages
from agentfsm.models import (
    AdapterModel,
    Anthropic,
    CachedModel,
    Fallback,
    Gemini,
    HTTPReranker,
    OpenAIChat,
    OpenAIEmbedder,
    OpenAIResponses,
    Price,
    Router,
    Throttled,
    TierClassifier,
    Tiered,
    from_openai,
    profiles,
    resolve,
    to_openai,
)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    for vendor in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(f"{vendor}_API_KEY", "sk-of-a-test")
        monkeypatch.delenv(f"{vendor}_BASE_URL", raising=False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("openai:gpt-4o", OpenAIChat),
        ("openai-responses:gpt-5", OpenAIResponses),
        ("anthropic:claude-opus-5", Anthropic),
    ],
)
def test_a_name_becomes_a_model(name, kind):
    """The prefix picks the adapter, and the rest is the model's name."""
    model = resolve(name)
    assert isinstance(model, kind)
    assert model.name == name.partition(":")[2]


def test_only_the_first_colon_counts():
    """The name of a fine-tuned model holds colons of its own."""
    assert resolve("openai:ft:gpt-4o:me::1").name == "ft:gpt-4o:me::1"


@pytest.mark.parametrize("name", ["gpt-4o", "openai:", "acme:gpt-4o", ""])
def test_other_names_are_refused(name):
    """Without a known prefix and a name, the error says what is known and how to write it."""
    with pytest.raises(
        MisuseError, match=r"'openai:gpt-5.4-mini'.*'anthropic:', 'azure:'.*'openai:', 'openai-responses:'"
    ):
        resolve(name)


def test_the_package_names_what_it_has():
    """Each public name is there, and another one is an AttributeError."""
    hosted = ["CodeExecution", "FileSearch", "HostedMCP", "HostedTool", "ImageGeneration", "URLContext", "WebSearch"]
    outcome = ["Citation", "HostedCall", "HostedContent", "HostedFile"]
    assert {name: getattr(models, name) for name in models.__all__} == {
        **{name: getattr(hosted_tools, name) for name in hosted},
        **{name: getattr(messages, name) for name in outcome},
        **{name: getattr(profiles, name) for name in ("ModelProfile", "Thinking", "find_profile")},
        "AdapterModel": AdapterModel,
        "Anthropic": Anthropic,
        "CachedModel": CachedModel,
        "Fallback": Fallback,
        "Gemini": Gemini,
        "HTTPReranker": HTTPReranker,
        "OpenAIChat": OpenAIChat,
        "OpenAIEmbedder": OpenAIEmbedder,
        "OpenAIResponses": OpenAIResponses,
        "Price": Price,
        "Router": Router,
        "Throttled": Throttled,
        "TierClassifier": TierClassifier,
        "Tiered": Tiered,
        "from_openai": from_openai,
        "resolve": resolve,
        "to_openai": to_openai,
    }
    assert set(models.__all__) <= set(dir(models))
    with pytest.raises(AttributeError, match="Nonesuch"):
        models.Nonesuch  # noqa: B018  reading it is the test


def test_importing_the_package_loads_no_vendor():
    """`import agentfsm.models` loads neither a vendor's package nor an HTTP client nor genai-prices."""
    code = (
        "import sys, agentfsm.models; "
        "print([name for name in ('anthropic', 'openai', 'httpx', 'httpx2', 'genai_prices') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_package_that_is_missing_is_named():
    """Without its vendor's package an adapter says what to install; all else works."""
    code = (
        "import sys; sys.modules['anthropic'] = None\n"
        "from agentfsm.models import resolve\n"
        "try:\n    resolve('anthropic:claude-opus-5')\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "agentfsm.models.Anthropic needs the extra 'anthropic'; pip install 'agentfsm[anthropic]'" in ran.stdout
