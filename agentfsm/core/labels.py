"""Labels, facts about the data that a run has read and about what its calls do, and the traits of tools.

A label restricts nothing. Rules that do, such as those of a guard, read the labels of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NoReturn

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import shorten_repr
from agentfsm.core.value import Value


class Label(StrEnum):
    """A fact about the data of a result or an input, or about what a call does. The last four are levels of data."""

    UNTRUSTED = "untrusted"
    PRIVATE = "private"
    SENDS_OUT = "sends_out"
    IRREVERSIBLE = "irreversible"
    USER_DATA = "user_data"
    PUBLIC = "public"
    INTERNAL = "internal"
    CONFIDENTIAL = "confidential"
    RESTRICTED = "restricted"


# Levels of data, lowest first, as in document H, 5.
DATA_LEVELS: Final = (Label.PUBLIC, Label.INTERNAL, Label.CONFIDENTIAL, Label.RESTRICTED)
# Labels of what a call does. They count from the start of the call, the others from its result.
EFFECT_LABELS: Final = frozenset({Label.SENDS_OUT, Label.IRREVERSIBLE})

# Labels of a prompt or an input that is not in the user's own words: a stranger's, or what a program passes on.
NOT_SAID: Final = frozenset({Label.UNTRUSTED, Label.USER_DATA})

# Labels of a prompt or an input that came as an argument over MCP: a model of the client wrote it, and not the user.
FROM_MODEL: Final = (Label.USER_DATA,)


@attrs.frozen(kw_only=True)
class LabelSource(Value):
    """The first input, call or reply that brought a label into a run."""

    label: Label
    run_id: str
    """Id of the run that it came into first. It is that of another run if the label was inherited: from the run whose
    history is continued, or from the run that called this agent.
    """

    version: int = 0
    """Version of that run after the event that brought the label; 0 for the prompt."""

    call_id: str = ""
    """Id of the call; empty if no call brought the label."""

    name: str = ""
    """Name of the tool, kind of the input, "prompt", or name of a tool that the provider executed."""

    owner: str = ""
    """User whose data it is, for `user_data`; empty for other labels, and for runs without a user."""

    def describe(self) -> str:
        """Return the source for people, such as "call t1.0 of fetch_page"."""
        return f"call {self.call_id} of {self.name}" if self.call_id else self.name


def as_labels(labels: Iterable[str]) -> tuple[Label, ...]:
    """Return labels in the order of `Label`, each once.

    Raises:
        MisuseError: if one is unknown, or they are not a list of strings.
    """
    try:
        given = frozenset(map(Label, () if isinstance(labels, str) else labels))
    except (TypeError, ValueError):
        given = frozenset()
    if not given and labels not in ((), [], frozenset()):
        raise MisuseError(
            f"labels={shorten_repr(labels)}: give a list of labels, such as ['untrusted']; valid labels: "
            f"{', '.join(Label)}"
        )
    return tuple([label for label in Label if label in given])


def find_owner(label: Label, user: str | None) -> str:
    """Return the owner of data with a label that comes into a run of the user; empty if it has none."""
    return (user or "") if label is Label.USER_DATA else ""


def join_labels(*several: Iterable[Label]) -> tuple[Label, ...]:
    """Return the labels of all, in the order of `Label`, each once."""
    given = frozenset().union(*several)
    return tuple([label for label in Label if label in given])


def highest_level(labels: Iterable[Label] | Mapping[Label, object]) -> Label | None:
    """Return the highest level of data among labels; None if there is none."""
    given = frozenset(labels)
    return next((level for level in reversed(DATA_LEVELS) if level in given), None)


class ToolKind(StrEnum):
    """Kind of a tool: DIRECT runs a function, AGENT runs another agent."""

    DIRECT = "direct"
    AGENT = "agent"


class Level(StrEnum):
    """Level of access that a tool needs, in order: `Level.READ < Level.WRITE < Level.ADMIN`."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise MisuseError(f"unknown level {value!r}; valid levels: {', '.join(cls)}")

    # Strings would compare alphabetically, with admin as the lowest.

    def __lt__(self, other: str) -> bool:
        return _RANK[self] < _RANK[Level(other)]

    def __le__(self, other: str) -> bool:
        return _RANK[self] <= _RANK[Level(other)]

    def __gt__(self, other: str) -> bool:
        return _RANK[self] > _RANK[Level(other)]

    def __ge__(self, other: str) -> bool:
        return _RANK[self] >= _RANK[Level(other)]


_RANK: Final = {level: rank for rank, level in enumerate(Level)}


def matches_tool(glob: str, name: str) -> bool:
    """Return whether a rule about the name or glob is about the tool: "drop_*" is about `Drop_table`, too.

    Case does not count, in either of them, since servers and people write names in any.
    """
    return fnmatchcase(name.casefold(), glob.casefold())
