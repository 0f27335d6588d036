"""Tools as a script sees them: signatures of Python with types."""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

from agentfsm.ports.model import ToolDefinition
from agentfsm.tools.tool import Tool

_TYPES: Final = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_PLAIN_HINTS: Final = (str, int, float, bool, dict, list)


def write_stub(tool: Tool[..., Any]) -> str:
    """Return the signature of a tool, and its description as the docstring."""
    schema: Mapping[str, Any] = tool.parameters
    needed = schema.get("required") or ()
    parameters = [
        f"{name}: {_name_type(each)}" + ("" if name in needed else f" = {_name_default(each)}")
        for name in list_parameters(tool.definition)
        for each in (schema["properties"][name],)
    ]
    text = " ".join(tool.description.split())
    head = f"async def {name_in_script(tool.name)}({', '.join(parameters)}) -> {_name_hint(_find_return_hint(tool))}:"
    return f"{head}\n    {json.dumps(text, ensure_ascii=False)}" if text else f"{head} ..."


def list_parameters(definition: ToolDefinition) -> tuple[str, ...]:
    """Return the names of the parameters, those that are needed first, in the order of the stub."""
    schema: Mapping[str, Any] = definition.parameters
    needed = schema.get("required") or ()
    return tuple(sorted(schema.get("properties") or {}, key=lambda name: name not in needed))


def name_in_script(tool: str) -> str:
    """Return the name of a tool as Python can write it: `get_weather` for "get-weather"."""
    name = re.sub(r"\W|^(?=\d)", "_", tool)
    return f"{name}_" if keyword.iskeyword(name) else name


def returns_text(tool: Tool[..., Any]) -> bool:
    """Return whether the function of a tool is annotated to return a text, or a text or None."""
    hint = _find_return_hint(tool)
    return hint is str or set(get_args(hint)) == {str, NoneType}


def _find_return_hint(tool: Tool[..., Any]) -> Any:
    """Return what the function of a tool is annotated to return; `inspect.Parameter.empty` if that is not known."""
    try:
        return get_type_hints(inspect.unwrap(tool.function)).get("return", inspect.Parameter.empty)
    except Exception:  # noqa: BLE001  hints of users may raise anything
        return inspect.Parameter.empty


def _name_hint(hint: Any) -> str:
    if hint is type(None):
        return "None"
    if hint in _PLAIN_HINTS:
        return str(hint.__name__)
    if NoneType in get_args(hint):
        return " | ".join(map(_name_hint, get_args(hint)))
    text = inspect.formatannotation(hint)
    return text if text.startswith(("list[", "dict[")) and "." not in text else "Any"


def _name_type(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "Any"
    if isinstance(choices := schema.get("enum"), list | tuple):
        return f"Literal[{', '.join(repr(each) for each in choices)}]"
    if isinstance(several := schema.get("anyOf") or schema.get("oneOf"), list | tuple):
        return " | ".join(dict.fromkeys(_name_type(each) for each in several))
    kind = schema.get("type")
    if isinstance(kind, list | tuple):
        return " | ".join(_name_type({**schema, "type": each}) for each in kind)
    if kind == "array":
        return f"list[{_name_type(schema.get('items'))}]"
    return "dict[str, Any]" if kind == "object" else _TYPES.get(str(kind), "Any")


def _name_default(schema: Any) -> str:
    return repr(schema["default"]) if isinstance(schema, Mapping) and "default" in schema else "..."
