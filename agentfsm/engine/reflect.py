"""REFLECT: check results for loops and drafts for their form, have both judged, and continue, accept or stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core import stops as loop_detection
from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.events import Action, Verdict
from agentfsm.core.inbox import Input
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import JSON, ToolResult
from agentfsm.core.usage import Purpose
from agentfsm.engine.advance_plan import describe_failure
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.execution.run_end import fail, stop_at_limit
from agentfsm.engine.execution.tool_access import build_context
from agentfsm.engine.model_calls.side_request import SideSpending, send_side_request
from agentfsm.engine.stop_requests import find_requested_stop
from agentfsm.engine.tool_calls.call_guards import check_data
from agentfsm.ports.model import OutputForm, OutputMode
from agentfsm.tools.queue.result_text import describe_error

if TYPE_CHECKING:
    from agentfsm.core.effects import Reflect
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.tool_calls.host import ToolCalls
    from agentfsm.ports.policies import Judge, JudgeAsk, PlanMaker

# Texts for the first and the second finding of a loop; the third stops the run.
_LOOP_WARNINGS: Final = (
    "You are repeating yourself: {loop}. The results will not change. Do something else, or answer with what you have.",
    "You are repeating yourself: {loop}. {tools} may not be called any more in this run. Answer with what you have.",
)
# The same texts for repeated answers, where no tool can be withdrawn.
_ANSWER_LOOP_WARNINGS: Final = 2 * (
    "You are repeating yourself: {loop}. It would be refused again: give another answer.",
)
_EQUAL_CALLS_NOTE: Final = (
    "Note: your last reply had equal calls, and each of them was run: {calls}. If you wanted only one, say so, and "
    "undo the others if you can."
)
_LOOP_STOP_NOTE: Final = "You are repeating yourself: {loop}."
_REFUSAL_NOTE: Final = "Your answer was refused: {why}\n{how}"


async def reflect(execution: Execution, effect: Reflect, _calls: ToolCalls) -> StepOutcome:
    """Review tool results or a draft of the answer, and return how the run continues."""
    if effect.is_paused:
        return StepOutcome((e.Continued(),))
    if effect.draft is None:
        return await _review_results(execution, effect)
    if execution.config.guards and (refusal := check_data(execution, execution.journal.run.labels)) is not None:
        message = f"the answer may hold data that the run must not read: {refusal.reason}"
        return fail(execution, StopReason.GUARD, message)
    objection = await _review_draft(execution, effect)
    return await _accept_draft(execution) if objection is None else objection


async def _review_results(execution: Execution, effect: Reflect) -> StepOutcome:
    """Continue after tools, unless a limit is reached, the run repeats itself, or a judge objects."""
    config, journal = execution.config, execution.journal
    if (stop := execution.budget.find_stop_reason()) is not None:
        return stop_at_limit(execution, *stop)
    if effect.verdict is not None:
        return StepOutcome((_note_equal_calls(execution, _build_continuation(effect.verdict)),))
    if config.planner is not None and (question := _find_plan_question(execution, config.planner)) is not None:
        return StepOutcome((e.Continued(asks=question),))
    if (loop := _find_loop(execution)) is not None:
        return _warn_of_loop(execution, loop, _note_equal_calls(execution, e.Continued()))
    if config.judge is not None and config.judge.wants(journal.run):
        return await _run_judge(execution, config.judge)
    return StepOutcome((_note_equal_calls(execution, e.Continued()),))


def _find_plan_question(execution: Execution, planner: PlanMaker) -> str | None:
    """Return the question to a person if a plan failed, and no more new plans may be made; else None."""
    progress = execution.journal.run.plan
    if progress is None or progress.is_stale or planner.fixed or planner.replan == "never":
        return None
    is_spent = progress.is_stuck and progress.replans >= planner.replans > 0
    if not is_spent or progress.build_ready_calls(execution.journal.run.header):
        return None
    return f"{describe_failure(progress)}. It was planned {progress.replans + 1} times. What should be done?"


async def _review_draft(execution: Execution, effect: Reflect) -> StepOutcome | None:
    """Return the objection to a draft, or the verdict of a judge to be recorded; None if the draft may be accepted."""
    config, journal, verdict = execution.config, execution.journal, effect.verdict
    if verdict is not None:
        return None if verdict.action is Action.ACCEPT else _send_back(execution, _build_continuation(verdict))
    spec = config.output_spec
    if spec is not None and (why := await spec.check(effect.draft or "", build_context(execution))) is not None:
        refusals, note = journal.run.refusals, _REFUSAL_NOTE.format(why=why, how=spec.correction_hint)
        if refusals >= config.limits.answer_retries:
            times = f"answers refused: {refusals + 1}, the last one: {why}"
            return stop_at_limit(execution, StopReason.TOO_MANY_ERRORS, times, note=note)
        journal.log.warning("answer_refused", turn=journal.run.turn, refusals=refusals + 1)
        return _send_back(execution, e.Continued(note=note, refused=True))
    if config.judge is not None and config.judge.wants(journal.run):
        return await _run_judge(execution, config.judge)
    return None


async def _accept_draft(execution: Execution, *, reread: bool = False) -> StepOutcome:
    """Accept the draft, unless input has arrived that it does not answer.

    Args:
        execution: The execution of the run.
        reread: Whether to read the inbox anew, since something arrived before the end was written. It may be a late
            decision and no input: then the draft still stands, and the model must not go on from it.
    """
    rows = await execution.journal.read_inbox(force=reread)
    if (stop := await find_requested_stop(execution, rows)) is not None:
        return stop
    if any(isinstance(row.item, Input) for row in rows):
        return StepOutcome((e.Continued(),))
    retry = partial(_accept_draft, execution, reread=True)
    return StepOutcome((e.Accepted(),), [row.number for row in rows], otherwise=retry)


def _send_back(execution: Execution, note: e.Continued) -> StepOutcome:
    """Return an objection to a draft, with a warning if the same draft was given before."""
    loop = None if note.asks else _find_loop(execution)  # a person reviews the next step
    return StepOutcome((note,)) if loop is None else _warn_of_loop(execution, loop, note)


# The form of an answer


# Judges


async def _run_judge(execution: Execution, judge: Judge) -> StepOutcome:
    """Have the draft or the results judged. If that fails, a person is asked: unjudged is not accepted."""
    journal = execution.journal
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
    journal.log.info("judged", turn=journal.run.turn, action=verdict.action.value)
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
    return Verdict(action=Action.ESCALATE, note=f"It could not be judged: {describe_error(error)}")


def _build_continuation(verdict: Verdict) -> e.Continued:
    """Return how the run continues after a verdict."""
    return _CONTINUATIONS[verdict.action](verdict)


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


# Loops


def _find_loop(execution: Execution) -> loop_detection.DetectedLoop | None:
    run = execution.journal.run
    return (
        None
        if run.turn < loop_detection.MIN_REPEATS
        else loop_detection.find_loop(run.messages, execution.config.registry.polling_tools)
    )


def _note_equal_calls(execution: Execution, note: e.Continued) -> e.Continued:
    """Add to a note that the reply called tools that are not read-only several times with equal arguments.

    The calls run, since that may be meant: two payments of the same amount need not be a mistake.
    """
    config, journal, run = execution.config, execution.journal, execution.journal.run
    last = run.messages[-1]
    if type(last) is not ToolResult or last.index == 0 or run.plan is not None or note.asks:  # most turns: one call
        return note
    turn = run.messages[-1 - last.index :]
    names = [each.tool for each in turn if type(each) is ToolResult and each.attempts]
    writes = {
        name
        for name in set(names)
        if names.count(name) > 1 and (tool := config.find_tool(name)) and not tool.read_only and not tool.poll
    }
    equal = loop_detection.count_equal_calls(run.messages, writes) if writes else {}
    if not equal:
        return note
    calls = ", ".join(f"{name} {count} times" for name, count in equal.items())
    journal.log.warning("equal_calls", turn=run.turn, tools=equal)
    text = _EQUAL_CALLS_NOTE.format(calls=calls)
    return attrs.evolve(note, note=f"{note.note}\n{text}".lstrip())


def _warn_of_loop(execution: Execution, loop: loop_detection.DetectedLoop, note: e.Continued) -> StepOutcome:
    """Add a loop warning to a note: first a hint, then the tools are withdrawn, then the run stops."""
    journal, run = execution.journal, execution.journal.run
    change: dict[str, Any] = {}
    if loop.is_hint:
        text = f"Note: {loop.description}{', though the arguments differ' if loop.tools else ''}."
    elif run.loops < len(_LOOP_WARNINGS):
        text = (_LOOP_WARNINGS if loop.tools else _ANSWER_LOOP_WARNINGS)[run.loops].format(
            loop=loop.description, tools=", ".join(loop.tools)
        )
        change = {"loop": True, "disabled": loop.tools if run.loops else ()}
    else:
        text = f"{note.note}\n{_LOOP_STOP_NOTE.format(loop=loop.description)}".lstrip()
        message = f"{loop.description}, after {run.loops} warnings"
        return stop_at_limit(execution, StopReason.LOOP_DETECTED, message, note=text)
    journal.log.warning("loop", turn=run.turn, what=loop.description)
    return StepOutcome((attrs.evolve(note, note=f"{note.note}\n{text}".lstrip(), **change),))
