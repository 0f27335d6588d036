"""`agentfsm whatif`: stored runs again with another agent, without an effect."""

import json

CANDIDATES = """
from app import Agent, calls, once, pay, results, FunctionModel

cheaper = Agent(once("pay", '{"account": "17\\\\u202e", "cents": 4}'), tools=[pay], name="payer", version="2")
same = Agent(once("pay", '{"account": "17\\\\u202e", "cents": 5}'), tools=[pay], name="payer")
"""


def test_runs_of_another_agent(here):
    """The report names what would have been done otherwise, in three forms; codes are for CI; nothing is paid."""
    (here.folder / "candidates.py").write_text(CANDIDATES, encoding="utf-8")
    here.run("app:payer", "--id", "paid", "Pay.", code=3)
    here("approve", "paid", "t1.0")
    here("resume", "paid")
    [line] = (here.folder / "paid.txt").read_text(encoding="utf-8").splitlines()
    assert line.endswith(" 5")
    words = ("whatif", "--agent", "candidates:cheaper", "--of", "agent", "--since", "7d")
    out = here(*words, "--md", "report.md", "--html", "report.html", code=1)
    assert "no tool that may act is called" in here.err
    assert "pay: other cents | 1 | 1" in out
    assert "| pay: other cents | 1 | 1 |" in (here.folder / "report.md").read_text(encoding="utf-8")
    assert "<td>pay: other cents</td>" in (here.folder / "report.html").read_text(encoding="utf-8")
    found = here.json("whatif", "paid", "--agent", "candidates:cheaper", code=1)
    assert (found["verdict"], found["trials"][0]["effects"]["other"][0]["fields"]) == ("different", ["cents"])
    assert json.loads(found["trials"][0]["effects"]["other"][0]["after"])["cents"] == 4
    control = ("--control", "candidates:same", "--repeats", "2")
    same = here.json("whatif", "paid", "--agent", "candidates:same", *control, code=0)
    assert (same["verdict"], len(same["control"]), same["aspects"][0]["noise"]) == ("no difference", 2, 0)
    here("whatif", "paid", "--agent", "candidates:cheaper", "--keep", "kept.db", code=1)
    [kept] = here.json("runs", "--store", "kept.db", "--purpose", "what-if")["runs"]
    assert here.json("show", kept["id"], "--store", "kept.db")["forked_from"] == "paid"
    here("whatif", "paid", "--agent", "candidates:cheaper", "--keep", ".agentfsm/runs.db", code=2)
    assert [each["id"] for each in here.json("runs")["runs"]] == ["paid"]
    assert (here.folder / "paid.txt").read_text(encoding="utf-8").splitlines() == [line]
    here("whatif", "--agent", "candidates:same", "--since", "7d", code=2)
    assert "the store has no run of an agent 'payer' that is over" in here.err
    here("whatif", "--agent", "candidates:same", "--md", "no/report.md", code=2)
    assert "there is no folder no" in here.err
    here("whatif", "--agent", "candidates:same", "--store", "none.db", code=2)
    assert not (here.folder / "none.db").exists()
    (here.folder / "link.db").symlink_to(here.folder / ".agentfsm" / "runs.db")
    here("whatif", "paid", "--agent", "candidates:cheaper", "--keep", "link.db", code=2)
    assert [each["id"] for each in here.json("runs")["runs"]] == ["paid"]
