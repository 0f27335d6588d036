"""Vectors of a memory: what is embedded and when, failing embedders, and the file of the SQLite index."""

import sqlite3
import subprocess
import sys

import anyio
import anyio.lowlevel
import apsw
import pytest

from agentfsm import Agent, MisuseError
from agentfsm.core.events import Recalled
from agentfsm.memory import Memory, SQLiteIndex
from agentfsm.memory import vector_file as module
from agentfsm.memory.vector_file import load_apsw, quantise
from agentfsm.ports.memory_items import ItemFilter, MemoryIndex, Namespace
from agentfsm.stores import SQLiteStore
from agentfsm.testing import HashEmbedder, ScriptedModel
from agentfsm.testing.memory_conformance import OF_ANN, VectorIndexConformance, build_item
from tests.support.embedding_server import serving_embeddings
from tests.support.sqlite_indexes import SQLiteIndexes


class TestSQLiteVectors(SQLiteIndexes, VectorIndexConformance):
    """The SQLite index passes the kit of vectors."""


@pytest.fixture
async def memory(tmp_path):
    memory = Memory(tmp_path / "memory.db", embedder=HashEmbedder())
    yield memory
    await memory.aclose()


async def test_a_search_has_both_rankings(memory):
    """An item may be found by words, by meaning or both, and each text is embedded once."""
    ann = memory.for_(user="ann")
    await memory.for_(user="bob").remember("a violin and a cello")
    item = await ann.remember("a violin and a cello")
    await ann.remember("something else")
    found = await ann.recall("violin")
    assert found[0].item.id == item.id
    assert found[0].why.keys() >= {"text", "vector"}
    assert found[0].why["vector"] == 1
    assert memory.embedder.texts == ["a violin and a cello", "something else", "violin"]
    assert memory.embedding_usage.input_tokens == 8


class SlowEmbedder(HashEmbedder):
    """Embeds items only once it is allowed to, and single queries always."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.may_go_on = anyio.Event()

    async def embed(self, texts):
        if len(texts) > 1:
            await self.may_go_on.wait()
        return await super().embed(texts)


async def test_another_model_embeds_in_the_background(memory):
    """The search goes on by words, and never with vectors of the earlier model, until all items are embedded again."""
    for text in ("a violin", "a cello"):
        await memory.remember(text)
    other = Memory(memory.index, embedder=SlowEmbedder(name="other", dims=8))
    assert "vector" not in (await other.recall("violin"))[0].why
    await other.remember("a viola")  # does not wait either
    assert "vector" not in (await memory.recall("violin"))[0].why  # the earlier model has no vectors any more
    other.embedder.may_go_on.set()
    while await other.index.read_unembedded(1):
        await anyio.lowlevel.checkpoint()
    assert "vector" in (await other.recall("violin"))[0].why
    assert {"a violin", "a cello", "a viola"} <= {*other.embedder.texts}
    assert await other.index.read_unembedded(1) == []


async def test_closing_ends_the_task_in_the_background(memory, tmp_path):
    """What is not embedded then waits for the next start."""
    for text in ("a violin", "a cello"):
        await memory.remember(text)
    await memory.aclose()
    other = Memory(tmp_path / "memory.db", embedder=SlowEmbedder(name="other"))
    await other.recall("violin")
    await other.aclose()
    again = Memory(tmp_path / "memory.db", embedder=HashEmbedder(name="other"))
    await again.remember("a viola")
    assert again.embedder.texts == ["a violin", "a cello", "a viola"]
    await again.aclose()


async def test_reindex_embeds_all_items_again(memory):
    """It waits until all items have a vector of the new model."""
    await memory.remember("text")
    other = Memory(memory.index, embedder=HashEmbedder(dims=8))
    assert await other.reindex() == 1
    assert (await other.recall("text"))[0].why["vector"] == 1


async def test_an_embedder_of_another_form_is_refused(memory, monkeypatch):
    """The error says what to return."""

    async def embed(texts):
        return [[1.0] for _ in texts]

    monkeypatch.setattr(memory.embedder, "embed", embed)
    with pytest.raises(MisuseError, match=r"returned list: return .*Embeddings\(vectors="):
        await memory.for_(user="ann").remember("green tea")


async def test_the_search_by_words_goes_on_without_the_embedder(memory):
    """Items are kept and found while the embedder is down, and embedded with the next one."""
    memory.embedder.fault = OSError("away")
    await memory.remember("a violin")
    assert "vector" not in (await memory.recall("violin"))[0].why
    memory.embedder.fault = None
    await memory.remember("a cello")
    assert memory.embedder.texts == ["a violin", "a cello"]


@pytest.mark.parametrize("fault", [None, OSError("away")])
async def test_a_run_records_the_embedder(memory, fault):
    """The event of the search has the usage of the embedder, or the reason why only words were searched."""
    await memory.for_(user="ann").remember("a violin")
    memory.embedder.fault = fault
    async with Agent(ScriptedModel("yes"), memory=memory) as agent:
        run = await agent.run("Who plays the violin?", user="ann")
        (event,) = [each for each in await agent.history(run.id) if isinstance(each, Recalled)]
    assert [item.text for item in event.items] == ["a violin"]
    if fault is None:
        assert (event.fault, event.model, event.usage.input_tokens) == ("", "hash", 4)
    else:
        assert (event.fault, event.model) == ("the embedder hash failed: OSError: away", "hash")


async def test_an_embedder_by_name(tmp_path, monkeypatch):
    """The name of a provider and its model make an embedder, as for models."""
    with serving_embeddings(dims=768) as server:
        monkeypatch.setenv("OLLAMA_BASE_URL", server.base_url)
        memory = Memory(tmp_path / "memory.db", embedder="ollama:nomic-embed-text")
        await memory.remember("a violin")
        assert (await memory.recall("a violin"))[0].why["vector"] == 1
        assert [request["input"] for request in server.requests] == [["a violin"], ["a violin"]]
        await memory.embedder.aclose()
        await memory.aclose()
    with pytest.raises(MisuseError, match="does not name an embedder"):
        Memory(embedder="nothing")


def test_an_index_without_vectors_is_refused():
    """An embedder that could not be used is refused."""

    class Plain(MemoryIndex):
        pass

    with pytest.raises(MisuseError, match="keeps no vectors"):
        Memory(Plain(), embedder=HashEmbedder())


async def test_the_extra_is_named(memory, monkeypatch):
    """Without the extra the error names it; and nothing is forgotten whose vector would remain."""
    item = await memory.remember("a violin")

    def missing(name):
        raise ModuleNotFoundError(name, name=name)

    monkeypatch.setattr(module, "import_module", missing)
    with pytest.raises(ImportError, match=r"agentfsm\[vec\]"):
        load_apsw()
    with pytest.raises(ImportError, match=r"agentfsm\[vec\]"):
        await memory.forget([item.id])
    assert await memory.read() == [item]


def read_all(folder):
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def test_forgetting_leaves_no_vector(memory, tmp_path):
    """No file has the bytes of a vector after its item was forgotten."""
    ann = memory.for_(user="ann")
    items = [await ann.remember(f"text {number}") for number in range(40)]
    vector = quantise((await memory.embedder.embed(["text 7"])).vectors[0])
    assert vector in read_all(tmp_path)
    await ann.forget([items[7].id])
    assert vector not in read_all(tmp_path)
    assert quantise((await memory.embedder.embed(["text 8"])).vectors[0]) in read_all(tmp_path)


async def test_a_lost_file_is_made_again(memory, tmp_path):
    """Vectors are derived: without their file all items are embedded again, at the next start."""
    await memory.remember("a violin")
    await memory.aclose()
    for path in tmp_path.glob("*.vectors*"):
        path.unlink()
    again = Memory(tmp_path / "memory.db", embedder=HashEmbedder())
    await again.remember("a cello")
    assert again.embedder.texts == ["a violin", "a cello"]
    assert (await again.recall("violin"))[0].why["vector"] == 1
    await again.aclose()


async def test_two_libraries_do_not_open_one_file(memory, tmp_path):
    """The file of the vectors is refused to sqlite3, and a journal at its path to apsw; neither is changed."""
    await memory.remember("a violin")
    stranger = SQLiteIndex(tmp_path / "memory.db.vectors")
    with pytest.raises(MisuseError, match="another SQLite library, apsw"):
        await stranger.newest_time()
    store = SQLiteStore(tmp_path / "other.db.vectors")
    assert not await store.followers()
    other = Memory(tmp_path / "other.db", embedder=HashEmbedder())
    with pytest.raises(MisuseError, match="another SQLite library, sqlite3"):
        await other.remember("a violin")
    assert await other.read() == []
    for each in (other, stranger, store):
        await each.aclose()
    assert (await memory.recall("violin"))[0].why["vector"] == 1


WRITER = """
import anyio, sys
from agentfsm.memory import Memory
from agentfsm.testing import HashEmbedder

async def main():
    memory = Memory(sys.argv[1], embedder=HashEmbedder())
    for number in range(20):
        await memory.remember(f"theirs {number}")
    await memory.aclose()

anyio.run(main)
"""


async def test_two_processes_write_one_memory(memory):
    """Items and vectors of both are there, and both files are whole."""
    await memory.remember("first")
    process = subprocess.Popen([sys.executable, "-c", WRITER, memory.index.path])  # noqa: ASYNC220
    try:
        for number in range(20):
            await memory.remember(f"ours {number}")
    finally:
        assert process.wait() == 0
    assert len(await memory.index.search_vector((1.0,) * 64, OF_ALL, 100)) == 41
    assert not await memory.index.read_unembedded(1)
    await memory.aclose()
    items, vectors = sqlite3.connect(memory.index.path), apsw.Connection(memory.index.path + ".vectors")
    for db in (items, vectors):
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()


OF_ALL = ItemFilter(namespaces=(Namespace(),))


def test_a_vector_is_kept_in_bytes():
    """Its largest number becomes 127; a vector of zeros stays one."""
    assert quantise((0.5, -0.25, 0.0)) == bytes([127, 256 - 64, 0])
    assert quantise((0.0, 0.0)) == bytes(2)


async def test_a_vector_of_zeros_is_not_found(tmp_path):
    """It has no direction, and does not disturb the others."""
    index = SQLiteIndex(tmp_path / "memory.db")
    await index.use_vectors("model", 2)
    await index.add([build_item("zero", "zero"), build_item("one", "one")])
    await index.add_vectors({"zero": (0.0, 0.0), "one": (1.0, 0.0)})
    assert [match.item_id for match in await index.search_vector((1.0, 0.0), OF_ANN, 5)] == ["one"]
    await index.aclose()
