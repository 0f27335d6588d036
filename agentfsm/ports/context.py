"""What a compaction works on: groups of messages, the room that they shall fit into, and the policies that see to it.

A group is what may be kept or dropped as one: a call with its results, one other message, or a summary. So a policy
cannot part a call from its results, whatever it does. `group_messages` makes groups of what a run shows, and
`build_segments` makes of the groups that are left what the journal says of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, Message, Outcome, SystemMessage, ToolResult, UserMessage
from agentfsm.core.run import Run
from agentfsm.core.segments import Removed, Segment, Span, Summarised, build_note, render_segments
from agentfsm.core.value import Value
from agentfsm.ports import ContextPolicy, Model
from agentfsm.tokens.ledger import BYTE_COUNTER, TokenLedger, count_message

# The part of the allowance that a compaction leaves in use. Each one changes the start of the request, so that the
# provider's prompt cache is lost; cutting by half loses it once in half a window of new messages, not in every turn.
TARGET_SHARE: Final = 0.5
# More than any note on a gap takes: what is left is found before it is known how much was removed.
MAX_NOTE_TOKENS: Final = count_message(build_note(Removed(count=10**9)), BYTE_COUNTER)


class GroupKind(StrEnum):
    """What a group is, by what it says."""

    SYSTEM = "system"
    # A note of the system, or a summary.
    FINAL = "final"
    # An answer that the user went on from.
    USER = "user"
    RESULTS = "results"
    # A call with its results, one of them a success at least.
    ERROR = "error"
    # A call whose results are all failures.
    OTHER = "other"
    # Anything else that the model said.


@attrs.frozen(kw_only=True)
class MessageGroup(Value):
    """What a compaction keeps or drops as one."""

    segment: Span | Summarised
    # What stands for it in the journal.
    messages: tuple[Message, ...]
    # As they are shown now, in order; at least one.
    tokens: int
    # Of these messages, with what the provider writes around them.
    kind: GroupKind
    is_task: bool = False
    # Whether it is the task, which is always shown.
    is_newest: bool = False
    # Whether it is the last one, which is always shown.
    is_unread: bool = False
    # Whether the model has not replied to it yet: it is dropped last.

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
    # What the groups shall come to together, at most. Where nothing may be kept it is below 0.
    limit_tokens: int
    # What they may come to at the very most: where more stays, the request may be refused.
    history: Sequence[Message]
    # Of the run, whole.
    model: Model
    # The agent's own.
    count: Callable[[Message], int]
    # Counts the tokens of a message.
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


def _as_policies(policies: Iterable[ContextPolicy]) -> tuple[ContextPolicy, ...]:
    return tuple(policies)


def _check_policies(_context: object, _attribute: object, policies: tuple[ContextPolicy, ...]) -> None:
    for policy in policies:
        if isinstance(policy, type) or not callable(getattr(policy, "compact", None)):
            raise MisuseError(f"{policy!r} is no policy for the context: give for example [TrimResults(), Summarise()]")


def _check_share(_context: object, _attribute: object, value: float) -> None:
    if not 0 < value <= 1:
        msg = f"share is {value}, but it is a part of the budget, above 0 and at most 1: 0.75 leaves room for the reply"
        raise MisuseError(msg)


@attrs.frozen
class Context(Value):
    """What is done about a history that outgrows the context window: policies, in the order in which they are tried.

    Raises:
        MisuseError: when one of them is no policy, or the share is out of its range.
    """

    policies: tuple[ContextPolicy, ...] = attrs.field(converter=_as_policies, validator=_check_policies)
    # Each takes up what those before it have left, until it fits.
    share: float = attrs.field(default=0.75, kw_only=True, validator=_check_share)
    # The part of the room that messages may fill, above 0 to 1. A quarter stays for the reply, and for the difference
    # between our count and the provider's (Source: document B, step 4).


def count_tokens(groups: Iterable[MessageGroup]) -> int:
    """Return the tokens of the groups together."""
    return sum([group.tokens for group in groups])


# Groups of what a run shows.


def group_messages(run: Run, ledger: TokenLedger) -> tuple[MessageGroup, ...]:
    """Return what a run shows as groups, in order, without the note on what is not shown.

    Args:
        run: The run.
        ledger: Follows it.
    """
    groups = [*_iter_compacted_groups(run, ledger), *_iter_recent_groups(run, ledger)]
    unread = _find_first_unread(groups)
    last = len(groups) - 1
    return tuple(
        [
            attrs.evolve(group, is_unread=True, is_newest=index == last) if index >= unread else group
            for index, group in enumerate(groups)
        ],
    )


def _iter_compacted_groups(run: Run, ledger: TokenLedger) -> Iterator[MessageGroup]:
    at = 0
    for entry in run.segments:
        size = entry.end - entry.start if isinstance(entry, Span) else 1
        messages, tokens = run.compacted_messages[at : at + size], ledger.compacted_tokens[at : at + size]
        at += size
        if isinstance(entry, Span):
            yield from _split_span(run, entry, messages, tokens, ledger.task_index)
        elif isinstance(entry, Summarised):
            yield MessageGroup(segment=entry, messages=messages, tokens=tokens[0], kind=GroupKind.SYSTEM)


def _iter_recent_groups(run: Run, ledger: TokenLedger) -> Iterator[MessageGroup]:
    span = Span(start=run.cutoff, end=len(run.messages))
    tokens = [ledger.message_tokens(index) for index in range(span.start, span.end)]
    yield from _split_span(run, span, run.messages[run.cutoff :], tokens, ledger.task_index)


def _split_span(
    run: Run,
    span: Span,
    messages: Sequence[Message],
    tokens: Sequence[int],
    task: int | None,
) -> Iterator[MessageGroup]:
    """Yield the groups of a span: a call with its results, or one other message."""
    start = 0
    while start < len(messages):
        end = start + 1
        while end < len(messages) and isinstance(messages[end], ToolResult):
            end += 1
        place = span.start + start
        follower = run.messages[span.start + end] if span.start + end < len(run.messages) else None
        yield MessageGroup(
            segment=attrs.evolve(span, start=place, end=span.start + end),
            messages=tuple(messages[start:end]),
            tokens=sum(tokens[start:end]),
            kind=_classify_group(messages[start:end], follower),
            is_task=place == task,
        )
        start = end


def _classify_group(messages: Sequence[Message], follower: Message | None) -> GroupKind:
    """Return what a group is; an answer is final where the user went on from it."""
    first, *results = messages
    if isinstance(first, AssistantMessage) and first.calls:
        return GroupKind.ERROR if all(_has_failed(result) for result in results) else GroupKind.RESULTS
    if isinstance(first, AssistantMessage):
        return GroupKind.FINAL if isinstance(follower, UserMessage) else GroupKind.OTHER
    return GroupKind.SYSTEM if isinstance(first, SystemMessage) else GroupKind.USER


def _has_failed(message: Message) -> bool:
    return isinstance(message, ToolResult) and message.outcome is not Outcome.DONE


def _find_first_unread(groups: Sequence[MessageGroup]) -> int:
    """Return the first group that the model has not replied to: a call whose results are new to it, or what follows."""
    for index in range(len(groups) - 1, -1, -1):
        first = groups[index].messages[0]
        if isinstance(first, AssistantMessage):
            return index if first.calls else min(index + 1, len(groups) - 1)
    return 0


# What the journal says of groups.


def build_segments(groups: Sequence[MessageGroup], end: int) -> tuple[int, tuple[Segment, ...]]:
    """Return where the messages start that are shown whole up to the end, and the layout of those before.

    Args:
        groups: What is shown, in order.
        end: How many messages the history has.
    """
    start, head = end, list(groups)
    while head and isinstance(span := head[-1].segment, Span) and span.chars is None and span.end == start:
        start = span.start
        head.pop()
    layout: list[Segment] = []
    at = gap = 0
    for entry in _merge_spans(group.segment for group in head):
        if isinstance(entry, Span):
            gap, at = (gap if entry.start == at else len(layout)), entry.end
        layout.append(entry)
    if at != start:
        gap = len(layout)
    if removed := start - sum(group.message_count for group in head):
        # The note changes with each compaction, so it comes late: what stands before it stays in the prompt cache.
        layout.insert(0 if _begins_with_reply(groups) else gap, Removed(count=removed))
    return start, tuple(layout)


def _merge_spans(entries: Iterable[Span | Summarised]) -> Iterator[Span | Summarised]:
    """Yield the entries, neighbouring spans that are shown alike as one."""
    last: Span | Summarised | None = None
    for entry in entries:
        if isinstance(last, Span) and isinstance(entry, Span) and _is_adjacent(last, entry):
            last = attrs.evolve(last, end=entry.end)
            continue
        if last is not None:
            yield last
        last = entry
    if last is not None:
        yield last


def _is_adjacent(last: Span, entry: Span) -> bool:
    return (last.end, last.chars, last.items) == (entry.start, entry.chars, entry.items)


def _begins_with_reply(groups: Sequence[MessageGroup]) -> bool:
    """Whether the model's own words would come first: a provider wants a request to begin with somebody else's."""
    return isinstance(groups[0].messages[0], AssistantMessage)
