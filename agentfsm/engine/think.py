"""THINK: prepare the request, ask the model, and turn its reply into an event.

A reply is calls, an answer, a draft of one, or nothing that can be used; each is an event of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

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
from agentfsm.core.labels import join_labels
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, HostedContent, replace_surrogates
from agentfsm.core.stops import find_near_limits
from agentfsm.core.usage import Purpose, Usage
from agentfsm.engine.advance_plan import RecordedPlan, advance_plan
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.run_end import end_after_last_answer, fail, stop_at_limit
from agentfsm.engine.model_calls.compaction import compact_after_refusal, compact_if_needed
from agentfsm.engine.model_calls.eager_calls import EagerCalls
from agentfsm.engine.model_calls.outgoing_text import filter_reply
from agentfsm.engine.model_calls.reply import find_other_model
from agentfsm.engine.model_calls.request import UNUSABLE_ANSWERS, PreparedRequest, ask_model
from agentfsm.engine.model_calls.tool_selection import select_tools
from agentfsm.engine.model_calls.view import build_view
from agentfsm.engine.recall import recall
from agentfsm.engine.repeat_answer import repeat_answer
from agentfsm.engine.tool_calls.host import ToolCalls, build_calls, create_eager_calls
from agentfsm.ports.guards import list_hosted_labels
from agentfsm.ports.model import FinishReason, Reply
from agentfsm.streaming.stream import BudgetWarning, UsageReported

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall
    from agentfsm.engine.execution.journal import Journal

# Turns of a run above which a warning is logged: most tasks need fewer.
EXPECTED_TURNS: Final = 8


async def think(execution: Execution, effect: AskModel, calls: ToolCalls) -> StepOutcome:
    """Prepare the request, ask the model, and return its reply as an outcome."""
    config, journal = execution.config, execution.journal
    if (reached := journal.run.limit_reached) is not None:
        return await _ask_last_answer(execution, effect, reached)
    if (stop := execution.budget.find_stop_reason()) is not None:
        return stop_at_limit(execution, *stop)
    if near := find_near_limits(journal.run, config.limits):
        _warn_of_limits(execution, near)
    has_plans = config.planner is not None or journal.run.plan is not None
    has_more = has_plans or config.memory is not None or execution.answer_claim is not None
    if has_more and (earlier := await _act_before_request(execution)) is not None:
        return earlier
    digest = ""
    try:
        request = await _prepare_request(execution, effect)
        if not isinstance(request, PreparedRequest):
            return StepOutcome((request,))
        digest = request.digest
        if request.is_streamed and config.registry.eager_tools and _may_start_early(journal):
            return await _ask_with_eager_calls(execution, request, calls)
        return _read_reply(execution, digest, *await ask_model(request))
    except LimitError as error:
        return stop_at_limit(execution, StopReason(error.reason), str(error))
    except ModelError as error:
        return await _read_error(execution, error, digest)


async def _act_before_request(execution: Execution) -> StepOutcome | None:
    """Repeat an answer, search the memory, or make or advance a plan; None if the model is to be asked."""
    config, claim = execution.config, execution.answer_claim
    if claim is not None and (repeated := await repeat_answer(execution, claim)) is not None:
        return repeated
    if config.memory is not None and (recalled := await recall(execution, config.memory)) is not None:
        return recalled
    if config.planner is None and execution.journal.run.plan is None:
        return None
    if config.registry.sources:
        await _refresh_tools(execution)
    return await advance_plan(execution, config.planner or RecordedPlan())


def _may_start_early(journal: Journal) -> bool:
    """Return whether calls may start before the reply is recorded: no pause and no approval comes before them."""
    plan = journal.run.plan
    return State.ACT not in journal.pause_before and (plan is None or not plan.guards_calls)


async def _read_error(execution: Execution, error: ModelError, digest: str) -> StepOutcome:
    """Return the outcome of a failed request, after retries: a shorter request in the next turn, or the end."""
    journal = execution.journal
    if isinstance(error, ModelUnavailableError | ModelReplyError):
        journal.log.warning("model_faltered", turn=journal.run.turn + 1, error=type(error).__name__)
        faltered = e.ModelFaltered(error=str(error), usage=error.usage or Usage(), request=digest)
        if not execution.config.limits.fails_fast(journal.run.header):
            return StepOutcome((faltered,))
        return fail(execution, StopReason.MODEL_ERROR, str(error), faltered)
    if isinstance(error, ContextTooLongError) and (cut := await compact_after_refusal(execution, error)) is not None:
        return StepOutcome((*_build_faltered(error), cut))
    return fail(execution, StopReason.MODEL_ERROR, str(error), *_build_faltered(error))


async def _ask_last_answer(execution: Execution, effect: AskModel, reached: e.LimitReached) -> StepOutcome:
    """Request the last answer and end the run.

    The answer is in `Run.partial`, and the stop reason remains the limit.
    """
    digest = ""
    try:
        request = await _prepare_request(execution, effect)
        if not isinstance(request, PreparedRequest):
            return StepOutcome((request,))
        digest = request.digest
        reply, usage = await ask_model(request)
    except LimitError as error:
        message = f"no room was left for a last answer: {error}"
        return end_after_last_answer(execution, reached, message)
    except ModelError as error:
        faltered = e.ModelFaltered(
            error=str(error), usage=error.usage or Usage(), request=digest, purpose=Purpose.LAST_ANSWER
        )
        return end_after_last_answer(execution, reached, f"no last answer came: {error}", faltered)
    _report_turn(execution, reply, 0, usage)
    if execution.config.output_spec is not None:
        reply = execution.config.output_spec.unwrap_reply(reply)
    hosted = _label_hosted(execution, reply.hosted) if reply.hosted else None
    if text := replace_surrogates(reply.text).strip():
        last = AssistantMessage(text=text, thinking=replace_surrogates(reply.thinking), hosted=hosted)
        filtered: tuple[str, ...] = ()
        if execution.config.guards and execution.config.filters_texts:
            last, filtered, _ = filter_reply(execution, last)
        said = e.AnswerDrafted(
            message=last,
            usage=usage,
            request=digest,
            model="" if reply.model == execution.config.model.name else reply.model,
            filtered=filtered,
            tier=reply.tier,
            purpose=Purpose.LAST_ANSWER,
        )
        return end_after_last_answer(execution, reached, "its last answer is in run.partial", said)
    silent = e.ModelFaltered(
        error="the last reply said nothing", usage=usage, request=digest, purpose=Purpose.LAST_ANSWER
    )
    return end_after_last_answer(execution, reached, "the last reply said nothing", silent)


async def _prepare_request(
    execution: Execution, effect: AskModel
) -> PreparedRequest | e.ToolsOffered | e.Reminded | e.Compacted:
    """Return the request, or an event to commit before it: the tool selection, a reminder or a compaction."""
    engine, journal = execution.config, execution.journal
    if journal.run.limit_reached is None:  # the last request offers no tools
        if engine.registry.sources:
            await _refresh_tools(execution)
        if (choice := await select_tools(execution)) is not None:
            return choice
    run = journal.run
    if (engine.reminder is not None or run.reminder) and run.reminded_turn != run.turn:  # at most once in a turn
        text = "" if engine.reminder is None else engine.reminder(run)
        if text != run.reminder:
            return e.Reminded(text=str(text), prompts=getattr(text, "sources", ()))
    view = build_view(execution)
    if (cut := await compact_if_needed(view)) is not None:
        return cut
    return PreparedRequest(execution, effect, view, view.digest)


async def _refresh_tools(execution: Execution) -> None:
    """Refresh the tools from sources. If a source cannot be reached, its known tools are kept."""
    try:
        await execution.config.registry.refresh()
    except AgentError as error:
        execution.journal.log.warning("tools_not_refreshed", error=str(error))


def _build_faltered(error: ModelError) -> tuple[e.ModelFaltered, ...]:
    """Return the event that records the usage paid before an error that ends the run."""
    usage = error.usage or Usage()
    return (e.ModelFaltered(error=str(error), usage=usage),) if usage.tokens else ()


def _warn_of_limits(execution: Execution, near: Iterable[tuple[str, float, float]]) -> None:
    """Report limits that the run nears, each of them once in an execution."""
    journal, run, budget = execution.journal, execution.journal.run, execution.budget
    for limit, used, of in near:
        if limit in budget.warned_limits:
            continue
        budget.warned_limits |= {limit}
        journal.log.warning("budget_warning", which=limit, used=used, limit=of)
        if journal.on_event is not None:
            journal.on_event(BudgetWarning(run_id=run.id, turn=run.turn, limit=limit, used=used, of=of))


def _read_reply(execution: Execution, digest: str, reply: Reply, usage: Usage) -> StepOutcome:
    """Return the outcome of a reply: calls, an answer, or an unusable answer."""
    config, journal = execution.config, execution.journal
    _report_turn(execution, reply, len(reply.calls), usage)
    if config.output_spec is not None:
        reply = config.output_spec.unwrap_reply(reply)
    model = "" if reply.model == config.model.name else reply.model
    served = _find_other_model(execution, reply) if reply.served_model else ""
    facts: dict[str, Any] = {  # of the request and its reply, in each event that records one
        "usage": usage,
        "request": digest,
        "model": model,
        "tier": reply.tier,
        "served_model": served,
    }
    text, hosted = replace_surrogates(reply.text), _label_hosted(execution, reply.hosted) if reply.hosted else None
    thinking = replace_surrogates(reply.thinking) if reply.thinking else ""
    is_filtered, refusal = config.guards and config.filters_texts, ""
    filtered: tuple[str, ...] = ()
    if reply.calls and reply.finish_reason is not FinishReason.CONTENT_FILTER and not reply.unanswered:
        calls = build_calls(execution, reply.calls, is_truncated=reply.finish_reason is FinishReason.LENGTH)
        if repaired := [call.id for call in calls if call.repaired is not None]:
            journal.log.warning("arguments_repaired", calls=", ".join(repaired))
        message = AssistantMessage(text=text, calls=calls, native=reply.native, thinking=thinking, hosted=hosted)
        if is_filtered:
            message, filtered, _ = filter_reply(execution, message)
        return StepOutcome((e.ToolsChosen(message=message, filtered=filtered, **facts),))
    message = AssistantMessage(
        text=text,
        native=None if reply.calls else reply.native,  # whose calls would need results
        thinking=thinking,
        hosted=hosted,
        paused=reply.finish_reason is FinishReason.PAUSED,
    )
    if is_filtered:
        message, filtered, refusal = filter_reply(execution, message)
    draft = partial(e.AnswerDrafted, message=message, filtered=filtered, **facts)
    if flaw := reply.unanswered or UNUSABLE_ANSWERS.get(reply.finish_reason):
        # A thinking model may be cut off before its first word, and providers refuse an empty message.
        is_empty = not (message.text.strip() or message.hosted)
        said = e.ModelFaltered(error=flaw, usage=usage, request=digest) if is_empty else draft()
        return StepOutcome((said, e.Failed(reason=StopReason.MODEL_ERROR, message=flaw)))
    if refusal:
        return fail(execution, StopReason.GUARD, f"the answer is withheld by the rule {refusal}", draft())
    has_read = config.guards and hosted is not None and hosted.labels
    if config.reviews_answers or has_read or message.paused:
        return StepOutcome((draft(),))

    async def review() -> StepOutcome:
        return StepOutcome((draft(),))

    answer = e.AnswerGiven(message=message, filtered=filtered, **facts)
    return StepOutcome((answer,), otherwise=review)


def _find_other_model(execution: Execution, reply: Reply) -> str:
    """Return the name of the model that replied, and warn of it, if it is not the snapshot that was asked; else ""."""
    asked = reply.model or execution.config.model.name
    served = find_other_model(asked, reply.served_model)
    if served:
        execution.journal.log.warning("other_model", asked=asked, served=served)
    return served


def _label_hosted(execution: Execution, hosted: HostedContent) -> HostedContent:
    """Return the outcome of the provider's own tools, with the labels that the agent declares for them."""
    names = {call.tool.partition(".")[0] for call in hosted.calls}
    tools = [tool for tool in execution.config.registry.hosted if tool.name in names or not names]
    return (
        attrs.evolve(hosted, labels=join_labels(*[list_hosted_labels(tool, execution.config.guards) for tool in tools]))
        if tools
        else hosted
    )


async def _ask_with_eager_calls(execution: Execution, request: PreparedRequest, calls: ToolCalls) -> StepOutcome:
    """Ask the model, and start read-only calls while its reply streams.

    Those calls continue while the step commits the reply, and end in the scope of the outcome.
    """
    async with AsyncExitStack() as stack:
        eager = await stack.enter_async_context(create_eager_calls(execution, calls.queue))
        outcome = _read_reply(execution, request.digest, *await ask_model(request, eager))
        chosen = outcome.events[0]
        if not isinstance(chosen, e.ToolsChosen):
            eager.discard()
            return outcome._replace(scope=stack.pop_all())
        return outcome._replace(scope=_finish_after_commit(stack.pop_all(), calls, eager, chosen.message.calls))


@asynccontextmanager
async def _finish_after_commit(
    stack: AsyncExitStack, calls: ToolCalls, eager: EagerCalls, chosen: Sequence[ToolCall]
) -> AsyncIterator[None]:
    """Commit the results of early calls after their reply, and wait for those still running."""
    async with stack:
        yield
        if eager.keep_matching(chosen):
            await calls.finish_eager_calls(eager)


def _report_turn(execution: Execution, reply: Reply, calls: int, usage: Usage) -> None:
    """Report a reply to the log, to the stream, and a refusal to the answer cache, which does not keep it."""
    journal, run = execution.journal, execution.journal.run
    if reply.finish_reason is FinishReason.REFUSAL and execution.answer_claim is not None:
        execution.answer_claim.has_refusal = True
    turn = run.turn + 1
    if journal.log.is_info_enabled:
        journal.log.info("turn", turn=turn, calls=calls, input=usage.input_tokens, output=usage.output_tokens)
    if turn == EXPECTED_TURNS + 1:
        journal.log.warning("more_turns_than_expected", turn=turn, expected=EXPECTED_TURNS)
    if journal.on_event is not None:
        journal.on_event(UsageReported(run_id=run.id, turn=turn, usage=usage, total=run.usage + usage))
