"""Likeness by words: what fits comes first, in any script, and the same everywhere."""

import os
import subprocess
import sys
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.context import LexicalScorer
from agentfsm.context.similarity import _build_index

TEXTS = (
    "get_weather\nTells the current weather of a city.\ncity\nThe city's name.",
    "convertCurrency\nConverts an amount of money into another currency.\namount\nfrom\nto",
    "read_file\nReads a file and returns its text.\npath",
    "HTTPFetch\nLoads a page.\nurl",
    "查询天气\n查询指定城市的天气预报。",
    "파일_읽기\n파일을 읽습니다.",
    "翻訳する\n文章を英語に翻訳します。",
)


async def best(query, texts=TEXTS):
    scores = await LexicalScorer().scores(query, texts)
    return texts[scores.index(max(scores))].partition("\n")[0] if any(scores) else None


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("What's the weather like in Paris?", "get_weather"),
        ("I want to be converting dollars to another CURRENCY", "convertCurrency"),
        ("currencies", "convertCurrency"),
        ("show me the texts of these files", "read_file"),
        ("http", "HTTPFetch"),
        ("fetch it", "HTTPFetch"),
        ("\uff26\uff29\uff2c\uff25", "read_file"),
        ("明天北京天气怎么样?", "查询天气"),
        ("이 파일을 보여줘", "파일_읽기"),
        ("英語にしてください", "翻訳する"),
        ("could you please do that for me", None),
        ("", None),
        ("🙂 ... !", None),
    ],
)
async def test_the_tool_that_fits_comes_first(query, name):
    """Case, width, plural, -ing, camelCase, and scripts without spaces do not keep a word from being found."""
    assert await best(query) == name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("query", "queries"),
        ("planning", "plans"),
        ("stopped", "stop"),
        ("calling", "calls"),
        ("convert", "converted"),
        ("update", "updating"),
        ("address", "addresses"),
        ("看", "看"),
        ("ราคา", "ราคาทอง"),
    ],
)
async def test_forms_of_a_word_meet(one, other):
    """The endings of English are cut alike in query and text."""
    assert (await LexicalScorer().scores(one, [other, "something"]))[0] > 0


@pytest.mark.parametrize(("one", "other"), [("sing", "s"), ("red", "r"), ("status", "statu"), ("use", "us")])
async def test_short_words_are_left_whole(one, other):
    """What only looks like an ending stays."""
    assert await LexicalScorer().scores(one, [other, "something"]) == [0.0, 0.0]


async def test_a_rare_word_counts_more_than_a_frequent_one():
    """What stands everywhere tells little, and what stands once tells all."""
    texts = ["a\nzip", "b\nfile", "c\nfile", "d\nfile"]
    scores = await LexicalScorer().scores("zip file", texts)
    assert scores[0] > scores[1] == scores[2] == scores[3] > 0


async def test_a_word_in_the_name_counts_more():
    """The name says what a tool is for."""
    named, said = await LexicalScorer().scores("mail", ["mail\nsend letter", "send\nmail letter"])
    assert named > said > 0


async def test_repeating_a_word_helps_less_and_less():
    """The tenth "mail" adds less than the second, so that nobody comes first by shouting."""
    texts = [f"tool\n{'mail ' * times}{'word ' * (20 - times)}" for times in (1, 2, 9, 10)]
    once, twice, nine, ten = await LexicalScorer().scores("mail", texts)
    assert 0 < ten - nine < twice - once


async def test_a_short_text_that_holds_the_word_is_better():
    """A long description holds any word sooner or later."""
    short, long = await LexicalScorer().scores("mail", ["a\nmail", f"b\nmail {'other words ' * 50}"])
    assert short > long


@pytest.mark.parametrize("texts", [(), ("",), ("", "\n"), ("!", "mail")])
async def test_texts_without_words_score_nothing(texts):
    """No texts, and empty ones, are no error."""
    scores = await LexicalScorer().scores("weather", texts)
    assert scores == [0.0] * len(texts)


async def test_the_same_texts_are_read_once():
    """An agent's tools are scored with every input; their words are counted only with the first."""
    texts = ["only\nhere and nowhere else"]
    _build_index.cache_clear()
    for query in ("one", "two", "three"):
        await LexicalScorer().scores(query, list(texts))
    assert (_build_index.cache_info().misses, _build_index.cache_info().hits) == (1, 2)


def test_scores_are_the_same_in_every_process():
    """Sums of floats depend on their order, which must not be that of a set."""
    code = (
        "import anyio; from agentfsm.context.similarity import LexicalScorer\n"
        "words = [f'w{i}' for i in range(60)]\n"
        "texts = [' '.join(words[: n + 3] * (n % 3 + 1)) for n in range(50)]\n"
        "print(anyio.run(LexicalScorer().scores, ' '.join(words), texts))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1


@given(query=st.text(), texts=st.lists(st.text(), max_size=5))
async def test_any_text_can_be_scored(query, texts):
    """Whatever is written, there is one finite score per text, and none below 0."""
    scores = await LexicalScorer().scores(query, texts)
    assert len(scores) == len(texts)
    assert all(isfinite(score) and score >= 0 for score in scores)
