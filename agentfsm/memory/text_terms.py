"""Terms of a text for full-text search, the same in every index.

A text is normalised, cut into words, and English words are reduced to their stems, here and not by the database: so all
indexes find the same. Terms are kept as one text, separated by spaces, which the database only splits at the spaces.

Word splitters take a run of Chinese characters for one word, and three-character sequences miss most Chinese words,
which have two characters. So the terms of a run without spaces are its overlapping pairs, and a short run of a query is
searched as a phrase of its pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib import import_module
from typing import Final

from agentfsm._lib.text_words import MAX_WORD_CHARS, PIECE, normalise, pair_up

# Version of the terms. An index that was written with another one is built again at its first use.
TERMS_VERSION: Final = 1
# Different terms of a query that are searched: more of them only match everything.
MAX_QUERY_TERMS: Final = 128
# Characters of a query that are read.
MAX_QUERY_CHARS: Final = 20_000
# Longest run of characters that is searched as a phrase. A longer one is a sentence, whose pairs are searched.
MAX_PHRASE_CHARS: Final = 4
# Stems that are kept in memory.
STEMS: Final = 65_536

_ASCII_WORD: Final = re.compile(r"[a-z0-9]+")
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


def read_query(query: str) -> tuple[str, ...]:
    """Return the terms of a query, without repetitions.

    A term is a word, or a phrase: terms of a text that follow one another, separated by spaces. One with a star at its
    end stands for all terms that begin with it.
    """
    words: dict[str, None] = {}
    phrases: dict[str, None] = {}
    for found in PIECE.finditer(normalise(query[:MAX_QUERY_CHARS])):
        if len(words) + len(phrases) >= MAX_QUERY_TERMS:
            break
        piece = found[0]
        if found[1] is None:
            words[piece[:MAX_WORD_CHARS]] = None
        elif len(piece) == 1:
            phrases[f"{piece}*"] = None
        elif len(piece) <= MAX_PHRASE_CHARS:
            phrases[" ".join(pair_up(piece)[:-1])] = None
        else:
            phrases |= dict.fromkeys(pair_up(piece)[:-1])
    said = [word for word in words if word not in _STOP_WORDS]
    kept = said or ([] if phrases else words)  # "Who is it?" is searched all the same
    return tuple(dict.fromkeys([*map(_stem, kept), *phrases]))[:MAX_QUERY_TERMS]


def write_terms(text: str, valid_from: float) -> str:
    """Return the terms of a text and of the day from which on it is true, separated by spaces."""
    return " ".join(_iter_terms(f"{text}\n{write_date(valid_from)}"))


def count_term(terms: str, term: str) -> int:
    """Return how often a term of a query is among the terms of a text, which begin and end with a space."""
    return terms.count(f" {term[:-1]}") if term[-1] == "*" else terms.count(f" {term} ")


def write_date(seconds: float) -> str:
    """Return the day of a time in words and digits, so that a question for it finds what happened then; in UTC."""
    try:
        day = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{day:%Y %B} {day.day} {day:%A %Y-%m-%d}"


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text, or the terms of one with other letters than those of ASCII, to compare texts."""
    return frozenset(_ASCII_WORD.findall(text.lower()) if text.isascii() else _iter_terms(text))


def _iter_terms(text: str) -> Iterator[str]:
    for found in PIECE.finditer(normalise(text)):
        if found[1] is None:
            yield _stem(found[0][:MAX_WORD_CHARS])
        else:
            yield from pair_up(found[0])


@lru_cache(STEMS)
def _stem(word: str) -> str:
    return _load_stemmer()(word) if word.isascii() and word.isalpha() else word


@cache
def _load_stemmer() -> Callable[[str], str]:
    snowballstemmer = import_module("snowballstemmer")  # 30 languages, which a program without a memory does not need

    stem: Callable[[str], str] = snowballstemmer.stemmer("english").stemWord
    return stem
