"""`agentfsm rollout` and `agentfsm release`: the whole way of a release, from the terminal."""

import io
import sys
from contextlib import aclosing

import anyio
import pytest

from agentfsm import CorruptError
from agentfsm.stores import SQLiteStore

APP = """
from agentfsm import Agent
from agentfsm.releases import Rollout
from agentfsm.testing import FunctionModel

old = Agent(FunctionModel(lambda _: "old"), name="billing", version="1.0.0")
new = old.with_(model=FunctionModel(lambda _: "new"), version="2.0.0", instructions="Be brief.")
rollout = Rollout("billing", {"old": old, "new": new})
only_old = Rollout("billing", {"old": old})
"""


@pytest.fixture
def here(here, monkeypatch):
    """A folder with the module `shop`."""
    (here.folder / "shop.py").write_text(APP)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    yield here
    sys.modules.pop("shop", None)


def test_a_release_is_started_changed_and_taken_back(here):
    """Each step is one command, and the log has all of them with author and reason."""
    line = here(
        "rollout", "start", "shop:rollout", "old=0", "new=100", "--reason", "a new prompt", "--by", "ann",
        "--holdout", "1", "--back-if", "failures 5%",
    )  # fmt: skip
    assert line.endswith("  1 start by ann: old=0 new=100; a new prompt\n")
    # Of ids by chance, one in a hundred would be held out.
    ids = [here("submit", "shop:rollout", "go", "--id", f"r{number}").strip() for number in range(3)]
    assert "has '1.0.0': it leaves them" in (here("worker", "shop:only_old", "--until-idle"), here.err)[1]
    assert here.json("worker", "shop:rollout", "--until-idle")["runs"]["done"] == 3
    assert {here.json("show", run_id)["release"] for run_id in ids} <= {"1.0.0", "2.0.0"}
    [shown] = here.json("rollout", "status", "billing")["rollouts"]
    assert [(arm["arm"], arm["weight"], arm["runs"] <= 3, arm["failed"]) for arm in shown["arms"]] == [
        ("old", 0.0, True, 0),
        ("new", 100.0, True, 0),
    ]
    here("rollout", "weights", "billing", "old=50", "new=50", "--reason", "less", "--by", "bob")
    here("rollout", "back", "billing", "--reason", "more again", "--by", "bob")
    here("rollout", "kill", "billing", "--reason", "wrong invoices", "--by", "bob", "--abort-running")
    assert "cancelled 0 runs" in here.err
    log = here.json("rollout", "log", "billing")["log"]
    assert [(each["action"], each["by"], each["reason"], each["weights"]["new"]) for each in log] == [
        ("start", "ann", "a new prompt", 100.0),
        ("weights", "bob", "less", 50.0),
        ("back", "bob", "more again", 100.0),
        ("kill", "bob", "wrong invoices", 0.0),
    ]
    table = here("rollout", "status")
    assert "billing: killed, " in table
    assert "  rolls back if failures 5% after 20\n" in table


def test_a_run_is_resumed_with_the_release_that_it_was_begun_with(here):
    """The run names the roll-out, and the roll-out has the agent; one without that release is refused by name."""
    here("rollout", "start", "shop:rollout", "old=0", "new=100", "--reason", "x")
    run_id = here("submit", "shop:rollout", "go").strip()
    here("rollout", "kill", "billing", "--reason", "x")
    assert here("resume", run_id).strip() == "new"
    assert here("run", "shop:rollout", "go").strip() == "old"
    here("rollout", "start", "shop:rollout", "old=0", "new=100", "--reason", "x")
    here("run", "shop:only_old", "go", code=2)
    assert "does not have release '2.0.0' of agent 'billing', it has '1.0.0'" in here.err


def test_a_target_gets_its_arm(here, monkeypatch):
    """By role and tenant, whatever the weights are, of runs, submitted runs and conversations."""
    here("rollout", "start", "shop:rollout", "old=100", "--target", "new:role=tester,tenant=acme", "--reason", "x")
    aim = ("--user", "ann", "--tenant", "acme", "--role", "tester")
    assert here("run", "shop:rollout", "go", *aim).strip() == "new"
    assert here("run", "shop:rollout", "go", *aim[:4]).strip() == "old"
    run = here.json("show", here("submit", "shop:rollout", "go", *aim).strip())
    assert (run["release"], run["user"]) == ("2.0.0", "ann")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/retry\n"))
    assert here("chat", "shop:rollout", "--session", "s", *aim).split() == ["new", "new"]
    assert "--session 's~2' --user ann --tenant acme --role tester" in here.err


def test_a_release_that_was_changed_in_place_resumes_no_run(here):
    """It is refused with the differences, as a worker refuses it; the run stays as it is."""
    here("rollout", "start", "shop:rollout", "old=0", "new=100", "--reason", "x")
    run_id = here("submit", "shop:rollout", "go").strip()
    (here.folder / "shop.py").write_text(APP.replace("Be brief.", "Be long."))
    del sys.modules["shop"]
    for command in (["resume", run_id], ["worker", "shop:rollout", "--until-idle"]):
        here(*command, code=1)
        assert "release '2.0.0' of agent 'billing' was saved with other contents (prompts: instructions " in here.err
    assert here.json("show", run_id)["version"] == 0


def test_releases_are_listed_shown_and_compared(here):
    """By their dimensions; a version that is not there is answered with those that are."""
    here("rollout", "start", "shop:rollout", "old=100", "--reason", "x")
    assert [line.split()[:2] for line in here("release", "list").splitlines()] == [
        ["billing", "1.0.0"],
        ["billing", "2.0.0"],
    ]
    assert here("release", "show", "billing", "2.0.0").startswith("billing 2.0.0 (")
    assert here("release", "diff", "billing", "1.0.0", "2.0.0").startswith("prompts: instructions ")
    assert here("release", "diff", "billing", "1.0.0", "1.0.0") == ""
    here("release", "show", "billing", "3.0.0", code=2)
    assert "has no release '3.0.0'; saved are: 1.0.0, 2.0.0" in here.err


def test_a_flag_needs_no_agent(here):
    """Its name is enough; mistakes change nothing and say what to give."""
    here("rollout", "start", "new-search", "off=90", "on=10", "--unit", "session", "--reason", "a better index")
    assert "new-search: by session, " in here("rollout", "status")
    for words, text in [
        (("weights", "new-search", "off=90"), "add up to 90 = 90 %"),
        (("weights", "new-search", "off=x"), "'x' is not a number: write for example off=5"),
        (("back", "old-search"), "there is no roll-out 'old-search'"),
        (("start", "new-search", "off=50", "on=50"), "is in progress"),
        (("start", "x", "off=90", "on=5", "on=10"), "arm 'on' is given more than once"),
        (("weights", "new-search", "off=50", "on=20", "on=50"), "arm 'on' is given more than once"),
    ]:
        here("rollout", *words, "--reason", "x", code=2)
        assert text in here.err
    here("rollout", "status", "old-search", code=2)
    assert len(here.json("rollout", "log", "new-search")["log"]) == 1


def test_a_kill_that_did_not_cancel_all_runs_is_repeated(here):
    """As after a crash in the middle: the runs are cancelled, and the log has one kill. Otherwise it is refused."""
    here("rollout", "start", "shop:rollout", "old=0", "new=100", "--reason", "x")
    for run_id in ("r1", "r2"):
        here("submit", "shop:rollout", "go", "--id", run_id)
    here("rollout", "kill", "billing", "--reason", "bad")
    assert [here.json("show", run_id)["state"] for run_id in ("r1", "r2")] == ["observe"] * 2
    for count in ("cancelled 2 runs", "cancelled 0 runs"):
        line = here("rollout", "kill", "billing", "--reason", "bad", "--abort-running")
        assert (count in here.err, "  2 kill by " in line) == (True, True)
    assert [here.json("show", run_id)["state"] for run_id in ("r1", "r2")] == ["error"] * 2
    here("rollout", "kill", "billing", "--reason", "bad", code=2)
    assert "was killed" in here.err
    assert [each["action"] for each in here.json("rollout", "log", "billing")["log"]] == ["start", "kill"]


def test_a_run_that_cannot_be_read_holds_up_no_kill(here, monkeypatch):
    """The others are cancelled, and the log of the program names it."""
    here("rollout", "start", "shop:rollout", "old=0", "new=100", "--reason", "x")
    for run_id in ("r1", "r2", "r3"):
        here("submit", "shop:rollout", "go", "--id", run_id)
    read = SQLiteStore.read

    async def read_or_fail(self, run_id, *args, **options):
        if run_id == "r2":
            raise CorruptError("a line is gone")
        return await read(self, run_id, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SQLiteStore, "read", read_or_fail)
        here("rollout", "kill", "billing", "--reason", "bad", "--abort-running")
    assert "cancelled 2 runs" in here.err
    assert [here.json("show", run_id)["state"] for run_id in ("r1", "r2", "r3")] == ["error", "observe", "error"]


def test_releases_of_many_pages_are_listed(here, monkeypatch):
    """A store returns a page of them at a time."""
    list_records = SQLiteStore.list_records

    async def list_one(self, kind, *, limit=1, **options):
        return await list_records(self, kind, limit=min(limit, 1), **options)

    here("rollout", "start", "shop:rollout", "old=100", "--reason", "x")
    monkeypatch.setattr(SQLiteStore, "list_records", list_one)
    assert [each["version"] for each in here.json("release", "list")["releases"]] == ["1.0.0", "2.0.0"]
    assert here("release", "list", "nobody") == ""


def test_watch_of_a_roll_out_that_is_not_there(here):
    """A wrong name is told at once: nothing would be watched, and nobody would know."""
    here("rollout", "start", "shop:rollout", "old=100", "--reason", "x")
    here("rollout", "watch", "biling", "--once", code=2)
    assert "there is no roll-out 'biling'" in here.err
    assert "watching" not in here.err


def test_watch_rolls_a_bad_release_back(here):
    """Without a worker of the roll-out, the command checks its rules."""
    (here.folder / "shop.py").write_text(
        APP.replace('lambda _: "new"', "fails").replace(
            "old = ",
            "from agentfsm.core.errors import ModelError\n\n\ndef fails(_):\n    raise ModelError('no')\n\n\nold = ",
            1,
        )
    )
    rule = ("--back-if", "failures 5% after 3")
    here("rollout", "start", "shop:rollout", "old=0", "new=100", "--reason", "x", *rule)

    async def fail_some():
        from shop import rollout  # noqa: PLC0415  written above

        async with aclosing(SQLiteStore(here.folder / ".agentfsm" / "runs.db")) as store:
            ours = rollout.with_(store=store)
            for number in range(5):
                await ours.run("go", user=f"{number}")

    anyio.run(fail_some)
    line = here("rollout", "watch", "billing", "--once")
    [shown] = here.json("rollout", "status")["rollouts"]
    assert [(arm["weight"], arm["failed"]) for arm in shown["arms"]] == [(100.0, 0), (0.0, 5)]
    assert "2 auto_back of new by agentfsm: old=100 new=0; failures 5% after 3: 5 of 5 runs are bad" in line
