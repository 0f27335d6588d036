"""Find values of a call in the words of the user, also where these have another form of the same value."""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Final

import attrs

# A whole word, between spaces and punctuation of a sentence: no part of a longer one, a number, an address or a path.
_BEFORE: Final = r"""(?<!\S)["'(\[{<«“`$€£¥\u2018]*"""
_AFTER: Final = r"""(?:['\u2019]s)?["')\]}>»”`.,;:!?%$€£¥\u2019]*(?!\S)"""
_NUMBER: Final = re.compile(rf"{_BEFORE}(-?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?){_AFTER}")
_MONTHS: Final = (
    "january february march april may june july august september october november december".split()  # noqa: SIM905
)
_MONTH: Final = "|".join([f"{name}|{name[:3]}" for name in _MONTHS])
_ORDINAL: Final = r"(\d{1,2})(?:st|nd|rd|th)?"
# Groups: an ISO date, or month and day, or day and month, and perhaps a year.
_DAY: Final = rf"(?:({_MONTH}) {_ORDINAL}|{_ORDINAL} (?:of )?({_MONTH}))(?:,? (\d{{4}}))?"
_DATE: Final = re.compile(rf"{_BEFORE}(?:(\d{{4}}-\d\d-\d\d)|{_DAY}){_AFTER}")
_TIME: Final = re.compile(rf"{_BEFORE}(\d{{1,2}}):(\d\d){_AFTER}")
_DURATION: Final = re.compile(rf"{_BEFORE}(\d{{1,3}}|one|an|two|three)[ -](hour|minute)s?{_AFTER}")
_COUNTS: Final = {"an": 1, "one": 1, "two": 2, "three": 3}
_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d(?:[ t]\d\d:\d\d(?::\d\d)?)?")


def _fold(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


@attrs.define(eq=False)
class SaidWords:
    """The words of the user in a run, in which values of calls are looked for.

    A value counts as said if it stands there as a whole word, in any case, a number unless it belongs to a date. A
    number may have another form of the same number: "$1,200.50" is 1200.5. So may a date: "May 3rd, 2026" is
    "2026-05-03", and "May 3rd" is it if another date has the year. A date with a time is one of the dates at one of the
    times, or that plus a duration, so that "on 2026-05-03 at 10:00 for one hour" says the end as well.
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
        if isinstance(value, int | float):
            return math.isfinite(value) and Decimal(text) in self.numbers
        if not _MOMENT.fullmatch(text):
            return False
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:  # no such day
            return False
        return moment.date() in self.dates if len(text) == len("2026-05-03") else moment in self.moments

    @cached_property
    def undated(self) -> str:
        """The words without those of dates: "June 13" says no number 13."""
        return _DATE.sub(" ", self.text)

    @cached_property
    def numbers(self) -> frozenset[Decimal]:
        """The numbers."""
        return frozenset([Decimal(found.replace(",", "")) for found in _NUMBER.findall(self.undated)])

    @cached_property
    def dates(self) -> frozenset[date]:
        """The days. One without a year is in each year that another has."""
        named: list[tuple[str, str, str]] = []
        for iso, month, day, other_day, other_month, year in _DATE.findall(self.text):
            name = month or other_month
            number = _MONTHS.index(next(each for each in _MONTHS if each.startswith(name))) + 1 if name else 0
            named.append(tuple(iso.split("-")) if iso else (year, str(number), day or other_day))
        years = {year for year, _month, _day in named if year}
        found: set[date] = set()
        for year, month, day in named:
            for each in [year] if year else years:
                try:
                    found.add(date(int(each), int(month), int(day)))
                except ValueError:  # no such day
                    continue
        return frozenset(found)

    @cached_property
    def moments(self) -> frozenset[datetime]:
        """The days at the times, and those after the durations."""
        times = [timedelta(hours=int(hour), minutes=int(minute)) for hour, minute in _TIME.findall(self.text)]
        starts = {datetime.combine(each, datetime.min.time()) + time for each in self.dates for time in times}
        spans = [
            timedelta(**{f"{unit}s": _COUNTS.get(count) or int(count)}) for count, unit in _DURATION.findall(self.text)
        ]
        return frozenset([*starts, *[start + span for start in starts for span in spans]])
