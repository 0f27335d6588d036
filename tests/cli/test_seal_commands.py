"""`agentfsm audit --seal`, `--verify` and `--head`."""

import sqlite3
from contextlib import closing

KEY = "k" * 32


def rewrite(here, old, new):
    with closing(sqlite3.connect(here.folder / ".agentfsm" / "runs.db", isolation_level=None)) as db:
        db.execute("UPDATE events SET body = replace(body, ?, ?)", (old, new))


def test_a_change_in_the_database_is_found(here, monkeypatch):
    """The command fails and names the run, as it does for one that was deleted."""
    monkeypatch.setenv("AGENTFSM_SEAL_KEY", KEY)
    here.run("app:adder", "500 + 1", "--id", "r1")
    here.run("app:adder", "2 + 2", "--id", "r2")
    assert [line.split("  ")[0] for line in here("audit", "--seal").splitlines()] == ["r1", "r2"]
    assert here.json("audit", "--seal") == {"sealed": 0}
    assert here("audit", "--verify") == "2 runs checked, 0 faults\n"
    assert here("audit", "--verify", "r1") == "1 run checked, 0 faults\n"
    head = here.json("audit", "--head")
    assert head["seals"] == 2
    assert here("audit", "--head") == f"{head['head']}  2 seals\n"
    rewrite(here, "500 ", "900 ")
    here("delete", "r2")
    changed, missing, total = here("audit", "--verify", code=1).splitlines()
    assert changed.startswith("r1  changed: the header or events 1 to ")
    assert missing.startswith("r2  missing: it was sealed up to version ")
    assert total == "2 runs checked, 2 faults"
    rewrite(here, "900 ", "500 ")
    assert here.json("audit", "--verify", "--allow-missing", "--since-head", head["head"])["checked"] == 2
    here("audit", "--verify", "--since-head", "00", code=1)
    assert "does not contain the head 00" in here.err


def test_without_a_key(here):
    """What that means is said; without a file, so is how to make one."""
    here.run("app:adder", "1 + 1", "--id", "r1")
    here("audit", "--verify", code=2)
    assert "`agentfsm audit --seal` writes it" in here.err
    here("audit", "--seal")
    assert "without AGENTFSM_SEAL_KEY" in here.err
    assert here("audit", "--verify") == "1 run checked, 0 faults\n"
