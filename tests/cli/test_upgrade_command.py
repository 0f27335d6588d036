"""`agentfsm upgrade check`: what becomes of open runs, before a deploy, from the terminal."""

import pytest

PROGRAM = '''
from agentfsm import Agent, tool
from agentfsm.testing import ScriptedModel, call, say

@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return "paid"

def reply(calls=1):
    return ScriptedModel(say("", call("pay", cents=5)), "done")

def build():
    return Agent(reply(), tools=[pay], name="payer", instructions="Be kind.", version="1")
'''
CHANGES = {
    "brief": ("Be kind.", "Be brief."),
    "other": ("cents: int", "cents: int, to: str"),
    "gone": ("tools=[pay]", "tools=[]"),
    "versioned": ('version="1"', 'version="2"'),
}


@pytest.fixture
def releases(here, shell):
    """Write a program and its changes, and begin three runs."""
    (shell.folder / "one.py").write_text(PROGRAM, encoding="utf-8")
    for name, (before, after) in CHANGES.items():
        (shell.folder / f"{name}.py").write_text(PROGRAM.replace(before, after), encoding="utf-8")
    for number in range(3):
        here("run", "one:build", "pay", "--id", f"r{number}", code=3)


def test_what_becomes_of_open_runs(here, releases, tmp_path):
    """The exit code is that of a gate: 1 if a run would need a person or the old release."""
    assert here("upgrade", "check", "one:build") == "3 open runs of payer 1\n  3  same  go on as they would have\n"
    assert "  3  differs  request  requests differ: other instructions\n" in here("upgrade", "check", "brief:build")
    here("upgrade", "check", "other:build", code=1)
    assert "3 attention arguments the arguments of an open call do not fit 'pay' any more" in " ".join(here.out.split())
    document = here.json("upgrade", "check", "gone:build", "--limit", "2", code=1)
    assert document["verdicts"] == {"same": 0, "differs": 0, "attention": 0, "refused": 3}
    assert [run["id"] for run in document["runs"]] == ["r2", "r1"]
    here("upgrade", "check", "gone:build", "--limit", "2", code=1)
    assert "1 more run: --offset 2" in here.err
    page = tmp_path / "report.md"
    here("upgrade", "check", "gone:build", "--offset", "2", "--markdown", str(page), code=1)
    assert "| r0 | refused | t1.0 | the tool 'pay' of an open call is gone |" in page.read_text(encoding="utf-8")


def test_nothing_is_created_to_check(here, shell):
    """Without a store there is nothing to check."""
    (shell.folder / "one.py").write_text(PROGRAM, encoding="utf-8")
    here("upgrade", "check", "one:build", code=2)
    assert "there is no store at" in here.err
