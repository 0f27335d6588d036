"""The codec: what is written is read again, exactly and for ever, and nothing else is read."""

import contextlib
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import partial

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentfsm import (
    AgentCost,
    AgentError,
    AudioPart,
    CorruptError,
    FilePart,
    ImagePart,
    MisuseError,
    Outcome,
    Settings,
    TextPart,
    ToolResult,
    TooNewError,
    Usage,
)
from agentfsm.core import codec, encoding
from agentfsm.core import events as e
from agentfsm.core.codec import decode_header, decode_item, encode_header, encode_item
from agentfsm.core.header import FORMAT, Header
from agentfsm.core.inbox import Approve, Cancel, GiveInput, InboxItem, Input, Pause, Reject, Rerun, Settle, Wake
from tests.support.sample_runs import PROMPT, SAMPLES, finished, header

ITEMS = typing.get_args(InboxItem)
encode_event = partial(codec.encode_event, header=header())
decode_event = partial(codec.decode_event, header=header())
# A run that an earlier agentfsm began.
OLD = header(format=1)

numbers = st.floats(allow_nan=False, allow_infinity=False)
plain = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | numbers | st.text()
metadata = st.dictionaries(
    st.text(), st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
)
urls = st.text().map("https://{}".format) | st.binary().map(lambda data: f"data:image/png;base64,{data.hex()}")
SIMPLE = {str: st.text(), int: st.integers(), float: numbers, bool: st.booleans(), types.NoneType: st.none()}


def values(kind):
    """Return a strategy for values of the type with every field drawn, so that no field is forgotten here."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if origin is tuple:
        return st.lists(values(inner[0]), max_size=3).map(tuple)
    if origin in {types.UnionType, typing.Union}:
        return st.one_of([values(each) for each in inner])
    if origin is Mapping:
        return st.dictionaries(*map(values, inner))
    if origin is not None:
        return metadata
    if issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    attrs.resolve_types(kind)
    own = {field.name: field.type for field in attrs.fields(kind) if field.type != tuple[kind, ...]}
    fields = {name: values(each) for name, each in own.items()} | _valid(kind)
    if kind is AgentCost:  # it holds others of its kind
        return st.recursive(st.builds(kind, **fields), lambda inner: costs(inner, fields), max_leaves=4)
    return st.builds(kind, **fields)


def _valid(kind):
    """Return strategies for the fields that take no value of their type but certain ones."""
    if kind is Settings:
        counts, shares = st.none() | st.integers(1, 10**6), st.none() | st.floats(0, 1)
        return {"temperature": shares, "top_p": shares, "max_tokens": counts}
    return {
        ImagePart: {"url": urls, "detail": st.sampled_from(["auto", "low", "high"])},
        AudioPart: {"url": st.just("data:audio/wav;base64,AAAA")},
        FilePart: {"url": st.just("data:application/pdf;base64,AAAA")},
    }.get(kind, {})


def costs(inner, fields):
    """Return a strategy for costs with such children."""
    return st.builds(AgentCost, **fields, children=st.lists(inner, min_size=1, max_size=2).map(tuple))


# Round trips


@pytest.mark.parametrize("kind", e.EVENTS)
@settings(max_examples=settings.default.max_examples // 2)  # of each of thirty
@given(data=st.data())
def test_every_event_comes_back(kind, data):
    """Any event, with any text and any number in it, is read as it was written, and is one line of UTF-8."""
    event = data.draw(values(kind))
    text = encode_event(event)
    assert decode_event(text) == event
    assert encode_event(decode_event(text)) == text
    assert "\n" not in text
    assert text.encode().decode() == text


@pytest.mark.parametrize("event", SAMPLES.values(), ids=lambda event: type(event).__name__)
def test_every_event_has_a_form_in_json(event):
    """`to_dict` is what the journal holds: it says the class, goes into JSON and can be read again."""
    form = event.to_dict()
    assert json.loads(json.dumps(form)) == form
    assert form["is"] == type(event).__name__
    assert decode_event(json.dumps(form)) == event


@given(values(Header))
def test_every_header_comes_back(header):
    """Any header is read as it was written, its metadata included; it is written in the newest format."""
    assert decode_header(encode_header(header)) == attrs.evolve(header, format=FORMAT)


@pytest.mark.parametrize("kind", ITEMS)
@given(data=st.data())
def test_every_inbox_item_comes_back(kind, data):
    """Any inbox item is read as it was written."""
    item = data.draw(values(kind))
    assert decode_item(encode_item(item)) == item


@pytest.mark.parametrize(
    "text", ["", "\0", "a\u2028b\x85c", "\U0001f600", "é e\u0301", "\u202e\u200b\ufeff", '"\\/\n\r\t', "x" * 10_000]
)
def test_awkward_text_comes_back(text):
    """NUL, line separators, direction marks and the like are kept as they are."""
    event = e.ModelFaltered(error=text)
    assert decode_event(encode_event(event)) == event


@example("a\ud800b\udfff")
@example("\ud83d\ude00")
@given(st.text(st.characters(exclude_categories=())))
def test_half_characters_are_made_whole_or_replaced(text):
    """Two halves are their character, one by itself, which no store could write, is U+FFFD, and all around it stays."""
    written = encode_event(e.ModelFaltered(error=text))
    assert written.encode().decode() == written
    assert decode_event(written).error == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_defaults_are_left_out():
    """What has its default is not written, so that the usual event is short; it is read as what it was."""
    assert encode_event(e.Accepted()) == '{"is":"Accepted"}'
    assert decode_event('{"is":"Accepted"}') == e.Accepted(at=0.0, took_s=0.0)
    assert encode_item(Approve(call_id="t1.0")) == f'{{"v":{FORMAT},"call_id":"t1.0","is":"Approve"}}'


@pytest.mark.parametrize("event", SAMPLES.values(), ids=lambda event: type(event).__name__)
def test_an_event_is_shown_as_its_fields(event):
    """What is written of an event is at hand as an object, without the format that it is in."""
    assert event.to_dict() == json.loads(encode_event(event))
    assert codec.decode_event(json.dumps(event.to_dict()), header()) == event


# Refusals

EVENT = {"is": "ToolStarted", "call_id": "t1.0"}
RESULT = {"call_id": "t1.0", "tool": "f", "outcome": "done", "content": ""}
COST = {"agent": "a", "run_id": "r1.t1.0", "usage": {}, "usd": None, "turns": 1}
PENDING = {"kind": "approval", "run_id": "r1.t1.0", "call_id": "t1.0", "tool": "f", "arguments": {}}
HEADER = {"v": FORMAT, "id": "r1", "prompt": [], "created_at": 1.0}

NO_RECORD = [
    "",
    "{",
    "nope",
    '{"is": "Accepted"} x',
    "[]",
    "5",
    "null",
    '"Accepted"',
    "\ufeff{}",
    "\0",
    "{'is': 'Accepted'}",
]
DEEP = ["[" * 200_000, '{"a":' * 200_000, "[" * 200_000 + "]" * 200_000, '{"is":"Accepted","at":' + "[" * 200_000]
HUGE_NUMBER = '{"is":"Accepted","at":' + "9" * 5_000 + "}"


@pytest.mark.parametrize("decode", [decode_event, decode_header, decode_item])
@pytest.mark.parametrize(
    "text", [*NO_RECORD, *DEEP, HUGE_NUMBER], ids=lambda text: getattr(text, "__name__", text[:24])
)
def test_what_is_no_record_is_refused(decode, text):
    """What is not JSON, no object, nested 200,000 deep or a number of 5,000 digits is corrupt, and quoted in short."""
    with pytest.raises(CorruptError) as caught:
        decode(text)
    assert repr(text[:120]) in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "record",
    [
        EVENT,
        {"is": "ToolFinished", "result": RESULT},
        {"is": "ToolFinished", "result": RESULT | {"child": COST | {"children": [COST]}}},
        {"is": "ToolPaused", "call_id": "t1.0", "pending": [PENDING]},
    ],
    ids=str,
)
def test_the_records_below_are_sound(record):
    """What the refusals below are made of is read, so that each is refused for what is wrong with it."""
    assert type(decode_event(json.dumps(record))).__name__ == record["is"]


@pytest.mark.parametrize(
    "record",
    [
        {"call_id": "t1.0"},
        EVENT | {"is": "ToolExploded"},
        EVENT | {"is": "Event"},
        EVENT | {"is": "object"},
        EVENT | {"is": None},
        EVENT | {"is": ["ToolStarted"]},
        EVENT | {"is": "Approve"},
        EVENT | {"at": None},
        EVENT | {"at": "soon"},
        EVENT | {"at": [1]},
        {"is": "Failed", "reason": "boredom", "message": ""},
        {"is": "Failed", "reason": None, "message": ""},
        {"is": "Observed", "inputs": [{"parts": [{"is": "Header", "id": "x"}]}]},
        {"is": "Observed", "inputs": [{"parts": [{"is": "TextPart", "text": "x", "more": 1}]}]},
        {"is": "Observed", "inputs": [{"parts": [{"is": "ImagePart", "url": "file:///etc/passwd"}]}]},
        {"is": "Observed", "inputs": 5},
        {"is": "ToolFinished", "result": RESULT | {"outcome": "great"}},
        {"is": "ToolFinished", "result": RESULT | {"more": 1}},
        {"is": "ToolFinished", "result": "ok"},
        {"is": "ToolFinished", "result": None},
        {"is": "ToolFinished", "result": RESULT | {"error_type": "boredom"}},
        {"is": "ToolFinished", "result": RESULT | {"child": COST | {"children": [COST | {"more": 1}]}}},
        {"is": "ToolPaused", "call_id": "t1.0", "pending": [PENDING | {"kind": "weather"}]},
        {"is": "AnswerGiven", "message": {"text": "hi", "is": "AssistantMessage", "calls": [{}]}},
    ],
    ids=str,
)
def test_what_is_no_event_is_refused(record):
    """The set of types is closed: unknown types, keys and values are corrupt, also deep inside."""
    with pytest.raises(CorruptError, match="does not fit the format"):
        decode_event(json.dumps(record))


WRONG_LISTS = [
    {"is": "Continued", "disabled": "abc"},
    {"is": "Continued", "disabled": {"a": 1}},
    {"is": "Continued", "disabled": None},
    {"is": "Observed", "inputs": {}},
]
WRONG_VALUES = [
    EVENT | {"call_id": 5},
    EVENT | {"call_id": None},
    EVENT | {"call_id": ["t1.0"]},
    EVENT | {"repeatable": "false"},
    EVENT | {"repeatable": 1},
    EVENT | {"at": "5"},
    EVENT | {"at": True},
    EVENT | {"at": math.nan},
    EVENT | {"at": math.inf},
    {"is": "ToolFinished", "result": RESULT | {"shown_chars": "7"}},
    {"is": "ToolFinished", "result": RESULT | {"shown_chars": 1.5}},
    {"is": "ToolFinished", "result": RESULT | {"shown_chars": True}},
    {"is": "ToolFinished", "result": RESULT | {"attempts": "2"}},
    {"is": "ToolFinished", "result": RESULT | {"retryable": 1}},
    {"is": "ToolFinished", "result": RESULT | {"child": [COST]}},
    {"is": "ToolFinished", "result": RESULT | {"child": COST | {"usd": "0.5"}}},
    {"is": "ToolFinished", "result": RESULT | {"child": COST | {"children": COST}}},
    {"is": "ToolPaused", "call_id": "t1.0", "pending": [PENDING | {"expires_at": True}]},
    {"is": "ToolPaused", "call_id": "t1.0", "pending": [PENDING | {"arguments": []}]},
    {"is": "ApprovalGiven", "call_id": "t1.0", "arguments": {}},
]


@pytest.mark.parametrize("record", WRONG_LISTS, ids=str)
def test_wrong_lists_are_refused(record):
    """Text or an object where a list belongs is corrupt, and not taken apart into items."""
    with pytest.raises(CorruptError):
        decode_event(json.dumps(record))


@pytest.mark.parametrize("record", WRONG_VALUES, ids=str)
def test_wrong_types_are_refused(record):
    """A value of another type than its field's is corrupt, and never turned into something that fits."""
    with pytest.raises(CorruptError):
        decode_event(json.dumps(record))


def test_a_whole_number_is_a_number():
    """Other writers of JSON leave the ".0" out: it is the same time."""
    event = decode_event('{"is":"Accepted","at":5}')
    assert (event, type(event.at)) == (e.Accepted(at=5.0), float)


def least(value):
    """Return the value with only what it must have."""
    needed = [field.name for field in attrs.fields(type(value)) if field.default is attrs.NOTHING]
    return type(value)(**{name: getattr(value, name) for name in needed})


# How to write and read each type, with a sample of it.
MANNERS = [
    *[(encode_event, decode_event, event) for event in SAMPLES.values()],
    *[(encode_item, decode_item, decision(call_id="t1.0")) for decision in (Approve, Reject, Rerun)],
    (encode_item, decode_item, Settle(call_id="t1.0", outcome=Outcome.DONE, content="ok")),
    (encode_item, decode_item, GiveInput(call_id="t1.0", answers={"who": None})),
    (encode_item, decode_item, Input(parts=PROMPT)),
    (encode_item, decode_item, Cancel()),
    (encode_item, decode_item, Pause()),
    (encode_item, decode_item, Wake(run_id="r1.t1.0")),
    (encode_header, decode_header, header()),
]


@pytest.mark.parametrize(("encode", "decode", "sample"), MANNERS, ids=[type(sample).__name__ for *_, sample in MANNERS])
def test_a_missing_or_extra_key_is_refused(encode, decode, sample):
    """Each key of the smallest record of each type is needed, and no further one is taken."""
    record = json.loads(encode(least(sample)))
    assert decode(json.dumps(record)) == least(sample)
    needed = record.keys() - ({"v"} if encode is encode_item else set())  # rows of format 1 had none
    for key in needed:
        with pytest.raises(CorruptError):
            decode(json.dumps({name: value for name, value in record.items() if name != key}))
    with pytest.raises(CorruptError):
        decode(json.dumps(record | {"more": 1}))


def test_the_samples_cover_the_items():
    """The samples above leave no type out."""
    assert {type(sample) for *_, sample in MANNERS} == {*e.EVENTS, *ITEMS, Header}


@pytest.mark.parametrize("decode", [decode_event, decode_header, decode_item])
@given(text=st.text() | metadata.map(json.dumps))
def test_nothing_else_escapes(decode, text):
    """Whatever the text, reading it gives a value or an error of ours."""
    with contextlib.suppress(AgentError):
        decode(text)


ROW = {"is": "Cancel"}
RECORDS = [(decode_header, HEADER), (decode_event, EVENT), (partial(codec.decode_event, header=OLD), EVENT)]
RECORDS += [(decode_item, ROW)]
EACH_RECORD = pytest.mark.parametrize(
    ("decode", "record"), RECORDS, ids=["header", "event", "event of an old run", "item"]
)


@EACH_RECORD
@pytest.mark.parametrize("version", [None, "1", 1.0, [1], 0, -1, True])
def test_a_version_that_never_was_is_refused(decode, record, version):
    """The version is a whole number from 1 on, and without it there is no knowing what the rest means."""
    decode(json.dumps(record))
    with pytest.raises(CorruptError, match="no format version"):
        decode(json.dumps(record | {"v": version}))


def test_a_header_has_a_version():
    """A header says itself which format it is in: there is nothing else to tell."""
    with pytest.raises(CorruptError, match="no format version"):
        decode_header(json.dumps({key: value for key, value in HEADER.items() if key != "v"}))


@EACH_RECORD
def test_a_newer_record_is_refused(decode, record):
    """A run may be driven by a newer agentfsm after an older one: the old one refuses what that wrote, and says so."""
    with pytest.raises(TooNewError, match=rf"format {FORMAT + 1}, .* up to {FORMAT}: upgrade"):
        decode(json.dumps(record | {"v": FORMAT + 1, "what_is": "this"}))


def test_an_event_says_its_format_in_an_older_run():
    """An event of the run's own format says nothing of it; one that is newer than the run's beginning does."""
    event = e.Paused(by="ann")
    assert json.loads(codec.encode_event(event, OLD)) == {"v": FORMAT, "by": "ann", "is": "Paused"}
    assert "v" not in json.loads(encode_event(event))
    for head in (OLD, header()):
        assert codec.decode_event(codec.encode_event(event, head), head) == event


def test_records_are_brought_up_to_date_one_version_at_a_time(monkeypatch):
    """An old record goes through every migration from its own version on, in order; a new one through none."""
    seen = []

    def rename(number, value):
        seen.append(number)
        return {key: f"{each}{number}" if key == "error" else each for key, each in value.items()}

    monkeypatch.setattr(codec, "FORMAT", 4)
    monkeypatch.setattr(codec, "_MIGRATIONS", {number: partial(rename, number) for number in (1, 2, 3)})
    text = '{"error":"e","is":"ModelFaltered"}'
    read = [codec.decode_event(text, header(format=version)).error for version in (1, 2, 3, 4)]
    assert read == ["e123", "e23", "e3", "e"]
    assert seen == [1, 2, 3, 2, 3, 3]
    newer = '{"v":3,"error":"e","is":"ModelFaltered"}'
    assert codec.decode_event(newer, header(format=1)).error == "e3"
    head = codec.decode_header('{"v":2,"id":"r1","prompt":[],"created_at":1.0}')
    assert (head.format, seen[-2:]) == (2, [2, 3])
    assert codec.decode_item('{"is":"Cancel"}') == Cancel()
    assert seen[-3:] == [1, 2, 3]


def test_every_older_format_has_its_migration():
    """Whoever raises the format writes the function that brings the one before up to date."""
    assert set(codec._MIGRATIONS) == set(range(codec.FIRST_FORMAT, FORMAT))


def test_a_migration_that_breaks_is_a_corrupt_record(monkeypatch):
    """A record that only looks like an old one is refused in our words, not in those of the migration."""
    monkeypatch.setattr(codec, "_MIGRATIONS", {1: lambda value: value["no such key"]})
    with pytest.raises(CorruptError, match=r"does not fit the format \(KeyError"):
        codec.decode_event('{"is":"Accepted"}', OLD)


@pytest.mark.parametrize(
    "value", [{1}, b"x", object(), math.nan, math.inf, 10**5_000, TextPart], ids=lambda value: type(value).__name__
)
def test_metadata_is_plain_json(value):
    """Metadata that JSON does not have is a misuse, told when the run begins."""
    with pytest.raises(MisuseError, match="metadata must be plain JSON"):
        encode_header(header(metadata={"value": value}))


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def endless():
    value = {}
    value["again"] = value
    return value


@pytest.mark.parametrize("value", [nested(199), nested(5_000), endless()], ids=["too deep", "deep", "endless"])
def test_metadata_ends_somewhere(value):
    """Metadata that is nested without end, or nearly so, is a misuse as well."""
    with pytest.raises(MisuseError):
        encode_header(header(metadata={"value": value}))


@pytest.mark.parametrize("value", [nested(197), [{"wide": []}] * 5_000, "[" * 5_000], ids=["deep", "wide", "text"])
def test_metadata_may_be_large(value):
    """What is wide or long is not deep."""
    head = header(metadata={"value": value})
    assert decode_header(encode_header(head)) == head


def test_costs_end_somewhere():
    """Sub-agents below one another without end, or nearly so, are neither written nor read."""
    cost = AgentCost(agent="a", run_id="r", usage=Usage(), usd=None, turns=1)
    for _ in range(5_000):
        cost = attrs.evolve(cost, children=(cost,))
    with pytest.raises(MisuseError):
        encode_event(finished(child=cost))
    head, tail = json.dumps(COST)[:-1] + ', "children": [', "]}"
    text = '{"is": "ToolFinished", "result": ' + json.dumps(RESULT)[:-1] + ', "child": '
    with pytest.raises(CorruptError):
        decode_event(text + head * 5_000 + tail * 5_000 + "}}")


def test_a_number_that_json_lacks_is_refused():
    """An event whose time is no number is not written."""
    with pytest.raises(MisuseError, match="cannot be written as JSON"):
        encode_event(e.Accepted(at=math.nan))


def test_a_record_has_a_size(monkeypatch):
    """A record over the limit is a misuse when written and corrupt when read; one just within it is fine."""
    text = encode_event(e.ModelFaltered(error="x" * 100))
    monkeypatch.setattr(codec, "MAX_RECORD_CHARS", len(text))
    monkeypatch.setattr(encoding, "MAX_RECORD_CHARS", len(text))
    assert decode_event(text) == decode_event(encode_event(e.ModelFaltered(error="x" * 100)))
    with pytest.raises(MisuseError, match=f"{len(text) + 1} characters; the maximum is {len(text)}"):
        encode_event(e.ModelFaltered(error="x" * 101))
    with pytest.raises(CorruptError, match=f"{len(text) + 1} characters"):
        decode_event(text + " ")


def test_what_is_no_value_of_a_journal_is_refused():
    """A value of another class is no inbox item, whatever fields it has: it would be written and never read again."""
    with pytest.raises(MisuseError, match="TextPart2 is not a type that journals contain"):
        encode_item(attrs.make_class("TextPart2", ["text"])("hello"))


def test_a_message_for_programs_says_what_it_is():
    """Its kind beside its fields, as JSON has them."""
    result = ToolResult(call_id="t1.0", tool="look", outcome=Outcome.DONE, content="seen")
    told = codec.message_to_json(result)
    assert told["is"] == "ToolResult"
    assert (told["call_id"], told["content"]) == ("t1.0", "seen")
    assert json.loads(json.dumps(told)) == {**told, "parts": [], "spent": [], "labels": []}
