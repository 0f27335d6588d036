"""THINK: prepare the request, ask the model, and turn its reply into an event.

A reply is calls, an answer, a draft of one, or nothing that can be used; each is an event of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core import events as e
from agentfsm.core.effects import AskModel
from agentfsm.core.errors import LimitError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, replace_surrogates
from agentfsm.core.usage import Purpose, Usage
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.run_end import end_after_last_answer, fail, stop_at_limit
from agentfsm.engine.line import Line
from agentfsm.engine.model_calls.eager_calls import EagerCalls
from agentfsm.engine.model_calls.received import ReceivedReply, build_calls
from agentfsm.engine.model_calls.reply import find_other_model
from agentfsm.engine.model_calls.request import UNUSABLE_ANSWERS, PreparedRequest, ask_model
from agentfsm.engine.tool_calls.eager_host import create_eager_calls
from agentfsm.engine.tool_calls.host import ToolCalls
from agentfsm.ports.model import FinishReason, Reply
from agentfsm.streaming.stream import UsageReported

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall

# Turns of a run above which a warning is logged: most tasks need fewer.
EXPECTED_TURNS: Final = 8


async def think(execution: Execution, effect: AskModel, calls: ToolCalls) -> StepOutcome:
    """Prepare the request, ask the model, and return its reply as an outcome."""
    line, reached = calls.line, execution.journal.run.limit_reached
    request = PreparedRequest(execution, effect, holds_texts=line.holds_texts)
    try:
        for decide in line.before_request if reached is None else line.before_last_answer:
            if (decided := await decide(request)) is not None:
                return decided
        if reached is not None:
            return _read_last_answer(line, request, reached, *await ask_model(request))
        if execution.config.registry.eager_tools and request.is_streamed and _may_start_early(execution, line):
            return await _ask_with_eager_calls(request, calls)
        return _read_reply(line, request, *await ask_model(request))
    except LimitError as error:
        if reached is None:
            return stop_at_limit(execution, StopReason(error.reason), str(error))
        return end_after_last_answer(execution, reached, f"no room was left for a last answer: {error}")
    except ModelError as error:
        if reached is None:
            return await _read_error(line, request, error)
        faltered = e.ModelFaltered(
            error=str(error), usage=error.usage or Usage(), request=request.digest, purpose=Purpose.LAST_ANSWER
        )
        return end_after_last_answer(execution, reached, f"no last answer came: {error}", faltered)


def _may_start_early(execution: Execution, line: Line) -> bool:
    """Return whether calls may start before the reply is recorded: no pause and no decision comes before them."""
    journal = execution.journal
    return State.ACT not in journal.pause_before and not any(holds(journal.run) for holds in line.holds_calls)


async def _read_error(line: Line, request: PreparedRequest, error: ModelError) -> StepOutcome:
    """Return the outcome of a failed request, after retries: the run goes on in the next turn, or ends."""
    execution, journal, usage = request.execution, request.execution.journal, error.usage or Usage()
    if isinstance(error, ModelUnavailableError | ModelReplyError):
        journal.log.warning("model_faltered", turn=journal.run.turn + 1, error=type(error).__name__)
        faltered = e.ModelFaltered(error=str(error), usage=usage, request=request.digest)
        if not execution.config.limits.fails_fast(journal.run.header):
            return StepOutcome((faltered,))
        return fail(execution, StopReason.MODEL_ERROR, str(error), faltered)
    paid = (e.ModelFaltered(error=str(error), usage=usage),) if usage.tokens else ()
    for decide in line.on_request_error:
        if (remedy := await decide(execution, error)) is not None:
            return StepOutcome((*paid, remedy))
    return fail(execution, StopReason.MODEL_ERROR, str(error), *paid)


def _receive(
    line: Line, request: PreparedRequest, reply: Reply, usage: Usage, *, is_last: bool
) -> tuple[ReceivedReply, AssistantMessage, dict[str, Any]]:
    """Report a reply, and return it as the features of the agent leave it, its message and the facts for its event."""
    execution, journal, run = request.execution, request.execution.journal, request.execution.journal.run
    turn, proposed = run.turn + 1, () if is_last else reply.calls
    if turn == EXPECTED_TURNS + 1:
        journal.log.warning("more_turns_than_expected", turn=turn, expected=EXPECTED_TURNS)
    if journal.on_event is not None:
        journal.on_event(UsageReported(run_id=run.id, turn=turn, usage=usage, total=run.usage + usage))
    if reply.finish_reason is FinishReason.CONTENT_FILTER or reply.unanswered:
        proposed = ()
    text = replace_surrogates(reply.text)
    received = ReceivedReply(
        reply,
        is_last,
        text=text.strip() if is_last else text,
        thinking=replace_surrogates(reply.thinking) if reply.thinking else "",
        calls=proposed,
        native=None if is_last or (reply.calls and not proposed) else reply.native,
        hosted=reply.hosted,
    )
    for decide in line.on_reply:
        decide(execution, received)
    calls: tuple[ToolCall, ...] = ()
    if received.calls:
        calls = build_calls(execution, received.calls, is_truncated=reply.finish_reason is FinishReason.LENGTH)
    message = AssistantMessage(
        text=received.text,
        calls=calls,
        native=received.native,
        thinking=received.thinking,
        hosted=received.hosted,
        paused=not calls and received.is_paused,
        cache_report=reply.cache_report,
    )
    facts: dict[str, Any] = {
        "message": message,
        "usage": usage,
        "request": request.digest,
        "model": "" if reply.model == execution.config.model.name else reply.model,
        "tier": reply.tier,
        "filtered": received.filtered,
    }
    return received, message, facts


def _read_last_answer(
    line: Line, request: PreparedRequest, reached: e.LimitReached, reply: Reply, usage: Usage
) -> StepOutcome:
    """Return the end of a run after its last answer, which is in `Run.partial`. The stop reason remains the limit."""
    received, _, facts = _receive(line, request, reply, usage, is_last=True)
    if received.text:
        said = e.AnswerDrafted(purpose=Purpose.LAST_ANSWER, claims=received.claims, **facts)
        return end_after_last_answer(request.execution, reached, "its last answer is in run.partial", said)
    text = "the last reply said nothing"
    silent = e.ModelFaltered(error=text, usage=usage, request=request.digest, purpose=Purpose.LAST_ANSWER)
    return end_after_last_answer(request.execution, reached, text, silent)


def _read_reply(line: Line, request: PreparedRequest, reply: Reply, usage: Usage) -> StepOutcome:
    """Return the outcome of a reply: calls, an answer, or an unusable answer."""
    execution = request.execution
    received, message, facts = _receive(line, request, reply, usage, is_last=False)
    if reply.served_model:
        asked = reply.model or execution.config.model.name
        facts["served_model"] = served = find_other_model(asked, reply.served_model)
        if served:
            execution.journal.log.warning("other_model", asked=asked, served=served)
    if message.calls:
        if repaired := [call.id for call in message.calls if call.repaired is not None]:
            execution.journal.log.warning("arguments_repaired", calls=", ".join(repaired))
        return StepOutcome((e.ToolsChosen(**facts),))
    draft = partial(e.AnswerDrafted, claims=received.claims, **facts)
    if flaw := reply.unanswered or UNUSABLE_ANSWERS.get(reply.finish_reason):
        # A thinking model may be cut off before its first word, and providers refuse an empty message.
        is_empty = not (message.text.strip() or message.hosted)
        said = e.ModelFaltered(error=flaw, usage=usage, request=request.digest) if is_empty else draft()
        return StepOutcome((said, e.Failed(reason=StopReason.MODEL_ERROR, message=flaw)))
    if received.refusal:
        return fail(execution, StopReason.GUARD, f"the answer is withheld by the rule {received.refusal}", draft())
    if message.paused or (line.must_review and any(must_review(message) for must_review in line.must_review)):
        return StepOutcome((draft(),))

    async def review() -> StepOutcome:
        return StepOutcome((draft(),))

    return StepOutcome((e.AnswerGiven(**facts),), otherwise=review)


async def _ask_with_eager_calls(request: PreparedRequest, calls: ToolCalls) -> StepOutcome:
    """Ask the model, and start read-only calls while its reply streams.

    Those calls continue while the step commits the reply, and end in the scope of the outcome.
    """
    async with AsyncExitStack() as stack:
        eager = await stack.enter_async_context(create_eager_calls(request.execution, calls.line, calls.queue))
        outcome = _read_reply(calls.line, request, *await ask_model(request, eager))
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
