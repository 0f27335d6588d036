"""Find the values of a call in the words of the user."""

from __future__ import annotations

import math
import re
import unicodedata
from decimal import Decimal
from functools import cached_property
from typing import Final

import attrs

# A whole word, between spaces and punctuation of a sentence: no part of a longer one, a number, an address or a path.
_BEFORE: Final = r"""(?<!\S)["'(\[{<«“`$€£¥\u2018]*"""
_AFTER: Final = r"""(?:['\u2019]s)?["')\]}>»”`.,;:!?%$€£¥\u2019]*(?!\S)"""
_NUMBER: Final = re.compile(rf"{_BEFORE}(-?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?){_AFTER}")
_MONTH: Final = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY: Final = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE: Final = re.compile(
    rf"{_BEFORE}(?:\d{{4}}-\d\d-\d\d|(?:{_MONTH} {_DAY}|{_DAY} (?:of )?{_MONTH})(?:,? \d{{4}})?){_AFTER}"
)


def _fold(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


@attrs.define(eq=False)
class SaidWords:
    """The words of the user in a run, in which values of calls are looked for.

    A value counts as said if it stands there as a whole word, in any case, a number unless it belongs to a date. A
    number may have another form of the same number: "$1,200.50" is 1200.5.
    """

    text: str = attrs.field(converter=_fold)
    """The words, in one case."""

    def has(self, value: object) -> bool:
        """Return whether the user has said a value. One without a letter or digit, such as "*", is never said."""
        text = _fold(f"{value:.15g}" if isinstance(value, float) else str(value))
        if not any(map(str.isalnum, text)):
            return False
        if re.search(f"{_BEFORE}{re.escape(text)}{_AFTER}", self.undated if text.isdecimal() else self.text):
            return True
        return isinstance(value, int | float) and math.isfinite(value) and Decimal(text) in self.numbers

    @cached_property
    def undated(self) -> str:
        """The words without those of dates: "June 13" says no number 13."""
        return _DATE.sub(" ", self.text)

    @cached_property
    def numbers(self) -> frozenset[Decimal]:
        """The numbers."""
        return frozenset([Decimal(found.replace(",", "")) for found in _NUMBER.findall(self.undated)])
