"""The pictures in docs are those of the table, of the example of the roles, of journals, and of a terminal."""

from pathlib import Path

import pytest

from agentfsm import TABLE
from tests.draw import PAGES, ROLES_PAGE, drawn, run_roles, with_roles
from tests.draw_cast import VARYING, draw_kill
from tests.draw_svg import ARROWS, DOCS, PICTURES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_picture_is_the_tables(path: Path) -> None:
    """What `make diagram` would write is what stands there."""
    page = path.read_text()
    assert "<!-- machine -->" in page
    assert drawn(page) == page, "the picture is out of date: run `make diagram`"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_picture_of_the_roles_is_drawn_by_their_example(backend: str) -> None:
    """The four agents run, and the ways that their journals have are the arrows."""
    page = ROLES_PAGE.read_text()
    roles = run_roles(backend)
    assert {way.split("|")[1] for way in roles.splitlines()[1:]} >= {"accept", "retry_step", "replan", "escalate"}
    assert with_roles(page, roles) == page, "the picture is out of date: run `make diagram`"


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_site_are_drawn_by_their_program(name: str) -> None:
    """Timelines are of the journals of runs, in virtual time."""
    assert (DOCS / name).read_text() == PICTURES[name](), "the picture is out of date: run `make diagram`"


def test_the_picture_of_the_kill_is_what_happens() -> None:
    """An agent that is killed again while it pays, and resumed, prints the same but for ids and times."""
    committed = (DOCS / "kill-9.svg").read_text(encoding="utf-8")
    assert VARYING.sub("*", draw_kill()) == VARYING.sub("*", committed), "run `make diagram`, and look what has changed"


def test_the_picture_of_the_machine_has_each_arrow() -> None:
    """Between two different states; those that stay in a state are counted."""
    assert set(ARROWS) == {(state, end) for state, row in TABLE.items() for end in row.values() if end is not state}
