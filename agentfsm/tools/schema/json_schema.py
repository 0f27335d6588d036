"""A function whose arguments are described by a plain JSON Schema, such as a tool of an MCP server.

The schema is untrusted: its references are not fetched, its patterns run on an engine with linear time, and its cost is
bounded (`complexity.py`). It is compiled once, when the tool is made. A call then costs one strict check of the text,
one parse and one `is_valid`; only a refusal is examined further.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import jiter

from agentfsm.core.errors import ArgumentsError, MisuseError
from agentfsm.core.messages import JSON
from agentfsm.core.value import Value
from agentfsm.tools.schema.arguments import build_problem, describe_parameters, format_problems, require_object
from agentfsm.tools.schema.binding import Arguments, BoundArguments
from agentfsm.tools.schema.complexity import ValidationCost, compute_cost, normalise_parameters
from agentfsm.tools.schema.introspection import (
    find_context_parameter,
    read_docstring,
    read_mutable_defaults,
    read_parameters,
)
from agentfsm.tools.schema.strict import build_strict_schema, drop_nulls
from agentfsm.tools.schema.validator import compile_schema, find_problems

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# An exponent or 300 digits, without which a number is finite.
_MAYBE_INFINITE: Final = re.compile(r"\d[eE]|\d{300}")


@attrs.frozen(kw_only=True)
class SchemaSignature(Value):
    """Signature of a tool's function whose arguments are described by a JSON Schema."""

    name: str
    """Name of the tool, for error messages."""

    description: str
    """The docstring's short and long description, without its sections; may be empty."""

    parameters: Mapping[str, JSON]
    """JSON Schema of the arguments for the model."""

    context_parameter: str | None
    """Name of the first parameter if it takes the RunContext, which is passed by position; else None."""

    strict: bool
    """Whether the schema that models are shown has null for an omitted value."""

    schema: dict[str, Any] = attrs.field(repr=False)
    """JSON Schema against which arguments are validated."""

    is_valid: Callable[[Any], bool] = attrs.field(repr=False, eq=False)
    cost: ValidationCost = attrs.field(repr=False)
    accepts_name: Callable[[str], bool] = attrs.field(repr=False, eq=False)
    """Return whether the function has a parameter of that name."""

    mutable_defaults: Mapping[str, Any] = attrs.field(factory=dict, repr=False, eq=False)
    """Defaults of the function that each call gets a copy of, by parameter name."""

    def to_namespace(self, bound: BoundArguments) -> Arguments:
        """Return bound arguments as a namespace, with the schema's defaults for omitted ones."""
        parts = self.schema["properties"].items()
        defaults = {name: part["default"] for name, part in parts if isinstance(part, Mapping) and "default" in part}
        return Arguments(**{**defaults, **bound[1]})

    def bind(self, text: str) -> BoundArguments:
        """Validate the arguments of a call.

        Args:
            text: The text of the model: a JSON object of any length; an empty text and `null` count as `{}`.

        Returns:
            No positional arguments, and the keyword arguments as JSON values. Omitted arguments are absent, except for
            copies of defaults that the function could change.

        Raises:
            ArgumentsError: if the text is not a strict JSON object or does not fit; the message lists all problems.
        """
        text = require_object(text)
        sent: dict[str, Any] = jiter.from_json(text.encode())
        if reason := self.cost.check_value(text, sent) or _find_infinite(text, sent):
            raise ArgumentsError(
                f"the arguments of {self.name} do not fit: {reason}.\n{describe_parameters(self.parameters)}"
            )
        # Models also send null for an optional property without strict mode.
        values = drop_nulls(sent, self.schema) if self.strict or not self.is_valid(sent) else sent
        if not (self.is_valid(values) and all(map(self.accepts_name, values))):
            raise ArgumentsError(
                format_problems(
                    f"the arguments of {self.name} do", self._find_problems(values), values, self.parameters
                )
            )
        if self.mutable_defaults:
            values |= copy.deepcopy({name: each for name, each in self.mutable_defaults.items() if name not in values})
        return (), values

    def _find_problems(self, values: dict[str, Any]) -> Iterator[ErrorDetails]:
        reported = set()
        for problem in find_problems(self.schema, values):
            reported.add(problem["loc"])
            yield problem
        for name, value in values.items():
            if not self.accepts_name(name) and (name,) not in reported:
                yield build_problem("extra_forbidden", (name,), value)


def build_schema_signature(
    function: Callable[..., Any],
    parameters: Mapping[str, JSON],
    *,
    context_type: type,
    name: str,
    strict: bool = False,
) -> SchemaSignature:
    """Read a function's docstring and a JSON Schema, and compile the schema.

    Args:
        function: A sync or async function that takes the arguments by keyword; with `**kwargs` it takes any name.
        parameters: A JSON Schema of type "object" (the default type), draft 6 or later (default 2020-12), with at most
            100,000 characters. References stay within it. Patterns have neither lookaround nor back references.
        context_type: The RunContext class: a first parameter of that type, subscripted or not, is hidden.
        name: The tool's name, for error messages.
        strict: Whether to build the schema for OpenAI's strict mode, where null stands for an omitted argument.

    Raises:
        MisuseError: if the schema is invalid, refers to a part outside of it, or could require endless work; if the
            function does not take a parameter; or if strict mode does not support the schema.
    """
    schema = normalise_parameters(parameters, name)
    is_valid = compile_schema(schema, name)
    shown = {key: value for key, value in schema.items() if key != "$schema"}
    visible = read_parameters(function, name)
    context = find_context_parameter(visible, context_type, name)
    return SchemaSignature(
        name=name,
        description=read_docstring(function, set(schema["properties"]))[0],
        parameters=build_strict_schema(shown, name) if strict else shown,
        context_parameter=context,
        strict=strict,
        schema=schema,
        is_valid=is_valid,
        cost=compute_cost(schema, name),
        accepts_name=_build_name_check(function, visible[1:] if context else visible, schema, name),
        mutable_defaults=read_mutable_defaults(visible, name),
    )


def _build_name_check(
    function: Callable[..., Any], visible: Sequence[inspect.Parameter], schema: Mapping[str, Any], tool: str
) -> Callable[[str], bool]:
    """Return a function that returns whether the tool's function takes a name.

    Raises:
        MisuseError: if a call that fits the schema would not fit the function.
    """
    named = {p.name: p for p in visible if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    names = frozenset(named)
    # The model must not set parameters that are hidden from it: the context and those that a partial fixes.
    hidden = _settable_names(function) - names if any(p.kind is p.VAR_KEYWORD for p in visible) else None

    def takes(name: str) -> bool:
        return name in names if hidden is None else name not in hidden

    for name in schema["properties"]:
        if not takes(name):
            raise MisuseError(f"Tool {tool!r}, parameter {name!r}: the function does not take it. Add it, or **kwargs.")
    for p in visible:
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            if p.name not in named:
                raise MisuseError(f"Tool {tool!r}, parameter {p.name!r} is passed by position only. Remove the '/'.")
            if p.name not in schema.get("required", ()):
                raise MisuseError(
                    f"Tool {tool!r}, parameter {p.name!r}: the schema lets the model leave it out, and the function "
                    'has no default for it. Add a default, or list it under "required".',
                )
    return takes


def _settable_names(function: Any) -> set[str]:
    """Return all parameters that can be set by name, including those that a partial or a bound method fixes."""
    fixed: set[str] = set()
    while isinstance(function, functools.partial):
        fixed |= function.keywords.keys()
        function = function.func
    inner = getattr(function, "__func__", function)  # of a bound method, whose own first parameter counts
    found = inspect.signature(inner).parameters.values()
    return fixed | {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _find_infinite(text: str, values: dict[str, Any]) -> str | None:
    """Return the problem if a number such as 1e999, which is valid JSON, becomes infinite."""
    if _MAYBE_INFINITE.search(text):
        try:
            json.dumps(values, allow_nan=False)
        except ValueError:
            return "a number in it is too large"
    return None
