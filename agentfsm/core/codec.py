"""Values to JSON text and back: a closed set of types, numbered, with caps; no pickle and no fallback.

A value of a union carries its type's name under "is"; fields that have their default are left out. Every header says
under "v" which version of the format wrote it: a newer one is refused, since half-understanding a journal would lose
facts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Union, get_args, get_origin

from cattrs import Converter
from cattrs.strategies import configure_tagged_union

from agentfsm.core import events
from agentfsm.core.effects import PendingKind
from agentfsm.core.errors import CorruptError, MisuseError, TooNewError
from agentfsm.core.inbox import InboxItem, InputKind
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import ErrorType, Message, Outcome, Part
from agentfsm.core.run import Header

VERSION = 1
# The format that this code writes; raised with every change that an older reader would misunderstand.
LIMIT_CHARS = 64 * 1024 * 1024
# The longest record written or read: no model takes more, and a larger one would hurt every later reader.

_AnyEvent: Any = Union[events.EVENTS]  # noqa: UP007  built from the list, so that there is one list


_PRIMITIVES: dict[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (float, int)}


def _exactly(accepted: tuple[type, ...], value: Any, kind: type) -> Any:
    """Take a value of the right type as it is; cattrs by itself would make "5" a number and 5 a text."""
    if type(value) not in accepted or (kind is float and not math.isfinite(value)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return float(value) if kind is float else value


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _tuple(converter: Converter, value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    item = get_args(kind)[0]
    return tuple([converter.structure(each, item) for each in value])


def _converter() -> Converter:
    converter = Converter(omit_if_default=True, forbid_extra_keys=True, detailed_validation=False)
    for kind, accepted in _PRIMITIVES.items():
        converter.register_structure_hook(kind, partial(_exactly, accepted))
    for enum in (
        ErrorType,
        InputKind,
        Outcome,
        PendingKind,
        StopReason,
    ):  # each by itself, since the hook for str would serve them as well
        converter.register_structure_hook(enum, lambda value, kind: kind(value))
    converter.register_structure_hook_func(_is_tuple, partial(_tuple, converter))
    for union in (Part, Message, InboxItem, _AnyEvent):
        configure_tagged_union(union, converter, tag_name="is")
    return converter


_CONVERTER = _converter()


def encode_event(event: events.Event) -> str:
    """Return the event as JSON text.

    Raises:
        MisuseError: when it is larger than a record may be, or holds what JSON cannot.
    """
    return _dump(lambda: _CONVERTER.unstructure(event, unstructure_as=_AnyEvent))


def decode_event(text: str) -> events.Event:
    """Return the event that the text holds.

    Raises:
        CorruptError: when it holds none.
    """
    event: events.Event = _structure(text, _load(text), _AnyEvent)
    return event


def encode_header(header: Header) -> str:
    """Return entry 0 as JSON text, with the version of the format.

    Raises:
        MisuseError: when the metadata holds what JSON cannot, or it is larger than a record may be.
    """
    return _dump(lambda: {"v": VERSION, **_CONVERTER.unstructure(header)})


def decode_header(text: str) -> Header:
    """Return the header that the text holds.

    Raises:
        TooNewError: when a newer agentfsm wrote it.
        CorruptError: when it holds none.
    """
    value = _load(text)
    version = value.pop("v", None)
    if type(version) is not int or version < 1:
        raise CorruptError(f"the record has no format version: {_excerpt(text)}")
    if version > VERSION:
        raise TooNewError(
            f"the run was written in format {version}, and this agentfsm reads up to {VERSION}: upgrade agentfsm",
        )
    header: Header = _structure(text, value, Header)
    return header


def encode_item(item: InboxItem) -> str:
    """Return an inbox item as JSON text."""
    return _dump(lambda: _CONVERTER.unstructure(item, unstructure_as=InboxItem))


def decode_item(text: str) -> InboxItem:
    """Return the inbox item that the text holds.

    Raises:
        CorruptError: when it holds none.
    """
    item: InboxItem = _structure(text, _load(text), InboxItem)
    return item


def _dump(value: Callable[[], object]) -> str:
    try:
        text = json.dumps(value(), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"the record cannot be written as JSON ({error}): metadata must be plain JSON") from None
    if len(text) > LIMIT_CHARS:
        raise MisuseError(f"the record has {len(text):,} characters, more than the {LIMIT_CHARS:,} that one may have")
    return text.encode("utf-8", "replace").decode() if _has_surrogates(text) else text


def _has_surrogates(text: str) -> bool:
    """Whether UTF-8 refuses it; a lone surrogate is no character, and a store must not fail on it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _load(text: str) -> dict[str, Any]:
    if len(text) > LIMIT_CHARS:
        raise CorruptError(f"the record has {len(text):,} characters, more than the {LIMIT_CHARS:,} that one may have")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the record is not JSON ({error}): {_excerpt(text)}") from None
    if not isinstance(value, dict):
        raise CorruptError(f"the record is not an object: {_excerpt(text)}")
    return value


def _structure(text: str, value: dict[str, Any], kind: Any) -> Any:
    try:
        return _CONVERTER.structure(value, kind)
    except Exception as error:  # noqa: BLE001  cattrs lets whatever a broken value provokes through
        raise CorruptError(f"the record does not fit the format ({error!r}): {_excerpt(text)}") from None


def _excerpt(text: str) -> str:
    return repr(text[:120])
