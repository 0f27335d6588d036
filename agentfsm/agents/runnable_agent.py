"""The part of an agent that workers, sub-agent tools and MCP servers use.

`Agent` makes each of these, so they depend on this Protocol instead of on `agent`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from agentfsm.agents.runs import Prompt, Runs
    from agentfsm.core.limits import Limits
    from agentfsm.core.run import Run
    from agentfsm.core.usage import AgentCost
    from agentfsm.engine.driver import Driver
    from agentfsm.ports.store import Clock, Store
    from agentfsm.tools.permission import Permissions

# Default limit of turns of a run that a tool calls: two with tool calls, and the answer.
DEFAULT_TURNS: Final = 3
# Default duration of such a run in seconds: three requests to a large model take 10 to 25 s.
DEFAULT_TIMEOUT_S: Final = 30.0


class RunnableAgent(Protocol):
    """Protocol of an agent for starting, executing and controlling its runs. `Agent` documents the members."""

    @property
    def name(self) -> str:
        """Name by which workers find its runs."""
        ...

    @property
    def version(self) -> str:
        """Version of the user's agent."""
        ...

    @property
    def target(self) -> str:
        """Import path, as "module:attribute"; empty if unknown."""
        ...

    @property
    def permissions(self) -> Permissions | None:
        """Permissions of runs for the tools; None: all tools are allowed."""
        ...

    @property
    def limits(self) -> Limits:
        """Limits of each run."""
        ...

    @property
    def clock(self) -> Clock:
        """Clock of its runs."""
        ...

    @property
    def store(self) -> Store:
        """Store of its runs."""
        ...

    @property
    def driver(self) -> Driver[Any]:
        """Driver of its runs. `driver.config` holds the model, the tools and the other settings."""
        ...

    @property
    def runs(self) -> Runs:
        """Client for the runs in its store."""
        ...

    def with_(self, **changes: Any) -> RunnableAgent:
        """Return a variant of the agent."""
        ...

    def start(
        self,
        prompt: Prompt,
        /,
        *,
        id: str | None = None,  # noqa: A002  the contract's name
        user: str | None = None,
        roles: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        tenant: str | None = None,
        release: str = "",
        arms: Mapping[str, str] | None = None,
        labels: Iterable[str] = (),
        parent: Run[Any] | None = None,
    ) -> Run[Any]:
        """Begin a run, without I/O."""
        ...

    async def submit(
        self,
        prompt_or_run: Prompt | Run[Any],
        /,
        *,
        id: str | None = None,  # noqa: A002
        session: str | None = None,
        labels: Iterable[str] = (),
        deps: Any = None,
    ) -> Run[Any]:
        """Create a run in the store, for a worker to execute."""
        ...

    async def load(self, run_id: str) -> Run[Any]:
        """Return a run from its journal."""
        ...

    def cost(self, run: Run[Any]) -> AgentCost:
        """Return the cost of a run."""
        ...


AgentChoice: TypeAlias = Callable[..., Awaitable[tuple[RunnableAgent, Mapping[str, object]]]]
"""`Rollout.choose`: returns the agent that starts a run, and the options of its start, by user, tenant and id."""
