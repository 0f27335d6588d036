"""A run for people and for programs: the turns as values, as plain lines, and as JSON."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.clean import clean, one_line
from agentfsm.core import codec
from agentfsm.core.effects import PendingKind
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, Outcome, TextPart, ToolResult
from agentfsm.core.run import arguments_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentfsm.core.effects import Pending
    from agentfsm.core.events import Event
    from agentfsm.core.messages import JSON, ToolCall, Usage
    from agentfsm.core.run import OpenCall, Run
    from agentfsm.ports import Summary

VALUE_CHARS: Final = 60
# Of an argument in a list of calls: a path or a question fits, a document does not.
CALL_CHARS: Final = 160
# Of a call with its arguments.
NOTE_CHARS: Final = 300
# Of what went wrong.


@attrs.frozen(kw_only=True)
class CallView:
    """A call as it is shown."""

    id: str
    name: str
    arguments: dict[str, JSON]
    status: str
    # Its outcome, or how far it is.
    duration_s: float | None = None
    # None while it has none.
    content: str = ""
    # The result's text.

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than done."""
        return self.duration_s is not None and self.status != Outcome.DONE

    @property
    def title(self) -> str:
        """The tool and its arguments, on one line."""
        values = [f"{name}={short(value)}" for name, value in self.arguments.items()]
        return one_line(f"{self.name}({', '.join(values)})", CALL_CHARS)

    @property
    def ending(self) -> str:
        """How it ended, with the reason where it failed."""
        took = "" if self.duration_s is None else f" in {seconds(self.duration_s)}"
        return f"{self.status}{took}" + (f": {one_line(self.content, NOTE_CHARS)}" if self.failed else "")


@attrs.frozen(kw_only=True)
class TurnView:
    """A reply of the model, with the calls that it chose."""

    number: int
    # From 1.
    text: str = ""
    calls: tuple[CallView, ...] = ()
    fault: str = ""
    # Why the model gave no reply.
    closed: bool = True
    # False while calls are open.


def turns_of(run: Run) -> tuple[TurnView, ...]:
    """Return the run's own turns, in order."""
    faults = {fault.turn: fault.message for fault in run.faults}
    turns: list[TurnView] = []
    for text, calls in _replies(run):
        turns += _faults_from(len(turns) + 1, faults)
        turns.append(TurnView(number=len(turns) + 1, text=text, calls=calls))
    turns += _faults_from(len(turns) + 1, faults)
    if run.reply is not None:
        calls = tuple(_open_view(entry) for entry in run.open)
        turns.append(TurnView(number=len(turns) + 1, text=run.reply.text, calls=calls, closed=False))
    return tuple(turns)


def _faults_from(number: int, faults: dict[int, str]) -> Iterator[TurnView]:
    while number in faults:
        yield TurnView(number=number, fault=faults[number])
        number += 1


def _replies(run: Run) -> Iterator[tuple[str, tuple[CallView, ...]]]:
    own = run.messages[len(run.prior) + len(run.header.history) :]
    results = {message.call_id: message for message in own if isinstance(message, ToolResult)}
    for message in own:
        if isinstance(message, AssistantMessage):
            yield message.text, tuple(_closed_view(call, results[call.id]) for call in message.calls)


def _closed_view(call: ToolCall, result: ToolResult) -> CallView:
    return CallView(
        id=call.id,
        name=call.name,
        arguments=arguments_of(call),
        status=str(result.outcome),
        duration_s=result.duration_s,
        content=result.content,
    )


def _open_view(entry: OpenCall) -> CallView:
    if entry.result is not None:
        return _closed_view(entry.call, entry.result)
    call = entry.call
    return CallView(id=call.id, name=call.name, arguments=arguments_of(call), status=str(entry.phase))


# Plain text.


def short(value: object) -> str:
    """Return a value as short JSON on one line; of a long text its length too."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= VALUE_CHARS:
        return text
    return f"{text[:VALUE_CHARS]}... ({len(text):,} characters)"


def seconds(value: float) -> str:
    """Return a duration: 0.004 s, 2.1 s, 75 s."""
    return f"{value:.3f} s" if value < 1 else f"{value:.1f} s" if value < 60 else f"{value:,.0f} s"  # noqa: PLR2004


def moment(at: float) -> str:
    """Return a time since 1970 as date and time of this place."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def state_line(run: Run) -> str:
    """Return the state, with why it stands there."""
    where = run.state.upper()
    if run.is_over:
        where += f" ({run.stop_reason})"
    elif run.is_waiting:
        where += f", waits for a person ({', '.join(item.call_id for item in run.pending)})"
    return f"{where}, version {run.version}"


def usage_line(usage: Usage) -> str:
    """Return tokens and cost."""
    about = ", estimated" if usage.estimated else ""
    cost = "" if usage.cost_usd is None else f", {usage.cost_usd:.4f} US dollars"
    return f"{usage.tokens:,} tokens ({usage.input_tokens:,} in, {usage.output_tokens:,} out{about}){cost}"


def prompt_of(run: Run) -> str:
    """Return the text of the prompt."""
    return "\n".join(part.text if isinstance(part, TextPart) else part.url for part in run.header.prompt)


def run_text(run: Run) -> str:
    """Return the header, the tree of turns, and what the run waits for."""
    return "\n".join([*_head(run), *tree_lines(turns_of(run)), *_foot(run)])


def _head(run: Run) -> Iterator[str]:
    header = run.header
    yield f"run      {run.id}"
    target = f" ({header.target})" if header.target else ""
    yield f"agent    {' '.join(filter(None, (header.agent, header.agent_version)))}{target}"
    if header.session is not None:
        yield f"session  {header.session}"
    yield f"created  {moment(run.created_at)}"
    yield f"prompt   {one_line(prompt_of(run), NOTE_CHARS)}"
    yield f"state    {state_line(run)}"


def tree_lines(turns: Sequence[TurnView]) -> Iterator[str]:
    """Return the turns as indented lines."""
    for turn in turns:
        yield f"turn {turn.number}"
        if turn.fault:
            yield f"  no reply: {one_line(turn.fault, NOTE_CHARS)}"
        yield from (f"  | {line}" for line in clean(turn.text).splitlines())
        for call in turn.calls:
            yield f"  {call.id} {call.title}"
            yield f"       {call.ending}"


def _foot(run: Run) -> Iterator[str]:
    yield f"used     {usage_line(run.usage)}; {seconds(run.duration_s)} active"
    yield from (f"waits    {pending_line(item)}" for item in run.pending)
    if run.state is State.ERROR:
        yield f"stopped  {run.stop_reason}: {one_line(run.stop_message, NOTE_CHARS)}"


def pending_line(item: Pending) -> str:
    """Return what a run waits for, in a line."""
    if item.kind is PendingKind.APPROVAL:
        until = "" if item.expires_at is None else f" (no answer until {moment(item.expires_at)} is a no)"
        return f"{item.call_id}: may {item.tool} run?{until}"
    return f"{item.call_id}: {item.tool} was running when its worker died or was stopped; what became of it?"


def event_lines(events: Sequence[Event]) -> Iterator[str]:
    """Return the journal, a line an entry; event number n made version n."""
    for number, event in enumerate(events, 1):
        facts = {name: value for name, value in event_json(event).items() if name not in ("is", "at", "took_s")}
        told = one_line(json.dumps(facts, ensure_ascii=False), CALL_CHARS) if facts else ""
        yield f"{number:>5}  {moment(event.at)}  {type(event).__name__:<14} {told}".rstrip()


def summary_lines(runs: Sequence[Summary]) -> Iterator[str]:
    """Return a table of runs."""
    width = max([len(run.id) for run in runs], default=0)
    for run in runs:
        facts = f"{moment(run.updated_at)}  turn {run.turn:<3} {run.tokens:>9,} tokens"
        yield f"{run.id:<{width}}  {_status(run):<22} {facts}  {one_line(run.prompt, VALUE_CHARS)}"


def _status(run: Summary) -> str:
    if run.stop_reason is not None:
        return f"{run.state.upper()} {run.stop_reason}"
    word = "running" if run.driven else "waiting" if run.waiting else "paused"
    return f"{run.state.upper()} {word}"


# JSON.


def run_json(run: Run, resume: str) -> dict[str, Any]:
    """Return what a program needs to know of a run.

    Args:
        run: As it stands.
        resume: The command line that goes on with it.
    """
    return {
        "id": run.id,
        "state": str(run.state),
        "stop_reason": None if run.stop_reason is None else str(run.stop_reason),
        "stop_message": run.stop_message,
        "output": run.output if run.state is State.DONE else None,
        "turns": run.turn,
        "version": run.version,
        "usage": attrs.asdict(run.usage) | {"tokens": run.usage.tokens},
        "duration_s": round(run.duration_s, 6),
        "pending": [attrs.asdict(item) for item in run.pending],
        "calls": [attrs.asdict(call) for call in run.calls],
        "resume": None if run.is_over else resume,
    }


def whole_json(run: Run, resume: str) -> dict[str, Any]:
    """Return `run_json` with the header and the turns."""
    header = run.header
    return run_json(run, resume) | {
        "agent": header.agent,
        "agent_version": header.agent_version,
        "target": header.target,
        "session": header.session,
        "user": header.user,
        "metadata": dict(header.metadata),
        "prompt": prompt_of(run),
        "created_at": run.created_at,
        "updated_at": run.updated_at,
        "tree": [attrs.asdict(turn) for turn in turns_of(run)],
    }


def event_json(event: Event) -> dict[str, Any]:
    """Return an event as the journal holds it."""
    fields: dict[str, Any] = json.loads(codec.encode_event(event))
    return fields


def summary_json(run: Summary) -> dict[str, Any]:
    """Return a line of a list of runs as JSON."""
    return attrs.asdict(run)
