"""The hash of each format of the journal is recorded here, so that a change of the format cannot go unnoticed.

A hash covers all that records may hold: the types of headers, events and inbox items, their fields, which of these have
a default, and the words of the closed sets. The hash of a released format never changes.
"""

import json
from enum import StrEnum
from hashlib import sha256
from typing import Union, get_args

import attrs
import pytest

from agentfsm import StopReason, TooNewError
from agentfsm.core.codec import decode_event
from agentfsm.core.events import EVENTS
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import InboxItem
from tests.support.format_1 import FORMAT_1
from tests.support.format_2 import FORMAT_2
from tests.support.format_3 import FORMAT_3
from tests.support.format_4 import FORMAT_4
from tests.support.format_5 import FORMAT_5

FORMATS = (FORMAT_1, FORMAT_2, FORMAT_3, FORMAT_4, FORMAT_5)
# The formats up to this one are released. Raise it with the release.
RELEASED = 4
HASHES = {
    1: "e13142fe2c1fd055",
    2: "c703d6abe2ecc954",
    3: "34af94d19d7d12b1",
    4: "3d7effc3e500cbed",
    5: "914126c626e0bb62",
}


def describe(later, *roots):
    """Describe the records that these types allow, without the types, fields and words that `later` holds.

    A type that has no name in the records is described in its place, so that it may be renamed.
    """
    tagged, found, open_kinds = {}, {}, []

    def visit(kind):
        if kind in open_kinds:
            return "as above"
        open_kinds.append(kind)
        try:
            return describe_kind(kind)
        finally:
            open_kinds.pop()

    def describe_kind(kind):
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            # By identity, since words of two sets may be the same text.
            return sorted(word.value for word in kind if not any(word is each for each in later))
        if isinstance(kind, type) and attrs.has(kind):
            fields = attrs.fields(attrs.resolve_types(kind))
            return {
                field.name: [field.default is attrs.NOTHING, visit(field.type)]
                for field in fields
                if (kind, field.name) not in later
            }
        members = [each for each in get_args(kind) if isinstance(each, type) and attrs.has(each)]
        if len(members) > 1:  # a union: its types are told apart by their names
            tagged.update({each.__name__: each for each in members if each not in later})
            return sorted(each.__name__ for each in members if each not in later)
        return [visit(each) for each in get_args(kind)] or getattr(kind, "__name__", str(kind))

    first = [visit(root) for root in roots]
    while missing := tagged.keys() - found.keys():
        found |= {name: visit(tagged[name]) for name in sorted(missing)}
    return json.dumps([first, found], sort_keys=True)


def hash_of_format(number, *further):
    """Return the hash of a format as the types of today allow it, without what came with later formats."""
    later = frozenset().union(*[form.added for form in FORMATS if form.number > number])
    return sha256(describe(later, Header, Union[(*EVENTS, *further)], InboxItem).encode()).hexdigest()[:16]


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_the_format_is_as_recorded(number):
    """A change of what records may hold fails here, and says what has to be done."""
    later = f"list what is new as `added` in tests/support/format_{FORMAT}.py, which is not released yet, "
    if number == FORMAT > RELEASED:
        advice = f"Format {number}: {later}with an example there and in its fixtures, and record the new hash here."
    elif FORMAT > RELEASED:
        advice = f"Format {number} is released: {later}so that this hash stays."
    else:
        advice = (
            f"Format {number} is released. Raise FORMAT, add tests/support/format_{FORMAT + 1}.py with its fixtures, "
            "and list there what was added, so that an older agentfsm refuses the newer records with TooNewError."
        )
    assert hash_of_format(number) == HASHES[number], advice


def test_a_new_stop_reason_changes_the_hash(monkeypatch):
    """A word, a field or an event more gives another hash, in every format that does not list it as added."""

    class MoreReasons(StrEnum):
        COMPLETED = "completed"
        SURPRISE = "surprise"

    @attrs.frozen
    class Failed:
        reason: StopReason

    @attrs.frozen
    class FailedOtherwise:
        reason: MoreReasons

    def hashes(*kinds):
        return {describe(frozenset(), kind) for kind in kinds}

    assert len(hashes(StopReason, MoreReasons)) == 2
    assert len(hashes(Failed, FailedOtherwise)) == 2
    assert hash_of_format(FORMAT) != hash_of_format(FORMAT, Failed)


def test_an_older_package_refuses_a_newer_record():
    """A record of a format that is not known yet is refused as too new, and not as corrupt."""
    text = f'{{"v":{FORMAT + 1},"reason":"surprise","message":"","at":1.0,"is":"Failed"}}'
    with pytest.raises(TooNewError, match=f"format {FORMAT + 1}.*upgrade"):
        decode_event(text, FORMAT_1.header)
