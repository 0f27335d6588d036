"""Evaluate an agent: carry out each case of a suite several times, and grade the runs.

Each run has an id that follows from the agent, the case and the repeat, and is journalled in the agent's store. So an
evaluation that was killed goes on where it was, and grades that are computed from journals can be computed again.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from inspect import Parameter, isawaitable, signature
from typing import Any, Final, Literal, TypeAlias

import anyio
import attrs

from agentfsm.agents.agent import Agent
from agentfsm.agents.agent_starts import StartOptions
from agentfsm.core.errors import AgentError, MisuseError, ModelError
from agentfsm.core.header import short_hash
from agentfsm.core.run import Run
from agentfsm.core.validation import COUNT, STRING, require_choice, shorten_repr
from agentfsm.evals.case import Case, Suite, Turn
from agentfsm.evals.conversation import AgentChooser, Conversation, open_memory
from agentfsm.evals.recorded_tools import Recording
from agentfsm.evals.results import CaseResult, Evaluation
from agentfsm.evals.scorers import SCORERS, Grade, GradedRun, RunScorer, add_usd, grade_turns
from agentfsm.ports.model import Request
from agentfsm.testing.models import FunctionModel

# Runs of each case: models vary, and one run shows little (document F, 6.3: 5 to 10).
RUNS: Final = 5
# Runs at a time: enough to keep a model busy, and below the rate limits of most accounts.
PARALLEL: Final = 8
# Hexadecimal digits of the hash in the id of a run.
RUN_ID_DIGITS: Final = 16

Speed: TypeAlias = Literal["live", "recorded", "replay"]
_SPEED: Final = require_choice("live", "recorded", "replay")


# A target that is no agent: it gets the text of the user, and the request if it takes two arguments.
Application: TypeAlias = Callable[[str], Awaitable[str] | str] | Callable[[str, Request], Awaitable[str] | str]


async def evaluate(
    target: Agent[Any] | AgentChooser | Application,
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
        target: The agent, whose store keeps the runs; a flow; a `Rollout`, which chooses the agent of each case by its
            user; or any function, plain or async, that takes the text of the user and returns the answer. With a second
            parameter it also gets the `Request`: `request.messages` is the conversation, and `request.run.header` has
            the user and the metadata. Its runs are kept in the memory of this process.
        suite: The cases.
        runs: Runs of each case, 1 or more.
        scorers: Scorers; by default the outcome, the path of tools, and limits of turns, cost and time.
        speed: "live": model and tools are called. "recorded": the results of tools are those of the run that the case
            was made from, and the model is called. "replay": nothing is called; the recorded run is graded, if the
            agent would make the same requests.
        deps: Dependencies of each run, or a function, plain or async, that takes the first run of a conversation and
            returns them. So each conversation has a world of its own. If an evaluation is to be resumed in another
            process, the world has to outlive this one.
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
    chooser: Any = target if hasattr(target, "choose") and hasattr(target, "arms") else None
    agents = _list_agents(target, chooser)
    runner = _Runner(agents=agents, chooser=chooser, scorers=tuple(scorers), speed=speed, deps=deps, label=label)
    jobs = [(case, repeat) for case in cases for repeat in range(1, runs + 1)]
    results = await _execute_all(runner, jobs, parallel, on_result)
    return Evaluation(
        suite=cases.name,
        agent=agents[0].name,
        version=_join(agent.version for agent in agents),
        fingerprint=_join(agent.fingerprint.digest for agent in agents),
        model=_join(agent.model.name for agent in agents),
        speed=speed,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        runs=runs,
        results=tuple(results),
    )


def _join(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _list_agents(target: Any, chooser: AgentChooser | None) -> tuple[Agent[Any], ...]:
    """Return the agents that a target has: one, or those of the arms of a roll-out."""
    if chooser is not None:
        return tuple(chooser.arms.values())
    if isinstance(target, Agent):
        return (target,)
    if callable(target) and not isinstance(target, type):
        return (_wrap_function(target),)
    raise MisuseError(
        f"evaluate({shorten_repr(target)}, ...): give an agent, a flow, a Rollout, or a function of a text"
    )


def _wrap_function(function: Callable[..., Any]) -> Agent[Any]:
    """Return an agent whose answers are those of a function, so that its conversations are runs like others."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    takes_request = len([each for each in signature(function).parameters.values() if each.kind in kinds]) > 1

    async def reply(request: Request) -> str:
        text = getattr(request.messages[-1], "text", "")
        try:
            found = function(text, request) if takes_request else function(text)
            found = await found if isawaitable(found) else found
        except Exception as error:  # an application that raises has failed its case
            raise ModelError(f"the function raised {type(error).__name__}: {error}") from error
        if not isinstance(found, str):
            raise MisuseError(f"the function returned {type(found).__name__}: return the answer as a text")
        return found

    return Agent(FunctionModel(reply), name=getattr(function, "__name__", type(function).__name__))


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
    agents: tuple[Agent[Any], ...]
    chooser: AgentChooser | None
    scorers: tuple[RunScorer, ...]
    speed: Speed
    deps: Any
    label: str

    async def evaluate_once(self, case: Case, repeat: int) -> CaseResult:
        recording: Recording | None = None
        findings: tuple[str, ...] = ()
        users: list[Run[Any]] = []
        if self.speed == "replay":
            graded, findings = await self._replay(case)
            fault = findings[0] if findings else ""
        else:
            run_id = f"{self._derive_id(case)}-{repeat}"
            agent, options = await self._choose(case, run_id)
            if self.speed == "recorded":
                recording = await Recording.of_run(agent, case.recorded)
                agent = recording.attach(agent)
            async with open_memory(agent, case) as opened:
                talk = Conversation(
                    agent=opened,
                    case=case,
                    run_id=run_id,
                    metadata={"eval": {"case": case.id, "repeat": repeat, "speed": self.speed}},
                    make_deps=self.deps if callable(self.deps) else lambda _run: self.deps,
                    options=options,
                )
                await talk.play()
            fault, users = talk.fault, talk.users
            graded = GradedRun(
                case=case,
                run=talk.runs[-1] if talk.runs else agent.start("(no turn)", id=run_id),
                runs=tuple(talk.runs),
                played=tuple(talk.played),
                stop=talk.stop,
                agent=agent,
                deps=talk.deps if callable(self.deps) else self.deps,
                has_world=talk.is_fresh or not callable(self.deps),
                is_kept=talk.is_kept,
            )
        grades = {}
        for scorer in self.scorers:
            grades[scorer.name] = Grade(None, fault) if fault else await scorer.grade(graded)
        if recording is not None:
            findings = tuple(found for run in graded.runs for found in recording.list_missing(run))
        costs = [graded.agent.cost(run) for run in graded.runs]
        return CaseResult(
            case=case.id,
            repeat=repeat,
            run_id=graded.run.id,
            grades=grades,
            total=_weigh(case, grades),
            tags=case.tags,
            stop_reason=str(graded.run.stop_reason or ""),
            turns=sum(run.turn for run in graded.runs),
            tokens=sum(cost.usage.tokens for cost in costs),
            usd=add_usd(cost.usd for cost in costs),
            user_usd=add_usd(graded.agent.cost(run).usd for run in users),
            seconds=sum(cost.duration_s for cost in costs),
            calls=tuple([call.name for run in graded.runs for call in run.calls]),
            is_kept=graded.is_kept,
            conversation=grade_turns(graded) if case.turns else (),
            findings=findings,
        )

    async def _choose(self, case: Case, run_id: str) -> tuple[Agent[Any], StartOptions]:
        """Return the agent of a case, and the options of the start of its runs that a roll-out adds."""
        if self.chooser is None:
            return self.agents[0], StartOptions()
        agent, options = await self.chooser.choose(user=case.user, session=case.session, tenant=case.tenant, id=run_id)
        return agent, StartOptions(release=options.get("release", ""), arms=options.get("arms"))

    async def _replay(self, case: Case) -> tuple[GradedRun, tuple[str, ...]]:
        """Return the recorded run of a case, and the requests that the agent would make differently."""
        agent = self.agents[0]
        replay = await agent.replay(case.recorded)
        run = agent.driver.attach_decoder(replay.run)
        graded = GradedRun(case=case, run=run, agent=agent, deps=self.deps, has_world=not callable(self.deps))
        return graded, tuple(
            f"turn {each.turn} would ask differently: {' and '.join(each.what)}" for each in replay.divergences
        )

    def _derive_id(self, case: Case) -> str:
        """Return the part of a run's id that follows from the agent and the input, but not from expectations."""
        first = case.all_turns[0]
        text = first.input if isinstance(first, Turn) else "(the user begins)"
        agents: list[Any] = []
        for agent in self.agents:
            header = agent.start(text, user=case.user).header
            agents += [header.agent, header.agent_version, attrs.asdict(header.fingerprint)]
        recorded = case.recorded if self.speed == "recorded" else ""
        facts = [*agents, case.id, text, recorded, self.label, *case.list_facts()]
        return f"eval-{short_hash(json.dumps(facts, sort_keys=True, default=str), RUN_ID_DIGITS)}"


def _weigh(case: Case, grades: Mapping[str, Grade]) -> float | None:
    """Return the mean of the grades of a run by the weights of its case; None if nothing with a weight is scored."""
    pairs = [(case.weights.get(name, 1.0), each.value) for name, each in grades.items() if each.value is not None]
    whole = sum(weight for weight, _value in pairs)
    return sum(weight * value for weight, value in pairs) / whole if whole else None
