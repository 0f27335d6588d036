"""Settings of model requests, for an agent, a run or a turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import BOOL, COUNT, STRING, require_between, require_type, suggest_fields
from agentfsm.core.value import Value

# Error about tools in `extra_body` beside those of the agent.
EXTRA_TOOLS: Final = (
    "Settings(extra_body=...) has tools, which would replace those of the agent: list the provider's own tools among "
    "the agent's, as tools=[WebSearch(), ...], and leave them out of extra_body"
)
# Fields of `extra_body` that name tools which the provider executes.
PROVIDER_TOOLS: Final = frozenset({"tools", "mcp_servers"})


def _as_stop_texts(texts: Iterable[str]) -> tuple[str, ...]:
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        return tuple(texts)
    raise MisuseError(f"Settings(stop={texts!r}): give a list of strings, also for a single one: ['END']")


def _copy(fields: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(fields, Mapping):
        return dict(fields)
    raise MisuseError(f"Settings(extra_body={fields!r}): give a dict, or {{}} for no fields")


@attrs.frozen(kw_only=True)
class Settings(Value):
    """Settings of model requests. A setting that is None is not sent, so the provider's default applies.

    Args:
        temperature: Sampling temperature, 0 (most likely token) to 2.
        top_p: Probability mass of the tokens that are sampled from (nucleus sampling), 0 to 1.
        max_tokens: Largest number of tokens in a reply, 1 or more.
        reasoning_effort: Amount of reasoning before the answer, in the provider's words, for example "low", "medium" or
            "high".
        tool_choice: Whether and which tools the model calls: "auto", "none", "required", or the name of one tool.
        parallel_tool_calls: Whether a reply may contain several tool calls.
        stream: Whether to stream replies even if no caller consumes the stream, so that read-only calls start early.
        seed: Seed of the provider's sampling, a whole number, for providers that support one.
        stop: Stop sequences: the model stops before it writes one of these.
        extra_body: Further fields of the request body, under the provider's names.

    Raises:
        MisuseError: when a value is out of its range or of a wrong type.
    """

    temperature: float | None = attrs.field(default=None, validator=require_between(0, 2).or_none())
    """Sampling temperature, 0 (most likely token) to 2. Some models accept at most 1, some only their default."""

    top_p: float | None = attrs.field(default=None, validator=require_between(0, 1).or_none())
    """Probability mass of the tokens that are sampled from (nucleus sampling), 0 to 1."""

    max_tokens: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Largest number of tokens in a reply, 1 or more."""

    reasoning_effort: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Amount of reasoning before the answer, in the provider's words, for example "low", "medium" or "high"."""

    tool_choice: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Whether and which tools the model calls: "auto", "none", "required", or the name of one tool."""

    parallel_tool_calls: bool | None = attrs.field(default=None, validator=BOOL.or_none())
    """Whether a reply may contain several tool calls. False also runs the calls one by one."""

    stream: bool = attrs.field(default=False, validator=BOOL)
    """Whether to stream replies even if no caller consumes the stream, so that read-only calls start early."""

    seed: int | None = attrs.field(default=None, validator=require_type(int, wanted="a whole number").or_none())
    """Seed of the provider's sampling, a whole number, for providers that support one."""

    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_stop_texts)
    """Stop sequences: the model stops before it writes one of these. Empty: none."""

    extra_body: dict[str, Any] = attrs.field(factory=dict, converter=_copy)
    """Further fields of the request body, under the provider's names. They override all other fields."""

    @property
    def thinking_tokens(self) -> int:
        """Tokens that `extra_body` reserves for thinking, in Anthropic's form (`thinking.budget_tokens`); 0 if none."""
        thinking = self.extra_body.get("thinking")
        tokens = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
        return tokens if isinstance(tokens, int) else 0

    def check_withheld(self) -> None:
        """Check that a run which withholds calls can use the settings.

        Raises:
            MisuseError: if `extra_body` has tools.
        """
        if names := PROVIDER_TOOLS & self.extra_body.keys():
            raise MisuseError(
                f"the provider executes the tools of Settings(extra_body={{{min(names)!r}: ...}}) itself, so a run "
                "cannot withhold their calls: use an agent without them"
            )

    def with_defaults(self, base: Settings) -> Settings:
        """Return these settings, with the values of `base` for all that are None, False or empty here."""
        own = {each.name: getattr(self, each.name) for each in attrs.fields(Settings)}
        said = {name: value for name, value in own.items() if value is not None and value is not False and value != ()}
        return attrs.evolve(base, **said | {"extra_body": {**base.extra_body, **self.extra_body}})


suggest_fields(Settings, stop_sequences="stop", top_k="extra_body")

# Sets nothing: the provider's defaults apply.
DEFAULT_SETTINGS = Settings()
