"""The answer cache: repeat the answer of an earlier run, or keep that of this one when it ends.

The cache is searched once, before the first request of a run. The event of the answer says where it came from, so a
replay needs no cache, and a resumed run does not search again.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from agentfsm.core import events as e
from agentfsm.core.errors import StoreError
from agentfsm.core.events import AnswerSource
from agentfsm.core.labels import Label, join_labels
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, Outcome, TextPart
from agentfsm.core.notes import NOTE_TOOL
from agentfsm.core.plans import ENGINE_TOOLS
from agentfsm.engine.deciders.answer_key import hash_question
from agentfsm.engine.deciders.claims import claim_nothing
from agentfsm.engine.execution.answer_cache import AnswerCache, AnswerClaim, KeptAnswer
from agentfsm.engine.execution.journal import create_shield
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.tool_access import build_context
from agentfsm.ports.model import FinishReason
from agentfsm.streaming.stream import TextDelta
from agentfsm.tools.builtin import FIND_TOOLS, READ_RESULT

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.model_calls.received import ReceivedReply
    from agentfsm.engine.model_calls.request import PreparedRequest

# Labels of data that not everybody of a tenant may see.
_PRIVATE: Final = frozenset({Label.PRIVATE, Label.CONFIDENTIAL, Label.RESTRICTED})
# Tools of the engine that read only the run itself.
_OWN_TOOLS: Final = ENGINE_TOOLS | {FIND_TOOLS, READ_RESULT, NOTE_TOOL}
# Events after which an answer is not kept: persons, pauses and crashes had a part in it, or the memory of the user.
_EXCLUDING: Final = (
    e.ApprovalAsked,
    e.ApprovalGiven,
    e.InputGiven,
    e.ToolPaused,
    e.ToolLost,
    e.Paused,
    e.Resumed,
    e.Recalled,
    e.LimitReached,
)


async def repeat_answer(request: PreparedRequest) -> StepOutcome | None:
    """Return the answer of an earlier run to the same question; None if the model has to be asked."""
    execution = request.execution
    run, claim = execution.journal.run, execution.answer_claim
    if claim is None or claim.key or not _is_alone(run, claim):
        return None
    kept = await _find_repeatable(execution, claim)
    if kept is None:
        return None
    journal = execution.journal
    journal.log.info("answered_from_cache", source=kept.source.run_id)
    if journal.on_event is not None:
        journal.on_event(TextDelta(run_id=run.id, turn=run.turn + 1, attempt=1, text=kept.text))
    message = AssistantMessage(text=kept.text)
    draft = partial(e.AnswerDrafted, message=message, answered_from=kept.source, claims=claim_nothing(execution))

    async def review() -> StepOutcome:
        return StepOutcome((draft(),))

    answer = e.AnswerGiven(message=message, answered_from=kept.source)
    return StepOutcome((answer,), otherwise=review)


def note_refusal(execution: Execution, received: ReceivedReply) -> None:
    """Note a refusal of the model, which is not kept as an answer."""
    if received.reply.finish_reason is FinishReason.REFUSAL and execution.answer_claim is not None:
        execution.answer_claim.has_refusal = True


async def _find_repeatable(execution: Execution, claim: AnswerClaim) -> KeptAnswer | None:
    """Return the kept answer; None if there is none, or it may not be repeated any more and this run replaces it."""
    key = await hash_question(execution, claim.cache)
    while (kept := await claim.find(key)) is not None:
        if await _may_repeat(execution, claim, kept):
            return kept
        if await claim.replace_found():
            return None
    return None


async def _may_repeat(execution: Execution, claim: AnswerClaim, kept: KeptAnswer) -> bool:
    """Return whether a kept answer is one that this agent would still give."""
    config = execution.config
    expires_at = _find_expiry(config, claim.cache, kept.source.at, kept.uses)
    if expires_at is None or expires_at <= config.clock.now() or not await claim.has_source(kept):
        return False
    return config.output_spec is None or await config.output_spec.check(kept.text, build_context(execution)) is None


def _is_alone(run: Run, claim: AnswerClaim) -> bool:
    """Return whether the prompt is all that the run has been given, so that its answer may be that of another run."""
    header = run.header
    if run.turn or run.plan is not None or len(run.messages) != 1:
        return False
    if header.parent is not None or header.session is not None or header.after is not None or header.history:
        return False
    if header.forked_from is not None or (claim.cache.scope == "user" and header.user is None):
        return False
    return all(isinstance(part, TextPart) for part in header.prompt)


async def keep_answer(execution: Execution, claim: AnswerClaim, steps: Coroutine[Any, Any, None]) -> None:
    """Perform the steps of an execution, and keep the answer of its run if it may be repeated.

    If the execution was cut off, the claim is withdrawn, so that a run that waits for the answer does not wait in vain.
    """
    try:
        await steps
    except GeneratorExit:  # awaiting is impossible; the claim expires
        raise
    except BaseException:
        with create_shield():
            await claim.withdraw()
        raise
    if claim.record is not None:
        await _settle_claim(execution, claim)


async def _settle_claim(execution: Execution, claim: AnswerClaim) -> None:
    run = execution.journal.run
    config = execution.config
    events: tuple[e.Event, ...] = ()
    is_shareable = claim.cache.scope == "user" or not run.labels.keys() & _PRIVATE
    if run.state is State.DONE and is_shareable and not run.claims and not run.hosted and not claim.has_refusal:
        try:
            events = (await execution.journal.store.read(run.id)).events
        except StoreError as error:
            execution.journal.log.warning("answer_not_kept", error=type(error).__name__)
    uses = _list_uses(config, events)
    expires_at = None if uses is None else _find_expiry(config, claim.cache, run.updated_at, uses)
    if uses is None or expires_at is None or expires_at <= config.clock.now():
        return await claim.mark_uncacheable()
    labels = join_labels(run.labels.keys() - {Label.USER_DATA})  # of the user who asked, not of those who get it
    source = AnswerSource(run_id=run.id, at=run.updated_at, labels=labels)
    answer = KeptAnswer(text=run.answer, source=source, version=run.version, uses=uses)
    return await claim.keep(answer, expires_at)


def _list_uses(config: EngineConfig, events: Iterable[e.Event]) -> dict[str, float] | None:
    """Return the tools that an answer used, with the start of the oldest call of each; None if it must not be kept."""
    uses: dict[str, float] | None = None
    for event in events:
        uses = {} if uses is None else uses
        if isinstance(event, _EXCLUDING) or (isinstance(event, e.Observed) and event.inputs):
            return None
        if getattr(event, "filtered", ()):
            return None
        if isinstance(event, e.ToolFinished):
            result = event.result
            if result.outcome is not Outcome.DONE or result.child is not None:
                return None
            if result.tool not in _OWN_TOOLS or config.registry.get(result.tool) is not None:
                uses[result.tool] = min(result.started_at, uses.get(result.tool, float("inf")))
    return uses


def _find_expiry(config: EngineConfig, cache: AnswerCache, at: float, uses: Mapping[str, float]) -> float | None:
    """Return the time until which an answer given at a time may be repeated; None if a tool excludes it."""
    expires_at = at + cache.ttl_s
    for name, started_at in uses.items():
        tool = config.registry.get(name)
        if tool is None or not tool.cacheable or tool.is_interactive:
            return None
        if tool.login is not None and cache.scope == "tenant":  # it reads with the account of one user
            return None
        if tool.fresh_s is not None:
            expires_at = min(expires_at, started_at + tool.fresh_s)
    return expires_at
