"""Steps that are repeated until a condition on their results holds: a child run whose plans are the repetitions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import JSON, ErrorType, Outcome
from agentfsm.core.plans import JOINS, Plan, PlanStep
from agentfsm.core.validation import FUNCTION, STRING, ValueRule, require_choice
from agentfsm.flow.agent_steps import make_child_step
from agentfsm.flow.child_flows import REPEATED_TIMEOUT_S, build_repeating_agent, check_inputs, write_inputs
from agentfsm.flow.flow_plan import (
    describe_failure,
    find_last_steps,
    find_results,
    find_steps,
    is_failure,
    list_failures,
    read_inputs,
    sort_steps,
)
from agentfsm.flow.step_types import check_results, select_types
from agentfsm.flow.steps import Names, Step, check_options, join_names, log, pick, read_names
from agentfsm.ports.policies import PlanAsk, PlanEnd, PlanMaker, PlanRequest
from agentfsm.tools.run_context import RunContext, ToolReturn

if TYPE_CHECKING:
    from agentfsm.core.run import Run

# Repetitions at most: a loop that needs more is a poll, and belongs into a schedule.
MAX_TIMES: Final = 1_000
_TIMES: Final = ValueRule(
    fits=lambda value: type(value) is int and 1 <= value <= MAX_TIMES, wanted=f"a whole number from 1 to {MAX_TIMES:,}"
)


def until(
    steps: Step | Iterable[Step],
    done: Callable[..., bool],
    *,
    times: int,
    on_limit: Literal["fail", "accept"] = "fail",
    name: str | None = None,
    depends_on: Iterable[str | Step] = (),
    when: Callable[..., bool] | None = None,
    compensate: Callable[..., Any] | Step | None = None,
    timeout_s: float = REPEATED_TIMEOUT_S,
    **options: Any,
) -> Step:
    """Make a step that repeats a step, or a cycle of several, until a condition on the results holds.

    Each repetition is a plan of a child run, and each step of it a call. A parameter with the name of a step takes its
    result: that of this repetition if the step is in `depends_on`, else that of the repetition before, which is None in
    the first one and where the step was skipped, or the parameter's default. The result is that of the last step in the
    last repetition, or an object with those of the last ones by name. A step that fails ends the loop, once its
    siblings have ended.

    Args:
        steps: The step, such as that of a function, an agent or a flow, or several. Their `depends_on` names steps of
            the cycle, and others of the flow, which come before the loop. They are not listed in the flow itself.
        done: Function that returns whether to stop. It takes results and inputs by name, also those of `steps`: None
            for one that was skipped. It has to return the same for the same arguments.
        times: Maximum of repetitions, from 1 to 1,000.
        on_limit: What becomes of the step if the condition does not hold after the last repetition. "fail": it fails.
            "accept": the last result is its result, and the log and the `error_type` of the result say so.
        name: Name of the step in the flow, and of its result; by default that of the last step.
        depends_on: Further steps, besides those that `steps` depend on.
        when: Function of results and inputs, as in `step`, on which the whole loop depends.
        compensate: Function or step that undoes all repetitions if the flow fails after this step. A repetition that
            fails is not undone.
        timeout_s: Seconds of active time for all repetitions together, above 0. Default 3,600.
        **options: Further options of `Agent.as_tool`.

    Raises:
        MisuseError: if an option is invalid, the steps cannot be ordered, or one has an option that belongs to the
            loop.
    """
    given = (steps,) if isinstance(steps, Step) else tuple(steps) if isinstance(steps, Iterable) else ()
    if not given or not all(isinstance(each, Step) for each in given):
        raise MisuseError(
            f"until({steps!r}): give a step, made with @step, agent_step(...), each(...) or as_step(), or a list of "
            "steps"
        )
    own = {each.name for each in given}
    cycle = sort_steps(
        tuple(
            [attrs.evolve(each, depends_on=tuple([name for name in each.depends_on if name in own])) for each in given]
        ),
        repeated=True,
    )
    size, needed = len(cycle), {name for each in cycle for name in each.depends_on}
    last = [each.name for each in cycle if each.name not in needed]
    if name is None and len(last) > 1:
        raise MisuseError(f"until([...]) has several last steps ({', '.join(last)}): give name=, that of their result")
    title = name or last[0]
    check_options(title, FUNCTION, done=done)
    check_options(title, STRING.or_none(), name=name)
    check_options(title, _TIMES, times=times)
    check_options(title, require_choice("fail", "accept"), on_limit=on_limit)
    if inspect.iscoroutinefunction(done):
        raise MisuseError(f"step {title!r}: done= is a plain function, since it only compares values")
    for each in cycle:
        if each.compensate is not None or (each.when is not None and size == 1):
            option = "compensate" if each.compensate is not None else "when"
            raise MisuseError(f"step {each.name!r} is repeated: give {option}= to until(...) instead")
        if each.join != JOINS[0] and size > 1:
            raise MisuseError(
                f"step {each.name!r} is one of a cycle, whose steps start once those before them have succeeded or "
                f"were skipped: leave out join={each.join!r}"
            )
        check_results(each.name, each.types, {other.name: other.result_hint for other in cycle})
    plan = UntilPlan(cycle=cycle, title=title, done=done, times=times, accepts_last=on_limit == "accept")
    agent = build_repeating_agent(title, plan, list(cycle), times=times, parallel=size, timeout_s=timeout_s)
    before = [name for each in given for name in each.depends_on if name not in own]
    made = make_child_step(
        agent,
        name=title,
        names=plan.names,
        write_prompt=write_inputs(plan.names),
        check_arguments=check_inputs,
        read_result=plan.read_result,
        order={"depends_on": [*before, *depends_on], "when": when, "join": cycle[0].join},
        timeout_s=timeout_s,
        compensate=compensate,
        options=options,
    )
    repeated = cycle[0].description if size == 1 else ", ".join([each.name for each in cycle])
    return attrs.evolve(
        made,
        over=tuple([name for each in cycle for name in each.over if name not in own]),
        calls=1 + times * sum([each.calls for each in cycle]),
        types=select_types([types for each in cycle for types in each.types], {*plan.names[0], *plan.names[1]}),
        result_hint=cycle[-1].result_hint if len(last) == 1 else dict[str, Any],
        description=f"{repeated}, up to {times} times".removeprefix(", "),
    )


@attrs.define(eq=False, repr=False, kw_only=True)
class UntilPlan(PlanMaker):
    """Plans one repetition after the other: each is a plan of all steps of the cycle."""

    cycle: tuple[Step, ...]
    """The steps that are repeated, in an order in which each depends only on earlier ones."""

    title: str
    """Name of the step in the flow."""

    done: Callable[..., bool]
    """Function that returns whether to stop."""

    times: int
    """Maximum of repetitions."""

    accepts_last: bool
    """Whether the last result counts if the condition does not hold for it."""

    fixed = True
    maker = "until"

    def __attrs_post_init__(self) -> None:
        """Bound the plans."""
        self.max_steps: int = len(self.cycle)
        self.replans: int = self.times - 1

    @property
    def names(self) -> Names:
        """Names of the parameters of the step in the flow."""
        own = {each.name for each in self.cycle}
        required, optional = join_names(*[(each.required, each.optional) for each in self.cycle], read_names(self.done))
        return tuple([name for name in required if name not in own]), tuple(
            [name for name in optional if name not in own]
        )

    def wants(self, run: Run) -> bool:  # noqa: ARG002  it is repeated at least once
        """Return True."""
        return True

    async def plan(self, request: PlanRequest, ask: PlanAsk) -> Plan | None:  # noqa: ARG002  no model is asked
        """Return the next repetition: the steps of the one before, which is in the journal, with its results."""
        known, values = {each.name: each for each in self.cycle}, read_inputs(request.run)
        progress = request.run.plan
        if progress is not None and progress.forward is not None:
            steps = progress.forward.steps
        else:
            numbers = {each.name: number for number, each in enumerate(self.cycle, 1)}
            steps = tuple(
                [
                    PlanStep(
                        id=numbers[each.name],
                        tool=each.name,
                        after=tuple([numbers[name] for name in each.depends_on]),
                    )
                    for each in self.cycle
                ]
            )
        shift, names = request.next_id - steps[0].id, {step.id: step.tool for step in steps}
        # Numbers of the results of the repetition before, by the names of their steps.
        before = {step.tool: step.id for step in steps if step.id in request.results}
        planned = list[PlanStep]()
        for step in steps:
            within = {names[number]: number + shift for number in step.after if number in names}
            own, arguments = known.get(step.tool), dict[str, JSON]()
            for name in step.arguments if own is None else own.names:
                if name in within or name in before:
                    arguments[name] = {"$step": within.get(name) or before[name]}
                elif name in known:
                    arguments |= {name: None} if own is not None and name in own.required else {}
                elif name in values:
                    arguments[name] = values[name]
            taken = [before[name] for name in arguments if name in before and name not in within]
            after = tuple(sorted({*within.values(), *taken}))
            planned.append(PlanStep(id=step.id + shift, tool=step.tool, arguments=arguments, after=after))
        return Plan(steps=tuple(planned))

    def conclude(self, run: Run) -> PlanEnd | None:
        """Return the result of the last repetition, or its failure; None if another one follows."""
        progress, ended = run.plan, find_steps(run)
        if progress is None or progress.forward is None or not ended:
            return PlanEnd(failure="no repetition has run")
        size, started = len(progress.forward.steps), {entry.call.name for entry in ended}
        count = -(-len(progress.steps) // size)
        if len(ended) < size or any(entry.result is None or is_failure(entry.result) for entry in ended):
            unrun = [step.tool for step in progress.forward.steps if step.tool not in started]
            failures = list_failures(ended)
            reason = failures[0][1] if size == 1 and failures else describe_failure(run, unrun)
            return PlanEnd(failure=f"repetition {count} failed ({reason})")
        results, last = find_results(run), find_last_steps(progress.forward)
        known: dict[str, Any] = {**read_inputs(run), **dict.fromkeys([each.name for each in self.cycle]), **results}
        try:
            is_done = bool(self.done(**pick(known, read_names(self.done))))
        except Exception as error:  # noqa: BLE001  a function of the user's
            return PlanEnd(failure=f"the condition raised {type(error).__name__} after repetition {count}: {error}")
        if not is_done and count < self.times:
            return None
        value: JSON = results.get(last[0])
        if len(last) > 1:
            value = {name: results[name] for name in last if name in results}
        if not is_done and not self.accepts_last:
            text = json.dumps(value, ensure_ascii=False)[:200]
            return PlanEnd(failure=f"the condition did not hold after {count} repetitions; the last result: {text}")
        answer: dict[str, JSON] = {"result": value, "times": count, "is_done": is_done}
        return PlanEnd(answer=json.dumps(answer, ensure_ascii=False))

    def read_result(self, ctx: RunContext[Any], found: ToolReturn) -> ToolReturn:
        """Return the result of the step from that of its child run, and log if the condition does not hold for it."""
        if found.outcome is not Outcome.DONE:
            return found
        answer = json.loads(found.content)
        if not answer["is_done"]:
            log.warning("step %s of run %s accepts its result after %d times", self.title, ctx.run_id, answer["times"])
        kind = None if answer["is_done"] else ErrorType.FALLBACK
        return attrs.evolve(found, content=json.dumps(answer["result"], ensure_ascii=False), error_type=kind)
