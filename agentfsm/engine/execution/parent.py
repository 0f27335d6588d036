"""Parent of a child run, as passed to subagent tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentfsm.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from agentfsm.core.inbox import InboxItem
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.budget import Budget
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.options import ExecutionOptions
    from agentfsm.ports.guards import CallGuard
    from agentfsm.ports.store import Clock, Store
    from agentfsm.streaming.watch import Outlet


@attrs.frozen(kw_only=True)
class Parent(Value):
    """A run that calls an agent as a tool, with the store and the budget of the child run."""

    run: Run
    options: ExecutionOptions
    """Options of the run's execution: the child run ends with its drain, and is taken over and renamed as it is."""

    store: Store
    clock: Clock
    budget: Budget
    depth_limit: int
    """Maximum depth of child runs below the root run."""

    watch: tuple[Outlet, ...] = ()
    """Watchers of the run, which observe the child run as well."""

    guards: tuple[CallGuard, ...] = ()
    """Guards of the run, which the child run obeys as well."""

    post: Callable[[str, InboxItem], Awaitable[str]] | None = None
    """Sends an item to a background run of the run, by the id of its call, and returns what became of it."""


def build_parent(execution: Execution, options: ExecutionOptions) -> Parent:
    """Return what the run of an agent gets from the run that calls it."""
    journal, config = execution.journal, execution.config
    return Parent(
        run=journal.run,
        store=journal.store,
        clock=journal.clock,
        budget=execution.budget,
        depth_limit=config.limits.depth,
        watch=config.watch,
        guards=config.guards,
        options=options,
    )
