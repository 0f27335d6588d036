"""Runs that an evaluation keeps: those whose agent and case are the same, in all that is known of them."""

import subprocess
import sys

import pytest

from agentfsm import Agent, ToolResult, tool
from agentfsm.evals import Case, evaluate
from agentfsm.releases import Release, Rollout
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, call, say


def answer_by_clerk(request):
    last = request.messages[-1]
    return last.content if isinstance(last, ToolResult) else say("", call("clerk", query="q"))


def build(what, changed):
    """Return an agent and a case; one part of them differs if it is changed."""
    answer = FunctionModel(lambda request: f"{len(request.messages)}")
    text, case = ("two" if changed else "one"), Case(id="c", input="x", user="ann", tenant="t")

    @tool(requires_approval=changed if what == "approval" else False)
    def pay() -> str:
        """Pay."""
        return "paid"

    def ask(run, said=text if what == "default of a function" else "one"):
        return None if run else said

    def say_one(run):
        return None if run else "one"

    def say_two(run):
        return None if run else "two"

    def instruct(header):
        return text if header.tenant == "t" else "be brief"

    class Priced(FunctionModel):
        name = "clerk-2" if changed and what == "model of a sub-agent" else "clerk-1"

    match what:
        case "reminder":
            return Agent(answer, name="a", reminder=text), case
        case "instructions for a tenant":
            return Agent(answer, name="a", instructions=instruct), case
        case "function of the user":
            return Agent(answer, name="a"), Case(id="c", turns=say_two if changed else say_one)
        case "default of a function":
            return Agent(answer, name="a"), Case(id="c", turns=ask)
        case "approval":
            return Agent(answer, name="a", tools=[pay]), case
    inner = Agent(Priced(lambda _request: "42"), name="clerk", instructions=text if "instructions" in what else "")
    if what == "sub-agent of a sub-agent":
        below = Agent(answer, name="below", instructions=text)
        inner = Agent(Priced(lambda _request: "42"), name="clerk", tools=[below.as_tool()])
    return Agent(FunctionModel(answer_by_clerk), name="a", version="1", tools=[inner.as_tool()]), case


INNER = ("instructions of a sub-agent", "model of a sub-agent", "sub-agent of a sub-agent")


@pytest.mark.parametrize(
    "what",
    [*INNER, "reminder", "instructions for a tenant", "approval", "function of the user", "default of a function"],
)
async def test_a_change_makes_fresh_runs(what):
    """What is the same is kept, and what differs is run again."""
    store, kept = MemoryStore(), []
    for changed in (False, False, True):
        agent, case = build(what, changed)
        found = await evaluate(agent.with_(store=store), [case], runs=1)
        kept.append(found.results[0].is_kept)
    assert kept == [False, True, False]


@pytest.mark.parametrize("what", INNER)
def test_a_fingerprint_covers_sub_agents(what):
    """Those below too, and so does the hash of the tool in a release; an agent that calls itself has one."""
    one, again, other = build(what, False)[0], build(what, False)[0], build(what, True)[0]
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert list(Release.of(one).diff(Release.of(other))) == ["tools"]
    one.tools.register(one.as_tool(name="again"))
    assert one.fingerprint != again.fingerprint


async def test_a_session_that_has_grown():
    """The case goes on from what is said there now."""
    store = MemoryStore()
    agent, case = Agent(FunctionModel(lambda r: f"{len(r.messages)}"), store=store), Case(input="x", session="s")
    answers = []
    for text in ("one", "", "two"):
        if text:
            await agent.run(text, session="s")
        found = await evaluate(agent, [case], runs=1)
        answers.append((await agent.load(found.results[0].run_id)).answer)
    assert answers == ["3", "3", "5"]


async def test_the_arm_of_a_roll_out():
    """The runs of an arm are kept as long as the user of the case gets it."""
    store = MemoryStore()
    arms = {
        name: Agent(FunctionModel(lambda _request, name=name: name), name="b", version=name, store=store)
        for name in ("old", "new")
    }
    case, answers = Case(input="x", user="ann"), []
    for weights in ({"old": 100}, {"old": 100}, {"new": 100}):
        rollout = Rollout(f"b-{'-'.join(weights)}", arms)
        if len(answers) != 1:
            await rollout.start(weights, by="a", reason="r")
        [result] = (await evaluate(rollout, [case], runs=1)).results
        answers.append(((await arms["old"].load(result.run_id)).answer, result.is_kept))
    assert answers == [("old", False), ("old", True), ("new", False)]


SCRIPT = """
import anyio
from agentfsm import Agent, tool
from agentfsm.evals import Case, evaluate
from agentfsm.testing.models import FunctionModel

class Policy:
    def __call__(self, run):
        return False

@tool(requires_approval=lambda arguments: arguments["cents"] in {1, 2, 3})
def pay(cents: int) -> str:
    "Pay."
    return "paid"

model = FunctionModel(lambda request: "done")
agent = Agent(model, name="a", tools=[pay], stop_when=[Policy()], reminder=lambda run: "be brief")
one = Case(id="a", input="x", expect=[lambda answer: answer in {"done", "over"}])
cases = [one, Case(id="b", turns=lambda run: None if run else "x")]
found = anyio.run(lambda: evaluate(agent, cases, runs=1))
print([each.run_id for each in found.results], found.cases)
"""


def test_ids_are_the_same_in_each_process():
    """So an evaluation that was killed goes on: no address and no order of a set is part of them."""
    said = {
        subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1
