"""The tokens that we count in recorded requests with tools, against what their providers billed."""

import re
from pathlib import Path

import pytest

from tests.support.token_errors import measure, summarise

PAGE = Path(__file__).parents[2] / "docs" / "context.md"
ROW = re.compile(r"^\| (Claude|OpenAI), (\w+) \| (\d+) \| ([-+]\d+) % \| ([-+]\d+) % \| ([-+]\d+) % \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def errors():
    """What is found in the recordings."""
    return summarise(measure())


def test_the_errors_are_those_of_the_docs(errors):
    """Each row of the table is measured anew."""
    stated = {(family, count): tuple(map(int, rest)) for family, count, *rest in ROW.findall(PAGE.read_text())}
    assert {key: (number, *map(round, rest)) for key, (number, *rest) in errors.items()} == stated


def test_tools_as_their_provider_shows_them_are_counted_better_than_as_json(errors):
    """By the median, for either provider; and a second request is counted with the bill of the first."""
    for family in ("Claude", "OpenAI"):
        plain, shown, corrected = (abs(errors[family, count][2]) for count in ("plain", "shown", "corrected"))
        assert shown < 5
        assert corrected < plain > 10
