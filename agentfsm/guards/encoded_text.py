"""Find a text that was encoded lightly: spaced, reversed, in other letters, or in base64 and the like."""

from __future__ import annotations

import html
import re
import sys
import unicodedata
import zlib
from base64 import a85decode, b32decode, b64decode, b85decode
from collections.abc import Callable, Iterable, Iterator
from typing import Final
from urllib.parse import unquote

from agentfsm.core.text_safety import HIDDEN_CHARS

# Signs before the first letter of a line or word.
_LINE_STARTS: Final = " \t\"'`*_#>-.("
# Fewest letters and digits of a text that is looked for: a shorter one would be found by chance.
MIN_LETTERS: Final = 12

_NO_BASE64: Final = re.compile(r"[^A-Za-z0-9+/]+")
_NO_BASE32: Final = re.compile(r"[^A-Z2-7]+")
_HEX: Final = re.compile(r"(?:(?:\\?x|%|=|0x|[\s:,-])?[0-9a-fA-F]{2}){5,}")
_ESCAPE: Final = re.compile(r"\\(?:u\{?([0-9a-fA-F]{2,6})\}?|x([0-9a-fA-F]{2})|([0-7]{3}))")
_CODES: Final = re.compile(r"(?:(?<![0-9])[0-9]{2,3}(?![0-9])[\s,;-]{0,3}){5,}")
_BITS: Final = re.compile(r"(?:[01]{8}[\s,;-]{0,3}){5,}")
_NUMBER: Final = re.compile(r"[0-9]+")
_NOT_HEX: Final = re.compile(r"(?:\\?x|0x|[^0-9a-fA-F])")
_SIGNS: Final = re.compile(r"[\W_]+")
_NO_SIGNS: Final = {code: None for code in range(128) if not chr(code).isalnum()}
# Numbers of characters beyond groups of eight that end no byte.
_NO_BASE32_ENDS: Final = frozenset({1, 3, 6})
_URL_SAFE: Final = str.maketrans("-_", "+/")
# Letters of other scripts that look like those of ASCII, in lower case: Cyrillic, Greek, Armenian.
_LOOKALIKES: Final = str.maketrans(
    "\u0430\u0432\u0441\u0501\u0435\u04bb\u043d\u0456\u0458\u043a\u04cf\u043c\u043e\u0440\u051b\u0433\u0455"
    "\u0442\u0443\u0475\u051d\u0445\u044c\u0451\u0457\u03b1\u03b2\u03b5\u03b3\u03b7\u03b9\u03ba\u03bd\u03bf"
    "\u03c1\u03c4\u03c5\u03c7\u03c9\u03b6\u03bc\u0585\u057d\u0570\u0578\u0581\u0584\u0131\u0251\u0261",
    "abcdehhijklmopqrstyvwxbeiabeynikvoptuxwzmouhngpiag",
)
# Rounds of decoding, and the most characters of a text that were compressed: a few words may unpack to any number.
_ROUNDS: Final = 3
_MAX_CHARS: Final = 100_000
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz"


class TooLongToReadError(Exception):
    """Compressed parts of a text have more characters than are read."""


def find_encoded(text: str, wanted: Iterable[str]) -> str | None:
    """Return the first of the wanted texts that is in a text, plain or lightly encoded; None if none is.

    Found are other spacing and punctuation, other case and forms of letters, letters of other scripts that look alike,
    hidden characters in between, every second character, the text backwards, alphabets shifted or turned around,
    base64, base32, base85, hexadecimal, binary and decimal codes, escapes, the first letters of lines and words, and
    base64 and the like of any of these and of compressed text, up to three times.
    Texts with fewer than 12 letters and digits are not looked for, and in encoded text only ASCII is. A text with more
    than 100,000 compressed characters counts as one that has the first of them.

    Args:
        text: Any text.
        wanted: The texts to find.
    """
    needles: dict[str, str] = {}
    for each in wanted:
        plain = _squeeze(each)
        if len(plain) >= MIN_LETTERS:
            shifted = [plain.translate(table) for table in _SHIFTS]
            needles |= dict.fromkeys([*shifted, *[form[::-1] for form in shifted]], each)
    if not needles:
        return None
    try:
        for candidate in iter_readings(text):
            plain = _squeeze(candidate)
            for form in (plain, plain[::2], plain[1::2]):
                for needle, each in needles.items():
                    if needle in form:
                        return each
    except TooLongToReadError:
        return next(iter(needles.values()))
    return None


_SHIFTS: Final = [
    *[str.maketrans(_ALPHABET, _ALPHABET[shift:] + _ALPHABET[:shift]) for shift in range(26)],
    str.maketrans(_ALPHABET, _ALPHABET[::-1]),
]


def _squeeze(text: str) -> str:
    """Return the letters and digits of a text, in their plain form."""
    if text.isascii():
        return text.lower().translate(_NO_SIGNS)
    plain = unicodedata.normalize("NFKC", HIDDEN_CHARS.sub("", text)).casefold()
    return _SIGNS.sub("", plain).translate(_LOOKALIKES)


def iter_readings(text: str) -> Iterator[str]:
    """Yield the text, those in it that are encoded or escaped, and the first letters of its lines and words.

    Raises:
        TooLongToReadError: if it has more than 100,000 compressed characters.
    """
    yield text
    if "%" in text or "&" in text:
        yield unquote(html.unescape(text))
    if "\\" in text:
        yield _ESCAPE.sub(lambda found: _to_char(int(found[1] or found[2] or found[3], 8 if found[3] else 16)), text)
    yield "".join([line.strip(_LINE_STARTS)[:1] for line in text.splitlines()])
    yield "".join([word.strip(_LINE_STARTS)[:1] for word in text.split()])
    for found in _CODES.finditer(text):
        yield "".join([_to_char(int(code)) for code in _NUMBER.findall(found[0])])
        yield "".join([_to_char(int(code, 8)) for code in _NUMBER.findall(found[0]) if not {"8", "9"} & set(code)])
    for found in _BITS.finditer(text):
        digits = "".join(_NUMBER.findall(found[0]))
        yield "".join([chr(int(digits[start : start + 8], 2)) for start in range(0, len(digits), 8)])
    # The text around does not matter, since it is decoded from each place in a group of characters.
    for decode, size, others in ((_decode_base64, 4, _NO_BASE64), (_decode_base32, 8, _NO_BASE32)):
        digits = others.sub("", text.translate(_URL_SAFE))
        yield from (decode(form[start:]) for form in (digits, digits[::-1]) for start in range(size))
    for found in _HEX.finditer(text):
        digits = _NOT_HEX.sub("", found[0])
        yield from (_decode_hex(digits[start:]) for start in range(2))
    yield from _iter_nested(text)


def _iter_nested(text: str) -> Iterator[str]:
    """Yield the texts that are encoded as a whole word: more than once, compressed, or in base85."""
    waiting, known, unpacked = [(text, 0), ("".join(text.split()), 0)], set[str](), 0
    while waiting:
        outer, rounds = waiting.pop()
        for words, decode in _DECODERS:
            for found in words.finditer(outer):
                try:
                    data = decode(found[0])
                    # By zlib or gzip, as its first byte says.
                    is_compressed = data[:1] in {b"\x78", b"\x1f"}
                    inner = zlib.decompressobj(47).decompress(data, _MAX_CHARS + 1) if is_compressed else data
                    plain = inner.decode("ascii")
                except (ValueError, zlib.error):
                    continue
                if plain not in known:
                    known.add(plain)
                    unpacked += len(plain) if is_compressed else 0
                    if unpacked > _MAX_CHARS:
                        raise TooLongToReadError
                    yield plain
                    if rounds + 1 < _ROUNDS:
                        waiting.append((plain, rounds + 1))


def _pad(text: str, size: int) -> str:
    return text + "=" * (-len(text) % size)


_DECODERS: Final[tuple[tuple[re.Pattern[str], Callable[[str], bytes]], ...]] = (
    (re.compile(r"[A-Za-z0-9+/_-]{7,}"), lambda word: b64decode(_pad(word.translate(_URL_SAFE), 4))),
    (re.compile(r"[A-Za-z0-9+_-]{7,}"), lambda word: b64decode(_pad(word.translate(_URL_SAFE), 4))),  # in a path
    (re.compile(r"[A-Z2-7]{8,}"), lambda word: b32decode(_pad(word, 8))),
    (re.compile(r"(?:[0-9a-fA-F]{2}){5,}"), bytes.fromhex),
    (re.compile(r"[!-u]{7,}"), a85decode),
    (re.compile(r"[!-~]{7,}"), b85decode),
)


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
