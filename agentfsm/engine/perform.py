"""The edge: one coroutine for each effect, which does it and commits what happened.

`step` is the whole control flow: take the effect, do it, commit the event. What comes next is the table's business.
New behaviour is a new event or effect and one function here, never a branch in the step. ACT has a file of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.effects import AskModel, Effect, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.errors import (
    AgentError,
    ContextTooLongError,
    LimitError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
)
from agentfsm.core.inbox import URGENCY, Cancel, Input, Pause, Posted
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, Usage, encodable
from agentfsm.core.verdict import Action, Verdict
from agentfsm.engine.act.calls import act, early_calls, minted, queue_of
from agentfsm.engine.act.children import end_children, note_children
from agentfsm.engine.drive.budget import Budget
from agentfsm.engine.drive.drive import Drive
from agentfsm.engine.drive.engine import Engine
from agentfsm.engine.drive.gate import Gate
from agentfsm.engine.reflect import review_draft, review_results
from agentfsm.engine.think.ask import FLAWS, Question, ask
from agentfsm.engine.think.compact import compact_after_refusal, compacted
from agentfsm.engine.think.early import EarlyCalls
from agentfsm.engine.think.offer import choose, offered
from agentfsm.engine.watch.stream import BudgetWarning, UsageReported
from agentfsm.ports import FinishReason, Reply
from agentfsm.tally import BYTES, BYTES_PER_TOKEN, Tally, count_message
from agentfsm.threads import event_loop

if TYPE_CHECKING:
    from agentfsm.engine.drive.journal import Journal

# The part of the window's room, for what comes in at once: the other half is for what was said before.
INPUT_SHARE: Final = 0.5
# Before them a run goes by the gate of its event loop; what is done in other states is short, and goes along.
_GATED: Final = frozenset({State.THINK, State.ACT})
# What became of an attempt at a model that was paid for.
_CUT_OFF: Final = "cut off before a usable reply came"


async def run_steps(engine: Engine, drive: Drive, gate: Gate, *, once: bool = False) -> None:
    """Perform effects until the run is over or waits, within the active time that its limits leave."""
    journal = drive.journal
    left_s = max(0.0, engine.limits.seconds - journal.run.duration_s)
    if journal.run.open:
        await note_children(engine, drive)
    is_wanted = not journal.run.is_over and not journal.lease.cancelled
    if is_wanted and journal.lease.crashes >= engine.limits.crashes:
        return await _park(engine, drive)
    loop = event_loop()
    with loop.create_cancel_scope(deadline=loop.current_time() + left_s) as journal.scope:
        while not (before := journal.run).is_over:
            if before.state in _GATED and not gate.try_pass():
                await gate.wait()
            await step(engine, drive)
            if once or journal.run is before:
                break
    if journal.scope.cancelled_caught:
        await _cut(engine, drive)
    return await journal.flush()


async def apply_requests(engine: Engine, drive: Drive) -> None:
    """End the run or let it rest, if somebody has asked for that, and do nothing else."""
    journal = drive.journal
    if journal.run.is_over:
        return
    await note_children(engine, drive)
    if journal.lease.cancelled:
        await _cancel(engine, drive)
    else:
        await _stop_if_asked(engine, drive, await journal.rows())
    await journal.flush()


async def step(engine: Engine, drive: Drive) -> None:
    """Perform the run's effect: do it, and commit what happened. This is the whole control flow."""
    journal = drive.journal
    effect = journal.run.effect
    if journal.lease.cancelled:
        await _cancel(engine, drive)
    elif (journal.has_news or journal.holds_pause) and await _stop_if_asked(engine, drive, await journal.rows()):
        return
    elif effect is not None:
        await PERFORM[type(effect)](engine, drive, effect)


async def _cut(engine: Engine, drive: Drive) -> None:
    """Commit why the effect in flight was cut off: somebody asked for the end, or the time is up.

    Raises:
        LeaseLostError: when another worker has taken the run.
    """
    if drive.journal.lease.cancelled:
        return await _cancel(engine, drive)
    await drive.journal.flush()
    used_s, limit_s = drive.journal.used_s, engine.limits.seconds
    message = f"{used_s:.1f} of {limit_s:.1f} seconds used, and what ran was cut off; a larger seconds= allows more"
    return drive.fail(StopReason.TIMEOUT, message, *_paid(drive), *await end_children(engine, drive))


async def _park(engine: Engine, drive: Drive) -> None:
    """End a run that has cost one worker after another: it is not tried again by itself."""
    journal = drive.journal
    run, crashes = journal.run, journal.lease.crashes
    calls = ", ".join(f"{entry.call.name} ({entry.call.id})" for entry in run.open if entry.phase is not Phase.FINISHED)
    where = f"in {run.state.upper()}, turn {run.turn}{f', with open calls: {calls}' if calls else ''}"
    message = f"{crashes} workers died over it {where}; see what they died of, then go on from a fork"
    drive.fail(StopReason.PARKED, message, *await end_children(engine, drive))
    await journal.flush()


async def _stop_if_asked(engine: Engine, drive: Drive, rows: Sequence[Posted]) -> bool:
    """Whether somebody asked for the end of the run, or for a rest at this boundary between two steps; then do it."""
    if any(isinstance(row.item, Cancel) for row in rows):
        await _cancel(engine, drive)
        return True
    wishes = [(row.number, row.item) for row in rows if isinstance(row.item, Pause)]
    if not wishes:
        return False
    wish = wishes[0][1]
    drive.journal.commit(e.Paused(by=wish.by, message=wish.message), taken=[number for number, _ in wishes])
    return True


async def _wait(engine: Engine, drive: Drive, effect: Wait) -> None:
    """See whether what the run waits for has come; a pause ends with `resume` only."""
    run = drive.journal.run
    if run.paused is None and not run.asks:
        return await act(engine, drive, effect)
    rows = await drive.journal.rows()  # they are seen: nobody need be woken for them again
    if run.paused is None and any(isinstance(row.item, Input) for row in rows):
        return await _observe(engine, drive, ReadInbox())
    return None


async def _cancel(engine: Engine, drive: Drive) -> None:
    rows = await drive.journal.store.inbox(drive.journal.run.id)
    wish = next((row.item for row in rows if isinstance(row.item, Cancel)), Cancel())
    words = [f"cancelled by {wish.by}" if wish.by else "cancelled", *([wish.message] if wish.message else [])]
    drive.fail(StopReason.CANCELLED, ": ".join(words), *_paid(drive), *await end_children(engine, drive))


def _paid(drive: Drive) -> tuple[e.Event, ...]:
    """Return what brings into the journal what attempts at the model have cost of which no reply came."""
    usage = drive.budget.unwritten
    if not usage.tokens:
        return ()
    if drive.journal.run.state is State.REFLECT:
        return (e.Judged(verdict=Verdict(action=Action.ESCALATE, note=_CUT_OFF), usage=usage),)
    return (e.ModelFaltered(error=_CUT_OFF, usage=usage),)


async def _observe(engine: Engine, drive: Drive, _effect: ReadInbox) -> None:
    journal = drive.journal
    rows = await journal.rows()
    if not rows:
        return journal.commit(e.Observed())
    if await _stop_if_asked(engine, drive, rows):
        return None
    taken = _that_fit(engine, drive, rows)
    inputs = tuple([row.item for row in taken if isinstance(row.item, Input)])
    return journal.commit(e.Observed(inputs=inputs), taken=[row.number for row in taken])


def _that_fit(engine: Engine, drive: Drive, rows: Sequence[Posted]) -> list[Posted]:
    """Return what is taken in now, most urgent first: inputs that half of the window holds, one at least.

    The others wait for the next OBSERVE. What is no input is taken in any case: nothing is left to be decided here.
    """
    inputs = [(row, row.item) for row in rows if isinstance(row.item, Input)]
    inputs.sort(key=lambda pair: URGENCY[pair[1].priority])
    room = (
        engine.room_tokens(drive.tally, engine.settings_of(drive.journal.run))
        * INPUT_SHARE
        * (BYTES_PER_TOKEN if drive.tally.counter is BYTES else 1)
    )
    fitting: list[Posted] = []
    for row, item in inputs:
        room -= count_message(item.message, drive.tally.counter)
        if room < 0 and fitting:
            break
        fitting.append(row)
    return fitting + [row for row in rows if not isinstance(row.item, Input)]


# THINK


async def _think(engine: Engine, drive: Drive, effect: AskModel) -> None:
    journal = drive.journal
    if (stop := drive.budget.stop()) is not None:
        return drive.fail(*stop)
    if nearing := engine.limits.nearing(journal.run):
        _warn(drive, nearing)
    request = ""
    try:
        question = await _question(engine, drive, effect)
        if not isinstance(question, Question):
            return journal.commit(question)
        request = question.digest
        if question.is_streamed and engine.registry.early and State.ACT not in journal.pause_before:
            async with early_calls(engine, drive) as early:
                await _commit_reply(drive, question, *await ask(question, early), early)
        else:
            await _commit_reply(drive, question, *await ask(question))
    except (ModelUnavailableError, ModelReplyError) as error:
        journal.log.warning("model_faltered", turn=effect.turn, error=type(error).__name__)
        return journal.commit(e.ModelFaltered(error=str(error), usage=error.usage or Usage(), request=request))
    except LimitError as error:
        return drive.fail(StopReason(error.reason), str(error), *_faltered(error))
    except ContextTooLongError as error:
        if (cut := await compact_after_refusal(engine, drive, error)) is None:
            return drive.fail(StopReason.MODEL_ERROR, str(error), *_faltered(error))
        return journal.commit(*_faltered(error), cut)
    except ModelError as error:
        return drive.fail(StopReason.MODEL_ERROR, str(error), *_faltered(error))
    return None


async def _question(engine: Engine, drive: Drive, effect: AskModel) -> Question | e.ToolsOffered | e.Compacted:
    """Return what the model is asked, or what has to be settled before: the tools it is told of, what it is shown."""
    journal, tally = drive.journal, drive.tally
    if engine.registry.sources:
        await _refresh(engine, drive)
    if (choice := await choose(engine, drive)) is not None:
        return choice
    tools, settings = offered(engine, drive), engine.settings_of(journal.run)
    tally.overhead = engine.overhead_tokens(tally.counter, tools)
    if (cut := await compacted(engine, drive, tools, settings)) is not None:
        return cut
    request = engine.request_digest(tally, tools, settings)
    return Question(engine, journal, effect, tally, drive.budget, tools, request, settings)


async def _refresh(engine: Engine, drive: Drive) -> None:
    """Take in what has changed among tools that come from elsewhere; one that cannot be asked leaves what was known."""
    try:
        await engine.registry.refresh()
    except AgentError as error:
        drive.journal.log.warning("tools_not_refreshed", error=str(error))


def _faltered(error: LimitError | ModelError) -> tuple[e.ModelFaltered, ...]:
    """Return what brings into the journal what was paid for before an error that ends the run."""
    usage = error.usage or Usage()
    return (e.ModelFaltered(error=str(error), usage=usage),) if usage.tokens else ()


def _warn(drive: Drive, nearing: Iterable[tuple[str, float, float]]) -> None:
    """Tell of limits that the run nears, of each once in a driving call."""
    journal, run = drive.journal, drive.journal.run
    for limit, used, of in nearing:
        if limit in drive.warned:
            continue
        drive.warned |= {limit}
        journal.log.warning("budget_warning", which=limit, used=used, limit=of)
        if journal.listen is not None:
            journal.listen(BudgetWarning(run_id=run.id, turn=run.turn, limit=limit, used=used, of=of))


async def _commit_reply(
    drive: Drive,
    question: Question,
    reply: Reply,
    usage: Usage,
    early: EarlyCalls | None = None,
) -> None:
    """Commit what the model said: calls, an answer, or one that cannot be used."""
    journal, request = question.journal, question.digest
    _note_turn(journal, len(reply.calls), usage)
    if question.engine.answers is not None:
        reply = question.engine.answers.unwrapped(reply)
    model = "" if reply.model == question.engine.model.name else reply.model
    proposed = () if reply.finish_reason is FinishReason.CONTENT_FILTER else reply.calls
    if early is not None and not proposed:
        early.drop()
    if journal.run.is_last:
        return _end_with_last_words(drive, reply, usage, request)
    if proposed:
        calls = minted(drive, proposed, cut=reply.finish_reason is FinishReason.LENGTH)
        if mended := [call.id for call in calls if call.repaired is not None]:
            journal.log.warning("arguments_repaired", calls=", ".join(mended))
        message = AssistantMessage(text=encodable(reply.text), calls=calls, native=reply.native)
        journal.commit(e.ToolsChosen(message=message, usage=usage, request=request, model=model))
        if early is not None and early.keep(calls):
            await _finish_early(drive, early)
        return None
    message = AssistantMessage(text=encodable(reply.text), native=reply.native)
    draft = partial(e.AnswerDrafted, message=message, usage=usage, request=request, model=model)
    if (flaw := FLAWS.get(reply.finish_reason)) is not None:
        # A model that thinks may be cut off before its first word, and no provider takes an empty message back.
        said = draft() if message.text.strip() else e.ModelFaltered(error=flaw, usage=usage, request=request)
        journal.commit(said, e.Failed(reason=StopReason.MODEL_ERROR, message=flaw))
    elif question.engine.drafts or not await journal.conclude(
        e.AnswerGiven(message=message, usage=usage, request=request, model=model)
    ):
        journal.commit(draft())
    return None


def _end_with_last_words(drive: Drive, reply: Reply, usage: Usage, request: str) -> None:
    """End a run with the last words that it was asked for: `Run.partial`, and no answer."""
    why = "the run went round in circles after every warning; its last words are in run.partial"
    if text := encodable(reply.text).strip():
        said: e.Event = e.AnswerDrafted(message=AssistantMessage(text=text), usage=usage, request=request)
    else:
        said = e.ModelFaltered(error="the last reply said nothing", usage=usage, request=request)
    drive.fail(StopReason.LOOP_DETECTED, why, said)


async def _finish_early(drive: Drive, early: EarlyCalls) -> None:
    """Commit the results of calls that started while the reply streamed, and wait for those still in flight."""
    drive.unfinished = len(drive.journal.run.open)
    await early.finish()
    drive.owes_drained = drive.unfinished > 0
    if not drive.owes_drained:
        await drive.queue.tell_drained()


def _note_turn(journal: Journal, calls: int, usage: Usage) -> None:
    run = journal.run
    turn = run.turn + 1
    if journal.log.is_read:
        journal.log.info("turn", turn=turn, calls=calls, input=usage.input_tokens, output=usage.output_tokens)
    if journal.listen is not None:
        journal.listen(UsageReported(run_id=run.id, turn=turn, usage=usage, total=run.usage + usage))


# REFLECT


async def _reflect(engine: Engine, drive: Drive, effect: Reflect) -> None:
    if effect.draft is None:
        await review_results(engine, drive, effect)
    elif await review_draft(engine, drive, effect):
        await _conclude(engine, drive)


async def _conclude(engine: Engine, drive: Drive) -> None:
    """Accept the draft, unless input has arrived that it does not answer."""
    journal = drive.journal
    rows = await journal.rows()
    while not await _stop_if_asked(engine, drive, rows):
        if any(isinstance(row.item, Input) for row in rows):
            journal.commit(e.Continued())
            return
        if await journal.conclude(e.Accepted(), taken=[row.number for row in rows]):
            return
        # What came meanwhile may be a late click, and no input: the model would go on from its own draft.
        rows = await journal.rows(afresh=True)


Performer: TypeAlias = Callable[[Engine, Drive, Any], Awaitable[None]]
PERFORM: Final[Mapping[type[Effect], Performer]] = {
    ReadInbox: _observe,
    AskModel: _think,
    RunTools: act,
    Wait: _wait,
    Reflect: _reflect,
}


def drive_of(engine: Engine, journal: Journal, deps: Any, tally: Tally, above: Budget | None = None) -> Drive:
    """Return a driving call: `above` is the budget of the run that this one works for."""
    budget = Budget(engine.limits, journal, above)
    queue = partial(queue_of, engine)
    return Drive(journal=journal, deps=deps, tally=tally, budget=budget, make_queue=queue)
