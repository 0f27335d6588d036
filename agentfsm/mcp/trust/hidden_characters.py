"""Find hidden characters in the texts of a server's tools: a model reads them, but a person who approves cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import mcp.types as m

from agentfsm.core.text_safety import find_hidden

# Characters with which a name could forge lines in the text that a person reads.
_LINE_BREAKS: Final = frozenset("\t\n\r")


def find_hidden_flaw(listed: m.Tool) -> str | None:
    """Return where a tool's texts have a hidden character, or its name or title a line break; None if nowhere."""
    titles = [listed.title, listed.annotations.title if listed.annotations else None]
    short: list[tuple[str, str | None]] = [("name", listed.name), *(("title", title) for title in titles)]
    for place, text in short:
        if text and not _LINE_BREAKS.isdisjoint(text):
            return f"its {place} has more than one line"
    places: list[tuple[str, Any]] = [
        *short,
        ("description", listed.description),
        ("input schema", listed.input_schema),
        ("output schema", listed.output_schema),
    ]
    for place, value in places:
        for text in iter_texts(value):
            if (found := find_hidden(text)) is not None:
                return f"its {place} holds the hidden character {found}"
    return None


def iter_texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, at any depth, including the keys of objects."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, Mapping):
            yield from (str(key) for key in inner)
            waiting += inner.values()
        elif isinstance(inner, list):
            waiting += inner
