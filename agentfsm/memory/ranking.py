"""Rank the items that a search found: join rankings, weigh similarity with age and importance, leave out repetitions.

All functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Final

import attrs

from agentfsm.core.validation import NOT_NEGATIVE, SHARE, require_between
from agentfsm.core.value import Value
from agentfsm.memory.text_terms import word_set
from agentfsm.ports.memory_items import ItemMatch, MemoryItem

# Constant of reciprocal rank fusion (Source: Cormack, Clarke and Buettcher, SIGIR 2009).
FUSION_CONSTANT: Final = 60
# Places before and after an item whose matches count for it: a question and its answer often stand in different items.
WINDOW: Final = 2
DAY_S: Final = 86_400.0


@attrs.frozen(kw_only=True)
class Weights(Value):
    """Weights of the score of an item. Source: document G, 3 and 8.

    The score is `similarity * s + recency * decay ** days + importance * i`, where `s` and `i` are from 0 to 1.
    """

    similarity: float = attrs.field(default=0.5, validator=NOT_NEGATIVE)
    """Weight of the similarity to the query, 0 or more."""

    recency: float = attrs.field(default=0.3, validator=NOT_NEGATIVE)
    """Weight of the age, 0 or more."""

    importance: float = attrs.field(default=0.2, validator=NOT_NEGATIVE)
    """Weight of the importance, 0 or more."""

    decay: float = attrs.field(default=0.95, validator=SHARE)
    """Factor by which recency shrinks with each day since the item was recorded, above 0 and up to 1."""

    repetition: float = attrs.field(default=0.1, validator=require_between(0, 1))
    """Penalty of an item that repeats a better one word for word, in shares of its similarity, from 0 to 1."""


@attrs.frozen(kw_only=True)
class Recollection(Value):
    """An item that was found, with its score and the reasons for it."""

    item: MemoryItem
    """The item."""

    score: float
    """Score by which the items are ordered, higher is better."""

    why: Mapping[str, float]
    """Parts of the score: "similarity", "recency" and "importance", each from 0 to 1; and the rank in each ranking that
    found the item, from 1, such as "text", "window" or "vector".
    """


def fuse(rankings: Mapping[str, Sequence[ItemMatch]], count: int) -> list[tuple[str, float, dict[str, float]]]:
    """Join rankings by reciprocal rank.

    Args:
        rankings: For each name, the items of a ranking with their scores, best first.
        count: Number of items to return.

    Returns:
        For each item its id, its similarity and its ranks, best first. The similarity is the mean, over the rankings,
        of the item's score in shares of the best one; it never rises along the order.
    """
    fused: dict[str, float] = defaultdict(float)
    shares: dict[str, float] = defaultdict(float)
    for ranking in rankings.values():
        best = ranking[0].score if ranking else 0.0
        weight = 1 / best / len(rankings) if best > 0 else 0.0
        for place, (item_id, _session, _place, score) in enumerate(ranking, FUSION_CONSTANT + 1):
            fused[item_id] += 1 / place
            shares[item_id] += score * weight
    first = sorted(fused, key=fused.__getitem__, reverse=True)[:count]
    ranks: dict[str, dict[str, float]] = {item_id: {} for item_id in first}
    for name, ranking in rankings.items():
        for rank, match in enumerate(ranking, 1):
            if match.item_id in ranks:
                ranks[match.item_id][name] = rank
    similarities = accumulate((min(1.0, shares[item_id]) for item_id in first), min)
    return [(item_id, similarity, ranks[item_id]) for item_id, similarity in zip(first, similarities, strict=True)]


def rank_windows(matches: Sequence[ItemMatch], neighbours: Iterable[ItemMatch], distance: int) -> list[ItemMatch]:
    """Rank items by the matches near them: an item counts the scores of all matches within `distance` places.

    Args:
        matches: Items that match by themselves.
        neighbours: Items near them, which may include them.
        distance: Number of places, 0 or more.
    """
    scores: dict[tuple[str, int], float] = defaultdict(float)
    for (_group, place), score in {(_name_group(match), match.place): match.score for match in matches}.items():
        for near in range(place - distance, place + distance + 1):
            scores[_group, near] += score
    items = {match.item_id: match for match in (*matches, *neighbours)}.values()
    found = [
        ItemMatch(item_id, session, place, scores[session or item_id, place]) for item_id, session, place, _ in items
    ]
    return sorted(found, key=_score_of, reverse=True)


def rank_sessions(matches: Sequence[ItemMatch], ranked: Sequence[ItemMatch]) -> list[ItemMatch]:
    """Rank items by the matches of their whole session, and within a session as they are ranked already.

    Args:
        matches: Items that match by themselves.
        ranked: The items to rank, in the order that holds within a session.
    """
    totals: dict[str, float] = defaultdict(float)
    for match in matches:
        totals[_name_group(match)] += match.score**2  # one good match says more than many poor ones
    found = [ItemMatch(item_id, session, place, totals[session or item_id]) for item_id, session, place, _ in ranked]
    return sorted(found, key=_score_of, reverse=True)


# The score of a match.
_score_of = attrgetter("score")


def _name_group(match: ItemMatch) -> str:
    """Return the name of the match's session; an item without one is a session of its own."""
    return match.session or match.item_id


def score_items(
    found: Iterable[tuple[MemoryItem, float, Mapping[str, float]]], now: float, weights: Weights
) -> list[Recollection]:
    """Weigh similarity, age and importance. Return the items best first."""
    scored: list[Recollection] = []
    for item, similarity, ranks in found:
        age = max(0.0, now - item.recorded_at) / DAY_S
        recency = weights.decay**age
        score = weights.similarity * similarity + weights.recency * recency + weights.importance * item.importance
        why = {**ranks, "similarity": similarity, "recency": recency, "importance": item.importance}
        scored.append(Recollection(item=item, score=score, why=why))
    return sorted(scored, key=lambda entry: -entry.score)


def diversify(scored: Sequence[Recollection], count: int, weights: Weights) -> list[Recollection]:
    """Take the best items one by one, each with a penalty for the words that it repeats of those taken before.

    This is maximal marginal relevance with word overlap (Source: Carbonell and Goldstein, SIGIR 1998).
    """
    left = list(scored)
    words = {entry.item.id: word_set(entry.item.text) for entry in left}
    taken: list[Recollection] = []
    overlaps = dict.fromkeys(words, 0.0)
    while left and len(taken) < count:
        penalty = weights.similarity * weights.repetition
        best = max(left, key=lambda entry: entry.score - penalty * overlaps[entry.item.id])
        left.remove(best)
        taken.append(best)
        for entry in left:
            one, other = words[entry.item.id], words[best.item.id]
            overlap = len(one & other) / (len(one | other) or 1)
            overlaps[entry.item.id] = max(overlaps[entry.item.id], overlap)
    return taken
