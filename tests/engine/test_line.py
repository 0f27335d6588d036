"""The line of deciders: a feature is a file and a row, and one that an agent does not have is not there."""

import ast
import importlib
from pathlib import Path

import attrs
import pytest

import agentfsm.engine
from agentfsm import Agent, AnswerCache, stop_after_tool, tool
from agentfsm.core import events as e
from agentfsm.engine import line as lines
from agentfsm.engine import step
from agentfsm.engine.execution.execution import build_execution
from agentfsm.engine.execution.journal import Journal
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.guards import Guard
from agentfsm.planning import Planner
from agentfsm.ports import Lease
from agentfsm.streaming.log import RunLogger
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tokens.ledger import TokenLedger

ENGINE = Path(agentfsm.engine.__file__).parent
HANDLERS = ["observe.py", "think.py", "act.py", "reflect.py", "step.py"]


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "17"


async def curfew(request):
    """Remind the model once of the time: all of a feature that is added below."""
    run = request.execution.journal.run
    return None if run.reminder else StepOutcome((e.Reminded(text="It is late."),))


async def test_a_feature_is_added_by_one_row(monkeypatch):
    """It takes part before the request, in the place of its row, and its decision is in the journal."""

    def build(execution):
        line = build_line(execution)
        return attrs.evolve(line, before_request=(curfew, *line.before_request))

    build_line = lines.build_line
    monkeypatch.setattr(step, "build_line", build)
    agent = Agent(model := ScriptedModel(say("", call("look")), "17."), tools=[look])
    run = await agent.run("go")
    assert [type(event) for event in await agent.history(run.id)][:3] == [e.Observed, e.Reminded, e.ToolsChosen]
    assert [request.messages[-1].text for request in model.requests] == ["It is late.", "It is late."]


def points(agent):
    """Return the features of an agent, by point."""
    config, run = agent.driver.config, agent.start("go")
    unowned = Lease(run_id=run.id, token=0, version=0)
    journal = Journal(store=agent.store, lease=unowned, run=run, clock=config.clock, log=RunLogger(run.id, ""))
    line = lines.build_line(build_execution(config, journal, TokenLedger(), ExecutionOptions()))
    functions = {name: getattr(line, name) for name in attrs.fields_dict(lines.Line)}
    return {
        name: [function.__module__.rpartition(".")[2] for function in each]
        for name, each in functions.items()
        if isinstance(each, tuple)
    }


def test_an_agent_without_features_has_none():
    """What is left are the limits, the choice of tools, the window, approvals, costs and loops."""
    found = points(Agent(ScriptedModel("Hi."), tools=[look]))
    assert found["on_inputs"] == found["on_reply"] == found["must_review"] == found["review_draft"] == []
    assert found["before_request"] == ["limits", "tool_selection", "window"]
    assert found["open_calls"] == ["limits", "approvals"]
    assert found["before_start"] == ["approvals", "cost"]
    assert found["on_plain_result"] == found["before_shown"] == found["decided_tools"] == []
    assert found["review_results"] == ["limits", "loops"]
    assert found["after_draft"] == ["loops"]


def test_the_order_of_all_features():
    """It is the order of the table in the architecture page."""
    found = points(
        Agent(
            ScriptedModel("Hi."),
            tools=[look],
            guards=Guard.default(),
            reminder="Be brief.",
            output_type=int,
            answer_cache=AnswerCache(),
            planner=Planner(),
            stop_when=[stop_after_tool("look")],
        )
    )
    assert found["review_results"] == ["stops", "limits", "plans", "loops"]
    assert found["after_draft"] == ["stops", "loops"]
    assert found["before_request"] == [
        "limits",
        "answer_cache",
        "reminder",
        "plans",
        "tool_selection",
        "window",
    ]
    assert found["open_calls"] == ["limits", "guards", "approvals"]
    assert found["before_start"] == ["guards", "approvals", "approvals", "cost"]
    assert found["on_result"] == ["cost", "cost", "labels", "labels", "labels", "approvals", "plans"]
    assert found["review_draft"] == ["labels", "output"]


def imported(path):
    """Return the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("name", HANDLERS)
def test_the_handlers_name_no_feature(name):
    """They import the line, and nothing of a decider."""
    assert [module for module in imported(ENGINE / name) if "deciders" in module] == []


def test_every_decider_is_in_the_line():
    """A file whose functions nothing calls is no feature."""
    used = {name for names in points_of_all() for name in names}
    helpers = {"answer_key", "plan_tools"}
    assert {path.stem for path in (ENGINE / "deciders").glob("*.py")} - helpers - {"__init__"} == used


def points_of_all():
    """Return the names of the modules that `build_line` names."""
    tree = ast.parse((ENGINE / "line.py").read_text(encoding="utf-8"))
    known = {path.stem for path in (ENGINE / "deciders").glob("*.py")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            assert hasattr(importlib.import_module(f"agentfsm.engine.deciders.{node.value.id}"), node.attr)
            yield [node.value.id]
