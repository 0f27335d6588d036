"""Hidden characters: found where they hide something, left alone where a script or an emoji needs them."""

import pytest

from agentfsm.core.text_safety import escape_hidden, find_hidden


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ab\U000e0041c", "U+E0041 TAG LATIN CAPITAL LETTER A at character 2"),
        ("a\u202eb", "U+202E RIGHT-TO-LEFT OVERRIDE at character 1"),
        ("a\u2066b", "U+2066 LEFT-TO-RIGHT ISOLATE at character 1"),
        ("a\u200bb", "U+200B ZERO WIDTH SPACE at character 1"),
        ("a\u200db", "U+200D ZERO WIDTH JOINER at character 1"),
        ("a\ufe0fb", "U+FE0F VARIATION SELECTOR-16 at character 1"),
        ("❤\ufe0f\ufe0f", "U+FE0F VARIATION SELECTOR-16 at character 2"),
        ("❤\U000e0100", "U+E0100 VARIATION SELECTOR-17 at character 1"),
        ("\ufeffa", "U+FEFF ZERO WIDTH NO-BREAK SPACE at character 0"),
        ("a\xadb", "U+00AD SOFT HYPHEN at character 1"),
        ("a\x1b[31m", "U+001B a control character at character 1"),
        ("a\rb", "U+000D a control character at character 1"),
        ("می\u200c\u200cخ", "U+200C ZERO WIDTH NON-JOINER at character 2"),
        ("\ud83d", "U+D83D a control character at character 0"),
    ],
)
def test_what_hides_is_named(text, named):
    """Tags, bidirectional marks, zero width, selectors out of place and controls are named with their place."""
    assert find_hidden(text) == named


@pytest.mark.parametrize(
    "text",
    [
        "plain,\ttabs\nand lines\r\nof any kind",
        "👩‍👩‍👧 👨🏽‍💻 ❤️ ❤️‍🔥 1️⃣ ☎︎ 🏳️‍🌈",
        "می‌خواهم",  # Persian, whose plural stands apart
        "क्‍ष and ശ്രീ‌മാൻ",  # a half letter of Devanagari, a stop in Malayalam
        "中文、日本語、한국어、עברית، العربية",
    ],
)
def test_what_belongs_is_left_alone(text):
    """Emoji of several parts, key caps, and scripts with joiners are plain text."""
    assert find_hidden(text) is None


def test_nothing_is_left_out_when_it_is_spelt_out():
    """What a person decides on shows each hidden character as its escape."""
    assert escape_hidden("a\u202eb\U000e0041") == "a\\u202eb\\udb40\\udc41"
