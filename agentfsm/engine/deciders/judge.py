"""The judge: a review of results, or of a draft, by a model or by a class of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.events import Action, Verdict
from agentfsm.core.messages import JSON
from agentfsm.core.usage import Purpose
from agentfsm.engine.execution.cost import SideSpending
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.model_calls.side_request import send_side_request
from agentfsm.ports.model import OutputForm, OutputMode
from agentfsm.tools.queue.result_text import describe_error

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.policies import Judge, JudgeAsk


# Beginning of the note of a verdict that no judge gave.
NOT_JUDGED: Final = "It could not be judged: "


async def apply_verdict(_execution: Execution, effect: Reflect) -> e.Continued | e.Accepted | None:
    """Return how the run goes on after a verdict that is in the journal; None if there is none."""
    if effect.verdict is None:
        return None
    is_accepted = effect.draft is not None and effect.verdict.action is Action.ACCEPT
    return e.Accepted() if is_accepted else _CONTINUATIONS[effect.verdict.action](effect.verdict)


async def ask_judge(execution: Execution, _effect: Reflect) -> StepOutcome | None:
    """Have the draft or the results judged. If that fails, a person is asked: unjudged is not accepted."""
    judge, journal = execution.config.judge, execution.journal
    if judge is None or not judge.wants(journal.run):
        return None
    spent = SideSpending(Purpose.JUDGE, execution.config.model.name)
    modes = (judge.model or execution.config.model).output_modes

    async def ask(instructions: str, question: str, schema: Mapping[str, JSON]) -> str:
        output = OutputForm(name="verdict", schema=schema) if OutputMode.SCHEMA in modes else None
        text, _ = await send_side_request(
            execution,
            spent,
            instructions,
            question,
            max_tokens=judge.answer_tokens,
            model=judge.model,
            output=output,
        )
        return text

    try:
        verdict = await _call_judge(judge, journal.run, ask)
    except ModelError as error:
        verdict = _build_failed_verdict(error)
    except Exception as error:  # an exception of the judge: record its cost, then raise it
        if spent.usage.tokens:
            journal.commit(_build_judged(_build_failed_verdict(error), spent))
        raise
    return StepOutcome((_build_judged(verdict, spent),))


def _build_judged(verdict: Verdict, spent: SideSpending) -> e.Judged:
    return e.Judged(verdict=verdict, usage=spent.usage, purpose=spent.recorded_purpose, model=spent.model)


async def _call_judge(judge: Judge, run: Run, ask: JudgeAsk) -> Verdict:
    verdict: object = await judge.judge(run, ask)
    if isinstance(verdict, Verdict):
        return verdict
    method = f"{type(judge).__name__}.judge returned {type(verdict).__name__}"
    raise MisuseError(f"{method}: return a Verdict, for example Verdict(action=Action.ACCEPT)")


def _build_failed_verdict(error: Exception) -> Verdict:
    return Verdict(action=Action.ESCALATE, note=f"{NOT_JUDGED}{describe_error(error)}")


def _build_retry(verdict: Verdict) -> e.Continued:
    task = f"Do step {verdict.step} again" if verdict.step else "Do it again"
    return e.Continued(note=f"A review found your work not good enough. {task}{_format_findings(verdict)}")


def _build_replan(verdict: Verdict) -> e.Continued:
    return e.Continued(note=f"A review found that this way leads nowhere. Make a new plan{_format_findings(verdict)}")


def _build_escalation(verdict: Verdict) -> e.Continued:
    if verdict.note and not verdict.scores:  # a question as it stands
        return e.Continued(asks=verdict.note)
    return e.Continued(asks=f"A review could not accept the work. What shall be done{_format_findings(verdict)}")


def _format_findings(verdict: Verdict) -> str:
    """Return the requested changes, with the comments on low scores."""
    low = [
        f"{each.criterion} {each.score} of 5 ({each.reason})" for each in verdict.scores if each.score < PASSING_SCORE
    ]
    changes = "; ".join(filter(None, (verdict.note, *low)))
    return f": {changes}" if changes else "."


# Lowest score that needs no comment.
PASSING_SCORE: Final = 4

_CONTINUATIONS: Final[dict[Action, Callable[[Verdict], e.Continued]]] = {
    Action.ACCEPT: lambda verdict: e.Continued(note=verdict.note),
    Action.RETRY_STEP: _build_retry,
    Action.REPLAN: _build_replan,
    Action.ESCALATE: _build_escalation,
}
