"""Rank the items that a search found: join rankings, weigh similarity with age and importance, leave out repetitions.

All functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

import attrs

from agentfsm.core.validation import NOT_NEGATIVE, SHARE, require_between
from agentfsm.core.value import Value
from agentfsm.memory.text_terms import count_term, word_set
from agentfsm.ports.memory_items import ItemKind, ItemMatch, MemoryItem, TextSearch

# Weights of the rankings, tuned on the dialogues 1 to 5 of LoCoMo: docs/memory.md, "How well it finds".
RANKING_WEIGHTS: Final[Mapping[str, float]] = {
    "text": 1.0,
    "window": 1.0,
    "session": 0.5,
    "vector": 0.3,
    "vector window": 0.6,
}
# Share of its score that an item gives to those at each distance, for "vector window".
NEAR_SHARES: Final = (1.0, 0.7, 0.4)
# Constants of BM25, as most engines have them (Source: Robertson and Zaragoza, 2009).
SATURATION: Final = 1.2
LENGTH_SHARE: Final = 0.75
# Places before and after an item whose matches count for it: a question and its answer often stand in different items.
WINDOW: Final = 2
DAY_S: Final = 86_400.0


@attrs.frozen(kw_only=True)
class Weights(Value):
    """Weights of the score of an item. Source: document G, 3 and 8.

    The score is `similarity * s + recency * decay ** days + importance * i`, where `s` and `i` are from 0 to 1. Only
    episodes age: of everything else the days count as 0.
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
    """Join rankings by their scores, in shares of the best of each.

    Ranks alone would make a match that is far better than all others equal to one that is hardly better.

    Args:
        rankings: For each name, the items of a ranking with their scores, best first.
        count: Number of items to return.

    Returns:
        For each item its similarity, from 0 to 1, and its ranks, best first.
    """
    shares: dict[str, float] = defaultdict(float)
    for name, ranking in rankings.items():
        best = ranking[0].score if ranking else 0.0
        if best > 0:
            for match in ranking:
                shares[match.item_id] += RANKING_WEIGHTS[name] * match.score / best
    first = sorted(shares, key=shares.__getitem__, reverse=True)[:count]
    ranks: dict[str, dict[str, float]] = {item_id: {} for item_id in first}
    for name, ranking in rankings.items():
        for rank, match in enumerate(ranking, 1):
            if match.item_id in ranks:
                ranks[match.item_id][name] = rank
    total = sum(RANKING_WEIGHTS[name] for name in rankings)
    return [(item_id, shares[item_id] / total, ranks[item_id]) for item_id in first]


def rank_text(matches: Sequence[ItemMatch], weights: Mapping[str, float]) -> list[ItemMatch]:
    """Rank items by BM25 over their terms.

    Args:
        matches: The items, with their terms.
        weights: Weights of the terms of the query.
    """
    counted = [_count_terms(match, weights) for match in matches]
    mean = sum(size for _, size in counted) / (len(counted) or 1)
    return _rank(matches, [_weigh(counts, size / mean) for counts, size in counted])


def rank_windows(found: TextSearch, neighbours: Iterable[ItemMatch], distance: int) -> dict[str, list[ItemMatch]]:
    """Rank items by BM25 over all terms of their surroundings: a window, or the session, counts as one text.

    So a window with two words of the query is better than one with the same word twice, which a sum of scores is not.

    Args:
        found: Items that match by themselves.
        neighbours: Items near them, which may include them.
        distance: Number of places before and after an item that are its window, 0 or more.

    Returns:
        The rankings "window" and "session". In a session, items are ranked as by their windows.
    """
    items = {match.item_id: match for match in (*neighbours, *found.matches)}.values()
    counted = [_count_terms(match, found.weights) for match in items]
    mean = sum(size for _, size in counted) / len(counted)
    groups = [match.session or match.item_id for match in items]  # an item without a session is one of its own
    at_place = {
        (group, match.place): each for group, match, each in zip(groups, items, counted, strict=True) if match.session
    }
    missing: tuple[dict[tuple[str, float], int], float] = ({}, mean)
    offsets = [*range(-distance, 0), *range(1, distance + 1)]
    windows: list[float] = []
    sessions: dict[str, dict[tuple[str, float], int]] = {}
    for group, match, (own, size) in zip(groups, items, counted, strict=True):
        sums, total = own.copy(), float(size)
        for offset in offsets:
            counts, length = at_place.get((group, match.place + offset), missing)
            total += length
            for term, count in counts.items():
                sums[term] = sums.get(term, 0) + count
        windows.append(_weigh(sums, total / mean / (2 * distance + 1)))
        session = sessions.setdefault(group, {})
        for term, count in own.items():
            session[term] = session.get(term, 0) + count
    ranked = _rank([*items], windows)
    totals = {group: _weigh(each, 1.0) for group, each in sessions.items()}
    return {"window": ranked, "session": _rank(ranked, [totals[match.session or match.item_id] for match in ranked])}


def rank_vectors(matches: Sequence[ItemMatch], limit: int) -> dict[str, list[ItemMatch]]:
    """Rank items by their vectors, and by those near them in their session.

    Args:
        matches: The nearest items, with their cosines, best first.
        limit: Number of items that were asked for. If there are as many, further ones are hardly worse than the last:
            cosines count from that one on, so that those which were cut off are not far behind.

    Returns:
        The rankings "vector" and "vector window".
    """
    floor = matches[-1].score if len(matches) >= limit else 0.0
    own = _rank(matches, [match.score - floor for match in matches])
    scores = {(match.session or match.item_id, match.place): match.score for match in own}
    shares = [(distance, NEAR_SHARES[abs(distance)]) for distance in range(1 - len(NEAR_SHARES), len(NEAR_SHARES))]
    sums = [
        sum([scores.get((match.session or match.item_id, match.place + each), 0.0) * share for each, share in shares])
        for match in own
    ]
    return {"vector": own, "vector window": _rank(own, sums)}


def _rank(matches: Sequence[ItemMatch], scores: Sequence[float]) -> list[ItemMatch]:
    ranked = [
        ItemMatch(match.item_id, match.session, match.place, score, match.terms)
        for match, score in zip(matches, scores, strict=True)
    ]
    return sorted(ranked, key=attrgetter("score"), reverse=True)


def _count_terms(match: ItemMatch, weights: Mapping[str, float]) -> tuple[dict[tuple[str, float], int], int]:
    """Return how often an item has each term of the query that it has, by term and weight; and its number of terms."""
    terms = f" {match.terms} "
    counts = {each: count for each in weights.items() if (count := count_term(terms, each[0]))}
    return counts, terms.count(" ") - 1


def _weigh(counts: Mapping[tuple[str, float], int], size: float) -> float:
    """Return the BM25 of a text with these terms, and with this size in shares of the mean."""
    scale = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * size)
    return sum([weight * count * (SATURATION + 1) / (count + scale) for (_, weight), count in counts.items()])


def score_items(
    found: Iterable[tuple[MemoryItem, float, Mapping[str, float]]], now: float, weights: Weights
) -> list[Recollection]:
    """Weigh similarity, age and importance. Return the items best first."""
    scored: list[Recollection] = []
    for item, similarity, ranks in found:
        age = max(0.0, now - item.recorded_at) / DAY_S
        recency = weights.decay**age if item.kind is ItemKind.EPISODE else 1.0
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
