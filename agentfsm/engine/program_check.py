"""Whether a program can continue a run that another version of it has begun, before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfsm.core.calls import Phase
from agentfsm.core.errors import IncompatibleProgramError
from agentfsm.core.plans import list_plan_tools
from agentfsm.tools.builtin import find_builtin

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.ports.store import Store

_NOTHING_CHANGED = "nothing was changed"
# The format from which plans say by which kind of program they were made.
_FIRST_WITH_MAKER = 5


async def check_program(config: EngineConfig, store: Store, run: Run[Any]) -> None:
    """Check that an agent can continue a run and the open runs below it.

    A step of a plan that has not started does not count: without its tool, it waits for a program that has it.

    Args:
        config: Configuration of the agent.
        store: Store of the run.
        run: The run.

    Raises:
        IncompatibleProgramError: if it cannot. Nothing was changed.
    """
    maker = "" if config.planner is None else config.planner.maker
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
            await tool.inner_agent.check_run(store, run.id, call.id)
