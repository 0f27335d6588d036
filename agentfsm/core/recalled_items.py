"""Memory items as a run recalled them, and how a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import attrs

from agentfsm.core.labels import Label
from agentfsm.core.messages import MessageOrigin, TextPart, UserMessage
from agentfsm.core.text_safety import fence_untrusted, strip_unsafe
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class RecalledItem(Value):
    """A memory item that a run recalled. The journal has its text, so a replay needs no memory."""

    id: str
    """Id of the item in the memory."""

    kind: str
    """Kind of the item, such as "fact" or "episode"."""

    text: str
    """Text of the item."""

    score: float
    """Score by which it was chosen."""

    valid_from: float
    """Time from which on the item is true, seconds since 1970."""

    source: str = ""
    """Run that the item comes from; empty if it was given to the memory directly."""

    labels: tuple[Label, ...] = ()
    """Labels of the item, with its level of data. The run has them from then on."""


def build_recall_note(items: Sequence[RecalledItem]) -> UserMessage:
    """Return the items as the model reads them: data, in a fence that they cannot close, without hidden characters."""
    return _build_note("[Memory] Kept from earlier runs.", items)


def build_profile_note(items: Sequence[RecalledItem]) -> UserMessage:
    """Return the profile of a user as the model reads it, at the beginning of each request."""
    return _build_note("[Profile] Kept of this user, who wants it to be taken into account.", items)


def _build_note(title: str, items: Sequence[RecalledItem]) -> UserMessage:
    lines = [f"- {item.kind} of {_write_day(item.valid_from)}: {write_item_text(item.text)}" for item in items]
    text = fence_untrusted("\n".join(lines))
    return UserMessage(parts=(TextPart(text=f"{title} {text}"),), origin=MessageOrigin.MEMORY)


def write_item_text(text: str) -> str:
    """Return the text of an item as notes have it: on one line, without hidden characters."""
    return " ".join(strip_unsafe(text).split())


def read_recall_note(note: UserMessage) -> str:
    """Return the texts of the items in a note, one a line, without the words of the note itself."""
    lines = [line.partition(": ") for line in note.text.splitlines() if line.startswith("- ")]
    return "\n".join([text for _head, _colon, text in lines])


def _write_day(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"
    except (OverflowError, ValueError, OSError):
        return "an unknown day"
