"""Records: small JSON values beside the runs, written by compare-and-set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from agentfsm.core.errors import ConflictError, MisuseError

if TYPE_CHECKING:
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoreRecord


async def _add(store: Store, key: str, name: str) -> None:
    """Add one to a count in a record, as often as it takes."""
    while True:
        found = await store.read_record("count", key)
        counts: Any = {} if found is None else found.value
        counts[name] = counts.get(name, 0) + 1
        try:
            await store.write_record("count", key, counts, revision=0 if found is None else found.revision)
        except ConflictError:
            continue
        return


def _keys(records: tuple[StoreRecord, ...]) -> list[str]:
    return [record.key for record in records]


class RecordConformance:
    """Records: small JSON values beside the runs, written by compare-and-set."""

    async def test_a_record_is_read_as_it_was_written(self, store: Store) -> None:
        """Kind and key name one value, which is any JSON; kinds share nothing."""
        value: Any = {"größe": [1, 2.5, None, True, "\u0000\u0001 😀"], "leer": {}}
        written = await store.write_record("kind-a", "Ünicode: a/b", value, revision=0)
        assert written.value == value
        assert (written.kind, written.key, written.expires_at) == ("kind-a", "Ünicode: a/b", None)
        assert written.revision > 0
        assert await store.read_record("kind-a", "Ünicode: a/b") == written
        assert await store.read_record("kind-b", "Ünicode: a/b") is None
        assert await store.read_record("kind-a", "ünicode: a/b") is None

    async def test_a_later_change_of_a_value_changes_no_record(self, store: Store) -> None:
        """Neither of the value that was given, nor of the one that was returned."""
        given: Any = {"list": [1]}
        written: Any = await store.write_record("copy", "k", given, revision=0)
        given["list"].append(2)
        written.value["list"].append(3)
        found = await store.read_record("copy", "k")
        assert found is not None
        assert found.value == {"list": [1]}

    async def test_a_write_needs_the_current_revision(self, store: Store) -> None:
        """Another revision, or none, is a conflict, and nothing is written."""
        with pytest.raises(ConflictError, match="'k'"):
            await store.write_record("cas", "k", 1, revision=7)
        first = await store.write_record("cas", "k", 1, revision=0)
        second = await store.write_record("cas", "k", 2, revision=first.revision)
        assert second.revision > first.revision
        for wrong in (0, first.revision, second.revision + 1):
            with pytest.raises(ConflictError, match="'k'"):
                await store.write_record("cas", "k", 3, revision=wrong)
        assert await store.read_record("cas", "k") == second

    async def test_a_deleted_record_is_absent(self, store: Store) -> None:
        """And an old revision does not fit a new record under the same key."""
        first = await store.write_record("gone", "k", 1, revision=0)
        second = await store.write_record("gone", "k", 2, revision=first.revision)
        with pytest.raises(ConflictError, match="'k'"):
            await store.delete_record("gone", "k", revision=first.revision)
        assert await store.delete_record("gone", "k", revision=second.revision)
        assert not await store.delete_record("gone", "k")
        assert not await store.delete_record("gone", "k", revision=second.revision)
        assert await store.read_record("gone", "k") is None
        with pytest.raises(ConflictError, match="'k'"):
            await store.write_record("gone", "k", 3, revision=second.revision)
        third = await store.write_record("gone", "k", 3, revision=0)
        assert third.revision > second.revision
        with pytest.raises(ConflictError, match="'k'"):
            await store.write_record("gone", "k", 4, revision=second.revision)
        assert await store.delete_record("gone", "k")

    async def test_an_expired_record_is_absent(self, store: Store) -> None:
        """By the store's clock; it can be replaced as if it had never existed, and gets a larger revision."""
        now = await store.now()
        kept = await store.write_record("expiry", "kept", 1, revision=0, expires_at=now + 3_600)
        past = await store.write_record("expiry", "past", 1, revision=0, expires_at=now - 1)
        assert kept.expires_at == now + 3_600
        assert await store.read_record("expiry", "kept") == kept
        assert await store.read_record("expiry", "past") is None
        assert _keys(await store.list_records("expiry")) == ["kept"]
        assert not await store.delete_record("expiry", "past")
        with pytest.raises(ConflictError, match="'past'"):
            await store.write_record("expiry", "past", 2, revision=past.revision)
        again = await store.write_record("expiry", "past", 2, revision=0, expires_at=now + 3_600)
        assert again.revision > past.revision
        assert await store.read_record("expiry", "past") == again
        unlimited = await store.write_record("expiry", "kept", 2, revision=kept.revision)
        assert unlimited.expires_at is None

    async def test_prune_deletes_expired_records(self, store: Store) -> None:
        """And no others, whatever time is given for the runs."""
        now = await store.now()
        for key, expires_at in (("a", now - 1), ("b", now + 3_600), ("c", None)):
            await store.write_record("prune", key, key, revision=0, expires_at=expires_at)
        assert await store.prune(0) == 0
        assert _keys(await store.list_records("prune")) == ["b", "c"]
        assert (await store.write_record("prune", "a", 1, revision=0)).value == 1

    async def test_records_are_listed_by_key(self, store: Store) -> None:
        """In the order of the code points, in pages, by prefix."""
        keys = ["a", "a/1", "a/10", "a/2", "a_", "b", "B", "%", "ä", "\uffff", "😀"]
        for key in keys:
            await store.write_record("list", key, {"key": key}, revision=0)
        await store.write_record("list-other", "a", 1, revision=0)
        found = await store.list_records("list")
        assert _keys(found) == sorted(keys)
        assert [record.value for record in found] == [{"key": key} for key in sorted(keys)]
        assert _keys(await store.list_records("list", prefix="a/")) == ["a/1", "a/10", "a/2"]
        assert _keys(await store.list_records("list", prefix="a/", after="a/1", limit=1)) == ["a/10"]
        assert _keys(await store.list_records("list", after="b", limit=2)) == ["ä", "\uffff"]
        assert _keys(await store.list_records("list", prefix="%")) == ["%"]
        assert await store.list_records("list", prefix="c") == ()
        pages: list[str] = []
        while page := await store.list_records("list", after=pages[-1] if pages else "", limit=3):
            pages += _keys(page)
        assert pages == sorted(keys)

    async def test_many_writers_lose_no_change(self, store: Store) -> None:
        """30 tasks count in two records at the same time, each by reading, adding and writing."""
        async with anyio.create_task_group() as group:
            for number in range(30):
                for key in ("x", "y")[:: -1 if number % 2 else 1]:
                    group.start_soon(_add, store, key, str(number % 3))
        for key in ("x", "y"):
            found = await store.read_record("count", key)
            assert found is not None
            assert found.value == {"0": 10, "1": 10, "2": 10}

    async def test_two_store_objects_lose_no_change(self, store: Store, other: Store) -> None:
        """Like two processes, which write two records in opposite orders."""
        async with anyio.create_task_group() as group:
            for number in range(20):
                for key in ("x", "y")[:: -1 if number % 2 else 1]:
                    group.start_soon(_add, (store, other)[number % 2], key, str(number % 2))
        for key in ("x", "y"):
            found = await other.read_record("count", key)
            assert found is not None
            assert found.value == {"0": 10, "1": 10}
            assert await store.read_record("count", key) == found

    async def test_invalid_arguments_are_refused(self, store: Store) -> None:
        """Before anything is written; the message names the argument."""
        valid: dict[str, Any] = {"kind": "valid", "key": "k", "value": 1, "revision": 0}
        invalid: dict[str, list[Any]] = {
            "kind": ["Kind", "", "a:b", "k" * 51, 1],
            "key": ["", "k" * 501, "a\0b", "\ud800", 1],
            "revision": [-1, None, True, "1"],
            "expires_at": [float("inf"), "tomorrow"],
            "value": ["v" * (1024 * 1024 - 1), float("nan"), "\ud800", object()],
        }
        for name, values in invalid.items():
            for value in values:
                with pytest.raises(MisuseError, match=name):
                    await store.write_record(**{**valid, name: value})
        lists: list[dict[str, Any]] = [{"kind": "Kind"}, {"prefix": 1}, {"after": "a\0b"}, {"limit": 0}]
        for wrong in lists:
            with pytest.raises(MisuseError, match=next(iter(wrong))):
                await store.list_records(**{"kind": "valid", **wrong})
        for call in (store.read_record, store.delete_record):
            with pytest.raises(MisuseError, match="key"):
                await call("valid", "")
        assert await store.list_records("valid") == ()

    async def test_the_largest_record_is_stored(self, store: Store) -> None:
        """1 MiB as JSON, under the longest key."""
        value, key = "v" * (1024 * 1024 - 2), "😀" * 500
        written = await store.write_record("k" * 50, key, value, revision=0)
        assert await store.read_record("k" * 50, key) == written
        assert await store.list_records("k" * 50, prefix="😀" * 499) == (written,)
