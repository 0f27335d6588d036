"""Prompts and inputs of clients: parts with checked types and sizes, and text without hidden characters."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AudioPart, FilePart, ImagePart, Media, Part, TextPart, media_kind, read_inline_data
from agentfsm.core.text_safety import escape_hidden
from agentfsm.tools.queue.media import SIGNED_TYPES, check_part

if TYPE_CHECKING:
    from agentfsm.serve.bodies import PartBody, PromptBody

_KINDS: Final[dict[str, type[Media]]] = {"image": ImagePart, "audio": AudioPart, "file": FilePart}
# Types of files without a signature, which have to be UTF-8.
_TEXT_TYPES: Final = frozenset({"text/plain", "text/csv", "text/markdown", "application/json"})


def read_prompt(body: PromptBody) -> str | tuple[Part, ...]:
    """Return the text or the parts of a prompt, with hidden characters of its texts escaped.

    A hidden character, such as a control, a mark that reorders text or a tag, is written as its JSON escape, so that
    people and the model read that it was there. Those that belong to an emoji or to a script stay.

    Raises:
        MisuseError: when the data of a part is not of the type that it declares, or of a type that no model takes.
    """
    if isinstance(body, str):
        return escape_hidden(body, keep_legitimate=True)
    return tuple([_read_part(number, each) for number, each in enumerate(body, 1)])


def _read_part(number: int, body: PartBody) -> Part:
    if body.type == "text":
        return TextPart(text=escape_hidden(body.text, keep_legitimate=True))
    part = _KINDS[body.type](url=body.url)
    if isinstance(part, FilePart):
        part = attrs.evolve(part, name=escape_hidden(body.name))
    part, flaw = check_part(part)
    if flaw is None:
        flaw = _find_flaw_of_type(part)
    if flaw is not None:
        raise MisuseError(f"part {number} ({media_kind(part)}) cannot be used: {flaw}")
    return part


def _find_flaw_of_type(part: Media) -> str | None:
    carried = read_inline_data(part)
    if carried is None:
        return None if part.url.startswith("https://") else "give a data: URL, or an address that begins with https://"
    kind, data = carried
    if kind in SIGNED_TYPES:
        return None
    if kind not in _TEXT_TYPES or not isinstance(part, FilePart):
        return f"{kind} is not one of the types that models take: {', '.join(sorted({*SIGNED_TYPES, *_TEXT_TYPES}))}"
    return _find_flaw_of_text(data)


def _find_flaw_of_text(data: str) -> str | None:
    try:
        b64decode(data).decode("utf-8")
    except ValueError:
        return "its text is not UTF-8"
    return None
