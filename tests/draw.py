"""Draw the machine into docs from the table, and pictures and tables from the programs that make them.

`make diagram` does so, and tests compare with what it would write: the machine, the roles of an example, the timelines,
a terminal, and the tables of what becomes of a run whose program has changed.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import anyio

from agentfsm.core import machine as diagram
from tests.draw_cast import VARYING, draw_kill
from tests.draw_svg import PICTURES
from tests.support.change_tables import PAGE, build_tables, write_tables
from tests.support.example_modules import example

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "docs" / "architecture.md",)
_PICTURE = re.compile(r"<!-- machine -->\n.*?<!-- /machine -->", re.DOTALL)


def drawn(page: str) -> str:
    """Return the page with the picture as the table has it."""
    picture = f"<!-- machine -->\n```mermaid\n{diagram.mermaid()}\n```\n<!-- /machine -->"
    return _PICTURE.sub(lambda _: picture, page)


ROLES_PAGE = ROOT / "docs" / "patterns.md"
_ROLES = re.compile(r"<!-- roles -->\n.*?<!-- /roles -->", re.DOTALL)


def run_roles(backend: str = "asyncio") -> str:
    """Return the diagram of the roles as their example draws it at its end."""
    with redirect_stdout(io.StringIO()):
        drawn_by_example: str = anyio.run(example("four_roles").main, backend=backend)
    return drawn_by_example


def with_roles(page: str, roles: str) -> str:
    """Return the page with the diagram of the roles."""
    return _ROLES.sub(lambda _: f"<!-- roles -->\n```mermaid\n{roles}\n```\n<!-- /roles -->", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(drawn(path.read_text()))
    ROLES_PAGE.write_text(with_roles(ROLES_PAGE.read_text(), run_roles()))
    for name, draw_picture in PICTURES.items():
        (ROOT / "docs" / name).write_text(draw_picture())
    if VARYING.sub("*", kill := draw_kill()) != VARYING.sub("*", (ROOT / "docs" / "kill-9.svg").read_text()):
        (ROOT / "docs" / "kill-9.svg").write_text(kill)
    PAGE.write_text(write_tables(PAGE.read_text(), anyio.run(build_tables)))
