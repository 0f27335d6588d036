"""Values that a store returns: the journal of a run, feedback on a run, and the state of a follower."""

from __future__ import annotations

import attrs

from agentfsm.core.events import Event
from agentfsm.core.header import Header
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class StoredRun(Value):
    """The journal of one run, as read from a store."""

    header: Header
    """Entry 0 of the journal, which identifies the run."""

    events: tuple[Event, ...]
    """Events after the requested version, oldest first."""


@attrs.frozen(kw_only=True)
class UnreadRun(Value):
    """A run that a follower has not read since its last change."""

    key: str
    """Key of the run in the store. A later run with the same id has another."""

    run_id: str
    """Id of the run."""

    change: int
    """Number of the change. Each release, pause or end of a run, and each feedback, gets a larger one."""

    after: int
    """Version up to which the follower has read the run; 0 if it has read nothing of it."""


@attrs.frozen(kw_only=True)
class FollowerStatus(Value):
    """The position of a follower, and its lag."""

    name: str
    """Name of the follower."""

    position: int
    """Number of the last change up to which all deliveries are done."""

    lag: int
    """Number of runs that it has not read since their last change."""

    waiting_since: float | None
    """Time of the newest event of the run that waits longest, seconds since 1970; None if it has read everything."""

    held: bool
    """True if a process works on its deliveries now."""
