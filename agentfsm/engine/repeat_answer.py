"""The answer cache in THINK: repeat the answer of an earlier run, or keep that of this one when it ends.

The cache is searched once, before the first request of a run. The event of the answer says where it came from, so a
replay needs no cache, and a resumed run does not search again.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Coroutine, Iterable
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.errors import StoreError
from agentfsm.core.labels import Label, join_labels
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, Outcome, TextPart
from agentfsm.core.notes import NOTE_TOOL
from agentfsm.core.plans import ENGINE_TOOLS
from agentfsm.core.reply_sources import AnswerSource
from agentfsm.engine.execution.answer_cache import AnswerClaim, KeptAnswer
from agentfsm.engine.execution.journal import create_shield
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.model_calls.tool_selection import list_offered_tools
from agentfsm.ports.model import to_mutable_json
from agentfsm.streaming.stream import TextDelta
from agentfsm.tools.builtin import FIND_TOOLS, READ_RESULT

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolResult
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution

# Version of the form of keys: another form finds none of the old answers.
_FORM: Final = 1
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


async def repeat_answer(execution: Execution, claim: AnswerClaim) -> StepOutcome | None:
    """Return the answer of an earlier run to the same question; None if the model has to be asked."""
    run = execution.journal.run
    if claim.key or not _is_alone(run, claim):
        return None
    kept = await claim.find(_hash_question(execution, claim))
    if kept is None:
        return None
    journal = execution.journal
    journal.log.info("answered_from_cache", source=kept.source.run_id)
    if journal.on_event is not None:
        journal.on_event(TextDelta(run_id=run.id, turn=run.turn + 1, attempt=1, text=kept.text))
    draft = partial(e.AnswerDrafted, message=AssistantMessage(text=kept.text), answered_from=kept.source)

    async def review() -> StepOutcome:
        return StepOutcome((draft(),))

    answer = e.AnswerGiven(message=AssistantMessage(text=kept.text), answered_from=kept.source)
    return StepOutcome((answer,), otherwise=review)


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


def _hash_question(execution: Execution, claim: AnswerClaim) -> str:
    """Return the key: a hash of all that an answer may depend on."""
    config, run = execution.config, execution.journal.run
    header, output = run.header, config.output_spec
    prompt = [_normalise(part.text) for part in header.prompt if isinstance(part, TextPart)]
    tools = [[each.name, each.description, each.parameters, each.strict] for each in list_offered_tools(execution)]
    parts = {
        "form": _FORM,
        "scope": claim.cache.scope,
        "prompt": prompt,
        "user": header.user if claim.cache.scope == "user" else None,
        "tenant": header.tenant,
        "roles": sorted(header.roles),
        "clearance": header.clearance,
        "metadata": header.metadata,
        "labels": join_labels(run.labels),
        "release": header.release,
        "arms": header.arms,
        "agent": [header.agent, header.agent_version],
        "fingerprint": attrs.asdict(config.fingerprint),
        "instructions": config.own_instructions,
        "reminder": "" if config.reminder is None else str(config.reminder(run)),
        "tools": tools,
        "permissions": repr(config.permissions),
        "settings": attrs.asdict(attrs.evolve(config.resolve_settings(run), stream=False)),
        "output": None if output is None or output.output_form is None else output.output_form.schema,
    }
    text = json.dumps(to_mutable_json(parts), sort_keys=True, default=str)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _normalise(text: str) -> str:
    """Return the text without differences that readers do not see: composed characters, and white space at ends."""
    return "\n".join([line.rstrip() for line in unicodedata.normalize("NFC", text).strip().splitlines()])


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
    events: tuple[e.Event, ...] = ()
    if run.state is State.DONE and not run.hosted and (claim.cache.scope == "user" or not run.labels.keys() & _PRIVATE):
        try:
            events = (await execution.journal.store.read(run.id)).events
        except StoreError as error:
            execution.journal.log.warning("answer_not_kept", error=type(error).__name__)
    expires_at = _find_expiry(execution.config, run.updated_at + claim.cache.ttl_s, events)
    if expires_at is None or expires_at <= execution.config.clock.now():
        return await claim.mark_uncacheable()
    source = AnswerSource(run_id=run.id, at=run.updated_at, labels=join_labels(run.labels))
    return await claim.keep(KeptAnswer(text=run.answer, source=source), expires_at)


def _find_expiry(config: EngineConfig, latest: float, events: Iterable[e.Event]) -> float | None:
    """Return the time until which the answer of a run may be repeated; None if it may not."""
    expires_at: float | None = None
    for event in events:
        expires_at = latest if expires_at is None else expires_at
        if isinstance(event, _EXCLUDING) or (isinstance(event, e.Observed) and event.inputs):
            return None
        if getattr(event, "filtered", ()):
            return None
        if isinstance(event, e.ToolFinished):
            fresh_until = _find_freshness(config, event.result)
            if fresh_until is None:
                return None
            expires_at = min(expires_at, fresh_until)
    return expires_at


def _find_freshness(config: EngineConfig, result: ToolResult) -> float | None:
    """Return the time until which a result is fresh, infinite without a bound; None if it must not be kept."""
    tool = config.registry.get(result.tool)
    if result.outcome is not Outcome.DONE or result.child is not None:
        return None
    if tool is None:
        return float("inf") if result.tool in _OWN_TOOLS else None
    if not tool.cacheable:
        return None
    return float("inf") if tool.fresh_s is None else result.started_at + tool.fresh_s
