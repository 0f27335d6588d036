"""Items of a run's inbox: input for its next turn, and decisions on the things it waits for.

Only the owner of a run appends to its journal. All others post to the inbox, and the owner turns the items into events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import Label, as_labels, join_labels
from agentfsm.core.messages import Message, Outcome, Part, SystemMessage, TextPart, UserMessage
from agentfsm.core.text_safety import fence_untrusted
from agentfsm.core.validation import STRING
from agentfsm.core.value import Value


class InputKind(StrEnum):
    """Source of an input."""

    USER = "user"
    EVENT = "event"
    TIMER = "timer"
    WEBHOOK = "webhook"
    REFLECTION = "reflection"


class Priority(StrEnum):
    """Order in which inputs are read, if several wait."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


# Rank of each priority; the most urgent has the lowest.
PRIORITY_ORDER = {priority: place for place, priority in enumerate(Priority)}
# Title of the system note that an input of each kind becomes; an input of the user becomes a user message.
NOTE_TITLES = {
    InputKind.EVENT: "System Event",
    InputKind.TIMER: "Timer",
    InputKind.WEBHOOK: "Webhook",
    InputKind.REFLECTION: "Reflection",
}
# Kinds whose text is untrusted. It is fenced as data, so that the model does not take it for instructions.
UNTRUSTED_KINDS = frozenset({InputKind.EVENT, InputKind.WEBHOOK})

E = TypeVar("E", bound=StrEnum)


def _parse_member(enum: type[E], name: str, value: str) -> E:
    try:
        return enum(value)
    except ValueError:
        raise MisuseError(f"{name}={value!r}: give one of {', '.join(map(repr, map(str, enum)))}") from None


def _parse_kind(value: InputKind | str) -> InputKind:
    return _parse_member(InputKind, "kind", value)


def _parse_priority(value: Priority | str) -> Priority:
    return _parse_member(Priority, "priority", value)


def parse_time(value: datetime | float | None, name: str = "at") -> float | None:
    """Return a time in seconds since 1970, given as such or as a datetime with its time zone; None stays None.

    Args:
        value: The time.
        name: Name of the argument, for the error.

    Raises:
        MisuseError: if it is neither.
    """
    if isinstance(value, datetime):
        seconds: float | None = value.timestamp() if value.tzinfo is not None else math.nan  # a naive time is ambiguous
    else:
        seconds = value if value is None or type(value) in {int, float} else math.nan
    if seconds is not None and not math.isfinite(seconds):
        how = "a datetime with its time zone, such as datetime.now(UTC) + timedelta(hours=1), or seconds since 1970"
        raise MisuseError(f"{name}={value!r}: give {how}")
    return None if seconds is None else float(seconds)


@attrs.frozen(kw_only=True)
class Input(Value):
    """An input that the run reads in OBSERVE."""

    kind: InputKind = attrs.field(default=InputKind.USER, converter=_parse_kind)
    """Source of the input. The model reads a USER input as a user message, any other as a system note."""

    parts: tuple[Part, ...]
    """Content of the input, in reading order."""

    priority: Priority = attrs.field(default=Priority.NORMAL, converter=_parse_priority)
    """Order in which the input is read, if several wait."""

    due_at: float | None = attrs.field(default=None, converter=parse_time)
    """Earliest time at which the input is read (a timer), seconds since 1970 by the store's clock. None: at once."""

    labels: tuple[Label, ...] = attrs.field(default=(), converter=as_labels)
    """Labels of the content, as the sender states them. An event and a webhook are untrusted without it."""

    by: str = attrs.field(default="", validator=STRING)
    """Person who sent the input; empty if no name was given."""

    @property
    def all_labels(self) -> tuple[Label, ...]:
        """The labels of the content, with "untrusted" for an event and a webhook."""
        return join_labels(self.labels, (Label.UNTRUSTED,)) if self.kind in UNTRUSTED_KINDS else self.labels

    @property
    def message(self) -> Message:
        """The input as the model reads it: the user's as a user message, all others as a system note."""
        if self.kind is InputKind.USER:
            return UserMessage(parts=self.parts)
        text = "\n".join(part.text if isinstance(part, TextPart) else part.url for part in self.parts)
        if self.kind in UNTRUSTED_KINDS:
            text = fence_untrusted(text)
        return SystemMessage(text=f"[{NOTE_TITLES[self.kind]}] {text}")


@attrs.frozen(kw_only=True)
class Approve(Value):
    """Approve a call."""

    call_id: str
    by: str = attrs.field(default="", validator=STRING)
    """Person who decided, for the record."""

    arguments: str | None = None
    """Text of a JSON object that replaces the arguments of the call; None to keep them."""

    digest: str = ""
    """Hash of the tool and the arguments that were shown to the person; the approval is valid only for these."""

    edit_only: bool = False
    """Whether this only replaces the arguments, because four eyes are asked for: another person has to approve them."""


@attrs.frozen(kw_only=True)
class Reject(Value):
    """Reject a call. It does not run, and the model reads the reason."""

    call_id: str
    by: str = attrs.field(default="", validator=STRING)
    message: str = attrs.field(default="", validator=STRING)
    """The reason, for the model."""


@attrs.frozen(kw_only=True)
class Settle(Value):
    """Record the result of a call that comes from outside (a question to the user), or whose outcome is unknown."""

    call_id: str
    by: str = attrs.field(default="", validator=STRING)
    outcome: Outcome
    """DONE or FAILED."""

    content: str
    """The result, or the error."""


@attrs.frozen(kw_only=True)
class GiveInput(Value):
    """Answer the questions that a tool asked in the middle of its call. The tool is called again."""

    call_id: str
    by: str = attrs.field(default="", validator=STRING)
    answers: dict[str, Any]
    """Answers by the key of the question: an object that fits its schema, or None if the person declines."""

    digest: str = ""
    """Hash of the questions that were shown to the person; the answers are valid only for these."""


@attrs.frozen(kw_only=True)
class Rerun(Value):
    """Run a call again whose outcome is unknown. It keeps its idempotency key."""

    call_id: str
    by: str = attrs.field(default="", validator=STRING)


@attrs.frozen(kw_only=True)
class Cancel(Value):
    """End the run."""

    by: str = attrs.field(default="", validator=STRING)
    message: str = attrs.field(default="", validator=STRING)


@attrs.frozen(kw_only=True)
class Pause(Value):
    """Pause the run at the next boundary between two steps, until it is resumed."""

    by: str = attrs.field(default="", validator=STRING)
    message: str = attrs.field(default="", validator=STRING)


@attrs.frozen(kw_only=True)
class Wake(Value):
    """Check the waits of a run again: something was decided in the run of a sub-agent that it waits for."""

    run_id: str
    """Id of the sub-agent's run."""


Decision: TypeAlias = Approve | Reject | Settle | GiveInput | Rerun
InboxItem: TypeAlias = Input | Decision | Cancel | Pause | Wake


def due_at(item: InboxItem) -> float | None:
    """Return the earliest time at which an item is read, seconds since 1970; None for at once."""
    return item.due_at if isinstance(item, Input) else None


@attrs.frozen(kw_only=True)
class PostedItem(Value):
    """An item in the inbox of a run."""

    number: int
    """Number of the item in the inbox, from 1. Later items have higher numbers."""

    key: str
    """Key of the item, unique in the run. A second post of the same key stores nothing and returns the first item."""

    item: InboxItem
    """Input, decision or request that was posted."""


# The effect of a decision on its call, for messages.
_DECISION_WORDS: Final[Mapping[type, str]] = {
    Approve: "approved",
    Reject: "rejected",
    GiveInput: "answered",
    Rerun: "set to run again",
}


def decision_word(item: InboxItem) -> str:
    """Return the effect of a decision on its call, for example "approved"."""
    if isinstance(item, Approve) and item.edit_only:
        return "edited"
    return _DECISION_WORDS.get(type(item), "decided")
