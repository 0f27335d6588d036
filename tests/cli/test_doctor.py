"""`agentfsm doctor`: what it finds, and that it changes and tells nothing that it must not."""

import hashlib
import os
import sqlite3

import anyio

from agentfsm import Agent, StopReason, tool
from agentfsm.cli.commands import doctor
from agentfsm.core.events import Failed
from agentfsm.engine.execution.journal import Journal
from agentfsm.ports import SystemClock
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say


def checks(here, *words, code=0):
    return {check["name"]: check for check in here.json("doctor", *words, code=code)["checks"]}


def test_a_sound_installation(here):
    """Versions of all that is needed; nothing is made by looking."""
    found = checks(here)
    assert {
        "python",
        "agentfsm",
        "anyio",
        "httpx",
        "openai",
        "sqlite",
        "store",
        "vocabulary",
        "sandbox",
        "extra cli",
    } <= set(found)
    assert all(check["ok"] for check in found.values())
    assert "does not exist yet" in found["store"]["detail"]
    assert not (here.folder / ".agentfsm").exists()


def test_keys_are_never_shown(here, monkeypatch):
    """Only whether they are set."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    assert checks(here)["OPENAI_API_KEY"]["detail"] == "set"
    text = here("doctor") + here.err
    assert "sk-very-secret" not in text
    assert "not set" in text  # the base URL


def test_a_store_that_opens(here):
    """It is opened, as it is, and what it promises is told."""
    here.run("app:adder")
    detail = checks(here)["store"]["detail"]
    assert detail.startswith(".agentfsm/runs.db opens and contains runs; acknowledged events survive a power cut")


def test_an_open_run_below_a_finished_one(here):
    """It is named, with the command that ends it; a run whose caller is open is none."""

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    async def leave() -> None:
        below = Agent(ScriptedModel(*[say("", call("pay"))] * 2), tools=[pay], name="payer").as_tool()
        script = say("", call("payer", query="x"))
        async with Agent(
            ScriptedModel(script, script), tools=[below], store=SQLiteStore(here.folder / ".agentfsm/runs.db")
        ) as top:
            for run_id in ("waits", "over"):
                await top.run("go", id=run_id)
            journal = await Journal.open(top.store, "over", SystemClock(), None, None)
            journal.commit(Failed(reason=StopReason.CANCELLED, message="planted"))
            await journal.close()

    (here.folder / ".agentfsm").mkdir()
    anyio.run(leave)
    detail = checks(here, code=1)["store"]["detail"]
    assert "over.t1.0;" in detail
    assert "waits" not in detail
    assert "agentfsm cancel RUN" in detail


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
    installed = doctor._installed_version
    missing = {"openai", "rich"}
    monkeypatch.setattr(doctor, "_installed_version", lambda name: None if name in missing else installed(name))
    found = checks(here, code=1)
    assert not found["openai"]["ok"]
    assert found["extra cli"]["ok"]
    assert "plain lines" in found["extra cli"]["detail"]


def test_findings_on_tools(here):
    """Each with its tool and its weight; advice breaks nothing, so the command ends well."""
    report = here.json("doctor", "app:careless")
    assert report["ok"]
    assert [tool["name"] for tool in report["tools"]] == ["get_undeclared", "delete_all", "send_mail"]
    found = {(each["tool"], each["severity"], each["message"].split(",")[0]) for each in report["findings"]}
    assert {
        ("get_undeclared", "hint", "it is named get_undeclared and declares nothing"),
        ("delete_all", "warning", "it is named delete_all"),
        ("send_mail", "warning", "it has no description"),
    } <= found
    lines = here("doctor", "app:careless").splitlines()
    at = lines.index("tool    get_undeclared: nothing declared: runs alone, is never repeated")
    assert lines[at + 1].startswith("        hint: its description")
    assert any(line.startswith("        warning: it is named delete_all, and is declared read_only") for line in lines)


def test_findings_on_all_tools_together(here):
    """They stand behind the tools, and belong to none."""
    here.folder.joinpath("crowd.py").write_text(CROWD, encoding="ascii")
    (finding,) = here.json("doctor", "crowd:agent")["findings"]
    assert finding["tool"] is None
    last = here("doctor", "crowd:agent").splitlines()[-1]
    assert last == f"hint: {finding['message']}"


CROWD = """
from agentfsm import Agent, tool
from agentfsm.testing.models import ScriptedModel

def look() -> str:
    '''Find out what is around.'''
    return ""

agent = Agent(ScriptedModel(), tools=[tool(name=f"look_{n}", read_only=True)(look) for n in range(21)])
"""


def test_without_an_agent_there_are_no_tools(here):
    """The same fields, empty."""
    report = here.json("doctor")
    assert (report["tools"], report["findings"]) == ([], [])


def test_no_findings_where_all_is_well(here):
    """Our own demo declares and describes what it does."""
    report = here.json("doctor", "agentfsm.cli.demo:agent")
    assert report["ok"]
    assert report["findings"] == []


def test_a_missing_key_hides_nothing(here):
    """The key is reported, with the error, and the tools of the agent are still listed with their declarations."""
    (here.folder / "keyless.py").write_text(
        'from agentfsm import Agent, tool\n\n@tool(read_only=True)\ndef look() -> str:\n    """Look around."""\n'
        "    return ''\n\nagent = Agent('openai:gpt-4o', tools=[look])\n",
        encoding="utf-8",
    )
    report = here.json("doctor", "keyless:agent", code=1)
    found = {check["name"]: check for check in report["checks"]}
    assert found["OPENAI_API_KEY"] == {
        "name": "OPENAI_API_KEY",
        "ok": False,
        "detail": found["OPENAI_API_KEY"]["detail"],
    }
    assert "OPENAI_API_KEY is not set" in found["OPENAI_API_KEY"]["detail"]
    assert found["agent"]["ok"]
    assert report["tools"] == [{"name": "look", "declared": ["read_only", "concurrency_safe"]}]
    assert "OPENAI_API_KEY" not in os.environ
