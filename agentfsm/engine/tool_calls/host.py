"""The run's host of the tool queue: commits each call's start and result to the journal before it counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import Inquiry, Phase, parse_index
from agentfsm.core.errors import AgentError
from agentfsm.core.inbox import GiveInput, PostedItem
from agentfsm.core.json_text import round_duration, round_timestamp
from agentfsm.core.labels import EFFECT_LABELS, Label, ToolKind, join_labels
from agentfsm.core.machine import State
from agentfsm.core.messages import ErrorType, ToolCall, ToolResult
from agentfsm.core.pending import PendingKind
from agentfsm.core.trace_context import call_context
from agentfsm.core.usage import Usage
from agentfsm.engine.deciders.approvals import build_pending_question, consume_decision
from agentfsm.engine.deciders.labels import list_call_labels
from agentfsm.engine.deciders.started_calls import apply_policy, refuse_started_call
from agentfsm.engine.execution.budget import NO_USAGE
from agentfsm.engine.execution.child_runs import end_interrupted_child
from agentfsm.engine.execution.cost import bill_settled_call
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.execution.open_calls import CallLedger, EndedCall, OpenCalls
from agentfsm.engine.execution.task_waits import build_task_wait, waits_for_task
from agentfsm.engine.execution.tool_access import check_available, current_turn, find_engine_tool
from agentfsm.engine.line import Line
from agentfsm.engine.tool_calls.call_context import build_call_context
from agentfsm.streaming.stream import StreamEvent, ToolEvent
from agentfsm.tools.attendance import Attendant, AttendedQuestions
from agentfsm.tools.executing_call import ExecutingCall
from agentfsm.tools.question_validation import MAX_ROUNDS
from agentfsm.tools.queue.dispatch import CallOutcome, ToolJob, failed_outcome
from agentfsm.tools.queue.result_text import mask_secrets, too_many_rounds_text
from agentfsm.tools.queue.scheduler import Scheduler, ToolQueue
from agentfsm.tools.run_context import CallPaused, InputRequired, LoginRequired, RunContext, TaskPending
from agentfsm.tools.schema.binding import BoundArguments
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from agentfsm.engine.execution.journal import Journal
    from agentfsm.engine.model_calls.eager_calls import EagerCalls
    from agentfsm.tools.registry import ToolRegistry


@attrs.define(eq=False, repr=False)
class RunHost(OpenCalls):
    """Serves the calls of a run: commits their events, and refuses calls that may not run."""

    line: Line = attrs.field(kw_only=True)
    """The features of the agent at the points of a call."""

    cut_off_limit_waits: int = 0
    """Number of calls that waited for a limit of their tool or tag when the execution was cut off."""

    activate_span: Callable[[ToolCall], AbstractContextManager[object]] | None = attrs.field(init=False, default=None)
    """Function that returns what makes the span of a call current in its task; None if the run is not traced."""

    def __attrs_post_init__(self) -> None:
        if (tracer := self.execution.config.tracer) is not None:
            header = self.execution.journal.run.header
            self.activate_span = lambda call: tracer.activate(header, call_context(header, call.id))

    # The tools of the run

    def find_tool(self, registry: ToolRegistry, name: str) -> Tool[..., Any] | None:
        """Return the tool of that name: the agent's own, or a built-in one."""
        return (
            registry.get(name) or self.execution.config.engine_tools.get(name) or find_engine_tool(self.execution, name)
        )

    def list_tool_names(self, registry: ToolRegistry) -> Sequence[str]:
        """Return the names of the available and permitted tools."""
        return [tool.name for tool in registry if self.check_available(tool) is None]

    def check_available(self, tool: Tool[..., Any]) -> CallOutcome | None:
        """Return the refusal if no call of a tool can run, whatever its arguments, else None."""
        return check_available(self.execution, tool)

    def list_labels(self, tool: Tool[..., Any], call: ToolCall) -> tuple[Label, ...]:
        """Return the labels of a call that was tried, with those that guards add."""
        return list_call_labels(self.execution, tool, call) if tool.labels or self.execution.config.guards else ()

    def mask_error(self, text: str) -> str:
        """Return the text of a tool's error without secrets, those that guards know among them."""
        config = self.execution.config
        return mask_secrets(text, [secret for find in self.line.secrets for secret in find(config)])

    def on_tool_error(self, call: ToolCall, error: BaseException) -> None:
        """Log an exception of a tool, which no result of a call contains."""
        self.execution.journal.log.warning("tool_raised", call=call.id, tool=call.name, exc_info=error)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, exact if a vocabulary is loaded."""
        return self.execution.count_tokens(text)

    # What the function of a call is given and reports

    def position_in_reply(self, call: ToolCall, index: int) -> int:  # noqa: ARG002  of those that run now
        """Return the call's position in the reply, some of whose calls may have run before."""
        return parse_index(call.id)

    def build_context(self, call: ToolCall, tool: Tool[..., Any], deadline: float) -> RunContext[Any]:
        """Build the context of a call."""
        return build_call_context(self, self.ask_person, call, tool, deadline)

    def build_login_context(self, call: ToolCall, tool: Tool[..., Any]) -> RunContext[Any]:
        """Build the context in which the login of a call is checked, with the answer that its start will record."""
        ctx, ledger = self.build_context(call, tool, inf), self.ledgers.get(call.id)
        row = None if ledger is None else ledger.approval
        if isinstance(row, PostedItem) and isinstance(row.item, GiveInput):  # the login is checked before the start
            answers = {**ctx.inquiry.answers, **row.item.answers}
            return attrs.evolve(ctx, inquiry=attrs.evolve(ctx.inquiry, answers=answers))
        return ctx

    def begin_attempt(self, call: ToolCall) -> ExecutingCall:
        """Return the call as the runs see it that its function starts."""

        def list_read_labels() -> tuple[Label, ...]:  # as declared, and as the function has said so far
            tool, ledger = self.find_tool(self.execution.config.registry, call.name), self.ledgers.get(call.id)
            declared = () if tool is None else self.list_labels(tool, call)
            read = tuple([label for label in declared if label not in EFFECT_LABELS])
            return read if ledger is None else join_labels(read, ledger.labels)

        return ExecutingCall(
            run=self.execution.journal.run,
            call=call,
            takeover=self.execution.options.takeover,
            own_labels=list_read_labels,
            on_labels=partial(self.add_labels, call.id),
            store=self.execution.journal.store,
        )

    async def ask_person(
        self, call: ToolCall, tool: Tool[..., Any], attendant: Attendant, asked: AttendedQuestions
    ) -> Mapping[str, Any] | None:
        """Ask the questions of a running call, and commit the answers before they are used."""
        journal = self.execution.journal
        inquiry = self.find_entry(call).inquiry or Inquiry()
        if inquiry.rounds >= MAX_ROUNDS:
            journal.log.warning("call_asks_too_often", call=call.id, rounds=inquiry.rounds)
            return None
        now = await journal.store.now()
        questions = asked.questions
        item = build_pending_question(journal.run, tool, call, questions, rounds=inquiry.rounds, now=now)
        given = await attendant(attrs.evolve(item, expires_at=None))
        answers = {} if given is None else given.answers
        by = "" if given is None else given.by
        fact = e.InputGiven(call_id=call.id, by=by, answers=answers, questions=questions, state=asked.state)
        if journal.run.open_call(call.id).phase is Phase.RUNNING:
            self.record(fact)
        else:  # a read-only call, whose start is not in the journal
            start = e.ToolStarted(call_id=call.id, repeatable=True, read_only=True, attempts=asked.attempt)
            self.record(start, fact)
        await journal.flush()
        journal.check_lease()
        return None if given is None else answers

    # The start of a call

    def check_permitted(self, call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
        """Return the refusal of a valid call, or None."""
        for decide in self.line.before_start:
            if (refusal := decide(self, call, tool, bound)) is not None:
                return refusal
        return None

    async def reserve_spend(self, call: ToolCall, tool: Tool[..., Any]) -> CallOutcome | None:
        """Reserve the declared cost of a call in the spending limits of the run."""
        for reserve in self.line.reserve_start:
            if (refusal := await reserve(self.execution, self.open_ledger(call.id), call, tool)) is not None:
                return refusal
        return None

    def has_started(self, call: ToolCall) -> bool:
        """Return whether the journal has a start of the call, before this execution of it."""
        return self.find_entry(call).attempts > 0

    async def on_start(self, call: ToolCall, tool: Tool[..., Any]) -> None:
        """Record that a call is about to run.

        A call with possible effects does not start before the record is durable, nor one that was decided on before
        the decision is.
        """
        execution, journal = self.execution, self.execution.journal
        ledger = self.ledgers.get(call.id) if self.ledgers else None
        is_decided = self.line.decided_tools and tool.name in self.line.list_decided_tools(execution.config)
        read_only, is_agent = tool.read_only, tool.kind is ToolKind.AGENT  # whose run must not exist without a record
        is_known = ledger is not None and ledger.has_started
        if is_known and waits_for_task(journal.run.open_call(call.id)):
            journal.check_lease()
            return  # to look at the task is no other start
        granted = ledger is not None and ledger.approval is not None
        if read_only and not (granted or is_known or is_agent):
            if is_decided:
                await journal.flush()
            return
        facts, taken = consume_decision(execution, ledger, call.id)
        if is_known or not read_only or is_agent:
            # The tool of a step of a flow may have set another key.
            is_rekeyed = tool.start_rule is not None and call.key != journal.run.open_call(call.id).call.key
            facts.append(
                e.ToolStarted(
                    call_id=call.id,
                    repeatable=tool.repeatable,
                    read_only=read_only,
                    labels=() if read_only and not is_known and not granted else tool.list_effects(call),
                    kind=tool.kind,
                    on_unknown=tool.recorded_policy,
                    key=call.key if is_rekeyed else "",
                    parameters="" if read_only or is_agent else tool.parameters_hash,
                )
            )
        self.record(*facts, taken=taken)
        if not read_only or granted or is_decided or is_agent:
            await journal.flush()
        if not read_only:
            journal.check_lease()

    # The end of a call

    def build_shown(self, result: ToolResult) -> ToolResult:
        """Return a result as listeners may see it: without its content if the run must not read it."""
        shown = EndedCall(result, self.ledgers.get(result.call_id), self)
        for decide in self.line.before_shown:
            decide(self.execution, shown)
        return shown.result

    def on_result(self, result: ToolResult) -> None:
        """Commit a call's result as it completes."""
        execution, line = self.execution, self.line
        self.unfinished -= 1
        ledger = self.ledgers.pop(result.call_id, None)
        if deciders := line.on_plain_result if ledger is None else line.on_result:
            ended = EndedCall(result, ledger, self)
            for decide in deciders:
                decide(execution, ended)
            result = ended.result
            if ledger is not None:
                self._release(ledger, ledger.spent or NO_USAGE)
            self.unfinished += len(ended.ready)
            ready = (e.StepsReady(calls=ended.ready),) if ended.ready else ()
            self.record(*ended.facts, e.ToolFinished(result=result), *ready, taken=ended.taken)
            execution.budget.record_call_finished()
            if ended.ready:
                self._start_ready(ended.ready)
        else:
            self.record(e.ToolFinished(result=result))
            execution.budget.record_call_finished()

    def _start_ready(self, ready: Sequence[ToolCall]) -> None:
        """Start calls that have become ready beside those that run.

        Those that need a decision or are beyond the budget wait for the next step of the engine, and so do all if
        something has arrived in the inbox.
        """
        execution, journal = self.execution, self.execution.journal
        waiting = [entry for entry in journal.run.open if entry.phase is not Phase.FINISHED]
        refused = {entry.call.id for entry in execution.budget.admit_calls(waiting)}
        if self.session is None or journal.has_unread_inbox or journal.has_pause_request:
            return
        for admit in self.line.ready_steps:
            ready = admit(self, ready)
        for call in ready:
            if call.id not in refused:
                self.session.add(call)

    def _release(self, ledger: CallLedger | None, usage: Usage | None = NO_USAGE) -> None:
        """Give back what is reserved for a call, for its actual usage; None: it may have been used."""
        if ledger is not None:
            for release in self.line.on_release:
                release(self.execution, ledger, usage)

    async def on_refused(self, job: ToolJob, end: CallOutcome) -> CallOutcome | None:
        """Apply the start rules to a call that is refused: if it had started, no result may say that it did not run.

        If a person has to decide, the call gets no result now.
        """
        entry = self.find_entry(job.call)
        if not entry.may_have_acted:
            return end
        found = await refuse_started_call(self.execution, entry, job.tool, end, self)
        if isinstance(found, CallOutcome):
            job.attempts = entry.attempts
            if paid := bill_settled_call(job.tool, entry):
                self.open_ledger(job.call.id).spent = paid[0].usage
            return found
        self._release(self.ledgers.get(job.call.id))
        facts, taken = consume_decision(self.execution, self.ledgers.get(job.call.id), job.call.id)
        self.execution.journal.log.warning("call_not_repeated", call=job.call.id, tool=job.call.name, why=found)
        self.record(*facts, e.ToolLost(call_id=job.call.id, reason=found), taken=taken)
        return None

    async def on_broken_off(self, job: ToolJob, end: CallOutcome, reason: str) -> CallOutcome | Literal["rerun"] | None:
        """Apply the tool's policy to a call that broke off. If a person has to decide, it gets no result now."""
        assert job.tool is not None  # the call has run  # noqa: S101
        entry = self.find_entry(job.call)
        found = await apply_policy(self.execution, entry, job.tool, self, end)
        if isinstance(found, CallOutcome):
            return found
        if found == "rerun":
            return "rerun"
        self._release(self.ledgers.get(job.call.id), None)  # it is billed when it is settled
        self.execution.journal.log.warning("call_unknown", call=job.call.id, policy="ask")
        self.record(e.ToolLost(call_id=job.call.id, reason=reason))
        return None

    def on_cut_off(self, job: ToolJob, duration_s: float) -> None:
        """Record the progress of a cut-off call, for the end of the run or the next worker."""
        journal = self.execution.journal
        self._release(self.ledgers.get(job.call.id), None if job.attempts else NO_USAGE)
        if journal.lease.lost:
            return  # the journal takes nothing more
        facts = self._build_late_start(job)
        if facts or (job.announced_attempts and self.find_entry(job.call).phase is Phase.RUNNING):
            cut = e.ToolCutOff(
                call_id=job.call.id,
                started_at=round_timestamp(job.started_at),
                duration_s=round_duration(duration_s),
                undone=job.attempts < job.announced_attempts,
            )
            try:
                self.record(*facts, cut)
            except AgentError as error:  # the cause of the cut-off propagates
                journal.log.error("cut_off_not_recorded", call=job.call.id, error=type(error).__name__)  # noqa: TRY400  a fact, no trace

    def on_limit_wait_cut_off(self, job: ToolJob) -> None:  # noqa: ARG002  they are counted
        """Count the call, for the message of a run whose time is up."""
        self.cut_off_limit_waits += 1

    def _build_late_start(self, job: ToolJob) -> list[e.Event]:
        """Return the start event of a read-only call that has run, if it is not in the journal."""
        tool = job.tool
        if tool is None or not tool.read_only or not job.attempts or self.has_started(job.call):
            return []
        since = round_timestamp(job.started_at)
        return [
            e.ToolStarted(
                call_id=job.call.id,
                repeatable=True,
                read_only=True,
                since=since,
                attempts=job.attempts,
                labels=tool.list_effects(job.call),
            )
        ]

    async def on_pause(self, job: ToolJob, pause: CallPaused) -> CallOutcome | None:
        """Record the items that a call waits for. A call that asks people too often fails."""
        call, tool = job.call, job.tool
        assert tool is not None  # the tool has raised the pause  # noqa: S101
        run, waits, state = self.execution.journal.run, pause.pending, None
        self._release(self.ledgers.get(call.id))
        if isinstance(pause, TaskPending):
            await self._record_task(job, pause)
            return None
        if isinstance(pause, InputRequired):
            rounds = (self.find_entry(call).inquiry or Inquiry()).rounds
            if rounds >= MAX_ROUNDS:
                return failed_outcome(too_many_rounds_text(call.name, rounds), ErrorType.TOOL)
            now = await self.execution.journal.store.now()
            kind = PendingKind.LOGIN if isinstance(pause, LoginRequired) else PendingKind.QUESTION
            waits = (build_pending_question(run, tool, call, pause.questions, kind=kind, rounds=rounds, now=now),)
            state = pause.state
        paused = e.ToolPaused(call_id=call.id, pending=waits, state=state)
        if job.attempts:
            self._record_pause(*self._build_late_start(job), paused)
        else:  # it has not started, so its approval, which a start consumes, is still there
            facts, taken = consume_decision(self.execution, self.ledgers.get(call.id), call.id)
            self._record_pause(*facts, paused, taken=taken)
        return None

    async def _record_task(self, job: ToolJob, pause: TaskPending) -> None:
        """Record the state of a task, and when it is looked at again, so that any process finds the task."""
        journal = self.execution.journal
        waits = build_task_wait(journal.run, job.call, pause, await journal.store.now())
        paused = e.ToolPaused(call_id=job.call.id, pending=(waits,), state=pause.state)
        self._record_pause(*self._build_late_start(job), paused)
        await journal.flush()

    def _record_pause(self, *events: e.Event, taken: Sequence[int] = ()) -> None:
        self.record(*events, taken=taken)

    async def end_interrupted_child(self, call: ToolCall, tool: Tool[..., Any], end: CallOutcome) -> CallOutcome:
        """End the child run of a call that has ended without a report, so that its effects are known."""
        return await end_interrupted_child(self.execution, tool, call, end)


@attrs.define(eq=False, repr=False)
class ToolCalls:
    """The tool calls of one execution: the state that ACT keeps between steps."""

    execution: Execution
    line: Line
    """The features of the agent at the points of the run."""

    drained_pending: bool = False
    """Whether calls ran early, and listeners have not yet been informed that no other call can run."""

    _queue: ToolQueue | None = None
    _host: RunHost | None = None

    @property
    def host(self) -> RunHost:
        """Host of the calls, created with the first of them."""
        if self._host is None:
            self._host = RunHost(self.execution, line=self.line)
        return self._host

    @property
    def queue(self) -> ToolQueue:
        """Queue of the calls, created with the first of them, since many runs have none."""
        if self._queue is None:
            config, journal, limits = self.execution.config, self.execution.journal, self.execution.config.limits
            serial = config.resolve_settings(journal.run).parallel_tool_calls is False
            self._queue = ToolQueue(
                config.registry,
                limit=1 if serial else limits.parallel,
                timeout_s=limits.tool_timeout_s,
                clock=config.clock,
                owner=journal.run.id,
                host=self.host,
                on_event=_create_tool_listener(journal) if journal.on_event is not None else None,
                retries_per_tool=limits.retries_per_tool,
                retries_per_run=limits.retries_per_run,
                retries=dict(journal.run.retries),
                drain=self.execution.options.drain,
            )
        return self._queue

    async def finish_eager_calls(self, eager: EagerCalls) -> None:
        """Commit the results of calls that started while the reply streamed, and wait for those still running."""
        await self.run_deferring_changes(self._drain_eager_calls(eager))

    async def _drain_eager_calls(self, eager: EagerCalls) -> None:
        await eager.finish()
        self.drained_pending = self.execution.journal.run.state is State.ACT  # some have no result yet
        if not self.drained_pending:
            await self.queue.emit_drained()

    async def execute_steps(self, ready: Sequence[ToolCall]) -> None:
        """Run steps of a plan, and those that become ready meanwhile."""
        host = self.host
        host.session = session = Scheduler(self.queue, grows=True)
        try:
            for call in ready:
                session.add(call)
            await session.run()
        finally:
            host.session = None

    async def run_deferring_changes(self, running: Awaitable[object]) -> None:
        """Await running calls. Listeners receive the end of a turn after its calls, as in the journal."""
        journal = self.execution.journal
        journal.defers_changes = True
        drain = self.execution.options.drain
        try:
            if drain is None:
                await running
            else:
                with drain.left():  # each call is counted by itself
                    await running
        finally:
            if journal.on_event is not None:
                journal.emit_changes()


def _create_tool_listener(journal: Journal) -> Callable[[StreamEvent], None]:
    """Return a listener that adds the run and the turn, which the queue does not know."""

    def listen(event: StreamEvent) -> None:
        if journal.on_event is None:
            return
        if isinstance(event, ToolEvent) and not event.run_id:  # else it is of an agent below
            event = attrs.evolve(event, run_id=journal.run.id, turn=current_turn(journal.run))
        journal.on_event(event)

    return listen
