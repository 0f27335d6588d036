"""Drop the least important messages: by kind, repeated errors, and bare acknowledgements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from agentfsm.context.window import drop_lowest
from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, ToolResult
from agentfsm.core.validation import COUNT
from agentfsm.ports.context import CompactionBudget, ContextPolicy, GroupKind, MessageGroup

# Source: document F, 7.2.
IMPORTANCE: Final[Mapping[GroupKind, float]] = MappingProxyType(
    {
        GroupKind.SYSTEM: 100,
        GroupKind.FINAL: 90,
        GroupKind.USER: 80,
        GroupKind.OTHER: 50,
        GroupKind.RESULTS: 40,
        GroupKind.ERROR: 20,
    },
)
# The longest bare acknowledgement is shorter (Source: document G, 7).
ACKNOWLEDGEMENT_CHARS: Final = 20
# Phrases of an acknowledgement, in lower case. By length alone, "Paris" and "42" would count as one.
ACKNOWLEDGEMENTS: Final = frozenset(
    (
        *("ok", "okay", "sure", "of course", "certainly", "yes", "right", "all right", "alright", "got it", "i see"),
        *("understood", "i understand", "noted", "done", "will do", "sounds good", "no problem", "great", "perfect"),
        *("thanks", "thank you", "you're welcome", "好", "好的", "嗯", "是的", "对", "行", "可以", "明白", "明白了"),
        *("知道了", "了解", "收到", "没问题", "谢谢", "不客气", "完成", "已完成"),
    ),
)
# Separators of phrases: punctuation and symbols, emoji included.
_PHRASE_SEPARATORS: Final = re.compile(r"[^\w\s']+")


def _merge_scores(scores: Mapping[GroupKind, float]) -> Mapping[GroupKind, float]:
    try:
        own = {GroupKind(kind): float(score) for kind, score in scores.items()}
    except (TypeError, ValueError, AttributeError):
        kinds = ", ".join(GroupKind)
        raise MisuseError(f"PriorityRetention(scores={scores!r}): give numbers by kind, out of {kinds}") from None
    return MappingProxyType({**IMPORTANCE, **own})


@attrs.frozen
class PriorityRetention(ContextPolicy):
    """Drop the least important groups until the rest fits, the oldest among equals first. The order is kept."""

    scores: Mapping[GroupKind, float] = attrs.field(default=IMPORTANCE, converter=_merge_scores)
    """Importance of each kind of group, as a number; the highest is kept longest. Missing kinds have their default."""

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:
        """Return the most important groups that fit."""
        return drop_lowest(groups, budget, lambda group: self.scores[group.kind])


@attrs.frozen
class DropRepeatedErrors(ContextPolicy):
    """Drop failed calls whose error text is the same as that of an earlier call."""

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:  # noqa: ARG002  it counts no tokens
        """Return the groups, with each error only once."""
        known: set[tuple[tuple[str, str], ...]] = set()
        left: list[MessageGroup] = []
        for group in groups:
            errors = tuple([(each.tool, each.content) for each in group.messages if isinstance(each, ToolResult)])
            is_error = group.kind is GroupKind.ERROR
            if not is_error or errors not in known or group.is_fixed:
                left.append(group)
            if is_error:
                known.add(errors)
        return left


def _as_phrases(phrases: Iterable[str]) -> frozenset[str]:
    return frozenset(phrases)


@attrs.frozen(kw_only=True)
class DropAcknowledgements(ContextPolicy):
    """Drop messages in which the model only acknowledges, such as "OK, understood"."""

    chars: int = attrs.field(default=ACKNOWLEDGEMENT_CHARS, validator=COUNT)
    """Length from which a message is never an acknowledgement, in characters, 1 or more. Default 20."""

    phrases: frozenset[str] = attrs.field(default=ACKNOWLEDGEMENTS, converter=_as_phrases)
    """Phrases that count as acknowledgements, in lower case. A message is dropped if it consists only of these."""

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:  # noqa: ARG002  it counts no tokens
        """Return the groups that are not acknowledgements."""
        return [group for group in groups if group.is_fixed or not self._is_acknowledgement(group)]

    def _is_acknowledgement(self, group: MessageGroup) -> bool:
        said = group.messages[0]
        if not isinstance(said, AssistantMessage) or said.calls or len(said.text.strip()) >= self.chars:
            return False
        phrases = [each for phrase in _PHRASE_SEPARATORS.split(said.text.lower()) if (each := " ".join(phrase.split()))]
        return all(each in self.phrases for each in phrases)
