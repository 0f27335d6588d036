"""Draw the machine into README and docs from the table: `make diagram`. Tests compare with what it would write."""

from __future__ import annotations

import re
from pathlib import Path

from agentfsm.core import diagram

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "architecture.md")
_PICTURE = re.compile(r"<!-- machine -->\n.*?<!-- /machine -->", re.DOTALL)


def drawn(page: str) -> str:
    """Return the page with the picture as the table has it."""
    picture = f"<!-- machine -->\n```mermaid\n{diagram.mermaid()}\n```\n<!-- /machine -->"
    return _PICTURE.sub(lambda _: picture, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(drawn(path.read_text()))
