"""The built package in environments of its own, made of the packages that are installed here: no network is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections import deque
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# A fixed time, so that two builds agree.
EPOCH = "1764115200"


def build(folder: Path, source: Path = ROOT) -> tuple[Path, Path]:
    """Build the sdist and the wheel of a source tree, and return their paths."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder],
        cwd=source,
        env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH},
        check=True,
        capture_output=True,
    )
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def read_requirements(found: Distribution, extras: set[str]) -> list[tuple[str, set[str]]]:
    """Return the packages that a distribution with these extras needs here, with the extras of each."""
    needed = []
    for line in found.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            needed.append((requirement.name, set(requirement.extras)))
    return needed


class Environment:
    """A virtual environment with the wheel, the packages that it requires, and nothing else."""

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        self.python = folder / "venv" / "bin" / "python"
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder / "venv")
        (site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        (info,) = site.glob("agentfsm-*.dist-info")
        self.packages = self._link(site, Distribution.at(info), {*extras})

    def _link(self, site: Path, wheel: Distribution, extras: set[str]) -> set[str]:
        """Link the packages that the wheel requires, directly or not."""
        queue, known = deque(read_requirements(wheel, extras)), set()
        while queue:
            name, below = queue.popleft()
            if (name, *sorted(below)) in known:
                continue
            known.add((name, *sorted(below)))
            try:
                found = distribution(name)
            except PackageNotFoundError:
                raise AssertionError(f"{name} is not installed here, so the environment cannot be made") from None
            for file in found.files or ():
                if file.parts[0] not in {"..", "__pycache__"}:
                    self._link_file(site, Path(found.locate_file("")), file.parts)
            queue.extend(read_requirements(found, below))
        return {name for name, *_ in known}

    def _link_file(self, site: Path, source: Path, parts: tuple[str, ...]) -> None:
        """Link the package that a file belongs to. A folder that several distributions share is not linked itself."""
        for depth in range(1, len(parts) + 1):
            place = Path(*parts[:depth])
            if (site / place).is_symlink():
                return
            is_shared = (source / place).is_dir() and not (source / place / "__init__.py").exists()
            if not is_shared or place.suffix == ".dist-info":
                (site / place).symlink_to(source / place)
                return
            (site / place).mkdir(exist_ok=True)

    def run(self, *words: str, folder: Path, code: int = 0, **env: str) -> str:
        """Run Python in a folder, and return its output; errors are part of it."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI", "AGENTFSM"))
        }
        done = subprocess.run(
            [self.python, *words],
            cwd=folder,
            env=kept | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{words} ended with {done.returncode}, not {code}\n{done.stdout}"
        return done.stdout
