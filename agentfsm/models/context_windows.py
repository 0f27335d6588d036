"""Default context windows of models, by name."""

from __future__ import annotations

from typing import Final

# Context window of a model that is not listed, in tokens.
DEFAULT_WINDOW_TOKENS: Final = 128_000

# Context windows in tokens, by prefix of the model's name; the longest matching prefix counts.
# Source: OpenAI's and Anthropic's model pages and the list of genai-prices 0.2.3; where they differ, the smaller.
_WINDOWS: Final = {
    "claude": 200_000,
    "claude-fable": 1_000_000,
    "claude-haiku-5-5": 1_000_000,
    "claude-mythos": 1_000_000,
    "claude-opus-4-6": 1_000_000,
    "claude-opus-4-7": 1_000_000,
    "claude-opus-4-8": 1_000_000,
    "claude-opus-5": 1_000_000,
    "claude-sonnet-4-6": 1_000_000,
    "claude-sonnet-5": 1_000_000,
    "gpt-3.5-turbo": 16_385,
    "gpt-4": 8_192,
    "gpt-4-32k": 32_000,
    "gpt-4-turbo": 128_000,
    "gpt-4.1": 1_000_000,
    "gpt-4.5": 128_000,
    "gpt-4o": 128_000,
    "gpt-5": 400_000,
    "gpt-5-chat": 128_000,
    "gpt-5.3": 128_000,
    "gpt-5.3-codex": 400_000,
    "gpt-5.4": 1_050_000,
    "gpt-5.4-mini": 400_000,
    "gpt-5.4-nano": 400_000,
    "gpt-5.5": 1_000_000,
    "gpt-5.6": 1_050_000,
    "gpt-6": 1_050_000,
    "gpt-oss": 131_072,
    "o1": 200_000,
    "o1-mini": 128_000,
    "o1-preview": 128_000,
    "o3": 200_000,
    "o4-mini": 200_000,
}


def strip_name_prefix(name: str) -> str:
    """Return a model's name without the prefix of a router ("openai/gpt-4o") or a fine-tuned model ("ft:...")."""
    return name.rpartition("/")[2].removeprefix("ft:")


def find_window_tokens(name: str) -> int:
    """Return the context window of a model in tokens, input and output together."""
    family = strip_name_prefix(name)
    beginnings = [beginning for beginning in _WINDOWS if family.startswith(beginning)]
    return _WINDOWS[max(beginnings, key=len)] if beginnings else DEFAULT_WINDOW_TOKENS
