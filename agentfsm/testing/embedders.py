"""An embedder for tests: it needs no model, and the same text always has the same vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256

import attrs

from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT
from agentfsm.ports.embedder import Embedder, Embeddings


@attrs.define(eq=False)
class HashEmbedder(Embedder):
    """Gives each word a direction by its hash, so that texts which share words are similar.

    It shows how vectors are kept and searched. It knows no synonyms, so it says nothing about the quality of a search.
    """

    name: str = attrs.field(default="hash", kw_only=True)
    """Name of the model. Default "hash"."""

    dims: int = attrs.field(default=64, kw_only=True, validator=COUNT)
    """Number of dimensions, 1 or more. Default 64."""

    texts: list[str] = attrs.field(factory=list, init=False)
    """All texts that were embedded, in their order."""

    fault: Exception | None = attrs.field(default=None, kw_only=True)
    """Error to raise from each call; None to work."""

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Return a vector of length 1 for each text."""
        if self.fault is not None:
            raise self.fault
        self.texts += texts
        words = sum(len(text.split()) for text in texts)
        return Embeddings(vectors=tuple(map(self._embed_text, texts)), usage=Usage(input_tokens=words))

    def _embed_text(self, text: str) -> tuple[float, ...]:
        vector = [0.0] * self.dims
        for word in text.casefold().split() or [""]:
            digest = sha256(word.encode("utf-8", "surrogatepass")).digest()
            vector[int.from_bytes(digest[:4]) % self.dims] += 1.0 if digest[4] % 2 else -1.0
        length = math.sqrt(sum(each * each for each in vector))
        return tuple(each / length for each in vector) if length else (1.0, *vector[1:])
