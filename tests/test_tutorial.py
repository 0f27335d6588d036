"""The tutorial, as a newcomer goes through it: the files are saved and the commands run in one folder, page by page."""

import re
import shutil
import socket
from urllib.parse import urlsplit

import pytest

from tests.support.tutorial import BLOCK, PAGES, execute


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
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = str(bound.getsockname()[1])
    assert len(PAGES) == 8
    for page in PAGES:
        given = {"AGENTFSM_STORE": database} if "AGENTFSM_STORE" in page.read_text(encoding="utf-8") else {}
        for block in BLOCK.finditer(page.read_text(encoding="utf-8").replace("8000", port)):
            if block["name"]:
                (tmp_path / block["name"]).write_text(block["code"], encoding="utf-8")
                continue
            out = execute(block["commands"], tmp_path, **given)
            assert is_like(out, block["out"] or ""), f"{page.name}\n{block['commands']}---- prints\n{out}"
