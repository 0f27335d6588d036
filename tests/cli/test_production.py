"""`agentfsm doctor --production` and `agentfsm load`."""

import json
import sqlite3
from contextlib import closing
from xml.etree.ElementTree import parse

WAIVERS = """
[[waiver]]
check = "run-cost"
by = "ann"
until = 2999-01-01
reason = "the model is ours"
"""


def test_an_agent_that_is_not_ready(here):
    """The exit code is 1, more than 20 checks are unmet, and each says what to do."""
    report = here.json("doctor", "--production", "app:adder", code=1)
    unmet = [check for check in report["checks"] if check["status"] != "pass"]
    assert len(unmet) > 20
    assert all(check["detail"] and check["remedy"] for check in unmet)
    assert not report["ready"]
    assert not (here.folder / ".agentfsm").exists()


def test_reports_for_people_and_ci_servers(here):
    """Markdown, SARIF and JUnit say the same as the terminal; a waiver is shown with its person."""
    (here.folder / "waivers.toml").write_text(WAIVERS, encoding="utf-8")
    files = ("--write", "page.md", "--sarif", "out.sarif", "--junit", "out.xml", "--waivers", "waivers.toml")
    text = here("doctor", "--production", "app:adder", "--no-probes", *files, code=1)
    assert "waived by ann until 2999-01-01: the model is ours" in text
    assert "| `run-cost` |" in (here.folder / "page.md").read_text(encoding="utf-8")
    [run] = json.loads((here.folder / "out.sarif").read_text(encoding="utf-8"))["runs"]
    suite = parse(here.folder / "out.xml").getroot()  # noqa: S314  the package wrote it
    levels = [each["level"] for each in run["results"]]
    assert levels.count("note") == int(suite.get("skipped")) == 1
    assert len(levels) - 1 == int(suite.get("failures"))
    assert text.count("FAIL") + text.count("UNKNOWN") == int(suite.get("failures"))


def test_wrong_use(here):
    """Says what is missing."""
    here("doctor", "--production", code=2)
    assert "--production checks an agent" in here.err
    (here.folder / "waivers.toml").write_text(WAIVERS.replace("run-cost", "run-costs"), encoding="utf-8")
    here("doctor", "--production", "app:adder", "--waivers", "waivers.toml", "--no-probes", code=2)
    assert "there is no check 'run-costs'; the checks are: " in here.err
    (here.folder / "waivers.toml").write_text(WAIVERS.replace("2999-01-01", '"soon"'), encoding="utf-8")
    here("doctor", "--production", "app:adder", "--waivers", "waivers.toml", code=2)
    assert "write it as 2027-01-31" in here.err
    here("load", "app:adder", code=2)
    assert "--prompts FILE" in here.err


def test_load(here):
    """Runs are real: they are in the store. The report has percentiles, and is the evidence of two checks."""
    here(
        "load",
        "app:adder",
        "--prompt",
        "Add 2 and 3",
        "--runs",
        "6",
        "--concurrency",
        "3",
        "--out",
        "evidence/load.json",
    )
    report = json.loads((here.folder / "evidence" / "load.json").read_text(encoding="utf-8"))
    assert (report["runs"], report["concurrency"], report["failed"]) == (6, 3, 0)
    assert 0 < report["p50_s"] <= report["p95_s"] <= report["p99_s"]
    assert len(here.json("runs")["runs"]) == 6
    checks = {each["id"]: each for each in here.json("doctor", "--production", "app:adder", code=1)["checks"]}
    assert [checks[name]["status"] for name in ("latency-baseline", "load-test")] == ["fail", "pass"]
    assert "over only 6 runs" in checks["latency-baseline"]["detail"]


def test_drills_and_the_log_of_a_run(here):
    """A backup is opened and recorded where doctor looks; the store in production is none. The log ends with totals."""
    here("run", "app:adder", "Add 2 and 3")
    [run] = here.json("runs")["runs"]
    lines = here.json("logs", run["id"])["lines"]
    assert [each["event"] for each in lines][-1] == "run_ended"
    assert (lines[-1]["level"], lines[-1]["reason"]) == ("INFO", "completed")
    assert f"INFO     event=run_ended run={run['id']} agent=" in here("logs", run["id"], "--follow")
    [store] = here.folder.glob(".agentfsm/*.db")
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("VACUUM INTO ?", [str(here.folder / "backup.db")])
    assert "restore in " in here("drill", "restore", "backup.db", "--by", "ann")
    report = json.loads((here.folder / "evidence" / "restore.json").read_text(encoding="utf-8"))
    assert (report["kind"], report["by"], report["checked"]) == ("restore", "ann", 1)
    text = here("drill", "restore", "gone.db", "--by", "ann", code=1)
    assert text.startswith("restore failed: there is no backup at gone.db")
    checks = {
        each["id"]: each for each in here.json("doctor", "--production", "app:adder", "--no-probes", code=1)["checks"]
    }
    assert "failed on" in checks["restore-drill"]["detail"]
    here("drill", "restore", str(store), code=2)
    assert "is the store in production" in here.err
    here("drill", "rollback", "nothing", code=2)
    assert "there is no roll-out 'nothing'" in here.err
