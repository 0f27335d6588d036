"""Tools: a Python function, its definition for the model, and its execution options."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from difflib import get_close_matches
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import attrs

from agentfsm._lib.limiter import Limiter
from agentfsm.core.errors import ArgumentsError, MisuseError, ModelRetry
from agentfsm.core.header import short_hash
from agentfsm.core.labels import DATA_LEVELS, EFFECT_LABELS, Label, Level, ToolKind
from agentfsm.core.pending import PendingKind
from agentfsm.core.validation import (
    BOOL,
    COUNT,
    FUNCTION,
    NOT_NEGATIVE,
    POSITIVE,
    STRING,
    ValueRule,
    require_choice,
    require_members,
)
from agentfsm.core.value import cached
from agentfsm.ports.guards import ToolTraits
from agentfsm.ports.model import ToolDefinition, to_mutable_json
from agentfsm.ports.store import Clock, Store
from agentfsm.ports.tool_login import ToolLogin
from agentfsm.ports.tool_sandbox import ToolSandbox
from agentfsm.tools import callback_errors
from agentfsm.tools.breaker import Breaker
from agentfsm.tools.run_context import Found, RunContext, ToolReturn
from agentfsm.tools.schema.binding import Arguments, BoundArguments

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON, ToolCall
    from agentfsm.core.run import Run
    from agentfsm.tools.schema.binding import ToolSignature

P = ParamSpec("P")
R = TypeVar("R")

# Seconds until an unanswered approval request is rejected: a week covers a holiday weekend.
APPROVAL_EXPIRES_S: Final = 7 * 86_400.0
# Seconds until an unanswered question expires: the same absences apply as to approvals.
ANSWER_EXPIRES_S: Final = APPROVAL_EXPIRES_S
# Default maximum of tokens of a result shown to the model, so that twenty results fit the usual context window.
SHOWN_TOKENS: Final = 4_000
# The same maximum in UTF-8 bytes, for text with few tokens relative to its length.
SHOWN_BYTES: Final = 64_000
# Seconds beyond the time of a sandbox until a call is cut off: the sandbox ends itself first.
SANDBOX_GRACE_S: Final = 10.0
# Maximum length of a tool name that the providers accept.
NAME_CHARS: Final = 64

# Characters of a hash: 64 bits, so that different arguments with the same hash cannot be found in practice.
DIGEST_CHARS: Final = 16
UNKNOWN_OUTCOME_POLICIES: Final = frozenset({"rerun", "fail", "ask"})

UnknownOutcomePolicy: TypeAlias = Literal["rerun", "fail", "ask"]
_FoundOutcome: TypeAlias = "UnknownOutcomePolicy | Found"
OnUnknown: TypeAlias = (
    "UnknownOutcomePolicy | Callable[[RunContext[Any], Arguments], _FoundOutcome | Awaitable[_FoundOutcome]]"
)


class StartRule(Protocol):
    """Decides before each start of a call whether it is needed and possible."""

    def __call__(self, ctx: RunContext[Any], arguments: Arguments, *, has_started: bool) -> ToolReturn | str | None:
        """Return the result of a call that need not or cannot start, the idempotency key of a first start, or None."""
        ...


class EndTask(Protocol):
    """Asks a server to end the task of a call."""

    async def __call__(self, state: JSON, *, tenant: str | None, user: str | None) -> bool:
        """Return whether the server has taken the request; `state` is that of the call, the others those of its run."""
        ...


# Hexadecimal digits of the hash of a tool's parameters, in the start of each call.
_PARAMETERS_DIGITS: Final = 6


class InnerAgent(Protocol):
    """The agent behind a tool, as the engine knows it."""

    async def end_run(self, store: Store, clock: Clock, caller: str, call_id: str) -> ToolReturn:
        """Cancel the child run of a call, because the parent run or the call ends; return what it did.

        Raises:
            RunNotFoundError: if the child run never began.
        """
        ...

    def has_tool(self, name: str, seen: tuple[object, ...]) -> bool:
        """Return whether the agent has a tool, or an agent below it; `seen` are the tools on the way."""
        ...

    async def drive_run(self, context: RunContext[Any]) -> ToolReturn:
        """Execute the child run of a background call until it is over or waits; return what it did.

        Args:
            context: Context of the call that began it.

        Raises:
            CallPaused: when it waits for external input.
            RunNotFoundError: if the store does not have it.
            LeaseHeldError: if another owner has its lease.
        """
        ...

    def hash_agent(self, seen: tuple[object, ...]) -> str:
        """Return the version and the digest of the fingerprint of the agent; `seen` are the tools on the way."""
        ...

    async def find_child(self, store: Store, caller: str, call_id: str) -> tuple[Any, Run[Any]] | None:
        """Return the configuration of the agent and the child run of a call; None if it has none that is open."""
        ...


def _name_policy(tool: Tool[..., Any]) -> str:
    policy = tool.on_unknown if isinstance(tool.on_unknown, str) else "check"
    return "" if policy == ("rerun" if tool.repeatable else "ask") else policy


def _to_tags(tags: Iterable[str]) -> frozenset[str]:
    return frozenset(tags)


# Options that declare a label.
_LABEL_OPTIONS: Final = {
    Label.UNTRUSTED: "reads_untrusted",
    Label.PRIVATE: "reads_private",
    Label.SENDS_OUT: "sends_out",
    Label.IRREVERSIBLE: "irreversible",
}


def _list_labels(tool: Tool[..., Any]) -> tuple[Label, ...]:
    own = tuple([label for label, option in _LABEL_OPTIONS.items() if getattr(tool, option)])
    return (*own, Label(tool.data_level)) if tool.data_level else own


def _list_label_rules(tool: Tool[..., Any]) -> Mapping[Label, Callable[[Arguments], bool]]:
    return {label: getattr(tool, name) for label, name in _LABEL_OPTIONS.items() if callable(getattr(tool, name))}


class _ToolCache:
    __slots__ = ("_defaults", "_digest", "_parameters_hash", "_traits")


@attrs.define(eq=False, repr=False, kw_only=True)
class Tool(_ToolCache, Generic[P, R]):
    """A function that a model may call. Calling the `Tool` calls the function, so that tests can use it directly.

    Options that take a function of the arguments pass it a namespace of validated arguments, defaults included: `lambda
    a: a.path`.
    """

    function: Callable[P, R]
    """The wrapped function, plain or async. A plain function runs in its own thread."""

    name: str
    """Name shown to the model: 1 to 64 ASCII letters, digits, "_" or "-", unique in a registry."""

    description: str
    """Text that explains the tool to the model; may be empty."""

    parameters: Mapping[str, JSON]
    """JSON Schema of the arguments, without the RunContext parameter."""

    dialect: str | None = None
    """Draft of JSON Schema that `parameters` are written in, as the given schema names it in `$schema`. It is in
    `input_schema`, and models are not shown it. None: the schema names none.
    """

    bind: Callable[[str], BoundArguments]
    """Converts the JSON text of the arguments to positional and keyword arguments; raises ArgumentsError."""

    to_namespace: Callable[[BoundArguments], Arguments]
    """Converts bound arguments to the namespace passed to functions such as `locks` and `validate`."""

    takes_context: bool
    """Whether the first parameter of the function receives the RunContext."""

    is_async: bool
    """Whether the function is async."""

    kind: ToolKind = ToolKind.DIRECT
    """`ToolKind.AGENT` if the call runs another agent, else `ToolKind.DIRECT`."""

    strict: bool = False
    """Whether the provider enforces the schema while the model generates the arguments (OpenAI's strict mode)."""

    read_only: bool = False
    """Whether a call changes nothing, so that it may overlap other calls and may be repeated."""

    idempotent: bool = False
    """Whether repeating a call with the same idempotency key has the same effect as running it once."""

    on_unknown: OnUnknown = attrs.field(
        default=attrs.Factory(lambda tool: "rerun" if tool.repeatable else "ask", takes_self=True)
    )
    """Policy for a call that was running when its worker crashed, so that its outcome is unknown. "rerun": run it again
    under the same key. "fail": report the unknown outcome. "ask": wait for a person (`settle`). A function of the
    context and the arguments can check the outcome and return `Found(result)` or one of these words. Default "rerun"
    for read-only and idempotent tools, else "ask".
    """

    external: bool = False
    """Whether the result comes from outside (`answer`): the function is never called, and the call waits."""

    answer_expires_s: float | Callable[[Arguments], float] = ANSWER_EXPIRES_S
    """Seconds to wait for that answer, 0 or more, or a function of the arguments. After that, the model is informed
    that the call was not answered. Default 604,800 (7 days): people may be absent over a holiday weekend.
    """

    concurrency_safe: bool | Callable[[Arguments], bool] = False
    """Whether a call may overlap other calls, or a function of the arguments that decides it. `@tool` defaults to the
    value of `read_only`.
    """

    locks: Callable[[Arguments], Iterable[Hashable]] | None = None
    """Function that returns the keys of the resources that a call uses; the call may overlap calls without a common
    key. None: the call may use anything.
    """

    after: tuple[str, ...] = ()
    """Names of tools whose earlier calls in the same reply must end before a call of this tool starts."""

    replaces: tuple[str, ...] = ()
    """Names of tools in place of which this one was written. An open run goes on with this tool where its calls, steps
    and compensations of such a name have not started, unless its agent still has a tool of that name. The journal
    records it, as `Resumed.renamed`. A call that has started never goes on as another tool.
    """

    limit: int | None = None
    """Maximum of concurrent calls over all runs in this process, 1 or more. None: unlimited."""

    per_minute: int | None = None
    """Maximum of calls started in any 60 seconds over all runs in this process, 1 or more. The time that a call waits
    for it does not count toward its timeout. None: unlimited.
    """

    tags: frozenset[str] = attrs.field(default=frozenset(), converter=_to_tags)
    """Labels for `ToolRegistry.filter` and for limits shared by several tools (`ToolRegistry.tag_limits`)."""

    permission: Level = attrs.field(
        default=attrs.Factory(lambda tool: Level.READ if tool.read_only else Level.WRITE, takes_self=True),
        converter=Level,
    )
    """Level that the run needs to call the tool. Default READ if `read_only`, else WRITE."""

    enabled: bool | Callable[[RunContext[Any]], bool] = True
    """Whether the tool is available, or a function of the context that decides it for each turn and each call."""

    validate: Callable[[Arguments], str | None] | None = None
    """Function that checks the arguments beyond their schema. It returns an error message, raises ValueError, or
    returns None if they are valid.
    """

    requires_approval: bool | Callable[[Arguments], bool] = False
    """Whether a person must approve each call, or a function that selects the calls by their arguments."""

    approval_expires_s: float = APPROVAL_EXPIRES_S
    """Seconds until an unanswered approval request is rejected, above 0. Default 604,800 (7 days), which covers a
    holiday weekend.
    """

    describe: Callable[[Arguments], str] | None = None
    """Function that returns a sentence about the effect of a call, for the person who approves it. It has to be pure:
    if it returns another sentence before the call starts, the person is asked again.
    """

    timeout_s: float | None = None
    """Seconds per call, retries included, above 0. None: `Limits.tool_timeout_s` of the run."""

    sandbox: ToolSandbox | None = None
    """Sandbox in which the function runs, in a process of its own: `Sandbox()` of `agentfsm.sandbox`. The function is
    a plain one of a module, and takes and returns JSON values. Calling the `Tool` itself does not use it. None: the
    function runs in this process.
    """

    login: ToolLogin | None = None
    """Logins of the users of runs at the server of the tool: `Login(...)` of `agentfsm.logins`. A call of a user
    without one waits before it starts. None: no login.
    """

    grace_s: float = 0.0
    """Additional seconds for a tool that enforces `timeout_s` itself."""

    estimate_s: float | None = None
    """Usual seconds per call, for display only. None: unknown."""

    shown_tokens: int = SHOWN_TOKENS
    """Maximum of tokens of a result shown to the model, 1 or more. The journal keeps the whole result. Default 4,000,
    so that twenty results fit the usual context window.
    """

    shown_bytes: int = SHOWN_BYTES
    """Maximum of UTF-8 bytes of a result shown to the model, 1 or more. It applies beside `shown_tokens`, to text with
    few tokens relative to its length.
    """

    cost_usd: float | Callable[[Arguments], float] | None = None
    """US dollars that a call costs beside the model, 0 or more, or a function of the arguments. A call is made only if
    `Limits.usd` has room for it, and its cost is added to the run's when it has ended. A tool that knows better calls
    `ctx.add_cost`. None: no cost.
    """

    reads_untrusted: bool | Callable[[Arguments], bool] | None = None
    """Whether results contain text that strangers can write, such as web pages and mails: the label `untrusted`. None:
    not declared, which counts as no except for `Guard.strict()`. This and the next three may be functions of the
    arguments, which have to be pure: a call has the label unless the function returns False, so also if it raises.
    """

    reads_private: bool | Callable[[Arguments], bool] = False
    """Whether results contain data that not everybody may see, such as those of a user: the label `private`."""

    sends_out: bool | Callable[[Arguments], bool] = False
    """Whether a call can send data to others, such as a mail or a request to a host that the arguments name: the label
    `sends_out`. Calls of such a tool do not start before the reply that requests them is complete.
    """

    sends_arguments: bool = False
    """Whether the service that a call asks gets its arguments, such as the query of a search, although the call sends
    nothing else out. A declaration without a label: only rules about what the arguments contain heed it, such as
    `no_leaks()`. A tool that `sends_out` need not declare it.
    """

    irreversible: bool | Callable[[Arguments], bool] = False
    """Whether others notice the effect of a call, or it gives power, so that to take it back does not undo it, such as
    a payment or a new password: the label `irreversible`.
    """

    harmless: str = ""
    """Reason why a call may run without a question after the run has read untrusted content, although the tool is not
    read-only, such as "writes a draft that only the user sees". Empty: `Guard.default()` asks then.
    """

    data_level: str = ""
    """Level of the data in results: "public", "internal", "confidential" or "restricted"; empty if not known."""

    cacheable: bool = False
    """Whether an answer that used a result may be repeated by an `AnswerCache`: the result depends only on the
    arguments, the user, the tenant, the roles and the metadata of the run, and not on its dependencies. For read-only
    tools only.
    """

    fresh_s: float | None = None
    """Seconds from the start of a call for which such an answer is repeated, above 0. None: as long as the cache keeps
    it. For cacheable tools only.
    """

    poll: bool = False
    """Whether repeated calls are the purpose of the tool; they are excluded from loop detection."""

    waits_for: PendingKind | None = attrs.field(
        default=attrs.Factory(lambda tool: PendingKind.QUESTION if tool.external else None, takes_self=True)
    )
    """Kind of input that an external call waits for; None for other tools."""

    inner_agent: InnerAgent | None = None
    """The agent that the tool calls; None for a function."""

    background: bool = False
    """Whether the work of a call goes on in the background: the call returns the id of its run at once, and the result
    comes later as a message.
    """

    end_task: EndTask | None = None
    """Asks the server to end the task of a call whose run ends; None: calls begin no tasks."""

    start_rule: StartRule | None = None
    """Decides before each start of a call, given the context and the arguments; None: nothing is decided."""

    recorded_policy: str = attrs.field(default=attrs.Factory(_name_policy, takes_self=True), init=False)
    """`on_unknown` as it is recorded at each start: a word, "check" for a function, or empty for the default."""

    labels: tuple[Label, ...] = attrs.field(default=attrs.Factory(_list_labels, takes_self=True), init=False)
    """Labels that the tool declares, those that only some calls have included. The results of its calls have them."""

    label_rules: Mapping[Label, Callable[[Arguments], bool]] = attrs.field(
        default=attrs.Factory(_list_label_rules, takes_self=True), init=False, repr=False
    )
    """Functions of the arguments, for the labels that only some calls have."""

    breaker: Breaker = attrs.field(factory=Breaker, init=False, repr=False)
    """Circuit breaker of the tool, shared by all runs in this process."""

    limiter: Limiter | None = attrs.field(
        default=attrs.Factory(lambda tool: _build_limiter(tool.limit, tool.per_minute), takes_self=True),
        init=False,
        repr=False,
    )
    """Limiter for `limit` and `per_minute`; None if both are None."""

    def __repr__(self) -> str:
        parameters: Any = self.parameters.get("properties")
        return f"<Tool {self.name}({', '.join(parameters or ())})>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, outside any run."""
        return self.function(*args, **kwargs)

    @property
    def input_schema(self) -> dict[str, JSON]:
        """JSON Schema of the arguments, with its draft in `$schema` if it names one, as other programs are shown it."""
        return ({} if self.dialect is None else {"$schema": self.dialect}) | dict(self.parameters)

    @property
    def repeatable(self) -> bool:
        """Whether repeating a call has the same effect as running it once."""
        return self.read_only or self.idempotent

    @property
    def effect_labels(self) -> tuple[Label, ...]:
        """Labels of effects that calls may have."""
        return tuple([label for label in self.labels if label in EFFECT_LABELS]) if self.labels else ()

    def list_labels(self, call: ToolCall) -> tuple[Label, ...]:
        """Return the labels of a call. Those of the result count from its end, those of the effect from its start."""
        if not self.label_rules:
            return self.labels
        try:
            return self.select_labels(self.to_namespace(self.bind(call.arguments)))
        except ArgumentsError:
            return self.labels

    def list_effects(self, call: ToolCall) -> tuple[Label, ...]:
        """Return the labels of the effect of a call, which count from its start."""
        return tuple([label for label in self.list_labels(call) if label in EFFECT_LABELS]) if self.labels else ()

    def select_labels(self, arguments: Arguments) -> tuple[Label, ...]:
        """Return the labels of a call with these arguments. A function that does not return False adds its label."""
        missing: set[Label] = set()
        for label, rule in self.label_rules.items():
            try:
                if rule(arguments) is False:
                    missing.add(label)
            except Exception as error:  # noqa: BLE001  a function that fails does not lift a label
                callback_errors.log_callback_error(
                    _LABEL_OPTIONS[label], self.name, f"the call counts as {label}", error
                )
        return tuple([label for label in self.labels if label not in missing]) if missing else self.labels

    def select_traits(self, arguments: Arguments) -> ToolTraits:
        """Return the traits of a call with these arguments."""
        return attrs.evolve(self.traits, labels=self.select_labels(arguments)) if self.label_rules else self.traits

    @cached
    def traits(self) -> ToolTraits:
        """Traits of the tool that the rules of guards are about, with all labels that a call may have."""
        return ToolTraits(
            name=self.name,
            labels=self.labels,
            read_only=self.read_only,
            changes=not (self.read_only or self.harmless or self.external or self.kind is ToolKind.AGENT),
            is_unclear_reader=self.reads_untrusted is None and self.kind is not ToolKind.AGENT,
            is_sandboxed=self.sandbox is not None,
            sends_arguments=self.sends_arguments,
        )

    @property
    def is_interactive(self) -> bool:
        """Whether a call may need an approval or input from outside before its result counts."""
        return self.requires_approval is not False or self.waits_for is not None

    def digest_call(self, call: ToolCall) -> str:
        """Return the hash of the tool and the exact arguments."""
        return short_hash(f"{self.digest}\n{call.name}\n{call.arguments}", DIGEST_CHARS)

    @property
    def may_start_early(self) -> bool:
        """Whether calls may start while the model is still streaming the reply that requests them."""
        if self.cost_usd is not None or self.sends_out:  # a reply that is dropped must cost and send nothing
            return False
        return self.read_only and not self.is_interactive and self.kind is ToolKind.DIRECT

    @cached
    def digest(self) -> str:
        """Hash of the tool as approvers see it: its name, description, schema and declared flags."""
        shape: list[Any] = [self.name, self.description, self.read_only, self.idempotent, self.strict]
        if self.labels:
            shape.append(self.labels)
        if self.harmless:
            shape.append({"harmless": self.harmless})
        if self.kind is not ToolKind.DIRECT or self.recorded_policy:
            shape.append([self.kind, self.recorded_policy])
        return short_hash(
            json.dumps([*shape, to_mutable_json(self.parameters)], sort_keys=True, default=str), DIGEST_CHARS
        )

    @cached
    def parameters_hash(self) -> str:
        """Hash of the parameters, with their defaults."""
        return short_hash(json.dumps(to_mutable_json(self.parameters), sort_keys=True, default=str), _PARAMETERS_DIGITS)

    @cached
    def defaults(self) -> Mapping[str, JSON]:
        """Values that arguments have by the schema if the model gives none, by name."""
        properties = self.parameters.get("properties")
        declared = properties.items() if isinstance(properties, Mapping) else ()
        return {name: each["default"] for name, each in declared if isinstance(each, Mapping) and "default" in each}

    @property
    def definition(self) -> ToolDefinition:
        """Definition of the tool for the model."""
        return ToolDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )

    def bind_and_check(self, text: str) -> BoundArguments:
        """Parse the arguments of a call and check them against the schema and the `validate` rule.

        Raises:
            ArgumentsError: with a message for the model that names the invalid argument.
        """
        bound = self.bind(text)
        self.check_rule(bound)
        return bound

    def check_rule(self, bound: BoundArguments) -> None:
        """Check schema-valid arguments against the `validate` rule.

        Raises:
            ArgumentsError: with a message for the model that states the violation.
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
    except Exception as error:  # noqa: BLE001  a rule that fails does not permit the call
        callback_errors.log_callback_error("validate", tool.name, "the call is refused", error)
        return f"the rule could not be applied ({type(error).__name__})"
    # Other values are mistakes: a rule that returns True for valid arguments would look like a violation, and its False
    # like a pass.
    return flaw if flaw is None or isinstance(flaw, str) else f"the rule could not be applied ({type(flaw).__name__})"


def _error_text(error: Exception) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  a broken __str__ must not hide the violation
        return ""


class ToolDeclarations(TypedDict, total=False):
    """Options of any tool, including one made from an agent. See the fields of `Tool` for their meaning."""

    strict: bool
    on_unknown: OnUnknown
    answer_expires_s: float | Callable[[Arguments], float]
    concurrency_safe: bool | Callable[[Arguments], bool]
    locks: Callable[[Arguments], Iterable[Hashable]] | None
    after: Collection[str]
    replaces: Collection[str]
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
    reads_untrusted: bool | Callable[[Arguments], bool] | None
    reads_private: bool | Callable[[Arguments], bool]
    sends_out: bool | Callable[[Arguments], bool]
    sends_arguments: bool
    irreversible: bool | Callable[[Arguments], bool]
    harmless: str
    data_level: str
    poll: bool


class ToolOptions(ToolDeclarations, total=False):
    """Options of the `tool` decorator."""

    name: str | None
    description: str | None
    parameters: Mapping[str, JSON] | None
    read_only: bool
    idempotent: bool
    external: bool
    cacheable: bool
    background: bool
    fresh_s: float | None
    timeout_s: float | None
    cost_usd: float | Callable[[Arguments], float] | None
    login: ToolLogin | None
    sandbox: ToolSandbox | None


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
    """Make a tool of a function, as `@tool` or `@tool(...)` with options.

    The schema comes from the type hints and the docstring (Google, NumPy or Sphinx). If the first parameter is
    annotated `RunContext[...]`, the engine passes it and hides it from the model.

    Args:
        function: A plain or an async function. A plain one runs in its own thread.
        **options: `name` (default: the function's name), `description` (default: the docstring's text), `parameters` (a
            JSON Schema that replaces the type hints) and the options documented as fields of `Tool`. The defaults are
            the safe choice: a tool without options runs alone and is never repeated without asking.

    Raises:
        MisuseError: if no schema can be built from the function, or an option is invalid.
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
    """Make a tool; the decorator `tool` calls this."""
    name = name or str(getattr(function, "__name__", type(function).__name__))
    _check_name(name)
    if unknown := options.keys() - attrs.fields_dict(Tool).keys():
        near = get_close_matches(option := min(unknown), attrs.fields_dict(Tool), 1)
        raise MisuseError(f"tool {name!r} has no option {option}={f': did you mean {near[0]}=?' if near else ''}")
    _check_function(name, function)
    check_declarations(name, description=description, concurrency_safe=concurrency_safe, **options)
    signature: Any = _read_signature(function, name, parameters, strict=strict)
    read_only = options.get("read_only", False)
    if options.get("sandbox") is not None:
        options = _prepare_for_sandbox(name, function, options)
        signature = attrs.evolve(signature, mutable_defaults={})  # each call has a process, and so defaults of its own
    return Tool(
        function=function,
        name=name,
        description=signature.description if description is None else description,
        parameters=signature.parameters,
        dialect=None if parameters is None else str(parameters.get("$schema", "")) or None,
        bind=signature.bind,
        to_namespace=signature.to_namespace,
        takes_context=signature.context_parameter is not None,
        is_async=any(map(iscoroutinefunction, _code_holders(function))),
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


def _prepare_for_sandbox(name: str, function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Check a function for its sandbox. Its time is that of the sandbox if no other is given."""
    if options.get("external"):
        raise MisuseError(f"tool {name!r}: an external tool runs no function, so leave out sandbox=")
    sandbox: ToolSandbox = options["sandbox"]
    sandbox.check_function(function)
    if options.get("timeout_s") is not None:
        return options
    return {**options, "timeout_s": sandbox.seconds, "grace_s": SANDBOX_GRACE_S}


def _check_name(name: str) -> None:
    plain = name.replace("_", "").replace("-", "") if isinstance(name, str) else ""
    if not (plain.isascii() and plain.isalnum() and len(name) <= NAME_CHARS):
        raise MisuseError(
            f"a tool cannot be called {name!r}: use 1 to {NAME_CHARS} ASCII letters, digits, '_' or '-', "
            "for example @tool(name='search')",
        )


_COUNT_OR_NONE: Final = COUNT.or_none()
_CHOICE: Final = ValueRule(
    fits=lambda value: isinstance(value, bool) or callable(value), wanted="True, False or a function"
).or_none()
_STRINGS: Final = ValueRule(
    fits=lambda value: (
        isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(each, str) for each in value)
    ),
    wanted="a tuple of strings, also for a single one: ('a',)",
)

# Validation rules of the tool options.
_OPTION_RULES: Final[Mapping[str, ValueRule]] = {
    **dict.fromkeys(("timeout_s", "approval_expires_s", "shown_tokens", "shown_bytes", "fresh_s"), POSITIVE.or_none()),
    "description": STRING.or_none(),
    "limit": attrs.evolve(
        _COUNT_OR_NONE,
        wanted=f"{_COUNT_OR_NONE.wanted}; to share a Limiter, use a tag: tags=['db'], and "
        "ToolRegistry(tag_limits={'db': limiter})",
    ),
    "per_minute": _COUNT_OR_NONE,
    "estimate_s": NOT_NEGATIVE.or_none(),
    "cost_usd": ValueRule(
        fits=lambda value: value is None or callable(value) or NOT_NEGATIVE.fits(value),
        wanted="US dollars, 0 or more, or a function of the arguments, or None",
    ),
    **dict.fromkeys(
        ("strict", "read_only", "idempotent", "poll", "external", "cacheable", "background", "sends_arguments"), BOOL
    ),
    **dict.fromkeys(_LABEL_OPTIONS.values(), _CHOICE),
    "reads_untrusted": _CHOICE.or_none(),
    "harmless": ValueRule(fits=lambda value: isinstance(value, str), wanted="the reason, a text; '' if it is not"),
    "data_level": require_choice("", *DATA_LEVELS),
    "login": require_members("require", "is_ready", wanted="a login, as Login(...) of agentfsm.logins").or_none(),
    "sandbox": require_members("seconds", "check_function", "run", wanted="a sandbox, as Sandbox()").or_none(),
    **dict.fromkeys(("enabled", "requires_approval", "concurrency_safe"), _CHOICE),
    **dict.fromkeys(("validate", "describe", "locks"), FUNCTION.or_none()),
    **dict.fromkeys(("after", "replaces", "tags"), _STRINGS),
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


def check_declarations(name: str, **declared: Any) -> None:
    """Check options of a tool, each by itself and all together.

    Raises:
        MisuseError: if one is invalid, or two contradict each other.
    """
    for option, value in declared.items():
        if (rule := _OPTION_RULES.get(option)) is not None:
            rule.check(f"tool {name!r}", option, value)
        if iscoroutinefunction(value) and option not in {"on_unknown", "end_task"}:
            raise MisuseError(
                f"tool {name!r}: {option}= is called while calls are planned, which cannot await: give a plain function"
            )
    if declared.get("external") and declared.get("requires_approval"):
        raise MisuseError(f"tool {name!r}: an external tool runs no function, so leave out requires_approval=")
    if declared.get("external") and declared.get("cost_usd") is not None:
        raise MisuseError(f"tool {name!r}: an external tool runs no function, so leave out cost_usd=")
    if declared.get("external") and declared.get("background"):
        raise MisuseError(f"tool {name!r}: an external tool runs no function, so leave out background=")
    if declared.get("cacheable") and not declared.get("read_only"):
        raise MisuseError(
            f"tool {name!r} is not read-only, so answers with its results are not repeated: leave out "
            "cacheable=, or set read_only=True if a call changes nothing"
        )
    if declared.get("fresh_s") is not None and not declared.get("cacheable"):
        raise MisuseError(f"tool {name!r}: fresh_s= is for cacheable tools: set cacheable=True")
    if declared.get("read_only") and declared.get("irreversible"):
        raise MisuseError(f"tool {name!r} is read-only, so a call has no effect: leave out irreversible= or read_only=")
    if declared.get("read_only") and "on_unknown" in declared:
        raise MisuseError(f"tool {name!r} is read-only, so an interrupted call runs again: leave out on_unknown=")


def _check_function(name: str, function: Callable[..., Any]) -> None:
    if isinstance(function, Tool):
        raise MisuseError(
            f"{function.name!r} is a tool already; to make a tool with other options, write "
            f"tool(name={function.name!r}, ...)({function.name}.function)"
        )
    if any(map(isgeneratorfunction, _code_holders(function))) or any(map(isasyncgenfunction, _code_holders(function))):
        raise MisuseError(
            f"tool {name!r} is a generator; return a list instead, and report progress with `await ctx.progress(...)`"
        )


def _code_holders(function: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the objects that may hold the code of a function: itself or a partial's function, and its `__call__`."""
    inner = getattr(function, "func", function)
    return inner, getattr(inner, "__call__", None)  # noqa: B004  reads the method, not whether it is callable
