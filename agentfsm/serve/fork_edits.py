"""Edits of a fork, as a request gives them: events that replace those of the forked run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.agents.admission import admit_answer, admit_media
from agentfsm.core import events as e
from agentfsm.core.codec import decode_event
from agentfsm.core.errors import CorruptError, MisuseError, TooNewError
from agentfsm.core.inbox import Input
from agentfsm.core.messages import Media
from agentfsm.core.value import Value
from agentfsm.serve.dialects.replies import REPLIES
from agentfsm.serve.event_stream import MAX_DIGITS

if TYPE_CHECKING:
    from agentfsm.core.events import Event
    from agentfsm.core.header import Header
    from agentfsm.core.labels import Label
    from agentfsm.serve.access import Caller


def parse_edits(edits: Mapping[str, Any], header: Header, history: Sequence[Event], caller: Caller) -> dict[int, Event]:
    """Return the events that replace those of a run, by version.

    An edit may change what happened, but not hide where data came from or who decided.

    Args:
        edits: Events in the form of the journal, by version.
        header: Header of the forked run.
        history: Its events.
        caller: Who edits.

    Raises:
        MisuseError: when a version is not a number or not one of the run, a value is not an event, an edit is the
            approval of a person or has the name of another person, or a label of the original is missing.
    """
    found: dict[int, Event] = {}
    for text, value in edits.items():
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise MisuseError(f"edit: {text[:20]!r} is not a version: give the number of the event to replace")
        version = int(text)
        if not 1 <= version <= len(history):
            raise MisuseError(f"edit: run {header.id!r} has the versions 1 to {len(history)}, and no {version}")
        event = _decode(version, value, header)
        if isinstance(event, e.ApprovalGiven):
            raise MisuseError(f"edit: version {version} would be a decision of a person, which cannot be written")
        original = history[version - 1]
        if isinstance(original, REPLIES) and event == attrs.evolve(
            original, message=attrs.evolve(original.message, native=None)
        ):
            event = original  # as the caller was shown it, without the provider's own form
        if event != original:
            event = _decode(version, admit_answer(value, caller.user), header)
            for number, each in enumerate([each for each in _iter_values(event) if isinstance(each, Media)], 1):
                admit_media(each, number)
            _check_author(version, event, original, caller)
            if missing := _read_labels(original) - _read_labels(event):
                names = ", ".join(sorted(missing))
                raise MisuseError(f"edit: version {version} has to keep the labels of its original: {names}")
        found[version] = event
    return found


def has_edits(copied: Sequence[Event], history: Sequence[Event], edits: Mapping[int, Event]) -> bool:
    """Return whether these are the first events of a run with exactly these edits; changed calls have other keys."""
    expected = [edits.get(version, event) for version, event in enumerate(history[: len(copied)], 1)]
    return [_without_keys(each) for each in copied] == [_without_keys(each) for each in expected]


def _without_keys(event: Event) -> Event:
    if isinstance(event, e.ToolsChosen):
        calls = tuple([attrs.evolve(each, key="") for each in event.message.calls])
        return attrs.evolve(event, message=attrs.evolve(event.message, calls=calls))
    if isinstance(event, e.ApprovalGiven | e.ApprovalAsked):
        return attrs.evolve(event, key=None)
    return event


def _decode(version: int, value: object, header: Header) -> Event:
    try:
        return decode_event(json.dumps(value), header)
    except (CorruptError, TooNewError) as error:
        raise MisuseError(f"edit: version {version} is not an event ({str(error)[:200]})") from None


def _check_author(version: int, event: Event, original: Event, caller: Caller) -> None:
    """Check that what a person has said or done, before or after the edit, is said by the caller now."""
    authors = {getattr(each, "by", "") for each in (event, original)}
    is_of_person = authors != {""} or isinstance(event, e.InputGiven | e.Paused)
    if is_of_person and getattr(event, "by", "") != caller.user:
        raise MisuseError(f"edit: version {version} is a person's word, now yours: give {caller.user!r} as its `by`")
    known = [each for each in _iter_values(original) if isinstance(each, Input)]
    for each in _iter_values(event):
        if isinstance(each, Input) and each not in known and each.by not in {"", caller.user}:
            raise MisuseError(f"edit: version {version} has an input of {each.by!r}: give {caller.user!r} as its `by`")


def _read_labels(event: Event) -> frozenset[Label]:
    """Return the labels of an event and of all that it contains."""
    found = [
        each.all_labels if isinstance(each, Input) else getattr(each, "labels", ()) for each in _iter_values(event)
    ]
    return frozenset[Any]().union(*found)


def _iter_values(value: Any) -> Iterator[Value]:
    """Yield a value and all that it contains."""
    if isinstance(value, tuple):
        for each in value:
            yield from _iter_values(each)
    elif isinstance(value, Value):
        yield value
        fields: Any = value  # each value is one of attrs, which its base class does not say
        yield from _iter_values(tuple(attrs.asdict(fields, recurse=False).values()))
