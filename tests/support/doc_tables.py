"""The tables of the documentation, and what their cells name."""

import re
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read_table(page: str, header: str) -> list[list[str]]:
    """Return the cells of the rows of each table of a page whose header row begins with these cells.

    Args:
        page: The path of the page from the root, or from docs/.
        header: The first cells, as they are written: `"field | default"`.
    """
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    tables = path.read_text(encoding="utf-8").split(f"\n| {header} |")[1:]
    assert tables, f"{page} has no table '| {header} |'"
    lines = [line for table in tables for line in takewhile(lambda line: line[:1] == "|", table.splitlines()[2:])]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def read_names(cell: str) -> list[str]:
    """Return the name that begins each code span of a cell, or else its words between commas."""
    spans = re.findall(r"`[\"@]?(/?[\w.+-]+)", cell)
    return [span.rstrip(".") for span in spans] or cell.split(", ")
