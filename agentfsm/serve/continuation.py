"""Continue one run at the request of a person, on a server over a store that executes no runs by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run


@attrs.frozen(kw_only=True)
class Continuation(Value):
    """Two ways to continue a run: this server imports the agent that the run names, or a person enters a command."""

    store: str
    """Path or URL of the store, without a password, for people."""

    build_command: Callable[[Header], str]
    """Returns the command line that continues a run, from the header of its root."""

    open_agent: Callable[[Run, Header], Agent]
    """Imports the agent of a run, given with the header of its root, and returns it with the store. It blocks."""

    def describe(self, root: Header) -> dict[str, Any]:
        """Return the target that would be imported, the store, and the command line, for the person who decides."""
        return {"target": root.target or None, "store": self.store, "command": self.build_command(root)}
