"""Decide how a server's tools are used: which of them, with which arguments and labels, and which hints count.

A policy belongs to the server, uses the server's own tool names, and holds for every agent. An agent's `Permissions`
apply in addition, to the prefixed names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from inspect import iscoroutinefunction
from typing import Any, Final, TypeAlias

import attrs
import mcp.types as m

from agentfsm._lib.pins import ApprovedText
from agentfsm.core.errors import ArgumentsError, MisuseError
from agentfsm.core.labels import matches_tool
from agentfsm.core.messages import JSON
from agentfsm.core.shortening import shorten
from agentfsm.core.text_safety import escape_hidden
from agentfsm.core.value import Value
from agentfsm.mcp.trust.consent import ConsentGate
from agentfsm.mcp.trust.names import tool_name
from agentfsm.tools.label_rules import LabelRules, as_label_rules, find_declarations
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.schema.binding import Arguments
from agentfsm.tools.schema.json_schema import build_schema_signature


class StandingScope(StrEnum):
    """Calls that a standing approval covers."""

    TOOL = "tool"
    """All calls of this tool, as it is described now."""

    READING = "reading"
    """All calls of the server's tools that it describes as read-only."""


@attrs.frozen(eq=False, kw_only=True)
class StandingRule:
    """Rule whether a call needs approval: it does, unless a person has approved all calls of the tool.

    An approval of a tool is bound to the hash of its text, so it ends when the tool changes.
    """

    gate: ConsentGate
    """Check of the tool's server, which stores the approvals."""

    text_hash: str
    """Hash of the tool's text."""

    claims_reading: bool
    """Whether the server describes the tool as read-only. It counts only after a person has said so."""

    def __call__(self, _arguments: Arguments) -> bool:
        """Return whether a call of the tool needs approval."""
        return not self.is_covered()

    def is_covered(self) -> bool:
        """Return whether a person has approved all calls of the tool."""
        standing = self.gate.standing
        return self.text_hash in standing.tools or (self.claims_reading and standing.reading)

    def scopes(self) -> tuple[StandingScope, ...]:
        """Return the standing approvals that a person may give."""
        return (StandingScope.TOOL, *([StandingScope.READING] if self.claims_reading else []))

    def allow(self, scope: str) -> None:
        """Store a standing approval.

        Raises:
            MCPServerError: when it cannot be stored.
        """
        self.gate.add_standing(tool=self.text_hash if scope == StandingScope.TOOL else None)


Confirm: TypeAlias = bool | Callable[[str, Arguments], bool]
Constraint: TypeAlias = Mapping[str, JSON] | Callable[[Arguments], "str | None"]

# Characters of an argument in a description; the approval itself covers the full value.
_MAX_VALUE_CHARS: Final = 500


def _as_globs(given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise MisuseError(f"names or globs of tools must be a sequence, not {given!r}: write ({given!r},)")
    globs = tuple(given)
    if wrong := [glob for glob in globs if not isinstance(glob, str) or not glob]:
        raise MisuseError(f"tools must be given by names or globs such as 'read_*', not by {wrong[0]!r}")
    return globs


def _check_confirm(_policy: ToolPolicy, _attribute: object, confirm: Any) -> None:
    if confirm is not None and (not (isinstance(confirm, bool) or callable(confirm)) or iscoroutinefunction(confirm)):
        raise MisuseError(
            f"invalid confirm={confirm!r}: give True, False, or a plain function of a tool's name and its "
            "arguments, for example lambda tool, a: tool == 'pay'"
        )


def _as_constraints(given: Mapping[str, Constraint]) -> dict[str, Callable[[Arguments], str | None]]:
    if not isinstance(given, Mapping):
        raise MisuseError(f"constraints= must be a mapping of tools to JSON Schemas or functions, not {given!r}")
    return {name: _build_constraint(name, each) for name, each in given.items()}


def _build_constraint(name: str, given: Constraint) -> Callable[[Arguments], str | None]:
    if callable(given) and not iscoroutinefunction(given):
        return given
    if not isinstance(given, Mapping):
        raise MisuseError(f"the constraint on {name!r} must be a JSON Schema or a plain function, not {given!r}")
    signature = build_schema_signature(_any, given, context_type=RunContext, name=name)

    def flaw(arguments: Arguments) -> str | None:
        try:
            signature.bind(json.dumps(vars(arguments)))
        except ArgumentsError as error:
            return str(error)
        return None

    return flaw


def _any(**_arguments: Any) -> None:
    """Accept any arguments; used to validate them against a schema."""


@attrs.frozen(kw_only=True)
class ToolPolicy(Value):
    """Rules of a program for the tools of one server.

    Raises:
        MisuseError: when a field is invalid, such as a constraint that is not a JSON Schema.
    """

    hints: bool = False
    """Whether hints of the server that loosen are believed: that a tool only reads, is idempotent, only adds, or
    reaches nothing outside of the server. Hints that tighten always count. Default False: a server may claim
    anything of itself.
    """

    trusted: bool = False
    """Whether no stranger can write the texts that the server returns, or read what it is asked. Otherwise its results
    have the label `untrusted`, its instructions are not added to those of the agent, and `no_leaks()` looks at the
    arguments of its tools. The mails of a mail server are texts of strangers, also if the server itself is honest.
    """

    labels: LabelRules = attrs.field(factory=dict, converter=as_label_rules)
    """Declarations by name or glob, in the server's own names or as models see them (`mail__send_*`): options of
    `tool` such as `{"sends_out": True}` or `{"on_unknown": "fail"}`. They have the last word, after the hints, and of
    several rules the last one.
    """

    confirm: Confirm | None = attrs.field(default=None, validator=_check_confirm)
    """Whether each call needs a person's approval: True, False, or a function of the tool's name and its arguments.
    None: calls of destructive tools need it until a person has approved all calls of the tool; without `hints` and
    `labels` every tool counts as destructive.
    """

    allow: tuple[str, ...] = attrs.field(default=("*",), converter=_as_globs)
    """Names or globs of the tools in use, in the server's own names. Default: all."""

    deny: tuple[str, ...] = attrs.field(default=(), converter=_as_globs)
    """Names or globs of tools that are not used, even if `allow` matches them."""

    repeat_for_input: tuple[str, ...] = attrs.field(default=(), converter=_as_globs)
    """Names or globs of tools whose calls may be made again from the beginning if the server asks for input and no
    person attends the run, although they are neither read-only nor idempotent. It concerns servers of the handshake
    revision; the work of a call before its question is then done twice. Default: none, and such questions are refused.
    """

    constraints: Mapping[str, Callable[[Arguments], str | None]] = attrs.field(factory=dict, converter=_as_constraints)
    """Additional checks of arguments, by tool: a JSON Schema, or a function that returns an error text or None."""

    def allows(self, own: str) -> bool:
        """Return whether the tool with this name of the server may be used."""
        return _matches_any(self.allow, own) and not _matches_any(self.deny, own)

    def repeats_for_input(self, own: str) -> bool:
        """Return whether calls of the tool may be made again from the beginning, once a question is answered."""
        return _matches_any(self.repeat_for_input, own)

    def unmatched_globs(self, server: str, names: Iterable[str], added: Iterable[str]) -> tuple[str, ...]:
        """Return the globs that match no tool, and thus have no effect.

        Args:
            server: Name of the server.
            names: The server's own names of its tools.
            added: Names of tools that are added to them, which only `labels` is about.
        """
        known = tuple(names)
        named = (*known, *added)
        shown = (*named, *[tool_name(server, own) for own in named])
        return tuple(
            glob
            for globs, among in (((*self.allow, *self.deny, *self.repeat_for_input), known), (self.labels, shown))
            for glob in globs
            if glob != "*" and not any(_matches_any((glob,), own) for own in among)
        )

    def find_declarations(self, server: str, own: str) -> dict[str, Any]:
        """Return the options that `labels` declares for the tool with this name of the server."""
        return find_declarations(self.labels, (own, tool_name(server, own)))

    def check_constraints(self, server: str, names: Iterable[str]) -> None:
        """Check that each constraint names a tool that the server lists.

        Raises:
            MisuseError: when a constraint names an unknown tool.
        """
        if missing := sorted(self.constraints.keys() - set(names)):
            raise MisuseError(
                f"the MCP server {server!r} has no tool {missing[0]!r}, which constraints= names: use a name from the "
                "server's own list"
            )

    def tool_options(self, gate: ConsentGate, listed: m.Tool) -> dict[str, Any]:
        """Return the options of a tool for `make_tool`.

        Args:
            gate: The check of the server, which knows the approvals for all calls of a tool.
            listed: The tool as the server lists it.
        """
        claims, said = ToolHints.from_tool(listed), self.find_declarations(gate.server, listed.name)
        hints = claims if self.hints else ToolHints()
        read_only = said.get("read_only", hints.read_only and not said.get("irreversible"))
        destructive = bool(said.get("irreversible")) or (hints.destructive and not read_only)
        if read_only:  # an interrupted call runs again
            said.pop("on_unknown", None)
        return {
            "read_only": read_only,
            "idempotent": hints.idempotent,
            "reads_untrusted": not self.trusted or claims.open_world is True,
            # A read-only tool without `openWorldHint` counts as one that sends nothing out. The specification's
            # default is the opposite; with it, a person would be asked about every mail after the first private one.
            "sends_out": claims.open_world is True or not (read_only or hints.open_world is False),
            "sends_arguments": not (self.trusted or hints.open_world is False or said.get("sends_out") is False),
            "irreversible": destructive,
            **said,
            "requires_approval": self._requires_approval(gate, listed, destructive=destructive),
            "validate": self.constraints.get(listed.name),
            "describe": lambda arguments: describe_call(gate.server, listed, arguments),
        }

    def _requires_approval(
        self, gate: ConsentGate, listed: m.Tool, *, destructive: bool
    ) -> bool | Callable[[Arguments], bool]:
        confirm = self.confirm
        if confirm is None and destructive:
            claims = ToolHints.from_tool(listed).read_only
            return StandingRule(gate=gate, text_hash=build_tool_text(listed).hash, claims_reading=claims)
        if confirm is None or isinstance(confirm, bool):
            return confirm is True
        return lambda arguments: confirm(listed.name, arguments) is not False


def _matches_any(globs: Iterable[str], own: str) -> bool:
    return any(matches_tool(glob, own) for glob in globs)


@attrs.frozen(kw_only=True)
class ToolHints(Value):
    """Hints of a tool. The defaults assume the worst.

    Source: the specification's `ToolAnnotations` and its defaults. A tool counts as destructive unless it declares that
    it only reads, or that it only adds. A tool that declares both read-only and destructive counts as destructive.
    """

    read_only: bool = False
    """Whether the tool changes nothing."""

    idempotent: bool = False
    """Whether a repeated call with the same arguments has no further effect."""

    destructive: bool = True
    """Whether the tool may delete or overwrite data."""

    open_world: bool | None = None
    """Whether the tool reaches others than the server itself, such as hosts of the web; None if it does not say."""

    @classmethod
    def from_tool(cls, listed: m.Tool) -> ToolHints:
        """Return the hints of a tool, as the server lists it."""
        said = listed.annotations or m.ToolAnnotations()
        read_only = said.read_only_hint is True and said.destructive_hint is not True
        return cls(
            read_only=read_only,
            idempotent=said.idempotent_hint is True,
            destructive=not read_only and said.destructive_hint is not False,
            open_world=said.open_world_hint,
        )


def find_title(listed: m.Tool) -> str | None:
    """Return the tool's title for people, or None."""
    return listed.title or (listed.annotations.title if listed.annotations else None)


def describe_call(server: str, listed: m.Tool, arguments: Arguments) -> str:
    """Describe a call to the person who approves it: the server, the tool and the arguments."""
    title = find_title(listed)
    called = f"{listed.name!r} ({title})" if title and title != listed.name else repr(listed.name)
    given = ", ".join(f"{name}={_shorten_value(value)}" for name, value in vars(arguments).items())
    return escape_hidden(f"Call the tool {called} of the MCP server {server!r} with {given or 'no arguments'}.")


def _shorten_value(value: object) -> str:
    return shorten(json.dumps(value, ensure_ascii=False, default=str), _MAX_VALUE_CHARS, with_length=True)


def build_tool_text(listed: m.Tool) -> ApprovedText:
    """Return the text to approve for a tool: its name, title, description, schemas and hints."""
    said = listed.annotations.model_dump(exclude_none=True, by_alias=True) if listed.annotations else None
    parts = {
        "name": listed.name,
        "title": listed.title,
        "description": listed.description,
        "input_schema": listed.input_schema,
        "output_schema": listed.output_schema,
        "annotations": said,
    }
    return ApprovedText.from_json({name: part for name, part in parts.items() if part is not None})
