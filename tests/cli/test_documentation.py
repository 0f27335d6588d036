"""`agentfsm docs`: the pages and the guide for coding agents, which are parts of the package."""

import re

import yaml

from agentfsm.cli.commands.documentation import PACKAGE, list_topics

SKILL = (PACKAGE / "SKILL.md").read_text(encoding="utf-8")


def test_the_guide_is_a_skill(here):
    """It has the front matter of https://agentskills.io/specification, and is short enough to be read as a whole."""
    assert here("docs") == SKILL
    _, front, body = SKILL.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["name"] == PACKAGE.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 1 <= len(fields["description"]) <= 1024
    assert len(body.splitlines()) < 500


def test_the_guide_names_pages_that_exist():
    """As the arguments of `agentfsm docs`."""
    named = re.findall(r"`([\w/-]+)`", SKILL.partition("## More pages")[2].partition("for example:")[2])
    assert len(named) > 10
    assert set(named) <= set(list_topics())


def test_a_page(here):
    """By its name, with or without the ending; and a list of all."""
    text = list_topics()["failures/crash"].read_text(encoding="utf-8")
    assert here("docs", "failures/crash") == here("docs", "failures/crash.md") == text
    assert here.json("docs", "--list")["topics"] == here("docs", "--list").split() == list(list_topics())


def test_a_page_that_does_not_exist(here):
    """The error names those with similar names."""
    here("docs", "tool", code=2)
    assert "there is no page 'tool': did you mean tools" in here.err
