"""Rerank what a search has found: read the query and each item together, as the rankings of an index cannot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.usage import Usage
from agentfsm.memory.text_terms import count_term, read_query, write_terms
from agentfsm.ports.memory_items import MemoryItem
from agentfsm.ports.reranker import Reranker, Reranking

# Best items of a search that a reranker reads.
RERANKED: Final = 50
# Characters of a query and of an item that it reads; models cut longer ones.
MAX_RERANKED_CHARS: Final = 4_000

# An item with its similarity, and its ranks by the name of the ranking.
Found = tuple[MemoryItem, float, Mapping[str, float]]


@attrs.frozen(kw_only=True)
class TermReranker(Reranker):
    """Scores texts by the terms of the query that they have and, for half, by those that follow one another in both.

    It needs no model and no network.
    """

    name: str = "terms"
    """Name of the method."""

    async def rerank(self, query: str, texts: Sequence[str]) -> Reranking:
        """Return a score for each text."""
        terms = read_query(query)
        wanted = [*terms, *[f"{one} {other}" for one, other in pairwise(terms) if "*" not in one + other]]
        kept = [f" {write_terms(text, math.inf)} " for text in texts]
        found = [[each for each in wanted if count_term(text, each)] for text in kept]
        shares = {
            each: (0.5 if place >= len(terms) else 1.0)
            * math.log(1 + len(texts) / (1 + sum(each in row for row in found)))
            for place, each in enumerate(wanted)
        }
        return Reranking(scores=tuple([sum(shares[each] for each in row) for row in found]))


async def rerank(reranker: Reranker, query: str, found: Sequence[Found]) -> tuple[list[Found], Usage, str]:
    """Return what was found in the order of a reranker, with its scores in shares of the best; its usage; and a fault.

    If the reranker fails, the order stays, and the fault says why.

    Raises:
        MisuseError: if the reranker returns another number of scores, or some that are no numbers.
    """
    if not found:
        return [], Usage(), ""
    texts = [item.text[:MAX_RERANKED_CHARS] for item, _, _ in found]
    try:
        result = await reranker.rerank(query[:MAX_RERANKED_CHARS], texts)
    except MisuseError:
        raise
    except Exception as error:  # noqa: BLE001  a reranker may fail in any way, and the search has an order of its own
        fault = f"the reranker {reranker.name} failed: {type(error).__name__}: {error}"[:1_000]
        return [*found], getattr(error, "usage", None) or Usage(), fault
    if not isinstance(result, Reranking):
        raise MisuseError(
            f"the reranker {reranker.name!r} returned {type(result).__name__}: return "
            "agentfsm.ports.reranker.Reranking(scores=...), a score for each text"
        )
    scores = result.scores
    if len(scores) != len(texts) or not all(map(math.isfinite, scores)):
        raise MisuseError(
            f"the reranker {reranker.name!r} returned {len(scores)} scores for {len(texts)} texts, and each has to be "
            "a finite number: correct its `rerank`"
        )
    # Scores below 0, as those of some cross-encoders, keep their distances.
    least = min(0.0, *scores)
    most = max(scores) - least or 1.0
    order = sorted(range(len(found)), key=lambda place: -scores[place])
    return (
        [
            (found[place][0], (scores[place] - least) / most, {**found[place][2], "rerank": rank})
            for rank, place in enumerate(order, 1)
        ],
        result.usage,
        "",
    )
