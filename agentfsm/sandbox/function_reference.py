"""References to functions that another process can load: a module or a file, and the name in it."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, Final

import attrs
import typing_extensions

import agentfsm
from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import Tool

_MAIN: Final = "__main__"
# Package whose files run in the processes of a sandbox, without the package around it.
_OWN_PROCESS: Final = "agentfsm.sandbox.process"
PACKAGE_FOLDER: Final = Path(agentfsm.__file__).parent
_JSON_TYPES: Final = frozenset({str, int, float, bool, type(None), list, dict, Any, object})
_JSON_ORIGINS: Final = frozenset({list, dict, typing.Union, types.UnionType, typing.Literal})


@attrs.frozen(kw_only=True)
class FunctionReference(Value):
    """A function, as another process can load it."""

    module: str
    """Name of its module; empty if it is loaded from a file."""

    file: str
    """File of its module; empty if it is imported by name."""

    name: str
    """Name in the module, with dots for a method of a class."""

    paths: tuple[Path, ...]
    """Files and folders that have to be readable for it."""

    root: str
    """Folder from which the module is imported; empty for a file."""


def refer_to(function: Callable[..., Any]) -> FunctionReference:
    """Return a reference to a function.

    Raises:
        MisuseError: if another process could not load it.
    """
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "") or ""
    if not isinstance(function, types.FunctionType) or "<" in name:
        raise MisuseError(
            f"a sandbox runs a function of a module in another process, which cannot load {name or function!r}: define "
            "it with `def` at the top of a module"
        )
    if module.startswith(_OWN_PROCESS):
        return _refer_to_file(Path(function.__code__.co_filename), name)
    if module == _MAIN:
        return _refer_to_main(name)
    if module in sys.modules and _may_be(sys.modules[module], name, function):
        return _refer_to_module(module, name)
    raise MisuseError(
        f"a sandbox runs {module}.{name} in another process, which imports it by this name, but the name is another "
        "object there: give the function a name of its own"
    )


def _may_be(module: types.ModuleType, name: str, function: Callable[..., Any]) -> bool:
    """Return whether the name in the module is the function, or will be when the module is loaded."""
    try:
        found = reduce(getattr, name.split("."), module)
    except AttributeError:
        return True  # the function is just being defined
    found = found.function if isinstance(found, Tool) else found
    # While a module is loaded again, its names are still those of the last time.
    return getattr(found, "__qualname__", None) == name and getattr(found, "__module__", None) == function.__module__


def _refer_to_main(name: str) -> FunctionReference:
    main = sys.modules[_MAIN]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return _refer_to_module(spec.name, name)
    file = getattr(main, "__file__", None)
    if file is None:
        raise MisuseError(
            f"a sandbox runs {name} in another process, which cannot load code of an interactive session: "
            "move it to a module"
        )
    return _refer_to_file(Path(file), name)


def _refer_to_file(path: Path, name: str) -> FunctionReference:
    real = path.resolve()
    return FunctionReference(module="", file=str(real), name=name, paths=(real, PACKAGE_FOLDER), root="")


def _refer_to_module(module: str, name: str) -> FunctionReference:
    top = sys.modules[module.partition(".")[0]]
    folders = [Path(each).resolve() for each in getattr(top, "__path__", ())]
    file = getattr(top, "__file__", None)
    paths = folders or ([Path(file).resolve()] if file else [])
    root = str(paths[0].parent) if paths else ""
    return FunctionReference(module=module, file="", name=name, paths=(*paths, PACKAGE_FOLDER), root=root)


def list_import_path(reference: FunctionReference) -> list[str]:
    """Return the folders in which the other process looks for modules: those of this process, and the function's."""
    folders = [str(Path(each).absolute()) for each in sys.path if each]
    return [*folders, *([reference.root] if reference.root and reference.root not in folders else [])]


def check_signature(function: Callable[..., Any]) -> None:
    """Check that the arguments of a function can be passed as JSON.

    Raises:
        MisuseError: if the function is async, takes the RunContext, or a parameter has another type than JSON has.
    """
    name = getattr(function, "__name__", repr(function))
    if inspect.iscoroutinefunction(function):
        raise MisuseError(f"the function {name} is async, and a sandbox runs plain functions: write it without `async`")
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # a name for type checkers only; making the tool reports it
        hints = {}
    for parameter, hint in hints.items():
        if parameter != "return" and (typing.get_origin(hint) or hint) is RunContext:
            raise MisuseError(
                f"the function {name} takes the RunContext, which is not there in a sandbox: leave out {parameter}, "
                "and pass its data as arguments"
            )
        if parameter != "return" and not _is_json_type(hint):
            raise MisuseError(
                f"the parameter {parameter} of {name} has the type {inspect.formatannotation(hint)}, and a sandbox "
                "passes arguments as JSON: use str, int, float, bool, list, dict, or a union of them"
            )


def _is_json_type(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is None:
        return hint in _JSON_TYPES or typing_extensions.is_typeddict(hint)
    if origin is typing.Literal:
        return True
    arguments = typing.get_args(hint)
    if origin is dict and arguments[0] is not str:
        return False  # keys of JSON objects are strings
    return origin in _JSON_ORIGINS and all(map(_is_json_type, arguments))
