"""Load models and stores that installed packages provide as entry points, and the package's own optional parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agentfsm.core.errors import AgentError, MisuseError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

MODELS: Final = "agentfsm.models"
# Entry point group: the prefix of a model's name, such as "openai", to a callable that takes the rest of the name.
STORES: Final = "agentfsm.stores"
# Entry point group: the scheme of a store's URL, such as "redis", to a callable that takes the URL.

# The product of an entry point of each group.
_PRODUCTS: Final = {MODELS: "a Model", STORES: "a Store"}

# Errors that are the package's fault; a KeyboardInterrupt or a cancellation is not.
_FAULTS: Final = (Exception, SystemExit)

T = TypeVar("T")


class MissingExtraError(MisuseError, ImportError):
    """A part of this package was used, but the extra that it needs is not installed."""


@contextmanager
def require_extra(part: str, extra: str, *packages: str) -> Iterator[None]:
    """Import the packages of an extra in this context, so that a missing one is reported with the command to install.

    Args:
        part: Full name of the part that needs the extra, for example "agentfsm.models.Anthropic".
        extra: Name of the extra.
        packages: Import names of the packages that the extra installs. An error about another module is passed on.

    Raises:
        MissingExtraError: if one of the packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        msg = f"{part} needs the extra {extra!r}; pip install 'agentfsm[{extra}]'"
        raise MissingExtraError(msg, name=error.name) from error


@cache
def find_plugins(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points of a group by name. The metadata of installed packages is read once per process.

    The names of stores are in lower case, since the scheme of a URL has no case.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415  12 ms, which `import agentfsm` need not take

    found: dict[str, list[EntryPoint]] = {}
    for each in entry_points(group=group):
        found.setdefault(each.name.lower() if group == STORES else each.name, []).append(each)
    return found


def create_from_plugin(group: str, name: str, argument: str, ensure: Callable[[Any], T]) -> T:
    """Import and call the factory of an entry point, and return its product.

    Args:
        group: `MODELS` or `STORES`.
        name: One of `find_plugins(group)`.
        argument: The argument of the factory.
        ensure: Returns the product, or raises a MisuseError if it has the wrong type.

    Raises:
        MisuseError: if several packages provide the name; or the entry point is malformed, cannot be imported or is not
            callable; or the factory fails or returns something else. It names the entry point and the package. An
            `AgentError` of the factory is passed on unchanged.
    """
    plugin, *others = find_plugins(group)[name]
    if any(each.value != plugin.value for each in others):
        packages = " and ".join(f"{_package(each)} ({each.value})" for each in (plugin, *others))
        raise MisuseError(f"{name!r} of {group} is provided by {packages}: uninstall one of them")
    who, product = f"{plugin.name!r} of package {_package(plugin)}", _PRODUCTS[group]
    factory = _load_factory(plugin, who)
    try:
        made = factory(argument)
    except AgentError:
        raise
    except _FAULTS as error:
        raise MisuseError(f"{who} failed: {_describe_fault(error)}") from error
    if inspect.iscoroutine(made):
        made.close()
        raise MisuseError(f"{who} is async: write a plain function that returns {product}")
    try:
        return ensure(made)
    except MisuseError as error:
        returned = f"the class {made.__name__}" if isinstance(made, type) else type(made).__name__
        raise MisuseError(f"{who} returned {returned}, not {product}: {error}") from None


def _load_factory(plugin: EntryPoint, who: str) -> Callable[[str], object]:
    if plugin.pattern.match(plugin.value) is None:
        raise MisuseError(
            f"{who} cannot be called: {plugin.value!r} does not have the form 'module:attribute'. Repair or uninstall "
            "the package."
        )
    try:
        factory: Callable[[str], object] = plugin.load()
    except AgentError:  # its message names the correction
        raise
    except _FAULTS as error:
        raise MisuseError(
            f"{who} cannot be loaded: {_describe_fault(error)}. Repair or uninstall the package."
        ) from error
    if not callable(factory):
        kind = "a module" if inspect.ismodule(factory) else f"of the type {type(factory).__name__}"
        whose = " of it" if inspect.ismodule(factory) else ""
        raise MisuseError(f"{who} cannot be called: {plugin.value} is {kind}: name a function or a class{whose}")
    return factory


def _describe_fault(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _package(plugin: EntryPoint) -> str:
    return plugin.dist.name if plugin.dist is not None else plugin.value
