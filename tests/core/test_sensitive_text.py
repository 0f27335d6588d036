"""Personal data and secrets in text: tables of what is found, what is missed, and what only looks like it."""
# ruff: noqa: RUF001  Chinese punctuation

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.core.sensitive_text import ALL_KINDS, find_sensitive, redact_members
from agentfsm.guards import DataKind, redact_sensitive
from tests.support.personal_data import MISSED, MISTAKEN, WITH_DATA, WITHOUT_DATA

NEIGHBOURS = (("", ""), ("的", "的"), ("，", "。"), ("(", ")"), ("x ", " x"), ("\n", "\n"))
FOUND = [(kind, text) for kind, texts in WITH_DATA.items() for text in texts]


def kinds_in(text):
    return [span.kind for span in find_sensitive(text)]


@pytest.mark.parametrize(("kind", "text"), FOUND)
def test_data_is_found(kind, text):
    """The one thing in each text is found whole, whatever stands beside it, and nothing else is."""
    assert kinds_in(text) == [kind]
    for before, after in NEIGHBOURS:
        assert kinds_in(f"{before}{text}{after}") == [kind], (before, after)
    redacted = redact_sensitive(text)
    assert f"[{kind.upper()}_REDACTED]" in redacted
    assert redact_sensitive(redacted) == redacted


def test_the_figures_of_the_tables():
    """How many texts are decided on rightly; docs/guards.md has these figures."""
    missed = [text for texts in MISSED.values() for text in texts]
    right = sum(kinds_in(text) == [kind] for kind, text in FOUND)
    assert (right, len(FOUND) + len(missed)) == (54, 65)
    assert sum(not kinds_in(text) for text in WITHOUT_DATA) == len(WITHOUT_DATA) == 40
    assert [kinds_in(text) for text in missed] == [[]] * 11
    assert [kinds_in(text) for _, text in MISTAKEN] == [[kind] for kind, _ in MISTAKEN]


@pytest.mark.parametrize("text", WITHOUT_DATA)
def test_what_only_looks_like_data_is_left(text):
    """Neither wrong check digits, nor parts of longer numbers, nor words about data are found."""
    assert redact_sensitive(text) == text


@pytest.mark.parametrize(("kind", "text"), [pair for pair in FOUND if pair[0] in {"id_card", "bank_card", "iban"}])
def test_a_wrong_check_digit_is_not_found(kind, text):
    """Any other last digit makes another number."""
    [span] = find_sensitive(text)
    last = text[span.end - 1]
    for digit in set("0123456789") - {last}:
        changed = text[: span.end - 1] + digit + text[span.end :]
        assert DataKind(kind) not in kinds_in(changed)


def test_several_in_one_text_in_order():
    """Each has its mark, and the text between them stays."""
    text = "王芳13800138000，身份证11010519491231002X，卡6222021234567890128，邮箱wf@example.cn。"
    marks = "王芳[PHONE_REDACTED]，身份证[ID_CARD_REDACTED]，卡[BANK_CARD_REDACTED]，邮箱[EMAIL_REDACTED]。"
    assert redact_sensitive(text) == marks
    assert redact_sensitive(text, {DataKind.PHONE}) == text.replace("13800138000", "[PHONE_REDACTED]")


def test_cards_among_other_numbers():
    """Groups of digits before and after a card do not hide it."""
    assert redact_sensitive("2024 4111 1111 1111 1111 2024") == "2024 [BANK_CARD_REDACTED] 2024"
    assert redact_sensitive("12 34 5555 5555 5555 4444") == "12 34 [BANK_CARD_REDACTED]"


def test_known_secrets_are_found_as_they_are():
    """A secret is found anywhere, with hidden characters in it too; one that overlaps with other data comes first."""
    secret = "hunter2-ann@example.com"  # noqa: S105  invented
    assert redact_sensitive(f"a{secret}b, hunter2\u200b-ann@example.com", secrets=[secret]) == (
        "a[SECRET_REDACTED]b, [SECRET_REDACTED]"
    )
    assert redact_sensitive(f"{secret}{secret}", (), secrets=[secret]) == 2 * "[SECRET_REDACTED]"
    assert redact_sensitive("ｓｅｃｒｅｔ９９", (), secrets=["secret99"]) == "[SECRET_REDACTED]"


def test_members_of_objects():
    """Texts at any depth are redacted, and whatever stands under the name of a secret."""
    arguments = {
        "to": "ann@example.com",
        "n": 13800138000,
        "api_key": "x",
        "more": [{"password": "", "text": "a@b.cn"}],
    }
    assert redact_members(arguments) == {
        "to": "[EMAIL_REDACTED]",
        "n": 13800138000,
        "api_key": "[SECRET_REDACTED]",
        "more": [{"password": "", "text": "[EMAIL_REDACTED]"}],
    }


@given(st.text(st.sampled_from("0123456789- @.abXx身\u200b０eyJsk:=\n"), max_size=60))
def test_any_text(text):
    """Places are in order, within the text and apart; marking them again changes nothing."""
    spans = find_sensitive(text)
    ends = [0, *[end for span in spans for end in (span.start, span.end)], len(text)]
    assert ends == sorted(ends)
    assert all(span.start < span.end for span in spans)
    assert ALL_KINDS.issuperset(span.kind for span in spans)


@pytest.mark.parametrize(
    "piece",
    ["a", "1 ", "1", "a.a@", "eyJ", "token=", "-----BEGIN PRIVATE KEY-----", "://a:", "DE11", "\u200b1", "1234 "],
)
def test_long_texts(piece):
    """200,000 characters that begin like data again and again are searched long before a test is timed out."""
    find_sensitive(piece * (200_000 // len(piece)))
