"""A run for people: the turns as values and as plain lines."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.render.formatting import (
    CALL_CHARS,
    NOTE_CHARS,
    VALUE_CHARS,
    format_arguments,
    format_count,
    format_duration,
    format_time,
)
from agentfsm.cli.render.pending import format_error_lines, format_pending, format_wait
from agentfsm.core.audit_records import build_audit
from agentfsm.core.calls import parse_arguments
from agentfsm.core.events import ApprovalGiven, Paused, Resumed, ToolPaused, ToolsOffered
from agentfsm.core.inbox import Approve
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, Outcome, ToolResult, format_part
from agentfsm.core.text_safety import one_line, strip_unsafe
from agentfsm.core.value import Value
from agentfsm.engine.execution.cost import calculate_run_cost
from agentfsm.stores.rules import decision_word

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentfsm.core.audit_records import AuditRecord
    from agentfsm.core.calls import OpenCall
    from agentfsm.core.events import Event
    from agentfsm.core.inbox import Decision
    from agentfsm.core.messages import JSON, ToolCall
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run
    from agentfsm.core.usage import AgentCost, Usage
    from agentfsm.ports.store import RunSummary

# In JSON, an address that carries its data, which says nothing to a reader.
_DATA: Final = re.compile(r'("data:[^",]{1,200}),[^"]*')


@attrs.frozen(kw_only=True)
class CallView(Value):
    """A call as it is shown."""

    id: str
    name: str
    arguments: dict[str, JSON]
    status: str
    """Its outcome, or how far it is."""

    duration_s: float | None = None
    """None while it has none."""

    content: str = ""
    """The result's text."""

    description: str = ""
    """What it will do, where it waits for a yes and its tool says so."""

    waits: tuple[Pending, ...] = ()
    """What it waits for from outside, by itself or in the run of a sub-agent."""

    run_id: str = ""
    """Of an open call: its run."""

    parts: tuple[str, ...] = ()
    """What the result holds beside its text, in words."""

    child: AgentCost | None = None
    """The sub-agent's run, where the tool is one."""

    approved_by: str | None = None
    """Who said yes; None where nobody was asked, or the journal was not looked at."""

    proposed: dict[str, JSON] | None = None
    """The model's own arguments, where that person changed them."""

    rerun_by: tuple[str, ...] = ()
    """Who had it run again when its outcome was lost, in order."""

    informed_by: tuple[str, ...] = ()
    """Who answered what its tool asked in the middle of the call, in order."""

    decision: str = ""
    """Where its result came from outside: "answered", "rejected" or "settled"; empty as in `approved_by`."""

    decided_by: str = ""
    """Whose word that was."""

    @property
    def is_failed(self) -> bool:
        """Whether it ended otherwise than done."""
        return self.duration_s is not None and self.status != Outcome.DONE

    @property
    def title(self) -> str:
        """The tool and its arguments, on one line."""
        return one_line(f"{self.name}({format_arguments(self.arguments)})", CALL_CHARS)

    @property
    def outcome_text(self) -> str:
        """How it ended, with the reason where it failed."""
        took = "" if self.duration_s is None else f" in {format_duration(self.duration_s)}"
        told = self.content if self.is_failed else self.description
        return f"{self.status}{took}" + (f": {one_line(told, NOTE_CHARS)}" if told.strip() else "")

    @property
    def detail_lines(self) -> Iterator[str]:
        """What there is to say below it, a line each: who decided on it, its parts, its sub-agent's run, its waits."""
        if self.approved_by is not None:
            yield one_line(f"approved by {self.approved_by or 'somebody'}", NOTE_CHARS)
        if self.proposed is not None:
            yield one_line(
                f"the model's own arguments, which were changed: {format_arguments(self.proposed)}", NOTE_CHARS
            )
        for by in self.rerun_by:
            yield one_line(f"run again after its outcome was lost, by {by or 'somebody'}", NOTE_CHARS)
        for by in self.informed_by:
            yield one_line(f"what it asked was answered by {by or 'somebody'}", NOTE_CHARS)
        if self.decision:
            yield one_line(f"{self.decision} by {self.decided_by or 'somebody'}", NOTE_CHARS)
        if self.parts:
            yield one_line(f"with {', '.join(self.parts)}", NOTE_CHARS)
        if self.child is not None:
            yield from format_costs(self.child)
        for item in self.waits:
            tool = "" if item.run_id == self.run_id else f", {item.tool}"
            yield one_line(f"waits for {format_wait(item, self.run_id)}{tool}", NOTE_CHARS)


@attrs.frozen(kw_only=True)
class TurnView(Value):
    """A reply of the model, with the calls that it chose."""

    number: int
    """From 1."""

    text: str = ""
    calls: tuple[CallView, ...] = ()
    fault: str = ""
    """Why the model gave no reply."""

    closed: bool = True
    """False while calls are open."""


def build_turns(run: Run) -> tuple[TurnView, ...]:
    """Return the run's own turns, in order."""
    faults = {fault.turn: fault.message for fault in run.model_failures}
    turns: list[TurnView] = []
    for text, calls in _iter_replies(run):
        turns += _iter_faults(len(turns) + 1, faults)
        turns.append(TurnView(number=len(turns) + 1, text=text, calls=calls))
    turns += _iter_faults(len(turns) + 1, faults)
    if run.reply is not None:
        calls = tuple(_open_view(entry, run.id) for entry in run.open)
        turns.append(TurnView(number=len(turns) + 1, text=run.reply.text, calls=calls, closed=False))
    return tuple(turns)


def build_decided_turns(run: Run, events: Sequence[Event]) -> tuple[TurnView, ...]:
    """Return the run's turns with what their journal knows of decisions: who approved, answered, rejected, settled."""
    known = {record.call_id: record for record in build_audit(run.header, events)}
    return tuple(
        attrs.evolve(turn, calls=tuple(_add_decisions(call, known.get(call.id)) for call in turn.calls))
        for turn in build_turns(run)
    )


def _add_decisions(call: CallView, record: AuditRecord | None) -> CallView:
    if record is None:
        return call
    proposed = None if record.proposed is None else dict(record.proposed)
    return attrs.evolve(
        call,
        approved_by=record.approved_by,
        proposed=proposed,
        decision=record.decision,
        decided_by=record.decided_by,
        rerun_by=record.rerun_by,
        informed_by=record.informed_by,
    )


def _iter_faults(number: int, faults: dict[int, str]) -> Iterator[TurnView]:
    while number in faults:
        yield TurnView(number=number, fault=faults[number])
        number += 1


def _iter_replies(run: Run) -> Iterator[tuple[str, tuple[CallView, ...]]]:
    own = run.messages[run.own_start :]
    results = {message.call_id: message for message in own if isinstance(message, ToolResult)}
    for message in own:
        if isinstance(message, AssistantMessage):
            yield message.text, tuple(_closed_view(call, results[call.id]) for call in message.calls)


def _closed_view(call: ToolCall, result: ToolResult) -> CallView:
    return CallView(
        id=call.id,
        name=call.name,
        arguments=parse_arguments(call),
        status=str(result.outcome),
        duration_s=result.duration_s,
        content=result.content,
        parts=tuple([format_part(part) for part in result.parts]),
        child=result.child,
    )


def _open_view(entry: OpenCall, run_id: str) -> CallView:
    if entry.result is not None:
        return _closed_view(entry.call, entry.result)
    call = entry.call
    return CallView(
        id=call.id,
        name=call.name,
        arguments=parse_arguments(call),
        status=str(entry.phase),
        description=entry.description,
        waits=entry.pending,
        run_id=run_id,
    )


# Plain text.


def format_state(run: Run) -> str:
    """Return the state, with why it stands there."""
    where = run.state.upper()
    if run.is_over:
        where += f" ({run.stop_reason})"
    elif run.is_waiting:
        where += f", waits for {', '.join(format_wait(item, run.id) for item in run.pending)}"
    return f"{where}, version {run.version}"


def format_used(run: Run) -> str:
    """Return tokens and cost of a run, and whose price is not known."""
    return _format_usage(run.usage, calculate_run_cost(run).unpriced)


def _format_usage(usage: Usage, unpriced: Sequence[str]) -> str:
    about = ", estimated" if usage.estimated else ""
    cost = "" if usage.cost_usd is None else f", {usage.cost_usd:.4f} US dollars"
    unknown = one_line(f", price of {' and '.join(unpriced)} unknown", NOTE_CHARS) if unpriced else ""
    return f"{usage.tokens:,} tokens ({usage.input_tokens:,} in, {usage.output_tokens:,} out{about}){cost}{unknown}"


def format_costs(cost: AgentCost) -> Iterator[str]:
    """Return what the run of a sub-agent came to, and those below it further in."""
    called = f", called {', '.join(cost.tool_calls)}" if cost.tool_calls else ""
    usage = cost.usage if cost.usd is None else attrs.evolve(cost.usage, cost_usd=cost.usd)
    used = (
        f"{format_count(cost.turns, 'turn')}, {_format_usage(usage, cost.unpriced)}, {format_duration(cost.duration_s)}"
    )
    yield one_line(f"{cost.agent}, run {cost.run_id}: {used}{called}", NOTE_CHARS)
    for child in cost.children:
        yield from (f"  {line}" for line in format_costs(child))


def format_prompt(run: Run) -> str:
    """Return the text of the prompt, and what else it holds in words."""
    return "\n".join(map(format_part, run.header.prompt))


def format_run(run: Run, events: Sequence[Event] = ()) -> str:
    """Return the header, the tree of turns, and what the run waits for.

    Args:
        run: As it stands.
        events: Its journal, for who decided what, and when it rested.
    """
    return "\n".join(
        [
            *_format_header(run),
            *format_turns(build_decided_turns(run, events)),
            *_format_pauses(events),
            *_format_footer(run),
        ]
    )


def _format_header(run: Run) -> Iterator[str]:
    header = run.header
    yield f"run      {run.id}"
    target = f" ({header.target})" if header.target else ""
    yield f"agent    {' '.join(filter(None, (header.agent, header.agent_version)))}{target}"
    if header.parent is not None:
        yield f"parent   {header.parent}"
    if header.forked_from is not None:
        yield f"forked   from {header.forked_from} at version {header.forked_at}"
    if header.session is not None:
        yield f"session  {header.session}"
    yield f"created  {format_time(run.created_at)}"
    yield f"prompt   {one_line(format_prompt(run), NOTE_CHARS)}"
    yield f"state    {format_state(run)}"


def format_turns(turns: Sequence[TurnView]) -> Iterator[str]:
    """Return the turns as indented lines."""
    for turn in turns:
        yield f"turn {turn.number}"
        if turn.fault:
            yield f"  no reply: {one_line(turn.fault, NOTE_CHARS)}"
        yield from (f"  | {line}" for line in strip_unsafe(turn.text).splitlines())
        for call in turn.calls:
            yield f"  {call.id} {call.title}"
            yield f"       {call.outcome_text}"
            yield from (f"       {line}" for line in call.detail_lines)


def _format_pauses(events: Sequence[Event]) -> Iterator[str]:
    """Return when the run rested and went on, and what had become of its agent."""
    for version, event in enumerate(events, 1):
        at = f"{format_time(event.at)}, version {version}"
        if isinstance(event, Paused):
            by = f" by {event.by}" if event.by else ""
            why = f": {event.message}" if event.message else ""
            yield f"paused   {one_line(f'{at}{by}{why}', NOTE_CHARS)}"
        elif isinstance(event, Resumed):
            changes = f", with a changed agent: {'; '.join(event.changes)}" if event.changes else ""
            yield f"resumed  {one_line(f'{at}{changes}', NOTE_CHARS)}"


def _format_footer(run: Run) -> Iterator[str]:
    yield f"used     {format_used(run)}; {format_duration(run.duration_s)} active"
    for item in run.pending:
        yield f"waits    {format_pending(item, run.id)}"
        yield from (f"         {line}" for line in format_error_lines(item))
    if run.state is State.ERROR:
        yield f"stopped  {run.stop_reason}: {one_line(run.stop_message, NOTE_CHARS)}"


def format_posted(run_id: str, decision: Decision, run: Run) -> str:
    """Return a decision that no worker has taken up, in a line."""
    where = "" if run_id == run.id else f" of run {run_id}"
    edited = parse_edited_arguments(decision)
    given = "" if edited is None else f", with the arguments {format_arguments(edited)}"
    rest = "not carried out: the run ended first" if run.is_over else "a worker, or resume, will carry it out"
    words = f"{decision.call_id}{where}: {decision_word(decision)} by {decision.by or 'somebody'}{given}; {rest}"
    return f"posted   {one_line(words, NOTE_CHARS)}"


def parse_edited_arguments(decision: Decision) -> dict[str, Any] | None:
    """Return the arguments that a person approved in place of the model's; None where there are none."""
    text = decision.arguments if isinstance(decision, Approve) else None
    return None if text is None else json.loads(text)


# The journal, and lists.


def format_events(events: Sequence[Event]) -> Iterator[str]:
    """Return the journal, a line an entry; event number n made version n."""
    for number, event in enumerate(events, 1):
        facts = _event_fields(event)
        text = json.dumps(facts, ensure_ascii=False) if facts else ""
        told = one_line(_DATA.sub(r"\1,...", text), CALL_CHARS)
        yield f"{number:>5}  {format_time(event.at)}  {type(event).__name__:<14} {told}".rstrip()


def _event_fields(event: Event) -> dict[str, Any]:
    """Return what an entry says, the telling part in front, since a line is cut at its end."""
    facts = {name: value for name, value in event.to_dict().items() if name not in ("is", "at", "took_s")}
    match event:
        case ToolsOffered(how=how):
            return {"how": how, **facts}
        case ToolPaused(pending=pending):
            return facts | {"pending": [format_wait(item) for item in pending]}
        case ApprovalGiven(arguments=str(text)):
            return facts | {"arguments": json.loads(text)}
    return facts


def format_summaries(runs: Sequence[RunSummary]) -> Iterator[str]:
    """Return a table of runs."""
    width = max([len(run.id) for run in runs], default=0)
    for run in runs:
        facts = f"{format_time(run.updated_at)}  turn {run.turn:<3} {run.tokens:>9,} tokens"
        yield f"{run.id:<{width}}  {_format_status(run):<22} {facts}  {one_line(run.prompt, VALUE_CHARS)}"


def _format_status(run: RunSummary) -> str:
    if run.stop_reason is not None:
        return f"{run.state.upper()} {run.stop_reason}"
    word = "running" if run.driven else "waiting" if run.waiting else "idle"  # for want of a worker
    return f"{run.state.upper()} {word}"
