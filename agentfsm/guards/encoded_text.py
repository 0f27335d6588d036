"""Find a text that was encoded lightly: spaced, reversed, in other letters, or in base64 and the like."""

from __future__ import annotations

import codecs
import html
import re
import sys
import unicodedata
from base64 import b32decode, b64decode
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import unquote

from agentfsm.core.text_safety import HIDDEN_CHARS

# Signs before the first letter of a line or word.
_LINE_STARTS: Final = " \t\"'`*_#>-.("
# Fewest letters and digits of a text that is looked for: a shorter one would be found by chance.
MIN_LETTERS: Final = 12

_NO_BASE64: Final = re.compile(r"[^A-Za-z0-9+/]+")
_NO_BASE32: Final = re.compile(r"[^A-Z2-7]+")
_HEX: Final = re.compile(r"(?:(?:\\?x|%|0x|[\s:,-])?[0-9a-fA-F]{2}){12,}")
_ESCAPE: Final = re.compile(r"\\(?:u\{?([0-9a-fA-F]{2,6})\}?|x([0-9a-fA-F]{2}))")
_CODES: Final = re.compile(r"(?:(?<![0-9])[0-9]{2,3}(?![0-9])[\s,;-]{0,3}){12,}")
_NUMBER: Final = re.compile(r"[0-9]+")
_NOT_HEX: Final = re.compile(r"(?:\\?x|0x|[^0-9a-fA-F])")
_SIGNS: Final = re.compile(r"[\W_]+")
_NO_SIGNS: Final = {code: None for code in range(128) if not chr(code).isalnum()}
# Numbers of characters beyond groups of eight that end no byte.
_NO_BASE32_ENDS: Final = frozenset({1, 3, 6})
_URL_SAFE: Final = str.maketrans("-_", "+/")


def find_encoded(text: str, wanted: Iterable[str]) -> str | None:
    """Return the first of the wanted texts that is in a text, plain or lightly encoded; None if none is.

    Found are other spacing and punctuation, other case and forms of letters, hidden characters in between, the text
    backwards, ROT13, base64, base32, hexadecimal and decimal codes, escapes, and the first letters of lines and words.
    Texts with fewer than 12 letters and digits are not looked for, and in base64, base32 and hexadecimal only ASCII is.

    Args:
        text: Any text.
        wanted: The texts to find.
    """
    needles: dict[str, str] = {}
    for each in wanted:
        plain = _squeeze(each)
        if len(plain) >= MIN_LETTERS:
            needles |= dict.fromkeys((plain, plain[::-1], codecs.encode(plain, "rot13")), each)
    if not needles:
        return None
    for candidate in iter_readings(text):
        plain = _squeeze(candidate)
        for needle, each in needles.items():
            if needle in plain:
                return each
    return None


def _squeeze(text: str) -> str:
    """Return the letters and digits of a text, in their plain form."""
    if text.isascii():
        return text.lower().translate(_NO_SIGNS)
    plain = unicodedata.normalize("NFKC", HIDDEN_CHARS.sub("", text)).casefold()
    return _SIGNS.sub("", plain)


def iter_readings(text: str) -> Iterator[str]:
    """Yield the text, those in it that are encoded or escaped, and the first letters of its lines and words."""
    yield text
    if "%" in text or "&" in text:
        yield unquote(html.unescape(text))
    if "\\" in text:
        yield _ESCAPE.sub(lambda found: _to_char(int(found[1] or found[2], 16)), text)
    yield "".join([line.strip(_LINE_STARTS)[:1] for line in text.splitlines()])
    yield "".join([word.strip(_LINE_STARTS)[:1] for word in text.split()])
    for found in _CODES.finditer(text):
        yield "".join([_to_char(int(code)) for code in _NUMBER.findall(found[0])])
    # The text around does not matter, since it is decoded from each place in a group of characters.
    for decode, size, others in ((_decode_base64, 4, _NO_BASE64), (_decode_base32, 8, _NO_BASE32)):
        digits = others.sub("", text.translate(_URL_SAFE))
        yield from (decode(form[start:]) for form in (digits, digits[::-1]) for start in range(size))
    for found in _HEX.finditer(text):
        digits = _NOT_HEX.sub("", found[0])
        yield from (_decode_hex(digits[start:]) for start in range(2))


def _to_char(code: int) -> str:
    return chr(code) if code <= sys.maxunicode else ""


def _decode_base64(text: str) -> str:
    whole = text[:-1] if len(text) % 4 == 1 else text  # one character alone holds no byte
    return b64decode(whole + "=" * (-len(whole) % 4)).decode("ascii", "ignore")


def _decode_base32(text: str) -> str:
    whole = text[: len(text) - (len(text) % 8 in _NO_BASE32_ENDS)]
    whole = whole[: len(whole) - (len(whole) % 8 in _NO_BASE32_ENDS)]
    return b32decode(whole + "=" * (-len(whole) % 8)).decode("ascii", "ignore")


def _decode_hex(digits: str) -> str:
    return bytes.fromhex(digits[: len(digits) // 2 * 2]).decode("ascii", "ignore")
