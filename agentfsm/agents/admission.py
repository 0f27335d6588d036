"""The checks of everything that a person or a program says to a run, the same at every door.

The doors are HTTP, AG-UI, UI messages, editors, chat completions, MCP, webhooks, the command line and schedules. The
Python interface has none of these checks: a program passes exactly the text that the model is to read.
"""

from __future__ import annotations

import json
import logging
from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import (
    AssistantMessage,
    FilePart,
    Media,
    Message,
    Part,
    SystemMessage,
    TextPart,
    ToolResult,
    UserMessage,
    as_parts,
    media_kind,
    read_inline_data,
)
from agentfsm.core.text_safety import escape_hidden, find_hidden
from agentfsm.tools.queue.media import SIGNED_TYPES, check_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agentfsm.agents.runs import Prompt

T = TypeVar("T")

_log = logging.getLogger("agentfsm.admission")

# Maximum of characters of a text.
MAX_TEXT_CHARS: Final = 1_000_000
# Maximum of parts of a prompt or an input.
MAX_PARTS: Final = 20
_TOO_DEEP: Final = "a JSON value is nested too deeply: flatten it"
# Types of files without a signature, which have to be UTF-8.
_TEXT_TYPES: Final = frozenset({"text/plain", "text/csv", "text/markdown", "application/json"})


def check_part_count(parts: Sequence[object]) -> None:
    """Check that a prompt has no more than `MAX_PARTS` parts.

    Raises:
        MisuseError: if it has more.
    """
    if len(parts) > MAX_PARTS:
        raise MisuseError(f"a prompt has {MAX_PARTS} parts at most, not {len(parts)}: leave out some")


def admit(prompt: Prompt, caller: str) -> tuple[Part, ...]:
    r"""Return the parts of a prompt or an input, as a run may read them.

    A hidden character, such as a control, a mark that reorders text or a tag, is written as its JSON escape, so that
    people and the model read that it was there. Those that belong to an emoji or to a script stay. If the text is a
    JSON object, as the inputs of a flow are, its texts hold the escapes, also after the object was parsed. An image, a
    recording or a file has data of the type that it declares, or an https address of a public host.

    Args:
        prompt: Text or parts.
        caller: Who says it, for the log: the user of a key, a webhook, a schedule or a terminal.

    Raises:
        MisuseError: when the prompt is empty or too large, or a part cannot be used.
    """
    parts = as_parts(prompt)
    check_part_count(parts)
    admitted = [
        TextPart(text=admit_answer(each.text, caller)) if isinstance(each, TextPart) else admit_media(each, number)
        for number, each in enumerate(parts, 1)
    ]
    texts = [each.text for each in admitted if isinstance(each, TextPart)]
    if texts[:1] and texts[0].lstrip().startswith("{") and len(texts) == len(admitted):
        try:
            inputs = json.loads("".join(texts))
        except ValueError:
            return tuple(admitted)
        except RecursionError:
            raise MisuseError(_TOO_DEEP) from None
        if (safe := admit_answer(inputs, caller)) != inputs:
            return (TextPart(text=json.dumps(safe, ensure_ascii=False)),)
    return tuple(admitted)


def admit_answer(content: T, caller: str) -> T:
    """Return an answer, a reason or another JSON value that is said to a run, with the checks of the texts of `admit`.

    Raises:
        MisuseError: when a text is too long, or the value is nested too deeply.
    """
    try:
        return cast("T", _admit_value(content, caller))
    except RecursionError:
        raise MisuseError(_TOO_DEEP) from None


def _admit_value(value: Any, caller: str) -> Any:
    if isinstance(value, str):
        if len(value) > MAX_TEXT_CHARS:
            raise MisuseError(f"a text has {MAX_TEXT_CHARS:,} characters at most, not {len(value):,}: shorten it")
        if (found := find_hidden(value)) is not None:
            _log.info("a hidden character was escaped in the words of %r: %s", caller, found)
            value = escape_hidden(value, keep_legitimate=True)
    elif isinstance(value, dict):
        value = {_admit_value(name, caller): _admit_value(each, caller) for name, each in value.items()}
    elif isinstance(value, list):
        value = [_admit_value(each, caller) for each in value]
    return value


def admit_messages(messages: Iterable[Message], caller: str) -> tuple[Message, ...]:
    """Return a history that a client gives, with the checks of `admit`.

    Raises:
        MisuseError: as for `admit`.
    """
    admitted: list[Message] = []
    for each in messages:
        message: Message = each
        if isinstance(message, UserMessage):
            message = attrs.evolve(message, parts=admit(message.parts, caller))
        elif isinstance(message, AssistantMessage | SystemMessage):
            message = attrs.evolve(message, text=admit_answer(message.text, caller))
        elif isinstance(message, ToolResult):
            parts = tuple([admit_media(part, number) for number, part in enumerate(message.parts, 1)])
            message = attrs.evolve(message, content=admit_answer(message.content, caller), parts=parts)
        admitted.append(message)
    return tuple(admitted)


def admit_media(given: Media, number: int) -> Media:
    """Return an image, a recording or a file with the media type of its data, which has passed the checks of `admit`.

    Args:
        given: The part.
        number: Its place, from 1, for the error.

    Raises:
        MisuseError: when it cannot be used.
    """
    part, flaw = check_part(given)
    if isinstance(part, FilePart):
        part = attrs.evolve(part, name=escape_hidden(part.name))
    if flaw is None:
        flaw = _find_flaw(part)
    if flaw is not None:
        raise MisuseError(f"part {number} ({media_kind(part)}) cannot be used: {flaw}")
    return part


def _find_flaw(part: Media) -> str | None:
    carried = read_inline_data(part)
    if carried is None:
        return _find_flaw_of_address(part.url)
    kind, data = carried
    if kind in SIGNED_TYPES:
        return None
    if kind not in _TEXT_TYPES or not isinstance(part, FilePart):
        return f"{kind} is not one of the types that models take: {', '.join(sorted({*SIGNED_TYPES, *_TEXT_TYPES}))}"
    try:
        b64decode(data).decode("utf-8")
    except ValueError:
        return "its text is not UTF-8"
    return None


def _find_flaw_of_address(url: str) -> str | None:
    from agentfsm._lib.public_network import is_public_host  # noqa: PLC0415  it loads an HTTP library

    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port  # a port that is none raises
    except ValueError:
        parts, host = None, ""
    if any(map(str.isspace, url)):
        return "its address has a space, a tab or a line break: leave it out"
    if parts is None or parts.scheme != "https" or "\\" in url or find_hidden(url) is not None:
        return "give a data: URL, or an address that begins with https://"
    if "@" in parts.netloc or not is_public_host(host):
        return f"the provider fetches it, and {host[:100]!r} is not the name of a public host: send the data instead"
    return None
