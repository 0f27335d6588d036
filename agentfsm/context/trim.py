"""Tool results in short: the cheapest way to room, since one result may hold as much as a hundred messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from agentfsm.core.validation import COUNT, COUNT_OR_ZERO
from agentfsm.ports.context import CompactionBudget, ContextPolicy, MessageGroup, count_tokens

# Characters of a result that the model has read (Source: document A, 8.3, and document G, 7).
MAX_RESULT_CHARS: Final = 500
# Items of a list (Source: document F, 7.4).
MAX_RESULT_ITEMS: Final = 5
# Groups: a model that compares two results has read them in two turns.
KEEP_NEWEST: Final = 2
# To how much results are shortened, step by step, that the model has not read and that do not fit.
_UNREAD_CHARS: Final = (16_000, 8_000, 4_000, 2_000, 1_000)


@attrs.frozen(kw_only=True)
class TrimResults(ContextPolicy):
    """Shortens tool results that the model has read, the oldest first; it can read on in one with `read_result`.

    A text keeps its head and its tail, a JSON list its first items and how many there are. Results that the model has
    not read are shortened only where nothing else would make them fit, and as little as possible.
    """

    chars: int = attrs.field(default=MAX_RESULT_CHARS, validator=COUNT)
    """Of a result; a list may have four times as many."""

    items: int = attrs.field(default=MAX_RESULT_ITEMS, validator=COUNT_OR_ZERO)
    """Of a list; 0 cuts lists as any other text."""

    keep: int = attrs.field(default=KEEP_NEWEST, validator=COUNT_OR_ZERO)
    """So many of the newest groups are left as they are."""

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:
        """Return the groups with shorter results."""
        left = list(groups)
        excess = count_tokens(left) - budget.target_tokens
        for index, group in enumerate(left[: max(len(left) - self.keep, 0)]):
            if excess <= 0:
                break
            if not group.is_fixed:
                left[index] = budget.shorten(group, self.chars, self.items)
                excess -= group.tokens - left[index].tokens
        return self._trim_unread(_if_shorter(left, groups), budget)

    def _trim_unread(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:
        """Return the groups, with what the model has not read made to fit beside the task."""
        for chars in (*[step for step in _UNREAD_CHARS if step > self.chars], self.chars):
            if count_tokens(group for group in groups if group.is_fixed) <= budget.limit_tokens:
                break
            left = [budget.shorten(group, chars, self.items) if group.is_unread else group for group in groups]
            groups = _if_shorter(left, groups)
        return groups


def _if_shorter(left: Sequence[MessageGroup], before: Sequence[MessageGroup]) -> Sequence[MessageGroup]:
    """Return what was made of the groups; the groups themselves where nothing in them was long."""
    return left if count_tokens(left) < count_tokens(before) else before
