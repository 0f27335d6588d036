"""An agent as a solver of Inspect, which is installed for the test."""

import os
import subprocess
import sys
from importlib.util import find_spec

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


CONVERSATION = """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import includes
from inspect_ai.solver import chain, system_message, user_message
from agentfsm import Agent
from agentfsm.evals.inspect_solver import as_solver
from agentfsm.testing.models import FunctionModel

said = [ChatMessageUser(content="My dog is Rex."), ChatMessageAssistant(content="Noted."),
        ChatMessageUser(content="What is its name?")]
texts = lambda request: f"{len(request.messages)} {request.instructions} | {request.messages[0].text}"
for instructions in ("Be brief.", lambda header: "Be kind."):
    agent = as_solver(Agent(FunctionModel(texts), instructions=instructions))
    steps = chain(system_message("Answer in {language}."), agent, user_message("And its age?"), agent)
    given = [ChatMessageSystem(content="You are a vet."), *said]
    samples = [Sample(input=given, target="Rex", metadata={"language": "French"})]
    [log] = eval(Task(samples, solver=steps, scorer=includes()), model="mockllm/model", display="none")
    [sample] = log.samples
    print(log.status, log.results.scores[0].metrics["accuracy"].value, *(each.role for each in sample.messages))
    print(*(each.text.replace(chr(10), " ") for each in sample.messages if each.role == "assistant"), sep=" / ")
    [(name, usage)] = sample.model_usage.items()
    print(name, usage.input_tokens > 0, usage.total_tokens > sample.output.usage.total_tokens)
    [log] = eval(Task(samples, solver=steps, scorer=includes(), token_limit=5), model="mockllm/model", display="none")
    print(log.samples[0].limit.type)
"""


def run_script(folder, script):
    """Run a script with Inspect, which is installed into a folder, and return its lines."""
    packages = folder / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), PINNED]
    if not find_spec("inspect_ai") and subprocess.run(pip, check=False).returncode:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say("Inspect could not be fetched")
    env = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_extra_is_named(monkeypatch):
    """If it is not installed."""
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    with pytest.raises(MisuseError, match=r"pip install 'agentfsm\[inspect\]'"):
        as_solver(Agent(ScriptedModel()))


@pytest.mark.soak
def test_an_agent_solves_a_task_of_inspect(tmp_path):
    """Its log has the messages, the grades and the ids of the runs."""
    assert run_script(tmp_path, SCRIPT) == [
        "success 0.5",
        "user assistant tool assistant inspect- It is Paris.",
        "user assistant tool assistant inspect- It is Madrid.",
    ]


@pytest.mark.soak
def test_a_sample_is_a_conversation(tmp_path):
    """The agent has its system messages and history, also behind other solvers; tokens are in the log and in limits."""
    roles = "system system user assistant user assistant user assistant"
    instructions = "Be brief.  You are a vet.  Answer in French."
    lines = run_script(tmp_path, CONVERSATION)
    assert lines[:4] == [
        f"success 1.0 {roles}",
        f"Noted. / 3 {instructions} | My dog is Rex. / 5 {instructions} | My dog is Rex.",
        "agentfsm/function True True",
        "token",
    ]
    assert lines[5] == "Noted. / 5 Be kind. | You are a vet. / 7 Be kind. | You are a vet."  # a function: as history
    assert lines[6:] == lines[2:4]
