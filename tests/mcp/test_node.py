"""Where node and its packages come from, and what happens where they cannot be had."""

import json

import pytest

from tests.support import node_packages


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """No packages are kept, and no registry gives any."""

    def fail(_kept):
        raise node_packages.FetchError("there is no registry")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(node_packages, "_install", fail)
    node_packages.packages.cache_clear()
    yield
    node_packages.packages.cache_clear()


def test_every_package_is_pinned_by_hash():
    """Ours by their exact versions, and all that they bring by the lock."""
    wanted = json.loads((node_packages.PINNED / "package.json").read_text())["dependencies"]
    locked = json.loads((node_packages.PINNED / "package-lock.json").read_text())["packages"]
    assert all(version[0].isdigit() for version in wanted.values())
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert [path for path, each in locked.items() if path and not each.get("integrity", "").startswith("sha512-")] == []


def test_it_skips_without_a_registry(cold, monkeypatch):
    """Who works on a train is not held up."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="there is no registry"):
        node_packages.program("@modelcontextprotocol/inspector")


def test_it_fails_in_ci(cold, monkeypatch):
    """What is to be shown there cannot be left out unseen."""
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="there is no registry"):
        node_packages.program("@modelcontextprotocol/inspector")
