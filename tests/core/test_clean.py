"""Text that somebody else wrote, before it is shown."""

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from agentfsm.core.text_safety import format_exact_json, one_line, strip_unsafe

# Unicode's categories of controls, format characters (bidirectional, zero-width, tags), surrogates and line separators.
HIDING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Of these categories, but visible: signs around Arabic, Syriac and Kaithi numbers.
SEEN = {"\n", "\t", *"\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"}


def test_escape_sequences_go_whole():
    """Colours and cursor moves leave nothing behind, not even their parameters."""
    assert strip_unsafe("a\x1b[31;1mb\x1b[2Jc\x9b5;5Hd") == "abcd"


def test_what_an_escape_encloses_stays():
    """The text of a title or a hyperlink is text that somebody could be meant not to see: it stays."""
    assert strip_unsafe("\x1b]8;;http://evil\x07click") == "]8;;http://evilclick"


def test_bidirectional_zero_width_and_tag_characters_go():
    """Nothing turns the text around, and nothing hides in it."""
    assert strip_unsafe("a\u202eb\u2066c\u200bd\ufeffe\U000e0041f\u00adg\ufe0fh") == "abcdefgh"


def test_line_breaks_tabs_and_letters_stay():
    """Whatever people write in, they can read."""
    text = "one\n\ttwo: Grüße, 你好, שלום, مرحبا, 👍"
    assert strip_unsafe(text) == text


@given(st.text(st.characters(codec=None)))
def test_nothing_hidden_is_left(text):
    """Of any text, no control and no invisible character is left; cleaning twice changes nothing more."""
    cleaned = strip_unsafe(text)
    assert not [c for c in cleaned if c not in SEEN and unicodedata.category(c) in HIDING and ord(c) < 0x13430]
    assert strip_unsafe(cleaned) == cleaned


@given(st.text(st.characters(codec=None)), st.integers(4, 50))
def test_one_line_is_one_line(text, width):
    """A line is a line, and no longer than asked for."""
    line = one_line(text, width)
    assert len(line) <= width
    assert len(line.splitlines()) <= 1


@given(st.dictionaries(st.text(), st.text(st.characters(codec=None)) | st.integers() | st.none()))
def test_exact_json_says_everything(value):
    """What a person decides on is exact: it reads back as the very same value, and still hides nothing."""
    text = format_exact_json(value)
    assert json.loads(text) == value
    assert strip_unsafe(text) == text
