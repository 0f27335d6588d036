"""Protocol of rerankers, which read a query and a text together, and say how well the text answers the query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from agentfsm.core.usage import Usage
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class Reranking(Value):
    """The scores of some texts."""

    scores: tuple[float, ...]
    """A score for each text, in their order, higher is better; only their order and their ratios count."""

    usage: Usage = Usage()
    """Usage of the request, if the service reports it."""


class Reranker(Protocol):
    """Scores texts by how well they answer a query."""

    name: str
    """Name of the model or the method."""

    async def rerank(self, query: str, texts: Sequence[str]) -> Reranking:
        """Return a score for each text.

        Raises:
            Exception: of any type, if it cannot; the search keeps its own order then.
        """
        ...
