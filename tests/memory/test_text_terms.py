"""Terms of texts and queries."""

import pytest

from agentfsm.memory.text_terms import MAX_QUERY_TERMS, count_term, read_query, write_date, write_terms


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("Where does Ann live?", ("ann", "live")),
        ("the cats were running", ("cat", "run")),
        ("Who is it?", ("who", "is", "it")),  # nothing but stop words: all of them are searched
        ("北京", ("北京",)),
        ("计算机", ("计算 算机",)),
        ("猫", ("猫*",)),
        ("Ann 喜欢什么颜色的车", ("ann", "喜欢", "欢什", "什么", "么颜", "颜色", "色的", "的车")),
        ("\uff21\uff22\uff23\u3000stra\xdfe", ("abc", "strass")),
        ("1,234.5 or 1,00,000", ("1234", "5", "100000")),
        ("!? ...", ()),
    ],
)
def test_a_query_is_words_and_phrases(query, terms):
    """Stop words are left out, unless there is nothing else; short runs of characters are phrases."""
    assert read_query(query) == terms


def test_a_long_query_is_bounded():
    """A query of 200,000 characters has a bounded number of terms."""
    assert len(read_query(" ".join(f"word{n} 长长长长长长{n}" for n in range(20_000)))) <= MAX_QUERY_TERMS


def test_terms_hold_the_last_character_too():
    """A run of characters is written as its pairs, and its last character, which begins no pair."""
    assert write_terms("Ann 喜欢猫, 是的", 1e300) == "ann 喜欢 欢猫 猫 是的 的"


def test_terms_are_counted():
    """Words, phrases of adjacent terms, and beginnings of terms."""
    terms = f" {write_terms('猫 and cats, 计算机', 1e300)} "
    assert [count_term(terms, term) for term in ("cat", "计算 算机", "猫*", "算*", "do")] == [1, 1, 1, 1, 0]


def test_a_date_is_written_in_words():
    """The day of a time is searched in words and digits; a time beyond the calendar has none."""
    assert write_date(1_683_504_000) == "2023 May 8 Monday 2023-05-08"
    assert write_date(1e300) == ""
