"""Chunks of documents: at headings, then paragraphs, then sentences and words."""

from itertools import pairwise

import pytest

from agentfsm.memory.chunks import split_document
from agentfsm.tokens.ledger import estimate_tokens

SENTENCE = "The quick brown fox number {} jumps over the lazy dog. "


def write(*numbers):
    return "".join(SENTENCE.format(number) for number in numbers)


def test_headings_begin_chunks():
    """With their path. A heading without a text is a text, unless there is more below it."""
    text = "Before\n\n# One #\n\n## Sub\n\nfirst\nline\n\nsecond\n\n## Empty\n\n# Two\nText\n\nThree\n=====\nat last\n"
    assert [(chunk.headings, chunk.text) for chunk in split_document(text)] == [
        ((), "Before"),
        (("One", "Sub"), "first\nline\n\nsecond"),
        (("One", "Empty"), "Empty"),
        (("Two",), "Text"),
        (("Three",), "at last"),
    ]


def test_code_is_no_heading():
    """What stands between fences is kept as it is; a shorter fence does not end it."""
    code = "````python\n# no heading\n\n```\n---\n````"
    [chunk] = split_document(f"# Code\n{code}\nafter")
    assert chunk.text == f"{code}\nafter"
    [chunk] = split_document("```\n# never closed")
    assert chunk.text == "```\n# never closed"


def test_a_long_section_is_cut_between_sentences_with_an_overlap():
    """No chunk is too long, none begins within a sentence, and nothing is lost."""
    chunks = split_document(write(*range(200)), tokens=100, overlap=20)
    assert max(estimate_tokens(chunk.text) for chunk in chunks) <= 100
    assert all(chunk.text.startswith("The quick") and chunk.text.endswith("dog.") for chunk in chunks)
    for before, after in pairwise(chunks):
        repeated = before.text[before.text.rindex("The quick") :]
        assert after.text.startswith(repeated)
    assert all(SENTENCE.format(number).strip() in " ".join(c.text for c in chunks) for number in range(200))


def test_paragraphs_stay_together():
    """A paragraph that does not fit any more begins the next chunk; without an overlap nothing is repeated."""
    paragraphs = [write(number, number).strip() for number in range(10)]
    chunks = split_document("\n\n".join(paragraphs), tokens=64, overlap=0)
    assert [each for chunk in chunks for each in chunk.text.split("\n\n")] == paragraphs


@pytest.mark.parametrize(
    "text", ["我们需要长期记忆。" * 300, "我们需要长期记忆" * 300, "x" * 20_000, "😀" * 3_000, "a\n" * 9_000]
)
def test_any_text_is_cut(text):
    """Also Chinese text, with and without punctuation, and a text without any place to cut."""
    chunks = split_document(text)
    assert len(chunks) > 3
    assert all(300 < estimate_tokens(chunk.text) <= 512 for chunk in chunks[:-1])
    whole = chunks[0].text
    for before, after in pairwise(chunks):
        repeated = max(size for size in range(257) if before.text.endswith(after.text[:size]))
        assert repeated > 30
        whole += after.text[repeated:]
    assert set(whole) == set(text.strip())


def test_chinese_sentences_stay_whole():
    """A chunk ends with the sign that ends a sentence."""
    assert all(chunk.text.endswith("。") for chunk in split_document("我们需要长期记忆。" * 300))


def test_an_edit_changes_the_chunks_of_its_section_only():
    """The others are equal, so that they need not be written again."""
    sections = [f"# Part {part}\n\n{write(*range(part * 50, part * 50 + 50))}\n" for part in range(4)]
    before = split_document("\n".join(sections))
    sections[1] = f"# Part 1\n\nNew. {write(*range(50, 100))}\n"
    after = split_document("\n".join(sections))
    assert {c.headings for c in before if c not in after} == {("Part 1",)}


def test_a_blank_text_has_no_chunks():
    """Neither has one of line breaks."""
    assert split_document("") == split_document(" \n\n\t\n") == []
