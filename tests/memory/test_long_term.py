"""The memory of a user: remember, recall, revise, forget, expire."""

import json
import math
import random
from datetime import UTC, datetime

import attrs
import pytest

from agentfsm import MisuseError
from agentfsm.memory import Expiry, Memory, SQLiteIndex

DAY = 86_400.0


class Clock:
    """A clock that a test moves by hand, also back."""

    def __init__(self):
        self.time = 1_000_000_000.0

    def now(self):
        return self.time

    monotonic = now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def memory(tmp_path, clock):
    memory = Memory(tmp_path / "memory.db", clock=clock)
    yield memory.for_(user="ann", tenant="acme")
    await memory.aclose()


async def ask(memory, query, **options):
    return [found.item.text for found in await memory.recall(query, **options)]


async def test_what_was_remembered_is_recalled(memory):
    """The best match comes first, with the parts of its score."""
    await memory.remember("Ann drinks green tea", kind="preference")
    await memory.remember("Ann works in Porto")
    tea, porto = await memory.recall("Which tea does Ann drink?")
    assert tea.item.text == "Ann drinks green tea"
    assert tea.why["similarity"] == 1.0
    assert tea.why["text"] == 1
    assert tea.score == pytest.approx(0.5 + 0.3 + 0.2 * 0.8)
    assert porto.score < tea.score


async def test_a_key_makes_remembering_repeatable(memory):
    """The same key of the same owner adds one item; another owner has its own."""
    first = await memory.remember("Ann likes lists", key="style")
    assert await memory.remember("Ann likes prose", key="style") == first
    other = await memory.for_(user="bob").remember("Bob likes prose", key="style")
    assert other.id != first.id
    assert await ask(memory.for_(user="bob"), "likes") == ["Bob likes prose"]


async def test_a_slot_moves_on(memory, clock):
    """A new value of a slot takes the place of the old one, which was true until then."""
    await memory.remember("Ann lives in Porto", slot="home")
    clock.time += 10 * DAY
    moved = datetime.fromtimestamp(clock.time - 3 * DAY, UTC)
    await memory.remember("Ann lives in Faro", slot="home", valid_from=moved)
    assert await ask(memory, "Where does Ann live?") == ["Ann lives in Faro"]
    assert await ask(memory, "Where does Ann live?", valid_at=clock.time - 5 * DAY) == ["Ann lives in Porto"]
    assert await ask(memory, "Where does Ann live?", as_of=clock.time - DAY) == ["Ann lives in Porto"]


async def test_a_correction(memory, clock):
    """A correction keeps what was not given, and the old item is known as of earlier."""
    old = await memory.remember("Ann is 31", importance=0.9, data={"n": 1})
    clock.time += 5
    new = await memory.revise(old.id, text="Ann is 32")
    assert (new.replaces, new.importance, new.data) == (old.id, 0.9, {"n": 1})
    assert await ask(memory, "Ann") == ["Ann is 32"]
    assert await ask(memory, "Ann", as_of=clock.time - 1) == ["Ann is 31"]
    with pytest.raises(MisuseError, match="no item 'nothing' of this owner"):
        await memory.revise("nothing", text="x")
    with pytest.raises(MisuseError, match="of this owner"):
        await memory.for_(user="bob").revise(new.id, text="x")


async def test_a_clock_that_goes_back(memory, clock, tmp_path):
    """What was remembered before is still found, and a later item still counts as later, in another process too."""
    await memory.remember("Ann lives in Porto", slot="home")
    clock.time -= 100 * DAY
    assert await ask(memory, "Ann lives") == ["Ann lives in Porto"]
    another = Memory(SQLiteIndex(tmp_path / "memory.db"), clock=clock).for_(user="ann", tenant="acme")
    await another.remember("Ann lives in Faro", slot="home")
    assert len(await ask(memory, "Ann lives")) == 1
    await another.aclose()


async def test_what_all_users_share(memory):
    """A user finds the items of the team when that is asked for; the team does not find those of users."""
    team = memory.for_(tenant="acme")
    await team.remember("The office is closed on Friday")
    await memory.remember("Ann is away on Friday")
    assert await ask(memory, "Friday") == ["Ann is away on Friday"]
    assert set(await ask(memory, "Friday", team=True)) == {"Ann is away on Friday", "The office is closed on Friday"}
    assert await ask(team, "Friday", team=True) == ["The office is closed on Friday"]
    assert await ask(memory.for_(user="ann", tenant="rival"), "Friday", team=True) == []


async def test_an_answer_is_found_beside_its_question(memory):
    """A turn that shares no word with the query is found, if its neighbours do; other sessions are not neighbours."""
    for turn in ("Which city did you choose for the wedding?", "Braga, we loved it there.", "Wonderful!"):
        await memory.remember(turn, session="monday")
    for number in range(20):
        await memory.remember(f"Something else, number {number}", session="tuesday")
    found = await ask(memory, "What city was chosen for the wedding?", k=3)
    assert "Braga, we loved it there." in found[:2]


async def test_forgetting_needs_the_owner(memory):
    """Nobody deletes an item of another owner; a forgotten key does not return."""
    item = await memory.remember("secret", key="k")
    with pytest.raises(MisuseError, match="of this owner"):
        await memory.for_(user="bob").forget([item.id])
    with pytest.raises(MisuseError, match="give a list of ids"):
        await memory.forget(item.id)
    assert await memory.forget([item.id], by="ann") == 1
    with pytest.raises(MisuseError, match="was forgotten"):
        await memory.remember("secret", key="k")


async def test_expiry_by_age_and_number(memory, clock):
    """Over 90 days and below importance 0.7 an item goes; beyond the number the least important ones."""
    await memory.remember("old and unimportant", importance=0.69)
    await memory.remember("old and important", importance=0.7)
    clock.time += 91 * DAY
    for number in range(5):
        await memory.remember(f"new {number}", importance=0.1 * number)
    assert await memory.expire() == 1
    assert await memory.expire(Expiry(count=3)) == 3
    left = {item.text for item in await memory.read()}
    assert left == {"new 2", "new 3", "new 4"}  # 0.7 * 0.95 ** 91 is less than 0.2


async def test_held_items_wait(memory):
    """An item that is held is found after its release."""
    item = await memory.remember("from a web page", held=True, labels=["untrusted"])
    assert await ask(memory, "web page") == []
    assert await memory.release([item.id], by="eve") == 1
    assert await ask(memory, "web page") == ["from a web page"]
    assert await ask(memory, "web page", without_labels=["untrusted"]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": ""}, "give a text of 1 to 20,000 characters"),
        ({"text": "x" * 20_001}, "split a longer one into several items"),
        ({"text": "x", "importance": 2}, "give a number from 0 to 1"),
        ({"text": "x", "level": "secret"}, "give 'public', 'internal', 'confidential' or 'restricted'"),
        ({"text": "x", "kind": "dream"}, "give 'episode', 'fact', 'preference' or 'document'"),
        ({"text": "x", "valid_from": datetime(2026, 1, 1)}, "a datetime with its time zone"),  # noqa: DTZ001
    ],
)
async def test_wrong_items_are_refused(memory, arguments, message):
    """An error says what is wrong and what to give."""
    with pytest.raises(MisuseError, match=message):
        await memory.remember(**arguments)


@pytest.mark.parametrize("k", [0, 101, True, "3"])
async def test_wrong_numbers_are_refused(memory, k):
    """A recall returns 1 to 100 items."""
    with pytest.raises(MisuseError, match="give a whole number from 1 to 100"):
        await memory.recall("x", k=k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"as_of": "yesterday"}, "^as_of='yesterday': give a datetime"),
        ({"valid_at": datetime(2026, 1, 1)}, "^valid_at=.*with its time zone"),  # noqa: DTZ001
        ({"kinds": "document"}, "^kinds='document': give a list of kinds"),
    ],
)
async def test_wrong_searches_are_refused(memory, arguments, message):
    """The error names the argument."""
    with pytest.raises(MisuseError, match=message):
        await memory.recall("x", **arguments)


async def test_a_long_query_is_answered(memory):
    """A query of 200,000 characters finds what its beginning asks for."""
    await memory.remember("Ann drinks green tea")
    assert await ask(memory, "tea " + "x y z " * 33_000) == ["Ann drinks green tea"]


@pytest.mark.parametrize("seed", range(4))
async def test_as_of_against_a_naive_list(memory, clock, seed):
    """What was true at a time, as known at another, is what a list of all records says."""
    chance = random.Random(seed)
    records = []
    for number in range(40):
        clock.time += 10
        if records and chance.random() < 0.3:
            old = chance.choice(records)
            item = await memory.revise(old.id, text=f"word {number}", valid_to=chance.choice([None, clock.time - 30]))
        else:
            begin = clock.time - chance.choice([0, 5, 50, 200])
            end = chance.choice([None, begin + 60])
            slot = chance.choice(["home", "work", ""])
            item = await memory.remember(f"word {number}", slot=slot, valid_from=begin, valid_to=end)
        records.append(item)
        if chance.random() < 0.1:
            family = {chance.choice(records).id}
            await memory.forget(family)
            for _ in records:  # all that it corrects, and that corrects it
                family |= {each.id for each in records if each.replaces in family}
                family |= {each.replaces for each in records if each.id in family and each.replaces}
                current = [each for each in records if not any(other.replaces == each.id for other in records)]
                for last in current:  # and the values of a slot whose present one it is
                    if last.id in family and not any(
                        each.slot == last.slot and is_later(each, last) for each in current
                    ):
                        family |= {each.id for each in records if last.slot and each.slot == last.slot}
            records = [each for each in records if each.id not in family]
    for _ in range(25):
        known, true = clock.time - chance.randrange(420), clock.time - chance.randrange(600)
        there = [each for each in records if each.recorded_at <= known]
        current = [each for each in there if not any(other.replaces == each.id for other in there)]
        begun = [each for each in current if each.valid_from <= true]
        expected = {
            each.id
            for each in begun
            if each.valid_to > true and not any(other.slot == each.slot and is_later(other, each) for other in begun)
        }
        found = {each.item.id for each in await memory.recall("word", k=50, as_of=known, valid_at=true)}
        assert found == expected


def is_later(item, other):
    """Whether an item with a slot takes the place of another one."""
    return item.slot and (item.valid_from, item.recorded_at, item.id) > (other.valid_from, other.recorded_at, other.id)


# Many at once.


async def test_many_texts_are_remembered_at_once(memory):
    """As one after the other: slots move on, what is said again is one item, and keys are known."""
    items = await memory.remember_all(
        [
            "Ann drinks tea",
            {"text": "Ann lives in Porto", "slot": "home"},
            {"text": "ann drinks tea."},
            {"text": "Ann lives in Faro", "slot": "home"},
            {"text": "Ann likes lists", "key": "style", "kind": "preference"},
            {"text": "Ann likes prose", "key": "style", "kind": "preference"},
        ]
    )
    assert [item.text for item in items] == [
        "Ann drinks tea",
        "Ann lives in Porto",
        "Ann drinks tea",
        "Ann lives in Faro",
        "Ann likes lists",
        "Ann likes lists",
    ]
    assert (items[2].data, items[2].follows) == ({"confirmed": 2}, items[0].id)
    assert await ask(memory, "Where does Ann live?", k=1) == ["Ann lives in Faro"]
    assert sorted(await ask(memory, "tea lists")) == ["Ann drinks tea", "Ann likes lists"]


async def test_many_texts_are_few_writes(memory, monkeypatch):
    """A thousand are two."""
    writes, add = [], memory.index.add

    async def count(items):
        writes.append(len(items))
        return await add(items)

    monkeypatch.setattr(memory.index, "add", count)
    await memory.remember_all([f"Ann has seen film {number}" for number in range(1_000)])
    assert writes == [500, 500]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"kind": "fact"}, r"entries\[1\]: give a text"),
        (7, r"entries\[1\]: give a text"),
        ({"text": "x", "weight": 1}, r"entries\[1\]: remember has no argument 'weight'"),
        ({"text": "x", "kind": "rumour"}, r"entries\[1\]: .*kind"),
        ({"text": " "}, r"entries\[1\]: .*text"),
        ({"text": 7}, r"entries\[1\]: .*text"),
        ({"text": "x", "slot": 7}, r"entries\[1\]: .*slot"),
    ],
)
async def test_of_a_wrong_entry_nothing_remains(memory, entry, told):
    """The error names its index."""
    with pytest.raises(MisuseError, match=told):
        await memory.remember_all(["Ann drinks tea", entry])
    assert await memory.read() == []


async def test_items_go_from_one_memory_to_another(memory, tmp_path):
    """With all that they are; twice is once."""
    await memory.remember(
        "Ann drinks tea", kind="preference", data={"cups": 3}, labels=["untrusted"], level="restricted"
    )
    await memory.remember("Ann lives in Porto", slot="home", valid_from=5.0, valid_to=900_000_000.0)
    await memory.remember("Ann pays by wire", held=True, session="talk")
    other = Memory(tmp_path / "other.db").for_(user="ann", tenant="acme")
    written = json.loads(json.dumps(await memory.export_items()))
    assert await other.import_items(written) == 3
    assert await other.import_items(written) == 0
    theirs = {item.imported_id: item for item in await other.read(include_held=True)}
    for item in await memory.read(include_held=True):
        there = attrs.evolve(theirs.pop(item.id), id=item.id, imported_id="")
        assert attrs.evolve(there, place=0) == attrs.evolve(item, place=0)
    assert theirs == {}
    assert await memory.import_items(await other.export_items()) == 0
    assert await memory.for_(user="bob").import_items(written) == 3  # a copy with ids of its own
    assert await memory.for_(user="bob").import_items(written) == 0
    await other.forget_all()
    assert await other.import_items(written) == 0
    await other.aclose()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text": None}, r"items\[1\]: .*text"),
        ({"namespace": {}}, r"items\[1\]: an item has no 'namespace'"),
        ({"colour": 1}, r"items\[1\]: an item has no 'colour'"),
        ({"held": "no"}, r"items\[1\]: .*held"),
        ({"data": []}, r"items\[1\]: data is an object"),
        ({"valid_from": "today"}, r"items\[1\]: .*valid_from"),
        ({"valid_to": math.nan}, r"items\[1\]: .*valid_to"),
        ({"place": "abc"}, r"items\[1\]: .*place"),
        ({"place": 2**70}, r"items\[1\]: .*place"),
        ({"recorded_at": 10**400}, r"items\[1\]: .*recorded_at"),
        ({"text": "\ud800"}, r"items\[1\]: .*surrogates"),
        ({"data": {"at": object()}}, r"items\[1\]: .*JSON"),
        ({"labels": 7}, r"items\[1\]: .*labels"),
    ],
)
async def test_of_a_wrong_item_nothing_is_imported(memory, tmp_path, change, told):
    """The error names its index."""
    await memory.remember("Ann drinks tea")
    [item] = await memory.export_items()
    other = Memory(tmp_path / "other.db").for_(user="ann", tenant="acme")
    with pytest.raises(MisuseError, match=told):
        await other.import_items([item, {**item, "id": "x", **change}])
    with pytest.raises(MisuseError, match=r"items\[0\]: an item is an object, not str"):
        await other.import_items(["tea"])
    with pytest.raises(MisuseError, match=r"items\[0\]: 'text' is missing"):
        await other.import_items([{"id": "x", "valid_from": 1, "recorded_at": 1}])
    assert await other.read() == []
    await other.aclose()


async def test_an_import_takes_no_id_of_another_owner(memory):
    """Whatever ids and times it names: what others remember under their keys is theirs, and is known from now on."""
    mine = await memory.remember("Ann's code is 17", key="code")
    await memory.forget([mine.id])
    [squat] = await memory.for_(user="bob").remember_all(["Bob's code is 4"])
    written = [{"id": each, "text": "Bob's code is 4", "valid_from": 0, "recorded_at": 4e9} for each in ("x", mine.id)]
    assert await memory.import_items(written[1:]) == 0  # that id was forgotten
    assert await memory.for_(user="bob").import_items(written) == 2
    assert squat.recorded_at < 2e9
    late = await memory.remember("Ann's code is 18", key="new code")
    assert late.recorded_at < 2e9
    assert [each.text for each in await memory.read()] == ["Ann's code is 18"]


async def test_what_is_forgotten_leaves_nothing_that_says_the_same(memory, clock):
    """A fact with a slot that was said twice goes whole, and so do its earlier values, which would hold again."""
    for text in ("Ann lives in Lisbon", "Ann lives in Porto", "Ann lives in Porto."):
        clock.time += 1
        last = await memory.remember(text, slot="home")
    await memory.remember("Ann drinks tea")
    clock.time += 1
    tea = await memory.remember("ann drinks tea")
    assert await memory.forget([last.id]) == 3
    assert await memory.forget([tea.id]) == 2
    assert await memory.read() == []


@pytest.mark.parametrize(("forgotten", "left"), [("Lisbon", "Porto Faro"), ("Porto", "Faro"), ("Faro", "Lisbon Porto")])
async def test_an_earlier_or_planned_value_is_forgotten_alone(memory, clock, forgotten, left):
    """The present one stays; with the present one its earlier ones go, and a planned one stays."""
    ids = {}
    for city, begin in (("Lisbon", -2 * DAY), ("Porto", -DAY), ("Faro", DAY)):
        item = await memory.remember(f"Ann lives in {city}", slot="home", valid_from=clock.time + begin)
        ids[city] = item.id
    await memory.forget([ids[forgotten]])
    assert {item.text.split()[-1] for item in await memory.read()} == {*left.split()}


async def test_equal_texts_are_forgotten_together(memory, clock):
    """Whatever stands beside them: sessions, kinds, levels, labels, slots and times."""
    beside = [{}, {"session": "s"}, {"kind": "preference"}, {"level": "public"}, {"slot": "x"}, {"valid_from": 5.0}]
    for each in (*beside, {"labels": ["private"]}):
        clock.time += 1
        last = await memory.remember("Ann likes plums", **each)
    await memory.remember("Ann likes plums and figs")
    await memory.for_(user="bob").remember("Ann likes plums")
    await memory.forget([last.id])
    assert [item.text for item in await memory.read()] == ["Ann likes plums and figs"]
    assert len(await memory.for_(user="bob").read()) == 1


async def test_a_held_item_is_forgotten_alone(memory, clock):
    """It says nothing of those that hold; with them it goes."""
    fact = await memory.remember("Ann likes plums", slot="fruit")
    clock.time += 1
    held = await memory.remember("Ann likes plums", slot="fruit", held=True)
    assert await memory.forget([held.id]) == 1
    held = await memory.remember("Ann likes plums", slot="fruit", held=True)
    assert await memory.forget([fact.id]) == 2


async def test_what_is_confirmed_while_it_is_forgotten_goes_too(memory, clock, monkeypatch):
    """Also by another process, between the look at all items and the deletion."""
    fact = await memory.remember("Ann likes plums")
    forget = memory.index.forget
    others = [1, 1]

    async def confirm_and_forget(*args, **options):
        if others:
            clock.time += others.pop()
            await memory.remember("ann likes plums")
        return await forget(*args, **options)

    monkeypatch.setattr(memory.index, "forget", confirm_and_forget)
    assert await memory.forget([fact.id]) == 3
    assert await memory.read() == []


async def test_forgetting_by_one_owner_binds_no_other(memory, clock):
    """Who has imported the items of another one may go on with them."""
    fact = await memory.remember("The team meets on Monday")
    bob = memory.for_(user="bob")
    assert await bob.import_items(await memory.export_items()) == 1
    await memory.forget([fact.id])
    clock.time += 1
    assert (await bob.remember("the team meets on Monday")).data == {"confirmed": 2}
    [item] = await bob.read(valid_at=clock.time)
    assert (await bob.revise(item.id, text="The team meets on Tuesday")).text == "The team meets on Tuesday"


async def test_who_was_forgotten_may_begin_anew_at_once(memory, clock):
    """Also at the same tick of the clock, and after a record of a machine whose clock was ahead."""
    clock.time += 300
    await memory.remember("Ann likes plums")
    clock.time -= 300
    await memory.forget_all()
    await memory.remember("Ann likes figs")
    anew = Memory(memory.index, clock=clock).for_(user="ann", tenant="acme")
    await anew.forget_all()
    await anew.remember("Ann likes pears")
    assert [item.text for item in await memory.read()] == ["Ann likes pears"]


async def test_what_expires_brings_nothing_back(memory, clock):
    """Neither what it has corrected, nor an earlier value of its slot."""
    dose = await memory.remember("The dose is 500 mg", importance=0.9)
    await memory.remember("Ann lives in Lisbon", slot="home")
    clock.time += 1
    await memory.revise(dose.id, text="The dose is 50 mg", importance=0.1)
    await memory.remember("Ann lives in Porto", slot="home", importance=0.1)
    clock.time += 100 * DAY
    assert await memory.expire() == 4
    assert await memory.read() == []


async def test_only_the_owner_releases(memory):
    """The id of another owner's item is as one that does not exist, and nothing is released."""
    mine, other = memory.for_(user="ann"), memory.for_(user="bob")
    items = [await each.remember("from a web page", held=True) for each in (mine, other)]
    with pytest.raises(MisuseError, match="no item"):
        await mine.release([each.id for each in items])
    assert [item.held for each in (mine, other) for item in await each.read(include_held=True)] == [True, True]


async def test_slots_are_compared_as_words(memory, clock):
    """A model, a program and a person spell one subject in three ways."""
    for number, slot in enumerate(("Home Town", "home_town", "home-town")):
        clock.time += 1
        await memory.remember(f"Ann lives in city {number}", slot=slot)
    assert [item.text for item in await memory.read(valid_at=clock.time)] == ["Ann lives in city 2"]
    assert len(await memory.read()) == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"valid_from": 5.0, "valid_to": 4.0}, "would never be true"),
        ({"data": {"at": object()}}, "data"),
        ({"slot": 5}, "slot"),
    ],
)
async def test_what_could_not_be_found_again_is_refused(memory, arguments, told):
    """With the name of the argument."""
    with pytest.raises(MisuseError, match=told):
        await memory.remember("x", **arguments)
    with pytest.raises(MisuseError, match="list of texts"):
        await memory.remember_all("one text")
    assert await memory.read() == []


async def test_items_of_all_owners_expire(memory, clock):
    """Each owner by the same rules."""
    bob = memory.for_(user="bob")
    for mine in (memory, bob):
        await mine.remember("an old fact", importance=0.1)
        await mine.remember("a wish", kind="preference")
    clock.time += 100 * DAY
    assert await memory.expire_all() == 2
    assert [item.text for item in (*await memory.read(), *await bob.read())] == ["a wish", "a wish"]
