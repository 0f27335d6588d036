"""The edge: one coroutine for each effect, which does it and commits what happened.

`step` is the whole control flow: take the effect, do it, commit the event. What comes next is the table's business.
New behaviour is a new event or effect and one function here, never a branch in the step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import attrs

from agentfsm.core import events as e
from agentfsm.core import loops
from agentfsm.core.effects import AskModel, Effect, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.errors import (
    ArgumentsError,
    LimitError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
)
from agentfsm.core.inbox import Approve, Cancel, Input, Posted, Reject, Rerun, Settle
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import AssistantMessage, Outcome, ToolCall, ToolResult, Usage, clean
from agentfsm.core.run import UNDECIDED, OpenCall, Phase
from agentfsm.engine.ask import FLAWS, ask, mint
from agentfsm.engine.engine import Engine
from agentfsm.engine.queue import ToolQueue
from agentfsm.engine.stream import ToolEvent, ToolEventType, UsageReported
from agentfsm.engine.tools import RunContext, Tool
from agentfsm.ports import Reply
from agentfsm.tally import BYTES, Tally

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.journal import Journal

UNUSUAL_SHARE: Final = 0.75
# Of the turns allowed: beyond it a run is worth a warning in the log.


@attrs.define(eq=False, kw_only=True)
class Drive:
    """One driving call: a journal, and what the caller brought along."""

    journal: Journal
    deps: Any
    queue: ToolQueue
    tally: Tally
    # Counts the run's messages, each once.
    granted: dict[str, Posted] = attrs.field(factory=dict)
    # Approvals that were read and not spent yet, by call id.
    unfinished: int = 0
    # Calls of the turn that have no result yet.

    def fail(self, reason: StopReason, message: str) -> None:
        """Commit the end of the run."""
        self.journal.log.error("run_failed", reason=reason.value, turn=self.journal.run.turn)
        self.journal.commit(e.Failed(reason=reason, message=message))


async def run_steps(engine: Engine, drive: Drive, *, once: bool = False) -> None:
    """Perform effects until the run is over or waits, within the active time that its limits leave."""
    journal = drive.journal
    left_s = max(0.0, engine.limits.seconds - journal.run.duration_s)
    with anyio.CancelScope(deadline=anyio.current_time() + left_s) as journal.scope:
        while not (before := journal.run).is_over:
            await step(engine, drive)
            if once or journal.run is before:
                break
    if journal.scope.cancelled_caught:
        await _cut(engine, drive)
    await journal.flush()


async def step(engine: Engine, drive: Drive) -> None:
    """Perform the run's effect: do it, and commit what happened. This is the whole control flow."""
    journal = drive.journal
    effect = journal.run.effect
    if journal.lease.cancelled:
        await _cancel(drive)
    elif effect is not None:
        await PERFORM[type(effect)](engine, drive, effect)


async def _cut(engine: Engine, drive: Drive) -> None:
    """Commit why the effect in flight was cut off: somebody asked for the end, or the time is up.

    Raises:
        LeaseLostError: when another worker has taken the run.
    """
    if drive.journal.lease.cancelled:
        return await _cancel(drive)
    await drive.journal.flush()
    used_s, limit_s = drive.journal.used_s, engine.limits.seconds
    return drive.fail(StopReason.TIMEOUT, f"{used_s:.1f} of {limit_s:.1f} seconds used; what ran was cut off")


async def _cancel(drive: Drive) -> None:
    rows = await drive.journal.store.inbox(drive.journal.run.id)
    wish = next((row.item for row in rows if isinstance(row.item, Cancel)), Cancel())
    words = [f"cancelled by {wish.by}" if wish.by else "cancelled", *([wish.message] if wish.message else [])]
    drive.fail(StopReason.CANCELLED, ": ".join(words))


async def _observe(_engine: Engine, drive: Drive, _effect: ReadInbox) -> None:
    journal = drive.journal
    rows = await journal.rows()
    if not rows:
        return journal.commit(e.Observed())
    if any(isinstance(row.item, Cancel) for row in rows):
        return await _cancel(drive)
    inputs = tuple([row.item for row in rows if isinstance(row.item, Input)])
    numbers = [row.number for row in rows]
    journal.commit(e.Observed(inputs=inputs), taken=numbers)
    journal.struck = max(numbers)
    return None


# THINK


async def _think(engine: Engine, drive: Drive, effect: AskModel) -> None:
    journal = drive.journal
    if (stop := engine.limits.spent(drive.journal.run)) is not None:
        return drive.fail(*stop)
    if (compacted := await _compacted(engine, drive)) is not None:
        return journal.commit(compacted)
    try:
        reply, usage = await ask(engine, journal, effect, drive.tally)
    except (ModelUnavailableError, ModelReplyError) as error:
        journal.log.warning("model_faltered", turn=effect.turn, error=type(error).__name__)
        return journal.commit(e.ModelFaltered(error=str(error), usage=error.usage or Usage()))
    except LimitError as error:
        return drive.fail(StopReason(error.reason), str(error))
    except ModelError as error:
        return drive.fail(StopReason.MODEL_ERROR, str(error))
    return await _hear(engine, drive, reply, usage)


async def _compacted(engine: Engine, drive: Drive) -> e.Compacted | None:
    """Return the event that makes room in the context window, where there is too little."""
    run, tally = drive.journal.run, drive.tally
    tally.extend_to(run.messages)
    if engine.context.fits(tally, run.window, engine.room_tokens(tally)):
        return None
    if tally.counter is BYTES:  # a sure bound that was too coarse to say yes
        counter = await engine.load_counter(engine.model.name)
        tally.overhead = engine.overhead_tokens(counter)
        tally.recount(run.messages, counter)
    room = engine.room_tokens(tally)
    start = engine.context.start(run.messages, tally, run.window, room)
    if start == run.window:
        return None
    before, after = tally.shown(run.window), tally.shown(start)
    why = f"{before:,} tokens of messages, {room:,} of room in the window of {engine.model.name}"
    return e.Compacted(start=start, tokens_before=before, tokens_after=after, why=why)


async def _hear(engine: Engine, drive: Drive, reply: Reply, usage: Usage) -> None:
    """Commit what the model said: calls, an answer, or one that cannot be used."""
    journal, run = drive.journal, drive.journal.run
    _note_turn(engine, journal, len(reply.calls), usage)
    if reply.calls:
        calls = mint(run, reply.calls, engine.registry)
        journal.commit(e.ToolsChosen(message=AssistantMessage(text=clean(reply.text), calls=calls), usage=usage))
        return
    message = AssistantMessage(text=clean(reply.text))
    draft = e.AnswerDrafted(message=message, usage=usage)
    if (flaw := FLAWS.get(reply.finish_reason)) is not None:
        journal.commit(draft, e.Failed(reason=StopReason.MODEL_ERROR, message=flaw))
    elif not await journal.conclude(e.AnswerGiven(message=message, usage=usage)):
        journal.commit(draft)


def _note_turn(engine: Engine, journal: Journal, calls: int, usage: Usage) -> None:
    run = journal.run
    turn = run.turn + 1
    if journal.log.is_read:
        journal.log.info("turn", turn=turn, calls=calls, input=usage.input_tokens, output=usage.output_tokens)
    if turn == int(engine.limits.turns * UNUSUAL_SHARE) + 1:
        journal.log.warning("many_turns", turn=turn, limit=engine.limits.turns)
    if journal.listen is not None:
        journal.listen(UsageReported(run_id=run.id, turn=turn, usage=usage, total=run.usage + usage))


# ACT


async def _act(engine: Engine, drive: Drive, effect: RunTools | Wait) -> None:
    """Run what may run; where nothing may and calls are open, leave the run as it is: it waits for a person."""
    entries, asking, intended = drive.journal.run.open, engine.registry.asking, Phase.INTENDED
    calls = effect.calls if isinstance(effect, RunTools) else ()
    drive.unfinished = len(entries)
    if [each for each in entries if each.phase is not intended or each.call.name in asking]:
        await _decide(engine, drive)
        calls = _ready(drive)
        drive.unfinished = len([each for each in drive.journal.run.open if each.phase is not Phase.FINISHED])
    if not drive.unfinished:
        drive.journal.commit(e.ToolsReturned())
    elif calls:
        await drive.queue.execute_all(calls)


def _ready(drive: Drive) -> tuple[ToolCall, ...]:
    """Return the calls that may run now: those before the first one that still needs a decision."""
    ready: list[ToolCall] = []
    for entry in drive.journal.run.open:
        if entry.phase in UNDECIDED and entry.call.id not in drive.granted:
            break
        if entry.phase is not Phase.FINISHED:
            ready.append(entry.call)
    return tuple(ready)


async def _decide(engine: Engine, drive: Drive) -> None:
    """Commit what is to be said of open calls before any runs: approvals to ask, decisions taken, calls lost."""
    rows: dict[str, Posted] = {}
    if any(entry.phase in UNDECIDED for entry in drive.journal.run.open):
        posted = await drive.journal.rows()
        rows = {row.item.call_id: row for row in posted if not isinstance(row.item, Input | Cancel)}
    facts: list[e.Event] = []
    taken: list[int] = []
    for entry in drive.journal.run.open:
        row = rows.get(entry.call.id)
        if row is not None and isinstance(row.item, Approve | Rerun):
            drive.granted[entry.call.id] = row  # spent in the very append that marks the call as started
        elif (fact := _fact(engine, drive.journal.run, entry, row)) is not None:
            facts.append(fact)
            taken += [row.number] if row is not None else []
    if facts:
        drive.journal.commit(*facts, taken=taken)


def _fact(engine: Engine, run: Run, entry: OpenCall, row: Posted | None) -> e.Event | None:
    """Return what is to be recorded of an open call before any call runs, if anything."""
    call, tool = entry.call, engine.registry.get(entry.call.name)
    now = engine.clock.now()
    match entry.phase, row.item if row is not None else None:
        case Phase.INTENDED, _ if tool is not None and _needs_approval(run, tool, call):
            return e.ApprovalAsked(call_id=call.id, expires_at=now + tool.approval_expires_s)
        case Phase.RUNNING, _ if tool is None or not tool.repeatable:
            return e.ToolLost(call_id=call.id)
        case Phase.ASKED, Reject(by=by, message=message):
            return e.ToolFinished(result=_rejected(call, message), by=by)
        case Phase.ASKED, None if entry.expires_at is not None and now >= entry.expires_at:
            return e.ToolFinished(result=_rejected(call, "nobody answered in time"))
        case Phase.LOST, Settle(by=by, outcome=outcome, content=content):
            result = ToolResult(call_id=call.id, name=call.name, outcome=outcome, content=content)
            return e.ToolFinished(result=result, by=by)
    return None


def _needs_approval(run: Run, tool: Tool[..., Any], call: ToolCall) -> bool:
    """Whether a person has to be asked; a call that will not run anyway is answered, and nobody is asked."""
    if not tool.requires_approval or tool.name in run.disabled or call.malformed is not None:
        return False
    try:
        tool.bind(call.arguments)
    except ArgumentsError:
        return False
    return True


def _rejected(call: ToolCall, message: str) -> ToolResult:
    content = f"not run: a person rejected it{f' ({message})' if message else ''}. Do not try it again unasked."
    return ToolResult(call_id=call.id, name=call.name, outcome=Outcome.REJECTED, content=content)


async def _starting(drive: Drive, call: ToolCall, tool: Tool[..., Any]) -> None:
    """Record that a call is about to run; what may have an effect does not start before that is durable."""
    journal = drive.journal
    facts: list[e.Event] = []
    row = drive.granted.pop(call.id, None)
    if row is not None and isinstance(row.item, Approve | Rerun):
        facts.append(e.ApprovalGiven(call_id=call.id, by=row.item.by))
    if not tool.read_only:
        facts.append(e.ToolStarted(call_id=call.id, repeatable=tool.repeatable))
    if facts:
        journal.commit(*facts, taken=[row.number] if row is not None else ())
    if not tool.read_only:
        await journal.flush()


def _finished(drive: Drive, result: ToolResult) -> None:
    """Record a call's result, as it comes; the last one ends the turn, in the same append."""
    journal = drive.journal
    finished = e.ToolFinished(result=result)
    drive.unfinished -= 1
    if drive.unfinished:
        journal.commit(finished)
    else:
        journal.commit(finished, e.ToolsReturned())
    if journal.log.is_read:
        tool = result.name if result.name in drive.queue.registry else "(unknown)"  # what a model invents is no fact
        outcome, wall_s = result.outcome.value, result.duration_s
        journal.log.info("call", call=result.call_id, tool=tool, outcome=outcome, wall_s=wall_s)


# REFLECT


async def _reflect(engine: Engine, drive: Drive, effect: Reflect) -> None:
    journal = drive.journal
    if effect.draft is not None:
        return await _judge(drive)
    if (stop := engine.limits.spent(drive.journal.run)) is not None:
        return drive.fail(*stop)
    early = drive.journal.run.turn < loops.REPEATS
    loop = None if early else loops.find(drive.journal.run.messages, engine.registry.polls)
    if loop is None:
        return journal.commit(e.Continued())
    if drive.journal.run.loops >= len(_LADDER) and not loop.hint:
        return drive.fail(StopReason.LOOP_DETECTED, f"{loop.what}, after {drive.journal.run.loops} warnings")
    journal.log.warning("loop", turn=drive.journal.run.turn, what=loop.what)
    return journal.commit(_warning(drive.journal.run, loop))


async def _judge(drive: Drive) -> None:
    """Accept the draft, unless input has arrived that it does not answer."""
    journal = drive.journal
    rows = await journal.rows()
    if any(isinstance(row.item, Cancel) for row in rows):
        return await _cancel(drive)
    unread = any(isinstance(row.item, Input) for row in rows)
    if unread or not await journal.conclude(e.Accepted(), taken=[row.number for row in rows]):
        journal.commit(e.Continued())
    return None


_LADDER: Final = (
    "You are repeating yourself: {what}. The results will not change. Do something else, or answer with what you have.",
    "You are repeating yourself: {what}. {tools} may not be called any more in this run. Answer with what you have.",
)
# What a finding says, the first and the second time; the third stops the run.


def _warning(run: Run, loop: loops.Loop) -> e.Continued:
    """Return the event that tells the model of a loop: first a nudge, then the tools are withdrawn."""
    if loop.hint:
        return e.Continued(note=f"Note: {loop.what}, though the arguments differ.")
    note = _LADDER[run.loops].format(what=loop.what, tools=", ".join(loop.tools))
    return e.Continued(note=note, loop=True, disabled=loop.tools if run.loops else ())


Performer: TypeAlias = Callable[[Engine, Drive, Any], Awaitable[None]]
PERFORM: Final[Mapping[type[Effect], Performer]] = {
    ReadInbox: _observe,
    AskModel: _think,
    RunTools: _act,
    Wait: _act,
    Reflect: _reflect,
}


def drive_of(engine: Engine, journal: Journal, deps: Any, tally: Tally) -> Drive:
    """Return a driving call with its queue, which records each call's start and end in the journal."""
    tally.overhead = engine.overhead_tokens(tally.counter)
    queue = ToolQueue(
        engine.registry,
        limit=engine.limits.parallel,
        timeout_s=engine.limits.tool_timeout_s,
        clock=engine.clock,
        owner=journal.run.id,
        context=lambda call, deadline: _context(drive, call, deadline),
        starting=lambda call, tool: _starting(drive, call, tool),
        finished=lambda result: _finished(drive, result),
        listen=_tool_listener(journal) if journal.listen is not None else None,
        disabled=lambda: journal.run.disabled,
    )
    drive = Drive(journal=journal, deps=deps, queue=queue, tally=tally)
    return drive


def _context(drive: Drive, call: ToolCall, deadline: float) -> RunContext[Any]:
    run, listen = drive.journal.run, drive.journal.listen

    async def report(message: str) -> None:
        if listen is not None:
            kind = ToolEventType.PROGRESS
            listen(ToolEvent(type=kind, run_id=run.id, turn=run.turn, call_id=call.id, tool=call.name, message=message))

    return RunContext(
        deps=drive.deps,
        run_id=run.id,
        turn=run.turn,
        call_id=call.id,
        idempotency_key=call.key,
        attempt=max(1, run.entry(call.id).attempts),
        deadline=deadline,
        user=run.header.user,
        roles=run.header.roles,
        metadata=run.metadata,
        report=report,
    )


def _tool_listener(journal: Journal) -> Callable[[ToolEvent], None]:
    """Return a listener that adds the run and the turn, which the queue does not know."""

    def listen(event: ToolEvent) -> None:
        if journal.listen is not None:
            journal.listen(attrs.evolve(event, run_id=journal.run.id, turn=journal.run.turn))

    return listen
