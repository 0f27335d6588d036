"""Results of tools as structured data: their schema, from the return hint of a function, and their values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import jiter

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.tools.queue.result_text import render_text
from agentfsm.tools.result_schema import RESULT_KEY, build_result_schema
from agentfsm.tools.schema.arguments import format_problems
from agentfsm.tools.schema.complexity import normalise_schema
from agentfsm.tools.schema.introspection import read_return_hint
from agentfsm.tools.schema.validator import compile_schema, find_problems

# Types of JSON that the text of a result tells apart. The text of a string is the string itself, without quotes.
_STRUCTURED_TYPES: Final = frozenset({"object", "array", "integer", "number", "boolean", "null"})
_NO_OUTPUT: Final = render_text(None)


@attrs.frozen(kw_only=True)
class OutputSchema(Value):
    """Schema of the results of a tool."""

    tool: str
    """Name of the tool, for error messages."""

    schema: Mapping[str, Any]
    """JSON Schema of type "object"."""

    is_wrapped: bool = False
    """Whether the result is sent under the key "result", because it is not an object."""

    _is_valid: Callable[[Any], bool] = attrs.field(
        init=False,
        repr=False,
        eq=False,
        default=attrs.Factory(
            lambda self: compile_schema(normalise_schema(self.schema, self.tool), self.tool), takes_self=True
        ),
    )

    def parse(self, text: str) -> dict[str, Any]:
        """Return the text of a result as structured data.

        Raises:
            ValueError: if it does not fit the schema; the message says how.
        """
        try:
            value = None if text == _NO_OUTPUT else jiter.from_json(text.encode(), allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"it is not JSON ({error})") from error
        found: Any = {RESULT_KEY: value} if self.is_wrapped else value
        if not self._is_valid(found):
            known = {"properties": self.schema.get("properties", {})}
            problems = find_problems(normalise_schema(self.schema, self.tool), found)
            text = format_problems("it does", problems, found, known)
            raise ValueError(text.rpartition("\n")[0])  # the last line is about arguments
        return dict(found)


def build_output_schema(function: Callable[..., Any], tool: str) -> OutputSchema | None:
    """Return the schema of a function's results, or None if its return hint states no structure.

    A hint states none if it is missing, allows a string or any value, or stands for images and other messages. A result
    that is not an object, such as a list, is put under the key "result".

    Args:
        function: The function of a tool.
        tool: The tool's name, for error messages.
    """
    hint = read_return_hint(function)
    try:
        schema = build_result_schema(hint)
    except Exception:  # noqa: BLE001  pydantic, typing and the user's own types raise any error for a hint
        return None
    definitions = schema.get("$defs", {})
    inner = _resolve(schema["properties"][RESULT_KEY], definitions)
    if not _is_structured(inner, definitions):
        return None
    is_wrapped = inner.get("type") != "object"
    if not is_wrapped:
        text = json.dumps(definitions)  # that of the result itself is needed only if it refers to itself
        used = {name: each for name, each in definitions.items() if f'"#/$defs/{name}"' in text}
        schema = {**inner, **({"$defs": used} if used else {})}
    try:
        return OutputSchema(tool=tool, schema=schema, is_wrapped=is_wrapped)
    except MisuseError:  # it is too large, or has a pattern that the validator does not take
        return None


def _resolve(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    while isinstance(reference := schema.get("$ref"), str):
        schema = definitions[reference.removeprefix("#/$defs/")]
    return schema


def _is_structured(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> bool:
    branches = list(_iter_branches(schema, definitions))
    types = {branch.get("type") for branch in branches}
    return types <= _STRUCTURED_TYPES and types != {"null"} and not any(map(_holds_anything, branches))


def _iter_branches(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    schema = _resolve(schema, definitions)
    branches: Sequence[Mapping[str, Any]] = schema.get("anyOf") or schema.get("oneOf") or ()
    if not branches:
        yield schema
    for branch in branches:
        yield from _iter_branches(branch, definitions)


def _holds_anything(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema is of an array that may hold any values, images among them."""
    items = [*schema.get("prefixItems", ()), *([schema["items"]] if schema.get("items") else [])]
    return schema.get("type") == "array" and not (items and all(items))
