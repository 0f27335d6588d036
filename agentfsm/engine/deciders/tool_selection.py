"""Tools of a request: those of servers as they are now, a choice among many, and others that the model asks for."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.core.errors import AgentError
from agentfsm.core.messages import AssistantMessage, ToolResult, UserMessage
from agentfsm.core.usage import Purpose, Usage
from agentfsm.engine.execution.cost import SideSpending
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.model_calls.side_request import send_side_request
from agentfsm.engine.model_calls.view import list_available_tools
from agentfsm.tools.builtin import FIND_TOOLS

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.model_calls.request import PreparedRequest

# Number of user inputs, the latest ones, that describe the task for the choice among many tools.
TASK_INPUTS: Final = 3
# Maximum of tokens of the model's choice: a handful of names.
CHOICE_TOKENS: Final = 400


async def refresh_tools(request: PreparedRequest) -> None:
    """Refresh the tools from sources. If a source cannot be reached, its known tools are kept."""
    try:
        await request.execution.config.registry.refresh()
    except AgentError as error:
        request.execution.journal.log.warning("tools_not_refreshed", error=str(error))


async def select_tools(request: PreparedRequest) -> StepOutcome | None:
    """Return the choice among many tools, if new input requires one."""
    execution = request.execution
    engine, run = execution.config, execution.journal.run
    if run.offered is not None:
        found = _add_found_tools(execution, run.offered)
        return None if found is None else StepOutcome((found,))
    if not engine.selector.wants(len(engine.registry)):
        return None
    tools = [tool.definition for tool in list_available_tools(execution)]
    if not engine.selector.wants(len(tools)):
        return None

    spent = SideSpending(Purpose.TOOL_SELECTION, engine.model.name)

    async def ask(instructions: str, question: str) -> tuple[str, Usage]:
        return await send_side_request(execution, spent, instructions, question, max_tokens=CHOICE_TOKENS)

    selection = await engine.selector.select(_describe_task(run), tools, ask)
    wanted = {*selection.tools, *_list_used_tools(run), *_read_found_names(run)}
    names = tuple([tool.name for tool in tools if tool.name in wanted])
    execution.journal.log.info("tools_offered", tools=len(names), of=len(tools), how=selection.how)
    offered = e.ToolsOffered(
        tools=names, how=selection.how, usage=selection.usage, purpose=spent.recorded_purpose, model=spent.model
    )
    return StepOutcome((offered,))


def _add_found_tools(execution: Execution, before: Collection[str]) -> e.ToolsOffered | None:
    """Return the choice extended by the tools that the model has just found, or None if there are none."""
    run, registry = execution.journal.run, execution.config.registry
    found = [name for name in _read_found_names(run) if name not in before and name in registry]
    if not found or FIND_TOOLS in registry:
        return None
    wanted = {*before, *found}
    execution.journal.log.info("tools_offered", tools=len(wanted), of=len(registry), how=FIND_TOOLS)
    return e.ToolsOffered(tools=tuple([name for name in registry.names if name in wanted]), how=FIND_TOOLS)


# First line of a search result, before one line per tool. The names are parsed from these lines, so that a resumed run
# knows them.
_FOUND_HEADER: Final = "You may call these from your next turn on:"
# Maximum of names listed if no tool matches.
MAX_NAMES: Final = 200


async def search_tools(execution: Execution, query: str) -> str:
    """Search the available tools that were not offered to the model, and return a text about the matches."""
    offered_names = execution.journal.run.offered or ()
    hidden = {tool.name: tool.definition for tool in list_available_tools(execution) if tool.name not in offered_names}
    names = await execution.config.selector.find(query, tuple(hidden.values()))
    if lines := [hidden[name].summary for name in names if name in hidden]:
        return "\n".join([_FOUND_HEADER, *lines])
    if not hidden:
        return "You see all tools that there are."
    more = f" and {len(hidden) - MAX_NAMES} more" if len(hidden) > MAX_NAMES else ""
    return f"No tool fits these words. Ask again, with words of these names: {', '.join([*hidden][:MAX_NAMES])}{more}"


def _read_found_names(run: Run) -> list[str]:
    """Return the names of the tools found by the searches of the latest turn."""
    names: list[str] = []
    for message in reversed(run.messages):
        if isinstance(message, AssistantMessage):
            break
        if isinstance(message, ToolResult) and message.tool == FIND_TOOLS:
            head, *lines = message.content.splitlines() or [""]
            names += [line.partition("(")[0] for line in lines if head == _FOUND_HEADER]
    return names


def _describe_task(run: Run) -> str:
    """Return the user's task: the latest few inputs, since the last one alone may only be "and in Paris?"."""
    said = [message.text for message in run.messages if isinstance(message, UserMessage) and not message.is_note]
    return "\n".join(said[-TASK_INPUTS:])


def _list_used_tools(run: Run) -> set[str]:
    """Return the names of the tools called in the history: the model knows them and may need them again."""
    return {call.name for message in run.messages if isinstance(message, AssistantMessage) for call in message.calls}
