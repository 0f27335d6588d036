"""Tools: a function, what the model is told of it, and what its author declares about running it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from functools import cached_property
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import attrs

from agentfsm.core.errors import ArgumentsError, MisuseError, ModelRetry
from agentfsm.core.fingerprint import short_hash
from agentfsm.core.pending import PendingKind
from agentfsm.core.tool_traits import Level, ToolKind
from agentfsm.core.validation import BOOL, COUNT, FUNCTION, NOT_NEGATIVE, POSITIVE, STRING, ValueRule
from agentfsm.limiter import Limiter
from agentfsm.ports.model import ToolDefinition, to_mutable_json
from agentfsm.ports.store import Clock, Store
from agentfsm.tools import callback_errors
from agentfsm.tools.breaker import Breaker
from agentfsm.tools.run_context import Found, RunContext, ToolReturn
from agentfsm.tools.schema.binding import Arguments, BoundArguments

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON, ToolCall
    from agentfsm.tools.schema.binding import ToolSignature

P = ParamSpec("P")
R = TypeVar("R")

# Seconds that an approval is waited for: a week covers a holiday weekend, and no answer is a no.
APPROVAL_EXPIRES_S: Final = 7 * 86_400.0
# Seconds that an answer is waited for: people are away as long, whatever they are asked.
ANSWER_EXPIRES_S: Final = APPROVAL_EXPIRES_S
# Tokens of a result that the model is shown, so that twenty results fit the usual window.
SHOWN_TOKENS: Final = 4_000
# The same in UTF-8 bytes, for text that has few tokens for its length.
SHOWN_BYTES: Final = 64_000
# The longest tool name that the providers take.
NAME_CHARS: Final = 64

# Characters of a hash: 64 bits, so that nobody finds other arguments with the same.
DIGEST_CHARS: Final = 16
UNKNOWN_OUTCOME_POLICIES: Final = frozenset({"rerun", "fail", "ask"})

UnknownOutcomePolicy: TypeAlias = Literal["rerun", "fail", "ask"]
_FoundOutcome: TypeAlias = "UnknownOutcomePolicy | Found"
OnUnknown: TypeAlias = (
    "UnknownOutcomePolicy | Callable[[RunContext[Any], Arguments], _FoundOutcome | Awaitable[_FoundOutcome]]"
)


def _to_tags(tags: Iterable[str]) -> frozenset[str]:
    return frozenset(tags)


@attrs.define(eq=False, repr=False, kw_only=True)
class Tool(Generic[P, R]):
    """A function that a model may call. Calling the tool calls the function, so that it can be tested as one.

    What takes a function of the arguments is given them validated, with defaults, as attributes: `lambda a: a.path`.
    """

    function: Callable[P, R]
    name: str
    description: str
    parameters: Mapping[str, JSON]
    """The JSON Schema of the arguments."""

    bind: Callable[[str], BoundArguments]
    """Turns the arguments' JSON text into what the function is called with; raises ArgumentsError."""

    to_namespace: Callable[[BoundArguments], Arguments]
    """Turns that into what a declaration's function is given."""

    takes_context: bool
    is_async: bool
    kind: ToolKind = ToolKind.DIRECT
    strict: bool = False
    """Whether the provider shall hold the model to the schema while it writes (OpenAI's strict mode)."""

    read_only: bool = False
    """Changes nothing: may run beside others, may run again."""

    idempotent: bool = False
    """Running it again under the same key has the same effect as running it once."""

    on_unknown: OnUnknown = attrs.field(
        default=attrs.Factory(lambda tool: "rerun" if tool.repeatable else "ask", takes_self=True)
    )
    """What is done about a call that was under way when its worker died, so that nobody knows what became of it:
    "rerun" it under the same key, "fail" it with the outcome unknown, "ask" a person (`settle`), or a function of its
    context and arguments that finds out, and returns `Found(result)` or one of these words.
    """

    external: bool = False
    """The function is never called: the call waits, and its result comes from outside (`answer`)."""

    answer_expires_s: float | Callable[[Arguments], float] = ANSWER_EXPIRES_S
    """Seconds that it is waited for, 0 or more; then the model is told that nobody answered."""

    concurrency_safe: bool | Callable[[Arguments], bool] = False
    """May run beside others."""

    locks: Callable[[Arguments], Iterable[Hashable]] | None = None
    """What a call touches, as keys: it overlaps with whatever touches none of them. None: it may touch anything."""

    after: tuple[str, ...] = ()
    """Tools whose earlier calls in the same reply a call waits for."""

    limit: int | None = None
    """Calls in flight at once, of all runs in this process, 1 or more. None: any number."""

    per_minute: int | None = None
    """Calls that start in any 60 seconds, of all runs in this process, 1 or more; a call beyond that waits its turn
    without using up its time. None: any number.
    """

    tags: frozenset[str] = attrs.field(default=frozenset(), converter=_to_tags)
    permission: Level = attrs.field(
        default=attrs.Factory(lambda tool: Level.READ if tool.read_only else Level.WRITE, takes_self=True),
        converter=Level,
    )
    """What a caller must be allowed to do."""

    enabled: bool | Callable[[RunContext[Any]], bool] = True
    """Whether it is there at all, asked for each turn and each call."""

    validate: Callable[[Arguments], str | None] | None = None
    """A rule that the arguments must meet beside their schema: returns, or raises as ValueError, what is wrong."""

    requires_approval: bool | Callable[[Arguments], bool] = False
    """A person has to say yes to each call, or to those that the function picks."""

    approval_expires_s: float = APPROVAL_EXPIRES_S
    describe: Callable[[Arguments], str] | None = None
    """What a call will do, in a sentence, for the person who approves it."""

    timeout_s: float | None = None
    """Seconds for a call, retries included; None for the run's own `Limits.tool_timeout_s`."""

    grace_s: float = 0.0
    """Seconds beyond it for a tool that keeps its time by itself."""

    estimate_s: float | None = None
    """Seconds that a call usually takes; shown, never enforced."""

    shown_tokens: int = SHOWN_TOKENS
    shown_bytes: int = SHOWN_BYTES
    """Of a result that the model is shown, 1 or more; the whole is kept in the journal."""

    poll: bool = False
    """Repeating it is its job: it counts for no loop."""

    waits_for: PendingKind | None = attrs.field(
        default=attrs.Factory(lambda tool: PendingKind.QUESTION if tool.external else None, takes_self=True)
    )
    """What a call without a body waits for."""

    end_child_run: Callable[[Store, Clock, str, str], Awaitable[ToolReturn]] | None = None
    """Ends the run of the agent behind a call, by the ids of the caller and the call, since one of them ends; returns
    what the agent did.
    """

    breaker: Breaker = attrs.field(factory=Breaker, init=False, repr=False)
    limiter: Limiter | None = attrs.field(
        default=attrs.Factory(lambda tool: _build_limiter(tool.limit, tool.per_minute), takes_self=True),
        init=False,
        repr=False,
    )

    def __repr__(self) -> str:
        parameters: Any = self.parameters.get("properties")
        return f"<Tool {self.name}({', '.join(parameters or ())})>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, outside any run."""
        return self.function(*args, **kwargs)

    @property
    def repeatable(self) -> bool:
        """Whether running a call again does no more than running it once."""
        return self.read_only or self.idempotent

    @property
    def is_interactive(self) -> bool:
        """Whether something may have to come from outside before a call of it counts."""
        return self.requires_approval is not False or self.waits_for is not None

    def digest_call(self, call: ToolCall) -> str:
        """Return what an approval is bound to: a hash of the tool as it is, and of the exact arguments."""
        return short_hash(f"{self.digest}\n{call.name}\n{call.arguments}", DIGEST_CHARS)

    @property
    def may_start_early(self) -> bool:
        """Whether its calls may start before the reply that asks for them is whole."""
        return self.read_only and self.requires_approval is False and self.kind is ToolKind.DIRECT

    @cached_property
    def digest(self) -> str:
        """Hash of what the tool is to those who decide on it: its description, its schema, what its author declares."""
        shape = [self.name, self.description, self.read_only, self.idempotent, self.strict]
        return short_hash(
            json.dumps([*shape, to_mutable_json(self.parameters)], sort_keys=True, default=str), DIGEST_CHARS
        )

    @property
    def definition(self) -> ToolDefinition:
        """The tool as a model is told of it."""
        return ToolDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )

    def bind_and_check(self, text: str) -> BoundArguments:
        """Read the arguments of a call through all three layers: JSON, schema, rule.

        Raises:
            ArgumentsError: telling the model what does not fit.
        """
        bound = self.bind(text)
        self.check_rule(bound)
        return bound

    def check_rule(self, bound: BoundArguments) -> None:
        """Hold arguments that fit the schema to the rule.

        Raises:
            ArgumentsError: telling the model what is wrong.
        """
        if self.validate is not None and (flaw := _find_rule_violation(self, self.validate, self.to_namespace(bound))):
            raise ArgumentsError(f"the arguments of {self.name} break a rule: {flaw}. Nothing was run.")


def _find_rule_violation(
    tool: Tool[..., Any], validate: Callable[[Arguments], str | None], arguments: Arguments
) -> str | None:
    try:
        flaw = validate(arguments)
    except (ValueError, ModelRetry) as error:
        return _error_text(error) or "they are not allowed"
    except Exception as error:  # noqa: BLE001  a rule that breaks has not said yes
        callback_errors.log_callback_error("validate", tool.name, "the call is refused", error)
        return f"the rule could not be applied ({type(error).__name__})"
    # Other values are mistakes: the `True` of a rule that says what is right reads as a flaw, its `False` as none.
    return flaw if flaw is None or isinstance(flaw, str) else f"the rule could not be applied ({type(flaw).__name__})"


def _error_text(error: Exception) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  a broken __str__ must not hide that the rule said no
        return ""


class ToolDeclarations(TypedDict, total=False):
    """What may be declared of any tool, also of one that is an agent; the fields of `Tool` say what it means."""

    strict: bool
    on_unknown: OnUnknown
    answer_expires_s: float | Callable[[Arguments], float]
    concurrency_safe: bool | Callable[[Arguments], bool]
    locks: Callable[[Arguments], Iterable[Hashable]] | None
    after: Collection[str]
    limit: int | None
    per_minute: int | None
    tags: Collection[str]
    permission: Level | str
    enabled: bool | Callable[[RunContext[Any]], bool]
    validate: Callable[[Arguments], str | None] | None
    requires_approval: bool | Callable[[Arguments], bool]
    approval_expires_s: float
    describe: Callable[[Arguments], str] | None
    estimate_s: float | None
    shown_tokens: int
    shown_bytes: int
    poll: bool


class ToolOptions(ToolDeclarations, total=False):
    """What `tool` takes."""

    name: str | None
    description: str | None
    parameters: Mapping[str, JSON] | None
    read_only: bool
    idempotent: bool
    external: bool
    timeout_s: float | None


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
    """Make a tool of a function: bare, or with what you declare about it.

    The schema comes from the type hints and the docstring (Google, NumPy or Sphinx). A first parameter annotated
    `RunContext[...]` is handed in by the engine and hidden from the model.

    Args:
        function: Plain or async. A plain one runs in a thread of its own.
        **options: `name` (by default the function's), `description` (by default the docstring's text), `parameters`
            (a JSON Schema in place of the type hints), and what the fields of `Tool` say. What is not declared is not
            assumed: a tool without a word runs alone, and is never silently repeated.

    Raises:
        MisuseError: when no schema can be made of the function, or a declaration makes no sense.
    """
    return (lambda fn: make_tool(fn, **options)) if function is None else make_tool(function, **options)


def make_tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, JSON] | None = None,
    strict: bool = False,
    concurrency_safe: bool | Callable[[Arguments], bool] | None = None,
    **options: Any,
) -> Tool[..., Any]:
    """Make a tool; `tool` is this as a decorator."""
    name = name or str(getattr(function, "__name__", type(function).__name__))
    _check_name(name)
    _check_function(name, function)
    _check_declarations(name, description=description, concurrency_safe=concurrency_safe, **options)
    signature = _read_signature(function, name, parameters, strict=strict)
    read_only = options.get("read_only", False)
    return Tool(
        function=function,
        name=name,
        description=signature.description if description is None else description,
        parameters=signature.parameters,
        bind=signature.bind,
        to_namespace=signature.to_namespace,
        takes_context=signature.context_parameter is not None,
        is_async=_is_async(function),
        strict=strict,
        concurrency_safe=read_only if concurrency_safe is None else concurrency_safe,
        **options,
    )


def _read_signature(
    function: Callable[..., Any], name: str, parameters: Mapping[str, JSON] | None, *, strict: bool
) -> ToolSignature:
    if parameters is None:
        from agentfsm.tools.schema.signature import build_function_signature  # noqa: PLC0415  brings pydantic

        return build_function_signature(function, context_type=RunContext, name=name, strict=strict)
    from agentfsm.tools.schema.json_schema import build_schema_signature  # noqa: PLC0415  brings a schema validator

    return build_schema_signature(function, parameters, context_type=RunContext, name=name, strict=strict)


def _check_name(name: str) -> None:
    plain = name.replace("_", "").replace("-", "") if isinstance(name, str) else ""
    if not (plain.isascii() and plain.isalnum() and len(name) <= NAME_CHARS):
        raise MisuseError(
            f"a tool cannot be called {name!r}: use 1 to {NAME_CHARS} ASCII letters, digits, '_' or '-', "
            "for example @tool(name='search')",
        )


_CHOICE: Final = ValueRule(
    fits=lambda value: isinstance(value, bool) or callable(value), wanted="True, False or a function"
).or_none()
_STRINGS: Final = ValueRule(
    fits=lambda value: (
        isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(each, str) for each in value)
    ),
    wanted="a tuple of strings, also where it is one: ('a',)",
)

# The options of a tool, and what each may be.
_OPTION_RULES: Final[Mapping[str, ValueRule]] = {
    **dict.fromkeys(
        ("timeout_s", "estimate_s", "approval_expires_s", "shown_tokens", "shown_bytes"), POSITIVE.or_none()
    ),
    "description": STRING.or_none(),
    "limit": attrs.evolve(
        COUNT.or_none(),
        wanted=f"{COUNT.or_none().wanted}; a Limiter is shared by a tag: tags=['db'], and "
        "ToolRegistry(tag_limits={'db': limiter})",
    ),
    "per_minute": COUNT.or_none(),
    **dict.fromkeys(("read_only", "idempotent", "poll", "external"), BOOL),
    **dict.fromkeys(("enabled", "requires_approval", "concurrency_safe"), _CHOICE),
    **dict.fromkeys(("validate", "describe", "locks"), FUNCTION.or_none()),
    **dict.fromkeys(("after", "tags"), _STRINGS),
    "answer_expires_s": ValueRule(
        fits=lambda value: callable(value) or NOT_NEGATIVE.fits(value),
        wanted="a finite number, 0 or more, or a function",
    ),
    "on_unknown": ValueRule(
        fits=lambda value: callable(value) or (isinstance(value, str) and value in UNKNOWN_OUTCOME_POLICIES),
        wanted="'rerun', 'fail', 'ask' or a function",
    ),
}


def _build_limiter(limit: int | None, per_minute: int | None) -> Limiter | None:
    return None if limit is None and per_minute is None else Limiter(limit, per_minute=per_minute)


def _check_declarations(name: str, **declared: Any) -> None:
    for option, value in declared.items():
        if (rule := _OPTION_RULES.get(option)) is not None:
            rule.check(f"tool {name!r}", option, value)
        if iscoroutinefunction(value) and option != "on_unknown":
            raise MisuseError(
                f"tool {name!r}: {option}= is asked while calls are planned and cannot wait: give a plain function"
            )
    if declared.get("external") and declared.get("requires_approval"):
        raise MisuseError(f"tool {name!r}: an external call runs nothing that could be approved: leave that out")
    if declared.get("read_only") and "on_unknown" in declared:
        raise MisuseError(f"tool {name!r} is read-only and simply runs again: leave out on_unknown=")


def _check_function(name: str, function: Callable[..., Any]) -> None:
    if isinstance(function, Tool):
        raise MisuseError(
            f"{function.name!r} is a tool already: for one that declares something else write "
            f"tool(name={function.name!r}, ...)({function.name}.function)"
        )
    if any(map(isgeneratorfunction, _code_holders(function))) or any(map(isasyncgenfunction, _code_holders(function))):
        raise MisuseError(
            f"tool {name!r} is a generator, which has no one result: return a list, and tell of its progress by "
            "`await ctx.progress(...)`"
        )


def _is_async(function: Callable[..., Any]) -> bool:
    return any(map(iscoroutinefunction, _code_holders(function)))


def _code_holders(function: Callable[..., Any]) -> tuple[Any, Any]:
    """Return what may hold the code of a function: that itself, a partial's function, an object's `__call__`."""
    inner = getattr(function, "func", function)
    return inner, getattr(inner, "__call__", None)  # noqa: B004  not asked whether it can be called
