"""Documents in the memory: versions, stable chunks, resources of MCP servers."""

import random

import attrs
import pytest

from agentfsm import Agent, FilePart, MisuseError, TextPart
from agentfsm.core.events import Recalled
from agentfsm.memory import DocumentChange, Expiry, Memory
from agentfsm.ports.memory_items import ItemFilter
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel

GUIDE = "# Tea\n\nGreen tea needs water of 80 degrees.\n\n# Coffee\n\nCoffee needs 92 degrees.\n"


class Clock:
    """A clock that a test moves by hand."""

    time = 1_000_000_000.0

    def now(self):
        return self.time

    monotonic = now


@pytest.fixture
async def memory(tmp_path):
    memory = Memory(tmp_path / "memory.db", clock=Clock())
    yield memory.for_(user="ann", tenant="acme")
    await memory.aclose()


async def ask(memory, query, **options):
    return [found.item.text.partition("\n")[2] for found in await memory.recall(query, kinds=["document"], **options)]


def changed(**counts):
    return DocumentChange(name="guide.md", **counts)


async def test_a_document_is_found_by_its_parts(memory):
    """A chunk has the name of the document and the headings above it."""
    assert await memory.add_document("guide.md", GUIDE) == changed(added=2)
    [found, _] = await memory.recall("How hot is green tea?")
    assert found.item.text == "guide.md > Tea\nGreen tea needs water of 80 degrees."
    assert found.item.data == {"document": "guide.md", "headings": ["Tea"]}
    assert await memory.list_documents() == {"guide.md": 2}
    assert await memory.for_(user="bob", tenant="acme").list_documents() == {}


async def test_only_changed_chunks_are_written(memory, monkeypatch):
    """A chunk that stays keeps its item, also if it moves; one that is gone is found as of earlier only."""
    added, add = [], memory.index.add

    async def note(items):
        added.extend(items)
        return await add(items)

    await memory.add_document("guide.md", GUIDE)
    monkeypatch.setattr(memory.index, "add", note)
    assert await memory.add_document("guide.md", GUIDE) == changed(kept=2)
    assert added == []
    before = memory.clock.time
    memory.clock.time += 100
    edited = f"# Milk\n\nCold.\n\n{GUIDE.replace('92', '94')}"
    assert await memory.add_document("guide.md", edited) == changed(added=2, kept=1, closed=1)
    assert len(added) == 3
    found = await ask(memory, "Coffee degrees")
    assert found[0] == "Coffee needs 94 degrees."
    assert set(found[1:]) == {"Cold.", "Green tea needs water of 80 degrees."}
    assert "Coffee needs 92 degrees." in await ask(memory, "Coffee degrees", as_of=before + 1)
    assert "Coffee needs 92 degrees." in await ask(memory, "Coffee degrees", valid_at=before + 1)
    assert await memory.list_documents() == {"guide.md": 3}


async def test_a_text_may_go_and_return(memory):
    """Each time at once, though the clock stands still."""
    for _ in range(3):
        assert await memory.add_document("guide.md", GUIDE) == changed(added=2)
        assert len(await ask(memory, "degrees")) == 2
        assert await memory.remove_document("guide.md") == changed(closed=2)
        assert await ask(memory, "degrees") == []
    with pytest.raises(MisuseError, match=r"no document 'guide.md' of this owner"):
        await memory.remove_document("guide.md")


async def test_a_text_may_stand_in_a_document_twice(memory):
    """And one of the two may go."""
    await memory.add_document("guide.md", "# A\n\nsame\n\n# A\n\nsame\n")
    assert await memory.list_documents() == {"guide.md": 2}
    assert await memory.add_document("guide.md", "# A\n\nsame\n") == changed(kept=1, closed=1)


async def test_other_labels_make_other_chunks(memory):
    """So that no chunk keeps labels that it should not have."""
    await memory.add_document("guide.md", GUIDE)
    assert await memory.add_document("guide.md", GUIDE, level="confidential") == changed(added=2, closed=2)
    assert await ask(memory, "tea", max_level="internal") == []
    assert len(await ask(memory, "tea")) == 2


async def test_two_processes_add_a_document_once(memory, tmp_path):
    """Both have read that it is not there, and the items of both have the same ids."""
    other = Memory(tmp_path / "memory.db", clock=memory.clock).for_(user="ann", tenant="acme")
    read, other.index.read = other.index.read, None

    async def read_late(*args, **options):
        found = await read(*args, **options)
        await memory.add_document("guide.md", GUIDE)
        return found

    other.index.read = read_late
    await other.add_document("guide.md", GUIDE)
    assert await memory.list_documents() == {"guide.md": 2}
    await other.aclose()


async def test_a_document_survives_a_rebuild_and_expiry(memory):
    """It was given to the memory, and comes from no run."""
    await memory.add_document("guide.md", GUIDE)
    await memory.add_document("guide.md", GUIDE.replace("92", "94"))
    before = await memory.read()
    await memory.rebuild(MemoryStore())
    memory.clock.time += 200 * 86_400
    assert await memory.expire(Expiry(count=1)) == 0
    assert await memory.read() == before


async def test_a_document_is_forgotten_with_all_versions(memory, tmp_path):
    """No byte of it is left, and its chunks do not return."""
    await memory.add_document("guide.md", GUIDE)
    await memory.add_document("guide.md", GUIDE.replace("92", "94"))
    await memory.add_document("other.md", "About milk")
    assert await memory.forget_document("guide.md", by="ann", reason="asked") == 4
    assert b"degrees" not in (tmp_path / "memory.db").read_bytes()
    assert await memory.list_documents() == {"other.md": 1}
    assert await memory.add_document("guide.md", GUIDE) == changed(left_out=2)
    with pytest.raises(MisuseError, match="no document 'nothing'"):
        await memory.forget_document("nothing")


async def test_a_run_recalls_a_document_with_its_labels(memory):
    """The run has them from then on."""
    await memory.add_document("guide.md", GUIDE, labels=["untrusted"])
    async with Agent(ScriptedModel("80 degrees"), memory=memory) as agent:
        run = await agent.run("How hot is green tea?", user="ann", tenant="acme")
        [recalled] = [each for each in await agent.history(run.id) if isinstance(each, Recalled)]
    assert recalled.items[0].text.startswith("guide.md > Tea")
    assert "untrusted" in run.labels


@attrs.define
class Shelf:
    """A server with one resource."""

    contents: tuple
    is_trusted: bool = False
    name: str = "shelf"

    async def read(self, uri):
        assert uri == "note://today"
        return self.contents


async def test_a_resource_is_a_document(memory):
    """What a server says is not trusted, unless the server is."""
    text = TextPart(text="Buy milk")
    assert (await memory.add_resource(Shelf((text,)), "note://today")).name == "shelf note://today"
    [found] = await memory.recall("milk")
    assert found.item.labels == ("untrusted",)
    await memory.add_resource(Shelf((text,), is_trusted=True), "note://today", labels=["private"])
    [found] = await memory.recall("milk")
    assert found.item.labels == ("private",)
    picture = FilePart(url="data:application/pdf;base64,eA==")
    with pytest.raises(MisuseError, match="'shelf note://today' has no text"):
        await memory.add_resource(Shelf((picture,)), "note://today")


@pytest.mark.parametrize(
    ("name", "text", "options", "error"),
    [
        ("", "text", {}, "name of the document"),
        ("x" * 501, "text", {}, "1 to 500 characters"),
        ("a", " \n", {}, "has no text"),
        ("a", "x" * 2_000_001, {}, r"2,000,001 characters, and 2,000,000 are the most: split it"),
        ("a", "text", {"level": "secret"}, "level"),
        ("a", "text", {"importance": 2}, "importance"),
    ],
)
async def test_bad_documents(memory, name, text, options, error):
    """Are refused with the reason, and leave nothing."""
    with pytest.raises(MisuseError, match=error):
        await memory.add_document(name, text, **options)
    assert await memory.read() == []


@pytest.mark.parametrize("seed", range(3))
async def test_every_version_is_found_as_of_its_time(memory, seed):
    """Against a naive list of versions; other documents and users do not disturb it."""
    rng, versions = random.Random(seed), []
    others = [(memory, "other.md"), (memory.for_(user="bob", tenant="acme"), "guide.md")]
    for _ in range(8):
        sections = rng.choices(["a", "b", "c", "d"], k=rng.randint(0, 4))
        text = "\n".join(f"# {each}\n\nabout {each}\n" for each in sections)
        if text:
            await memory.add_document("guide.md", text)
        elif versions and versions[-1][1]:
            await memory.remove_document("guide.md")
        versions.append((memory.clock.time, sorted(f"about {each}" for each in sections)))
        for owner, name in others:
            await owner.add_document(name, f"# a\n\nabout {rng.choice('abcd')}\n")
        memory.clock.time += rng.choice([0.5, 100.0])
    for at, expected in versions:
        for where in ({"as_of": at + 0.2, "valid_at": at + 0.2}, {"valid_at": at + 0.2}):
            known = ItemFilter(namespaces=(memory.namespace,), session="guide.md", **where)
            assert sorted(item.text.partition("\n")[2] for item in await memory.index.read(known)) == expected
