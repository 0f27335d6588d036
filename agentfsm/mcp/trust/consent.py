"""Who is asked before a server is started, and before what it has changed is used; and what that person is shown.

A server that a program names in its own code was chosen by its author: it starts unasked, and its tools are taken as
they are first seen. One that comes out of a file or a directory needs a person's yes for both. What a known tool has
become needs a yes in either case, and until then it is withheld.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from agentfsm.core.fingerprint import short_hash
from agentfsm.core.messages import JSON
from agentfsm.core.text_safety import escape_hidden
from agentfsm.core.value import Value
from agentfsm.mcp.connection.launch import Launch, Remote, Stdio
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust.pins import HASH_CHARS, Pin, Pins, Text

_log = logging.getLogger("agentfsm.mcp")

# Characters of what is kept of a value that may be a secret: enough to notice that it is another.
_SECRET_HASH_CHARS: Final = 12
_SECRETS: Final = ("env", "headers")


class Wish(StrEnum):
    """What a person is asked about a server."""

    START = "start"
    # Whether it may be started, or connected to, at all.
    TOOLS = "tools"
    # Whether the tools that it lists may be used.
    CHANGE = "change"
    # Whether they may be, as they are now.


@attrs.frozen(kw_only=True)
class Proposal(Value):
    """Something about a server that a person says yes or no to."""

    server: str
    wish: Wish
    shown: str
    # All that the decision is about, for reading; hidden characters are spelt out.


Consent: TypeAlias = Callable[[Proposal], Awaitable[bool]]


def start_text(launch: Launch, written: Mapping[str, JSON] | None = None) -> Text:
    """Return how a server is started, as it is pinned: secrets by a part of their hash.

    Args:
        launch: How it is started.
        written: Its entry in a configuration, before variables were put in; where there is one, that is what counts.
    """
    start: dict[str, Any] = dict(written) if written is not None else _parts(launch)
    for name in _SECRETS:
        if isinstance(values := start.get(name), Mapping):
            start[name] = {key: f"sha256:{short_hash(str(value), _SECRET_HASH_CHARS)}" for key, value in values.items()}
    return Text.of(start)


def _parts(launch: Launch) -> dict[str, Any]:
    match launch:
        case Stdio():
            sandbox = None if launch.sandbox is None else launch.sandbox.written
            told = {"env": dict(launch.env), "cwd": launch.cwd and str(launch.cwd), "sandbox": sandbox}
            return {"command": launch.command, "args": list(launch.args), **{k: v for k, v in told.items() if v}}
        case Remote():
            return {"url": launch.shown, "headers": dict(launch.headers), "allow_private": launch.allow_private}
    return {"launch": launch.shown}


def start_shown(launch: Launch) -> str:
    """Say exactly how a server is started, for a person who decides on it; values that may be secrets are left out."""
    match launch:
        case Stdio():
            lines = [f"command:   {shlex.join([launch.command, *launch.args])}"]
            lines += [f"folder:    {launch.cwd}"] if launch.cwd else []
            lines += [f"variables: {', '.join(launch.env)}"] if launch.env else []
            lines.append(f"sandbox:   {launch.sandbox.shown if launch.sandbox else 'none: it may do what you may do'}")
        case Remote():
            lines = [f"URL:       {launch.shown}"]
            lines += [f"headers:   {', '.join(launch.headers)}"] if launch.headers else []
            lines += ["private addresses are allowed"] if launch.allow_private else []
        case _:
            lines = [launch.shown]
    return "\n".join(f"  {_one_line(line)}" for line in lines)


def _one_line(text: str) -> str:
    """Return the text on one line, so that no server can write lines of its own into what a person reads."""
    return escape_hidden(text).replace("\n", "\\n").replace("\t", "\\t")


@attrs.define(eq=False, repr=False, kw_only=True)
class Gate:
    """Lets through what was approved of one server, and asks about the rest."""

    server: str
    pins: Pins
    consent: Consent | None
    origin: str | None
    # The file or the directory that the server comes from; None where a program names it in its code.
    _declined: set[str] = attrs.field(factory=set, init=False)
    # Hashes of what was said no to: nobody is asked the same again.
    _announced: bool = attrs.field(default=False, init=False)

    @property
    def key(self) -> str:
        """What the pins of the server are kept under: files may call two servers by one name."""
        return self.server if self.origin is None else f"{self.origin}#{self.server}"

    def pin(self) -> Pin | None:
        """Return what was approved of the server, if anything was."""
        return self.pins.read().get(self.key)

    async def start(self, launch: Launch, start: Text) -> None:
        """Return if the server may be started.

        Raises:
            MCPServerError: when nobody has approved how it is started.
        """
        pin = self.pin() or Pin()
        if self.origin is None and not self._announced:
            self._announced = True
            _log.info("the MCP server %r is started for the first time:\n%s", self.server, start_shown(launch))
        if pin.start == start:
            return
        changed = f"\nIt was approved otherwise:\n{pin.start.difference(start, 'start')}" if pin.start else ""
        if self.origin is None:
            if changed:
                _log.warning("the MCP server %r is started otherwise than before.%s", self.server, changed)
            self._keep(start=start)
            return
        shown = f"Start the MCP server {self.server!r} of {self.origin}:\n{start_shown(launch)}{changed}"
        if not await self._asked(Wish.START, shown):
            raise MCPServerError(
                f"the MCP server {self.server!r} was not started: nobody has approved how that is done.\n"
                f"{start_shown(launch)}\nTo say yes to it, {self._way_on()}"
            )
        self._keep(start=start)

    def _keep(self, **parts: Any) -> None:
        """Change what is pinned, as it is by now: another process may have been told something meanwhile."""
        self.pins.write(self.key, attrs.evolve(self.pin() or Pin(), **parts))

    def _way_on(self) -> str:
        is_file = self.origin is not None and Path(self.origin).is_absolute()  # a directory has a name
        return f"run: agentfsm mcp approve {shlex.quote(self.origin or '')}" if is_file else "give consent="

    async def review(self, items: Mapping[str, Text]) -> dict[str, str]:
        """Compare what the server says now with what was approved, and ask about what is not the same.

        What is new from a server that a program names in its code is taken as it is, unless somebody is there to ask.

        Args:
            items: What it says, by what it is: "tool search", "instructions".

        Returns:
            Those of the items that are withheld, each with the reason. The others are approved now.
        """
        pin = self.pin() or Pin()
        changed = [name for name, text in items.items() if pin.items.get(name, text) != text]
        new = [name for name in items if name not in pin.items]
        is_taken = self.origin is None and (not pin.items or self.consent is None)
        asked = [*changed, *([] if is_taken else new)]
        withheld: dict[str, str] = {}
        if asked:
            wish = Wish.CHANGE if pin.items else Wish.TOOLS
            if not await self._asked(wish, self._shown(pin, items, asked)):
                withheld = {name: self._reason(is_new=name in new) for name in asked}
        approved = {name: text for name, text in items.items() if name not in withheld}
        if not approved.items() <= pin.items.items():
            now = self.pin() or Pin()
            self._keep(items={**now.items, **approved})
        return withheld

    async def _asked(self, wish: Wish, shown: str) -> bool:
        mark = short_hash(shown, HASH_CHARS)
        if self.consent is None or mark in self._declined:
            return False
        approved = await self.consent(Proposal(server=self.server, wish=wish, shown=shown)) is True
        self._declined |= set() if approved else {mark}
        return approved

    def _shown(self, pin: Pin, items: Mapping[str, Text], asked: Iterable[str]) -> str:
        parts = [_part(name, pin.items.get(name), items[name]) for name in asked]
        gone = [name for name in pin.items if name not in items]
        parts += [f"No longer there: {', '.join(gone)}"] if gone else []
        what = "says otherwise than was approved" if pin.items else "offers this"
        return "\n\n".join([f"The MCP server {self.server!r} {what}.", *parts])

    def _reason(self, *, is_new: bool) -> str:
        what = "it is new, and nobody has approved it" if is_new else "it has changed since it was approved"
        return f"{what}; to be shown it and say yes or no, {self._way_on()}"


def _part(name: str, before: Text | None, now: Text) -> str:
    shown = _one_line(name)
    return f"New: {shown}\n{now.text}" if before is None else f"Changed: {shown}\n{before.difference(now, shown)}"
