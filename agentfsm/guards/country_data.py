"""Phone, tax and bank numbers of countries: found by their form, their check digits, and words beside them.

The check digits and numbering plans are those of the packages python-stdnum and phonenumbers, which are loaded when a
country is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Final, NamedTuple

from agentfsm.core.errors import MisuseError
from agentfsm.core.sensitive_text import DataFinder, DataKind

_EU_CODES: Final = "AT BE BG CY CZ DE DK EE ES FI FR GR HR HU IE IT LT LU LV MT NL PL PT RO SE SI SK"
_EU: Final = tuple(_EU_CODES.split())
# Characters in which a word beside a number is looked for: before it, and after it.
_WORDS_BEFORE: Final = 40
_WORDS_AFTER: Final = 25
# A number neither begins nor ends within a word, a longer number, a UUID or a version.
_START: Final = r"(?<![0-9A-Za-z_.-])"
_END: Final = r"(?![0-9A-Za-z_]|[.-][0-9A-Za-z])"
_PHONE_WORDS: Final = re.compile(
    r"\b(?:tel|(?:tele)?phone|mobile|cell|call|fax|whatsapp|ring|text|telefon\w*|handy|t[ée]l[ée]phone|appel\w*"
    r"|tel[ée]fono|m[óo]vil|cellulare|telefoon)\b",
    re.IGNORECASE,
)
# Seven digits, the fewest of a phone number, which stand close together. The search for phone numbers is slow.
_SEVEN_DIGITS: Final = re.compile(r"(?:[0-9][^0-9\n]{0,4}){6}[0-9]")
# Invalid candidates after which the search for phone numbers in a text ends.
_PHONE_TRIES: Final = 65_535
# A number of groups of capitals and digits behind the code of a country.
_VAT_GROUP: Final = re.compile(r"[ .-]?[0-9A-Z+*]+")
# Fewest characters of a VAT number with its country: shorter ones, of Romania, are found by chance.
_MIN_VAT_CHARS: Final = 9


class _NumberForm(NamedTuple):
    kind: DataKind
    pattern: str
    module: str = ""
    """Module of stdnum that knows the check digits, or which numbers are issued; empty: the pattern is all."""
    words: str = ""
    """Words of which one has to stand beside the number, as its form alone is that of too many others."""


# Forms by country. Those whose check digit lets one number in ten or so pass need a word beside them.
_FORMS: Final[dict[str, tuple[_NumberForm, ...]]] = {
    "US": (
        _NumberForm(DataKind.TAX_ID, r"[0-9]{3}-[0-9]{2}-[0-9]{4}", "us.ssn"),
        _NumberForm(DataKind.TAX_ID, r"9[0-9]{2}-[0-9]{2}-[0-9]{4}", "us.itin"),
        _NumberForm(DataKind.TAX_ID, r"[0-9]{3} ?[0-9]{2} ?[0-9]{4}", "us.ssn", r"SSNs?|social security"),
        _NumberForm(DataKind.TAX_ID, r"9[0-9]{2} ?[0-9]{2} ?[0-9]{4}", "us.itin", r"ITINs?|taxpayer"),
        _NumberForm(DataKind.TAX_ID, r"[0-9]{2}-[0-9]{7}", "us.ein", r"EINs?|employer id\w*|tax id\w*"),
        _NumberForm(DataKind.ROUTING_NUMBER, r"[0-9]{9}", "us.rtn", r"routing|RTN|ABA"),
    ),
    "GB": (
        # HMRC, NIM39110: letters that are not used, and prefixes that are not allocated. There is no check digit.
        _NumberForm(
            DataKind.TAX_ID,
            r"(?!BG|GB|NK|KN|TN|NT|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]( ?)[0-9]{2}(?:\1[0-9]{2}){2}\1[A-D]",
        ),
        _NumberForm(DataKind.TAX_ID, r"[0-9]{5} ?[0-9]{5}[Kk]?", "gb.utr", r"UTRs?|taxpayer ref\w*|tax ref\w*"),
    ),
    "DE": (_NumberForm(DataKind.TAX_ID, r"[0-9]{2}(?: ?[0-9]{3}){3}", "de.idnr", r"steuer\w*|IdNr|tax id\w*|TIN"),),
    "FR": (
        _NumberForm(
            DataKind.TAX_ID, r"[12]( ?)[0-9]{2}\1[0-9]{2}\1[0-9][0-9AB]\1[0-9]{3}\1[0-9]{3} ?[0-9]{2}", "fr.nir"
        ),
    ),
    "IT": (
        _NumberForm(DataKind.TAX_ID, r"[A-Z]{6}[0-9]{2}[A-EHLMPRST][0-9]{2}[A-Z][0-9]{3}[A-Z]", "it.codicefiscale"),
    ),
    "ES": (_NumberForm(DataKind.TAX_ID, r"[0-9]{8}[ -]?[A-Z]|[XYZ][ -]?[0-9]{7}[ -]?[A-Z]", "es.nif", r"DNI|NIF|NIE"),),
    "NL": (_NumberForm(DataKind.TAX_ID, r"[0-9]{9}", "nl.bsn", r"BSN|burgerservicenummer|sofi\w*"),),
    "BE": (_NumberForm(DataKind.TAX_ID, r"[0-9]{2}\.[0-9]{2}\.[0-9]{2}-[0-9]{3}\.[0-9]{2}", "be.nn"),),
    "PL": (_NumberForm(DataKind.TAX_ID, r"[0-9]{11}", "pl.pesel", r"PESEL"),),
}


@lru_cache(maxsize=32)
def load_country_data(*countries: str) -> tuple[DataFinder, ...]:
    """Return the finders of the phone, tax and bank numbers of countries, for `redact_sensitive(text, finders=...)`.

    Args:
        *countries: Codes of ISO 3166, such as "US", "GB" and "DE", or "EU" for the tax numbers of all its members.
            Phone numbers in international form (+44 ...) are found for each of them, those in national form for the
            countries that are named themselves.

    Raises:
        MisuseError: if a country is unknown, or a package is missing.
    """
    try:
        phonenumbers = import_module("phonenumbers")
        vat = import_module("stdnum.eu.vat")
    except ImportError:
        raise MisuseError(
            "numbers of countries need the packages python-stdnum and phonenumbers: pip install 'agentfsm[pii]'"
        ) from None
    named = dict.fromkeys(["GB" if each.upper() == "UK" else each.upper() for each in countries])
    if unknown := [each for each in named if each != "EU" and each not in phonenumbers.SUPPORTED_REGIONS]:
        raise MisuseError(
            f"countries: {unknown[0]!r} is unknown: give codes of ISO 3166, such as 'US', 'GB' and 'DE', or 'EU'"
        )
    members = dict.fromkeys([code for each in named for code in (_EU if each == "EU" else (each,))])
    finders: list[DataFinder] = []
    prefixes = ["EL" if code == "GR" else code for code in members if code in _EU]
    if prefixes:
        finders.append(_build_vat_finder(prefixes, vat.is_valid))
    if "GB" in members:
        finders.append(_build_vat_finder(["GB"], import_module("stdnum.gb.vat").is_valid))
    finders += [_build_form_finder(form) for code in members for form in _FORMS.get(code, ())]
    regions = [None, *[code for code in named if code != "EU"]] if named else []
    finders += [_build_phone_finder(phonenumbers, region) for region in regions]
    return tuple(finders)


def _build_form_finder(form: _NumberForm) -> DataFinder:
    pattern = re.compile(f"{_START}(?:{form.pattern}){_END}")
    words = re.compile(rf"(?<![a-z])(?:{form.words})(?![a-z])", re.IGNORECASE) if form.words else None
    is_valid = import_module(f"stdnum.{form.module}").is_valid if form.module else None

    def find(text: str) -> Iterator[tuple[DataKind, int, int]]:
        for found in pattern.finditer(text):
            if (is_valid is None or is_valid(found[0])) and (words is None or _has_word(text, found.span(), words)):
                yield form.kind, *found.span()

    return find


def _has_word(text: str, span: tuple[int, int], words: re.Pattern[str]) -> bool:
    start, end = span
    before, after = text[max(0, start - _WORDS_BEFORE) : start], text[end : end + _WORDS_AFTER]
    return words.search(before) is not None or words.search(after) is not None


def _build_vat_finder(prefixes: Iterable[str], is_valid: Callable[[str], bool]) -> DataFinder:
    pattern = re.compile(rf"{_START}(?:{'|'.join(prefixes)})(?:[ .-]?[0-9A-Z+*]{{1,14}}){{1,5}}")

    def find(text: str) -> Iterator[tuple[DataKind, int, int]]:
        for found in pattern.finditer(text):
            start = found.start()
            ends = [each.end() for each in _VAT_GROUP.finditer(text, start + 2, found.end())]
            for end in reversed(ends):  # words in capitals may follow
                number = text[start:end]
                next_char = text[end : end + 1]
                if next_char.isascii() and next_char.isalnum():
                    continue
                if sum(map(str.isalnum, number)) >= _MIN_VAT_CHARS and is_valid(number):
                    yield DataKind.TAX_ID, start, end
                    break

    return find


def _build_phone_finder(phonenumbers: ModuleType, region: str | None) -> DataFinder:
    """Return a finder of phone numbers: in international form, or in the national form of a region.

    A national number has to be written in the groups of its region; digits in a row are one only beside a word such as
    "phone".
    """
    leniency = phonenumbers.Leniency.VALID if region is None else phonenumbers.Leniency.STRICT_GROUPING

    def find(text: str) -> Iterator[tuple[DataKind, int, int]]:
        if _SEVEN_DIGITS.search(text) is None or (region is None and "+" not in text):
            return
        for found in phonenumbers.PhoneNumberMatcher(text, region, leniency=leniency, max_tries=_PHONE_TRIES):
            span = found.start, found.end
            if region is None or not found.raw_string.isdigit() or _has_word(text, span, _PHONE_WORDS):
                yield DataKind.PHONE, *span

    return find
