"""An agent as a solver of Inspect, which is installed for the test."""

import os
import subprocess
import sys

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.evals.inspect_solver import as_solver
from agentfsm.testing import ScriptedModel

PINNED = "inspect-ai==0.3.285"
SCRIPT = """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from agentfsm import Agent, ToolResult, tool
from agentfsm.evals.inspect_solver import as_solver
from agentfsm.testing.models import FunctionModel, call, say

@tool(read_only=True)
def capital(country: str) -> str:
    "Look up a capital."
    return {"France": "Paris", "Spain": "Madrid"}[country]

def think(request):
    last = request.messages[-1]
    if isinstance(last, ToolResult):
        return f"It is {last.content}."
    return say("", call("capital", country=last.text.rstrip("?").split()[-1]))

samples = [Sample(input="Capital of France?", target="Paris"), Sample(input="Capital of Spain?", target="Lisbon")]
agent = Agent(FunctionModel(think), tools=[capital], name="geo")
[log] = eval(Task(samples, solver=as_solver(agent), scorer=includes()), model="mockllm/model", display="none")
print(log.status, log.results.scores[0].metrics["accuracy"].value)
for sample in log.samples:
    print(*(message.role for message in sample.messages), sample.metadata["agentfsm_run"][:8], sample.output.completion)
"""


def test_the_extra_is_named(monkeypatch):
    """If it is not installed."""
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    with pytest.raises(MisuseError, match=r"pip install 'agentfsm\[inspect\]'"):
        as_solver(Agent(ScriptedModel()))


@pytest.mark.soak
def test_an_agent_solves_a_task_of_inspect(tmp_path):
    """Its log has the messages, the grades and the ids of the runs."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "packages"), PINNED]
    if subprocess.run(pip, check=False).returncode:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say("Inspect could not be fetched")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "success 0.5",
        "user assistant tool assistant inspect- It is Paris.",
        "user assistant tool assistant inspect- It is Madrid.",
    ], done.stderr
