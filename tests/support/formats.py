"""A format of the journal and the inbox, with the values that its files hold.

The files of a frozen format, in `tests/core/fixtures`, are never changed. A newer format has files of its own beside
them, and the older ones go on being read; nobody writes them any more.
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import attrs

from agentfsm.core.events import Event
from agentfsm.core.header import Header
from agentfsm.core.inbox import InboxItem

FIXTURES = Path(__file__).parents[1] / "core" / "fixtures"


@attrs.frozen(kw_only=True)
class Format:
    """One format: what its files say, and which types, fields and words there were when it was frozen."""

    number: int
    header: Header
    journal: tuple[Event, ...]
    # A run as it could have been, from its prompt to DONE.
    further: tuple[Event, ...]
    # Events of other runs; they stand behind it in the file.
    items: tuple[InboxItem, ...]
    added: frozenset[object]
    # Types, fields and words that came with it.
    closed_sets: tuple[type[StrEnum], ...]
    # Those of which its files hold every word.

    def __str__(self) -> str:
        return f"v{self.number}"

    @property
    def events(self) -> tuple[Event, ...]:
        """All events of its file."""
        return self.journal + self.further

    @property
    def values(self) -> tuple[object, ...]:
        """All that its files say."""
        return (self.header, *self.events, *self.items)

    def records(self) -> list[str]:
        """Return the lines of its journal, the header first."""
        return _lines(f"v{self.number}.jsonl")

    def rows(self) -> list[str]:
        """Return the lines of its inbox."""
        return _lines(f"v{self.number}-inbox.jsonl")


def _lines(name: str) -> list[str]:
    return (FIXTURES / name).read_text(encoding="utf-8").split("\n")[:-1]


def shown(value: object) -> Iterator[tuple[type, str]]:
    """Yield (type, field) for each field in the value, deep inside too, that is not at its default."""
    if isinstance(value, tuple):
        for item in value:
            yield from shown(item)
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            if getattr(value, field.name) != field.default:
                yield type(value), field.name
                yield from shown(getattr(value, field.name))


def words(value: object) -> Iterator[StrEnum]:
    """Yield every word of a closed set in the value, deep inside too."""
    if isinstance(value, StrEnum):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from words(item)
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from words(getattr(value, field.name))
