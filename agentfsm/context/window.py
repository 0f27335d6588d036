"""Drop the oldest messages: until the rest fits, or all but a fixed number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from agentfsm.core.validation import COUNT
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
