"""The words of runs, by which their prompts and answers are searched; the same in all stores that search text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from agentfsm._lib.text_words import MAX_WORD_CHARS, PIECE, normalise, pair_up
from agentfsm.core.machine import State
from agentfsm.core.messages import TextPart

if TYPE_CHECKING:
    from agentfsm.core.run import Run

# Characters of a prompt and of an answer whose words are kept, and different words of a run: some pages.
MAX_TEXT_CHARS: Final = 20_000
MAX_WORDS: Final = 4_000
# Characters and words of a query that are read.
MAX_QUERY_CHARS: Final = 1_000
MAX_QUERY_WORDS: Final = 32
# Characters from which on a word of a query stands for all words that begin with it. The beginnings of shorter ones are
# those of too many words.
MIN_BEGINNING_CHARS: Final = 3


def read_words(run: Run) -> tuple[str, ...]:
    """Return the different words of a run: of its id, its prompt, and its answer if it has one."""
    texts = [run.id, *[part.text for part in run.header.prompt if isinstance(part, TextPart)]]
    if run.state is State.DONE:
        texts.append(run.answer)
    words = dict.fromkeys(word for text in texts for word in _iter_words(text[:MAX_TEXT_CHARS]))
    return tuple(words)[:MAX_WORDS]


def read_query(text: str) -> tuple[str, ...]:
    """Return the words of a query, all of which a run must have; one with a star stands for a beginning."""
    words: dict[str, None] = {}
    for found in PIECE.finditer(normalise(text[:MAX_QUERY_CHARS])):
        piece = found[0]
        if found[1] is not None:
            words |= dict.fromkeys(pair_up(piece)[:-1] or [f"{piece}*"])
        else:
            words[piece[:MAX_WORD_CHARS] + ("*" if len(piece) >= MIN_BEGINNING_CHARS else "")] = None
    return tuple(words)[:MAX_QUERY_WORDS]


def has_words(words: Iterable[str], query: Iterable[str]) -> bool:
    """Return whether a run with these words is one that a query searches. A query without words finds nothing."""
    wanted, found = list(query), set(words)
    return bool(wanted) and all(
        any(word.startswith(each[:-1]) for word in found) if each[-1] == "*" else each in found for each in wanted
    )


def _iter_words(text: str) -> Iterator[str]:
    for found in PIECE.finditer(normalise(text)):
        if found[1] is None:
            yield found[0][:MAX_WORD_CHARS]
        else:
            yield from pair_up(found[0])
