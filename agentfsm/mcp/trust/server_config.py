"""Read the usual configuration file of MCP hosts: a JSON object with `mcpServers`, by name.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "..."], "env": {"TOKEN": "${TOKEN}"}},
                    "search": {"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${KEY:-none}"}}}}

If `mcpServers` is absent, `servers` is read instead, as VS Code writes it. Other top-level keys belong to other
programs and are ignored. Within a server's entry, an unknown key is an error: ignoring it might be a security problem.
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
from agentfsm.mcp.connection.sandbox import Sandbox
from agentfsm.mcp.connection.transports import (
    ServerTransport,
    SSETransport,
    StdioTransport,
    StreamableHTTPTransport,
)
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust.names import check_server_name
from agentfsm.mcp.trust.tool_policy import ToolPolicy

# Maximum size of the file in bytes; a hundred servers take some 30,000.
MAX_FILE_BYTES: Final = 1_000_000

# The last branch matches unsupported forms: with `${input:token}`, other hosts ask the user.
_VARIABLE_PATTERN: Final = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{[^}]*\}?")


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_string, value))


def _is_string_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_string, value.values()))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


_STDIO_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "command": (_is_string, "a text"),
    "args": (_is_string_list, "a list of texts"),
    "env": (_is_string_map, "an object of texts"),
    "cwd": (_is_string, "a text"),
}
_HTTP_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "url": (_is_string, "a text"),
    "headers": (_is_string_map, "an object of texts"),
}
_POLICY_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "trusted": (_is_bool, "true or false"),
    "confirm": (_is_bool, "true or false"),
    "allow": (_is_string_list, "a list of texts"),
    "deny": (_is_string_list, "a list of texts"),
    "repeat_for_input": (_is_string_list, "a list of texts"),
    "constraints": (_is_object, "an object of JSON Schemas, by tool"),
}
_EXTENSION_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **_POLICY_KEYS,
    "timeout": (_is_seconds, "a number of seconds above 0"),
    "start_timeout": (_is_seconds, "a number of seconds above 0"),
    "required": (_is_bool, "true or false"),
    "disabled": (_is_bool, "true or false"),
    "resources_as_tools": (_is_bool, "true or false"),
    "allow_private": (_is_bool, "true or false"),
    "sandbox": (
        lambda value: _is_bool(value) or _is_object(value),
        "true, false, or an object of read, write, network",
    ),
}
_SANDBOX_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "read": (_is_string_list, "a list of texts"),
    "write": (_is_string_list, "a list of texts"),
    "network": (_is_bool, "true or false"),
}
# What `type` may say -> the key that such a server has.
_KEY_BY_TYPE: Final = {
    "stdio": "command",
    "http": "url",
    "streamable-http": "url",
    "streamableHttp": "url",
    "sse": "url",
}
# The keys that every host knows; the others are ours.
_STANDARD_KEYS: Final = {
    **_STDIO_KEYS,
    **_HTTP_KEYS,
    "type": (lambda value: value in _KEY_BY_TYPE, " or ".join(map(repr, _KEY_BY_TYPE))),
}
_OPTION_BY_KEY: Final = {"timeout": "timeout_s", "start_timeout": "start_s"}


@attrs.frozen(kw_only=True)
class ServerEntry(Value):
    """Server in a configuration file."""

    name: str
    """Name of the server, the key of its entry."""

    transport: ServerTransport
    """Transport that the entry describes, with variables expanded."""

    raw: Mapping[str, JSON]
    """Entry as it is in the file, before variables are expanded."""

    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of `MCPServer` that the entry sets."""


def load_entries(path: Path, environment: Mapping[str, str] = os.environ) -> tuple[ServerEntry, ...]:
    """Read the servers of a file, without those that are disabled.

    Raises:
        MCPServerError: when the file cannot be read, or is invalid; the text names the file, server and key.
    """
    document = _read_document(path)
    servers = document.get("mcpServers", document.get("servers"))
    if not isinstance(servers, dict):
        raise MCPServerError(f'{path}: it has no object "mcpServers", which holds the servers by name')
    found = [
        (name, plain) for name, plain in servers.items() if not (_is_object(plain) and plain.get("disabled") is True)
    ]
    return tuple(parse_entry(name, plain, where=str(path), environment=environment) for name, plain in found)


def _read_document(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MCPServerError(f"the MCP servers in {path} cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise MCPServerError(f"{path}: a list of servers must not be larger than {MAX_FILE_BYTES:,} bytes")
    try:
        document = jiter.from_json(content.removeprefix(b"\xef\xbb\xbf"), catch_duplicate_keys=True)
    except ValueError as error:
        raise MCPServerError(f"{path}: invalid JSON ({error})") from error
    if not isinstance(document, dict):
        raise MCPServerError(f'{path}: expected a JSON object with "mcpServers"')
    return document


def parse_entry(
    name: str,
    raw: Any,
    *,
    where: str,
    environment: Mapping[str, str] | None,
    allow_extensions: bool = True,
) -> ServerEntry:
    """Parse the entry of one server.

    Args:
        name: The server's name.
        raw: The entry, as parsed JSON.
        where: The file or directory, for error texts.
        environment: Values of the variables. None: variables are not expanded.
        allow_extensions: Whether the keys of this package are allowed, which may grant rights.

    Raises:
        MCPServerError: when the entry is invalid.
    """
    parser = _EntryParser(f"{where}: server {name!r}", environment)
    try:
        check_server_name(name)
        known = {**_STANDARD_KEYS, **_EXTENSION_KEYS} if allow_extensions else _STANDARD_KEYS
        parser.check_keys(raw, known)
        transport = parser.parse_transport(raw)
        policy = ToolPolicy(**{key: raw[key] for key in _POLICY_KEYS if key in raw})
    except MisuseError as error:
        raise MCPServerError(f"{parser.where}: {error}") from error
    options = {option: raw[key] for key, option in _OPTION_BY_KEY.items() if key in raw}
    options |= {key: raw[key] for key in ("required", "resources_as_tools") if key in raw}
    return ServerEntry(name=name, transport=transport, raw=raw, options={**options, "tool_policy": policy})


@attrs.frozen
class _EntryParser(Value):
    """Parser of one entry."""

    where: str
    environment: Mapping[str, str] | None

    def check_keys(self, plain: Any, known: Mapping[str, tuple[Callable[[Any], bool], str]], part: str = "") -> None:
        """Check the keys and the types of the values of an object."""
        if not isinstance(plain, dict):
            raise MCPServerError(f"{self.where}: {part or 'its entry'} must be an object, not {_shorten_repr(plain)}")
        for key, value in plain.items():
            if key not in known:
                raise MCPServerError(f"{self.where}: unknown key {key!r}{_suggest_key(key, known)}")
            fits, expected = known[key]
            if not fits(value):
                raise MCPServerError(f"{self.where}: {key!r} must be {expected}, not {_shorten_repr(value)}")

    def parse_transport(self, plain: Mapping[str, Any]) -> ServerTransport:
        """Return the transport of the server."""
        ways = [way for way in ("command", "url") if way in plain]
        if len(ways) != 1:
            raise MCPServerError(
                f"{self.where}: expected either 'command' or 'url', found {' and '.join(ways) or 'neither'}"
            )
        way = ways[0]
        if _KEY_BY_TYPE.get(plain.get("type", ""), way) != way:
            raise MCPServerError(f"{self.where}: a server of 'type' {plain['type']!r} cannot have {way!r}; remove one")
        others = _HTTP_KEYS.keys() | {"allow_private"} if way == "command" else _STDIO_KEYS.keys() | {"sandbox"}
        if wrong := sorted(others & plain.keys()):
            raise MCPServerError(f"{self.where}: a server with {way!r} cannot have {wrong[0]!r}; remove it")
        return self._parse_stdio(plain) if way == "command" else self._parse_http(plain)

    def _parse_stdio(self, plain: Mapping[str, Any]) -> StdioTransport:
        env = {name: self.expand_variables(value) for name, value in plain.get("env", {}).items()}
        return StdioTransport(
            command=self.expand_variables(plain["command"]),
            args=[self.expand_variables(each) for each in plain.get("args", ())],
            env=env,
            cwd=self.expand_variables(plain["cwd"]) if "cwd" in plain else None,
            sandbox=self._parse_sandbox(plain.get("sandbox", False)),
        )

    def _parse_sandbox(self, plain: Any) -> Sandbox | None:
        if isinstance(plain, bool):
            return Sandbox() if plain else None
        self.check_keys(plain, _SANDBOX_KEYS, "sandbox")
        paths = {key: [self.expand_variables(path) for path in plain.get(key, ())] for key in ("read", "write")}
        return Sandbox(**paths, network=plain.get("network", False))

    def _parse_http(self, plain: Mapping[str, Any]) -> StreamableHTTPTransport | SSETransport:
        kind = SSETransport if plain.get("type") == "sse" else StreamableHTTPTransport
        return kind(
            url=self.expand_variables(plain["url"]),
            headers={name: self.expand_variables(value) for name, value in plain.get("headers", {}).items()},
            allow_private=plain.get("allow_private", False),
        )

    def expand_variables(self, text: str) -> str:
        """Replace the variables in a text by their values."""
        return _VARIABLE_PATTERN.sub(self._resolve_variable, text)

    def _resolve_variable(self, found: re.Match[str]) -> str:
        name, default = found[1], cast("str | None", found[2])
        if name is None or self.environment is None:
            hint = "variables are not expanded here" if self.environment is None else "use ${NAME} or ${NAME:-default}"
            raise MCPServerError(f"{self.where}: unsupported variable {_shorten_repr(found[0])}: {hint}")
        value = self.environment.get(name)
        if default is not None:
            return value or default
        if value is None:
            raise MCPServerError(
                f"{self.where}: the variable {name} is not set: set it, or write ${{{name}:-default}} for a default"
            )
        return value


def _suggest_key(key: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key[:100], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"


def _shorten_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."  # noqa: PLR2004  enough to find it
