"""`agentfsm index`: documents are added, found, listed, removed and indexed again."""

import anyio
import pytest

from agentfsm.memory import Memory
from tests.support.embedding_server import serving_embeddings

TEA = "# Tea\n\nGreen tea needs 80 degrees.\n\n# Coffee\n\nCoffee needs 92 degrees.\n"


@pytest.fixture
def filled(here):
    """A memory with two documents of Ann."""
    (here.folder / "tea.md").write_text(TEA, encoding="utf-8")
    (here.folder / "milk.md").write_text("\ufeff牛奶应该冷藏", encoding="utf-8")
    added = here("index", "add", "tea.md", "milk.md", "--user", "ann")
    assert added == "tea.md: 2 new (chunks)\nmilk.md: 1 new (chunks)\n"
    return here


def test_documents_are_found(filled):
    """For their owner only, and without other items."""

    async def act():
        memory = Memory(filled.folder / ".agentfsm" / "memory.db")
        await memory.for_(user="ann").remember("Ann drinks green tea")
        await memory.aclose()

    anyio.run(act)
    [line] = filled("index", "search", "green tea", "--user", "ann", "--limit", "1").splitlines()
    assert line.endswith("document  tea.md > Tea Green tea needs 80 degrees.")
    assert "牛奶应该冷藏" in filled("index", "search", "冷藏", "--user", "ann")
    assert filled.json("index", "search", "green tea", "--user", "bob") == {"items": []}
    assert filled("index", "search", "green tea") == ""
    assert "nothing found" in filled.err


def test_a_new_version_writes_what_changed(filled):
    """The old one is no longer found; a removed document is not, either."""
    (filled.folder / "tea.md").write_text(TEA.replace("92", "94"), encoding="utf-8")
    assert filled("index", "add", "tea.md", "--user", "ann") == "tea.md: 1 new, 1 kept, 1 gone (chunks)\n"
    assert "92" not in filled("index", "search", "Coffee", "--user", "ann")
    assert filled("index", "list", "--user", "ann") == "     1  milk.md\n     2  tea.md\n"
    assert filled("index", "remove", "milk.md", "--user", "ann") == "milk.md: removed 1 chunk\n"
    assert filled.json("index", "list", "--user", "ann") == {"documents": [{"name": "tea.md", "chunks": 2}]}
    assert filled("index", "rebuild") == "indexed 6 items\n"
    assert "94" in filled("index", "search", "Coffee", "--user", "ann")
    assert filled.json("index", "remove", "tea.md", "--forget", "--user", "ann") == {"chunks": {"tea.md": 4}}
    assert b"degrees" not in (filled.folder / ".agentfsm" / "memory.db").read_bytes()
    assert filled("index", "list", "--user", "ann") == ""
    added = filled("index", "add", "tea.md", "--user", "ann")
    assert added == "tea.md: 2 forgotten before (chunks); a forgotten text is not found: add it under another name\n"
    filled("index", "remove", "tea.md", "--user", "ann", code=2)
    assert "no document 'tea.md'" in filled.err


def test_files_that_cannot_be_added(here):
    """Nothing of them is, and no memory is made."""
    (here.folder / "tea.md").write_text(TEA, encoding="utf-8")
    (here.folder / "tea.png").write_bytes(b"\x89PNG")
    for file, reason in (("tea.png", "not a text in UTF-8"), ("gone.md", "No such file"), (".", "Is a directory")):
        here("index", "add", "tea.md", file, code=2)
        assert reason in here.err
    here("index", "add", "tea.md", "--server", "notes", code=2)
    assert "give both" in here.err
    here("index", "search", "tea", code=2)
    assert "no memory .agentfsm/memory.db" in here.err


def test_only_new_chunks_are_embedded(here, monkeypatch):
    """With an embedder, which a rebuild asks for all items again; one that is unknown is refused."""
    (here.folder / "tea.md").write_text(TEA, encoding="utf-8")
    options = ("--embedder", "openai:text-embedding-3-small")
    with serving_embeddings(dims=1536) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        here("index", "add", "tea.md", *options)
        assert sorted(server.requests.pop()["input"])[1] == "tea.md > Tea\nGreen tea needs 80 degrees."
        (here.folder / "tea.md").write_text(TEA.replace("92", "94"), encoding="utf-8")
        here("index", "add", "tea.md", *options)
        assert "tea.md > Tea\nGreen tea needs 80 degrees." not in server.requests.pop()["input"]
        assert "94 degrees" in here("index", "search", "unrelated", *options)
        server.requests.clear()
        assert here("index", "rebuild", *options) == "indexed 4 items\n"
        assert sum(len(request["input"]) for request in server.requests) == 4
    here("index", "add", "tea.md", "--embedder", "nobody:x", code=2)
    assert "does not name an embedder" in here.err
