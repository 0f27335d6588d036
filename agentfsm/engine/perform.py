"""The edge: one coroutine for each effect, which does it and commits what happened.

`step` is the whole control flow: take the effect, do it, commit the event. What comes next is the table's business.
New behaviour is a new event or effect and one function here, never a branch in the step. THINK, ACT and REFLECT have
files of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from agentfsm._concurrency import current_backend
from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.effects import AskModel, Effect, PendingKind, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.inbox import PRIORITY_ORDER, Cancel, Input, Pause, PostedItem
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.verdict import Action, Verdict
from agentfsm.engine.act.calls import act, queue_of
from agentfsm.engine.act.children import end_children, note_children
from agentfsm.engine.drive.budget import Budget
from agentfsm.engine.drive.drive import Drive
from agentfsm.engine.drive.engine import Engine
from agentfsm.engine.drive.gate import Gate
from agentfsm.engine.reflect import review_draft, review_results
from agentfsm.engine.thinking import think
from agentfsm.tokens.ledger import BYTE_COUNTER, BYTES_PER_TOKEN, TokenLedger, count_message

if TYPE_CHECKING:
    from agentfsm.engine.drive.journal import Journal

# The part of the window's room, for what comes in at once: the other half is for what was said before.
INPUT_SHARE: Final = 0.5
# Before them a run goes by the gate of its event loop; what is done in other states is short, and goes along.
_GATED: Final = frozenset({State.THINK, State.ACT})
# What became of an attempt at a model that was paid for.
_CUT_OFF: Final = "cut off before a usable reply came"


async def run_steps(drive: Drive, gate: Gate, *, once: bool = False) -> None:
    """Perform effects until the run is over or waits, within the active time that its limits leave."""
    limits, journal = drive.engine.limits, drive.journal
    if journal.run.open:
        await note_children(drive)
    is_wanted = not journal.run.is_over and not journal.lease.cancelled
    if is_wanted and journal.run.paused is None and journal.lease.crashes >= limits.crashes:
        return await _park(drive)
    while await _asks_last(drive, gate, once=once):
        pass
    return await journal.flush()


async def _asks_last(drive: Drive, gate: Gate, *, once: bool) -> bool:
    """Perform effects within the time that is left; whether a limit was reached, and the last answer is asked for next.

    It has time of its own, so it is performed under a deadline of its own.
    """
    limits, journal, loop = drive.engine.limits, drive.journal, current_backend()
    reached = journal.run.limit_reached
    left_s = limits.seconds - journal.run.duration_s
    if drive.engine.last_answer and reached is None:
        left_s -= limits.last_answer_s
    journal.scope = scope = loop.create_cancel_scope(deadline=loop.current_time() + left_s)
    with scope:
        while not (before := journal.run).is_over:
            if before.state in _GATED and not gate.try_pass():
                await gate.wait()
            await step(drive)
            if once or journal.run is before or journal.run.limit_reached is not reached:
                break
    if scope.cancelled_caught and (journal.run.limit_reached is reached or journal.lease.cancelled):
        await _cut(drive)
    return not once and journal.run.limit_reached is not reached and not journal.run.is_over


async def apply_requests(drive: Drive) -> None:
    """End the run or let it rest, if somebody has asked for that, and do nothing else."""
    journal = drive.journal
    if journal.run.is_over:
        return
    await note_children(drive)
    if journal.lease.cancelled:
        await _cancel(drive)
    else:
        await _stop_if_asked(drive, await journal.rows())
    await journal.flush()


async def step(drive: Drive) -> None:
    """Perform the run's effect: do it, and commit what happened. This is the whole control flow."""
    journal = drive.journal
    effect = journal.run.effect
    if journal.lease.cancelled:
        await _cancel(drive)
    elif (journal.has_news or journal.holds_pause) and await _stop_if_asked(drive, await journal.rows()):
        return
    elif effect is not None:
        await PERFORM[type(effect)](drive, effect)


async def _cut(drive: Drive) -> None:
    """Commit why the effect in flight was cut off: somebody asked for the end, or the time is up.

    Raises:
        LeaseLostError: when another worker has taken the run.
    """
    if drive.journal.lease.cancelled:
        return await _cancel(drive)
    await drive.journal.flush()
    used_s, limit_s = drive.journal.used_s, drive.engine.limits.seconds
    if (reached := drive.journal.run.limit_reached) is not None:
        return drive.end(reached, f"no last answer came within {limit_s:.1f} seconds", *_paid(drive))
    message = f"{used_s:.1f} of {limit_s:.1f} seconds used, and what ran was cut off; a larger seconds= allows more"
    return drive.stop(StopReason.TIMEOUT, message, *_paid(drive), *await end_children(drive))


async def _park(drive: Drive) -> None:
    """Pause a run that one worker after another died of: it is driven again when a person resumes it."""
    journal = drive.journal
    run, crashes = journal.run, journal.lease.crashes
    calls = ", ".join(f"{entry.call.name} ({entry.call.id})" for entry in run.open if entry.phase is not Phase.FINISHED)
    where = f"in {run.state.upper()}, turn {run.turn}{f', with open calls: {calls}' if calls else ''}"
    message = (
        f"{crashes} workers died while they drove it and no other run, {where}; see what they died of, then resume"
    )
    journal.log.error("run_paused", reason=message)
    journal.commit(e.Paused(kind=PendingKind.CRASH, message=message))
    await journal.flush()


async def _stop_if_asked(drive: Drive, rows: Sequence[PostedItem]) -> bool:
    """Whether somebody asked for the end of the run, or for a rest at this boundary between two steps; then do it."""
    if any(isinstance(row.item, Cancel) for row in rows):
        await _cancel(drive)
        return True
    wishes = [(row.number, row.item) for row in rows if isinstance(row.item, Pause)]
    if not wishes:
        return False
    wish = wishes[0][1]
    drive.journal.commit(e.Paused(by=wish.by, message=wish.message), taken=[number for number, _ in wishes])
    return True


async def _wait(drive: Drive, effect: Wait) -> None:
    """See whether what the run waits for has come; a pause ends with `resume` only."""
    run = drive.journal.run
    if run.paused is None and not run.asks:
        return await act(drive, effect)
    rows = await drive.journal.rows()  # they are seen: nobody need be woken for them again
    if run.paused is None and any(isinstance(row.item, Input) for row in rows):
        return await _observe(drive, ReadInbox())
    return None


async def _cancel(drive: Drive) -> None:
    rows = await drive.journal.store.inbox(drive.journal.run.id)
    wish = next((row.item for row in rows if isinstance(row.item, Cancel)), Cancel())
    words = [f"cancelled by {wish.by}" if wish.by else "cancelled", *([wish.message] if wish.message else [])]
    drive.fail(StopReason.CANCELLED, ": ".join(words), *_paid(drive), *await end_children(drive))


def _paid(drive: Drive) -> tuple[e.Event, ...]:
    """Return what brings into the journal what attempts at the model have cost of which no reply came."""
    usage = drive.budget.unwritten
    if not usage.tokens:
        return ()
    if drive.journal.run.state is State.REFLECT:
        return (e.Judged(verdict=Verdict(action=Action.ESCALATE, note=_CUT_OFF), usage=usage),)
    return (e.ModelFaltered(error=_CUT_OFF, usage=usage),)


async def _observe(drive: Drive, _effect: ReadInbox) -> None:
    journal = drive.journal
    rows = await journal.rows()
    if not rows:
        return journal.commit(e.Observed())
    if await _stop_if_asked(drive, rows):
        return None
    taken = _that_fit(drive, rows)
    inputs = tuple([row.item for row in taken if isinstance(row.item, Input)])
    return journal.commit(e.Observed(inputs=inputs), taken=[row.number for row in taken])


def _that_fit(drive: Drive, rows: Sequence[PostedItem]) -> list[PostedItem]:
    """Return what is taken in now, most urgent first: inputs that half of the window holds, one at least.

    The others wait for the next OBSERVE. What is no input is taken in any case: nothing is left to be decided here.
    """
    inputs = [(row, row.item) for row in rows if isinstance(row.item, Input)]
    engine = drive.engine
    inputs.sort(key=lambda pair: PRIORITY_ORDER[pair[1].priority])
    room = (
        engine.room_tokens(drive.tally, engine.settings_of(drive.journal.run))
        * INPUT_SHARE
        * (BYTES_PER_TOKEN if drive.tally.counter is BYTE_COUNTER else 1)
    )
    fitting: list[PostedItem] = []
    for row, item in inputs:
        room -= count_message(item.message, drive.tally.counter)
        if room < 0 and fitting:
            break
        fitting.append(row)
    return fitting + [row for row in rows if not isinstance(row.item, Input)]


async def _reflect(drive: Drive, effect: Reflect) -> None:
    if effect.draft is None:
        await review_results(drive, effect)
    elif await review_draft(drive, effect):
        await _conclude(drive)


async def _conclude(drive: Drive) -> None:
    """Accept the draft, unless input has arrived that it does not answer."""
    journal = drive.journal
    rows = await journal.rows()
    while not await _stop_if_asked(drive, rows):
        if any(isinstance(row.item, Input) for row in rows):
            journal.commit(e.Continued())
            return
        if await journal.conclude(e.Accepted(), taken=[row.number for row in rows]):
            return
        # What came meanwhile may be a late click, and no input: the model would go on from its own draft.
        rows = await journal.rows(afresh=True)


Performer: TypeAlias = Callable[[Drive, Any], Awaitable[None]]
PERFORM: Final[Mapping[type[Effect], Performer]] = {
    ReadInbox: _observe,
    AskModel: think,
    RunTools: act,
    Wait: _wait,
    Reflect: _reflect,
}


def drive_of(
    engine: Engine,
    journal: Journal,
    deps: Any,
    tally: TokenLedger,
    above: Budget | None = None,
    *,
    resume: bool = False,
    takeover: bool = False,
) -> Drive:
    """Return a driving call.

    Args:
        engine: Of the agent.
        journal: Of the run, under its lease.
        deps: Handed to tools.
        tally: The count of the run's tokens.
        above: The budget of the run that this one works for.
        resume: Whether somebody has resumed the run, and not a worker.
        takeover: Whether the run was taken from the worker that drove it.
    """
    return Drive(
        engine=engine,
        journal=journal,
        deps=deps,
        tally=tally,
        budget=Budget(engine.limits, journal, above, engine.last_answer),
        make_queue=queue_of,
        is_resumed=resume,
        takes_over=takeover,
        inherited=frozenset([entry.call.id for entry in journal.run.open]) if journal.lease.abandoned else frozenset(),
    )
