"""What the world outside answered to a run, read from its journal and those of the agents below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.errors import RunNotFoundError
from agentfsm.core.labels import ToolKind
from agentfsm.core.messages import AssistantMessage, ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.core.plans import ENGINE_TOOLS
from agentfsm.core.run import Run, begin_run
from agentfsm.core.run_ids import child_run_id
from agentfsm.core.value import Value
from agentfsm.journal.load import fold_events, load_predecessor

if TYPE_CHECKING:
    from agentfsm.core.inbox import Input
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoredRun

# Refusals by the program itself: another program decides anew.
_OF_PROGRAM: Final = frozenset(
    {
        ErrorType.ARGUMENTS,
        ErrorType.UNKNOWN_TOOL,
        ErrorType.NOT_PERMITTED,
        ErrorType.WITHDRAWN,
        ErrorType.BLOCKED,
        ErrorType.BUDGET,
        ErrorType.CIRCUIT_OPEN,
        ErrorType.CONDITION,
    }
)


@attrs.frozen(kw_only=True, eq=False)
class RecordedCall(Value):
    """A call of a run, as its journal has it."""

    call: ToolCall
    """The call as the model asked for it, before a person edited its arguments."""

    result: ToolResult | None = None
    """Result of the call; None if it has none."""

    was_asked: bool = False
    """Whether a person was asked about the call."""

    is_agent: bool = False
    """Whether the call was started, and its tool was an agent."""

    has_acted: bool = False
    """Whether the call was started, and its tool was neither read-only nor an agent."""

    below: RecordedRun | None = None
    """Run of the agent that the call called; None for another call, or if that run is not in the store."""

    @property
    def is_answered(self) -> bool:
        """Whether a tool, a person or the run of an agent has answered. A withheld call has no answer."""
        if self.result is None or self.result.outcome is Outcome.SKIPPED:
            return False
        return not self.is_refused and self.result.error_type is not ErrorType.WITHHELD

    @property
    def is_refused(self) -> bool:
        """Whether the program refused the call before anything could happen."""
        return self.result is not None and self.result.error_type in _OF_PROGRAM


@attrs.frozen(kw_only=True, eq=False)
class RecordedRun(Value):
    """A run with all that came from outside."""

    run: Run
    """The run."""

    calls: tuple[RecordedCall, ...]
    """Its calls, in the order in which they were asked for."""

    inputs: tuple[tuple[int, Input], ...]
    """Inputs that arrived after the prompt, each with the number of turns before it."""

    recalled: tuple[e.Recalled, ...]
    """Searches of the memory."""

    def iter_calls(self) -> Iterator[RecordedCall]:
        """Yield its calls, each with those of the agent that it called behind it."""
        for each in self.calls:
            yield each
            if each.below is not None:
                yield from each.below.iter_calls()


async def load_recorded_run(store: Store, run_id: str) -> RecordedRun:
    """Read a run with those of the agents below.

    Raises:
        RunNotFoundError: if the store has no such run.
    """
    stored = await store.read(run_id)
    before = await load_predecessor(store, stored.header)
    return await _build(store, stored, await fold_events(begin_run(stored.header, before), stored.events))


async def _build(store: Store, stored: StoredRun, run: Run) -> RecordedRun:
    calls: dict[str, RecordedCall] = {}
    inputs: list[tuple[int, Input]] = []
    turn = 0
    for event in stored.events:
        match event:
            case e.ToolsChosen():
                calls |= {call.id: RecordedCall(call=call) for call in event.message.calls}
                turn += 1
            case e.StepsReady():
                calls |= {call.id: RecordedCall(call=call) for call in event.calls}
            case e.AnswerDrafted():
                turn += 1
            case e.ToolStarted(call_id=call_id) if call_id in calls and event.kind is ToolKind.AGENT:
                calls[call_id] = attrs.evolve(calls[call_id], is_agent=True)
            case e.ToolStarted(call_id=call_id) if call_id in calls and not event.read_only:
                calls[call_id] = attrs.evolve(calls[call_id], has_acted=True)
            case e.ApprovalAsked(call_id=call_id) if call_id in calls:
                calls[call_id] = attrs.evolve(calls[call_id], was_asked=True)
            case e.ToolFinished(result=result) if result.call_id in calls:
                calls[result.call_id] = attrs.evolve(calls[result.call_id], result=result)
            case e.Observed():
                inputs += [(turn, each) for each in event.inputs]
            case _:
                pass
    for call_id in [each.call.id for each in calls.values() if each.is_agent]:
        try:
            below = await load_recorded_run(store, child_run_id(run.id, call_id))
        except RunNotFoundError:
            continue
        if below.run.header.parent == run.id:
            calls[call_id] = attrs.evolve(calls[call_id], below=below)
    return RecordedRun(
        run=run,
        calls=tuple([each for each in calls.values() if each.call.name not in ENGINE_TOOLS]),
        inputs=tuple(inputs),
        recalled=tuple([event for event in stored.events if isinstance(event, e.Recalled)]),
    )


def list_closed_calls(run: Run) -> list[ToolCall]:
    """Return the calls of a run that have ended, steps of plans first."""
    steps = () if run.plan is None else run.plan.closed
    replies = [message for message in run.messages[run.own_start :] if isinstance(message, AssistantMessage)]
    return [*[entry.call for entry in steps], *[call for reply in replies for call in reply.calls]]
