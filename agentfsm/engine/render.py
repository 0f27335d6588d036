"""Results and errors as text for the model: what happened, whether to try again, what to do instead."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.messages import clean

if TYPE_CHECKING:
    from agentfsm.core.errors import ModelRetry
    from agentfsm.engine.tools import Tool, ToolRegistry

NAMES_SHOWN = 30
# Tools listed when one is unknown: enough to choose from, not the whole catalogue again.
ERROR_CHARS = 2_000
# Of an error's own text: the cause stands at its beginning.


def result_text(value: object) -> str:
    """Return what a tool returned as text: a str as it is, everything else as JSON, not ASCII-escaped."""
    if isinstance(value, str):
        return clean(value)
    if value is None:
        return "(done, no output)"
    try:
        return _json(value)
    except Exception as error:  # noqa: BLE001  cyclic, too deep, or a broken __repr__: the tool's effect stands
        return f"(done, but the result of type {type(value).__name__} cannot be written as JSON: {describe(error)})"


def _json(value: object) -> str:
    core = _pydantic_core()
    try:
        return str(core.to_json(value, fallback=_plain).decode())
    except core.PydanticSerializationError as error:
        if "surrogates" not in str(error):  # half of a surrogate pair somewhere in it is replaced below
            raise
    return clean(json.dumps(core.to_jsonable_python(value, fallback=_plain), ensure_ascii=False))


@cache
def _pydantic_core() -> Any:
    """Return pydantic's writer: it is loaded with the first schema, not with this module."""
    return import_module("pydantic_core")


def _plain(value: Any) -> Any:
    return attrs.asdict(value, recurse=False) if attrs.has(type(value)) else str(value)


def describe(error: BaseException) -> str:
    """Return the error's type and text; never raises, and never shows a traceback. Of a group, what is in it."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe(each) for each in error.exceptions)[:ERROR_CHARS]
    text = _words(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _words(error: BaseException) -> str:
    try:
        return clean(str(error)[:ERROR_CHARS])
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the error
        return "(its text cannot be read)"


def retry_text(hint: ModelRetry) -> str:
    """Say what the tool wants instead."""
    return _words(hint) or "not like this; try other arguments"


def failure_text(error: BaseException, tool: Tool[..., Any]) -> str:
    """Say that a tool failed."""
    return f"{describe(error)}. {_advice(tool)}"


def timeout_text(tool: Tool[..., Any], timeout_s: float) -> str:
    """Say that a call was cut off."""
    return f"no result within {timeout_s:g} s, so the call was cut off. {_advice(tool)}"


def _advice(tool: Tool[..., Any]) -> str:
    if tool.repeatable:
        return "It may be called again; other arguments or another tool may do better."
    return "Its effect may have happened, in whole or in part: check before you call it again."


def malformed_text(reason: str) -> str:
    """Say why the arguments are no JSON object."""
    return f"the arguments are not a JSON object ({reason}). Nothing was run: call again with valid JSON."


def unknown_text(name: str, registry: ToolRegistry) -> str:
    """Say that there is no such tool, and which there are."""
    nearest = registry.nearest(name)
    hint = f" Did you mean {nearest!r}?" if nearest else ""
    listed = ", ".join(registry.names[:NAMES_SHOWN]) or "none"
    more = f" and {len(registry) - NAMES_SHOWN} more" if len(registry) > NAMES_SHOWN else ""
    return clean(f"there is no tool {name[:100]!r}.{hint} Nothing was run. Tools: {listed}{more}.")
