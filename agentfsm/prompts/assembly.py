"""Assemble a prompt of layers within a budget of tokens. Elastic layers are shortened, fixed ones never.

Source: document F, 2, 6.4 and 7.3.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import COUNT, COUNT_OR_ZERO, FUNCTION, STRING, require_type
from agentfsm.core.value import Value
from agentfsm.prompts.assertions import CountTokens
from agentfsm.prompts.template import (
    MIN_TOKENS,
    LayerKind,
    PromptTemplate,
    RenderedPrompt,
    VariableKind,
    as_layer_kind,
)
from agentfsm.tokens.estimate import EstimatedCounter

_ORDER: Final = {kind: place for place, kind in enumerate(LayerKind)}
# Attempts to shorten one layer: counts of tokens are not exactly additive, so the first may leave a few too many.
_ATTEMPTS: Final = 4
_LINE_END: Final = re.compile(r"\s*\n")
_BLANK: Final = re.compile(r"\s+")
_LEFT_OUT: Final = "[... the rest is left out]"


@attrs.frozen(kw_only=True)
class Layer(Value):
    """A part of an assembled prompt."""

    text: str = attrs.field(validator=STRING)
    """Text of the layer. An empty layer is left out."""

    kind: LayerKind = attrs.field(default=LayerKind.CONTEXT, converter=as_layer_kind)
    """Place in the prompt. CONTEXT is elastic, all others are fixed."""

    title: str = attrs.field(default="", validator=STRING)
    """Heading; empty for none."""

    priority: int = attrs.field(default=0, validator=require_type(int, wanted="a whole number"))
    """Priority among elastic layers: the lowest is shortened first."""

    max_tokens: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Maximum tokens. An elastic layer is shortened to it, a fixed one that is longer is an error."""

    min_tokens: int = attrs.field(default=MIN_TOKENS, validator=COUNT_OR_ZERO)
    """Tokens that shortening leaves, for an elastic layer."""

    shrink: Callable[[str, int], str] | None = attrs.field(default=None, validator=FUNCTION.or_none(), repr=False)
    """Function that shortens the text to a number of tokens. None: the beginning is kept, as whole lines, or as whole
    entries of a JSON list or object.
    """

    sources: tuple[str, ...] = ()
    """References of the prompts that the text was made of."""

    shorten_values: Callable[[int, CountTokens], str] | None = attrs.field(default=None, repr=False, eq=False)
    """Shortens the values of a rendered prompt; set by `compose`, so that its literals stay whole."""

    @property
    def is_elastic(self) -> bool:
        """Whether the layer may be shortened."""
        return self.kind is LayerKind.CONTEXT

    @property
    def block(self) -> str:
        """Text with its heading."""
        return f"## {self.title}\n{self.text}" if self.title else self.text


@attrs.frozen(kw_only=True)
class ShortenedLayer(Value):
    """A layer that was shortened."""

    title: str
    """Heading of the layer, or its first source."""

    before: int
    """Tokens before, heading included."""

    after: int
    """Tokens after."""


class AssembledPrompt(RenderedPrompt):
    """Text made of layers, which knows the versions of its prompts: `Agent(instructions=assemble(...))`."""

    __slots__ = ("shortened", "tokens")

    tokens: int
    """Tokens of the text, at most the budget."""

    shortened: tuple[ShortenedLayer, ...]
    """Layers that were shortened; empty if everything fitted."""


def compose(prompts: Mapping[str, PromptTemplate], /, **values: Any) -> tuple[Layer, ...]:
    """Render prompts as layers, each with its own variables only.

    Args:
        prompts: Prompts by heading, in order; several agents can share one, such as that of an output format.
        **values: Values for the variables of all prompts.

    Raises:
        MisuseError: if a value is missing, or belongs to no prompt.
    """
    known = {name for prompt in prompts.values() for name in prompt.variables}
    if unknown := sorted(set(values) - known):
        raise MisuseError(f"compose() got unknown variables {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return tuple(_as_layer(title, prompt, values) for title, prompt in prompts.items())


def _as_layer(title: str, prompt: PromptTemplate, values: Mapping[str, Any]) -> Layer:
    own = {name: value for name, value in values.items() if name in prompt.variables}
    text = prompt.render(**own)
    return Layer(
        text=text,
        kind=prompt.layer,
        title=title,
        priority=prompt.priority,
        max_tokens=prompt.max_tokens,
        min_tokens=prompt.min_tokens,
        sources=text.sources,
        shorten_values=partial(_shorten_values, prompt, own),
    )


def assemble(layers: Iterable[Layer], budget: int, count: CountTokens | None = None) -> AssembledPrompt:
    """Join layers to a prompt of at most `budget` tokens. The layers themselves are not changed.

    The order is that of the layer kinds, and as given within a kind: long-lived text first, so that the caches of
    providers hold. If the text is too long, elastic layers are shortened, by rising priority.

    Args:
        layers: The layers.
        budget: Maximum tokens. Leave room for tools, history and the answer.
        count: Function that counts tokens, for example `(await load_counter("gpt-5.4-mini")).count`; None: an estimate.

    Raises:
        MisuseError: if the fixed layers alone exceed the budget, or the elastic ones cannot be shortened enough.
    """
    COUNT.check("assemble", "budget", budget)
    count = count or EstimatedCounter().count
    given = sorted((layer for layer in layers if layer.text), key=lambda layer: _ORDER[layer.kind])
    left = [_fit_maximum(layer, count) for layer in given]
    elastic = [index for index, layer in enumerate(left) if layer.is_elastic]
    for index in sorted(elastic, key=lambda index: (left[index].priority, -index)):
        for _ in range(_ATTEMPTS):
            if (excess := count(_join(left)) - budget) <= 0:
                break
            left[index] = _shorten(left[index], count(left[index].block) - excess, count)
    tokens = count(_join(left))
    if tokens > budget:
        raise MisuseError(_describe_excess(left, tokens, budget, count))
    sizes = [(layer, count(layer.block), count(_join([after]))) for layer, after in zip(given, left, strict=True)]
    made = AssembledPrompt(_join(left), [source for layer in left for source in layer.sources])
    made.tokens = tokens
    made.shortened = tuple(
        [
            ShortenedLayer(title=_name(layer), before=before, after=after)
            for layer, before, after in sizes
            if after < before
        ]
    )
    return made


def _join(layers: Iterable[Layer]) -> str:
    return "\n\n".join(layer.block for layer in layers if layer.text)


def _name(layer: Layer) -> str:
    return layer.title or next(iter(layer.sources), str(layer.kind))


def _fit_maximum(layer: Layer, count: CountTokens) -> Layer:
    """Return the layer with at most its own maximum of tokens."""
    most = math.inf if layer.max_tokens is None else layer.max_tokens
    for _ in range(_ATTEMPTS if layer.is_elastic else 0):
        if (excess := count(layer.block) - most) <= 0:
            break
        layer = _shorten(layer, count(layer.block) - int(excess), count)
    if (tokens := count(layer.block)) > most:
        fixed = "it could not be shortened" if layer.is_elastic else "fixed layers are not shortened"
        raise MisuseError(
            f"layer {_name(layer)!r} has {tokens:,} tokens, more than its max_tokens={layer.max_tokens:,}: {fixed}"
        )
    return layer


def _shorten(layer: Layer, tokens: int, count: CountTokens) -> Layer:
    """Return the layer with about this number of tokens, but not below its floor, and never longer than before."""
    heading = count(layer.block) - count(layer.text)
    target = max(tokens, min(layer.min_tokens, count(layer.block))) - heading
    if layer.shrink is not None:
        text = layer.shrink(layer.text, max(target, 0))
        STRING.check("Layer.shrink", "result", text)
    elif layer.shorten_values is not None:
        text = layer.shorten_values(target, count)
    else:
        text = shorten_text(layer.text, target, count)
    return attrs.evolve(layer, text=text) if count(text) < count(layer.text) else layer


def _shorten_values(prompt: PromptTemplate, values: Mapping[str, Any], tokens: int, count: CountTokens) -> str:
    """Render a prompt with shorter values, the longest first, so that neither literals nor marks are cut."""
    left = dict(values)
    text = prompt.render(**left)
    for _ in range(_ATTEMPTS * (len(left) + 1)):
        sizes = {name: count(_as_text(prompt, name, value)) for name, value in left.items() if value not in ("", None)}
        if not sizes or (excess := count(text) - tokens) <= 0:
            break
        longest = max(sizes, key=lambda name: sizes[name])
        shorter = shorten_text(_as_text(prompt, longest, left[longest]), sizes[longest] - excess, count)
        is_json = prompt.variables[longest].kind is VariableKind.JSON
        left[longest] = shorter if not is_json or shorter else None
        text = prompt.render(**left)
    return text


def _as_text(prompt: PromptTemplate, name: str, value: Any) -> str:
    is_json = prompt.variables[name].kind is VariableKind.JSON
    return json.dumps(value, ensure_ascii=False, indent=2) if is_json else value


def shorten_text(text: str, tokens: int, count: CountTokens) -> str:
    """Return the beginning of a text in at most this number of tokens, with a mark that the rest is left out.

    JSON keeps whole entries and stays JSON but for the mark. Other text is cut at the end of a line, or else of a word.

    Returns:
        The text itself if it fits; an empty text if not even the mark fits.
    """
    if count(text) <= tokens:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    build, units = partial(_build_lines, text), len(text)
    if isinstance(value, list | dict):
        build, units = partial(_build_json, value), len(value)
    kept = bisect_right(range(units + 1), tokens, key=lambda size: count(build(size))) - 1
    while kept >= 0 and count(build(kept)) > tokens:  # counts do not always rise with the text
        kept -= 1
    return build(kept) if kept >= 0 else ""


def _build_json(value: list[Any] | dict[str, Any], size: int) -> str:
    entries = value[:size] if isinstance(value, list) else dict(list(value.items())[:size])
    return f"{json.dumps(entries, ensure_ascii=False, indent=2)}\n[{size:,} of {len(value):,} entries]"


def _build_lines(text: str, size: int) -> str:
    """Return the beginning of a text, cut back to the end of a line, or of a word if that would cost half of it."""
    head = text[:size]
    ends = (max((found.start() for found in blanks.finditer(head)), default=0) for blanks in (_LINE_END, _BLANK))
    head = head[: next((end for end in ends if 2 * end >= size), size)]
    return f"{head}\n{_LEFT_OUT}" if head else _LEFT_OUT


def _describe_excess(layers: list[Layer], tokens: int, budget: int, count: CountTokens) -> str:
    fixed = count(_join(layer for layer in layers if not layer.is_elastic))
    if fixed > budget:
        return (
            f"the fixed layers alone have {fixed:,} tokens, and the budget is {budget:,}: shorten them, or raise the "
            "budget; rules and requests are never cut"
        )
    return (
        f"the prompt has {tokens:,} tokens after all elastic layers were shortened as far as possible, and the budget "
        f"is {budget:,}: lower min_tokens of a layer, leave one out, or raise the budget"
    )
