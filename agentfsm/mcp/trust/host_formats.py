"""Read the configuration files of MCP hosts: find the servers in a file, and translate the keys of other hosts.

Keys that restrict a server are honoured, keys that would grant it rights or only describe it are dropped, and an entry
with any other key is refused: ignoring it might be a security problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import jiter

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust import server_packages
from agentfsm.mcp.trust.config_variables import InputField

# Maximum size of the file in bytes; a hundred servers take some 30,000.
MAX_FILE_BYTES: Final = 1_000_000

# Texts stay as they are; comments and commas before a closing bracket become spaces, so that positions stay the same.
_COMMENT: Final = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA: Final = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)

# Places of the servers in a document: most hosts, VS Code, its settings.json, Zed, opencode.
_PLACES: Final = (("mcpServers",), ("servers",), ("mcp", "servers"), ("context_servers",), ("mcp",))
_WAYS: Final = ("command", "url", "serverUrl", "httpUrl")

_RENAMED: Final = {
    "serverUrl": "url",  # Windsurf
    "httpUrl": "url",  # Gemini
    "transport": "type",  # fastmcp
    "transportType": "type",  # Cline
    "environment": "env",  # opencode
    "includeTools": "allow",  # Gemini
    "tools": "allow",  # Copilot
    "excludeTools": "deny",  # Gemini
    "disabledTools": "deny",  # Windsurf, Roo Code, Kiro
}
_TYPES: Final = {"local": "stdio", "remote": "http", "streamable_http": "http"}
# Keys without a meaning here: descriptions, and rights that only the keys of this package can grant.
_DROPPED: Final = frozenset(
    {"alwaysAllow", "alwaysLoad", "autoApprove", "description", "dev", "disabled", "displayName", "enabled", "gallery"}
    | {"icon", "iconUrl", "isActive", "keep_alive", "name", "note", "notes", "source", "sse_read_timeout", "trust"}
    | {"version", "watchPaths"}
)
_UNSUPPORTED: Final = {
    "headersHelper": "it runs a command to get headers; use 'headers' with ${NAME}",
    "sandboxEnabled": "use 'sandbox' of this package: true, or an object of read, write, network",
    "include_tags": "tags are not supported; use 'allow'",
    "exclude_tags": "tags are not supported; use 'deny'",
}
# Settings of OAuth in other hosts -> ours: Claude Code, Gemini and opencode have them in `oauth`, Cursor in `auth`.
_OAUTH_RENAMED: Final = {
    "clientId": "client_id",
    "CLIENT_ID": "client_id",
    "clientSecret": "client_secret",
    "CLIENT_SECRET": "client_secret",
    "callbackPort": "callback_port",
    "scope": "scopes",
}
_OAUTH_DROPPED: Final = frozenset({"enabled", "authorizationUrl", "tokenUrl", "tokenParamName", "redirectUri"})
# The one of Gemini's `authProviderType` that means OAuth with a person.
_GEMINI_OAUTH: Final = "dynamic_discovery"
# Keys by which Gemini's command line is recognised; it also replaces $NAME.
_GEMINI_KEYS: Final = frozenset({"httpUrl", "includeTools", "excludeTools", "trust"})
# Keys of hosts that count `timeout` in seconds, whatever its size: ours, Cline and Roo Code.
_SECONDS_KEYS: Final = frozenset(
    {"alwaysAllow", "autoApprove", "transportType", "hints", "trusted", "labels", "confirm", "start_timeout"}
)
# From this value on, `timeout` of other hosts counts as milliseconds: nobody waits for a call for 17 minutes.
_FIRST_MILLISECONDS: Final = 1_000
_SSE_URL: Final = re.compile(r"/sse/?(?:[?#].*)?$")


@attrs.frozen(kw_only=True)
class ConfigDocument(Value):
    """Servers of a file, as they are written, and the values that it describes."""

    servers: Mapping[str, Any]
    """Entries by name, without those that are disabled."""

    inputs: Mapping[str, InputField] = attrs.field(factory=dict)
    """Inputs that the file describes, by id."""

    folders: Mapping[str, str] = attrs.field(factory=dict)
    """Variables that name folders."""

    is_foreign: bool = False
    """Whether the file is the publisher's, not the user's: then our environment is not filled in."""


def read_document(path: Path) -> ConfigDocument:
    """Read a configuration file of an MCP host, a `server.json` of a registry, or a bundle (`.mcpb`).

    Raises:
        MCPServerError: when the file cannot be read, or has no servers.
    """
    if path.suffix.lower() in server_packages.BUNDLE_SUFFIXES:
        path = server_packages.unpack_bundle(path)
    document = _read_json(path)
    if (found := server_packages.find_package(document, path)) is not None:
        return ConfigDocument(
            servers={found.name: found.entry}, inputs=found.inputs, folders=found.folders, is_foreign=True
        )
    servers = _find_servers(document)
    if servers is None:
        raise MCPServerError(f'{path}: it has no object "mcpServers", which holds the servers by name')
    return ConfigDocument(
        servers={name: plain for name, plain in servers.items() if not _is_disabled(document, name, plain)},
        inputs=_read_inputs(document),
        folders=_name_folders(path),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MCPServerError(f"the MCP servers in {path} cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise MCPServerError(f"{path}: a list of servers must not be larger than {MAX_FILE_BYTES:,} bytes")
    try:
        document = jiter.from_json(_strip_comments(content.decode("utf-8-sig")).encode(), catch_duplicate_keys=True)
    except ValueError as error:
        raise MCPServerError(f"{path}: invalid JSON ({error})") from error
    if not isinstance(document, dict):
        raise MCPServerError(f'{path}: expected a JSON object with "mcpServers"')
    return document


def _strip_comments(text: str) -> str:
    """Replace comments and trailing commas by spaces (JSONC), as VS Code, Zed and Gemini write them."""

    def blank(found: re.Match[str]) -> str:
        return found[1] or re.sub(r"[^\n]", " ", found[0])

    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))


def _find_servers(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for place in _PLACES:
        found: Any = document
        for key in place:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
    roots = {name: plain for name, plain in document.items() if isinstance(plain, dict) and _has_way(plain)}
    return roots or None


def _has_way(plain: Mapping[str, Any]) -> bool:
    return any(way in plain for way in _WAYS)


def _is_disabled(document: Mapping[str, Any], name: str, plain: Any) -> bool:
    rules = _settings(document)  # Gemini's lists of names
    if name in rules.get("excluded", ()) or name not in rules.get("allowed", (name,)):
        return True
    if not isinstance(plain, dict):
        return False
    return plain.get("disabled") is True or plain.get("enabled") is False or plain.get("isActive") is False


def _settings(document: Mapping[str, Any]) -> Mapping[str, Any]:
    found = document.get("mcp")
    return found if isinstance(found, dict) else {}


def _read_inputs(document: Mapping[str, Any]) -> dict[str, InputField]:
    plain = document.get("inputs", _settings(document).get("inputs"))
    described = [each for each in plain or () if isinstance(each, dict) and isinstance(each.get("id"), str)]
    return {each["id"]: _read_input(each) for each in described}


def _read_input(plain: Mapping[str, Any]) -> InputField:
    options = [each.get("value") if isinstance(each, dict) else each for each in plain.get("options", ())]
    default = plain.get("default")
    return InputField(
        id=plain["id"],
        description=str(plain.get("description", "")),
        is_secret=plain.get("password") is True,
        default=default if isinstance(default, str) else None,
        choices=tuple(each for each in options if isinstance(each, str)),
    )


def _name_folders(path: Path) -> dict[str, str]:
    """Return the variables of VS Code, Cursor and Claude Code that name folders."""
    folder = path.absolute().parent
    project = folder.parent if folder.name in {".vscode", ".cursor", ".gemini", ".roo"} else folder
    return {
        "workspaceFolder": str(project),
        "workspaceFolderBasename": project.name,
        "CLAUDE_PROJECT_DIR": str(project),
        "userHome": str(Path.home()),
        "pathSeparator": "/",
        "/": "/",
    }


def is_gemini_entry(raw: Any, path: Path) -> bool:
    """Return whether an entry is one of Gemini's command line."""
    return isinstance(raw, dict) and (path.absolute().parent.name == ".gemini" or not _GEMINI_KEYS.isdisjoint(raw))


def translate_entry(raw: Any) -> Any:
    """Return an entry with our keys, where another host has other names or units for them.

    Raises:
        MisuseError: when the entry has a key whose meaning is known and not supported.
    """
    if not isinstance(raw, dict):
        return raw
    for key, reason in _UNSUPPORTED.items():
        if raw.get(key):
            raise MisuseError(f"the key {key!r} is not supported: {reason}")
    entry = {
        key: value
        for key, value in raw.items()
        if value is not None and key not in _DROPPED and key not in _UNSUPPORTED and not key.startswith(("_", "//"))
    }
    if "httpUrl" in entry:  # Gemini prefers it to `url`
        entry.pop("url", None)
    for key, ours in _RENAMED.items():
        if key in entry and ours not in entry:
            entry[ours] = entry.pop(key)
    for key, change in _CHANGES.items():
        if key in entry:
            change(entry, raw)
    return entry


def _change_provider(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    if entry.pop("authProviderType") != _GEMINI_OAUTH:
        raise MisuseError("the key 'authProviderType' is not supported: use 'auth', which is OAuth")
    entry.setdefault("oauth", {})


def _change_oauth(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    oauth = entry.pop("oauth")
    if oauth is False or (isinstance(oauth, dict) and oauth.get("enabled") is False):
        return
    entry["auth"] = oauth or "oauth"
    _change_auth(entry, _raw)


def _change_auth(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    if not isinstance(entry["auth"], dict):
        return
    auth = {_OAUTH_RENAMED.get(key, key): each for key, each in entry["auth"].items() if key not in _OAUTH_DROPPED}
    if isinstance(auth.get("scopes"), str):
        auth["scopes"] = auth["scopes"].split()
    entry["auth"] = auth or "oauth"


def _change_command(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    match entry["command"]:
        case [str() as program, *args]:  # opencode
            entry |= {"command": program, "args": [*args, *entry.get("args", ())]}
        case {"path": program}:  # Zed
            entry |= {**entry["command"], "command": program}
            del entry["path"]


def _change_env(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    if isinstance(entry["env"], dict):  # VS Code: numbers are texts, and null is no variable
        entry["env"] = {
            name: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
            for name, value in entry["env"].items()
            if value is not None
        }


def _change_type(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    entry["type"] = _TYPES.get(entry["type"], entry["type"]) if isinstance(entry["type"], str) else entry["type"]


def _change_url(entry: dict[str, Any], raw: Mapping[str, Any]) -> None:
    if "type" not in entry and "httpUrl" not in raw and isinstance(entry["url"], str) and _SSE_URL.search(entry["url"]):
        entry["type"] = "sse"  # hosts try both transports


def _change_timeout(entry: dict[str, Any], raw: Mapping[str, Any]) -> None:
    timeout = entry["timeout"]
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if is_number and timeout >= _FIRST_MILLISECONDS and _SECONDS_KEYS.isdisjoint(raw):
        entry["timeout"] = timeout / 1_000


_CHANGES: Final[Mapping[str, Callable[[dict[str, Any], Mapping[str, Any]], None]]] = {
    "authProviderType": _change_provider,
    "auth": _change_auth,
    "oauth": _change_oauth,
    "command": _change_command,
    "env": _change_env,
    "type": _change_type,
    "url": _change_url,
    "timeout": _change_timeout,
}
