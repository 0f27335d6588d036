"""Scorers: each grades one aspect of a run, from 0 to 1, by a rule. None of them asks a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from inspect import isawaitable
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from agentfsm.agents.agent import Agent
from agentfsm.core.errors import MisuseError, RunNotFoundError
from agentfsm.core.machine import State
from agentfsm.core.messages import Outcome
from agentfsm.core.run_ids import child_run_id
from agentfsm.core.validation import ValueRule, is_number
from agentfsm.core.value import Value
from agentfsm.engine.deciders.answer_key import describe
from agentfsm.evals.case import CallPath, Case, ExpectedCall, hash_facts
from agentfsm.evals.conversation import PlayedTurn, describe_reply, record
from agentfsm.evals.run_checks import Expectation, RunCheck
from agentfsm.prompts import find_failures

if TYPE_CHECKING:
    from agentfsm.core.calls import CallRecord
    from agentfsm.core.run import Run

# Characters of a reason that a report shows.
MAX_REASON_CHARS: Final = 300
# Hexadecimal digits of the hash of a check of the world.
CHECK_DIGITS: Final = 8


GRADE: Final = ValueRule(fits=lambda value: is_number(value) and 0 <= value <= 1, wanted="a number from 0 to 1")


@attrs.frozen
class Grade(Value):
    """The grade of one aspect of a run.

    Raises:
        MisuseError: if the value is no number from 0 to 1.
    """

    value: float | None = attrs.field(validator=GRADE.or_none())
    """From 0 (worst) to 1 (best); None if the aspect is not scored, which is not the same as 0."""

    reason: str = ""
    """Reason for a grade below 1, or for none."""

    usd: float | None = 0.0
    """US dollars of the requests of a judge; 0 for a grade by a rule; None if a price is unknown."""

    judge: str = ""
    """Digest of the judge, which a gate compares with that of its calibration; empty for a grade by a rule."""


@attrs.frozen(kw_only=True)
class TurnResult(Value):
    """Result of one turn of a conversation."""

    said: str
    """Turn of the user: a text, a decision or a message."""

    run_id: str
    """Id of the run that the turn began, or was about."""

    grades: Mapping[str, Grade]
    """Grade by aspect as far as the turn has expectations of its own: "outcome", "tool_path", and those of judges by
    the rubric of the turn.
    """


@attrs.frozen(kw_only=True)
class GradedRun(Value):
    """A run that scorers grade, with its case, and the conversation that it is the last of."""

    case: Case
    """The case."""

    run: Run[Any]
    """The last run: over, or waiting for a person, which counts as not completed."""

    runs: tuple[Run[Any], ...] = attrs.field(default=attrs.Factory(lambda graded: (graded.run,), takes_self=True))
    """All runs of the conversation, oldest first: one for each text of the user."""

    below: tuple[Run[Any], ...] = ()
    """Runs of the agents that these runs called, and so on, as far as a check of the case is about their tools."""

    played: tuple[PlayedTurn, ...] = ()
    """The turns of the case as they were carried out, those of a simulated user included."""

    stop: str = ""
    """Reason why a turn of the case could not be carried out; empty if all were."""

    agent: Agent[Any]
    """The agent of the run."""

    deps: Any = None
    """Dependencies of the run."""

    has_world: bool = True
    """Whether `deps` are those with which the whole run was executed. If another process had begun the run, a function
    that makes dependencies would return other ones.
    """

    is_kept: bool = False
    """Whether the run was over before this evaluation."""


class RunScorer(Protocol):
    """Protocol of scorers."""

    @property
    def name(self) -> str:
        """Name of the aspect, for reports and weights."""
        ...

    async def grade(self, graded: GradedRun) -> Grade:
        """Grade a run. A scorer that asks a model keeps the reply in the store, so that it is asked once."""
        ...


NOT_SCORED: Final = Grade(None, "")


@attrs.frozen
class OutcomeScorer(Value):
    """Grades 1 if the run ended with an answer that passes all checks, and the check of the world; else 0.

    A check of the world is recorded as a run of its own beside the run that it checks, because the world may change
    afterwards. So it is made once.
    """

    name: str = "outcome"
    """Name of the aspect."""

    async def grade(self, graded: GradedRun) -> Grade:
        """Grade a run. A check of the world that raises leaves the run unscored."""
        case = graded.case
        if graded.stop:
            return Grade(0.0, graded.stop)
        for run in graded.runs[:-1]:
            if run.state is not State.DONE:
                return Grade(0.0, f"run {run.id} failed, {run.stop_reason}: {run.stop_message}")
        found = _grade_runs(graded.runs, case.expect, graded.below)
        if found.value != 1:
            return found
        for number, turn in enumerate(grade_turns(graded), 1):
            found = turn.grades.get("outcome", found)
            if found.value != 1:
                return Grade(found.value, f"turn {number}: {found.reason}")
        return Grade(1.0) if case.check is None else await _record_check(graded)


def _grade_runs(
    runs: Sequence[Run[Any]], checks: Sequence[Expectation], below: Sequence[Run[Any]], *, is_decided: bool = False
) -> Grade:
    """Grade 1 if the last of these runs has an answer and they pass the checks; a check that is broken gives no grade.

    `below` are the runs of agents that they called. If the next turn decides on what the last run waits for, this
    stands for the answer.
    """
    run = runs[-1]
    if run.state is not State.DONE and not is_decided:
        why = f"failed, {run.stop_reason}: {run.stop_message}" if run.is_over else "the run waits for a person"
        return Grade(0.0, why)
    answer = run.answer if run.state is State.DONE else describe_reply(run)
    failures: list[str] = []
    for check in checks:
        try:
            if not isinstance(check, RunCheck):
                failures += find_failures([check], answer)
            elif (flaw := check.find_failure(runs, below)) is not None:
                failures.append(f"{check.name}: {flaw}")
        except Exception as error:  # noqa: BLE001  the check may be the user's code
            text = str(error) if isinstance(error, MisuseError) else f"{check.name} raised {error!r}"
            return Grade(None, f"not scored: {text}")
    return Grade(0.0, "; ".join(failures)) if failures else Grade(1.0)


async def _record_check(graded: GradedRun) -> Grade:
    """Check the world, and keep the verdict as a run, whose id follows from the code of the check; return a kept one.

    A check that is broken has no verdict, so it is made again.
    """
    check, run = graded.case.check, graded.run
    assert check is not None  # noqa: S101  the caller has looked

    check_id = f"{run.id}-check-{hash_facts(describe(check), CHECK_DIGITS)}"
    try:
        kept = await graded.agent.runs.load(check_id)
    except RunNotFoundError:
        kept = None
    if kept is not None and kept.state is State.DONE:
        return Grade(*json.loads(kept.answer))
    if not graded.has_world:
        return Grade(None, "another process had begun the run, so its world is gone: evaluate with another label")
    try:
        found: object = check(run, graded.deps)
        found = await found if isawaitable(found) else found
    except Exception as error:  # noqa: BLE001  the check is the user's code
        return Grade(None, f"the check raised {type(error).__name__}: {error}")
    if found is not True and found is not False and not isinstance(found, str):
        return Grade(None, f"the check returned {type(found).__name__}: return True, False or a reason")
    value, reason = (1.0, "") if found is True else (0.0, found or "the check of the world failed")
    task = f"Check the world after the run {run.id}."
    await record(graded.agent, check_id, task, lambda: [value, reason], run.header)
    return Grade(value, reason)


def grade_turns(graded: GradedRun) -> tuple[TurnResult, ...]:
    """Return the grades of each turn that has expectations of its own; a turn without any has no grade.

    A turn is graded as the run was after it. Its calls are those that the agent chose in it, whenever they were over.
    """
    found, seen = [], set[tuple[str, str]]()
    last = {run.id: run for run in graded.runs}
    for index, played in enumerate(graded.played):
        run, turn, grades = played.run, played.turn, dict[str, Grade]()
        ids = {(run.id, call_id) for call_id in [c.call_id for c in run.calls] + [c.call.id for c in run.open]}
        if turn.expect:
            is_decided = run.is_waiting and run.id in {later.run.id for later in graded.played[index + 1 :]}
            children = [child_run_id(*each) for each in ids - seen]
            below = [each for each in graded.below if any(f"{each.id}.".startswith(f"{child}.") for child in children)]
            grades["outcome"] = _grade_runs([run], turn.expect, below, is_decided=is_decided)
        if turn.paths is not None:
            calls = [call for call in last[run.id].calls if (run.id, call.call_id) in ids - seen]
            grades["tool_path"] = _grade_path(turn.paths, calls)
        seen |= ids
        found.append(TurnResult(said=str(turn), run_id=run.id, grades=grades))
    return tuple(found)


@attrs.frozen
class PathScorer(Value):
    """Grades the tool calls by alignment with the nearest valid path: 2 m / (e + c).

    m is the number of calls that match a path in order, e the length of the path, and c the number of calls. So
    missing, wrong, repeated and misplaced calls all cost. A skipped call, which never ran, does not count; one that a
    person rejected does, because the agent has asked for it.
    """

    name: str = "tool_path"
    """Name of the aspect."""

    async def grade(self, graded: GradedRun) -> Grade:
        """Grade a run by the mean of the case and the turns that have paths; without any it is not scored."""
        grades = [turn.grades["tool_path"] for turn in grade_turns(graded) if "tool_path" in turn.grades]
        if graded.case.paths is not None:
            grades.append(_grade_path(graded.case.paths, [call for run in graded.runs for call in run.calls]))
        values = [each.value for each in grades if each.value is not None]
        reasons = dict.fromkeys(each.reason for each in grades if each.reason)
        return Grade(fmean(values), "; ".join(reasons)) if values else NOT_SCORED


def _grade_path(paths: Sequence[CallPath], made: Sequence[CallRecord]) -> Grade:
    calls = [call for call in made if call.outcome is not Outcome.SKIPPED]
    value = max((align(path, calls) for path in paths or [()]), default=0.0)
    return Grade(value, "" if value == 1 else f"calls: {', '.join(call.name for call in calls) or 'none'}")


def align(path: CallPath, calls: Sequence[CallRecord]) -> float:
    """Return how well calls match a path, from 0 to 1: twice the aligned calls, by the length of both together."""
    expected = sum(map(len, path))
    if not expected and not calls:
        return 1.0
    # best[j]: most calls among the first j that match the groups so far, in order
    best = [0] * (len(calls) + 1)
    for group in path:
        best = [max(best[k] + _count_matches(group, calls[k:j]) for k in range(j + 1)) for j in range(len(calls) + 1)]
    return 2 * best[-1] / (expected + len(calls))


def _count_matches(group: Sequence[ExpectedCall], calls: Sequence[CallRecord]) -> int:
    """Return the most expected calls of a group that have a call of their own (a maximum matching of two sets)."""
    taken: dict[int, int] = {}

    def place(wanted: int, seen: set[int]) -> bool:
        for index, call in enumerate(calls):
            if index in seen or not group[wanted].matches(call.name, call.arguments):
                continue
            seen.add(index)
            if index not in taken or place(taken[index], seen):
                taken[index] = wanted
                return True
        return False

    return sum(place(wanted, set()) for wanted in range(len(group)))


def add_usd(given: Iterable[float | None]) -> float | None:
    """Return the sum of costs; None if one is unknown."""
    found = [*given]
    return None if None in found else sum(each for each in found if each is not None)


@attrs.frozen
class LimitScorer(Value):
    """Grades `min(1, limit / actual)` for turns, tokens, US dollars or seconds of active time."""

    name: str
    """Name of the aspect: "steps", "tokens", "cost" or "latency"."""

    async def grade(self, graded: GradedRun) -> Grade:
        """Grade a run; a case without the limit, and a run whose cost is unknown, are not scored."""
        case, costs = graded.case, [graded.agent.cost(run) for run in graded.runs]
        measures: Mapping[str, tuple[float | None, float | None]] = {
            "steps": (case.max_steps, sum(run.turn for run in graded.runs)),
            "tokens": (case.max_tokens, sum(cost.usage.tokens for cost in costs)),
            "cost": (case.max_usd, add_usd([cost.usd for cost in costs])),
            "latency": (case.max_seconds, sum(cost.duration_s for cost in costs)),
        }
        limit, actual = measures[self.name]
        if limit is None:
            return NOT_SCORED
        if actual is None:
            unpriced = dict.fromkeys(name for cost in costs for name in cost.unpriced)
            return Grade(None, f"the price of {', '.join(unpriced)} is unknown")
        value = min(1.0, limit / actual) if actual > 0 else 1.0
        return Grade(value, "" if value == 1 else f"{actual:g} of {limit:g}")


SCORERS: Final[tuple[RunScorer, ...]] = (
    OutcomeScorer(),
    PathScorer(),
    LimitScorer("steps"),
    LimitScorer("tokens"),
    LimitScorer("cost"),
    LimitScorer("latency"),
)
"""The default scorers: the outcome, the path of tools, and the limits of turns, tokens, US dollars and seconds."""
