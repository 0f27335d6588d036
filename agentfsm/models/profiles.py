"""Abilities of models by family, as far as requests depend on them: the one table of their differences.

A row holds for the models whose name matches its pattern. Of several that match, the later has the last word, field by
field: a row has only that in which its models differ from their family, which stands before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import attrs

from agentfsm.core.settings import Settings
from agentfsm.core.value import Value

_NO_BUDGETS: Final[Mapping[str, int]] = MappingProxyType({})


class Thinking(StrEnum):
    """The way in which a request controls the thinking of a model."""

    UNKNOWN = "unknown"
    """The model is not in the table: the setting is sent, and the server decides."""

    NONE = "none"
    """The model does not think."""

    BUDGET = "budget"
    """By a number of tokens."""

    LEVEL = "level"
    """By one of several levels."""

    ADAPTIVE = "adaptive"
    """The model decides itself how much to think, guided by a level."""


@attrs.frozen(kw_only=True)
class ModelProfile(Value):
    """Abilities of a model, as far as requests depend on them. `find_profile` returns that of a name.

    To override some: `OpenAIChat("my-model", profile=attrs.evolve(find_profile("my-model"), window_tokens=32_768))`.
    """

    window_tokens: int = 128_000
    """Context window in tokens, input and output together. Default 128,000."""

    thinking: Thinking = Thinking.UNKNOWN
    """The way in which a request controls the thinking. Default UNKNOWN."""

    efforts: tuple[str, ...] = ()
    """Values of `Settings.reasoning_effort` that the model has, without "none". Empty: none, or not known."""

    can_be_silent: bool = True
    """Whether thinking can be turned off, by `Settings(reasoning_effort="none")`. Default True."""

    budgets: Mapping[str, int] = _NO_BUDGETS
    """Tokens of thinking for each effort, as the vendor documents the translation. Empty: it documents none."""

    binds_thinking: bool = False
    """Whether the model refuses thinking of its own after a change of that which came before it. Default False."""

    has_sampling: bool = True
    """Whether the model has a temperature and `top_p`. Default True."""

    combines_tools: bool = True
    """Whether a request may have the provider's own tools beside those of the agent or a schema. Default True."""

    explains_cache: bool = False
    """Whether the provider tells why its prompt cache was missed, if a request asks for it. Default False."""

    signs_calls: bool = False
    """Whether the provider signs calls, and a history needs a mark in place of a signature that is missing. Default
    False.
    """

    checks_messages: bool = False
    """Whether servers check requests with mistral-common: ids of calls, and the order of messages. Default False."""

    limits_thinking: bool = False
    """Whether the maximum of an answer includes thinking, and is named `max_completion_tokens`. Default False."""

    reads_family: str = ""
    """Family of models whose thinking the provider accepts back from each other, because it leaves out thinking
    that this one cannot read. Empty: a model gets only its own thinking back.
    """

    source: str = ""
    """Source of the row, with its date; empty for a model that is not in the table."""

    def describe(self) -> str:
        """Return the abilities in one line, for people."""
        efforts = (*self.efforts, *(["none"] if self.can_be_silent and self.thinking is not Thinking.NONE else ()))
        thinking = {
            Thinking.UNKNOWN: "thinking not known",
            Thinking.NONE: "does not think",
        }.get(self.thinking, f"thinks by {self.thinking} ({', '.join(efforts)})")
        facts = [f"window {self.window_tokens:,} tokens", thinking]
        facts += ["thinking is bound to its prefix"] * self.binds_thinking
        facts += ["no temperature"] * (not self.has_sampling)
        return "; ".join(facts)

    def explain_settings(self, model: str, settings: Settings) -> str | None:
        """Return which setting a model does not have, and a remedy; None if it has all, or is not in the table.

        Args:
            model: Name of the model, for the text.
            settings: The settings.
        """
        for name, value in (("temperature", settings.temperature), ("top_p", settings.top_p)):
            if value is not None and not self.has_sampling:
                return f"{model} has no {name}: leave out Settings({name}={value})"
        effort = settings.reasoning_effort
        if effort is None or effort in self.efforts or self.thinking is Thinking.UNKNOWN:
            return None
        values = " or ".join(map(repr, self.efforts + ("none",) * self.can_be_silent))
        if effort == "none":
            return None if self.can_be_silent else f"{model} always thinks: give Settings(reasoning_effort=) {values}"
        if self.efforts:
            return f"{model} has no reasoning effort {effort!r}: give {values}"
        if self.thinking is Thinking.NONE:
            return f"{model} does not think: leave out Settings(reasoning_effort={effort!r}), or use a model that does"
        return (
            f"{model} has no reasoning effort {effort!r}, and thinks by a budget: leave it out, and give "
            'Settings(extra_body={"thinking": {"type": "enabled", "budget_tokens": 4096}})'
        )


DEFAULT_PROFILE: Final = ModelProfile()

_ANTHROPIC: Final = "platform.claude.com/docs: effort, adaptive thinking, preserved thinking; November 2026"
_GOOGLE: Final = "ai.google.dev/gemini-api/docs: thinking, openai, tool-combination; November 2026"
_OPENAI: Final = "developers.openai.com: models, reasoning; November 2026"
_LIST: Final = "genai-prices 0.2.3; November 2026"

_UP_TO_HIGH: Final = ("low", "medium", "high")
_UP_TO_MAX: Final = (*_UP_TO_HIGH, "max")
_ALL: Final = (*_UP_TO_HIGH, "xhigh", "max")
_FROM_MINIMAL: Final = ("minimal", *_UP_TO_HIGH)
# Google's table for its endpoint in OpenAI's form.
_GEMINI_BUDGETS: Final = MappingProxyType({"minimal": 1_024, "low": 1_024, "medium": 8_192, "high": 24_576})

_MISTRAL_NAMES: Final = (
    *("*mistral*", "*mixtral*", "*ministral*"),
    *("*codestral*", "*devstral*", "*magistral*", "*pixtral*"),
)
_MISTRAL: Final = MappingProxyType({"checks_messages": True, "source": "mistral-common 1.13.1; November 2026"})

# Patterns of names without the prefix of a router, in lower case. Where sources of a window differ, the smaller counts.
_ROWS: Final[Mapping[str, Mapping[str, Any]]] = {
    # Anthropic. Models newer than the table are taken for its newest.
    "claude-*": {
        "window_tokens": 200_000,
        "thinking": Thinking.ADAPTIVE,
        "efforts": _ALL,
        "binds_thinking": True,
        "explains_cache": True,
        "reads_family": "claude",
        "source": _ANTHROPIC,
    },
    "claude-[123]*": {"thinking": Thinking.NONE, "efforts": (), "binds_thinking": False},
    "claude-3-7-*": {"thinking": Thinking.BUDGET},
    "claude-*[a-z]-4*": {"thinking": Thinking.BUDGET, "efforts": (), "binds_thinking": False},
    "claude-4-*": {"thinking": Thinking.BUDGET, "efforts": (), "binds_thinking": False},
    "claude-opus-4-5*": {"efforts": _UP_TO_HIGH},
    "claude-opus-4-6*": {"thinking": Thinking.ADAPTIVE, "efforts": _UP_TO_MAX, "window_tokens": 1_000_000},
    "claude-sonnet-4-6*": {"thinking": Thinking.ADAPTIVE, "efforts": _UP_TO_MAX, "window_tokens": 1_000_000},
    "claude-opus-4-7*": {"thinking": Thinking.ADAPTIVE, "efforts": _ALL, "window_tokens": 1_000_000},
    "claude-opus-4-8*": {"thinking": Thinking.ADAPTIVE, "efforts": _ALL, "window_tokens": 1_000_000},
    "claude-opus-5*": {"binds_thinking": False, "window_tokens": 1_000_000},
    "claude-sonnet-5*": {"binds_thinking": False, "window_tokens": 1_000_000},
    "claude-fable-*": {"window_tokens": 1_000_000, "can_be_silent": False},
    "claude-fable-5": {"binds_thinking": False},
    "claude-mythos-*": {"window_tokens": 1_000_000, "can_be_silent": False},
    "claude-mythos-5": {"binds_thinking": False},
    "claude-opus-5-5*": {"binds_thinking": True},
    "claude-sonnet-5-5*": {"binds_thinking": True},
    "claude-haiku-5-5*": {"window_tokens": 1_000_000},
    # Google
    "gemini-*": {
        "window_tokens": 1_000_000,
        "thinking": Thinking.LEVEL,
        "efforts": _FROM_MINIMAL,
        "can_be_silent": False,
        "signs_calls": True,
        "source": _GOOGLE,
    },
    "gemini-[12].*": {
        "thinking": Thinking.NONE,
        "efforts": (),
        "can_be_silent": True,
        "combines_tools": False,
        "signs_calls": False,
    },
    "gemini-2.5-*": {"thinking": Thinking.BUDGET, "efforts": _FROM_MINIMAL, "budgets": _GEMINI_BUDGETS},
    "gemini-2.5-pro*": {"can_be_silent": False},
    "gemini-*-image*": {"thinking": Thinking.NONE, "efforts": (), "can_be_silent": True},
    "gemini-*-tts*": {"thinking": Thinking.NONE, "efforts": (), "can_be_silent": True, "window_tokens": 8_192},
    "gemini-*-live*": {"window_tokens": 131_072},
    "gemini-3-pro*": {"efforts": ("low", "high")},
    "gemma-*": {"window_tokens": 128_000, "thinking": Thinking.NONE, "source": _GOOGLE},
    "gemma-4-*": {"window_tokens": 262_144, "thinking": Thinking.UNKNOWN},
    # OpenAI. The levels of its newer models differ by model and change: the server decides on them.
    "chatgpt*": {"thinking": Thinking.NONE, "source": _OPENAI},
    "gpt-3.5*": {"thinking": Thinking.NONE, "window_tokens": 16_385, "source": _OPENAI},
    "gpt-4*": {"thinking": Thinking.NONE, "window_tokens": 8_192, "source": _OPENAI},
    "gpt-4-32k*": {"window_tokens": 32_000},
    "gpt-4-turbo*": {"window_tokens": 128_000},
    "gpt-4.1*": {"window_tokens": 1_000_000},
    "gpt-4.5*": {"window_tokens": 128_000},
    "gpt-4o*": {"window_tokens": 128_000},
    "gpt-5*": {"window_tokens": 400_000, "limits_thinking": True, "source": _OPENAI},
    "gpt-5-chat*": {"thinking": Thinking.NONE, "window_tokens": 128_000},
    "gpt-5.3*": {"window_tokens": 128_000},
    "gpt-5.3-codex*": {"window_tokens": 400_000},
    "gpt-5.4*": {"window_tokens": 1_050_000},
    "gpt-5.4-mini*": {"window_tokens": 400_000},
    "gpt-5.4-nano*": {"window_tokens": 400_000},
    "gpt-5.5*": {"window_tokens": 1_000_000},
    "gpt-5.6*": {"window_tokens": 1_050_000, "explains_cache": True},  # older ones refuse `prompt_cache_options`
    "gpt-6*": {"window_tokens": 1_050_000, "limits_thinking": True, "explains_cache": True, "source": _OPENAI},
    "gpt-oss*": {"window_tokens": 131_072, "source": _LIST},
    "o[134]*": {"window_tokens": 200_000, "has_sampling": False, "limits_thinking": True, "source": _OPENAI},
    "o1-mini*": {"window_tokens": 128_000},
    "o1-preview*": {"window_tokens": 128_000},
    # Mistral, also at vLLM and Nvidia
    **dict.fromkeys(_MISTRAL_NAMES, _MISTRAL),
    # Others, by the list of prices: the smallest window of a family that its own provider serves.
    "grok-*": {"window_tokens": 131_072, "source": _LIST},
    "grok-2*": {"window_tokens": 32_768},
    "grok-4*": {"window_tokens": 256_000},
    "grok-4-1-fast*": {"window_tokens": 2_000_000},
    "grok-4-fast*": {"window_tokens": 2_000_000},
    "grok-4.[23]*": {"window_tokens": 1_000_000},
    "grok-4.[5-9]*": {"window_tokens": 500_000},
    "grok-[5-9]*": {"window_tokens": 500_000},
    "deepseek-*": {"window_tokens": 64_000, "source": _LIST},
    "deepseek-v3*": {"window_tokens": 128_000},
    "deepseek-v[4-9]*": {"window_tokens": 1_000_000},
    "deepseek-flash*": {"window_tokens": 1_000_000},
    "qwen*": {"window_tokens": 32_768, "source": _LIST},
    "qwen3*": {"window_tokens": 131_072},
    "qwen3.[5-9]*": {"window_tokens": 262_144},
    "kimi-*": {"window_tokens": 131_072, "source": _LIST},
    "kimi-k2.[5-9]*": {"window_tokens": 262_144},
    "kimi-k3*": {"window_tokens": 1_040_000},
}


def strip_name_prefix(name: str) -> str:
    """Return a model's name without the prefix of a router ("openai/gpt-4o") or a fine-tuned model ("ft:...")."""
    return name.rpartition("/")[2].removeprefix("ft:")


@lru_cache(maxsize=1_000)
def find_profile(name: str) -> ModelProfile:
    """Return the abilities of a model by its name; those of an unknown one are the defaults."""
    family = strip_name_prefix(name).lower()
    found: dict[str, Any] = {}
    for pattern, values in _ROWS.items():
        if fnmatchcase(family, pattern):
            found |= values
    return ModelProfile(**found)
