"""Adapters of other packages: models by prefix and stores by URL scheme, found through entry points."""

import sys
import traceback

import pytest

from agentfsm import Agent, MisuseError
from agentfsm._lib.plugins import MODELS, STORES, find_plugins
from agentfsm.models import resolve
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
URL_WITH_SECRETS = "odd://me:s3cr%25t@host/db?sslpassword=0ther"
GROUPS = {MODELS: lambda: resolve("odd:x"), STORES: lambda: open_store("odd://x")}


def install(folder, name="shelf-package", entries=ENTRIES, source=PACKAGE):
    """Lay out a package as an installer would, and have it found."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")
    (folder / f"{name.replace('-', '_')}.py").write_text(source, encoding="utf-8")
    find_plugins.cache_clear()


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """Install the package of this file, for the test only."""
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    find_plugins.cache_clear()
    for name in ("shelf_package", "odd_package"):
        sys.modules.pop(name, None)


def install_odd(folder, source, group=STORES, value="odd_package:make"):
    """Install a package whose entry point `odd` of the group is at fault."""
    install(folder, "odd-package", f"[{group}]\nodd = {value}\n", source)


def expect_misuse(folder, group, source, fault, value="odd_package:make"):
    """Install a package that is at fault, use its entry point, and check that the error names both and the fault."""
    install_odd(folder, source, group, value)
    with pytest.raises(MisuseError, match=f"'odd' of package odd-package {fault}"):
        GROUPS[group]()


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
    with pytest.raises(MisuseError, match=r"'gone' of package shelf-package cannot be loaded: AttributeError: "):
        open_store("gone://x")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def (", r"SyntaxError: invalid syntax \(odd_package\.py, line 1\)"),
        ("raise RuntimeError('no driver here')", "RuntimeError: no driver here"),
        ("import os; os.environ['NOT_SET_ANYWHERE']", "KeyError: 'NOT_SET_ANYWHERE'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import a_module_that_is_missing", "ModuleNotFoundError: No module named 'a_module_that_is_missing'"),
    ],
)
@pytest.mark.parametrize("group", GROUPS)
def test_a_module_that_fails_when_it_is_imported(installed, group, source, fault):
    """Whatever it raises is a misuse that names the entry point, the package and the fault."""
    expect_misuse(installed, group, source, f"cannot be loaded: {fault}")


def test_an_interrupt_of_an_import_is_passed_on(installed):
    """Ctrl-C ends the program, and is no fault of the package."""
    install_odd(installed, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        open_store("odd://x")


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("not a value!!", "'not a value!!' does not have the form 'module:attribute'"),
        ("odd_package", "odd_package is a module: name a function or a class of it"),
        ("odd_package:make", "odd_package:make is of the type int: name a function or a class"),
    ],
)
@pytest.mark.parametrize("group", GROUPS)
def test_an_entry_point_that_cannot_be_called(installed, group, value, fault):
    """The error names what stands in its place."""
    expect_misuse(installed, group, "make = 42", f"cannot be called: {fault}", value)


@pytest.mark.parametrize(
    ("group", "source", "fault"),
    [
        (STORES, "make = lambda url: None", "returned NoneType, not a Store: it does not implement create"),
        (STORES, "make = lambda url: 42", "returned int, not a Store: it does not implement create"),
        (STORES, "async def make(url): pass", "is async: write a plain function that returns a Store"),
        (
            STORES,
            "from agentfsm.stores import MemoryStore\nmake = lambda url: MemoryStore",
            "returned the class MemoryStore, not a Store: ",
        ),
        (
            MODELS,
            "make = lambda name: None",
            "returned NoneType, not a Model: NoneType is not a model, since it has no",
        ),
        (MODELS, "make = lambda name: 'gpt'", "returned str, not a Model: 'gpt' is a name, not a model"),
        (MODELS, "async def make(name): pass", "is async: write a plain function that returns a Model"),
        (MODELS, "make = lambda: None", "failed: TypeError: .*0 positional arguments but 1 was given"),
        (MODELS, "def make(name): raise KeyError(name)", "failed: KeyError: 'x'"),
        (STORES, "import sys\ndef make(url): sys.exit(3)", "failed: SystemExit: 3"),
    ],
)
def test_what_an_entry_point_makes_is_checked(installed, group, source, fault):
    """It is refused where it is made, and not by an arithmetic error in the first run."""
    expect_misuse(installed, group, source, fault)


def test_a_misuse_that_a_package_tells_of_is_passed_on(installed):
    """An adapter refuses a URL that cannot be right in its own words."""
    install_odd(installed, "from agentfsm import MisuseError\ndef make(url): raise MisuseError('no shelf is named x')")
    with pytest.raises(MisuseError, match=r"^no shelf is named x$"):
        open_store("odd://x")


@pytest.mark.parametrize("error", ["ValueError", "agentfsm.MisuseError"])
@pytest.mark.parametrize("words", ["url", "url.partition('://')[2]", "'s3cr' + '%t'"])
def test_no_error_of_a_package_shows_the_password(installed, error, words):
    """Nor does its traceback, whether the error quotes the URL, a part of it, or the password alone."""
    install_odd(installed, f"import agentfsm\ndef make(url): raise {error}('bad: ' + {words})")
    with pytest.raises(MisuseError, match=r"bad: .*\*\*\*") as caught:
        open_store(URL_WITH_SECRETS)
    told = "".join(traceback.format_exception(caught.value))
    assert not any(secret in told for secret in ("s3cr%25t", "s3cr%t", "0ther"))


def test_the_scheme_of_a_url_has_no_case(installed):
    """An entry point with an upper-case letter can be opened, as it is written and otherwise."""
    install_odd(installed, "from agentfsm.stores import MemoryStore\nmake = lambda url: MemoryStore()")
    for path in installed.glob("odd_package-1.0.dist-info/entry_points.txt"):
        path.write_text(f"[{STORES}]\nOdd = odd_package:make\n", encoding="utf-8")
    find_plugins.cache_clear()
    for url in ("Odd://x", "odd://x", "ODD://x"):
        assert isinstance(open_store(url), MemoryStore)


def test_two_packages_with_one_name(installed):
    """Neither is chosen in silence."""
    install(installed, "other-package", "[agentfsm.stores]\nShelf = other_package:open_shelf\n")
    with pytest.raises(MisuseError, match=r"'shelf' of agentfsm.stores is provided by .*other-package"):
        open_store("shelf://x")


async def test_a_model_of_another_package():
    """Its callable is given what stands behind the prefix."""
    run = await Agent("echo:hello").run("Say it.")
    assert run.output == "hello"


def test_an_unknown_prefix():
    """The error lists the prefixes that are known, and says how a package adds one."""
    with pytest.raises(MisuseError, match=r"Known providers: .*'echo:'.*'openai:'.*") as caught:
        Agent("acme:large")
    assert "A package provides 'acme:' by an entry point of the group agentfsm.models" in str(caught.value)


def test_a_scheme_without_slashes_is_not_taken_for_a_file():
    """A slip of the keyboard would else make an empty store beside the real one."""
    with pytest.raises(MisuseError, match=r"^postgresql:/db would be the name of a file: write the URL as postgresql"):
        open_store("postgresql:/db")
