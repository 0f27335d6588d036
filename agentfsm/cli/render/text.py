"""Render runs as text: the turns as values, and as plain lines."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.render.formatting import (
    CALL_CHARS,
    NOTE_CHARS,
    count_columns,
    fit_columns,
    format_arguments,
    format_count,
    format_duration,
    format_time,
)
from agentfsm.cli.render.pending import format_error_lines, format_pending, format_wait, format_whole_call
from agentfsm.core.calls import BackgroundRun, parse_arguments
from agentfsm.core.events import (
    AnswerDrafted,
    AnswerGiven,
    ApprovalAsked,
    ApprovalGiven,
    GuardVerdict,
    ModelFaltered,
    Paused,
    Recalled,
    Resumed,
    ToolPaused,
    ToolsChosen,
    ToolsOffered,
)
from agentfsm.core.inbox import Approve, decision_word
from agentfsm.core.labels import join_labels
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, ErrorType, Outcome, ToolResult, format_part
from agentfsm.core.run_facts import usage_by_purpose
from agentfsm.core.run_ids import find_caller
from agentfsm.core.text_safety import one_line, strip_unsafe
from agentfsm.core.usage import KEPT
from agentfsm.core.value import Value
from agentfsm.engine.execution.cost import calculate_run_cost
from agentfsm.journal.audit import build_audit
from agentfsm.journal.cache_losses import list_cache_losses
from agentfsm.journal.run_status import RunStatus
from agentfsm.ports.stored import BEST_RATING
from agentfsm.tokens.ledger import estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentfsm.core.calls import OpenCall
    from agentfsm.core.events import Event
    from agentfsm.core.inbox import Decision
    from agentfsm.core.messages import JSON, ToolCall
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run
    from agentfsm.core.usage import AgentCost, Usage
    from agentfsm.journal.audit import AuditRecord
    from agentfsm.ports.store import RunSummary
    from agentfsm.ports.stored import Feedback

# A data URL in JSON text; its data is left out of listings.
_DATA: Final = re.compile(r'("data:[^",]{1,200}),[^"]*')


@attrs.frozen(kw_only=True)
class CallView(Value):
    """A tool call, prepared for display."""

    id: str
    name: str
    arguments: dict[str, JSON]
    status: str
    """Outcome of a finished call, phase of an open one."""

    duration_s: float | None = None
    """Duration in seconds; None while the call is open."""

    content: str = ""
    """Text of the result."""

    description: str = ""
    """Description of the effect, from the tool, while the call waits for approval."""

    waits: tuple[Pending, ...] = ()
    """Inputs that the call waits for, including those of a sub-agent's run."""

    run_id: str = ""
    """Id of the run, for an open call; empty otherwise."""

    parts: tuple[str, ...] = ()
    """Descriptions of the images and other media in the result."""

    child: AgentCost | None = None
    """Cost of the sub-agent's run, if the tool is a sub-agent."""

    background: BackgroundRun | None = None
    """Background run that the call has begun; None if it has begun none."""

    is_fallback: bool = False
    """Whether a fallback stands for the result of a step of a flow."""

    verdict: GuardVerdict | None = None
    """Decision of the guards on the call; None if there was none, or the journal was not read."""

    reason: str = ""
    """Reason of that decision; empty if no rule applied."""

    approved_by: str | None = None
    """Name of the person who approved the call; None if no approval was needed, or the journal was not read."""

    allowance: str = ""
    """Allowance by which that person had decided beforehand; empty if on this very call."""

    proposed: dict[str, JSON] | None = None
    """Arguments of the model, if that person edited them; None otherwise."""

    rerun_by: tuple[str, ...] = ()
    """Names of the persons who had the call rerun after its worker crashed, in order."""

    informed_by: tuple[str, ...] = ()
    """Names of the persons who answered questions of the tool, in order."""

    decision: str = ""
    """"answered", "rejected" or "settled" if a person decided the result; empty otherwise."""

    decided_by: str = ""
    """Name of the person who made that decision."""

    @property
    def is_failed(self) -> bool:
        """Whether the call is finished with another outcome than DONE."""
        return self.duration_s is not None and self.status != Outcome.DONE

    @property
    def title(self) -> str:
        """Tool and arguments, on one line."""
        return one_line(f"{self.name}({format_arguments(self.arguments)})", CALL_CHARS)

    @property
    def outcome_text(self) -> str:
        """Status and duration, with the error of a failed call or the description of an open one."""
        took = "" if self.duration_s is None else f" in {format_duration(self.duration_s)}"
        note = self.content if self.is_failed else self.description
        status = f"{self.status} with a fallback" if self.is_fallback else self.status
        return f"{status}{took}" + (f": {one_line(note, NOTE_CHARS)}" if note.strip() else "")

    @property
    def detail_lines(self) -> Iterator[str]:
        """Lines below the call: the decisions about it, its media, its sub-agent's run, its waits."""
        yield from (one_line(line, NOTE_CHARS) for line in format_decisions(self))
        if self.parts:
            yield one_line(f"with {', '.join(self.parts)}", NOTE_CHARS)
        if self.child is not None:
            yield from format_costs(self.child)
        if self.background is not None:
            yield from _format_background(self.background, self.run_id)
        for item in self.waits:
            tool = "" if item.run_id == self.run_id else f", {item.tool}"
            yield one_line(f"waits for {format_wait(item, self.run_id)}{tool}", NOTE_CHARS)


def _format_background(each: BackgroundRun, run_id: str) -> Iterator[str]:
    """Yield lines about a background run: what it waits for, or its result with its cost."""
    name = f"in the background, run {run_id}.{each.call.id}:"
    if each.result is None:
        waits = ", ".join(format_wait(item, run_id) for item in each.pending)
        yield one_line(f"{name} waits for {waits}" if waits else f"{name} not ended yet", NOTE_CHARS)
        return
    yield one_line(f"{name} {each.result.outcome}: {each.result.content}", NOTE_CHARS)
    if each.result.child is not None:
        yield from format_costs(each.result.child)


def format_decisions(call: CallView | AuditRecord) -> Iterator[str]:
    """Yield a line for each decision of guards and persons about a call."""
    if call.verdict is not None and call.reason:
        yield f"guards: {call.verdict}, {call.reason}"
    if call.approved_by is not None:
        beforehand = f", by {call.allowance}" if call.allowance else ""
        yield f"approved by {_format_person(call.approved_by)}{beforehand}"
    if call.proposed is not None:
        yield f"arguments of the model before the edit: {format_arguments(call.proposed)}"
    for name in call.rerun_by:
        yield f"rerun after a crash, decided by {_format_person(name)}"
    for name in call.informed_by:
        yield f"questions of the tool answered by {_format_person(name)}"
    if call.decision:
        yield f"{call.decision} by {_format_person(call.decided_by)}"


def _format_person(name: str) -> str:
    return name or "an unnamed person"


@attrs.frozen(kw_only=True)
class TurnView(Value):
    """A reply of the model with its calls."""

    number: int
    """Number of the turn, from 1."""

    text: str = ""
    calls: tuple[CallView, ...] = ()
    fault: str = ""
    """Error of the model if it gave no reply; empty otherwise."""

    closed: bool = True
    """Whether all calls of the turn are finished."""

    is_plan: bool = False
    """Whether this is a plan with its steps, and `number` that of the plan."""

    @property
    def title(self) -> str:
        """Kind and number."""
        return f"{'plan' if self.is_plan else 'turn'} {self.number}"


def build_turns(run: Run) -> tuple[TurnView, ...]:
    """Return the turns of the run in order, without those of earlier runs of the conversation."""
    faults = {fault.turn: fault.message for fault in run.model_failures}
    turns: list[TurnView] = []
    own = run.messages[run.own_start :]
    results = {message.call_id: message for message in own if isinstance(message, ToolResult)}
    for message in own:
        if isinstance(message, AssistantMessage):
            turns += _iter_faults(len(turns) + 1, faults)
            calls = tuple(_closed_view(call, results[call.id]) for call in message.calls)
            turns.append(TurnView(number=len(turns) + 1, text=message.text, calls=calls))
    turns += _iter_faults(len(turns) + 1, faults)
    if run.reply is not None:
        calls = tuple(_open_view(entry, run.id) for entry in run.open)
        turns.append(TurnView(number=len(turns) + 1, text=run.reply.text, calls=calls, closed=False))
    turns = [*_build_plans(run), *turns]
    return tuple([_add_background(turn, run) for turn in turns] if run.background else turns)


def _add_background(turn: TurnView, run: Run) -> TurnView:
    calls = [attrs.evolve(call, run_id=run.id, background=run.background.get(call.id)) for call in turn.calls]
    return attrs.evolve(turn, calls=tuple(calls))


def _build_plans(run: Run) -> Iterator[TurnView]:
    """Yield each plan with its steps."""
    if run.plan is None:
        return
    opened = run.open if run.reply is None else ()
    for number in range(1, run.plan.number + 1):
        ids = (f"p{number}", f"p{number}.")
        entries = [e for e in (*run.plan.closed, *opened) if e.call.id == ids[0] or e.call.id.startswith(ids[1])]
        calls = tuple([_open_view(entry, run.id) for entry in entries])
        yield TurnView(number=number, calls=calls, closed=number < run.plan.number or not opened, is_plan=True)


def build_decided_turns(run: Run, events: Sequence[Event]) -> tuple[TurnView, ...]:
    """Return the turns of the run, with the decisions that its journal records."""
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
        verdict=record.verdict,
        reason=record.reason,
        approved_by=record.approved_by,
        allowance=record.allowance,
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
        is_fallback=result.error_type is ErrorType.FALLBACK,
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
    """Return the state with the stop reason or the waits, and the version."""
    state = run.state.upper()
    if run.is_over:
        state += f" ({run.stop_reason})"
    elif run.is_waiting:
        state += f", waits for {', '.join(format_wait(item, run.id) for item in run.pending)}"
    return f"{state}, version {run.version}"


def format_used(run: Run) -> str:
    """Return tokens and cost of a run, with the models that have no price."""
    return _format_usage(run.usage, calculate_run_cost(run).unpriced)


def _format_usage(usage: Usage, unpriced: Sequence[str]) -> str:
    estimated = ", estimated" if usage.estimated else ""
    is_named = bool(unpriced) and not usage.cost_usd  # the models without a price say it
    cost = f", {usage.format_cost()}" if (usage.tokens or usage.cost_usd) and not is_named else ""
    models = " and ".join(f'"{model}"' for model in unpriced)
    missing = one_line(f", no price for model {models}", NOTE_CHARS) if unpriced else ""
    cached = f", {format_count(usage.cached_replies, 'hit')} of the reply cache" if usage.cached_replies else ""
    read = f", {usage.cached_tokens:,} of them from the provider's cache" if usage.cached_tokens else ""
    tokens = f"{usage.tokens:,} tokens ({usage.input_tokens:,} in{read}, {usage.output_tokens:,} out{estimated})"
    return f"{tokens}{cost}{missing}{cached}"


def format_costs(cost: AgentCost) -> Iterator[str]:
    """Yield a line with the cost of a sub-agent's run, followed by indented lines for the runs below it."""
    called = f", called {', '.join(cost.tool_calls)}" if cost.tool_calls else ""
    usage = cost.usage if cost.usd is None else attrs.evolve(cost.usage, cost_usd=cost.usd)
    used = (
        f"{format_count(cost.turns, 'turn')}, {_format_usage(usage, cost.unpriced)}, {format_duration(cost.duration_s)}"
    )
    yield one_line(f"{cost.agent}, run {cost.run_id}: {used}{called}", NOTE_CHARS)
    for child in cost.children:
        yield from (f"  {line}" for line in format_costs(child))


def format_prompt(run: Run) -> str:
    """Return the text of the prompt, with a description of each image or other medium."""
    return "\n".join(map(format_part, run.header.prompt))


def format_run(run: Run, events: Sequence[Event] = (), *, status: str = "") -> str:
    """Return the header, the turns, the pauses and the waits of a run.

    Args:
        run: The run at any version.
        events: Its journal, from which decisions and pauses are read.
        status: Its status, and how it continues; empty to leave it out.
    """
    return "\n".join(
        [
            *_format_header(run),
            *([f"status   {status}"] if status else []),
            *format_turns(build_decided_turns(run, events)),
            *_format_pauses(events),
            *_format_footer(run, events),
        ]
    )


def _format_header(run: Run) -> Iterator[str]:
    header = run.header
    yield f"run      {run.id}"
    target = f" ({header.target})" if header.target else ""
    yield f"agent    {' '.join(filter(None, (header.agent, header.agent_version)))}{target}"
    if header.parent is not None:
        yield f"parent   {header.parent}"
    if header.caller is not None:
        yield f"caller   {format_caller(header.caller)}"
    if header.forked_from is not None:
        yield f"forked   from {header.forked_from} at version {header.forked_at}"
    if header.withhold:
        yield "withheld calls of tools that are not read-only"
    if (source := run.answered_from) is not None:
        yield f"answer   of run {source.run_id}, {format_time(source.at)}, from the answer cache"
    for name, version in sorted(header.fingerprint.prompts.items()):
        yield f"prompts  {name}@{version}"
    if header.session is not None:
        yield f"session  {header.session}"
    facts = {
        "user": header.user,
        "tenant": header.tenant,
        "cleared": header.clearance,
        "release": header.release,
        "purpose": header.purpose,
        "arms": ", ".join(f"{name}={arm}" for name, arm in sorted(header.arms.items())),
        "trace": header.traceparent,
    }
    yield from (f"{name:<8} {one_line(value, NOTE_CHARS)}" for name, value in facts.items() if value)
    yield f"created  {format_time(run.created_at)}"
    yield f"prompt   {one_line(format_prompt(run), NOTE_CHARS)}"
    yield f"state    {format_state(run)}"


def format_caller(caller: str) -> str:
    """Return the call whose function started a run, given as in `Header.caller`."""
    run_id, _, call_id = caller.rpartition("/")
    return f"call {call_id} of run {run_id}"


def _format_tiers(events: Sequence[Event]) -> Iterator[str]:
    """Yield a line for the first tier of the run, and one for each change."""
    turn = 0
    for event in events:
        if not isinstance(event, ToolsChosen | AnswerGiven | AnswerDrafted | ModelFaltered):
            continue
        turn += 1
        tier = None if isinstance(event, ModelFaltered) else event.tier
        if tier is not None and tier.reason != KEPT:
            yield f"tier     {one_line(f'{tier.name} from turn {turn} on: {tier.reason}', NOTE_CHARS)}"


def _format_recall(event: Recalled) -> str:
    """Return what a search of the memory gave: the items that the model reads, with their tokens and the room."""
    told = [f"{format_count(len(event.profile), 'item')} in the profile"] if event.profile else []
    told += [f"{format_count(len(event.items), 'item')} recalled"]
    if event.layers is not None:
        tokens = sum([estimate_tokens(item.text) for item in event.items])
        told.append(f"{tokens:,} of {event.layers.memory:,} tokens")
    told += [f"{event.left_out:,} left out for want of room"] if event.left_out else []
    told += [one_line(event.fault, NOTE_CHARS)] if event.fault else []
    return ", ".join(told)


def format_turns(turns: Sequence[TurnView]) -> Iterator[str]:
    """Return the turns as indented lines."""
    for turn in turns:
        yield turn.title
        if turn.fault:
            yield f"  no reply: {one_line(turn.fault, NOTE_CHARS)}"
        yield from (f"  | {line}" for line in strip_unsafe(turn.text).splitlines())
        for call in turn.calls:
            yield f"  {call.id} {call.title}"
            yield f"       {call.outcome_text}"
            yield from (f"       {line}" for line in call.detail_lines)


def _format_pauses(events: Sequence[Event]) -> Iterator[str]:
    """Yield a line for each pause and resumption, with the changes of the agent in between."""
    for version, event in enumerate(events, 1):
        at = f"{format_time(event.at)}, version {version}"
        if isinstance(event, Paused):
            by = f" by {event.by}" if event.by else ""
            why = f": {event.message}" if event.message else ""
            yield f"paused   {one_line(f'{at}{by}{why}', NOTE_CHARS)}"
        elif isinstance(event, Resumed):
            changes = f", with a changed agent: {'; '.join(event.changes)}" if event.changes else ""
            names = ", ".join([f"{old} is {new} now" for old, new in event.renamed.items()])
            told = f"{at}{changes}; {names}" if names else f"{at}{changes}"
            yield f"resumed  {one_line(told, NOTE_CHARS)}"


def _format_footer(run: Run, events: Sequence[Event]) -> Iterator[str]:
    yield f"used     {format_used(run)}; {format_duration(run.duration_s)} active"
    spent = usage_by_purpose(events)
    for purpose, usage in spent.items() if len(spent) > 1 else ():
        yield f"         {purpose}: {_format_usage(usage, ())}"
    for loss in list_cache_losses(events):
        lost = f"{loss.tokens:,} tokens that the provider had in its prompt cache were read anew"
        yield f"cache    {one_line(f'turn {loss.turn}: {lost}, because {loss.reason}', NOTE_CHARS)}"
    yield from _format_tiers(events)
    yield from (f"memory   {_format_recall(event)}" for event in events if isinstance(event, Recalled))
    for label in join_labels(run.labels):
        source = run.labels[label]
        origin = "" if source.run_id == run.id else f" of run {source.run_id}"
        yield f"label    {one_line(f'{label}, from {source.describe()}{origin}', NOTE_CHARS)}"
    yield from (f"finding  {one_line(text, NOTE_CHARS)}" for text in run.findings)
    for item in run.pending:
        yield f"waits    {format_pending(item, run.id)}"
        yield from (f"         {line}" for line in format_whole_call(item))
        yield from (f"         {line}" for line in format_error_lines(item))
    yield from (f"not done {one_line(f'{claim}: {claim.fault}', NOTE_CHARS)}" for claim in run.not_done)
    if run.state is State.ERROR:
        yield f"failed   {run.stop_reason}: {one_line(run.stop_message, NOTE_CHARS)}"


def format_posted(run_id: str, decision: Decision, run: Run) -> str:
    """Return the line for a decision in the inbox, which no worker has executed yet."""
    target = "" if run_id == run.id else f" of run {run_id}"
    edited = parse_edited_arguments(decision)
    changed = "" if edited is None else f", with the arguments {format_arguments(edited)}"
    status = "not executed, because the run ended first" if run.is_over else "a worker, or resume, executes it"
    text = f"{decision.call_id}{target}: {decision_word(decision)} by {_format_person(decision.by)}{changed}; {status}"
    return f"posted   {one_line(text, NOTE_CHARS)}"


def format_feedback(feedback: Feedback) -> str:
    """Return the line for a person's opinion of the run."""
    who = f" by {feedback.by}" if feedback.by else ""
    why = f": {feedback.comment}" if feedback.comment else ""
    return f"feedback {one_line(f'{feedback.rating}/{BEST_RATING}{who}, {format_time(feedback.at)}{why}', NOTE_CHARS)}"


def parse_edited_arguments(decision: Decision) -> dict[str, Any] | None:
    """Return the arguments that a person approved instead of the model's; None if they were not edited."""
    text = decision.arguments if isinstance(decision, Approve) else None
    return None if text is None else json.loads(text)


# The journal, and lists.


def format_events(events: Sequence[Event]) -> Iterator[str]:
    """Yield a line for each event of the journal, numbered by the version that it made."""
    for number, event in enumerate(events, 1):
        facts = _event_fields(event)
        text = json.dumps(facts, ensure_ascii=False) if facts else ""
        shown = one_line(_DATA.sub(r"\1,...", text), CALL_CHARS)
        yield f"{number:>5}  {format_time(event.at)}  {type(event).__name__:<14} {shown}".rstrip()


def _event_fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event, the most important ones first, because the line may be cut at its end."""
    facts = {name: value for name, value in event.to_dict().items() if name not in ("is", "at", "took_s")}
    match event:
        case ToolsOffered(how=how):
            return {"how": how, **facts}
        case ToolPaused(pending=pending):
            return facts | {"pending": [format_wait(item) for item in pending]}
        case ApprovalGiven(arguments=str(text)) | ApprovalAsked(arguments=str(text)):
            return facts | {"arguments": json.loads(text)}
    return facts


_COLUMNS: Final = ("ID", "STATUS", "UPDATED", "TURN", "TOKENS", "PROMPT")
_NUMBERS: Final = frozenset({"TURN", "TOKENS"})
# Columns that a narrow terminal leaves out, the first one first.
_OPTIONAL_COLUMNS: Final = ("TOKENS", "TURN", "UPDATED")
# Terminal columns that are kept free for the prompt.
_PROMPT_COLUMNS: Final = 16
# Longest prompt of a summary: more than stores keep.
_PROMPT_CHARS: Final = 1_000


def format_summaries(
    runs: Sequence[RunSummary], statuses: Sequence[RunStatus], width: int | None = None
) -> Iterator[str]:
    """Yield a table of runs with a header line; no lines without runs.

    Args:
        runs: Rows of the table.
        statuses: Status of each run.
        width: Columns of the terminal. Prompts are cut to fit it. A narrow one gets no reasons of failures and no
            years, and a very narrow one fewer columns. None: all columns, and no cuts.
    """
    if not runs:
        return
    for is_short in (False, True):
        cells = [_format_cells(run, status, is_short) for run, status in zip(runs, statuses, strict=True)]
        rows = [dict(zip(_COLUMNS, _COLUMNS, strict=True)), *cells]
        widths = {name: max(count_columns(row[name]) for row in rows) for name in _COLUMNS}
        if width is None or sum(widths[each] + 2 for each in _COLUMNS[:-1]) + _PROMPT_COLUMNS <= width:
            break
    shown = list(_COLUMNS)
    for name in _OPTIONAL_COLUMNS:
        if width is not None and sum(widths[each] + 2 for each in shown[:-1]) + _PROMPT_COLUMNS > width:
            shown.remove(name)
    for row in rows:
        texts = [row[each].rjust(widths[each]) if each in _NUMBERS else row[each].ljust(widths[each]) for each in shown]
        lines = ["  ".join(texts).rstrip()]
        if (call := find_caller(row["ID"])) is not None:
            lines.append(f"    started by call {call.call_id} of run {call.run_id}")
        yield from lines if width is None else [fit_columns(line, width) for line in lines]


def _format_cells(run: RunSummary, status: RunStatus, is_short: bool) -> dict[str, str]:
    at = format_time(run.updated_at)
    reason = f", {run.stop_reason}" if status is RunStatus.FAILED and not is_short else ""
    if run.is_too_new:
        reason = f", needs a newer agentfsm (format {run.format})"
    return {
        "ID": run.id,
        "STATUS": f"{status}{reason}",
        "UPDATED": at[5:16] if is_short else at,  # month, day, hour and minute
        "TURN": str(run.turn),
        "TOKENS": f"{run.tokens:,}",
        "PROMPT": one_line(run.prompt, _PROMPT_CHARS),
    }
