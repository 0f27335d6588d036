"""Steps whose work is a child run: those of agents, and what all of them share."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.runnable_agent import DEFAULT_TURNS
from agentfsm.agents.subagent import make_agent_tool
from agentfsm.core.errors import IncompatibleProgramError, MisuseError, StoreError
from agentfsm.core.messages import ErrorType, Outcome, as_parts
from agentfsm.core.validation import STRING, ValueRule
from agentfsm.flow.flow_plan import FlowPlan
from agentfsm.flow.step_results import write_step_result
from agentfsm.flow.step_types import read_parameter_types, read_result_hint
from agentfsm.flow.steps import (
    STEP_TIMEOUT_S,
    Condition,
    Join,
    Names,
    Step,
    StepOrder,
    build_schema,
    build_step,
    check_options,
    join_names,
    log,
    pick,
    prepare_options,
    read_names,
)
from agentfsm.tools.queue.result_text import describe_error, remove_advice
from agentfsm.tools.run_context import CallPaused, RunContext, ToolReturn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.tools.schema.binding import Arguments as Bound

# Tool calls of an agent in a turn, for which the limit of a flow has room: as in `Limits.tool_calls`.
_CALLS_OF_A_TURN: Final = 10
Validator = Callable[[Any], Any] | Collection[str]
Arguments = Mapping[str, Any]
_VALIDATOR: Final = ValueRule(
    fits=lambda value: (
        callable(value)
        or (
            isinstance(value, Collection)
            and not isinstance(value, str)
            and len(value) > 0
            and all(isinstance(x, str) for x in value)
        )
    ),
    wanted="a set of texts, at least one, or a function of the answer",
).or_none()


def agent_step(
    agent: RunnableAgent,
    prompt: str | Callable[..., Any],
    *,
    name: str | None = None,
    depends_on: Iterable[str | Step] = (),
    when: Callable[..., bool] | None = None,
    join: Join = "all_success",
    validate: Validator | None = None,
    fallback: Any = attrs.NOTHING,
    turns: int = DEFAULT_TURNS,
    timeout_s: float = STEP_TIMEOUT_S,
    compensate: Callable[..., Any] | Step | None = None,
    **options: Any,
) -> Step:
    """Make a step of an agent. Its run is a child run, with its own journal and within the limits of the flow.

    The result of the step is the agent's answer: a text, or JSON if the agent has an `output_type` or is a flow.

    Args:
        agent: The agent, or a flow.
        prompt: Prompt, or function of results and inputs, which it takes by name, that returns it.
        name: Name of the step; by default that of the agent.
        depends_on: As in `step`.
        when: As in `step`.
        join: As in `step`.
        validate: Check of the answer before other steps read it: the set of valid texts, compared without case and
            surrounding space; or a function of the answer, of its type, that returns the result, a JSON value, or
            raises an exception. None: any answer is valid.
        fallback: JSON value that is the result if the agent gives no valid answer for any reason: `validate` refuses
            it, its run fails, reaches a limit or is cancelled, its model raises an exception, or `prompt` does. If
            `validate` is a set, one of its texts. The log names the run, the step and the reason. Without it, the step
            fails. It also fails if it is unknown whether a tool of the agent had its effect.
        turns: Maximum of model replies, 1 or more. Default 3.
        timeout_s: Seconds for the step, above 0. Default 300.
        compensate: As in `step`.
        **options: Further options of `Agent.as_tool`.

    Raises:
        MisuseError: if an option is invalid.
    """
    title = name or agent.name
    check_options(title, _VALIDATOR, validate=validate)
    if fallback is not attrs.NOTHING:
        check_json(title, fallback=fallback)
        if validate is not None and not callable(validate) and fallback not in list(validate):
            raise MisuseError(
                f"step {title!r}: other steps take one of {', '.join(sorted(validate))}, so fallback={fallback!r} has "
                "to be one of them, too"
            )
    names = read_names(prompt) if callable(prompt) else ((), ())
    config = agent.driver.config
    read_text: Callable[[str], Any] = str if config.output_spec is None else config.output_spec.parse
    check: Callable[[Any], object] = as_parts
    if is_flow := isinstance(config.planner, FlowPlan):
        read_text, check = json.loads, config.planner.write_inputs
    made = make_child_step(
        agent,
        name=title,
        names=names,
        write_prompt=_PromptWriter(prompt, names, check=check).write,
        read_result=_AnswerCheck(title, validate, fallback, read_text).read,
        order={"depends_on": depends_on, "when": when, "join": join},
        turns=turns,
        timeout_s=timeout_s,
        compensate=compensate,
        options=options,
        has_fallback=fallback is not attrs.NOTHING,
    )
    result: Any = dict[str, Any] if is_flow else str if config.output_spec is None else Any
    if callable(validate):
        result = read_result_hint(validate)
    return attrs.evolve(
        made,
        types=read_parameter_types(prompt, title) if callable(prompt) else (),
        result_hint=result if fallback is attrs.NOTHING or isinstance(fallback, str) else Any,
        calls=1 + min(agent.limits.tool_calls, _CALLS_OF_A_TURN * turns) * bool(config.registry),
    )


def make_child_step(
    agent: RunnableAgent,
    *,
    name: str,
    names: Names,
    write_prompt: Callable[[Arguments], Any],
    read_result: Callable[[RunContext[Any], ToolReturn], ToolReturn],
    order: StepOrder,
    timeout_s: float,
    options: Mapping[str, Any],
    check_arguments: Callable[[Arguments], ToolReturn | None] | None = None,
    compensate: Callable[..., Any] | Step | None = None,
    turns: int = DEFAULT_TURNS,
    has_fallback: bool = False,
) -> Step:
    """Make a step whose work is a run of an agent.

    Args:
        agent: The agent, or a flow.
        name: Name of the step.
        names: Names of the parameters, without those of the condition.
        write_prompt: Function of the arguments that returns the first message of the child run.
        read_result: Function of the context and the result of the child run that returns that of the step.
        order: The dependencies and the condition of the step.
        timeout_s: Seconds for the step, above 0.
        options: Further options of `Agent.as_tool`.
        check_arguments: Function of the arguments that returns the result if no child run is needed; None: one always
            is.
        compensate: As in `step`.
        turns: Maximum of model replies, 1 or more.
        has_fallback: Whether `read_result` also reads the failure of a run that an exception has ended.

    Raises:
        MisuseError: if an option is invalid.
    """
    condition = Condition(order.get("when"))
    names = join_names(names, condition.names)
    inner = make_agent_tool(
        agent,
        name=name,
        parameters=build_schema(*names),
        prompt=lambda arguments: write_prompt(vars(arguments)),
        turns=turns,
        timeout_s=timeout_s,
        accepts_partial=False,
        **prepare_options(condition, {"concurrency_safe": True, **options}),
    )
    work = _ChildRunStep(name, inner.function, condition, check_arguments, read_result, has_fallback)
    rule = None if condition.when is None and check_arguments is None else work.decide_start
    return build_step(attrs.evolve(inner, function=work.call, start_rule=rule), order, names, compensate=compensate)


@attrs.define(eq=False, repr=False)
class _ChildRunStep:
    """Function of the tool of a step whose work is a child run."""

    name: str
    work: Callable[..., Awaitable[ToolReturn]]
    condition: Condition
    check_arguments: Callable[[Arguments], ToolReturn | None] | None
    read_result: Callable[[RunContext[Any], ToolReturn], ToolReturn]
    has_fallback: bool

    def decide_start(self, ctx: RunContext[Any], arguments: Bound, *, has_started: bool) -> ToolReturn | None:
        """Return the result of a step that is not needed. Once it has started, its child run exists and goes on."""
        if has_started:
            return None
        known = self.condition.check(ctx, self.name, vars(arguments))
        return known if known is not None or self.check_arguments is None else self.check_arguments(vars(arguments))

    async def call(self, ctx: RunContext[Any], **arguments: Any) -> ToolReturn:
        """Run the agent, and read its result."""
        try:
            found = await self.work(ctx, **arguments)
        except Exception as error:
            is_uncalled = isinstance(error, _PromptError)
            if _must_propagate(error) or not (self.has_fallback or is_uncalled):
                raise
            log.warning("step %s (%s) of run %s raised", self.name, ctx.call_id, ctx.run_id, exc_info=error)
            text = str(error) if is_uncalled else describe_error(error)
            found = ToolReturn(outcome=Outcome.FAILED, content=text, error_type=ErrorType.AGENT)
        return self.read_result(ctx, found)


def _must_propagate(error: BaseException) -> bool:
    """Return whether an exception says nothing of the agent: the call pauses, the store fails, the program differs."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_must_propagate, error.exceptions))
    return isinstance(error, CallPaused | StoreError | IncompatibleProgramError) or not isinstance(error, Exception)


class _PromptError(Exception):
    """There is no prompt for the agent."""


@attrs.define(eq=False, repr=False)
class _PromptWriter:
    """Writes the prompt of an agent from the arguments of its step."""

    prompt: str | Callable[..., Any]
    names: Names
    check: Callable[[Any], object]
    """Checks a prompt, or the inputs of a flow, and raises an error if they are invalid."""

    def write(self, arguments: Arguments) -> Any:
        """Return the prompt.

        Raises:
            _PromptError: if its function raises, or returns something else.
        """
        if not callable(self.prompt):
            return self.prompt
        try:
            prompt = self.prompt(**pick(arguments, self.names))
            self.check(prompt)
        except Exception as error:
            raise _PromptError(f"the agent was not called, since its prompt= raised {describe_error(error)}") from error
        return prompt


@attrs.define(eq=False, repr=False)
class _AnswerCheck:
    """Checks the answer of an agent, and replaces it by the fallback if it is not valid."""

    name: str
    validate: Validator | None
    fallback: Any
    read_text: Callable[[str], Any]
    """Function that returns the value of the text of an answer."""

    def read(self, ctx: RunContext[Any], found: ToolReturn) -> ToolReturn:
        """Return the result of the step."""
        flaw = found.content
        if found.outcome is Outcome.DONE:
            try:
                value = self._check_answer(self.read_text(found.content))
                return attrs.evolve(found, content=write_step_result(value))
            except Exception as error:  # noqa: BLE001  a function of the user's
                said = str(error) if isinstance(error, ValueError) else describe_error(error)
                flaw = f"the answer is not valid: {said}"
        elif found.outcome is Outcome.UNKNOWN:
            return found
        if self.fallback is attrs.NOTHING:
            outcome = Outcome.FAILED if found.outcome is Outcome.DONE else found.outcome
            return attrs.evolve(found, outcome=outcome, content=flaw, error_type=found.error_type or ErrorType.AGENT)
        log.warning(
            "step %s (%s) of run %s uses its fallback: %s", self.name, ctx.call_id, ctx.run_id, remove_advice(flaw)
        )
        return attrs.evolve(
            found,
            outcome=Outcome.DONE,
            content=write_step_result(self.fallback),
            error_type=ErrorType.FALLBACK,
        )

    def _check_answer(self, answer: Any) -> Any:
        if self.validate is None:
            return answer
        if callable(self.validate):
            return self.validate(answer)
        valid = {each.strip().casefold(): each for each in self.validate}
        said = answer.strip().casefold() if isinstance(answer, str) else answer
        if said not in valid:
            raise ValueError(f"{str(answer)[:200]!r} is none of {', '.join(sorted(self.validate))}")
        return valid[said]


def check_json(name: str, **option: Any) -> None:
    """Check that an option of a step is a JSON value.

    Raises:
        MisuseError: if it is none.
    """
    STRING.check("step", "name", name)
    for each, value in option.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise MisuseError(f"step {name!r}: {each}= is a JSON value ({error})") from None
