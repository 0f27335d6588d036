"""`agentfsm doctor`: what it finds, and that it changes and tells nothing that it must not."""

import hashlib
import sqlite3

import pytest

from agentfsm.cli import doctor


def checks(here, *words, code=0):
    return {check["name"]: check for check in here.json("doctor", *words, code=code)["checks"]}


def test_a_sound_installation(here):
    """Versions of all that is needed; nothing is made by looking."""
    found = checks(here)
    assert {"python", "agentfsm", "anyio", "httpx", "openai", "sqlite", "store", "vocabulary", "rich"} <= set(found)
    assert all(check["ok"] for check in found.values())
    assert "is not there yet" in found["store"]["detail"]
    assert not (here.folder / ".agentfsm").exists()


def test_keys_are_never_shown(here, monkeypatch):
    """Only whether they are set."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    assert checks(here)["OPENAI_API_KEY"]["detail"] == "set"
    text = here("doctor") + here.err
    assert "sk-very-secret" not in text
    assert "not set" in text  # the base URL


def test_a_store_that_opens(here):
    """It is opened, as it is."""
    here.run("app:adder")
    assert "opens and holds runs" in checks(here)["store"]["detail"]


def test_a_store_that_is_none(here):
    """Something needed is broken: 1."""
    (here.folder / "runs.db").write_text("not a database, whatever it says" * 100, encoding="ascii")
    store = checks(here, "--store", "runs.db", code=1)["store"]
    assert not store["ok"]
    assert "BROKEN  store" in here("doctor", "--store", "runs.db", code=1)


def test_the_database_of_another_program(here):
    """It is left as it is."""
    with sqlite3.connect(here.folder / "other.db") as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    assert not checks(here, "--store", "other.db", code=1)["store"]["ok"]


def test_the_vocabulary_is_looked_for_and_not_fetched(here, monkeypatch):
    """The file's name is the hash that tiktoken uses."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(here.folder))
    assert "is not in" in checks(here)["vocabulary"]["detail"]
    name = hashlib.sha1(doctor.VOCABULARY_URL.encode(), usedforsecurity=False).hexdigest()
    (here.folder / name).write_bytes(b"x")
    assert checks(here)["vocabulary"]["detail"] == f"o200k_base is in {here.folder}"


def test_a_package_that_is_missing(here, monkeypatch):
    """One that is needed is an error, one that is optional a word."""
    installed = doctor._version
    missing = {"openai", "rich"}
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in missing else installed(name))
    found = checks(here, code=1)
    assert not found["openai"]["ok"]
    assert found["rich"]["ok"]
    assert "plain lines" in found["rich"]["detail"]


def test_hints_on_tools(here):
    """Declarations that do not fit the name, and a description that is missing."""
    found = here.json("doctor", "app:careless")
    hints = {tool["name"]: " ".join(tool["hints"]) for tool in found["tools"]}
    assert "@tool(read_only=True)" in hints["get_undeclared"]
    assert "declared read_only" in hints["delete_all"]
    assert "concurrency_safe" in hints["send_mail"]
    assert "no description" in hints["send_mail"]
    text = here("doctor", "app:careless")
    assert "tool    get_undeclared: nothing declared: runs alone, never repeated" in text
    assert "        hint: it has no description" in text


@pytest.mark.parametrize("target", ["app:payer", "agentfsm.cli.demo:agent"])
def test_no_hints_where_all_is_well(here, target):
    """Our own demo declares what it does."""
    found = here.json("doctor", target)
    assert found["ok"]
    assert not any(tool["hints"] for tool in found["tools"])
