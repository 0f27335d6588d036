"""Scripted replies of `LocalServer`: the lines of a `ScriptedModel`, and the details that only an HTTP server has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from agentfsm.core.errors import ContextTooLongError, MisuseError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.core.value import Value
from agentfsm.ports.model import FinishReason
from agentfsm.testing.models import Call, Line, say, to_line

_BAD_REQUEST: Final = 400
_TOO_LARGE: Final = 413
_SERVER_ERROR: Final = 500
_UNAVAILABLE: Final = 503


@attrs.frozen
class WireReply(Value):
    """Line of a script with HTTP details, or a failure in its place."""

    line: Line = attrs.field(default=say(), converter=to_line)
    """Reply to send: a text or `say(...)`. Its `expect` must be a text."""

    thinking: str = attrs.field(default="", kw_only=True)
    """Reasoning text before the reply, for the protocols that transmit it."""

    refusal: str = attrs.field(default="", kw_only=True)
    """Text of a refusal after the line's text; empty: the model does not refuse."""

    finish_reason: str | None = attrs.field(default=None, kw_only=True)
    """Finish reason, in the protocol's own terms. None: the line's."""

    usage: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True)
    """Token usage in the provider's format (for responses, in that of chat completions). None: the line's."""

    fields: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    """Further fields of a message or a response, in the provider's format, such as {"diagnostics": {...}}."""

    status: int = attrs.field(default=200, kw_only=True)
    """HTTP status. A status of 400 or more sends an error in place of the reply."""

    error: str | Mapping[str, Any] = attrs.field(default="", kw_only=True)
    """Message of the error, or its fields: message, type, param, code."""

    headers: Mapping[str, str] = attrs.field(factory=dict, kw_only=True)
    """Additional response headers, such as {"retry-after": "2"}."""

    html: bool = attrs.field(default=False, kw_only=True)
    """Whether to send an HTML page with status 200 in place of the reply, as a captive portal does."""

    raw: str | None = attrs.field(default=None, kw_only=True)
    """Body to send unchanged in place of the reply, such as malformed JSON or events."""

    chunk_delay_s: float = attrs.field(default=0.0, kw_only=True)
    """Seconds of silence before each chunk of a stream, 0 or more."""

    chunk_chars: int = attrs.field(default=16, kw_only=True)
    """Characters of text or arguments per chunk, 1 or more."""

    interleave: bool = attrs.field(default=False, kw_only=True)
    """Whether the chunks of several calls are interleaved. False: they come call by call."""

    cut_after: int | None = attrs.field(default=None, kw_only=True)
    """Number of chunks after which the connection breaks, 0 or more; a reply that is not streamed breaks in its middle.
    None: it does not break.
    """

    def __attrs_post_init__(self) -> None:
        """Check the ranges."""
        if self.chunk_chars < 1 or min(self.chunk_delay_s, self.cut_after or 0) < 0:
            msg = "WireReply: chunk_chars must be 1 or more, chunk_delay_s and cut_after 0 or more"
            raise MisuseError(msg)

    @property
    def text(self) -> str:
        """Text of the reply, without that of a refusal."""
        return "" if self.line.finish_reason is FinishReason.REFUSAL else self.line.text

    @property
    def refusal_text(self) -> str:
        """Text of the refusal; empty if the model does not refuse."""
        return self.line.text if self.line.finish_reason is FinishReason.REFUSAL else self.refusal

    @property
    def calls(self) -> tuple[Call, ...]:
        """Tool calls of the reply, in order."""
        return self.line.calls


def to_wire_reply(given: object) -> WireReply:
    """Return a line of a script as the server sends it; a `fail` line becomes a response that raises a similar error.

    Raises:
        MisuseError: if it is neither a text, nor made by `say` or `fail`, nor a WireReply.
    """
    reply = given if isinstance(given, WireReply) else WireReply(to_line(given))
    match reply.line.error:
        case None:
            return reply
        case ModelReplyError():
            return attrs.evolve(reply, html=True)
        case ModelUnavailableError() as error:
            headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
            return attrs.evolve(reply, status=error.status or _UNAVAILABLE, error=str(error), headers=headers)
        case ContextTooLongError() as error:
            return attrs.evolve(reply, status=_TOO_LARGE, error=str(error))
        case ModelError() as error:
            return attrs.evolve(reply, status=_BAD_REQUEST, error=str(error))
        case error:
            return attrs.evolve(reply, status=_SERVER_ERROR, error=str(error))


def check_expectation(line: Line, number: int, newest: str) -> None:
    """Check the newest message of a request against the line's expected text.

    Raises:
        AssertionError: if the message does not contain the text.
        MisuseError: if the expectation is a function: the server has the request only as JSON.
    """
    if callable(line.expect):
        raise MisuseError(
            f"line {number} of the script expects a function of a Request, which a server does not have: pass a text "
            "to expect=, or check LocalServer.requests"
        )
    if line.expect is not None and line.expect not in newest:
        raise AssertionError(f"line {number} of the script expects {line.expect!r}; the newest message is: {newest}")


def join_text(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of parts."""
    if isinstance(content, list):
        return "".join([part.get("text") or "" for part in content])
    return str(content or "")


def split_text(text: str, size: int) -> list[str]:
    """Split a text into pieces of at most `size` characters; an empty text gives none."""
    return [text[start : start + size] for start in range(0, len(text), size)]
