"""Plan which calls of a reply may overlap, and which must wait for others. Pure functions, used by the queue.

A call uses everything or a set of keys (its locks), shared or exclusively. Two calls may overlap if both share, or if
they use nothing in common; otherwise the later one waits for the earlier. So the effect always equals that of running
the calls one after the other, in the model's order.

A reader-writer table with keys below it finds the waits in time linear in the calls, also for thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.tools import callback_errors

if TYPE_CHECKING:
    from agentfsm.core.labels import ToolKind
    from agentfsm.tools.schema.binding import Arguments
    from agentfsm.tools.tool import Tool


@attrs.frozen
class Access(Value):
    """Resources that a call uses, and whether it shares them."""

    shared: bool
    """Whether the call shares its resources with other sharing calls."""

    keys: frozenset[Hashable] | None
    """Keys of the resources. None: the call may use anything."""

    reason: str
    """Explanation for readers of the plan."""

    def may_overlap(self, other: Access) -> bool:
        """Return whether calls with these accesses may run at the same time."""
        if self.shared and other.shared:
            return True
        return self.keys is not None and other.keys is not None and self.keys.isdisjoint(other.keys)


EXCLUSIVE: Final = Access(shared=False, keys=None, reason="declares nothing, so it runs alone")
READ_ONLY: Final = Access(shared=True, keys=None, reason="read-only")
CONCURRENCY_SAFE: Final = Access(shared=True, keys=None, reason="declared concurrency-safe")
NO_ACCESS: Final = Access(shared=True, keys=frozenset(), reason="will not run")


def resolve_access(tool: Tool[..., Any], arguments: Callable[[], Arguments]) -> Access:
    """Return the resources that a call uses. If a declaration fails or is invalid, the call runs alone.

    Args:
        tool: The tool that is called.
        arguments: Returns the validated arguments; called only if the tool's declarations are functions of them.

    Raises:
        ArgumentsError: if the arguments do not fit.
    """
    safe = tool.concurrency_safe
    if tool.locks is None and isinstance(safe, bool):
        return EXCLUSIVE if not safe else READ_ONLY if tool.read_only else CONCURRENCY_SAFE
    given = arguments()
    try:
        shared = safe if isinstance(safe, bool) else _require_bool(safe(given))
        keys: frozenset[Hashable] | None = None
        if tool.locks is not None:
            named = tool.locks(given)
            keys = frozenset([named] if isinstance(named, str) else named)
        return Access(shared=shared, keys=keys, reason=_format_reason(keys, shared=shared))
    except Exception as error:  # noqa: BLE001  a declaration that breaks has declared nothing
        callback_errors.log_callback_error("locks or concurrency_safe", tool.name, "the call is alone", error)
        why = f"its declaration failed ({type(error).__name__}), so it is alone"
        return Access(shared=False, keys=None, reason=why)


def _require_bool(answer: object) -> bool:
    if not isinstance(answer, bool):  # other values are mistakes that read as a yes: a coroutine, a text
        raise TypeError(type(answer).__name__)
    return answer


def _format_reason(keys: frozenset[Hashable] | None, *, shared: bool) -> str:
    if keys is None:
        return "concurrency-safe with these arguments" if shared else "not safe with these arguments, so it runs alone"
    names = ", ".join(sorted(map(str, keys))) or "nothing"
    return f"{'shares' if shared else 'locks'} {names}"


@attrs.define(eq=False, repr=False)
class CallGroup:
    """Calls that later calls wait for together."""

    batch: int = -1
    """Highest batch number of its calls."""

    members: list[int] = attrs.field(factory=list)
    remaining: int = 0
    """Number of its calls and of preceding groups that have not ended."""

    on_done: list[Callable[[], None]] = attrs.field(factory=list)
    """Callbacks for the end of the group."""

    predecessor: CallGroup | None = None
    """Group that must end before this one counts as ended."""

    successors: list[CallGroup] = attrs.field(factory=list)
    """Groups that count as ended only after this one."""

    @property
    def calls(self) -> Iterator[int]:
        """Indexes of all calls that must end before this group counts as ended."""
        group: CallGroup | None = self
        while group is not None:
            yield from group.members
            group = group.predecessor

    def add_call(self, index: int, batch: int) -> None:
        """Add a call."""
        self.members.append(index)
        self.remaining += 1
        self.batch = max(self.batch, batch)

    def finish_one(self) -> None:
        """Record that a call, or a preceding group, has ended."""
        ending = [self]
        while ending:  # no recursion: thousands may be chained
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
        """Make another group count as ended only after this one."""
        after.predecessor = self
        after.batch = max(after.batch, self.batch)
        if self.remaining:
            after.remaining += 1
            self.successors.append(after)


@attrs.define(eq=False, repr=False)
class ScheduledCall:
    """Position of a call in the order."""

    index: int
    batch: int
    waits: list[CallGroup]
    """Groups that must end before the call starts."""

    groups: list[CallGroup]
    """Groups that the call belongs to, so that others can wait for it."""

    remaining: int
    """Number of `waits` that have not ended."""


@attrs.define(eq=False, repr=False)
class _KeyHolders:
    """Holders of a key: the latest call that uses it exclusively, and the calls that share it since then."""

    exclusive: CallGroup | None = None
    shared: CallGroup | None = None


@attrs.define(eq=False, repr=False)
class DependencyTracker:
    """Takes the calls one by one, in the model's order, and returns the groups that each must wait for."""

    prerequisites: frozenset[str] = frozenset()
    """Names that occur in the `after` of any tool."""

    _count: int = 0
    _last_exclusive: CallGroup | None = None
    """Latest call that runs alone; everything behind it waits for it."""

    _since_exclusive: CallGroup = attrs.field(factory=CallGroup)
    """All calls since that one, itself included; the next call that runs alone waits for them."""

    _sharers: CallGroup | None = None
    """Calls that share everything, since the latest call that locks keys."""

    _lockers: CallGroup | None = None
    """Calls that lock keys, since the latest call that shares everything."""

    _lockers_are_newest: bool = False
    """Whether the lockers came after the sharers."""

    _keys: dict[Hashable, _KeyHolders] = attrs.field(factory=dict)
    _groups_by_name: dict[str, CallGroup] = attrs.field(factory=dict)
    _closed_names: set[str] = attrs.field(factory=set)
    """Names whose group has a waiter, so that the next call of the name starts a new group."""

    def add(self, name: str, access: Access, after: Collection[str] = ()) -> ScheduledCall:
        """Add the next call: the name of its tool, its access, and the tools whose earlier calls it waits for."""
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
        """Return the group of a tool's latest calls; chained if the call does not wait for earlier ones."""
        group = self._groups_by_name.get(name)
        if group is None or name in self._closed_names:
            before, group = group, CallGroup()
            if before is not None and chained:
                before.add_successor(group)
            self._groups_by_name[name] = group
            self._closed_names.discard(name)
        return group

    def _resolve_by_access(self, access: Access) -> tuple[list[CallGroup], list[CallGroup]]:
        """Return the groups that a call with this access waits for, and the groups that it joins."""
        if access.keys is None and not access.shared:
            waits = [self._since_exclusive]
            self._last_exclusive, self._since_exclusive = CallGroup(), CallGroup()
            self._sharers = self._lockers = None
            self._keys.clear()
            return waits, [self._last_exclusive]
        waits = [] if self._last_exclusive is None else [self._last_exclusive]
        if access.keys is None:
            if self._lockers is not None:
                waits.append(self._lockers)
            if self._sharers is None or self._lockers_are_newest:
                self._sharers, self._lockers_are_newest = CallGroup(), False
            return waits, [self._sharers]
        joins: list[CallGroup] = []
        if not access.shared:
            if self._sharers is not None:
                waits.append(self._sharers)
            if self._lockers is None or not self._lockers_are_newest:
                self._lockers, self._lockers_are_newest = CallGroup(), True
            joins.append(self._lockers)
        for key in access.keys:
            held = self._keys.setdefault(key, _KeyHolders())
            if access.shared:
                waits += [held.exclusive] if held.exclusive is not None else []
                held.shared = held.shared or CallGroup()
                joins.append(held.shared)
            else:
                before = held.shared or held.exclusive  # sharing calls have waited for the exclusive one
                waits += [before] if before is not None else []
                held.exclusive, held.shared = CallGroup(), None
                joins.append(held.exclusive)
        return waits, joins


@attrs.frozen(kw_only=True)
class PlannedCall(Value):
    """The plan for one call."""

    index: int
    """Position of the call in the reply, from 0."""

    call_id: str
    """Id of the call."""

    tool: str
    """Name of the tool."""

    kind: ToolKind | None
    """Kind of the tool; None for an unknown tool."""

    batch: int
    """Batch number, from 0. Calls of one batch may run together; each waits for at least one call of the batch
    before.
    """

    waits: tuple[str, ...]
    """Ids of the calls that it waits for directly."""

    locks: frozenset[Hashable] | None
    """Keys of the resources that it uses. None: it may use anything."""

    shared: bool
    """Whether it shares these resources with other sharing calls."""

    reason: str
    """Reason why it may or may not overlap other calls."""

    estimate_s: float | None = None
    """Usual seconds of a call, if the tool declares them."""


@attrs.frozen(kw_only=True)
class CallOrder(Value):
    """The plan for the calls of a reply. Nothing was run."""

    calls: tuple[PlannedCall, ...]
    """The planned calls, in the model's order."""

    limit: int
    """Maximum of concurrent calls."""

    @property
    def batches(self) -> tuple[tuple[str, ...], ...]:
        """Ids of the calls, batch by batch."""
        found: dict[int, list[str]] = {}
        for call in self.calls:
            found.setdefault(call.batch, []).append(call.call_id)
        return tuple(tuple(found[batch]) for batch in sorted(found))

    @property
    def estimate_s(self) -> float:
        """Estimated seconds for all calls together, by the tools' declarations (0 for a tool without one)."""
        ends: dict[str, float] = {}
        for call in self.calls:
            start = max((ends[waited] for waited in call.waits), default=0.0)
            ends[call.call_id] = start + (call.estimate_s or 0.0)
        return max(ends.values(), default=0.0)
