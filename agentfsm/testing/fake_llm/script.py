"""What `LocalServer` says: a reply or a failure, and its words as the wires write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class Say(Value):
    """What the model says to one request, or how it fails."""

    text: str = ""
    calls: tuple[tuple[str, Mapping[str, Any] | str], ...] = ()
    """Tool calls, in order: the tool's name, and its arguments as a mapping or as the raw text to send."""

    thinking: str = ""
    """What the model thinks before, on the wires that show it."""

    refusal: str = ""
    """What the model says where it refuses."""

    finish_reason: str | None = None
    """In the words of the wire. None for what it says of calls ("tool_calls") where there are calls, else of an end."""

    usage: Mapping[str, Any] | None = None
    """As the provider writes it; None for an estimate, a token for four characters."""

    without_usage: bool = False
    """Leaves the usage out, as some servers do."""

    status: int = 200
    """Anything from 400 on is answered by an error."""

    error: str | Mapping[str, Any] = ""
    """The message of that error, or its fields: message, type, param, code."""

    headers: Mapping[str, str] = attrs.field(factory=dict)
    """Further headers, such as {"retry-after": "2"}."""

    html: bool = False
    """A page in place of the answer, with status 200: what a captive portal or a wrong address sends."""

    raw: str | None = None
    """The body as it is, in place of the answer: JSON or events that are malformed, say."""

    delay_s: float = 0.0
    """Silence before the first byte, seconds."""

    chunk_delay_s: float = 0.0
    """Silence before each chunk of a stream, seconds."""

    chunk_chars: int = 16
    """Characters of text or arguments in a chunk, 1 or more."""

    interleave: bool = False
    """Whether the chunks of several calls come by turns, and not call by call."""

    cut_after: int | None = None
    """Breaks the connection after so many chunks of a stream; an answer that is not streamed, in its middle."""

    def __attrs_post_init__(self) -> None:
        """Check the ranges, and that the calls can be written."""
        for each in self.calls:
            match each:
                case (str(), str() | Mapping() as given):
                    format_arguments(given)
                case _:
                    raise MisuseError(f'Say(calls={self.calls!r}): give pairs, calls=(("look", {{"at": 1}}),)')
        if self.chunk_chars < 1 or min(self.delay_s, self.chunk_delay_s, self.cut_after or 0) < 0:
            msg = "chunk_chars is 1 or more, and delay_s, chunk_delay_s and cut_after are 0 or more"
            raise MisuseError(msg)


def format_arguments(given: Mapping[str, Any] | str) -> str:
    """Return the arguments of a call as a model writes them; a text as it is."""
    return given if isinstance(given, str) else json.dumps(dict(given), ensure_ascii=False)


def split_text(text: str, size: int) -> list[str]:
    """Return a text in pieces of at most so many characters; none for an empty one."""
    return [text[start : start + size] for start in range(0, len(text), size)]
