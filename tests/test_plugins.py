"""Adapters of other packages: models by prefix and stores by URL scheme, found through entry points."""

import sys

import pytest

from agentfsm import Agent, MisuseError
from agentfsm._plugins import MODELS, STORES, find_plugins
from agentfsm.stores import MemoryStore, SQLiteStore, open_store

PACKAGE = """
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel

def open_shelf(url):
    store = MemoryStore()
    store.url = url
    return store

def echo(name):
    return ScriptedModel(name)
"""
ENTRIES = """
[agentfsm.stores]
shelf = shelf_package:open_shelf
gone = shelf_package:no_such_function

[agentfsm.models]
echo = shelf_package:echo
"""


def install(folder, name="shelf-package", entries=ENTRIES, source=PACKAGE):
    """Lay out a package as an installer would."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")
    (folder / f"{name.replace('-', '_')}.py").write_text(source, encoding="utf-8")


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """Install the package of this file, for the test only."""
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    find_plugins.cache_clear()
    yield tmp_path
    find_plugins.cache_clear()
    sys.modules.pop("shelf_package", None)


def test_the_package_uses_the_entry_points_itself():
    """Its own adapters are registered as those of other packages are."""
    assert {"openai", "openai-responses", "anthropic", "echo"} <= set(find_plugins(MODELS))
    assert {"postgres", "postgresql", "redis", "rediss", "unix", "shelf"} <= set(find_plugins(STORES))


def test_a_store_of_another_package():
    """Its callable is given the URL as it is."""
    store = open_store("shelf://oak/3?dust=yes")
    assert isinstance(store, MemoryStore)
    assert store.url == "shelf://oak/3?dust=yes"


def test_a_path_is_a_file(tmp_path):
    """What is no URL is the path of a SQLite file."""
    assert isinstance(open_store(tmp_path / "runs.db"), SQLiteStore)


def test_an_unknown_scheme():
    """The error lists what is installed, and keeps the password to itself."""
    with pytest.raises(MisuseError, match=r"mongo://me:\*\*\*@host names no store.*redis://.*shelf://"):
        open_store("mongo://me:secret@host")


def test_a_package_that_cannot_be_loaded():
    """The error names the package."""
    with pytest.raises(MisuseError, match="'gone' is provided by shelf-package, which cannot be loaded"):
        open_store("gone://x")


def test_two_packages_with_one_name(installed):
    """Neither is chosen in silence."""
    install(installed, "other-package", "[agentfsm.stores]\nshelf = other_package:open_shelf\n")
    find_plugins.cache_clear()
    with pytest.raises(MisuseError, match=r"'shelf' of agentfsm.stores is provided by .*other-package"):
        open_store("shelf://x")


async def test_a_model_of_another_package():
    """Its callable is given what stands behind the prefix."""
    run = await Agent("echo:hello").run("Say it.")
    assert run.output == "hello"


def test_an_unknown_prefix():
    """The error lists the prefixes that are known."""
    with pytest.raises(MisuseError, match=r"Known providers: .*'echo:'.*'openai:'"):
        Agent("mistral:large")
