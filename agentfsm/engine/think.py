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
from agentfsm.core.messages import AssistantMessage, replace_surrogates
from agentfsm.core.stops import find_near_limits
from agentfsm.core.usage import Usage
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.model_calls.compaction import compact_after_refusal, compact_if_needed
from agentfsm.engine.model_calls.eager_calls import EagerCalls
from agentfsm.engine.model_calls.request import UNUSABLE_ANSWERS, PreparedRequest, ask_model
from agentfsm.engine.model_calls.tool_selection import list_offered_tools, select_tools
from agentfsm.engine.tool_calls.host import build_calls, create_eager_calls, run_deferring_changes
from agentfsm.ports.model import FinishReason, Reply
from agentfsm.streaming.stream import BudgetWarning, UsageReported

if TYPE_CHECKING:
    from agentfsm.engine.execution.journal import Journal


async def think(execution: Execution, effect: AskModel) -> None:
    """Perform AskModel: settle what the model is shown, ask it, and commit what it said."""
    engine, journal = execution.config, execution.journal
    if (reached := journal.run.limit_reached) is not None:
        return await _ask_last_answer(execution, effect, reached)
    if (stop := execution.budget.find_stop_reason()) is not None:
        return execution.stop_at_limit(*stop)
    if nearing := find_near_limits(journal.run, engine.limits):
        _warn_of_limits(execution, nearing)
    request = ""
    try:
        question = await _prepare_request(execution, effect)
        if not isinstance(question, PreparedRequest):
            return journal.commit(question)
        request = question.digest
        if question.is_streamed and engine.registry.eager_tools and State.ACT not in journal.pause_before:
            async with create_eager_calls(execution) as early:
                await _commit_reply(execution, request, *await ask_model(question, early), early)
        else:
            await _commit_reply(execution, request, *await ask_model(question))
    except LimitError as error:
        return execution.stop_at_limit(StopReason(error.reason), str(error), *_build_faltered(error))
    except ModelError as error:
        return await _commit_error(execution, error, request)
    return None


async def _commit_error(execution: Execution, error: ModelError, request: str) -> None:
    """Commit that the model failed, retries included: the next turn asks again, with less to read, or the run ends."""
    journal = execution.journal
    if isinstance(error, ModelUnavailableError | ModelReplyError):
        journal.log.warning("model_faltered", turn=journal.run.turn + 1, error=type(error).__name__)
        faltered = e.ModelFaltered(error=str(error), usage=error.usage or Usage(), request=request)
        if not execution.config.limits.fails_fast(journal.run.header):
            return journal.commit(faltered)
        return execution.fail(StopReason.MODEL_ERROR, str(error), faltered)
    if isinstance(error, ContextTooLongError) and (cut := await compact_after_refusal(execution, error)) is not None:
        return journal.commit(*_build_faltered(error), cut)
    return execution.fail(StopReason.MODEL_ERROR, str(error), *_build_faltered(error))


async def _ask_last_answer(execution: Execution, effect: AskModel, reached: e.LimitReached) -> None:
    """Ask for the last answer, once, and end the run: `Run.partial` has it, and the stop reason stays the limit's."""
    request = ""
    try:
        question = await _prepare_request(execution, effect)
        if not isinstance(question, PreparedRequest):
            return execution.journal.commit(question)
        request = question.digest
        reply, usage = await ask_model(question)
    except LimitError as error:
        return execution.end_after_last_answer(
            reached, f"no room was left for a last answer: {error}", *_build_faltered(error)
        )
    except ModelError as error:
        faltered = e.ModelFaltered(error=str(error), usage=error.usage or Usage(), request=request)
        return execution.end_after_last_answer(reached, f"no last answer came: {error}", faltered)
    _report_turn(execution.journal, 0, usage)
    if execution.config.output_spec is not None:
        reply = execution.config.output_spec.unwrap_reply(reply)
    if text := replace_surrogates(reply.text).strip():
        said = e.AnswerDrafted(message=AssistantMessage(text=text), usage=usage, request=request)
        return execution.end_after_last_answer(reached, "its last answer is in run.partial", said)
    silent = e.ModelFaltered(error="the last reply said nothing", usage=usage, request=request)
    return execution.end_after_last_answer(reached, "the last reply said nothing", silent)


async def _prepare_request(execution: Execution, effect: AskModel) -> PreparedRequest | e.ToolsOffered | e.Compacted:
    """Return what the model is asked, or what has to be settled before: the tools it is told of, what it is shown."""
    engine, journal, tally = execution.config, execution.journal, execution.ledger
    if journal.run.limit_reached is None:  # the last request offers no tools
        if engine.registry.sources:
            await _refresh_tools(execution)
        if (choice := await select_tools(execution)) is not None:
            return choice
    tools, settings = list_offered_tools(execution), engine.resolve_settings(journal.run)
    tally.overhead_tokens = engine.overhead_tokens(tally.counter, tools)
    if (cut := await compact_if_needed(execution, tools, settings)) is not None:
        return cut
    request = engine.request_digest(tally, tools, settings)
    return PreparedRequest(execution, effect, tools, request, settings)


async def _refresh_tools(execution: Execution) -> None:
    """Take in what has changed among tools that come from elsewhere; one that cannot be asked leaves what was known."""
    try:
        await execution.config.registry.refresh()
    except AgentError as error:
        execution.journal.log.warning("tools_not_refreshed", error=str(error))


def _build_faltered(error: LimitError | ModelError) -> tuple[e.ModelFaltered, ...]:
    """Return what brings into the journal what was paid for before an error that ends the run."""
    usage = error.usage or Usage()
    return (e.ModelFaltered(error=str(error), usage=usage),) if usage.tokens else ()


def _warn_of_limits(execution: Execution, nearing: Iterable[tuple[str, float, float]]) -> None:
    """Tell of limits that the run nears, of each once in a driving call."""
    journal, run = execution.journal, execution.journal.run
    for limit, used, of in nearing:
        if limit in execution.warned_limits:
            continue
        execution.warned_limits |= {limit}
        journal.log.warning("budget_warning", which=limit, used=used, limit=of)
        if journal.on_event is not None:
            journal.on_event(BudgetWarning(run_id=run.id, turn=run.turn, limit=limit, used=used, of=of))


async def _commit_reply(
    execution: Execution, request: str, reply: Reply, usage: Usage, eager: EagerCalls | None = None
) -> None:
    """Commit what the model said: calls, an answer, or one that cannot be used."""
    engine, journal = execution.config, execution.journal
    _report_turn(journal, len(reply.calls), usage)
    if engine.output_spec is not None:
        reply = engine.output_spec.unwrap_reply(reply)
    model = "" if reply.model == engine.model.name else reply.model
    proposed = () if reply.finish_reason is FinishReason.CONTENT_FILTER else reply.calls
    if eager is not None and not proposed:
        eager.discard()
    if proposed:
        calls = build_calls(execution, proposed, is_truncated=reply.finish_reason is FinishReason.LENGTH)
        if mended := [call.id for call in calls if call.repaired is not None]:
            journal.log.warning("arguments_repaired", calls=", ".join(mended))
        message = AssistantMessage(text=replace_surrogates(reply.text), calls=calls, native=reply.native)
        journal.commit(e.ToolsChosen(message=message, usage=usage, request=request, model=model))
        if eager is not None and eager.keep_matching(calls):
            await _finish_eager_calls(execution, eager)
        return
    message = AssistantMessage(text=replace_surrogates(reply.text), native=reply.native)
    draft = partial(e.AnswerDrafted, message=message, usage=usage, request=request, model=model)
    if (flaw := UNUSABLE_ANSWERS.get(reply.finish_reason)) is not None:
        # A model that thinks may be cut off before its first word, and no provider takes an empty message back.
        said = draft() if message.text.strip() else e.ModelFaltered(error=flaw, usage=usage, request=request)
        journal.commit(said, e.Failed(reason=StopReason.MODEL_ERROR, message=flaw))
    elif engine.reviews_answers or not await journal.try_commit_final(
        e.AnswerGiven(message=message, usage=usage, request=request, model=model)
    ):
        journal.commit(draft())
    return


async def _finish_eager_calls(execution: Execution, eager: EagerCalls) -> None:
    """Commit the results of calls that started while the reply streamed, and wait for those still in flight."""
    execution.unfinished_calls = len(execution.journal.run.open)
    await run_deferring_changes(execution, _drain_eager_calls(execution, eager))


async def _drain_eager_calls(execution: Execution, eager: EagerCalls) -> None:
    await eager.finish()
    execution.drained_pending = execution.unfinished_calls > 0
    if not execution.drained_pending:
        await execution.queue.emit_drained()


def _report_turn(journal: Journal, calls: int, usage: Usage) -> None:
    run = journal.run
    turn = run.turn + 1
    if journal.log.is_info_enabled:
        journal.log.info("turn", turn=turn, calls=calls, input=usage.input_tokens, output=usage.output_tokens)
    if journal.on_event is not None:
        journal.on_event(UsageReported(run_id=run.id, turn=turn, usage=usage, total=run.usage + usage))
