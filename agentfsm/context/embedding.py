"""Score the similarity of texts by their meaning, with an embedder."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import attrs

from agentfsm.ports.embedder import Embedder
from agentfsm.ports.policies import PaidScores, Scorer

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

    _vectors: OrderedDict[str, tuple[float, ...]] = attrs.field(factory=OrderedDict, init=False, repr=False)

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
        self._keep(known)
        scores = [math.fsum(map(float.__mul__, wanted, known[text])) for text in texts]
        return PaidScores(scores=tuple(scores), usage=found.usage)

    def _keep(self, vectors: dict[str, tuple[float, ...]]) -> None:
        for text, vector in vectors.items():
            self._vectors[text] = vector
            self._vectors.move_to_end(text)
        while len(self._vectors) > MAX_CACHED_TEXTS:
            self._vectors.popitem(last=False)


def _normalise(vector: Sequence[float]) -> tuple[float, ...]:
    """Return the vector with length 1; one of zeros stays as it is."""
    length = math.hypot(*vector) or 1.0
    return tuple([each / length for each in vector])
