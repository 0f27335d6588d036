"""Tools: a function, what the model is told of it, and what its author declares about running it."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, overload

import attrs

from agentfsm.core.errors import DuplicateToolError, MisuseError
from agentfsm.ports import ToolDefinition

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")

APPROVAL_EXPIRES_S: Final = 7 * 86_400.0
# Seconds that an approval is waited for: a week covers a holiday weekend, and no answer is a no.
SHOWN_CHARS: Final = 16_000
# Characters of a result that the model is shown: some 4,000 tokens, so that twenty results fit the usual window.
NAME_CHARS: Final = 64
# The longest tool name that the providers take.

Progress = Callable[[str], Awaitable[None]]


@attrs.frozen(kw_only=True)
class RunContext(Generic[D]):
    """What a tool may know of the call it serves; its first parameter, if annotated with this type."""

    deps: D
    # What the driving call was given as `deps=`.
    run_id: str = ""
    turn: int = 0
    call_id: str = ""
    idempotency_key: str = ""
    # The same on every attempt at this call: hand it to the service that must not act twice.
    attempt: int = 1
    # 1, or more when an earlier attempt was cut off.
    deadline: float = float("inf")
    # Seconds since 1970 by which the call is cut off.
    user: str | None = None
    roles: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    report: Progress | None = attrs.field(default=None, repr=False)
    # Where progress goes; None when nobody watches.

    async def progress(self, message: str) -> None:
        """Tell whoever watches how far the call is. Never waits for them."""
        if self.report is not None:
            await self.report(message)


@attrs.define(eq=False, kw_only=True)
class Tool(Generic[P, R]):
    """A function that a model may call. Calling the tool calls the function, so that it can be tested as one."""

    function: Callable[P, R]
    name: str
    description: str
    parameters: Mapping[str, JSON]
    # The JSON Schema of the arguments.
    bind: Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
    # Turns the arguments' JSON text into what the function is called with; raises ArgumentsError.
    takes_context: bool
    is_async: bool
    read_only: bool = False
    # Changes nothing: may run beside others, may run again.
    idempotent: bool = False
    # Running it again under the same key has the same effect as running it once.
    concurrency_safe: bool = False
    # May run beside others.
    requires_approval: bool = False
    # A person has to say yes to each call.
    approval_expires_s: float = APPROVAL_EXPIRES_S
    timeout_s: float | None = None
    # Seconds; None for the run's own `Limits.tool_timeout_s`.
    shown_chars: int = SHOWN_CHARS
    # Characters of a result that the model is shown.
    poll: bool = False
    # Repeating it is its job: it counts for no loop.

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, outside any run."""
        return self.function(*args, **kwargs)

    @property
    def repeatable(self) -> bool:
        """Whether it may be run again when nobody knows what became of it."""
        return self.read_only or self.idempotent

    @property
    def definition(self) -> ToolDefinition:
        """The tool as a model is told of it."""
        return ToolDefinition(name=self.name, description=self.description, parameters=self.parameters)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    read_only: bool = False,
    idempotent: bool = False,
    concurrency_safe: bool | None = None,
    requires_approval: bool = False,
    approval_expires_s: float = APPROVAL_EXPIRES_S,
    timeout_s: float | None = None,
    shown_chars: int = SHOWN_CHARS,
    poll: bool = False,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    concurrency_safe: bool | None = None,
    **options: Any,
) -> Any:
    """Make a tool of a function: bare, or with what you declare about it.

    The schema comes from the type hints and the docstring (Google, NumPy or Sphinx). A first parameter annotated
    `RunContext[...]` is handed in by the engine and hidden from the model.

    Args:
        function: Plain or async. A plain one runs in a thread of its own.
        name: What the model calls it; by default the function's name.
        description: What the model reads; by default the docstring's text.
        concurrency_safe: Whether it may run beside others; by default only if it is read-only.
        **options: As the fields of `Tool` say. What is not declared is not assumed: a tool without a word runs alone,
            and is never silently repeated.

    Raises:
        MisuseError: when no schema can be made of the function.
    """
    if function is None:
        return lambda fn: make_tool(fn, name=name, description=description, safe=concurrency_safe, **options)
    return make_tool(function, name=name, description=description, safe=concurrency_safe)


def make_tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    safe: bool | None = None,
    **options: Any,
) -> Tool[..., Any]:
    """Make a tool; `tool` is this as a decorator."""
    name = name or str(getattr(function, "__name__", type(function).__name__))
    _check_name(name)
    schema = import_module("agentfsm.engine.schema")  # here, since it brings pydantic: `import agentfsm` must not
    signature = schema.signature_of(function, context_type=RunContext, name=name)
    read_only = options.get("read_only", False)
    return Tool(
        function=function,
        name=name,
        description=signature.description if description is None else description,
        parameters=signature.parameters,
        bind=signature.bind,
        takes_context=signature.context_parameter is not None,
        is_async=_is_async(function),
        concurrency_safe=read_only if safe is None else safe,
        **options,
    )


def _check_name(name: str) -> None:
    plain = name.replace("_", "").replace("-", "")
    if not (plain.isascii() and plain.isalnum() and len(name) <= NAME_CHARS):
        raise MisuseError(
            f"a tool cannot be called {name!r}: use 1 to {NAME_CHARS} ASCII letters, digits, '_' or '-', "
            "for example @tool(name='search')",
        )


def _is_async(function: Callable[..., Any]) -> bool:
    inner = getattr(function, "func", function)  # functools.partial
    return iscoroutinefunction(inner) or iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


@attrs.define(eq=False)
class ToolRegistry:
    """The tools of an agent, by name, in the order in which they were registered."""

    _tools: dict[str, Tool[..., Any]] = attrs.field(factory=dict, init=False)
    definitions: tuple[ToolDefinition, ...] = attrs.field(default=(), init=False)
    # What a model is told of them. This and the next two are kept with each registration, and read with each turn.
    polls: frozenset[str] = attrs.field(default=frozenset(), init=False)
    # Names of the tools whose repetition is their job.
    asking: frozenset[str] = attrs.field(default=frozenset(), init=False)
    # Names of the tools that need a person's yes.

    @classmethod
    def of(cls, tools: Iterable[Tool[..., Any] | Callable[..., Any]]) -> ToolRegistry:
        """Return a registry of these tools; plain functions are made tools without declarations."""
        registry = cls()
        for each in tools:
            registry.register(each)
        return registry

    def register(self, candidate: Tool[..., Any] | Callable[..., Any]) -> Tool[..., Any]:
        """Add a tool, or a function as one.

        Raises:
            DuplicateToolError: when the name is taken.
            MisuseError: when it is no function, or no schema can be made of it.
        """
        if not callable(candidate):
            raise MisuseError(
                f"a tool is a function or a Tool, not {type(candidate).__name__}: use @tool on a function"
            )
        added = candidate if isinstance(candidate, Tool) else make_tool(candidate)
        if added.name in self._tools:
            raise DuplicateToolError(
                f"two tools are called {added.name!r}: rename one, for example with @tool(name='{added.name}_2')",
            )
        self._tools[added.name] = added
        self.definitions += (added.definition,)
        self.polls |= {added.name} if added.poll else set()
        self.asking |= {added.name} if added.requires_approval else set()
        return added

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def get(self, name: str) -> Tool[..., Any] | None:
        """Return the tool of that name, or None."""
        return self._tools.get(name)

    def nearest(self, name: str) -> str | None:
        """Return the name most like this one, or None where none is like it."""
        close = difflib.get_close_matches(name[:NAME_CHARS], self._tools, n=1)
        return close[0] if close else None

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of registration."""
        return tuple(self._tools)

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)
