"""Which calls of a reply may overlap, and which wait for which: the plan that the queue follows. Pure.

A call touches everything or a set of keys (its locks), and shares what it touches or needs it for itself. Two calls
may overlap when both share, or when they touch nothing in common; of two that may not, the later waits for the
earlier. So what runs is always equal to the calls one after the other, in the model's order.

A reader-writer table with keys below it finds the waits in time linear in the calls, also for thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.tools import callback_errors

if TYPE_CHECKING:
    from agentfsm.core.tool_traits import ToolKind
    from agentfsm.tools.schema.binding import Arguments
    from agentfsm.tools.tool import Tool


@attrs.frozen
class Access(Value):
    """What a call touches, and whether it shares it."""

    shared: bool
    keys: frozenset[Hashable] | None
    """None: it may touch anything."""

    reason: str
    """In words, for who reads the plan."""

    def may_overlap(self, other: Access) -> bool:
        """Whether calls with these accesses may run at the same time."""
        if self.shared and other.shared:
            return True
        return self.keys is not None and other.keys is not None and self.keys.isdisjoint(other.keys)


EXCLUSIVE: Final = Access(shared=False, keys=None, reason="declares nothing, so it runs alone")
READ_ONLY: Final = Access(shared=True, keys=None, reason="read-only")
CONCURRENCY_SAFE: Final = Access(shared=True, keys=None, reason="declared concurrency-safe")
NO_ACCESS: Final = Access(shared=True, keys=frozenset(), reason="will not run")


def resolve_access(tool: Tool[..., Any], arguments: Callable[[], Arguments]) -> Access:
    """Return what a call touches; a declaration that fails or makes no sense counts for nothing, so the call is alone.

    Args:
        tool: What is called.
        arguments: Makes the validated arguments; called only where the tool's declarations are functions of them.

    Raises:
        ArgumentsError: when the arguments do not fit.
    """
    safe = tool.concurrency_safe
    if tool.locks is None and isinstance(safe, bool):
        return EXCLUSIVE if not safe else READ_ONLY if tool.read_only else CONCURRENCY_SAFE
    given = arguments()
    try:
        shared = safe if isinstance(safe, bool) else _require_bool(safe(given))
        keys = None if tool.locks is None else _to_keys(tool.locks(given))
        return Access(shared=shared, keys=keys, reason=_format_reason(keys, shared=shared))
    except Exception as error:  # noqa: BLE001  a declaration that breaks has declared nothing
        callback_errors.log_callback_error("locks or concurrency_safe", tool.name, "the call is alone", error)
        why = f"its declaration failed ({type(error).__name__}), so it is alone"
        return Access(shared=False, keys=None, reason=why)


def _require_bool(answer: object) -> bool:
    if not isinstance(answer, bool):  # other values are mistakes that read as a yes: a coroutine, a text
        raise TypeError(type(answer).__name__)
    return answer


def _to_keys(keys: Iterable[Hashable]) -> frozenset[Hashable]:
    return frozenset([keys] if isinstance(keys, str) else keys)


def _format_reason(keys: frozenset[Hashable] | None, *, shared: bool) -> str:
    if keys is None:
        return "concurrency-safe with these arguments" if shared else "not safe with these arguments, so it runs alone"
    names = ", ".join(sorted(map(str, keys))) or "nothing"
    return f"{'shares' if shared else 'locks'} {names}"


@attrs.define(eq=False, repr=False)
class CallGroup:
    """Calls that later ones wait for together."""

    batch: int = -1
    """The highest batch among its calls."""

    members: list[int] = attrs.field(factory=list)
    remaining: int = 0
    """Calls, and groups before it, that have not ended."""

    on_done: list[Callable[[], None]] = attrs.field(factory=list)
    """Called when all have ended."""

    predecessor: CallGroup | None = None
    """The group that this one ends no sooner than."""

    successors: list[CallGroup] = attrs.field(factory=list)
    """Groups that end no sooner than this one."""

    @property
    def calls(self) -> Iterator[int]:
        """The indexes of the calls that somebody who waits for this group waits for."""
        group: CallGroup | None = self
        while group is not None:
            yield from group.members
            group = group.predecessor

    def add_call(self, index: int, batch: int) -> None:
        """Take a call in."""
        self.members.append(index)
        self.remaining += 1
        self.batch = max(self.batch, batch)

    def finish_one(self) -> None:
        """Say that a call has ended, or a group before this one."""
        ending = [self]
        while ending:  # and not by recursion: thousands may follow one another
            group = ending.pop()
            group.remaining -= 1
            if group.remaining:
                continue
            waiting, group.on_done = group.on_done, []
            after, group.successors = group.successors, []
            ending += after
            for resume_from in waiting:
                resume_from()

    def add_successor(self, after: CallGroup) -> None:
        """Let another group count as ended no sooner than this one."""
        after.predecessor = self
        after.batch = max(after.batch, self.batch)
        if self.remaining:
            after.remaining += 1
            self.successors.append(after)


@attrs.define(eq=False, repr=False)
class ScheduledCall:
    """A call's place in the order."""

    index: int
    batch: int
    waits: list[CallGroup]
    """What has to end before it starts."""

    groups: list[CallGroup]
    """What it is part of, so that others can wait for it."""

    remaining: int
    """How many of `waits` have not ended."""


@attrs.define(eq=False, repr=False)
class _KeyHolders:
    """Who holds a key: the newest call that needs it for itself, and those that share it since."""

    exclusive: CallGroup | None = None
    shared: CallGroup | None = None


@attrs.define(eq=False, repr=False)
class DependencyTracker:
    """Takes calls one by one, in the model's order, and tells what each has to wait for."""

    prerequisites: frozenset[str] = frozenset()
    """Names that occur in any `after`."""

    _count: int = 0
    _last_exclusive: CallGroup | None = None
    """The newest call that ran alone: everything behind it waits for it."""

    _since_exclusive: CallGroup = attrs.field(factory=CallGroup)
    """All calls from that one on: the next that runs alone waits for them."""

    _sharers: CallGroup | None = None
    """Calls that share everything, and came since the newest one that locks keys."""

    _lockers: CallGroup | None = None
    """Calls that lock keys, and came since the newest one that shares everything."""

    _lockers_are_newest: bool = False
    """Which of these two came last."""

    _keys: dict[Hashable, _KeyHolders] = attrs.field(factory=dict)
    _groups_by_name: dict[str, CallGroup] = attrs.field(factory=dict)
    _closed_names: set[str] = attrs.field(factory=set)
    """Names whose group somebody waits for, so that the next call of the name starts a new one."""

    def add(self, name: str, access: Access, after: Collection[str] = ()) -> ScheduledCall:
        """Take in the next call: of which tool, what it touches, and which tools' earlier calls it waits for."""
        waits, joins = self._resolve_by_access(access)
        for other in after:
            if (group := self._groups_by_name.get(other)) is not None:
                waits.append(group)
                self._closed_names.add(other)
        batch = 1 + max([group.batch for group in waits]) if waits else 0
        joins.append(self._since_exclusive)
        if name in self.prerequisites:
            joins.append(self._get_name_group(name, chained=name not in after))
        for group in joins:
            group.add_call(self._count, batch)
        waits = [group for group in waits if group.remaining]
        self._count += 1
        return ScheduledCall(self._count - 1, batch, waits, joins, len(waits))

    def _get_name_group(self, name: str, *, chained: bool) -> CallGroup:
        """Return the group of a tool's newest calls; chained where the call does not itself wait for those before."""
        group = self._groups_by_name.get(name)
        if group is None or name in self._closed_names:
            before, group = group, CallGroup()
            if before is not None and chained:
                before.add_successor(group)
            self._groups_by_name[name] = group
            self._closed_names.discard(name)
        return group

    def _resolve_by_access(self, access: Access) -> tuple[list[CallGroup], list[CallGroup]]:
        """Return what such a call waits for, and what it becomes part of."""
        waits = [] if self._last_exclusive is None else [self._last_exclusive]
        if access.keys is not None:
            return self._resolve_by_keys(access.keys, waits, shared=access.shared)
        if access.shared:
            if self._lockers is not None:
                waits.append(self._lockers)
            if self._sharers is None or self._lockers_are_newest:
                self._sharers, self._lockers_are_newest = CallGroup(), False
            return waits, [self._sharers]
        waits = [self._since_exclusive]
        self._last_exclusive, self._since_exclusive = CallGroup(), CallGroup()
        self._sharers = self._lockers = None
        self._keys.clear()
        return waits, [self._last_exclusive]

    def _resolve_by_keys(
        self,
        keys: Iterable[Hashable],
        waits: list[CallGroup],
        *,
        shared: bool,
    ) -> tuple[list[CallGroup], list[CallGroup]]:
        joins: list[CallGroup] = []
        if not shared:
            if self._sharers is not None:
                waits.append(self._sharers)
            if self._lockers is None or not self._lockers_are_newest:
                self._lockers, self._lockers_are_newest = CallGroup(), True
            joins.append(self._lockers)
        for key in keys:
            held = self._keys.setdefault(key, _KeyHolders())
            if shared:
                waits += [held.exclusive] if held.exclusive is not None else []
                held.shared = held.shared or CallGroup()
                joins.append(held.shared)
            else:
                before = held.shared or held.exclusive  # those that share it waited for its owner
                waits += [before] if before is not None else []
                held.exclusive, held.shared = CallGroup(), None
                joins.append(held.exclusive)
        return waits, joins


@attrs.frozen(kw_only=True)
class PlannedCall(Value):
    """What the queue would do with a call."""

    index: int
    """Its place in the reply, from 0."""

    call_id: str
    tool: str
    kind: ToolKind | None
    """None for a tool that does not exist."""

    batch: int
    """Calls of one batch may run together; a batch holds what waits for the batch before, at least in part."""

    waits: tuple[str, ...]
    """The ids of the calls that it waits for, as far as others do not imply them."""

    locks: frozenset[Hashable] | None
    """What it touches; None: it may touch anything."""

    shared: bool
    reason: str
    """Why it may, or may not, run beside others."""

    estimate_s: float | None = None
    """Seconds, where the tool says so."""


@attrs.frozen(kw_only=True)
class Plan(Value):
    """How the queue would run the calls of a reply. Nothing was run."""

    calls: tuple[PlannedCall, ...]
    """In the model's order."""

    limit: int
    """How many may be in flight at once."""

    @property
    def batches(self) -> tuple[tuple[str, ...], ...]:
        """The ids of the calls, batch by batch."""
        found: dict[int, list[str]] = {}
        for call in self.calls:
            found.setdefault(call.batch, []).append(call.call_id)
        return tuple(tuple(found[batch]) for batch in sorted(found))

    @property
    def estimate_s(self) -> float:
        """Seconds that the calls take together if each takes what its tool says (0 where it says nothing)."""
        ends: dict[str, float] = {}
        for call in self.calls:
            start = max((ends[waited] for waited in call.waits), default=0.0)
            ends[call.call_id] = start + (call.estimate_s or 0.0)
        return max(ends.values(), default=0.0)
