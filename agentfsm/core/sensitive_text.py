"""Personal data and secrets in text: find them by their form and their check digits, and replace them by marks.

Numbers are bounded by any character but a digit, never by the end of a word: for a regular expression a Chinese
character and a digit are of the same word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import accumulate
from typing import Final, TypeAlias

import attrs

from agentfsm.core.json_text import map_leaves
from agentfsm.core.messages import JSON
from agentfsm.core.text_safety import HIDDEN_CHARS
from agentfsm.core.value import Value


class DataKind(StrEnum):
    """A kind of personal data, or a secret."""

    EMAIL = "email"
    """An e-mail address."""

    PHONE = "phone"
    """A mobile number of mainland China, with or without +86."""

    ID_CARD = "id_card"
    """A resident identity number of China, 18 characters, with the check character of ISO 7064, mod 11-2."""

    BANK_CARD = "bank_card"
    """A number of a bank card: 13 to 19 digits that begin as those of a card network, with the check digit of Luhn."""

    IBAN = "iban"
    """An account number by ISO 13616, of the length of its country, with check digits mod 97."""

    TAX_ID = "tax_id"
    """A number of a taxpayer or of social security, found for countries that are named: VAT, SSN, ITIN, NINO, UTR and
    others. See `load_country_data` in `agentfsm.guards`.
    """

    ROUTING_NUMBER = "routing_number"
    """A routing number of a bank in the United States, found if that country is named, beside a word for it."""

    SECRET = "secret"  # noqa: S105  the name of a kind
    """A known secret, or a text in the form of one: API keys, private keys, JWTs, bearer tokens, passwords in URLs or
    behind the word.
    """


@attrs.frozen(kw_only=True)
class SensitiveSpan(Value):
    """A place in a text with sensitive data."""

    kind: DataKind
    """Kind of the data."""

    start: int
    """First character."""

    end: int
    """Character after the last one."""


_Range: TypeAlias = tuple[int, int]
# Finds data in a text: yields the kind, the first character, and the character after the last one.
DataFinder: TypeAlias = Callable[[str], Iterable[tuple[DataKind, int, int]]]

# E-mail addresses. Not the user of a git server, nor a picture for two pixels a point ("icon@2x.png").
_EMAIL: Final = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9_][A-Za-z0-9._%+-]{0,63}@(?![0-9]x\.)"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9]|:[A-Za-z_~/])"
)
# Not the fraction of a number.
_PHONE: Final = re.compile(
    r"(?<![0-9])(?<![0-9][.,])(?:(?:\+|00)?86[ -]?)?1[3-9][0-9](?:[ -]?[0-9]{4}){2}(?![0-9]|\.[0-9])"
)
_ID_CARD: Final = re.compile(
    r"(?<![0-9])[1-9][0-9]{5}([ -]?)(?:18|19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])\1[0-9]{3}[0-9Xx]"
    r"(?![0-9])"
)
_ID_WEIGHTS: Final = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_ID_CHECKS: Final = "10X98765432"
_DIGIT_GROUPS: Final = re.compile(r"(?<![0-9])(?<![0-9][.,])[0-9]+(?:[ -][0-9]+)*(?![0-9])")
_DIGITS: Final = re.compile(r"[0-9]+")
# Beginnings by which networks are told apart (ISO/IEC 7812): Mastercard 2 and 5, American Express, Diners and JCB 3,
# Visa 4, Discover and UnionPay 6, and old cards of ICBC.
_CARD_START: Final = re.compile(r"3[0-9]|4|5[0-9]|6[0-9]|2[2-7]|9558")
_CARD_LENGTHS: Final = range(13, 20)
# Lengths of the groups in which card numbers are written.
_CARD_GROUPS: Final = (
    (4, 4, 4, 4, 3),
    (4, 4, 4, 4, 2),
    (4, 4, 4, 4, 1),
    (4, 4, 4, 4),
    (4, 6, 5),
    (4, 6, 4),
    (6, 13),
    (6, 10),
)
_LUHN_DOUBLES: Final = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)
_IBAN: Final = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}[0-9]{2}(?:[ -]?[A-Za-z0-9]){11,30}")
# Length of an account number by country (SWIFT, IBAN registry).
_IBAN_LENGTHS: Final = {
    country: length
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FO GL NL SD FK",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HU LB NI PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU YE",
        31: "MT SC",
        32: "LC",
        33: "RU",
    }.items()
    for country in countries.split()
}
_SECRETS: Final = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY-----[^-]{0,20000}(?:-----END [A-Z0-9 ]{0,40}-----)?"
    r"|(?<![A-Za-z0-9_-])(?:"
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"  # JWT
    r"|(?:sk|pk|rk)[-_](?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic, Stripe
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{16,}"  # AWS, Google
    r"|LTAI[A-Za-z0-9]{12,30}|AKID[A-Za-z0-9]{13,40}"  # Alibaba Cloud, Tencent Cloud
    r"|hf_[A-Za-z0-9]{24,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{32,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
    r")"
    r"|(?i:(?<![a-z])bearer[ \t]+(?=[A-Za-z0-9._~+/-]*[0-9])[A-Za-z0-9._~+/-]{16,}=*)"
    r"|(?<=://)[^\s/:@]{0,100}:[^\s/@]{1,200}@"  # in a URL
    # A value behind its name: 8 characters or more, with a letter and a digit.
    r"|(?i:(?:api[_-]?key|secret|token|passw(?:or)?d|passphrase|密码|口令|密钥|令牌)[\"']?"
    r"\s{0,3}(?:[:=\uff1a]|是|为|\bis\b)\s{0,3}[\"']?)"
    r"(?=[!-~]{0,100}?[0-9])(?=[!-~]{0,100}?[A-Za-z])[^\s\"'`,;<>\u0080-\uffff]{8,200}"
)
# Written with characters of full width, digits are digits.
_FULL_WIDTH: Final = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}


def _find_emails(text: str) -> Iterator[_Range]:
    return (found.span() for found in _EMAIL.finditer(text)) if "@" in text else iter(())


def _find_phones(text: str) -> Iterator[_Range]:
    return (found.span() for found in _PHONE.finditer(text))


def _find_id_cards(text: str) -> Iterator[_Range]:
    return (found.span() for found in _ID_CARD.finditer(text) if _has_id_check(found[0]))


def _has_id_check(text: str) -> bool:
    number = text.replace(" ", "").replace("-", "")
    total = sum([weight * int(digit) for weight, digit in zip(_ID_WEIGHTS, number, strict=False)])
    return _ID_CHECKS[total % 11] == number[-1].upper()


def _find_bank_cards(text: str) -> Iterator[_Range]:
    for found in _DIGIT_GROUPS.finditer(text):
        if found.end() - found.start() < _CARD_LENGTHS.start:
            continue
        groups = [each.span() for each in _DIGITS.finditer(text, *found.span())]
        first = 0
        while first < len(groups):
            count = _match_card(text, groups, first)
            if count:
                yield groups[first][0], groups[first + count - 1][1]
            first += count or 1


def _match_card(text: str, groups: list[_Range], first: int) -> int:
    """Return the number of groups of digits, from the first on, that are the number of a card; 0 if they are none."""
    sizes = tuple([end - start for start, end in groups[first : first + 5]])
    shapes = _CARD_GROUPS if sizes[0] not in _CARD_LENGTHS else ((sizes[0],), *_CARD_GROUPS)
    for shape in shapes:
        if sizes[: len(shape)] == shape:
            number = "".join([text[start:end] for start, end in groups[first : first + len(shape)]])
            if _CARD_START.match(number) and _has_luhn_check(number):
                return len(shape)
    return 0


def _has_luhn_check(number: str) -> bool:
    digits = [int(digit) for digit in reversed(number)]
    return (sum(digits[::2]) + sum([_LUHN_DOUBLES[digit] for digit in digits[1::2]])) % 10 == 0


def _find_ibans(text: str) -> Iterator[_Range]:
    for found in _IBAN.finditer(text):
        length = _IBAN_LENGTHS.get(found[0][:2].upper(), 0)
        counts = accumulate(char.isalnum() for char in found[0])
        size = next((index for index, count in enumerate(counts, 1) if count == length), 0)
        end = found.start() + size
        if size and not (text[end : end + 1].isascii() and text[end : end + 1].isalnum()):
            number = "".join(filter(str.isalnum, found[0][:size])).upper()
            if int("".join([str(int(char, 36)) for char in number[4:] + number[:4]])) % 97 == 1:
                yield found.start(), end


def _find_secrets(text: str) -> Iterator[_Range]:
    return (found.span() for found in _SECRETS.finditer(text))


# In this order: of two kinds that overlap, the first counts.
_FINDERS: Final[dict[DataKind, Callable[[str], Iterator[_Range]]]] = {
    DataKind.SECRET: _find_secrets,
    DataKind.ID_CARD: _find_id_cards,
    DataKind.IBAN: _find_ibans,
    DataKind.BANK_CARD: _find_bank_cards,
    DataKind.PHONE: _find_phones,
    DataKind.EMAIL: _find_emails,
}
ALL_KINDS: Final = frozenset(DataKind)


def find_sensitive(
    text: str,
    kinds: Collection[DataKind] = ALL_KINDS,
    *,
    secrets: Iterable[str] = (),
    finders: Iterable[DataFinder] = (),
) -> tuple[SensitiveSpan, ...]:
    """Return the places of sensitive data in a text, in order. They do not overlap.

    Digits of full width count as digits, and hidden characters between them do not matter.

    Args:
        text: Any text.
        kinds: Kinds to find.
        secrets: Known secrets, found wherever they occur, whatever the kinds. None of them may be empty.
        finders: Finders of more data, such as those of `load_country_data`.
    """
    plain, places = _fold(text)
    found = [(DataKind.SECRET, *span) for secret in secrets for span in _find_all(plain, _fold(secret)[0])]
    found += [(kind, *span) for kind, find in _FINDERS.items() if kind in kinds for span in find(plain)]
    found += [each for find in finders for each in find(plain) if each[0] in kinds]
    kept: list[SensitiveSpan] = []
    taken = bytearray(len(plain))
    for kind, start, end in found:
        if not any(taken[start:end]):
            taken[start:end] = b"\1" * (end - start)
            first, last = (start, end - 1) if places is None else (places[start], places[end - 1])
            kept.append(SensitiveSpan(kind=kind, start=first, end=last + 1))
    return tuple(sorted(kept, key=lambda each: each.start))


def _fold(text: str) -> tuple[str, list[int] | None]:
    """Return the text as it is searched, and the place of each of its characters; None if they are the same."""
    if text.isascii() and text.isprintable():
        return text, None
    plain = text.translate(_FULL_WIDTH)
    if HIDDEN_CHARS.search(plain) is None:
        return plain, None
    places = [place for place, char in enumerate(plain) if HIDDEN_CHARS.match(char) is None]
    return "".join([plain[place] for place in places]), places


def _find_all(text: str, part: str) -> Iterator[_Range]:
    start = text.find(part)
    while start >= 0:
        yield start, start + len(part)
        start = text.find(part, start + len(part))


def replace_spans(text: str, spans: Iterable[SensitiveSpan], write: Callable[[DataKind, str], str]) -> str:
    """Return the text with each place replaced by the result of `write` for its kind and its text.

    Args:
        text: The text.
        spans: Places in it, in order, as `find_sensitive` returns them.
        write: Returns the text that replaces a place.
    """
    pieces, last = [], 0
    for span in spans:
        pieces += [text[last : span.start], write(span.kind, text[span.start : span.end])]
        last = span.end
    return "".join([*pieces, text[last:]])


def redact_sensitive(
    text: str,
    kinds: Collection[DataKind] = ALL_KINDS,
    *,
    secrets: Iterable[str] = (),
    finders: Iterable[DataFinder] = (),
) -> str:
    """Return the text with sensitive data replaced by marks, such as [EMAIL_REDACTED].

    Args:
        text: Any text.
        kinds: Kinds to replace.
        secrets: Known secrets, as for `find_sensitive`.
        finders: Finders of more data: `load_country_data("US", "GB")` of `agentfsm.guards`.
    """
    spans = find_sensitive(text, kinds, secrets=secrets, finders=finders)
    return replace_spans(text, spans, lambda kind, _: redaction_mark(kind))


def redaction_mark(kind: DataKind) -> str:
    """Return the mark that replaces data of a kind, such as [EMAIL_REDACTED]."""
    return f"[{kind.upper()}_REDACTED]"


# Names of arguments whose values are secrets, whatever their form.
_SECRET_NAMES: Final = re.compile(
    r"(?:api|access|private|secret)_?-?key|passw(?:or)?d|passphrase|secret|token", re.IGNORECASE
)


def redact_members(values: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a JSON object with sensitive data in its texts and names replaced by marks, and texts named as secrets.

    Args:
        values: The members, such as the arguments of a call. Numbers are kept.
    """
    members: dict[str, JSON] = map_leaves(values, _redact_leaf)
    return members


def _redact_leaf(leaf: JSON, name: str | None) -> JSON:
    if not isinstance(leaf, str):
        return leaf
    is_secret = leaf and name and _SECRET_NAMES.search(name) is not None
    return redaction_mark(DataKind.SECRET) if is_secret else redact_sensitive(leaf)


# Looser than the shapes of `find_sensitive`: in a log or a trace, a word too few is better than a secret too many.
_SECRET_PATTERN: Final = re.compile(
    r"(?i)\b(?:sk|pk|rk|ghp|gho|xox[abp])[-_][\w-]{8,}|\bbearer\s+\S+|[\w-]*(?:key|password|secret|token)\W{1,4}\S+",
)


def mask_sensitive(text: str) -> str:
    """Return the text with personal data and likely secrets masked."""
    return _SECRET_PATTERN.sub("[redacted]", redact_sensitive(text))
