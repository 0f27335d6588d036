"""The sliding window: which messages of a history a request shows.

The history itself is never cut. A request shows all of it, or the task, a note on what is missing, and the messages
from `start` on:

    task   [12 earlier messages removed ...]   messages[start:]

`start` only grows, and never stands between a call and its results. Counting is kept apart from choosing: a `Tally`
counts each message once and holds running totals, so a turn costs what it added, and a cut a binary search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import Message, ToolResult
from agentfsm.core.run import gap_note
from agentfsm.ports import ContextPolicy
from agentfsm.tally import BYTES, Tally, count_message

if TYPE_CHECKING:
    from collections.abc import Sequence

AFTER_CUT: Final = 0.5
# The part of the allowance that a cut leaves in use. Each cut changes the start of the request, so the provider's
# prompt cache is lost; cutting by half loses it once per half a window of new messages instead of every turn.


def _check_share(_window: object, _attribute: object, value: float) -> None:
    if not 0 < value <= 1:
        msg = f"share is {value}, but it is a part of the budget, above 0 and at most 1: 0.75 leaves room for the reply"
        raise MisuseError(msg)


@attrs.frozen(kw_only=True)
class SlidingWindow(ContextPolicy):
    """Shows the newest messages that fit, and always the task."""

    share: float = attrs.field(default=0.75, validator=_check_share)
    # The part of the budget that messages may fill, above 0 to 1. A quarter stays for the reply, and for the difference
    # between our count and the provider's (Source: document B, step 4).

    def fits(self, tally: Tally, start: int, budget_tokens: int) -> bool:
        """Tell whether a request from `start` on fits. A yes is sure even where the tally still counts bytes."""
        return tally.shown(start) <= self.share * budget_tokens

    def start(self, messages: Sequence[Message], tally: Tally, current: int, budget_tokens: int) -> int:
        """Return where the messages of the next request start.

        Args:
            messages: The whole history, in which each call has its results right behind it.
            tally: The count of exactly these messages.
            current: What this returned the last time; 0 at first.
            budget_tokens: What a request may hold besides instructions and tools, tokens.

        Returns:
            `current` where that fits. Else, the smallest index above it that brings the request down to half of what
            it may hold, and that is not a tool result. The last group, which is a call with its results or one other
            message, is kept even where it does not fit.
        """
        if self.fits(tally, current, budget_tokens):
            return current
        task_tokens = 0 if tally.task is None else tally.of(tally.task)
        room = AFTER_CUT * self.share * budget_tokens - task_tokens - _NOTE_TOKENS
        last = _group_start(messages)
        cut = min(tally.first_within(room, current), last)
        while cut < last and isinstance(messages[cut], ToolResult):
            cut += 1
        return cut if _removed(cut, tally.task) > _removed(current, tally.task) else current


def _group_start(messages: Sequence[Message]) -> int:
    """Return where the last group starts."""
    start = max(len(messages) - 1, 0)
    while start > 0 and isinstance(messages[start], ToolResult):
        start -= 1
    return start


def _removed(start: int, task: int | None) -> int:
    """Return how many of the messages before `start` are not shown: all but the task."""
    return start - (task is not None and task < start)


_NOTE_TOKENS: Final = count_message(gap_note(10**9), BYTES)
# More than any note takes: where a cut has to be is found before it is known how much it removes.
