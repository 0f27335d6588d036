"""The required form of an answer: it is taken from the output tool, and a draft is checked before it is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.core.json_text import normalise_arguments
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import replace_surrogates
from agentfsm.engine.execution.run_end import stop_at_limit
from agentfsm.engine.execution.tool_access import build_context

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.outcome import StepOutcome
    from agentfsm.engine.model_calls.received import ReceivedReply

REFUSAL_NOTE: Final = "Your answer was refused: {why}\n{how}"


def unwrap_answer(execution: Execution, received: ReceivedReply) -> None:
    """Take the arguments of the output tool as the text of the answer, if the reply calls nothing else."""
    spec, proposed = execution.config.output_spec, received.reply.calls
    if spec is None or spec.tool is None or not proposed or any(call.name != spec.tool.name for call in proposed):
        return
    received.text = replace_surrogates(normalise_arguments(proposed[0].arguments))
    received.calls, received.native = (), None


async def check_draft(execution: Execution, effect: Reflect) -> e.Continued | StepOutcome | None:
    """Return the objection to a draft that does not have the required form or that a validator refuses."""
    config, journal, spec = execution.config, execution.journal, execution.config.output_spec
    if spec is None:
        return None
    is_split = journal.run.draft_claims is not None
    if (why := await spec.check(effect.draft or "", build_context(execution), is_split=is_split)) is None:
        return None
    refusals, note = journal.run.refusals, REFUSAL_NOTE.format(why=why, how=spec.correction_hint)
    if refusals >= config.limits.answer_retries:
        times = f"answers refused: {refusals + 1}, the last one: {why}"
        return stop_at_limit(execution, StopReason.TOO_MANY_ERRORS, times, note=note)
    journal.log.warning("answer_refused", turn=journal.run.turn, refusals=refusals + 1)
    return e.Continued(note=note, refused=True)
