"""Write the events of a run as session updates of the Agent Client Protocol, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.events import Observed
from agentfsm.core.messages import (
    AssistantMessage,
    AudioPart,
    ImagePart,
    Message,
    Outcome,
    Part,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    read_inline_data,
)
from agentfsm.core.plans import PLAN_TOOL
from agentfsm.serve.dialects.turn_parts import CallMade, CallStarted, TextEnd, TextPiece, TurnPart, TurnParts
from agentfsm.serve.journal_feeds import to_json

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.journal.follow import JournalEvent
    from agentfsm.serve.event_stream import Ending
    from agentfsm.streaming.stream import StreamEvent

Update = dict[str, Any]


@attrs.define(eq=False, repr=False, kw_only=True)
class ACPEncoder:
    """Encoder of session updates. The stream ends when the run waits."""

    ends_at_wait = True
    folds = True

    shows_inputs: bool = False
    """Whether messages of the user are written, because the editor does not show them yet."""

    cut: Ending | None = attrs.field(default=None, init=False)
    """Reason why the stream ended before its run; None if it did not."""

    _parts: TurnParts | None = attrs.field(default=None, init=False)
    _plan: list[Update] = attrs.field(factory=list, init=False)
    """Entries of the plan that were written."""

    def encode_start(self, run: Run | None) -> str:
        """Write nothing."""
        assert run is not None  # noqa: S101  `folds` is set
        self._parts = TurnParts(run)
        self._plan = list(_list_steps(run))
        return ""

    def encode_event(self, item: JournalEvent, run: Run | None, position: str) -> str:  # noqa: ARG002
        """Write the updates that follow from an event of a journal."""
        assert run is not None  # noqa: S101  `folds` is set
        updates: list[Update] = []
        event, is_root = item.event, run.id == self.parts.run.id
        if self.shows_inputs and is_root and isinstance(event, Observed):
            for each in event.inputs:
                updates += write_user_message(each.parts)
        updates += self._translate(self.parts.read_event(event, run))
        if is_root and (plan := list(_list_steps(run))) != self._plan:
            self._plan = plan
            updates.append({"sessionUpdate": "plan", "entries": plan})
        return _write(updates)

    def encode_delta(self, event: StreamEvent, offset: int) -> str:
        """Write a piece of a text."""
        return _write(self._translate(self.parts.read_delta(event, offset)))

    def encode_end(self, _run: Run | None, _position: str) -> str:
        """Write nothing: the end of a turn is the answer to its prompt."""
        return ""

    def encode_cut(self, ending: Ending) -> str:
        """Keep the reason, for the answer to the prompt."""
        self.cut = ending
        return ""

    @property
    def parts(self) -> TurnParts:
        """The parts of the run of the stream."""
        assert self._parts is not None  # noqa: S101  the stream has begun
        return self._parts

    def _translate(self, parts: Iterator[TurnPart]) -> Iterator[Update]:
        for part in parts:
            if isinstance(part, TextPiece):
                kind = "agent_thought_chunk" if part.is_thinking else "agent_message_chunk"
                yield _write_text(kind, part.text, f"{self.parts.run.id}:{part.id}")
            elif isinstance(part, TextEnd):
                if part.is_retracted and not part.is_thinking:
                    note = "\n\n[This reply broke off and is not part of the conversation.]\n\n"
                    yield _write_text("agent_message_chunk", note, f"{self.parts.run.id}:{part.id}")
            elif isinstance(part, CallMade):
                yield _write_call(part.id, part.call)
            elif isinstance(part, CallStarted):
                yield {"sessionUpdate": "tool_call_update", "toolCallId": part.id, "status": "in_progress"}
            else:
                yield _write_result(part.id, part.result)


def write_history(messages: Sequence[Message]) -> list[Update]:
    """Return the updates that show messages of earlier runs."""
    updates: list[Update] = []
    turn = ""
    for index, message in enumerate(messages):
        if isinstance(message, UserMessage):
            updates += write_user_message(message.parts)
        elif isinstance(message, ToolResult):
            updates.append(_write_result(f"{turn}{message.call_id}", message))
        elif isinstance(message, AssistantMessage):
            turn = f"history.{index}:"  # calls have ids that are unique in their run only
            if message.thinking:
                updates.append(_write_text("agent_thought_chunk", message.thinking, turn))
            if message.text:
                updates.append(_write_text("agent_message_chunk", message.text, turn))
            updates += [_write_call(f"{turn}{call.id}", call) for call in message.calls]
    return updates


def write_user_message(parts: Sequence[Part]) -> list[Update]:
    """Return the updates that show a message of the user."""
    return [{"sessionUpdate": "user_message_chunk", "content": _write_part(part)} for part in parts]


def _write(updates: Sequence[Update] | Iterator[Update]) -> str:
    return "".join([f"{to_json(each)}\n" for each in updates])


def _write_part(part: Part) -> Update:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    inline = read_inline_data(part)
    if inline is not None and isinstance(part, ImagePart | AudioPart):
        kind = "image" if isinstance(part, ImagePart) else "audio"
        return {"type": kind, "data": inline[1], "mimeType": inline[0]}
    name = getattr(part, "name", "") or "file"
    if inline is not None:
        resource = {"uri": f"file:///{name}", "blob": inline[1], "mimeType": inline[0]}
        return {"type": "resource", "resource": resource}
    return {"type": "resource_link", "uri": part.url, "name": name}


def _write_text(kind: str, text: str, message_id: str) -> Update:
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}, "messageId": message_id}


def _write_call(call_id: str, call: ToolCall) -> Update:
    kind = "think" if call.name == PLAN_TOOL else "other"
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    shown = {"toolCallId": call_id, "title": call.name, "kind": kind, "status": "pending", "rawInput": arguments}
    return {"sessionUpdate": "tool_call", **shown}


def _write_result(call_id: str, result: ToolResult) -> Update:
    content = [{"type": "content", "content": {"type": "text", "text": result.content}}]
    content += [{"type": "content", "content": _write_part(part)} for part in result.parts]
    status = "completed" if result.outcome is Outcome.DONE else "failed"
    ended = {"toolCallId": call_id, "status": status, "content": content, "rawOutput": result.content}
    return {"sessionUpdate": "tool_call_update", **ended}


def _list_steps(run: Run) -> Iterator[Update]:
    """Yield the steps of the accepted plan with their progress."""
    if run.plan is None or run.plan.plan is None:
        return
    entries = {entry.call.id: entry for entry in run.open}
    for step in run.plan.plan.steps:
        entry = entries.get(f"p{run.plan.number}.{step.id}")
        has_ended = entry is not None and entry.result is not None and entry.result.outcome is Outcome.DONE
        is_done = has_ended or step.id in run.plan.results
        status = "completed" if is_done else "pending" if entry is None else "in_progress"
        yield {"content": step.description or step.describe(), "priority": "medium", "status": status}
