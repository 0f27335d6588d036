"""Audit of runs: one record for each tool call, derived from the journals."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from math import inf
from typing import Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall, Phase, parse_arguments
from agentfsm.core.errors import RunNotFoundError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.header import Header, short_hash
from agentfsm.core.labels import Label, join_labels
from agentfsm.core.messages import JSON, ErrorType, Outcome, ToolCall, ToolResult
from agentfsm.core.pending import PendingKind
from agentfsm.core.run import Run, begin_run
from agentfsm.core.run_ids import child_run_id
from agentfsm.core.value import Value
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import Filter, Store

# Hexadecimal digits of the SHA-256 of a result: all of them, because the digest stands for the result.
DIGEST_CHARS: Final = 64


@attrs.frozen(kw_only=True)
class AuditRecord(Value):
    """Record of one tool call: who asked for it, who approved it, and how it ended."""

    run_id: str
    """Id of the run that made the call."""

    call_id: str
    """Id of the call, unique in the run."""

    key: str
    """Idempotency key, the same for every attempt. External services know the call by it."""

    turn: int
    """Number of the turn whose reply asked for the call, from 1."""

    agent: str
    """Name of the agent."""

    agent_version: str
    """Version of the agent when the run started; empty if it has none."""

    user: str | None
    """User on whose behalf the run works; None if not given."""

    session: str | None
    """Id of the session that the run belongs to; None if it belongs to none."""

    parent: str | None
    """Id of the run that called this agent as a tool; None for a top-level run."""

    caller: str | None = None
    """Run and call, as "RUN/CALL", whose tool started the run by itself; None if no tool did."""

    tool: str
    """Name of the tool."""

    arguments: Mapping[str, JSON]
    """Arguments that the call ran with or would run with: the edited ones if a person has changed them."""

    proposed: Mapping[str, JSON] | None = None
    """The model's arguments if a person has changed them; else None."""

    asked_at: float
    """Time at which the reply that asked for the call was complete, seconds since 1970."""

    started_at: float | None = None
    """Time at which the call was first started, seconds since 1970: before `asked_at` if it started while the reply was
    streamed. None if the journal records no start.
    """

    ended_at: float | None = None
    """Time at which the call ended, seconds since 1970; None while it is open."""

    duration_s: float = 0.0
    """Seconds that the last dispatch of the call took, as its result reports."""

    attempts: int = 0
    """Number of times the tool was tried, as far as the journal records it: if a worker dies during a read-only call,
    that attempt is not recorded.
    """

    status: Outcome | Phase = Phase.INTENDED
    """Outcome of the call, or its phase while it is open."""

    error_type: ErrorType | None = None
    """Reason why the tool gave no result; None if it gave one or the call is open."""

    verdict: GuardVerdict | None = None
    """Decision of the guards on the call; None if no rule can concern it, or they did not decide."""

    reason: str = ""
    """Reason of that decision, with the rule and the sources of its labels; empty if no rule applied."""

    approved_by: str | None = None
    """Person who approved the call, empty if no name was given; None if the call was not approved."""

    allowance: str = ""
    """Allowance by which that person had decided beforehand, as `Allowance.name`; empty if on this very call."""

    rerun_by: tuple[str, ...] = ()
    """Persons who had the call run again when its outcome was unknown, in order."""

    informed_by: tuple[str, ...] = ()
    """Persons who answered questions that the tool asked during the call, in order, one for each round."""

    decision: str = ""
    """"answered", "rejected" or "settled" if the result came from outside; else empty."""

    decided_by: str = ""
    """Person who answered, rejected or settled the call; empty if not given."""

    result: str | None = None
    """Full text of the result; None while there is none."""

    labels: tuple[Label, ...] = ()
    """Labels of what the call has read and done, as its tool declares them and as far as the journal records it."""

    sandbox: str = ""
    """Isolation in which the tool's function ran, as `ToolResult.sandbox` names it; empty if it ran in none."""

    inherited: bool = False
    """Whether the call ended in the run that this one was forked from. The audit of that run also contains it."""

    @property
    def is_open(self) -> bool:
        """Whether the call has no result yet."""
        return self.result is None

    @property
    def digest(self) -> str:
        """The SHA-256 of the result's text, in hexadecimal; empty while the call is open."""
        return "" if self.result is None else short_hash(self.result, DIGEST_CHARS)


def build_audit(header: Header, events: Sequence[e.Event]) -> tuple[AuditRecord, ...]:
    """Return a record of each call of a run, in order, open calls included.

    Args:
        header: Header of the run.
        events: Events of its journal, from the first on.
    """
    builder = _AuditBuilder(header)
    run = begin_run(header)
    for event in events:
        before, run = run, run.apply(event)
        builder.add_event(event, before, run)
    steps = () if run.plan is None else run.plan.closed
    given = (*run.messages[run.own_start :], *[entry.result for entry in steps])
    results = {m.call_id: m for m in given if isinstance(m, ToolResult)}
    opened = {entry.call.id: entry for entry in run.open}
    return tuple([_with_outcome(r, results.get(r.call_id), opened.get(r.call_id)) for r in builder.records.values()])


class _AuditBuilder:
    """Collects the records of calls while the events of a run are applied in order."""

    def __init__(self, header: Header) -> None:
        self.header = header
        # Records by call id, in order.
        self.records: dict[str, AuditRecord] = {}
        # Ids of calls whose result comes from outside.
        self.external_calls: set[str] = set()

    def add_event(self, event: e.Event, before: Run, run: Run) -> None:
        """Record an event; `before` and `run` are the run before and after it."""
        match event:
            case e.ToolsChosen() | e.Planned() | e.StepsReady():
                for call in list_new_calls(event):
                    self.records[call.id] = AuditRecord(
                        run_id=self.header.id,
                        call_id=call.id,
                        key=call.key,
                        turn=run.turn,
                        agent=self.header.agent,
                        agent_version=self.header.agent_version,
                        user=self.header.user,
                        session=self.header.session,
                        parent=self.header.parent,
                        caller=self.header.caller,
                        tool=call.name,
                        arguments=parse_arguments(call),
                        asked_at=event.at,
                    )
            case e.ToolStarted():
                record = self.records[event.call_id]
                since = record.started_at or event.since or event.at
                labels = join_labels(record.labels, event.labels)
                attempts = record.attempts + event.attempts
                key = event.key or record.key
                self._update(event.call_id, started_at=since, attempts=attempts, labels=labels, key=key)
            case e.ToolCutOff():
                record = self.records[event.call_id]
                attempts = record.attempts - event.undone
                started_at = _earliest_start(record.started_at, event.started_at) if attempts else None
                self._update(event.call_id, started_at=started_at, attempts=attempts)
            case e.ToolPaused():
                asked = [item for item in event.pending if item.kind is PendingKind.QUESTION and item.run_id == run.id]
                if any(not item.questions for item in asked):  # the answer is the result, and not one for the tool
                    self.external_calls.add(event.call_id)
            case e.Guarded():
                self._update(event.call_id, verdict=event.verdict, reason=event.reason)
            case e.ApprovalGiven():
                self._record_approval(event, before)
            case e.ApprovalAsked(arguments=str() as text):
                self._record_edit(event.call_id, text, event.key)
            case e.InputGiven(answers=answers) if answers:
                informed = (*self.records[event.call_id].informed_by, event.by)
                self._update(event.call_id, informed_by=informed)
            case e.ToolFinished():
                self._record_finish(event, run)
            case e.Resumed(renamed=names) if names:  # the tool that acts is the new one
                for call in (*[each.call for each in run.open], *[each.call for each in run.background.values()]):
                    self._update(call.id, tool=call.name)
            case e.LimitReached() | e.Failed():  # they close the calls that are open
                for record in self.records.values():
                    if record.ended_at is None:
                        self._update(record.call_id, ended_at=event.at)

    def _update(self, call_id: str, **facts: Any) -> None:
        self.records[call_id] = attrs.evolve(self.records[call_id], **facts)

    def _record_approval(self, event: e.ApprovalGiven, before: Run) -> None:
        record = self.records[event.call_id]
        is_lost = before.open_call(event.call_id).phase is Phase.OUTCOME_UNKNOWN
        if is_lost and event.arguments is None:  # `settle(rerun=True)` is journalled so, too
            self._update(event.call_id, rerun_by=(*record.rerun_by, event.by))
            return
        self._update(event.call_id, approved_by=event.by, allowance=event.allowance)
        if event.arguments is not None:
            self._record_edit(event.call_id, event.arguments, event.key)

    def _record_edit(self, call_id: str, arguments: str, key: str | None) -> None:
        record = self.records[call_id]
        own = record.arguments if record.proposed is None else record.proposed
        self._update(call_id, proposed=own, arguments=json.loads(arguments), key=key or record.key)

    def _record_finish(self, event: e.ToolFinished, run: Run) -> None:
        result, record = event.result, self.records[event.result.call_id]
        decision = _classify_decision(event, is_question=result.call_id in self.external_calls)
        # A call whose starts are not in the journal has its attempts in the result.
        was_tried = bool(result.started_at) and result.error_type not in _UNTRIED_ERRORS
        self._update(
            result.call_id,
            started_at=_earliest_start(record.started_at, result.started_at),
            ended_at=event.at,
            attempts=record.attempts or (result.attempts if was_tried else 0),
            decision=decision,
            decided_by=event.by if decision else "",
            labels=join_labels(record.labels, result.labels),
            inherited=run.version <= self.header.forked_at,
        )


def list_new_calls(event: e.ToolsChosen | e.Planned | e.StepsReady) -> tuple[ToolCall, ...]:
    """Return the calls that an event opens."""
    if isinstance(event, e.ToolsChosen):
        return event.message.calls
    return (event.call,) if isinstance(event, e.Planned) else event.calls


def _with_outcome(record: AuditRecord, result: ToolResult | None, entry: OpenCall | None) -> AuditRecord:
    """Return the record with the outcome of its call, or its phase while it is open."""
    result = entry.result if entry is not None else result
    if result is None:
        return record if entry is None else attrs.evolve(record, status=entry.phase)
    return attrs.evolve(
        record,
        status=result.outcome,
        duration_s=result.duration_s,
        error_type=result.error_type,
        result=result.content,
        sandbox=result.sandbox,
    )


def _earliest_start(started_at: float | None, taken_up_at: float) -> float | None:
    """Return when a call was first started. `taken_up_at` is 0 if its last dispatch did not start it."""
    known = [at for at in (started_at, taken_up_at or None) if at is not None]
    return min(known, default=None)


# Errors of calls that ended before their tool was tried.
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


def _classify_decision(event: e.ToolFinished, *, is_question: bool) -> str:
    """Return the kind of decision that a result comes from; empty if it comes from the tool or the engine."""
    result = event.result
    if is_question and not result.started_at:
        return "answered" if result.outcome in (Outcome.DONE, Outcome.FAILED) else ""
    if not event.by:
        return ""
    return "rejected" if result.outcome is Outcome.REJECTED else "settled"


# Larger than the number of agent calls of any run.
MAX_CHILD_RUNS: Final = 1_000_000


async def audit_run_tree(store: Store, run_id: str) -> tuple[AuditRecord, ...]:
    """Return the calls of a run in order, each agent call followed directly by the calls of its child run.

    Raises:
        RunNotFoundError: if the store has no such run.
    """
    stored = await store.read(run_id)
    below = {line.id for line in await store.runs(Filter(parent=run_id), limit=MAX_CHILD_RUNS)}
    records: list[AuditRecord] = []
    for record in build_audit(stored.header, stored.events):
        records.append(record)
        if (child := child_run_id(run_id, record.call_id)) in below:
            records += await audit_run_tree(store, child)
    return tuple(records)


@attrs.define(eq=False, repr=False)
class AuditTrail(AsyncIterator[AuditRecord]):
    """Iterator over the calls of many runs, newest run first, in call order within a run; each call once.

    Child runs count as runs of their own. Calls that a fork inherited are listed with the forked run only. Runs that
    begin after the first page was read may be missing. It is safe to break out of the loop at any time.
    """

    _store: Store
    _runs: RunIterator
    _since: float = -inf
    """Unix time in seconds; runs that were over before it are not read."""

    _records: deque[AuditRecord] = attrs.field(factory=deque, init=False)

    async def __anext__(self) -> AuditRecord:
        while not self._records:
            line = await anext(self._runs)
            if line.stop_reason is not None and line.updated_at < self._since:
                continue
            try:
                stored = await self._store.read(line.id)
            except RunNotFoundError:  # removed after it was listed
                continue
            records = build_audit(stored.header, stored.events)
            self._records.extend([record for record in records if not record.inherited])
        return self._records.popleft()
