"""The methods of an index that keeps its items in a SQL database, which one thread works on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Final, Generic, Protocol, TypeVar

import attrs

from agentfsm.core.errors import AgentError, PartlyDoneError
from agentfsm.memory.ranking import rank_text
from agentfsm.memory.text_terms import read_query
from agentfsm.ports.memory_items import (
    DeletionProof,
    ItemFilter,
    ItemMatch,
    MemoryItem,
    Namespace,
    TextSearch,
    VectorIndex,
)
from agentfsm.stores.threaded.group_commit import GroupCommitWriter, StoreJob, TransactionBackend

T = TypeVar("T")

# A word that no item has is corrected from this length on; shorter ones have too many words like them.
MIN_CORRECTED_CHARS: Final = 4
# Words of a query that are corrected, and the words that each of them may be.
MAX_CORRECTED: Final = 8
CORRECTIONS: Final = 3
# Least likeness of a correction: twice the share of the letters that both words have in the same order.
LIKENESS: Final = 0.8
# Weight of a correction, in shares of a word that was found as it is.
CORRECTED_SHARE: Final = 0.5
# Items with a term of the query that are read to find the best ones.
MAX_HITS: Final = 2_000


class ItemTables(TransactionBackend, Protocol):
    """The operations on the tables of an index, each within a transaction. Only the index's thread calls them."""

    def add(self, items: Sequence[MemoryItem]) -> list[MemoryItem]:
        """Insert the items that are new and not forgotten."""
        ...

    def has_old_terms(self) -> bool:
        """Return whether the terms of the items were written by another version, so that they have to be rebuilt."""
        ...

    def count_terms(self, terms: Collection[str], owners: Collection[Namespace]) -> tuple[int, dict[str, int]]:
        """Return the number of the owners' items; and for each term, of those that have it, which may be estimated."""
        ...

    def list_words(self, beginning: str, lengths: range, owners: Collection[Namespace]) -> list[str]:
        """Return words of items, with that beginning and one of these lengths; of other owners, if it is faster."""
        ...

    def search_terms(self, weights: Mapping[str, float], where: ItemFilter, limit: int) -> list[ItemMatch]:
        """Return the items that have any of these terms, roughly the best first. The filter does not shorten it."""
        ...

    def find_neighbours(self, matches: Sequence[ItemMatch], distance: int, where: ItemFilter) -> list[ItemMatch]:
        """Return the items near others."""
        ...

    def get(self, ids: Collection[str]) -> list[MemoryItem]:
        """Return the items with these ids."""
        ...

    def read(self, where: ItemFilter, after: str, limit: int) -> list[MemoryItem]:
        """Return items in the order of their ids."""
        ...

    def newest_time(self) -> float:
        """Return the time of the newest record, or just after the newest owner was forgotten; else minus infinity."""
        ...

    def find_forgotten(self, ids: Collection[str]) -> list[str]:
        """Return those of the ids whose items were forgotten."""
        ...

    def forget(self, ids: Collection[str], proof: Callable[[int], DeletionProof], *, with_words: bool = False) -> int:
        """Delete items, and note their ids, and with `with_words` those of their words."""
        ...

    def forget_sources(self, run_ids: Collection[str], proof: Callable[[int], DeletionProof]) -> int:
        """Delete the items that come from these runs, and note their ids."""
        ...

    def list_sources(self, after: str, limit: int) -> list[str]:
        """Return ids of runs from which items come, in order."""
        ...

    def list_owners(self) -> list[Namespace]:
        """Return the owners of items, in order."""
        ...

    def forget_owner(self, namespace: Namespace, proof: Callable[[int], DeletionProof]) -> int:
        """Delete all items of an owner, and note the hash of its name."""
        ...

    def release(self, ids: Collection[str], at: float, by: str) -> int:
        """Let held items be found."""
        ...

    def drop_derived(self) -> int:
        """Delete the items with a source."""
        ...

    def rebuild_text(self) -> int:
        """Build the index of words again from the items, and return their number."""
        ...

    def list_deletions(self) -> list[DeletionProof]:
        """Return the records of deletions, oldest first."""
        ...

    def use_vectors(self, model: str, dims: int) -> None:
        """Prepare the vectors of a model, or check that they are of this model."""
        ...

    def drop_vectors(self) -> None:
        """Delete all vectors."""
        ...

    def drop_unused_vectors(self) -> None:
        """Delete the vectors of deleted items."""
        ...

    def read_unembedded(self, limit: int) -> list[MemoryItem]:
        """Return items without a vector, oldest first."""
        ...

    def copy_vectors(self, ids: Collection[str]) -> set[str]:
        """Give items the vectors of others with the same text; return the ids of those that have one now."""
        ...

    def add_vectors(self, vectors: Mapping[str, Sequence[float]]) -> None:
        """Keep vectors of items."""
        ...

    def search_vector(self, vector: Sequence[float], where: ItemFilter, limit: int) -> list[ItemMatch]:
        """Return the nearest items that fit the filter."""
        ...


TablesT = TypeVar("TablesT", bound=ItemTables)


@attrs.define(eq=False, repr=False)
class ThreadedIndex(VectorIndex, Generic[TablesT]):
    """An index whose thread works on tables."""

    _writer: GroupCommitWriter[TablesT] = attrs.field(init=False)

    _has_terms: bool = attrs.field(default=False, init=False)
    """Whether the terms of the items are known to be of this version."""

    async def _remove_remains(self) -> None:
        """Remove the remains of deleted rows. Default: nothing."""

    async def _forget(self, work: Callable[[TablesT], int]) -> int:
        """Delete items in one transaction, then their remains.

        Raises:
            PartlyDoneError: if the items were deleted, and their remains were not.
        """
        count = await self._run(work, writes=True)
        try:
            await self._remove_remains()
        except AgentError as error:
            raise PartlyDoneError(
                f"{count} items were deleted, and are not found any more; but their content may remain in free parts "
                f"of the files until the next deletion, or until `await memory.forget([])`, because: {error}"
            ) from error
        return count

    async def _run(self, work: Callable[[TablesT], T], *, writes: bool) -> T:
        if not self._has_terms:
            if await self._submit(lambda tables: tables.has_old_terms(), writes=False):
                await self._submit(lambda tables: tables.rebuild_text(), writes=True)
            self._has_terms = True
        return await self._submit(work, writes=writes)

    async def _submit(self, work: Callable[[TablesT], T], *, writes: bool) -> T:
        job = StoreJob(work, writes=writes)
        self._writer.submit(job)
        return await job.wait()

    async def add(self, items: Sequence[MemoryItem]) -> Sequence[MemoryItem]:
        """Add items in their order."""
        return await self._run(lambda tables: tables.add(items), writes=True)

    async def search_text(self, query: str, where: ItemFilter, limit: int) -> TextSearch:
        """Return the best matches."""
        terms = read_query(query)
        if not terms:
            return TextSearch()
        return await self._run(lambda tables: _search_text(tables, terms, where, limit), writes=False)

    async def find_neighbours(
        self, matches: Sequence[ItemMatch], distance: int, where: ItemFilter
    ) -> Sequence[ItemMatch]:
        """Return the items near others."""
        return await self._run(lambda tables: tables.find_neighbours(matches, distance, where), writes=False)

    async def get(self, ids: Collection[str]) -> Mapping[str, MemoryItem]:
        """Return the items with these ids."""
        return {item.id: item for item in await self._run(lambda tables: tables.get(ids), writes=False)}

    async def read(self, where: ItemFilter, *, after: str = "", limit: int = 1_000) -> Sequence[MemoryItem]:
        """Return items in the order of their ids."""
        return await self._run(lambda tables: tables.read(where, after, limit), writes=False)

    async def newest_time(self) -> float:
        """Return the time of the newest record, or just after an owner was forgotten."""
        return await self._run(lambda tables: tables.newest_time(), writes=False)

    async def find_forgotten(self, ids: Collection[str]) -> Collection[str]:
        """Return those of the ids whose items were forgotten."""
        return await self._run(lambda tables: tables.find_forgotten(ids), writes=False)

    async def forget(self, ids: Collection[str], *, at: float, by: str, reason: str, with_words: bool = False) -> int:
        """Delete items and their remains."""

        def prove(items: int) -> DeletionProof:
            return DeletionProof(items=items, at=at, by=by, reason=reason)

        return await self._forget(lambda tables: tables.forget(ids, prove, with_words=with_words))

    async def forget_namespace(self, namespace: Namespace, *, at: float, by: str, reason: str) -> int:
        """Delete all items of an owner and their remains."""

        def prove(items: int) -> DeletionProof:
            return DeletionProof(items=items, at=at, by=by, reason=reason)

        return await self._forget(lambda tables: tables.forget_owner(namespace, prove))

    async def forget_sources(self, run_ids: Collection[str], *, at: float, by: str, reason: str) -> int:
        """Delete the items that come from these runs, and their remains."""

        def prove(items: int) -> DeletionProof:
            return DeletionProof(items=items, at=at, by=by, reason=reason)

        return await self._forget(lambda tables: tables.forget_sources(run_ids, prove))

    async def list_sources(self, *, after: str = "", limit: int = 1_000) -> Sequence[str]:
        """Return ids of runs from which items come."""
        return await self._run(lambda tables: tables.list_sources(after, limit), writes=False)

    async def list_owners(self) -> Sequence[Namespace]:
        """Return the owners of items."""
        return await self._run(lambda tables: tables.list_owners(), writes=False)

    async def release(self, ids: Collection[str], *, at: float, by: str) -> int:
        """Approve items that are held."""
        return await self._run(lambda tables: tables.release(ids, at, by), writes=True)

    async def drop_derived(self) -> int:
        """Delete the items that have a source."""
        return await self._run(lambda tables: tables.drop_derived(), writes=True)

    async def rebuild_text(self) -> int:
        """Build the index of words again."""
        return await self._run(lambda tables: tables.rebuild_text(), writes=True)

    async def list_deletions(self) -> Sequence[DeletionProof]:
        """Return the records of deletions, oldest first."""
        return await self._run(lambda tables: tables.list_deletions(), writes=False)

    async def use_vectors(self, model: str, dims: int) -> None:
        """Prepare the index for the vectors of a model, unless it is."""
        await self._run(lambda tables: tables.use_vectors(model, dims), writes=True)

    async def drop_vectors(self) -> None:
        """Delete all vectors."""
        await self._run(lambda tables: tables.drop_vectors(), writes=True)

    async def drop_unused_vectors(self) -> None:
        """Delete the vectors of deleted items."""
        await self._run(lambda tables: tables.drop_unused_vectors(), writes=True)

    async def read_unembedded(self, limit: int) -> Sequence[MemoryItem]:
        """Return items without a vector, oldest first."""
        return await self._run(lambda tables: tables.read_unembedded(limit), writes=False)

    async def copy_vectors(self, ids: Collection[str]) -> Collection[str]:
        """Give items the vectors of others with the same text."""
        return await self._run(lambda tables: tables.copy_vectors(ids), writes=True)

    async def add_vectors(self, vectors: Mapping[str, Sequence[float]]) -> None:
        """Keep vectors by the ids of their items."""
        await self._run(lambda tables: tables.add_vectors(vectors), writes=True)

    async def search_vector(self, vector: Sequence[float], where: ItemFilter, limit: int) -> Sequence[ItemMatch]:
        """Return the items whose vectors have the most similar direction."""
        return await self._run(lambda tables: tables.search_vector(vector, where, limit), writes=False)

    async def aclose(self) -> None:
        """Close the tables and end the thread."""
        await self._writer.close()


def _search_text(tables: ItemTables, terms: Sequence[str], where: ItemFilter, limit: int) -> TextSearch:
    """Weigh the terms by their rarity, correct misspelled ones, read the candidates, and rank them by BM25."""
    total, counts = tables.count_terms(terms, where.namespaces)
    if not total:
        return TextSearch()
    shares = dict.fromkeys(terms, 1.0)
    unknown = [term for term in terms if not counts[term] and len(term) >= MIN_CORRECTED_CHARS and term.isalpha()]
    for word in unknown[:MAX_CORRECTED]:
        lengths = range(len(word) - 1, len(word) + 2)
        known = tables.list_words(word[0], lengths, where.namespaces)
        shares |= dict.fromkeys(get_close_matches(word, known, n=CORRECTIONS, cutoff=LIKENESS), CORRECTED_SHARE)
    if more := shares.keys() - counts.keys():
        counts |= tables.count_terms(more, where.namespaces)[1]
    weights = {
        term: share * math.log(1 + (total - counts[term] + 0.5) / (counts[term] + 0.5))
        for term, share in shares.items()
        if counts[term]
    }
    if not weights:
        return TextSearch()
    # Common terms are left out while there are rarer ones: what has nothing else is not among the best.
    chosen: dict[str, float] = {}
    hits = 0
    for term in sorted(weights, key=counts.__getitem__):
        if hits >= limit and hits + counts[term] > MAX_HITS:
            break
        chosen[term] = weights[term]
        hits += counts[term]
    matches = tables.search_terms(chosen, where, limit)
    if len(matches) < limit and len(chosen) < len(weights):
        matches = tables.search_terms(weights, where, limit)
    return TextSearch(matches=tuple(rank_text(matches, weights)), weights=weights)
