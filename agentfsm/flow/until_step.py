"""A step that is repeated until a condition on its result holds: a child run whose plans are the repetitions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import JSON, ErrorType, Outcome
from agentfsm.core.plans import Plan, PlanStep, find_step_number, read_content
from agentfsm.core.validation import FUNCTION, STRING, ValueRule, require_choice
from agentfsm.flow.agent_steps import make_child_step
from agentfsm.flow.child_flows import REPEATED_TIMEOUT_S, build_repeating_agent, check_inputs, write_inputs
from agentfsm.flow.flow_plan import read_inputs, shorten_reason
from agentfsm.flow.steps import Names, Step, check_options, join_names, log, pick, read_names
from agentfsm.ports.policies import PlanAsk, PlanEnd, PlanMaker, PlanRequest
from agentfsm.tools.run_context import RunContext, ToolReturn

if TYPE_CHECKING:
    from agentfsm.core.calls import OpenCall
    from agentfsm.core.run import Run

# Repetitions at most: a loop that needs more is a poll, and belongs into a schedule.
MAX_TIMES: Final = 1_000
_TIMES: Final = ValueRule(
    fits=lambda value: type(value) is int and 1 <= value <= MAX_TIMES, wanted=f"a whole number from 1 to {MAX_TIMES:,}"
)


def until(
    step: Step,
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
    """Make a step that repeats another step until a condition on its result holds.

    The result is that of the last repetition. Each repetition is a call of its own in a child run. The parameter of the
    step with its own name takes the result of the repetition before: None in the first one, or its default.

    Args:
        step: The step, such as that of a function, an agent or a flow. `depends_on` and `join` are its own; it is not
            listed in the flow itself.
        done: Function that returns whether to stop. It takes the result by the name of `step`, and results and inputs
            by name. It has to return the same for the same arguments.
        times: Maximum of repetitions, from 1 to 1,000.
        on_limit: What becomes of the step if the condition does not hold after the last repetition. "fail": it fails.
            "accept": the last result is its result, and the log and the `error_type` of the result say so.
        name: Name of the step in the flow, and of its result; by default that of `step`.
        depends_on: Further steps, besides those that `step` depends on.
        when: Function of results and inputs, as in `step`.
        compensate: Function or step that undoes all repetitions if the flow fails after this step. A repetition that
            fails is not undone.
        timeout_s: Seconds of active time for all repetitions together, above 0. Default 3,600.
        **options: Further options of `Agent.as_tool`.

    Raises:
        MisuseError: if an option is invalid, or the step has a condition or a compensation of its own.
    """
    if not isinstance(step, Step):
        raise MisuseError(f"until({step!r}): give a step, made with @step, agent_step(...), each(...) or as_step()")
    title = name or step.name
    check_options(title, FUNCTION, done=done)
    check_options(title, STRING.or_none(), name=name)
    check_options(title, _TIMES, times=times)
    check_options(title, require_choice("fail", "accept"), on_limit=on_limit)
    if inspect.iscoroutinefunction(done):
        raise MisuseError(f"step {title!r}: done= is a plain function, since it only compares values")
    if step.when is not None or step.compensate is not None:
        option = "when" if step.when is not None else "compensate"
        raise MisuseError(f"step {step.name!r} is repeated: give {option}= to until(...) instead")
    plan = UntilPlan(step=step, title=title, done=done, times=times, accepts_last=on_limit == "accept")
    agent = build_repeating_agent(title, plan, [step], times=times, parallel=1, timeout_s=timeout_s)
    made = make_child_step(
        agent,
        name=title,
        names=plan.names,
        write_prompt=write_inputs(plan.names),
        check_arguments=check_inputs,
        read_result=plan.read_result,
        order={"depends_on": [*step.depends_on, *depends_on], "when": when, "join": step.join},
        timeout_s=timeout_s,
        compensate=compensate,
        options=options,
    )
    repeated = "" if step.description == "" else f"{step.description}, "
    return attrs.evolve(
        made, over=step.over, calls=1 + times * step.calls, description=f"{repeated}up to {times} times"
    )


@attrs.define(eq=False, repr=False, kw_only=True)
class UntilPlan(PlanMaker):
    """Plans one repetition after the other: each is a plan of one step."""

    step: Step
    """The step that is repeated."""

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
    max_steps = 1

    def __attrs_post_init__(self) -> None:
        """Bound the plans."""
        self.replans: int = self.times - 1

    @property
    def names(self) -> Names:
        """Names of the parameters of the step in the flow."""
        required, optional = join_names((self.step.required, self.step.optional), read_names(self.done))
        own = self.step.name
        return tuple([name for name in required if name != own]), tuple([name for name in optional if name != own])

    def wants(self, run: Run) -> bool:  # noqa: ARG002  it is repeated at least once
        """Return True."""
        return True

    async def plan(self, request: PlanRequest, ask: PlanAsk) -> Plan | None:  # noqa: ARG002  no model is asked
        """Return the next repetition."""
        own, values = self.step.name, read_inputs(request.run)
        last = self._find_last(request.run)
        after = () if last is None else (find_step_number(last.call.id) or 0,)
        if after:
            values[own] = {"$step": after[0]}
        elif own in self.step.required:
            values[own] = None
        arguments = {name: values[name] for name in self.step.names if name in values}
        tool = own if last is None else last.call.name  # that of the journal, since the step may have been renamed
        step = PlanStep(id=request.next_id, tool=tool, arguments=arguments, after=after if own in arguments else ())
        return Plan(steps=(step,))

    def _find_last(self, run: Run) -> OpenCall | None:
        return None if run.plan is None or not run.plan.steps else run.plan.steps[-1]

    def conclude(self, run: Run) -> PlanEnd | None:
        """Return the last result, or the failure; None if another repetition follows."""
        last = self._find_last(run)
        if last is None or last.result is None or run.plan is None:
            return PlanEnd(failure="no repetition has run")
        count = len(run.plan.steps)
        if last.result.outcome is not Outcome.DONE:
            return PlanEnd(failure=f"repetition {count} failed ({shorten_reason(last.result)})")
        value = read_content(last.result.content)
        known: dict[str, Any] = {**read_inputs(run), self.step.name: value}
        try:
            is_done = bool(self.done(**pick(known, read_names(self.done))))
        except Exception as error:  # noqa: BLE001  a function of the user's
            return PlanEnd(failure=f"the condition raised {type(error).__name__} after repetition {count}: {error}")
        if not is_done and count < self.times:
            return None
        if not is_done and not self.accepts_last:
            text = last.result.content[:200]
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
