"""Grade runs of production by a judge, and keep the grades as feedback."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from agentfsm.agents.agent import Agent
from agentfsm.agents.runs import Runs
from agentfsm.core.header import short_hash
from agentfsm.core.json_text import round_timestamp
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import TextPart
from agentfsm.core.validation import COUNT, NOT_NEGATIVE, POSITIVE, SHARE
from agentfsm.evals.case import HIGHEST, LOWEST, Case
from agentfsm.evals.evaluation_runner import PARALLEL, Purse, execute_all
from agentfsm.evals.results import CaseResult, Evaluation
from agentfsm.evals.rubric_judge import RubricJudge
from agentfsm.evals.scorers import GradedRun, add_usd
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import Filter, RunSummary, Store
from agentfsm.ports.stored import JUDGE_PREFIX, Feedback

# Hexadecimal digits of the hash of a run's id that decides whether it is in the sample, and of that of a rubric.
SAMPLE_DIGITS: Final = 8
RUBRIC_DIGITS: Final = 8


async def grade_stored(
    store: Store,
    judge: RubricJudge,
    *,
    since: float = 0.0,
    sample: float = 1.0,
    agent: str | None = None,
    usd: float | None = None,
    parallel: int = PARALLEL,
    on_result: Callable[[CaseResult], None] | None = None,
) -> Evaluation:
    """Grade the answers of runs of production, newest first, and record each grade as feedback on its run.

    A run is graded once by a judge with the same model and rubric, also if this was killed: the votes are runs in the
    store, with the purpose "eval", and what is over is not asked again. Runs that failed have no answer and are left
    out, and so are those of sub-agents. The judge reads what the run did, so it has to be one that may.

    Args:
        store: Store of the runs.
        judge: The judge, with the rubric.
        since: Time in seconds since 1970; runs that ended before it are left out.
        sample: Share of the runs, above 0 and up to 1. Which ones follows from their ids, so it is the same each time.
        agent: Name of the agent; None for all.
        usd: US dollars that the judge may cost in this call. None: no limit.
        parallel: Maximum of runs at a time, 1 or more.
        on_result: Called with each result, for progress.

    Returns:
        The runs that were graded now, each as a case, with the grade of the judge. `calibrate` takes its grades.

    Raises:
        MisuseError: if an argument is wrong, the judge is of the family of a run's model, or there is a limit in US
            dollars and a price is unknown.
        LimitError: if the limit in US dollars is reached. What was graded before is recorded.
        StoreError: if the store fails.
    """
    NOT_NEGATIVE.check("grade_stored", "since", since)
    SHARE.check("grade_stored", "sample", sample)
    POSITIVE.or_none().check("grade_stored", "usd", usd)
    COUNT.check("grade_stored", "parallel", parallel)
    rubric = {name: dict(each) for name, each in judge.rubric.items()}
    about = json.dumps([judge.name, judge.model.name, rubric], sort_keys=True)
    by = f"{JUDGE_PREFIX}{judge.model.name}:{short_hash(about, RUBRIC_DIGITS)}"
    chosen: list[RunSummary] = []
    async for each in RunIterator(store, Filter(agent=agent, purpose="", over=True)):
        place = int(short_hash(each.id, SAMPLE_DIGITS), 16) / 16**SAMPLE_DIGITS
        if each.parent is not None or each.stop_reason is not StopReason.COMPLETED:
            continue
        if place < sample and each.updated_at >= since:
            known = () if each.rating is None else await store.list_feedback(each.id)
            if by not in [feedback.by for feedback in known]:
                chosen.append(each)
    expected = None
    if usd is not None:
        expected = add_usd(judge.estimate_usd(each.tokens / max(each.turn, 1)) for each in chosen)
    reader, runs = Agent(judge.model, name="eval-judge", store=store), Runs(store)

    async def grade(summary: RunSummary) -> CaseResult:
        run = await runs.load(summary.id)
        text = "\n".join([part.text for part in run.header.prompt if isinstance(part, TextPart)])
        graded: GradedRun = GradedRun(case=Case(id=run.id, input=text or "(no text)"), run=run, agent=reader)
        found = await judge.grade(graded)
        if found.value is not None:
            feedback = Feedback(
                rating=LOWEST + round((HIGHEST - LOWEST) * found.value),
                comment=found.reason[:10_000],
                by=by,
                at=round_timestamp(await store.now()),
            )
            await store.add_feedback(run.id, f"eval-{short_hash(by, 16)}", feedback)
        return CaseResult(
            case=run.id,
            repeat=1,
            run_id=run.id,
            grades={judge.name: found},
            total=found.value,
            stop_reason=str(run.stop_reason or ""),
            turns=run.turn,
            tokens=summary.tokens,
            usd=0.0,
            calls=tuple([call.name for call in run.calls]),
        )

    purse = None if usd is None else Purse(limit=usd, jobs=len(chosen), expected=expected)
    results: list[Any] = await execute_all(grade, chosen, parallel, purse, on_result)
    return Evaluation(
        suite="stored runs",
        agent=", ".join(dict.fromkeys(each.agent for each in chosen)),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        runs=1,
        results=tuple(results),
        estimated_usd=expected,
    )
