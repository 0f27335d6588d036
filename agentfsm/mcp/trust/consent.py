"""Ask a person before a server is started and before changed tools are used, and format the text that is shown.

A server named in the program's own code was chosen by its author: it starts without a question, and its tools are
accepted as first listed. A server from a file or a directory needs a person's approval for both. A changed tool needs
approval in either case, and is withheld until then.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from agentfsm._lib.pins import HASH_CHARS, ApprovedText, Pin, Pins, PinsError, StandingApprovals
from agentfsm.core.header import short_hash
from agentfsm.core.messages import JSON
from agentfsm.core.text_safety import escape_hidden
from agentfsm.core.value import Value
from agentfsm.logins.oauth_settings import OAuth
from agentfsm.mcp.connection.transports import RemoteTransport, ServerTransport, StdioTransport
from agentfsm.mcp.errors import MCPServerError

_log = logging.getLogger("agentfsm.mcp")

# Characters of the hash that is kept of a possible secret: enough to detect a change.
_SECRET_HASH_CHARS: Final = 12
_SECRET_KEYS: Final = ("env", "headers")
# Secrets among the settings of OAuth, as this package and other hosts name them.
_OAUTH_SECRETS: Final = frozenset({"client_secret", "clientSecret", "CLIENT_SECRET", "private_key"})
# Characters of a tool's signature, and of its description, in the line that a person reads.
_LINE_CHARS: Final = 100


class Wish(StrEnum):
    """Subject of a question to a person about a server."""

    START = "start"
    """Whether the server may be started, or connected to."""

    TOOLS = "tools"
    """Whether the tools that the server lists may be used."""

    CHANGE = "change"
    """Whether the tools may still be used after they have changed."""


@attrs.frozen(kw_only=True)
class Proposal(Value):
    """Question about a server that a person answers with yes or no."""

    server: str
    """Name of the server."""

    wish: Wish
    """Subject of the question."""

    shown: str
    """Text to show to the person: the start, or a line for each tool. Hidden characters are escaped."""

    details: str = ""
    """Full texts of the tools, to show on demand; "" if `shown` has everything. They are what is approved."""


Consent: TypeAlias = Callable[[Proposal], Awaitable[bool]]
"""Function that shows a proposal to a person, and returns whether the person agrees."""


def build_start_text(transport: ServerTransport, raw_entry: Mapping[str, JSON] | None = None) -> ApprovedText:
    """Return the text that is pinned for the start of a server. Possible secrets are replaced by a short hash.

    Args:
        transport: The transport of the server.
        raw_entry: The server's entry in a configuration file, before variables were expanded; used instead of
            `transport` if given.
    """
    start: dict[str, Any] = dict(raw_entry) if raw_entry is not None else _describe_transport(transport)
    for name in _SECRET_KEYS:
        if isinstance(values := start.get(name), Mapping):
            start[name] = {key: _hash_secret(value) for key, value in values.items()}
    for name in ("auth", "oauth"):
        if isinstance(values := start.get(name), Mapping):
            start[name] = {k: _hash_secret(v) if k in _OAUTH_SECRETS else v for k, v in values.items()}
    return ApprovedText.from_json(start)


def _hash_secret(value: JSON) -> str:
    return f"sha256:{short_hash(str(value), _SECRET_HASH_CHARS)}"


def _describe_transport(transport: ServerTransport) -> dict[str, Any]:
    match transport:
        case StdioTransport():
            sandbox = None if transport.sandbox is None else transport.sandbox.as_json
            optional = {"env": dict(transport.env), "cwd": transport.cwd and str(transport.cwd), "sandbox": sandbox}
            return {
                "command": transport.command,
                "args": list(transport.args),
                **{k: v for k, v in optional.items() if v},
            }
        case RemoteTransport():
            described = {
                "url": transport.display_text,
                "headers": dict(transport.headers),
                "allow_private": transport.allow_private,
            }
            # The settings that differ from the defaults; the storage of the tokens is not one of the server.
            if isinstance(transport.auth, OAuth):
                parts = attrs.asdict(
                    transport.auth, filter=lambda field, value: field.name != "tokens" and value != field.default
                )
                described["auth"] = {name: list(value) if name == "scopes" else value for name, value in parts.items()}
            return described
    return {"launch": transport.display_text}


def format_start(transport: ServerTransport) -> str:
    """Format how a server is started, for the person who approves it; values that may be secrets are left out."""
    match transport:
        case StdioTransport():
            lines = [f"command:   {shlex.join([transport.command, *transport.args])}"]
            lines += [f"folder:    {transport.cwd}"] if transport.cwd else []
            lines += [f"variables: {', '.join(transport.env)}"] if transport.env else []
            kept_in = transport.sandbox.description if transport.sandbox else "none: it runs with all your rights"
            lines.append(f"sandbox:   {kept_in}")
        case RemoteTransport():
            lines = [f"URL:       {transport.display_text}"]
            lines += [f"headers:   {', '.join(transport.headers)}"] if transport.headers else []
            lines += [f"login:     OAuth, {transport.auth.grant}"] if isinstance(transport.auth, OAuth) else []
            lines += ["private addresses are allowed"] if transport.allow_private else []
        case _:
            lines = [transport.display_text]
    return "\n".join(f"  {_one_line(line)}" for line in lines)


def _one_line(text: str) -> str:
    """Return the text on one line, so that a server cannot forge lines in the text that a person reads."""
    return escape_hidden(text).replace("\n", "\\n").replace("\t", "\\t")


@attrs.define(eq=False, repr=False, kw_only=True)
class ConsentGate:
    """Admit the approved parts of one server, and ask a person about the others."""

    server: str
    """Name of the server."""

    pins: Pins
    """Storage for approvals."""

    consent: Consent | None
    """Function that asks a person. None: the answer to each question is no."""

    origin: str | None
    """File or directory that lists the server. None: the program names the server in its code."""

    _declined: set[str] = attrs.field(factory=set, init=False)
    """Hashes of declined proposals, which are not asked again."""

    _announced: bool = attrs.field(default=False, init=False)

    standing: StandingApprovals = attrs.field(factory=StandingApprovals, init=False)
    """Approvals for all calls of tools, as of the newest listing and the decisions in this process since."""

    @property
    def pin_key(self) -> str:
        """Key of the server's pin. It includes the origin, since two files may use the same server name."""
        return self.server if self.origin is None else f"{self.origin}#{self.server}"

    def load_pin(self) -> Pin | None:
        """Return the server's pin, or None if nothing was approved."""
        try:
            return self.pins.read().get(self.pin_key)
        except PinsError as error:
            raise MCPServerError(str(error)) from error

    async def check_start(self, transport: ServerTransport, start: ApprovedText) -> None:
        """Check that the start of the server is approved, asking a person if necessary.

        Raises:
            MCPServerError: when the start is not approved.
        """
        pin = self.load_pin() or Pin()
        if self.origin is None and not self._announced:
            self._announced = True
            _log.info("the MCP server %r is started for the first time:\n%s", self.server, format_start(transport))
        if pin.start == start:
            return
        changed = f"\nChanges since it was approved:\n{pin.start.diff(start, 'start')}" if pin.start else ""
        if self.origin is None:
            if changed:
                _log.warning("the MCP server %r is started differently than before.%s", self.server, changed)
            self._update_pin(lambda pin: attrs.evolve(pin, start=start))
            return
        shown = f"Start the MCP server {self.server!r} of {self.origin}:\n{format_start(transport)}{changed}"
        if not await self._ask(Wish.START, shown):
            raise MCPServerError(
                f"the MCP server {self.server!r} was not started, because its start is not approved.\n"
                f"{format_start(transport)}\nTo approve it, {self._approval_hint()}"
            )
        self._update_pin(lambda pin: attrs.evolve(pin, start=start))

    def _update_pin(self, change: Callable[[Pin], Pin]) -> None:
        """Change the pin as it is now: another process may have changed it since it was read."""
        try:
            self.pins.change(self.pin_key, lambda stored: change(stored or Pin()))
        except PinsError as error:
            raise MCPServerError(str(error)) from error

    def _approval_hint(self) -> str:
        is_file = self.origin is not None and Path(self.origin).is_absolute()  # a directory has a name
        return f"run: agentfsm mcp approve {shlex.quote(self.origin or '')}" if is_file else "pass consent="

    async def review(self, items: Mapping[str, ApprovedText]) -> dict[str, str]:
        """Compare the server's items with the approved ones, and ask a person about the differences.

        New items of a server that the program names in its code are accepted without a question if there is no
        `consent` or nothing was approved before.

        Args:
            items: Texts of the server, by kind and name: "tool search", "instructions".

        Returns:
            The withheld items, each with the reason. The others are approved now.
        """
        pin = self.load_pin() or Pin()
        self.standing = pin.standing
        changed = [name for name, text in items.items() if pin.items.get(name, text) != text]
        new = [name for name in items if name not in pin.items]
        accepts_new = self.origin is None and (not pin.items or self.consent is None)
        asked = [*changed, *([] if accepts_new else new)]
        withheld: dict[str, str] = {}
        if asked:
            wish = Wish.CHANGE if pin.items else Wish.TOOLS
            if not await self._ask(wish, *self._format_review(pin, items, asked)):
                for name in asked:
                    reason = "it is new and not approved" if name in new else "it has changed since it was approved"
                    withheld[name] = f"{reason}; to review it, {self._approval_hint()}"
        approved = {name: text for name, text in items.items() if name not in withheld}
        if not approved.items() <= pin.items.items():
            self._update_pin(lambda pin: attrs.evolve(pin, items={**pin.items, **approved}))
        return withheld

    def add_standing(self, *, tool: str | None) -> None:
        """Store that calls need no approval: those of a tool, given as the hash of its text, or of reading tools.

        Raises:
            MCPServerError: when it cannot be stored.
        """

        def add(pin: Pin) -> Pin:
            now = pin.standing
            added = attrs.evolve(now, reading=True) if tool is None else attrs.evolve(now, tools=now.tools | {tool})
            self.standing = added
            return attrs.evolve(pin, standing=added)

        self._update_pin(add)

    def clear_standing(self) -> None:
        """Remove the approvals for all calls of tools.

        Raises:
            MCPServerError: when it cannot be stored.
        """
        if (pin := self.load_pin()) is not None and pin.standing != StandingApprovals():
            self._update_pin(lambda pin: attrs.evolve(pin, standing=StandingApprovals()))
        self.standing = StandingApprovals()

    async def _ask(self, wish: Wish, shown: str, details: str = "") -> bool:
        mark = short_hash(details or shown, HASH_CHARS)
        if self.consent is None or mark in self._declined:
            return False
        approved = await self.consent(Proposal(server=self.server, wish=wish, shown=shown, details=details)) is True
        self._declined |= set() if approved else {mark}
        return approved

    def _format_review(self, pin: Pin, items: Mapping[str, ApprovedText], asked: Iterable[str]) -> tuple[str, str]:
        """Return a line for each item that is new, and the difference of each that has changed; and the full texts."""
        new = [name for name in asked if name not in pin.items]
        changed = [_format_item(name, pin.items.get(name), items[name]) for name in asked if name in pin.items]
        gone = [name for name in pin.items if name not in items]
        changed += [f"No longer listed: {', '.join(map(_one_line, gone))}"] if gone else []
        change = "has changed since it was approved" if pin.items else "lists these items"
        head = f"The MCP server {self.server!r} {change}."
        lines = "\n".join(summarize_item(name, items[name]) for name in new)
        full = [_format_item(name, None, items[name]) for name in new]
        return "\n\n".join(filter(None, [head, lines, *changed])), "\n\n".join([head, *full, *changed])


def summarize_item(name: str, text: ApprovedText) -> str:
    """Return a line for a tool: its name, its arguments, the server's claim that it only reads, its description."""
    try:
        plain = json.loads(text.text)
    except ValueError:  # an escaped character that JSON does not have
        plain = None
    if not isinstance(plain, dict):
        return f"  {_one_line(name)}: {_shorten(text.text)}"
    schema = plain.get("input_schema", {})
    required = schema.get("required")
    required = required if isinstance(required, list) else ()  # the server wrote it, and nothing has checked it yet
    arguments = [each if each in required else f"{each}?" for each in schema.get("properties") or ()]
    hints = plain.get("annotations", {})
    claim = " [read-only, it says]" if claims_reading(hints) else ""
    called = f"{name.removeprefix('tool ')}({', '.join(arguments)})"
    return f"  {_shorten(called)}{claim}: {_shorten(str(plain.get('description', 'no description')))}"


def claims_reading(hints: Mapping[str, Any]) -> bool:
    """Return whether a server's hints describe a tool as read-only, and not as destructive as well."""
    return hints.get("readOnlyHint") is True and hints.get("destructiveHint") is not True


def _shorten(text: str) -> str:
    line = " ".join(escape_hidden(text).split())
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]}... ({len(text):,} characters)"


def _format_item(name: str, before: ApprovedText | None, now: ApprovedText) -> str:
    shown = _one_line(name)
    return f"New: {shown}\n{now.text}" if before is None else f"Changed: {shown}\n{before.diff(now, shown)}"
