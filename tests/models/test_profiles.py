"""Abilities of models by family: settings are translated as the vendor documents, or refused before a request."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from genai_prices import data

from agentfsm import Agent, MisuseError, Settings
from agentfsm.models import Anthropic, Gemini, OpenAIResponses, Thinking, find_profile
from agentfsm.models.gemini.contents import build_config
from agentfsm.ports import Request

VENDORS = {"anthropic", "google", "x-ai", "deepseek", "openai", "moonshotai"}
# The list's window is not that of the family: an address of the API that is for something else, or a resold model.
OTHERS = (
    "gemini-pro",
    "-8k",
    "-32k",
    "embedding",
    "tts",
    "audio",
    "realtime",
    "image",
    "live",
    "search",
    "transcribe",
    "computer-use",
    "vision",
)


def test_no_window_is_larger_than_that_of_the_price_list() -> None:
    """A history that is compacted too early costs little; one that is sent too long ends the run."""
    listed = [
        (model.id, model.context_window)
        for provider in data.providers
        if provider.id in VENDORS
        for model in provider.models
        if model.context_window and not any(word in model.id for word in OTHERS)
    ]
    assert len(listed) > 60
    assert [(name, size) for name, size in listed if find_profile(name).window_tokens > size] == []


@pytest.mark.parametrize(
    ("name", "effort", "sent"),
    [
        ("claude-opus-5-5", "max", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
        ("claude-opus-4-6", "none", {"thinking": {"type": "disabled"}}),
        ("claude-opus-4-5", "low", {"output_config": {"effort": "low"}}),
        ("claude-sonnet-4-5", None, {}),
        ("claude-3-5-haiku-latest", "none", {}),
        ("deepseek-v4", "low", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}),
    ],
)
def test_an_effort_is_sent_to_claude_as_the_model_knows_it(name: str, effort: str | None, sent: dict[str, Any]) -> None:
    """Another server's models get it as it is."""
    model = Anthropic(name, api_key="k")
    request = Request(instructions="", messages=(), settings=Settings(reasoning_effort=effort))
    body = json.loads(model._encode_request(request, model._make_encoding_cache(), streamed=False))
    assert {key: body[key] for key in ("thinking", "output_config") if key in body} == sent


@pytest.mark.parametrize(
    ("name", "effort", "sent"),
    [
        ("gemini-2.0-flash", None, None),
        ("gemini-2.0-flash", "none", None),
        ("gemini-2.5-flash", "low", {"include_thoughts": True, "thinking_budget": 1024}),
        ("gemini-2.5-flash", "none", {"thinking_budget": 0}),
        ("gemini-3.8-flash", None, {"include_thoughts": True}),
        ("gemini-3.8-flash", "minimal", {"include_thoughts": True, "thinking_level": "MINIMAL"}),
    ],
)
def test_an_effort_is_sent_to_gemini_as_the_model_knows_it(name: str, effort: str | None, sent: Any) -> None:
    """As a budget, by Google's own table, to the generation that has no levels."""
    request = Request(instructions="", messages=(), settings=Settings(reasoning_effort=effort))
    config = build_config(request, find_profile(name)).thinking_config
    assert (None if config is None else config.model_dump(exclude_none=True)) == sent


@pytest.mark.parametrize(
    ("model", "effort", "words"),
    [
        (Anthropic("claude-sonnet-4-5", api_key="k"), "low", "budget_tokens"),
        (Anthropic("claude-opus-4-6", api_key="k"), "xhigh", "'low' or 'medium' or 'high' or 'max' or 'none'"),
        (Anthropic("claude-fable-5-2", api_key="k"), "none", "always thinks"),
        (Gemini("gemini-2.0-flash", api_key="k"), "low", "does not think"),
        (Gemini("gemini-3-pro", api_key="k"), "medium", "'low' or 'high'"),
        (OpenAIResponses("gpt-4.1", api_key="k"), "low", "does not think"),
    ],
)
def test_an_effort_that_the_model_lacks_is_refused_before_a_request(model: Any, effort: str, words: str) -> None:
    """The error says which it has."""
    with pytest.raises(MisuseError, match=words):
        Agent(model, settings=Settings(reasoning_effort=effort))


def test_a_temperature_that_the_model_lacks_is_refused() -> None:
    """OpenAI's older reasoning models have none."""
    with pytest.raises(MisuseError, match="o3 has no temperature"):
        Agent(OpenAIResponses("o3", api_key="k"), settings=Settings(temperature=0.0))


async def test_a_profile_of_ones_own_counts() -> None:
    """For a model that the table does not know, or knows wrongly."""
    profile = attrs.evolve(find_profile("x"), window_tokens=9_000, thinking=Thinking.NONE)
    model = Anthropic("x", api_key="k", profile=profile)
    assert (model.window_tokens, model.profile) == (9_000, profile)
    with pytest.raises(MisuseError, match="x does not think"):
        Agent(model, settings=Settings(reasoning_effort="low"))
    with pytest.raises(MisuseError, match="profile"):
        Anthropic("x", api_key="k", profile="claude")  # type: ignore[arg-type]
