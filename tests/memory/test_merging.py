"""Items that say the same are one, and an extraction merges what a run taught with what the memory knew."""

import json

import attrs
import pytest

from agentfsm import Agent, MisuseError
from agentfsm.memory import Learner, Memory
from agentfsm.ports import Clock
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel, HashEmbedder, ScriptedModel

DAY = 86_400.0


@attrs.define(eq=False)
class Calendar(Clock):
    """A clock that a test moves by hand."""

    time: float = 1_800_000_000.0

    def now(self) -> float:
        return self.time

    monotonic = now


TABLES = "Ann wants the report as Markdown tables"


@pytest.fixture
def clock():
    return Calendar()


@pytest.fixture
async def store(tmp_path, clock):
    store = SQLiteStore(tmp_path / "runs.db", clock=clock)
    yield store
    await store.aclose()


@pytest.fixture
async def memory(tmp_path, clock):
    memory = Memory(tmp_path / "memory.db", clock=clock)
    yield memory
    await memory.aclose()


def texts(found):
    return [each.item.text for each in found]


async def teach(store, memory, clock, *facts, run_id="r1", prompt="Write about Porto and tea", **answer):
    """Run an agent for Ann, a day later, and learn these facts from it. Return the prompt of the extraction."""
    clock.time += DAY
    await Agent(ScriptedModel("Done."), store=store, clock=clock).run(prompt, user="ann", id=run_id)
    model = ScriptedModel(json.dumps({"facts": [*facts], **answer}))
    await Learner(memory, model, store).learn(run_id)
    return model.requests[0].messages[0].text if model.requests else ""


def number_of(prompt, text):
    """The number of an item in the prompt of an extraction."""
    [line] = [line for line in prompt.splitlines() if line.endswith(f": {text}")]
    return int(line.partition(".")[0])


class Merging(FunctionModel):
    """An extraction that follows its prompt: it names the item of the memory by its number."""

    def __init__(self, known, **fact):
        def extract(request):
            number = number_of(request.messages[0].text, known)
            return json.dumps({"facts": [{"item": number, **fact}]})

        super().__init__(extract)


async def merge(store, memory, clock, run_id, known, **fact):
    clock.time += DAY
    await Agent(ScriptedModel("Done."), store=store, clock=clock).run("Porto, tea", user="ann", id=run_id)
    await Learner(memory, Merging(known, **fact), store).learn(run_id)


async def test_a_text_that_is_said_again_is_one_item(memory):
    """But for case and marks at its ends; it leaves room for others, is worth more each time, and is forgotten."""
    ann = memory.for_(user="ann")
    for text in ("The report goes to the board", "The report is about Asia", "The last report had a wrong total"):
        await ann.remember(text)
    for text in (TABLES, f" {TABLES.upper()}.", TABLES):
        last = await ann.remember(text, kind="preference")
    found = texts(await ann.recall("write the report", k=5))
    assert (len(found), found.count(TABLES)) == (4, 1)
    assert (last.text, last.data["confirmed"], last.importance) == (TABLES, 3, 1.0)
    assert await ann.forget([last.id]) == 3
    assert TABLES not in texts(await ann.recall("write the report", k=5))


async def test_what_differs_is_not_merged(memory):
    """Another number, sign, kind, level, owner or conversation is another item."""
    ann = memory.for_(user="ann")
    for text in ("Ann codes in C", "Ann codes in C++", "Ann codes in C#", "It is -5 outside", "It is 5 outside"):
        await ann.remember(text)
    await ann.remember("Ann codes in C", kind="preference")
    await ann.remember("Ann codes in C", level="confidential")
    await ann.remember("Ann codes in C", session="talk")
    await memory.for_(user="bob").remember("Ann codes in C")
    assert len(await ann.read()) == 8
    assert all("confirmed" not in item.data for item in await ann.read())
    low = await ann.recall("Ann codes in C", max_level="internal", k=20)
    assert "Ann codes in C" in texts(low)


async def test_almost_the_same_words_are_one_with_an_embedder(tmp_path):
    """If the vectors are near and the numbers the same; the newer words hold."""
    memory = Memory(tmp_path / "memory.db", embedder=HashEmbedder())
    ann = memory.for_(user="ann")
    words = "wants the weekly report of all the regions as short Markdown tables with totals by quarter and by year"
    await ann.remember(f"Ann {words}")
    await ann.remember(f"Ann really {words}")
    await ann.remember(f"Ann {words} 3")
    await ann.remember(f"Ann {words} 4")
    assert sorted(texts(await ann.recall("report"))) == [f"Ann really {words}", f"Ann {words} 3", f"Ann {words} 4"]
    await memory.aclose()


async def test_nonsense_finds_nothing(tmp_path):
    """With an embedder, too: an item that shares no word has to be near by its meaning."""
    memory = Memory(tmp_path / "memory.db", embedder=HashEmbedder())
    ann = memory.for_(user="ann")
    await ann.remember("Ann plays the violin")
    assert await ann.recall("qzxv blorp") == []
    assert texts(await ann.recall("violin")) == ["Ann plays the violin"]
    await memory.aclose()


async def test_a_slot_is_decided_by_validity(memory, clock):
    """Not by the moment of writing: of two values at one tick of the clock the later holds, and an old one never."""
    ann = memory.for_(user="ann")
    for town in ("Porto", "Faro", "Braga"):
        await ann.remember(f"Ann lives in {town}", slot="home")
        assert texts(await memory.for_(user="ann").recall("Where does Ann live?")) == [f"Ann lives in {town}"]
    await ann.remember("Ann lives in Rome", slot="home", valid_from=clock.time - 9 * DAY)
    await ann.remember("Ann lives in Oslo", slot="home", valid_from=clock.time - 8 * DAY, valid_to=clock.time - DAY)
    assert texts(await ann.recall("Where does Ann live?")) == ["Ann lives in Braga"]
    assert texts(await ann.recall("Ann live", valid_at=clock.time - 2 * DAY)) == ["Ann lives in Oslo"]
    with pytest.raises(MisuseError, match="give valid_from, too"):
        await ann.remember("Ann lives in Bonn", slot="home", valid_to=clock.time - DAY)


async def test_an_extraction_is_shown_what_the_memory_knew(store, memory, clock):
    """Items on its subjects and the profile, numbered; nothing above its level, from outside, or of a later time."""
    ann = memory.for_(user="ann")
    await ann.remember("Ann lives in Porto")
    await ann.remember("Ann likes short answers", kind="preference")
    await ann.remember("Porto is secret", level="confidential")
    await ann.remember("Porto is a page", labels=["untrusted"])
    prompt = await teach(store, memory, clock)
    assert {number_of(prompt, "Ann lives in Porto"), number_of(prompt, "Ann likes short answers")} == {1, 2}
    assert "secret" not in prompt
    assert "is a page" not in prompt


async def test_a_known_fact_is_confirmed(store, memory, clock):
    """By "none", or by the same words: it is one item, which counts both, and its place in the profile stays."""
    ann = memory.for_(user="ann")
    first = await ann.remember("Ann drinks tea")
    await merge(store, memory, clock, "r1", "Ann drinks tea", action="none", text="Ann likes to drink tea")
    await teach(store, memory, clock, {"text": "ann drinks tea."}, run_id="r2")
    [found] = await ann.recall("tea", kinds=["fact"])
    assert (found.item.text, found.item.data["confirmed"]) == ("Ann drinks tea", 3)
    assert found.item.valid_from == first.valid_from
    assert found.item.importance == pytest.approx(0.7)


async def test_a_contradiction_takes_the_place_of_a_fact(store, memory, clock):
    """By "update"; the past stays, a rebuild makes the same, and what one run taught goes with that run alone."""
    ann = memory.for_(user="ann")
    await ann.remember("Ann lives in Porto")
    before = clock.time
    fact = {"text": "Ann lives in Faro", "kind": "fact"}
    await merge(store, memory, clock, "r1", "Ann lives in Porto", action="update", **fact)
    for _ in range(2):
        assert texts(await ann.recall("Ann lives", kinds=["fact"])) == ["Ann lives in Faro"]
        assert texts(await ann.recall("Ann lives", kinds=["fact"], valid_at=before)) == ["Ann lives in Porto"]
        await memory.rebuild(store)
    await memory.forget_runs(["r1"])
    assert texts(await ann.recall("Ann lives")) == ["Ann lives in Porto"]


async def test_a_fact_ends(store, memory, clock):
    """By "delete": it is not found any more, and was true before. The same words later hold again."""
    ann = memory.for_(user="ann")
    await ann.remember("Ann drinks tea")
    before = clock.time
    await merge(store, memory, clock, "r1", "Ann drinks tea", action="delete", text="")
    assert await ann.recall("tea", kinds=["fact"]) == []
    assert texts(await ann.recall("tea", kinds=["fact"], valid_at=before)) == ["Ann drinks tea"]
    await memory.expire()
    assert await ann.recall("tea", kinds=["fact"]) == []
    clock.time += DAY
    await ann.remember("Ann drinks tea")
    assert texts(await ann.recall("tea", kinds=["fact"])) == ["Ann drinks tea"]


async def test_what_an_extraction_says_wrongly_does_no_harm(store, memory, clock):
    """Numbers and words that there are not, and several words about one item."""
    ann = memory.for_(user="ann")
    await ann.remember("Ann drinks tea")
    await teach(
        store,
        memory,
        clock,
        {"text": "Ann sings", "action": "update", "item": 9},
        {"text": "", "action": "delete", "item": 9},
        {"text": "", "action": "none", "item": 0},
        {"text": "Ann dances", "action": "explode"},
        {"text": "Ann lives in Faro", "slot": "home"},
        {"text": "Ann lives in Porto", "slot": "home"},
        {"text": "Ann drinks tea", "action": "none", "item": 1},
        {"text": "Ann drinks mate", "action": "update", "item": 1},
    )
    found = texts(await ann.recall("Ann", kinds=["fact"], k=20))
    assert sorted(found) == ["Ann dances", "Ann drinks mate", "Ann lives in Porto", "Ann sings"]


async def test_forgetting_a_user_forgets_the_profile(store, memory, clock, tmp_path):
    """And what extractions were shown of it: no byte remains, and the next request has none."""
    ann = memory.for_(user="ann")
    await ann.remember("Ann plays the viola", kind="preference")
    await Agent(ScriptedModel("Yes."), store=store, memory=memory, clock=clock).run("Hello", user="ann", id="r0")
    await merge(store, memory, clock, "r1", "Ann plays the viola", action="none", text="viola")
    assert any(b"viola" in path.read_bytes() for path in tmp_path.iterdir())
    await ann.forget_all(runs="delete", store=store)
    assert not [path for path in tmp_path.iterdir() if b"viola" in path.read_bytes()]
    run = await Agent(ScriptedModel("Yes."), store=store, memory=memory, clock=clock).run("Hello", user="ann")
    assert run.profile is None
