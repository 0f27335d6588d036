"""Which tools a model is told of: those that are there, are permitted, and were chosen among many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.core.messages import AssistantMessage, Usage, UserMessage
from agentfsm.engine.drive.access import absence
from agentfsm.engine.think.beside import ask_beside
from agentfsm.engine.tools.builtin import READ_RESULT, read_result
from agentfsm.ports import ToolDefinition

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.drive.drive import Drive
    from agentfsm.engine.tools.tool import Tool

# Inputs of the user, newest last, for the choice among many tools.
TASK_INPUTS: Final = 3
# Tokens of the model's choice: a handful of names.
CHOICE_TOKENS: Final = 400


def offered(drive: Drive) -> Sequence[ToolDefinition]:
    """Return the definitions of the tools that the model is told of, in the order of registration."""
    engine, run = drive.engine, drive.journal.run
    answer = () if engine.answers is None or engine.answers.definition is None else (engine.answers.definition,)
    if run.reached is not None:
        return answer
    if run.disabled or run.offered is not None or engine.narrows:
        chosen = None if run.offered is None else frozenset(run.offered)
        tools = [tool for tool in _there(drive) if chosen is None or tool.name in chosen]
        definitions: Sequence[ToolDefinition] = tuple([tool.definition for tool in tools])
    else:
        definitions = engine.registry.definitions
    if run.has_cut and READ_RESULT not in engine.registry and absence(drive, read_result()) is None:
        definitions = (*definitions, read_result().definition)
    return (*definitions, *answer) if answer else definitions


def _there(drive: Drive) -> list[Tool[..., object]]:
    """Return the tools that this run has now and may use."""
    return [tool for tool in drive.engine.registry if absence(drive, tool) is None]


async def choose(drive: Drive) -> e.ToolsOffered | None:
    """Return the choice among many tools, where one has to be made since input came."""
    engine, run = drive.engine, drive.journal.run
    if run.offered is not None or not engine.selector.wants(len(engine.registry)):
        return None
    tools = [tool.definition for tool in _there(drive)]
    if not engine.selector.wants(len(tools)):
        return None

    async def ask(instructions: str, question: str) -> tuple[str, Usage]:
        return await ask_beside(drive, instructions, question, max_tokens=CHOICE_TOKENS)

    selection = await engine.selector.select(_task(run), tools, ask)
    wanted = {*selection.tools, *_used(run)}
    names = tuple([tool.name for tool in tools if tool.name in wanted])
    drive.journal.log.info("tools_offered", tools=len(names), of=len(tools), how=selection.how)
    return e.ToolsOffered(tools=names, how=selection.how, usage=selection.usage)


def _task(run: Run) -> str:
    """Return what the user wants: the newest of their words, since the very newest may only be "and in Paris?"."""
    said = [message.text for message in run.messages if isinstance(message, UserMessage)]
    return "\n".join(said[-TASK_INPUTS:])


def _used(run: Run) -> set[str]:
    """Return the tools that the history calls: the model knows them, and what follows may need them again."""
    return {call.name for message in run.messages if isinstance(message, AssistantMessage) for call in message.calls}
