"""Stop conditions: functions of the run that end it, with a text as its answer or without one.

They are asked whenever the run would go on to another turn: after results, and when a draft is sent back. Each sees
only what is in the journal, so a resumed run decides the same.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.errors import MisuseError
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import AssistantMessage, replace_surrogates
from agentfsm.core.stops import name_condition
from agentfsm.core.validation import shorten_repr
from agentfsm.engine.deciders.claims import claim_nothing
from agentfsm.engine.deciders.text_filters import filter_texts
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.run_end import fail, stop_at_limit
from agentfsm.engine.model_calls.received import ReceivedReply
from agentfsm.ports.model import Reply

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.engine.execution.execution import Execution

_STOP_NOTE: Final = "The stop condition {name} holds, so this is the answer:"


async def check_results(execution: Execution, _effect: Reflect) -> StepOutcome | None:
    """Return the end of a run, or the draft of its answer, by the first stop condition that holds."""
    return _find_stop(execution, e.Continued(note=""))


def check_objection(execution: Execution, note: e.Continued) -> e.Continued | StepOutcome:
    """Return the end of a run whose draft would be sent back with a note, by the first stop condition that holds."""
    return note if note.asks else _find_stop(execution, note) or note


def _find_stop(execution: Execution, objection: e.Continued) -> StepOutcome | None:
    journal = execution.journal
    for condition in execution.config.stop_when:
        name = name_condition(condition)
        try:
            found: object = condition(journal.run)
        except Exception as error:
            raise MisuseError(
                f"the stop condition {name} raised {type(error).__name__}: {error}. Correct it, then resume the run"
            ) from error
        if found is None or found is False:
            continue
        if found is True:
            return stop_at_limit(
                execution, StopReason.STOP_CONDITION, f"the stop condition {name} holds", note=objection.note
            )
        if isinstance(found, str) and found.strip():
            return _end_with(execution, name, replace_surrogates(found), objection)
        if inspect.iscoroutine(found):
            found.close()
        raise MisuseError(
            f"the stop condition {name} returned {shorten_repr(found)}: return False or None to go on, True to stop "
            "without an answer, or the answer, a text that is not empty. Correct it, then resume the run"
        )
    return None


def _end_with(execution: Execution, name: str, text: str, objection: e.Continued) -> StepOutcome:
    """Return the draft of an answer that no model has written. It is filtered and reviewed as any other."""
    execution.journal.log.info("stop_condition", name=name)
    said = ReceivedReply(Reply(text=text), is_last=False, text=text, thinking="", calls=(), native=None, hosted=None)
    filter_texts(execution, said)
    message = AssistantMessage(text=said.text)
    draft = e.AnswerDrafted(message=message, filtered=said.filtered, claims=claim_nothing(execution))
    # One append: a run that dies has decided, or has not.
    note = f"{objection.note}\n{_STOP_NOTE.format(name=name)}".lstrip()
    events = (attrs.evolve(objection, note=note), e.Observed(), draft)  # a refused draft counts, so that they end
    if said.refusal:
        return fail(execution, StopReason.GUARD, f"the answer is withheld by the rule {said.refusal}", *events)
    return StepOutcome(events)
