"""Terms of texts and queries."""

import pytest

from agentfsm.memory.text_terms import MAX_QUERY_TERMS, read_query, write_date, write_pairs


@pytest.mark.parametrize(
    ("query", "words", "phrases"),
    [
        ("Where does Ann live?", ("ann", "live"), ()),
        ("Who is it?", ("who", "is", "it"), ()),  # nothing but stop words: all of them are searched
        ("北京", (), (("北京",),)),
        ("计算机", (), (("计算", "算机"),)),
        ("猫", (), (("猫",),)),
        (
            "Ann 喜欢什么颜色的车",
            ("ann",),
            (("喜欢",), ("欢什",), ("什么",), ("么颜",), ("颜色",), ("色的",), ("的车",)),
        ),
        ("\uff21\uff22\uff23\u3000stra\xdfe", ("abc", "strasse"), ()),
        ("!? ...", (), ()),
    ],
)
def test_a_query_is_words_and_phrases(query, words, phrases):
    """Stop words are left out, unless there is nothing else; short runs of characters are phrases."""
    terms = read_query(query)
    assert (terms.words, terms.phrases) == (words, phrases)


def test_a_long_query_is_bounded():
    """A query of 200,000 characters has a bounded number of terms."""
    terms = read_query(" ".join(f"word{n} 长长长长长长{n}" for n in range(20_000)))
    assert len(terms.words) <= MAX_QUERY_TERMS
    assert len(terms.phrases) <= MAX_QUERY_TERMS


def test_pairs_hold_the_last_character_too():
    """A run of characters is written as its pairs, and its last character, which begins no pair."""
    assert write_pairs("Ann 喜欢猫, 是的") == "喜欢 欢猫 猫 是的 的"
    assert write_pairs("no Chinese") == ""


def test_a_date_is_written_in_words():
    """The day of a time is searched in words and digits; a time beyond the calendar has none."""
    assert write_date(1_683_504_000) == "2023 May 8 Monday 2023-05-08"
    assert write_date(1e300) == ""
