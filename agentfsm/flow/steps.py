"""Steps of flows: functions as tools of the queue, with their conditions and dependencies.

A step is a tool whose parameters are the names of other steps and of inputs of the flow. Its call decides itself
whether the step is skipped, so the decision is in the journal as the outcome of the call.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack, overload

import attrs

from agentfsm.core.errors import MisuseError, ModelRetry, OutcomeUnknownError, TransientError
from agentfsm.core.messages import JSON, ErrorType, Outcome, Part
from agentfsm.core.plans import JOINS
from agentfsm.core.validation import COUNT_OR_ZERO, FUNCTION, SECONDS, ValueRule, require_choice
from agentfsm.core.value import Value
from agentfsm.flow.step_results import build_uncalled_result, build_unwritable_result, write_step_result
from agentfsm.flow.step_types import ParameterTypes, read_parameter_types, read_result_hint
from agentfsm.tools.run_context import CallPaused, RunContext, ToolReturn
from agentfsm.tools.tool import Tool, ToolDeclarations, make_tool

if TYPE_CHECKING:
    from agentfsm.tools.schema.binding import Arguments

log: logging.Logger = logging.getLogger("agentfsm.flow")

# Seconds for a step, retries included: a slow query or export takes minutes (document H03, 2.2).
STEP_TIMEOUT_S: Final = 300.0

Join = Literal["all_success", "all_done", "any"]
# Names of parameters: those without a default, and those with one.
Names = tuple[tuple[str, ...], tuple[str, ...]]
SKIPPED: Final = ToolReturn(
    outcome=Outcome.SKIPPED, content="skipped: its condition is false", error_type=ErrorType.CONDITION
)
_NAMES: Final = ValueRule(
    fits=lambda value: isinstance(value, Collection) and all(isinstance(each, str | Step) for each in value),
    wanted="a list of steps, or of their names",
)


class StepOptions(ToolDeclarations, total=False):
    """Further options of a step, which are those of `tool`."""

    read_only: bool
    idempotent: bool
    cost_usd: float | Callable[[Arguments], float] | None


class StepOrder(TypedDict, total=False):
    """The options of a step on when it starts."""

    depends_on: Iterable[str | Step]
    when: Callable[..., bool] | None
    join: Join


@attrs.frozen(kw_only=True, eq=False)
class Step(Value):
    """A step of a flow. Make it with `step`, `agent_step`, `each`, `until` or `Flow.as_step`.

    Calling it calls the function itself.
    """

    name: str
    """Name of the step, unique in the flow; the name of its tool."""

    tool: Tool[..., Any]
    """The tool whose call carries out the step."""

    depends_on: tuple[str, ...] = ()
    """Names of the steps that have to end before this one starts, as `join` says."""

    join: Join = "all_success"
    """Condition on `depends_on`, see `PlanStep.join`."""

    required: tuple[str, ...] = ()
    """Parameters of the step, its condition and its key that have no default: names of steps or of inputs."""

    optional: tuple[str, ...] = ()
    """Parameters that have a default."""

    when: Callable[..., bool] | None = None
    """Function of results and inputs; if it returns False, the step is skipped. None: it is never skipped."""

    retry: int = 0
    """Maximum of further attempts after an exception, 0 or more."""

    calls: int = 1
    """Maximum of tool calls of the step: more than 1 for a step that stands for several, such as that of `each`."""

    description: str = ""
    """Repetitions of the step, for pictures, such as "for each of orders"; empty if there are none."""

    compensate: Step | None = None
    """The step that undoes this one, if the flow fails later; None if there is none."""

    over: tuple[str, ...] = ()
    """For a step of `each`, the name of its list: a step of that name comes before this one. For a step of `until`,
    those of the steps that it repeats. Empty for others.
    """

    types: tuple[ParameterTypes, ...] = attrs.field(default=(), repr=False)
    """Type hints of parameters, for each function that takes them, as far as they are known."""

    result_hint: Any = attrs.field(default=Any, repr=False)
    """Type hint of the result; `Any` if it is not known."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters."""
        return (*self.required, *self.optional)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, outside any run."""
        work = getattr(self.tool.function, "__self__", None)
        return work.function(*args, **kwargs) if isinstance(work, _FunctionStep) else self.tool(*args, **kwargs)


@overload
def step(function: Callable[..., Any], /) -> Step: ...


@overload
def step(
    *,
    name: str | None = None,
    depends_on: Iterable[str | Step] = (),
    when: Callable[..., bool] | None = None,
    join: Join = "all_success",
    retry: int = 0,
    timeout_s: float = STEP_TIMEOUT_S,
    key: Callable[..., str] | None = None,
    compensate: Callable[..., Any] | Step | None = None,
    **options: Unpack[StepOptions],
) -> Callable[[Callable[..., Any]], Step]: ...


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    depends_on: Iterable[str | Step] = (),
    when: Callable[..., bool] | None = None,
    join: Join = "all_success",
    retry: int = 0,
    timeout_s: float = STEP_TIMEOUT_S,
    key: Callable[..., str] | None = None,
    compensate: Callable[..., Any] | Step | None = None,
    **options: Unpack[StepOptions],
) -> Step | Callable[[Callable[..., Any]], Step]:
    """Make a step of a function, as `@step` or `@step(...)` with options.

    A parameter with the name of a step in `depends_on` takes the result of that step, or None if it has none: it was
    skipped, or failed. All other parameters are inputs of the flow. Results and inputs are JSON values, converted to
    the type hints. If the first parameter is annotated `RunContext[...]`, the engine passes it.

    Args:
        function: A plain or an async function. A plain one runs in its own thread.
        name: Name of the step; by default the name of the function.
        depends_on: Steps, or their names, that have to end before this one starts.
        when: Function of results and inputs, which it takes by name; if it returns False, the step is skipped. It has
            to return the same for the same arguments. None: the step is never skipped.
        join: Condition on the steps in `depends_on`. "all_success": all have succeeded or were skipped. "all_done":
            all have ended in any way, or cannot start any more. "any": one has succeeded, or all were skipped.
        retry: Maximum of further attempts after an exception, 0 or more, after 1 s, 2 s and so on. Default 0. Above 0
            the step has to be `read_only` or `idempotent`, or to have a `key`.
        timeout_s: Seconds for the step, its retries included, above 0. Default 300.
        key: Function of results and inputs, which it takes by name, that returns `ctx.idempotency_key`, for example an
            order number. It declares the step as idempotent: the same key has its effect once, in any run. None: the
            key is that of this step in this run.
        compensate: Function or step that undoes this step if the flow fails after it. Its parameters may name what the
            step itself can take, and the step, for its result.
        **options: Further options of `tool`: `read_only`, `idempotent`, `on_unknown`, `requires_approval`, `locks`, ...
            `concurrency_safe` is True by default, since the dependencies are declared.

    Raises:
        MisuseError: if an option is invalid, or the function has a parameter without a type hint.
    """

    def make(fn: Callable[..., Any]) -> Step:
        return _make_function_step(
            fn,
            name=name,
            order={"depends_on": depends_on, "when": when, "join": join},
            retry=retry,
            key=key,
            compensate=compensate,
            options={"timeout_s": timeout_s, **options},
        )

    return make if function is None else make(function)


def _make_function_step(
    function: Callable[..., Any],
    *,
    name: str | None,
    order: StepOrder,
    retry: int,
    key: Callable[..., str] | None,
    compensate: Callable[..., Any] | Step | None,
    options: dict[str, Any],
    has_result: bool = True,
) -> Step:
    inner = make_tool(function, name=name)
    check_options(inner.name, SECONDS, timeout_s=options["timeout_s"])
    check_options(inner.name, COUNT_OR_ZERO, retry=retry)
    check_options(inner.name, FUNCTION.or_none(), key=key)
    if key is not None and not options.get("read_only"):
        options["idempotent"] = True
    repeatable = bool(options.get("read_only") or options.get("idempotent"))
    if retry and not repeatable:
        raise MisuseError(
            f"step {inner.name!r}: retry={retry} would repeat its effect: declare it read_only= or idempotent=, or "
            "give it a key="
        )
    condition = Condition(order.get("when"))
    shape: Any = inner.parameters
    wanted = tuple(shape.get("required", ()))
    own = (wanted, tuple(each for each in shape.get("properties", ()) if each not in wanted))
    key_names = ((), ()) if key is None else read_names(key)
    work = _FunctionStep(function, inner, condition, key, key_names, retry, has_result)
    names = join_names(own, condition.names, work.key_names)
    made = make_tool(
        work.call if inner.is_async else work.start,
        name=inner.name,
        description=inner.description,
        parameters=build_schema(*names),
        **prepare_options(condition, {"concurrency_safe": True, **options}),
    )
    made.start_rule, made.parameters_hash = work.decide_start, inner.parameters_hash
    found = build_step(made, order, names, retry=retry, compensate=compensate)
    return attrs.evolve(
        found,
        types=read_parameter_types(function, inner.name),
        result_hint=read_result_hint(function) if has_result else Any,
    )


def build_step(
    made: Tool[..., Any],
    order: StepOrder,
    names: Names,
    *,
    retry: int = 0,
    compensate: Callable[..., Any] | Step | None,
) -> Step:
    """Return the step whose work is the call of a tool.

    Raises:
        MisuseError: if an option is invalid.
    """
    name, depends_on = made.name, order.get("depends_on", ())
    depends_on = (depends_on,) if isinstance(depends_on, str | Step) else depends_on
    check_options(name, _NAMES, depends_on=depends_on)
    check_options(name, require_choice(*JOINS), join=order.get("join", JOINS[0]))
    if compensate is not None and not isinstance(compensate, Step):
        compensate = _make_function_step(
            compensate,
            name=f"compensate_{name}",
            order={},
            retry=0,
            key=None,
            compensate=None,
            options={"timeout_s": made.timeout_s},
            has_result=False,
        )
    if compensate is not None and (compensate.depends_on or compensate.compensate or compensate.when):
        raise MisuseError(f"step {name!r}: a compensation has no depends_on=, when= or compensate= of its own")
    return Step(
        name=name,
        tool=made,
        depends_on=tuple(dict.fromkeys(each.name if isinstance(each, Step) else each for each in depends_on)),
        join=order.get("join", "all_success"),
        required=names[0],
        optional=names[1],
        when=order.get("when"),
        retry=retry,
        compensate=compensate,
    )


@attrs.define(eq=False, repr=False)
class Condition:
    """The condition of a step."""

    when: Callable[..., bool] | None
    names: Names = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        FUNCTION.or_none().check("step", "when", self.when)
        if inspect.iscoroutinefunction(self.when):
            raise MisuseError("when= is a plain function, since it only compares values")
        self.names = ((), ()) if self.when is None else read_names(self.when)

    def check(self, ctx: RunContext[Any], step: str, arguments: Mapping[str, Any]) -> ToolReturn | None:
        """Return the result of a step that is skipped, or whose condition raises; None if it runs."""
        try:
            return None if self.holds(arguments) else SKIPPED
        except Exception as error:
            log.warning("the condition of step %s of run %s raised", step, ctx.run_id, exc_info=error)
            return build_uncalled_result("its condition when= raised ", error)

    def holds(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the step is not skipped."""
        return self.when is None or bool(self.when(**pick(arguments, self.names)))


@attrs.define(eq=False, repr=False)
class _FunctionStep:
    """Function of the tool of a step."""

    function: Callable[..., Any]
    inner: Tool[..., Any]
    """The function as a tool, which converts the arguments to its type hints."""

    condition: Condition
    key: Callable[..., str] | None
    key_names: Names
    retry: int
    has_result: bool
    """Whether other steps can read the result; those of compensations are not read."""

    async def call(self, ctx: RunContext[Any], **arguments: Any) -> Any:
        """Call an async function."""
        result = self.start(ctx, **arguments)
        return await result if hasattr(type(result), "__await__") else result

    def start(self, ctx: RunContext[Any], **arguments: Any) -> Any:
        """Call the function, and return the result, or an awaitable of it."""
        bound = self._bind(ctx, arguments)
        if isinstance(bound, ToolReturn):
            return bound
        args, kwargs = bound
        try:
            value = self.function(*args, **kwargs)
        except Exception as error:
            self._allow_retry(ctx, error)
            raise
        return self._finish(ctx, value) if hasattr(type(value), "__await__") else self._write(ctx, value)

    async def _finish(self, ctx: RunContext[Any], work: Awaitable[Any]) -> Any:
        try:
            value = await work
        except Exception as error:
            self._allow_retry(ctx, error)
            raise
        return self._write(ctx, value)

    def _write(self, ctx: RunContext[Any], value: Any) -> Any:
        """Return the result of the step, or its failure if the value of the function cannot be written as JSON."""
        if isinstance(value, ToolReturn | Part) or (
            type(value) in (list, tuple) and any(isinstance(each, Part) for each in value)
        ):
            return value
        try:
            return write_step_result(value)
        except Exception as error:
            if not self.has_result:
                return write_step_result(None)
            log.warning("step %s of run %s has no JSON as its result", self.inner.name, ctx.run_id, exc_info=error)
            return build_unwritable_result(value, error)

    def decide_start(self, ctx: RunContext[Any], arguments: Arguments, *, has_started: bool) -> ToolReturn | str | None:
        """Return the result of a step that is not needed or does not fit, or the key of one that has a `key=`."""
        given = vars(arguments)
        if not has_started and (known := self.condition.check(ctx, self.inner.name, given)) is not None:
            return known
        if isinstance(bound := self._bind(ctx, given), ToolReturn):
            return bound
        if has_started or self.key is None:
            return None
        try:
            return str(self.key(**pick(given, self.key_names)))
        except Exception as error:
            log.warning("the key= of step %s of run %s raised", self.inner.name, ctx.run_id, exc_info=error)
            return build_uncalled_result("its key= raised ", error)

    def _bind(
        self, ctx: RunContext[Any], arguments: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | ToolReturn:
        """Return the arguments of the function; a result if they do not fit its type hints."""
        shape: Any = self.inner.parameters
        own = {name: arguments[name] for name in shape.get("properties", ()) if name in arguments}
        try:
            args, kwargs = self.inner.bind(json.dumps(own))
        except Exception as error:  # noqa: BLE001  types of the user's validate themselves
            log.warning("the arguments of step %s of run %s do not fit: %s", self.inner.name, ctx.run_id, error)
            return build_uncalled_result("", error)
        return ((ctx, *args) if self.inner.takes_context else args), kwargs

    def _allow_retry(self, ctx: RunContext[Any], error: Exception) -> None:
        """Raise an error that the queue retries, if the step has an attempt left."""
        if ctx.attempt <= self.retry and not isinstance(
            error, CallPaused | ModelRetry | TransientError | OutcomeUnknownError
        ):
            log.warning(
                "attempt %d of step %s of run %s failed", ctx.attempt, self.inner.name, ctx.run_id, exc_info=error
            )
            raise TransientError(f"{type(error).__name__}: {error}") from error


def prepare_options(condition: Condition, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a tool, with an approval only for calls that are not skipped."""
    asks = options.get("requires_approval")
    if condition.when is None or not asks:
        return options
    return options | {
        "requires_approval": lambda arguments: (
            condition.holds(vars(arguments)) and (asks(arguments) if callable(asks) else True)
        )
    }


def read_names(function: Callable[..., Any]) -> Names:
    """Return the names of the parameters without and with a default."""
    found = inspect.signature(function).parameters.values()
    for each in found:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise MisuseError(f"{each} of {function!r}: name the results and inputs that the function takes, each one")
    return (
        tuple([each.name for each in found if each.default is each.empty]),
        tuple([each.name for each in found if each.default is not each.empty]),
    )


def join_names(*groups: Names) -> Names:
    """Return each name of the groups once; one that a group requires is required."""
    required = tuple(dict.fromkeys(name for group in groups for name in group[0]))
    optional = dict.fromkeys(name for group in groups for name in group[1])
    return required, tuple(name for name in optional if name not in required)


def pick(arguments: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the arguments with these names, as far as they are given."""
    return {name: arguments[name] for name in (*names[0], *names[1]) if name in arguments}


def build_schema(required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, JSON]:
    """Return a schema that takes any JSON values by these names; the function's own hints are checked by its call."""
    names: dict[str, JSON] = {name: {} for name in (*required, *optional)}
    return {"type": "object", "properties": names, "required": list(required), "additionalProperties": False}


def check_options(step: str, rule: ValueRule, /, **option: Any) -> None:
    """Check options of a step.

    Raises:
        MisuseError: if one does not fit the rule.
    """
    for each, value in option.items():
        rule.check(f"step {step!r}", each, value)
