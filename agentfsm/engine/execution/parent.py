"""What an agent that is a tool gets from the run that calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.budget import Budget
    from agentfsm.ports.store import Clock, Store


@attrs.frozen(kw_only=True)
class Parent(Value):
    """A run that calls an agent as a tool: where the child's journal goes, and what it may spend."""

    run: Run
    store: Store
    clock: Clock
    budget: Budget
    depth_limit: int
    """How many runs may stand below the first one."""

    takeover: bool = False
    """Whether runs of agents are taken from the workers that drive them."""


def child_run_id(run_id: str, call_id: str) -> str:
    """Return the id of the run of an agent that a call of another run is: the same whenever it is called again."""
    return f"{run_id}.{call_id}"
