"""The audit of a run: each call of a tool as one record. It is read off the journal, and no second truth beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall, Phase, parse_arguments
from agentfsm.core.fingerprint import short_hash
from agentfsm.core.header import Header
from agentfsm.core.messages import JSON, ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.core.run import Run, begin_run
from agentfsm.core.value import Value

# Characters of a result's SHA-256: all of it, since it stands for the result.
DIGEST_CHARS: Final = 64


@attrs.frozen(kw_only=True)
class AuditRecord(Value):
    """One call of a tool: who asked for what, who let it run, and how it ended."""

    run_id: str
    call_id: str
    """Unique in the run."""

    key: str
    """The idempotency key: the same on every attempt, and what a service outside knows the call by."""

    turn: int
    """The number of the run's reply that asked for it, from 1."""

    agent: str
    agent_version: str
    user: str | None
    """On whose behalf it ran."""

    session: str | None
    parent: str | None
    """The run whose tool this one is."""

    tool: str
    arguments: Mapping[str, JSON]
    """As it ran, or would run: a person's, where one has changed them."""

    proposed: Mapping[str, JSON] | None = None
    """The model's own, where a person has changed them."""

    asked_at: float
    """When the reply that asked for it was there, seconds since 1970, as the other two."""

    started_at: float | None = None
    """When it was first taken up: before `asked_at`, where it started while the reply came. None where it never was, as
    far as the journal tells.
    """

    ended_at: float | None = None
    """None while it is open."""

    duration_s: float = 0.0
    """Of its last dispatch, as its result says."""

    attempts: int = 0
    """How many times the tool was tried, as far as the journal tells: a worker that is killed over a call that is
    read-only leaves no word of it.
    """

    status: Outcome | Phase = Phase.INTENDED
    """How it ended, or how far it is."""

    error_type: ErrorType | None = None
    approved_by: str | None = None
    """Who let it run, empty for somebody who gave no name; None where nobody did."""

    rerun_by: tuple[str, ...] = ()
    """Who had it run again when its outcome was lost, in order."""

    informed_by: tuple[str, ...] = ()
    """Who has answered what the tool asked in the middle of the call, in order, once for each round."""

    decision: str = ""
    """Where its result came from outside: "answered", "rejected" or "settled"."""

    decided_by: str = ""
    """Whose word that was."""

    result: str | None = None
    """Its whole text; None while it has none."""

    inherited: bool = False
    """Whether it ended in the run that this one was forked from, whose audit has it, too."""

    @property
    def is_open(self) -> bool:
        """Whether it has no result yet."""
        return self.result is None

    @property
    def digest(self) -> str:
        """The SHA-256 of the result's text, in hexadecimal; empty while it has none."""
        return "" if self.result is None else short_hash(self.result, DIGEST_CHARS)


def build_audit(header: Header, events: Sequence[e.Event]) -> tuple[AuditRecord, ...]:
    """Return a record of each call that the run has chosen, in order, however far it came.

    Args:
        header: Of the run.
        events: Its journal, from the first event on.
    """
    notes = _AuditBuilder(header)
    run = begin_run(header)
    for event in events:
        before, run = run, run.apply(event)
        notes.add_event(event, before, run)
    results = {m.call_id: m for m in run.messages[run.own_start :] if isinstance(m, ToolResult)}
    opened = {entry.call.id: entry for entry in run.open}
    return tuple([_with_outcome(r, results.get(r.call_id), opened.get(r.call_id)) for r in notes.records.values()])


class _AuditBuilder:
    """What the events say of calls, taken down one after the other: no value, since it fills."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.records: dict[str, AuditRecord] = {}
        # By call id, in order.
        self.external_calls: set[str] = set()
        # Calls whose result is asked for outside.

    def add_event(self, event: e.Event, before: Run, run: Run) -> None:
        """Take down an event; `run` is the run after it."""
        match event:
            case e.ToolsChosen():
                self.records |= {call.id: self._new_record(call, event, run) for call in event.message.calls}
            case e.ToolStarted():
                record = self.records[event.call_id]
                since = record.started_at or event.since or event.at
                self._update(event.call_id, started_at=since, attempts=record.attempts + event.attempts)
            case e.ToolCutOff():
                self._record_cut_off(event)
            case e.ToolPaused():
                if any(_asks_for_result(item) and item.run_id == run.id for item in event.pending):
                    self.external_calls.add(event.call_id)
            case e.ApprovalGiven():
                self._record_approval(event, before)
            case e.InputGiven():
                informed = (*self.records[event.call_id].informed_by, event.by)
                self._update(event.call_id, informed_by=informed)
            case e.ToolFinished():
                self._record_finish(event, run)
            case e.LimitReached() | e.Failed():
                self._record_close(event)

    def _update(self, call_id: str, **facts: Any) -> None:
        self.records[call_id] = attrs.evolve(self.records[call_id], **facts)

    def _new_record(self, call: ToolCall, event: e.ToolsChosen, run: Run) -> AuditRecord:
        return AuditRecord(
            run_id=self.header.id,
            call_id=call.id,
            key=call.key,
            turn=run.turn,
            agent=self.header.agent,
            agent_version=self.header.agent_version,
            user=self.header.user,
            session=self.header.session,
            parent=self.header.parent,
            tool=call.name,
            arguments=parse_arguments(call),
            asked_at=event.at,
        )

    def _record_cut_off(self, event: e.ToolCutOff) -> None:
        record = self.records[event.call_id]
        attempts = record.attempts - event.undone
        since = _earliest_start(record.started_at, event.started_at) if attempts else None
        self._update(event.call_id, started_at=since, attempts=attempts)

    def _record_approval(self, event: e.ApprovalGiven, before: Run) -> None:
        record = self.records[event.call_id]
        is_lost = before.open_call(event.call_id).phase is Phase.OUTCOME_UNKNOWN
        if is_lost and event.arguments is None:  # `settle(rerun=True)` is journalled so, too
            self._update(event.call_id, rerun_by=(*record.rerun_by, event.by))
            return
        self._update(event.call_id, approved_by=event.by)
        if event.arguments is not None:
            own = record.arguments if record.proposed is None else record.proposed
            key = event.key or record.key
            self._update(event.call_id, proposed=own, arguments=json.loads(event.arguments), key=key)

    def _record_finish(self, event: e.ToolFinished, run: Run) -> None:
        result, record = event.result, self.records[event.result.call_id]
        decision = _classify_decision(event, is_question=result.call_id in self.external_calls)
        self._update(
            result.call_id,
            started_at=_earliest_start(record.started_at, result.started_at),
            ended_at=event.at,
            attempts=record.attempts or _count_attempts(result),
            decision=decision,
            decided_by=event.by if decision else "",
            inherited=run.version <= self.header.forked_at,
        )

    def _record_close(self, event: e.LimitReached | e.Failed) -> None:
        """Note the end of the calls that a limit or the end of the run has closed."""
        for record in self.records.values():
            if record.ended_at is None:
                self._update(record.call_id, ended_at=event.at)


def _asks_for_result(item: Pending) -> bool:
    """Whether the answer is the call's result, and not what a tool wants to know before it goes on."""
    return item.kind is PendingKind.QUESTION and not item.questions


def _with_outcome(record: AuditRecord, result: ToolResult | None, entry: OpenCall | None) -> AuditRecord:
    """Return the record with how its call ended, or how far it is."""
    result = entry.result if entry is not None else result
    if result is None:
        return record if entry is None else attrs.evolve(record, status=entry.phase)
    return attrs.evolve(
        record,
        status=result.outcome,
        duration_s=result.duration_s,
        error_type=result.error_type,
        result=result.content,
    )


def _earliest_start(started_at: float | None, taken_up_at: float) -> float | None:
    """Return when a call was first taken up; 0 says that its last dispatch was none."""
    known = [at for at in (started_at, taken_up_at or None) if at is not None]
    return min(known, default=None)


# Why a call was answered before its tool was tried.
_UNTRIED_ERRORS: Final = frozenset(
    {
        ErrorType.ARGUMENTS,
        ErrorType.UNKNOWN_TOOL,
        ErrorType.NOT_PERMITTED,
        ErrorType.WITHDRAWN,
        ErrorType.BLOCKED,
        ErrorType.BUDGET,
        ErrorType.CIRCUIT_OPEN,
    },
)


def _count_attempts(result: ToolResult) -> int:
    """Return how many times a tool was tried whose starts are not in the journal."""
    return 0 if not result.started_at or result.error_type in _UNTRIED_ERRORS else result.attempts


def _classify_decision(event: e.ToolFinished, *, is_question: bool) -> str:
    """Return whose word a result is: empty where it is the tool's own, or nobody's."""
    result = event.result
    if is_question and not result.started_at:
        return "answered" if result.outcome in (Outcome.DONE, Outcome.FAILED) else ""
    if not event.by:
        return ""
    return "rejected" if result.outcome is Outcome.REJECTED else "settled"
