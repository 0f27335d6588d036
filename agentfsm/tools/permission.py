"""Permissions: levels, and rules over tool names and arguments.

Each rule is checked twice. Tools that can never be allowed are not offered to the model, so that it does not try them.
Each call is checked again with its exact arguments, since a model may also call a tool that it was not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import Level, matches_tool
from agentfsm.core.value import Value
from agentfsm.tools import callback_errors

if TYPE_CHECKING:
    from agentfsm.tools.tool import Tool


# A condition on the validated arguments, defaults included: `lambda a: a.cents <= 500`.
Condition: TypeAlias = Callable[[SimpleNamespace], bool]


class Named(Protocol):
    """A tool, as far as rules are about it."""

    @property
    def name(self) -> str:
        """Name of the tool."""
        ...


def _check_tools(_rule: Rule, _attribute: object, tools: Any) -> None:
    if not isinstance(tools, str) or not tools:
        raise MisuseError(f"a rule is about tool names, not {tools!r}: name a tool, or a glob such as 'read_*'")


def _check_when(rule: Rule, _attribute: object, when: Any) -> None:
    if when is not None and (not callable(when) or iscoroutinefunction(when)):
        raise MisuseError(
            f"the condition of the rule on {rule.tools!r} has to be a plain function of the arguments, for example "
            f"lambda a: a.cents <= 500, and not {when!r}"
        )


@attrs.frozen
class Rule(Value):
    """A rule about some tools, and optionally some arguments: `Rule("pay*", lambda a: a.cents <= 500)`.

    Raises:
        MisuseError: if `tools` is not a name, or `when` is not a plain function.
    """

    tools: str = attrs.field(validator=_check_tools)
    """Name of a tool, or a glob over names, in which * matches any characters. Case does not count."""

    when: Condition | None = attrs.field(default=None, validator=_check_when)
    """Condition on the arguments, a plain function that returns True or False. None: the rule covers any arguments."""

    def covers(self, tool: Named) -> bool:
        """Return whether the rule covers this tool."""
        return matches_tool(self.tools, tool.name)

    def evaluate(self, tool: Named, arguments: SimpleNamespace) -> bool | Exception:
        """Return whether the condition holds, or the exception that prevented its evaluation."""
        if self.when is None:
            return True
        try:
            met = self.when(arguments)
        except Exception as error:  # noqa: BLE001  a rule that fails does not permit the call
            callback_errors.log_callback_error("a rule's `when`", tool.name, "it counts against the call", error)
            return error
        # Other values are mistakes that look true: a coroutine, a comparison of arrays.
        return met if isinstance(met, bool) else TypeError(type(met).__name__)


def _to_rules(given: Iterable[str | Rule]) -> tuple[Rule, ...]:
    if isinstance(given, str | Rule) or not isinstance(given, Iterable):
        raise MisuseError(f"rules come as a tuple, not as {given!r}: write ({given!r},)")
    rules: list[Rule] = []
    for each in given:
        if not isinstance(each, str | Rule):
            raise MisuseError(f"a rule is a tool's name, a glob or a Rule, not {each!r}: write Rule('pay', when=...)")
        rules.append(Rule(each) if isinstance(each, str) else each)
    return tuple(rules)


def _check_roles(given: Mapping[str, Permissions]) -> dict[str, Permissions]:
    if not isinstance(given, Mapping):
        raise MisuseError(f"roles are a mapping of names to Permissions, not {given!r}")
    for name, each in given.items():
        if not isinstance(name, str) or not isinstance(each, Permissions):
            raise MisuseError(f"a role is a name and its Permissions, not {name!r}: {each!r}")
        if each.roles:
            inner = ", ".join(each.roles)
            raise MisuseError(
                f"the role {name!r} has roles of its own, which are never checked: move {inner} to the top level"
            )
    return dict(given)


@attrs.frozen(kw_only=True)
class Permissions(Value):
    """Permissions of runs. The defaults allow everything.

    A run with known roles may do whatever any one of them allows. A run started without roles has the permissions set
    here. If roles are defined here, a run whose roles are all unknown may do nothing, since a role may be misspelled.

    Raises:
        MisuseError: if a level, a rule or a role is invalid.
    """

    level: Level = attrs.field(default=Level.ADMIN, converter=Level)
    """Highest level that is allowed; tools of a higher level are refused. Default ADMIN, which allows all."""

    allow: tuple[Rule, ...] = attrs.field(default=(Rule("*"),), converter=_to_rules)
    """Rules that allow calls; a call that matches none of them is refused. Default: all calls."""

    deny: tuple[Rule, ...] = attrs.field(default=(), converter=_to_rules)
    """Rules that refuse calls, whatever allows them; they also apply to runs with roles."""

    roles: Mapping[str, Permissions] = attrs.field(factory=dict, converter=_check_roles)
    """Permissions by role name. They replace `level` and `allow` for runs with the role, and cannot have roles of their
    own.
    """

    def may_offer(self, tool: Tool[..., Any], roles: Collection[str]) -> bool:
        """Return whether a tool is offered to the model, because a call with some arguments could be allowed."""
        if any(rule.when is None and rule.covers(tool) for rule in self.deny):
            return False
        if self.roles and roles:
            return any(each.may_offer(tool, ()) for each in self._permissions_of_roles(roles))
        return tool.permission <= self.level and any(rule.covers(tool) for rule in self.allow)

    def refusal_reason(self, tool: Tool[..., Any], roles: Collection[str], arguments: SimpleNamespace) -> str | None:
        """Return the reason why this call may not run.

        A condition that raises, or does not return a bool, counts as a refusal.

        Args:
            tool: The tool that is called.
            roles: The roles of the run.
            arguments: The validated arguments, defaults included.

        Returns:
            A clause for the model, or None if the call may run.
        """
        for rule in self.deny:
            if rule.covers(tool) and (met := rule.evaluate(tool, arguments)) is not False:
                return _format_refusal(tool, [rule], met)
        if self.roles and roles:
            refusals = [each.refusal_reason(tool, (), arguments) for each in self._permissions_of_roles(roles)]
            if None in refusals:
                return None
            reason = "; ".join(dict.fromkeys(filter(None, refusals)))
            return reason or f"none of this run's roles ({', '.join(roles)}) is known to the agent's permissions"
        if tool.permission > self.level:
            return f"{tool.name} needs level {tool.permission}, and this run has {self.level}"
        about = [rule for rule in self.allow if rule.covers(tool)]
        broken: Exception | None = None
        for rule in about:
            met = rule.evaluate(tool, arguments)
            if met is True:
                return None
            broken = met or broken
        return _format_refusal(tool, about, broken)

    def _permissions_of_roles(self, roles: Collection[str]) -> list[Permissions]:
        return [self.roles[role] for role in roles if role in self.roles]


def _format_refusal(tool: Tool[..., Any], rules: list[Rule], met: bool | Exception | None) -> str:
    if isinstance(met, Exception):
        return f"a rule on {tool.name} could not be applied ({type(met).__name__}), so it is not permitted"
    conditional = any(rule.when is not None for rule in rules)
    return f"{tool.name} is not permitted {'with these arguments' if conditional else 'in this run'}"
