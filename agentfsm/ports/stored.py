"""Values that a store returns: the journal of a run, feedback on a run, records, and the state of a follower."""

from __future__ import annotations

import re
from typing import Final

import attrs

from agentfsm.core.events import Event
from agentfsm.core.header import Header
from agentfsm.core.messages import JSON
from agentfsm.core.validation import STRING, ValueRule, is_number
from agentfsm.core.value import Value

BEST_RATING: Final = 5
MAX_COMMENT_CHARS: Final = 10_000
RATING: Final = ValueRule(
    fits=lambda value: type(value) is int and 1 <= value <= BEST_RATING,
    wanted=f"a whole number from 1 (bad) to {BEST_RATING} (good); for thumbs, 1 and {BEST_RATING}",
)
_COMMENT: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and len(value) <= MAX_COMMENT_CHARS,
    wanted=f"a string of up to {MAX_COMMENT_CHARS:,} characters",
)
_MOMENT: Final = ValueRule(fits=is_number, wanted="seconds since 1970")


@attrs.frozen(kw_only=True)
class StoredRun(Value):
    """The journal of one run, as read from a store."""

    header: Header
    """Entry 0 of the journal, which identifies the run."""

    events: tuple[Event, ...]
    """Events after the requested version, oldest first."""


# Beginning of `Feedback.by` that tells a judge from a person.
JUDGE_PREFIX: Final = "judge:"


@attrs.frozen(kw_only=True)
class Feedback(Value):
    """The opinion of a person or a judge on a run. It is stored beside the journal, and may come after the end."""

    rating: int = attrs.field(validator=RATING)
    """The rating, from 1 (bad) to 5 (good)."""

    comment: str = attrs.field(default="", validator=_COMMENT)
    """The reasons, up to 10,000 characters."""

    by: str = attrs.field(default="", validator=STRING)
    """Name of the person, empty if not given; or of the judge, which begins with "judge:"."""

    at: float = attrs.field(default=0.0, validator=_MOMENT)
    """Time of the feedback, seconds since 1970 by the store's clock."""

    @property
    def judge(self) -> str:
        """Name of the judge without "judge:"; empty for the feedback of a person."""
        return self.by.removeprefix(JUDGE_PREFIX) if self.by.startswith(JUDGE_PREFIX) else ""


# Seconds of the window in which uses of a quota count.
QUOTA_WINDOW_S: Final = 60
_QUOTA_NUMBER: Final = ValueRule(
    fits=lambda value: type(value) is int and value >= 0, wanted="a whole number, 0 or more"
)


@attrs.frozen(kw_only=True)
class QuotaUse(Value):
    """An amount to take from a quota, such as one request of a user."""

    name: str = attrs.field(validator=STRING)
    """Name of the quota in the store."""

    amount: int = attrs.field(default=1, validator=_QUOTA_NUMBER)
    """The amount, 0 or more."""

    limit: int = attrs.field(validator=_QUOTA_NUMBER)
    """Maximum of all amounts within 60 s."""


# Maximum size of a record's value as compact JSON, bytes.
MAX_RECORD_BYTES: Final = 1024 * 1024
MAX_KIND_CHARS: Final = 50
MAX_KEY_CHARS: Final = 500
RECORD_KIND: Final = ValueRule(
    fits=lambda value: (
        isinstance(value, str) and re.fullmatch(rf"[a-z][a-z0-9_-]{{0,{MAX_KIND_CHARS - 1}}}", value) is not None
    ),
    wanted=f"up to {MAX_KIND_CHARS} lower case letters, digits, - and _, beginning with a letter, such as 'schedule'",
)


def _is_key_part(value: object) -> bool:
    """Return whether every database can store the string in an index."""
    return isinstance(value, str) and len(value) <= MAX_KEY_CHARS and not re.search("[\0-\x1f\ud800-\udfff]", value)


RECORD_KEY_PART: Final = ValueRule(
    fits=_is_key_part,
    wanted=f"a string of up to {MAX_KEY_CHARS} characters, without control characters and lone surrogates",
)
RECORD_KEY: Final = ValueRule(
    fits=lambda value: _is_key_part(value) and value != "",
    wanted=f"a string of 1 to {MAX_KEY_CHARS} characters, without control characters and lone surrogates",
)


@attrs.frozen(kw_only=True)
class StoreRecord(Value):
    """A small JSON value under a kind and a key, beside the runs of a store. Writes compare the revision."""

    kind: str
    """Kind of the record, such as "schedule": up to 50 lower case letters, digits, - and _. Keys are unique in it."""

    key: str
    """Key of the record, 1 to 500 characters, without control characters."""

    value: JSON
    """The value, up to 1 MiB as compact JSON in UTF-8."""

    revision: int
    """Number of the write, 1 or more. Each write gets a larger one, also after the record was deleted, so an old
    revision never fits a later record with the same key.
    """

    expires_at: float | None = None
    """Time from which on the record reads as absent, seconds since 1970 by the store's clock; None for never."""


@attrs.frozen(kw_only=True)
class UnreadRun(Value):
    """A run that a follower has not read since its last change."""

    key: str
    """Key of the run in the store. A later run with the same id has another."""

    run_id: str
    """Id of the run."""

    change: int
    """Number of the change. Each release, pause or end of a run, and each feedback, gets a larger one."""

    after: int
    """Version up to which the follower has read the run; 0 if it has read nothing of it."""


@attrs.frozen(kw_only=True)
class FollowerStatus(Value):
    """The position of a follower, and its lag."""

    name: str
    """Name of the follower."""

    position: int
    """Number of the last change up to which all deliveries are done."""

    lag: int
    """Number of runs that it has not read since their last change."""

    waiting_since: float | None
    """Time of the newest event of the run that waits longest, seconds since 1970; None if it has read everything."""

    held: bool
    """True if a process works on its deliveries now."""
