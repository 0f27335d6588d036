"""From "module:agent" to an agent, and what is said where there is none."""

import sys

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.cli.resolve.agent_target import load_agent


@pytest.mark.parametrize("target", ["app:adder", "app:build", "app:Shelf.inner"])
def test_an_agent_or_what_makes_one(here, target):
    """An Agent, a function without parameters, or either inside something."""
    found = load_agent(target)
    assert isinstance(found, Agent)
    assert found.name == "adder"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("app", "does not name an agent: name an agent as module:name"),
        ("app:", "does not name an agent"),
        (":adder", "does not name an agent"),
        ("app.py:adder", "there is no module 'app.py'"),
        ("app:adder()", "does not name an agent"),
        ("./app:adder", "does not name an agent"),
        ("nowhere:agent", "there is no module 'nowhere' in /"),
        ("nowhere.at.all:agent", "there is no module 'nowhere.at.all'"),
        ("app:adde", "has no attribute 'adde'; its agents: buggy, adder"),
        ("app:Shelf.outer", "has no attribute 'Shelf.outer'"),
        ("json:agent", "it contains no Agent"),
        ("app:number", ", but of type int"),
        ("app:Shelf", ", but the class Shelf"),
        ("app:build_number", ", but of type int"),
        ("app:build_later", ", but a coroutine"),
        ("app:build_nothing", "failed: RuntimeError: no database"),
        ("app:needs_arguments", "cannot be called without arguments"),
    ],
)
def test_what_is_wrong_is_said(here, target, said):
    """As an error of usage, never as a traceback."""
    with pytest.raises(MisuseError) as caught:
        load_agent(target)
    assert said in str(caught.value)
    here("run", target, "x", code=2)
    assert said in here.err
    assert "Traceback" not in here.err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("app", "'app' does not name a Learner: name one as module:name, for example app:learner"),
        ("app:learnr", "the module 'app' has no attribute 'learnr'; it contains no Learner"),
        ("app:adder", "'app:adder' is not a Learner, but of type Agent"),
    ],
)
def test_what_is_no_learner_is_said(here, target, said):
    """Of the kind that the command needs."""
    here("memory", "learn", target, code=2)
    assert said in here.err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this' ("),
        ("1/0", "ZeroDivisionError: division by zero ("),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit('no')", "SystemExit: no ("),
        ("from agentfsm import Agent\nagent = Agent('openai:gpt-4o')", "OPENAI_API_KEY"),
        ("from agentfsm import Agent\nagent = Agent('gpt-4o')", "does not name a model"),
    ],
)
def test_a_module_that_breaks(here, source, said):
    """Its own error is told, with the place in the code."""
    (here.folder / "broken.py").write_text(f"\n{source}\n", encoding="utf-8")
    here("run", "broken:agent", "x", code=2)
    assert said in here.err
    assert "Traceback" not in here.err
    sys.modules.pop("broken", None)
    here("doctor", "broken:agent", code=1)
    assert said in here.out
    sys.modules.pop("broken", None)
