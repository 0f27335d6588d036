"""Compaction of a history: groups of messages, the token budget, and the policies that meet it.

A group is a call with its results, one other message, or a summary. It is kept or dropped as a whole, so that a policy
cannot separate a call from its results.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.history import Span, Summarised, build_note, render_segments
from agentfsm.core.messages import Message
from agentfsm.core.validation import SHARE
from agentfsm.core.value import Value
from agentfsm.ports.model import Model


class GroupKind(StrEnum):
    """The kind of a group, by its content."""

    SYSTEM = "system"
    """A system note or a summary."""

    FINAL = "final"
    """A final answer that the user replied to."""

    USER = "user"
    """A message of the user."""

    RESULTS = "results"
    """A call with its results, at least one of which is a success; or a note with data: the results of a plan, or items
    of the memory.
    """

    ERROR = "error"
    """A call whose results are all failures."""

    OTHER = "other"
    """Anything else that the model said."""


@attrs.frozen(kw_only=True)
class MessageGroup(Value):
    """Messages that a compaction keeps or drops together."""

    segment: Span | Summarised
    """The entry that represents the group in the journal."""

    messages: tuple[Message, ...]
    """The messages of the group as they are shown now, in order; at least one."""

    tokens: int
    """Tokens of the messages, including the provider's framing around them."""

    kind: GroupKind
    """The kind of the group, by its content."""

    is_task: bool = False
    """Whether the group is the task, which is always shown."""

    is_newest: bool = False
    """Whether the group is the newest one, which is always shown."""

    is_unread: bool = False
    """Whether the model has not replied to the group yet. Unread groups are dropped last."""

    @property
    def is_summary(self) -> bool:
        """Whether the group is a summary of other messages."""
        return isinstance(self.segment, Summarised)

    @property
    def is_fixed(self) -> bool:
        """Whether the model still needs the group: it is the task, or unread."""
        return self.is_task or self.is_unread

    @property
    def message_count(self) -> int:
        """Number of messages of the history that the group represents."""
        return self.segment.count if isinstance(self.segment, Summarised) else self.segment.end - self.segment.start


PolicyAsk: TypeAlias = Callable[[Model | None, str, str, int], Awaitable[str]]
"""Function that asks a model without tools, outside the run's history but within its budget. It takes the model (None:
the agent's own), instructions, a question and the maximum tokens of the answer, and returns the text of the answer,
which is never blank. Raises ModelError, and the journal records the reason.
"""


@attrs.frozen(kw_only=True)
class CompactionBudget(Value):
    """The token budget of a compaction, and the operations that a policy can use to meet it."""

    target_tokens: int
    """Maximum tokens of all groups together that the compaction aims at. Below 0 if nothing may be kept."""

    limit_tokens: int
    """Hard limit on the tokens of all groups together. Above it, the provider may refuse the request."""

    history: Sequence[Message]
    """The complete history of the run."""

    model: Model
    """The agent's own model."""

    count: Callable[[Message], int]
    """Function that counts the tokens of a message."""

    ask: PolicyAsk
    """Function that asks a model without tools, within the budget of the run, for example for a summary."""

    def fits(self, groups: Iterable[MessageGroup]) -> bool:
        """Whether the groups are within `target_tokens`."""
        return count_tokens(groups) <= self.target_tokens

    def shorten(self, group: MessageGroup, chars: int, items: int) -> MessageGroup:
        """Return the group with its tool results cut to `chars` characters, and lists to `items` items.

        Args:
            group: The group. Results that were shortened further before stay as they are.
            chars: Maximum characters of each result, 1 or more.
            items: Maximum items of each list, 0 or more; 0 cuts lists like any other text.
        """
        span = group.segment
        if isinstance(span, Summarised) or (span.chars is not None and span.chars <= chars):
            return group
        shown = attrs.evolve(span, chars=chars, items=items)
        messages = render_segments((shown,), self.history)
        pairs = zip(group.messages, messages, strict=True)
        saved = sum(self.count(old) - self.count(new) for old, new in pairs if new is not old)
        return attrs.evolve(group, segment=shown, messages=messages, tokens=group.tokens - saved)

    def build_summary(self, groups: Sequence[MessageGroup], text: str) -> MessageGroup:
        """Return a group that replaces these groups by a summary."""
        shown = Summarised(count=sum(group.message_count for group in groups), text=text)
        message = build_note(shown)
        return MessageGroup(segment=shown, messages=(message,), tokens=self.count(message), kind=GroupKind.SYSTEM)


class ContextPolicy(Protocol):
    """Shortens a history that outgrew the context window. `Context` applies several policies in order."""

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:
        """Return the groups that a request shows instead of these, dropping or shortening until they fit.

        Args:
            groups: The groups shown now, oldest first. Each is kept or dropped as a whole.
            budget: The token budget, and the operations that shorten a group.

        Returns:
            Some of these groups in their order, or replacements made by `budget`. They include the task and the newest
            group.

        Raises:
            MisuseError: if the policy is set up wrongly. External failures must not raise.
        """
        ...

    async def aclose(self) -> None:
        """Release the resources of the policy; the default has none."""
        return


def _as_policies(policies: Iterable[ContextPolicy]) -> tuple[ContextPolicy, ...]:
    return tuple(policies)


def _check_policies(_context: object, _attribute: object, policies: tuple[ContextPolicy, ...]) -> None:
    for policy in policies:
        if isinstance(policy, type) or not callable(getattr(policy, "compact", None)):
            raise MisuseError(f"{policy!r} is not a context policy: give for example [TrimResults(), Summarise()]")


@attrs.frozen
class Context(Value):
    """The policies that shorten a history which outgrows the context window, in the order in which they are tried.

    Raises:
        MisuseError: if a policy is invalid, or the share is out of range.
    """

    policies: tuple[ContextPolicy, ...] = attrs.field(converter=_as_policies, validator=_check_policies)
    """Policies in order; each one works on the result of those before it, until the history fits."""

    share: float = attrs.field(default=0.75, kw_only=True, validator=SHARE)
    """Share of the context window that messages may fill, above 0 and at most 1. Default 0.75: a quarter stays for the
    reply, and for the difference between our count and the provider's (Source: document B, step 4).
    """


def count_tokens(groups: Iterable[MessageGroup]) -> int:
    """Return the total tokens of the groups."""
    return sum([group.tokens for group in groups])
