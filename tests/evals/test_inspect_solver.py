"""An agent as a solver of Inspect, which is installed for the test."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.evals.inspect_solver import as_solver
from agentfsm.testing import ScriptedModel

PINNED = ("inspect-ai==0.3.285",)
SUITES = ("inspect-evals==0.28.0", "toml")  # without what it needs for suites that are not run here
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


def run_script(folder, script, *suites):
    """Run a script with Inspect and packages of suites, which are installed into a folder, and return its lines."""
    packages = folder / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
    wanted = [] if find_spec("inspect_ai") else [PINNED]
    wanted += [("--no-deps", *suites)] if suites else []
    for each in wanted:
        if subprocess.run([*pip, *each], check=False).returncode:
            say = pytest.fail if os.environ.get("CI") else pytest.skip
            say(f"{each} could not be fetched")
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


THREATS = """
from inspect_ai import eval, task_with
from inspect_ai.solver import chain
from inspect_evals.agent_threat_bench.agent_threat_bench import agent_threat_bench_memory_poison
from agentfsm import Agent, ToolResult, tool
from agentfsm.evals.inspect_solver import as_solver
from agentfsm.testing.models import FunctionModel, call, say

@tool(read_only=True)
def summarise(text: str) -> str:
    "Return the first sentence."
    return text.split(". ")[0]

def think(request):
    last = request.messages[-1]
    if not isinstance(last, ToolResult):
        topics = {"vacation": "vacation_policy", "benefits": "benefits"}
        return say("", call("memory_read", key=next((topics[each] for each in topics if each in last.text), "?")))
    if careful and last.tool == "memory_read":
        return say("", call("summarise", text=last.content))
    return f"It says: {last.content}"

for careful in (False, True):
    published = agent_threat_bench_memory_poison()
    agent = Agent(FunctionModel(think), tools=[summarise], name="reader")
    task = task_with(published, solver=chain(*published.solver[:-1], as_solver(agent)))
    [log] = eval(task, model="mockllm/model", display="none", limit=2)
    print(log.status, *(f"{score.name} {score.metrics['accuracy'].value}" for score in log.results.scores))
    print(*(message.role for message in log.samples[0].messages))
"""


@pytest.mark.soak
def test_a_published_task_with_tools(tmp_path):
    """The agent has the tools of the task, which work on its state, beside its own; the task's scorer reads the log."""
    assert run_script(tmp_path, THREATS, *SUITES) == [
        "success utility 1.0 security 0.0",
        "system user assistant tool assistant",
        "success utility 0.5 security 0.5",
        "system user assistant tool assistant tool assistant",
    ]


AIRLINE = """
import inspect, json, typing
from copy import deepcopy
import anyio
from inspect_ai.util import Store
from inspect_evals.tau2.airline.AirlineAgentTools import AirlineAgentTools
from inspect_evals.tau2.utils import TAU2_DATA_DIR
from agentfsm import Agent, RunContext, ToolResult, tool
from agentfsm.evals import Case, evaluate
from agentfsm.testing.models import FunctionModel, call, say

whole = AirlineAgentTools(store=Store())
whole.initialize()
tasks = json.loads((TAU2_DATA_DIR / "domains/airline/tasks.json").read_text())

def make_world(_run=None):
    world = AirlineAgentTools(store=Store(), initialized=True)
    world.db = whole.db.model_copy(deep=True)
    return world

def make_tool(name, method):
    def act(ctx, **arguments):
        return str(getattr(ctx.deps, name)(**arguments))
    hints = {"ctx": RunContext[AirlineAgentTools], **typing.get_type_hints(method)}
    parts = [each.replace(annotation=hints[each.name]) for each in [*inspect.signature(method).parameters.values()][1:]]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hints["ctx"])
    act.__signature__, act.__annotations__ = inspect.Signature([context, *parts], return_annotation=str), hints
    act.__name__, act.__doc__ = name, method.__doc__ or name
    return tool(act)

methods = {name: each for name, each in vars(AirlineAgentTools).items() if inspect.isfunction(each) and name[0] != "_"}
del methods["initialize"]
tools = [make_tool(*each) for each in methods.items()]

def make_case(task):
    actions = [each for each in task["evaluation_criteria"]["actions"] if each["name"] in methods]
    wanted = make_world()
    for each in actions:
        getattr(wanted, each["name"])(**deepcopy(each["arguments"]))
    case = Case(
        id=task["id"],
        input=task["user_scenario"]["instructions"]["reason_for_call"],
        paths=[[{"tool": each["name"], "arguments": each["arguments"]} for each in actions]],
        check=lambda run, world: world.db == wanted.db,
        metadata={"actions": actions},
    )
    return case

async def main():
    cases = [make_case(tasks[number]) for number in (2, 7, 11)]
    for left_out in (0, 1):
        def think(request):
            actions = request.run.header.metadata["actions"]
            done = sum(isinstance(each, ToolResult) for each in request.messages)
            if done >= len(actions) - left_out:
                return "Done."
            return say("", call(actions[done]["name"], **actions[done]["arguments"]))
        agent = Agent(FunctionModel(think), tools=tools)
        found = await evaluate(agent, cases, runs=1, deps=make_world, parallel=1)
        print(len(tasks), found.mean(), round(found.mean("tool_path"), 2))

anyio.run(main)
"""


@pytest.mark.soak
def test_tasks_of_tau_bench(tmp_path):
    """The published calls lead to the published end state; without the last one, world and path are wrong."""
    assert run_script(tmp_path, AIRLINE, *SUITES) == ["50 1.0 1.0", "50 0.0 0.58"]
