"""THINK: what is settled before the model is asked, asking it, and what its reply is committed as.

A reply is calls, an answer, a draft of one, or nothing that can be used; each is an event of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from agentfsm.core import events as e
from agentfsm.core.effects import AskModel
from agentfsm.core.errors import (
    AgentError,
    ContextTooLongError,
    LimitError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
)
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, Usage, replace_surrogates
from agentfsm.engine.act.calls import early_calls, minted, under_way
from agentfsm.engine.drive.drive import Drive
from agentfsm.engine.think.ask import FLAWS, Question, ask
from agentfsm.engine.think.compact import compact_after_refusal, compacted
from agentfsm.engine.think.early import EarlyCalls
from agentfsm.engine.think.offer import choose, offered
from agentfsm.ports import FinishReason, Reply
from agentfsm.streaming.stream import BudgetWarning, UsageReported

if TYPE_CHECKING:
    from agentfsm.engine.drive.journal import Journal


async def think(drive: Drive, effect: AskModel) -> None:
    """Perform AskModel: settle what the model is shown, ask it, and commit what it said."""
    engine, journal = drive.engine, drive.journal
    if (reached := journal.run.limit_reached) is not None:
        return await _think_last(drive, effect, reached)
    if (stop := drive.budget.stop()) is not None:
        return drive.stop(*stop)
    if nearing := engine.limits.find_near_limits(journal.run):
        _warn(drive, nearing)
    request = ""
    try:
        question = await _question(drive, effect)
        if not isinstance(question, Question):
            return journal.commit(question)
        request = question.digest
        if question.is_streamed and engine.registry.eager_tools and State.ACT not in journal.pause_before:
            async with early_calls(drive) as early:
                await _commit_reply(drive, request, *await ask(question, early), early)
        else:
            await _commit_reply(drive, request, *await ask(question))
    except LimitError as error:
        return drive.stop(StopReason(error.reason), str(error), *_faltered(error))
    except ModelError as error:
        return await _commit_error(drive, error, request)
    return None


async def _commit_error(drive: Drive, error: ModelError, request: str) -> None:
    """Commit that the model failed, retries included: the next turn asks again, with less to read, or the run ends."""
    journal = drive.journal
    if isinstance(error, ModelUnavailableError | ModelReplyError):
        journal.log.warning("model_faltered", turn=journal.run.turn + 1, error=type(error).__name__)
        faltered = e.ModelFaltered(error=str(error), usage=error.usage or Usage(), request=request)
        if not drive.engine.limits.fails_fast(journal.run):
            return journal.commit(faltered)
        return drive.fail(StopReason.MODEL_ERROR, str(error), faltered)
    if isinstance(error, ContextTooLongError) and (cut := await compact_after_refusal(drive, error)) is not None:
        return journal.commit(*_faltered(error), cut)
    return drive.fail(StopReason.MODEL_ERROR, str(error), *_faltered(error))


async def _think_last(drive: Drive, effect: AskModel, reached: e.LimitReached) -> None:
    """Ask for the last answer, once, and end the run: `Run.partial` has it, and the stop reason stays the limit's."""
    request = ""
    try:
        question = await _question(drive, effect)
        if not isinstance(question, Question):
            return drive.journal.commit(question)
        request = question.digest
        reply, usage = await ask(question)
    except LimitError as error:
        return drive.end(reached, f"no room was left for a last answer: {error}", *_faltered(error))
    except ModelError as error:
        faltered = e.ModelFaltered(error=str(error), usage=error.usage or Usage(), request=request)
        return drive.end(reached, f"no last answer came: {error}", faltered)
    _note_turn(drive.journal, 0, usage)
    if drive.engine.answers is not None:
        reply = drive.engine.answers.unwrapped(reply)
    if text := replace_surrogates(reply.text).strip():
        said = e.AnswerDrafted(message=AssistantMessage(text=text), usage=usage, request=request)
        return drive.end(reached, "its last answer is in run.partial", said)
    silent = e.ModelFaltered(error="the last reply said nothing", usage=usage, request=request)
    return drive.end(reached, "the last reply said nothing", silent)


async def _question(drive: Drive, effect: AskModel) -> Question | e.ToolsOffered | e.Compacted:
    """Return what the model is asked, or what has to be settled before: the tools it is told of, what it is shown."""
    engine, journal, tally = drive.engine, drive.journal, drive.tally
    if journal.run.limit_reached is None:  # the last request offers no tools
        if engine.registry.sources:
            await _refresh(drive)
        if (choice := await choose(drive)) is not None:
            return choice
    tools, settings = offered(drive), engine.settings_of(journal.run)
    tally.overhead_tokens = engine.overhead_tokens(tally.counter, tools)
    if (cut := await compacted(drive, tools, settings)) is not None:
        return cut
    request = engine.request_digest(tally, tools, settings)
    return Question(drive, effect, tools, request, settings)


async def _refresh(drive: Drive) -> None:
    """Take in what has changed among tools that come from elsewhere; one that cannot be asked leaves what was known."""
    try:
        await drive.engine.registry.refresh()
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
    drive: Drive, request: str, reply: Reply, usage: Usage, early: EarlyCalls | None = None
) -> None:
    """Commit what the model said: calls, an answer, or one that cannot be used."""
    engine, journal = drive.engine, drive.journal
    _note_turn(journal, len(reply.calls), usage)
    if engine.answers is not None:
        reply = engine.answers.unwrapped(reply)
    model = "" if reply.model == engine.model.name else reply.model
    proposed = () if reply.finish_reason is FinishReason.CONTENT_FILTER else reply.calls
    if early is not None and not proposed:
        early.drop()
    if proposed:
        calls = minted(drive, proposed, cut=reply.finish_reason is FinishReason.LENGTH)
        if mended := [call.id for call in calls if call.repaired is not None]:
            journal.log.warning("arguments_repaired", calls=", ".join(mended))
        message = AssistantMessage(text=replace_surrogates(reply.text), calls=calls, native=reply.native)
        journal.commit(e.ToolsChosen(message=message, usage=usage, request=request, model=model))
        if early is not None and early.keep(calls):
            await _finish_early(drive, early)
        return
    message = AssistantMessage(text=replace_surrogates(reply.text), native=reply.native)
    draft = partial(e.AnswerDrafted, message=message, usage=usage, request=request, model=model)
    if (flaw := FLAWS.get(reply.finish_reason)) is not None:
        # A model that thinks may be cut off before its first word, and no provider takes an empty message back.
        said = draft() if message.text.strip() else e.ModelFaltered(error=flaw, usage=usage, request=request)
        journal.commit(said, e.Failed(reason=StopReason.MODEL_ERROR, message=flaw))
    elif engine.drafts or not await journal.conclude(
        e.AnswerGiven(message=message, usage=usage, request=request, model=model)
    ):
        journal.commit(draft())
    return


async def _finish_early(drive: Drive, early: EarlyCalls) -> None:
    """Commit the results of calls that started while the reply streamed, and wait for those still in flight."""
    drive.unfinished = len(drive.journal.run.open)
    await under_way(drive, _early_ends(drive, early))


async def _early_ends(drive: Drive, early: EarlyCalls) -> None:
    await early.finish()
    drive.owes_drained = drive.unfinished > 0
    if not drive.owes_drained:
        await drive.queue.emit_drained()


def _note_turn(journal: Journal, calls: int, usage: Usage) -> None:
    run = journal.run
    turn = run.turn + 1
    if journal.log.is_info_enabled:
        journal.log.info("turn", turn=turn, calls=calls, input=usage.input_tokens, output=usage.output_tokens)
    if journal.listen is not None:
        journal.listen(UsageReported(run_id=run.id, turn=turn, usage=usage, total=run.usage + usage))
