"""How rankings are joined and items are weighed."""

import pytest

from agentfsm.memory.ranking import Weights, diversify, fuse, rank_sessions, rank_windows, score_items
from agentfsm.ports.memory_items import ItemMatch, MemoryItem

DAY = 86_400.0


def match(item_id, place, score, session="s"):
    return ItemMatch(item_id, session, place, score)


def item(item_id, text="text", **fields):
    return MemoryItem(id=item_id, text=text, **{"valid_from": 0.0, "recorded_at": 0.0} | fields)


def test_an_item_counts_the_matches_near_it():
    """An answer that shares no word with the query is found beside the question that does."""
    ranked = rank_windows([match("question", 4, 2.0), match("far", 9, 1.5)], [match("answer", 5, 0.0)], 2)
    assert [(each.item_id, each.score) for each in ranked] == [("question", 2.0), ("answer", 2.0), ("far", 1.5)]


def test_windows_do_not_reach_into_other_sessions():
    """The same place of another session is not near."""
    ranked = rank_windows([match("one", 4, 2.0, "a")], [match("other", 4, 0.0, "b")], 2)
    assert {each.item_id: each.score for each in ranked} == {"one": 2.0, "other": 0.0}


def test_a_session_with_a_good_match_is_before_one_with_many_poor_ones():
    """Within a session the order stays."""
    matches = [match("a1", 1, 3.0, "a"), *[match(f"b{n}", n, 1.0, "b") for n in range(5)]]
    ranked = rank_sessions(matches, [match("b1", 1, 0, "b"), match("a2", 2, 0, "a"), match("a1", 1, 0, "a")])
    assert [each.item_id for each in ranked] == ["a2", "a1", "b1"]


def test_the_first_of_all_rankings_has_similarity_1():
    """Similarity never rises along the order of the joined rankings."""
    rankings = {"text": [match("a", 1, 4.0), match("b", 2, 1.0)], "window": [match("a", 1, 2.0), match("c", 3, 2.0)]}
    found = fuse(rankings, 5)
    assert fuse(rankings, 1) == found[:1]
    assert [each for each, *_ in found] == ["a", "b", "c"]
    assert [similarity for _, similarity, _ in found] == [1.0, 0.125, 0.125]
    assert found[0][2] == {"text": 1, "window": 1}
    assert fuse({}, 5) == []


def test_the_score_is_the_documents_formula():
    """0.5 similarity + 0.3 * 0.95 ** days + 0.2 importance."""
    (scored,) = score_items([(item("a", importance=0.9), 0.8, {})], 10 * DAY, Weights())
    assert scored.score == pytest.approx(0.5 * 0.8 + 0.3 * 0.95**10 + 0.2 * 0.9)
    assert scored.why["recency"] == pytest.approx(0.95**10)


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
    ranked = rank_windows([match("a", 1, 2.0, ""), match("b", 2, 1.0, "")], [], 2)
    assert [each.score for each in ranked] == [2.0, 1.0]
    assert [each.score for each in rank_sessions(ranked, ranked)] == [4.0, 1.0]
