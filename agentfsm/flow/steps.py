"""Steps of flows: functions and agents as tools of the queue, with their conditions and dependencies.

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

from agentfsm.core.errors import MisuseError, ModelRetry, TransientError
from agentfsm.core.messages import JSON, ErrorType, Outcome
from agentfsm.core.plans import JOINS
from agentfsm.core.validation import COUNT_OR_ZERO, FUNCTION, SECONDS, STRING, ValueRule, require_choice
from agentfsm.core.value import Value
from agentfsm.subagent import DEFAULT_TURNS, make_agent_tool
from agentfsm.tools.queue.result_text import render_text
from agentfsm.tools.run_context import CallPaused, RunContext, ToolReturn
from agentfsm.tools.tool import Tool, ToolDeclarations, make_tool

if TYPE_CHECKING:
    from agentfsm._runnable_agent import RunnableAgent
    from agentfsm.tools.schema.binding import Arguments

_log = logging.getLogger("agentfsm.flow")

# Seconds for a step, retries included: a slow query or export takes minutes (document H03, 2.2).
STEP_TIMEOUT_S: Final = 300.0

Join = Literal["all_success", "all_done", "any"]
Validator = Callable[[Any], Any] | Collection[str]
_SKIPPED: Final = ToolReturn(
    outcome=Outcome.SKIPPED, content="skipped: its condition is false", error_type=ErrorType.CONDITION
)
_NAMES: Final = ValueRule(
    fits=lambda value: isinstance(value, Collection) and all(isinstance(each, str | Step) for each in value),
    wanted="a list of steps, or of their names",
)
_VALIDATOR: Final = ValueRule(
    fits=lambda value: (
        callable(value)
        or (isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(x, str) for x in value))
    ),
    wanted="a set of texts, or a function of the answer",
).or_none()


class StepOptions(ToolDeclarations, total=False):
    """Further options of a step, which are those of `tool`."""

    read_only: bool
    idempotent: bool
    cost_usd: float | Callable[[Arguments], float] | None


class _Order(TypedDict, total=False):
    depends_on: Iterable[str | Step]
    when: Callable[..., bool] | None
    join: Join


@attrs.frozen(kw_only=True, eq=False)
class Step(Value):
    """A step of a flow. Make it with `step` or `agent_step`. Calling it calls the function itself."""

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

    is_conditional: bool = False
    """Whether the step has a condition (`when`)."""

    retry: int = 0
    """Maximum of further attempts after an exception."""

    compensate: Step | None = None
    """The step that undoes this one, if the flow fails later; None if there is none."""

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
            surrounding space; or a function of the answer, of its type, that returns the result, or raises ValueError.
            None: any answer is valid.
        fallback: JSON value that is the result if the agent gives no valid answer. The log names the run and the step.
            Without it, the step fails.
        turns: Maximum of model replies, 1 or more. Default 3.
        timeout_s: Seconds for the step, above 0. Default 300.
        compensate: As in `step`.
        **options: Further options of `Agent.as_tool`.

    Raises:
        MisuseError: if an option is invalid.
    """
    title, names = name or agent.name, _read_names(prompt) if callable(prompt) else ((), ())
    _check(title, _VALIDATOR, validate=validate)
    if fallback is not attrs.NOTHING:
        _check_json(title, fallback)
    condition = _Condition(when)

    def write_prompt(arguments: Arguments) -> Any:
        return prompt(**_pick(vars(arguments), names)) if callable(prompt) else prompt

    required, optional = _join_names(names, condition.names)
    inner = make_agent_tool(
        agent,
        name=title,
        parameters=_build_schema(required, optional),
        prompt=write_prompt,
        turns=turns,
        timeout_s=timeout_s,
        accepts_partial=False,
        **_prepare_options(condition, {"concurrency_safe": True, **options}, repeatable=True),
    )
    config = agent.driver.config
    read_answer: Callable[[str], Any] = str if config.output_spec is None else config.output_spec.parse
    if config.planner is not None and config.planner.fixed:  # a flow
        read_answer = json.loads
    work = _AgentStep(title, inner.function, condition, validate, fallback, read_answer)
    return _build_step(
        attrs.evolve(inner, function=work.call),
        {"depends_on": depends_on, "when": when, "join": join},
        (required, optional),
        compensate=compensate,
    )


def _make_function_step(
    function: Callable[..., Any],
    *,
    name: str | None,
    order: _Order,
    retry: int,
    key: Callable[..., str] | None,
    compensate: Callable[..., Any] | Step | None,
    options: dict[str, Any],
) -> Step:
    inner = make_tool(function, name=name)
    _check(inner.name, SECONDS, timeout_s=options["timeout_s"])
    _check(inner.name, COUNT_OR_ZERO, retry=retry)
    _check(inner.name, FUNCTION.or_none(), key=key)
    if key is not None and not options.get("read_only"):
        options["idempotent"] = True
    repeatable = bool(options.get("read_only") or options.get("idempotent"))
    if retry and not repeatable:
        raise MisuseError(
            f"step {inner.name!r}: retry={retry} would repeat its effect: declare it read_only= or idempotent=, or "
            "give it a key="
        )
    condition = _Condition(order.get("when"))
    shape: Any = inner.parameters
    wanted = tuple(shape.get("required", ()))
    own = (wanted, tuple(each for each in shape.get("properties", ()) if each not in wanted))
    work = _FunctionStep(function, inner, condition, key, ((), ()) if key is None else _read_names(key), retry)
    names = _join_names(own, condition.names, work.key_names)
    made = make_tool(
        work.call if inner.is_async else work.call_in_thread,
        name=inner.name,
        description=inner.description,
        parameters=_build_schema(*names),
        **_prepare_options(condition, {"concurrency_safe": True, **options}, repeatable=repeatable),
    )
    return _build_step(made, order, names, retry=retry, compensate=compensate)


def _build_step(
    made: Tool[..., Any],
    order: _Order,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    *,
    retry: int = 0,
    compensate: Callable[..., Any] | Step | None,
) -> Step:
    name, depends_on = made.name, order.get("depends_on", ())
    depends_on = (depends_on,) if isinstance(depends_on, str | Step) else depends_on
    _check(name, _NAMES, depends_on=depends_on)
    _check(name, require_choice(*JOINS), join=order.get("join", JOINS[0]))
    if compensate is not None and not isinstance(compensate, Step):
        compensate = _make_function_step(
            compensate,
            name=f"compensate_{name}",
            order={},
            retry=0,
            key=None,
            compensate=None,
            options={"timeout_s": made.timeout_s},
        )
    if compensate is not None and (compensate.depends_on or compensate.compensate or compensate.is_conditional):
        raise MisuseError(f"step {name!r}: a compensation has no depends_on=, when= or compensate= of its own")
    return Step(
        name=name,
        tool=made,
        depends_on=tuple(dict.fromkeys(each.name if isinstance(each, Step) else each for each in depends_on)),
        join=order.get("join", "all_success"),
        required=names[0],
        optional=names[1],
        is_conditional=order.get("when") is not None,
        retry=retry,
        compensate=compensate,
    )


@attrs.define(eq=False, repr=False)
class _Condition:
    """The condition of a step."""

    when: Callable[..., bool] | None
    names: tuple[tuple[str, ...], tuple[str, ...]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        FUNCTION.or_none().check("step", "when", self.when)
        if inspect.iscoroutinefunction(self.when):
            raise MisuseError("when= is a plain function, since it only compares values")
        self.names = ((), ()) if self.when is None else _read_names(self.when)

    def holds(self, arguments: Mapping[str, Any]) -> bool:
        return self.when is None or bool(self.when(**_pick(arguments, self.names)))


@attrs.define(eq=False, repr=False)
class _FunctionStep:
    """Function of the tool of a step."""

    function: Callable[..., Any]
    inner: Tool[..., Any]
    """The function as a tool, which converts the arguments to its type hints."""

    condition: _Condition
    key: Callable[..., str] | None
    key_names: tuple[tuple[str, ...], tuple[str, ...]]
    retry: int

    async def call(self, ctx: RunContext[Any], **arguments: Any) -> Any:
        """Call an async function, if the condition holds."""
        if not self.condition.holds(arguments):
            return _SKIPPED
        args, kwargs = self._bind(ctx, arguments)
        try:
            return _to_result(await self.function(*args, **kwargs))
        except Exception as error:
            self._allow_retry(ctx, error)
            raise

    def call_in_thread(self, ctx: RunContext[Any], **arguments: Any) -> Any:
        """Call a plain function, if the condition holds."""
        if not self.condition.holds(arguments):
            return _SKIPPED
        args, kwargs = self._bind(ctx, arguments)
        try:
            return _to_result(self.function(*args, **kwargs))
        except Exception as error:
            self._allow_retry(ctx, error)
            raise

    def _bind(self, ctx: RunContext[Any], arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shape: Any = self.inner.parameters
        own = {name: arguments[name] for name in shape.get("properties", ()) if name in arguments}
        args, kwargs = self.inner.bind(json.dumps(own))
        if not self.inner.takes_context:
            return args, kwargs
        if self.key is not None:
            ctx = attrs.evolve(ctx, idempotency_key=str(self.key(**_pick(arguments, self.key_names))))
        return (ctx, *args), kwargs

    def _allow_retry(self, ctx: RunContext[Any], error: Exception) -> None:
        """Raise an error that the queue retries, if the step has an attempt left."""
        if ctx.attempt <= self.retry and not isinstance(error, CallPaused | ModelRetry | TransientError):
            _log.warning(
                "attempt %d of step %s of run %s failed", ctx.attempt, self.inner.name, ctx.run_id, exc_info=error
            )
            raise TransientError(f"{type(error).__name__}: {error}") from error


@attrs.define(eq=False, repr=False)
class _AgentStep:
    """Function of the tool of a step that an agent works on."""

    name: str
    ask: Callable[..., Awaitable[ToolReturn]]
    condition: _Condition
    validate: Validator | None
    fallback: Any
    read_answer: Callable[[str], Any]
    """Function that returns the value of the text of an answer."""

    async def call(self, ctx: RunContext[Any], **arguments: Any) -> ToolReturn:
        """Run the agent, if the condition holds, and check its answer."""
        if not self.condition.holds(arguments):
            return _SKIPPED
        found = await self.ask(ctx, **arguments)
        flaw = found.content
        if found.outcome is Outcome.DONE:
            try:
                value = self._check_answer(self.read_answer(found.content))
                return attrs.evolve(found, content=render_text(_to_result(value)))
            except (ValueError, TypeError) as error:
                flaw = f"the answer is not valid: {error}"
        elif found.outcome not in (Outcome.FAILED, Outcome.TIMED_OUT):
            return found
        if self.fallback is attrs.NOTHING:
            outcome = Outcome.FAILED if found.outcome is Outcome.DONE else found.outcome
            return attrs.evolve(found, outcome=outcome, content=flaw, error_type=found.error_type or ErrorType.AGENT)
        _log.warning("step %s of run %s uses its fallback: %s", self.name, ctx.run_id, flaw)
        return attrs.evolve(
            found, outcome=Outcome.DONE, content=render_text(_to_result(self.fallback)), error_type=None
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


def _prepare_options(condition: _Condition, options: dict[str, Any], *, repeatable: bool) -> dict[str, Any]:
    """Return the options of a tool, with those that ask a person limited to calls that are not skipped."""
    if condition.when is None:
        return options
    changed = dict(options)
    if asks := options.get("requires_approval"):
        changed["requires_approval"] = lambda arguments: (
            condition.holds(vars(arguments)) and (asks(arguments) if callable(asks) else True)
        )
    if not repeatable:  # a step that was about to be skipped has had no effect
        policy = options.get("on_unknown", "ask")

        def settle(ctx: RunContext[Any], arguments: Arguments) -> Any:
            if not condition.holds(vars(arguments)):
                return "rerun"
            return policy(ctx, arguments) if callable(policy) else policy

        changed["on_unknown"] = settle
    return changed


def _read_names(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the parameters without and with a default."""
    found = inspect.signature(function).parameters.values()
    for each in found:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise MisuseError(f"{each} of {function!r}: name the results and inputs that the function takes, each one")
    return (
        tuple([each.name for each in found if each.default is each.empty]),
        tuple([each.name for each in found if each.default is not each.empty]),
    )


def _join_names(*groups: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    required = tuple(dict.fromkeys(name for group in groups for name in group[0]))
    optional = dict.fromkeys(name for group in groups for name in group[1])
    return required, tuple(name for name in optional if name not in required)


def _pick(arguments: Mapping[str, Any], names: tuple[tuple[str, ...], tuple[str, ...]]) -> dict[str, Any]:
    return {name: arguments[name] for name in (*names[0], *names[1]) if name in arguments}


def _build_schema(required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, JSON]:
    """Return a schema that takes any JSON values by these names; the function's own hints are checked by its call."""
    names: dict[str, JSON] = {name: {} for name in (*required, *optional)}
    return {"type": "object", "properties": names, "required": list(required), "additionalProperties": False}


def _to_result(value: Any) -> Any:
    """Return the result of a step such that its JSON is read back as the same value, also if it is a text or None."""
    if isinstance(value, str):
        return json.dumps(str(value), ensure_ascii=False)
    return "null" if value is None else value


def _check(name: str, rule: ValueRule, **option: Any) -> None:
    for each, value in option.items():
        rule.check(f"step {name!r}", each, value)


def _check_json(name: str, fallback: Any) -> None:
    STRING.check("agent_step", "name", name)
    try:
        json.dumps(fallback)
    except (TypeError, ValueError) as error:
        raise MisuseError(f"step {name!r}: fallback= is a JSON value ({error})") from None
