"""Figures of the docs about recordings: how many there are, and how far our count of tokens is from what was billed."""

from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.cassettes import Wire, recordings
from tests.support.doc_tables import read_table
from tests.support.token_errors import measure, summarise

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def errors():
    """What is found in the recordings."""
    return summarise(measure())


def test_the_errors_are_those_of_the_docs(errors):
    """Each row of the table is measured anew."""
    stated = {
        tuple(row[0].split(", ")): tuple(int(cell.removesuffix(" %")) for cell in row[1:])
        for row in read_table("context.md", "count")
    }
    assert {key: (number, *map(round, rest)) for key, (number, *rest) in errors.items()} == stated


def test_tools_as_their_provider_shows_them_are_counted_better_than_as_json(errors):
    """By the median, for either provider; and a second request is counted with the bill of the first."""
    for family in ("Claude", "OpenAI"):
        plain, shown, corrected = (abs(errors[family, count][2]) for count in ("plain", "shown", "corrected"))
        assert shown < 5
        assert corrected < plain > 10


# By wire and host: how the table of docs/models.md goes on after the name of the provider.
STATED = {
    (Wire.CHAT, "api.openai.com"): "| OpenAI, chat completions | {} recorded replies;",
    (Wire.CHAT, "api.deepseek.com"): "| DeepSeek | {} recorded replies;",
    (Wire.CHAT, "traceloop-stg.openai.azure.com"): "| Azure OpenAI | {} recorded replies,",
    (Wire.CHAT, "localhost"): "| vLLM, Ollama, Together, TGI | {} recorded replies of servers on one's own machine;",
    (Wire.RESPONSES, "api.openai.com"): "| OpenAI, Responses | {} recorded replies,",
    (Wire.RESPONSES, None): "recorded replies, {} without their address;",
    (Wire.MESSAGES, "api.anthropic.com"): "| Anthropic | {} recorded replies;",
    (Wire.MESSAGES, "bedrock-runtime.us-east-1.amazonaws.com"): "| Bedrock (Anthropic's body) | {} recorded replies",
}


def test_the_recordings_are_as_many_as_the_docs_say():
    """By provider, errors among them."""
    found = Counter((each.wire, urlsplit(each.url).hostname) for each in recordings())
    page = (DOCS / "models.md").read_text()
    assert [row for key, row in STATED.items() if row.format(found[key]) not in page] == []


# Prefix of a model -> wire, host, and cells of the table by what a recording shows.
TRIED = {
    "openai": (Wire.CHAT, {"api.openai.com"}),
    "openai-responses": (Wire.RESPONSES, {"api.openai.com", None}),
    "anthropic": (Wire.MESSAGES, {"api.anthropic.com", None}),
    "azure": (Wire.CHAT, {"traceloop-stg.openai.azure.com"}),
    "deepseek": (Wire.CHAT, {"api.deepseek.com"}),
    "ollama": (Wire.CHAT, set()),
}


@pytest.mark.parametrize("prefix", TRIED)
def test_a_cell_that_says_recorded_has_a_recording(prefix):
    """Text, streams, calls and errors; and each of these that is recorded is said to be."""
    (cells,) = [row[1:] for row in read_table("models.md", "tried") if row[0] == f"`{prefix}:`"]
    text, stream, calls, _, errors = [cell == "recorded" for cell in cells]
    wire, hosts = TRIED[prefix]
    ours = [each for each in recordings() if each.wire is wire and urlsplit(each.url).hostname in hosts]
    answers = [each for each in ours if each.status == 200]
    asked = [each for each in answers if each.request.get("tools")]
    found = (
        any(not each.is_streamed for each in answers),
        any(each.is_streamed for each in answers),
        bool(asked),
        any(each.status >= 400 for each in ours),
    )
    assert (text, stream, calls, errors) == found
