"""Agents as solvers of Inspect, the framework of evaluations of the UK AI Security Institute."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentfsm._lib.plugins import require_extra
from agentfsm.agents.extras import read_history
from agentfsm.core.calls import parse_arguments
from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, ToolResult, UserMessage
from agentfsm.evals.conversation import PURPOSE
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.tool import Tool, make_tool

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run


def as_solver(agent: Agent[Any], *, deps: Any = None) -> Any:
    """Return a solver of Inspect: `Task(dataset, solver=as_solver(agent), scorer=includes())`. Needs agentfsm[inspect].

    Each sample is a run in the agent's store, which asks the agent's own model. It has the messages of the sample: its
    system messages follow the agent's instructions, and the conversation before the last message of the user is its
    history. The agent gets the tools of the sample beside its own. So the solver may stand behind others, such as
    `use_tools`, and twice in a chain. The log of Inspect has the run's messages, its
    tokens, which count in the limits of the task, and, in the metadata of the sample, its id. A run that has no answer
    gives an empty one, with the reason.

    Args:
        agent: The agent.
        deps: Dependencies of the runs.
    """
    with require_extra("agentfsm.evals.inspect_solver", "inspect", "inspect_ai"):
        solvers: Any = import_module("inspect_ai.solver")

    async def solve(state: Any, _generate: Any) -> Any:
        models: Any = import_module("inspect_ai.model")
        given, asked, system = list(state.messages), agent, list[Any]()
        if isinstance(agent.instructions, str):  # otherwise the system messages stay in the history
            system = [each for each in given if each.role == "system"]
            texts = [agent.instructions, *[each.text for each in system]]
            asked = agent.with_(instructions="\n\n".join(filter(None, texts))) if system else agent
        if state.tools:
            own = [*agent.tools, *agent.tools.sources, *agent.tools.hosted]
            asked = asked.with_(tools=ToolRegistry.of([*own, *map(_convert_tool, state.tools)]))
        said = await models.messages_to_openai([each for each in given if each not in system])
        messages = read_history(said) if said else ()
        if not messages or not isinstance(messages[-1], UserMessage):
            raise MisuseError(
                "the last message of the sample is not the user's: put user_message(...) before the agent"
            )
        run = await asked.run(
            messages[-1].parts,
            messages=messages[:-1],
            id=f"inspect-{state.uuid}-{len(given)}",
            deps=deps,
            purpose=PURPOSE,
        )
        is_done = run.state is State.DONE
        output = models.ModelOutput.from_content(
            agent.model.name,
            run.answer if is_done else "",
            error=None if is_done else f"{run.stop_reason or 'waiting'}: {run.stop_message}",
        )
        usage = agent.cost(run).usage
        cached = usage.cached_tokens + usage.cache_write_tokens
        output.usage = models.ModelUsage(
            input_tokens=usage.input_tokens - cached,
            output_tokens=usage.output_tokens,
            total_tokens=usage.tokens,
            input_tokens_cache_read=usage.cached_tokens or None,
            input_tokens_cache_write=usage.cache_write_tokens or None,
            reasoning_tokens=usage.reasoning_tokens or None,
            total_cost=usage.cost_usd,
        )
        state.messages.extend(_convert_messages(run, models))
        state.metadata["agentfsm_run"] = run.id
        state.output = output
        await _build_model(models, agent.model.name, output).generate(given)  # what Inspect counts are requests
        return state

    return solvers.solver(name=f"agentfsm/{agent.name}")(lambda: solve)()


def _build_model(models: Any, name: str, output: Any) -> Any:
    """Return a model of Inspect that replies with what a run came to, so that its tokens are in the log and limits."""

    class RunModel(models.ModelAPI):  # type: ignore[misc]
        async def generate(self, *_given: Any, **_named: Any) -> Any:
            return output

    models.modelapi(name="agentfsm")(lambda: RunModel)
    return models.get_model(f"agentfsm/{name}", memoize=False)


def _convert_tool(given: Any) -> Tool[..., Any]:
    """Return a tool of Inspect as one of an agent. It is called in the context of the sample, so it finds its store."""
    tools: Any = import_module("inspect_ai.tool")
    definition = tools.ToolDef(given)

    async def act(**arguments: Any) -> str:
        return str(await definition.tool(**arguments))

    parameters = definition.parameters.model_dump(exclude_none=True)
    return make_tool(act, name=definition.name, description=definition.description, parameters=parameters)


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
