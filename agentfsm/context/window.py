"""Policies without a model: drop the oldest messages, or shorten tool results, which are the longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs

from agentfsm.core.validation import COUNT, COUNT_OR_ZERO
from agentfsm.ports.context import CompactionBudget, ContextPolicy, MessageGroup, count_tokens


@attrs.frozen
class SlidingWindow(ContextPolicy):
    """Keep the task and the newest messages that fit. A summary is dropped only if it would not fit at all."""

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:
        """Return the groups without the oldest ones."""
        return drop_lowest(groups, budget, lambda _group: 0)


@attrs.frozen
class Cut(ContextPolicy):
    """Keep the task, the summaries, and the newest messages up to a number, regardless of their size."""

    messages: int = attrs.field(validator=COUNT)
    """Maximum of messages, 1 or more. A call is kept or dropped with its results, so fewer may remain. The newest
    group always stays, even if it is larger.
    """

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:  # noqa: ARG002  it counts no tokens
        """Return the newest groups."""
        left: list[MessageGroup] = []
        room_for = self.messages
        for group in reversed(groups):
            room_for -= 0 if group.is_task or group.is_summary else group.message_count
            if group.is_task or group.is_summary or group.is_newest or room_for >= 0:
                left.append(group)
        return left[::-1]


def drop_lowest(
    groups: Sequence[MessageGroup], budget: CompactionBudget, rank: Callable[[MessageGroup], float]
) -> Sequence[MessageGroup]:
    """Drop groups until the rest fits: the lowest rank first, the oldest among equals. The order is kept.

    The task and the newest group stay. Summaries and unread groups are dropped last, and only if the rest would exceed
    the hard limit.
    """
    tokens = count_tokens(groups)
    places = [place for place, group in enumerate(groups) if not (group.is_task or group.is_newest)]
    gone: set[int] = set()
    for place in sorted(places, key=lambda place: (_drop_order(groups[place]), rank(groups[place]))):
        if tokens <= (budget.limit_tokens if _drop_order(groups[place]) else budget.target_tokens):
            break
        gone.add(place)
        tokens -= groups[place].tokens
    return [group for place, group in enumerate(groups) if place not in gone]


def _drop_order(group: MessageGroup) -> int:
    return group.is_summary + 2 * group.is_unread


# Characters of a result that the model has read (Source: document A, 8.3, and document G, 7).
MAX_RESULT_CHARS: Final = 500
# Items that are kept of a list (Source: document F, 7.4).
MAX_RESULT_ITEMS: Final = 5
# Newest groups that stay: a model that compares two results has read them in two turns.
KEEP_NEWEST: Final = 2
# Steps by which unread results are shortened if they do not fit, in characters.
_UNREAD_CHARS: Final = (16_000, 8_000, 4_000, 2_000, 1_000)


@attrs.frozen(kw_only=True)
class TrimResults(ContextPolicy):
    """Shorten tool results that the model has read, the oldest first. The model can read the rest with `read_result`.

    A text keeps its head and its tail, a JSON list its first items and its length. Results that the model has not read
    are shortened only if the request does not fit otherwise, and as little as possible.
    """

    chars: int = attrs.field(default=MAX_RESULT_CHARS, validator=COUNT)
    """Characters that are kept of a result, 1 or more; of a JSON list, four times as many. Default 500."""

    items: int = attrs.field(default=MAX_RESULT_ITEMS, validator=COUNT_OR_ZERO)
    """Items that are kept of a JSON list, 0 or more. Default 5. 0: lists are cut as text."""

    keep: int = attrs.field(default=KEEP_NEWEST, validator=COUNT_OR_ZERO)
    """Number of newest groups that stay unchanged, 0 or more. Default 2: two results can still be compared."""

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
        groups = _if_shorter(left, groups)
        for chars in (*[step for step in _UNREAD_CHARS if step > self.chars], self.chars):
            if count_tokens(group for group in groups if group.is_fixed) <= budget.limit_tokens:
                break
            left = [budget.shorten(group, chars, self.items) if group.is_unread else group for group in groups]
            groups = _if_shorter(left, groups)
        return groups


def _if_shorter(left: Sequence[MessageGroup], before: Sequence[MessageGroup]) -> Sequence[MessageGroup]:
    """Return the shortened groups, or the original ones if that saved nothing."""
    return left if count_tokens(left) < count_tokens(before) else before
