"""Whether a program can continue a run that another version of it has begun, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.calls import Phase
from agentfsm.core.errors import IncompatibleProgramError
from agentfsm.core.events import Resumed
from agentfsm.core.plans import list_plan_tools
from agentfsm.core.value import Value
from agentfsm.engine.deciders.plans import find_maker
from agentfsm.tools.builtin import find_builtin

if TYPE_CHECKING:
    from agentfsm.core.calls import OpenCall
    from agentfsm.core.header import Fingerprint
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.ports.store import Store
    from agentfsm.tools.tool import InnerAgent

# The format from which plans say by which kind of program they were made.
_FIRST_WITH_MAKER: Final = 5


@attrs.frozen(kw_only=True)
class Obstacle(Value):
    """A reason why a program cannot continue a run."""

    kind: str
    """Kind of the reason: "program", "tool", "plan" or "background"."""

    text: str
    """The reason, after the name of the run."""

    tool: str = ""
    """Name of the tool that the program lacks; empty if it lacks none."""

    call_id: str = ""
    """Id of the call that is concerned; empty if it is the run itself."""

    wanted: str = "an agent that has it"
    """The program that can continue the run."""


def select_names(config: EngineConfig, run: Run[Any], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return the new names that change a run, as given and as the agent's tools declare, with those of compensations.

    Raises:
        MisuseError: if a new name is that of another tool of the run's plan.
    """
    declared = config.registry.replacements
    if not (declared or renamed):
        return {}
    names = {old: new for old, new in declared.items() if config.find_tool(old) is None}
    names |= {old: new for old, new in renamed.items() if config.find_tool(new) is not None}
    for old, new in tuple(names.items()):
        if config.find_tool(f"compensate_{new}") is not None:  # named after its step
            names.setdefault(f"compensate_{old}", f"compensate_{new}")
    after = run.apply(Resumed(renamed=names)) if names else run
    is_used = (after.open, after.plan, after.background) != (run.open, run.plan, run.background)
    return names if is_used else {}


def has_tool(config: EngineConfig, name: str, seen: tuple[object, ...] = ()) -> bool:
    """Return whether an agent or one below it has a tool, or its replacement; `seen` are the tools on the way."""
    inner = [tool.inner_agent for tool in config.registry if tool.inner_agent is not None and tool not in seen]
    is_known = config.find_tool(name) is not None or name in config.registry.replacements
    return is_known or any(each.has_tool(name, (*seen, *config.registry)) for each in inner)


def find_changes(config: EngineConfig, run: Run[Any]) -> tuple[Fingerprint, tuple[str, ...]]:
    """Return the fingerprint of the agent, and its changes since the agent that executed a run last, for people."""
    fingerprint = config.for_run(run.header).fingerprint
    before = run.fingerprint or run.header.fingerprint
    if run.header.parent is not None:  # its seconds are those that its call has left, so they always differ
        before = attrs.evolve(before, config=fingerprint.config)
    return fingerprint, fingerprint.changes_since(before)


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
    if names := select_names(config, run, renamed):
        run = run.apply(Resumed(renamed=names))
    for each in list_obstacles(config, run):
        raise IncompatibleProgramError(
            f"run {run.id!r} {each.text}: resume it with {each.wanted}, or cancel it; nothing was changed"
        )
    for inner, call_id in list_inner_agents(config, run):
        if (found := await inner.find_child(store, run.id, call_id)) is not None:
            child_config, child = found
            await check_program(child_config, store, child, renamed)


def list_obstacles(config: EngineConfig, run: Run[Any]) -> Iterator[Obstacle]:
    """Yield the reasons why an agent cannot continue a run, those of the runs below it left out."""
    maker = find_maker(config)
    recorded = "" if run.plan is None else run.plan.maker
    if maker != recorded and (run.plan is not None or run.turn) and run.header.format >= _FIRST_WITH_MAKER:
        was, now = (f"a flow (a plan of {each!r})" if each else "an agent" for each in (recorded, maker))
        text = f"was begun by {was}, and {run.header.agent!r} is {now} here"
        yield Obstacle(kind="program", text=text, wanted="the program that began it")
    for entry in _list_unfinished(run):
        call = entry.call
        tool = config.find_tool(call.name) or find_builtin(run, call.name)
        if tool is None and not is_new_step(run, entry):
            text = f"has an open call {call.id} of the tool {call.name!r}, which this agent does not have"
            yield Obstacle(kind="tool", text=text, tool=call.name, call_id=call.id)
        gone = [name for name in list_plan_tools(call) if config.registry.get(name) is None]
        if gone and entry.phase is Phase.AWAITING_APPROVAL:
            text = f"has a plan under review ({call.id}) with the tool {gone[0]!r}, which this agent does not have"
            yield Obstacle(kind="plan", text=text, tool=gone[0], call_id=call.id)
    for each in run.open_background:
        tool = config.find_tool(each.call.name)
        if tool is None or tool.inner_agent is None:
            text = (
                f"has a background run of the tool {each.call.name!r} ({each.call.id}), which this agent does not have"
            )
            yield Obstacle(kind="background", text=text, tool=each.call.name, call_id=each.call.id)


def is_new_step(run: Run[Any], entry: OpenCall) -> bool:
    """Return whether this is a step of a plan that has not started, and about which no person was asked."""
    return run.reply is None and not entry.attempts and entry.phase is not Phase.AWAITING_APPROVAL


def list_inner_agents(config: EngineConfig, run: Run[Any]) -> list[tuple[InnerAgent, str]]:
    """Return the agents that work on open calls of a run or in its background, with the ids of their calls."""
    begun = [entry.call for entry in _list_unfinished(run) if entry.attempts]
    calls = [*begun, *[each.call for each in run.open_background]]
    tools = [(config.find_tool(call.name), call.id) for call in calls]
    return [(tool.inner_agent, call_id) for tool, call_id in tools if tool is not None and tool.inner_agent is not None]


def _list_unfinished(run: Run[Any]) -> list[OpenCall]:
    return [entry for entry in run.open if entry.phase is not Phase.FINISHED and not entry.call.invented]
