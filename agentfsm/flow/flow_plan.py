"""The steps of a flow as a plan: checked once, given to each run, and followed by compensations if the flow fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.calls import UNDECIDED_PHASES, OpenCall, Phase
from agentfsm.core.errors import MisuseError
from agentfsm.core.events import PlanKind
from agentfsm.core.labels import ToolKind
from agentfsm.core.limits import Limits
from agentfsm.core.messages import JSON, Outcome, Part, TextPart, ToolResult, as_parts
from agentfsm.core.plans import (
    JOINS,
    Compensation,
    Plan,
    PlanProgress,
    PlanStep,
    build_compensations,
    is_skipped,
    list_steps,
    read_content,
)
from agentfsm.flow.step_types import InputTypes, check_results
from agentfsm.flow.steps import STEP_TIMEOUT_S, Step
from agentfsm.ports.planned_calls import PlannedCall, plan_calls
from agentfsm.ports.policies import PlanAsk, PlanEnd, PlanMaker, PlanRequest
from agentfsm.tools.queue.result_text import remove_advice

if TYPE_CHECKING:
    from agentfsm.agents.runs import Prompt
    from agentfsm.core.run import Run
    from agentfsm.tools.tool import Tool

# Keys of a plan that stand for results, which inputs therefore cannot have.
_RESERVED_KEYS: Final = frozenset({"$step", "$text"})
# Characters of the reason why a step failed, in the message of the run.
_REASON_CHARS: Final = 500
# End of a reason that was longer.
_CUT: Final = " ..."


class StepStatus(StrEnum):
    """Status of a step in a run of a flow."""

    PENDING = "pending"
    """It has not started."""

    RUNNING = "running"
    """It has started."""

    WAITING = "waiting"
    """It waits for a person: an approval, an answer, or the outcome of a call that was in flight in a crash."""

    SUCCESS = "success"
    """It has a result."""

    SKIPPED = "skipped"
    """Its condition was false."""

    FAILED = "failed"
    """It has ended without a result: it failed, timed out, was rejected, or its outcome is unknown."""

    NOT_RUN = "not_run"
    """It did not start and will not, since steps that it depends on failed or the run has ended."""


_ENDED_BADLY: Final = frozenset({StepStatus.FAILED, StepStatus.NOT_RUN})


def sort_steps(steps: tuple[Step, ...], *, repeated: bool = False) -> tuple[Step, ...]:
    """Return the steps such that each depends only on earlier ones.

    Args:
        steps: The steps, in any order.
        repeated: Whether they are those of a repetition, whose parameters may take results of the one before.

    Raises:
        MisuseError: if something else is given, or they cannot all be carried out.
    """
    if inner := [each for each in steps if hasattr(each, "as_step")]:
        raise MisuseError(f"Flow([...]) takes steps, not {inner[0]!r}: give flow.as_step(...)")
    if not steps or not all(isinstance(each, Step) for each in steps):
        raise MisuseError("Flow([...]) takes steps, at least one: make them with @step or agent_step(...)")
    known = {each.name: each for each in steps}
    if len(known) < len(steps):
        names = [each.name for each in steps]
        raise MisuseError(f"two steps are called {next(name for name in names if names.count(name) > 1)!r}: give name=")
    for name, each in known.items():
        lists = [other for other in each.over if other in known and other != name]
        known[name] = attrs.evolve(each, depends_on=tuple(dict.fromkeys([*lists, *each.depends_on])))
    steps = tuple(known.values())
    for each in () if repeated else steps:
        _check_names(each, known)
    try:
        order = tuple(TopologicalSorter({each.name: each.depends_on for each in steps}).static_order())
    except CycleError as error:
        raise MisuseError(f"steps depend on each other in a circle: {' -> '.join(reversed(error.args[1]))}") from None
    return tuple([known[name] for name in order])


def _check_names(step: Step, known: Mapping[str, Step]) -> None:
    for name in step.depends_on:
        if name not in known:
            raise MisuseError(f"step {step.name!r} depends on {name!r}; the steps are: {', '.join(known)}")
    for name in (*step.required, *step.optional):
        if name in known and name not in step.depends_on:
            hint = f"repeat it with until({name}, ...)" if name == step.name else "add it to depends_on="
            raise MisuseError(f"step {step.name!r} takes the result of {name!r}: {hint}")
    if step.join != JOINS[0] and not step.depends_on:
        raise MisuseError(f"step {step.name!r}: join={step.join!r} says how depends_on= is met, and there is none")
    if (undo := step.compensate) is None:
        return
    if undo.name in known:
        raise MisuseError(f"{undo.name!r} compensates {step.name!r}: do not list it as a step of the flow")
    for name in (*undo.required, *undo.optional):
        if name in known and name not in (step.name, *step.depends_on):
            raise MisuseError(
                f"{undo.name!r} takes the result of {name!r}: it can take those of {step.name!r} and its depends_on="
            )


@attrs.define(eq=False, repr=False)
class FlowPlan(PlanMaker):
    """Gives the steps of a flow as a plan, and compensations as a second plan if steps have failed."""

    steps: tuple[Step, ...] = attrs.field(converter=sort_steps)
    """The steps, in an order in which each depends only on earlier ones."""

    numbers: Mapping[str, int] = attrs.field(init=False)
    """Numbers of the steps in the plan, by name."""

    inputs: tuple[str, ...] = attrs.field(init=False)
    """Names of the inputs that a run needs."""

    optional_inputs: tuple[str, ...] = attrs.field(init=False)
    """Names of the inputs that have a default."""

    types: InputTypes = attrs.field(init=False)
    """The types of the inputs."""

    fixed = True
    maker = "flow"
    replans = 1

    def __attrs_post_init__(self) -> None:
        """Find the inputs: the parameters without the name of a step."""
        self.numbers = {each.name: number for number, each in enumerate(self.steps, 1)}
        self.max_steps: int = len(self.steps)
        required = dict.fromkeys(name for each in self._iter_all() for name in each.required)
        optional = dict.fromkeys(name for each in self._iter_all() for name in each.optional)
        self.inputs = tuple([name for name in required if name not in self.numbers])
        self.optional_inputs = tuple(
            [name for name in optional if name not in self.numbers and name not in self.inputs]
        )
        takers = [(each.name, types) for each in self._iter_all() for types in each.types]
        self.types = InputTypes(self.inputs, self.optional_inputs, tuple(takers))
        results = {each.name: each.result_hint for each in self.steps}
        for each in self._iter_all():
            check_results(each.name, each.types, results)

    @property
    def input_schema(self) -> Mapping[str, JSON]:
        """JSON Schema of the inputs."""
        return self.types.schema

    def _iter_all(self) -> Iterator[Step]:
        yield from self.steps
        yield from {each.compensate.name: each.compensate for each in self.steps if each.compensate}.values()

    def list_tools(self) -> list[Tool[..., Any]]:
        """Return the tools of the steps and of their compensations."""
        return [each.tool for each in self._iter_all()]

    def list_planned_calls(self) -> tuple[PlannedCall, ...]:
        """Return the calls of the steps, whose arguments are results of others and inputs."""
        inputs: dict[str, JSON] = {name: {"$input": name} for name in (*self.inputs, *self.optional_inputs)}
        steps = [
            PlanStep(
                id=self.numbers[step.name],
                tool=step.name,
                arguments=self._build_arguments(step, inputs),
                after=tuple([self.numbers[name] for name in step.depends_on]),
                join=step.join,
            )
            for step in self.steps
        ]
        agents = [each.name for each in self.steps if each.calls > 1 or each.over or each.tool.kind is ToolKind.AGENT]
        return plan_calls(steps, agents=agents, conditional=[each.name for each in self.steps if each.when is not None])

    def build_limits(self, limits: Limits | None) -> Limits:
        """Return limits that leave room for the retries of the steps. Without given ones, for their time, too."""
        steps = list(self._iter_all())
        retries = [each.retry for each in steps]
        if limits is None:
            seconds = sum(each.tool.timeout_s or STEP_TIMEOUT_S for each in steps)
            default = Limits()
            calls = 2 * sum(each.calls for each in steps)
            limits = Limits(seconds=max(seconds, default.seconds), tool_calls=max(calls, default.tool_calls))
        return attrs.evolve(
            limits,
            retries_per_tool=max(limits.retries_per_tool, *retries),
            retries_per_run=max(limits.retries_per_run, sum(retries)),
        )

    def write_inputs(self, prompt: Prompt | Mapping[str, Any]) -> str:
        """Return the inputs of a run as the text of its prompt.

        Raises:
            MisuseError: if an input is missing or unknown, is not JSON, or does not fit the type hints.
        """
        if not isinstance(prompt, Mapping):
            prompt = _read_object(_read_text(as_parts(prompt)))
        known = (*self.inputs, *self.optional_inputs)
        if missing := [name for name in self.inputs if name not in prompt]:
            raise MisuseError(f"the flow needs the input {missing[0]!r}; its inputs are: {', '.join(known)}")
        if unknown := sorted(map(str, prompt.keys() - set(known))):
            raise MisuseError(f"no step takes the input {unknown[0]!r}; the inputs are: {', '.join(known) or 'none'}")
        if has_reserved_key(prompt):
            raise MisuseError("inputs cannot have the keys '$step' and '$text', which stand for results of steps")
        try:
            text = json.dumps(prompt, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise MisuseError(f"inputs are JSON values: {error}") from None
        if (flaw := self.types.find_flaw(prompt)) is not None:
            raise MisuseError(flaw)
        return text

    def wants(self, run: Run) -> bool:  # noqa: ARG002  a flow always has its plan
        """Return True."""
        return True

    async def plan(self, request: PlanRequest, ask: PlanAsk) -> Plan | None:  # noqa: ARG002  no model is asked
        """Return the steps as a plan; after a failure, the compensations that the plan in the journal names."""
        if request.failure and request.run.plan is not None:
            return build_compensations(self._complete(request.run.plan), in_order=True)
        values = read_inputs(request.run)
        return Plan(
            steps=tuple(
                [
                    PlanStep(
                        id=self.numbers[step.name],
                        tool=step.name,
                        arguments=self._build_arguments(step, values),
                        after=tuple(sorted([self.numbers[name] for name in step.depends_on])),
                        join=step.join,
                        compensation=self._build_compensation(step, values),
                    )
                    for step in self.steps
                ]
            )
        )

    def _build_arguments(self, step: Step, values: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return the arguments of a step: references to results of other steps, and inputs."""
        found: dict[str, JSON] = {**values, **{name: {"$step": number} for name, number in self.numbers.items()}}
        return {name: found[name] for name in step.names if name in found}

    def _build_compensation(self, step: Step, values: Mapping[str, JSON]) -> Compensation | None:
        if (undo := step.compensate) is None:
            return None
        return Compensation(tool=undo.name, arguments=self._build_arguments(undo, values))

    def _complete(self, progress: PlanProgress) -> PlanProgress:
        known = {each.name: self._build_compensation(each, {}) for each in self.steps}
        return add_compensations(progress, lambda step: known.get(step.tool))

    def conclude(self, run: Run) -> PlanEnd | None:
        """Return the answer or the failure of a run whose steps have ended; None if compensations come first.

        The steps are those of the plan in the journal: another version of the flow changes nothing for a run that has
        one.
        """
        if run.plan is None or run.plan.forward is None:
            return PlanEnd(failure="its plan was not carried out")
        progress, steps = self._complete(run.plan), run.plan.forward.steps
        statuses = self.find_statuses(run)
        unstarted = StepStatus.PENDING
        statuses = {name: StepStatus.NOT_RUN if each is unstarted else each for name, each in statuses.items()}
        if not any(_fails(step, steps, statuses) for step in steps):
            last, results = find_last_steps(run.plan.forward), find_results(run)
            answer = {name: value for name, value in results.items() if name in last}
            return PlanEnd(answer=json.dumps(answer, ensure_ascii=False))
        if progress.kind is PlanKind.FORWARD and build_compensations(progress, in_order=True) is not None:
            return None
        unrun = [name for name, status in statuses.items() if status is StepStatus.NOT_RUN]
        return PlanEnd(failure=describe_failure(run, unrun))

    def find_statuses(self, run: Run) -> dict[str, StepStatus]:
        """Return the status of each step of the run, by name; without a plan, of each step of the flow."""
        progress = run.plan
        if progress is None or progress.forward is None:
            return dict.fromkeys(self.numbers, StepStatus.NOT_RUN if run.is_over else StepStatus.PENDING)
        is_past = run.is_over or progress.kind is PlanKind.COMPENSATION
        names = [step.tool for step in progress.forward.steps]
        found = dict.fromkeys(names, StepStatus.NOT_RUN if is_past else StepStatus.PENDING)
        return found | {entry.call.name: read_step_status(entry) for entry in find_steps(run)}


def add_compensations(progress: PlanProgress, find: Callable[[PlanStep], Compensation | None]) -> PlanProgress:
    """Return the plans of a run. Format 4 did not record compensations, so those of the program are found."""
    if progress.maker or progress.forward is None:
        return progress
    steps = [attrs.evolve(step, compensation=find(step)) for step in progress.forward.steps]
    return attrs.evolve(progress, forward=attrs.evolve(progress.forward, steps=tuple(steps)))


def _fails(step: PlanStep, steps: tuple[PlanStep, ...], statuses: Mapping[str, StepStatus]) -> bool:
    """Return whether a flow fails because of a step: it has not succeeded, and no "any" join stood in for it."""
    if statuses[step.tool] not in _ENDED_BADLY:
        return False
    behind = [each for each in steps if step.id in each.after]
    return not behind or any(each.join != "any" or statuses[each.tool] in _ENDED_BADLY for each in behind)


def find_steps(run: Run, *, compensations: bool = False) -> list[OpenCall]:
    """Return the calls of the steps of a run, or of their compensations, in the order of their start."""
    progress = run.plan
    if progress is None:
        return []
    undoes = progress.plan if progress.kind is PlanKind.COMPENSATION else None
    return list_steps(undoes if compensations else progress.forward, (*progress.closed, *run.open))


def find_results(run: Run) -> dict[str, JSON]:
    """Return the results of the steps of the newest plan that have succeeded, by name."""
    return {
        entry.call.name: read_content(entry.result.content)
        for entry in find_steps(run)
        if entry.result is not None and entry.result.outcome is Outcome.DONE
    }


def find_last_steps(plan: Plan) -> list[str]:
    """Return the names of the steps that no other step of a plan comes after."""
    needed = {number for step in plan.steps for number in step.after}
    return [step.tool for step in plan.steps if step.id not in needed]


def has_outcome(entry: OpenCall, outcome: Outcome) -> bool:
    """Return whether a call has ended with this outcome."""
    return entry.result is not None and entry.result.outcome is outcome


def read_step_status(entry: OpenCall) -> StepStatus:
    """Return the status of a step from its call."""
    if entry.result is None:
        if entry.phase in UNDECIDED_PHASES:
            return StepStatus.WAITING
        return StepStatus.RUNNING if entry.phase is Phase.RUNNING else StepStatus.PENDING
    if entry.result.outcome is Outcome.DONE:
        return StepStatus.SUCCESS
    return StepStatus.SKIPPED if is_skipped(entry.result) else StepStatus.FAILED


def describe_failure(run: Run, unrun: list[str]) -> str:
    """Return which steps failed and why, which did not run, and which were compensated."""
    parts = [f"step {name} failed ({reason})" for name, reason in list_failures(find_steps(run))]
    parts += [f"not run: {', '.join(unrun)}"] if unrun else []
    undone = find_steps(run, compensations=True)
    done = [entry.call.name for entry in undone if has_outcome(entry, Outcome.DONE)]
    parts += [f"compensated by: {', '.join(done)}"] if done else []
    parts += [f"compensation {name} failed ({reason})" for name, reason in list_failures(undone)]
    return "; ".join(parts)


def list_failures(entries: Iterable[OpenCall]) -> list[tuple[str, str]]:
    """Return the steps that have ended without success, with the reasons."""
    ended = [(entry.call.name, entry.result) for entry in entries if entry.result is not None]
    return [(name, shorten_reason(result)) for name, result in ended if is_failure(result)]


def is_failure(result: ToolResult) -> bool:
    """Return whether a step has ended without success, and was not skipped."""
    return result.outcome is not Outcome.DONE and not is_skipped(result)


def shorten_reason(result: ToolResult, chars: int = _REASON_CHARS) -> str:
    """Return the reason why a step failed, for people, on one line of at most so many characters."""
    kind = "" if result.outcome is Outcome.FAILED else f"{result.outcome}: "
    text = f"{kind}{remove_advice(result.content)}"
    if len(text) <= chars:
        return text
    text = text[: chars - len(_CUT)]
    return (text.rpartition(" ")[0] if " " in text[chars // 2 :] else text) + _CUT


def read_inputs(run: Run) -> dict[str, JSON]:
    """Return the inputs of a run of a flow, by name."""
    return _read_object(_read_text(run.header.prompt))


def _read_text(parts: tuple[Part, ...]) -> str:
    return "".join([part.text for part in parts if isinstance(part, TextPart)])


def _read_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        MisuseError: if it has none.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise MisuseError("the prompt of a flow is a mapping of its inputs, or the text of a JSON object")
    return value


def has_reserved_key(value: object) -> bool:
    """Return whether a value has a key that stands for results in a plan, at any depth."""
    if isinstance(value, Mapping):
        return not _RESERVED_KEYS.isdisjoint(value) or any(map(has_reserved_key, value.values()))
    return isinstance(value, list | tuple) and any(map(has_reserved_key, value))
