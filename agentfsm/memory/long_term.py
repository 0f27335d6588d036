"""Long-term memory: items that are kept across runs, by owner, and their search."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from importlib import import_module
from secrets import token_hex
from typing import Any, Final, Literal

import attrs

from agentfsm._lib.concurrency import start_in_thread
from agentfsm._lib.plugins import require_extra
from agentfsm.agents.validation import to_plain_json
from agentfsm.core.errors import AgentError, ConflictError, MisuseError, PartlyDoneError, RunNotFoundError
from agentfsm.core.header import short_hash
from agentfsm.core.inbox import parse_time
from agentfsm.core.labels import DATA_LEVELS, Label, as_labels, join_labels
from agentfsm.core.messages import Message, Part
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.run import Run
from agentfsm.core.run_ids import name_extraction
from agentfsm.core.usage import Usage
from agentfsm.core.validation import (
    COUNT,
    COUNT_OR_ZERO,
    NOT_NEGATIVE,
    SHARE,
    STRING,
    ValueRule,
    require_between,
    require_choice,
    require_members,
)
from agentfsm.core.value import Value
from agentfsm.core.window_layers import WindowDemand, share_window
from agentfsm.engine.execution.answer_cache import delete_answers
from agentfsm.journal.load import load_run, read_header
from agentfsm.journal.run_list import RunIterator
from agentfsm.memory.documents import (
    DOCUMENT_NAME,
    DocumentChange,
    ResourceServer,
    build_chunks,
    plan_change,
    read_text,
)
from agentfsm.memory.episodes import build_items, is_extraction, leaves_episode
from agentfsm.memory.equal_items import (
    EQUAL_SLOT,
    clean_slot,
    confirm,
    find_earlier,
    find_same,
    is_shown,
    leave_out_equal,
    name_slot,
    normalise_text,
    rank_profile,
)
from agentfsm.memory.item_rows import TICK_S
from agentfsm.memory.ranking import (
    WINDOW,
    Recollection,
    Weights,
    diversify,
    fuse,
    rank_vectors,
    rank_windows,
    score_items,
)
from agentfsm.memory.reranking import RERANKED, Found, rerank
from agentfsm.memory.sqlite_index import SQLiteIndex
from agentfsm.memory.text_terms import word_set
from agentfsm.memory.threaded_index import ThreadedIndex
from agentfsm.memory.vectors import EmbeddedQuery, ItemVectors, open_vectors
from agentfsm.ports.embedder import Embedder
from agentfsm.ports.memory_items import (
    LEVEL,
    DeletionProof,
    ItemFilter,
    ItemKind,
    ItemMatch,
    MemoryIndex,
    MemoryItem,
    Namespace,
    Recall,
    RunMemory,
    parse_item_kind,
    read_item,
    write_item,
)
from agentfsm.ports.model import Model
from agentfsm.ports.reranker import Reranker
from agentfsm.ports.store import ALL_RUNS, Clock, Filter, Store, SystemClock
from agentfsm.stores.loading import mask_password
from agentfsm.stores.memory import MemoryStore
from agentfsm.stores.sqlite.store import SQLiteStore
from agentfsm.tokens.ledger import estimate_tokens
from agentfsm.tokens.ledger import read_text as read_message_text
from agentfsm.tools.executing_call import list_passed_labels

# Items that a search by words, and one by vectors, contributes at least before the rankings are joined.
TEXT_CANDIDATES: Final = 100
VECTOR_CANDIDATES: Final = 200
# The best matches, whose neighbours are candidates, too.
NEAR: Final = 50
# Items that are weighed for each one that is returned. Source: document G, 3.
OVERFETCH: Final = 2
# Items that a recall returns at most, unless it is asked for another number.
RECALL_COUNT: Final = 8
MOST: Final = ValueRule(
    fits=lambda value: type(value) is int and 1 <= value <= VECTOR_CANDIDATES // OVERFETCH,
    wanted=f"a whole number from 1 to {VECTOR_CANDIDATES // OVERFETCH}",
)
# Tokens of a profile: some thirty sentences.
PROFILE_TOKENS: Final = 500
# Importance from which a fact is a part of the profile. Source: document G, 4, the importance of a preference.
CORE_IMPORTANCE: Final = 0.8
# Tokens of the items that an agent recalls for an input: three episodes and three parts of documents, or 70 sentences.
RECALL_TOKENS: Final = 2_000
# Items that are weighed for that.
RECALLED_MOST: Final = 50
# Cosine from which an item is found by its meaning alone. Unrelated sentences have 0 to 0.2 with most models.
MIN_SCORE: Final = 0.25
# Cosine from which two sentences say the same, if they have the same numbers.
EQUAL_SCORE: Final = 0.95
# Characters up to which a text is a sentence that may be said again, and words by which an equal one is looked for.
MAX_EQUAL_CHARS: Final = 1_000
EQUAL_WORDS: Final = 8
# Items among which an equal one is looked for.
EQUAL_CANDIDATES: Final = 20
# Seconds by which clocks of machines are taken to differ at most, where an owner is forgotten.
MAX_SKEW_S: Final = 5.0
# Further items that are read at once if many of the first repeat others.
FURTHER: Final = 4
# Items that one write adds.
WRITE_BATCH: Final = 500
# Arguments of `Memory.remember`.
_GIVEN: Final = {"id", "namespace", "replaces", "source", "place", "recorded_at"}
REMEMBER_ARGUMENTS: Final = frozenset({"key", *attrs.fields_dict(MemoryItem)} - _GIVEN)
# Kinds whose items may be said again.
_REPEATED: Final = frozenset({ItemKind.FACT, ItemKind.PREFERENCE})
_NUMBER: Final = re.compile(r"\d+")
RUNS_CHOICE: Final = require_choice("keep", "delete")
_NO_ITEM: Final = "there is no item {!r} of this owner: recall() and `agentfsm memory export` tell the ids of items"
_NO_DOCUMENT: Final = (
    "there is no document {!r} of this owner: list_documents() and `agentfsm index list` tell their names"
)
# Bytes of the id of an item without a key: no two items have the same one.
ID_BYTES: Final = 10
# Importance of an item of each kind, if none is given. Source: document G, 4.
IMPORTANCE: Final[Mapping[ItemKind, float]] = {
    ItemKind.EPISODE: 0.7,
    ItemKind.FACT: 0.5,
    ItemKind.PREFERENCE: 0.8,
    ItemKind.DOCUMENT: 0.5,
}

# Memory that takes the place of those of all users, in the current task and those that it has started.
_STAND_IN: Final[ContextVar[Memory | None]] = ContextVar("memory that stands in", default=None)


def weigh(kind: ItemKind, slot: str) -> float:
    """Return the importance of an item for which none is given."""
    return max(IMPORTANCE[kind], CORE_IMPORTANCE if slot else 0.0)


def load_postgres_index() -> Any:
    """Return the class of the PostgreSQL index, imported at the first call.

    Raises:
        ImportError: if its driver is not installed; the message names the extra.
    """
    with require_extra("agentfsm.memory.PostgresIndex", "postgres", "psycopg"):
        return import_module("agentfsm.memory.postgres_index").PostgresIndex


def _open_index(location: str | os.PathLike[str] | MemoryIndex) -> MemoryIndex:
    if isinstance(location, str | os.PathLike):
        path = os.fspath(location)
        scheme, is_url, _ = path.partition("://")
        if is_url and scheme not in {"postgres", "postgresql"}:
            raise MisuseError(
                f"{mask_password(path)} names no memory: give the path of a file, or a URL that begins with postgresql://"
            )
        return load_postgres_index()(path) if is_url else SQLiteIndex(path)
    require_members("search_text", "add", "forget", wanted="a path, a URL, or a MemoryIndex").check(
        "Memory", "index", location
    )
    return location


def _open_embedder(embedder: Embedder | str | None) -> Embedder | None:
    if not isinstance(embedder, str):
        return embedder
    from agentfsm.models.openai.embeddings import create_embedder  # noqa: PLC0415  brings the SDK

    return create_embedder(embedder)


def _parse_kinds(kinds: Iterable[ItemKind | str]) -> tuple[ItemKind, ...]:
    if isinstance(kinds, str):
        raise MisuseError(f"kinds={kinds!r}: give a list of kinds, also for a single one")
    return tuple(map(parse_item_kind, kinds))


def _as_roles(roles: Iterable[str]) -> frozenset[str]:
    return frozenset(roles)


def _add_passed(labels: tuple[Label, ...]) -> tuple[Label, ...]:
    """Return the labels of an item, with those of the tool's run if the function of a tool keeps it."""
    return join_labels(labels, set(list_passed_labels()) - {*DATA_LEVELS, Label.USER_DATA})


def as_recalled(entry: Recollection) -> RecalledItem:
    """Return an item as the journal of a run records it."""
    item = entry.item
    return RecalledItem(
        id=item.id,
        kind=item.kind.value,
        text=item.text,
        score=round(entry.score, 4),
        valid_from=item.valid_from,
        source="" if item.source is None else item.source.run_id,
        labels=join_labels(item.labels, [Label(item.level)]),
    )


@attrs.frozen(kw_only=True)
class Expiry(Value):
    """Rules by which old items are forgotten. Source: document G, 4."""

    days: float = attrs.field(default=90.0, validator=NOT_NEGATIVE)
    """Age from which an item of little importance is forgotten, days."""

    importance: float = attrs.field(default=0.7, validator=require_between(0, 1))
    """Importance from which an item is kept whatever its age."""

    count: int = attrs.field(default=1_000, validator=COUNT)
    """Number of items of each owner that are kept. The least important ones are forgotten first, where importance
    shrinks with the age.
    """

    decay: float = attrs.field(default=0.95, validator=SHARE)
    """Factor by which importance shrinks with each day, for `count`."""


@attrs.define(eq=False, repr=False)
class Memory(RunMemory):
    """Long-term memory, which is kept across runs.

    `Memory("memory.db")` keeps its items in a SQLite file. Items belong to a user of a tenant: the run of an agent
    reads and writes the items of its own user, and `for_` returns the memory of a user for direct use.

    An item never changes. `revise` adds a correction, and a new item with the same `slot` takes the place of an earlier
    one from its `valid_from` on. So `recall` also answers what was known, or true, at an earlier time.
    """

    _index: MemoryIndex = attrs.field(factory=SQLiteIndex, converter=_open_index)
    """Index that keeps the items; or the path of a SQLite file, or the `postgresql://` URL of a database. Default: a
    temporary file.
    """

    namespace: Namespace = attrs.field(factory=Namespace, kw_only=True)
    """Owner of the items of `remember` and `recall`. Default: the items that all share."""

    weights: Weights = attrs.field(factory=Weights, kw_only=True)
    """Weights of similarity, age and importance."""

    min_score: float = attrs.field(default=MIN_SCORE, kw_only=True, validator=require_between(0, 1))
    """Least cosine between a query and an item that shares no word with it, from 0 to 1; without an embedder it has no
    effect. Default 0.25, so that nothing is found for nonsense.
    """

    recall_tokens: int = attrs.field(default=RECALL_TOKENS, kw_only=True, validator=COUNT_OR_ZERO)
    """Tokens of the items that an agent recalls for an input, beside the profile, 0 or more. Default 2,000, and at most
    the memory's share of the window.
    """

    profile_tokens: int = attrs.field(default=PROFILE_TOKENS, kw_only=True, validator=COUNT_OR_ZERO)
    """Tokens of the profile of a user, which is a part of each request of that user, 0 or more. Default 500; 0 for no
    profile.
    """

    team_roles: frozenset[str] = attrs.field(factory=frozenset, kw_only=True, converter=_as_roles)
    """Roles whose runs also recall the items that all users of their tenant share. Default none."""

    clock: Clock = attrs.field(factory=SystemClock, kw_only=True)
    """Source of the time."""

    new_id: Callable[[], str] = attrs.field(default=lambda: token_hex(ID_BYTES), kw_only=True)
    """Function that returns the id of an item without a key. Default: 80 random bits."""

    embedder: Embedder | None = attrs.field(default=None, kw_only=True, converter=_open_embedder)
    """Embedder that adds a search by meaning; or its name, such as "openai:text-embedding-3-small". Default None: by
    words only. A SQLite index needs the extra `vec`, a PostgreSQL index pgvector on the server.
    """

    reranker: Reranker | None = attrs.field(default=None, kw_only=True)
    """Reranker that reads the query and the best 50 items of a search together, and orders them anew: a `TermReranker`,
    an `agentfsm.models.HTTPReranker`, or one of your own. Default None: the order of the search stays.
    """

    model: Model | str | None = attrs.field(default=None, kw_only=True)
    """Model that reads the conversations given to `add`, or its name: a cheap one will do. Default None: `add` is
    refused.
    """

    _item_vectors: ItemVectors | None = attrs.field(
        default=attrs.Factory(lambda self: open_vectors(self._index, self.embedder), takes_self=True), init=False
    )

    _newest: float = attrs.field(default=-math.inf, init=False)
    """Time of the newest record that this object has seen."""

    def for_(self, *, user: str = "", tenant: str = "") -> Memory:
        """Return the memory of a user, with the same index and options.

        Args:
            user: The user; empty for the items that all users of the tenant share.
            tenant: The tenant; empty for none.
        """
        mine = attrs.evolve(self, namespace=Namespace(tenant=tenant, user=user))
        mine._item_vectors = self._item_vectors  # noqa: SLF001  the vectors of an index are checked once
        return mine

    @property
    def index(self) -> MemoryIndex:
        """Index that keeps the items: the one given, or that of the memory which stands in for it (`stand_in`)."""
        return self._find_acting()._index  # noqa: SLF001  of the same class

    @property
    def _vectors(self) -> ItemVectors | None:
        return self._find_acting()._item_vectors  # noqa: SLF001  of the same class

    def _find_acting(self) -> Memory:
        apart = _STAND_IN.get() if self.namespace.user else None
        return self if apart is None else apart

    def apart(self) -> Memory:
        """Return an empty memory with the same options, in a temporary file: for evaluations and trials."""
        return attrs.evolve(self, index=SQLiteIndex())

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """Take the place of the memory of each user, in the current task and those that it starts.

        So what sub-agents, steps of a flow and functions of tools do with the items of a user concerns this memory, by
        whichever `Memory` they do it. Items that belong to no user are read and written where they are.
        """
        token = _STAND_IN.set(self)
        try:
            yield
        finally:
            _STAND_IN.reset(token)

    # Write.

    async def remember(
        self,
        text: str,
        *,
        kind: ItemKind | str = ItemKind.FACT,
        key: str = "",
        slot: str = "",
        session: str = "",
        data: Mapping[str, Any] | None = None,
        labels: Collection[str] = (),
        level: str = "internal",
        importance: float | None = None,
        valid_from: datetime | float | None = None,
        valid_to: datetime | float | None = None,
        held: bool = False,
    ) -> MemoryItem:
        """Remember a text. It is durable when the call returns.

        A fact or a preference that the memory has already, but for case and marks at its ends, or with an embedder in
        almost the same words, is confirmed: it is found once, and its importance rises by 0.1. What has a session or a
        time of its own, and what has more than 1,000 characters, stands by itself.

        Args:
            text: The text, up to 20,000 characters.
            kind: "fact", "preference", "episode" or "document".
            key: Name that makes the call repeatable: a second item with the same key of the same owner is not added.
                Empty: each call adds an item.
            slot: Subject that the text gives a value to, such as "home town". From `valid_from` on it takes the place
                of earlier items with that slot. Empty: it affects no other item.
            session: Conversation that the text is a part of. Neighbours in it are found together more easily. Empty: it
                stands by itself.
            data: Further content, as JSON values.
            labels: Labels of the run that the item comes from. In the function of a tool, those of its run are added.
            level: Data level: "public", "internal", "confidential" or "restricted".
            importance: From 0 to 1. None: 0.8 for preferences and values of a slot, 0.7 for episodes, else 0.5. Facts
                from 0.8 on are a part of each request of the user, as preferences are.
            valid_from: Time from which on the text is true, as a datetime with time zone or seconds since 1970. None:
                now.
            valid_to: Time until which it is true. None: no end is known.
            held: Whether the item is not found until `release`.

        Returns:
            The item; the earlier one if the key is known.

        Raises:
            MisuseError: if a value does not fit, or the item was forgotten and must not return.
        """
        entry = {
            "text": text,
            "kind": kind,
            "key": key,
            "slot": slot,
            "session": session,
            "data": data,
            "labels": labels,
            "level": level,
            "importance": importance,
            "valid_from": valid_from,
            "valid_to": valid_to,
            "held": held,
        }
        [item] = await self._remember([self._build_item(await self._now(), entry)])
        return item

    async def remember_all(self, entries: Iterable[str | Mapping[str, Any]]) -> list[MemoryItem]:
        """Remember many texts, as `remember` does one after the other, in a few writes. They are durable at the end.

        Args:
            entries: Texts, or arguments of `remember` by name, such as `{"text": "Ann lives in Faro", "slot": "home"}`.

        Returns:
            The items, in the order of the entries.

        Raises:
            MisuseError: if an entry does not fit, naming its index: nothing is remembered then.
        """
        if isinstance(entries, str | Mapping):
            raise MisuseError("remember_all takes a list of texts or dicts; for a single text there is remember")
        now, items = await self._now(), list[MemoryItem]()
        for place, entry in enumerate(entries):
            try:
                items.append(self._build_item(now, {"text": entry} if isinstance(entry, str) else entry))
            except MisuseError as error:
                raise MisuseError(f"entries[{place}]: {error}") from None
        return await self._remember(items)

    def _build_item(self, now: float, entry: Mapping[str, Any]) -> MemoryItem:
        """Return the new item for arguments of `remember`, by name."""
        if not isinstance(entry, Mapping) or "text" not in entry:
            raise MisuseError("give a text, or a dict with a text")
        if unknown := entry.keys() - REMEMBER_ARGUMENTS:
            raise MisuseError(f"remember has no argument {min(map(str, unknown))!r}")
        text, slot, session, key = entry["text"], *[entry.get(name, "") for name in ("slot", "session", "key")]
        STRING.check("remember", "slot", slot)
        if slot.startswith(EQUAL_SLOT):
            raise MisuseError(f"slot={slot!r}: slots that begin with {EQUAL_SLOT!r} are those of equal texts")
        slot = clean_slot(slot)
        begins = parse_time(entry.get("valid_from"), "valid_from")
        ends = parse_time(entry.get("valid_to"), "valid_to")
        if begins is None and ends is not None and ends <= now:
            raise MisuseError(
                "remember(valid_to=...) is in the past: give valid_from, too, the time since which it was true"
            )
        if begins is not None and ends is not None and ends <= begins:
            raise MisuseError("remember(valid_to=...) is before valid_from: the text would never be true")
        kind, importance = parse_item_kind(entry.get("kind", ItemKind.FACT)), entry.get("importance")
        item = MemoryItem(
            id=short_hash(f"{self.namespace}\n{kind}\n{key}", 24) if key else self.new_id(),
            namespace=self.namespace,
            kind=kind,
            text=text,
            slot=slot,
            session=session,
            data=to_plain_json(entry.get("data") or {}, "data"),
            labels=_add_passed(as_labels(entry.get("labels", ()))),
            level=entry.get("level", "internal"),
            importance=weigh(kind, slot) if importance is None else importance,
            valid_from=now if begins is None else begins,
            valid_to=math.inf if ends is None else ends,
            recorded_at=now,
            held=entry.get("held", False),
        )
        stands_alone = session or not (begins is None and ends is None) or len(text) > MAX_EQUAL_CHARS
        if not slot and not stands_alone and kind in _REPEATED:
            item = attrs.evolve(item, slot=name_slot(kind, text, item.level, item.labels))
        return item

    async def _remember(self, items: Sequence[MemoryItem]) -> list[MemoryItem]:
        """Write new items, and those that confirm what the memory has. Return the items."""
        written: list[MemoryItem] = []
        batch: list[MemoryItem] = []
        vectors, slots = dict[str, Sequence[float]](), set[str]()
        for item in items:
            merged, vector = await self._merge(item)
            if len(batch) == WRITE_BATCH or {item.slot, merged.slot} & slots:
                written += await self._write(batch, vectors)
                batch, vectors, slots = [], {}, set()
                merged, vector = await self._merge(item)
            batch.append(merged)
            vectors |= {merged.id: vector} if vector else {}
            slots |= {item.slot, merged.slot} - {""}
        return [*written, *await self._write(batch, vectors)]

    async def _merge(self, item: MemoryItem) -> tuple[MemoryItem, tuple[float, ...]]:
        """Return the item as it follows on one in its slot, or in almost the same words, and its vector if it was made.

        An item that begins at a time of its own stays as it is.
        """
        if not item.slot or item.valid_from != item.recorded_at:
            return item, ()
        where = ItemFilter(namespaces=(self.namespace,), slot=item.slot, valid_at=await self._now())
        vector: tuple[float, ...] = ()
        old = next(iter(await self.index.read(where, limit=1)), None)
        if old is None and item.slot.startswith(EQUAL_SLOT) and self._vectors is not None:
            old, vector = await self._find_near(item)
        if old is None or old.id == item.id:
            return item, vector
        # At the same tick of the clock, the later one holds all the same.
        now = self._newest = max(await self._now(), old.valid_from + TICK_S, old.recorded_at + TICK_S)
        new = attrs.evolve(item, valid_from=now, recorded_at=now)
        is_alike = (old.kind, old.level, {*old.labels}, old.valid_to) == (
            item.kind,
            item.level,
            {*item.labels},
            math.inf,
        )
        is_same = vector or normalise_text(old.text) == normalise_text(item.text)
        return (confirm(old, new) if is_alike and is_same and item.valid_to == math.inf else new), vector

    async def add(
        self,
        messages: Sequence[Message] | Sequence[Mapping[str, Any]],
        *,
        user: str = "",
        tenant: str = "",
        session: str = "",
        at: datetime | float | None = None,
        labels: Iterable[str] = (),
        store: Store | None = None,
    ) -> int:
        """Learn facts, preferences and an episode from a conversation that was held elsewhere.

        The `model` of the memory reads it, and what the memory knows of its subjects, so that a fact that has changed
        takes the place of the old one. The same conversation is learned from once.

        Args:
            messages: Messages, oldest first: those of a run, or dicts as in chat completions.
            user: User whose memory learns. Empty: the owner of this memory.
            tenant: Tenant of the user. Empty: that of this memory.
            session: Conversation that the items are a part of. Empty: one that follows from the messages.
            at: Time at which it was held, as a datetime with time zone or seconds since 1970. None: now.
            labels: Labels of the conversation. With "untrusted", the items are held until a person releases them.
            store: Store of the extraction runs, so that their cost is counted, and a crash pays for no request twice.
                None: they are not kept.

        Returns:
            The number of new items.

        Raises:
            MisuseError: if the memory has no `model`, no user is given, a message has a wrong form, or all are empty.
            ModelUnavailableError: if the model did not answer at the fourth try.
            RunError: if an extraction ended without an answer that can be read. The next call asks again.
        """
        if self.model is None:
            raise MisuseError('memory.add asks a model: write Memory(..., model="openai:gpt-5.4-mini")')
        from agentfsm.memory.learner import Learner  # noqa: PLC0415  brings the agents, which may have this memory

        async with AsyncExitStack() as rest:
            if store is None:
                store = MemoryStore()
                rest.push_async_callback(store.aclose)
            learner = Learner(self, self.model, store)
            if isinstance(self.model, str):
                rest.push_async_callback(learner.close_model)
            return await learner.add(messages, user=user, tenant=tenant, session=session, at=at, labels=labels)

    async def _find_near(self, new: MemoryItem) -> tuple[MemoryItem | None, tuple[float, ...]]:
        """Return the item that says the same in almost the same words, or None; and the vector of the text, if made.

        Both are of the same owner, kind, level and labels, and have the same numbers.
        """
        where = ItemFilter(
            namespaces=(new.namespace,), kinds=(new.kind,), max_level=new.level, valid_at=new.recorded_at
        )
        words, numbers = word_set(new.text), _NUMBER.findall(new.text)
        rarest = " ".join(sorted(words, key=len)[-EQUAL_WORDS:])
        matches = (await self.index.search_text(rarest, where, EQUAL_CANDIDATES)).matches
        known = await self.index.get([match.item_id for match in matches]) if matches else {}
        similar = {
            old.id: old
            for old in known.values()
            if old.slot.startswith(EQUAL_SLOT)
            and (old.level, {*old.labels}) == (new.level, {*new.labels})
            and _NUMBER.findall(old.text) == numbers
            and 2 * len(words & word_set(old.text)) >= len(words | word_set(old.text))
        }
        if self._vectors is None or not similar:
            return None, ()
        embedded = await self._vectors.embed_query(new.text)
        near = await self._vectors.search(embedded, where, EQUAL_CANDIDATES)
        found = [similar[match.item_id] for match in near if match.score >= EQUAL_SCORE and match.item_id in similar]
        return (found[0] if found else None), embedded.vector

    async def add_document(
        self,
        name: str,
        text: str | Sequence[Part],
        *,
        labels: Collection[str] = (),
        level: str = "internal",
        importance: float = IMPORTANCE[ItemKind.DOCUMENT],
    ) -> DocumentChange:
        """Add a document, or a new version of it. It is durable when the call returns.

        The text is cut into chunks of up to 512 tokens, at headings and between paragraphs if possible; within a
        section, a chunk repeats up to 64 tokens of the one before. Chunks that the memory has already are not written
        or embedded again. Those that are no longer in the document are found as of earlier times only.

        Args:
            name: Name of the document, such as its path: a document with the same name is a new version of it.
            text: Markdown or plain text, up to 2,000,000 characters; or parts of a message, whose texts are taken.
            labels: Labels of the document, such as "untrusted". A run that recalls a part of it has them from then on.
            level: Data level: "public", "internal", "confidential" or "restricted".
            importance: Importance of the chunks, from 0 to 1.

        Raises:
            MisuseError: if a value does not fit, or there is no text.
        """
        DOCUMENT_NAME.check("add_document", "name", name)
        LEVEL.check("add_document", "level", level)
        fields = {"labels": _add_passed(as_labels(labels)), "level": level, "importance": importance}
        build = partial(build_chunks, name, read_text(name, text), fields)
        return await self._change_document(name, await start_in_thread(build).wait())

    async def add_resource(
        self, server: ResourceServer, uri: str, *, labels: Collection[str] = (), level: str = "internal"
    ) -> DocumentChange:
        """Read a resource of an MCP server, and add it as a document with the name "server uri".

        Unless the server is trusted, the document has the label "untrusted".

        Args:
            server: The server, an `agentfsm.mcp.MCPServer`.
            uri: URI of the resource.
            labels: Further labels of the document.
            level: Data level of the document.

        Raises:
            MisuseError: if the server has no resources, or the resource has no text.
            MCPServerError: if the server cannot be reached, or has no such resource.
        """
        known = [*labels] if server.is_trusted else [Label.UNTRUSTED, *labels]
        return await self.add_document(f"{server.name} {uri}", await server.read(uri), labels=known, level=level)

    async def remove_document(self, name: str) -> DocumentChange:
        """Close all chunks of a document: they are found as of earlier times only. `forget_document` deletes them.

        Raises:
            MisuseError: if the owner has no such document.
        """
        change = await self._change_document(name, {})
        if not change.closed:
            raise MisuseError(_NO_DOCUMENT.format(name))
        return change

    async def list_documents(self) -> dict[str, int]:
        """Return the number of chunks of each document of the owner, by its name, in the order of the names."""
        where = ItemFilter(namespaces=(self.namespace,), kinds=(ItemKind.DOCUMENT,), valid_at=await self._now())
        return dict(sorted(Counter([item.session for item in await self._read_all(where)]).items()))

    async def _change_document(self, name: str, chunks: Mapping[str, Mapping[str, Any]]) -> DocumentChange:
        known = await self._read_document(name)
        items, change = plan_change(name, chunks, known, self.namespace, await self._now())
        if not items:
            return change
        self._newest = max(self._newest, items[0].recorded_at)
        if self._vectors is not None:
            await self._vectors.prepare()
        await self.index.add(items)
        there = await self.index.get([item.id for item in items[: change.added]])
        left_out = change.added - len(there)
        if self._vectors is not None:
            await self._vectors.embed_new()
        return attrs.evolve(change, added=change.added - left_out, left_out=left_out)

    async def _read_document(self, name: str) -> list[MemoryItem]:
        """Return the items of all versions of a document."""
        where = ItemFilter(namespaces=(self.namespace,), kinds=(ItemKind.DOCUMENT,), session=name)
        return [item for item in await self._read_all(where) if item.data.get("document") == name]

    async def revise(
        self,
        item_id: str,
        *,
        text: str | None = None,
        data: Mapping[str, Any] | None = None,
        importance: float | None = None,
        valid_from: datetime | float | None = None,
        valid_to: datetime | float | None = None,
    ) -> MemoryItem:
        """Correct an item: add one that replaces it. Fields that are not given stay as they were.

        In the function of a tool, the labels of its run are added.

        Use it for mistakes. A fact that has changed is a new item with the same slot.

        Raises:
            MisuseError: if the owner has no such item.
        """
        old = (await self.index.get([item_id])).get(item_id)
        if old is None or old.namespace != self.namespace:
            raise MisuseError(_NO_ITEM.format(item_id))
        begins, ends = parse_time(valid_from, "valid_from"), parse_time(valid_to, "valid_to")
        new = attrs.evolve(
            old,
            id=self.new_id(),
            replaces=item_id,
            follows="",
            imported_id="",
            source=None,
            text=old.text if text is None else text,
            labels=_add_passed(old.labels),
            data=old.data if data is None else dict(data),
            importance=old.importance if importance is None else importance,
            valid_from=old.valid_from if begins is None else begins,
            valid_to=old.valid_to if ends is None else ends,
            recorded_at=await self._now(),
        )
        [revised] = await self._write([new])
        return revised

    async def release(self, item_ids: Iterable[str], *, by: str = "") -> int:
        """Approve items of the owner that are held, so that they are found. Return their number.

        Raises:
            MisuseError: if the owner has no item with one of the ids; nothing is released.
        """
        return await self.index.release(await self._check_own(item_ids), at=await self._now(), by=by)

    async def _check_own(self, item_ids: Iterable[str]) -> list[str]:
        """Return the ids.

        Raises:
            MisuseError: if the owner has no item with one of them, or they are one text.
        """
        if isinstance(item_ids, str):
            raise MisuseError(f"{item_ids!r}: give a list of ids, also for a single item")
        ids = [*item_ids]
        found = await self.index.get(ids)
        if missing := [each for each in ids if each not in found or found[each].namespace != self.namespace]:
            raise MisuseError(_NO_ITEM.format(missing[0]))
        return ids

    async def _write(
        self, items: Sequence[MemoryItem], vectors: Mapping[str, Sequence[float]] | None = None
    ) -> list[MemoryItem]:
        """Add items, and embed those that have no vector yet. Return them, or the earlier ones with the same ids."""
        if self._vectors is not None:
            await self._vectors.prepare()
        known = {item.id: item for item in await self.index.add(items)} if items else {}
        if known and self._vectors is not None:
            if vectors:
                await self._vectors.index.add_vectors(vectors)
            await self._vectors.embed_new()
        if left_out := [item.id for item in items if item.id not in known]:
            known |= await self.index.get(left_out)
        for item in items:
            if item.id not in known:
                raise MisuseError(f"the item {item.id!r} was forgotten, so it is not added again: give it another key")
            if known[item.id].namespace != item.namespace:
                raise ConflictError(f"{item.id!r} is the id of an item of another owner: give it another key")
        return [known[item.id] for item in items]

    async def _now(self) -> float:
        """Return the time, which does not go back behind the newest record."""
        if self._newest == -math.inf:
            self._newest = await self.index.newest_time()
        self._newest = max(self._newest, self.clock.now())
        return self._newest

    # Read.

    async def recall(
        self,
        query: str,
        *,
        k: int = RECALL_COUNT,
        kinds: Iterable[ItemKind | str] = (),
        as_of: datetime | float | None = None,
        valid_at: datetime | float | None = None,
        session: str | None = None,
        max_level: str = "restricted",
        without_labels: Collection[str] = (),
        team: bool = False,
    ) -> list[Recollection]:
        """Find the items that match a query, best first. Of items with equal texts the best is returned.

        Args:
            query: The search, in any words; of more than 20,000 characters the first are read.
            k: Number of items, 1 or more.
            kinds: Kinds of the items; empty for all.
            as_of: Time whose knowledge counts: items recorded later are ignored. None: now.
            valid_at: Time at which the items are true. None: `as_of`.
            session: Conversation of the items; None for all.
            max_level: Highest data level of the items.
            without_labels: Labels that the items do not have.
            team: Whether the items that all users of the tenant share are found, too.
        """
        MOST.check("recall", "k", k)
        known, true, now = parse_time(as_of, "as_of"), parse_time(valid_at, "valid_at"), await self._now()
        where = ItemFilter(
            namespaces=self._list_owners(team=team),
            kinds=_parse_kinds(kinds),
            max_level=max_level,
            without_labels=as_labels(without_labels),
            session=session,
            as_of=math.inf if known is None else known,
            valid_at=true if true is not None else now if known is None else known,
        )
        return (await self._recall(query, await self._embed_query(query), where, k))[0]

    async def _recall(
        self,
        query: str,
        embedded: EmbeddedQuery,
        where: ItemFilter,
        k: int,
        leaves_out: Callable[[MemoryItem], bool] = lambda _item: False,
    ) -> tuple[list[Recollection], Usage, str]:
        """Return the items, best first; and the usage of the reranker, and the reason if it failed."""
        count = wanted = k * OVERFETCH if self.reranker is None else max(k * OVERFETCH, RERANKED)
        rankings = await self._search(query, embedded, where, wanted)
        known_at = await self._now() if math.isinf(where.as_of) else where.as_of
        items: dict[str, MemoryItem] = {}
        while True:  # more of the rankings are read if many of the first items repeat others
            found = fuse(rankings, count)
            items |= await self.index.get([item_id for item_id, *_ in found if item_id not in items])
            present: list[Found] = [
                (items[item_id], similarity, ranks)
                for item_id, similarity, ranks in found
                if item_id in items and not leaves_out(items[item_id])
            ]
            different = leave_out_equal(score_items(present, known_at, self.weights))
            if len(different) >= k * OVERFETCH or len(found) < count:
                break
            count *= FURTHER
        usage, fault = Usage(), ""
        if self.reranker is not None:
            kept = {each.item.id for each in different}
            present = [each for each in present if each[0].id in kept][:wanted]
            present, usage, fault = await rerank(self.reranker, query, present)
            different = score_items(present[: k * OVERFETCH], known_at, self.weights)
        return diversify(different[: k * OVERFETCH], k, self.weights), usage, fault

    def _list_owners(self, *, team: bool) -> tuple[Namespace, ...]:
        shared = Namespace(tenant=self.namespace.tenant)
        return (self.namespace, shared) if team and shared != self.namespace else (self.namespace,)

    async def _embed_query(self, query: str) -> EmbeddedQuery:
        return EmbeddedQuery() if self._vectors is None else await self._vectors.embed_query(query)

    async def _search(
        self, query: str, embedded: EmbeddedQuery, where: ItemFilter, wanted: int
    ) -> dict[str, Sequence[ItemMatch]]:
        text = await self.index.search_text(query, where, max(wanted, TEXT_CANDIDATES))
        found: dict[str, Sequence[ItemMatch]] = {}
        if text.matches:
            neighbours = await self.index.find_neighbours(text.matches[:NEAR], WINDOW, where)
            found = {"text": text.matches, **rank_windows(text, neighbours, WINDOW)}
        near = () if self._vectors is None else await self._vectors.search(embedded, where, VECTOR_CANDIDATES)
        shares_words = {match.item_id for match in text.matches}
        if near := [match for match in near if match.score >= self.min_score or match.item_id in shares_words]:
            found |= rank_vectors(near, VECTOR_CANDIDATES)
        return found

    async def reindex(self) -> int:
        """Build the search again from the items of all owners, and return their number.

        The words are split anew, as after an upgrade that splits them in another way. With an embedder, all items are
        embedded again, for example by another model.

        Raises:
            PartlyDoneError: if the words were indexed, and not all items were embedded.
        """
        count = await self.index.rebuild_text()
        if self._vectors is not None:
            try:
                await self._vectors.reindex()
            except Exception as error:
                raise PartlyDoneError(
                    f"the words of {count} items were indexed again, and not all of the items were embedded: {error}; "
                    "call reindex() again"
                ) from error
        return count

    @property
    def embedding_usage(self) -> Usage:
        """Tokens and cost of all requests to the embedder so far, by this object and those of `for_`."""
        return Usage() if self._vectors is None else self._vectors.usage

    # Runs of agents.

    def for_run(self, run: Run[Any]) -> Memory:
        """Return the memory of the user for whom a run was started."""
        return self.for_(user=run.header.user or "", tenant=run.header.tenant or "")

    def wants(self, run: Run[Any]) -> bool:
        """Return whether the run has a user."""
        return bool(run.header.user)

    async def recall_for(self, run: Run[Any], query: str, demand: WindowDemand) -> Recall:
        """Return the profile of the user, and other items that match an input, within their share of the window.

        Items above the clearance of the run are left out.
        """
        mine, header = self.for_run(run), run.header
        where = ItemFilter(
            namespaces=mine._list_owners(team=not self.team_roles.isdisjoint(header.roles)),  # noqa: SLF001
            max_level=header.clearance or DATA_LEVELS[-1],
            valid_at=await mine._now(),  # noqa: SLF001
        )
        room = share_window(demand).memory
        profile = [*map(as_recalled, await mine.profile(max_level=where.max_level, room_tokens=room))]
        texts = [read_message_text(message) for message in run.shown if message is not run.profile]
        shown = normalise_text("\n".join([*texts, *[item.text for item in profile]]))
        # The history has the runs of the conversation, unless it was compacted.
        session = header.session if header.after is not None and not run.cutoff else None

        def leaves_out(item: MemoryItem) -> bool:
            is_of_session = item.source is not None and item.session == session
            return is_of_session or is_shown(item, shown)

        embedded = await self._embed_query(query) if self.recall_tokens else EmbeddedQuery()
        found: list[Recollection] = []
        usage, faults = embedded.usage, [embedded.fault]
        if self.recall_tokens:
            found, added, fault = await mine._recall(query, embedded, where, RECALLED_MOST, leaves_out)  # noqa: SLF001
            usage, faults = usage + added, [*faults, fault]
        has_documents = any(entry.item.kind is ItemKind.DOCUMENT for entry in found)
        layers = share_window(attrs.evolve(demand, has_documents=has_documents))
        taken = demand.working_tokens + sum([estimate_tokens(item.text) for item in profile])
        left = min(self.recall_tokens, layers.memory - taken)
        items: list[RecalledItem] = []
        for entry in sorted(found, key=lambda entry: -entry.score):
            tokens = estimate_tokens(entry.item.text)
            if tokens <= left:
                left -= tokens
                items.append(as_recalled(entry))
        return Recall(
            items=tuple(items),
            fault="; ".join(dict.fromkeys(filter(None, faults))),
            usage=usage,
            model=embedded.model or ("" if self.reranker is None else self.reranker.name),
            layers=layers,
            left_out=len(found) - len(items),
            profile=tuple(profile),
        )

    async def profile(
        self,
        *,
        max_level: str = "restricted",
        without_labels: Collection[str] = (),
        as_of: datetime | float | None = None,
        room_tokens: float = math.inf,
    ) -> list[Recollection]:
        """Return the preferences and core facts that each request of the owner's runs has, the oldest first.

        The newest and most confirmed ones are chosen, by scores whose order does not change with time. So a request
        begins the same as long as the memory has the same preferences and core facts. Those with the label "untrusted"
        are left out, because all runs of the user would have it: `recall` finds them.

        Args:
            max_level: Highest data level of the items.
            without_labels: Further labels that the items do not have.
            as_of: Time whose knowledge counts. None: now.
            room_tokens: Tokens that there is room for, if they are fewer than `profile_tokens`.
        """
        known, now, left = parse_time(as_of, "as_of"), await self._now(), min(self.profile_tokens, room_tokens)
        if left <= 0:
            return []
        where = ItemFilter(
            namespaces=(self.namespace,),
            kinds=(ItemKind.PREFERENCE, ItemKind.FACT),
            max_level=max_level,
            without_labels=as_labels((Label.UNTRUSTED, *without_labels)),
            as_of=math.inf if known is None else known,
            valid_at=now if known is None else known,
            min_importance=CORE_IMPORTANCE,
        )
        chosen: list[Recollection] = []
        for entry in rank_profile(await self._read_all(where), now):
            if (tokens := estimate_tokens(entry.item.text)) <= left:
                left -= tokens
                chosen.append(entry)
        return sorted(chosen, key=lambda entry: (entry.item.valid_from, entry.item.text))

    async def read(
        self,
        *,
        kinds: Iterable[ItemKind | str] = (),
        include_held: bool = False,
        valid_at: datetime | float | None = None,
    ) -> list[MemoryItem]:
        """Return all items of the owner that are not corrected, in the order of their ids.

        Args:
            kinds: Kinds of the items; none for all.
            include_held: Whether items that wait for approval are included.
            valid_at: Time at which the items are true, so that of each slot one is left. None: any time.
        """
        where = ItemFilter(
            namespaces=(self.namespace,),
            kinds=_parse_kinds(kinds),
            include_held=include_held,
            valid_at=parse_time(valid_at, "valid_at"),
        )
        return await self._read_all(where)

    async def read_newest(
        self,
        count: int,
        *,
        kinds: Iterable[ItemKind | str] = (),
        max_level: str = "restricted",
        without_labels: Collection[str] = (),
        as_of: datetime | float | None = None,
    ) -> list[MemoryItem]:
        """Return the items of the owner that were recorded last, newest first, of those that hold at that time.

        Args:
            count: Maximum of items.
            kinds: Kinds of the items; none for all.
            max_level: Highest data level of the items.
            without_labels: Labels that the items do not have.
            as_of: Time whose knowledge counts. None: now.
        """
        known = parse_time(as_of, "as_of")
        where = ItemFilter(
            namespaces=(self.namespace,),
            kinds=_parse_kinds(kinds),
            max_level=max_level,
            without_labels=as_labels(without_labels),
            as_of=math.inf if known is None else known,
            valid_at=await self._now() if known is None else known,
        )
        return sorted(await self._read_all(where), key=lambda item: (-item.recorded_at, item.id))[:count]

    async def export_items(self) -> list[dict[str, Any]]:
        """Return all items of the owner that are not replaced as JSON values, held ones included."""
        return [*map(write_item, await self.read(include_held=True))]

    async def import_items(self, items: Iterable[object]) -> int:
        """Add items that `export_items` returned, of this memory or another one, for this owner.

        They get ids of this owner, which follow from those that they have, so a second call adds nothing, nor do items
        that this owner has. What this memory was told to forget does not return, unless the other one has changed it
        since. They have no source: a rebuild leaves them. They are known since the time that they name, or now if it is
        later.

        Returns:
            The number of new items.

        Raises:
            MisuseError: if an item has another form, naming its index: nothing is added then.
        """
        now, given = await self._now(), list[MemoryItem]()
        own = {item.id for item in await self._read_versions()}
        for place, fields in enumerate(items):
            try:
                item = read_item(fields, self.namespace)
                json.dumps(write_item(item), ensure_ascii=False, allow_nan=False).encode()
            except (MisuseError, ValueError, TypeError, OverflowError) as error:
                raise MisuseError(f"items[{place}]: {error}") from None
            first = item.imported_id or item.id
            if {item.id, first}.isdisjoint(own):
                # An id of its own, which no other owner can foresee or take.
                new_id = short_hash(f"{self.namespace}\n{first}", 24)
                given.append(attrs.evolve(item, id=new_id, imported_id=first, recorded_at=min(item.recorded_at, now)))
        count = 0
        for begin in range(0, len(given), WRITE_BATCH):
            count += await self.add_derived(given[begin : begin + WRITE_BATCH])
        return count

    async def _read_all(self, where: ItemFilter) -> list[MemoryItem]:
        found: list[MemoryItem] = []
        while page := await self.index.read(where, after=found[-1].id if found else ""):
            found += page
        return found

    # Derived items.

    async def add_derived(self, items: Sequence[MemoryItem]) -> int:
        """Add the items that a run leaves, unless they are there or were forgotten. Return the number of new ones.

        A version of an episode is left out if the episode itself was forgotten.
        """
        if self._vectors is not None:
            await self._vectors.prepare()
        count = len(await self.index.add([attrs.evolve(item, labels=_add_passed(item.labels)) for item in items]))
        if count and self._vectors is not None:
            await self._vectors.embed_new()
        return count

    async def rebuild(self, store: Store) -> int:
        """Derive the items of runs again from the journals, and drop those there were. Return the number of items.

        No model is asked: the extraction runs have the replies. Runs without one are left to the learner.
        Forgotten items stay forgotten, released ones stay released, and those remembered directly are not touched. Of
        runs that are no longer in the store nothing remains.

        Args:
            store: The store of the runs.

        Raises:
            PartlyDoneError: if it stopped after the derived items were dropped.
        """
        if self._vectors is not None:
            await self._vectors.prepare()
        await self.index.drop_derived()
        count = 0
        try:
            async for summary in RunIterator(store, ALL_RUNS):
                if summary.user and summary.parent is None:
                    count += await self._derive(store, summary.id)
            if self._vectors is not None:
                await self._vectors.embed_new()
            if isinstance(self.index, ThreadedIndex):
                await self.index.drop_unused_vectors()
        except AgentError as error:
            raise PartlyDoneError(
                f"the derived items were dropped, and {count} of them are derived again; the others are missing until "
                f"rebuild() is called again: {error}"
            ) from error
        return count

    async def _derive(self, store: Store, run_id: str) -> int:
        try:
            run, extraction = await load_run(store, run_id), await load_run(store, name_extraction(run_id))
            feedback = await store.list_feedback(run_id)
        except RunNotFoundError:
            return 0
        if not leaves_episode(run) or not is_extraction(extraction.header) or not extraction.is_over:
            return 0
        return len(await self.index.add(build_items(run, extraction, feedback)))

    # Forget.

    async def forget(self, item_ids: Iterable[str], *, by: str = "", reason: str = "") -> int:
        """Delete items of the owner so that nothing of their content remains. Return their number.

        All that says the same goes with them: corrections, confirmations, equal texts. With the present value of a slot
        its earlier values go, which would else hold again. A rebuild does not bring them back, nor does a learner that
        has read them before.

        Args:
            item_ids: Ids of the items. An empty list removes the remains that earlier deletions have left on the disk.
            by: Person or program that asks for it.
            reason: Reason of the deletion.

        Raises:
            MisuseError: if the owner has no item with one of the ids, or one text is given in place of a list; nothing
                is deleted.
            PartlyDoneError: if the items were deleted, and a SQLite file could not be rewritten without their content,
                for example because another process reads it.
        """
        ids, count = await self._check_own(item_ids), 0
        same = find_same(await self._read_versions(), ids, await self._now())
        while True:  # until nobody has confirmed or corrected them meanwhile
            count += await self.index.forget(same, at=await self._now(), by=by, reason=reason, with_words=True)
            found = find_same(await self._read_versions(), same, await self._now())
            if found == same:
                return count
            same = found

    async def forget_document(self, name: str, *, by: str = "", reason: str = "") -> int:
        """Delete a document with all its versions, as `forget` does. Return the number of items.

        The same texts can be added again under another name only.

        Raises:
            MisuseError: if the owner has no such document.
        """
        ids = [item.id for item in await self._read_document(name)]
        if not ids:
            raise MisuseError(_NO_DOCUMENT.format(name))
        return await self.index.forget(ids, at=await self._now(), by=by, reason=reason)

    async def _read_versions(self) -> list[MemoryItem]:
        """Return all items of the owner, with held ones and those that were corrected."""
        return await self._read_all(ItemFilter(namespaces=(self.namespace,), include_held=True, include_replaced=True))

    async def forget_all(
        self, *, runs: Literal["keep", "delete"] = "keep", store: Store | None = None, by: str = "", reason: str = ""
    ) -> int:
        """Delete all items of the owner so that nothing of their content remains. Return their number.

        A rebuild does not bring back items recorded until now.

        Args:
            runs: "keep": the journals keep the words and recalled items of the owner's runs. "delete": they are deleted
                as well, and a SQLite store is rewritten without them.
            store: The store of the runs, for "delete".
            by: Person or program that asks for it.
            reason: Reason of the deletion.

        Raises:
            MisuseError: if `runs` is something else, or the store or the user is missing; nothing is deleted.
            ConflictError: if a worker executes one of the runs, or another user's run continues the newest one; nothing
                is deleted.
            PartlyDoneError: if it stopped later. The message says whether runs and items were deleted; call it again.
        """
        RUNS_CHOICE.check("forget_all", "runs", runs)
        if runs == "delete" and (store is None or not self.namespace.user):
            raise MisuseError('forget_all(runs="delete") needs store=, and the memory of a user: memory.for_(user=...)')
        deleted = await self._delete_runs(store) if runs == "delete" and store is not None else 0
        try:
            # A record of a machine whose clock is ahead does not keep the owner from beginning anew.
            at = min(await self._now(), self.clock.now() + MAX_SKEW_S)
            count = await self.index.forget_namespace(self.namespace, at=at, by=by, reason=reason)
            self._newest = at + TICK_S
        except AgentError as error:
            if not deleted:
                raise
            raise PartlyDoneError(f"{deleted} runs were deleted; and of the items: {error}") from error
        if runs == "delete" and isinstance(store, SQLiteStore):
            try:
                await store.compact()
            except AgentError as error:
                raise PartlyDoneError(
                    f"{count} items and {deleted} runs were deleted; but content of the runs may remain in free parts "
                    f"of the file until `agentfsm compact`, because: {error}"
                ) from error
        return count

    async def _delete_runs(self, store: Store) -> int:
        """Delete the runs of the user, and their answers in the answer cache, and return the number of the runs.

        The newest is the first: one may continue an earlier one.

        They are deleted before the items, so that none of them teaches a learner new items afterwards.
        """
        mine = [
            each async for each in RunIterator(store, Filter(user=self.namespace.user, tenant=self.namespace.tenant))
        ]
        if (driven := next((each.id for each in mine if each.driven), None)) is not None:
            raise ConflictError(f"run {driven!r} is being driven: cancel it or wait for it; nothing was deleted")
        count = 0
        with suppress(MisuseError):  # a store without records has no answers
            await delete_answers(store, {each.id for each in mine})
        for each in mine:
            try:
                await store.delete(each.id)
            except RunNotFoundError:  # it was deleted with its caller
                continue
            except AgentError as error:
                if not count:
                    raise
                raise PartlyDoneError(
                    f"{count} runs of the user were deleted, newest first, and the others and all items were not: "
                    f"{error}; then call it again"
                ) from error
            count += 1
        return count

    async def forget_runs(self, run_ids: Iterable[str], *, by: str = "", reason: str = "") -> int:
        """Delete the items of runs, for all owners, as `forget` does. Return the number of items."""
        return await self.index.forget_sources([*run_ids], at=await self._now(), by=by, reason=reason)

    async def forget_deleted_runs(self, store: Store, *, by: str = "") -> int:
        """Delete the items of runs that the store no longer has. Return the number of items.

        Call it after runs or sessions were deleted, and after `prune` if the items are to go with the runs.
        """
        last, gone = "", list[str]()
        while page := await self.index.list_sources(after=last):
            for last in page:
                try:
                    await read_header(store, last)
                except RunNotFoundError:
                    gone.append(last)
        return await self.forget_runs(gone, by=by, reason="its run was deleted") if gone else 0

    async def expire(self, rules: Expiry | None = None, *, by: str = "expiry") -> int:
        """Forget old items of little importance, and the least important ones beyond a number. Return their number.

        Documents do not expire.
        """
        rules, now = rules or Expiry(), await self._now()
        kinds = [kind for kind in ItemKind if kind is not ItemKind.DOCUMENT]
        items = await self.read(kinds=kinds, include_held=True)
        ages = {item.id: max(0.0, now - item.recorded_at) / 86_400 for item in items}
        old = {each.id for each in items if ages[each.id] > rules.days and each.importance < rules.importance}
        left = [item for item in items if item.id not in old]
        left.sort(key=lambda item: item.importance * rules.decay ** ages[item.id])
        old |= {item.id for item in left[: max(0, len(left) - rules.count)]}
        if not old:
            return 0
        earlier = find_earlier(await self._read_versions(), old, now)  # which would else be found again
        return await self.index.forget(earlier, at=now, by=by, reason="old")

    async def expire_all(self, rules: Expiry | None = None, *, by: str = "expiry") -> int:
        """Do what `expire` does, for all owners of the index. Return the number of items forgotten."""
        owners = [self.for_(user=owner.user, tenant=owner.tenant) for owner in await self.index.list_owners()]
        return sum([await owner.expire(rules, by=by) for owner in owners])

    async def list_deletions(self) -> Sequence[DeletionProof]:
        """Return the records of all deletions of the index, oldest first, without content."""
        return await self.index.list_deletions()

    async def aclose(self) -> None:
        """Close files and connections."""
        if self._vectors is not None:
            await self._vectors.stop()
        await self.index.aclose()
