"""Conformance tests that every index of memory items has to pass, for authors of custom indexes.

    from agentfsm.testing.memory_conformance import MemoryIndexConformance

    class TestMyIndex(MemoryIndexConformance):
        @pytest.fixture
        async def index(self):
            index = MyIndex(...)  # new and empty for each test
            yield index
            await index.aclose()

`VectorIndexConformance` has the tests of an index that also keeps vectors, a `VectorIndex`.

The tests need anyio's pytest plugin and its fixture `anyio_backend`. Without the fixture `other`, a second object
on the same data, tests with two objects are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs
import pytest

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import Label
from agentfsm.ports.memory_items import (
    ItemFilter,
    ItemKind,
    ItemSource,
    MemoryIndex,
    MemoryItem,
    Namespace,
    VectorIndex,
)

ANN: Final = Namespace(tenant="acme", user="ann")
BOB: Final = Namespace(tenant="acme", user="bob")
OF_ANN: Final = ItemFilter(namespaces=(ANN,))


def build_item(item_id: str, text: str, **fields: Any) -> MemoryItem:
    """Return an item of Ann."""
    given: dict[str, Any] = {"namespace": ANN, "valid_from": 100.0, "recorded_at": 100.0} | fields
    return MemoryItem(id=item_id, text=text, **given)


@pytest.mark.anyio
class MemoryIndexConformance:
    """Conformance tests of an index. Override the fixture `index` with one that yields a new, empty index."""

    @pytest.fixture
    async def index(self) -> MemoryIndex:
        """Return the index to check."""
        raise NotImplementedError("the fixture `index` is missing: override it with one that yields a new, empty index")

    @pytest.fixture
    async def other(self) -> MemoryIndex:
        """Return a second index object with the same data, as another process would have."""
        pytest.skip("needs a second index object: override the fixture `other` if the index supports several")

    async def search(self, index: MemoryIndex, query: str, where: ItemFilter = OF_ANN, limit: int = 10) -> list[str]:
        """Return the ids of the items that a search finds, best first."""
        return [match.item_id for match in (await index.search_text(query, where, limit)).matches]

    async def test_an_item_is_returned_as_it_was_added(self, index: MemoryIndex) -> None:
        """Each field of an item is kept, whatever characters it has."""
        item = MemoryItem(
            id="a\"'; DROP",
            namespace=Namespace(tenant="a\x00b", user="ü"),
            kind=ItemKind.PREFERENCE,
            text='Zoë said: "OR" AND NEAR(1) * ^ : {text} 北京 \u202e',
            data={"n": [1, None, "ü"]},
            slot="s",
            replaces="other",
            source=ItemSource(run_id="r", version=7),
            session="talk",
            place=3,
            labels=(Label.UNTRUSTED, Label.PRIVATE),
            level="confidential",
            importance=0.25,
            valid_from=-5.5,
            valid_to=math.inf,
            recorded_at=1e9,
            held=True,
        )
        assert [*await index.add([item])] == [item]
        assert await index.get([item.id, "unknown"]) == {item.id: item}

    async def test_a_known_id_is_left_as_it_is(self, index: MemoryIndex) -> None:
        """An item that is added again changes nothing and is not among those that were added."""
        await index.add([build_item("a", "first")])
        assert [item.id for item in await index.add([build_item("a", "second"), build_item("b", "third")])] == ["b"]
        assert (await index.get(["a"]))["a"].text == "first"

    async def test_any_of_the_words_is_found(self, index: MemoryIndex) -> None:
        """An item that has more of the rare words of a query comes first. Endings of words do not count."""
        await index.add(
            [
                build_item("tea", "Ann drinks green tea in the morning"),
                build_item("coffee", "Ann drinks coffee"),
                build_item("cats", "The cats were running"),
                *[build_item(f"ann{number}", f"Ann said number {number}") for number in range(20)],
            ]
        )
        assert (await self.search(index, "Does Ann drink green tea?"))[:2] == ["tea", "coffee"]
        assert await self.search(index, "a cat runs") == ["cats"]
        assert await self.search(index, "unheard") == []
        assert await self.search(index, "") == []

    async def test_operators_in_a_query_are_words(self, index: MemoryIndex) -> None:
        """No text of a query is read as an operator or as SQL."""
        await index.add([build_item("a", "quotes and stars near the NOT operator")])
        for query in ('"', "'", "a* OR (", "NOT", "NEAR/2", "text:x -y", "%_\\", ":as_of", "\x00", "\ud800", "') --"):
            await index.search_text(query, OF_ANN, 10)
        assert await self.search(index, 'NOT "operator') == ["a"]

    async def test_chinese_words_are_found(self, index: MemoryIndex) -> None:
        """A word of any length is found where it stands, and nowhere else."""
        await index.add(
            [
                build_item("beijing", "我明年想去北京旅游"),
                build_item("shanghai", "她住在上海, 有一只猫"),
                build_item("computer", "计算机坏了"),
                build_item("sum", "请计算总和"),
            ]
        )
        assert await self.search(index, "北京") == ["beijing"]
        assert await self.search(index, "猫") == ["shanghai"]
        assert await self.search(index, "计算机") == ["computer"]
        assert set(await self.search(index, "计算")) == {"computer", "sum"}
        assert await self.search(index, "京旅") == ["beijing"]
        assert await self.search(index, "海有") == []

    async def test_the_day_is_found(self, index: MemoryIndex) -> None:
        """A question for a date finds what became true then."""
        may, june = 1_683_504_000.0, 1_686_182_400.0  # 8 May and 8 June 2023
        await index.add([build_item("may", "the dentist", valid_from=may), build_item("june", "work", valid_from=june)])
        assert (await self.search(index, "What happened in May?"))[0] == "may"

    async def test_owners_are_apart(self, index: MemoryIndex) -> None:
        """No search, list or neighbourhood shows an item of another owner."""
        await index.add([build_item("a", "secret"), build_item("b", "secret", namespace=BOB)])
        await index.add([build_item("c", "secret", namespace=Namespace(tenant="other", user="ann"))])
        await index.add([build_item(f"{user.user}-talk", "secret", namespace=user, session="s") for user in (ANN, BOB)])
        assert set(await self.search(index, "secret")) == {"a", "ann-talk"}
        assert [item.id for item in await index.read(OF_ANN)] == ["a", "ann-talk"]
        found = (await index.search_text("secret", OF_ANN, 10)).matches
        assert [match.item_id for match in await index.find_neighbours(found, 5, OF_ANN)] == ["ann-talk"]
        both = attrs.evolve(OF_ANN, namespaces=(ANN, BOB))
        assert set(await self.search(index, "secret", both)) == {"a", "b", "ann-talk", "bob-talk"}

    async def test_the_filter_does_not_shorten_the_result(self, index: MemoryIndex) -> None:
        """The filter is applied before the limit, so that better matches that are filtered out take no place."""
        await index.add([build_item(f"high{number}", "salary salary", level="restricted") for number in range(30)])
        await index.add([build_item("low", "the salary of all of us together", level="public")])
        where = attrs.evolve(OF_ANN, max_level="internal")
        assert await self.search(index, "salary", where, 1) == ["low"]

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ({"kinds": (ItemKind.PREFERENCE,)}, {"preference"}),
            ({"max_level": "public"}, {"public"}),
            ({"without_labels": (Label.UNTRUSTED,)}, {"preference", "public", "talk"}),
            ({"session": "talk"}, {"talk"}),
            ({"as_of": 150.0}, {"preference", "public", "talk", "labelled"}),
            ({"valid_at": 100.0}, {"preference", "public", "talk", "labelled"}),
            ({"include_held": True}, {"preference", "public", "talk", "labelled", "held", "later"}),
            ({}, {"preference", "public", "talk", "labelled", "later"}),
        ],
    )
    async def test_each_filter(self, index: MemoryIndex, changes: Any, found: set[str]) -> None:
        """Each field of the filter leaves out the items that do not fit."""
        await index.add(
            [
                build_item("preference", "word", kind=ItemKind.PREFERENCE),
                build_item("public", "word", level="public"),
                build_item("talk", "word", session="talk"),
                build_item("labelled", "word", labels=(Label.PRIVATE, Label.UNTRUSTED)),
                build_item("held", "word", held=True),
                build_item("later", "word", recorded_at=200.0, valid_from=200.0, labels=(Label.UNTRUSTED,)),
            ]
        )
        where = attrs.evolve(OF_ANN, **changes)
        assert set(await self.search(index, "word", where)) == found
        assert {item.id for item in await index.read(where)} == found

    async def test_items_are_read_by_importance_and_slot(self, index: MemoryIndex) -> None:
        """From the least importance on, and of one slot; both together with the other conditions."""
        await index.add(
            [
                build_item("low", "drinks tea", importance=0.79),
                build_item("high", "likes tea", importance=0.8, slot="drink"),
                build_item("top", "likes rice", importance=1.0, slot="food"),
            ]
        )
        important = attrs.evolve(OF_ANN, min_importance=0.8)
        assert [item.id for item in await index.read(important)] == ["high", "top"]
        assert await self.search(index, "tea", important) == ["high"]
        assert [item.id for item in await index.read(attrs.evolve(important, slot="food"))] == ["top"]
        assert await index.read(attrs.evolve(OF_ANN, slot="other")) == []

    async def test_a_slot_has_one_value_at_a_time(self, index: MemoryIndex) -> None:
        """The item with the latest beginning holds; earlier ones hold until then. Other slots are not affected."""
        await index.add(
            [
                build_item("porto", "lives in Porto", slot="home", valid_from=10.0, recorded_at=10.0),
                build_item("faro", "lives in Faro", slot="home", valid_from=30.0, recorded_at=40.0),
                build_item("backfilled", "lives in Braga", slot="home", valid_from=20.0, recorded_at=50.0),
                build_item("work", "lives near work", slot="office", valid_from=10.0, recorded_at=10.0),
                build_item("free", "lives happily", valid_from=10.0, recorded_at=10.0),
            ]
        )

        async def ask(valid_at: float, as_of: float) -> set[str]:
            where = attrs.evolve(OF_ANN, valid_at=valid_at, as_of=as_of)
            return {*await self.search(index, "lives", where)} - {"work", "free"}

        assert await ask(15.0, math.inf) == {"porto"}
        assert await ask(25.0, math.inf) == {"backfilled"}
        assert await ask(35.0, math.inf) == {"faro"}
        assert await ask(25.0, 45.0) == {"porto"}  # the backfilled item was not known yet
        assert await ask(35.0, 15.0) == {"porto"}
        assert await ask(5.0, math.inf) == set()
        assert "work" in await self.search(index, "lives", attrs.evolve(OF_ANN, valid_at=35.0))

    async def test_a_correction_replaces(self, index: MemoryIndex) -> None:
        """A replaced item is found only as of a time before its correction was recorded."""
        await index.add([build_item("wrong", "Ann is 31"), build_item("right", "Ann is 32", replaces="wrong")])
        await index.add([build_item("newest", "Ann is 33", replaces="right", recorded_at=200.0)])
        assert await self.search(index, "Ann") == ["newest"]
        assert await self.search(index, "Ann", attrs.evolve(OF_ANN, as_of=150.0)) == ["right"]

    async def test_a_held_item_replaces_nothing(self, index: MemoryIndex) -> None:
        """An item that waits for approval neither replaces another nor takes its slot, until it is released."""
        await index.add([build_item("old", "lives in Porto", slot="home")])
        held = build_item("new", "lives in Faro", slot="home", valid_from=110.0, replaces="old", held=True)
        await index.add([held])
        where = attrs.evolve(OF_ANN, valid_at=120.0)
        assert await self.search(index, "lives", where) == ["old"]
        assert await index.release(["new", "unknown"], at=130.0, by="eve") == 1
        assert await self.search(index, "lives", where) == ["new"]
        assert await index.release(["new"], at=130.0, by="eve") == 0

    async def test_neighbours(self, index: MemoryIndex) -> None:
        """Items of a session get places in their order; the ones near a match are found, those of others are not."""
        await index.add([build_item(f"a{number}", f"word{number}", session="a") for number in range(6)])
        await index.add([build_item(f"b{number}", "other", session="b") for number in range(6)])
        found = (await index.search_text("word3", OF_ANN, 10)).matches
        near = await index.find_neighbours(found, 2, OF_ANN)
        assert sorted(match.item_id for match in near) == ["a1", "a2", "a3", "a4", "a5"]
        assert {match.session for match in near} == {found[0].session}
        assert not await index.find_neighbours([], 2, OF_ANN)

    async def test_items_without_a_session_have_no_neighbours(self, index: MemoryIndex) -> None:
        """Items that stand by themselves are not near those that were recorded before and after them."""
        await index.add([build_item("a", "word"), build_item("b", "other")])
        found = (await index.search_text("word", OF_ANN, 10)).matches
        assert found[0].session == ""
        assert not await index.find_neighbours(found, 2, OF_ANN)

    async def test_reading_goes_on_after_an_id(self, index: MemoryIndex) -> None:
        """Pages of all items, in the order of their ids, leave out none."""
        await index.add([build_item(f"{number:02}", "text") for number in range(7)])
        assert [item.id for item in await index.read(OF_ANN, limit=3)] == ["00", "01", "02"]
        assert [item.id for item in await index.read(OF_ANN, after="02", limit=9)] == ["03", "04", "05", "06"]

    async def test_forgotten_items_do_not_return(self, index: MemoryIndex) -> None:
        """A forgotten item is not found, cannot be added again, and leaves a record without content."""
        await index.add([build_item("a", "secret one"), build_item("b", "secret two")])
        assert await index.forget(["a", "unknown"], at=300.0, by="ann", reason="wish") == 1
        assert await self.search(index, "secret") == ["b"]
        assert [*await index.add([build_item("a", "secret one")])] == []
        assert await index.get(["a"]) == {}
        (proof,) = await index.list_deletions()
        assert (proof.items, proof.at, proof.by, proof.reason) == (1, 300.0, "ann", "wish")

    async def test_a_forgotten_owner_may_begin_anew(self, index: MemoryIndex) -> None:
        """Items recorded until then do not return; later ones do, and other owners keep theirs."""
        await index.add([build_item("a", "secret"), build_item("b", "secret", namespace=BOB)])
        assert await index.forget_namespace(ANN, at=300.0, by="", reason="") == 1
        assert [*await index.add([build_item("again", "secret", recorded_at=300.0)])] == []
        assert len(await index.add([build_item("new", "secret", recorded_at=301.0)])) == 1
        assert await self.search(index, "secret") == ["new"]
        assert await self.search(index, "secret", ItemFilter(namespaces=(BOB,))) == ["b"]

    async def test_versions_of_a_forgotten_item_do_not_return(self, index: MemoryIndex) -> None:
        """Versions that are added together with a forgotten item are left out, though they are new."""
        first, second = build_item("a", "secret"), build_item("a2", "secret", replaces="a", recorded_at=301.0)
        third = build_item("a3", "secret", replaces="a2", recorded_at=302.0)
        await index.add([first])
        await index.forget(["a"], at=300.0, by="", reason="")
        added = await index.add([first, second, third, build_item("b", "other")])
        assert [item.id for item in added] == ["b"]
        await index.forget_namespace(ANN, at=300.0, by="", reason="")
        assert [*await index.add([build_item("c", "secret"), attrs.evolve(second, replaces="c")])] == []
        assert await self.search(index, "secret") == []

    async def test_words_that_are_forgotten_return_in_no_other_item(self, index: MemoryIndex) -> None:
        """Neither one that confirms the item, nor one that confirms that; without `with_words` they may."""
        await index.add([build_item("a", "secret"), build_item("b", "open")])
        await index.forget(["a"], at=300.0, by="", reason="", with_words=True)
        await index.forget(["b"], at=300.0, by="", reason="")
        again = build_item("a2", "secret", follows="a", recorded_at=301.0)
        added = await index.add([again, build_item("b2", "open", follows="b", recorded_at=301.0)])
        assert [item.id for item in added] == ["b2"]
        last = build_item("a3", "secret", follows="a2", recorded_at=302.0)
        assert [*await index.add([last, build_item("x", "secret", imported_id="a")])] == []

    async def test_items_that_were_corrected_are_read_on_request(self, index: MemoryIndex) -> None:
        """Beside those that took their place."""
        await index.add([build_item("a", "old"), build_item("a2", "new", replaces="a")])
        where = ItemFilter(namespaces=(ANN,), include_replaced=True)
        assert [item.id for item in await index.read(where)] == ["a", "a2"]
        assert [item.id for item in await index.read(OF_ANN)] == ["a2"]

    async def test_the_index_of_words_is_built_again(self, index: MemoryIndex) -> None:
        """From the items, which are found as before; what was forgotten is not."""
        await index.add(
            [build_item("tea", "Ann drinks tea"), build_item("gone", "Ann"), build_item("beijing", "去北京")]
        )
        await index.forget(["gone"], at=300.0, by="", reason="")
        assert await index.rebuild_text() == 2
        assert await self.search(index, "drinking") == ["tea"]
        assert await self.search(index, "北京") == ["beijing"]
        assert await self.search(index, "Ann") == ["tea"]

    async def test_derived_items_are_dropped(self, index: MemoryIndex) -> None:
        """A rebuild drops the items with a source only, and a release holds for the item that returns."""
        derived = build_item("derived", "word", source=ItemSource(run_id="r"), held=True)
        await index.add([derived, build_item("own", "word")])
        await index.release(["derived"], at=1.0, by="eve")
        assert await index.drop_derived() == 1
        assert await self.search(index, "word") == ["own"]
        await index.add([derived])
        assert set(await self.search(index, "word")) == {"derived", "own"}

    async def test_owners_are_listed(self, index: MemoryIndex) -> None:
        """Each once, in order, also one whose items are held; not one whose items are forgotten."""
        nobody = Namespace()
        items = [build_item("a", "x", namespace=BOB), build_item("b", "x"), build_item("c", "x", held=True)]
        await index.add([*items, build_item("d", "x", namespace=nobody), build_item("e", "x", namespace=BOB)])
        assert [*await index.list_owners()] == [nobody, ANN, BOB]
        await index.forget_namespace(BOB, at=500.0, by="", reason="")
        assert [*await index.list_owners()] == [nobody, ANN]

    async def test_items_are_forgotten_by_their_source(self, index: MemoryIndex) -> None:
        """The items of a run go together with their corrections, for all owners, and do not return."""
        items = [
            build_item("a", "word", source=ItemSource(run_id="r1")),
            build_item("b", "word", source=ItemSource(run_id="r1", version=2), namespace=BOB),
            build_item("c", "word", source=ItemSource(run_id="r2")),
            build_item("own", "word"),
            build_item("a2", "word", replaces="a"),
            build_item("a3", "word", replaces="a2"),
            build_item("c2", "word", replaces="c"),
        ]
        await index.add(items)
        assert [*await index.list_sources()] == ["r1", "r2"]
        assert [*await index.list_sources(after="r1")] == ["r2"]
        assert [*await index.list_sources(limit=1)] == ["r1"]
        assert await index.forget_sources(["r1", "unknown"], at=500.0, by="x", reason="y") == 4
        assert [item.id for item in await index.add(items)] == []
        assert {*await index.get([item.id for item in items])} == {"c", "c2", "own"}

    async def test_the_newest_time(self, index: MemoryIndex) -> None:
        """The time of the newest record is minus infinity before there is one."""
        assert await index.newest_time() == -math.inf
        await index.add([build_item("a", "x", recorded_at=7.0), build_item("b", "x", recorded_at=5.0)])
        assert await index.newest_time() == 7.0

    async def test_two_objects_share_the_items(self, index: MemoryIndex, other: MemoryIndex) -> None:
        """Items that one object adds are found by another one, and places are not given twice."""
        for number in range(3):
            for each in (index, other):
                await each.add([build_item(f"{id(each)}-{number}", "shared", session="s")])
        found = await index.search_text("shared", OF_ANN, 10)
        assert sorted(match.place for match in found.matches) == [1, 2, 3, 4, 5, 6]
        assert await other.search_text("shared", OF_ANN, 10) == found


@pytest.mark.anyio
class VectorIndexConformance:
    """Conformance tests of the vectors of an index. Override the fixture `index` as for `MemoryIndexConformance`."""

    @pytest.fixture
    async def index(self) -> VectorIndex:
        """Return the index to check."""
        raise NotImplementedError("the fixture `index` is missing: override it with one that yields a new, empty index")

    @pytest.fixture
    async def other(self) -> VectorIndex:
        """Return a second index object with the same data, as another process would have."""
        pytest.skip("needs a second index object: override the fixture `other` if the index supports several")

    async def embed(self, index: VectorIndex, vectors: Mapping[str, tuple[float, ...]], **fields: Any) -> None:
        """Add an item for each vector, with its id as the text."""
        await index.use_vectors("model", 2)
        await index.add([build_item(each, each, **fields) for each in vectors])
        await index.add_vectors(vectors)

    async def search(
        self, index: VectorIndex, vector: tuple[float, ...], where: ItemFilter = OF_ANN, limit: int = 10
    ) -> list[str]:
        """Return the ids of the items that a search finds, best first."""
        return [match.item_id for match in await index.search_vector(vector, where, limit)]

    async def test_similar_directions_come_first(self, index: VectorIndex) -> None:
        """The length of a vector does not count. The scores are cosines, and 0 for opposite directions."""
        await self.embed(
            index, {"east": (5.0, 0.0), "north": (0.0, 0.1), "north-east": (1.0, 1.0), "west": (-1.0, 0.0)}
        )
        found = await index.search_vector((0.5, 0.001), OF_ANN, 10)
        assert [match.item_id for match in found] == ["east", "north-east", "north", "west"]
        assert [match.score for match in found] == pytest.approx([1, math.sqrt(0.5), 0, 0], abs=0.02)
        assert await self.search(index, (0.5, 0.001), limit=2) == ["east", "north-east"]

    async def test_the_filter_comes_before_the_ranking(self, index: VectorIndex) -> None:
        """Nearer items that are filtered out take no place, however many they are."""
        near = {f"near{number}": (1.0, number / 10_000) for number in range(40)}
        await self.embed(index, {"far": (0.0, 1.0)}, labels=(Label.PRIVATE,))
        await self.embed(index, near, level="restricted")
        await self.embed(index, {f"bob-{each}": vector for each, vector in near.items()}, namespace=BOB)
        assert await self.search(index, (1.0, 0.0), attrs.evolve(OF_ANN, max_level="internal"), 1) == ["far"]
        assert (
            len(await self.search(index, (1.0, 0.0), attrs.evolve(OF_ANN, without_labels=(Label.PRIVATE,)), 50)) == 40
        )
        assert len(await self.search(index, (1.0, 0.0), attrs.evolve(OF_ANN, namespaces=(ANN, BOB)), 100)) == 81
        assert await self.search(index, (1.0, 0.0), attrs.evolve(OF_ANN, as_of=50.0)) == []

    async def test_items_wait_for_their_vector(self, index: VectorIndex) -> None:
        """Items are listed until they have a vector, those from before the first use of vectors too."""
        await index.add([build_item("before", "before")])
        await index.use_vectors("model", 2)
        await index.add([build_item("after", "after"), build_item("gone", "gone")])
        await index.forget(["gone"], at=200.0, by="", reason="")
        assert [item.id for item in await index.read_unembedded(10)] == ["before", "after"]
        assert [item.id for item in await index.read_unembedded(1)] == ["before"]
        await index.add_vectors({"before": (1.0, 0.0), "unknown": (1.0, 0.0)})
        assert [item.id for item in await index.read_unembedded(10)] == ["after"]
        await index.add_vectors({"before": (0.0, 1.0), "after": (0.0, 1.0)})
        assert await self.search(index, (1.0, 0.0)) == ["before", "after"]
        assert not await index.read_unembedded(10)

    async def test_equal_texts_have_one_vector(self, index: VectorIndex) -> None:
        """A text that was embedded is not embedded again, for another owner too."""
        await self.embed(index, {"text": (1.0, 0.0)})
        await index.add([build_item("same", "text", namespace=BOB), build_item("different", "other")])
        assert {*await index.copy_vectors(["text", "same", "different"])} == {"text", "same"}
        assert await self.search(index, (1.0, 0.0), ItemFilter(namespaces=(BOB,))) == ["same"]
        assert [item.id for item in await index.read_unembedded(10)] == ["different"]

    async def test_a_rebuild_keeps_vectors(self, index: VectorIndex) -> None:
        """The vectors of dropped items are there for those that return, until the unused ones are deleted."""
        source = ItemSource(run_id="r")
        await self.embed(index, {"one": (1.0, 0.0), "two": (0.0, 1.0)}, source=source)
        await index.drop_derived()
        await index.add([build_item("one", "one", source=source)])
        assert {*await index.copy_vectors(["one"])} == {"one"}
        await index.drop_unused_vectors()
        await index.add([build_item("two", "two", source=source)])
        assert {*await index.copy_vectors(["one", "two"])} == {"one"}
        assert await self.search(index, (0.0, 1.0)) == ["one"]

    async def test_forgotten_vectors_are_gone(self, index: VectorIndex) -> None:
        """Forgetting deletes the vector with the item, so that nothing has it for an equal text."""
        await self.embed(index, {"a": (1.0, 0.0), "b": (1.0, 0.1)})
        await self.embed(index, {"c": (1.0, 0.0)}, namespace=BOB)
        await index.forget(["a"], at=200.0, by="", reason="")
        await index.forget_namespace(BOB, at=200.0, by="", reason="")
        assert await self.search(index, (1.0, 0.0)) == ["b"]
        await index.add([build_item("a-again", "a"), build_item("c-again", "c")])
        assert {*await index.copy_vectors(["a-again", "c-again"])} == set()

    async def test_another_model_begins_anew(self, index: VectorIndex, other: VectorIndex) -> None:
        """Another model, or other dimensions, drop the vectors; an object with the earlier model notices that."""
        await self.embed(index, {"a": (1.0, 0.0)})
        for model, dims in (("other", 2), ("other", 3)):
            await other.use_vectors(model, dims)
            assert [item.id for item in await other.read_unembedded(10)] == ["a"]
            vector = (1.0, *[0.0] * (dims - 1))
            assert not await other.search_vector(vector, OF_ANN, 1)
            await other.add_vectors({"a": vector})
            assert [match.item_id for match in await other.search_vector(vector, OF_ANN, 1)] == ["a"]
        with pytest.raises(MisuseError, match="reindex"):
            await index.add_vectors({"a": (1.0, 0.0)})
        with pytest.raises(MisuseError, match="reindex"):
            await index.search_vector((1.0, 0.0), OF_ANN, 1)

    async def test_two_objects_share_the_vectors(self, index: VectorIndex, other: VectorIndex) -> None:
        """A vector that one object adds is found by another one."""
        await self.embed(index, {"a": (1.0, 0.0)})
        await self.embed(other, {"b": (0.0, 1.0)})
        assert await self.search(index, (0.0, 1.0)) == ["b", "a"]
        assert await self.search(other, (1.0, 0.0)) == ["a", "b"]
