"""ACT: decisions are taken in, calls run, and what happens to each is a fact in the journal before it counts."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import (
    UNDECIDED_PHASES,
    Inquiry,
    OpenCall,
    Phase,
    build_idempotency_key,
    parse_index,
    replace_arguments,
)
from agentfsm.core.effects import RunTools, Wait
from agentfsm.core.errors import AgentError
from agentfsm.core.inbox import Approve, GiveInput, PostedItem, Rerun
from agentfsm.core.messages import ErrorType, Media, Outcome, ToolCall, ToolResult, replace_surrogates
from agentfsm.core.times import round_duration, round_timestamp
from agentfsm.engine.act.children import broken_off, returned
from agentfsm.engine.act.decide import decide, inquired, needs_approval
from agentfsm.engine.drive.access import absence, context_of, turn_of, why_barred
from agentfsm.engine.drive.drive import Drive
from agentfsm.engine.drive.family import Parent
from agentfsm.engine.think.early import Attempt, EarlyCalls
from agentfsm.engine.think.offer import found_text
from agentfsm.ports import ProposedCall
from agentfsm.streaming.stream import StreamEvent, ToolEvent, ToolEventType
from agentfsm.tokens.ledger import BYTE_COUNTER, estimate_tokens
from agentfsm.tools.builtin import find_builtin
from agentfsm.tools.question_validation import MAX_ROUNDS
from agentfsm.tools.queue.dispatch import CallOutcome, QueueHost, ToolJob, failed_outcome
from agentfsm.tools.queue.result_text import build_decided_result, too_many_rounds_text
from agentfsm.tools.queue.scheduler import ToolQueue
from agentfsm.tools.run_context import CallPaused, InputRequired, RunContext, ToolKind
from agentfsm.tools.schema.arguments import check_object, normalise_text, repair_object
from agentfsm.tools.schema.binding import BoundArguments
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.drive.journal import Journal
    from agentfsm.tools.registry import ToolRegistry

# Characters of arguments that are no JSON object, kept for the record and shown to the model.
MALFORMED_CHARS: Final = 2_000
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_-]")


async def act(drive: Drive, effect: RunTools | Wait) -> None:
    """Run what may run; where nothing may and calls are open, leave the run as it is: it waits for a person."""
    entries, asking, intended = drive.journal.run.open, drive.engine.registry.interactive_tools, Phase.INTENDED
    calls = effect.calls if isinstance(effect, RunTools) else ()
    drive.unfinished = len(entries)
    special = [each for each in entries if each.phase is not intended or each.call.name in asking]
    refused = drive.budget.admit(_unfinished(entries) if special else entries)
    if refused:
        _refuse(drive, refused)
    if special or refused:
        await decide(drive)
        calls, waiting = _ready(drive), _unfinished(drive.journal.run.open)
        drive.unfinished = len(waiting)
        drive.budget.admit(waiting)  # some may have their result now
    if drive.owes_drained and not (calls and drive.unfinished):
        await drive.queue.emit_drained()
    drive.owes_drained = False
    if not drive.unfinished:
        drive.journal.commit(e.ToolsReturned())
    elif calls:
        await under_way(drive, drive.queue.execute_all(calls))


async def under_way(drive: Drive, running: Awaitable[object]) -> None:
    """Await calls that run. A turn that ends with them is told after them, as it stands in the journal."""
    journal = drive.journal
    journal.holds_changes = True
    try:
        await running
    finally:
        if journal.listen is not None:
            journal.tell_changes()


def _unfinished(entries: Sequence[OpenCall]) -> list[OpenCall]:
    return [each for each in entries if each.phase is not Phase.FINISHED]


def _refuse(drive: Drive, entries: Sequence[OpenCall]) -> None:
    """Commit the results of calls that the budget has no place for, before anybody is asked about them."""
    text = drive.budget.refusal()
    results = [build_decided_result(entry, Outcome.SKIPPED, text) for entry in entries]
    drive.journal.log.warning("calls_refused", turn=drive.journal.run.turn, calls=len(results))
    drive.journal.commit(
        *[e.ToolFinished(result=attrs.evolve(each, error_type=ErrorType.BUDGET)) for each in results],
    )


def _ready(drive: Drive) -> tuple[ToolCall, ...]:
    """Return the calls that may run now: those before the first one that still needs a decision."""
    ready: list[ToolCall] = []
    drive.begun = frozenset([entry.call.id for entry in drive.journal.run.open if entry.attempts])
    for entry in drive.journal.run.open:
        call_id = entry.call.id
        if entry.phase in UNDECIDED_PHASES and call_id not in drive.granted and call_id not in drive.woken:
            break
        if entry.phase is not Phase.FINISHED:
            row = drive.granted.get(call_id)
            ready.append(entry.call if row is None else _as_approved(drive.journal.run, entry.call, row))
    return tuple(ready)


def _as_approved(run: Run, call: ToolCall, row: PostedItem) -> ToolCall:
    """Return the call as a person let it run: with other arguments, where they changed them."""
    edited = row.item.arguments if isinstance(row.item, Approve) else None
    return call if edited is None else replace_arguments(run.header, call, edited)


@attrs.define(eq=False, repr=False)
class RunHost(QueueHost):
    """Serves the calls of a run: what happens to each is committed, and what may not run is refused."""

    drive: Drive
    held: list[ToolResult | list[e.Event] | ToolEvent] | None = None
    # What became of calls that started before the reply was in the journal; None where it is committed as it comes.
    is_dropped: bool = False
    # Whether the reply that asked for them is not used.

    def find_tool(self, registry: ToolRegistry, name: str) -> Tool[..., Any] | None:
        """Return the tool of that name: the agent's, or one that the engine brings along."""
        return registry.get(name) or find_builtin(self.drive.journal.run, name) or self._answering(name)

    def _answering(self, name: str) -> Tool[..., Any] | None:
        """Return the tool whose arguments are the answer; a call of it that comes here came too early."""
        answers = self.drive.engine.answers
        return None if answers is None or answers.tool is None or answers.tool.name != name else answers.tool

    def list_tool_names(self, registry: ToolRegistry) -> Sequence[str]:
        """Return the names of the tools that the run has and may use."""
        return [tool.name for tool in registry if self.check_available(tool) is None]

    def position_in_reply(self, call: ToolCall, index: int) -> int:  # noqa: ARG002  of those that run now
        """Return the call's place in the reply: some of its calls may have run before."""
        return parse_index(call.id)

    def build_context(self, call: ToolCall, tool: Tool[..., Any], deadline: float) -> RunContext[Any]:
        """Make what a tool may know of its call."""
        run = self.drive.journal.run
        entry = _entry_of(run, call)
        return attrs.evolve(
            context_of(self.drive),
            call_id=call.id,
            idempotency_key=call.key,
            fencing_token=self.drive.journal.lease.token,
            attempt=max(1, entry.attempts),
            inquiry=entry.inquiry or Inquiry(),
            deadline=deadline,
            kept=self._kept,
            find_result_parts=self._kept_parts,
            find_tools=self._find_tools,
            parent=self._parent() if tool.kind is ToolKind.AGENT else None,
        )

    async def _find_tools(self, query: str) -> str:
        return await found_text(self.drive, query)

    def _kept(self, call_id: str) -> str | None:
        return next((result.content for result in self._results(call_id)), None)

    def _kept_parts(self, call_id: str) -> tuple[Media, ...]:
        return next((result.parts for result in self._results(call_id)), ())

    def _results(self, call_id: str) -> Iterator[ToolResult]:
        messages = self.drive.journal.run.messages
        return (m for m in messages if isinstance(m, ToolResult) and m.call_id == call_id)

    def _parent(self) -> Parent:
        journal, drive = self.drive.journal, self.drive
        return Parent(
            run=journal.run,
            store=journal.store,
            clock=journal.clock,
            budget=drive.budget,
            depth_limit=drive.engine.limits.depth,
            takeover=drive.takes_over,
        )

    def check_available(self, tool: Tool[..., Any]) -> CallOutcome | None:
        """Say why no call of a tool can run, whatever its arguments, or None."""
        return absence(self.drive, tool)

    def check_permitted(self, call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
        """Say why a valid call may not run: not with these arguments, or not approved."""
        return why_barred(self.drive, tool, bound) or self._unapproved(call, tool, bound)

    def _unapproved(self, call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
        """Refuse a call that could not run when others were asked for their word, and now could."""
        if not tool.is_interactive or call.id in self.drive.granted:
            return None
        if self.drive.journal.run.open_call(call.id).phase is not Phase.INTENDED:
            return None
        if tool.waits_for is None and not needs_approval(tool, tool.to_namespace(bound)):
            return None
        text = f"{call.name} needs a person's word, which nobody was asked for: call it again to have them asked."
        return failed_outcome(text, ErrorType.BLOCKED, retryable=True)

    async def on_start(self, call: ToolCall, tool: Tool[..., Any]) -> None:
        """Record that a call is about to run; what may have an effect does not start before that is durable."""
        read_only, granted, journal = tool.read_only, call.id in self.drive.granted, self.drive.journal
        is_known = call.id in self.drive.begun
        if read_only and not granted and not is_known:
            return
        facts, taken = self._spent(call.id)
        if is_known or not read_only:
            facts.append(e.ToolStarted(call_id=call.id, repeatable=tool.repeatable, read_only=read_only))
        journal.commit(*facts, taken=taken)
        if not read_only or granted:
            await journal.flush()
        if not read_only:
            journal.check_time()

    def _spent(self, call_id: str) -> tuple[list[e.Event], list[int]]:
        """Spend the decision that lets a call run: return what is to be recorded of it, and its row in the inbox."""
        row = self.drive.granted.pop(call_id, None)
        if row is None or not isinstance(row.item, Approve | Rerun | GiveInput):
            return [], []
        if isinstance(row.item, GiveInput):
            return [e.InputGiven(call_id=call_id, by=row.item.by, answers=row.item.answers)], [row.number]
        fact = e.ApprovalGiven(call_id=call_id, by=row.item.by)
        if isinstance(row.item, Approve) and row.item.arguments is not None:
            run = self.drive.journal.run
            call = _as_approved(run, run.open_call(call_id).call, row)
            fact = attrs.evolve(fact, arguments=call.arguments, key=call.key)
        return [fact], [row.number]

    def on_tool_error(self, call: ToolCall, error: BaseException) -> None:
        """Tell in the log what no result of a call shows: where its tool has failed."""
        self.drive.journal.log.warning("tool_raised", call=call.id, tool=call.name, exc_info=error)

    def on_result(self, result: ToolResult) -> None:
        """Record a call's result, as it comes; the last one ends the turn, in the same append."""
        if self.held is not None:
            self.held.append(result)
            return
        journal, drive = self.drive.journal, self.drive
        drive.unfinished -= 1
        if drive.budget.below:
            result = returned(drive, result)
        finished = e.ToolFinished(result=result)
        ending = () if drive.unfinished else (e.ToolsReturned(),)
        facts, taken = self._spent(result.call_id)  # where it was let run, and could not
        journal.commit(*facts, finished, *ending, taken=taken)
        drive.budget.ended()
        if journal.log.is_info_enabled:
            # What a model invents is no fact.
            tool = result.tool if result.tool in drive.queue.registry else "(unknown)"
            outcome, wall_s = result.outcome.value, result.duration_s
            journal.log.info("call", call=result.call_id, tool=tool, outcome=outcome, wall_s=wall_s)

    def release(self) -> None:
        """Record what was held back: the reply that asked for it is in the journal."""
        held, self.held = self.held or [], None
        for each in held:
            if isinstance(each, ToolResult):
                self.on_result(each)
            elif isinstance(each, ToolEvent):
                self.drive.queue.emit(each)
            else:
                self.drive.journal.commit(*each)

    def drop(self) -> None:
        """Discard the results of early calls, since the reply that asked for them is not used; watchers see the end."""
        self.is_dropped = True
        for each in self.held or ():
            if isinstance(each, ToolEvent):
                self.drive.queue.emit(_dropped(each))
        if self.held is not None:
            self.held.clear()

    def hear(self, event: StreamEvent) -> None:
        """Tell what happens to calls; the end of one whose result is held back comes with that."""
        if self.held is None or not isinstance(event, ToolEvent) or not event.is_end:
            self.drive.queue.emit(event)
        elif self.is_dropped:
            self.drive.queue.emit(_dropped(event))
        else:
            self.held.append(event)

    def on_cut_off(self, job: ToolJob, duration_s: float) -> None:
        """Record how far a cut-off call has come, for the end of the run or the next worker."""
        journal = self.drive.journal
        if self.held is not None or journal.lease.lost:
            return  # the journal does not know the call, or takes nothing more
        facts = self._late_start(job)
        if facts or (job.announced_attempts and _entry_of(journal.run, job.call).phase is Phase.RUNNING):
            cut = e.ToolCutOff(
                call_id=job.call.id,
                started_at=round_timestamp(job.started_at),
                duration_s=round_duration(duration_s),
                undone=job.attempts < job.announced_attempts,
            )
            try:
                journal.commit(*facts, cut)
            except AgentError as error:  # what has cut the call off goes on as it is
                journal.log.error("cut_off_not_recorded", call=job.call.id, error=type(error).__name__)  # noqa: TRY400  a fact, no trace

    def _late_start(self, job: ToolJob) -> list[e.Event]:
        """Return the start of a call that is read-only and has run, where the journal does not tell of it."""
        run, tool = self.drive.journal.run, job.tool
        if tool is None or not tool.read_only or not job.attempts or _entry_of(run, job.call).attempts:
            return []
        since = round_timestamp(job.started_at)
        return [e.ToolStarted(call_id=job.call.id, repeatable=True, read_only=True, since=since, attempts=job.attempts)]

    async def on_pause(self, job: ToolJob, pause: CallPaused) -> CallOutcome | None:
        """Record what a call waits for; one that asks people again and again comes to an end."""
        call, tool = job.call, job.tool
        assert tool is not None  # it has raised the pause  # noqa: S101
        run, waits, state = self.drive.journal.run, pause.pending, None
        if isinstance(pause, InputRequired):
            rounds = (_entry_of(run, call).inquiry or Inquiry()).rounds
            if rounds >= MAX_ROUNDS:
                return failed_outcome(too_many_rounds_text(call.name, rounds), ErrorType.TOOL)
            now = await self.drive.journal.store.now()
            waits = (inquired(run, tool, call, pause, rounds=rounds, now=now),)
            state = pause.state
        facts = [*self._late_start(job), e.ToolPaused(call_id=call.id, pending=waits, state=state)]
        if self.held is None:
            self.drive.journal.commit(*facts)
        else:
            self.held.append(facts)
        return None

    async def end_interrupted_child(self, call: ToolCall, tool: Tool[..., Any], end: CallOutcome) -> CallOutcome:
        """End an agent whose call has ended without a word of it: its run must not stay open, nor hide what it did."""
        return await broken_off(self.drive, tool, call, end)

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text, exactly where a vocabulary is loaded."""
        counter = self.drive.tally.counter
        return estimate_tokens(text) if counter is BYTE_COUNTER else counter.count(text)


def _dropped(event: ToolEvent) -> ToolEvent:
    """Return the end of a call whose result counts for nothing."""
    text = "dropped, with the reply that asked for it"
    return attrs.evolve(event, type=ToolEventType.ERROR, success=False, message=text, result=None)


def _entry_of(run: Run, call: ToolCall) -> OpenCall:
    """Return the open call; as it was chosen, where the reply that chose it is not in the journal yet."""
    found = next((entry for entry in run.open if entry.call.id == call.id), None)
    return OpenCall(call=call) if found is None else found


def early_calls(drive: Drive) -> EarlyCalls:
    """Return what starts read-only calls while a reply streams; their results wait for the reply to be journalled."""

    def prepare() -> Attempt:
        host = RunHost(drive, held=[])
        drive.budget.begin_calls()
        queue = attrs.evolve(drive.queue, host=host, watch=host.hear if drive.queue.is_watched else None)
        return Attempt(queue, host.release, host.drop, drive.budget.take)

    return EarlyCalls(prepare, mint=lambda index, call: mint(drive, index, call))


def minted(drive: Drive, proposed: Sequence[ProposedCall], *, cut: bool) -> tuple[ToolCall, ...]:
    """Return the calls of a reply, one or more; the last is set aside where the reply was cut before its arguments.

    No arguments at all are as good as `{}` otherwise, and Anthropic itself writes `{}` for what it has cut off. With
    them, the tool would run by its defaults, which the model did not choose.
    """
    calls = [mint(drive, index, call) for index, call in enumerate(proposed)]
    if cut and calls[-1].arguments == "{}" and calls[-1].malformed is None:
        calls[-1] = attrs.evolve(calls[-1], malformed="the reply was cut off at the length limit before they came")
    return tuple(calls)


def mint(drive: Drive, index: int, proposed: ProposedCall) -> ToolCall:
    """Give a call of the reply its id and key, mend its arguments if need be, and set aside what is no JSON object."""
    run = drive.journal.run
    call_id = f"t{run.turns_before + run.turn + 1}.{index}"
    known = drive.queue.host.find_tool(drive.queue.registry, proposed.name) is not None
    arguments = normalise_text(proposed.arguments)
    flaw, mended = check_object(arguments), None
    if flaw is not None:
        mended = repair_object(proposed.arguments)
    call = ToolCall(
        id=call_id,
        name=proposed.name if known else _legal_name(proposed.name),
        invented=not known,
        arguments=arguments if flaw is None else mended or "{}",
        provider_id=replace_surrogates(proposed.id),
        malformed=None
        if flaw is None or mended
        else f"{flaw}; it began: {replace_surrogates(arguments[:MALFORMED_CHARS])}",
        repaired=replace_surrogates(arguments[:MALFORMED_CHARS]) if mended else None,
    )
    object.__setattr__(
        call, "key", build_idempotency_key(run.header, call)
    )  # nobody has seen it yet: a copy would cost its making
    return call


def _legal_name(name: str) -> str:
    """Return an invented name in the letters that a provider takes back."""
    return _NOT_IN_NAMES.sub("_", name)[:64] or "unnamed"


def queue_of(drive: Drive) -> ToolQueue:
    """Return the queue of a driving call, which records each call's start and end in the journal."""
    engine, journal, limits = drive.engine, drive.journal, drive.engine.limits
    serial = engine.settings_of(journal.run).parallel_tool_calls is False
    return ToolQueue(
        engine.registry,
        limit=1 if serial else limits.parallel,
        timeout_s=limits.tool_timeout_s,
        clock=engine.clock,
        owner=journal.run.id,
        host=RunHost(drive),
        on_event=_tool_listener(journal) if journal.listen is not None else None,
        retries_per_tool=limits.retries_per_tool,
        retries_per_run=limits.retries_per_run,
        retries=dict(journal.run.retries),
    )


def _tool_listener(journal: Journal) -> Callable[[StreamEvent], None]:
    """Return a listener that adds the run and the turn, which the queue does not know."""

    def listen(event: StreamEvent) -> None:
        if journal.listen is None:
            return
        if isinstance(event, ToolEvent) and not event.run_id:  # else it is of an agent below
            event = attrs.evolve(event, run_id=journal.run.id, turn=turn_of(journal.run))
        journal.listen(event)

    return listen
