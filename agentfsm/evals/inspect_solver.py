"""Agents as solvers of Inspect, the framework of evaluations of the UK AI Security Institute."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentfsm._lib.plugins import require_extra
from agentfsm.core.calls import parse_arguments
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, ToolResult
from agentfsm.evals.conversation import PURPOSE

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run


def as_solver(agent: Agent[Any], *, deps: Any = None) -> Any:
    """Return a solver of Inspect: `Task(dataset, solver=as_solver(agent), scorer=includes())`. Needs agentfsm[inspect].

    Each sample is a run in the agent's store, which asks the agent's own model. The log of Inspect has its messages,
    tokens and, in the metadata of the sample, its id. A run that has no answer gives an empty one, with the reason.

    Args:
        agent: The agent.
        deps: Dependencies of the runs.
    """
    with require_extra("agentfsm.evals.inspect_solver", "inspect", "inspect_ai"):
        solvers: Any = import_module("inspect_ai.solver")

    async def solve(state: Any, _generate: Any) -> Any:
        run = await agent.run(state.input_text, id=f"inspect-{state.uuid}", deps=deps, purpose=PURPOSE)
        models: Any = import_module("inspect_ai.model")
        usage = agent.cost(run).usage
        is_done = run.state is State.DONE
        state.messages.extend(_convert_messages(run, models))
        state.output = models.ModelOutput.from_content(
            agent.model.name,
            run.answer if is_done else "",
            error=None if is_done else f"{run.stop_reason or 'waiting'}: {run.stop_message}",
        )
        state.output.usage = models.ModelUsage(
            input_tokens=usage.input_tokens, output_tokens=usage.output_tokens, total_tokens=usage.tokens
        )
        state.metadata["agentfsm_run"] = run.id
        state.completed = True
        return state

    return solvers.solver(name=f"agentfsm/{agent.name}")(lambda: solve)()


def _convert_messages(run: Run[Any], models: Any) -> list[Any]:
    """Return the model's messages and the results of tools in Inspect's form, without the prompt, which it has."""
    tools: Any = import_module("inspect_ai.tool")
    found = []
    for each in run.messages[run.own_start :]:
        if isinstance(each, AssistantMessage):
            calls = [
                tools.ToolCall(id=call.id, function=call.name, arguments=parse_arguments(call)) for call in each.calls
            ]
            found.append(
                models.ChatMessageAssistant(content=each.text, tool_calls=calls or None, model=run.header.agent)
            )
        elif isinstance(each, ToolResult):
            found.append(models.ChatMessageTool(content=each.content, tool_call_id=each.call_id, function=each.tool))
    return found
