"""Vectors of the items of a memory: embed what has none, and search by the vector of a query."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

import attrs

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.usage import Usage
from agentfsm.core.validation import require_members
from agentfsm.core.value import Value
from agentfsm.ports.embedder import Embedder, Embeddings
from agentfsm.ports.memory_items import ItemFilter, ItemMatch, MemoryIndex, VectorIndex
from agentfsm.streaming.detached_task import DetachedTask, cut_off_owned

_log = logging.getLogger("agentfsm.memory")

# Items that are embedded at once.
BATCH_ITEMS: Final = 256
# Characters of a query that are embedded; models read some 8,000 tokens at most.
MAX_EMBEDDED_CHARS: Final = 8_000
_VECTOR_METHODS: Final = ("use_vectors", "copy_vectors", "add_vectors", "search_vector")


@attrs.frozen(kw_only=True)
class EmbeddedQuery(Value):
    """The vector of a query, or the reason why there is none."""

    vector: tuple[float, ...] = ()
    """The vector; empty if there is none."""

    usage: Usage = Usage()
    """Usage of the embedder."""

    model: str = ""
    """Name of the embedder's model; empty if there is no embedder."""

    fault: str = ""
    """Reason why there is no vector; empty if there is one, or no embedder."""


@attrs.define(eq=False, repr=False)
class ItemVectors:
    """The vectors of an index by one embedder."""

    index: VectorIndex
    """The index."""

    embedder: Embedder
    """The embedder."""

    usage: Usage = attrs.field(factory=Usage, init=False)
    """Usage of all requests to the embedder so far."""

    _is_ready: bool = attrs.field(default=False, init=False)

    _task: DetachedTask | None = attrs.field(default=None, init=False)
    """Task that embeds the items without a vector, after another model was given; None before the first."""

    async def embed_query(self, query: str) -> EmbeddedQuery:
        """Return the vector of a query. A failing embedder is reported in the result.

        At the first call, items without a vector begin to be embedded in the background.
        """
        if not self._is_ready:
            await self.prepare()
            if await self.index.read_unembedded(1):
                self._embed_in_background()
        try:
            (vector,), usage = await self._embed([query[:MAX_EMBEDDED_CHARS]])
        except MisuseError:
            raise
        except Exception as error:  # noqa: BLE001  an embedder may fail in any way, and the search by words goes on
            return EmbeddedQuery(
                usage=getattr(error, "usage", None) or Usage(),
                model=self.embedder.name,
                fault=f"the embedder {self.embedder.name} failed: {type(error).__name__}: {error}"[:1_000],
            )
        return EmbeddedQuery(vector=vector, usage=usage, model=self.embedder.name)

    async def search(self, query: EmbeddedQuery, where: ItemFilter, limit: int) -> Sequence[ItemMatch]:
        """Return the nearest items, best first; none if another object has given the index another model since."""
        try:
            return await self.index.search_vector(query.vector, where, limit) if query.vector else ()
        except MisuseError as error:
            _log.warning("the memory was searched by words only: %s", error)
            return ()

    async def embed_new(self) -> None:
        """Embed the items without a vector. A failing embedder or index is logged, and they are embedded later.

        Raises:
            MisuseError: if the embedder is not as it declares itself.
        """
        if self._task is not None and not self._task.is_over:
            return  # it goes on until there are none
        if len(await self.index.read_unembedded(BATCH_ITEMS + 1)) > BATCH_ITEMS:
            self._embed_in_background()
            return
        try:
            await self.embed_missing()
        except MisuseError as error:
            raise MisuseError(f"the items are kept, and are found by their words only: {error}") from error
        except Exception as error:  # noqa: BLE001  as above: the items are kept, and found by their words
            _log.warning("items are without vectors until the next one is added or reindex(): %s", error)

    async def embed_missing(self) -> int:
        """Give a vector to all items without one; return their number. Texts that have a vector are not embedded."""
        await self.prepare()
        count = 0
        while items := await self.index.read_unembedded(BATCH_ITEMS):
            known = await self.index.copy_vectors([item.id for item in items])
            texts = {item.id: item.text[:MAX_EMBEDDED_CHARS] for item in items if item.id not in known}
            if texts:
                different = [*dict.fromkeys(texts.values())]
                vectors = dict(zip(different, (await self._embed(different))[0], strict=True))
                await self.index.add_vectors({item_id: vectors[text] for item_id, text in texts.items()})
            count += len(items)
        return count

    def _embed_in_background(self) -> None:
        def note_end(error: BaseException | None, was_cut_off: bool) -> None:  # noqa: ARG001  as the task calls it
            if error is not None:
                _log.warning("items are without vectors until the next one is added or reindex(): %s", error)

        self._task = DetachedTask(self.embed_missing, note_end, self)
        self._task.start()

    async def stop(self) -> None:
        """End the task in the background. What it has embedded stays, and the rest waits for the next start."""
        await cut_off_owned(self)

    async def reindex(self) -> int:
        """Drop all vectors and embed all items again; return their number."""
        await self.stop()
        await self.index.drop_vectors()
        self._is_ready = False
        return await self.embed_missing()

    async def prepare(self) -> None:
        """Prepare the index for the vectors of the model. Those of another one are dropped, at the first call."""
        if not self._is_ready:
            await self.index.use_vectors(self.embedder.name, self.embedder.dims)
            self._is_ready = True

    async def _embed(self, texts: Sequence[str]) -> tuple[tuple[tuple[float, ...], ...], Usage]:
        """Return a vector for each text, checked.

        Raises:
            MisuseError: if the vectors are not as the embedder declares them.
        """
        try:
            found = await self.embedder.embed(texts)
        except ModelError as error:
            self.usage += error.usage or Usage()
            raise
        if not isinstance(found, Embeddings):
            raise MisuseError(
                f"the embedder {self.embedder.name!r} returned {type(found).__name__}: return "
                "agentfsm.ports.embedder.Embeddings(vectors=...), a tuple of numbers for each text"
            )
        self.usage += found.usage
        dims = {len(vector) for vector in found.vectors}
        if len(found.vectors) != len(texts) or dims != {self.embedder.dims}:
            raise MisuseError(
                f"the embedder {self.embedder.name!r} returned {len(found.vectors)} vectors of {sorted(dims)} "
                f"dimensions for {len(texts)} texts, and declares {self.embedder.dims}: correct its `dims`"
            )
        if not all(math.isfinite(each) for vector in found.vectors for each in vector):
            raise ValueError("it returned a vector with a number that is not finite")
        return found.vectors, found.usage


def open_vectors(index: MemoryIndex, embedder: Embedder | None) -> ItemVectors | None:
    """Return the vectors of an index; None without an embedder.

    Raises:
        MisuseError: if the index keeps no vectors, or the embedder is none.
    """
    if embedder is None:
        return None
    require_members("name", "dims", "embed", wanted="an Embedder, with name, dims and embed").check(
        "Memory", "embedder", embedder
    )
    if not all(hasattr(index, name) for name in _VECTOR_METHODS):
        raise MisuseError(
            f"Memory(embedder=...): {type(index).__name__} keeps no vectors; use the path of a file or a "
            "postgresql:// URL, or leave out embedder"
        )
    return ItemVectors(index, embedder)  # type: ignore[arg-type]  # checked above
