"""Phone, tax and bank numbers of countries: tables of what is found, and of what only looks like it."""

import sys

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.core.sensitive_text import find_sensitive
from agentfsm.guards import exit_filter, load_country_data, redact_sensitive
from agentfsm.testing import ScriptedModel

# Countries, and texts with one number of the kind, between brackets where it does not fill the text. All are invented,
# or numbers that the authorities publish as examples.
WITH_DATA = {
    ("tax_id", "EU"): (
        "VAT [DE136695976] please",
        "[DE 136 695 976] AND MORE",
        "USt-ID: [ATU13585627], Wien",
        "[BE0403019261]",
        "[FR 83 404 833 048]",
        "[NL004495445B01] x",
        "[IT00743110157]",
        "[ESA13585625]",
        "[PL8567346215]",
        "[SE123456789701]",
        "[EL094259216]",
        "[IE6433435F]",
        "[PT501964843]",
        "RF [RCCMNL83S18D969H]",
        "NIR [2 95 10 99 126 111 93]",
        "DNI [54362315K]",
        "NIE: [X-2482300W]",
        "BSN [111222333]",
        "[85.07.30-033.28]",
        "PESEL [44051401359]",
        "Steuer-ID [36 574 261 809]",
    ),
    ("tax_id", "US"): (
        "SSN [536-90-4399]",
        "my social security number is [536904399]",
        "ITIN: [912-90-3456].",
        "[912903456] is her ITIN",
        "EIN [91-1144442]",
    ),
    ("routing_number", "US"): ("routing number [111000025]", "ABA: [021000021]"),
    ("phone", "US"): ("call [+1 415 555 2671]", "[(415) 555-2671]", "[415-555-2671], please", "tel [4155552671]"),
    ("tax_id", "GB"): ("[GB 980 7806 84]", "[GB980780684]", "NINO [AB123456C]", "[JG 10 37 59 A]", "UTR [1955839661]"),
    ("phone", "uk"): ("[020 7946 0958] now", "phone: [02079460958]", "[07911 123456]", "[+44 7911 123456]"),
    ("phone", "EU"): ("[+49 30 901820]", "[+33142685300]", "[+353 1 234 5678]"),
    ("phone", "DE"): ("[030 901820]", "[+49 30 901820]"),
    ("phone", "FR"): ("[01 42 68 53 00]",),
}
FOUND = [(*names, text) for names, texts in WITH_DATA.items() for text in texts]
EVERYWHERE = ("US", "GB", "EU", "DE", "FR")

WITHOUT_DATA = (
    "2024-01-15 13:45:30",
    "15/01/2024, 01.02.2023, 12-31-1999",
    "20240115134530",
    "Order 4155552671",
    "Order number: 02079460958",
    "order no. 111000025",
    "Order 123-1234567-1234567",
    "uuid 123e4567-e89b-12d3-a456-426614174000",
    "8d777f385d3dfec8815d20f7496026dc",
    "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "ISBN 978-3-16-148410-0",
    "192.168.100.200",
    "10.0.0.1:8080",
    "1700000000000",
    "version 1.23.456.7890",
    "invoice INV-2024-000123",
    "SKU AB-123456-C",
    "DE123456789",
    "GB123456789",
    "IT 2024 and BE 2025",
    "SSN 000-12-3456",
    "SSN 123-45-67890",
    "666-12-3456",
    "routing number 123456789",
    "1955839661",
    "36574261809",
    "54362315K",
    "3.14159265358979323846",
    "price 1,234,567,890",
    "pages 415-555",
    "ratio 555-2671",
    "BG123456A, GB123456C",
    "2 95 10 99 126 111 94",
    "flight BA2490 at 10:15, gate 12",
    "0x4155552671",
    "2024-W03, Q3-2024",
    "tracking 1Z999AA10123456784",
    "9400 1000 0000 0000 0000 00",
    "lat 51.5073509, lon -0.1277583",
    "000-000-0000",
)
# Texts without data in which something is found: their form is that of a number of the country.
MISTAKEN = (("phone", "ticket 202-401-1512"), ("tax_id", "part AB123456C"), ("tax_id", "batch 536-90-4399"))


@pytest.fixture(autouse=True)
def _packages():
    pytest.importorskip("phonenumbers")
    pytest.importorskip("stdnum")


def test_numbers_of_named_countries_are_found():
    """Each is found whole, and only if its country is named; any other last digit of a VAT number is no number."""
    for kind, country, marked in FOUND:
        text = marked.replace("[", "").replace("]", "")
        spans = find_sensitive(text, finders=load_country_data(country))
        begin, end = marked.index("["), marked.index("]") - 1
        assert [(each.kind, each.start, each.end) for each in spans] == [(kind, begin, end)], marked
        assert redact_sensitive(text) == text
    finders = load_country_data("EU")
    assert not any(find_sensitive(f"DE13669597{digit}", finders=finders) for digit in "012345789")


def test_the_figures_of_the_table():
    """How many texts are decided on rightly; docs/guards.md has these figures."""
    finders = load_country_data(*EVERYWHERE)
    assert (len(FOUND), len(WITHOUT_DATA) + len(MISTAKEN)) == (47, 43)
    assert [text for text in WITHOUT_DATA if find_sensitive(text, finders=finders)] == []
    assert [find_sensitive(text, finders=finders)[0].kind for _, text in MISTAKEN] == [kind for kind, _ in MISTAKEN]


async def test_the_exit_filter_of_a_country():
    """Numbers of its countries are replaced; those that the user typed, in whatever form, and asked for are not."""
    guards = [exit_filter(countries=["US", "GB"])]
    answer = "SSN 536-90-4399, phone (415) 555-2671, UTR 1955839661, DE136695976"
    none = "SSN [TAX_ID_REDACTED], phone [PHONE_REDACTED], UTR [TAX_ID_REDACTED], DE136695976"
    for prompt, left in (
        ("Who is she? Her tax number?", none),
        ("Her phone number?", none.replace("[PHONE_REDACTED]", "(415) 555-2671")),
        ("My SSN: 536904399", none.replace("[TAX_ID_REDACTED]", "536-90-4399", 1)),
    ):
        assert (await Agent(ScriptedModel(answer), guards=guards).run(prompt)).output == left
    asking = exit_filter(countries=["US", "GB"], requested=["tax_id"])
    run = await Agent(ScriptedModel(answer), guards=[asking]).run("Her tax numbers?")
    assert run.output == answer.replace("(415) 555-2671", "[PHONE_REDACTED]")


def test_wrong_countries_and_missing_packages(monkeypatch):
    """The error names the country, or the extra."""
    with pytest.raises(MisuseError, match="'XX' is unknown"):
        exit_filter(countries=["XX"])
    load_country_data.cache_clear()
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    with pytest.raises(MisuseError, match=r"agentfsm\[pii\]"):
        exit_filter(countries="US")


@pytest.mark.parametrize("piece", ["a", "1 ", "1", "+1", "GB1 ", "(1) ", "415-555 ", "DE 1A "])
def test_long_texts(piece):
    """5,000 characters that begin like numbers again and again are searched to their end."""
    text = f"{piece * (5_000 // len(piece))}\nVAT DE136695976"
    assert find_sensitive(text, {"tax_id"}, finders=load_country_data("EU", "GB"))[-1].end == len(text)
