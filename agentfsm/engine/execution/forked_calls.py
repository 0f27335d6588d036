"""Calls under a quota in the forks of a session, in a record of the store.

A fork begins with the calls of the events that it copies, and would not see those that the forked run and its other
forks make beside it. The first fork of a session creates the record. From then on each of these runs writes the number
of its calls by compare-and-set, before the decisions of guards are in its journal. So of two forks at the last allowed
call, in any process, one is refused. A session without forks has no record.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.core.errors import ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.reducers import add_counts
from agentfsm.core.value import Value
from agentfsm.journal.load import read_header

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoreRecord

# Kind of the records.
FORKED_CALLS: Final = "forked-calls"
# Name of the line of a session that its forks leave.
_MAIN: Final = ""
_Counts = Mapping[str, int]


@attrs.frozen(kw_only=True)
class ForkedLine(Value):
    """The place of a run in its session: a fork and the runs that continue it are a line, and so are all others."""

    key: str
    """Key of the session's record."""

    line: str
    """Id of the fork with which the line begins; empty for the runs that continue no fork."""


async def find_line(store: Store, header: Header) -> ForkedLine:
    """Return the place of a run, the run of a sub-agent excepted."""
    line, origin = _MAIN, f"run {header.id}"
    while header.session is None and (earlier := header.forked_from or header.after) is not None:
        if header.forked_from is not None:
            line = line or header.id
        origin = f"run {earlier}"
        try:
            header = await read_header(store, earlier)
        except RunNotFoundError:
            break
    name = origin if header.session is None else f"session {header.session}"
    return ForkedLine(key=sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32], line=line)


@attrs.define(eq=False)
class ForkedCalls:
    """The record of a session, as one of its runs has read it."""

    store: Store
    place: ForkedLine
    lock: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)
    """Held from `read` until the decisions are in the journal, since runs of sub-agents count side by side."""

    _record: StoreRecord | None = attrs.field(default=None, init=False)
    _has_records: bool = attrs.field(default=True, init=False)

    @property
    def is_forked(self) -> bool:
        """Whether the session has forks, as of the last `read`."""
        return self._record is not None

    async def read(self) -> None:
        """Read the record. A store without records has none."""
        try:
            self._record = await self.store.read_record(FORKED_CALLS, self.place.key)
        except MisuseError:
            self._record, self._has_records = None, False

    def count_all(self, own: _Counts) -> _Counts:
        """Return the number of calls of all lines, by tool name.

        Args:
            own: Calls of the run and of those that it continues, as its journal has them.
        """
        value = self._value
        total = add_counts(own, {name: -count for name, count in value["before"].get(self.place.line, {}).items()})
        for line, counts in value["lines"].items():
            total = total if line == self.place.line else add_counts(total, counts)
        return total

    async def write(self, own: _Counts) -> bool:
        """Write the calls of the run. Return False if another run has written since `read`: read and decide again.

        Args:
            own: As for `count_all`, with those that were just allowed.
        """
        return self._record is None or await self._replace(own)

    async def add_fork(self, fork_id: str, copied: _Counts, own: _Counts) -> None:
        """Begin a line for a fork of the run, before it is created; not in a store without records.

        Args:
            fork_id: Id of the fork.
            copied: Calls of the journal that the fork begins with.
            own: Calls of the run, or of the newest one of its session.
        """
        while True:
            await self.read()
            if not self._has_records:
                return
            if await self._replace(own, {fork_id: dict(copied)}):
                return

    @property
    def _value(self) -> Any:
        return {"lines": {}, "before": {}} if self._record is None else self._record.value

    async def _replace(self, own: _Counts, forks: Mapping[str, Any] | None = None) -> bool:
        value, line = self._value, self.place.line
        before = value["before"].get(line, {})
        counts = {name: count - before.get(name, 0) for name, count in own.items()}
        if forks is not None:  # an earlier run of the line may be forked, which has made fewer calls
            known = value["lines"].get(line, {})
            counts = {name: max(known.get(name, 0), counts.get(name, 0)) for name in {**known, **counts}}
        # A fork that exists already keeps the calls with which it began.
        changed: Any = {"lines": {**value["lines"], line: counts}, "before": {**(forks or {}), **value["before"]}}
        revision = 0 if self._record is None else self._record.revision
        try:
            self._record = await self.store.write_record(FORKED_CALLS, self.place.key, changed, revision=revision)
        except ConflictError:
            return False
        return True
