"""Whether a program can continue a run that another version of it has begun, before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core.calls import Phase
from agentfsm.core.errors import IncompatibleProgramError
from agentfsm.core.events import Resumed
from agentfsm.core.plans import list_plan_tools
from agentfsm.engine.deciders.plans import find_maker
from agentfsm.tools.builtin import find_builtin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentfsm.core.run import Run
    from agentfsm.engine.deciders.plans import find_maker
    from agentfsm.engine.execution.config import EngineConfig
from agentfsm.ports.store import Store

_NOTHING_CHANGED = "nothing was changed"
# The format from which plans say by which kind of program they were made.
_FIRST_WITH_MAKER = 5


def select_names(config: EngineConfig, run: Run[Any], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return the new names that this agent has and that change a run, with those of compensations.

    Raises:
        MisuseError: if a new name is that of another tool of the run's plan.
    """
    names = {old: new for old, new in renamed.items() if config.find_tool(new) is not None}
    for old, new in tuple(names.items()):
        if config.find_tool(f"compensate_{new}") is not None:  # named after its step
            names.setdefault(f"compensate_{old}", f"compensate_{new}")
    after = run.apply(Resumed(renamed=names)) if names else run
    return names if (after.open, after.plan) != (run.open, run.plan) else {}


def has_tool(config: EngineConfig, name: str, seen: tuple[object, ...] = ()) -> bool:
    """Return whether an agent has a tool, or an agent below it; `seen` are the tools on the way."""
    inner = [tool.inner_agent for tool in config.registry if tool.inner_agent is not None and tool not in seen]
    return config.find_tool(name) is not None or any(each.has_tool(name, (*seen, *config.registry)) for each in inner)


async def check_program(config: EngineConfig, store: Store, run: Run[Any], renamed: Mapping[str, str]) -> None:
    """Check that an agent can continue a run and the open runs below it.

    A step of a plan that has not started does not count: without its tool, it waits for a program that has it.

    Args:
        config: Configuration of the agent.
        store: Store of the run.
        run: The run.
        renamed: New names of tools by their names in the journal.

    Raises:
        IncompatibleProgramError: if it cannot. Nothing was changed.
    """
    if renamed and (names := select_names(config, run, renamed)):
        run = run.apply(Resumed(renamed=names))
    maker = find_maker(config)
    recorded = "" if run.plan is None else run.plan.maker
    if maker != recorded and (run.plan is not None or run.turn) and run.header.format >= _FIRST_WITH_MAKER:
        was, now = (f"a flow (a plan of {each!r})" if each else "an agent" for each in (recorded, maker))
        raise IncompatibleProgramError(
            f"run {run.id!r} was begun by {was}, and {run.header.agent!r} is {now} here: resume it with the program "
            f"that began it, or cancel it; {_NOTHING_CHANGED}"
        )
    for entry in run.open:
        call = entry.call
        if entry.phase is Phase.FINISHED or call.invented:
            continue
        tool = config.find_tool(call.name) or find_builtin(run, call.name)
        is_new_step = run.reply is None and not entry.attempts and entry.phase is not Phase.AWAITING_APPROVAL
        if tool is None and not is_new_step:
            raise IncompatibleProgramError(
                f"run {run.id!r} has an open call {call.id} of the tool {call.name!r}, which this agent does not have: "
                f"resume it with an agent that has it, or cancel it; {_NOTHING_CHANGED}"
            )
        gone = [name for name in list_plan_tools(call) if config.registry.get(name) is None]
        if gone and entry.phase is Phase.AWAITING_APPROVAL:
            raise IncompatibleProgramError(
                f"run {run.id!r} has a plan under review ({call.id}) with the tool {gone[0]!r}, which this agent does "
                f"not have: resume it with an agent that has it, or cancel it; {_NOTHING_CHANGED}"
            )
        if tool is not None and entry.attempts and tool.inner_agent is not None:
            await tool.inner_agent.check_run(store, run.id, call.id, renamed)
    for each in run.open_background:
        tool = config.find_tool(each.call.name)
        if tool is None or tool.inner_agent is None:
            raise IncompatibleProgramError(
                f"run {run.id!r} has a background run of the tool {each.call.name!r} ({each.call.id}), which this "
                f"agent does not have: resume it with an agent that has it, or cancel it; {_NOTHING_CHANGED}"
            )
        await tool.inner_agent.check_run(store, run.id, each.call.id, renamed)
