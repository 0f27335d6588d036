"""Cut texts into words for full-text search, the same in every store and index.

A text is normalised and cut here and not by the database. Word splitters take a run of Chinese characters for one word,
and three-character sequences miss most Chinese words, which have two characters. So a run without spaces is cut into
its overlapping pairs.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

# Characters of a word; longer ones, such as keys and images in base64, are cut.
MAX_WORD_CHARS: Final = 64

# Thai to Khmer, Chinese characters, Japanese and Korean.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
    "\u3005-\u3007\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff\uac00-\ud7a3"
)
# Vowel signs and other marks that are a part of a word, of scripts from Syriac to Indic, Tibetan and Javanese. Python's
# `\w` has letters only.
_MARKS: Final = (
    "\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u0711\u0730-\u074a\u07a6-\u07b0\u07eb-\u07f3\u0816-\u082d"
    "\u0859-\u085b\u08d3-\u0903\u093a-\u094f\u0951-\u0957\u0962\u0963\u0981-\u0983\u09bc-\u09cd\u09d7\u09e2\u09e3"
    "\u0a01-\u0a03\u0a3c-\u0a51\u0a70\u0a71\u0a75\u0a81-\u0a83\u0abc-\u0acd\u0ae2\u0ae3\u0b01-\u0b03\u0b3c-\u0b57"
    "\u0b62\u0b63\u0b82\u0bbe-\u0bcd\u0bd7\u0c00-\u0c04\u0c3c-\u0c56\u0c62\u0c63\u0c81-\u0c83\u0cbc-\u0cd6\u0ce2\u0ce3"
    "\u0d00-\u0d03\u0d3b-\u0d4d\u0d57\u0d62\u0d63\u0d81-\u0d83\u0dca-\u0df3\u0f18\u0f19\u0f35\u0f37\u0f39\u0f71-\u0f84"
    "\u0f86\u0f87\u0f8d-\u0fbc\u135d-\u135f\u1712-\u1714\u18a9\u1920-\u193b\u1a17-\u1a1b\u1b00-\u1b04\u1b34-\u1b44"
    "\u1b80-\u1b82\u1ba1-\u1bad\u1be6-\u1bf3\u1c24-\u1c37\ua880\ua881\ua8b4-\ua8c5\ua947-\ua953\ua980-\ua983"
    "\ua9b3-\ua9c0\uabe3-\uabea\uabec\uabed"
)
PIECE: Final = re.compile(rf"([{_UNSPACED}]+)|(?:[^\W_{_UNSPACED}]|[{_MARKS}])+")
# A separator of thousands, such as in 10,000, 10.000, 10 000, 10'000, 1_000 and 1,00,000.
_THOUSANDS: Final = re.compile(
    "(?<=[0-9])(?:,(?=[0-9]{2},[0-9]{2,3}(?:,|\\b))|[,.'_\u2019\u00a0\u202f\u2009\u066c](?=[0-9]{3}(?![0-9])))"
)
# Letters that Unicode does not decompose, and that are written with and without their stroke, or in two ways on the
# keyboards of two languages.
_LETTERS: Final = str.maketrans(
    {
        "\u00f8": "o",
        "\u0142": "l",
        "\u0111": "d",
        "\u00f0": "d",
        "\u00fe": "th",
        "\u00e6": "ae",
        "\u0153": "oe",
        "\u0131": "i",
        "\u0640": "",  # Arabic elongation
        "\u0649": "\u064a",  # final forms of yeh
        "\u06cc": "\u064a",
        "\u06a9": "\u0643",  # Persian kaf
        "\u0629": "\u0647",  # teh marbuta
        "\u03c2": "\u03c3",  # final sigma
    }
)
# Combining classes of marks that are a part of their letter: the signs of voiced kana, and the virama of Indic scripts.
_KEPT_CLASSES: Final = frozenset({0, 8, 9})


def normalise(text: str) -> str:
    """Return a text in which the ways to write a word are one.

    Forms of characters, case, accents, optional vowel signs, digits of all scripts and separators in numbers go.
    """
    if text.isascii():
        return _THOUSANDS.sub("", text.lower())
    text = unicodedata.normalize("NFKD", _THOUSANDS.sub("", _as_digits(text))).casefold()
    kept = (
        each
        for each in unicodedata.normalize("NFKD", text)
        if unicodedata.combining(each) in _KEPT_CLASSES
        and unicodedata.category(each) not in {"Cf", "Cs"}
        and not "\ufe00" <= each <= "\ufe0f"
    )
    return _THOUSANDS.sub("", unicodedata.normalize("NFC", "".join(kept)).translate(_LETTERS))


def _as_digits(text: str) -> str:
    return re.sub(r"\d", lambda found: str(unicodedata.digit(found[0], found[0])), text)


def pair_up(piece: str) -> list[str]:
    """Return the overlapping pairs of a run, and its last character."""
    return [piece[place : place + 2] for place in range(len(piece))]
