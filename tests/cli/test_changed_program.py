"""A program that cannot continue a run says which command can, and not the one that was just refused."""

import pytest

PROGRAM = '''
from agentfsm import Agent, tool
from agentfsm.flow import Flow, step
from agentfsm.testing import ScriptedModel, call, say

@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return "paid"

agent = Agent(ScriptedModel(say("", call("pay", cents=5)), "done"), tools=[pay], name="payer")

@step(requires_approval=True, read_only=True)
async def gate() -> str:
    return "open"

@step(depends_on=["gate"])
async def charge(gate: str) -> str:
    return "charged"

flow = Flow([gate, charge], name="shop")
'''
OTHER = PROGRAM.replace("tools=[pay]", "tools=[]").replace("def charge", "def fee").replace(", charge]", ", fee]")


@pytest.fixture
def programs(here, shell):
    """Write both programs, and begin a run of each kind."""
    for name, text in {"one": PROGRAM, "two": OTHER, "moved": PROGRAM}.items():
        (shell.folder / f"{name}.py").write_text(text, encoding="utf-8")
    here("run", "one:agent", "pay", "--id", "a", code=3)
    here("run", "one:flow", "{}", "--id", "f", code=3)
    here("approve", "f", "p1.1")


def test_a_refused_resume_names_another_program(here, programs):
    """To repeat the same command would be refused again."""
    here("resume", "a", "--agent", "two:agent", code=2)
    assert "which this agent does not have: resume it with an agent that has it" in here.err
    assert here.err.rstrip().endswith("To continue with another program: agentfsm resume a --agent MODULE:NAME")


def test_a_step_without_its_tool_names_the_ways_out(here, programs):
    """A person settles it, or another program or name of the step continues it; to rerun it starts nothing."""
    here("resume", "f", "--agent", "two:flow", code=3)
    assert "or, with a program that has charge: agentfsm resume f --agent MODULE:NAME\n" in here.err
    assert "if it has another name now: agentfsm resume f --agent two:flow --renamed charge=NEW\n" in here.err
    assert "--rerun" not in here.err
    assert here("resume", "f", "--agent", "two:flow", "--renamed", "charge=fee") == '{"fee": "charged"}\n'


def test_a_module_that_was_moved(here, programs):
    """The worker leaves the run alone, and names the command that continues it."""
    here("worker", "moved:flow", "--until-idle", code=1)
    assert "if the module was moved, continue the run with agentfsm resume f --agent moved:flow" in here.err
    here("worker", "moved:flow", "--until-idle", code=1)  # at its first look, like any other worker
    assert here("resume", "f", "--agent", "moved:flow") == '{"charge": "charged"}\n'
