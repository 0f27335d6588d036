"""The picture in README and docs is the table's."""

from pathlib import Path

import pytest

from tests.draw import PAGES, drawn


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_picture_is_the_tables(path: Path) -> None:
    """What `make diagram` would write is what stands there."""
    page = path.read_text()
    assert "<!-- machine -->" in page
    assert drawn(page) == page, "the picture is out of date: run `make diagram`"
