"""Translate the entries of MCP hosts to our keys; `host_documents` finds them in a file.

Keys that restrict a server are honoured, keys that would grant it rights or only describe it are dropped, and an entry
with any other key is refused: ignoring it might be a security problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from agentfsm.core.errors import MisuseError

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
    "http_headers": "headers",  # Codex
    "enabled_tools": "allow",  # Codex
    "disabled_tools": "deny",  # Codex
    "tool_timeout_sec": "timeout",  # Codex
    "startup_timeout_sec": "start_timeout",  # Codex
    "cmd": "command",  # Goose
    "envs": "env",  # Goose
    "uri": "url",  # Goose
    "available_tools": "allow",  # Goose
    "working_directory": "cwd",  # Warp
}
_TYPES: Final = {"local": "stdio", "remote": "http", "streamable_http": "http"}
# Keys without a meaning here: descriptions, and rights that only the keys of this package can grant.
_DROPPED: Final = frozenset(
    {"alwaysAllow", "alwaysLoad", "autoApprove", "description", "dev", "disabled", "displayName", "enabled", "gallery"}
    | {"icon", "iconUrl", "isActive", "keep_alive", "name", "note", "notes", "source", "sse_read_timeout", "trust"}
    | {"version", "watchPaths"}
    | {"bundled", "display_name", "start_on_launch", "startup", "chatMenu", "title", "iconPath", "serverInstructions"}
    | {"faviconUrl", "sourceFile", "stderr", "_target"}
)
_UNSUPPORTED: Final = {
    "headersHelper": "it runs a command to get headers; use 'headers' with ${NAME}",
    "sandboxEnabled": "use 'sandbox' of this package: true, or an object of read, write, network",
    "include_tags": "tags are not supported; use 'allow'",
    "exclude_tags": "tags are not supported; use 'deny'",
    "experimental_environment": "it runs on another machine; start it there, and list its URL",
}
# Types of Goose that are no servers.
_PARTS_OF_GOOSE: Final = frozenset({"builtin", "platform", "frontend", "inline_python"})
# Settings of OAuth in other hosts -> ours: Claude Code, Gemini and opencode have them in `oauth`, Cursor in `auth`.
_OAUTH_RENAMED: Final = {
    "clientId": "client_id",
    "CLIENT_ID": "client_id",
    "clientSecret": "client_secret",
    "CLIENT_SECRET": "client_secret",
    "callbackPort": "callback_port",
    "scope": "scopes",
}
_OAUTH_DROPPED: Final = frozenset(
    {"enabled", "authorizationUrl", "tokenUrl", "tokenParamName", "redirectUri"}
    | {"authorization_url", "token_url", "redirect_uri"}
)
# The one of Gemini's `authProviderType` that means OAuth with a person.
_GEMINI_OAUTH: Final = "dynamic_discovery"
# Keys by which Gemini's command line is recognised; it also replaces $NAME.
_GEMINI_KEYS: Final = frozenset({"httpUrl", "includeTools", "excludeTools", "trust"})
# Keys of hosts that count `timeout` in seconds, whatever its size: ours, Cline, Roo Code, Codex and Goose.
_SECONDS_KEYS: Final = frozenset(
    {"alwaysAllow", "autoApprove", "transportType", "hints", "trusted", "labels", "confirm", "start_timeout"}
    | {"tool_timeout_sec", "startup_timeout_sec", "cmd", "uri", "envs", "env_keys"}
)
# From this value on, `timeout` of other hosts counts as milliseconds: nobody waits for a call for 17 minutes.
_FIRST_MILLISECONDS: Final = 1_000
# Variables of Continue, of devcontainers, and of LibreChat.
_CONTINUE: Final = re.compile(r"\$\{\{\s*(secrets|inputs)\.([A-Za-z_]\w*)\s*\}\}")
_LOCAL_ENV: Final = re.compile(r"\$\{(?:local|container)Env:([A-Za-z_]\w*)(?::([^}]*))?\}")
_LIBRECHAT: Final = re.compile(r"(?<!\$)\{\{\s*([A-Za-z_]\w*)\s*\}\}")
_SSE_URL: Final = re.compile(r"/sse/?(?:[?#].*)?$")


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
    if raw.get("source") == "extension" and "command" not in raw:
        raise MisuseError("it is an extension of Zed, which alone knows its command: list the command")
    if raw.get("type") in _PARTS_OF_GOOSE:
        raise MisuseError(f"it is a part of Goose ({raw['type']}) and no server: leave it out")
    asked = raw.get("customUserVars") or {}
    entry = {
        key: _translate_texts(value, asked)
        for key, value in raw.items()
        if value is not None and key not in _DROPPED and key not in _UNSUPPORTED and not key.startswith(("_", "//"))
    }
    if "httpUrl" in entry:  # Gemini prefers it to `url`
        entry.pop("url", None)
    entry.pop("customUserVars", None)
    for key, ours in _RENAMED.items():
        if key in entry and ours not in entry:
            entry[ours] = entry.pop(key)
    for key, change in _CHANGES.items():
        if key in entry:
            change(entry, raw)
    return entry


def _translate_texts(value: Any, asked: Any) -> Any:
    """Return a value with our variables for those of hosts, in each text.

    Args:
        value: The value.
        asked: Names of the variables for which LibreChat asks its user.

    Raises:
        MisuseError: when there is a variable of LibreChat that only LibreChat knows.
    """
    if isinstance(value, list):
        return [_translate_texts(each, asked) for each in value]
    if isinstance(value, dict):
        return {name: _translate_texts(each, asked) for name, each in value.items()}
    if not isinstance(value, str) or "{" not in value:
        return value
    text = _CONTINUE.sub(lambda found: f"${{{'input:' if found[1] == 'inputs' else ''}{found[2]}}}", value)
    text = _LOCAL_ENV.sub(lambda found: f"${{{found[1]}{'' if found[2] is None else f':-{found[2]}'}}}", text)
    if (unknown := next((name for name in _LIBRECHAT.findall(text) if name not in asked), None)) is not None:
        raise MisuseError(f"the variable {{{{{unknown}}}}} has no value here: write it out, or as ${{NAME}}")
    return _LIBRECHAT.sub(r"${input:\1}", text)


def _change_tokens(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    """Put the names of variables, and a key, where their values go."""
    headers = {name: f"${{{variable}}}" for name, variable in (entry.pop("env_http_headers", None) or {}).items()}
    if variable := entry.pop("bearer_token_env_var", None):
        headers["Authorization"] = f"Bearer ${{{variable}}}"
    if key := entry.pop("apiKey", None):
        headers["Authorization"] = f"Bearer {key}"
    if headers:
        entry["headers"] = {**headers, **entry.get("headers", {})}
    named = [entry.pop(key) for key in ("env_vars", "env_keys") if key in entry]
    if not all(isinstance(each, list) for each in named):
        raise MisuseError("'env_vars' and 'env_keys' must be lists of names")
    names = [each["name"] if isinstance(each, dict) and "name" in each else each for part in named for each in part]
    if names:
        entry["env"] = {**{name: f"${{{name}}}" for name in names}, **entry.get("env", {})}


def _change_options(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    options = entry.pop("requestOptions")
    if not isinstance(options, dict) or options.keys() - {"headers", "timeout"}:
        raise MisuseError("'requestOptions' may have only 'headers' and 'timeout' here: remove the others")
    entry["headers"] = {**options.get("headers", {}), **entry.get("headers", {})}
    if "timeout" in options:
        entry.setdefault("timeout", options["timeout"])


def _change_milliseconds(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    for key in ("connectionTimeout", "initTimeout", "startup_timeout_ms"):
        if isinstance(given := entry.pop(key, None), int | float):
            entry["start_timeout"] = given / 1_000


def _change_scopes(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    entry["auth"] = {"scopes": entry.pop("scopes")}
    entry.pop("oauth_resource", None)


def _change_requires(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    if entry.pop("requiresOAuth") is True:
        entry.setdefault("oauth", {})


def _change_approval(entry: dict[str, Any], _raw: Mapping[str, Any]) -> None:
    if entry.pop("default_tools_approval_mode") == "prompt":
        entry["confirm"] = True


def _change_allow(entry: dict[str, Any], raw: Mapping[str, Any]) -> None:
    if raw.get("available_tools") == []:  # Goose: all
        del entry["allow"]


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
    "requestOptions": _change_options,
    **dict.fromkeys(("bearer_token_env_var", "env_http_headers", "apiKey", "env_vars", "env_keys"), _change_tokens),
    **dict.fromkeys(("connectionTimeout", "initTimeout", "startup_timeout_ms"), _change_milliseconds),
    "scopes": _change_scopes,
    "requiresOAuth": _change_requires,
    "default_tools_approval_mode": _change_approval,
    "allow": _change_allow,
    "authProviderType": _change_provider,
    "auth": _change_auth,
    "oauth": _change_oauth,
    "command": _change_command,
    "env": _change_env,
    "type": _change_type,
    "url": _change_url,
    "timeout": _change_timeout,
}
