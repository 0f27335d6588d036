"""Introspection of functions: parameters with their hints, the context parameter, and the docstring."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import attrs
import docstring_parser
from docstring_parser import Docstring, DocstringMeta, DocstringStyle

from agentfsm.core.errors import MisuseError

_STYLES = (DocstringStyle.GOOGLE, DocstringStyle.NUMPYDOC, DocstringStyle.REST)
# Maximum of characters of a foreign error's first sentence.
_MAX_REASON_CHARS = 300


def read_parameters(function: Callable[..., Any], tool: str) -> list[inspect.Parameter]:
    """Return the function's parameters with their hints resolved, without those that a partial fixes by name.

    A parameter without a hint, `*args` and `**kwargs` stay as they are.

    Args:
        function: A sync or async function, method, `functools.partial` or callable object.
        tool: The tool's name, for error texts.

    Raises:
        MisuseError: if it is a class or has no signature, or if a hint cannot be resolved.
    """
    if inspect.isclass(function):
        raise MisuseError(f"Tool {tool!r} is made of the class {function.__name__}. Write a function that uses it.")
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise MisuseError(f"Tool {tool!r}: {error}. Write a function with type hints around it.") from error
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    scope = getattr(_find_definition(_unwrap(function)), "__globals__", {})
    return [p.replace(annotation=_resolve_hint(p, scope, tool)) for p in found if p.name not in fixed]


def read_mutable_defaults(parameters: Sequence[inspect.Parameter], tool: str) -> dict[str, Any]:
    """Return the defaults that a function could change, by parameter: a call that omits one gets a copy of its own.

    Python makes a default once, so calls would share it, of all runs and tenants.

    Raises:
        MisuseError: if a default cannot be copied.
    """
    found = {
        p.name: p.default
        for p in parameters
        if isinstance(p.default, MutableSequence | MutableMapping | MutableSet)
        or (not isinstance(p.default, type) and (dataclasses.is_dataclass(p.default) or attrs.has(type(p.default))))
        or hasattr(type(p.default), "model_fields")
    }
    for name, default in found.items():
        try:
            copy.deepcopy(default)
        except Exception as error:
            raise MisuseError(
                f"Tool {tool!r}, parameter {name!r}: all calls would share its default, which cannot be copied "
                f"({summarise_error(error)}). Use None as the default, and make the value in the function."
            ) from error
    return found


def read_return_hint(function: Callable[..., Any]) -> Any:
    """Return the resolved hint of a function's result; `Any` if there is none, or it cannot be resolved."""
    try:
        hint = inspect.signature(function).return_annotation
        scope = getattr(_find_definition(_unwrap(function)), "__globals__", {})
        holder = types.SimpleNamespace(__annotations__={"return": Any if hint is inspect.Signature.empty else hint})
        return get_type_hints(holder, scope, include_extras=True)["return"]
    except Exception:  # noqa: BLE001  a hint given as text may be any expression
        return Any


def find_context_parameter(parameters: Sequence[inspect.Parameter], context_type: type, tool: str) -> str | None:
    """Return the name of the first parameter if it takes the context, else None.

    Raises:
        MisuseError: if another parameter takes it, or it cannot be passed by position.
    """
    found = [p for p in parameters if _is_context(p.annotation, context_type)]
    if not found:
        return None
    if found != list(parameters[:1]) or found[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise MisuseError(
            f"Tool {tool!r}: {found[-1].name!r} takes the {context_type.__name__}, which is passed as the first "
            "argument. Make it the first parameter, and the only one of its kind.",
        )
    return found[0].name


def read_docstring(function: Callable[..., Any], names: set[str]) -> tuple[str, dict[str, str]]:
    """Return the docstring's text without its sections, and the descriptions by parameter, each on one line.

    The style that finds most parameters is used, or else most sections. The parser's own choice would mistake a line
    that begins with `:class:` for a section, and lose the others.

    Args:
        function: A function as for `read_parameters`.
        names: The parameters to describe.
    """
    target = _unwrap(function)
    text = inspect.getdoc(_find_definition(target)) or inspect.getdoc(target) or ""
    readings = []
    for style in _STYLES:
        with contextlib.suppress(Exception):  # the docstring is prose, so parser errors are ignored
            readings.append(docstring_parser.parse(text, style))
    doc = max(
        readings,
        key=lambda doc: (
            len(names & _parameter_descriptions(doc).keys()),
            sum(type(section) is not DocstringMeta for section in doc.meta),
        ),
        default=Docstring(),
    )
    return "\n\n".join(filter(None, (doc.short_description, doc.long_description))), _parameter_descriptions(doc)


def summarise_error(error: Exception) -> str:
    """Return the first sentence of an error; attrs puts more than its text into `args`."""
    try:
        text = str(error.args[0] if error.args else error)
    except BaseException:  # noqa: BLE001  a foreign error's `__str__` may raise
        text = "no reason could be read"
    return text[:_MAX_REASON_CHARS].partition("\n")[0].partition(". ")[0]


def _unwrap(function: Any) -> Any:
    """Return the function inside partials and decorators."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _find_definition(target: Any) -> Any:
    """Return the innermost `def`, in whose module hints are resolved."""
    return target if inspect.isroutine(target) else inspect.unwrap(type(target).__call__)


def _resolve_hint(parameter: inspect.Parameter, scope: dict[str, Any], tool: str) -> Any:
    if parameter.annotation is parameter.empty or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return parameter.annotation
    # One at a time, so that the error names it. The return hint is ignored, since it is not needed and may not resolve.
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return get_type_hints(holder, scope, include_extras=True)[parameter.name]
    except Exception as error:  # a hint given as text may be any expression
        raise MisuseError(
            f"Tool {tool!r}, parameter {parameter.name!r}: the hint {parameter.annotation!r} cannot be resolved "
            f"({summarise_error(error)}). Define or import it at the top of the module, not inside a function or under "
            "TYPE_CHECKING.",
        ) from error


def _is_context(hint: Any, context_type: type) -> bool:
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        return any(_is_context(part, context_type) for part in get_args(hint))
    return (get_origin(hint) or hint) is context_type


def _parameter_descriptions(doc: Docstring) -> dict[str, str]:
    """Return the descriptions by parameter, each on one line; NumPy's `a, b : int` describes both."""
    return {
        name.strip("* "): " ".join(param.description.split())
        for param in doc.params
        if param.description
        for name in param.arg_name.split(",")
    }
