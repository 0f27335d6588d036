"""Long-term memory: items, filters, and the protocol of the indexes that keep them.

An index is a set of items that only grows, except that items are forgotten. Whether an item holds at some time follows
from the set alone: which items replace it, and which hold the same slot later. So the same items give the same answers
in whatever order they were added, and an index can be rebuilt from the journals.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import DATA_LEVELS, Label, as_labels
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.run import Run
from agentfsm.core.usage import Usage
from agentfsm.core.validation import (
    NAME,
    STRING,
    ValueRule,
    is_number,
    require_between,
    require_choice,
)
from agentfsm.core.value import Value
from agentfsm.core.window_layers import WindowDemand, WindowLayers

# Characters of an item: a page of dense text. Longer texts are cut into chunks before.
MAX_ITEM_CHARS: Final = 20_000
MAX_DATA_CHARS: Final = 100_000

# Seconds since 1970, in a range that is far from all times of people, and in which numbers have fractions of seconds.
_TIME: Final = ValueRule(fits=lambda value: is_number(value) and abs(value) < 1e12, wanted="seconds since 1970")
_TEXT: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and bool(value.strip()) and len(value) <= MAX_ITEM_CHARS,
    wanted=f"a text of 1 to {MAX_ITEM_CHARS:,} characters; split a longer one into several items",
)
_END: Final = ValueRule(
    fits=lambda value: is_number(value) and not math.isnan(value), wanted="seconds since 1970, or infinity"
)
LEVEL: Final = require_choice(*DATA_LEVELS)
# Places in a session fit into a column of any database.
_PLACE: Final = ValueRule(
    fits=lambda value: type(value) is int and 0 <= value < 2**53, wanted="a whole number from 0 to 2**53"
)


class ItemKind(StrEnum):
    """Kind of a memory item."""

    EPISODE = "episode"
    FACT = "fact"
    PREFERENCE = "preference"
    DOCUMENT = "document"


def parse_item_kind(value: ItemKind | str) -> ItemKind:
    """Return the kind of that name.

    Raises:
        MisuseError: if there is none.
    """
    _KIND.check("MemoryItem", "kind", value)
    return ItemKind(value)


_KIND: Final = require_choice(*ItemKind)


@attrs.frozen(kw_only=True)
class Namespace(Value):
    """Owner of memory items. Items of one owner are never found for another."""

    tenant: str = attrs.field(default="", validator=STRING)
    """Tenant, as in the header of a run; empty for none."""

    user: str = attrs.field(default="", validator=STRING)
    """User, as in the header of a run; empty for the items that all users of the tenant share."""


@attrs.frozen(kw_only=True)
class ItemSource(Value):
    """The event from which an item was derived."""

    run_id: str = attrs.field(validator=NAME)
    """Id of the run."""

    version: int = 0
    """Version of the run after the event; 0 for the run as a whole."""


@attrs.frozen(kw_only=True)
class MemoryItem(Value):
    """One thing to remember. It never changes: a correction is a new item that replaces it."""

    id: str = attrs.field(validator=NAME)
    """Id of the item, unique in its index."""

    namespace: Namespace = Namespace()
    """Owner of the item."""

    kind: ItemKind = attrs.field(default=ItemKind.FACT, converter=parse_item_kind)
    """Kind of the item."""

    text: str = attrs.field(validator=_TEXT)
    """Text, which is searched and which models read."""

    data: Mapping[str, Any] = attrs.field(factory=dict)
    """Further content, as JSON values."""

    slot: str = attrs.field(default="", validator=STRING)
    """Subject that the item gives a value to, such as "home town". Of the items of one owner with the same slot, the
    one with the latest `valid_from` holds. Empty: other items do not affect this one.
    """

    replaces: str = attrs.field(default="", validator=STRING)
    """Id of the item that this one corrects; empty for none. The other item is not found any more, except as of a time
    before this one was recorded.
    """

    follows: str = attrs.field(default="", validator=STRING)
    """Id of the item that this one confirms or ends, whose words it has; empty for none."""

    imported_id: str = attrs.field(default="", validator=STRING)
    """Id that the item had in the memory from which it was imported; empty if it was not imported."""

    source: ItemSource | None = None
    """Event from which the item was derived; None if it was given to the memory directly. Items with a source are
    rebuilt from the journals.
    """

    session: str = attrs.field(default="", validator=STRING)
    """Conversation or document that the item is a part of. Items that were recorded one after the other in the same
    session are found together more easily. Empty: it stands by itself.
    """

    place: int = attrs.field(default=0, validator=_PLACE)
    """Position in the session; 0 to let the index count."""

    labels: tuple[Label, ...] = attrs.field(default=(), converter=as_labels)
    """Labels of the run that the item comes from, such as "untrusted"."""

    level: str = attrs.field(default="internal", validator=LEVEL)
    """Data level: "public", "internal", "confidential" or "restricted"."""

    importance: float = attrs.field(default=0.5, validator=require_between(0, 1))
    """Importance, from 0 to 1. Source: document G, 4."""

    valid_from: float = attrs.field(validator=_TIME)
    """Time from which on the item is true, seconds since 1970."""

    valid_to: float = attrs.field(default=math.inf, validator=_END)
    """Time until which the item is true, seconds since 1970; infinity if no end is known."""

    recorded_at: float = attrs.field(validator=_TIME)
    """Time at which the item became known, seconds since 1970."""

    held: bool = False
    """Whether the item waits for the approval of a person, and is not found until then."""

    @property
    def origins(self) -> frozenset[str]:
        """Ids of the items whose words this one has: itself, and those that it replaces, confirms or ends."""
        return frozenset(filter(None, (self.id, self.replaces, self.follows)))

    @property
    def is_end(self) -> bool:
        """Whether the item is there to end another one."""
        return bool(self.follows) and math.isfinite(self.valid_to)


@attrs.frozen(kw_only=True)
class ItemFilter(Value):
    """A selection of items. It is applied before the ranking."""

    namespaces: tuple[Namespace, ...]
    """Owners of the items, at least one."""

    kinds: tuple[ItemKind, ...] = ()
    """Kinds of the items; empty for all."""

    max_level: str = attrs.field(default="restricted", validator=LEVEL)
    """Highest data level of the items."""

    without_labels: tuple[Label, ...] = attrs.field(default=(), converter=as_labels)
    """Labels that the items do not have."""

    session: str | None = None
    """Session of the items; None for all."""

    as_of: float = attrs.field(default=math.inf, validator=ValueRule(fits=is_number, wanted="seconds since 1970"))
    """Time whose knowledge counts, seconds since 1970: items recorded later do not exist. Infinity: all count."""

    valid_at: float | None = attrs.field(
        default=None, validator=ValueRule(fits=is_number, wanted="seconds since 1970").or_none()
    )
    """Time at which the items are true, seconds since 1970; None for any time."""

    include_held: bool = False
    """Whether items that wait for approval are included."""

    include_replaced: bool = False
    """Whether items that were corrected are included."""

    slot: str | None = attrs.field(default=None, validator=NAME.or_none())
    """Slot of the items; None for any or none."""

    min_importance: float = attrs.field(default=0.0, validator=require_between(0, 1))
    """Least importance of the items, from 0 to 1."""


def write_item(item: MemoryItem) -> dict[str, Any]:
    """Return an item as JSON values, without its owner."""
    return {
        "id": item.id,
        "kind": item.kind.value,
        "text": item.text,
        "slot": item.slot,
        "session": item.session,
        "importance": item.importance,
        "level": item.level,
        "labels": [str(label) for label in item.labels],
        "source": None if item.source is None else item.source.run_id,
        "recorded_at": item.recorded_at,
        "valid_from": item.valid_from,
        "valid_to": None if math.isinf(item.valid_to) else item.valid_to,
        "held": item.held,
        "imported_id": item.imported_id,
        "data": dict(item.data),
    }


def read_item(fields: object, namespace: Namespace) -> MemoryItem:
    """Return the item of an owner from the values that `write_item` returned. It has no source.

    Raises:
        MisuseError: if they are others.
    """
    if not isinstance(fields, Mapping):
        raise MisuseError(f"an item is an object, not {type(fields).__name__}")
    values = dict(fields)
    values.pop("source", None)
    own = {"namespace", "replaces", "follows"}
    if unknown := values.keys() - attrs.fields_dict(MemoryItem).keys() | values.keys() & own:
        raise MisuseError(f"an item has no {min(map(str, unknown))!r}")
    if missing := {"id", "text", "valid_from", "recorded_at"} - values.keys():
        raise MisuseError(f"{min(missing)!r} is missing")
    if values.get("valid_to", 0) is None:
        del values["valid_to"]
    if not isinstance(values.get("data", {}), dict) or not isinstance(values.get("held", False), bool):
        raise MisuseError("data is an object, and held is true or false")
    return MemoryItem(**values, namespace=namespace)


class ItemMatch(NamedTuple):
    """An item in a ranking: where it stands, without its content, because most matches are not read."""

    item_id: str
    """Id of the item."""

    session: str
    """Name of the item's session, different for each owner; empty if it has none."""

    place: int
    """Position of the item in its session."""

    score: float
    """Score, 0 or more, higher is better, on a scale of the ranking's own."""

    terms: str = ""
    """Terms of the item, as `agentfsm.memory.text_terms.write_terms` returns them; a ranking by vectors may leave them
    out.
    """


@attrs.frozen(kw_only=True)
class TextSearch(Value):
    """Result of a search by words."""

    matches: tuple[ItemMatch, ...] = ()
    """The items that have a term of the query, best first."""

    weights: Mapping[str, float] = attrs.field(factory=dict)
    """Terms by which the items were found, with their weights: the rarer among the items of the owners, the higher."""


@attrs.frozen(kw_only=True)
class DeletionProof(Value):
    """Record of a deletion, without content."""

    items: int
    """Number of items deleted."""

    at: float
    """Time of the deletion, seconds since 1970."""

    by: str = ""
    """Person or program that asked for it; empty if not given."""

    reason: str = ""
    """Reason of the deletion; empty if not given."""


@attrs.frozen(kw_only=True)
class Recall(Value):
    """Result of a search of the memory for a run."""

    items: tuple[RecalledItem, ...] = ()
    """The items found, best first; the model reads all of them."""

    fault: str = ""
    """Reason why the memory, or a part of it, was not searched; empty if there was none."""

    usage: Usage = Usage()
    """Usage of the search, for embeddings."""

    model: str = ""
    """Name of the model that made the embeddings; empty if there were none."""

    layers: WindowLayers | None = None
    """Shares of the window; None if the memory did not ask for them."""

    left_out: int = 0
    """Number of items that matched and had no room."""

    profile: tuple[RecalledItem, ...] | None = None
    """Preferences and core facts of the user, which each request of the run has from now on, in an order that changes
    with them only; None if they were not read.
    """


class RunMemory(Protocol):
    """The memory of an agent, as the engine sees it."""

    def wants(self, run: Run) -> bool:
        """Return whether the run has a memory: without a user it may have none."""
        ...

    async def recall_for(self, run: Run, query: str, demand: WindowDemand) -> Recall:
        """Read the profile of the user, and search for other items that matter for the newest input of a run.

        Args:
            run: The run, in THINK. Its header names the tenant, the user and the clearance.
            query: The newest input of the user, of any length.
            demand: What the run needs of the window; `share_window` returns the room of the memory.

        Raises:
            Exception: of any type, if the memory fails. The run goes on without it.
        """
        ...


class MemoryIndex(Protocol):
    """Keeps memory items and searches them. All methods may be called from any task of any event loop."""

    async def add(self, items: Sequence[MemoryItem]) -> Sequence[MemoryItem]:
        """Add items in their order, durably and all or none.

        An item whose id is known, or was forgotten, is left out, and so is one that replaces or ends a forgotten item,
        confirms one that was forgotten with its words, or is an import of one of its owner.

        Returns:
            The items that are new, with their place.
        """
        ...

    async def search_text(self, query: str, where: ItemFilter, limit: int) -> TextSearch:
        """Return the items that share terms with a query, best first, at most `limit`.

        A word that no item of the owners has counts as the words that are spelled almost like it.
        """
        ...

    async def find_neighbours(
        self, matches: Sequence[ItemMatch], distance: int, where: ItemFilter
    ) -> Sequence[ItemMatch]:
        """Return the items of the same session within `distance` places of any of these, in any order, with score 0."""
        ...

    async def get(self, ids: Collection[str]) -> Mapping[str, MemoryItem]:
        """Return the items with these ids, by id. Unknown ids are left out."""
        ...

    async def read(self, where: ItemFilter, *, after: str = "", limit: int = 1_000) -> Sequence[MemoryItem]:
        """Return items in the order of their ids, at most `limit`, from the id after `after` on."""
        ...

    async def newest_time(self) -> float:
        """Return the time of the newest record, or just after an owner was forgotten, seconds since 1970.

        It is minus infinity if there is neither.
        """
        ...

    async def find_forgotten(self, ids: Collection[str]) -> Collection[str]:
        """Return those of the ids whose items were forgotten."""
        ...

    async def forget(self, ids: Collection[str], *, at: float, by: str, reason: str, with_words: bool = False) -> int:
        """Delete items so that no byte of them remains, and keep their ids from being added again.

        With `with_words`, items that confirm them are kept from it, too.

        Returns:
            The number of items deleted.
        """
        ...

    async def forget_namespace(self, namespace: Namespace, *, at: float, by: str, reason: str) -> int:
        """Delete all items of an owner, and keep them, and others recorded up to `at`, from being added again."""
        ...

    async def forget_sources(self, run_ids: Collection[str], *, at: float, by: str, reason: str) -> int:
        """Delete the items of all owners that come from these runs, with what corrects or ends them.

        Returns:
            The number of items deleted.
        """
        ...

    async def list_sources(self, *, after: str = "", limit: int = 1_000) -> Sequence[str]:
        """Return the ids of runs from which items come, in order, at most `limit`, from the id after `after` on."""
        ...

    async def list_owners(self) -> Sequence[Namespace]:
        """Return the owners of items, in the order of tenants and users."""
        ...

    async def release(self, ids: Collection[str], *, at: float, by: str) -> int:
        """Approve items that are held. A rebuild keeps the approval. Return their number."""
        ...

    async def drop_derived(self) -> int:
        """Delete the items that have a source, before they are derived from the journals again; return their number."""
        ...

    async def rebuild_text(self) -> int:
        """Build the index of words again from the items of all owners, and return their number."""
        ...

    async def list_deletions(self) -> Sequence[DeletionProof]:
        """Return the records of deletions, oldest first."""
        ...

    async def aclose(self) -> None:
        """Close files and connections."""
        ...


class VectorIndex(MemoryIndex, Protocol):
    """An index that also keeps a vector for each item, and finds items by it. All vectors are of one model."""

    async def use_vectors(self, model: str, dims: int) -> None:
        """Prepare the index for the vectors of a model, unless it is.

        Vectors of another model, or of other dimensions, are dropped, and all items are without a vector then.

        Raises:
            MisuseError: if it cannot keep any.
        """
        ...

    async def drop_vectors(self) -> None:
        """Delete all vectors, so that all items are embedded again."""
        ...

    async def drop_unused_vectors(self) -> None:
        """Delete the vectors of items that `drop_derived` has deleted and that were not added again."""
        ...

    async def read_unembedded(self, limit: int) -> Sequence[MemoryItem]:
        """Return items without a vector, oldest first, at most `limit`."""
        ...

    async def copy_vectors(self, ids: Collection[str]) -> Collection[str]:
        """Give items the vectors of others with the same text, also of those that `drop_derived` has deleted.

        Returns:
            The ids of the items that have a vector now; the others have to be embedded.
        """
        ...

    async def add_vectors(self, vectors: Mapping[str, Sequence[float]]) -> None:
        """Keep vectors by the ids of their items. Ids that are unknown, or have a vector, are left out.

        Raises:
            MisuseError: if another object has prepared the index for another model; `search_vector` likewise.
        """
        ...

    async def search_vector(self, vector: Sequence[float], where: ItemFilter, limit: int) -> Sequence[ItemMatch]:
        """Return the items whose vectors have the most similar direction, best first, at most `limit`.

        The scores are cosines, and 0 for opposite directions.
        """
        ...
