"""Read the servers of a configuration file: a JSON object with `mcpServers`, by name.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "..."], "env": {"TOKEN": "${TOKEN}"}},
                    "search": {"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${KEY:-none}"}}}}

`host_documents` finds the servers in the files of other hosts, and `host_formats` translates their keys. Within a
server's entry, an unknown key is an error: ignoring it might be a security problem. An entry with an error is refused,
and the others are read.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import JSON
from agentfsm.core.validation import shorten_repr
from agentfsm.core.value import Value
from agentfsm.logins.oauth_settings import OAuth
from agentfsm.mcp.connection.server_sandbox import ServerSandbox
from agentfsm.mcp.connection.transports import (
    ServerTransport,
    SSETransport,
    StdioTransport,
    StreamableHTTPTransport,
)
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust.config_variables import AskInput, ConfigVariables, read_env_file
from agentfsm.mcp.trust.host_documents import ConfigDocument, read_document
from agentfsm.mcp.trust.host_formats import is_gemini_entry, translate_entry
from agentfsm.mcp.trust.names import check_server_name, derive_server_name, is_server_name
from agentfsm.mcp.trust.tool_policy import ToolPolicy


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
_OAUTH_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "grant": (_is_string, "a text"),
    "client_id": (_is_string, "a text"),
    "client_secret": (_is_string, "a text"),
    "private_key": (_is_string, "a text"),
    "key_algorithm": (_is_string, "a text"),
    "issuer": (_is_string, "a text"),
    "scopes": (_is_string_list, "a list of texts"),
    "callback_port": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a port"),
    "client_metadata_url": (_is_string, "a text"),
}
_POLICY_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "hints": (_is_bool, "true or false"),
    "trusted": (_is_bool, "true or false"),
    "labels": (_is_object, "an object of declarations, by tool"),
    "confirm": (_is_bool, "true or false"),
    "allow": (_is_string_list, "a list of texts"),
    "deny": (_is_string_list, "a list of texts"),
    "repeat_for_input": (_is_string_list, "a list of texts"),
    "constraints": (_is_object, "an object of JSON Schemas, by tool"),
}
_EXTENSION_KEYS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **_POLICY_KEYS,
    "envFile": (_is_string, "a text"),
    "timeout": (_is_seconds, "a number of seconds above 0"),
    "start_timeout": (_is_seconds, "a number of seconds above 0"),
    "required": (_is_bool, "true or false"),
    "disabled": (_is_bool, "true or false"),
    "resources_as_tools": (_is_bool, "true or false"),
    "allow_private": (_is_bool, "true or false"),
    "auth": (lambda value: value == "oauth" or _is_object(value), f'"oauth", or an object of {", ".join(_OAUTH_KEYS)}'),
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
    "type": (lambda value: _is_string(value) and value in _KEY_BY_TYPE, " or ".join(map(repr, _KEY_BY_TYPE))),
}
# The keys of ours that a publisher's file may have: they restrict the server.
_PUBLISHED_KEYS: Final = {key: _EXTENSION_KEYS[key] for key in ("allow", "deny", "timeout")}
_OPTION_BY_KEY: Final = {"timeout": "timeout_s", "start_timeout": "start_s"}


@attrs.frozen(kw_only=True)
class ServerEntry(Value):
    """Server in a configuration file."""

    name: str
    """Name of the server, the key of its entry."""

    transport: ServerTransport
    """Transport that the entry describes, with variables expanded."""

    raw: Mapping[str, JSON]
    """Entry as it is in the file, before variables are expanded. It is approved with the start of the server."""

    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of `MCPServer` that the entry sets."""


@attrs.frozen(kw_only=True)
class RefusedEntry(Value):
    """Entry of a configuration file that cannot be used."""

    name: str
    """Name of the server in the file."""

    why: str
    """Reason, with the file and the key."""


@attrs.frozen(kw_only=True)
class LoadedEntries(Value):
    """Servers of a configuration file."""

    entries: tuple[ServerEntry, ...]
    """Servers that can be used, in the order of the file."""

    refused: tuple[RefusedEntry, ...] = ()
    """Servers that cannot be used."""


def load_entries(
    path: Path,
    environment: Mapping[str, str] = os.environ,
    ask: AskInput | None = None,
    project: Path | None = None,
) -> LoadedEntries:
    """Read the servers of a file, without those that are disabled.

    Args:
        path: The file.
        environment: Values of the variables.
        ask: Function that gives the values of the file's inputs, if the environment has none.
        project: Folder whose own servers in the file are read too. None: the current folder.

    Raises:
        MCPServerError: when the file cannot be read, or each of its entries is refused.
    """
    document = read_document(path, project)
    variables = ConfigVariables(
        environment=None if document.is_foreign else environment,
        answers=environment,
        folders=document.folders,
        inputs=document.inputs,
        ask=ask,
    )
    reader = _FileReader(path, document, variables)
    entries: list[ServerEntry] = []
    refused: list[RefusedEntry] = []
    for name, written in _derive_names(document.servers):
        try:
            entries.append(reader.read_entry(name, written))
        except MCPServerError as error:
            refused.append(RefusedEntry(name=written, why=str(error)))
    for folder, name in document.elsewhere:
        why = f"{path}: server {name!r} is of the project {folder}: give MCPServer.load(project=...), or start there"
        refused.append(RefusedEntry(name=name, why=why))
    if refused and not entries:
        raise MCPServerError("\n".join(each.why for each in refused))
    return LoadedEntries(entries=tuple(entries), refused=tuple(refused))


def _derive_names(servers: Iterable[str]) -> Iterator[tuple[str | None, str]]:
    """Yield each server's name here and in the file, such as "Brave Search". None: another server has the name."""
    taken = {written for written in servers if is_server_name(written)}
    for written in servers:
        if written in taken:
            yield written, written
            continue
        name = derive_server_name(written.rstrip("/").rpartition("/")[2])  # of "github.com/a/b" it is the end
        yield None if name in taken else name, written
        taken.add(name)


@attrs.frozen
class _FileReader(Value):
    """Reader of the entries of one file."""

    path: Path
    document: ConfigDocument
    variables: ConfigVariables

    def read_entry(self, name: str | None, written: str) -> ServerEntry:
        """Return a server of the file."""
        where = f"{self.path}: server {written!r}"
        if name is None:
            raise MCPServerError(f"{where}: its tools would have the names of another server's tools: rename it")
        raw = self.document.servers[written]
        is_own = not self.document.is_foreign
        try:
            plain = translate_entry(raw)
        except MisuseError as error:
            raise MCPServerError(f"{where}: {error}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise MCPServerError(f"{where}: a part of it has another type than its host writes ({error})") from error
        parser = _EntryParser(where, self.variables, self.path, is_gemini=is_gemini_entry(raw, self.path))
        known = {**_STANDARD_KEYS, **(_EXTENSION_KEYS if is_own else _PUBLISHED_KEYS)}
        return parser.parse(name, plain, raw=raw, known=known)


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
    parser = _EntryParser(f"{where}: server {name!r}", ConfigVariables(environment=environment))
    known = {**_STANDARD_KEYS, **_EXTENSION_KEYS} if allow_extensions else _STANDARD_KEYS
    return parser.parse(name, raw, raw=raw, known=known)


@attrs.frozen
class _EntryParser(Value):
    """Parser of one entry."""

    where: str
    variables: ConfigVariables
    path: Path | None = None
    is_gemini: bool = False

    def parse(
        self, name: str, plain: Any, *, raw: Any, known: Mapping[str, tuple[Callable[[Any], bool], str]]
    ) -> ServerEntry:
        """Return the server of an entry with our keys."""
        try:
            check_server_name(name)
            self.check_keys(plain, known)
            transport = self.parse_transport(plain)
            policy = ToolPolicy(**{key: plain[key] for key in _POLICY_KEYS if key in plain})
        except MisuseError as error:
            raise MCPServerError(f"{self.where}: {error}") from error
        options = {option: plain[key] for key, option in _OPTION_BY_KEY.items() if key in plain}
        options |= {key: plain[key] for key in ("required", "resources_as_tools") if key in plain}
        if "envFile" in plain:  # the names of its variables belong to what is approved
            raw = {**raw, "variables": sorted(getattr(transport, "env", ()))}
        return ServerEntry(name=name, transport=transport, raw=raw, options={**options, "tool_policy": policy})

    def check_keys(self, plain: Any, known: Mapping[str, tuple[Callable[[Any], bool], str]], part: str = "") -> None:
        """Check the keys and the types of the values of an object."""
        if not isinstance(plain, dict):
            raise MCPServerError(f"{self.where}: {part or 'its entry'} must be an object, not {shorten_repr(plain)}")
        for key, value in plain.items():
            if key not in known:
                near = difflib.get_close_matches(key[:100], known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
                raise MCPServerError(f"{self.where}: unknown key {key!r}; {hint}")
            fits, expected = known[key]
            if not fits(value):
                raise MCPServerError(f"{self.where}: {key!r} must be {expected}, not {shorten_repr(value)}")

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
        others = (
            _HTTP_KEYS.keys() | {"allow_private", "auth"}
            if way == "command"
            else _STDIO_KEYS.keys() | {"sandbox", "envFile"}
        )
        if wrong := sorted(others & plain.keys()):
            raise MCPServerError(f"{self.where}: a server with {way!r} cannot have {wrong[0]!r}; remove it")
        return self._parse_stdio(plain) if way == "command" else self._parse_http(plain)

    def _parse_stdio(self, plain: Mapping[str, Any]) -> StdioTransport:
        env = {name: self._expand(value) for name, value in plain.get("env", {}).items()}
        return StdioTransport(
            command=self._expand(plain["command"]),
            args=self.variables.expand_all(plain.get("args", ()), bare=self.is_gemini, own=env),
            env=self._read_env_file(plain) | env,
            cwd=self._expand(plain["cwd"]) if "cwd" in plain else None,
            sandbox=self._parse_sandbox(plain.get("sandbox", False)),
        )

    def _read_env_file(self, plain: Mapping[str, Any]) -> dict[str, str]:
        if "envFile" not in plain:
            return {}
        folder = self.path.absolute().parent if self.path else Path.cwd()
        return read_env_file(folder / self._expand(plain["envFile"]))

    def _parse_sandbox(self, plain: Any) -> ServerSandbox | None:
        if isinstance(plain, bool):
            return ServerSandbox() if plain else None
        self.check_keys(plain, _SANDBOX_KEYS, "sandbox")
        paths = {key: [self._expand(path) for path in plain.get(key, ())] for key in ("read", "write")}
        return ServerSandbox(**paths, network=plain.get("network", False))

    def _parse_http(self, plain: Mapping[str, Any]) -> StreamableHTTPTransport | SSETransport:
        kind = SSETransport if plain.get("type") == "sse" else StreamableHTTPTransport
        return kind(
            url=self._expand(plain["url"]),
            headers={name: self._expand(value) for name, value in plain.get("headers", {}).items()},
            auth=self._parse_auth(plain.get("auth")),
            allow_private=plain.get("allow_private", False),
        )

    def _parse_auth(self, plain: Any) -> OAuth | None:
        if not isinstance(plain, dict):
            return None if plain is None else OAuth()
        self.check_keys(plain, _OAUTH_KEYS, "auth")
        texts = {key: self._expand(value) for key, value in plain.items() if isinstance(value, str)}
        scopes = [self._expand(scope) for scope in plain.get("scopes", ())]
        return OAuth(**{**plain, **texts, "scopes": scopes})

    def _expand(self, text: str) -> str:
        return self.variables.expand(text, bare=self.is_gemini)
