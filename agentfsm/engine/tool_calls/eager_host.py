"""The host of calls that start while the reply that requests them still streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentfsm.core import events as e
from agentfsm.core.messages import ToolResult
from agentfsm.engine.model_calls.eager_calls import EagerAttempt, EagerCalls
from agentfsm.engine.model_calls.received import build_call
from agentfsm.engine.tool_calls.host import RunHost
from agentfsm.streaming.stream import StreamEvent, ToolEvent, ToolEventType

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.line import Line
    from agentfsm.tools.attendance import Attendant, AttendedQuestions
    from agentfsm.tools.queue.dispatch import ToolJob
    from agentfsm.tools.queue.scheduler import EventHook, ToolQueue
    from agentfsm.tools.tool import Tool


@attrs.define(eq=False, repr=False)
class EagerHost(RunHost):
    """Serves calls that start before the reply is in the journal; holds their events back until it is."""

    emit: EventHook = attrs.field(kw_only=True)
    """Receives the events for listeners."""

    held_records: list[ToolResult | tuple[e.Event, ...] | ToolEvent] | None = attrs.field(factory=list, init=False)
    """Events held back; None once the reply is in the journal, when everything is committed at once."""

    is_released: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    """Set once the reply is in the journal."""

    is_discarded: bool = attrs.field(default=False, init=False)
    """Whether the reply that requested the calls was dropped."""

    def on_result(self, result: ToolResult) -> None:
        """Hold a result back, or commit it."""
        if self.held_records is None:
            super().on_result(result)
        else:
            self.held_records.append(result)

    async def ask_person(
        self, call: ToolCall, tool: Tool[..., Any], attendant: Attendant, asked: AttendedQuestions
    ) -> Mapping[str, Any] | None:
        """Ask once the reply that requested the call is in the journal."""
        await self.is_released.wait()
        return await super().ask_person(call, tool, attendant, asked)

    def on_cut_off(self, job: ToolJob, duration_s: float) -> None:
        """Record the progress of a cut-off call, if the journal has the call."""
        if self.held_records is None:
            super().on_cut_off(job, duration_s)

    def _record_pause(self, *events: e.Event, taken: Sequence[int] = ()) -> None:
        if self.held_records is None:
            self.record(*events, taken=taken)
        else:
            self.held_records.append(events)

    def release(self) -> None:
        """Commit the events held back, once the reply that requested the calls is in the journal."""
        self.unfinished: int = len(self.execution.journal.run.open)
        held, self.held_records = self.held_records or [], None
        self.is_released.set()
        for each in held:
            if isinstance(each, ToolResult):
                self.on_result(each)
            elif isinstance(each, ToolEvent):
                self.emit(each)
            else:
                self.record(*each)

    def discard(self) -> None:
        """Discard the results of early calls whose reply was dropped; listeners receive their end."""
        self.is_discarded = True
        for each in self.held_records or ():
            if isinstance(each, ToolEvent):
                self.emit(_mark_discarded(each))
        if self.held_records is not None:
            self.held_records.clear()

    def forward_event(self, event: StreamEvent) -> None:
        """Pass an event on to listeners; the end of a call is held back together with its result."""
        if self.held_records is None or not isinstance(event, ToolEvent) or not event.is_end:
            self.emit(event)
        elif self.is_discarded:
            self.emit(_mark_discarded(event))
        else:
            self.held_records.append(event)


def _mark_discarded(event: ToolEvent) -> ToolEvent:
    """Return the end event of a call whose result was dropped."""
    text = "dropped, with the reply that asked for it"
    return attrs.evolve(event, type=ToolEventType.ERROR, success=False, message=text, result=None)


def create_eager_calls(execution: Execution, line: Line, queue: ToolQueue) -> EagerCalls:
    """Create the starter of read-only calls while a reply streams; their results wait until the reply is journalled.

    Args:
        execution: The execution of the run.
        line: The features of its agent.
        queue: The queue of its calls.
    """

    def make_attempt() -> EagerAttempt:
        host = EagerHost(execution, line=line, emit=queue.emit)
        execution.budget.reset_open_calls()
        own = attrs.evolve(queue, host=host, on_event=host.forward_event if queue.is_watched else None)
        return EagerAttempt(own, host.release, host.discard, execution.budget.try_start_call)

    decided = line.list_decided_tools(execution.config)
    return EagerCalls(
        make_attempt,
        build_call=lambda index, call: build_call(execution, index, call),
        may_start=lambda tool: tool.may_start_early and tool.name not in decided,
    )
