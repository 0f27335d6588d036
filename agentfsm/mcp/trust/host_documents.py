"""Find the MCP servers in a file of a host: JSON, TOML (Codex) or YAML (Continue, Goose, LibreChat)."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import jiter

from agentfsm._lib.plugins import require_extra
from agentfsm.core.value import Value
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust import server_packages
from agentfsm.mcp.trust.config_variables import InputField

# Maximum size of the file in bytes; a hundred servers take some 30,000.
MAX_FILE_BYTES: Final = 1_000_000

# Texts stay as they are; comments and commas before a closing bracket become spaces, so that positions stay the same.
_COMMENT: Final = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA: Final = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)

# Places of the servers in a document: most hosts, VS Code, its settings.json, Zed, opencode, Codex, Amp, devcontainers.
_PLACES: Final = (
    ("mcpServers",),
    ("servers",),
    ("mcp", "servers"),
    ("context_servers",),
    ("mcp",),
    ("mcp_servers",),
    ("amp.mcpServers",),
    ("customizations", "vscode", "mcp", "servers"),
)
_WAYS: Final = ("command", "url", "serverUrl", "httpUrl", "cmd", "uri")
# Folders of hosts within a project.
_HOST_FOLDERS: Final = frozenset(
    {".amp", ".codex", ".continue", ".cursor", ".devcontainer", ".gemini", ".roo", ".vscode", ".warp", ".zed"}
)
_EXTENSION_FILE: Final = "gemini-extension.json"


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

    elsewhere: tuple[tuple[str, str], ...] = ()
    """Servers that the file has for other folders: the folder and the name."""


def read_document(path: Path, project: Path | None = None) -> ConfigDocument:
    """Read a configuration file of an MCP host, a `server.json` of a registry, or a bundle (`.mcpb`).

    Args:
        path: The file.
        project: Folder whose own servers in the file are read too, as in `projects` of ~/.claude.json. None: the
            current folder.

    Raises:
        MCPServerError: when the file cannot be read, or has no servers.
    """
    if path.suffix.lower() in server_packages.BUNDLE_SUFFIXES:
        path = server_packages.unpack_bundle(path)
    document = _read_file(path)
    if (found := server_packages.find_package(document, path)) is not None:
        return ConfigDocument(
            servers={found.name: found.entry}, inputs=found.inputs, folders=found.folders, is_foreign=True
        )
    if (source := document.get("source")) is not None and ("deployment" in document or "environment" in document):
        return ConfigDocument(servers=_read_fastmcp(path, source))
    servers = _find_servers(document, path)
    elsewhere: tuple[tuple[str, str], ...] = ()
    if isinstance(document.get("projects"), dict):
        own, elsewhere = _read_projects(document["projects"], project or Path.cwd())
        servers = {**(servers or {}), **own}
    if servers is None:
        raise MCPServerError(f'{path}: it has no object "mcpServers", which holds the servers by name')
    enabled = {name: plain for name, plain in servers.items() if not _is_disabled(document, name, plain)}
    listed = document.get("inputs", _settings(document).get("inputs")) or ()
    described = [each for each in listed if isinstance(each, dict) and isinstance(each.get("id"), str)]
    inputs, is_foreign = {each["id"]: _read_input(each) for each in described}, path.name == _EXTENSION_FILE
    if is_foreign:
        enabled, inputs = _add_settings(enabled, document.get("settings"))
    return ConfigDocument(
        servers=enabled, inputs=inputs, folders=_name_folders(path), is_foreign=is_foreign, elsewhere=elsewhere
    )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MCPServerError(f"the MCP servers in {path} cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise MCPServerError(f"{path}: a list of servers must not be larger than {MAX_FILE_BYTES:,} bytes")
    kind = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}.get(path.suffix.lower(), "JSON")
    try:
        text = content.decode("utf-8-sig")
        if kind == "TOML":
            document: Any = tomllib.loads(text)
        elif kind == "YAML":
            document = _parse_yaml(text)
        else:
            document = jiter.from_json(_strip_comments(text).encode(), catch_duplicate_keys=True)
    except (ValueError, RecursionError) as error:
        raise MCPServerError(f"{path}: invalid {kind} ({error})") from error
    if kind != "JSON":  # with dates, and keys that are no texts
        document = json.loads(json.dumps(document, default=str))
    if not isinstance(document, dict):
        raise MCPServerError(f'{path}: expected a {kind} object with "mcpServers"')
    return document


def _parse_yaml(text: str) -> Any:
    with require_extra("a configuration of MCP servers in YAML", "mcp", "yaml"):
        import yaml  # type: ignore[import-untyped]  # noqa: PLC0415  only these hosts need it
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        nodes, seen = [] if root is None else [root], set[int]()
        while nodes:
            node = nodes.pop()
            if id(node) in seen:  # a few lines can stand for gigabytes
                raise ValueError("aliases (*name) are not supported")
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                keys = Counter(str(key.value) for key, _ in node.value)
                if twice := next((key for key, count in keys.items() if count > 1), None):  # YAML keeps the second
                    raise ValueError(f"the key {twice!r} is there twice")
                nodes += [value for _, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                nodes += node.value
        return None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _strip_comments(text: str) -> str:
    """Replace comments and trailing commas by spaces (JSONC), as VS Code, Zed and Gemini write them."""

    def blank(found: re.Match[str]) -> str:
        return found[1] or re.sub(r"[^\n]", " ", found[0])

    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))


def _find_servers(document: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
    is_yaml = path.suffix.lower() in {".yaml", ".yml"}
    for place in (*_PLACES, ("extensions",)) if is_yaml else _PLACES:  # Goose
        found: Any = document
        for key in place:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
        if is_yaml and isinstance(found, list):  # Continue
            named = {str(each.get("name")): each for each in found if isinstance(each, dict)}
            if len(named) != len(found):
                raise MCPServerError(f"{path}: each of its servers must have a name of its own")
            return named
    roots = {
        name: plain
        for name, plain in document.items()
        if isinstance(plain, dict) and any(way in plain for way in _WAYS)
    }
    return roots or None


def _read_projects(projects: Mapping[str, Any], project: Path) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Return the servers of a project, and the folders and names of those of others, as Claude Code keeps both."""
    own: dict[str, Any] = {}
    elsewhere: list[tuple[str, str]] = []
    for folder, plain in projects.items():
        servers = plain.get("mcpServers") if isinstance(plain, dict) else None
        if not isinstance(servers, dict):
            continue
        off = plain.get("disabledMcpServers")
        off = off if isinstance(off, list) else []
        if Path(folder) == project.absolute():
            own = {name: entry for name, entry in servers.items() if name not in off}
        else:
            elsewhere += [(folder, name) for name in servers if name not in off]
    return own, tuple(elsewhere)


def _read_fastmcp(path: Path, source: Any) -> dict[str, Any]:
    """Return the server that a fastmcp.json describes, which fastmcp itself starts with its environment."""
    file = source.get("path") if isinstance(source, dict) else None
    if not isinstance(file, str):
        raise MCPServerError(f"{path}: its source has no path, which names the file of the server")
    args = ["run", str(path.absolute()), "--transport", "stdio"]
    return {Path(file).stem: {"command": "fastmcp", "args": args}}


def _add_settings(servers: Mapping[str, Any], settings: Any) -> tuple[dict[str, Any], dict[str, InputField]]:
    """Return the servers of Gemini's extension with its settings, which it gives to each as variables, and these."""
    described = [each for each in settings or () if isinstance(each, dict) and isinstance(each.get("envVar"), str)]
    inputs = {
        each["envVar"]: InputField(
            id=each["envVar"],
            description=str(each.get("description") or each.get("name") or ""),
            is_secret=each.get("sensitive") is True,
        )
        for each in described
    }
    given = {name: f"${{input:{name}}}" for name in inputs}
    changed = {
        name: {**plain, "env": {**given, **(plain.get("env") or {})}}
        if isinstance(plain, dict) and "command" in plain and given
        else plain
        for name, plain in servers.items()
    }
    return changed, inputs


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
    """Return the variables of hosts that name folders."""
    folder = path.absolute().parent
    inside = next((each for each in (folder, folder.parent) if each.name in _HOST_FOLDERS), None)
    project = folder if inside is None else inside.parent
    return {
        **dict.fromkeys(("workspaceFolder", "localWorkspaceFolder", "workspacePath"), str(project)),
        **dict.fromkeys(("workspaceFolderBasename", "localWorkspaceFolderBasename"), project.name),
        "extensionPath": str(folder),
        "CLAUDE_PROJECT_DIR": str(project),
        "userHome": str(Path.home()),
        "pathSeparator": "/",
        "/": "/",
    }
