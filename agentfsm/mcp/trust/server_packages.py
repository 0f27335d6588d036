"""Read what publishers write about their servers: `server.json` of the MCP registry, and bundles (`.mcpb`).

Both become an entry as in `mcpServers`, whose inputs are `${input:id}`. A publisher's file grants no rights, and our
environment variables are not filled in.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import shorten_repr
from agentfsm.core.value import Value
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust.config_variables import InputField

BUNDLE_SUFFIXES: Final = frozenset({".mcpb", ".dxt"})
# Bounds of a bundle: the largest published ones hold some 20,000 files, and an interpreter.
_MAX_BUNDLE_FILES: Final = 100_000
_MAX_BUNDLE_BYTES: Final = 1 << 30

# Registry of packages -> command that runs one, its arguments, and the sign between a package and its version.
_RUNNERS: Final[Mapping[str, tuple[str, tuple[str, ...], str]]] = {
    "npm": ("npx", ("-y",), "@"),
    "pypi": ("uvx", (), "=="),
    "oci": ("docker", ("run", "-i", "--rm"), ":"),
    "nuget": ("dnx", ("--yes",), "@"),
}
_TEMPLATE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_-]*)\}")
_USER_CONFIG: Final = re.compile(r"\$\{user_config\.([^}]+)\}")


@attrs.frozen(kw_only=True)
class PublishedServer(Value):
    """Server that its publisher describes."""

    name: str
    """Name of the server."""

    entry: Mapping[str, Any]
    """Entry as in `mcpServers`, with `${input:id}` for the values that the user gives."""

    inputs: Mapping[str, InputField]
    """Inputs by id."""

    folders: Mapping[str, str] = attrs.field(factory=dict)
    """Variables that name folders."""


def find_package(document: Mapping[str, Any], path: Path) -> PublishedServer | None:
    """Return the server that a document describes; None if it is not a publisher's document.

    Raises:
        MCPServerError: when the document has no form of the server that can be used here.
    """
    inner = document.get("server")
    try:
        if isinstance(inner, dict) and ("manifest_version" in document or "dxt_version" in document):
            return _read_manifest(document, path)
        if isinstance(inner, dict) and ("packages" in inner or "remotes" in inner):  # as the registry's API returns it
            document = inner
        if isinstance(document.get("name"), str) and ("packages" in document or "remotes" in document):
            return _read_registry_entry(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise MCPServerError(f"{path}: it lacks a part, or a part has another type ({error!r})") from error
    except MisuseError as error:
        raise MCPServerError(f"{path}: {error}") from error
    return None


# `server.json`.


def _read_registry_entry(document: Mapping[str, Any]) -> PublishedServer:
    inputs: dict[str, InputField] = {}
    reasons: list[str] = []
    forms = [*product([_build_package], document.get("packages") or ())]
    for build, each in (*forms, *product([_build_remote], document.get("remotes") or ())):
        try:
            entry = build(each, inputs)
        except MisuseError as error:
            reasons.append(str(error))
        else:
            return PublishedServer(name=document["name"], entry=entry, inputs=inputs)
    raise MisuseError(f"the server {document['name']!r} cannot be used: {'; '.join(reasons) or 'it has no package'}")


def _build_package(package: Mapping[str, Any], inputs: dict[str, InputField]) -> dict[str, Any]:
    kind, identifier = package["registryType"], package["identifier"]
    transport = package.get("transport", {}).get("type", "stdio")
    if kind not in _RUNNERS:
        raise MisuseError(f"packages of type {kind!r} are not supported: install it, and list its command")
    if transport != "stdio":
        raise MisuseError(f"a package with the transport {transport!r} is not started here: start it, and list its URL")
    if identifier.startswith("-"):
        raise MisuseError(f"the package {identifier!r} would be read as an option")
    command, options, sign = _RUNNERS[kind]
    version = package.get("version")
    if kind == "oci" and re.search(r":[^/]+$|@", identifier):  # the image has its tag
        version = None
    env = dict(_read_pairs(package.get("environmentVariables"), inputs))
    if kind == "oci":  # docker passes on the variables that it is given by name
        options = (*options, *(part for name in env for part in ("-e", name)))
    args = [
        *options,
        *_read_arguments(package.get("runtimeArguments"), inputs),
        f"{identifier}{sign}{version}" if version else identifier,
        *_read_arguments(package.get("packageArguments"), inputs),
    ]
    return {"command": command, "args": args} | ({"env": env} if env else {})


def _build_remote(remote: Mapping[str, Any], inputs: dict[str, InputField]) -> dict[str, Any]:
    if remote["type"] not in {"streamable-http", "sse"}:
        raise MisuseError(f"the transport {remote['type']!r} is not supported")
    headers = dict(_read_pairs(remote.get("headers"), inputs))
    url = _fill_template(remote["url"], remote.get("variables") or {}, inputs)
    return {"type": remote["type"], "url": url} | ({"headers": headers} if headers else {})


def _read_arguments(arguments: Iterable[Mapping[str, Any]] | None, inputs: dict[str, InputField]) -> Iterator[str]:
    for each in arguments or ():
        value = _read_value(each, each.get("valueHint") or each.get("name", "argument").lstrip("-"), inputs)
        if each["type"] == "positional":
            yield from [] if value is None else [value]
        elif value is not None or "isRequired" not in each:
            yield from [each["name"]] if value is None else [each["name"], value]


def _read_pairs(pairs: Iterable[Mapping[str, Any]] | None, inputs: dict[str, InputField]) -> Iterator[tuple[str, str]]:
    for each in pairs or ():
        if (value := _read_value(each, each["name"], inputs)) is not None:
            yield each["name"], value


def _read_value(plain: Mapping[str, Any], name: str, inputs: dict[str, InputField]) -> str | None:
    """Return the value that a publisher gives, or an input for the user; None for an option without a value."""
    if plain.get("value") is not None:
        return _fill_template(plain["value"], plain.get("variables") or {}, inputs)
    if plain.get("isRequired") or plain.get("default") is not None or plain.get("isSecret"):
        return _add_input(name, plain, inputs)
    return None


def _fill_template(text: str, variables: Mapping[str, Any], inputs: dict[str, InputField]) -> str:
    def fill(found: re.Match[str]) -> str:
        name = found[1]
        return _add_input(name, variables[name], inputs) if name in variables else found[0]

    return _TEMPLATE.sub(fill, text)


def _add_input(name: str, plain: Mapping[str, Any], inputs: dict[str, InputField]) -> str:
    default = plain.get("default")
    inputs[name] = InputField(
        id=name,
        description=str(plain.get("description", "")),
        is_secret=plain.get("isSecret") is True,
        default=None if default is None else str(default),
        choices=tuple(map(str, plain.get("choices") or ())),
        is_required=plain.get("isRequired") is True,
    )
    return f"${{input:{name}}}"


# Bundles.


def _read_manifest(manifest: Mapping[str, Any], path: Path) -> PublishedServer:
    platforms = manifest.get("compatibility", {}).get("platforms")
    if platforms is not None and sys.platform not in platforms:
        raise MisuseError(f"the bundle is for {', '.join(platforms)}, not for {sys.platform}")
    config = dict(manifest["server"]["mcp_config"])
    config |= config.pop("platform_overrides", {}).get(sys.platform, {})
    folder = str(path.absolute().parent)
    if path.absolute().is_relative_to(_bundle_home()):
        config["cwd"] = folder  # named after the bundle's hash: a changed bundle needs another approval
    inputs = {name: _read_user_config(name, each) for name, each in manifest.get("user_config", {}).items()}
    home = Path.home()
    folders = {"__dirname": folder, "HOME": str(home), "pathSeparator": os.sep, "/": os.sep}
    folders |= {name.upper(): str(home / name) for name in ("Desktop", "Documents", "Downloads")}
    return PublishedServer(name=manifest["name"], entry=_rename_inputs(config), inputs=inputs, folders=folders)


def _rename_inputs(plain: Any) -> Any:
    if isinstance(plain, str):
        return _USER_CONFIG.sub(r"${input:\1}", plain)
    if isinstance(plain, list):
        return [_rename_inputs(each) for each in plain]
    return {key: _rename_inputs(each) for key, each in plain.items()} if isinstance(plain, dict) else plain


def _read_user_config(name: str, plain: Mapping[str, Any]) -> InputField:
    default = plain.get("default")
    if isinstance(default, list):
        default = os.pathsep.join(map(str, default))
    elif isinstance(default, bool):
        default = str(default).lower()
    return InputField(
        id=name,
        description=str(plain.get("description") or plain.get("title") or ""),
        is_secret=plain.get("sensitive") is True,
        default=None if default is None else str(default),
        is_required=plain.get("required") is True,
        is_list=plain.get("multiple") is True,
    )


def _bundle_home() -> Path:
    return Path.home() / ".agentfsm" / "mcp-bundles"


def unpack_bundle(path: Path) -> Path:
    """Unpack a bundle below ~/.agentfsm, in a folder named after its hash; return the path of its manifest.

    Nothing of it is executed: its command starts only after approval.

    Raises:
        MCPServerError: when it cannot be read, or is not a safe archive.
    """
    try:
        with path.open("rb") as file:
            folder = _bundle_home() / hashlib.file_digest(file, "sha256").hexdigest()[:32]
        if not folder.exists():
            _unpack(path, folder)
    except (OSError, zipfile.BadZipFile, MisuseError, RuntimeError) as error:
        raise MCPServerError(f"the bundle {path} cannot be used: {error}") from error
    return folder / "manifest.json"


def _unpack(path: Path, folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    begun = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(archive.infolist())
            for member in archive.infolist():
                # An error if the size differs from the one that was checked.
                target = Path(archive.extract(member, begun))
                if not member.is_dir() and (member.external_attr >> 16) & stat.S_IXUSR:
                    target.chmod(0o755)
        begun.rename(folder)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise


def _check_members(members: list[zipfile.ZipInfo]) -> None:
    if len(members) > _MAX_BUNDLE_FILES or sum(each.file_size for each in members) > _MAX_BUNDLE_BYTES:
        raise MisuseError(f"it has more than {_MAX_BUNDLE_FILES:,} files or {_MAX_BUNDLE_BYTES >> 30} GiB")
    if "manifest.json" not in {each.filename for each in members}:
        raise MisuseError("it has no manifest.json")
    for each in members:
        parts = Path(each.filename.replace("\\", "/")).parts
        if ".." in parts or Path(each.filename).is_absolute() or stat.S_ISLNK(each.external_attr >> 16):
            raise MisuseError(f"its file {shorten_repr(each.filename)} leads out of its folder")
