"""How rankings are joined and items are weighed."""

import pytest

from agentfsm.memory import Weights
from agentfsm.memory.ranking import diversify, fuse, rank_vectors, rank_windows, score_items
from agentfsm.ports.memory_items import ItemMatch, MemoryItem, TextSearch

DAY = 86_400.0


def match(item_id, place, score, session="s", terms=""):
    return ItemMatch(item_id, session, place, score, terms)


def item(item_id, text="text", **fields):
    return MemoryItem(id=item_id, text=text, **{"valid_from": 0.0, "recorded_at": 0.0} | fields)


def search(*matches):
    return TextSearch(matches=tuple(matches), weights={"tea": 2.0, "green": 3.0})


def test_an_item_counts_the_matches_near_it():
    """An answer that shares no word with the query is found beside the question that does."""
    found = search(match("question", 4, 2.0, terms="tea"), match("far", 9, 1.5, terms="tea tea tea"))
    ranked = rank_windows(found, [match("answer", 5, 0.0, terms="at noon")], 2)["window"]
    assert {each.item_id: each.score > 0 for each in ranked} == {"far": True, "question": True, "answer": True}


def test_two_words_in_a_window_are_better_than_one_twice():
    """A window counts as one text: different words of the query say more than the same one again."""
    same = [match("a1", 1, 1.0, "a", "tea x"), match("a2", 2, 1.0, "a", "tea x")]
    both = [match("b1", 1, 1.0, "b", "tea x"), match("b2", 2, 1.0, "b", "green x")]
    ranked = rank_windows(search(*same, *both), [], 2)
    assert [each.session for each in ranked["window"]] == ["b", "b", "a", "a"]
    assert [each.session for each in ranked["session"]] == ["b", "b", "a", "a"]


def test_windows_do_not_reach_into_other_sessions():
    """The same place of another session is not near."""
    found = search(match("one", 4, 2.0, "a", "tea"))
    ranked = rank_windows(found, [match("other", 4, 0.0, "b", "at noon")], 2)["window"]
    assert [each.score > 0 for each in ranked] == [True, False]


def test_an_item_gets_a_share_of_the_similarity_near_it():
    """Two similar items side by side are better than one by itself."""
    near = [match("alone", 1, 0.6, "a"), match("b1", 1, 0.5, "b"), match("b2", 2, 0.5, "b")]
    ranked = rank_vectors(near, 10)
    assert [(each.item_id, each.score) for each in ranked["vector window"]] == [
        ("b1", 0.85),
        ("b2", 0.85),
        ("alone", 0.6),
    ]
    assert ranked["vector"] == near


def test_similarity_counts_from_where_a_ranking_is_cut_off():
    """An item behind the last of a full ranking is not far behind it."""
    ranked = rank_vectors([match("a", 1, 0.75), match("b", 9, 0.5)], 2)
    assert [each.score for each in ranked["vector"]] == [0.25, 0.0]


def test_rankings_are_joined_by_their_scores():
    """Each ranking counts in shares of its best score, so that a match far better than the others stays so."""
    rankings = {"text": [match("a", 1, 4.0), match("b", 2, 1.0)], "window": [match("a", 1, 2.0), match("c", 3, 2.0)]}
    found = fuse(rankings, 5)
    assert fuse(rankings, 1) == found[:1]
    assert [(each, similarity) for each, similarity, _ in found] == [("a", 1.0), ("c", 0.5), ("b", 0.125)]
    assert found[0][2] == {"text": 1, "window": 1}
    assert fuse({}, 5) == []


def test_the_score_is_the_documents_formula():
    """0.5 similarity + 0.3 * 0.95 ** days + 0.2 importance."""
    (scored,) = score_items([(item("a", kind="episode", importance=0.9), 0.8, {})], 10 * DAY, Weights())
    assert scored.score == pytest.approx(0.5 * 0.8 + 0.3 * 0.95**10 + 0.2 * 0.9)
    assert scored.why["recency"] == pytest.approx(0.95**10)


def test_facts_do_not_age():
    """Only an episode is worth less when it is old: a birthday is as true after a year."""
    found = [(item(kind, kind=kind), 1.0, {}) for kind in ("fact", "preference", "document", "episode")]
    aged = {each.item.id: each.why["recency"] for each in score_items(found, 100 * DAY, Weights())}
    assert aged == {"fact": 1.0, "preference": 1.0, "document": 1.0, "episode": pytest.approx(0.95**100)}


def test_a_future_record_is_not_better_than_a_present_one():
    """A clock that goes back does not make items younger than now."""
    (scored,) = score_items([(item("a", recorded_at=5 * DAY), 1.0, {})], 0.0, Weights())
    assert scored.why["recency"] == 1.0


def test_a_repetition_is_behind_something_new():
    """Of two items with nearly the same score, the one that repeats the best item comes last."""
    found = [
        (item("a", "Ann likes tea"), 1.0, {}),
        (item("b", "ann likes TEA"), 0.99, {}),
        (item("c", "Bob"), 0.95, {}),
    ]
    taken = diversify(score_items(found, 0.0, Weights()), 3, Weights())
    assert [entry.item.id for entry in taken] == ["a", "c", "b"]


def test_items_without_a_session_stand_by_themselves():
    """They are near nothing, whatever their place."""
    ranked = rank_windows(search(match("a", 1, 2.0, "", "tea"), match("b", 2, 1.0, "", "green")), [], 2)
    assert [each.item_id for each in ranked["window"]] == ["b", "a"]
    assert [each.item_id for each in ranked["session"]] == ["b", "a"]
    near = rank_vectors([match("a", 1, 0.9, ""), match("b", 2, 0.8, "")], 10)
    assert [each.score for each in near["vector window"]] == [0.9, 0.8]
