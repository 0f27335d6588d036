"""The subcommand that writes a new project."""

from __future__ import annotations

import argparse
import json
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentfsm.cli.arguments import AddParser, add_command
from agentfsm.cli.codes import ExitCode
from agentfsm.core.errors import MisuseError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from agentfsm.cli.terminal import Terminal

# A name that package indexes accept and that begins like a Python name.
_NAME: Final = re.compile(r"[A-Za-z]([A-Za-z0-9._-]{0,80}[A-Za-z0-9])?", re.ASCII)
# Folder of the template that becomes the package of the project.
_PACKAGE_FOLDER: Final = "package"
# agentfsm with the extras that a project uses.
_REQUIREMENT: Final = "agentfsm[cli,serve]"
# Files of the template have this suffix, so that no tool takes them for code of agentfsm.
_SUFFIX: Final = ".txt"
# Names of files that packagers would leave out.
_HIDDEN: Final = {"gitignore": ".gitignore"}


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    init_options = add_command(add, init, has_store=False)
    init_options.description = f"{init_options.description} Files that exist are never changed."
    init_options.add_argument("folder", nargs="?", default=".", help="folder of the project (default: the current one)")
    init_options.add_argument("--name", help="name of the project (default: that of the folder)")


def init(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Write a new project."""
    folder = Path(args.folder)
    name = args.name or folder.resolve().name
    package = _build_package_name(name)
    template = files("agentfsm.cli").joinpath("project_template")
    texts = {"name": name, "package": package, "agentfsm": _read_source(), "python": _find_python()}
    written = {folder / path: _fill(text, texts) for path, text in _read_template(template, package)}
    if found := [str(path) for path in written if path.exists() or path.is_symlink()]:
        others = " and so do others" if len(found) > 1 else ""
        raise MisuseError(f"nothing was written, because {found[0]} exists{others}: name a new folder")
    try:
        for path, text in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        raise MisuseError(f"cannot write {error.filename}: {error.strerror}") from None
    names = [path.relative_to(folder).as_posix() for path in written]
    steps = {
        "make test": "its tests; the first time, this installs agentfsm into .venv",
        "make chat": "talk with it: no key is needed",
    }
    if folder.resolve() != Path.cwd():
        steps = {f"cd {shlex.quote(str(folder))}": "", **steps}
    if terminal.json:
        terminal.document(
            {"name": name, "package": package, "folder": str(folder.resolve()), "files": names, "next": [*steps]}
        )
        return ExitCode.DONE
    for each in names:
        terminal.out(each)
    terminal.err(f"\n{name} is ready. Next:")
    for step, about in steps.items():
        terminal.err(f"  {step}" + (f"\n      {about}" if about else ""))
    terminal.err("For a real model, export OPENAI_API_KEY=... before make chat. README.md has the rest.")
    return ExitCode.DONE


def _read_source() -> str:
    """Return the requirement that installs this agentfsm again: from its folder, wheel or repository, else an index."""
    try:
        found = distribution("agentfsm")
    except PackageNotFoundError:  # a source tree on the path
        return f"{_REQUIREMENT} @ {Path(str(files('agentfsm'))).parent.as_uri()}"
    record = json.loads(found.read_text("direct_url.json") or "{}")  # of PEP 610
    if not record:
        return f"{_REQUIREMENT}>={found.version}"
    url, vcs = record["url"], record.get("vcs_info")
    if vcs is not None:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    subfolder = record.get("subdirectory")
    return f"{_REQUIREMENT} @ {url}" + (f"#subdirectory={subfolder}" if subfolder else "")


def _find_python() -> str:
    """Return how the Makefile calls the interpreter of this process, outside of its environment: by name if it can."""
    base = Path(getattr(sys, "_base_executable", sys.executable))
    own = {base.resolve(), Path(sys.executable).resolve()}
    folders = [each for each in os.get_exec_path() if Path(each) != Path(sys.executable).parent]
    for name in ("python3", f"python3.{sys.version_info.minor}"):
        place = shutil.which(name, path=os.pathsep.join(folders))
        if place is not None and Path(place).resolve() in own:
            return name
    return shlex.quote(str(base))


def _build_package_name(name: str) -> str:
    """Return the name of the package of a project.

    Raises:
        MisuseError: if the project cannot have this name.
    """
    package = re.sub(r"[-.]+", "_", name).lower()
    if _NAME.fullmatch(name) is None or not package.isidentifier():
        raise MisuseError(
            f"{name!r} cannot be the name of a package: give letters, digits, dots and dashes, and a letter first, "
            "for example --name my-agent"
        )
    taken = package in {*sys.stdlib_module_names, "tests", "evals"} or find_spec(package) is not None
    if keyword.iskeyword(package) or taken:
        raise MisuseError(
            f"a package {package!r} would hide another module: choose another one, for example --name my-agent"
        )
    return package


def _read_template(folder: Traversable, package: str, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file of the template."""
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            name = package if entry.name == _PACKAGE_FOLDER else entry.name
            yield from _read_template(entry, package, f"{above}{name}/")
        elif entry.name.endswith(_SUFFIX):
            name = entry.name.removesuffix(_SUFFIX)
            yield above + _HIDDEN.get(name, name), entry.read_text(encoding="utf-8")


def _fill(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
