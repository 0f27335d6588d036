"""What a compaction works on: groups of messages, the room that they shall fit into, and the policies that see to it.

A group is kept or dropped as one: a call with its results, one other message, or a summary. So a policy cannot part a
call from its results.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import Message
from agentfsm.core.segments import Span, Summarised, build_note, render_segments
from agentfsm.core.validation import SHARE
from agentfsm.core.value import Value
from agentfsm.ports.model import Model


class GroupKind(StrEnum):
    """What a group is, by what it says."""

    SYSTEM = "system"
    """A note of the system, or a summary."""

    FINAL = "final"
    """An answer that the user went on from."""

    USER = "user"
    RESULTS = "results"
    """A call with its results, one of them a success at least."""

    ERROR = "error"
    """A call whose results are all failures."""

    OTHER = "other"
    """Anything else that the model said."""


@attrs.frozen(kw_only=True)
class MessageGroup(Value):
    """What a compaction keeps or drops as one."""

    segment: Span | Summarised
    """What stands for it in the journal."""

    messages: tuple[Message, ...]
    """As they are shown now, in order; at least one."""

    tokens: int
    """Of these messages, with what the provider writes around them."""

    kind: GroupKind
    is_task: bool = False
    """Whether it is the task, which is always shown."""

    is_newest: bool = False
    """Whether it is the last one, which is always shown."""

    is_unread: bool = False
    """Whether the model has not replied to it yet: it is dropped last."""

    @property
    def is_summary(self) -> bool:
        """Whether it tells of other messages in short."""
        return isinstance(self.segment, Summarised)

    @property
    def is_fixed(self) -> bool:
        """Whether there is something that the model has yet to do with it."""
        return self.is_task or self.is_unread

    @property
    def message_count(self) -> int:
        """How many messages of the history it stands for."""
        return self.segment.count if isinstance(self.segment, Summarised) else self.segment.end - self.segment.start


# Asks a model (None: the agent's own) beside the run and within its budget, without tools: instructions, question and
# the tokens of the longest answer in; its text out, which is never blank. Raises ModelError; the journal then says why.
PolicyAsk: TypeAlias = Callable[[Model | None, str, str, int], Awaitable[str]]


@attrs.frozen(kw_only=True)
class CompactionBudget(Value):
    """How much a request may hold, and what a policy can do to keep to it."""

    target_tokens: int
    """What the groups shall come to together, at most. Where nothing may be kept it is below 0."""

    limit_tokens: int
    """What they may come to at the very most: where more stays, the request may be refused."""

    history: Sequence[Message]
    """Of the run, whole."""

    model: Model
    """The agent's own."""

    count: Callable[[Message], int]
    """Counts the tokens of a message."""

    ask: PolicyAsk

    def fits(self, groups: Iterable[MessageGroup]) -> bool:
        """Whether the groups are as few as they shall be."""
        return count_tokens(groups) <= self.target_tokens

    def shorten(self, group: MessageGroup, chars: int, items: int) -> MessageGroup:
        """Return a group whose tool results are shown in so many characters, lists with so many items.

        Args:
            group: The group; of one that was shortened before, each result stays as short as it is.
            chars: 1 or more.
            items: 0 or more; 0 cuts lists as any other text.
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
        """Return a group that tells in short what these have said."""
        shown = Summarised(count=sum(group.message_count for group in groups), text=text)
        message = build_note(shown)
        return MessageGroup(segment=shown, messages=(message,), tokens=self.count(message), kind=GroupKind.SYSTEM)


class ContextPolicy(Protocol):
    """Makes a history shorter that outgrew the window; several do so one after the other, see `Context`."""

    async def compact(self, groups: Sequence[MessageGroup], budget: CompactionBudget) -> Sequence[MessageGroup]:
        """Return what a request shows in place of these groups, until they fit or there is nothing more to do.

        Args:
            groups: What is shown now, oldest first: each is kept or dropped as a whole.
            budget: How much there is, and how a group is made shorter.

        Returns:
            Some of these groups in their order, or what `budget` has made of them. The task and the newest group are
            among them.

        Raises:
            MisuseError: when it is set up wrongly. What the world does to it must not raise.
        """
        ...

    async def aclose(self) -> None:
        """Close what the policy holds open; the default holds nothing."""
        return


def _as_policies(policies: Iterable[ContextPolicy]) -> tuple[ContextPolicy, ...]:
    return tuple(policies)


def _check_policies(_context: object, _attribute: object, policies: tuple[ContextPolicy, ...]) -> None:
    for policy in policies:
        if isinstance(policy, type) or not callable(getattr(policy, "compact", None)):
            raise MisuseError(f"{policy!r} is no policy for the context: give for example [TrimResults(), Summarise()]")


@attrs.frozen
class Context(Value):
    """What is done about a history that outgrows the context window: policies, in the order in which they are tried.

    Raises:
        MisuseError: when one of them is no policy, or the share is out of its range.
    """

    policies: tuple[ContextPolicy, ...] = attrs.field(converter=_as_policies, validator=_check_policies)
    """Each takes up what those before it have left, until it fits."""

    share: float = attrs.field(default=0.75, kw_only=True, validator=SHARE)
    """The part of the room that messages may fill, above 0 to 1. A quarter stays for the reply, and for the difference
    between our count and the provider's (Source: document B, step 4).
    """


def count_tokens(groups: Iterable[MessageGroup]) -> int:
    """Return the tokens of the groups together."""
    return sum([group.tokens for group in groups])


# Groups of what a run shows.
