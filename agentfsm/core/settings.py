"""How a model is asked: what an agent sets, and what a run or a turn sets in its place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from agentfsm.core.errors import MisuseError


def _in_range(low: float, high: float) -> Any:
    def check(_settings: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not (is_number and low <= value <= high):
            raise MisuseError(f"Settings({attribute.name}={value!r}): give a number from {low:g} to {high:g}")

    return check


def _is_count(_settings: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise MisuseError(f"Settings({attribute.name}={value!r}): give a whole number, 1 or more")


def _copy(fields: Mapping[str, Any]) -> dict[str, Any]:
    return dict(fields)


@attrs.frozen(kw_only=True)
class Settings:
    """How the model is asked. What is None is not sent, and the provider's own default holds.

    Raises:
        MisuseError: when a value is out of its range.
    """

    temperature: float | None = attrs.field(default=None, validator=_in_range(0, 2))
    # 0 (the likeliest word) to 2; some models take no more than 1, some only their default.
    top_p: float | None = attrs.field(default=None, validator=_in_range(0, 1))
    # The share of likely words that is drawn from, 0 to 1.
    max_tokens: int | None = attrs.field(default=None, validator=_is_count)
    # The largest answer, tokens.
    reasoning_effort: str | None = None
    # How much the model thinks before it answers, in the provider's words: "low", "medium", "high".
    tool_choice: str | None = None
    # "auto", "none", "required", or the name of one tool.
    parallel_tool_calls: bool | None = None
    # Whether a reply may hold several calls; False also runs them one by one.
    stream: bool = False
    # Whether to ask for a streamed reply also where nobody watches, so that read-only calls start early.
    seed: int | None = None
    stop: tuple[str, ...] = ()
    # Texts at which the answer ends.
    extra_body: dict[str, Any] = attrs.field(factory=dict, converter=_copy)
    # Further fields of the request, as the provider names them; they go before all others.

    @property
    def thinking_tokens(self) -> int:
        """How many tokens of an answer `extra_body` sets aside for thinking, in Anthropic's words; 0 for none."""
        thinking = self.extra_body.get("thinking")
        tokens = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
        return tokens if isinstance(tokens, int) else 0

    def over(self, base: Settings) -> Settings:
        """Return these settings, and the base's where these say nothing: None, False or empty."""
        own = {each.name: getattr(self, each.name) for each in attrs.fields(Settings)}
        said = {name: value for name, value in own.items() if value not in (None, (), False)}
        return attrs.evolve(base, **said | {"extra_body": {**base.extra_body, **self.extra_body}})


# Says nothing.
DEFAULT = Settings()
