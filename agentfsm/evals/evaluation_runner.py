"""Evaluate an agent: run each case of a suite several times, and grade the runs.

Each run has an id that follows from the agent, the case and the repeat, and is journalled in the agent's store. So an
evaluation that was killed goes on where it was, and grades that are computed from journals can be computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from inspect import isawaitable
from typing import Any, Final, Literal, TypeAlias

import anyio
import attrs

from agentfsm.agents.agent import Agent
from agentfsm.core.errors import AgentError, LeaseHeldError, MisuseError, RunNotFoundError
from agentfsm.core.header import short_hash
from agentfsm.core.run import Run
from agentfsm.core.validation import COUNT, STRING, require_choice
from agentfsm.evals.case import Case, Suite
from agentfsm.evals.recorded_tools import Recording
from agentfsm.evals.results import CaseResult, Evaluation
from agentfsm.evals.scorers import SCORERS, Grade, GradedRun, RunScorer

# Runs of each case: models vary, and one run shows little (document F, 6.3: 5 to 10).
RUNS: Final = 5
# Runs at a time: enough to keep a model busy, and below the rate limits of most accounts.
PARALLEL: Final = 8
# Hexadecimal digits of the hash in the id of a run.
RUN_ID_DIGITS: Final = 16

Speed: TypeAlias = Literal["live", "recorded", "replay"]
_SPEED: Final = require_choice("live", "recorded", "replay")


async def evaluate(
    agent: Agent[Any],
    suite: Suite | Iterable[Case],
    *,
    runs: int = RUNS,
    scorers: Iterable[RunScorer] = SCORERS,
    speed: Speed = "live",
    deps: Any = None,
    label: str = "",
    parallel: int = PARALLEL,
    on_result: Callable[[CaseResult], None] | None = None,
) -> Evaluation:
    """Run each case of a suite several times, and grade the runs.

    A second evaluation with the same agent, case and label returns the runs of the first one, graded anew. The agent is
    the same if its name, version and fingerprint are; a change in the code of a tool needs another version or label.

    Args:
        agent: The agent. Its store keeps the runs.
        suite: The cases.
        runs: Runs of each case, 1 or more.
        scorers: Scorers; by default the outcome, the path of tools, and limits of turns, cost and time.
        speed: "live": model and tools are called. "recorded": the results of tools are those of the run that the case
            was made from, and the model is called. "replay": nothing is called; the recorded run is graded, if the
            agent would make the same requests.
        deps: Dependencies of each run, or a function, plain or async, that takes the run and returns them. So each run
            has a world of its own. If an evaluation is to be resumed in another process, the world has to outlive
            this one.
        label: Distinguishes evaluations of the same agent, such as those of each night.
        parallel: Maximum of runs at a time, 1 or more.
        on_result: Called with each result, for progress.

    Raises:
        MisuseError: if an argument is wrong, or a case has no recorded run where the speed needs one.
        AgentError: if a run cannot be executed, such as a StoreError. Runs that are over are kept.
    """
    COUNT.check("evaluate", "runs", runs)
    COUNT.check("evaluate", "parallel", parallel)
    STRING.check("evaluate", "label", label)
    _SPEED.check("evaluate", "speed", speed)
    cases = suite if isinstance(suite, Suite) else Suite(suite)
    if speed != "live" and (bare := [case.id for case in cases if not case.recorded]):
        raise MisuseError(f'speed="{speed}" needs cases made from runs (agentfsm eval add), and {bare[0]!r} is not')
    runs = 1 if speed == "replay" else runs
    runner = _Runner(agent=agent, scorers=tuple(scorers), speed=speed, deps=deps, label=label)
    jobs = [(case, repeat) for case in cases for repeat in range(1, runs + 1)]
    results = await _execute_all(runner, jobs, parallel, on_result)
    return Evaluation(
        suite=cases.name,
        agent=agent.name,
        version=agent.version,
        fingerprint=agent.fingerprint.digest,
        model=agent.model.name,
        speed=speed,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        runs=runs,
        results=tuple(results),
    )


async def _execute_all(
    runner: _Runner,
    jobs: list[tuple[Case, int]],
    parallel: int,
    on_result: Callable[[CaseResult], None] | None,
) -> list[CaseResult]:
    """Execute all jobs, and return their results in order. The first error ends the others and is raised."""
    found: dict[int, CaseResult] = {}
    errors: list[AgentError] = []
    waiting = iter(enumerate(jobs))

    async def work() -> None:
        for index, (case, repeat) in waiting:
            try:
                found[index] = await runner.evaluate_once(case, repeat)
            except AgentError as error:
                errors.append(error)
                group.cancel_scope.cancel()
                return
            if on_result is not None:
                on_result(found[index])

    async with anyio.create_task_group() as group:
        for _ in range(min(parallel, len(jobs))):
            group.start_soon(work)
    if errors:
        raise errors[0]
    return [found[index] for index in range(len(jobs))]


@attrs.frozen(kw_only=True, eq=False)
class _Runner:
    agent: Agent[Any]
    scorers: tuple[RunScorer, ...]
    speed: Speed
    deps: Any
    label: str

    async def evaluate_once(self, case: Case, repeat: int) -> CaseResult:
        agent, recording = self.agent, None
        if self.speed == "recorded":
            recording = await Recording.of_run(agent, case.recorded)
            agent = recording.attach(agent)
        findings: tuple[str, ...] = ()
        if self.speed == "replay":
            graded, findings = await self._replay(case)
        else:
            graded = await self._run(agent, case, repeat)
        run = graded.run
        grades = {}
        for scorer in self.scorers:
            grades[scorer.name] = Grade(None, findings[0]) if findings else await scorer.grade(graded)
        if recording is not None:
            findings = recording.list_missing(run)
        cost = agent.cost(run)
        return CaseResult(
            case=case.id,
            repeat=repeat,
            run_id=run.id,
            grades=grades,
            total=_weigh(case, grades),
            tags=case.tags,
            stop_reason=str(run.stop_reason or ""),
            turns=run.turn,
            tokens=cost.usage.tokens,
            usd=cost.usd,
            seconds=cost.duration_s,
            calls=tuple([call.name for call in run.calls]),
            is_kept=graded.is_kept,
            findings=findings,
        )

    async def _run(self, agent: Agent[Any], case: Case, repeat: int) -> GradedRun:
        """Execute the run of a repeat, or return it if it is over already."""
        run_id = f"{self._derive_id(case)}-{repeat}"
        is_kept = False
        try:
            run = await agent.load(run_id)
            is_kept = run.is_over
        except RunNotFoundError:
            metadata = {"eval": {"case": case.id, "repeat": repeat, "speed": self.speed}}
            run = agent.start(case.input, id=run_id, metadata=metadata)
        has_world = run.version == 0 or not callable(self.deps)
        deps = None if run.is_over and not has_world else await self._resolve_deps(run)
        try:
            run = await agent.finish(run, deps=deps)
        except LeaseHeldError:  # of a process that was killed a moment ago
            run = await agent.resume(run_id, deps=deps)
        return GradedRun(case=case, run=run, agent=agent, deps=deps, has_world=has_world, is_kept=is_kept)

    async def _replay(self, case: Case) -> tuple[GradedRun, tuple[str, ...]]:
        """Return the recorded run of a case, and the requests that the agent would make differently."""
        replay = await self.agent.replay(case.recorded)
        run = self.agent.driver.attach_decoder(replay.run)
        graded = GradedRun(case=case, run=run, agent=self.agent, deps=self.deps, has_world=not callable(self.deps))
        return graded, tuple(
            f"turn {each.turn} would ask differently: {' and '.join(each.what)}" for each in replay.divergences
        )

    async def _resolve_deps(self, run: Run[Any]) -> Any:
        deps = self.deps(run) if callable(self.deps) else self.deps
        return await deps if isawaitable(deps) else deps

    def _derive_id(self, case: Case) -> str:
        """Return the part of a run's id that follows from the agent and the input, but not from expectations."""
        header = self.agent.start(case.input).header
        agent = [header.agent, header.agent_version, attrs.asdict(header.fingerprint)]
        recorded = case.recorded if self.speed == "recorded" else ""
        facts = [*agent, case.id, case.input, recorded, self.label]
        return f"eval-{short_hash(json.dumps(facts, sort_keys=True), RUN_ID_DIGITS)}"


def _weigh(case: Case, grades: Mapping[str, Grade]) -> float | None:
    """Return the mean of the grades of a run by the weights of its case; None if nothing with a weight is scored."""
    pairs = [(case.weights.get(name, 1.0), each.value) for name, each in grades.items() if each.value is not None]
    whole = sum(weight for weight, _value in pairs)
    return sum(weight * value for weight, value in pairs) / whole if whole else None
