"""How the documentation says that agentfsm is installed, as long as no index has it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
# The page that says when this becomes true.
PUBLISHING = ROOT / "docs" / "publishing.md"


def test_nothing_is_installed_from_an_index_that_does_not_have_it():
    """No command takes agentfsm itself by its bare name; with an extra, it adds packages to one that is installed."""
    bare = re.compile(r"pip install (?:-U |--upgrade )?'?agentfsm(?![\w[\-])")
    found = [path.name for path in PAGES if path != PUBLISHING and bare.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_a_new_environment_gets_agentfsm_from_a_path():
    """A block of commands that makes an environment installs agentfsm from a folder, a wheel or a repository."""
    for path in PAGES:
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            if "-m venv" in block:
                assert not re.search(r"pip install (?:\S+ )*'?agentfsm\[[^]]*\]'?(?! @)", block), path
