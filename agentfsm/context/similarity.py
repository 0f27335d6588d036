"""Score the similarity of texts: by their words, with BM25, or by their meaning, with an embedder.

A word counts more if it is rare among the texts, less with each repetition, and more in a short text than in a long one
(Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009).

Synonyms do not match, and a task in Chinese finds only descriptions in Chinese. If the languages differ, use a scorer
with embeddings.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import attrs

from agentfsm._lib.newest import Newest
from agentfsm.ports.embedder import Embedder
from agentfsm.ports.policies import PaidScores, Scorer

# BM25 parameter k1, the saturation of repeated words; the usual value. From 0.8 to 3 recall moves by under 1 %.
SATURATION: Final = 1.2
# BM25 parameter b, the penalty of long texts, 0 to 1; the usual value. From 0.5 to 1 recall moves by under 1 %.
LENGTH_WEIGHT: Final = 0.75
# Weight of the name, as a word count. 1 and 3 differ by under 1 % in recall; 6 overrates a name that fits by chance.
NAME_WEIGHT: Final = 2
# Tool sets whose index a process caches: each agent's set is scored again with every input.
INDEX_CACHE_SIZE: Final = 16
# Texts whose words a process caches: `find_tools` searches nearly the same tools as the selection before it, and to
# read the words of 1,222 tools takes 0.3 s.
TEXT_CACHE_SIZE: Final = 2_048

# English words that stand in any task. Leaving them out raises recall among the first five by 2 %: descriptions are so
# short that even a frequent word is rare in them.
_STOP_WORDS: Final = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be by can could do does for from how i if in is it me my of on or our please that the this "
        "to was we were what which who will with would you your",
    ),
)

# Scripts without spaces between words: each pair of adjacent characters counts as a word.
_UNSPACED_SCRIPTS: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
    "\uac00-\ud7a3"  # Korean has spaces, but glues its particles to the words
)
# `re` compiles this on first use: the ranges take 3 ms to compile, and most agents have few tools.
_PIECE: Final = rf"([{_UNSPACED_SCRIPTS}]+)|[^\W_{_UNSPACED_SCRIPTS}]+"
# Where camelCase breaks: getUser, HTTPServer.
_CAMEL_CASE_BREAK: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

# Letters that remain after an ending is cut: "sing" and "red" are not endings.
_MIN_STEM_CHARS: Final = 3

# Word -> the indexes of the texts that contain it, each with the word's share of the score.
_Index: TypeAlias = Mapping[str, Sequence[tuple[int, float]]]


@attrs.frozen
class LexicalScorer(Scorer):
    """Score texts by the words that they share with a query.

    Measured on a public function-calling set (`make bench ROW=selection`): of the tools that a task needs, 97 % are
    among the first 20 of 500. A plain count of shared words finds 87 %.
    """

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return a score of 0 or more for each text; 0 if it shares no word with the query. Never suspends."""
        scores = [0.0] * len(texts)
        index = _build_index(tuple(texts))
        for word in dict.fromkeys(_tokenise(query)):  # not a set: sums of floats depend on their order
            for place, weight in index.get(word, ()):
                scores[place] += weight
        return scores


@lru_cache(maxsize=INDEX_CACHE_SIZE)
def _build_index(texts: tuple[str, ...]) -> _Index:
    counts = [_count_words(text) for text in texts]
    lengths = [count.total() for count in counts]
    mean = sum(lengths) / max(len(texts), 1) or 1.0
    holding = Counter(word for count in counts for word in count)
    index: dict[str, list[tuple[int, float]]] = {word: [] for word in holding}
    for place, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        damping = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length / mean)
        for word, times in count.items():
            rarity = math.log1p((len(texts) - holding[word] + 0.5) / (holding[word] + 0.5))
            index[word].append((place, rarity * times * (SATURATION + 1) / (times + damping)))
    return index


@lru_cache(maxsize=TEXT_CACHE_SIZE)
def _count_words(text: str) -> Counter[str]:
    """Count the words of a text, those of its name with their weight. The result is shared: it must not be changed."""
    count = Counter(_tokenise(text))
    for word in _tokenise(text.partition("\n")[0]):
        count[word] += NAME_WEIGHT - 1
    return count


def _tokenise(text: str) -> Iterator[str]:
    """Yield the terms to compare: lower-case words without endings, and character pairs of unspaced scripts."""
    spaced = _CAMEL_CASE_BREAK.sub(" ", unicodedata.normalize("NFKC", text)).lower()
    for piece in re.finditer(_PIECE, spaced):
        word = piece[0]
        if piece[1]:
            yield from (word[i : i + 2] for i in range(max(len(word) - 1, 1)))
        elif word not in _STOP_WORDS:
            yield _stem(word)


def _stem(word: str) -> str:
    """Remove English endings: plural, -ing, -ed and a mute e, so that "converting" matches "converts".

    Recall among the first 10 rises by 1 %. Overstemming does little harm, since query and text are stemmed alike.
    """
    if len(word) > _MIN_STEM_CHARS and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = f"{word[:-3]}y" if word.endswith("ies") else word[:-1]
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) >= _MIN_STEM_CHARS + len(ending):
            word = word.removesuffix(ending)
            word = word[:-1] if word[-1] == word[-2] and word[-1] not in "lsz" else word
            break
    return word[:-1] if len(word) > _MIN_STEM_CHARS and word.endswith("e") else word


# Texts whose vectors are cached: the tools of several agents. The least recently used are dropped.
MAX_CACHED_TEXTS: Final = 4_096


@attrs.define(eq=False)
class EmbeddingScorer(Scorer):
    """Score texts by the cosine between their vectors and that of the query (Source: document E, 5.4).

    It finds tools that say the same in other words, or in another language that the model knows. Each text is embedded
    once, each query anew: a request for each selection.
    """

    embedder: Embedder
    """The embedder, such as `agentfsm.models.OpenAIEmbedder("text-embedding-3-small")`."""

    _vectors: Newest[str, tuple[float, ...]] = attrs.field(
        factory=lambda: Newest(MAX_CACHED_TEXTS), init=False, repr=False
    )

    async def scores(self, query: str, texts: Sequence[str]) -> PaidScores:
        """Return a score from -1 to 1 for each text, and the usage of the embedder.

        Raises:
            Exception: as from the embedder.
        """
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        found = await self.embedder.embed([query, *missing])
        wanted, *vectors = map(_normalise, found.vectors)
        known = {text: self._vectors[text] for text in texts if text in self._vectors}
        known |= dict(zip(missing, vectors, strict=True))
        self._vectors.update(known)
        scores = [math.fsum(map(float.__mul__, wanted, known[text])) for text in texts]
        return PaidScores(scores=tuple(scores), usage=found.usage)


def _normalise(vector: Sequence[float]) -> tuple[float, ...]:
    """Return the vector with length 1; one of zeros stays as it is."""
    length = math.hypot(*vector) or 1.0
    return tuple([each / length for each in vector])
