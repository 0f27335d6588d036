"""Protocol of embedders, which turn texts into vectors: texts of similar meaning have vectors of similar direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from agentfsm.core.usage import Usage
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class Embeddings(Value):
    """The vectors of some texts."""

    vectors: tuple[tuple[float, ...], ...]
    """A vector for each text, in their order."""

    usage: Usage = Usage()
    """Usage of the requests, with its cost if the price is known."""


class Embedder(Protocol):
    """Turns texts into vectors, by a model."""

    name: str
    """Name of the model. Vectors of different models cannot be compared, so an index keeps those of one."""

    dims: int
    """Number of dimensions of each vector, 1 or more."""

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Return a vector for each text.

        Args:
            texts: Any number of texts; the embedder sends them in batches of its own.

        Raises:
            Exception: of any type, if it cannot embed them.
        """
        ...
