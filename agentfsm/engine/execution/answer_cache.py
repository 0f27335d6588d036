"""The answer cache in a store: find an answer, claim the right to give it, keep it.

A key has one record. It is a claim while a run works on the answer, so that other runs with the same key wait for it,
in any process; then it is the answer, or a note that there is none to keep. A claim of a run that died expires.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final, Literal, TypeAlias, TypeVar

import anyio
import attrs

from agentfsm.core.errors import AgentError, ConflictError, MisuseError, RunNotFoundError, StoreError
from agentfsm.core.events import AnswerSource
from agentfsm.core.labels import Label, as_labels
from agentfsm.core.messages import JSON
from agentfsm.core.validation import NOT_NEGATIVE, POSITIVE, require_choice
from agentfsm.core.value import Value
from agentfsm.ports.store import Store, ensure_store
from agentfsm.ports.stored import MAX_RECORD_BYTES, StoreRecord
from agentfsm.streaming.log import RunLogger

T = TypeVar("T")
AnswerScope: TypeAlias = Literal["user", "tenant"]

# Kind of the records of answers.
ANSWER_KIND: Final = "answer_cache"
# Seconds for which an answer is kept: document H, 4.3.
ANSWER_TTL_S: Final = 3_600.0
# Seconds that a run waits for another one with the same question: as long as most runs take.
ANSWER_WAIT_S: Final = 30.0
# Seconds for which it is known that a question has no answer to keep.
UNCACHEABLE_S: Final = 60.0
# Seconds that one operation of the store may take; then the run goes on as without a cache.
STORE_TIMEOUT_S: Final = 2.0
# Seconds for which a claim holds if no run waits for it.
_MIN_CLAIM_S: Final = 1.0
# Seconds between two reads of a run that waits: doubled from the first to the last.
_FIRST_POLL_S, _LAST_POLL_S = 0.02, 0.5


def _check_store(_owner: object, _attribute: object, store: Store | None) -> None:
    if store is not None:
        ensure_store(store)


@attrs.frozen(kw_only=True)
class AnswerCache(Value):
    """Repeats the answer of an earlier run to the same question, without a request to the model.

    A run is answered from the cache if all of these are the same: the prompt (apart from spaces, tabs and line breaks
    at its ends), the user, the tenant, the roles, the clearance, the labels, the metadata, the release, the arms of
    experiments, the agent with its version, instructions, prompts, settings and limits, the model with its address, and
    the options of tools, permissions, guards, validators, judge and other policies.

    An answer is kept only if the run ended in DONE, and all calls were those of tools that are declared read-only and
    `cacheable` and need no approval, and succeeded. It is not kept if the model refused, if a person decided or was
    asked something, if the run belongs to a session or continues another, was given more inputs, called agents, used
    tools of the provider, or had its texts changed by guards.

    Before each repetition, these are checked again: the tools that it used, their `fresh_s`, the output type, the
    validators, and whether the run that gave it is still in the store. If a check fails, the model is asked.

    Each run that is answered from the cache is a run of its own in the journal, with `run.answered_from`.

    Raises:
        MisuseError: if an option is invalid.
    """

    ttl_s: float = attrs.field(default=ANSWER_TTL_S, validator=POSITIVE)
    """Seconds for which an answer is kept, above 0; `fresh_s` of the tools that it used may shorten it. Default 3,600.
    """

    scope: AnswerScope = attrs.field(default="user", validator=require_choice("user", "tenant"))
    """Runs that share answers. "user", the default: those of one user; runs without `user=` have no cache. "tenant":
    all of a tenant with the same roles, or all without a tenant; then answers of runs with a label of private data
    (`private`, `confidential`, `restricted`) are not kept, nor those with calls of tools that have a `login`.
    """

    store: Store | None = attrs.field(default=None, validator=_check_store)
    """Store that keeps the answers as records; None for that of the agent. If it fails, runs go on without a cache. In
    another store than that of the agent, an answer remains until it expires, also if its run is deleted.
    """

    wait_s: float = attrs.field(default=ANSWER_WAIT_S, validator=NOT_NEGATIVE)
    """Seconds that a run waits for one that works on the same question, in any process, 0 or more. Default 30. The time
    is active time of the run.
    """


@attrs.frozen(kw_only=True)
class KeptAnswer(Value):
    """An answer in the cache."""

    text: str
    """Text of the answer."""

    source: AnswerSource
    """Run that gave it."""

    version: int
    """Version of the journal of that run at its end."""

    uses: Mapping[str, float]
    """Tools that it used, with the start of the oldest call of each, in seconds since 1970."""


@attrs.define(eq=False, repr=False)
class AnswerClaim:
    """The part of one run in the cache: it finds an answer, or has the claim to give one. It raises no StoreError."""

    run_id: str
    """Id of the run."""

    cache: AnswerCache
    """Options of the cache."""

    store: Store
    """Store of the answers."""

    log: RunLogger
    """Log of the run."""

    key: str = ""
    """Key of the question, once an answer was sought; empty before."""

    record: StoreRecord | None = None
    """The claim as stored; None if the run has none."""

    found: StoreRecord | None = None
    """The answer as stored that was found last; None if there was none."""

    has_runs: bool = False
    """Whether the store is that of the agent's runs."""

    has_refusal: bool = False
    """Whether the model refused in this run, so that its answer is not kept."""

    async def find(self, key: str) -> KeptAnswer | None:
        """Return the answer of a key, after waiting for a run that works on it; None if this run has to give it."""
        self.key = key
        try:
            return await self._find(key)
        except StoreError as error:
            self._warn(error)
            return None

    async def _find(self, key: str) -> KeptAnswer | None:
        poll_s, until = _FIRST_POLL_S, anyio.current_time() + self.cache.wait_s
        while True:
            record = await _bound(self.store.read_record(ANSWER_KIND, key))
            if record is None:
                if await self._claim():
                    return None
                continue
            value: Mapping[str, Any] = record.value if isinstance(record.value, Mapping) else {}
            if (kept := _read_answer(value)) is not None:
                self.found = record
                return kept
            if value.get("claimed_by") == self.run_id:  # by an earlier execution
                self.record = record
            if value.get("claimed_by") in (None, self.run_id) or anyio.current_time() >= until:
                return None
            await anyio.sleep(poll_s)
            poll_s = min(2 * poll_s, _LAST_POLL_S)

    async def _claim(self, revision: int = 0) -> bool:
        """Claim the key; return whether no other run was faster."""
        seconds = max(self.cache.wait_s, _MIN_CLAIM_S)
        try:
            self.record = await self._write({"claimed_by": self.run_id}, revision, seconds)
        except ConflictError:
            return False
        return True

    async def replace_found(self) -> bool:
        """Replace the answer that was found by a claim; False if the record has changed, to be searched again."""
        try:
            return self.found is None or await self._claim(self.found.revision)
        except StoreError as error:
            self._warn(error)
            return True

    async def has_source(self, answer: KeptAnswer) -> bool:
        """Return whether the run that gave an answer still exists; True if the store does not have the runs."""
        if not self.has_runs:
            return True
        try:
            await _bound(self.store.read(answer.source.run_id, answer.version))
        except RunNotFoundError:
            return False
        except AgentError as error:
            self._warn(error)
            return False
        return True

    async def keep(self, answer: KeptAnswer, expires_at: float) -> None:
        """Replace the claim by the answer."""
        source = answer.source
        value: JSON = {
            "answer": answer.text,
            "run": source.run_id,
            "at": source.at,
            "labels": [str(label) for label in source.labels],
            "version": answer.version,
            "uses": dict(answer.uses),
        }
        if len(json.dumps(value)) > MAX_RECORD_BYTES:
            await self.mark_uncacheable()
        else:
            await self._replace(lambda revision: self._write_answer(value, revision, expires_at))

    async def _write_answer(self, value: JSON, revision: int, expires_at: float) -> None:
        try:
            await self._write_until(value, revision, expires_at)
        except ConflictError:  # the claim has expired: keep the answer, unless another run has claimed the key
            await self._write_until(value, 0, expires_at)

    async def mark_uncacheable(self) -> None:
        """Replace the claim by a note that there is no answer to keep: runs that wait go on, all at once."""
        await self._replace(lambda revision: self._write({}, revision, UNCACHEABLE_S))

    async def withdraw(self) -> None:
        """Delete the claim, because the execution was cut off: a run that waits takes it over."""
        await self._replace(lambda revision: _bound(self.store.delete_record(ANSWER_KIND, self.key, revision=revision)))

    async def _replace(self, write: Callable[[int], Awaitable[object]]) -> None:
        record, self.record = self.record, None
        if record is None:
            return
        try:
            await write(record.revision)
        except ConflictError:  # it had expired, and another run has claimed the key
            return
        except StoreError as error:
            self._warn(error)

    async def _write(self, value: JSON, revision: int, seconds: float) -> StoreRecord:
        return await self._write_until(value, revision, await _bound(self.store.now()) + seconds)

    async def _write_until(self, value: JSON, revision: int, expires_at: float) -> StoreRecord:
        return await _bound(
            self.store.write_record(ANSWER_KIND, self.key, value, revision=revision, expires_at=expires_at)
        )

    def _warn(self, error: AgentError) -> None:
        self.log.warning("answer_cache_failed", error=f"{type(error).__name__}: {error}")


async def delete_answers(store: Store, run_ids: Collection[str]) -> int:
    """Delete the answers that these runs gave, before the runs are deleted. Return their number."""
    count, last = 0, ""
    while records := await store.list_records(ANSWER_KIND, after=last):
        for record in records:
            last = record.key
            answer = _read_answer(record.value) if isinstance(record.value, Mapping) else None
            if answer is not None and answer.source.run_id in run_ids:
                count += await store.delete_record(ANSWER_KIND, record.key, revision=record.revision)
    return count


async def _bound(operation: Awaitable[T]) -> T:
    """Await an operation of the store, for a limited time.

    Raises:
        StoreError: if it takes longer.
    """
    with anyio.move_on_after(STORE_TIMEOUT_S):
        return await operation
    raise StoreError(f"the store of the answer cache gave no answer within {STORE_TIMEOUT_S:g} s")


def _read_answer(value: Mapping[str, Any]) -> KeptAnswer | None:
    """Return the answer of a record; None if it is a claim, or the record of another program."""
    try:
        labels: tuple[Label, ...] = as_labels(value["labels"])
        source = AnswerSource(run_id=str(value["run"]), at=float(value["at"]), labels=labels)
        uses = {str(tool): float(at) for tool, at in dict(value["uses"]).items()}
        return KeptAnswer(text=str(value["answer"]), source=source, version=int(value["version"]), uses=uses)
    except (KeyError, TypeError, ValueError, MisuseError):
        return None
