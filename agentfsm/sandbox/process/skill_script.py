"""Run a script of a skill. The function below is loaded from this file, inside a sandbox."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Final

# Environment variable with the folder and the digest of each skill, by name, as JSON.
SKILLS_VARIABLE: Final = "AGENTFSM_SKILLS"
# Programs that run scripts, by the suffix of the file. Python scripts run in the process itself.
INTERPRETERS: Final = {".sh": "sh", ".bash": "bash", ".js": "node"}
PYTHON: Final = ".py"
# Folders that are no part of a skill.
_LEFT_OUT: Final = frozenset({"__pycache__", ".git"})
_MAX_OUTPUT_CHARS: Final = 50_000


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder, by its path with slashes, in order.

    Raises:
        ValueError: if something in it is neither a file nor a folder, such as a symbolic link.
        OSError: if something in it cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    if folder.is_symlink():
        raise ValueError(f"{folder.name} is a symbolic link")
    found = {}
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in [*folders, *names]:
            path = Path(place, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ValueError(f"{path.relative_to(folder).as_posix()} is a symbolic link, or no file")
        for name in names:
            path = Path(place, name)
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return dict(sorted(found.items()))


def digest_files(hashes: dict[str, str]) -> str:
    """Return one hash of all files: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


def run_script(skill: str, script: str, arguments: list[str] | None = None, text: str = "") -> dict[str, Any]:
    """Run a script in the folder of its skill; return what it printed, and its exit code."""
    place, digest = json.loads(os.environ.pop(SKILLS_VARIABLE))[skill]
    folder = Path(place)
    if digest_files(hash_files(folder)) != digest:
        raise RuntimeError(f"the files of the skill {skill} have changed since it was loaded, so nothing was run")
    path = folder / script
    os.chdir(folder)
    # A __pycache__ of the folder is not in the digest, so no Python may take code from it.
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = os.environ["TMPDIR"]
    if path.suffix == PYTHON:
        output, code = _run_python(path, arguments or [], text)
    else:
        command = [INTERPRETERS[path.suffix], str(path), *(arguments or [])]
        done = subprocess.run(  # noqa: S603  this is the purpose, in a sandbox
            command, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        output, code = done.stdout.decode("utf-8", "replace"), done.returncode
    dropped = len(output) - _MAX_OUTPUT_CHARS
    shown = f"{output[:_MAX_OUTPUT_CHARS]}\n[... {dropped} more characters ...]" if dropped > 0 else output
    return {"output": shown, "exit_code": code}


def _run_python(path: Path, arguments: list[str], text: str) -> tuple[str, int]:
    printed = io.StringIO()
    sys.argv, sys.stdin = [str(path), *arguments], io.StringIO(text)
    sys.path.insert(0, str(path.parent))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if not (end.code is None or isinstance(end.code, int)):
                printed.write(f"{end.code}\n")
            return printed.getvalue(), end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  whatever it raises is its result
            printed.write(traceback.format_exc())
            return printed.getvalue(), 1
    return printed.getvalue(), 0
