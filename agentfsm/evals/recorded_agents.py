"""Agents in a recorded world: the results of their calls are those of a case, so that they have no effect."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.engine.driver import RecordedDriver
from agentfsm.engine.execution.recorded_world import Evidence, RecordedWorld
from agentfsm.journal.recorded_run import RecordedCall, load_recorded_run

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.core.calls import CallRecord
    from agentfsm.core.run import Run
    from agentfsm.evals.case import Case, ToolFixture


def list_results(run: Run[Any]) -> list[tuple[ToolCall, ToolResult]]:
    """Return the calls that a run made itself, with their results; those that were skipped left out."""
    own = run.messages[run.own_start :]
    calls = {call.id: call for each in own if isinstance(each, AssistantMessage) for call in each.calls}
    results = [each for each in own if isinstance(each, ToolResult) and each.outcome is not Outcome.SKIPPED]
    return [(calls[each.call_id], each) for each in results]


def enter_world(agent: Agent[Any], world: RecordedWorld) -> Agent[Any]:
    """Return a variant of an agent whose calls are answered by a recorded world."""
    variant, known = agent.with_(), agent.driver
    driver: RecordedDriver[Any] = RecordedDriver(
        config=variant.driver.config,
        store=known.store,
        durability=known.durability,
        pause_before=known.pause_before,
        world=world,
    )
    object.__setattr__(variant, "driver", driver)
    return variant


async def enter_case(agent: Agent[Any], case: Case) -> Agent[Any]:
    """Return an agent in the world of the fixtures of a case, or else of its run in the agent's store.

    Raises:
        RunNotFoundError: if the store has no such run.
        MisuseError: if the agent has tools of its provider, which cannot be played back.
    """
    if agent.tools.hosted:
        raise MisuseError("tools of providers cannot be played back: evaluate the case live")
    if case.fixtures is None:
        recorded = await load_recorded_run(agent.store, case.recorded)
        calls = [attrs.evolve(each, below=None) for each in recorded.calls]  # answered by its result
    else:
        calls = [_read_fixture(at, each) for at, each in enumerate(case.fixtures)]
    evidence = Evidence(record=None)
    evidence.add(calls)
    return enter_world(agent, RecordedWorld(evidence=evidence, record=None))


def _read_fixture(index: int, fixture: ToolFixture) -> RecordedCall:
    call = ToolCall(id=f"fixture {index}", name=fixture.tool, arguments=json.dumps(fixture.arguments))
    return RecordedCall(
        call=call,
        result=ToolResult(
            call_id=call.id,
            tool=fixture.tool,
            outcome=fixture.outcome,
            content=fixture.content,
            error_type=fixture.error_type,
            labels=fixture.labels,
        ),
    )


def find_missing(run: Run[Any]) -> list[CallRecord]:
    """Return the calls of a run in a recorded world that were not recorded."""
    missing = [each for each in run.messages if isinstance(each, ToolResult) and each.error_type is ErrorType.WITHHELD]
    calls = {call.call_id: call for call in run.calls}
    return [calls[each.call_id] for each in missing if each.call_id in calls]
