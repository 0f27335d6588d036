"""Store the texts that a person has approved: of an MCP server its start and its tools, of a skill its files.

What is found later is compared with these texts before it is used. The text is kept beside the hash, so that a change
can be shown as a diff.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import jiter

from agentfsm._lib.shared_files import change_file
from agentfsm.core.errors import AgentError
from agentfsm.core.header import short_hash
from agentfsm.core.messages import JSON
from agentfsm.core.text_safety import escape_hidden
from agentfsm.core.value import Value

# All of SHA-256: an attacker has unlimited time to search for a collision.
HASH_CHARS: Final = 64
# The version of the file's format.
_VERSION: Final = 1


class PinsError(AgentError):
    """Approvals cannot be read or stored; the message names the file and a remedy."""


@attrs.frozen
class ApprovedText(Value):
    """Text that a person has approved, exactly as it was shown."""

    text: str
    """The text, with hidden characters escaped."""

    @property
    def hash(self) -> str:
        """SHA-256 of the text, as 64 hexadecimal digits."""
        return short_hash(self.text, HASH_CHARS)

    @classmethod
    def from_json(cls, value: JSON) -> ApprovedText:
        """Format a JSON value for reading: indented, with sorted keys and escaped hidden characters."""
        return cls(escape_hidden(json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)))

    def diff(self, newer: ApprovedText, title: str) -> str:
        """Return a unified diff from this text to a newer one."""
        sides = (self.text.splitlines(), newer.text.splitlines())
        return "\n".join(difflib.unified_diff(*sides, f"{title} as approved", f"{title} now", lineterm="", n=2))


@attrs.frozen(kw_only=True)
class StandingApprovals(Value):
    """Approvals of a person for all calls of a server's tools."""

    tools: frozenset[str] = frozenset()
    """Hashes of the texts of tools whose calls need no approval."""

    reading: bool = False
    """Whether calls of tools that the server describes as read-only need no approval."""


@attrs.frozen(kw_only=True)
class Pin(Value):
    """Approvals of one server or skill."""

    start: ApprovedText | None = None
    """Approved start command or address; None: not approved."""

    items: Mapping[str, ApprovedText] = attrs.field(factory=dict)
    """Approved texts by kind and name: "tool search", "instructions", "file SKILL.md". Items that a server no longer
    lists are kept, so that a changed one is noticed when it returns.
    """

    standing: StandingApprovals = StandingApprovals()
    """Approvals for all calls of tools."""


class Pins(Protocol):
    """Storage for approvals."""

    def read(self) -> Mapping[str, Pin]:
        """Return all pins, by the key of a server or skill.

        Raises:
            PinsError: when the pins cannot be read.
        """
        ...

    def write(self, server: str, pin: Pin) -> None:
        """Store the pin of a server, replacing the earlier one.

        Raises:
            PinsError: when the pin cannot be stored.
        """
        ...

    def change(self, server: str, change: Callable[[Pin | None], Pin]) -> None:
        """Store the pin that a function makes of the stored one, which is None if there is none.

        The default reads, then writes: a storage that several processes share does both under a lock, so that the
        approval of one process does not undo that of another.

        Raises:
            PinsError: when the pin cannot be stored.
        """
        self.write(server, change(self.read().get(server)))


@attrs.define(eq=False, repr=False)
class MemoryPins(Pins):
    """Pins in memory, which end with the process."""

    _pins: dict[str, Pin] = attrs.field(factory=dict, init=False)

    def read(self) -> Mapping[str, Pin]:
        """Return all pins, by the key of a server or skill."""
        return dict(self._pins)

    def write(self, server: str, pin: Pin) -> None:
        """Store the pin of a server."""
        self._pins[server] = pin


def default_path() -> Path:
    """Return the default pin file, which all programs of a user share."""
    return Path.home() / ".agentfsm" / "mcp-pins.json"


@attrs.define(eq=False, repr=False)
class PinFile(Pins):
    """Pins in a JSON file that several processes may share. Only its owner may read it.

    A write replaces the whole file atomically, under a lock between processes.
    """

    path: Path = attrs.field(factory=default_path, converter=Path)
    """Path of the file. Default: ~/.agentfsm/mcp-pins.json, which `agentfsm mcp approve` also uses."""

    def read(self) -> Mapping[str, Pin]:
        """Return all pins, by the key of a server or skill.

        Raises:
            PinsError: when the file cannot be read, or does not have the expected format.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise PinsError(f"the approvals cannot be read: {error}") from error
        return self._parse(content)

    def _parse(self, content: bytes) -> Mapping[str, Pin]:
        try:
            return _parse_file(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PinsError(
                f"the approvals in {self.path} cannot be parsed ({error or 'a part is missing'})."
                " Nothing was overwritten. Restore a copy, or remove the file and approve again."
            ) from error

    def write(self, server: str, pin: Pin) -> None:
        """Store the pin of a server.

        Raises:
            PinsError: when the file cannot be read or written; it is left unchanged.
        """
        self.change(server, lambda _stored: pin)

    def change(self, server: str, change: Callable[[Pin | None], Pin]) -> None:
        """Store the pin that a function makes of the stored one, under a lock between processes.

        Raises:
            PinsError: when the file cannot be read or written; it is left unchanged.
        """

        def update(content: str | None) -> str:
            pins = {} if content is None else self._parse(content.encode())
            return _format_file({**pins, server: change(pins.get(server))})

        try:
            change_file(self.path, update)
        except (OSError, UnicodeError) as error:
            raise PinsError(f"the approval of {server!r} cannot be stored: {error}") from error


def _format_file(pins: Mapping[str, Pin]) -> str:
    servers = {server: _pin_to_json(pin) for server, pin in sorted(pins.items())}
    return json.dumps({"version": _VERSION, "servers": servers}, ensure_ascii=False, indent=2) + "\n"


def _pin_to_json(pin: Pin) -> dict[str, Any]:
    return {
        "start": None if pin.start is None else _text_to_json(pin.start),
        "items": {name: _text_to_json(text) for name, text in sorted(pin.items.items())},
        "standing": {"tools": sorted(pin.standing.tools), "reading": pin.standing.reading},
    }


def _text_to_json(text: ApprovedText) -> dict[str, str]:
    return {"sha256": text.hash, "text": text.text}


def _parse_file(content: bytes) -> dict[str, Pin]:
    document = jiter.from_json(content, catch_duplicate_keys=True)
    if document["version"] != _VERSION:
        raise ValueError(f"the file has version {document['version']!r}; supported: {_VERSION}")
    return {server: _parse_pin(server, each) for server, each in document["servers"].items()}


def _parse_pin(server: str, plain: Mapping[str, Any]) -> Pin:
    standing = plain.get("standing", {"tools": [], "reading": False})
    return Pin(
        start=None if plain["start"] is None else _parse_text(server, plain["start"]),
        items={name: _parse_text(server, entry) for name, entry in plain["items"].items()},
        standing=StandingApprovals(tools=frozenset(standing["tools"]), reading=standing["reading"] is True),
    )


def _parse_text(server: str, entry: Mapping[str, str]) -> ApprovedText:
    text = ApprovedText(entry["text"])
    if text.hash != entry["sha256"]:
        raise ValueError(f"a text of {server!r} does not match its hash")
    return text
