"""Options with which a run is executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from agentfsm._lib.fairness import StepThrottle
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.budget import Budget
    from agentfsm.engine.execution.drain import Drain
    from agentfsm.engine.execution.recorded_world import RecordedWorld
    from agentfsm.ports.store import Lease
    from agentfsm.streaming.stream import Listener
    from agentfsm.tools.attendance import Attendant


class ExecutionOptions(NamedTuple):
    """Options with which a run is executed.

    A named tuple is built with 2 calls of functions, a frozen attrs class of these fields with 14.
    """

    deps: Any = None
    """Dependencies for tools, as `ctx.deps`; never stored."""

    once: bool = False
    """Whether to perform a single effect."""

    resume: bool = False
    """Whether to end a pause of the run; child runs that were paused after crashes then continue as well."""

    takeover: bool = False
    """Whether to take the run from the worker that executes it; its child runs are then taken as well."""

    renamed: Mapping[str, str] = MappingProxyType({})
    """New names of tools by their names in the journal, also for the runs below."""

    lease: Lease | None = None
    """Lease of this run, if the caller holds it; released at the end of the execution."""

    on_event: Listener | None = None
    """Called with each streamed event."""

    on_run: Callable[[Run], None] | None = None
    """Called with each new state of the run."""

    attendant: Attendant | None = None
    """Asks the person who attends the execution; None if there is none."""

    drain: Drain | None = None
    """Ends the execution between two effects; None if only cancellation ends it."""

    throttle: StepThrottle | None = None
    """Throttle of this event loop, if the caller has passed it already."""

    parent_budget: Budget | None = None
    """Budget of the parent run; None for a run without one."""

    callers: tuple[Run, ...] = ()
    """The calling runs, the outermost first, if the run carries out what its caller has written, as a script does:
    guards then read the words of its user, and what it has read, as its own. Empty for other runs.
    """

    world: RecordedWorld | None = None
    """Record from which calls are answered; None if they are made."""
