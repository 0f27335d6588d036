"""Declarations of tools that come from elsewhere, by name: `labels={"send_*": {"sends_out": True}}`.

The tools of an MCP server or of an OpenAPI document have no decorator to declare them. Hints of a server and methods of
HTTP are a start; the program that adds the tools has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import matches_tool
from agentfsm.core.validation import shorten_repr
from agentfsm.tools.tool import check_declarations

# Names or globs of tools, each with options of `tool`.
LabelRules: TypeAlias = Mapping[str, Mapping[str, Any]]

# Options that a rule may set: the labels, whether a call changes something, and the policy for an unknown outcome.
_OPTIONS: Final = (
    "read_only",
    "idempotent",
    "reads_untrusted",
    "reads_private",
    "sends_out",
    "sends_arguments",
    "irreversible",
    "harmless",
    "data_level",
    "on_unknown",
)
_EXAMPLE: Final = "labels={'send_*': {'sends_out': True, 'irreversible': True}}"


def as_label_rules(rules: LabelRules) -> dict[str, dict[str, Any]]:
    """Return a copy of the rules, after checking them.

    Raises:
        MisuseError: if they are not a mapping of names to options, an option is unknown or has an invalid value, or a
            rule contradicts itself.
    """
    if not isinstance(rules, Mapping):
        raise MisuseError(f"labels= must be a mapping of tools to declarations, not {shorten_repr(rules)}: {_EXAMPLE}")
    for name, options in rules.items():
        if not isinstance(name, str) or not name or not isinstance(options, Mapping):
            raise MisuseError(
                f"labels= has the rule {shorten_repr(name)}: {shorten_repr(options)}: give a name or a glob of tools, "
                f"and a mapping of declarations: {_EXAMPLE}"
            )
        if unknown := sorted(set(options) - set(_OPTIONS), key=str):
            raise MisuseError(
                f"labels= declares {unknown[0]!r} for {name!r}; the declarations are: {', '.join(_OPTIONS)}"
            )
        check_declarations(name, **options)
    return {name: dict(options) for name, options in rules.items()}


def find_declarations(rules: LabelRules, names: Iterable[str]) -> dict[str, Any]:
    """Return the options that the rules declare for a tool; of several rules, each option as the last one has it.

    Args:
        rules: The rules.
        names: The names of the tool. A rule is about the tool if it matches one of them.
    """
    known, found = tuple(names), dict[str, Any]()
    for glob, options in rules.items():
        if any(matches_tool(glob, name) for name in known):
            found.update(options)
    return found
