"""Rows of memory items in SQL, and the conditions that select them: the same for SQLite and PostgreSQL.

Values of a condition are written as `:name`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import DATA_LEVELS, Label
from agentfsm.core.value import Value
from agentfsm.ports.memory_items import ItemFilter, ItemKind, ItemSource, MemoryItem, Namespace

# Characters of the word that stands for an owner: 128 bits of a hash.
OWNER_CHARS: Final = 33
COLUMNS: Final = (
    'number, id, tenant, "user", kind, slot, replaces, follows, imported_id, source_run, source_version, session, '
    "place, level, valid_from, valid_to, recorded_at, held, labels, importance, text, data"
)
COLUMN_NAMES: Final = tuple(COLUMNS.replace('"', "").split(", "))
PREFIXED_COLUMNS: Final = ", ".join(f"i.{name}" for name in COLUMNS.split(", "))
# Session of the item `i`, different for each owner.
SESSION: Final = "CASE i.session WHEN '' THEN '' ELSE i.owner || i.session END"
# An item is replaced once a correction of it is recorded. The first condition lets SQLite use the index.
_NOT_REPLACED: Final = """NOT EXISTS (SELECT 1 FROM items r WHERE r.replaces <> '' AND r.replaces = {item}.id
    AND r.recorded_at <= :as_of AND NOT r.held)"""
# An item with a slot is true until the next item with that slot; of several that begin at once, the newest holds.
_VALID: Final = f"""i.valid_from <= :valid_at AND i.valid_to > :valid_at AND (i.slot = '' OR NOT EXISTS (
    SELECT 1 FROM items s WHERE s.owner = i.owner AND s.slot = i.slot AND s.slot <> ''
    AND s.recorded_at <= :as_of AND NOT s.held AND s.valid_from <= :valid_at
    AND (s.valid_from, s.recorded_at, s.id) > (i.valid_from, i.recorded_at, i.id)
    AND {_NOT_REPLACED.format(item="s")}))"""  # noqa: S608


@attrs.frozen(kw_only=True)
class ListSyntax(Value):
    """The way in which a database takes a list of texts as one value."""

    contains: str
    """Condition that a column is in a list, with `{column}` and `{name}`, the name of the value."""

    overlaps: str
    """Condition that the labels of the item `i` are in a list, with `{name}`."""

    def has(self, column: str, name: str) -> str:
        """Return the condition that a column is in the list of that name."""
        return self.contains.format(column=column, name=name)


def write_filter(where: ItemFilter, syntax: ListSyntax) -> tuple[str, dict[str, Any]]:
    """Return the condition on the item `i`, and its values; texts in lists are lists."""
    values: dict[str, Any] = {"as_of": where.as_of, "level": DATA_LEVELS.index(Label(where.max_level))}
    values["owners"] = [name_owner(each) for each in where.namespaces]
    parts = [syntax.has("i.owner", "owners"), "i.level <= :level", "i.recorded_at <= :as_of"]
    if not where.include_replaced:
        parts.append(_NOT_REPLACED.format(item="i"))
    if where.kinds:
        values["kinds"] = [kind.value for kind in where.kinds]
        parts.append(syntax.has("i.kind", "kinds"))
    if where.without_labels:
        values["labels"] = [str(label) for label in where.without_labels]
        parts.append(f"NOT {syntax.overlaps.format(name='labels')}")
    if where.session is not None:
        values["session"] = where.session
        parts.append("i.session = :session")
    if where.valid_at is not None:
        values["valid_at"] = where.valid_at
        parts.append(_VALID)
    if where.slot is not None:
        values["slot"] = where.slot
        parts.append("i.slot = :slot AND i.slot <> ''")
    if where.min_importance:
        values["importance"] = where.min_importance
        parts.append("i.importance >= :importance")
    if not where.include_held:
        parts.append("NOT i.held")
    return " AND ".join(parts), values


def name_owner(namespace: Namespace) -> str:
    """Return a word for an owner that stands for it in the text index, and in the notes on what was forgotten."""
    names = json.dumps([namespace.tenant, namespace.user])
    return f"o{sha256(names.encode()).hexdigest()}"[:OWNER_CHARS]


# Seconds between two records that follow one another at one tick of the clock.
TICK_S: Final = 1e-6
# The notes on what was forgotten: ids of items; and with the owner, items that are not to be imported again, and those
# whose words are not to be confirmed.
NOTES: Final = "{id}", "{owner} {id}"
NOTES_ON_WORDS: Final = (*NOTES, "words of {id}")


def write_notes(items: Iterable[tuple[str, str]], forms: Sequence[str]) -> list[str]:
    """Return the notes on forgotten items, each with its id and the name of its owner, in these forms."""
    return [form.format(id=item_id, owner=owner) for item_id, owner in items for form in forms]


def find_notes(item: MemoryItem) -> list[str]:
    """Return the notes of which one tells that the item, or what it follows from, was forgotten."""
    follows = item.follows if item.is_end else f"words of {item.follows}"
    return [item.id, item.replaces, follows, f"{name_owner(item.namespace)} {item.imported_id}"]


def hash_text(text: str) -> bytes:
    """Return a hash of a text. Items with the same text have the same vector."""
    return sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


def other_model_error(found: tuple[str, int], given: tuple[str, int]) -> MisuseError:
    """Return the error of an index that another process has given another model, or other dimensions."""
    return MisuseError(
        f"the memory has vectors of {found[0]!r} with {found[1]} dimensions now, and the embedder is {given[0]!r} with "
        f"{given[1]}: vectors of two models cannot be compared. Give all processes the same embedder; one that is "
        "started anew, or calls memory.reindex(), embeds all items again"
    )


def write_row(item: MemoryItem) -> tuple[Any, ...]:
    """Return the values of the columns but `number`."""
    source = item.source
    return (
        item.id,
        item.namespace.tenant,
        item.namespace.user,
        item.kind.value,
        item.slot,
        item.replaces,
        item.follows,
        item.imported_id,
        None if source is None else source.run_id,
        None if source is None else source.version,
        item.session,
        item.place,
        DATA_LEVELS.index(Label(item.level)),
        item.valid_from,
        item.valid_to,
        item.recorded_at,
        item.held,
        json.dumps(item.labels),
        item.importance,
        item.text,
        json.dumps(item.data, ensure_ascii=False),
    )


def read_row(row: Sequence[Any]) -> MemoryItem:
    """Return the item with these values of the columns."""
    fields = dict(zip(COLUMN_NAMES, row, strict=True))
    del fields["number"]
    run_id, version = fields.pop("source_run"), fields.pop("source_version")
    return MemoryItem(
        namespace=Namespace(tenant=fields.pop("tenant"), user=fields.pop("user")),
        kind=ItemKind(fields.pop("kind")),
        source=None if run_id is None else ItemSource(run_id=run_id, version=version),
        level=DATA_LEVELS[fields.pop("level")].value,
        held=bool(fields.pop("held")),
        labels=tuple(json.loads(fields.pop("labels"))),
        data=json.loads(fields.pop("data")),
        **fields,
    )
