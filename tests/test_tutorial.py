"""The tutorial, as a newcomer goes through it: the files are saved and the commands run in one folder, page by page."""

import re
import shutil
import socket
import sys
from urllib.parse import urlsplit

import pytest

from tests.support.bare_shell import BARE_PATH, execute_bare
from tests.support.command_line import write_warm_command
from tests.support.tutorial import BLOCK, PAGES, ROOT, execute, list_variables


@pytest.fixture
def database(shared_postgres, postgres_desk):
    """Return the URL of a database of its own."""
    postgres_desk.execute("CREATE DATABASE shop")
    yield urlsplit(shared_postgres)._replace(path="/shop").geturl()
    postgres_desk.execute("DROP DATABASE shop WITH (FORCE)")


def is_like(out, shown):
    """Return whether a text is the one of a page, in which `...` stands for any text."""
    return re.fullmatch(".*?".join(re.escape(part) for part in shown.split("...")), out, re.DOTALL) is not None


@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial uses curl")
def test_the_pages_do_what_they_say(tmp_path, database):
    """Each command prints what stands below it, in the folder that the pages before have left."""
    folder, variables = tmp_path / "shop", list_variables()
    folder.mkdir()
    warm = write_warm_command(tmp_path / "bin")
    follow_pages(folder, database, variables | {"PATH": f"{warm}:{variables['PATH']}"})


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial uses curl")
def test_the_pages_in_an_environment_of_a_newcomer(tmp_path, database):
    """The first page's own commands install everything that the others need, where there is nothing but a system."""
    [install] = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/tutorial/index.md").read_text(), re.DOTALL)
    python = f"ln -s {sys.base_prefix}/bin/python3 bin/python"  # the pages say `python`, as the environments have it
    execute_bare(
        tmp_path, f"mkdir bin && {python} && PATH=$PWD/bin:$PATH\n{install.replace('/path/to/agentfsm', str(ROOT))}"
    )
    folder = tmp_path / "shop"
    path = f"{folder}/.venv/bin:{BARE_PATH}"
    follow_pages(folder, database, {"PATH": path, "HOME": str(tmp_path / "no-home"), "USER": "newcomer"})


def follow_pages(folder, database, environment):
    """Save the files of all pages and execute their commands, in order."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = str(bound.getsockname()[1])
    assert len(PAGES) == 8
    for page in PAGES:
        given = {"AGENTFSM_STORE": database} if "AGENTFSM_STORE" in page.read_text(encoding="utf-8") else {}
        for block in BLOCK.finditer(page.read_text(encoding="utf-8").replace("8000", port)):
            if block["name"]:
                (folder / block["name"]).write_text(block["code"], encoding="utf-8")
                continue
            out = execute(block["commands"], folder, environment | given)
            assert is_like(out, block["out"] or ""), f"{page.name}\n{block['commands']}---- prints\n{out}"
