"""Terms of a text for full-text search: words of scripts with spaces, and character pairs of those without.

SQLite's and PostgreSQL's word splitters take a run of Chinese characters for one word, and three-character sequences
miss most Chinese words, which have two characters. So each run is also indexed as overlapping pairs, and a short run of
a query is searched as a phrase of its pairs.
"""

from __future__ import annotations

import re
import unicodedata
from datetime import UTC, datetime
from typing import Final

import attrs

from agentfsm.core.value import Value

# Different terms of a query that are searched: more of them only match everything.
MAX_QUERY_TERMS: Final = 128
# Characters of a query that are read.
MAX_QUERY_CHARS: Final = 20_000
# Longest run of characters that is searched as a phrase. A longer one is a sentence, whose pairs are searched.
MAX_PHRASE_CHARS: Final = 4

# Thai to Khmer, Chinese characters, Japanese and Korean.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
    "\u3005-\u3007\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff\uac00-\ud7a3"
)
_PIECE: Final = re.compile(rf"([{_UNSPACED}]+)|[^\W_{_UNSPACED}]+")

# Words of questions and sentences that say nothing about their subject. They are left out of queries only.
_STOP_WORDS: Final = frozenset(
    re.findall(
        r"\w+",
        "a about am an and any are as at be been but by can could did do does doing for from had has have having he "
        "her hers him his how i if in into is it its just me my of on or our ours s she should so t than that the "
        "their them then there these they this those to too us was we were what when where which who whom whose why "
        "will with would you your yours",
    )
)


@attrs.frozen(kw_only=True)
class QueryTerms(Value):
    """The terms of a query, without repetitions."""

    words: tuple[str, ...]
    """Words of scripts with spaces, in lower case."""

    phrases: tuple[tuple[str, ...], ...]
    """Sequences of pairs to search as a phrase; a single character stands for the pairs that begin with it."""

    def __bool__(self) -> bool:
        return bool(self.words or self.phrases)


def read_query(query: str) -> QueryTerms:
    """Return the terms of a query."""
    words: dict[str, None] = {}
    phrases: dict[tuple[str, ...], None] = {}
    for found in _PIECE.finditer(_normalise(query[:MAX_QUERY_CHARS])):
        if len(words) + len(phrases) >= MAX_QUERY_TERMS:
            break
        piece = found[0]
        if found[1] is None:
            words[piece] = None
        elif len(piece) <= MAX_PHRASE_CHARS:
            phrases[tuple(_pair(piece)[: max(1, len(piece) - 1)])] = None
        else:
            phrases |= dict.fromkeys((pair,) for pair in _pair(piece)[:-1])
    said = tuple(word for word in words if word not in _STOP_WORDS)
    kept = said or (() if phrases else tuple(words))  # "Who is it?" is searched all the same
    return QueryTerms(words=kept, phrases=tuple(phrases)[:MAX_QUERY_TERMS])


def write_pairs(text: str) -> str:
    """Return the character pairs of all runs without spaces, and the last character of each, separated by spaces."""
    pieces = (found[1] for found in _PIECE.finditer(_normalise(text)) if found[1] is not None)
    return " ".join(pair for piece in pieces for pair in _pair(piece))


def split_words(text: str) -> list[str]:
    """Return the words of scripts with spaces, in lower case and in their order."""
    return [found[0] for found in _PIECE.finditer(_normalise(text)) if found[1] is None]


def write_date(seconds: float) -> str:
    """Return the day of a time in words and digits, so that a question for it finds what happened then; in UTC."""
    try:
        day = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{day:%Y %B} {day.day} {day:%A %Y-%m-%d}"


def word_set(text: str) -> frozenset[str]:
    """Return the words and pairs of a text, to compare it with other texts."""
    return frozenset(
        term
        for found in _PIECE.finditer(_normalise(text))
        for term in (_pair(found[0])[:-1] or [found[0]] if found[1] else [found[0]])
    )


def _normalise(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _pair(piece: str) -> list[str]:
    return [piece[place : place + 2] for place in range(len(piece))]
