"""Functions as background tools: each call is a run of its own, which calls the function once.

So a function in the background has what every call has: its start and its result are in a journal, its idempotency key
is the same after a crash, and its approvals, guards and `on_unknown` apply.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import attrs

from agentfsm.agents.subagent import find_inner_agent, make_agent_tool
from agentfsm.core.errors import ArgumentsError
from agentfsm.core.limits import Limits
from agentfsm.core.messages import ToolResult, UserMessage
from agentfsm.core.usage import Usage
from agentfsm.ports.model import Emit, Model, ProposedCall, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.tools.registry import ToolRegistry
    from agentfsm.tools.schema.binding import Arguments
    from agentfsm.tools.tool import Tool

# Seconds of a call in the background if its tool has no `timeout_s`: an hour.
TIMEOUT_S: Final = 3_600.0
# Options of the function that hold for the tool that begins its run as well.
_SHARED: Final = ("tags", "enabled", "permission", "shown_tokens", "shown_bytes", "estimate_s", "poll")
# Turns of the run: the call, the answer, and an answer more for each message that comes in.
_TURNS: Final = 5


class CallOnce(Model):
    """Calls one tool with the arguments that it is sent, and answers with the result."""

    takes_tokens = False

    def __init__(self, tool: str) -> None:
        """Name the tool."""
        self.name = "none"
        self._tool = tool

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:  # noqa: ARG002  nothing is streamed
        """Return the call, or its result."""
        results = [message for message in request.messages if isinstance(message, ToolResult)]
        if results:
            return Reply(text=results[-1].content or "(no result)", usage=Usage())
        task = next(message for message in request.messages if isinstance(message, UserMessage))
        call = ProposedCall(id="call", name=self._tool, arguments=task.text)
        return Reply(calls=(call,), usage=Usage())

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  it sends no request
        """Return 0."""
        return 0.0


def wrap_background_functions(agent: RunnableAgent, tools: ToolRegistry) -> ToolRegistry:
    """Return the tools of an agent, in which background tools that are functions begin runs."""
    functions = [tool for tool in tools if tool.background and tool.inner_agent is None]
    if not functions:
        return tools
    whole = tools.extended(())
    for tool in functions:
        whole.unregister(tool.name)
        whole.register(_make_run_tool(agent, tool))
    return whole


def find_function_agents(tools: ToolRegistry) -> dict[str, RunnableAgent]:
    """Return the agents that call the background functions among the tools of an agent, by the function's name."""
    agents = {tool.name: find_inner_agent(tool) for tool in tools if tool.background}
    return {
        name: agent
        for name, agent in agents.items()
        if agent is not None and isinstance(agent.driver.config.model, CallOnce)
    }


def _make_run_tool(agent: RunnableAgent, tool: Tool[..., Any]) -> Tool[..., Any]:
    seconds = TIMEOUT_S if tool.timeout_s is None else tool.timeout_s
    build = cast("Callable[..., RunnableAgent]", type(agent))  # without what the agent does beside its calls
    caller = build(
        CallOnce(tool.name),
        tools=[attrs.evolve(tool, background=False, timeout_s=seconds)],
        name=tool.name,
        limits=Limits(turns=_TURNS, seconds=seconds + tool.grace_s + 1.0),
        permissions=agent.permissions,
        clock=agent.clock,
        store=agent.store,
    )
    return make_agent_tool(
        caller,
        description=tool.description,
        parameters=tool.input_schema,
        background=True,
        returns_call=True,
        validate=partial(_find_flaw, tool),
        **{name: getattr(tool, name) for name in _SHARED},
    )


def _find_flaw(tool: Tool[..., Any], arguments: Arguments) -> str | None:
    try:
        tool.bind_and_check(json.dumps(vars(arguments), ensure_ascii=False))
    except ArgumentsError as error:
        return str(error)
    return None
