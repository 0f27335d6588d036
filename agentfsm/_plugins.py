"""Find adapters that installed packages provide through entry points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from agentfsm.core.errors import MisuseError

MODELS: Final = "agentfsm.models"
# Entry point group: the prefix of a model's name, such as "openai", to a callable that takes the rest of the name.
STORES: Final = "agentfsm.stores"
# Entry point group: the scheme of a store's URL, such as "redis", to a callable that takes the URL.


@cache
def find_plugins(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points of a group by name. The metadata of installed packages is read once per process."""
    found: dict[str, list[EntryPoint]] = {}
    for each in entry_points(group=group):
        found.setdefault(each.name, []).append(each)
    return found


def load_plugin(group: str, name: str) -> Any:
    """Import what an entry point names.

    Args:
        group: `MODELS` or `STORES`.
        name: One of `find_plugins(group)`.

    Raises:
        MisuseError: if several packages provide the name, or the package that does cannot be imported.
        ImportError: if an adapter of agentfsm itself needs an extra that is not installed; it says which.
    """
    candidates = find_plugins(group)[name]
    if len({each.value for each in candidates}) > 1:
        packages = " and ".join(f"{_package(each)} ({each.value})" for each in candidates)
        raise MisuseError(f"{name!r} of {group} is provided by {packages}: uninstall one of them")
    plugin = candidates[0]
    try:
        return plugin.load()
    except (ImportError, AttributeError) as error:
        if plugin.module.partition(".")[0] == "agentfsm":
            raise
        raise MisuseError(f"{name!r} is provided by {_package(plugin)}, which cannot be loaded: {error}") from error


def _package(plugin: EntryPoint) -> str:
    return plugin.dist.name if plugin.dist is not None else plugin.module
