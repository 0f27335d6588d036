"""Docstrings are in plain technical English: no words of a private dialect, and no title that is a relative clause."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "agentfsm"
FILES = sorted(PACKAGE.rglob("*.py"))

AVOIDED = re.compile(
    r"\b(whoever|whatsoever|somebody|anybody|nobody|told|tells?|shall|thereof"
    r"|(?<!there )(?:is|are) no (?!longer|more))\b",
    re.IGNORECASE,
)
RELATIVE = re.compile(r"(What|Which|Who|Whose|Whom|How|Where|When|That|As|So)\b(?! `)(?! (many|much)\b)")
# Times "what" may stand in 1,000 lines of the package, comments and messages included. Anyio, httpx and trio: up to 2.
WHAT_PER_1000_LINES = 2


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Return the line and text of each docstring in a file, those of attributes included."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_are_plain(path):
    """None has an avoided word, or opens with a relative clause."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {words.group()!r} in {text[:60]!r}"
        for line, text in docstrings(path)
        for words in [AVOIDED.search(text) or RELATIVE.match(text)]
        if words
    ]
    assert not found, "\n".join(["", *found])


def test_the_word_what_is_rare():
    """It is the mark of sentences that do not name their subject."""
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    assert 1000 * len(re.findall(r"\bwhat\b", text, re.IGNORECASE)) / text.count("\n") < WHAT_PER_1000_LINES
