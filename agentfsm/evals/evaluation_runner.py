"""Evaluate an agent: carry out each case of a suite several times, and grade the runs.

Each run has an id that follows from the agent, the case and the repeat, and is journalled in the agent's store. So an
evaluation that was killed goes on where it was, and grades that are computed from journals can be computed again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from inspect import Parameter, isawaitable, signature
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

import anyio
import attrs

from agentfsm.agents.agent import Agent
from agentfsm.agents.agent_starts import StartOptions
from agentfsm.agents.extras import resolve_model
from agentfsm.agents.runs import Runs
from agentfsm.agents.subagent import find_inner_agent
from agentfsm.core.errors import AgentError, LimitError, MisuseError, ModelError
from agentfsm.core.limits import StopReason
from agentfsm.core.run import Run
from agentfsm.core.usage import Usage, format_usd
from agentfsm.core.validation import COUNT, POSITIVE, STRING, require_choice, shorten_repr
from agentfsm.engine.deciders.answer_key import describe, describe_agent
from agentfsm.engine.program_check import has_tool
from agentfsm.evals.case import Case, SimulatedUser, Suite, Turn, hash_facts
from agentfsm.evals.conversation import AgentChooser, Conversation, open_memory
from agentfsm.evals.recorded_agents import enter_case, find_missing
from agentfsm.evals.results import CaseResult, Evaluation
from agentfsm.evals.rubric_judge import RubricJudge
from agentfsm.evals.run_checks import RunCheck
from agentfsm.evals.scorers import SCORERS, Grade, GradedRun, RunScorer, add_usd, grade_turns
from agentfsm.ports.model import Request
from agentfsm.ports.store import Filter, Store
from agentfsm.telemetry.costs import estimate
from agentfsm.testing.models import FunctionModel

_log = logging.getLogger("agentfsm.evals")

# Runs of each case: models vary, and one run shows little (document F, 6.3: 5 to 10).
RUNS: Final = 5
# Runs at a time: enough to keep a model busy, and below the rate limits of most accounts.
PARALLEL: Final = 8
# Hexadecimal digits of the hash in the id of a run.
RUN_ID_DIGITS: Final = 16
# Part of a limit in US dollars by which sums of floating-point numbers may exceed it.
ROUNDING: Final = 1e-9

T = TypeVar("T")


class Priced(Protocol):
    """Result of a run that a purse pays for."""

    @property
    def run_id(self) -> str:
        """Id of the run."""
        ...

    @property
    def total_usd(self) -> float | None:
        """US dollars of all that belongs to it; None if a price is unknown."""
        ...


R = TypeVar("R", bound=Priced)

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
    store: Store | None = None,
    parallel: int = PARALLEL,
    usd: float | None = None,
    on_estimate: Callable[[float | None], None] | None = None,
    on_result: Callable[[CaseResult], None] | None = None,
) -> Evaluation:
    """Run each case of a suite several times, and grade the runs.

    A second evaluation with the same agent, case and label returns the runs of the first one, graded anew. The agent is
    the same if its name, version and fingerprint are; a change in the code of a tool needs another version or label.

    Args:
        target: The agent, whose store keeps the runs; a flow; a `Rollout`, which chooses the agent of each case by its
            user; or any function, plain or async, that takes the text of the user and returns the answer. With a second
            parameter it also gets the `Request`: `request.messages` is the conversation, and `request.run.header` has
            the user and the metadata.
        suite: The cases.
        runs: Runs of each case, 1 or more.
        scorers: Scorers; by default the outcome, the path of tools, and limits of turns, cost and time.
        speed: "live": model and tools are called. "recorded": the results of tools are those of the run that the case
            was made from, and the model is called. "replay": nothing is called; the recorded run is graded, if the
            agent would make the same requests.
        deps: Dependencies of each run, or a function, plain or async, that takes the first run of a conversation and
            returns them. So each conversation has a world of its own, and one that another process had begun is begun
            again. An object is shared by all; if an evaluation is to be resumed in another process, it has to outlive
            this one.
        label: Distinguishes evaluations of the same agent, such as those of each night.
        store: Store of the runs of a function, so that an evaluation that was killed goes on: turns that are over are
            not repeated, and the call of a turn that was in progress is made again. The function is found again by its
            name, whatever its code is, so after a change give another label. None: the memory of this call.
        parallel: Maximum of cases at a time, 1 or more.
        usd: US dollars that all of it may cost: the runs, simulated users and judges, those of an earlier call that
            this one continues included. No case begins that exceeds it if it costs as much as the dearest one before.
            A case that has begun is finished, so cases that are dearer than all before may exceed it, `parallel` of
            them at most. None: no limit.
        on_estimate: Called before the first request with the US dollars that all of it is likely to cost; None if a
            price is unknown. Raise an error to stop. With a limit the estimate is also logged.
        on_result: Called with each result, for progress.

    Raises:
        MisuseError: if an argument is wrong, a case has no recorded run where the speed needs one, or there is a limit
            in US dollars and a price is unknown.
        EvaluationLimitError: if the limit in US dollars is reached. Cases that are over are kept, so a call with a
            higher one goes on.
        AgentError: if a run cannot be executed, such as a StoreError. Runs that are over are kept.
    """
    COUNT.check("evaluate", "runs", runs)
    COUNT.check("evaluate", "parallel", parallel)
    STRING.check("evaluate", "label", label)
    _SPEED.check("evaluate", "speed", speed)
    POSITIVE.or_none().check("evaluate", "usd", usd)
    cases = suite if isinstance(suite, Suite) else Suite(suite)
    bare = [case.id for case in cases if not case.recorded and (speed == "replay" or case.fixtures is None)]
    if speed != "live" and bare:
        raise MisuseError(
            f'speed="{speed}" needs cases made from runs (agentfsm eval from-run), and {bare[0]!r} is not'
        )
    runs = 1 if speed == "replay" else runs
    chooser: Any = target if hasattr(target, "choose") and hasattr(target, "arms") else None
    agents = _list_agents(target, chooser, store)
    checked = _check_scorers(scorers, cases)
    runner = _Runner(agents=agents, chooser=chooser, scorers=checked, speed=speed, deps=deps, label=label)
    jobs = [(case, repeat) for case in cases for repeat in range(1, runs + 1)]
    expected = None
    if usd is not None or on_estimate is not None:
        expected = await _estimate(runner, jobs)
        _log.info("%d cases are evaluated, for %s", len(jobs), format_usd(expected, estimated=True))
        if on_estimate is not None:
            on_estimate(expected)
    purse = None if usd is None else Purse(limit=usd, jobs=len(jobs), expected=expected)

    def build(results: Iterable[CaseResult]) -> Evaluation:
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
            cases={case.id: case.digest for case in cases},
            estimated_usd=expected,
        )

    try:
        results = await execute_all(lambda job: runner.evaluate_once(*job), jobs, parallel, purse, on_result)
    except EvaluationLimitError as error:
        error.evaluation = build(error.results)
        raise
    return build(results)


def _check_scorers(scorers: Iterable[RunScorer], cases: Suite) -> tuple[RunScorer, ...]:
    """Return the scorers.

    Raises:
        MisuseError: if two have one name, one has the name of a built-in aspect, or no scorer is there for a weight or
            a rubric of a case.
    """
    found: dict[str, RunScorer] = {}
    built_in: dict[str, type] = {each.name: type(each) for each in SCORERS} | {"total": type(None)}
    for each in scorers:
        if each.name in found or not isinstance(each, built_in.get(each.name, object)):
            raise MisuseError(
                f"evaluate(scorers=...): {each.name!r} names another aspect as well: give each scorer a name of its own"
            )
        found[each.name] = each
    for case in cases:
        if unknown := case.weights.keys() - found.keys() - built_in.keys():
            raise MisuseError(f"case {case.id!r} has a weight of {min(unknown)!r}; scorers: {', '.join(found)}")
        rubrics = [case.rubric, *[each.rubric for each in case.all_turns if isinstance(each, Turn)]]
        if any(each is not None for each in rubrics) and found.keys() <= built_in.keys():
            raise MisuseError(
                f"case {case.id!r} has a rubric, and no judge grades by it: scorers=[*SCORERS, RubricJudge(...)], or "
                "--judge MODEL"
            )
    return tuple(found.values())


async def _estimate(runner: _Runner, jobs: list[tuple[Case, int]]) -> float | None:
    """Return the US dollars that cases are likely to cost: texts by the growth of requests, users and judges added."""
    agent, by_case = runner.agents[0], dict[str, float | None]()
    try:
        alone = await estimate(agent)
        by_texts = {1: alone}
        for case, _repeat in jobs:
            if case.id in by_case:
                continue
            users = [each for each in case.all_turns if isinstance(each, SimulatedUser)]
            said = sum(user.max_turns for user in users) + len(case.all_turns) - len(users)
            whole = by_texts[said] = by_texts.get(said) or await estimate(agent, alone.turns * said)
            parts = [whole.usd]
            read = whole.fixed_tokens + whole.added_tokens * whole.turns
            for user in users:  # each reply is a request that has the conversation so far
                asked = Usage(input_tokens=round(read / 2), output_tokens=round(whole.reply_tokens))
                one = resolve_model(user.model).cost_usd(asked)
                parts.append(None if one is None else one * user.max_turns)
            judged = 1 + len([each for each in case.all_turns if isinstance(each, Turn) and each.rubric is not None])
            parts += [each.estimate_usd(read) for each in runner.scorers if isinstance(each, RubricJudge)] * judged
            by_case[case.id] = 0.0 if runner.speed == "replay" else add_usd(parts)
    except (AttributeError, MisuseError) as error:  # a model of the user's own may have no prices
        _log.debug("the cost is not estimated: %s", error)
        return None
    return add_usd(by_case[case.id] for case, _repeat in jobs)


class EvaluationLimitError(LimitError):
    """The limit in US dollars of an evaluation is reached.

    Attributes:
        results: Results of the cases that are over.
        evaluation: The same as an `Evaluation`, with which no gate is passed; None of `grade_stored`.
    """

    def __init__(self, results: Sequence[Any], message: str) -> None:
        super().__init__(str(StopReason.COST_BUDGET), message)
        self.results = results
        self.evaluation: Evaluation | None = None


@attrs.define(eq=False)
class Purse:
    """The US dollars of an evaluation: what was spent, and what the cases in progress are likely to cost."""

    limit: float
    jobs: int
    expected: float | None
    spent: float = 0.0
    dearest: float = 0.0
    done: int = 0
    in_progress: int = 0

    settled: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when the next case is over."""

    async def take(self) -> bool:
        """Return whether another case is likely to stay within the limit, which is then in progress.

        Each case may cost as much as the dearest one that is over. While others may turn out cheaper, this waits for
        them.
        """
        while True:
            one = self.dearest if self.done else (self.expected or 0.0) / self.jobs
            whole = self.spent + (self.in_progress + 1) * one
            if self.spent < self.limit and whole <= self.limit * (1 + ROUNDING):
                self.in_progress += 1
                return True
            if not self.in_progress:
                return False
            await self.settled.wait()

    def settle(self, result: Priced) -> None:
        """Note the cost of a case.

        Raises:
            MisuseError: if it is unknown.
        """
        usd = result.total_usd
        if usd is None:
            raise MisuseError(
                f"usd={self.limit:g}: the price of a model of run {result.run_id} is unknown, so the limit "
                "cannot hold: give the model a price, or leave usd= out"
            )
        self.spent, self.dearest, self.done = self.spent + usd, max(self.dearest, usd), self.done + 1
        self.end()

    def end(self) -> None:
        """Note that a case is in progress no more, and wake those that wait for it."""
        self.in_progress -= 1
        self.settled.set()
        self.settled = anyio.Event()


def _join(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _list_agents(target: Any, chooser: AgentChooser | None, store: Store | None) -> tuple[Agent[Any], ...]:
    """Return the agents that a target has: one, or those of the arms of a roll-out."""
    if store is not None and (chooser is not None or isinstance(target, Agent)):
        raise MisuseError("evaluate(store=...) is for functions: the runs of an agent are in the store that it has")
    if chooser is not None:
        return tuple(chooser.arms.values())
    if isinstance(target, Agent):
        return (target,)
    if callable(target) and not isinstance(target, type):
        return (_wrap_function(target, store),)
    raise MisuseError(
        f"evaluate({shorten_repr(target)}, ...): give an agent, a flow, a Rollout, or a function of a text"
    )


def _wrap_function(function: Callable[..., Any], store: Store | None) -> Agent[Any]:
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
            raise ModelError(f"the function returned {type(found).__name__}: return the answer as a text")
        return found

    name = getattr(function, "__name__", type(function).__name__)
    if store is None:
        return Agent(FunctionModel(reply), name=name)
    if name in {"<lambda>", "partial"}:
        raise MisuseError(
            f"evaluate({name}, store=...): its runs are found again by its name, so give a def or a class"
        )
    return Agent(FunctionModel(reply), name=name, store=store)


async def execute_all(
    act: Callable[[T], Awaitable[R]],
    jobs: Sequence[T],
    parallel: int,
    purse: Purse | None,
    on_result: Callable[[R], None] | None,
) -> list[R]:
    """Execute a function with all jobs, and return the results in order. The first error ends all, and is raised.

    If the purse is empty, those in progress are finished first, and then an error is raised.
    """
    found: dict[int, R] = {}
    errors: list[Exception] = []
    waiting = iter(enumerate(jobs))

    async def work() -> None:
        while purse is None or await purse.take():
            if (job := next(waiting, None)) is None:
                if purse is not None:
                    purse.end()
                return
            index, given = job
            try:
                found[index] = await act(given)
                if purse is not None:
                    purse.settle(found[index])
            except Exception as error:  # noqa: BLE001  raised below, and not as one of a group
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
    if purse is not None and len(found) < len(jobs):
        raise EvaluationLimitError(
            [found[index] for index in sorted(found)],
            f"{len(found)} of {len(jobs)} cases cost {format_usd(purse.spent)}, and more would exceed "
            f"usd={purse.limit:g}; they are kept: evaluate with a higher usd to go on",
        )
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
        findings: tuple[str, ...] = ()
        users: list[Run[Any]] = []
        spent: list[float | None] = []
        if self.speed == "replay":
            graded, findings = await self._replay(case)
            fault = findings[0] if findings else ""
        else:
            run_id, agent, options = await self._identify(case, repeat)
            talks: list[Conversation] = []
            while not talks or talks[-1].is_lost:
                tried = await enter_case(agent, case) if self.speed == "recorded" else agent
                async with open_memory(agent, case):
                    talk = Conversation(
                        agent=tried,
                        case=case,
                        run_id=f"{run_id}-again-{len(talks)}" if talks else run_id,
                        metadata={"eval": {"case": case.id, "repeat": repeat, "speed": self.speed}},
                        make_deps=self.deps if callable(self.deps) else lambda _run: self.deps,
                        has_own_world=callable(self.deps) or case.memory is not None or self.speed == "recorded",
                        options=options,
                    )
                    talks.append(talk)
                    await talk.play()
            *lost, talk = talks
            findings = tuple(f"the world of {each.run_id} was lost with its process: begun again" for each in lost)
            if not (talk.is_fresh or talk.is_kept or self.deps is None or talk.has_own_world):
                findings += ("another process had begun it: its grades hold if deps have outlived that process",)
            fault, users = talk.fault, [run for each in talks for run in each.users]
            spent = [agent.cost(run).usd for each in lost for run in each.runs]
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
        expected = [*case.expect, *[each for turn in case.all_turns if isinstance(turn, Turn) for each in turn.expect]]
        named = {tool for each in expected if isinstance(each, RunCheck) for tool in each.tools}
        if named and not fault:
            graded = attrs.evolve(graded, below=await _load_below(graded.agent.runs, [run.id for run in graded.runs]))
        unknown = [tool for tool in sorted(named) if not has_tool(graded.agent.driver.config, tool)]
        findings += tuple(f"not_called {tool}: no agent that takes part has this tool" for tool in unknown)
        grades = {}
        for scorer in self.scorers:
            grades[scorer.name] = Grade(None, fault) if fault else await _grade(scorer, graded)
        turns = [*grade_turns(graded)] if case.turns else []
        for judge in () if fault else [each for each in self.scorers if isinstance(each, RubricJudge)]:
            for number, turn in enumerate(turns):
                if (grade := await judge.grade_turn(graded, number)) is not None:
                    turns[number] = attrs.evolve(turn, grades={**turn.grades, judge.name: grade})
        if self.speed == "recorded":
            calls = [call for run in graded.runs for call in find_missing(run)]
            findings += tuple(
                f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)}) was not recorded" for call in calls
            )
            harmless = {tool.name for tool in graded.agent.tools if tool.read_only}
            if "outcome" in grades and (found := {call.name for call in calls} - harmless):
                why = f"a call of {', '.join(sorted(found))} was not recorded, and may have an effect"
                grades["outcome"] = Grade(0.0, why)
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
            usd=add_usd([*spent, *[cost.usd for cost in costs]]),
            estimated=any(cost.usage.estimated for cost in costs),
            user_usd=add_usd(graded.agent.cost(run).usd for run in users),
            seconds=sum(cost.duration_s for cost in costs),
            calls=tuple([call.name for run in graded.runs for call in run.calls]),
            is_kept=graded.is_kept,
            conversation=tuple(turns),
            findings=findings,
        )

    async def _replay(self, case: Case) -> tuple[GradedRun, tuple[str, ...]]:
        """Return the recorded run of a case, and the requests that the agent would make differently."""
        agent = self.agents[0]
        replay = await agent.replay(case.recorded)
        run = agent.driver.attach_decoder(replay.run)
        graded = GradedRun(case=case, run=run, agent=agent, deps=self.deps, has_world=not callable(self.deps))
        return graded, tuple(
            f"turn {each.turn} would ask differently: {' and '.join(each.what)}" for each in replay.divergences
        )

    async def _identify(self, case: Case, repeat: int) -> tuple[str, Agent[Any], StartOptions]:
        """Return the id of the first run of a case, its agent, and the options of its start that a roll-out adds.

        The id follows from all that is known to determine the runs, and not from expectations.
        """
        agent, options = self.agents[0], StartOptions()
        facts = [case.id, self.label, *case.list_facts()]
        facts += [case.recorded, str(case.fixtures or "")] if self.speed == "recorded" else []
        if case.session is not None:  # the case goes on from what is said there now
            last = await agent.runs.list(Filter(session=case.session), limit=1)
            facts += [[each.id, each.version] for each in last]
        if self.chooser is not None:
            chosen_by = f"eval-{hash_facts(facts, RUN_ID_DIGITS)}-{repeat}"
            agent, found = await self.chooser.choose(
                user=case.user,
                session=case.session,
                tenant=case.tenant,
                id=chosen_by,
                roles=case.roles,
                metadata=case.metadata,
            )
            options = StartOptions(release=found.get("release", ""), arms=found.get("arms"))
        first = case.all_turns[0]
        start: StartOptions = {
            **options,
            "user": case.user,
            "roles": case.roles,
            "tenant": case.tenant,
            "metadata": case.metadata,
        }
        header = agent.start(first.input if isinstance(first, Turn) else "(the user begins)", **start).header
        facts += [header.agent, header.agent_version, attrs.asdict(header.fingerprint), options]
        facts.append(_describe_target(agent))
        return f"eval-{hash_facts(facts, RUN_ID_DIGITS)}-{repeat}", agent, options


def _describe_target(agent: Any, seen: tuple[object, ...] = ()) -> list[Any]:
    """Return what an agent does, as far as it is known, with the agents below it; `seen` are the tools on the way."""
    registry = agent.driver.config.registry
    tools = [tool for tool in registry if tool.name in registry.agent_tools and tool not in seen]
    return [
        agent.version,
        describe_agent(agent.driver.config),
        describe([agent.instructions, agent.reminder, agent.settings]),
        [_describe_target(find_inner_agent(tool), (*seen, tool)) for tool in tools],
    ]


async def _grade(scorer: RunScorer, graded: GradedRun) -> Grade:
    """Return the grade of a scorer, which may be the user's own; none if it is broken."""
    try:
        found: object = await scorer.grade(graded)
    except AgentError:  # such as a judge that is refused, or a store that fails
        raise
    except Exception as error:  # noqa: BLE001  the scorer is the user's code
        return Grade(None, f"not scored: the scorer {scorer.name} raised {type(error).__name__}: {error}")
    if isinstance(found, Grade):
        return found
    return Grade(None, f"not scored: the scorer {scorer.name} returned {type(found).__name__}: return a Grade")


async def _load_below(runs: Runs, ids: list[str]) -> tuple[Run[Any], ...]:
    """Return the runs of the agents that runs called, and so on."""
    found = []
    for run_id in ids:  # those below are added on the way
        found += [await runs.load(line.id) for line in await runs.children(run_id)]
        ids += [each.id for each in found if each.header.parent == run_id]
    return tuple(found)


def _weigh(case: Case, grades: Mapping[str, Grade]) -> float | None:
    """Return the mean of the grades of a run by the weights of its case; None if nothing with a weight is scored."""
    pairs = [(case.weights.get(name, 1.0), each.value) for name, each in grades.items() if each.value is not None]
    whole = sum(weight for weight, _value in pairs)
    return sum(weight * value for weight, value in pairs) / whole if whole else None
