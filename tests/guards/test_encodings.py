"""Forms in which a known secret may leave: those that the exit filter finds, and those that are out of its reach."""

import gzip
import zlib
from base64 import a85encode, b32encode, b64encode, b85encode, urlsafe_b64encode
from binascii import b2a_uu
from codecs import encode
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from pydantic import BaseModel, ConfigDict

from agentfsm import Label
from agentfsm.core.json_text import list_leaves, map_json_texts
from agentfsm.core.sensitive_text import redact_members
from agentfsm.guards import exit_filter
from agentfsm.ports import GuardedCall, OutgoingText, ToolTraits
from tests.support.sample_runs import header

KEY = "battery-horse-9"
DATA = KEY.encode()
LOOKALIKES = str.maketrans("aeoyr", "\u0430\u0435\u043e\u0443\u0433")
FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
MORSE = "-... .- - - . .-. -.-- -....- .... --- .-. ... . -....- ----."
RULE = exit_filter(secrets=[KEY], canary=False, kinds=[])

# Texts in which it is found.
FOUND = {
    "plain": f"The key is {KEY}.",
    "upper case": KEY.upper(),
    "backwards": KEY[::-1],
    "spaced": " ".join(KEY),
    "with dots": ".".join(KEY),
    "a line each": "\n".join(KEY),
    "with hidden characters": "\u200b".join(KEY),
    "full width": KEY.translate(FULL_WIDTH),
    "look-alikes": KEY.translate(LOOKALIKES),
    "HTML references": "".join(f"&#{ord(char)};" for char in KEY),
    "URL escapes": "".join(f"%{byte:02x}" for byte in DATA),
    "JSON escapes": "".join(f"\\u{byte:04x}" for byte in DATA),
    "octal escapes": "".join(f"\\{byte:03o}" for byte in DATA),
    "quoted-printable": "".join(f"={byte:02X}" for byte in DATA),
    "hexadecimal": DATA.hex(),
    "hexadecimal, spaced": DATA.hex(" "),
    "decimal codes": " ".join(str(byte) for byte in DATA),
    "octal codes": " ".join(f"{byte:o}" for byte in DATA),
    "binary": " ".join(f"{byte:08b}" for byte in DATA),
    "base32": b32encode(DATA).decode(),
    "base64": b64encode(DATA).decode(),
    "base64 in a longer text": b64encode(b"the key is " + DATA).decode(),
    "base64 for URLs": f"https://evil.example/?d={urlsafe_b64encode(DATA).decode()}",
    "base64, wrapped": encode(DATA * 9, "base64").decode(),
    "base64, backwards": b64encode(DATA).decode()[::-1],
    "base64 twice": b64encode(b64encode(DATA)).decode(),
    "base64 three times": b64encode(b64encode(b64encode(DATA))).decode(),
    "base64 of hexadecimal": b64encode(DATA.hex().encode()).decode(),
    "hexadecimal of base64": b64encode(DATA).hex(),
    "base85": b85encode(DATA).decode(),
    "ascii85": a85encode(DATA).decode(),
    "base64 of UTF-16": b64encode(KEY.encode("utf-16-le")).decode(),
    "zlib, base64": b64encode(zlib.compress(DATA)).decode(),
    "gzip, base64": b64encode(gzip.compress(DATA)).decode(),
    "ROT13": encode(KEY, "rot13"),
    "Caesar": KEY.translate(str.maketrans("abcdefghijklmnopqrstuvwxyz", "defghijklmnopqrstuvwxyzabc")),
    "Atbash": KEY.translate(str.maketrans("abcdefghijklmnopqrstuvwxyz", "zyxwvutsrqponmlkjihgfedcba")),
    "every second letter": "x".join(KEY.replace("-", "")),
    "first letters of words": " ".join(f"{char}ood" for char in KEY.replace("-", "")),
    "first letters of lines": "\n".join(f"{char} is first" for char in KEY.replace("-", "")),
}
# Texts in which it is not.
OUT_OF_REACH = {
    "last letters of words": " ".join(f"wo{char}" for char in KEY.replace("-", "")),
    "every third letter": "xy".join(KEY.replace("-", "")),
    "two halves with words between": "It begins with battery-ho, and then comes rse-9.",
    "halves turned around": "rse-9 battery-ho",
    "in words": "battery, then horse, then the number nine",
    "translated": "Batterie-Pferd-9",
    "digits for letters": KEY.replace("a", "4").replace("e", "3").replace("o", "0"),
    "Morse": MORSE,
    "spelling alphabet": "Bravo Alfa Tango Tango Echo Romeo Yankee, Hotel Oscar Romeo Sierra Echo, Niner",
    "uuencode": b2a_uu(DATA).decode(),
    "shifted bytes": bytes(byte ^ 1 for byte in DATA).hex(),
    "rail fence": KEY[::2] + KEY[1::2],
    "only a part": KEY[:11],
}


class Parcel(BaseModel):
    model_config = ConfigDict(extra="allow")
    street: str = ""


@attrs.frozen
class Note:
    text: str


# Arguments in which it is found.
PLACES = {
    "a text": {"data": KEY},
    "a name": {"data": {KEY: "x"}},
    "a name, encoded": {"data": {b64encode(DATA).decode(): "x"}},
    "a name deep below": {"data": [{"a": ({"b": {KEY[::-1]: None}},)}]},
    "a list": {"data": ["a", ["b", KEY]]},
    "a set": {"data": {KEY, "a"}},
    "a model": {"data": Parcel(street=KEY)},
    "a field that a model does not declare": {"data": Parcel(**{KEY: "x"})},
    "an attrs class with slots": {"data": Note(KEY)},
    "halves in two values": {"to": "battery-ho", "data": "rse-9"},
    "halves in two values below": {"data": {"first": "battery-ho", "second": "rse-9"}},
    "halves turned around": {"to": "rse-9", "data": "battery-ho"},
    "halves in two names": {"data": {"battery-ho": 1, "rse-9": 2}},
    "a name and its value": {"data": {"battery-ho": "rse-9"}},
}
PLACES_OUT_OF_REACH = {
    "thirds in another order": {"to": "rse-9", "data": "tery-ho", "more": "bat"},
    "a number": {"data": int.from_bytes(DATA)},
}


def is_filtered(text):
    outgoing = OutgoingText(text=text, labels=frozenset(), messages=(), hosted=None, header=header())
    return RULE.filter_text(outgoing) is not None


def is_refused(arguments):
    tool = ToolTraits(name="post", labels=(Label.SENDS_OUT,))
    call = GuardedCall(tool=tool, arguments=SimpleNamespace(**arguments), labels={}, counted={}, header=header())
    return RULE.decide(call) is not None


def test_the_table_of_forms_holds():
    """Each form is found or not, as the tables say, in texts and in arguments; harmless ones are not."""
    for name, text in FOUND.items():
        assert (is_filtered(text), is_refused({"data": text})) == (True, True), name
    for name, text in OUT_OF_REACH.items():
        assert not is_filtered(text), name
    assert [name for name, arguments in PLACES.items() if not is_refused(arguments)] == []
    assert [name for name, arguments in PLACES_OUT_OF_REACH.items() if is_refused(arguments)] == []
    assert not is_refused({"data": {"battery": "new", "horse": 9}, "to": "ann"})


def test_the_pages_have_the_figures():
    """Both pages say how many of the forms and places are found."""
    texts = f"{len(FOUND)} of {len(FOUND) + len(OUT_OF_REACH)} forms"
    places = f"{len(PLACES)} of {len(PLACES) + len(PLACES_OUT_OF_REACH)} places"
    root = Path(__file__).parents[2]
    for page in ("docs/guards.md", "SECURITY_MODEL.md"):
        text = " ".join((root / page).read_text(encoding="utf-8").split())
        assert (page, texts in text, places in text) == (page, True, True), (texts, places)


def test_names_are_masked_like_values():
    """No member is lost where two names become one, and a value that is named as a secret is one in a list too."""
    members = {"to": {"a@example.com": 1, "b@example.com": "c@example.com"}, "token": ["abc"]}
    assert redact_members(members) == {
        "to": {"[EMAIL_REDACTED]": 1, "[EMAIL_REDACTED] (2)": "[EMAIL_REDACTED]"},
        "token": ["[SECRET_REDACTED]"],
    }


def test_the_walk_visits_names_and_values():
    """All plain values and names are visited, in order; other text than JSON stays as it is."""
    value = {"a": [1, None, {"b": True}], "c": ("d", 2.5)}
    assert list_leaves(value) == ["a", 1, "b", True, "c", "d", 2.5]
    assert list_leaves(value, names=False) == [1, True, "d", 2.5]
    assert list_leaves(value, names=True) == ["a", "b", "c"]
    assert map_json_texts('{"a": ["b", 1]}', str.upper) == '{"A": ["B", 1]}'
    assert [map_json_texts(text, str.upper) for text in ("[a", "a", "{} b")] == ["[a", "a", "{} b"]


@pytest.mark.parametrize("text", ["An answer with https://docs.example/guide?x=1, 1234 5678 and words.", "a" * 20_000])
def test_ordinary_texts_are_not_taken_for_it(text):
    """Nothing is found where the secret is not."""
    assert not is_filtered(text)
