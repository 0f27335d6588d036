"""The configuration of servers that every host reads: a JSON object with `mcpServers`, by name.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "..."], "env": {"TOKEN": "${TOKEN}"}},
                    "search": {"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${KEY:-none}"}}}}

`servers`, as VS Code has it, stands for `mcpServers` where that is absent; what else is in the file is other programs'.
Inside of a server's entry nothing is passed over: a key that nobody reads is a misunderstanding, and here it might be
one about safety.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import attrs
import jiter

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import JSON
from agentfsm.core.value import Value
from agentfsm.mcp.connection.launch import Http, Launch, Sse, Stdio
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust.names import check_server
from agentfsm.mcp.trust.sandbox import Sandbox
from agentfsm.mcp.trust.terms import Terms

# Bytes; a hundred servers take some 30,000.
MAX_FILE_BYTES: Final = 1_000_000

# The last branch is what only looks like one: `${input:token}` asks somebody in another host.
_VARIABLE: Final = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{[^}]*\}?")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_named_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


_COMMAND: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "command": (_is_text, "a text"),
    "args": (_are_texts, "a list of texts"),
    "env": (_are_named_texts, "an object of texts"),
    "cwd": (_is_text, "a text"),
}
_URL: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "url": (_is_text, "a text"),
    "headers": (_are_named_texts, "an object of texts"),
}
_TERMS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "trusted": (_is_flag, "true or false"),
    "confirm": (_is_flag, "true or false"),
    "allow": (_are_texts, "a list of texts"),
    "deny": (_are_texts, "a list of texts"),
    "constraints": (_is_object, "an object of JSON Schemas, by tool"),
}
_OWN: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **_TERMS,
    "timeout": (_is_seconds, "a number of seconds above 0"),
    "start_timeout": (_is_seconds, "a number of seconds above 0"),
    "required": (_is_flag, "true or false"),
    "disabled": (_is_flag, "true or false"),
    "resources_as_tools": (_is_flag, "true or false"),
    "allow_private": (_is_flag, "true or false"),
    "sandbox": (
        lambda value: _is_flag(value) or _is_object(value),
        "true, false, or an object of read, write, network",
    ),
}
_SANDBOX: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "read": (_are_texts, "a list of texts"),
    "write": (_are_texts, "a list of texts"),
    "network": (_is_flag, "true or false"),
}
# What `type` may say -> the key that such a server has.
_TYPE: Final = {"stdio": "command", "http": "url", "streamable-http": "url", "streamableHttp": "url", "sse": "url"}
# The keys that every host knows; the others are ours.
_KNOWN: Final = {**_COMMAND, **_URL, "type": (lambda value: value in _TYPE, " or ".join(map(repr, _TYPE)))}
_SECONDS: Final = {"timeout": "timeout_s", "start_timeout": "start_s"}


@attrs.frozen(kw_only=True)
class Entry(Value):
    """A server as it is configured."""

    name: str
    launch: Launch
    written: Mapping[str, JSON]
    # The entry itself, before variables were put in.
    options: Mapping[str, Any] = attrs.field(factory=dict)
    # Of `MCPServer`, where the entry says something.


def entries_in(path: Path, environment: Mapping[str, str] = os.environ) -> tuple[Entry, ...]:
    """Read the servers of a file, without those that are disabled.

    Raises:
        MCPServerError: when it cannot be read, or something in it makes no sense; it names the file, server and key.
    """
    document = _read(path)
    servers = document.get("mcpServers", document.get("servers"))
    if not isinstance(servers, dict):
        raise MCPServerError(f'{path}: it has no object "mcpServers", which holds the servers by name')
    found = [
        (name, plain) for name, plain in servers.items() if not (_is_object(plain) and plain.get("disabled") is True)
    ]
    return tuple(entry_of(name, plain, where=str(path), environment=environment) for name, plain in found)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MCPServerError(f"the MCP servers of {path} cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise MCPServerError(f"{path}: it is larger than {MAX_FILE_BYTES:,} bytes, and no list of servers")
    try:
        document = jiter.from_json(content.removeprefix(b"\xef\xbb\xbf"), catch_duplicate_keys=True)
    except ValueError as error:
        raise MCPServerError(f"{path}: it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise MCPServerError(f'{path}: it is no JSON object with "mcpServers"')
    return document


def entry_of(
    name: str,
    plain: Any,
    *,
    where: str,
    environment: Mapping[str, str] | None,
    ours: bool = True,
) -> Entry:
    """Make sense of one entry.

    Args:
        name: The server's.
        plain: Parsed JSON.
        where: The file or directory, for error texts.
        environment: Where variables come from; None where none are put in.
        ours: Whether it may have our own keys, which grant something.

    Raises:
        MCPServerError: when something in it makes no sense.
    """
    reading = _Reading(f"{where}: server {name!r}", environment)
    try:
        check_server(name)
        known = {**_KNOWN, **_OWN} if ours else _KNOWN
        reading.check(plain, known)
        launch = reading.launch(plain)
        terms = Terms(**{key: plain[key] for key in _TERMS if key in plain})
    except MisuseError as error:
        raise MCPServerError(f"{reading.where}: {error}") from error
    options = {option: plain[key] for key, option in _SECONDS.items() if key in plain}
    options |= {key: plain[key] for key in ("required", "resources_as_tools") if key in plain}
    return Entry(name=name, launch=launch, written=plain, options={**options, "terms": terms})


@attrs.frozen
class _Reading(Value):
    """Reads one entry."""

    where: str
    environment: Mapping[str, str] | None

    def check(self, plain: Any, known: Mapping[str, tuple[Callable[[Any], bool], str]], part: str = "") -> None:
        """Hold an object to what its keys may be."""
        if not isinstance(plain, dict):
            raise MCPServerError(f"{self.where}: {part or 'its entry'} has to be an object, not {_cut(plain)}")
        for key, value in plain.items():
            if key not in known:
                raise MCPServerError(f"{self.where}: nothing is known of the key {key!r}{_near(key, known)}")
            fits, wish = known[key]
            if not fits(value):
                raise MCPServerError(f"{self.where}: {key!r} has to be {wish}, not {_cut(value)}")

    def launch(self, plain: Mapping[str, Any]) -> Launch:
        """Return how the server is reached."""
        ways = [way for way in ("command", "url") if way in plain]
        if len(ways) != 1:
            raise MCPServerError(
                f"{self.where}: it needs a 'command' or a 'url', and has {' and '.join(ways) or 'none'}"
            )
        way = ways[0]
        if _TYPE.get(plain.get("type", ""), way) != way:
            raise MCPServerError(f"{self.where}: 'type' is {plain['type']!r}, and such a server has no {way!r}")
        others = _URL.keys() | {"allow_private"} if way == "command" else _COMMAND.keys() | {"sandbox"}
        if wrong := sorted(others & plain.keys()):
            raise MCPServerError(f"{self.where}: a server with a {way!r} has no use for {wrong[0]!r}; take it away")
        return self._command(plain) if way == "command" else self._url(plain)

    def _command(self, plain: Mapping[str, Any]) -> Stdio:
        env = {name: self.filled(value) for name, value in plain.get("env", {}).items()}
        return Stdio(
            command=self.filled(plain["command"]),
            args=[self.filled(each) for each in plain.get("args", ())],
            env=env,
            cwd=self.filled(plain["cwd"]) if "cwd" in plain else None,
            sandbox=self._sandbox(plain.get("sandbox", False)),
        )

    def _sandbox(self, plain: Any) -> Sandbox | None:
        if isinstance(plain, bool):
            return Sandbox() if plain else None
        self.check(plain, _SANDBOX, "sandbox")
        paths = {key: [self.filled(path) for path in plain.get(key, ())] for key in ("read", "write")}
        return Sandbox(**paths, network=plain.get("network", False))

    def _url(self, plain: Mapping[str, Any]) -> Http | Sse:
        kind = Sse if plain.get("type") == "sse" else Http
        return kind(
            url=self.filled(plain["url"]),
            headers={name: self.filled(value) for name, value in plain.get("headers", {}).items()},
            allow_private=plain.get("allow_private", False),
        )

    def filled(self, text: str) -> str:
        """Put in the variables that a text names."""
        return _VARIABLE.sub(self._value, text)

    def _value(self, found: re.Match[str]) -> str:
        name, default = found[1], cast("str | None", found[2])
        if name is None or self.environment is None:
            wish = "nothing is put in here" if self.environment is None else "write ${NAME} or ${NAME:-default}"
            raise MCPServerError(f"{self.where}: {_cut(found[0])} is no variable: {wish}")
        value = self.environment.get(name)
        if default is not None:
            return value or default
        if value is None:
            raise MCPServerError(
                f"{self.where}: the variable {name} is not set: set it, or write ${{{name}:-default}} for a default"
            )
        return value


def _near(key: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key[:100], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."  # noqa: PLR2004  enough to find it
