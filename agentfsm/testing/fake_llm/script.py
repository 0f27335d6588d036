"""Scripted replies and failures of `LocalServer`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class Say(Value):
    """Scripted reply to one request, or a failure."""

    text: str = ""
    """Text of the reply."""

    calls: tuple[tuple[str, Mapping[str, Any] | str], ...] = ()
    """Tool calls, in order: the tool's name, and its arguments as a mapping or as the raw text to send."""

    thinking: str = ""
    """Reasoning text before the reply, for the protocols that transmit it."""

    refusal: str = ""
    """Text of the model's refusal; empty: it does not refuse."""

    finish_reason: str | None = None
    """Finish reason, in the protocol's own terms. None: the usual one for tool calls ("tool_calls") if `calls` is set,
    else the one for a complete reply.
    """

    usage: Mapping[str, Any] | None = None
    """Token usage in the provider's format. None: an estimate of one token per four characters."""

    without_usage: bool = False
    """Whether the reply omits its usage, as some servers do."""

    status: int = 200
    """HTTP status. A status of 400 or more sends an error in place of the reply."""

    error: str | Mapping[str, Any] = ""
    """Message of the error, or its fields: message, type, param, code."""

    headers: Mapping[str, str] = attrs.field(factory=dict)
    """Additional response headers, such as {"retry-after": "2"}."""

    html: bool = False
    """Whether to send an HTML page with status 200 in place of the reply, as a captive portal does."""

    raw: str | None = None
    """Body to send unchanged in place of the reply, such as malformed JSON or events."""

    delay_s: float = 0.0
    """Seconds of silence before the first byte, 0 or more."""

    chunk_delay_s: float = 0.0
    """Seconds of silence before each chunk of a stream, 0 or more."""

    chunk_chars: int = 16
    """Characters of text or arguments per chunk, 1 or more."""

    interleave: bool = False
    """Whether the chunks of several calls are interleaved. False: they come call by call."""

    cut_after: int | None = None
    """Number of chunks after which the connection breaks, 0 or more; a reply that is not streamed breaks in its middle.
    None: it does not break.
    """

    def __attrs_post_init__(self) -> None:
        """Check the ranges, and that the calls can be serialised."""
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
    """Return the arguments of a call as JSON text; a text is returned unchanged."""
    return given if isinstance(given, str) else json.dumps(dict(given), ensure_ascii=False)


def split_text(text: str, size: int) -> list[str]:
    """Split a text into pieces of at most `size` characters; an empty text gives none."""
    return [text[start : start + size] for start in range(0, len(text), size)]
