"""Groups of the messages shown to the model, for policies to keep or drop, and the segments that record the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from agentfsm.core.history import Removed, Segment, Span, Summarised
from agentfsm.core.messages import AssistantMessage, Message, Outcome, SystemMessage, ToolResult, UserMessage
from agentfsm.core.run import Run
from agentfsm.ports.context import GroupKind, MessageGroup
from agentfsm.tokens.ledger import TokenLedger


def group_messages(run: Run, ledger: TokenLedger) -> tuple[MessageGroup, ...]:
    """Return the shown messages of a run as groups, in order, without the note on hidden messages.

    Args:
        run: The run.
        ledger: Token counts of the run.
    """
    span = Span(start=run.cutoff, end=len(run.messages))
    tokens = [ledger.message_tokens(index) for index in range(span.start, span.end)]
    recent = _split_span(run, span, run.messages[run.cutoff :], tokens, ledger.task_index)
    groups = [*_iter_compacted_groups(run, ledger), *recent]
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
    """Return the kind of a group; an answer is final if the user continued after it."""
    first, *results = messages
    if isinstance(first, AssistantMessage) and first.calls:
        has_failed = all(isinstance(each, ToolResult) and each.outcome is not Outcome.DONE for each in results)
        return GroupKind.ERROR if has_failed else GroupKind.RESULTS
    if isinstance(first, AssistantMessage):
        return GroupKind.FINAL if isinstance(follower, UserMessage) else GroupKind.OTHER
    if isinstance(first, SystemMessage):
        return GroupKind.SYSTEM
    return GroupKind.RESULTS if isinstance(first, UserMessage) and first.is_note else GroupKind.USER


def _find_first_unread(groups: Sequence[MessageGroup]) -> int:
    """Return the index of the first group that the model has not replied to: calls with new results, or later."""
    for index in range(len(groups) - 1, -1, -1):
        first = groups[index].messages[0]
        if isinstance(first, AssistantMessage):
            return index if first.calls else min(index + 1, len(groups) - 1)
    return 0


# Segments of the remaining groups.


def build_segments(groups: Sequence[MessageGroup], end: int) -> tuple[int, tuple[Segment, ...]]:
    """Return the index from which messages are shown whole, and the segments before it.

    Args:
        groups: The groups that are shown, in order.
        end: The number of messages in the history.
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
        # The note changes with each compaction, so it comes late: the messages before it stay in the prompt cache.
        layout.insert(0 if _begins_with_reply(groups) else gap, Removed(count=removed))
    return start, tuple(layout)


def _merge_spans(entries: Iterable[Span | Summarised]) -> Iterator[Span | Summarised]:
    """Yield the entries, merging neighbouring spans that are shown alike."""
    last: Span | Summarised | None = None
    for entry in entries:
        if (
            isinstance(last, Span)
            and isinstance(entry, Span)
            and (last.end, last.chars, last.items) == (entry.start, entry.chars, entry.items)
        ):
            last = attrs.evolve(last, end=entry.end)
            continue
        if last is not None:
            yield last
        last = entry
    if last is not None:
        yield last


def _begins_with_reply(groups: Sequence[MessageGroup]) -> bool:
    """Return whether the model's own message would come first: providers require another role at the start."""
    return isinstance(groups[0].messages[0], AssistantMessage)
