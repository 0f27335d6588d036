"""How a model is asked: what an agent sets, and what a run or a turn sets in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import BOOL, COUNT, STRING, require_between, require_type
from agentfsm.core.value import Value


def _as_stop_texts(texts: Iterable[str]) -> tuple[str, ...]:
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        return tuple(texts)
    raise MisuseError(f"Settings(stop={texts!r}): give a list of texts, also where there is one: ['END']")


def _copy(fields: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(fields, Mapping):
        return dict(fields)
    raise MisuseError(f"Settings(extra_body={fields!r}): give a dict, {{}} for none")


@attrs.frozen(kw_only=True)
class Settings(Value):
    """How the model is asked. What is None is not sent, and the provider's own default holds.

    Raises:
        MisuseError: when a value is out of its range, or of a wrong type.
    """

    temperature: float | None = attrs.field(default=None, validator=require_between(0, 2).or_none())
    """0 (the likeliest word) to 2; some models take no more than 1, some only their default."""

    top_p: float | None = attrs.field(default=None, validator=require_between(0, 1).or_none())
    """The share of likely words that is drawn from, 0 to 1."""

    max_tokens: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """The largest answer, tokens."""

    reasoning_effort: str | None = attrs.field(default=None, validator=STRING.or_none())
    """How much the model thinks before it answers, in the provider's words: "low", "medium", "high"."""

    tool_choice: str | None = attrs.field(default=None, validator=STRING.or_none())
    """"auto", "none", "required", or the name of one tool."""

    parallel_tool_calls: bool | None = attrs.field(default=None, validator=BOOL.or_none())
    """Whether a reply may hold several calls; False also runs them one by one."""

    stream: bool = attrs.field(default=False, validator=BOOL)
    """Whether to ask for a streamed reply also where nobody watches, so that read-only calls start early."""

    seed: int | None = attrs.field(default=None, validator=require_type(int, wanted="a whole number").or_none())
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_stop_texts)
    """Texts at which the answer ends."""

    extra_body: dict[str, Any] = attrs.field(factory=dict, converter=_copy)
    """Further fields of the request, as the provider names them; they go before all others."""

    @property
    def thinking_tokens(self) -> int:
        """How many tokens of an answer `extra_body` sets aside for thinking, in Anthropic's words; 0 for none."""
        thinking = self.extra_body.get("thinking")
        tokens = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
        return tokens if isinstance(tokens, int) else 0

    def with_defaults(self, base: Settings) -> Settings:
        """Return these settings, and the base's where these say nothing: None, False or empty."""
        own = {each.name: getattr(self, each.name) for each in attrs.fields(Settings)}
        said = {name: value for name, value in own.items() if value not in (None, (), False)}
        return attrs.evolve(base, **said | {"extra_body": {**base.extra_body, **self.extra_body}})


# Says nothing.
DEFAULT_SETTINGS = Settings()
